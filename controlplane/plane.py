"""The trainer's handle on its fleet: one object that runs the bus on a thread and an event loop of its own.

A trainer may block its thread or its event loop for minutes within a step. The bus therefore never runs in the
trainer's loop, and its heartbeats go on whatever the trainer does. Every method hands its command to the bus within
microseconds and returns a `Ticket`: a trainer without an event loop calls `.wait()`, an async one awaits it.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from anyio import CancelScope, fail_after, to_thread
from anyio.from_thread import BlockingPortal

from controlplane.bus.bus import Bus
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.thread import BusThread
from controlplane.machine.events import Absent
from controlplane.machine.serving import all_serve, what_agents_lack
from controlplane.phased_sync import PhasedSync, SendWeights, send_when_loading
from controlplane.record.log import RunLog
from controlplane.steps import Profiling, Step
from controlplane.tickets import Ticket
from schemas.carriers.filesystems import network_type
from schemas.carriers.keys import KEYS_VARIABLE
from schemas.carriers.sockets import Context
from schemas.commands import (
    Broadcast,
    Checkpoint,
    EngineCommand,
    Manifest,
    ProfileCommand,
    ProfilePlan,
    Source,
    Target,
    durable_source,
)
from schemas.config import BusConfig, milliseconds, within_bounds
from schemas.errors import AgentsMissing, BusClosed, ConfigError, RolloutctlError
from schemas.formatting import escape_html
from schemas.identity import Identity, InFlight, Tag
from schemas.logs import logger_of
from schemas.profiler.config import ProfilerConfig
from schemas.reports import FleetStatus, Report, SyncReport
from schemas.safetensors.manifest import build_manifest
from schemas.safetensors.paths import resolve_below

logger = logger_of("plane")

StrPath = str | os.PathLike[str]
Replicas = Iterable[int] | None


class ControlPlane:
    """The control plane of one training run.

    Enter it with `with` or `async with`. All methods may be called from any thread. Those that command the fleet
    publish at once and return a ticket. A method raises CommandError for a command that can't be published,
    BusOverloaded, BusFaulted (the log can't be written) or BusClosed. What happens in the fleet is in the reports.

    In all methods, `replicas` are the indices of the replicas that the command is for (None for all), and `timeout`
    is the number of seconds after which agents that have not answered are reported as missing.

    Args:
        address: Where agents connect, e.g. tcp://127.0.0.1:5555. Port 0 lets the system choose; see `.address`.
        log: File of the run's log. Must be on a local disk.
        run: What to do with the log. `"new"`: begin a run, and keep the log of an earlier one beside it, as
            `run.<its id>.db`. `"resume"`: continue the run in it, which must exist. Anything else is an id, of a new
            run or of the one that the log must be of. None: continue the run if there is one, and warn, or begin one.
        config: Intervals and limits of the bus.
        profiler: Which steps `step` profiles, and how.
        checkpoints: Directory that checkpoint paths are relative to on this machine. Each agent is configured with
            its own path to the same directory.
        keys: Folder made by `rolloutctl keys`: the bus's own key, and who may come in. Needed for an address that other
            machines can reach. None for the folder that `ROLLOUTCTL_KEYS` names, or no keys.
        insecure: Allow an address that other machines can reach without keys. Anybody on them can command the engines.
        context: ZeroMQ context, for `inproc://` addresses. A bus with keys needs one without another such bus.

    Raises:
        AddressInUse, BusAddressError, KeyFileError, ConfigError, LogLocked, LogCorrupt, LogFull, LogError: On entering.
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
        keys: StrPath | None = None,
        insecure: bool = False,
        context: Context | None = None,
    ) -> None:
        self._address, self._log, self._run = address, log, run
        self._config = within_bounds(config or BusConfig())
        self._profiling = Profiling(
            profiler or ProfilerConfig(), lambda *order: self.bus.publish(*order), self._live_identities
        )
        self._checkpoints, self._insecure, self._context = Path(checkpoints), insecure, context
        folder = keys or os.environ.get(KEYS_VARIABLE)
        self._keys = KeyFolder(Path(folder)) if folder else None
        self._begun: Step | None = None
        self._opened: BusThread | None = None
        self._owner: threading.Thread | None = None
        self._bus: Bus

    # --- lifetime -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the log and start the bus. Blocks for some milliseconds."""
        if self._opened is not None:
            raise ConfigError("this control plane is already open: create one object for each life of a bus")
        with ExitStack() as stack:
            config = self._config
            log = RunLog.open(
                self._log,
                self._run,
                config.durability,
                bytes_max=config.log_bytes_max,
                age_max_s=config.log_age_max_s,
            )
            stack.callback(log.close)
            if filesystem := network_type(Path(self._log)):
                logger.warning(
                    "the log %s is on a network file system (%s): each group is written more slowly, and others should "
                    "read it on this machine only. A local disk is better",
                    *(self._log, filesystem),
                )
            if log.continues and self._run is None:
                logger.warning('%s. run="resume" says that this is meant', log.continues)
            bus = Bus(
                self._address,
                log,
                self._config,
                insecure=self._insecure,
                keys=self._keys,
                checkpoints=self._checkpoints,
                context=self._context,
            )
            thread = BusThread(bus, self._owner or threading.current_thread())
            thread.start()
            stack.pop_all()  # the bus closes the log
            self._bus, self._opened = bus, thread

    def close(self) -> None:
        """End an open profiling session, inform the fleet, and close the log. Open tickets fail with BusClosed.

        Ctrl-C ends the wait at once, with KeyboardInterrupt: the bus then closes by itself, within seconds.
        """
        if self._opened is None:
            return
        opened = self._opened
        try:
            self._profiling.close()
        finally:
            opened.ask_to_end()
            self._opened = None
        opened.end()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._owner = threading.current_thread()  # not the worker that opens it
        await to_thread.run_sync(self.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        with CancelScope(shield=True):
            await to_thread.run_sync(self.close)

    @property
    def bus(self) -> Bus:
        """The open bus. Raises BusClosed if it is not open."""
        if self._opened is None:
            raise self._closed()
        return self._bus

    def _closed(self) -> BusClosed:
        return BusClosed(f"the control plane at {self._address} is not open: use `with` or `async with`")

    @property
    def _portal(self) -> BlockingPortal:
        if self._opened is None:
            raise self._closed()
        return self._opened.portal

    @property
    def address(self) -> str:
        """Where agents and operators connect, with the port that the system chose."""
        return self.bus.address

    @property
    def checkpoints(self) -> Path:
        """The directory that checkpoint paths are relative to on this machine."""
        return self._checkpoints

    # --- the fleet ----------------------------------------------------------------------------------------------------

    def status(self) -> FleetStatus:
        """Return the fleet at this moment: its agents, their states, and which commands wait for whom."""
        bus = self.bus
        return self._portal.call(bus.status_in_steps)

    def serving(self) -> dict[int, int]:
        """Return the replicas that serve at this moment, each with the version that it is proven to serve.

        Exact without a wait: an answer counts at once, before the next heartbeat. A replica is not in it while it is
        paused, asleep, in a sync, in quarantine, launching or away, or while it has not answered a command that lets it
        serve again. An agent that dies without a word counts until the bus notices, at the latest after
        `agent_timeout_ms`. Version 0 is what the engine was launched with. Replicas that never sync are left out.

        Raises:
            BusFaulted, BusClosed: The bus has stopped, and nobody knows what the replicas serve.
        """
        return self.bus.serving()

    def wait_for_agents(self, count: int, timeout: float = 60.0) -> Ticket[FleetStatus]:
        """Wait until `count` agents are live, and every live replica is proven to serve.

        Only what an agent reports after this call counts. Node rank 0 of a replica must then generate on the committed
        weights, in sync and not quarantined. Other nodes and training ranks must be alive.

        Raises:
            ConfigError: The timeout is out of bounds.
            AgentsMissing: From the ticket. Names what each known agent still lacks.
        """
        ticket: Ticket[FleetStatus] = Ticket(0)
        bus = self.bus
        milliseconds(timeout)  # its bounds
        self._portal.start_task_soon(partial(_await_agents, bus, count, timeout, ticket))
        return ticket

    def retire(self, *places: int | str) -> Ticket[FleetStatus]:
        """Take places out of the run for good, so that reports no longer name them as absent.

        Args:
            places: A replica, by index (all of its agents), or one agent, by name: `3`, `"3.1"`, `"actor.0"`. An agent
                that is running can't be retired: stop it first. One that is started at a retired place later is told
                to give up.

        Raises:
            CommandError: From the ticket. An agent is running there, or the run has no such place; nothing was retired.
        """
        return self.bus.retire(tuple(str(place) for place in places))

    def _repr_html_(self) -> str:
        """What a notebook shows: the fleet at this moment."""
        if self._opened is None:
            return f"<pre>{escape_html(str(self._closed()))}</pre>"
        return self.status()._repr_html_()

    @property
    def profile_reports(self) -> deque[Report]:
        """Reports of the profile commands that `step` published, newest last. Bounded; the log has all of them."""
        return self._profiling.reports

    def _live_identities(self) -> list[Identity]:
        members = self.bus.state.members.values()  # a state is replaced, never changed: any thread may read it
        return [member.hello.identity for member in members if member.state == "live"]

    # --- commands -----------------------------------------------------------------------------------------------------

    def publish(
        self, command: ProfileCommand | EngineCommand, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """Publish one command. Takes microseconds here, whatever the size of the fleet."""
        return self.bus.publish(command, _target(replicas), milliseconds(timeout))

    def pause(
        self, in_flight: InFlight = "abort", *, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """Stop generation.

        Args:
            in_flight: `abort` ends running requests: they return the tokens that they have, all of the old weights.
                `wait` lets them finish. `keep` freezes them. If the weights change meanwhile, as in a sync, the rest of
                a frozen sequence is of neither version alone, because the cache behind it is the old weights': train on
                the logprobs that the engine reports for it, not on recomputed ones.
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
        """
        command = EngineCommand(operation="sleep", tags=frozenset(tags), discard=discard)
        return self.publish(command, replicas, timeout)

    def wake(self, tags: Iterable[Tag] = (), *, replicas: Replicas = None, timeout: float = 60.0) -> Ticket[Report]:
        """Allocate released memory again: the given tags, or all."""
        return self.publish(EngineCommand(operation="wake", tags=frozenset(tags)), replicas, timeout)

    def flush(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Flush the prefix cache."""
        return self.publish(EngineCommand(operation="flush"), replicas, timeout)

    def abort_requests(self, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Abort all running requests."""
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
        """Open a profiling session by hand. `step` opens and closes them by configuration.

        Args:
            step: Global training step; names the directory of the traces.
            plan: For rollouts; None for the configured one.
            roles: For training ranks, by role; None for the configured ones.
        """
        config = self._profiling.config
        role_plans = dict(roles) if roles is not None else config.roles
        command = ProfileCommand(action="start", step=step, plan=plan or config.plan, roles=role_plans)
        return self.publish(command, replicas, timeout)

    def stop_profile(self, step: int, *, replicas: Replicas = None, timeout: float = 30.0) -> Ticket[Report]:
        """Close the session of that step. The report lists the traces."""
        return self.publish(ProfileCommand(action="stop", step=step), replicas, timeout)

    def collect_traces(
        self, step: int, plan: ProfilePlan | None = None, *, replicas: Replicas = None, timeout: float = 30.0
    ) -> Ticket[Report]:
        """After a stop, ask node ranks above 0 to list the traces that their ranks wrote to their own disks."""
        command = ProfileCommand(action="collect", step=step, plan=plan or self._profiling.config.plan)
        return self.publish(command, replicas, timeout)

    def sync_weights(
        self,
        version: int | None,
        source: Source | str | Path,
        *,
        manifest: Manifest | None = None,
        content: bool = False,
        send: SendWeights | None = None,
        in_flight: InFlight = "abort",
        quorum: int | None = None,
        replicas: Replicas = None,
        absent: Absent = "leave",
        timeout: float = 600.0,
    ) -> Ticket[SyncReport]:
        """Bring the fleet to new weights, all replicas together or none: prepare, load, then commit or abort.

        Args:
            version: Larger than any committed before, and not one that was used for other weights: once replicas were
                told to load it, it stands for this source and manifest. None for the next of the run, one more than
                the newest that was ever requested; the report says which.
            source: Where the weights are. A path is a directory of safetensors files below `checkpoints`, the same as
                `Checkpoint(path)`.
            manifest: What the source must hold; None to read it from the headers of the files on this machine.
            content: Hash the bytes of the tensors too, here and in every engine that can. Reads the whole checkpoint
                in the caller's thread.
            send: For a `Broadcast` or `Pushed`. Called in a thread of its own when the load phase begins, with the
                replicas that prepared. It creates the group if there is none yet, and sends. If it raises, the load
                phase ends at once, the sync is aborted, and its report says why. Once it has returned, replicas have
                `after_send_ms` of BusConfig (10 s) to finish their loads. Engines that wait for a broadcast go on
                waiting until their group gives up, so give it a deadline.
            in_flight: What happens to running requests, see `pause`.
            quorum: Replicas that must load; None for more than half.
            absent: `leave`: no phase waits for an engine that is known to be down once the others meet the quorum; the
                report names its replica as unproven, and it comes back to these weights. `wait`: wait for it.
            timeout: Seconds for each phase.

        Raises:
            CheckpointError: The source is missing, cut off or unsafe. Nothing was sent.
            CommandError: From the ticket. The version was used for other weights.
            SyncInProgress: From the ticket. Another sync has not ended yet.
        """
        bus = self.bus
        source, manifest = self._checked_source(source, manifest, content)
        ticket = bus.sync(
            version,
            source,
            manifest,
            in_flight=in_flight,
            quorum=quorum,
            absent=absent,
            target=_target(replicas),
            timeout_ms=milliseconds(timeout),
        )
        if send is not None:
            self._portal.start_task_soon(send_when_loading, bus, ticket, send)
        return ticket

    def begin_sync(
        self,
        version: int | None,
        source: Source | str | Path,
        *,
        manifest: Manifest | None = None,
        content: bool = False,
        in_flight: InFlight = "abort",
        quorum: int | None = None,
        replicas: Replicas = None,
        absent: Absent = "leave",
        timeout: float = 600.0,
    ) -> PhasedSync:
        """Return a sync that its trainer takes through its phases: `with plane.begin_sync(7, source) as sync:`.

        For a trainer that works or moves tensors between the phases. Everything else is as in `sync_weights`, the
        arguments and the errors too.

        Args:
            timeout: Seconds for each phase, and for the trainer's own time after it: the next phase is asked for
                within that time since the last one began, or the sync is aborted.
        """
        source, manifest = self._checked_source(source, manifest, content)
        begin = partial(
            self.bus.sync,
            version,
            source,
            manifest,
            in_flight=in_flight,
            quorum=quorum,
            absent=absent,
            target=_target(replicas),
            timeout_ms=milliseconds(timeout),
        )
        return PhasedSync(self.bus, begin)

    def _checked_source(
        self, source: Source | str | Path, manifest: Manifest | None, content: bool
    ) -> tuple[Source, Manifest | None]:
        """The source, and what it must hold, as its files say if nobody else does."""
        if isinstance(source, str | Path):
            source = Checkpoint(os.fspath(source))
        if manifest is not None:
            return source, manifest
        checkpoint = durable_source(source)
        if checkpoint is not None:
            return source, build_manifest(resolve_below(self._checkpoints, checkpoint.path), content)
        if isinstance(source, Broadcast):
            raise ConfigError("a broadcast needs a manifest or a path: `manifest_of` makes one of names and shapes")
        return source, None

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, global_step: int) -> Step:
        """Return the context of one training step: `with` or `async with plane.step(n):` around its work.

        Opens and closes profiling sessions as configured. Never raises for profiling that failed: a warning is logged,
        and the report is in `profile_reports`.
        """
        return Step(self._profiling, global_step)

    def oldest_version(self) -> int:
        """Return the oldest version that anybody may still have to load: checkpoints of older ones can be deleted.

        A replica that is away comes back to the version that was committed for it, also if later syncs did not name it.
        During a sync, replicas may go back to that version. `retire` a replica that does not come back.

        Raises:
            BusFaulted, BusClosed: The bus has stopped.
        """
        return self.bus.oldest_version()

    def begin_step(self, global_step: int) -> None:
        """Begin a training step, for a trainer whose steps are callbacks. Waits as `with plane.step(n):` does.

        Raises:
            ConfigError: The step before it has not ended.
        """
        if self._begun is not None:
            begun = self._begun.number
            raise ConfigError(f"begin_step({global_step}): step {begun} has not ended. Call `end_step` at its end")
        step = self.step(global_step)
        step.begin()
        self._begun = step

    def end_step(self) -> None:
        """End the step that `begin_step` began, and wait for its reports.

        Raises:
            ConfigError: No step has begun.
        """
        if self._begun is None:
            raise ConfigError("end_step: no step has begun. Call `begin_step` at its beginning")
        step, self._begun = self._begun, None
        step.end()


async def _await_agents(bus: Bus, count: int, timeout_s: float, ticket: Ticket[FleetStatus]) -> None:
    try:
        since_us = await bus.ask_anew()
        with fail_after(timeout_s):
            await bus.wait_until(lambda state: all_serve(state, count, since_us))
        ticket.resolve(await bus.status_in_steps())
    except TimeoutError:
        lacking = (f"  {name} lacks: {what}" for name, what in what_agents_lack(bus.state, since_us).items())
        fleet = await bus.status_in_steps()
        expected = "1 agent that serves" if count == 1 else f"{count} agents, all of them serving,"
        lines = [f"expected {expected} within {timeout_s:g} s:", *lacking, str(fleet)]
        advice = (
            f"Agents must be started with --bus {_as_dialled(bus.address)}. Read the logs of those that are not here: "
            "each says which address it connects to and what it waits for"
        )
        ticket.fail(AgentsMissing("\n".join([*lines, advice])))
    except BaseException as error:
        ticket.fail(error if isinstance(error, RolloutctlError) else BusClosed("the bus was closed meanwhile"))
        raise


def _as_dialled(address: str) -> str:
    """The address as agents name it: a bus that listens everywhere is reached at this machine's name."""
    host, _, port = address.rpartition(":")
    everywhere = host in ("tcp://0.0.0.0", "tcp://*", "tcp://[::]")
    return f"tcp://{socket.gethostname()}:{port}" if everywhere else address


def _target(replicas: Replicas) -> Target:
    return Target(replicas=frozenset(replicas) if replicas is not None else None)
