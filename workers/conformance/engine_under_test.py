"""An engine under test: calls to it, requests of a client of it, and what it says of itself."""

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from schemas import events
from schemas.errors import EngineError, RolloutctlError
from schemas.identity import Operation
from workers.driver import checked_result, is_readable
from workers.engine import Engine

SHORT: Final = 8
"""Tokens of a request that only shows which weights answer."""
LONG_S: Final = 2.0
"""Seconds that a request lasts which is to be running when a call comes."""
LONG_MAX: Final = 1024
"""Most tokens of the first such request. Halved until the engine accepts it."""
LENGTHENED_MAX: Final = 16_384
"""Most tokens of one that is tried again because it ended before the call came."""
ROUNDS: Final = 10
"""Times that a request is looked at while it may still hand out what it made before a pause."""
OBSERVE_S: Final = 10.0
"""Longest time that an observation may take: the agent makes no call meanwhile."""
PROMPT: Final = (1, 2, 3, 4)
Tokens = tuple[int, ...]


class CheckResult(NamedTuple):
    """What is wrong, one clause each, empty if nothing is; and what was seen."""

    faults: Sequence[str]
    seen: str


def if_true(wrong: object, fault: str) -> tuple[str, ...]:
    """Return the fault if something is wrong, for a list of them."""
    return (fault,) if wrong else ()


class GenerationClient(Protocol):
    """A client of the engine. An agent needs none; the kit does, to see what the engine does."""

    def generate(self, prompt: Sequence[int], max_tokens: int, model: str = "", /) -> AsyncIterator[int]:
        """Yield greedy tokens as they are made, `max_tokens` unless the request is aborted. Raises if it is refused.

        Only an engine that takes LoRA adapters is given a `model`: the version of one, and never an empty text.
        """
        ...


class Setup(Struct, frozen=True, kw_only=True):
    """What the kit may use.

    Attributes:
        root: Root of the checkpoints. Spoiled ones are written there, and removed.
        checkpoints: Two of the engine's model, with different weights, relative to `root`; None if there are none.
        traces: Root of the traces.
        silence_s: Time without a token after which a request counts as stopped. Longer for a slow engine.
        up_within_s: Time for an engine to be ready.
        call_s: Longest time that one call may take.
        request_s: Longest time that one request may take.
    """

    root: Path
    checkpoints: tuple[str, str] | None
    traces: Path
    silence_s: float = 0.25
    up_within_s: float = 10.0
    call_s: float = 300.0
    request_s: float = 60.0


class EngineLost(EngineError):
    """The engine serves no more, so nothing further can be judged."""


class ClientRequest:
    """A request in flight."""

    def __init__(self, client: GenerationClient, prompt: Sequence[int], asked: int, model: str) -> None:
        self.prompt, self.asked = prompt, asked
        self._stream = client.generate(prompt, asked, *([model] if model else ()))
        self.tokens: list[int] = []
        self.error = ""
        self.begun, self.over = anyio.Event(), anyio.Event()

    @property
    def ended(self) -> bool:
        return self.over.is_set()

    def cut_short(self) -> tuple[str, ...]:
        """Return what is wrong with a request that nothing should have ended."""
        got = f"a running request got {len(self.tokens)} of {self.asked} tokens"
        return if_true(len(self.tokens) < self.asked, got)

    async def run(self) -> None:
        try:
            async for token in self._stream:
                self.tokens.append(token)
                self.begun.set()
        except Exception as error:  # a user's client may raise anything
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.begun.set()
            self.over.set()


