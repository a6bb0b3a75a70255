"""How the backends load and unload adapters over HTTP, on stand-ins of the servers that are as unkind as these."""

import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import httpcore
import pytest

from schemas.errors import CheckpointError, EngineError, RefusedError, UnansweredError, UnsupportedError
from schemas.events import CheckAdapter, LoadAdapter, UnloadAdapter
from schemas.identity import Identity, Operation
from tests.engines.adapters import BASE, save_adapter, save_base
from tests.engines.lora_servers import LOAD, UNLOAD, LoRAServer, lora_server, of
from tests.engines.releases import LATEST, releases
from tests.engines.strict import Reply, request_module, stand_in
from tests.engines.surfaces import Kind, read
from workers.engines.factory import EngineOptions, make_observer
from workers.engines.http import ANSWER_BYTES
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.in_process import AsyncLLMClient, lora_request

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


def lora_requests(running: str, waiting: str, at: str) -> str:
    """A sample of vLLM's metric. It keeps one for each set of names that it has ever seen."""
    names = f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f'vllm:lora_requests_info{{max_lora="2",{names}}} {at}\n'


COUNTED = "# TYPE vllm:lora_requests_info gauge\n"
IDLE: dict[Kind, str] = {
    "vllm": COUNTED
    + lora_requests("policy-v1", "policy-v1", "1.7956896912922168e+09")
    + lora_requests("", "", "1.795689691400778e+09"),
    "sglang": """sglang:num_running_reqs{tp_rank="0"} 0.0
sglang:num_queue_reqs{tp_rank="0"} 0.0
sglang:http_requests_active{endpoint="/metrics",method="GET"} 1.0
sglang:http_requests_active{endpoint="/generate",method="POST"} 0.0
""",
}
"""What the servers say of themselves when no request runs."""


@pytest.fixture(params=["vllm", "sglang"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LoRAServer]:
    kind: Kind = request.param
    async with lora_server(kind, LATEST[kind], tmp_path) as made:
        yield made


async def holding(server: LoRAServer, *versions: int) -> None:
    """Have the server hold these versions."""
    for version in versions:
        save_adapter(server.root / of(version).path, seed=version)
        assert await server.fault(LoadAdapter(of(version))) is None
    server.posts.clear()


async def test_a_version_is_loaded_from_its_own_path_and_listed_with_it(server: LoRAServer) -> None:
    seen = await server.seen()
    assert Operation.ADAPTERS in seen.operations and seen.adapters == {}
    directory = save_adapter(server.root / "adapters" / "step_1")
    assert await server.fault(CheckAdapter(of(1))) is None and server.posts == []
    assert await server.fault(LoadAdapter(of(1))) is None
    assert server.posts == [(LOAD[server.kind], {"lora_name": "policy-v1", "lora_path": str(directory)})]
    assert (await server.seen()).adapters == {"policy-v1": "adapters/step_1"}
    server.metrics = IDLE[server.kind]
    assert await server.fault(UnloadAdapter("policy-v1", waited=False)) is None
    assert (await server.seen()).adapters == {}
    assert server.posts[-1] == (UNLOAD[server.kind], {"lora_name": "policy-v1"})


async def test_a_version_that_is_held_is_not_loaded_again(server: LoRAServer) -> None:
    save_adapter(server.root / "adapters" / "step_1")
    server.lost.add(LOAD[server.kind])
    assert isinstance(await server.fault(LoadAdapter(of(1))), UnansweredError)
    assert await server.fault(LoadAdapter(of(1))) is None and await server.fault(CheckAdapter(of(1))) is None
    assert [path for path, _ in server.posts] == [LOAD[server.kind]]


async def test_a_load_that_comes_second_counts_if_the_first_was_of_that_path(server: LoRAServer) -> None:
    await holding(server, 1)
    server.hidden.add("policy-v1")  # when it is asked before the load
    assert await server.fault(LoadAdapter(of(1))) is None
    server.loaded["policy-v1"] = "/elsewhere"
    server.hidden.add("policy-v1")
    fault = await server.fault(LoadAdapter(of(1)))
    assert isinstance(fault, CheckpointError) and "already loaded" in str(fault)


async def test_a_front_end_that_stands_still_for_a_moment_is_asked_again_in_the_time_of_the_command(
    server: LoRAServer,
) -> None:
    save_adapter(server.root / "adapters" / "step_1")
    for call in (CheckAdapter(of(1)), LoadAdapter(of(1))):
        server.late = 2
        assert await server.fault(call, 60) is None
    server.late = 1
    fault = await server.fault(UnloadAdapter("policy-v1", waited=True))  # which no command waits for
    assert isinstance(fault, RefusedError) and "does not list its adapters" in str(fault)
    assert server.loaded.keys() == {"policy-v1"} and len(server.posts) == 1


async def test_nothing_is_loaded_over_a_name_that_is_taken(server: LoRAServer) -> None:
    await holding(server, 1)
    save_adapter(server.root / "adapters" / "other")
    fault = await server.fault(LoadAdapter(of(1, "adapters/other")))
    assert isinstance(fault, RefusedError) and "from adapters/step_1, and adapters/other was not loaded" in str(fault)
    assert server.posts == []


async def test_an_adapter_that_does_not_fit_reaches_no_engine(server: LoRAServer) -> None:
    save_adapter(server.root / "adapters" / "step_1", {name: (rows, 9) for name, (rows, _) in BASE.items()})
    save_adapter(server.root / "adapters" / "step_2", rank=16)
    for version in (1, 2, 3):
        for call in (CheckAdapter(of(version)), LoadAdapter(of(version))):
            assert isinstance(await server.fault(call), CheckpointError)
    assert server.posts == [] and server.loaded == {}


async def test_a_version_without_a_place_is_refused(server: LoRAServer) -> None:
    await holding(server, 1, 2)
    save_adapter(server.root / "adapters" / "step_3")
    for call in (CheckAdapter(of(3)), LoadAdapter(of(3))):
        fault = await server.fault(call)
        assert isinstance(fault, RefusedError) and "holds 2 adapters at most: policy-v1, policy-v2" in str(fault)
    assert server.posts == []  # SGLang would unload another, and vLLM read files in the middle of its work


@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, CheckpointError), (404, CheckpointError), (422, CheckpointError), (403, RefusedError), (500, EngineError)],
)
async def test_a_refusal_says_whether_the_engine_was_touched(
    server: LoRAServer, status: int, expected: type[Exception]
) -> None:
    save_adapter(server.root / "adapters" / "step_1")
    server.refusals[LOAD[server.kind]] = Reply(status, {"error": "because"})
    fault = await server.fault(LoadAdapter(of(1)))
    assert isinstance(fault, expected) and "because" in str(fault)
    assert isinstance(fault, RefusedError) == (expected is RefusedError)


