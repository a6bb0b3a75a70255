"""The gateway and trainers' own clients, from their packages: by its rules, over HTTP, against tiny engines."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from tests.trainers.gateway_fleet import MODEL, GatewayFleet, digest_of, engine, gateway_fleet
from tests.trainers.own_client import SKYRL, SMG, OwnClient
from tests.trainers.posting_trainers import HTTP
from tests.trainers.test_gateway_adapters import LoRAFleet, lora_fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.trainer_clients, pytest.mark.timeout(300)]


@pytest.fixture
def lora_run(tmp_path: Path) -> Iterator[LoRAFleet]:
    with lora_fleet(tmp_path) as made:
        yield made


# --- AReaL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["SGLang", "vLLM"])
def test_areals_own_client_updates_while_nothing_stands_and_is_told_of_an_abort(ports: GatewayFleet, kind: str) -> None:
    with OwnClient.areal(kind, ports.addresses, ports.folder / "names") as client:

        def update(version: int, **options: Any) -> Path:
            directory = ports.folder / "run" / f"weight_update_v{version}"
            client(f"update = begin({version}, {str(directory)!r})")
            assert ports.generates_on() == [min(version - 1, 2)] * 2  # paused by the trainer, and generating
            ports.write(directory.name, version, **options)
            client("end(update)")
            return directory

        for version in (1, 2):
            removed = update(version)
            assert ports.digests() == [digest_of(version)] * 2 and not removed.exists()
        with pytest.raises(RuntimeError, match="Failed after 3 retries.*weights v5 aborted: .*source_refused"):
            update(3, hidden=32)
    assert ports.syncs()[:2] == [("committed", (0, 1))] * 2 and ports.generates_on() == [2, 2]
    assert {status for status, _ in ports.syncs()[2:]} == {"aborted"}


@pytest.mark.parametrize(("kind", "field"), [("SGLang", "lora_path"), ("vLLM", "model")])
def test_areals_own_client_names_each_version_of_an_adapter(tmp_path: Path, kind: str, field: str) -> None:
    with (
        lora_fleet(tmp_path, ports=True) as fleet,
        OwnClient.areal(kind, fleet.fleet.addresses, tmp_path / "names") as client,
    ):

        def update(version: int, seed: int) -> None:
            path = fleet.run / f"weight_update_v{version}"
            client(f"update = begin({version}, {str(path)!r}, use_lora=True, lora_name='lora', lora_keep_versions=2)")
            fleet.write(path.name, seed)
            client("end(update)")
            assert not path.exists()

        for version in (1, 2, 3):
            update(version, version)
            assert fleet.serves(f"lora-v{version}", version, field=field)
        assert fleet.serves("lora-v2", 2, field=field)  # that a late request still names
        gone = fleet.ask(1, "lora-v1", field)
        assert gone.status_code == 404 and "served are: lora-v3, lora-v2" in gone.json()["message"]
        launched = fleet.ask(0, "lora-v0", field)  # what the engine was launched with is its own
        assert "lora-v0" in launched.json()["detail"]
        update(2, 12)  # restarted from its checkpoint of version 1
        assert fleet.serves("lora-v2", 12, field=field) and fleet.serves("lora", 12, field=field)
        assert fleet.fleet.operations() == []  # no pause, no resume, no unload of a version


# --- SkyRL ------------------------------------------------------------------------------------------------------------


def test_skyrls_own_client_updates_in_four_phases(fleet: GatewayFleet) -> None:
    """As `weight_sync/delta/trainer.py` drives it."""
    with OwnClient(SKYRL) as client:
        client(f"client = SkyrlWeightSyncClient({fleet.urls})")
        local = {"base_model_path": "base", "local_checkpoint_dir": str(fleet.folder / "run" / "local")}
        client(f"client.init_weight_transfer_engine({local})")
        for version in (1, 2):
            fleet.write("local/weights", version)
            client(f"client.fetch_weights({version}, 's3://bucket/run')")
            client("client.pause_generation()")
            client("client.reset_prefix_cache(reset_running_requests=True)")
            client("client.start_weight_update()")
            client(f"client.update_weights({{'target_version': {version}, 'sync_dir': 's3://bucket/run'}})")
            client("client.finish_weight_update()")
            client("client.resume_generation()")
            assert fleet.digests() == [digest_of(version)] * 2
        with pytest.raises(RuntimeError, match="not the drafter"):
            client("with client.draft_session(): client.start_weight_update()")
        with pytest.raises(RuntimeError, match="weight_sync_backend=delta"):
            client("client.init_weight_transfer_engine({'master_address': '127.0.0.1', 'world_size': 3})")
    assert fleet.syncs() == [("committed", (0, 1))] * 2 and fleet.operations() == []


SAMPLE = {"prompt": {"chunks": [{"tokens": [10, 20, 30]}]}, "num_samples": 1, "sampling_params": {"max_tokens": 64}}
TEXT = {"type": "encoded_text", "tokens": [10, 11]}
IMAGE = {"type": "image", "data": "ZmFrZQ==", "format": "jpeg"}
POINTER = {"type": "image_asset_pointer", "format": "png", "location": "https://example.com/image.png"}
SAID = [{"role": "user", "content": "Hello"}]
SHOWN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/"}}]}]
BATCH = {"prompt_token_ids": [[1, 2, 3]], "sampling_params": {"max_tokens": 50}}
FEATURES = {"mm_hashes": {"image": ["abc"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 10}]}}

ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("generate", "", {"prompt_token_ids": [[1, 2, 3], [4, 5, 6]], "sampling_params": {"max_tokens": 100}}),
    ("generate", "", {"prompt_token_ids": [[1, 2, 3]], "session_ids": ["test-session"]}),
    ("generate", "", {**BATCH, "mm_features": [FEATURES]}),
    ("generate", "model='lora-explicit'", BATCH),
    ("chat_completion", "", {"json": {"model": "test", "messages": SAID}, "headers": {}}),
    ("chat_completion", "", {"json": {"messages": SAID}, "headers": {}}),
    ("completion", "", {"json": {"model": "test", "prompt": "Hello"}, "headers": {}}),
    ("completion", "", {"json": {"prompt": "Hello"}, "headers": {}}),
    ("render_chat_completion", "", {"json": {"model": "test", "messages": SAID}}),
    ("render_chat_completion", "", {"json": {"messages": SHOWN}}),
    ("sample", "", {"json": {**SAMPLE, "model": "lora-sample", "include_prompt_logprobs": True}}),
    ("sample", "", {"json": {**SAMPLE, "num_samples": 2, "include_prompt_logprobs": True}}),
    ("sample", "", {"json": {**SAMPLE, "include_prompt_logprobs": True, "topk_prompt_logprobs": 2}}),
    ("sample", "", {"json": {**SAMPLE, "topk_prompt_logprobs": 2}}),
    ("sample", "", {"json": {**SAMPLE, "prompt": {"chunks": [TEXT, IMAGE, TEXT]}}}),
    ("sample", "", {"json": {**SAMPLE, "prompt": {"chunks": [TEXT, POINTER, TEXT]}}}),
    ("sample", "", {"json": {**SAMPLE, "prompt": {"chunks": [TEXT]}}}),
]
"""Method, other arguments and request: those of SkyRL's tests that reach a server."""


