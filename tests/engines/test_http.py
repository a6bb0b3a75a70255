"""The HTTP client of engine servers, against real servers that answer well, badly, or not at all."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from schemas.errors import ConfigError, RefusedError, UnansweredError
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from workers.engines import http
from workers.engines.api_key import api_key
from workers.engines.client import CallRefused
from workers.engines.http import ATTEMPTS, HttpClient, Route, base_url
from workers.engines.probe import probe

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

ROUTES = {
    "read": Route("GET", "/read", answer="value"),
    "once": Route("POST", "/once"),
    "again": Route("POST", "/again", repeatable=True),
    "asked": Route("POST", "/asked", query=True, renamed={"here": "there"}),
}
OPENAPI = {
    "paths": {
        "/read": {"get": {}},
        "/once": {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/x/Body"}}}}}},
        "/asked": {"post": {"parameters": [{"name": "there", "in": "query"}, {"name": "X-H", "in": "header"}]}},
    },
    "components": {"schemas": {"Body": {"properties": {"one": {}, "two": {}}}}},
}


async def ask(url: str, method: str, key: str | None = None, **arguments: object) -> object:
    client = HttpClient(url, ROUTES, info_path="/info", key=key)
    try:
        return await (client.read(method) if method == "read" else client.call(method, **arguments))
    finally:
        await client.close()


@asynccontextmanager
async def listening(serve: Callable[[SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that does with each connection what it wants."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        group.cancel_scope.cancel()


async def test_methods_and_their_parameters_are_read_from_the_openapi_document() -> None:
    with HttpServer(lambda _: (200, OPENAPI)) as server:
        client = HttpClient(server.url, ROUTES, info_path="/info")
        assert await client.methods() == {
            "read": frozenset(),
            "once": frozenset({"one", "two"}),
            "asked": frozenset({"there"}),
        }
        await client.close()
    assert await HttpClient(server.url, ROUTES, info_path="/info").methods() is None  # nothing listens any more


async def test_arguments_go_where_the_route_says() -> None:
    with HttpServer(lambda _: (200, {})) as server:
        await ask(server.url, "once", tags=["a"], flag=True)
        await ask(server.url, "asked", here=["a", "b"], flag=False)
    assert [(request.path, request.body) for request in server.requests] == [
        ("/once", b'{"tags":["a"],"flag":true}'),
        ("/asked?there=a&there=b&flag=false", b""),
    ]


async def test_a_refusal_carries_status_and_body() -> None:
    with HttpServer(lambda _: (400, "Flush cache failed. " * 100)) as server, pytest.raises(CallRefused) as refused:
        await ask(server.url, "again")
    assert refused.value.status == 400 and refused.value.body.startswith("Flush cache failed.")
    assert "/again answered 400: Flush" in str(refused.value) and len(str(refused.value)) < 700


@pytest.mark.parametrize(("method", "attempts"), [("read", ATTEMPTS), ("again", ATTEMPTS), ("once", 1)])
async def test_only_idempotent_requests_are_retried(method: str, attempts: int) -> None:
    with HttpServer(lambda _: None) as server, pytest.raises(UnansweredError, match=f"/{method} did not answer"):
        await ask(server.url, method)
    assert len(server.requests) == attempts


async def test_the_answer_to_a_second_attempt_is_returned() -> None:
    def second(_: HttpRequest) -> Reply:
        return None if len(server.requests) == 1 else (200, {"value": 7})

    with HttpServer(second) as server:
        assert await ask(server.url, "read") == 7


async def test_a_refusal_is_not_retried() -> None:
    with HttpServer(lambda _: (503, {"error": "no"})) as server, pytest.raises(CallRefused):
        await ask(server.url, "read")
    assert len(server.requests) == 1


@pytest.mark.every_loop
async def test_a_connection_serves_one_request_after_the_other_until_the_server_closes_it() -> None:
    served: list[int] = []

    async def serve(stream: SocketStream) -> None:
        accepted.append(None)
        number = len(accepted)
        async with stream:
            with suppress(anyio.EndOfStream):
                for _ in range(2):
                    await stream.receive()
                    served.append(number)
                    await stream.send(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"value":7}')

    accepted: list[None] = []
    async with listening(serve) as url:
        client = HttpClient(url, ROUTES, info_path="/info")
        assert [await client.read("read") for _ in range(3)] == [7, 7, 7]
        await client.close()
    assert served == [1, 1, 2]


@pytest.mark.every_loop
async def test_the_answer_to_a_request_that_was_cancelled_goes_to_no_other() -> None:
    asked, cancelled = anyio.Event(), anyio.Event()

    async def serve(stream: SocketStream) -> None:
        first = not asked.is_set()
        async with stream:
            await stream.receive()
            asked.set()
            if first:
                await cancelled.wait()
            with suppress(anyio.BrokenResourceError):
                await stream.send(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"value":%d}' % (1 if first else 2))

    async with listening(serve) as url:
        client = HttpClient(url, ROUTES, info_path="/info")
        async with anyio.create_task_group() as group:
            group.start_soon(client.read, "read")
            await asked.wait()
            group.cancel_scope.cancel()
        cancelled.set()
        assert await client.read("read") == 2
        await client.close()


@pytest.mark.every_loop
async def test_an_answer_that_is_too_large_is_not_read_on_and_its_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "ANSWER_BYTES", 100_000)
    closed = anyio.Event()

    async def serve(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            with suppress(anyio.BrokenResourceError):
                await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    await stream.send(bytes(65536))
        closed.set()

    async with listening(serve) as url:
        client = HttpClient(url, ROUTES, info_path="/info")
        with pytest.raises(UnansweredError, match="answered more than 100,000 bytes"):
            await client.call("once")
        await closed.wait()
        await client.close()


@pytest.mark.every_loop
@pytest.mark.parametrize(
    ("says", "error"), [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "ConnectError"), (b"", "ConnectTimeout")]
)
async def test_a_server_that_speaks_no_tls_is_no_connection(
    monkeypatch: pytest.MonkeyPatch, says: bytes, error: str
) -> None:
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 5.0 if says else 0.2)
    accepted: list[None] = []
    closed = anyio.Event()

    async def serve(stream: SocketStream) -> None:
        accepted.append(None)
        async with stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()
                await stream.send(says)
                await stream.receive()
        closed.set()

    async with listening(serve) as url:
        with pytest.raises(RefusedError, match=f"did not answer: {error}"):
            await ask(url.replace("http", "https"), "read")
        await closed.wait()
    assert len(accepted) == 1


async def test_the_key_is_sent_and_never_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    with HttpServer(lambda _: (401, "Unauthorized")) as server, pytest.raises(CallRefused) as refused:
        await ask(server.url, "once", key=api_key(tmp_path / "key"))
    assert [request.token for request in server.requests] == ["s3cret"] and "s3cret" not in str(refused.value)
    monkeypatch.setenv("ROLLOUTCTL_ENGINE_API_KEY", "other")
    assert api_key() == "other"
    monkeypatch.setenv("ROLLOUTCTL_ENGINE_API_KEY_FILE", str(tmp_path / "key"))
    assert api_key() == "s3cret"


@pytest.mark.parametrize("content", ["", "two\nlines", "ключ"])
def test_a_file_without_a_key_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match="holds no key"):
        api_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="can't be read"):
        api_key(tmp_path / "none")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://h:1", "http://", "http://h:1?a=b", "http://h:x", "http://ключ:1"]
)
def test_a_bad_url_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        base_url(url)


def test_a_key_in_a_url_is_refused_and_not_quoted() -> None:
    with pytest.raises(ConfigError) as refused:
        base_url("http://me:s3cret@h:8000")
    assert "s3cret" not in str(refused.value)


# --- rolloutctl engine probe ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "kind", "tokenizer", "note"),
    [
        (("/health", "/health_generate", "/ping"), "sglang", "absent", "node rank 0"),
        (("/v1/chat/completions",), "unknown", "unknown", "neither"),
        (("/generate", "/pause_generation"), "sglang", "absent", "no /server_info"),
    ],
)
async def test_probe_recognizes_a_server_by_its_routes(
    paths: tuple[str, ...], kind: str, tokenizer: str, note: str
) -> None:
    def answer(request: HttpRequest) -> Reply:
        known = request.path == "/openapi.json"
        return (200, {"paths": {path: {} for path in paths}}) if known else (404, {"detail": "no"})

    with HttpServer(answer) as server:
        found = await probe(server.url)
    assert (found.kind, found.tokenizer) == (kind, tokenizer) and note in found.note


async def test_probe_of_a_server_with_an_engines_routes_and_no_engines_answers() -> None:
    paths: dict[str, object] = {"/generate": {"post": {}}}
    with HttpServer(lambda request: (200, {"paths": paths} if "openapi" in request.path else {"ok": True})) as server:
        found = await probe(server.url)
    assert (found.kind, found.has) == ("unknown", ()) and "it is no engine" in found.note


async def test_probe_of_a_server_that_hides_its_routes_or_is_not_there() -> None:
    with HttpServer(lambda _: (404, "Not Found")) as server:
        assert "openapi.json" in (await probe(server.url)).note
    with pytest.raises(RefusedError):
        await probe(server.url)
