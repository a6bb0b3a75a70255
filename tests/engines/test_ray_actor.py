"""The backend of verl's servers, over real Ray actors that have verl's methods; and one agent for each node of them."""

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
from ray.exceptions import RayActorError

from controlplane import ControlPlane
from schemas import events
from schemas.commands import Checkpoint, ProfilePlan, Window
from schemas.config import AgentConfig, BusConfig
from schemas.desired import ProfileSession
from schemas.errors import ConfigError, EngineError, RefusedError, UnsupportedError
from schemas.identity import Identity, Operation, RolloutMode, Tag
from tests.engines.verl_servers import Server, SGLangHttpServer, vLLMHttpServer
from tests.running import python
from workers.agent import Agent
from workers.engines.verl import engine as verl_engine
from workers.engines.verl.engine import VerlEngine
from workers.traces.node import NodeTraces

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.xdist_group("ray")]

PRIMARY = Identity(replica=0, node_rank=0, nnodes=2)
OBSERVER = Identity(replica=0, node_rank=0, mode=RolloutMode.OBSERVED)
SECOND = Identity(replica=0, node_rank=1, nnodes=2)
CACHE: frozenset[Tag] = frozenset({"kv_cache"})
WEIGHTS: frozenset[Tag] = frozenset({"weights"})
BOTH = CACHE | WEIGHTS
STEERING = frozenset({Operation.PAUSE, Operation.RESUME, Operation.FLUSH, Operation.PROFILE, Operation.LOAD})
MEMORY = frozenset({Operation.SLEEP, Operation.WAKE})


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # "local": a cluster of its own, even if another one runs on this machine.
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    yield
    ray.shutdown()


class Bench:
    """One server, and the engine that commands it."""

    def __init__(self, server: Any, folder: Path, identity: Identity = PRIMARY) -> None:
        self.server, self.folder = server, folder
        self.engine = VerlEngine(server, identity, traces=folder / "traces")

    def within(self, look: Callable[[Any], Any]) -> Any:
        """Run a function of the server inside the actor."""
        return ray.get(self.server.__ray_call__.remote(look))

    @property
    def called(self) -> list[str]:
        """Return the methods that were called since the last time."""

        def take(server: Server) -> list[str]:
            called, server.called = server.called, []
            return called

        called: list[str] = self.within(take)
        return called

    async def do(self, call: events.EngineCall, timeout_s: float = 60.0) -> events.Returned:
        return await self.engine.perform(call, timeout_s)

    async def refuses(self, call: events.EngineCall, *words: str) -> None:
        """Check that the call is refused with this message, and that no method of the server was called."""
        with pytest.raises(EngineError) as refusal:
            await self.do(call, 0.0)
        assert all(word in str(refusal.value) for word in words), str(refusal.value)
        assert self.called == []


@asynccontextmanager
async def bench(
    kind: type[Server], *given: Any, folder: Path, identity: Identity = PRIMARY, **options: Any
) -> AsyncIterator[Bench]:
    """A separate server, for tests that end it or watch it launch. An actor takes a second to start."""
    server = ray.remote(kind).options(num_cpus=0, **options).remote(*given)
    made = Bench(server, folder, identity)
    await made.engine.open()
    try:
        yield made
    finally:
        await made.engine.close()
        ray.kill(server)
        with suppress(RayActorError):  # a kill does not wait for the end, and until then it may still answer
            while True:
                ray.get(server.__ray_ready__.remote())


@pytest.fixture(scope="module")
def servers(cluster: None) -> dict[type[Server], Any]:
    """One of each kind, for all other tests. `fresh` initializes it again for each test."""
    kinds = (SGLangHttpServer, vLLMHttpServer)
    return {kind: ray.remote(kind).options(num_cpus=0).remote("hybrid") for kind in kinds}