def skyrls_server(request: HttpRequest) -> Reply:
    """The routes of SkyRL's server that its client asks for tokens."""
    body = json.loads(request.body) if request.body else {}
    match request.path.partition("?")[0]:
        case "/inference/v1/generate" | "/skyrl/v1/generate" as path:
            chosen = {"token_ids": [0, 1, 2], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -0.1}]}}
            if path.startswith("/skyrl"):
                chosen["routed_experts"] = {"data": "AAECAwQFBgcICQoL", "shape": [3, 2, 2], "dtype": "uint8"}
            known = [None, *({str(token): {"logprob": -0.5, "rank": 1}} for token in body["token_ids"][1:])]
            choices = [chosen] * body["sampling_params"].get("n", 1)
            return 200, {"choices": choices, "prompt_logprobs": known, "model": body["model"]}
        case "/v1/completions" | "/v1/chat/completions":
            return 200, {"choices": [{"text": "some"}], "model": body.get("model")}
        case "/v1/chat/completions/render":
            shown = "image_url" in request.body.decode()
            at = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {"image": [{"offset": 4, "length": 100}]}}
            return 200, {
                "token_ids": [*range(110)],
                "features": {**at, "kwargs_data": {"image": ["x"]}} if shown else None,
            }
        case "/tokenize":
            return 200, {"tokens": [1, 2, 3]}
        case "/detokenize":
            return 200, {"prompt": "hello world"}
        case "/finish_session":
            return (500, {"error": "boom"}) if "error" in request.path else (200, {"status": "ok"})
    return engine(request)


