"""The agent: one process beside each node of each rollout replica. A shell around `workers.machine.decide`; decides
nothing.

Theory of operation. Every event, whether it came from the bus, the engine or a clock, goes through `Agent._step`, the
only place that calls `decide`. A decision goes into the journal, and only then are its effects performed, in order:
an engine call is given to the one task that calls the engine, everything else is sent to the bus at once. `_step` does
not wait for anything, so no event can slip between a decision and its effects.

A call into an engine is never cancelled, not even when the agent is told to end: engines wedge, or hand the late reply
to the next caller. What the machine wants of it past its deadline it says by events of its own.

Rule 1  Written down first. Before an engine is called, and before the outcome of a call is told, the decision is
        committed. Decisions that touch nothing may be lost in a crash: they would be made again.
Rule 2  An agent that can't write acts no more. It ends, with an error that says so.
Rule 3  Nothing that an engine raises leaves the agent. It becomes a `Fault`, and the machine decides what it means.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar, assert_never

import anyio
import zmq
from anyio import CancelScope

from schemas.carriers.sockets import Context
from schemas.config import AgentConfig
from schemas.errors import CheckpointError, EngineError, RolloutctlError, UnsupportedError
from schemas.events import (
    Answer,
    Call,
    CommandReceived,
    DiskCall,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    Fault,
    HeadSeen,
    Observation,
    Perform,
    RequestResend,
    RequestSnapshot,
    Restart,
    Returned,
    Settings,
    Started,
    Tick,
)
from schemas.identity import Identity
from schemas.outcomes import Acted, Failed, Skipped
from schemas.wire import DECODE_ERRORS, encode, event_decoder
from workers.engine import Engine
from workers.link.journal import Journal, set_aside
from workers.link.link import AnotherRun, Link, now_ms
from workers.machine.decide import AgentState, decide, in_sync, next_deadline
from workers.traces.node import NodeTraces

logger = logging.getLogger("rolloutctl.agent")

ENGINE_CLOSE_S: Final = 30.0
"""How long an engine may take to be let go of."""
RESULT_BYTES: Final = 64 * 1024
"""Largest result of a call. It travels in an outcome, and twice in the log."""
MESSAGE_MAX: Final = 2000
"""Letters of an engine's own words in an outcome."""

_LAZY = (CommandReceived, HeadSeen, Tick)
"""Events whose decisions may wait for the next commit, unless they call the engine or leave an epoch behind."""

_DONE = Returned()

T = TypeVar("T")


