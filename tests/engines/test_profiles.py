"""Profiles of each engine through a trainer's bus and agents: a plan's traces hold what it says, or it is refused.

SGLang's replica 0 has a node for each of its two ranks. vLLM's replica 0 was launched to record nothing but the passes,
replica 1 with stacks, shapes and memory as well, which vLLM then records whether or not they are asked for.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psutil
import pytest
from anyio import to_thread
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile, record_function

from controlplane import ControlPlane
from schemas.commands import Finish, ProfileActivity, ProfileCommand, ProfilePlan, Window
from schemas.desired import ProfileSession
from schemas.errors import EngineError
from schemas.events import Resume, StartProfile, StopProfile
from schemas.identity import Identity
from schemas.outcomes import Acted, ErrorKind, Reason, Skipped, Trace
from tests.engines.profiles import (
    CONTENTS,
    FEW,
    MATRIX,
    ORTHOGONAL,
    PASSES,
    VLLM_PASSES,
    WITHIN,
    Found,
    Row,
    look,
    look_into,
    of_rank,
    torch_plan,
    within,
    work,
)
from tests.engines.reports import BUS, acted, conclusions, failed, refuses
from tests.engines.servers import AgentProcess, generate, wait_for
from tests.engines.sglang_fleet import SGLangFleet
from tests.engines.vllm_fleet import VLLMFleet
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.server import TinyClient

EVERYTHING = frozenset({"stack", "shapes", "memory"})
BY_STAGE = ProfilePlan(by_stage=True, window=Window(0, 2))


class Bench(ABC):
    """A fleet of one engine and its sessions. Each has a step of its own.

    passes: those of `work`.   plain: contents that every replica of it records, enough to tell the passes.
    nodes: the agents that leave traces, each of one rank.   target: the folder that the engine writes into.
    """

    kind: ClassVar[str]
    passes: ClassVar[list[str]] = PASSES
    plain: ClassVar[tuple[str, ...]] = ("cpu",)
    nodes: ClassVar[tuple[str, ...]] = ("0.0",)
    steps = count(101)

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.root, self.step = plane, folder / "traces", 100
        self.target = self.root

    @abstractmethod
    def work(self, replica: int = 0) -> None: ...

    def session(self, plan: ProfilePlan, replica: int = 0) -> list[Acted]:
        """The outcomes of one session, of each node that has traces."""
        self.start(plan, replica)
        self.work(replica)
        return self.stop(plan, replica)

    def start(self, plan: ProfilePlan, replica: int = 0) -> None:
        self.step = next(self.steps)
        acted(self.plane.start_profile(self.step, plan, replicas=[replica]).wait(), f"{replica}.0")

    def stop(self, plan: ProfilePlan, replica: int = 0) -> list[Acted]:
        stopped = self.plane.stop_profile(self.step, replicas=[replica], timeout=300).wait()
        return [acted(stopped, f"{replica}.0")]

    def first(self, plan: ProfilePlan, replica: int = 0) -> tuple[Acted, list[Found]]:
        """The outcome of the first node of one session, and what is in the traces of its rank."""
        outcome = self.session(plan, replica)[0]
        return outcome, self.found(outcome, replica)

    def found(self, outcome: Acted, rank: int, stage: str = ".trace.json") -> list[Found]:
        return [look(self.root, trace) for trace in of_rank(outcome, rank, stage)]

    def refuses(self, plan: ProfilePlan, why: str, replica: int = 0) -> None:
        self.step = next(self.steps)
        refuses(self.plane, self.step, plan, why, replica)

    def check(self, plan: ProfilePlan, replica: int = 0) -> None:
        command = ProfileCommand(action="check", step=0, plan=plan)
        acted(self.plane.publish(command, replicas=[replica]).wait(), f"{replica}.0")

    def holds(self, row: Row) -> None:
        """Check that a session records what a row wants."""
        self.check(row.plan)
        outcome, (found,) = self.first(row.plan)
        assert found.contents == row.wanted
        assert found.passes == (
            row.passes if self.kind != "tiny" or "shapes" in row.wanted else ["?"] * len(row.passes)
        )
        assert outcome.auto_stopped == (row.window is not None) and outcome.ranks_without_trace == ()

    def selected(self, contents: str, ranks: tuple[int, ...]) -> tuple[int, tuple[int, int] | None]:
        """The replica that has these ranks and can record these contents, and a window that keeps the trace small."""
        return (1 if ranks else 0), None

    @abstractmethod
    def writer(self) -> tuple[psutil.Process, int]:
        """The process that writes a trace, and the most bytes of a file with which it can't."""


