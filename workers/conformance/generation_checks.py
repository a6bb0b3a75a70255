"""Checks of the calls that stop and continue generation, by the tokens that clients get."""

from typing import Final, Literal

import anyio

from schemas import events
from schemas.errors import EngineError, UnsupportedError
from schemas.identity import InFlight, Operation
from workers.conformance.engine_under_test import SHORT, CheckResult, ClientRequest, EngineUnderTest, if_true

ATTEMPTS: Final = 5
"""Times that a call is tried on a running request, which may end by itself before the call comes."""


class GenerationChecks:
    """Each check begins with an engine that serves, and leaves it serving."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self._engine = engine

    async def generate(self) -> tuple[CheckResult, ...]:
        """The same prompt twice."""
        first, longest = await self._engine.measure()
        again = await self._engine.tokens_after()
        other = "the same prompt had other tokens the second time, so no weights can be told from others"
        faults = (
            *if_true(len(first) < SHORT, f"a request of {SHORT} tokens got {len(first)}"),
            *if_true(first != again, other),
        )
        return (CheckResult(faults, f"the same tokens twice; requests of up to {longest} tokens"),)

    async def pause(self, mode: InFlight) -> tuple[CheckResult, ...]:
        """A pause with a request running, a request sent after it, and a resume."""
        engine = self._engine
        for _ in range(ATTEMPTS):
            request = await engine.begin_long()
            await engine.perform(events.Pause(mode))
            at_return = len(request.tokens)
            observed = await engine.observe(f"paused ({mode})")
            if mode != "keep":
                await engine.has_ended(request)
            silent, ended = await engine.is_silent(request), request.ended
            counted = (await engine.observe("paused")).generated
            late = await engine.late()
            early, grown = len(late.tokens), (await engine.observe("paused")).generated
            await engine.perform(events.Resume())
            await engine.end(request, late)
            if mode == "wait" or not ended or len(request.tokens) < request.asked:
                break
            engine.lengthen()
        growth = grown - counted if grown is not None and counted is not None else 0
        faults = (
            *if_true(observed.generating, "it reports that it still generates"),
            *if_true(not silent, "tokens kept coming after the pause had returned"),
            *if_true(early, f"a request that was sent while it was paused got {early} tokens"),
            *if_true(growth, f"its own counter grew by {growth} tokens while it was paused"),
            *_running_request(mode, request, ended),
        )
        made, asked = len(request.tokens), request.asked
        seen = {
            "abort": f"the running request ended after {made} of {asked} tokens; then no token came",
            "wait": f"the running request got all {asked} tokens; then no token came",
            "keep": f"no token after {at_return}; after the resume the request got all {asked}",
        }
        return (CheckResult(faults, seen[mode]),)

    async def resume(self) -> tuple[CheckResult, ...]:
        """A resume after a pause. A request sent in between is held, or refused."""
        engine = self._engine
        await engine.perform(events.Pause("abort"))
        held = await engine.late()
        await engine.perform(events.Resume())
        observed = await engine.observe("resumed")
        await engine.end(held)
        got = f"{len(held.tokens)} of {SHORT} tokens"
        short = len(held.tokens) < SHORT and not held.error
        faults = (
            *if_true(observed.generating is False, "it reports that it is still paused"),
            *if_true(short, f"a request that was sent during the pause got {got}"),
            *await engine.changed(),
        )
        seen = f"a request was refused during the pause ({held.error})" if held.error else f"a held request got {got}"
        return (CheckResult(faults, f"{seen}; the next one was served"),)

    async def abort(self) -> tuple[CheckResult, ...]:
        """An abort with a request running, and a request after it."""
        engine = self._engine
        for _ in range(ATTEMPTS):
            request = await engine.begin_long()
            await engine.perform(events.Abort())
            await engine.has_ended(request)
            if len(request.tokens) < request.asked:
                break
            engine.lengthen()
        observed = await engine.observe("after an abort")
        faults = (
            *_running_request("abort", request, request.ended),
            *if_true(observed.generating is False, "it reports that it is paused, which an abort must not do"),
            *await engine.changed(),
        )
        got = f"{len(request.tokens)} of {request.asked} tokens"
        return (CheckResult(faults, f"the running request ended after {got}; the next one was served"),)

    async def repeat(self) -> tuple[CheckResult, ...]:
        """Make those calls twice that an agent makes again if it died during the first."""
        calls: dict[Operation, events.EngineCall] = {
            Operation.ABORT: events.Abort(),
            Operation.PAUSE: events.Pause("abort"),
            Operation.FLUSH: events.Flush(),
            Operation.RESUME: events.Resume(),
        }
        offered = {operation: call for operation, call in calls.items() if operation in self._engine.operations}
        errors = []
        for operation, call in offered.items():
            await self._engine.perform(call)
            try:
                await self._engine.perform(call)
            except EngineError as error:
                errors.append(f"a second {operation} failed: {error}")
        return (CheckResult((*errors, *await self._engine.changed()), f"{', '.join(offered)}, each twice"),)

    async def unanswered(self, how: Literal["late", "cancelled"]) -> tuple[CheckResult, ...]:
        """A pause that waits for a long request, and is given too little time or is abandoned by its caller."""
        engine = self._engine
        request = await engine.begin_long()
        error = "cancelled"
        with anyio.move_on_after(None if how == "late" else engine.silence_s / 2):
            try:
                await engine.perform(events.Pause("wait"), 0.05 if how == "late" else None)
                error = ""
            except UnsupportedError:
                raise
            except EngineError as raised:
                error = str(raised)
        # The client may get its last tokens after the engine has made them.
        holds = bool(error) or (await engine.has_ended(request) and len(request.tokens) == request.asked)
        if Operation.ABORT in engine.operations:
            await engine.perform(events.Abort())
        await engine.perform(events.Pause("abort"))
        observed = await engine.observe(f"after a {how} call")
        late = await engine.late()
        paused = not late.tokens and observed.generating is not True
        await engine.perform(events.Resume())
        await engine.end(request, late)
        faults = (
            *if_true(not holds, "it returned before the running request had ended"),
            *if_true(not paused, "the next pause did not hold"),
            *await engine.changed(),
        )
        return (CheckResult(faults, f"{error or 'it returned when the request had ended'}; later calls were answered"),)


def _running_request(mode: InFlight, request: ClientRequest, ended: bool) -> tuple[str, ...]:
    """What is wrong with the end of a request that was running. `ended`: before anything was resumed."""
    got, complete = f"{len(request.tokens)} of {request.asked} tokens", len(request.tokens) >= request.asked
    if mode == "abort":
        if complete:
            return (f"the running request was not aborted: it got all {request.asked} tokens",)
        return if_true(not ended, "the running request was not ended")
    if mode == "wait":
        return if_true(not (ended and complete), f"it did not wait for the running request, which got {got}")
    if ended:
        return (f"it ended the running request at {got}",)
    return if_true(not complete, f"the frozen request did not continue: it got {got}")