@asynccontextmanager
async def fresh(server: Any, folder: Path, *given: Any) -> AsyncIterator[Bench]:
    made = Bench(server, folder)

    def make(server: Any) -> None:
        vars(server).clear()
        server.__init__(*given)

    made.within(make)
    ray.get(server.launch_server.remote())
    await made.engine.open()
    yield made
    await made.engine.close()


@pytest.fixture
async def sglang(servers: dict[type[Server], Any], tmp_path: Path) -> AsyncIterator[Bench]:
    async with fresh(servers[SGLangHttpServer], tmp_path, "hybrid") as made:
        yield made


@pytest.fixture
async def vllm(servers: dict[type[Server], Any], tmp_path: Path) -> AsyncIterator[Bench]:
    async with fresh(servers[vLLMHttpServer], tmp_path, "hybrid", 0, 0, str(tmp_path / "save")) as made:
        yield made


@pytest.fixture
async def profiled(servers: dict[type[Server], Any], tmp_path: Path) -> AsyncIterator[Bench]:
    """The SGLang server, with verl's profiler."""
    async with fresh(servers[SGLangHttpServer], tmp_path, "colocated", 0, 0, str(tmp_path / "save")) as made:
        yield made


def start(step: int = 1, **plan: Any) -> events.StartProfile:
    return events.StartProfile(ProfileSession(step, ProfilePlan(**plan)), f"global_step_{step}/replica_0")


def stop(step: int = 1) -> events.StopProfile:
    return events.StopProfile(ProfileSession(step, ProfilePlan()), f"global_step_{step}/replica_0")


async def test_each_call_is_one_method_and_does_what_it_says(sglang: Bench) -> None:
    seen = await sglang.engine.observe()
    assert (seen.engine, seen.tokenizer) == ("verl SGLangHttpServer", "present")
    assert seen.operations == STEERING | MEMORY
    # What verl's checkpoint manager changes by itself is not told: the machine would change it back.
    assert (seen.generating, seen.asleep, seen.profiling, seen.version) == (None, None, None, None)

    def held(server: Any) -> tuple[Any, ...]:
        front = server.tokenizer_manager
        return front.is_pause, set(front.released), front.prefixes

    sglang.within(lambda server: server.tokenizer_manager.requests.update(a=1))
    await sglang.do(events.Pause("abort"))
    assert sglang.within(held) == (True, set(), 7)
    await sglang.do(events.Flush())
    assert sglang.within(held) == (True, set(), 0)
    await sglang.do(events.Sleep(CACHE))
    assert sglang.within(held) == (True, {"kv_cache"}, 0)
    await sglang.do(events.Wake(CACHE))
    await sglang.do(events.Resume())
    assert sglang.within(held) == (False, set(), 0)
    assert sglang.called == [
        *("abort_all_requests", "clear_kv_cache", "release_kv_cache", "resume_kv_cache", "resume_generation")
    ]


async def test_what_no_method_can_do_is_refused_and_nothing_is_called(sglang: Bench) -> None:
    await sglang.refuses(events.Pause("wait"), "'wait'", "abort_all_requests, aborts")
    await sglang.refuses(events.Pause("keep"), "'keep'")
    await sglang.refuses(events.Abort(), "no method for abort")
    await sglang.refuses(events.Load(1, Checkpoint("v1"), None), "no method that loads weights")
    await sglang.refuses(
        events.Sleep(BOTH), "release kv_cache and weights", "mode hybrid", "restore unchanged: kv_cache."
    )
    await sglang.refuses(events.Sleep(WEIGHTS), "release weights")
    await sglang.refuses(events.Wake(WEIGHTS), "restore weights")
    await sglang.refuses(events.Sleep(CACHE), "generates", "Pause it first")
    sglang.within(lambda server: setattr(server.config, "free_cache_engine", False))
    await sglang.refuses(events.Sleep(CACHE), "free_cache_engine False", "nothing")
    assert (await sglang.engine.observe()).operations == STEERING