class TinyBench(Bench):
    """Two replicas of one rank, each in a process of its own."""

    kind, plain = "tiny", ("cpu", "shapes")

    def __init__(self, folder: Path, open_: ExitStack) -> None:
        plane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder)
        )
        super().__init__(plane, folder)
        self.clients, self.agents = [], []
        for replica in (0, 1):
            front = f"ipc://{folder}/front-{replica}"
            options = ("--engine", "tiny", "--serve", front, "--finish-hook", "true")
            agent = AgentProcess(self.plane.address, folder, f"{replica}.0", 1, *options)
            self.agents.append(open_.enter_context(agent))
            self.clients.append(TinyClient(front, timeout_s=30))
        self.plane.wait_for_agents(2, timeout=60).wait()

    def work(self, replica: int = 0) -> None:
        self.plane.flush().wait()  # no prefixes kept from before
        client = self.clients[replica]
        work(lambda prompt, tokens: client.generate([[token % 32 for token in prompt]], tokens))

    def writer(self) -> tuple[psutil.Process, int]:
        largest = max(file.stat().st_size for file in (self.root.parent / "state").iterdir())
        return psutil.Process(self.agents[0].process.pid), largest + 50_000


class SGLangBench(Bench):
    """One replica over two nodes, which profiles both."""

    kind, nodes = "sglang", ("0.0", "0.1")
    refusal = "did not start"

    def __init__(self, fleet: SGLangFleet) -> None:
        super().__init__(fleet.plane, fleet.folder)
        self.url, self.generate = fleet.urls[0], partial(generate, "sglang", fleet.urls[0], model=fleet.model)
        self.foreign = fleet.folder / "foreign"
        self.foreign_body = {"output_dir": str(self.foreign), "activities": ["CPU"], "with_stack": False}

    def work(self, replica: int = 0) -> None:
        self.plane.flush(replicas=[0]).wait()
        work(self.generate)

    def stop(self, plan: ProfilePlan, replica: int = 0) -> list[Acted]:
        """Of rank 1, those that it left in the folder of its node."""
        outcomes = super().stop(plan)
        return [*outcomes, acted(self.plane.collect_traces(self.step, plan, replicas=[0]).wait(), "0.1")]

    def holds(self, row: Row) -> None:
        self.check(row.plan)
        self.start(row.plan)
        passes, stages = row.passes, {".trace.json": row.passes}
        if row.plan.by_stage:
            assert row.window is not None
            stages = {"EXTEND": ["P5"], "DECODE": ["D"] * row.window[1]}
            passes = [*stages["EXTEND"], *stages["DECODE"]]
            self.plane.flush(replicas=[0]).wait()
            self.generate([7] * 5, 8)
        else:
            self.work()
        outcomes = self.stop(row.plan)
        for rank, outcome in enumerate(outcomes):
            found = {stage: self.found(outcome, rank, stage)[0] for stage in stages}
            assert {stage: trace.passes for stage, trace in found.items()} == stages
            assert {trace.contents for trace in found.values()} == {row.wanted}
        assert outcomes[0].auto_stopped == (row.window is not None)
        merged = [trace for trace in outcomes[0].traces if "merged-" in trace.path]
        assert bool(merged) == row.plan.merge and (row.plan.by_stage or len(merged) < 2)
        for trace in merged:
            assert sorted(look(self.root, trace).passes) == sorted([*passes] * 2)  # of both ranks

    def selected(self, contents: str, ranks: tuple[int, ...]) -> tuple[int, tuple[int, int] | None]:
        return 0, (FEW if contents == "detailed" else None)

    def foreign_traces(self) -> list[Path]:
        return sorted(self.foreign.iterdir())

    def writer(self) -> tuple[psutil.Process, int]:
        raise NotImplementedError


