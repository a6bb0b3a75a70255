"""The trainer's handle on its fleet: one object that runs the bus on a thread and an event loop of its own.

A trainer may block its thread or its event loop for minutes within a step. The bus therefore never runs in the
trainer's loop, and its heartbeats go on whatever the trainer does. Every method hands its command to the bus within
microseconds and returns a `Ticket`: a trainer without an event loop calls `.wait()`, an async one awaits it.
"""

import html
import os
import threading
from collections import deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Self

from anyio import CancelScope, to_thread

from controlplane.bus.bus import Bus
from controlplane.bus.key_folder import KeyFolder
from controlplane.bus.thread import COPY_OPEN_S, BusThread
from controlplane.engine_commands import EngineCommands, Replicas, target_of
from controlplane.machine.events import OnUnreachable, SyncRequested
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.provenance import Provenance, Verdict, accepts
from controlplane.record.log import RunLog
from controlplane.samples import SampleCounts
from controlplane.sending import SendWeights, send_when_loading
from controlplane.steps import Profiling, Step
from controlplane.tickets import Ticket
from controlplane.waiting import await_agents
from schemas.commands import (
    AdapterDrop,
    AdapterRequest,
    Broadcast,
    Checkpoint,
    Manifest,
    Source,
    Target,
    durable_source,
)
from schemas.config import BusConfig, milliseconds, within_bounds
from schemas.errors import BusAddressError, BusClosed, BusFaulted, ConfigError
from schemas.identity import TIME_MAX_MS, Identity, InFlight
from schemas.logs import logger_of
from schemas.profiler.config import ProfilerConfig
from schemas.reports import AdapterStatus, FleetStatus, Report, SyncReport
from schemas.safetensors.format import find_tensors
from schemas.safetensors.manifest import find_delta, manifest_of, read_checkpoint, require_all_changed
from schemas.safetensors.paths import resolve_below
from schemas.safetensors.reading import content_digest
from schemas.storage.filesystems import network_type
from schemas.transport.addresses import write_address
from schemas.transport.keys import KEYS_VARIABLE
from schemas.transport.sockets import Context

logger = logger_of("plane")

STATUS_MS: Final = 5_000
"""Longest time that `status` waits for a bus before it looks whether its log hangs."""
StrPath = str | os.PathLike[str]


