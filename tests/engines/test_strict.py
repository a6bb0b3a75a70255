"""The stand-ins of released engines refuse what a release does not have, and record what it has."""

import json
from typing import Any

import httpcore
import pytest

from tests.engines.strict import App, Called, Reply, request_module, stand_in
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


async def test_a_call_that_a_release_has_is_answered_and_recorded() -> None:
    app = App(read("sglang", "0.5.23"), {"/flush_cache": Reply(400, "Flush cache failed.\n")})
    app.answers["/start_profile"] = lambda body: {"started": body["num_steps"]}
    assert await ask(app, "POST", "/flush_cache?timeout=2.5") == (400, "Flush cache failed.\n")
    assert await ask(app, "POST", "/start_profile", {"num_steps": 3}) == (200, '{"started": 3}')
    assert app.requests[0] == ("POST", "/flush_cache", (("timeout", "2.5"),), None, 400)
    assert app.requests[1].body == {"num_steps": 3}
    by_hand = App(read("vllm", "0.13.0"))
    assert (await ask(by_hand, "POST", "/wake_up?tags=weights&tags=kv_cache"))[0] == 200
    assert by_hand.requests[0].query == (("tags", "weights"), ("tags", "kv_cache"))


async def test_an_object_in_process_records_its_calls_and_refuses_unknown_arguments() -> None:
    surface = read("vllm", "0.32.0")
    made = stand_in(surface, {"is_paused": True, "sleep": ValueError("not enabled")}, vllm_config="config")
    made.answers["wake_up"] = lambda **arguments: arguments
    engine = made.engine
    assert engine.vllm_config == "config"
    assert await engine.is_paused() is True
    assert await engine.wake_up(["weights"]) == {"tags": ["weights"]}
    assert await engine.pause_generation(mode="keep") is None
    assert made.calls[-1] == Called("pause_generation", {"mode": "keep"})
    with pytest.raises(ValueError, match="not enabled"):
        await engine.sleep(1)
    with pytest.raises(TypeError, match="wait_for_inflight_requests"):
        await engine.pause_generation(wait_for_inflight_requests=True)
    with pytest.raises(AssertionError, match="no begin_weight_update"):
        stand_in(surface, {"begin_weight_update": None})
    pause = request_module(read("sglang", "0.5.23")).PauseGenerationReqInput
    assert pause(mode="retract").mode == "retract"
    with pytest.raises(TypeError, match="positional"):
        pause("retract")
