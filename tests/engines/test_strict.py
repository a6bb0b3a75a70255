"""The stand-ins of released engines refuse what a release does not have."""

import json
from typing import Any

import httpcore
import pytest

from tests.engines.strict import App
from tests.engines.surfaces import Kind, read

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


async def ask(app: App, verb: str, path: str, body: Any = None) -> tuple[int, str]:
    """(status, text) of one request. Bytes are sent as they are."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answer = await app.handle_async_request(httpcore.Request(verb, f"http://engine{path}", content=content))
    return answer.status, (await answer.aread()).decode()


REFUSED: list[tuple[Kind, str, str, str, object, int, str]] = [
    ("sglang", "0.5.20", "POST", "/begin_weight_update", {}, 404, "Not Found"),
    ("sglang", "0.5.23", "GET", "/pause_generation", None, 405, "POST"),
    ("sglang", "0.5.23", "POST", "/pause_generation", None, 400, "needs a JSON body"),
    ("sglang", "0.5.23", "POST", "/pause_generation", b"{", 400, "no JSON"),
    ("sglang", "0.5.23", "POST", "/pause_generation", ["abort"], 400, "takes a JSON object"),
    ("sglang", "0.5.23", "POST", "/pause_generation", {"mode": "keep"}, 400, "body field mode"),
    ("sglang", "0.5.14", "POST", "/start_profile", {"profile_id": "1"}, 400, "has no body field profile_id"),
    ("sglang", "0.5.23", "POST", "/start_profile", {"num_steps": "3"}, 400, "body field num_steps"),
    ("sglang", "0.5.23", "POST", "/flush_cache?timeout=soon", None, 400, "query.timeout"),
    ("sglang", "0.5.23", "POST", "/stop_profile", {"now": 1}, 400, "takes no body"),
    ("sglang", "0.5.23", "POST", "/update_weight_version", {}, 400, "needs body field new_version"),
    ("vllm", "0.13.0", "POST", "/pause?mode=keep", None, 400, "has no query parameter mode"),
    ("vllm", "0.32.0", "POST", "/sleep?level=1&level=2", None, 400, "once, got 2"),
]


@pytest.mark.parametrize(("kind", "version", "verb", "path", "body", "status", "words"), REFUSED)
async def test_a_call_that_a_release_does_not_have_is_refused(
    kind: Kind, version: str, verb: str, path: str, body: object, status: int, words: str
) -> None:
    app = App(read(kind, version))
    seen, text = await ask(app, verb, path, body)
    assert (seen, words in text) == (status, True), text
    assert [request.status for request in app.requests] == [status]