@pytest.mark.parametrize(
    ("mode", "level", "adapters", "releases"),
    [
        ("hybrid", 1, False, [BOTH, CACHE]),
        ("hybrid", 1, True, [CACHE]),
        ("hybrid", 2, False, []),
        ("colocated", 2, False, [BOTH]),
        ("standalone", 1, False, [CACHE]),
        ("standalone", 2, False, []),
    ],
)
async def test_vllm_releases_only_what_it_can_restore(
    vllm: Bench, mode: str, level: int, adapters: bool, releases: list[frozenset[Tag]]
) -> None:
    def configure(server: Any) -> None:
        server.rollout_mode = type(server.rollout_mode)(mode)
        server.level, server.lora_as_adapter, server._submission_paused = level, adapters, True

    vllm.within(configure)
    assert (await vllm.engine.observe()).operations == (STEERING | MEMORY if releases else STEERING)
    for tags in (BOTH, CACHE, WEIGHTS):
        if tags not in releases:
            await vllm.refuses(events.Sleep(tags), "restore unchanged")
            continue
        await vllm.do(events.Sleep(tags))
        assert vllm.within(lambda server: server.engine.released) == tags
        await vllm.do(events.Wake(tags))
        assert vllm.within(lambda server: server.engine.released) == set()
        assert len(vllm.called) == 2


async def test_vllm_restores_the_weights_alone(vllm: Bench) -> None:
    await vllm.do(events.Pause("abort"))
    await vllm.do(events.Sleep(BOTH))
    await vllm.do(events.Wake(WEIGHTS))
    assert vllm.within(lambda server: server.engine.released) == {"kv_cache"}
    await vllm.do(events.Wake(CACHE))
    assert vllm.called == ["abort_all_requests", "sleep", "wake_up", "resume_kv_cache"]


async def test_an_error_that_the_server_swallowed_is_reported(vllm: Bench) -> None:
    vllm.within(lambda server: setattr(server, "answer", {"error": "no attribute 'engine'"}))
    with pytest.raises(EngineError, match="abort_all_requests failed: no attribute 'engine'"):
        await vllm.do(events.Pause("abort"))
    assert vllm.called == ["abort_all_requests"]


async def test_a_cache_is_dropped_when_no_request_runs(sglang: Bench) -> None:
    sglang.within(lambda server: server.tokenizer_manager.requests.update(a=1))
    await sglang.refuses(events.Flush(), "1 requests run", "pause first")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sglang.do, events.Flush())
        sglang.within(lambda server: server.tokenizer_manager.requests.clear())
    assert sglang.within(lambda server: server.tokenizer_manager.flushed) == 1


async def test_a_success_that_the_server_itself_contradicts_is_a_failure(sglang: Bench) -> None:
    sglang.within(lambda server: setattr(server.tokenizer_manager, "deaf", True))
    with pytest.raises(EngineError, match="accepted abort_all_requests, but is not paused"):
        await sglang.do(events.Pause("abort"))
    with pytest.raises(EngineError, match="accepted resume_generation, but is still paused"):
        await sglang.do(events.Resume())


async def test_an_error_that_a_method_raises_is_quoted(profiled: Bench) -> None:
    await profiled.engine.observe()
    with pytest.raises(EngineError, match=r"SGLangHttpServer\.stop_profile raised RuntimeError: Profiling is not in"):
        await profiled.do(stop())


async def test_a_colocated_server_restores_all_memory_at_once(profiled: Bench) -> None:
    profiled.within(lambda server: setattr(server.tokenizer_manager, "is_pause", True))
    await profiled.do(events.Sleep(BOTH))
    assert profiled.within(lambda server: server.tokenizer_manager.released) == BOTH
    await profiled.do(events.Wake(BOTH))
    assert profiled.called == ["sleep", "wake_up"]


# --- launching, dead, another -----------------------------------------------------------------------------------------


