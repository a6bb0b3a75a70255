"""What a trainer may ask of its engines between syncs: a method for each command."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from controlplane.bus.bus import Bus
from controlplane.tickets import Ticket
from schemas.commands import Drain, EngineCommand, ProfileCommand, ProfilePlan, Target
from schemas.config import milliseconds
from schemas.identity import InFlight, Tag
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report

Replicas = Iterable[int] | int | None
"""Indices of replicas, or one index; None for all."""


def target_of(replicas: Replicas) -> Target:
    """Return the target of a command for these replicas."""
    if isinstance(replicas, int):
        return Target(replicas=frozenset({replicas}))
    return Target(replicas=frozenset(replicas) if replicas is not None else None)


class EngineCommands(ABC):
    """The commands of an open bus. Each is published at once, and returns the ticket of its report.

    `replicas` are the indices of those that it is for, or one; None for all. After `timeout` seconds, agents that have
    not answered are missing.
    """

    _profiler: ProfilerConfig

    @property
    @abstractmethod
    def bus(self) -> Bus:
        """The open bus."""

    def publish(
        self, command: ProfileCommand | EngineCommand, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """Publish one command. Takes microseconds here, whatever the size of the fleet.

        Args:
            command: What to do.
            replicas: Replicas that it is for, by index; None for all.
            timeout: Seconds until agents that have not answered are missing.
        """
        return self.bus.publish(command, target_of(replicas), milliseconds(timeout))

    def pause(
        self, in_flight: InFlight = "abort", *, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """Stop generation.

        Args:
            in_flight: `abort` ends running requests: they return the tokens that they have, all of the old weights.
                `wait` lets them finish. `keep` freezes them. If the weights change meanwhile, as in a sync, a frozen
                sequence is computed anew when it goes on: first tokens are the old weights', the rest the new ones'. An
                engine that can't do that (docs/engines.md) makes the rest with the old weights' cache.
            replicas: Replicas that it is for, by index; None for all.
            timeout: Seconds until agents that have not answered are missing.
        """
        return self.publish(EngineCommand(operation="pause", mode=in_flight), replicas, timeout)

    def resume(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Resume generation."""
        return self.publish(EngineCommand(operation="resume"), replicas, timeout)

    def sleep(
        self, tags: Iterable[Tag] = (), *, discard: bool = False, replicas: Replicas = None, timeout: float = 60.0
    ) -> Ticket[Report]:
        """Release engine memory.

        Args:
            tags: `weights`, `kv_cache`; both if none is given.
            discard: Drop the weights instead of keeping them in host memory. The committed ones are loaded after the
                wake.
            replicas: Replicas that it is for, by index; None for all.
            timeout: Seconds until agents that have not answered are missing.
        """
        command = EngineCommand(operation="sleep", tags=frozenset(tags), discard=discard)
        return self.publish(command, replicas, timeout)

    def wake(self, tags: Iterable[Tag] = (), *, replicas: Replicas = None, timeout: float = 60.0) -> Ticket[Report]:
        """Allocate released memory again: the given tags, or all.

        Args:
            tags: `weights`, `kv_cache`; both if none is given.
            replicas: Replicas that it is for, by index; None for all.
            timeout: Seconds until agents that have not answered are missing.
        """
        return self.publish(EngineCommand(operation="wake", tags=frozenset(tags)), replicas, timeout)

    def flush(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Flush the prefix cache."""
        return self.publish(EngineCommand(operation="flush"), replicas, timeout)

    def abort_requests(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Abort all running requests."""
        return self.publish(EngineCommand(operation="abort"), replicas, timeout)

    def drain(self, *replicas: int, grace: float = 30.0) -> Ticket[Report]:
        """Take replicas out of the fleet in good order, and retire them: their agents end, and so do the servers that
        these launched.

        From the bus's next turn on `serving` and routers leave them out, and no sync waits for them or names them, not
        even an open one. If an engine says how many requests it runs, the drain waits until there are none.

        Args:
            replicas: By index.
            grace: Seconds that running requests may go on. Those that are left are aborted.

        Raises:
            CommandError: From the ticket. The run has no such replica, or it is leaving already; nothing was drained.
        """
        command = Drain(grace_ms=milliseconds(grace, "grace") if grace else 0)
        return self.bus.publish(command, target_of(replicas), command.timeout_ms)

    def start_profile(
        self,
        step: int,
        plan: ProfilePlan | None = None,
        *,
        roles: Mapping[str, ProfilePlan] | None = None,
        replicas: Replicas = None,
        timeout: float = 30.0,
    ) -> Ticket[Report]:
        """Open a profiling session by hand. `step` opens and closes them by configuration.

        Args:
            step: Global training step; names the directory of the traces.
            plan: For rollouts; None for the configured one.
            roles: For training ranks, by role; None for the configured ones.
            replicas: Replicas that it is for, by index; None for all.
            timeout: Seconds until agents that have not answered are missing.
        """
        config = self._profiler
        role_plans = dict(roles) if roles is not None else config.roles
        command = ProfileCommand(action="start", step=step, plan=plan or config.plan, roles=role_plans)
        return self.publish(command, replicas, timeout)

    def stop_profile(self, step: int, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Close the session of that step. The report lists the traces."""
        return self.publish(ProfileCommand(action="stop", step=step), replicas, timeout)

    def collect_traces(
        self, step: int, plan: ProfilePlan | None = None, *, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """After a stop, ask node ranks above 0 to list the traces that their ranks wrote to their own disks.

        Args:
            step: The step of the session.
            plan: For rollouts; None for the configured one.
            replicas: Replicas that it is for, by index; None for all.
            timeout: Seconds until agents that have not answered are missing.
        """
        command = ProfileCommand(action="collect", step=step, plan=plan or self._profiler.plan)
        return self.publish(command, replicas, timeout)
