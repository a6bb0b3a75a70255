"""The tiny engine's data plane: how prompts reach it, in place of another engine's HTTP server.

It is no part of the bus. A client connects to a Unix socket, sends one request as a line of JSON, and reads the answer
as a line of JSON. While the engine is paused, clients wait for their completions, as they do with the real engines.

Needs no torch, so a client can run where torch is not installed.
"""

import socket
import socketserver
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from schemas.errors import EngineError
from schemas.events import Observation
from schemas.identity import Count, Label, Positive
from schemas.wire import DECODE_ERRORS

SCHEME: Final = "ipc://"
LINE_BYTES_MAX: Final = 1 << 20

T = TypeVar("T")


class Generate(Struct, frozen=True, kw_only=True, tag="generate"):
    """Continue each prompt by `max_tokens` tokens.

    Attributes:
        prompts: Token ids of each prompt, which are sampled together and so have the same length.
        max_tokens: Length of every completion; the tiny model has no end-of-sequence token.
        temperature: 0 takes the likeliest token each time.
        model: The version of a LoRA adapter, as `policy-v7`; empty for the base weights alone.
    """

    prompts: Annotated[list[list[Count]], Meta(max_length=1024)]
    max_tokens: Positive
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    model: Label = ""


class DescribeEngine(Struct, frozen=True, tag="describe_engine"):
    """Ask what the engine is and does. Answered even while it is paused, and changes nothing."""


class Completion(Struct, frozen=True, kw_only=True):
    """The completion of one prompt.

    Attributes:
        versions: For each token, the version of the weights that it was drawn from. They differ if the request was
            frozen during a weight sync.
        finish_reason: `abort` when it was ended early; `tokens` are those it had by then.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: Literal["length", "abort"]


class Completions(Struct, frozen=True, tag="completions"):
    """The answer to `Generate`, in the order of its prompts."""

    completions: list[Completion]


class EngineDescription(Struct, frozen=True, tag="engine"):
    """The answer to `DescribeEngine`. Its digest is that of the live tensors (`schemas.safetensors.digest`)."""

    observation: Observation


class RequestRefused(Struct, frozen=True, tag="refused"):
    """The engine did not serve the request; the message says why."""

    message: str


Request = Generate | DescribeEngine
Answer = Completions | EngineDescription | RequestRefused

_request_decoder = msgspec.json.Decoder(Request)
_answer_decoder = msgspec.json.Decoder(Answer)


class TinyServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Serves clients at one address until `close`, each connection on a thread of its own. Raises EngineError."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, respond: Callable[[Request], Answer]) -> None:
        self.respond = respond
        path = _path(address)
        try:
            if path.is_socket():
                path.unlink()
            super().__init__(str(path), _Connection)
        except OSError as error:
            raise EngineError(f"the tiny engine can't listen at {address}: {error.strerror or error}.") from error
        # It checks every 0.1 s whether it should end.
        self._thread = Thread(target=self.serve_forever, args=(0.1,), name="tiny-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more clients."""
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Connection(socketserver.StreamRequestHandler):
    server: TinyServer

    def handle(self) -> None:
        with suppress(OSError):  # the client has gone, and loses its answer
            line = self.rfile.readline(LINE_BYTES_MAX)
            self.wfile.write(msgspec.json.encode(self._answer(line)) + b"\n")

    def _answer(self, line: bytes) -> Answer:
        try:
            return self.server.respond(_request_decoder.decode(line))
        except EngineError as error:
            return RequestRefused(str(error))
        except DECODE_ERRORS as error:
            return RequestRefused(f"the request can't be read: {error}.")


class TinyClient:
    """Sends requests to a tiny engine from blocking code. Any thread may use it; each call opens a connection.

    Args:
        address: `ipc://PATH` that the engine listens at.
        timeout_s: Limit of each call.
    """

    def __init__(self, address: str, timeout_s: float = 60.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 1.0, model: str = ""
    ) -> list[Completion]:
        """Continue each prompt, as `Generate` says. Waits while the engine is paused.

        Args:
            prompts: Tokens of each prompt.
            max_tokens: Tokens to add to each.
            temperature: 0 takes the likeliest token.
            model: The version of a LoRA adapter; empty for the base weights alone.

        Raises:
            EngineError: The engine refused the request, or did not answer in time.
        """
        tokens = [list(prompt) for prompt in prompts]
        request = Generate(prompts=tokens, max_tokens=max_tokens, temperature=temperature, model=model)
        return self._ask(request, Completions).completions

    def describe(self) -> Observation:
        """Return what the engine is, does and holds now. Raises EngineError when it does not answer in time."""
        return self._ask(DescribeEngine(), EngineDescription).observation

    def _ask(self, request: Request, kind: type[T]) -> T:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(str(_path(self.address)))
                connection.sendall(msgspec.json.encode(request) + b"\n")
                with connection.makefile("rb") as lines:
                    line = lines.readline()
        except OSError as error:
            raise EngineError(
                f"the engine at {self.address} did not answer within {self._timeout_s:g} s ({error}). It is paused, "
                "busy or gone; it may still compute what was asked."
            ) from error
        if not line.endswith(b"\n"):
            raise EngineError(f"the engine at {self.address} closed the connection without an answer.")
        answer = _answer_decoder.decode(line)
        if isinstance(answer, kind):
            return answer
        raise EngineError(f"the engine at {self.address} refused: {getattr(answer, 'message', answer)}")


def _path(address: str) -> Path:
    if not address.startswith(SCHEME):
        raise EngineError(f"the tiny engine is reached at {SCHEME}PATH, not at {address!r}.")
    return Path(address.removeprefix(SCHEME))