class VLLMBench(Bench):
    """Two replicas, launched to record different things."""

    kind, passes = "vllm", VLLM_PASSES
    refusal = "already active"

    def __init__(self, fleet: VLLMFleet) -> None:
        super().__init__(fleet.plane, fleet.folder)
        self.fleet, self.url, self.target = fleet, fleet.first.url, fleet.folder / "raw-0"
        self.foreign_body = {"profile_prefix": "foreign"}

    def work(self, replica: int = 0) -> None:
        url = (self.url, self.fleet.second_url)[replica]
        work(partial(generate, "vllm", url, model=self.fleet.first.model))

    def holds(self, row: Row) -> None:
        if row.wanted:
            key = {"stack": "torch_profiler_with_stack", "shapes": "torch_profiler_record_shapes"}
            self.refuses(row.plan, f"launch it with {key['stack' if 'stack' in row.wanted else 'shapes']}")
            self.check(row.plan, 1)
            _, (found,) = self.first(torch_plan(*row.contents, window=WITHIN), 1)
            assert (found.passes, found.contents) == (["D"], EVERYTHING)
        stopped, (found,) = self.first(torch_plan("cpu", window=row.window))
        assert found.passes == within(VLLM_PASSES, row.window) and found.contents == frozenset()
        assert stopped.auto_stopped == (row.window is not None)

    def selected(self, contents: str, ranks: tuple[int, ...]) -> tuple[int, tuple[int, int] | None]:
        """Rank 1 of replica 0 is that of a node which has no server."""
        return (1, WITHIN) if contents == "detailed" or ranks else (0, None)

    def foreign_traces(self) -> list[Path]:
        return sorted(self.target.glob("foreign_rank0*.json.gz"))

    def writer(self) -> tuple[psutil.Process, int]:
        return next(process for process in self.fleet.first.family() if "Worker" in process.name()), 4096


@pytest.fixture(scope="module")
def tiny_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyBench]:
    with ExitStack() as open_:
        yield TinyBench(tmp_path_factory.mktemp("tiny"), open_)


def engine(kind: str, *values: object) -> Any:
    """A parameter for the bench of one engine."""
    marks = [pytest.mark.xdist_group("tiny fleet")]
    if kind != "tiny":
        marks = [getattr(pytest.mark, f"engine_{kind}"), pytest.mark.timeout(480)]
    return pytest.param(kind, *values, marks=marks, id=None if values else kind)


TINY, SGLANG, VLLM = engine("tiny"), engine("sglang"), engine("vllm")


def on(*engines: Any) -> pytest.MarkDecorator:
    """Run a test on some engines only."""
    return pytest.mark.parametrize("bench", engines, indirect=True)


@pytest.fixture(params=[TINY, SGLANG, VLLM])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "tiny":
        yield request.getfixturevalue("tiny_bench")
        return
    fleet = request.getfixturevalue(f"{request.param}_fleet")
    yield SGLangBench(fleet) if request.param == "sglang" else VLLMBench(fleet)
    fleet.rest()


@pytest.mark.parametrize("row", ORTHOGONAL.values(), ids=ORTHOGONAL)
def test_trace_holds_what_the_plan_says_or_the_plan_is_refused(bench: Bench, row: Row) -> None:
    if (why := row.refused.get(bench.kind)) is not None:
        bench.refuses(row.plan, why, 1 if bench.kind == "vllm" else 0)
        return
    bench.holds(row)


@pytest.mark.parametrize(("contents", "ranks"), MATRIX)
def test_step_2_of_the_selected_ranks(bench: Bench, contents: str, ranks: tuple[int, ...]) -> None:
    """SGLang profiles the whole group; of rank 1 alone, only the trace of the second node is reported."""
    replica, window = bench.selected(contents, ranks)
    plan = torch_plan(*CONTENTS[contents], ranks=ranks, window=window)
    plan = replace(plan, steps=frozenset({2}))
    early = bench.plane.start_profile(1, plan, replicas=[replica]).wait()
    assert conclusions(early)[f"{replica}.0"] == Skipped(Reason.STEP_NOT_SELECTED)
    acted(bench.plane.start_profile(2, plan, replicas=[replica]).wait(), f"{replica}.0")
    bench.work(replica)
    bench.step = 2
    outcomes = bench.stop(plan, replica)
    traces = [trace for outcome in outcomes for trace in outcome.traces if ".trace.json" in trace.path]
    ranked = [trace for trace in traces if trace.rank is not None and "merged-" not in trace.path]
    assert [trace.rank for trace in ranked] == ([*(ranks or (0, 1))] if len(bench.nodes) > 1 else [replica])
    wanted = frozenset(CONTENTS[contents]) - {"cpu"}
    if bench.kind == "vllm":
        wanted = EVERYTHING if replica else frozenset()
    for trace in ranked:
        found = look(bench.root, trace)
        assert found.contents == wanted
        if bench.kind != "tiny":
            assert found.passes == within(bench.passes, window)
        assert len(found.passes) == len(within(bench.passes, window))
    if bench.kind == "sglang":
        assert len(list((bench.root / "global_step_2" / "replica_0").iterdir())) == 2, "the other rank's stays in place"
    shutil.rmtree(bench.root / "global_step_2")


@on(TINY, SGLANG)
def test_modules_are_in_the_trace(bench: Bench) -> None:
    _, (found,) = bench.first(ProfilePlan(with_modules=True, window=Window(0, 2)))
    assert found.modules