async def test_a_server_that_launches_is_unknown_and_one_without_a_front_end_absent(tmp_path: Path) -> None:
    async with bench(SGLangHttpServer, "hybrid", folder=tmp_path) as made:
        launching = await made.engine.observe()
        assert (launching.tokenizer, launching.operations) == ("unknown", STEERING | MEMORY)
        made.within(lambda server: setattr(server, "tokenizer_manager", None))
        assert (await made.engine.observe()).tokenizer == "absent"
        ray.get(made.server.launch_server.remote())
        assert (await made.engine.observe()).tokenizer == "present"


async def test_a_second_node_is_never_called(tmp_path: Path) -> None:
    async with bench(SGLangHttpServer, "hybrid", 1, folder=tmp_path, identity=SECOND) as made:
        ray.get(made.server.launch_server.remote())
        engine = made.engine
        assert await engine.observe() == events.Observation(engine="verl server", tokenizer="absent")
        with pytest.raises(EngineError, match="no front end"):
            await engine.perform(events.Flush(), 1.0)
        assert made.called == []


async def test_a_dead_server_is_unknown_with_a_reason_and_its_namesake_is_another_instance(tmp_path: Path) -> None:
    engine = VerlEngine("sglang_server_0_0", PRIMARY, traces=tmp_path)
    await engine.open()
    assert await engine.observe() == events.Observation(engine="verl server", tokenizer="unknown")
    with pytest.raises(EngineError, match="actor was not found: .*'sglang_server_0_0'"):
        await engine.perform(events.Flush(), 1.0)
    instances = []
    for _ in range(2):
        async with bench(SGLangHttpServer, "hybrid", folder=tmp_path, name="sglang_server_0_0") as made:
            ray.get(made.server.launch_server.remote())
            seen = await engine.observe()
            assert seen.tokenizer == "present"
            instances.append(seen.instance)
        assert (await engine.observe()).tokenizer == "unknown"
    assert instances[0] != instances[1]
    handle = VerlEngine(made.server, PRIMARY, traces=tmp_path)
    with pytest.raises(EngineError, match="is dead, and whether __ray_call__ .* killed by `ray.kill`"):
        await handle.perform(events.Flush(), 1.0)


async def test_a_restarted_server_is_another_instance_and_gets_no_call_twice(tmp_path: Path) -> None:
    restarted: dict[str, Any] = {"max_restarts": 1, "max_task_retries": -1}
    async with bench(SGLangHttpServer, "hybrid", folder=tmp_path, **restarted) as made:
        ray.get(made.server.launch_server.remote())
        before = (await made.engine.observe()).instance
        made.within(lambda server: setattr(server, "dies_in", "clear_kv_cache"))
        with pytest.raises(EngineError, match="clear_kv_cache"):
            await made.do(events.Flush())
        assert made.called == []
        after = await made.engine.observe()
        assert (after.tokenizer, after.instance == before) == ("unknown", False)


async def test_a_server_that_does_not_answer_is_unknown_until_it_does(
    sglang: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verl_engine, "INSPECT_TIMEOUT_S", 0.3)
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    held = sglang.server.hold.remote(str(fifo))
    with await anyio.to_thread.run_sync(open, fifo, "w"):  # it opens when the other side reads
        assert (await sglang.engine.observe()).tokenizer == "unknown"
        with pytest.raises(EngineError, match="did not answer within"):
            await sglang.do(events.Flush())
    ray.get(held)
    monkeypatch.undo()
    assert (await sglang.engine.observe()).tokenizer == "present"


