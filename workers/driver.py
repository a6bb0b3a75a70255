"""The one place that calls an engine: it makes the calls that the machine asks for, and observes the engine in between.

Rule 1  Calls never overlap, and the engine is not observed during a call: such an observation belongs to no moment.
Rule 2  A call that has begun is never cancelled, not even when the agent ends: engines hang, or give the late reply to
        the next caller. What follows from a call that takes too long is for the machine to decide. So all of this runs
        in one task behind a shield, which ends when it is told to.
Rule 3  Nothing that an engine raises leaves this file. It becomes a `Fault`, and the machine decides what it means.
Rule 4  Nothing that an adapter returns reaches the machine unless it can be encoded and decoded again: the journal has
        to be readable after a restart.
Rule 5  To wait for weights that the trainer pushes calls nothing. The engine is observed until it reports their label,
        or until the machine no longer waits for it.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio import CancelScope

from schemas.carriers.wakeup import Signal
from schemas.errors import CheckpointError, EngineError, UnsupportedError
from schemas.events import (
    AwaitPush,
    Call,
    CollectTraces,
    EngineObserved,
    EngineReturned,
    Event,
    Fault,
    FinishProfile,
    Observation,
    Observe,
    Perform,
    Returned,
)
from schemas.logs import logger_of
from schemas.wire import DECODE_ERRORS, encode, event_decoder
from workers.engine import Engine, EngineView
from workers.machine.progress import is_news, stalls_after
from workers.machine.state import AgentState
from workers.traces.node import NodeTraces

logger = logger_of("agent")

RESULT_BYTES: Final = 64 * 1024
"""Largest result of a call. It travels in an outcome, and is twice in the log."""
MESSAGE_MAX: Final = 2000
"""Most characters of an engine's own message in an outcome."""
LABEL_FIRST_S: Final = 0.02
"""Seconds after which the label of pushed weights is read again. The time doubles with each reading."""
LABEL_LAST_S: Final = 0.5
"""Most seconds between two readings of that label."""
WARN_AGAIN_MS: Final = 60_000
"""Time between two warnings about the same engine."""

_DONE = Returned()
_ONLY_OBSERVED = (Observe, AwaitPush)
_DISK_CALLS = (CollectTraces, FinishProfile)


