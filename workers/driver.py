"""The one place that calls an engine: it makes the calls that the machine asks for, and observes the engine in between.

Rule 1  Calls never overlap, and the engine is not observed during a call: such an observation belongs to no moment. It
        is observed after a call, unless the call succeeded and no observation shows whether it was made.
Rule 2  A call that has begun is never cancelled, not even when the agent ends: engines hang, or give the late reply to
        the next caller. What follows from a call that takes too long is for the machine to decide. So all of this runs
        in one task behind a shield, which ends when it is told to. A call whose deadline has passed is not begun.
Rule 3  Nothing that an engine raises leaves this file, and no cancellation from within its backend. It becomes a
        `Fault`, and the machine decides what it means. An engine that can't be read is `unknown`.
Rule 4  Nothing that a backend returns reaches the machine unless it can be encoded and decoded again: the journal has
        to be readable after a restart.
Rule 5  To wait for weights that the trainer pushes, or for requests to end, calls nothing. The engine is observed until
        it reports their label, or no requests, or until the machine no longer waits for it.
Rule 6  An observation takes no longer than `OBSERVE_S`, and gives way to a command at once. A call that the machine
        makes by itself has no time for retries.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
from anyio import CancelScope

from schemas.agent_status import RequestCounts
from schemas.errors import CheckpointError, EngineError, RefusedError, UnansweredError, UnsupportedError
from schemas.events import (
    AwaitIdle,
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
    Tick,
    UnloadAdapter,
)
from schemas.logs import logger_of
from schemas.wire import DECODE_ERRORS, encode, event_decoder
from workers.engine import Engine, EngineView
from workers.machine.observe import SHOWS_NOTHING
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
IDLE_S: Final = 1.0
"""Seconds without a request after which an engine counts as idle: a router may just have sent one."""
OBSERVE_S: Final = 15.0
"""Longest time of one observation. An engine that can't be read for so long is unknown."""
OBSERVE_SHARE: Final = 0.8
"""Share of the time left to a command for which the observation after its call may last."""
WARN_AGAIN_MS: Final = 60_000
"""Time between two warnings about the same engine."""

_DONE = Returned()
_ONLY_OBSERVED = (Observe, AwaitPush, AwaitIdle)
_DISK_CALLS = (CollectTraces, FinishProfile)