def test_skyrls_own_client_gets_through_the_gateway_what_its_servers_answer(tmp_path: Path) -> None:
    """Requests and results with the gateway as proxy are those without it."""
    with (
        HttpServer(skyrls_server) as server,
        gateway_fleet(tmp_path, engines=[server.url] * 2) as fleet,
        OwnClient(SKYRL) as client,
    ):

        def asked(url: str, call: str, **fields: Any) -> tuple[object, list[HttpRequest]]:
            before = len(server.requests)
            client(f"client = remote({url!r}, {fleet.urls}, **{fields})")
            found = client(f"run(client.{call})")
            return found, sorted(server.requests[before:], key=str)  # the client asks for its prompts at the same time

        calls = [f"{method}({given}{', ' if more else ''}{more})" for method, more, given in ASKED]
        calls += ["tokenize(['hello', 'world'])", "detokenize([[1, 2, 3], [4, 5, 6]])"]
        calls += ["finish_session('session')", "finish_session('')", "finish_session('an-error')"]
        for call in calls:
            assert asked(fleet.urls[0], call) == asked(server.url, call), call
        packed = f"generate({BATCH})"
        found = asked(fleet.urls[0], packed, enable_return_routed_experts=True)
        assert found == asked(server.url, packed, enable_return_routed_experts=True) and "array" in str(found[0])


def test_skyrls_own_client_finds_what_its_own_servers_answer_to_its_control(fleet: GatewayFleet) -> None:
    with OwnClient(SKYRL) as client:
        client(f"client = remote({fleet.urls[0]!r}, {fleet.urls})")

        def told(call: str) -> list[dict[str, Any]]:
            answers = client(f"run(client.{call})")
            assert list(answers) == fleet.urls and {answer["status"] for answer in answers.values()} == {200}
            return [answer["body"] for answer in answers.values()]

        for mode in ("keep", "abort", "wait"):
            for body in told(f"pause({mode!r})"):
                assert (body["status"], body["mode"], body["clear_cache"]) == ("paused", mode, "false")
        assert [body["mode"] for body in told("pause_generation()")] == ["keep", "keep"]
        for body in told("reset_prefix_cache(reset_running_requests=True)"):
            assert (body["status"], body["body"]) == ("cache_reset", {"reset_running_requests": True})
        assert [body["status"] for body in told("resume()")] == ["resumed", "resumed"]
        assert [body["status"] for body in told("fetch_weights(3, 'gs://b', 'gs://b/3')")] == ["ok", "ok"]
        assert client("run(client.get_world_size())") == [2, 1]


REFUSED = [
    ("sleep(level=2)", "memory of an engine"),
    ("sleep(level=1, tags=['weights', 'kv_cache'])", "memory of an engine"),
    ("wake_up()", "memory of an engine"),
    ("wake_up(tags=['weights'])", "memory of an engine"),
    ("update_named_weights({'names': ['layer.weight']})", "weight_sync_backend=delta"),
    ("load_lora_adapter('lora-A', '/tmp/path/lora-A')", "is not below"),
    ("load_lora_adapter('lora-A', in_memory=True)", "lora.sync_mode=disk"),
    ("unload_lora_adapter('nonexistent-lora')", "this run has no adapter 'nonexistent-lora'"),
]
"""What SkyRL's tests ask for and gateways refuse by decision, but for the last, which must be refused."""


def test_skyrls_own_client_is_told_why_it_is_refused(fleet: GatewayFleet) -> None:
    with OwnClient(SKYRL) as client:
        client(f"client = remote({fleet.urls[0]!r}, {fleet.urls})")
        for call, why in REFUSED:
            with pytest.raises(RuntimeError, match=why):
                client(f"run(client.{call})")


