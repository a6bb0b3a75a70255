"""What agents see of engines that refuse them, that are something else, and that hang."""

import asyncio
import logging
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from controlplane.bus.bus import Bus
from controlplane.record.log import RunLog
from schemas.config import AgentConfig, BusConfig
from schemas.errors import ConfigError, EngineError
from schemas.identity import Identity
from tests.engines.http_servers import HttpRequest, HttpServer, Reply
from workers.agent import Agent
from workers.engines.attached import AttachedEngine
from workers.engines.counters import CounterNames, Counters, read_counters
from workers.engines.observed import at_once
from workers.engines.probe import probe
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.in_process import TokenizerManagerClient
from workers.engines.sglang.server import SGLangServer
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.server import TinyClient
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.server import VLLMServer
from workers.link.heartbeat import status_of
from workers.machine.readiness import is_ready, is_wedged
from workers.router import routable

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PLACE = Identity(replica=0, node_rank=0)
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40)


def sglang(url: str, folder: Path) -> SGLangEngine:
    return SGLangEngine(PLACE, SGLangServer(url), checkpoints=folder, traces=folder)


def vllm(url: str, folder: Path) -> VLLMEngine:
    return VLLMEngine(PLACE, VLLMServer(url), checkpoints=folder, traces=folder)


class MultiTokenizerRouter:
    """Stands in for what SGLang has in front of several tokenizer managers. It cannot be asked anything."""

    def __init__(self) -> None:
        self.server_args = object()


async def test_a_router_in_the_place_of_a_tokenizer_manager_is_observed_as_absent(tmp_path: Path) -> None:
    client = TokenizerManagerClient(MultiTokenizerRouter())
    engine = SGLangEngine(PLACE, client, checkpoints=tmp_path, traces=tmp_path)
    await engine.open()
    observed = await engine.observe()
    assert observed.tokenizer == "absent" and not observed.operations
    assert "no front end of sglang" in str(observed.trouble)
    await engine.close()


Backend = Callable[[str, Path], AttachedEngine]  # type: ignore[type-arg]


@pytest.mark.parametrize("backend", [sglang, vllm])
@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "engine refuses this agent: {url} answers 401, check the API key"),
        (403, "engine refuses this agent: {url} answers 403, check the API key"),
        (404, "{url} has not the routes of an engine: it answers 404. Is it another server?"),
        (503, "engine is up and does not work: {url} answers 503"),
    ],
)
async def test_an_engine_that_refuses_says_why(backend: Backend, tmp_path: Path, status: int, says: str) -> None:
    with HttpServer(lambda request: (status, {"error": f"no {len(request.path)}"})) as server:
        engine = backend(server.url, tmp_path)
        seen = await engine.observe()
        assert (seen.tokenizer, seen.trouble) == ("unknown", says.format(url=server.url))
        assert await engine.observe() == seen  # news once
        await engine.close()


async def test_a_server_of_another_kind_on_that_port_is_named(tmp_path: Path) -> None:
    def shop(request: HttpRequest) -> Reply:
        return (200, {"paths": {"/basket": {"get": {}}}}) if request.path == "/openapi.json" else (404, {})

    with HttpServer(shop) as server:
        engine = sglang(server.url, tmp_path)
        seen = await engine.observe()
        assert seen.tokenizer == "absent" and seen.trouble is not None
        assert f"{server.url} is no front end of sglang" in seen.trouble
        await engine.close()


@pytest.mark.parametrize("backend", [sglang, vllm])
@pytest.mark.parametrize("lists", [{}, "<html>hello</html>", {"paths": {"/{path}": {"get": {}, "post": {}}}}])
async def test_a_server_that_answers_200_to_everything_is_no_engine(
    backend: Backend, tmp_path: Path, lists: object
) -> None:
    def agreeable(request: HttpRequest) -> Reply:
        return 200, lists if request.path == "/openapi.json" else {"status": "ok"}

    with HttpServer(agreeable) as server:
        engine = backend(server.url, tmp_path)
        await engine.open()
        seen = await engine.observe()
        says = f"{server.url} has not the routes of an engine: it answers 200. Is it another server?"
        assert (seen.tokenizer, seen.operations, seen.trouble) == ("unknown", frozenset(), says)
        found = await probe(server.url)
        assert found.kind == "unknown" and not found.has
        await engine.close()


# --- what was configured, and what an engine reports ------------------------------------------------------------------


def shaped(parallel: dict[str, object], **info: object) -> Callable[[HttpRequest], Reply]:
    """A server of either kind that reports these numbers."""
    answers: dict[str, Reply] = {
        "/openapi.json": (200, {"paths": {"/model_info": {"get": {}}}}),
        "/server_info": (200, {"version": "0.5.23", **info}),
        "/server_info?config_format=json": (200, {"vllm_config": {"parallel_config": parallel}}),
        "/version": (200, {"version": "0.32.0"}),
        "/model_info": (200, {"weight_version": "default"}),
    }
    return lambda request: answers.get(request.path, (404, {}))


