"""The control plane for a trainer without an event loop: each method waits for what the ticket would hold."""

from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from controlplane.plane import ControlPlane, Replicas, Send
from controlplane.steps import Step
from schemas.commands import EngineCommand, Manifest, ProfileCommand, ProfilePlan, Source
from schemas.identity import InFlight, Tag
from schemas.reports import FleetStatus, Report, SyncReport


class BlockingControlPlane:
    """Made by `ControlPlane.blocking`; see there for arguments and errors. `with plane.step(n):` blocks likewise."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def __enter__(self) -> Self:
        self._plane.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plane.close()

    @property
    def address(self) -> str:
        """Where agents and operators find it, with the port that the system chose."""
        return self._plane.address

    @property
    def profile_reports(self) -> deque[Report]:
        """Reports of what `step` opened and closed, newest last."""
        return self._plane.profile_reports

    def status(self) -> FleetStatus:
        """Who is there, in which state, and who waits for whom."""
        return self._plane.status()

    def step(self, global_step: int) -> Step:
        """The context of one training step."""
        return self._plane.step(global_step)

    def wait_for_agents(self, count: int, timeout: float = 60.0) -> FleetStatus:
        """Wait until `count` agents are live and ready. Raises AgentsMissing."""
        return self._plane.wait_for_agents(count, timeout).wait()

    def publish(
        self, command: ProfileCommand | EngineCommand, replicas: Replicas = None, timeout: float = 30.0
    ) -> Report:
        """Publish one command, and wait for every agent's outcome."""
        return self._plane.publish(command, replicas, timeout).wait()

    def sync_weights(
        self,
        version: int,
        source: Source,
        *,
        manifest: Manifest | None = None,
        content: bool = False,
        send: Send | None = None,
        in_flight: InFlight = "abort",
        quorum: int | None = None,
        replicas: Replicas = None,
        timeout: float = 600.0,
    ) -> SyncReport:
        """Bring the fleet to new weights, all replicas together or none."""
        return self._plane.sync_weights(
            version,
            source,
            manifest=manifest,
            content=content,
            send=send,
            in_flight=in_flight,
            quorum=quorum,
            replicas=replicas,
            timeout=timeout,
        ).wait()

    def pause(self, in_flight: InFlight = "abort", *, replicas: Replicas = None, timeout: float = 30.0) -> Report:
        """Stop generating."""
        return self._plane.pause(in_flight, replicas=replicas, timeout=timeout).wait()

    def resume(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Report:
        """Generate again."""
        return self._plane.resume(replicas=replicas, timeout=timeout).wait()

    def sleep(
        self, tags: Iterable[Tag] = (), *, discard: bool = False, replicas: Replicas = None, timeout: float = 60.0
    ) -> Report:
        """Free memory."""
        return self._plane.sleep(tags, discard=discard, replicas=replicas, timeout=timeout).wait()

    def wake(self, tags: Iterable[Tag] = (), *, replicas: Replicas = None, timeout: float = 60.0) -> Report:
        """Take memory again."""
        return self._plane.wake(tags, replicas=replicas, timeout=timeout).wait()

    def flush(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Report:
        """Forget cached prefixes."""
        return self._plane.flush(replicas=replicas, timeout=timeout).wait()

    def abort_requests(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Report:
        """End all running requests where they are."""
        return self._plane.abort_requests(replicas=replicas, timeout=timeout).wait()

    def start_profile(
        self,
        step: int,
        plan: ProfilePlan | None = None,
        *,
        roles: Mapping[str, ProfilePlan] | None = None,
        replicas: Replicas = None,
        timeout: float = 30.0,
    ) -> Report:
        """Open a profiling session by hand."""
        return self._plane.start_profile(step, plan, roles=roles, replicas=replicas, timeout=timeout).wait()

    def stop_profile(self, step: int, *, replicas: Replicas = None, timeout: float = 30.0) -> Report:
        """Close the session of that step; the report names the traces."""
        return self._plane.stop_profile(step, replicas=replicas, timeout=timeout).wait()

    def collect_traces(
        self, step: int, plan: ProfilePlan | None = None, *, replicas: Replicas = None, timeout: float = 30.0
    ) -> Report:
        """Have node ranks above 0 name the traces that they wrote."""
        return self._plane.collect_traces(step, plan, replicas=replicas, timeout=timeout).wait()
