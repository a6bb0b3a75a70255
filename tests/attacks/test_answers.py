"""Engine servers whose answers are endless, slow, deep, packed or of another shape: one error, in time, and no more."""

import gzip
import select
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from schemas.errors import EngineError, UnansweredError
from schemas.identity import Identity
from tests.engines.http_servers import HttpServer
from workers.engines import http
from workers.engines.http import ANSWER_BYTES, HttpClient, Route
from workers.engines.probe import probe
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.server import SGLangServer
from workers.router import RouterRegistration

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PACKED = gzip.compress(b" " * (64 << 20), 1)
ROUTES = {"read": Route("GET", "/read"), "once": Route("POST", "/once")}


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that writes what it wants to each connection, on a thread for each."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.recv(65536)
            answer(peer)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def endless(peer: socket.socket) -> None:
    peer.sendall(HEAD + b"\r\n[")
    while True:
        peer.sendall(b"[]," * 20_000)


def endless_headers(peer: socket.socket) -> None:
    peer.sendall(HEAD)
    while True:
        peer.sendall(b"X-More: %s\r\n" % (b"x" * 1000))


def dripping(peer: socket.socket) -> None:
    peer.sendall(HEAD + b"\r\n[")
    for _ in range(600):
        peer.sendall(b" ")
        select.select([peer], [], [], 0.05)


def silent(peer: socket.socket) -> None:
    peer.recv(1)


def packed(peer: socket.socket) -> None:
    peer.sendall(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED)


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        *(("read", answer) for answer in (endless, endless_headers, dripping, silent, packed)),
        *(("once", answer) for answer in (endless, endless_headers, dripping, packed)),  # a call may take any time
    ],
)
async def test_an_answer_is_bounded_in_bytes_and_time(
    answer: Callable[[socket.socket], None], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "READ_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http, "BODY_S", 0.5)
    with raw_server(answer) as url:
        client = HttpClient(url, ROUTES, info_path="/info")
        tracemalloc.start()
        try:
            with anyio.fail_after(30), pytest.raises(UnansweredError) as refused:
                await (client.read(method) if method == "read" else client.call(method))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            await client.close()
    assert peak < 4 * ANSWER_BYTES
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 200_000,
        b"{" + b'"paths":{' * 100_000,
        b"5",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"paths": 5}',
        b'{"paths": {"/pause_generation": 5}}',
        b'{"paths": {"/pause_generation": {"post": 5}}}',
        b'{"paths": {"/pause_generation": {"post": {"parameters": 5, "requestBody": [1]}}}}',
        b'{"paths": {"/pause_generation": {"post": {"parameters": [5, {"in": "query"}]}}}}',
        b'{"paths": {"/pause_generation": {"post": {"requestBody": {"content": {"application/json": 7}}}}}}',
        b'{"paths": {"/pause_generation": {"post": {}}}, "components": 5, "tp_size": 1e999, "node_rank": 1e400}',
        b'{"paths": {"/flush_cache": {"post": {}}}, "tp_size": %s, "random_seed": [[[[5]]]]}' % (b"9" * 4000),
    ],
)
async def test_an_answer_of_another_shape_is_a_state_or_an_error_of_ours(document: bytes, tmp_path: Path) -> None:
    with HttpServer(lambda _: (200, document)) as server:
        engine = SGLangEngine(
            Identity(replica=0, node_rank=0), SGLangServer(server.url), checkpoints=tmp_path, traces=tmp_path
        )
        observation = await engine.observe()
        assert observation.tokenizer in ("present", "absent", "unknown")
        await engine.close()
        with suppress(EngineError):
            await probe(server.url)
        router = RouterRegistration(server.url, "http://127.0.0.1:1")
        with pytest.raises(EngineError, match="no list of workers"):
            await router.step(lambda _: True)
        await router.close()