async def test_vllm_unloads_no_adapter_that_requests_run_on(tmp_path: Path) -> None:
    async with lora_server("vllm", LATEST["vllm"], tmp_path) as server:
        await holding(server, 1, 2)
        later = "1.7956897e+09"
        for running, waiting in (("policy-v2,policy-v1", ""), ("policy-v2", "policy-v1,policy-v2")):
            server.metrics = IDLE["vllm"] + lora_requests(running, waiting, later)
            for waited in (False, True):
                fault = await server.fault(UnloadAdapter("policy-v1", waited))
                assert isinstance(fault, RefusedError) and "requests run on it" in str(fault)
        server.metrics = IDLE["vllm"] + lora_requests("policy-v2,policy-v11", "policy-v2", later)
        assert await server.fault(UnloadAdapter("policy-v1", waited=False)) is None
        server.metrics = COUNTED  # before the first request of all
        assert await server.fault(UnloadAdapter("policy-v2", waited=False)) is None
        assert server.loaded == {}


async def test_sglang_unloads_only_when_no_request_runs(tmp_path: Path) -> None:
    async with lora_server("sglang", LATEST["sglang"], tmp_path) as server:
        await holding(server, 1)
        for busy in ('num_running_reqs{tp_rank="0"}', 'num_queue_reqs{tp_rank="0"}', 'generate",method="POST"}'):
            server.metrics = IDLE["sglang"].replace(f"{busy} 0.0", f"{busy} 2.0")
            fault = await server.fault(UnloadAdapter("policy-v1", waited=False))
            assert isinstance(fault, RefusedError) and "can't be told" in str(fault)
        server.app.answers["/ready"] = Reply(503)
        for waited in (False, True):  # it would wait for ever, and hold up every load
            fault = await server.fault(UnloadAdapter("policy-v1", waited))
            assert isinstance(fault, RefusedError) and "is paused" in str(fault)
        assert server.posts == []
        server.app.answers["/ready"] = {}
        assert await server.fault(UnloadAdapter("policy-v1", waited=True)) is None