class EngineDriver:
    """Drives the engine of one agent during one incarnation.

    Attributes:
        counts: Of the engine's requests, when they were last observed.
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
        self.counts = RequestCounts()
        self._requested: Perform | None = None
        self._wake = asyncio.Event()
        self._ending, self._shield = False, CancelScope(shield=True)
        self._observing = CancelScope()
        self._observe_at_ms: int | None = None  # when the next observation is due; None if it is already
        self._observed: Observation | None = None  # the newest one
        self._last_reported: Observation | None = None  # the newest one that the machine has seen
        self._unreadable: Observation | None = None  # while the engine can't be read: the first one that says so
        self._warned_ms: int | None = None  # when the engine's trouble was last logged
        self._stalls = 0  # observations in a row in which running requests made no progress

    def request(self, perform: Perform) -> None:
        """Make a call as soon as the engine is free."""
        self._requested = perform
        self._observing.cancel()
        self._wake.set()

    def give_way(self) -> None:
        """Have no command wait for the observation after a call that the machine made by itself."""
        activity = self._state().activity
        if activity is not None and activity.trigger is None:
            self._observing.cancel()

    def notice_time(self, now_ms: int) -> None:
        if self._observe_at_ms is None:
            return
        if now_ms < self._observe_at_ms:
            self._wake_at(self._observe_at_ms)
        else:
            self._observe_at_ms = None
            self._wake.set()

    def end(self, *, at_once: bool = False) -> None:
        """Begin no other call, and return from `run`: `at_once`, or after the call under way."""
        self._ending = True
        self._shield.shield = not at_once
        self._observing.cancel()
        self._wake.set()

    async def run(self) -> None:
        """Make the requested calls, and observe the engine between them, until `end`. It can't be cancelled before."""
        with self._shield:
            while not self._ending:
                perform, self._requested = self._requested, None
                if perform is None and self._observe_at_ms is None:
                    await self._watch()
                elif perform is None:
                    await self._wake.wait()
                    self._wake.clear()
                elif self._is_late():
                    self._report(perform, Fault("refused", "it was not begun: its deadline had passed."), None)
                elif isinstance(perform.call, AwaitPush):
                    await self._await(perform, partial(_has_label, perform.call.source.label))
                elif isinstance(perform.call, AwaitIdle):
                    await self._await(perform, _idle_for(IDLE_S))
                else:
                    await self._carry_out(perform)

    async def _watch(self) -> None:
        """Observe the engine between calls. A change is an event."""
        observation = await self._observe(OBSERVE_S)
        self._observe_at_ms = self._now_ms() + self._observe_ms
        self._wake_at(self._observe_at_ms)
        if observation is not None:
            self._warn_of_trouble(observation)
            self._feed(observation)

    async def _await(self, perform: Perform, shown_by: Callable[[Observation], bool]) -> None:
        """Observe the engine until it shows what is awaited. Ends without a result if the machine no longer waits."""
        delay_s = LABEL_FIRST_S
        while self._is_current(perform):
            observation = await self._observe(OBSERVE_S)
            if observation is not None and shown_by(observation):
                if self._is_current(perform):
                    self._report(perform, Returned(), observation)
                return
            if observation is not None:
                self._feed(observation)
            with anyio.move_on_after(delay_s):
                await self._wake.wait()
                self._wake.clear()
            delay_s = min(2 * delay_s, LABEL_LAST_S)

    def _is_current(self, perform: Perform) -> bool:
        activity = self._state().activity
        current = activity is not None and activity.call_id == perform.call_id
        return current and self._requested is None and not self._ending

    def _feed(self, observation: Observation) -> None:
        stalls = stalls_after(self._stalls, self._observed, observation)
        news = is_news(self._last_reported, observation, self._stalls, stalls)
        self._observed, self._stalls = observation, stalls
        if news:
            self._last_reported = observation
            self._handle(EngineObserved(at_ms=self._now_ms(), observation=observation))

    def _is_late(self) -> bool:
        """Whether the deadline of the requested call has passed. Its command is answered first, if it is not yet."""
        activity, now_ms = self._state().activity, self._now_ms()
        if activity is None or now_ms < activity.deadline_ms:
            return False
        if not activity.overdue:
            self._handle(Tick(at_ms=now_ms))
        return True

    async def _carry_out(self, perform: Perform) -> None:
        try:
            result: Returned | Fault = await self._perform(perform.call)
        except (Exception, asyncio.CancelledError) as error:
            if ends_this_task(error):
                raise
            result = fault_of(error)
        if isinstance(result, Fault):
            self._warn_if_unanswered(perform.call, result)
        result = checked_result(result)
        self._report(perform, result, await self._observe_effect(perform.call, result))

    async def _observe_effect(self, call: Call, result: Returned | Fault) -> Observation | None:
        """Observe the engine after a call. No command is late for it, or waits for it unless the call was its own."""
        if type(call) in SHOWS_NOTHING and isinstance(result, Returned):
            return None
        state = self._state()
        activity = state.activity
        if activity is None or activity.trigger is None:
            return None if state.queue else await self._observe(OBSERVE_S)
        left_s = (activity.deadline_ms - self._now_ms()) / 1000
        limited = not activity.overdue and left_s > 0
        return await self._observe(min(OBSERVE_S, left_s * OBSERVE_SHARE) if limited else OBSERVE_S)

    def _report(self, perform: Perform, result: Returned | Fault, observation: Observation | None) -> None:
        self._observed = self._last_reported = observation
        self._stalls = 0
        event = EngineReturned(at_ms=self._now_ms(), call_id=perform.call_id, result=result, observation=observation)
        self._handle(event)

    async def _perform(self, call: Call) -> Returned:
        if self._commanded is None:
            raise UnsupportedError("this agent only observes: it makes no calls.")
        if isinstance(call, _ONLY_OBSERVED):
            return _DONE  # the observation that follows is what was asked for
        if isinstance(call, _DISK_CALLS):
            if self._traces is None:
                raise UnsupportedError("this agent was started without a traces root, so it knows of no traces.")
            return await self._traces.perform(call)
        activity = self._state().activity
        commanded = activity is not None and activity.trigger is not None
        timeout_s = (activity.deadline_ms - self._now_ms()) / 1000 if activity is not None and commanded else 0.0
        return await self._commanded.perform(call, max(0.0, timeout_s))

    async def _observe(self, limit_s: float) -> Observation | None:
        """Observe the engine. None if that was cut short: by the end, by a command, or by a limit below OBSERVE_S."""
        if self._ending:
            return None
        with CancelScope(deadline=anyio.current_time() + limit_s) as scope:
            self._observing = scope
            try:
                observation = await self._engine.observe()
            except (Exception, asyncio.CancelledError) as error:
                if ends_this_task(error):
                    raise
                # Once the scope is cancelled, a cancellation of the backend's own is not one that the scope takes.
                if not (scope.cancel_called and isinstance(error, asyncio.CancelledError)):
                    return self._not_read(f"raised {fault_of(error).message}")
            else:
                if observation != self._observed and not is_readable(EngineObserved(at_ms=0, observation=observation)):
                    return self._not_read("returned what can't be recorded")
                self._unreadable = None
                if observation.running is not None:  # after a call it is not counted
                    self.counts = RequestCounts(running=observation.running, waiting=observation.waiting)
                return observation
        gave_way = self._requested is not None  # in the very moment in which its time was over
        if gave_way or limit_s < OBSERVE_S or anyio.current_time() < scope.deadline:
            return None
        return self._not_read(f"did not return within {OBSERVE_S:g} s")

    def _not_read(self, what: str) -> Observation:
        """Return an observation of an engine that can't be read: the same for as long as that lasts."""
        self.counts = RequestCounts()
        if self._unreadable is None:
            name = self._state().engine.name
            trouble = f"{name} can't be read: {type(self._engine).__name__}.observe {what}"
            self._unreadable = Observation(engine=name, tokenizer="unknown", trouble=trouble[:MESSAGE_MAX])
        return self._unreadable

    def _warn_of_trouble(self, observation: Observation) -> None:
        """Log an engine that can't be used from here, at once and then now and then: a person has to act."""
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
        waits = isinstance(call, UnloadAdapter) and fault.kind == "refused"  # for requests to end, as is usual
        if activity is not None and (activity.trigger is None or activity.overdue) and not (state.retries or waits):
            name, reason = type(call).__name__, fault.message
            logger.warning("agent %s: %s, which no command waits for, failed: %s", state.identity.agent, name, reason)