ONE_GPU = {"world_size": 1, "data_parallel_size": 1, "nnodes": 1, "node_rank": 0}
EIGHT: dict[str, object] = {"tp_size": 8, "pp_size": 1, "dp_size": 1, "nnodes": 1, "node_rank": 0}
EXTERNAL = {"data_parallel_external_lb": True, "data_parallel_size": 16, "data_parallel_size_local": 1}


@pytest.mark.parametrize(
    ("backend", "parallel", "info", "place", "differs"),
    [
        (sglang, {}, EIGHT, {"gpus_per_node": 8}, ""),
        (sglang, {}, EIGHT, {}, r"reports 8 GPUs, and its agent was given 1 \(--nnodes 1, --gpus-per-node 1\)"),
        (sglang, {}, EIGHT | {"dp_size": 2}, {"gpus_per_node": 8}, "reports 16 GPUs, and its agent was given 8"),
        (sglang, {}, EIGHT | {"dp_size": 8, "enable_dp_attention": True}, {"gpus_per_node": 8}, ""),
        (sglang, {}, EIGHT | {"attn_dp_size": 8, "enable_dp_attention": True}, {"gpus_per_node": 8}, ""),
        (sglang, {}, EIGHT | {"nnodes": 2}, {"gpus_per_node": 4, "nnodes": 2}, ""),
        (sglang, {}, EIGHT | {"nnodes": 2}, {"gpus_per_node": 8}, "reports 2 nodes, and its agent was given 1"),
        (sglang, {}, EIGHT | {"nnodes": 2}, {"gpus_per_node": 4, "nnodes": 2, "node_rank": 1}, "is node rank 0"),
        (sglang, {}, {}, {"gpus_per_node": 8}, ""),
        (vllm, ONE_GPU, {}, {}, ""),
        (vllm, ONE_GPU, {}, {"gpus_per_node": 2}, "reports 1 GPUs, and its agent was given 2"),
        (vllm, ONE_GPU | {"world_size": 16}, {}, {"gpus_per_node": 8, "nnodes": 2}, ""),  # Ray counts no nodes
        (vllm, ONE_GPU | {"world_size": 16, "nnodes": 4}, {}, {"gpus_per_node": 8, "nnodes": 2}, "reports 4 nodes"),
        (vllm, ONE_GPU | {"world_size": 2} | EXTERNAL, {}, {"gpus_per_node": 2}, ""),
        (
            vllm,
            ONE_GPU | EXTERNAL | {"world_size": 16, "nnodes": 32, "node_rank": 6},
            {},
            {"gpus_per_node": 8, "nnodes": 2},
            "",
        ),
        (vllm, {}, {}, {"gpus_per_node": 8}, ""),
    ],
)
async def test_an_agent_whose_numbers_are_not_its_engines_does_not_start(
    backend: Backend,
    parallel: dict[str, object],
    info: dict[str, object],
    place: dict[str, int],
    differs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.PLACE", replace(PLACE, **place))
    with HttpServer(shaped(parallel, **info)) as server:
        engine = backend(server.url, tmp_path)
        if not differs:
            await engine.open()
            assert (await engine.observe()).tokenizer == "present"
        else:
            with pytest.raises(ConfigError, match=differs):
                await engine.open()
            later = await engine.observe()  # of an engine that came up after its agent
            assert later.tokenizer == "unknown" and re.search(differs, later.trouble or "")
        await engine.close()


async def test_an_engine_that_is_not_up_yet_is_no_trouble(tmp_path: Path) -> None:
    with HttpServer(lambda _: (200, {})) as server:
        engine = sglang(server.url, tmp_path)
    seen = await engine.observe()  # nothing listens any more
    assert (seen.tokenizer, seen.trouble) == ("unknown", None)
    await engine.close()


@pytest.mark.parametrize(
    ("key", "note"), [(None, "it asks for an API key (401)"), ("k", "it refuses the API key (401)")]
)
async def test_a_probe_that_is_refused_speaks_of_the_key(key: str | None, note: str) -> None:
    with HttpServer(lambda _: (401, {"error": "Unauthorized"})) as server:
        assert (await probe(server.url, key)).note == note


async def test_an_agent_warns_of_an_engine_that_refuses_it_and_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rolloutctl.agent")
    log = RunLog.open(tmp_path / "run.db")
    with HttpServer(lambda _: (401, {"error": "Unauthorized"})) as server:
        async with Bus("tcp://127.0.0.1:0", log, QUICK) as bus:
            agent = Agent(
                bus=bus.address,
                identity=PLACE,
                engine=sglang(server.url, tmp_path),
                state_dir=tmp_path,
                config=AgentConfig(hello_retry_ms=20, observe_ms=20),
            )
            async with agent, anyio.create_task_group() as tasks:
                tasks.start_soon(agent.run)
                with anyio.fail_after(20):
                    await agent.wait_until(lambda state: state.joined and state.engine.trouble is not None)
                    refused = f"engine refuses this agent: {server.url} answers 401, check the API key"
                    await bus.wait_until(lambda _: any(refused in line.condition for line in bus.status().agents))
                tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records].count(f"agent 0.0: {refused}") == 1