async def test_where_requests_cannot_be_counted_an_adapter_is_unloaded_after_its_time(server: LoRAServer) -> None:
    await holding(server, 1)
    for server.metrics in (None, "# nothing\n"):
        fault = await server.fault(UnloadAdapter("policy-v1", waited=False))
        assert isinstance(fault, RefusedError) and "it can't be told which requests run on it" in str(fault)
    assert await server.fault(UnloadAdapter("policy-v1", waited=True)) is None and server.loaded == {}


async def test_an_unload_of_what_is_gone_succeeds(server: LoRAServer) -> None:
    await holding(server, 1)
    server.metrics = IDLE[server.kind]
    server.lost.add(UNLOAD[server.kind])
    assert isinstance(await server.fault(UnloadAdapter("policy-v1", waited=False)), UnansweredError)
    assert await server.fault(UnloadAdapter("policy-v1", waited=False)) is None
    assert len(server.posts) == 1
    await holding(server, 1)
    server.refusals[UNLOAD[server.kind]] = Reply(500, "what?")
    fault = await server.fault(UnloadAdapter("policy-v1", waited=False))
    assert isinstance(fault, EngineError) and not isinstance(fault, RefusedError)  # it is still listed


async def test_an_unload_of_sglang_that_waits_for_requests_is_not_waited_for(tmp_path: Path) -> None:
    async with lora_server("sglang", LATEST["sglang"], tmp_path) as server:
        await holding(server, 1)

        async def waits(body: dict[str, Any]) -> None:
            del server.loaded[body["lora_name"]]  # it is no longer listed from the beginning
            await anyio.sleep_forever()

        server.app.answers[UNLOAD["sglang"]] = waits
        route = server.client._routes["unload_lora_adapter"]
        assert route.timeout_s == 2.0
        server.client._routes["unload_lora_adapter"] = route._replace(timeout_s=0.05)
        assert isinstance(await server.fault(UnloadAdapter("policy-v1", waited=True)), UnansweredError)
        assert (await server.seen()).adapters == {}


async def test_an_agent_that_only_observes_sees_adapters_too(server: LoRAServer, tmp_path: Path) -> None:
    await holding(server, 1)
    place = Identity(replica=0, node_rank=0)
    options = EngineOptions(identity=place, checkpoints=server.root, traces=tmp_path, url="http://engine")
    observer = make_observer(server.kind, options)
    observer._reader._pool = server.app  # type: ignore[attr-defined]  # the same reader, with another way
    assert (await observer.observe()).adapters == {"policy-v1": "adapters/step_1"}