@pytest.mark.parametrize(
    ("sizes", "nnodes", "node_rank", "differs"),
    [
        ((8, 1, 1), 2, 0, r"reports 8 GPUs, and its agent was given 16 \(--nnodes 2, --gpus-per-node 8\)"),
        ((8, 2, 1), 1, 0, "reports 1 nodes, and its agent was given 2"),
        ((4, 2, 2), 2, 1, "is node rank 1 of its replica, and its agent was given --node-rank 0"),
    ],
)
async def test_an_agent_whose_numbers_are_not_its_servers_does_not_start(
    sglang: Bench, sizes: tuple[int, ...], nnodes: int, node_rank: int, differs: str, tmp_path: Path
) -> None:
    kinds = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    sglang.within(lambda server: vars(server.config).update(zip(kinds, sizes, strict=True)))
    sglang.within(lambda server: vars(server).update(nnodes=nnodes, node_rank=node_rank))
    engine = VerlEngine(sglang.server, Identity(replica=0, node_rank=0, nnodes=2, gpus_per_node=8), traces=tmp_path)
    with pytest.raises(ConfigError, match=differs):
        await engine.open()
    assert differs[:9] in str((await engine.observe()).trouble)
    with pytest.raises(RefusedError, match=differs):
        await engine.perform(events.Flush(), 1.0)


async def test_an_actor_that_is_not_a_server_of_verl_is_an_error(tmp_path: Path) -> None:
    class Other:
        rollout_mode = 1
        lora_as_adapter = False

        def _resolve_sleep_level(self) -> str:
            return "two"

    engine = VerlEngine(ray.remote(Other).options(num_cpus=0).remote(), PRIMARY, traces=tmp_path)
    await engine.open()
    with pytest.raises(EngineError, match="is not like verl's servers"):
        await engine.perform(events.Flush(), 1.0)
    assert (await engine.observe()).operations == frozenset()


@pytest.mark.parametrize(
    ("before", "message"),
    [("", "in no Ray cluster"), ("import sys; sys.modules['ray'] = None", "its extra `ray`")],
)
def test_a_process_without_ray_gets_advice(before: str, message: str) -> None:
    code = f"""
{before}
import anyio
from pathlib import Path
from schemas.identity import Identity
from workers.engines.verl.engine import VerlEngine
anyio.run(VerlEngine("any", Identity(replica=0, node_rank=1, nnodes=2), traces=Path()).open)
anyio.run(VerlEngine("any", Identity(replica=0, node_rank=0), traces=Path()).open)
"""
    done = python("-c", code)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("schemas.errors.E") and message in last


# --- profiles ---------------------------------------------------------------------------------------------------------


async def test_the_traces_of_a_session_are_brought_to_its_directory(profiled: Bench, tmp_path: Path) -> None:
    own = tmp_path / "save" / "agent_loop_rollout_replica_0"
    await profiled.do(start(1))
    assert profiled.within(lambda server: server.tokenizer_manager.recording) == {"output_dir": str(own)}
    first = await profiled.do(stop(1))
    profiled.within(lambda server: setattr(server.profiler_controller.config, "relocate_results", True))
    await profiled.do(start(2))
    second = await profiled.do(stop(2))
    # Both nodes' ranks are there, since these share a disk; each node tells of its own.
    at = "global_step_{0}/replica_0/{1}{0}-TP-{2}.trace.json.gz"
    moved = "rollout-replica0-globalrank0_"
    assert [trace.path for trace in first.traces] == [at.format(1, "", 0)]
    assert [trace.path for trace in second.traces] == [at.format(2, moved, 0)]
    other = NodeTraces(tmp_path / "traces", SECOND)
    for step, before in ((1, ""), (2, moved)):
        session = ProfileSession(step, ProfilePlan())
        collected = await other.perform(events.CollectTraces(session, f"global_step_{step}/replica_0"))
        assert [trace.path for trace in collected.traces] == [at.format(step, before, 1)]
    # verl's own hooks find theirs where they were.
    assert sorted(file.name for file in own.iterdir()) == ["1-TP-0.trace.json.gz", "1-TP-1.trace.json.gz"]
    assert len(list((tmp_path / "save").glob(f"{moved}2-TP-*"))) == 2
    with pytest.raises(EngineError, match="holds files already"):
        await profiled.do(start(1))


async def test_on_another_disk_the_traces_are_copied(
    profiled: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)
    await profiled.do(start())
    (trace,) = (await profiled.do(stop())).traces
    assert (tmp_path / "traces" / trace.path).stat().st_nlink == 1


