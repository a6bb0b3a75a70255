"""The front end of the tiny engine: how prompts reach it, in the place of another engine's HTTP server.

This is the engine's own data plane and no part of the bus. A request is `number, body` on a DEALER and so is the
answer; the number is the client's and comes back as it was. Bodies are tagged MessagePack maps. A request holds many
prompts, and they are sampled together. While the engine is paused it answers no prompts: clients wait, as with the
real ones.

Needs no torch, so a client can live where none is.
"""

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Annotated, Literal, Protocol, Self, TypeVar, assert_never

import anyio
import msgspec
import zmq
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from msgspec import Meta, Struct

from schemas.carriers.sockets import FRAME_BYTES_MAX, EdgeSocket, agent_dealer, bus_router
from schemas.carriers.wakeup import Wakeup
from schemas.errors import EngineError, RolloutctlError
from schemas.identity import Count, Name, Positive

T = TypeVar("T")

_HOSTILE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)


class Generate(Struct, frozen=True, kw_only=True, tag="generate"):
    """Continue each prompt by `max_tokens` tokens.

    temperature: 0 takes the likeliest token each time.   seed: the same one gives the same tokens, from the same
    weights, whatever else runs; None draws one.
    """

    prompts: list[list[Count]]
    max_tokens: Positive
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None


class AskWeights(Struct, frozen=True, tag="ask_weights"):
    """Which weights does the engine hold? Answered while paused, too."""


class Completion(Struct, frozen=True, kw_only=True):
    """What became of one prompt.

    logprobs: of each token, under the distribution that it was drawn from.   finish_reason: `abort` when it was ended
    early; the tokens are those it had.   version: of the weights held when it ended.   versions: of the weights that
    each token was drawn from; they differ when it was frozen through a weight sync.
    reused: tokens of the prompt that were not computed but found in the cache.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["length", "abort"]
    version: Count
    versions: list[int]
    reused: Count = 0


class Completions(Struct, frozen=True, tag="completions"):
    """The answer to `Generate`, in the order of its prompts."""

    completions: list[Completion]


class Weights(Struct, frozen=True, kw_only=True, tag="weights"):
    """The answer to `AskWeights`. digest: content digest of the live tensors, as `schemas.safetensors.format` defines
    it.
    """

    version: Count
    digest: Name


class Refused(Struct, frozen=True, tag="refused"):
    """The engine did not take the request; the text says why."""

    message: str


Answer = Completions | Weights | Refused

_request_decoder = msgspec.msgpack.Decoder(Generate | AskWeights)
_answer_decoder = msgspec.msgpack.Decoder(Answer)

Answered = Callable[[list[Completion] | RolloutctlError], None]
"""Told once what became of a request, on the engine's thread. Must neither block nor raise."""


class Front(Protocol):
    """What the server needs of an engine. Both may be called from any thread."""

    def submit(self, asked: Generate, done: Answered) -> object:
        """Queue a request. Raises EngineError when it can't be served."""
        ...

    def held(self) -> Weights:
        """The weights that the engine holds."""
        ...