# --- counters ---------------------------------------------------------------------------------------------------------

METRICS = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="1",model_name="m {}"} 2.5e+03
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
"""


def test_counters_are_summed_over_their_labels() -> None:
    assert read_counters(METRICS, VLLMEngine.kind.counters) == Counters(3, 4, 3500)
    assert read_counters(METRICS, SGLangEngine.kind.counters) == Counters()
    assert read_counters("a 1\nb 2\nb 3\n", CounterNames("a", "w", ("b", "c"))) == Counters(1, None, 5)


@pytest.mark.parametrize(("metrics", "counters"), [((200, METRICS), (3, 3500)), ((404, {}), (None, None))])
async def test_a_server_is_asked_for_its_counters_if_it_has_them(
    tmp_path: Path, metrics: Reply, counters: tuple[int | None, int | None]
) -> None:
    paths: dict[str, object] = {"/pause": {"post": {}}, "/is_paused": {"get": {}}}
    answers: dict[str, Reply] = {
        "/openapi.json": (200, {"paths": paths}),
        "/server_info?config_format=json": (200, {"vllm_config": {}}),
        "/version": (200, {"version": "0.32.0"}),
        "/is_paused": (200, {"is_paused": False}),
        "/metrics": metrics,
    }
    with HttpServer(lambda request: answers.get(request.path, (404, {}))) as server:
        engine = vllm(server.url, tmp_path)
        for _ in range(3):
            seen = await engine.observe()
            assert (seen.tokenizer, seen.trouble, seen.running, seen.generated) == ("present", None, *counters)
        asked = [request.path for request in server.requests].count("/metrics")
        assert asked == (3 if counters[0] is not None else 1)
        await engine.close()


# --- an engine that hangs ---------------------------------------------------------------------------------------------


def hang_within_a_request(engine: TinyEngine, goes_on: threading.Event) -> None:
    """Let the engine's thread hang between two forwards of the next request."""
    scheduler = engine._scheduler
    assert scheduler is not None

    def turn() -> None:
        if any(request.versions for request in scheduler._requests):
            goes_on.wait()
        else:
            scheduler._thread.submit(turn)

    scheduler._thread.submit(turn)


async def test_an_engine_that_answers_and_generates_nothing_is_wedged_until_it_goes_on(tmp_path: Path) -> None:
    engine = TinyEngine(PLACE, checkpoints=tmp_path, traces=tmp_path, serve=f"ipc://{tmp_path}/front")
    client, goes_on = TinyClient(f"ipc://{tmp_path}/front", timeout_s=60), threading.Event()
    log = RunLog.open(tmp_path / "run.db")
    async with Bus("tcp://127.0.0.1:0", log, QUICK) as bus:
        config = AgentConfig(hello_retry_ms=20, observe_ms=20, wedged_after_s=1)
        agent = Agent(bus=bus.address, identity=PLACE, engine=engine, state_dir=tmp_path, config=config)
        async with agent, anyio.create_task_group() as tasks:
            tasks.start_soon(agent.run)
            with anyio.fail_after(30), ThreadPoolExecutor() as pool:
                await agent.wait_ready()
                hang_within_a_request(engine, goes_on)
                hang = pool.submit(client.generate, [[1, 2, 3]], 60)
                try:
                    state = await agent.wait_until(is_wedged)
                    assert not is_ready(state) and not routable(state) and state.engine.generating
                    await bus.wait_until(lambda _: any("wedged" in line.condition for line in bus.status().agents))
                    assert status_of(state).wedged and not hang.done()
                finally:
                    goes_on.set()
                await agent.wait_until(is_ready)
                assert len(hang.result()[0].tokens) == 60
            tasks.cancel_scope.cancel()


async def test_what_an_observation_reads_is_read_at_once() -> None:
    all_begun, begun = anyio.Event(), list[int]()

    def read(place: int) -> Callable[[], Awaitable[int]]:
        async def wait_for_the_others() -> int:
            begun.append(place)
            if len(begun) == 3:
                all_begun.set()
            await all_begun.wait()
            return place

        return wait_for_the_others

    with anyio.fail_after(10):
        assert await at_once(*map(read, range(3))) == [0, 1, 2]


@pytest.mark.parametrize("raised", [EngineError("no"), asyncio.CancelledError()], ids=["error", "cancelled"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_reading_that_fails_or_is_cancelled_from_within_fails_all_of_them(raised: BaseException) -> None:
    async def fails() -> int:
        raise raised

    async def succeeds() -> int:
        return 1

    with pytest.raises(EngineError, match="no|was cancelled"):
        await at_once(succeeds, fails)