NPU: frozenset[ProfileActivity] = frozenset({"cpu", "npu"})


@pytest.mark.parametrize(
    ("bench", "plan", "why"),
    [
        engine("tiny", ProfilePlan(tool="npu", activities=NPU), "NPU"),
        engine("tiny", ProfilePlan(activities=NPU), "NPU"),
        engine("vllm", ProfilePlan(activities=NPU), "an NPU's work: its device is cpu"),
        engine("vllm", ProfilePlan(with_modules=True), "launch it with torch_profiler_with_stack"),
        engine(
            "vllm", ProfilePlan(activities=frozenset({"cpu", "memory"})), "launch it with torch_profiler_with_memory"
        ),
    ],
    indirect=["bench"],
)
def test_what_it_was_not_launched_for_is_refused_with_advice(bench: Bench, plan: ProfilePlan, why: str) -> None:
    bench.refuses(plan, why)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bench", "window"),
    [
        *(engine("tiny", window) for window in ((5, 6), (2, 50), (49, 50))),
        *(engine("sglang", window) for window in ((0, 1), (0, 50))),
        *(engine("vllm", window) for window in ((0, 1), (2, 5), (2, 50), (49, 50))),
    ],
    indirect=["bench"],
)
def test_window_is_these_passes_and_leaves_no_session(bench: Bench, window: tuple[int, int]) -> None:
    passes = within(bench.passes, window)
    stopped, found = bench.first(torch_plan(*bench.plain, window=window))
    assert [trace.passes for trace in found] == ([passes] if passes else [])
    assert stopped.auto_stopped == (window[1] <= len(bench.passes))
    assert stopped.ranks_without_trace == (() if passes else (0,))
    _, (after,) = bench.first(torch_plan(*bench.plain))
    assert after.passes == bench.passes


@on(SGLANG)
def test_stages_that_never_came_are_recorded_in_no_later_step(bench: Bench) -> None:
    """SGLang would begin with the first prompt and the first token, whenever they come."""
    bench.start(BY_STAGE)
    stopped = bench.stop(BY_STAGE)[0]
    assert (stopped.traces, stopped.ranks_without_trace, stopped.auto_stopped) == ((), (0,), False)
    bench.work()
    place = bench.root / f"global_step_{bench.step}" / "replica_0"
    _, (later,) = bench.first(ProfilePlan())
    assert later.passes == PASSES and list(place.iterdir()) == []


@on(SGLANG)
def test_stage_that_came_alone_leaves_the_other_unarmed(bench: SGLangBench) -> None:
    bench.start(BY_STAGE)
    bench.generate([9] * 5, 1)  # a prompt and its one token, and nothing decoded
    stopped = bench.stop(BY_STAGE)[0]
    (trace,) = stopped.traces
    assert look(bench.root, trace).passes == ["P5"] and not stopped.auto_stopped
    bench.work()
    assert list((bench.root / trace.path).parent.glob("*DECODE*")) == []
    _, (later,) = bench.first(ProfilePlan())
    assert later.passes == PASSES


# --- where traces lie, and end up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["verl", "verl_step"])
def test_steps_in_verls_directories_overwrite_nothing_and_are_relocated(bench: Bench, layout: str) -> None:
    ends = Finish(relocate=True, hook=bench.kind == "tiny")
    plan = ProfilePlan(layout=layout, finish=ends)  # type: ignore[arg-type]
    left: list[Trace] = []
    steps: list[int] = []
    for _ in range(2):
        left += [trace for outcome in bench.session(plan) for trace in outcome.traces]
        steps.append(bench.step)
    places = {"agent_loop_rollout_replica_0"}
    if layout == "verl_step":
        places = {f"rollout_step_{step}/agent_loop_replica_0" for step in steps}
    assert {trace.path.rpartition("/")[0] for trace in left} == places
    content = {(trace.rank, trace.path.rpartition("/")[2]): (bench.root / trace.path).read_bytes() for trace in left}
    assert len({trace.path for trace in left}) == len(left) == len(content)
    finish = ProfileCommand(action="finish", step=bench.step, plan=plan, profiled_steps=tuple(steps))
    report = bench.plane.publish(finish, replicas=[0]).wait()
    for trace in (trace for node in bench.nodes for trace in acted(report, node).traces):
        rank = f"-globalrank{trace.rank}" if len(bench.nodes) > 1 else ""
        name = trace.path.removeprefix(f"rollout-replica0{rank}_")
        assert (bench.root / trace.path).read_bytes() == content.pop((trace.rank, name))
    assert content == {} and not any((bench.root / place).exists() for place in places)


# --- when something goes wrong ----------------------------------------------------------------------------------------