async def test_a_repeated_stop_overwrites_nothing(profiled: Bench, tmp_path: Path) -> None:
    await profiled.do(start())
    first = await profiled.do(stop())
    ray.get(profiled.server.start_profile.remote())
    again = await profiled.do(stop())
    assert again.traces[: len(first.traces)] == first.traces
    assert len(again.traces) == len(first.traces) + 1


async def test_vllm_gets_no_argument_that_it_does_not_know(vllm: Bench) -> None:
    await vllm.do(start())
    assert vllm.within(lambda server: server.engine.given) == [{}]
    assert [trace.path for trace in (await vllm.do(stop())).traces] == ["global_step_1/replica_0/1-TP-0.trace.json.gz"]


async def test_a_server_without_its_own_profiler_gets_the_plan(sglang: Bench, tmp_path: Path) -> None:
    await sglang.do(start(4, activities=frozenset({"cpu", "cuda"}), with_stack=True, merge=True))
    (given,) = sglang.within(lambda server: server.tokenizer_manager.given)
    assert given == {
        "output_dir": str(tmp_path / "traces" / "global_step_4" / "replica_0"),
        "activities": ["CPU", "GPU"],
        "with_stack": True,
        "record_shapes": False,
        "merge_profiles": True,
    }
    (trace,) = (await sglang.do(stop(4))).traces
    assert trace.path == "global_step_4/replica_0/1-TP-0.trace.json.gz"
    assert sglang.called == ["start_profile", "stop_profile"]
    await sglang.refuses(start(5, window=Window(0, 3)), "take no window")


@pytest.mark.parametrize(
    ("configured", "plan", "why"),
    [
        ({"enabled": False}, {}, "enable is off"),
        ({"selected": False}, {}, "leave this replica out"),
        ({"discrete": False}, {}, "discrete is off"),
        ({}, {"tool": "npu"}, "with tool npu: the tool of its rollout.profiler is torch"),
        ({}, {"window": Window(0, 3)}, "take no window"),
        ({}, {"by_stage": True}, "by stage"),
        ({}, {"merge": True}, "nothing that merges"),
        ({}, {"with_stack": True, "record_shapes": True}, "record stack, shapes: the contents"),
        ({}, {"with_modules": True}, "record stack: the contents"),
        ({}, {"activities": frozenset()}, "name at least one activity"),
        ({}, {"activities": frozenset({"memory"})}, "record memory: the contents"),
    ],
)
async def test_a_plan_that_the_server_would_not_follow_is_refused(
    profiled: Bench, configured: dict[str, bool], plan: dict[str, Any], why: str
) -> None:
    profiled.within(lambda server: server.profiler_controller.__dict__.update(configured))
    started = start(**plan)
    for call in (events.CheckProfile(started.session.plan), started):
        with pytest.raises(UnsupportedError, match=why):
            await profiled.do(call)
    assert profiled.called == []
    assert not (profiled.folder / "traces").exists()


async def test_what_the_server_records_beyond_the_plan_is_no_reason_to_refuse(profiled: Bench) -> None:
    profiled.within(lambda server: server.profiler_controller.tool_config.contents.extend(["stack", "shapes", "cuda"]))
    await profiled.do(start(with_stack=True))
    profiled.within(lambda server: setattr(server.profiler_controller.tool_config, "profile_token_end", 9))
    assert profiled.called == ["start_profile"]
    await profiled.refuses(start(2), "profile_token_start or profile_token_end")


async def test_a_window_is_taken_if_it_is_the_servers_own_and_counted_from_the_start(
    vllm: Bench, profiled: Bench
) -> None:
    """Both come from the same YAML. SGLang counts its first step from the launch, so it records another window."""

    def bound(server: Any) -> None:
        server.profiler_controller.tool_config.profile_token_start = 2
        server.profiler_controller.tool_config.profile_token_end = 9

    vllm.within(bound)
    profiled.within(bound)
    await vllm.do(events.CheckProfile(ProfilePlan(window=Window(2, 9))))
    for window in (Window(2), Window(0, 9), Window(2, 8)):
        await vllm.refuses(start(window=window), r"that of its rollout.profiler is [2, 9)")
    await vllm.do(start(window=Window(2, 9)))
    assert vllm.called == ["start_profile"]
    await profiled.refuses(start(window=Window(2, 9)), "SGLang counts it from its launch")


