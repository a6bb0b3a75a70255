"""The agent: one process beside each node of each rollout replica. A shell around `workers.machine.decide`; it decides
nothing.

Theory of operation. Every event, whether it comes from the bus, the engine or a clock, goes through `Agent._step`, the
only caller of `decide`. The decision goes into the journal, and only then are its effects performed, in order: an
engine call is handed to the engine's driver, everything else is sent to the bus at once. `_step` waits for nothing, so
no event can come between a decision and its effects.

Rule 1  Write first. The decision is committed before an engine is called, and before the outcome of a call is sent.
        Decisions that touch nothing may be lost in a crash, because they would be made again. `is_written_first` says
        which are which.
Rule 2  An agent that cannot write its journal stops acting. It ends with an error that says so.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, assert_never

import anyio
import zmq
from anyio import CancelScope
from anyio.abc import TaskGroup

from schemas import events
from schemas.commands import Drain
from schemas.config import AgentConfig, milliseconds, within_bounds
from schemas.errors import AgentError, ConfigError, EngineError, RolloutctlError
from schemas.identity import Identity, RolloutMode
from schemas.listeners import Listeners
from schemas.logs import logger_of
from schemas.outcomes import Acted, Failed, Skipped
from schemas.transport.keys import KeySource, PeerKeys, StrPath
from schemas.transport.sockets import Context
from schemas.transport.timer import Timer
from schemas.wall_clock import wall_clock_ns
from workers.driver import EngineDriver, ends_this_task, fault_of
from workers.engine import Engine, EngineView
from workers.link.journal import Journal, archive_journal
from workers.link.link import HasLeft, Link, RunChanged, as_it_is
from workers.machine.decide import decide, next_deadline
from workers.machine.readiness import is_ready
from workers.machine.rules import is_leaving
from workers.machine.state import AgentState, call_name, is_written_first, with_engine_state
from workers.stacks import BEFORE_MS, StackDumps
from workers.state_folder import state_folder, warn_if_network
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from workers.faults import FaultInjector

logger = logger_of("agent")

ENGINE_CLOSE_S: Final = 30.0
"""Longest time that closing an engine may take."""

_COMMITTED_LATER = frozenset((events.CommandReceived, events.HeadSeen, events.Tick))
"""Events whose decisions may wait for the next commit, unless they are written first or enter a new epoch."""


class _Incarnation:
    """What belongs to one incarnation.

    Attributes:
        restarting: The machine has asked for the next one.
        stacks: Number of the newest call whose stacks were dumped, and what became of them.
    """

    def __init__(self, link: Link, driver: EngineDriver, timer: Timer) -> None:
        self.link, self.driver, self.timer = link, driver, timer
        self.scope = CancelScope()
        self.tasks: TaskGroup | None = None
        self.stacks: tuple[int, str] = (0, "")
        self.restarting = False


class Agent:
    """One node's agent: `async with Agent(...) as agent: await agent.run()`, under asyncio. Not thread-safe.

    Args:
        bus: Address of the bus, e.g. tcp://10.0.0.1:5555; the only address that an agent must know. Or the path, with a
            slash in it, of a file that names it, which is read again whenever the bus does not answer.
        identity: The place of this node. Two live agents cannot hold the same.
        engine: What the agent commands; opened on entering and closed on leaving. With an identity of mode `observed`
            the agent only observes it: it opens, reads and closes it, and has no way to make a call.
        state_dir: Directory of the journal. It must outlive the process, on a disk of this machine. None for the user's
            state folder, see `workers.state_folder`.
        traces: What profiling sessions leave on this node's disk; None if no session leaves anything.
        stacks: Takes a dump of the engine's stacks when a call is about to pass its deadline; None for no dumps.
        config: Intervals and limits.
        keys: File with this agent's key, for a bus that has keys; None for that of `ROLLOUTCTL_KEY_FILE`, or for
            `ROLLOUTCTL_KEY` and `ROLLOUTCTL_SERVER_KEY`, or none. A file that changes is read again.
        context: The ZeroMQ context, for `inproc://` addresses, which exist in one context only; None for the process's
            own.
        wall_ns: The node's wall clock, which is compared with the bus's.
        faults: What goes wrong on purpose with this agent, on a game day; None for nothing.
        endpoint: Where clients reach the engine's server, http://HOST:PORT, for `ControlPlane.endpoints`; empty if they
            don't.

    Attributes:
        decisions: Who hears of each event and its effects, in the loop of the agent, once they were performed or begun.

    Raises:
        ConfigError: The engine offers no calls, and the identity is not one that only observes. On entering: the user's
            state folder can't be made.
        KeyFileError: The keys can't be used.
        BusAddressError: On entering: the address cannot be dialled.
        LogLocked: On entering: another process runs this agent.
        LogError: On entering: the journal cannot be read.
        AgentError: On entering: the journal was written by another version of the decision logic.
        EngineError: On entering: there is no engine to attach to.
    """

    _path: Path  # these four exist once the agent is entered
    _journal: Journal
    _life: _Incarnation
    _now_ms: Callable[[], int]

    def __init__(
        self,
        *,
        bus: str,
        identity: Identity,
        engine: Engine | EngineView,
        state_dir: Path | None = None,
        traces: NodeTraces | None = None,
        stacks: StackDumps | None = None,
        config: AgentConfig | None = None,
        keys: StrPath | PeerKeys | None = None,
        context: Context | None = None,
        wall_ns: Callable[[], int] = wall_clock_ns,
        faults: "FaultInjector | None" = None,
        endpoint: str = "",
    ) -> None:
        self.identity = within_bounds(identity)
        self._faults = faults
        if faults is not None:
            engine, wall_ns = faults.wrapped(engine), faults.wall_ns
        self._bus, self._context, self._wall_ns = bus, context or zmq.Context.instance(), wall_ns
        self._engine, self._traces, self._config = engine, traces, within_bounds(config or AgentConfig())
        self._stacks, self._endpoint = stacks, endpoint
        self._commanded = None if identity.mode is RolloutMode.OBSERVED else _commandable(engine)
        self._state_dir = state_dir
        self._keys = KeySource.find(keys)
        self.decisions: Listeners[[events.Event, Sequence[events.Effect]]] = Listeners()
        if faults is not None:
            faults.attach(self)
        self._resources = AsyncExitStack()
        self._changed: anyio.Event | None = None  # while a state is waited for

    @property
    def state(self) -> AgentState:
        """Everything that the agent knows, frozen; each decision leads to a new one."""
        return self._journal.state

    @property
    def malformed(self) -> int:
        """Number of messages from the bus that could not be read."""
        return self._life.link.malformed

    async def __aenter__(self) -> Self:
        clock = asyncio.get_running_loop().time  # at a fifth of what asking anyio costs
        self._now_ms = lambda: int(clock() * 1000)
        async with AsyncExitStack() as stack:
            folder = warn_if_network(self._state_dir) if self._state_dir is not None else state_folder(self._bus)
            self._path = folder / f"agent-{self.identity.agent}.journal"
            self._journal = self._open_journal()
            stack.callback(lambda: self._journal.close())
            if self._faults is not None:
                stack.callback(self._faults.close)
            self._begin()
            stack.callback(lambda: self._life.link.close())
            stack.push_async_callback(self._close_engine)
            await self._open_engine()
            self._resources = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    async def run(self) -> None:
        """Serve until cancelled. Then the call in flight is awaited, and the bus learns that this agent leaves.

        Returns once the replica has been drained and retired.

        Raises:
            IdentityTaken: A live agent holds the place, or the bus does not accept this agent's key for it.
            AgentError: The journal cannot be written, or a task of the agent was cancelled from elsewhere.
        """
        while True:
            life = self._life
            try:
                await self._serve(life)
            except BaseExceptionGroup as group:
                error = _own_error(group)
                if isinstance(error, HasLeft):
                    logger.info("agent %s ends: its replica has left the fleet", self.identity.agent)
                    return
                if not isinstance(error, RunChanged):
                    raise error from None
                logger.warning("agent %s begins a new journal: %s", self.identity.agent, error)
                self._life.link.close()
                self._journal.close()
                archive_journal(self._path)  # of another run, in which seq and epochs mean something else
                self._journal = self._open_journal()
                self._begin()
                continue
            if not life.restarting:
                raise AgentError(
                    f"agent {self.identity.agent} ends: one of its tasks was cancelled from within. "
                    "Its engine is as the last call left it. Start the agent again; it continues from its journal."
                )
            logger.info("agent %s begins a new incarnation: its engine was relaunched", self.identity.agent)
            life.link.close()
            self._begin()

    async def drain(self, grace_s: float) -> None:
        """Have the replica leave the fleet and be retired, as `ControlPlane.drain` does. `run` returns then.

        Returns at once if no bus can be asked, and at the latest when the bus should have retired it: end the agent.

        Args:
            grace_s: Seconds that running requests may go on.
        """
        if self.state.joined and not self.state.bus_lost:
            grace_ms = milliseconds(grace_s, "grace") if grace_s else 0
            self._life.link.ask_to_leave(grace_ms)
            await anyio.sleep(Drain(grace_ms=grace_ms).timeout_ms / 1000 + 1)  # the bus gives up first

    async def wait_ready(self) -> None:
        """Return when the engine is as desired, with nothing under way, and serves."""
        await self.wait_until(is_ready)

    async def wait_until(self, condition: Callable[[AgentState], bool]) -> AgentState:
        """Return the first state, from now on, for which `condition` is true."""
        while not condition(self.state):
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()
        return self.state

    def note_fault(self, name: str, what: str) -> None:
        """Write down that a fault of a game day is about to happen.

        Args:
            name: Of the fault in its plan.
            what: What goes wrong.
        """
        self._step(events.FaultInjected(at_ms=self._now_ms(), name=name, what=what))

    # --- one incarnation ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin an incarnation: dial the bus, and give the machine `Started`."""
        incarnation, timer, journal = secrets.token_hex(16), Timer(self._on_time), self._journal

        def wake_at(at_ms: int) -> None:
            timer.set(at_ms / 1000)

        link = Link(
            bus=self._bus,
            identity=self.identity,
            incarnation=incarnation,
            journal=journal,
            config=self._config,
            context=self._context,
            handle=self._step,
            now_ms=self._now_ms,
            wake_at=wake_at,
            wall_ns=self._wall_ns,
            counts=lambda: driver.counts,
            keys=self._keys,
            dialled=self._faults.dialled if self._faults is not None else as_it_is,
            endpoint=self._endpoint,
        )
        driver = EngineDriver(
            self._engine,
            self._commanded,
            self._traces,
            observe_ms=self._config.observe_ms,
            state=lambda: journal.state,
            handle=self._step,
            now_ms=self._now_ms,
            wake_at=wake_at,
        )
        self._life = _Incarnation(link, driver, timer)
        settings = events.MachineSettings(
            reconcile_timeout_ms=self._config.reconcile_timeout_ms,
            on_lost_bus=self._config.on_lost_bus,
            memory=self._config.memory,
            wedged_after_ms=self._config.wedged_after_s * 1000,
            game_day=self._faults is not None,
        )
        self._step(
            events.Started(at_ms=self._now_ms(), identity=self.identity, incarnation=incarnation, settings=settings)
        )

    async def _serve(self, life: _Incarnation) -> None:
        try:
            with life.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(life.driver.run)
                    tasks.start_soon(life.timer.serve)
                    tasks.start_soon(life.link.run)
                    life.tasks = tasks
                    try:
                        await anyio.sleep_forever()
                    finally:  # at once: a call in flight is awaited, and may take minutes
                        try:
                            self._step(events.Stopping(at_ms=self._now_ms()))
                        finally:
                            life.driver.end(at_once=is_leaving(self.state))  # nothing needs the engine any more
        finally:
            try:
                self._journal.commit()
            finally:
                life.link.leave()

    def _open_journal(self) -> Journal:
        return Journal.open(self._path, self.identity.agent, self._config.durability)

    async def _open_engine(self) -> None:
        try:
            await self._engine.open()
        except (Exception, asyncio.CancelledError) as error:
            if ends_this_task(error):
                raise
            what = str(error) or fault_of(error).message
            logger.warning("agent %s: %s.open raised: %s", self.identity.agent, type(self._engine).__name__, what)
            if isinstance(error, asyncio.CancelledError):
                raise EngineError(what) from error
            raise

    async def _close_engine(self) -> None:
        """Close the engine, also one that could not be opened: what its `open` had created is freed."""
        name = type(self._engine).__name__
        with anyio.move_on_after(ENGINE_CLOSE_S, shield=True) as scope:
            try:
                await self._engine.close()
            except (Exception, asyncio.CancelledError) as error:
                if scope.cancel_called and ends_this_task(error):
                    raise
                what = str(error) or fault_of(error).message
                logger.warning("agent %s: %s.close raised: %s", self.identity.agent, name, what)

    # --- decide, write down, perform ----------------------------------------------------------------------------------

    def _step(self, event: events.Event) -> None:
        journal, life = self._journal, self._life
        before = journal.state
        state, effects = decide(before, event)
        if not effects and (state is before or state == before):
            return
        journal.append(event, effects, state)
        later = type(event) in _COMMITTED_LATER and state.epoch == before.epoch
        if not later or is_written_first(before, effects):
            journal.commit()
        if type(event) is events.SnapshotReceived and state.seq < before.seq and before.joined:
            self._warn_of_lost_tail(before, state)
        yields = state.changed_by_others and state.bus_lost
        if yields and not (before.changed_by_others and before.bus_lost):
            holds = with_engine_state("It makes no call until a bus tells it what is desired.", state.engine)
            logger.warning(
                "agent %s commands its engine no more: something else has changed it since the bus was last heard. %s",
                *(self.identity.agent, holds),
            )
        for effect in effects:
            self._perform(effect, life)
        engine, queue = state.engine, state.queue
        if queue and queue is not before.queue:
            life.driver.give_way()
        if state.activity is not before.activity or queue is not before.queue or engine is not before.engine:
            self._plan_tick(state, life)
            if engine.version != before.engine.version:
                logger.info(
                    "agent %s: its engine holds weights v%d (before: v%d)",
                    *(self.identity.agent, engine.version, before.engine.version),
                )
            if engine.instance != before.engine.instance:
                self._say_if_stuck_without_a_commit(state)
        life.link.note_decision(state)
        if self.decisions:
            self.decisions.notify(event, effects)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _say_if_stuck_without_a_commit(self, state: AgentState) -> None:
        """Say at the start of an engine that nothing brings it back if the run's first sync fails in it."""
        engine, identity = state.engine, state.identity
        if identity.syncs and engine.tokenizer == "present" and not (engine.version or engine.launched_from):
            logger.info(
                "agent %s: the weights that %s was launched with can't be loaded again. If the first sync of the run "
                "fails in it, it stays paused until a sync succeeds.",
                *(identity.agent, engine.name),
            )

    def _perform(self, effect: events.Effect, life: _Incarnation) -> None:
        match effect:
            case events.Answer():
                life.link.send_outcome(effect)
                self._log_outcome(effect)
            case events.Perform():
                life.driver.request(effect)
                if self._stacks is not None and life.tasks is not None:
                    life.tasks.start_soon(self._dump_stacks, self._stacks, effect, life)
            case events.RequestResend():
                life.link.request_resend(effect.first)
            case events.RequestSnapshot():
                life.link.request_snapshot()
            case events.Restart():
                life.restarting = True
                life.scope.cancel()
            case _:
                assert_never(effect)

    async def _dump_stacks(self, stacks: StackDumps, perform: events.Perform, life: _Incarnation) -> None:
        """Dump the stacks if the engine has not returned shortly before the deadline of a call."""
        if isinstance(perform.call, events.AwaitPush | events.AwaitIdle):
            return  # no engine is called
        activity = self.state.activity
        left_ms = activity.deadline_ms - self._now_ms() if activity is not None else 0
        await anyio.sleep(max(0, left_ms - min(BEFORE_MS, left_ms // 4)) / 1000)
        activity = self.state.activity
        if activity is None or activity.call_id != perform.call_id or activity.overdue:
            return
        note = await stacks.dump(self._path.parent, self.identity.agent, call := call_name(perform.call))
        logger.warning("agent %s: %s is about to pass its deadline. %s", self.identity.agent, call, note)
        life.stacks = perform.call_id, note

    def _warn_of_lost_tail(self, before: AgentState, state: AgentState) -> None:
        logger.warning(
            "agent %s had applied the commands up to seq %d of epoch %d, and the bus of epoch %d goes on after seq %d: "
            "its log lost its tail. The agent takes that bus's desired state.",
            *(self.identity.agent, before.seq, before.snapshot_epoch, state.epoch, state.seq),
        )

    def _log_outcome(self, answer: events.Answer) -> None:
        """Log one line per command. Skips are logged at debug: most agents skip most commands."""
        agent, seq = self.identity.agent, answer.seq
        match answer.outcome:
            case Skipped(reason=reason):
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("agent %s seq %d skipped %s", agent, seq, reason)
            case Acted(calls=calls):
                if logger.isEnabledFor(logging.INFO):
                    logger.info("agent %s seq %d acted: %s", agent, seq, ", ".join(calls) or "noted")
            case Failed(error=error, message=message):
                logger.warning("agent %s seq %d failed (%s): %s", agent, seq, error, message)
            case _:
                assert_never(answer.outcome)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _plan_tick(self, state: AgentState, life: _Incarnation) -> None:
        due_ms = next_deadline(state)
        if due_ms is not None:
            life.timer.set(due_ms / 1000)

    def _on_time(self) -> None:
        """Do what is due, and set the timer for what is not. It may ring for a moment that has moved."""
        life, now_ms = self._life, self._now_ms() + 1  # the clock is rounded down, and some loops round too
        due_ms = next_deadline(self.state)
        if due_ms is not None and now_ms >= due_ms:
            activity, (call_id, note) = self.state.activity, life.stacks
            stacks = note if activity is not None and activity.call_id == call_id else ""
            self._step(events.Tick(at_ms=max(due_ms, now_ms - 1), stacks=stacks))
        self._plan_tick(self.state, life)
        life.driver.notice_time(now_ms)
        life.link.notice_time(now_ms)


def _commandable(engine: Engine | EngineView) -> Engine:
    if not isinstance(engine, Engine):
        raise ConfigError("this engine can only be observed: give the agent an identity of mode observed")
    return engine


def _own_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return an error of this package from the group, or the group itself if it holds any other."""
    own, others = group.split(RolloutctlError)
    if own is None or others is not None:
        return group
    error: BaseException = own.split(RunChanged)[1] or own
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