def test_skyrls_own_client_overwrites_its_adapters_files_and_no_version_changes_by_that(lora_run: LoRAFleet) -> None:
    directory = lora_run.write("lora_sync", 1)
    inode = os.stat(directory / "adapter_model.safetensors").st_ino
    with OwnClient(SKYRL) as client:
        client(f"client = remote({lora_run.urls[0]!r}, {lora_run.urls})")
        load = f"run(client.load_lora_adapter('skyrl-lora', {str(directory)!r}))"
        assert [json.loads(answer["body"])["success"] for answer in client(load).values()] == [True, True]
        lora_run.write("lora_sync", 2)
        assert os.stat(directory / "adapter_model.safetensors").st_ino == inode  # a hard link would have it too

        lora_run.fleet.stop_agent(1)
        lora_run.fleet.start_agent(1)  # its engine has nothing, and reads the files of what is committed
        wait_until(lambda: lora_run.listed(1) == {"skyrl-lora-v1"})
        wait_until(lambda: lora_run.ask(1, "skyrl-lora").status_code == 200)
        assert lora_run.serves("skyrl-lora", 1)

        client(load)
        assert lora_run.serves("skyrl-lora", 2)


def test_skyrls_own_client_drops_one_of_two_tenants(lora_run: LoRAFleet) -> None:
    a, b = lora_run.write("lora_sync/model_a", 1), lora_run.write("lora_sync/model_b", 2)
    with OwnClient(SKYRL) as client:
        client(f"client = remote({lora_run.urls[0]!r}, {lora_run.urls})")
        loads = [f"client.load_lora_adapter({path.name!r}, {str(path)!r})" for path in (a, b)]
        client(f"both = lambda: asyncio.gather({', '.join(loads)})")
        client("async def load(): await both()")
        client("run(load())")
        assert lora_run.serves("model_a", 1) and lora_run.serves("model_b", 2)
        client("run(client.unload_lora_adapter('model_a'))")
    assert lora_run.fleet.operations() == ["adapter drop model_a"]
    answer = lora_run.ask(0, "model_a")
    assert answer.status_code == 404 and "model_a" in answer.json()["error"]["message"]
    wait_until(lambda: lora_run.listed(0) == lora_run.listed(1) == {"model_b-v1"})
    wait_until(lambda: lora_run.copies() == ["model_b"])
    assert lora_run.serves("model_b", 2)


# --- smg --------------------------------------------------------------------------------------------------------------


def test_smgs_own_client_reads_what_each_worker_is_and_an_epoch_grows_with_each_change(fleet: GatewayFleet) -> None:
    with OwnClient(SMG, "router") as client:

        def workers() -> list[dict[str, Any]]:
            return client("[vars(worker) for worker in gateway.workers()]")  # type: ignore[no-any-return]

        def epoch() -> int:
            return int(HTTP.get(f"{fleet.gateway.url}/v1/rl/workers").json()["membership_epoch"])

        client(f"gateway = RL({fleet.gateway.url!r})")
        body = {"model_path": str(fleet.write("w", 1)), "weight_version": "70"}
        for url in fleet.urls:
            Thread(target=HTTP.post, args=[f"{url}/update_weights_from_disk"], kwargs={"json": body}).start()
        wait_until(lambda: [worker["weight_version"] for worker in workers()] == ["70", "70"])
        first, second = workers()
        assert {name for name, value in first.items() if value is None} == {"tp_size", "dp_size", "pp_size", "role"}
        assert (first["id"], first["base_url"], first["model_id"]) == ("0", fleet.urls[0], MODEL)
        assert (first["engine"], first["health"], first["worker_type"]) == ("tiny", "ready", "regular")
        assert first["capabilities"]["update_from"] == ["disk"] and second["id"] == "1"
        assert client("vars(gateway.worker('1'))") == second
        for other in ("2", "01", "1/", "1/engine/flush_cache"):
            with pytest.raises(RuntimeError, match=r"HTTP 404"):
                client(f"gateway.worker({other!r})")

        before = epoch()
        assert epoch() == before
        fleet.stop_agent(1)
        wait_until(lambda: workers()[1]["health"] == "not_ready")
        assert workers()[1]["weight_version"] is None
        left = epoch()
        fleet.start_agent(1)
        wait_until(lambda: workers()[1]["health"] == "ready")
        assert before < left < epoch()
        fleet.stop_agent(1)
        wait_until(lambda: workers()[1]["health"] == "not_ready")
        fleet.plane.retire(1).wait()
        assert [worker["id"] for worker in workers()] == ["0"]