class EngineUnderTest:
    """One engine and a client of it.

    Attributes:
        operations: What the engine listed at first.
        expected: Tokens of PROMPT, under the weights that it holds now.
        long: Tokens of a long request.
        silence_s: Time without a token after which a request counts as stopped.
        observations: All that were made, each with the state that the engine was in.
        problems: Observations that failed, took long, or can't be recorded.
    """

    def __init__(self, engine: Engine, client: GenerationClient, setup: Setup, tasks: TaskGroup) -> None:
        self._engine, self._client, self._setup, self._tasks = engine, client, setup, tasks
        self.operations: frozenset[Operation] = frozenset()
        self.silence_s = setup.silence_s
        self.long = LONG_MAX
        self.expected: Tokens = ()
        self.observations: list[tuple[str, events.Observation]] = []
        self.problems: list[str] = []
        self._fresh = itertools.count(1)

    async def memory_bytes(self) -> int | None:
        """Return the bytes of memory that the engine holds and can release; None if its client can't measure them."""
        measure = getattr(self._client, "memory_bytes", None)
        return None if measure is None else await measure()

    async def perform(self, call: events.EngineCall, timeout_s: float | None = None) -> events.Returned:
        with anyio.move_on_after(self._setup.call_s):
            returned = await self._engine.perform(call, self._setup.call_s if timeout_s is None else timeout_s)
            if not isinstance(returned, events.Returned) or checked_result(returned) != returned:
                raise EngineError(f"{type(call).__name__} returned {returned!r}, which no log can record")
            return returned
        raise EngineLost(f"{type(call).__name__} did not return within {self._setup.call_s:g} s")

    async def answer(self, call: events.EngineCall) -> str:
        """Make a call that may fail. Returns what came of it."""
        try:
            await self.perform(call)
        except Exception as error:  # a user's backend may raise anything
            return f"raised {type(error).__name__}"
        return "was accepted"

    async def observe(self, state: str) -> events.Observation:
        began = time.monotonic()
        try:
            observed = await self._engine.observe()
        except Exception as error:  # a user's backend may raise anything
            self.problems.append(f"{state}: observe raised {type(error).__name__}: {error}")
            return events.Observation(engine="unknown", tokenizer="unknown")
        if (took := time.monotonic() - began) > OBSERVE_S:
            self.problems.append(f"{state}: observe took {took:.1f} s")
        event = events.EngineObserved(at_ms=0, observation=observed)
        if not isinstance(observed, events.Observation) or not is_readable(event):
            self.problems.append(f"{state}: observe returned {observed!r}, which no log can record")
            return events.Observation(engine="unknown", tokenizer="unknown")
        self.observations.append((state, observed))
        return observed

    async def rest(self) -> None:
        """Have the engine awake and running, as it is before every check."""
        try:
            observed = await self.observe("before a check")
            if observed.asleep:
                await self.perform(events.Wake(observed.asleep))
            if observed.generating is not True and Operation.RESUME in self.operations:
                await self.perform(events.Resume())
            self.expected = await self.tokens()
        except EngineError as error:
            raise EngineLost(f"the engine serves no more: {error}") from error

    def start(self, prompt: Sequence[int], asked: int, model: str = "") -> ClientRequest:
        request = ClientRequest(self._client, prompt, asked, model)
        self._tasks.start_soon(request.run)
        return request

    async def begin_long(self, model: str = "") -> ClientRequest:
        """Start a long request, shorter if the engine refuses it, and wait for its first token."""
        while True:
            request = self.start((next(self._fresh) % 31 + 1, *PROMPT), self.long, model)
            with anyio.fail_after(self._setup.request_s):
                await request.begun.wait()
            if request.tokens:
                return request
            if self.long <= SHORT:
                raise EngineError(f"a request was not served: {request.error or 'it ended without a token'}")
            self.long //= 2

    def lengthen(self) -> None:
        """Have long requests last longer: the last one ended before a call came."""
        self.long = min(LENGTHENED_MAX, 2 * self.long)

    async def end(self, *requests: ClientRequest) -> None:
        with anyio.move_on_after(self._setup.request_s):
            for request in requests:
                await request.over.wait()

    async def tokens(self, prompt: Sequence[int] = PROMPT, model: str = "") -> Tokens:
        """Tokens of one prompt. Raises EngineError if it is not served."""
        request = self.start(prompt, SHORT, model)
        await self.end(request)
        if not request.ended or request.error:
            reason = request.error or f"it did not end within {self._setup.request_s:g} s"
            raise EngineError(f"a request was not served: {reason}")
        return tuple(request.tokens)

    async def continued(self, request: ClientRequest, since: int, model: str = "") -> tuple[Tokens, Tokens]:
        """Wait for a request's end. Returns its last tokens, and those that now follow the same beginning.

        Nothing of one that was about to end when it had made `since`: they would say nothing of what happened then.
        """
        await self.end(request)
        kept = len(request.tokens) - SHORT
        if kept < since:
            return (), ()
        return tuple(request.tokens[kept:]), await self.tokens((*request.prompt, *request.tokens[:kept]), model)

    async def tokens_after(self, model: str = "") -> Tokens:
        """Tokens of PROMPT after a call, as far as they come."""
        request = self.start(PROMPT, SHORT, model)
        await self.end(request)
        return tuple(request.tokens)

    async def changed(self) -> tuple[str, ...]:
        """Return what is wrong with the tokens of PROMPT, which should be as before."""
        before, after = self.expected, await self.tokens_after()
        if len(after) < len(before):
            return (f"afterwards a request got {len(after)} of {len(before)} tokens",)
        return if_true(after != before, "afterwards the same prompt had other tokens")

    async def measure(self) -> tuple[Tokens, int]:
        """Learn how fast the engine is, and how long a request may be. Returns tokens of PROMPT, and that length."""
        first = await self.tokens()  # a server that was just launched is slow to answer it
        began = time.monotonic()
        await self.tokens()
        took_s = time.monotonic() - began
        self.silence_s = max(self._setup.silence_s, took_s)
        self.long = min(LONG_MAX, max(4 * SHORT, int(LONG_S / took_s * SHORT)))
        request = await self.begin_long()
        await self.end(request)
        return first, len(request.tokens)

    async def has_ended(self, request: ClientRequest) -> bool:
        """Return whether a request that the engine has ended ends for its client too, which may be a while behind."""
        with anyio.move_on_after(ROUNDS * self.silence_s):
            await request.over.wait()
        return request.ended

    async def is_silent(self, request: ClientRequest) -> bool:
        for _ in range(ROUNDS):
            before = len(request.tokens)
            await anyio.sleep(self.silence_s)
            if len(request.tokens) == before:
                return True
        return False

    async def late(self) -> ClientRequest:
        """Send a request that must get no token now."""
        request = self.start((next(self._fresh) % 31 + 1, *PROMPT), SHORT)
        await anyio.sleep(self.silence_s)
        return request


@asynccontextmanager
async def opened(engine: Engine, up_within_s: float) -> AsyncIterator[events.Observation]:
    """Open an engine and wait until it can be commanded. Raises EngineError if it can't."""
    try:
        await engine.open()
    except RolloutctlError:
        raise
    except Exception as error:  # a user's backend may raise anything
        raise EngineError(f"open raised {type(error).__name__}: {error}") from error
    try:
        observed = await engine.observe()
        with anyio.move_on_after(up_within_s):
            while observed.tokenizer == "unknown":
                await anyio.sleep(0.2)
                observed = await engine.observe()
        if observed.tokenizer != "present":
            reason = observed.trouble or f"its tokenizer is {observed.tokenizer} after {up_within_s:g} s"
            raise EngineError(f"{observed.engine} can't be commanded from here: {reason}.")
        yield observed
    finally:
        with anyio.CancelScope(shield=True):
            await engine.close()
