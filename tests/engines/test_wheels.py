"""The stand-ins made from the source of released engines refuse what a release does not have, and take what it has.

This also shows that the source is read correctly: many refusals are of the last release without a route or a field.
"""

from typing import Any

import httpx
import pytest

from tests.engines import wheels
from tests.engines.strict import App, Called, Reply, request_module, stand_in
from tests.engines.surfaces import openapi, read

pytestmark = [
    *(pytest.mark.engine_wheels, pytest.mark.timeout(600), pytest.mark.anyio),
    *(pytest.mark.one_loop, pytest.mark.usefixtures("fetched_wheels")),
]


# --- openapi.json -----------------------------------------------------------------------------------------------------


def test_openapi_has_the_form_that_fastapi_gives_it() -> None:
    document = openapi(read("sglang", "0.5.23"))
    profile = document["paths"]["/start_profile"]["post"]
    assert profile["requestBody"]["content"]["application/json"]["schema"] == {
        "anyOf": [{"$ref": "#/components/schemas/ProfileReq"}, {"type": "null"}]
    }
    assert "num_steps" in document["components"]["schemas"]["ProfileReq"]["properties"]
    assert document["paths"]["/flush_cache"]["post"]["parameters"] == [
        {"name": "timeout", "in": "query", "required": False}
    ]


def test_openapi_names_a_body_of_single_fields_as_fastapi_does() -> None:
    update = openapi(read("vllm", "0.32.0"))["paths"]["/update_weights"]["post"]["requestBody"]
    reference = {"$ref": "#/components/schemas/Body_update_weights_update_weights_post"}
    assert update == {"content": {"application/json": {"schema": reference}}, "required": True}


# --- the server -------------------------------------------------------------------------------------------------------


async def ask(app: Any, verb: str, path: str, **what: Any) -> tuple[int, str]:
    """(status, text) of one request."""
    async with httpx.AsyncClient(transport=app, base_url="http://engine") as client:
        answer = await client.request(verb, path, **what)
        return answer.status_code, answer.text


REFUSED: list[tuple[wheels.Kind, str, str, str, dict[str, Any], int, str]] = [
    ("sglang", "0.5.20", "POST", "/begin_weight_update", {"json": {}}, 404, "Not Found"),
    ("sglang", "0.5.23", "GET", "/pause_generation", {}, 405, "POST"),
    ("sglang", "0.5.23", "POST", "/pause_generation", {}, 400, "needs a JSON body"),
    ("sglang", "0.5.23", "POST", "/pause_generation", {"content": b"{"}, 400, "no JSON"),
    ("sglang", "0.5.23", "POST", "/pause_generation", {"json": ["abort"]}, 400, "takes a JSON object"),
    ("sglang", "0.5.23", "POST", "/pause_generation", {"json": {"mode": "keep"}}, 400, "body field mode"),
    ("sglang", "0.5.14", "POST", "/start_profile", {"json": {"profile_id": "1"}}, 400, "has no body field profile_id"),
    ("sglang", "0.5.23", "POST", "/start_profile", {"json": {"num_steps": "3"}}, 400, "body field num_steps"),
    ("sglang", "0.5.9", "POST", "/flush_cache", {"params": {"timeout": 1}}, 400, "has no query parameter timeout"),
    ("sglang", "0.5.23", "POST", "/flush_cache", {"params": {"timeout": "soon"}}, 400, "query parameter timeout"),
    ("sglang", "0.5.23", "POST", "/stop_profile", {"json": {"now": 1}}, 400, "takes no body"),
    ("sglang", "0.5.23", "POST", "/update_weight_version", {"json": {}}, 400, "needs body field new_version"),
    ("vllm", "0.13.0", "POST", "/pause", {"params": {"mode": "keep"}}, 400, "has no query parameter mode"),
    ("vllm", "0.32.0", "POST", "/pause", {"params": {"mode": "retract"}}, 400, "query parameter mode"),
    ("vllm", "0.32.0", "POST", "/sleep", {"params": {"level": "deep"}}, 400, "query parameter level"),
    ("vllm", "0.32.0", "POST", "/sleep", {"params": [("level", "1"), ("level", "2")]}, 400, "once, got 2"),
    ("vllm", "0.31.0", "POST", "/start_profile", {"json": {"max_iterations": 1}}, 400, "takes no body"),
    ("vllm", "0.21.0", "POST", "/start_weight_update", {}, 400, "needs a JSON body"),
    ("vllm", "0.32.0", "POST", "/collective_rpc", {"json": {"name": "sleep"}}, 400, "needs body field method"),
]


@pytest.mark.parametrize(("kind", "version", "verb", "path", "what", "status", "words"), REFUSED)
async def test_a_call_that_a_release_does_not_have_is_refused(
    kind: wheels.Kind, version: str, verb: str, path: str, what: dict[str, Any], status: int, words: str
) -> None:
    app = App(read(kind, version))
    seen, text = await ask(app, verb, path, **what)
    assert (seen, words in text) == (status, True), text
    assert [request.status for request in app.requests] == [status]


async def test_a_call_that_a_release_has_is_answered_and_recorded() -> None:
    app = App(read("sglang", "0.5.23"), {"/flush_cache": Reply(400, "Flush cache failed.\n")})
    app.answers["/start_profile"] = lambda body: {"started": body["num_steps"]}
    assert await ask(app, "POST", "/flush_cache?timeout=2.5") == (400, "Flush cache failed.\n")
    assert await ask(app, "POST", "/start_profile", json={"num_steps": 3}) == (200, '{"started":3}')
    assert await ask(app, "GET", "/v1/models/a/b") == (200, "{}")
    assert (await ask(app, "GET", "/openapi.json"))[0] == 200
    assert app.requests[0] == ("POST", "/flush_cache", (("timeout", "2.5"),), None, 400)
    assert app.requests[1].body == {"num_steps": 3}


async def test_a_parameter_that_a_server_reads_by_hand_is_accepted_though_it_is_not_listed() -> None:
    app = App(read("vllm", "0.13.0"))
    assert (await ask(app, "POST", "/wake_up?tags=weights&tags=kv_cache"))[0] == 200
    assert (await ask(app, "POST", "/collective_rpc", json={"method": "reload", "kwargs": {}}))[0] == 200
    assert app.requests[0].query == (("tags", "weights"), ("tags", "kv_cache"))


# --- in process -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("version", wheels.RELEASES["sglang"])
def test_request_classes_take_the_fields_of_their_release(version: str) -> None:
    module = request_module(read("sglang", version))
    made = module.UpdateWeightFromDiskReqInput(model_path="/m")
    assert (made.flush_cache, made.abort_all_requests) == (True, False)
    with pytest.raises(TypeError, match="nothing_such"):
        module.PauseGenerationReqInput(nothing_such=1)
    with pytest.raises(TypeError, match="new_version"):
        module.UpdateWeightVersionReqInput()
    if wheels.number(version) < (0, 5, 15):
        assert module.PauseGenerationReqInput("retract").mode == "retract"
    else:
        assert module.ProfileReq().req_type is module.ProfileReqType.START_PROFILE
        with pytest.raises(TypeError, match="positional"):
            module.PauseGenerationReqInput("retract")
