"""The one HTTP client, against real servers that answer well, badly, late or not at all."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from workers.engines.client import CallRefused, Unanswered
from workers.engines.http import ATTEMPTS, HttpClient, Route, api_key, base_url
from workers.engines.probe import probe

pytestmark = pytest.mark.anyio

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

Handle = Callable[[BaseHTTPRequestHandler, bytes], None]


@contextmanager
def serving(handle: Handle) -> Iterator[str]:
    """A server on the loopback that answers each request with `handle(request, body)`."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            handle(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def answer(request: BaseHTTPRequestHandler, status: int, body: object) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(raw)))
    request.end_headers()
    request.wfile.write(raw)


async def ask(url: str, method: str, key: str | None = None, **arguments: object) -> object:
    front = HttpClient(url, ROUTES, info_path="/info", key=key)
    try:
        return await (front.read(method) if method == "read" else front.call(method, **arguments))
    finally:
        await front.close()


async def test_it_knows_what_a_server_says_that_it_takes() -> None:
    with serving(lambda request, _: answer(request, 200, OPENAPI)) as url:
        front = HttpClient(url, ROUTES, info_path="/info")
        assert await front.methods() == {
            "read": frozenset(),
            "once": frozenset({"one", "two"}),
            "asked": frozenset({"there"}),
        }
        await front.close()
    assert await HttpClient(url, ROUTES, info_path="/info").methods() is None  # nobody is there any more


async def test_arguments_go_where_the_route_says() -> None:
    seen: list[tuple[str, bytes]] = []

    def handle(request: BaseHTTPRequestHandler, body: bytes) -> None:
        seen.append((request.path, body))
        answer(request, 200, {})

    with serving(handle) as url:
        await ask(url, "once", tags=["a"], flag=True)
        await ask(url, "asked", here=["a", "b"], flag=False)
    assert seen == [("/once", b'{"tags":["a"],"flag":true}'), ("/asked?there=a&there=b&flag=false", b"")]


async def test_refusal_carries_status_and_words() -> None:
    with (
        serving(lambda request, _: answer(request, 400, "Flush cache failed. " * 100)) as url,
        pytest.raises(CallRefused) as refused,
    ):
        await ask(url, "again")
    assert refused.value.status == 400 and refused.value.body.startswith("Flush cache failed.")
    assert "/again answered 400: Flush" in str(refused.value) and len(str(refused.value)) < 700


@pytest.mark.parametrize(("method", "attempts"), [("read", ATTEMPTS), ("again", ATTEMPTS), ("once", 1)])
async def test_only_what_may_be_done_twice_is_tried_again(method: str, attempts: int) -> None:
    asked: list[str] = []

    def hang_up(request: BaseHTTPRequestHandler, _: bytes) -> None:
        asked.append(request.path)
        request.close_connection = True

    with serving(hang_up) as url, pytest.raises(Unanswered, match=f"/{method} did not answer"):
        await ask(url, method)
    assert len(asked) == attempts


async def test_answer_that_comes_at_the_second_attempt_is_taken() -> None:
    asked: list[str] = []

    def second(request: BaseHTTPRequestHandler, _: bytes) -> None:
        asked.append(request.path)
        if len(asked) == 1:
            request.close_connection = True
        else:
            answer(request, 200, {"value": 7})

    with serving(second) as url:
        assert await ask(url, "read") == 7


async def test_refusal_is_an_answer_and_is_not_asked_for_again() -> None:
    asked: list[str] = []

    def refuse(request: BaseHTTPRequestHandler, _: bytes) -> None:
        asked.append(request.path)
        answer(request, 503, {"error": "no"})

    with serving(refuse) as url, pytest.raises(CallRefused):
        await ask(url, "read")
    assert len(asked) == 1


async def test_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str | None] = []

    def handle(request: BaseHTTPRequestHandler, _: bytes) -> None:
        seen.append(request.headers.get("Authorization"))
        answer(request, 401, "Unauthorized")

    (tmp_path / "key").write_text("s3cret\n")
    with serving(handle) as url, pytest.raises(CallRefused) as refused:
        await ask(url, "once", key=api_key(tmp_path / "key"))
    assert seen == ["Bearer s3cret"] and "s3cret" not in str(refused.value)
    monkeypatch.setenv("ROLLOUTCTL_ENGINE_API_KEY", "other")
    assert api_key() == "other"
    monkeypatch.setenv("ROLLOUTCTL_ENGINE_API_KEY_FILE", str(tmp_path / "key"))
    assert api_key() == "s3cret"


@pytest.mark.parametrize("content", ["", "two\nlines", "ключ"])
def test_file_without_a_key_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError, match="holds no key"):
        api_key(tmp_path / "key")
    with pytest.raises(ConfigError, match="can't be read"):
        api_key(tmp_path / "none")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h:1", "http://", "http://h:1?a=b", "http://h:x"])
def test_url_that_can_not_be_used_is_said(url: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        base_url(url)


def test_key_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        base_url("http://me:s3cret@h:8000")
    assert "s3cret" not in str(refused.value)


# --- rolloutctl engine probe ------------------------------------------------------------------------------------------


def _document(*paths: str) -> Handle:
    """A server that says it has these paths, and no more."""

    def handle(request: BaseHTTPRequestHandler, _: bytes) -> None:
        known = request.path == "/openapi.json"
        answer(request, 200 if known else 404, {"paths": {one: {} for one in paths}} if known else {"detail": "no"})

    return handle


@pytest.mark.parametrize(
    ("paths", "kind", "tokenizer", "says"),
    [
        (("/health", "/health_generate", "/ping"), "sglang", "absent", "node rank 0"),
        (("/v1/chat/completions",), "unknown", "unknown", "neither"),
        (("/generate", "/pause_generation"), "sglang", "absent", "no /server_info"),
    ],
)
async def test_probe_tells_what_it_found(paths: tuple[str, ...], kind: str, tokenizer: str, says: str) -> None:
    with serving(_document(*paths)) as url:
        found = await probe(url)
    assert (found.kind, found.tokenizer) == (kind, tokenizer) and says in found.note


async def test_probe_of_a_server_that_hides_its_routes_or_is_not_there() -> None:
    with serving(lambda request, _: answer(request, 404, "Not Found")) as url:
        assert "openapi.json" in (await probe(url)).note
    with pytest.raises(Unanswered):
        await probe(url)