class ControlPlane(EngineCommands):
    """The control plane of one training run.

    Enter it with `with` or `async with`. All methods may be called from any thread. Those that command the fleet
    publish at once and return a ticket. A method raises CommandError for a command that can't be published,
    BusOverloaded, BusFaulted (the log can't be written) or BusClosed. What happens in the fleet is in the reports.

    In all methods, `replicas` are the indices of the replicas that the command is for, or one index (None for all), and
    `timeout` is the number of seconds after which agents that have not answered are reported as missing.

    Args:
        address: Where agents connect, e.g. tcp://127.0.0.1:5555. Port 0 lets the system choose; see `.address`.
        log: File of the run's log. Must be on a local disk; `log_copy` of BusConfig is for a run that may go on on
            another machine.
        run: What to do with the log. `"auto"`, which fits every start: continue the run in it if there is one, else
            begin one. `"new"`: begin a run, and keep the log of an earlier one beside it, as `run.<its id>.db`.
            `"resume"`: continue the run in it, which must exist. Anything else is an id, of a new run or of the one
            that the log must be of. None: as `"auto"`, with a warning where a run is continued.
        config: Intervals and limits of the bus.
        profiler: Which steps `step` profiles, and how.
        checkpoints: Directory that checkpoint paths are relative to on this machine. Each agent is configured with
            its own path to the same directory.
        keys: Folder made by `rolloutctl keys`: the bus's own key, and who may come in. Needed for an address that other
            machines can reach. None for the folder that `ROLLOUTCTL_KEYS` names, or no keys.
        insecure: Allow an address that other machines can reach without keys. Programs there can command the engines.
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
        self._profiler = profiler or ProfilerConfig()
        self._profiling = Profiling(self._profiler, lambda *order: self.bus.publish(*order), self._live_identities)
        self._checkpoints, self._insecure, self._context = Path(checkpoints), insecure, context
        folder = keys or os.environ.get(KEYS_VARIABLE)
        self._keys = KeyFolder(Path(folder)) if folder else None
        self._samples, self._step = SampleCounts(), 0
        self._digested: dict[str, dict[str, bytes]] = {}  # tensors of the newest checkpoints, by their content
        self._senders: list[threading.Thread] = []
        self._opened: BusThread | None = None
        self._owner: threading.Thread | None = None
        self._bus: Bus

    # --- lifetime -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the log and start the bus. Blocks for some milliseconds, and for half a minute at most.

        With a copy of the log it blocks for 10 s after a life that was killed, and for five minutes at most.
        """
        if self._opened is not None:
            raise ConfigError("this control plane is already open: create one object for each life of a bus")
        reads = f"the log {self._log}" + (f" or the keys in {self._keys.path}" if self._keys is not None else "")
        limit_s = COPY_OPEN_S if self._config.log_copy is not None else None
        thread = BusThread(self._make_bus, self._owner or threading.current_thread(), reads, limit_s)
        self._bus = thread.start()
        self._opened = thread
        if self._config.address_file is not None:
            try:
                write_address(Path(self._config.address_file), self._bus.address)
            except BusAddressError:
                self.close()
                raise

    def _make_bus(self) -> Bus:
        config = self._config
        log = RunLog.open(
            self._log,
            self._run,
            config.durability,
            bytes_max=config.log_bytes_max,
            age_max_s=config.log_age_max_s,
            copy=config.log_copy,
        )
        with ExitStack() as stack:
            stack.callback(log.close)
            if filesystem := network_type(Path(self._log)):
                logger.warning(
                    "the log %s is on a network file system (%s): each group is written more slowly, and others should "
                    "read it on this machine only. A local disk is better, with `log_copy` for a run that moves",
                    *(self._log, filesystem),
                )
            if log.continues and self._run is None:
                logger.warning('%s. run="auto" (`--run auto`) says that this is meant', log.continues)
            bus = Bus(
                self._address,
                log,
                config,
                insecure=self._insecure,
                keys=self._keys,
                checkpoints=self._checkpoints,
                context=self._context,
            )
            stack.pop_all()  # the bus closes the log
        return bus

    def close(self) -> None:
        """End an open profiling session, inform the fleet, and close the log. Open tickets fail with BusClosed.

        Ctrl-C ends the wait at once, with KeyboardInterrupt: the bus then closes by itself, within seconds. A `send`
        that has not returned is not waited for.

        Raises:
            BusFaulted: The bus has not closed within half a minute, since the disk of its log hangs. The process can
                end all the same.
        """
        if self._opened is None or self._opened.misused is not None:  # a fork leaves its parent's open
            return
        opened = self._opened
        self._record_samples()
        try:
            self._profiling.close()
        finally:
            opened.ask_to_end()
            self._opened = None
        opened.end()
        for sender in self._senders:
            if sender.is_alive():
                logger.warning("the bus has closed, and `send` has not returned: thread %s is left alone", sender.name)

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
        """The open bus. Raises BusClosed if it is not open, and BusError in a fork of the process that opened it."""
        if self._opened is None:
            raise self._closed()
        if (error := self._opened.misused) is not None:
            raise error
        return self._bus

    def _closed(self) -> BusClosed:
        return BusClosed(f"the control plane at {self._address} is not open: use `with` or `async with`")

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
        """Return the fleet at this moment: its agents, their states, and which commands wait for which agents.

        While the disk of the log hangs, it is the fleet as last known, and `hold_up` says since when.

        Raises:
            BusClosed: The bus has ended.
        """
        bus = self.bus
        if held_up := bus.status_if_held_up():
            return held_up
        try:
            return bus.run_soon(partial(_status, bus), STATUS_MS).wait()
        except BusFaulted:  # the disk began to hang meanwhile
            if held_up := bus.status_if_held_up():
                return held_up
            raise

    def serving(self) -> dict[int, int]:
        """Return the replicas that serve at this moment, each with the version that it is proven to serve.

        Exact without a wait: an answer counts at once, before the next heartbeat. A replica is not in it while it is
        paused, asleep, in a sync, in quarantine, launching or away, or while it has not answered a command that lets it
        serve again. An agent that dies without a word counts until the bus notices, at the latest after
        `agent_timeout_ms`. Version 0 is what the engine was launched with. Replicas that never sync are left out.

        Raises:
            BusHeldUp: Its log takes no record, and so what the replicas serve is not known. The bus may go on.
            BusFaulted, BusClosed: It has stopped.
        """
        return self.bus.view().serving

    def endpoints(self) -> dict[int, str]:
        """Return where the servers are of the replicas that serve at this moment, as their agents say (`--url`).

        As exact as `serving`, and raises the same. A replica whose agent names no server is not in it.
        """
        return self.bus.view().endpoints

    def view(self) -> FleetView:
        """Return what is known of the fleet at this moment, for a trainer's door.

        Raises:
            BusFaulted, BusClosed: Nothing is known of it.
        """
        return self.bus.view()

    def provenance(self, answer: object, *, replica: int | None = None, model: str = "") -> list[Provenance]:
        """Return which weights made each sequence of an engine's answer, and whether that is proven.

        Takes microseconds, and no turn of the bus. `accepts` says whether to train on one.

        Args:
            answer: As JSON decoded it, or the engine's own object: SGLang's `/generate`, completions and chat, vLLM's
                `RequestOutput` and `/inference/v1/generate`, verl's `TokenOutput`; or a list of them.
            replica: That made it; None if that is not known.
            model: The engine's name of an adapter's version, such as `policy-v7`, if the request named one and the
                answer does not. Labels count for base weights alone: engines have one, whatever adapter made a token.

        Raises:
            ConfigError: The answer does not name its weights, or how many tokens it has.
            BusFaulted, BusClosed: Nothing is known of the fleet.
        """
        return self.bus.view().provenance(answer, replica=replica, model=model)

    def accepts(
        self,
        provenance: Provenance,
        *,
        max_staleness: int | None = None,
        mixed: bool = True,
        unproven: bool = False,
    ) -> Verdict:
        """Return whether a sequence may be trained on, by the versions that made it: true, or false with a `reason`.

        Each is counted, and the counts of each step are in the log: the report, `rolloutctl log verify` and the metrics
        have them.

        Args:
            provenance: Of the sequence.
            max_staleness: How many versions behind the newest committed one its oldest token may be; None for any
                number.
            mixed: Take sequences that more than one version made, as those that ran during a sync with `keep`.
            unproven: Take tokens of weights that their replica was not proven to hold, or that the run does not know.
                `log verify` names them. Those of an aborted sync are never taken.
        """
        verdict = accepts(provenance, max_staleness=max_staleness, mixed=mixed, unproven=unproven)
        self._samples.add(provenance, accepted=bool(verdict))
        return verdict

    def _record_samples(self) -> None:
        if self._opened is not None and (counts := self._samples.take()):
            self._bus.note_samples(self._step, counts)

    def wait_for_agents(self, count: int, timeout: float = 60.0) -> Ticket[FleetStatus]:
        """Wait until `count` agents are live, and every live replica is proven to serve.

        Only what an agent reports after this call counts. Node rank 0 of a replica must then generate on the committed
        weights, in sync and not quarantined. Other nodes and training ranks must be alive.

        Args:
            count: Agents that must be live, training ranks included.
            timeout: Seconds to wait.

        Raises:
            ConfigError: The timeout is out of bounds.
            AgentsMissing: From the ticket. Names what each known agent still lacks.
        """
        bus = self.bus
        return bus.run_soon(partial(await_agents, bus, count, timeout), milliseconds(timeout))

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
            return f"<pre>{html.escape(str(self._closed()), quote=False)}</pre>"
        return self.status()._repr_html_()

    @property
    def profile_reports(self) -> deque[Report]:
        """Reports of the profile commands that `step` published, newest last. Bounded; the log has all of them."""
        return self._profiling.reports

    def _live_identities(self) -> list[Identity]:
        members = self.bus.state.members.values()  # a state is replaced, never changed: any thread may read it
        return [member.hello.identity for member in members if member.state == "live"]

    # --- weights and adapters -----------------------------------------------------------------------------------------

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
        on_unreachable: OnUnreachable = "skip",
        timeout: float = 600.0,
    ) -> Ticket[SyncReport]:
        """Bring the fleet to new weights, all replicas together or none: prepare, load, then commit or abort.

        Args:
            version: Larger than any committed before, and not one that was used for other weights: once replicas were
                told to load it, it stands for this source and manifest. None for the next of the run, one more than the
                newest that was ever requested; `version` of the ticket says which, at once.
            source: Where the weights are. A path is a directory of safetensors files below `checkpoints`, the same as
                `Checkpoint(path)`. `Checkpoint(path, delta=…, base=…)` also names a directory with only the tensors
                that have changed since version `base`, for replicas that serve it.
            manifest: What the source must hold; None to read it from the headers of the files on this machine.
            content: Hash the bytes of the tensors too, here and in every engine that can. Reads the whole checkpoint in
                the caller's thread.
            send: For a `Broadcast` or `Pushed`. Called in a thread of its own when the load phase begins, with the
                replicas that prepared. It creates the group if there is none yet, and sends. Nothing is committed
                before it has returned, whatever engines report meanwhile. If it raises, or has not returned by the
                deadline of the load phase, the sync is aborted, and its report says why. Once it has returned, replicas
                have `after_send_ms` of BusConfig (10 s) to finish their loads. Engines that wait for a broadcast go on
                waiting until their group gives up, so give it a deadline.
            in_flight: What happens to running requests, see `pause`.
            quorum: Replicas that must load; None for more than half of those that take part. A replica that is away
                when the phase begins is not counted: of four with three away, one is enough. The report names them.
            replicas: Replicas that take part, by index; None for all.
            on_unreachable: `skip`: no phase waits for an engine that is known to be down once the others meet the
                quorum; the report names its replica as unproven, and it comes back to these weights. `wait`: wait for
                it.
            timeout: Seconds for each phase.

        Raises:
            CheckpointError: The source is missing, cut off or unsafe. Nothing was sent.
            CommandError: From the ticket. The version was used for other weights.
            SyncInProgress: From the ticket. Another sync has not ended yet.
        """
        bus = self.bus
        self._record_samples()
        source, manifest = self._checked_source(source, manifest, content)
        request = SyncRequested(
            version=version,
            source=source,
            manifest=manifest,
            in_flight=in_flight,
            quorum=quorum,
            on_unreachable=on_unreachable,
            target=target_of(replicas),
            timeout_ms=milliseconds(timeout),
            sends=send is not None,
        )
        ticket = bus.sync(request)
        if send is not None:
            bus.run_soon(partial(send_when_loading, bus, ticket, send, self._senders), TIME_MAX_MS)
        return ticket

    def sync_adapter(
        self,
        name: str,
        version: int | None,
        path: StrPath,
        *,
        base: int | None = None,
        keep: int = 2,
        quorum: int | None = None,
        replicas: Replicas = None,
        on_unreachable: OnUnreachable = "skip",
        timeout: float = 120.0,
    ) -> Ticket[SyncReport]:
        """Bring the fleet to a version of a LoRA adapter, beside the older ones: prepare, load, then commit or abort.

        Nothing is paused. Running requests end on the version that they began with, and from the commit on `adapters`
        has the new one. A replica that could not load it serves its base and its other adapters on; it is not among
        the `replicas` of the adapter. Reads the files, in the caller's thread.

        Args:
            name: Of the adapter.
            version: Larger than any committed before; None for the next of this adapter.
            path: Directory of the files, as PEFT writes them, below `checkpoints`. No other version may have it, now or
                later: engines read it again. `needed_checkpoints` says when it can be deleted.
            base: Version of the base weights that it belongs to; None for any.
            keep: How many versions replicas hold afterwards, the newest included: one more than the steps by which the
                trainer lets a sample be late. An older one is unloaded once no request runs on it.
            quorum: As in `sync_weights`.
            replicas: As in `sync_weights`.
            on_unreachable: As in `sync_weights`.
            timeout: Seconds for each phase.

        Raises:
            CheckpointError: The files are missing, cut off or unsafe. Nothing was sent.
            CommandError: From the ticket. The version or the path was used before, or the base is another.
            SyncInProgress: From the ticket. Another sync of this adapter has not ended yet.
        """
        self._record_samples()
        place = Path(path).as_posix()  # engines are asked for what they list by this very path
        found = read_checkpoint(resolve_below(self._checkpoints, place), adapter=True)
        request = SyncRequested(
            version=version,
            source=Checkpoint(place),
            manifest=found.manifest,
            in_flight="keep",
            quorum=quorum,
            on_unreachable=on_unreachable,
            target=target_of(replicas),
            timeout_ms=milliseconds(timeout),
            adapter=AdapterRequest(name=name, config=found.config, base=base, keep=keep),
        )
        return self.bus.sync(request)

    def drop_adapter(self, name: str, timeout: float = 30.0) -> Ticket[Report]:
        """Have replicas hold no version of a LoRA adapter any more. Each is unloaded once no request runs on it.

        Args:
            name: Of the adapter.
            timeout: Seconds until agents that have not answered are missing.

        Raises:
            CommandError: From the ticket. The run has no such adapter, or a sync of it has not ended.
        """
        return self.bus.publish(AdapterDrop(name=name), Target(), milliseconds(timeout))

    def adapters(self) -> dict[str, AdapterStatus]:
        """Return the newest committed version of each LoRA adapter: what to name in a request, and on which replicas.

        As exact as `serving`: a replica is not among them while it is not proven to serve, and to hold that version.

        Raises:
            BusFaulted, BusClosed: The bus has stopped.
        """
        return self.bus.view().adapters

    def needed_checkpoints(self) -> frozenset[str]:
        """Return the directories that a replica may still have to read: all others that were synced can be deleted.

        They are those of weights and adapters, as they were given, of earlier lives of the trainer too. A replica that
        is away comes back to the version that was committed for it, also if later syncs did not name it. During a sync,
        replicas may go back to that version. `retire` a replica that does not come back.

        Raises:
            BusFaulted, BusClosed: The bus has stopped.
        """
        return self.bus.view().needed_checkpoints

    def _checked_source(
        self, source: Source | str | Path, manifest: Manifest | None, content: bool
    ) -> tuple[Source, Manifest | None]:
        """The source, and what it must hold; by default what its files say."""
        if isinstance(source, str | Path):
            source = Checkpoint(os.fspath(source))
        if manifest is not None:
            return source, manifest
        checkpoint = durable_source(source)
        if checkpoint is not None:
            places = find_tensors(resolve_below(self._checkpoints, checkpoint.path))
            digest = content_digest(places) if content else None
            if isinstance(source, Checkpoint) and source.delta:
                delta = resolve_below(self._checkpoints, source.delta)
                changed, held = find_delta(delta, places), self.bus.state.default_desired.committed
                known = held.manifest if held is not None and held.version == source.base else None
                base = self._digested.get(known.content or "") if known is not None else None
                if digest is not None and base is not None:
                    require_all_changed(delta, changed, base, digest.tensors)
            layout = {name: place.spec for name, place in places.items()}
            if digest is None:
                return source, manifest_of(layout)
            self._digested = {digest.hexdigest(): digest.tensors, **dict(list(self._digested.items())[:3])}
            return source, manifest_of(layout, digest.hexdigest())
        if isinstance(source, Broadcast):
            raise ConfigError("a broadcast needs a manifest or a path: `manifest_of` makes one of names and shapes")
        return source, None

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, global_step: int) -> Step:
        """Return the context of one training step: `with` or `async with plane.step(n):` around its work.

        A trainer whose steps are callbacks enters it with a `contextlib.ExitStack`.
        Opens and closes profiling sessions as configured. Never raises for profiling that failed: a warning is logged,
        and the report is in `profile_reports`.
        """
        self._record_samples()
        self._step = max(0, global_step)
        return Step(self._profiling, global_step)


async def _status(bus: Bus) -> FleetStatus:
    return bus.status()