@on(SGLANG, VLLM)
def test_a_foreign_session_survives_our_start_and_stop(bench: SGLangBench | VLLMBench) -> None:
    httpx.post(f"{bench.url}/start_profile", json=bench.foreign_body, timeout=60).raise_for_status()
    bench.step = next(bench.steps)
    refused = failed(bench.plane.start_profile(bench.step, replicas=[0]).wait())
    assert refused.error is ErrorKind.REFUSED and bench.refusal in refused.message
    bench.work()
    stopped = conclusions(bench.plane.stop_profile(bench.step, replicas=[0]).wait())
    assert stopped["0.0"] == Skipped(Reason.NOT_PROFILING)
    httpx.post(f"{bench.url}/stop_profile", timeout=120).raise_for_status()
    foreign = bench.foreign_traces()
    assert [look_into(file).passes for file in foreign] == [bench.passes] * len(bench.nodes)
    _, (ours,) = bench.first(ProfilePlan())
    assert ours.passes == bench.passes and bench.foreign_traces() == foreign  # it is not brought home with ours
    for file in foreign[0].parent.glob("foreign*" if bench.kind == "vllm" else "*"):
        file.unlink()


@on(TINY, VLLM)
def test_a_full_disk_fails_the_stop_and_nothing_else(bench: Bench) -> None:
    plan = torch_plan("cpu", "stack", "shapes") if bench.kind == "tiny" else ProfilePlan()
    bench.start(plan)
    bench.work()
    process, limit = bench.writer()
    no_limit = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (limit, no_limit[1]))
    try:
        full = failed(bench.plane.stop_profile(bench.step, replicas=[0], timeout=120).wait())
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, no_limit)
    assert full.error is ErrorKind.ENGINE_ERROR and "disk full" in full.message
    _, (found,) = bench.first(torch_plan(*bench.plain))
    assert found.passes == bench.passes


@on(TINY, VLLM)
def test_an_unwritable_root_is_reported_before_the_first_step(bench: Bench) -> None:
    aside = bench.target.with_name("aside")
    bench.target.mkdir(exist_ok=True)
    bench.target.rename(aside)
    bench.target.write_text("a file")
    try:
        check = ProfileCommand(action="check", step=next(bench.steps))
        refused = failed(bench.plane.publish(check, replicas=[0]).wait())
        assert refused.error is ErrorKind.REFUSED and str(bench.target) in refused.message
    finally:
        bench.target.unlink()
        aside.rename(bench.target)


@on(VLLM)
def test_a_trace_that_takes_long_is_reported_late_and_blocks_no_other_agent(bench: VLLMBench) -> None:
    bench.start(ProfilePlan())
    bench.work()
    bench.fleet.proxy.on["/stop_profile"] = bench.fleet.first.freeze
    late = failed(bench.plane.stop_profile(bench.step, replicas=[0], timeout=12).wait())
    assert late.error is ErrorKind.ENGINE_TIMEOUT
    flushed = bench.plane.flush(timeout=5).wait()
    assert failed(flushed).error is ErrorKind.ENGINE_BUSY and isinstance(conclusions(flushed)["1.0"], Acted)
    bench.fleet.first.thaw()
    wait_for("the call has ended", lambda: bench.fleet.status("0.0").activity is None)
    _, (found,) = bench.first(ProfilePlan())
    assert found.passes == VLLM_PASSES


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("window", [None, Window(0, 1)])
async def test_another_profiler_in_the_process_is_reported_and_loses_nothing(
    tmp_path: Path, window: Window | None
) -> None:
    front, identity = f"ipc://{tmp_path}/front", Identity(replica=0, node_rank=0)
    tiny = TinyEngine(identity, checkpoints=tmp_path, traces=tmp_path, serve=front)
    await tiny.open()
    opened = ProfileSession(1, ProfilePlan(window=window))
    client = TinyClient(front)
    with profile(activities=[ProfilerActivity.CPU]) as other:
        await tiny.perform(Resume(), 10)
        with pytest.raises(EngineError, match="another torch profiler records in this process"):
            await tiny.perform(StartProfile(opened, "1"), 10)
        with record_function("other"):
            await to_thread.run_sync(client.generate, [[1, 2]], 2)
    assert "other" in {event.name for event in other.events()}
    await tiny.perform(StartProfile(opened, "1"), 10)
    await to_thread.run_sync(client.generate, [[1, 2]], 2)
    ended = await tiny.perform(StopProfile(opened, "1"), 10)
    assert [len(look(tmp_path, trace).passes) for trace in ended.traces] == [2 if window is None else 1]
    await tiny.close()