async def test_the_label_of_the_weights_is_read_and_no_weights_are_fetched(sglang: Bench) -> None:
    assert (await sglang.engine.observe()).label == ""
    ray.get(sglang.server.set_global_steps.remote(0))
    seen = await sglang.engine.observe()
    assert seen.label == "0" and Operation.LOAD in seen.operations and seen.version is None
    sglang.within(lambda server: delattr(server, "global_steps"))
    assert (await sglang.engine.observe()).label is None
    sglang.within(lambda server: setattr(server, "global_steps", 0))
    load = events.Load(1, Checkpoint("step_1"), None)
    with pytest.raises(UnsupportedError, match="Sync with Pushed"):
        await sglang.do(load)


# --- with agents and a bus --------------------------------------------------------------------------------------------


async def test_one_profile_is_broadcast_to_both_nodes_of_a_replica(profiled: Bench, tmp_path: Path) -> None:
    """Node rank 0 acts; on node rank 1, whose every method would fail, nothing is called and nothing fails."""
    quick = AgentConfig(hello_retry_ms=20, observe_ms=50)
    config = BusConfig(head_interval_ms=50, heartbeat_ms=100, retransmit_ms=200)
    async with AsyncExitStack() as stack:
        headless = await stack.enter_async_context(
            bench(SGLangHttpServer, "colocated", 1, folder=tmp_path, identity=SECOND)
        )
        ray.get(headless.server.launch_server.remote())
        address = f"ipc://{tmp_path}/bus"
        plane = await stack.enter_async_context(ControlPlane(address, log=tmp_path / "run.db", config=config))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)

        async def run(place: Identity, bench: Bench) -> None:
            engine = VerlEngine(bench.server, place, traces=tmp_path / "traces")
            async with Agent(bus=address, identity=place, engine=engine, state_dir=tmp_path, config=quick) as agent:
                await agent.run()

        tasks.start_soon(run, PRIMARY, profiled)
        tasks.start_soon(run, SECOND, headless)
        await plane.wait_for_agents(2)
        started = await plane.start_profile(7, ProfilePlan())
        stopped = await plane.stop_profile(7)
        for report in (started, stopped):
            assert (report.acted, report.skipped, report.failed) == (("0.0",), ("0.1",), ())
        slept, woken = await plane.sleep(), await plane.wake()
        assert (slept.acted, woken.acted) == (("0.0",), ("0.0",))
        refused = await plane.pause("wait")
        assert refused.failed == ("0.0",)
        ended = await plane.abort_requests()
        assert ended.failed == ("0.0",)
        assert profiled.called == [
            "resume_generation",  # it does not say whether it was paused when it was found
            *("start_profile", "stop_profile", "abort_all_requests", "sleep", "wake_up", "resume_generation"),
        ]
        assert headless.called == []


# --- observed ---------------------------------------------------------------------------------------------------------


async def test_a_server_that_is_only_observed_is_inspected_and_no_method_of_it_is_called(
    sglang: Bench, vllm: Bench
) -> None:
    for server in (sglang, vllm):
        view = VerlEngine(server.server, OBSERVER, traces=server.folder)
        await view.open()
        seen = await view.observe()
        assert (seen.tokenizer, seen.generating, seen.label) == ("present", True, "")
        await server.server.set_global_steps.remote(7)
        await server.server.abort_all_requests.remote()
        assert server.called == ["set_global_steps", "abort_all_requests"]
        seen = await view.observe()
        assert (seen.generating, seen.label, seen.version) == (False, "7", 7)
        await view.close()
        assert server.called == []