class TinyServer:
    """Answers clients at one address, on an event loop and thread of its own. `start` it once, then `close` it."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._open = ExitStack()
        self._outbox: deque[tuple[bytes, bytes, Answer]] = deque()

    def start(self, address: str) -> str:
        """Bind, serve, and return the address with the port that the system chose. Blocks for some milliseconds.

        Raises AddressInUse, BusAddressError.
        """
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name="tiny-server"))
            serving, bound = portal.start_task(self._serve, address)
            stack.callback(serving.cancel)
            self._open = stack.pop_all()
        return str(bound)

    def close(self) -> None:
        """Stop serving. Requests under way get no answer. May be called twice."""
        self._open.close()

    async def _serve(self, address: str, *, task_status: TaskStatus[str]) -> None:
        wakeup = Wakeup()
        try:
            async with bus_router(zmq.Context.instance(), address) as router, anyio.create_task_group() as tasks:
                tasks.start_soon(self._send, router, wakeup)
                task_status.started(router.address)
                while True:
                    frames = await router.recv()
                    if len(frames) == 3:  # else no client of ours, and there is no number to answer to
                        self._take(wakeup, *frames)
        finally:
            wakeup.close()

    def _take(self, wakeup: Wakeup, client: bytes, number: bytes, body: bytes) -> None:
        def answer(answer: Answer) -> None:
            self._outbox.append((client, number, answer))
            wakeup.notify()

        def done(result: list[Completion] | RolloutctlError) -> None:
            answer(Refused(str(result)) if isinstance(result, RolloutctlError) else Completions(result))

        try:
            asked = _request_decoder.decode(body)
            match asked:
                case Generate():
                    self._front.submit(asked, done)
                case AskWeights():
                    answer(self._front.held())
                case _:
                    assert_never(asked)
        except EngineError as error:
            answer(Refused(str(error)))
        except _HOSTILE as error:
            answer(Refused(f"the request can't be read: {error}."))

    async def _send(self, router: EdgeSocket, wakeup: Wakeup) -> None:
        while True:
            await wakeup.wait()
            while self._outbox:
                client, number, answer = self._outbox.popleft()
                body = msgspec.msgpack.encode(answer)
                if len(body) > FRAME_BYTES_MAX:
                    size = f"{len(body):,} bytes; at most {FRAME_BYTES_MAX:,} are sent"
                    body = msgspec.msgpack.encode(Refused(f"the answer has {size}. Ask for fewer prompts at once."))
                # A client that went away, or does not read what it asked for, loses its answer.
                router.send_nowait([client, number, body])


class TinyClient:
    """Asks a tiny engine from blocking code. One call at a time; give each thread a client of its own.

    address: what the engine listens on. It need not listen yet.   timeout_s: for each call.
    Use as a context manager, or `close` it: it has a thread.
    """

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="tiny-client"))
            routing_id = b"tiny/" + secrets.token_bytes(16)
            self._dealer = self._portal.call(agent_dealer, zmq.Context.instance(), address, routing_id)
            stack.callback(self._portal.call, self._dealer.close, 0)
            self._open = stack.pop_all()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 1.0, seed: int | None = None
    ) -> list[Completion]:
        """Continue each prompt; see `Generate`. Waits while the engine is paused.

        Raises EngineError when the engine refuses, or did not answer in time.
        """
        asked = Generate(
            prompts=[list(prompt) for prompt in prompts], max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        return self._ask(asked, Completions).completions

    def weights(self) -> Weights:
        """The weights that the engine holds now. Raises EngineError when it did not answer in time."""
        return self._ask(AskWeights(), Weights)

    def close(self) -> None:
        """Let go of the engine. May be called twice."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, asked: Generate | AskWeights, kind: type[T]) -> T:
        with self._lock:
            future = self._portal.start_task_soon(self._exchange, msgspec.msgpack.encode(asked))
            try:
                answer = future.result()
            except BaseException:
                future.cancel()  # Ctrl-C must not leave the call running behind its caller
                raise
        if isinstance(answer, kind):
            return answer
        raise EngineError(f"the engine at {self.address} refused: {getattr(answer, 'message', answer)}")

    async def _exchange(self, body: bytes) -> Answer:
        number = next(self._numbers).to_bytes(8, "big")
        with anyio.move_on_after(self._timeout_s):
            await self._dealer.send([number, body])
            while (frames := await self._dealer.recv())[0] != number:
                pass  # the answer to a call that was given up
            answer: Answer = _answer_decoder.decode(frames[1])
            return answer
        raise EngineError(
            f"the engine at {self.address} did not answer within {self._timeout_s:g} s. It is paused, busy, or not "
            "there; what was asked may still be computed."
        )