class EngineDriver:
    """Drives the engine of one agent during one incarnation.

    Args:
        engine: The engine, to observe it.
        commanded: The same engine, to call it; None if this agent only observes. Then nothing here can call it.
        traces: What profiling sessions leave on this node's disk, if they do.
        observe_ms: Time between two observations.
        state: Returns the agent's state.
        handle: Gives an event to the machine.
        now_ms: The agent's monotonic time.
        wake_at: Asks for a call of `notice_time` at a moment, in ms.
    """

    def __init__(
        self,
        engine: EngineView,
        commanded: Engine | None,
        traces: NodeTraces | None,
        observe_ms: int,
        state: Callable[[], AgentState],
        handle: Callable[[Event], None],
        now_ms: Callable[[], int],
        wake_at: Callable[[int], None],
    ) -> None:
        self._engine, self._commanded = engine, commanded
        self._traces, self._observe_ms = traces, observe_ms
        self._state, self._handle = state, handle
        self._now_ms, self._wake_at = now_ms, wake_at
        self._requested: Perform | None = None
        self._wake = Signal()
        self._ending = False
        self._observing = CancelScope()
        self._observe_at_ms: int | None = None  # when the next observation is due; None if it is already
        self._observed: Observation | None = None  # the newest one
        self._fed: Observation | None = None  # the newest one that the machine has seen
        self._warned_ms: int | None = None  # when the engine's trouble was last logged
        self._stalls = 0  # observations in a row in which running requests made no progress

    def request(self, perform: Perform) -> None:
        """Make a call as soon as the engine is free."""
        self._requested = perform
        self._wake.set()

    def notice_time(self, now_ms: int) -> None:
        """Observe the engine if it is time."""
        if self._observe_at_ms is None:
            return
        if now_ms < self._observe_at_ms:
            self._wake_at(self._observe_at_ms)
        else:
            self._observe_at_ms = None
            self._wake.set()

    def end(self) -> None:
        """Begin no other call, and return from `run` after the one under way."""
        self._ending = True
        self._observing.cancel()
        self._wake.set()

    async def run(self) -> None:
        """Make the requested calls, and observe the engine between them, until `end`. It can't be cancelled."""
        with CancelScope(shield=True):
            while not self._ending:
                perform, self._requested = self._requested, None
                if perform is None and self._observe_at_ms is None:
                    await self._watch()
                elif perform is None:
                    await self._wake.wait()
                elif isinstance(perform.call, AwaitPush):
                    await self._await_label(perform, perform.call.source.label)
                else:
                    await self._make(perform)

    async def _watch(self) -> None:
        """Observe the engine between calls. A change is an event."""
        observation = await self._observe_unless_ended()
        self._observe_at_ms = self._now_ms() + self._observe_ms
        self._wake_at(self._observe_at_ms)
        if observation is not None:
            self._warn_of_trouble(observation)
            self._feed(observation)

    async def _await_label(self, perform: Perform, label: str) -> None:
        """Observe the engine until it reports the label. Ends without a result if the machine no longer waits."""
        delay_s = LABEL_FIRST_S
        while self._is_current(perform):
            observation = await self._observe_unless_ended()
            if observation is not None and observation.label == label:
                if self._is_current(perform):
                    self._report(perform, Returned(), observation)
                return
            if observation is not None:
                self._feed(observation)
            with anyio.move_on_after(delay_s):
                await self._wake.wait()
            delay_s = min(2 * delay_s, LABEL_LAST_S)

    def _is_current(self, perform: Perform) -> bool:
        activity = self._state().activity
        current = activity is not None and activity.call_id == perform.call_id
        return current and self._requested is None and not self._ending

    def _feed(self, observation: Observation) -> None:
        stalls = stalls_after(self._stalls, self._observed, observation)
        news = is_news(self._fed, observation, self._stalls, stalls)
        self._observed, self._stalls = observation, stalls
        if news:
            self._fed = observation
            self._handle(EngineObserved(at_ms=self._now_ms(), observation=observation))

    async def _make(self, perform: Perform) -> None:
        try:
            result: Returned | Fault = await self._perform(perform.call)
        except Exception as error:
            result = fault_of(error)
        if isinstance(result, Fault):
            self._warn_if_unanswered(perform.call, result)
        self._report(perform, recordable(result), await self._observe())

    def _report(self, perform: Perform, result: Returned | Fault, observation: Observation | None) -> None:
        self._observed = self._fed = observation
        self._stalls = 0
        event = EngineReturned(at_ms=self._now_ms(), call_id=perform.call_id, result=result, observation=observation)
        self._handle(event)

    def _perform(self, call: Call) -> Awaitable[Returned]:
        if self._commanded is None:
            raise UnsupportedError("this agent only observes: it makes no calls.")
        if isinstance(call, _ONLY_OBSERVED):
            return _only_observed()
        if isinstance(call, _DISK_CALLS):
            if self._traces is None:
                raise UnsupportedError("this agent was started without a traces root, so it knows of no traces.")
            return self._traces.perform(call)
        activity = self._state().activity
        timeout_s = (activity.deadline_ms - self._now_ms()) / 1000 if activity is not None else 0.0
        return self._commanded.perform(call, max(0.0, timeout_s))

    async def _observe_unless_ended(self) -> Observation | None:
        with CancelScope() as self._observing:
            return await self._observe()
        return None

    async def _observe(self) -> Observation | None:
        try:
            observation = await self._engine.observe()
        except Exception as error:
            fault_of(error)
            return None
        known = observation == self._observed
        return observation if known or is_readable(EngineObserved(at_ms=0, observation=observation)) else None

    def _warn_of_trouble(self, observation: Observation) -> None:
        """Log an engine that can't be used from here, at once and then now and then: somebody has to act."""
        now = self._now_ms()
        if observation.trouble is None:
            self._warned_ms = None
        elif self._warned_ms is None or now - self._warned_ms >= WARN_AGAIN_MS:
            self._warned_ms = now
            logger.warning("agent %s: %s", self._state().identity.agent, observation.trouble)

    def _warn_if_unanswered(self, call: Call, fault: Fault) -> None:
        """Log a failure that no outcome reports, because no command waits for the call, or none does any more."""
        state = self._state()
        activity = state.activity
        if activity is not None and (activity.trigger is None or activity.overdue):
            name, reason = type(call).__name__, fault.message
            logger.warning("agent %s: %s, which no command waits for, failed: %s", state.identity.agent, name, reason)


def recordable(result: Returned | Fault) -> Returned | Fault:
    """Return the result, or a fault if no message could carry it or no journal could give it back."""
    if result == _DONE:
        return result
    event = EngineReturned(at_ms=0, call_id=1, result=result)
    if not is_readable(event):
        return Fault("engine_error", "the engine's adapter returned what cannot be recorded.")
    if (size := len(encode(event))) > RESULT_BYTES:
        return Fault("engine_error", f"the engine's adapter returned {size} bytes; the limit is {RESULT_BYTES}.")
    return result


async def _only_observed() -> Returned:
    return _DONE  # the observation that follows is what was asked for


def fault_of(error: Exception) -> Fault:
    """Return why an engine did not do what it was asked. An adapter may be anybody's code, so all errors count."""
    match error:
        case CheckpointError():
            return Fault("source_refused", str(error)[:MESSAGE_MAX])
        case UnsupportedError():
            return Fault("unsupported", str(error)[:MESSAGE_MAX])
        case EngineError():
            return Fault("engine_error", str(error)[:MESSAGE_MAX])
    logger.debug("the engine's adapter raised", exc_info=error)
    return Fault("engine_error", f"{type(error).__name__}: {error}"[:MESSAGE_MAX])


def is_readable(event: Event) -> bool:
    """Return whether an adapter's value can be decoded again: a struct is checked then, not when it is built."""
    try:
        return event_decoder.decode(encode(event)) == event
    except DECODE_ERRORS + (TypeError,):
        return False