def checked_result(result: Returned | Fault) -> Returned | Fault:
    """Return the result, or a fault if no message could carry it or no journal could give it back."""
    if result == _DONE:
        return result
    event = EngineReturned(at_ms=0, call_id=1, result=result)
    if not is_readable(event):
        return Fault("engine_error", "the engine's backend returned what cannot be recorded.")
    if (size := len(encode(event))) > RESULT_BYTES:
        return Fault("engine_error", f"the engine's backend returned {size} bytes; the limit is {RESULT_BYTES}.")
    return result


def _has_label(label: str, observation: Observation) -> bool:
    return observation.label == label


def _idle_for(seconds: float) -> Callable[[Observation], bool]:
    """Return a function that says whether all that was observed for so long showed an engine without requests."""
    busy_at = anyio.current_time()

    def shown_by(observation: Observation) -> bool:
        nonlocal busy_at
        now = anyio.current_time()
        if observation.running != 0 or observation.waiting:
            busy_at = now
        return now - busy_at >= seconds

    return shown_by


def ends_this_task(error: BaseException) -> bool:
    """Whether the event loop itself ends this task. Any other cancellation here comes from a task of the backend."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def fault_of(error: BaseException) -> Fault:
    """Return why an engine did not do what it was asked. A backend may be a user's code, so all errors count."""
    match error:
        case CheckpointError():
            return Fault("source_refused", str(error)[:MESSAGE_MAX])
        case UnsupportedError():
            return Fault("unsupported", str(error)[:MESSAGE_MAX])
        case RefusedError():
            return Fault("refused", str(error)[:MESSAGE_MAX])
        case UnansweredError():
            return Fault("unanswered", str(error)[:MESSAGE_MAX])
        case EngineError():
            return Fault("engine_error", str(error)[:MESSAGE_MAX])
        case asyncio.CancelledError():
            return Fault("unanswered", "a task of the engine's backend was cancelled from within.")
    logger.debug("the engine's backend raised", exc_info=error)
    return Fault("engine_error", f"{type(error).__name__}: {error}"[:MESSAGE_MAX])


def is_readable(event: Event) -> bool:
    """Return whether a backend's value can be decoded again: a struct is checked then, not when it is built."""
    try:
        return event_decoder.decode(encode(event)) == event
    except DECODE_ERRORS + (TypeError,):
        return False