async def test_metrics_that_have_grown_too_large_cost_the_counters_and_not_the_engine(tmp_path: Path) -> None:
    async with lora_server("vllm", LATEST["vllm"], tmp_path) as server:
        await holding(server, 1)
        server.metrics = COUNTED + lora_requests("policy-v1", "", "1.7956896912e+09") * (ANSWER_BYTES // 100)
        seen = await server.seen()
        assert (seen.tokenizer, seen.running) == ("present", None)
        fault = await server.fault(UnloadAdapter("policy-v1", waited=False))
        assert isinstance(fault, RefusedError) and "can't be told" in str(fault)


# --- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("vllm", {"lora_config": None}, "launch the server with --enable-lora"),
        ("vllm", {"lora_config": {"max_loras": 1}}, "would wait for the last one of the old"),
        ("vllm", {"parallel_config": {"_api_process_count": 2}}, "--api-server-count 1"),
        ("sglang", {"enable_lora": None}, "launch it with --enable-lora"),
        ("sglang", {"enable_lora": False}, "launch it with --enable-lora"),
        ("sglang", {"max_loras_per_batch": 1}, "would wait for the last one of the old"),
        ("sglang", {"dp_size": 2}, "data parallel"),
        ("sglang", {"tokenizer_worker_num": 2}, "--tokenizer-worker-num 1"),
    ],
)
async def test_an_engine_that_was_not_launched_for_adapters_says_how(
    kind: Kind, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    async with lora_server(kind, LATEST[kind], tmp_path) as server:
        info = server.info["vllm_config"] if kind == "vllm" else server.info
        info.update(change)
        server.backend._observed._launch = None
        server.app.requests.clear()
        seen = await server.seen()
        assert Operation.ADAPTERS not in seen.operations
        if "lora_config" in change or "enable_lora" in change:
            asked = {request.path for request in server.app.requests}
            assert (seen.adapters is None) == ("/v1/models" not in asked)
        fault = await server.fault(LoadAdapter(of(1)))
        assert isinstance(fault, UnsupportedError) and says in str(fault)


async def test_a_vllm_without_the_routes_has_no_adapters(tmp_path: Path) -> None:
    async with lora_server("vllm", LATEST["vllm"], tmp_path) as server:
        openapi: Any = server.app.answers["/openapi.json"]
        del openapi["paths"][LOAD["vllm"]]
        server.backend._observed._launch = None
        assert Operation.ADAPTERS not in (await server.seen()).operations
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(await server.fault(LoadAdapter(of(1))))


async def test_a_vllm_that_shows_no_settings_is_believed_by_its_routes(tmp_path: Path) -> None:
    async with lora_server("vllm", LATEST["vllm"], tmp_path) as server:
        server.info = {}
        server.backend._observed._launch = None
        assert Operation.ADAPTERS in (await server.seen()).operations
        save_adapter(server.root / "adapters" / "step_1")
        fault = await server.fault(LoadAdapter(of(1)))  # its model is not known either
        assert isinstance(fault, CheckpointError) and "carries no manifest" in str(fault)


@pytest.mark.parametrize("answer", [Reply(500), Reply(401), {"data": "what?"}, Reply(200, "<html>")])
async def test_an_engine_that_does_not_list_its_adapters_is_not_called(server: LoRAServer, answer: Any) -> None:
    await holding(server, 1)
    server.app.answers["/v1/models"] = answer
    for call in (CheckAdapter(of(2)), LoadAdapter(of(2)), UnloadAdapter("policy-v1", waited=True)):
        fault = await server.fault(call)
        assert isinstance(fault, RefusedError) and "does not list its adapters" in str(fault)
    assert server.posts == []


async def test_a_load_that_failed_in_an_engine_that_is_gone_is_no_refusal(server: LoRAServer) -> None:
    save_adapter(server.root / "adapters" / "step_1")

    def dies(_: Any) -> Reply:
        server.app.answers["/v1/models"] = httpcore.ConnectError("nothing listens")
        return Reply(500)

    server.app.answers[LOAD[server.kind]] = dies
    fault = await server.fault(LoadAdapter(of(1)))
    assert isinstance(fault, EngineError) and not isinstance(fault, RefusedError)


async def test_an_engine_that_refuses_to_list_them_is_observed_all_the_same(server: LoRAServer) -> None:
    server.app.answers["/v1/models"] = Reply(401)
    seen = await server.seen()
    assert (seen.tokenizer, seen.adapters) == ("present", None)


@pytest.mark.parametrize(("kind", "version"), releases())
async def test_loads_and_unloads_fit_the_release(kind: Kind, version: str, tmp_path: Path) -> None:
    async with lora_server(kind, version, tmp_path) as server:
        server.metrics = IDLE[kind]
        await holding(server, 1)
        assert (await server.seen()).adapters == {"policy-v1": "adapters/step_1"}
        assert await server.fault(UnloadAdapter("policy-v1", waited=False)) is None
        assert {request.status for request in server.app.requests} == {200}


# --- in process -------------------------------------------------------------------------------------------------------


class Registry:
    """SGLang's `LoRARegistry`, as far as it is read."""

    def __init__(self) -> None:
        self.adapters: dict[str, SimpleNamespace] = {}
        self._counters: dict[str, SimpleNamespace] = {}

    def get_all_adapters(self) -> dict[str, SimpleNamespace]:
        return dict(self.adapters)

    def load(self, obj: Any) -> SimpleNamespace:
        if obj.lora_name in self.adapters:
            return SimpleNamespace(success=False, error_message="it is already loaded")
        self.adapters[obj.lora_name] = SimpleNamespace(lora_id=f"id-{obj.lora_name}", lora_path=obj.lora_path)
        self.run(obj.lora_name, 0)
        return SimpleNamespace(success=True, error_message="")

    def unload(self, obj: Any) -> SimpleNamespace:
        del self.adapters[obj.lora_name]
        return SimpleNamespace(success=True, error_message="")

    def run(self, name: str, requests: int) -> None:
        """Have requests run on an adapter."""
        self._counters[f"id-{name}"] = SimpleNamespace(value=lambda: requests)


@pytest.mark.parametrize(("kind", "version"), releases("sglang"))
async def test_sglang_in_process_counts_the_requests_of_each_adapter(kind: Kind, version: str, tmp_path: Path) -> None:
    surface, registry = read(kind, version), Registry()
    launched = {"model_path": str(save_base(tmp_path / "base")), "random_seed": 1, "enable_lora": True, "dp_size": 1}
    limits = {
        "max_lora_rank": 8,
        "lora_target_modules": {"v_proj", "q_proj", "down_proj"},
        "max_loras_per_batch": 3,
        "max_loaded_loras": 2,
    }
    state: dict[str, Any] = {"is_pause": False, "gracefully_exit": False, "event_loop": None, "lora_registry": registry}
    arguments = SimpleNamespace(**launched, **limits, node_rank=0, device="cuda", weight_version="default")
    answers = {"load_lora_adapter": registry.load, "unload_lora_adapter": registry.unload}
    standin = stand_in(surface, answers, server_args=arguments, **state)
    client = TokenizerManagerClient(standin.engine, request_module(surface))
    backend = SGLangEngine(Identity(replica=0, node_rank=0), client, checkpoints=tmp_path, traces=tmp_path)
    await backend.open()
    seen = await backend.observe()
    assert Operation.ADAPTERS in seen.operations and seen.adapters == {}
    save_adapter(tmp_path / "a")
    await backend.perform(LoadAdapter(of(1, "a")), 1.0)
    await backend.perform(LoadAdapter(of(1, "a")), 1.0)
    assert (await backend.observe()).adapters == {"policy-v1": "a"}
    save_adapter(tmp_path / "gate", {"model.layers.0.mlp.gate_proj": (12, 8)})
    with pytest.raises(CheckpointError, match="launched for down_proj, q_proj, v_proj"):
        await backend.perform(CheckAdapter(of(2, "gate")), 1.0)
    registry.load(SimpleNamespace(lora_name="other", lora_path="/x"))
    with pytest.raises(RefusedError, match="holds 2 adapters at most"):
        await backend.perform(LoadAdapter(of(2, "a")), 1.0)
    registry.run("policy-v1", 2)
    for waited in (False, True):  # it would wait, and no call in process can be given up
        with pytest.raises(RefusedError, match="requests run on it"):
            await backend.perform(UnloadAdapter("policy-v1", waited), 1.0)
    registry.run("policy-v1", 0)
    await backend.perform(UnloadAdapter("policy-v1", waited=False), 1.0)
    assert (await backend.observe()).adapters == {"other": "/x"}
    made = [call.method for call in standin.calls if "lora" in call.method]
    assert made == ["load_lora_adapter", "unload_lora_adapter"]


@dataclass
class LoRAConfig:
    """vLLM's settings, as far as they are read."""

    max_lora_rank: int = 8
    max_loras: int = 2
    max_cpu_loras: int = 2


@pytest.mark.parametrize(("kind", "version"), releases("vllm"))
async def test_vllm_in_process_has_names_for_its_numbers(
    kind: Kind, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = ModuleType("vllm.lora.request")
    requests.LoRARequest = make_dataclass("LoRARequest", ["lora_name", "lora_int_id", "lora_path"])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, requests.__name__, requests)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(save_base(tmp_path / "base")), enable_sleep_mode=True),
        device_config=SimpleNamespace(device="cpu"),
        lora_config=LoRAConfig(),
    )
    tracked = SimpleNamespace(request_states={"one": SimpleNamespace(lora_name="policy-v1")}, parent_requests={})
    standin = stand_in(read(kind, version), vllm_config=config, output_processor=tracked, output_handler=None)
    backend = VLLMEngine(
        Identity(replica=0, node_rank=0), AsyncLLMClient(standin.engine), checkpoints=tmp_path, traces=tmp_path
    )
    await backend.open()
    seen = await backend.observe()
    assert Operation.ADAPTERS in seen.operations and seen.adapters == {}
    save_adapter(tmp_path / "a")
    await backend.perform(LoadAdapter(of(1, "a")), 1.0)
    assert (await backend.observe()).adapters == {"policy-v1": "a"}
    named = lora_request(standin.engine, "policy-v1")
    assert (named.lora_name, named.lora_path) == ("policy-v1", str(tmp_path / "a"))
    with pytest.raises(RefusedError, match="requests run on it"):
        await backend.perform(UnloadAdapter("policy-v1", waited=True), 1.0)
    tracked.request_states.clear()
    await backend.perform(UnloadAdapter("policy-v1", waited=False), 1.0)
    assert (await backend.observe()).adapters == {}
    made = [(call.method, *call.arguments.values()) for call in standin.calls if "lora" in call.method]
    assert made == [("add_lora", named), ("remove_lora", named.lora_int_id)]
    with pytest.raises(KeyError):
        lora_request(standin.engine, "policy-v1")
