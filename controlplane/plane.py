"""The trainer's handle on its fleet: one object that holds the bus, on a thread and loop of its own.

Trainers block for minutes in the middle of a step, and hold whatever event loop they have. So the bus never runs in
the trainer's: it keeps its heartbeats whatever the trainer does. Every method hands something over in microseconds and
returns a ticket; what came of it is `await ticket` in an async trainer. `ControlPlane.blocking` waits for the caller.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from anyio import CancelScope, fail_after, to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from controlplane.bus.bus import Bus
from controlplane.machine.coordinator import CoordinatorState
from controlplane.record.log import RunLog
from controlplane.steps import Profiling, Step
from controlplane.tickets import Ticket
from schemas.carriers.sockets import Context
from schemas.commands import EngineCommand, Manifest, ProfileCommand, ProfilePlan, Source, Target, durable_source
from schemas.config import BusConfig
from schemas.errors import AgentsMissing, BusClosed, ConfigError, RolloutctlError
from schemas.identity import Identity, InFlight, Tag
from schemas.profiler.config import ProfilerConfig
from schemas.reports import FleetStatus, Report, SyncReport
from schemas.safetensors.manifest import build_manifest
from schemas.safetensors.paths import resolve

if TYPE_CHECKING:
    from controlplane.blocking import BlockingControlPlane

logger = logging.getLogger("rolloutctl.plane")

StrPath = str | os.PathLike[str]
Send = Callable[[tuple[int, ...]], object]
"""Sends weights to the replicas that are named."""
Replicas = Iterable[int] | None


class ControlPlane:
    """The control plane of one training run. `async with ControlPlane(...) as plane:`, or `ControlPlane.blocking(...)`.

    address: where agents find it, e.g. tcp://127.0.0.1:5555; port 0 lets the system choose, see `.address`. Other
    machines reach it only with an address of this machine and `insecure=True`, until there are keys.
    log: file of the run's log; it is made, or gone on with. On a local disk.   run: id of a new run; None makes one up.
    profiler: which steps `step` profiles.   checkpoints: the folder that paths of checkpoints begin at, here; each
    agent has its own setting for the same folder.   context: for `inproc://` addresses.

    Every method but `status` publishes at once and returns a ticket; all may be called from any thread. They raise
    CommandError for what can't be published, BusOverloaded, BusFaulted (the log can't be written) and BusClosed; what
    happens in the fleet is in the reports. timeout: seconds until whoever has not answered is reported as missing.
    replicas: which ones; None for all.

    Opening raises AddressInUse, BusAddressError, ConfigError, LogLocked, LogCorrupt, LogFull and LogError.
    """

    def __init__(
        self,
        address: str,
        *,
        log: StrPath,
        run: str | None = None,
        config: BusConfig | None = None,
        profiler: ProfilerConfig | None = None,
        checkpoints: StrPath = ".",
        insecure: bool = False,
        context: Context | None = None,
    ) -> None:
        self._address, self._log, self._run = address, log, run
        self._config = config or BusConfig()
        self._profiling = Profiling(profiler or ProfilerConfig(), self._publish_profile, self._fleet)
        self._checkpoints, self._insecure, self._context = Path(checkpoints), insecure, context
        self._opened: ExitStack | None = None
        self._bus: Bus
        self._portal: BlockingPortal

    @classmethod
    def blocking(
        cls,
        address: str,
        *,
        log: StrPath,
        run: str | None = None,
        config: BusConfig | None = None,
        profiler: ProfilerConfig | None = None,
        checkpoints: StrPath = ".",
        insecure: bool = False,
    ) -> "BlockingControlPlane":
        """The same for a trainer without an event loop: each method waits, and returns what the ticket would hold."""
        from controlplane.blocking import BlockingControlPlane

        return BlockingControlPlane(
            cls(
                address,
                log=log,
                run=run,
                config=config,
                profiler=profiler,
                checkpoints=checkpoints,
                insecure=insecure,
            )
        )

    # --- its life -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the log and start the bus. Blocks for some milliseconds."""
        if self._opened is not None:
            raise ConfigError("this control plane is open already: make one object for each life of a bus")
        with ExitStack() as stack:
            log = RunLog.open(self._log, self._run, self._config.durability)
            stack.callback(log.close)
            options = {"use_uvloop": find_spec("uvloop") is not None}
            self._portal = stack.enter_context(
                start_blocking_portal("asyncio", backend_options=options, name="rolloutctl-bus")
            )
            bus = Bus(self._address, log, self._config, insecure=self._insecure, context=self._context)
            self._bus = stack.enter_context(self._portal.wrap_async_context_manager(bus))
            self._opened = stack.pop_all()

    def close(self) -> None:
        """End an open profiling session, tell the fleet, close the log. Whoever still waits gets BusClosed."""
        if self._opened is None:
            return
        self._profiling.close()
        opened, self._opened = self._opened, None
        opened.close()

    async def __aenter__(self) -> Self:
        await to_thread.run_sync(self.open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with CancelScope(shield=True):
            await to_thread.run_sync(self.close)

    @property
    def bus(self) -> Bus:
        """The bus, open. Raises BusClosed when it is not."""
        if self._opened is None:
            raise BusClosed(f"the control plane at {self._address} is not open: use `with` or `async with`")
        return self._bus

    @property
    def address(self) -> str:
        """Where agents and operators find it, with the port that the system chose."""
        return self.bus.address

    # --- the fleet ----------------------------------------------------------------------------------------------------

    def status(self) -> FleetStatus:
        """Who is there, in which state, and who waits for whom."""
        return self._portal.call(self.bus.status)

    def wait_for_agents(self, count: int, timeout: float = 60.0) -> Ticket[FleetStatus]:
        """Wait until `count` agents are live, and those with an engine to drive are ready to serve.

        Raises AgentsMissing, naming who is there and what they wait for.
        """
        ticket: Ticket[FleetStatus] = Ticket(0)
        bus = self.bus
        self._portal.start_task_soon(partial(_await_agents, bus, count, timeout, ticket))
        return ticket

    @property
    def profile_reports(self) -> deque[Report]:
        """Reports of what `step` opened and closed, newest last; some hundred. The log has all."""
        return self._profiling.reports

    def _fleet(self) -> list[Identity]:
        members = self.bus.state.members.values()  # a state is never changed, only replaced: any thread may read it
        return [member.hello.identity for member in members if member.state == "live"]

    def _publish_profile(self, command: ProfileCommand, target: Target, timeout_ms: int) -> Ticket[Report]:
        return self.bus.publish(command, target, timeout_ms)

    # --- commands -----------------------------------------------------------------------------------------------------

    def publish(
        self, command: ProfileCommand | EngineCommand, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """Publish one command. Median on this side: microseconds, whatever the size of the fleet."""
        return self.bus.publish(command, _target(replicas), _milliseconds(timeout))

    def pause(
        self, in_flight: InFlight = "abort", *, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """Stop generating. in_flight: `abort` ends running requests, `wait` lets them end, `keep` freezes them."""
        return self.publish(EngineCommand(operation="pause", mode=in_flight), replicas, timeout)

    def resume(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Generate again."""
        return self.publish(EngineCommand(operation="resume"), replicas, timeout)

    def sleep(
        self, tags: Iterable[Tag] = (), *, discard: bool = False, replicas: Replicas = None, timeout: float = 60.0
    ) -> Ticket[Report]:
        """Free memory: `weights`, `kv_cache`, or both when no tag is given.

        discard: drop the weights instead of keeping them in host memory; after the wake what is committed is loaded.
        """
        command = EngineCommand(operation="sleep", tags=frozenset(tags), discard=discard)
        return self.publish(command, replicas, timeout)

    def wake(self, tags: Iterable[Tag] = (), *, replicas: Replicas = None, timeout: float = 60.0) -> Ticket[Report]:
        """Take memory again: the tags given, or all."""
        return self.publish(EngineCommand(operation="wake", tags=frozenset(tags)), replicas, timeout)

    def flush(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Forget cached prefixes."""
        return self.publish(EngineCommand(operation="flush"), replicas, timeout)

    def abort_requests(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """End all running requests where they are."""
        return self.publish(EngineCommand(operation="abort"), replicas, timeout)

    def start_profile(
        self,
        step: int,
        plan: ProfilePlan | None = None,
        *,
        roles: Mapping[str, ProfilePlan] | None = None,
        replicas: Replicas = None,
        timeout: float = 30.0,
    ) -> Ticket[Report]:
        """Open a profiling session for a global training step, by hand; `step` does it by configuration.

        plan: for rollouts.   roles: for training ranks, by role. None for those of the configuration.
        """
        config = self._profiling.config
        asked = dict(roles) if roles is not None else config.roles
        command = ProfileCommand(action="start", step=step, plan=plan or config.plan, roles=asked)
        return self.publish(command, replicas, timeout)

    def stop_profile(self, step: int, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Close the session of that step; the report names the traces."""
        return self.publish(ProfileCommand(action="stop", step=step), replicas, timeout)

    def collect_traces(
        self, step: int, plan: ProfilePlan | None = None, *, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """After a stop: have node ranks above 0 name the traces that their ranks wrote to their own disks."""
        command = ProfileCommand(action="collect", step=step, plan=plan or self._profiling.config.plan)
        return self.publish(command, replicas, timeout)

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
    ) -> Ticket[SyncReport]:
        """Bring the fleet to new weights, all replicas together or none: prepare, load, then commit or abort.

        version: larger than any committed before.   source: e.g. `Checkpoint("step_10")`, a directory of safetensors
        files below `checkpoints`.   manifest: what the source must hold; None reads it from the files' headers here.
        content: hash the tensors' bytes too, here and in each engine that can tell: it reads the whole checkpoint in
        the caller's thread.   quorum: replicas that must load; None for more than half.   timeout: of each phase.
        send: for a `Broadcast`. Called in a thread of its own with the replicas that prepared, at the moment when they
        are told to receive; it makes the group if there is none yet, and broadcasts. What it raises is logged; the
        replicas then fail by the deadline, so give the group a shorter one.
        Raises CheckpointError when the source is missing, cut off or unsafe; SyncInProgress.
        """
        bus = self.bus
        if manifest is None:
            kept = durable_source(source)
            if kept is None:
                raise ConfigError(
                    "a broadcast needs a manifest, or a path: `manifest_of` makes one of names and shapes"
                )
            manifest = build_manifest(resolve(self._checkpoints, kept.path), content)
        ticket = bus.sync(
            version,
            source,
            manifest,
            in_flight=in_flight,
            quorum=quorum,
            target=_target(replicas),
            timeout_ms=_milliseconds(timeout),
        )
        if send is not None:
            self._portal.start_task_soon(_send_when_loading, bus, ticket, version, send)
        return ticket

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, global_step: int) -> "Step":
        """`async with plane.step(n):` around the work of a training step. Opens and closes profiling as configured.

        Never raises for profiling that failed: a warning is logged, and the report is in `profile_reports`.
        """
        return Step(self._profiling, global_step)


async def _send_when_loading(bus: Bus, ticket: Ticket[SyncReport], version: int, send: Send) -> None:
    """Nobody sends before everybody who is to receive has prepared: a broadcast waits for all of its group."""

    def begun(state: CoordinatorState) -> bool:
        sync = state.sync
        return ticket.done or (sync is not None and sync.version == version and sync.phase != "prepare")

    try:
        sync = (await bus.wait_until(begun)).sync
        if sync is not None and sync.version == version and sync.phase == "load":
            members = tuple(sorted(sync.members - sync.lost))
            await to_thread.run_sync(send, members, abandon_on_cancel=True)
    except Exception as error:
        logger.warning("version %d was not sent: %s: %s", version, type(error).__name__, error)


async def _await_agents(bus: Bus, count: int, patience_s: float, ticket: Ticket[FleetStatus]) -> None:
    try:
        with fail_after(patience_s):
            await bus.wait_until(_complete(count))
        ticket.resolve(bus.status())
    except TimeoutError:
        ticket.fail(AgentsMissing(_who_is_missing(bus.status(), count, patience_s)))
    except BaseException as error:
        ticket.fail(error if isinstance(error, RolloutctlError) else BusClosed("the bus was closed meanwhile"))
        raise


def _complete(count: int) -> Callable[[CoordinatorState], bool]:
    def holds(state: CoordinatorState) -> bool:
        live = [one for one in state.members.values() if one.state == "live"]
        return len(live) >= count and all(one.status is not None and one.status.ready for one in live)

    return holds


def _who_is_missing(status: FleetStatus, count: int, patience_s: float) -> str:
    there = [
        f"  {one.agent} on {one.host}: {one.state}, {'ready' if one.status and one.status.ready else 'not ready'}"
        + (f", engine {one.status.engine}" if one.status else "")
        for one in status.agents
    ]
    seen = "\n".join(there) or "  none"
    return (
        f"{count} agents were expected within {patience_s:g} s, and these said hello:\n{seen}\nLook at the logs of the "
        "others: each says which address it dials and what it waits for"
    )


def _target(replicas: Replicas) -> Target:
    return Target(replicas=frozenset(replicas) if replicas is not None else None)


def _milliseconds(timeout: float) -> int:
    if not 0.001 <= timeout <= 7 * 86_400:
        raise ConfigError(f"timeout {timeout!r}: from 0.001 to {7 * 86_400} seconds")
    return int(timeout * 1000)