class Agent:
    """One node's agent. `async with Agent(...) as agent: await agent.run()`.

    bus: address of the bus, e.g. tcp://10.0.0.1:5555; the only one that an agent must know.
    identity: the place of this node. Two live agents can't hold the same.
    engine: what the agent commands; opened on entering and closed on leaving.   traces: what its sessions leave on
    this node's disk; None where no session leaves any.
    state_dir: where the journal lies. It must outlive the process, and be on a disk of this machine.
    context: for `inproc://` addresses, which exist within one context only; else the process's own.
    wall_ns: the node's wall clock; what it shows is told, and compared with the bus's.

    Entering raises BusAddressError, LogLocked (another process runs this agent), LogError, AgentError (a journal of
    another version of the decision logic) and EngineError. Under asyncio or trio; nothing of it is thread-safe.
    """

    def __init__(
        self,
        *,
        bus: str,
        identity: Identity,
        engine: Engine,
        state_dir: Path,
        traces: NodeTraces | None = None,
        config: AgentConfig | None = None,
        context: Context | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.identity = identity
        self._bus, self._engine, self._config = bus, engine, config or AgentConfig()
        self._traces = traces
        self._path = state_dir / f"agent-{identity.agent}.db"
        self._context, self._wall_ns = context or zmq.Context.instance(), wall_ns
        self._open = AsyncExitStack()
        self._journal: Journal
        self._link: Link
        self._next: Perform | None = None
        self._anew, self._life = False, CancelScope()
        self._called = anyio.Event()
        self._engine_lock = anyio.Lock(fast_acquire=True)
        self._seen: Observation | None = None  # the last one that the machine was given
        self._planned: int | None = None  # when the machine gets its next tick
        self._earlier = anyio.Event()
        self._changed: anyio.Event | None = None  # exists while somebody waits

    @property
    def state(self) -> AgentState:
        """All that the agent knows, frozen; the machine makes a new one with each decision."""
        return self._journal.state

    @property
    def malformed(self) -> int:
        """Messages of the bus that could not be read."""
        return self._link.malformed

    @property
    def safety_polls(self) -> int:
        """Messages that waited because a socket did not signal them. Must stay 0."""
        return self._link.safety_polls

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._journal = Journal.open(self._path, self.identity.agent, self._config.durability)
            stack.callback(lambda: self._journal.close())
            self._start()
            stack.callback(lambda: self._link.close())
            stack.push_async_callback(self._close_engine)
            await self._engine.open()
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def run(self) -> None:
        """Serve until cancelled. Then the engine call under way is awaited, and the bus told that this agent leaves.

        Raises IdentityTaken if a live agent holds the place, AgentError if the journal can't be written.
        """
        while True:
            try:
                await self._serve()
            except BaseExceptionGroup as group:
                error = _ours(group)
                if not isinstance(error, AnotherRun):
                    raise error from None
                logger.warning("agent %s begins anew: %s", self.identity.agent, error)
                self._begin_anew()
            if self._anew:
                logger.info("agent %s starts anew: its engine was launched again", self.identity.agent)
                self._link.close()
                self._start()

    async def wait_ready(self) -> None:
        """Return when the engine is as desired, with nothing under way: the replica may serve."""
        await self.wait_until(in_sync)

    async def wait_until(self, holds: Callable[[AgentState], bool]) -> AgentState:
        """Return the first state, from now on, for which `holds` is true."""
        while not holds(self.state):
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()
        return self.state

    # --- one life -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """A new incarnation: dial, and tell the machine."""
        incarnation = secrets.token_hex(16)
        place = (self._bus, self.identity, incarnation)
        self._link = Link(*place, self._journal, self._config, self._context, self._step, self._wall_ns)
        settings = Settings(reconcile_timeout_ms=self._config.reconcile_timeout_ms)
        self._next = self._seen = self._planned = None
        self._anew, self._life = False, CancelScope()
        self._step(Started(at_ms=now_ms(), identity=self.identity, incarnation=incarnation, settings=settings))

    async def _serve(self) -> None:
        try:
            with self._life:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._call_engine)
                    tasks.start_soon(self._watch_engine)
                    tasks.start_soon(self._tick)
                    tasks.start_soon(self._link.run)
        finally:
            try:
                self._journal.commit()
            finally:
                self._link.leave()

    def _begin_anew(self) -> None:
        """Another run: its seq and epochs begin anew, so what was decided before has no meaning in it."""
        self._link.close()
        self._journal.close()
        set_aside(self._path)
        self._journal = Journal.open(self._path, self.identity.agent, self._config.durability)
        self._start()

    async def _close_engine(self) -> None:
        with anyio.move_on_after(ENGINE_CLOSE_S, shield=True):
            await self._engine.close()

    # --- decide, write down, perform ----------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        journal = self._journal
        before = journal.state
        state, effects = decide(before, event)
        if not effects and (state is before or state == before):
            return
        journal.note(event, effects, state)
        if type(event) not in _LAZY or state.calls_made != before.calls_made or state.epoch != before.epoch:
            journal.commit()
        for effect in effects:
            self._perform(effect)
        if state.activity is not before.activity or state.queue is not before.queue:
            self._plan(state)
        self._link.noted(state)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Answer():
                self._link.answer(effect)
                self._tell(effect)
            case Perform():
                self._next = effect
                self._called.set()
            case RequestResend():
                self._link.request_resend(effect.first)
            case RequestSnapshot():
                self._link.request_snapshot()
            case Restart():
                self._anew = True
                self._life.cancel()
            case _:
                assert_never(effect)

    def _tell(self, answer: Answer) -> None:
        """One line per command: a failure is a warning, a skip is what most agents of a fleet do most of the time."""
        match answer.outcome:
            case Skipped(reason=reason):
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("agent %s seq %d skipped %s", self.identity.agent, answer.seq, reason)
            case Acted(calls=calls):
                if logger.isEnabledFor(logging.INFO):
                    made = ", ".join(calls) or "noted"
                    logger.info("agent %s seq %d acted: %s", self.identity.agent, answer.seq, made)
            case Failed(error=error, message=message):
                logger.warning("agent %s seq %d failed (%s): %s", self.identity.agent, answer.seq, error, message)
            case _:
                assert_never(answer.outcome)

    def _tell_unasked(self, call: Call, result: Returned | Fault) -> None:
        """A failure that no outcome tells, since no command waits for the call, or none does any more."""
        activity = self.state.activity
        if isinstance(result, Fault) and activity is not None and (activity.trigger is None or activity.overdue):
            what, why = type(call).__name__, result.message
            logger.warning("agent %s: %s, which no command waits for, failed: %s", self.identity.agent, what, why)

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def _call_engine(self) -> None:
        """Make the calls that the machine asks for. What was begun is brought to its end, also when the agent ends."""
        while True:
            await self._called.wait()
            self._called = anyio.Event()
            with CancelScope(shield=True):
                while (perform := self._next) is not None:
                    self._next = None
                    async with self._engine_lock:
                        result = await self._guarded(self._performed(perform.call))
                        self._tell_unasked(perform.call, result)
                        self._seen = seen = await self._observe()
                        result = _fitting(result)
                        call_id = perform.call_id
                        self._step(EngineReturned(at_ms=now_ms(), call_id=call_id, result=result, observation=seen))

    async def _performed(self, call: Call) -> Returned:
        if not isinstance(call, DiskCall):
            return await self._engine.perform(call, self._left_s())
        if self._traces is None:
            raise UnsupportedError("this agent was started without a traces root, so it knows of no traces.")
        return await self._traces.perform(call)

    def _left_s(self) -> float:
        """Seconds until the deadline of what is under way."""
        activity = self.state.activity
        return max(0.0, (activity.deadline_ms - now_ms()) / 1000) if activity is not None else 0.0

    async def _watch_engine(self) -> None:
        """Look at the engine while nothing is asked of it; what is new is an event."""
        while True:
            async with self._engine_lock:  # what is read during a call belongs to no moment
                seen = await self._observe()
                if seen is not None and seen != self._seen:
                    self._seen = seen
                    self._step(EngineObserved(at_ms=now_ms(), observation=seen))
            await anyio.sleep(self._config.observe_ms / 1000)

    async def _observe(self) -> Observation | None:
        seen = await self._guarded(self._engine.observe())
        if isinstance(seen, Fault):
            return None
        if seen == self._seen:
            return seen
        return seen if _readable(EngineObserved(at_ms=0, observation=seen)) else None

    async def _guarded(self, call: Awaitable[T]) -> T | Fault:
        """What the engine gives back, or why it does not: behind this call is other people's code."""
        try:
            return await call
        except CheckpointError as error:
            return Fault("source_refused", str(error)[:MESSAGE_MAX])
        except UnsupportedError as error:
            return Fault("unsupported", str(error)[:MESSAGE_MAX])
        except EngineError as error:
            return Fault("engine_error", str(error)[:MESSAGE_MAX])
        except Exception as error:
            logger.debug("agent %s: the engine raised", self.identity.agent, exc_info=True)
            return Fault("engine_error", f"{type(error).__name__}: {error}"[:MESSAGE_MAX])

    # --- time ---------------------------------------------------------------------------------------------------------

    def _plan(self, state: AgentState) -> None:
        """Wake the clock if it would come too late. If it comes too early it looks again, which costs less."""
        due = next_deadline(state)
        if due is not None and (self._planned is None or due < self._planned):
            self._planned = due
            self._earlier.set()

    async def _tick(self) -> None:
        """Give the machine its moments."""
        while True:
            due = self._planned = next_deadline(self.state)
            self._earlier = anyio.Event()
            if due is None:
                await self._earlier.wait()
                continue
            with CancelScope(deadline=due / 1000):
                await self._earlier.wait()
                continue
            if next_deadline(self.state) == due:
                self._step(Tick(at_ms=max(due, now_ms())))


def _fitting(result: Returned | Fault) -> Returned | Fault:
    """The result, or a fault in the place of one that no message could carry or no journal give back."""
    if result == _DONE:
        return result
    event = EngineReturned(at_ms=0, call_id=1, result=result)
    if not _readable(event):
        return Fault("engine_error", "the engine's adapter returned what can't be written down.")
    if (size := len(encode(event))) > RESULT_BYTES:
        return Fault("engine_error", f"the engine's adapter returned {size} bytes; at most {RESULT_BYTES} are told.")
    return result


def _readable(event: Event) -> bool:
    """Can what an adapter gave be read back? A struct is checked when it is decoded, not when it is built."""
    try:
        return event_decoder.decode(encode(event)) == event
    except DECODE_ERRORS + (TypeError,):
        return False


def _ours(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of ours in the group, or the group itself if there is anything else in it."""
    found: list[RolloutctlError] = []
    rest: list[BaseException] = [group]
    while rest:
        error = rest.pop()
        if isinstance(error, BaseExceptionGroup):
            rest.extend(error.exceptions)
        elif isinstance(error, RolloutctlError):
            found.append(error)
        else:
            return group
    return next((error for error in found if not isinstance(error, AnotherRun)), found[0])
