"""Profiles of a real SGLang over two nodes: each plan is checked by both ranks' traces, or refused with advice."""

import shutil
from collections.abc import Iterator

import httpx
import pytest
from msgspec.structs import replace

from schemas.commands import Finish, ProfileCommand, ProfilePlan, Window
from schemas.outcomes import Acted, ErrorKind, Reason, Skipped
from tests.engines.profiles import (
    CONTENTS,
    FEW,
    MATRIX,
    ORTHOGONAL,
    PASSES,
    Row,
    look,
    look_into,
    of_rank,
    torch_plan,
    work,
)
from tests.engines.reports import acted, conclusions, failed, refuses
from tests.engines.servers import generate
from tests.engines.sglang_fleet import SGLangFleet

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(480)]

NODES = ("0.0", "0.1")


class Bench:
    """The fleet, and the step of the next session."""

    step = 100

    def __init__(self, fleet: SGLangFleet) -> None:
        self.plane, self.url, self.model = fleet.plane, fleet.urls[0], fleet.model
        self.root = fleet.folder / "traces"

    def work(self) -> None:
        self.plane.flush(replicas=[0]).wait()
        work(self.generate)

    def generate(self, prompt: list[int], tokens: int) -> None:
        generate("sglang", self.url, prompt, tokens, self.model)

    def start(self, plan: ProfilePlan) -> None:
        Bench.step += 1
        acted(self.plane.start_profile(self.step, plan, replicas=[0]).wait())

    def stop(self, plan: ProfilePlan) -> tuple[Acted, Acted]:
        """The outcomes of node rank 0 for the stop, and of node rank 1 for the traces that it left."""
        stopped = acted(self.plane.stop_profile(self.step, replicas=[0], timeout=60).wait())
        return stopped, acted(self.plane.collect_traces(self.step, plan, replicas=[0]).wait(), "0.1")

    def session(self, plan: ProfilePlan) -> tuple[Acted, Acted]:
        self.start(plan)
        self.work()
        return self.stop(plan)

    def refuses(self, plan: ProfilePlan, why: str) -> None:
        Bench.step += 1
        refuses(self.plane, self.step, plan, why)


@pytest.fixture
def bench(sglang_fleet: SGLangFleet) -> Iterator[Bench]:
    yield Bench(sglang_fleet)
    sglang_fleet.rest()


@pytest.mark.parametrize("row", [row for row in ORTHOGONAL.values() if not row.plan.by_stage])
def test_trace_holds_what_the_plan_says_or_the_plan_is_refused(bench: Bench, row: Row) -> None:
    if (why := row.refused.get("sglang")) is not None:
        bench.refuses(row.plan, why)
        return
    acted(bench.plane.publish(ProfileCommand(action="check", step=0, plan=row.plan), replicas=[0]).wait())
    outcomes = bench.session(row.plan)
    for rank, outcome in enumerate(outcomes):
        (trace,) = of_rank(outcome, rank)
        found = look(bench.root, trace)
        assert found.passes == row.passes and found.contents == row.wanted
    assert outcomes[0].auto_stopped == (row.window is not None)
    merged = [trace for trace in outcomes[0].traces if "merged-" in trace.path]
    assert len(merged) == row.plan.merge
    for trace in merged:
        assert sorted(look(bench.root, trace).passes) == sorted([*row.passes] * 2)  # of both ranks


@pytest.mark.parametrize("row", [row for row in ORTHOGONAL.values() if row.plan.by_stage])
def test_stages_are_recorded_apart_or_the_plan_is_refused(bench: Bench, row: Row) -> None:
    if (why := row.refused.get("sglang")) is not None:
        bench.refuses(row.plan, why)
        return
    bench.start(row.plan)
    bench.plane.flush(replicas=[0]).wait()
    bench.generate([7] * 5, 8)
    assert row.window is not None
    passes = {"EXTEND": ["P5"], "DECODE": ["D"] * row.window[1]}
    outcomes = bench.stop(row.plan)
    for rank, outcome in enumerate(outcomes):
        stages = {stage: look(bench.root, of_rank(outcome, rank, stage)[0]) for stage in passes}
        assert {stage: found.passes for stage, found in stages.items()} == passes
        assert {found.contents for found in stages.values()} == {row.wanted}
    assert outcomes[0].auto_stopped
    merged = [trace for trace in outcomes[0].traces if "merged-" in trace.path]
    for trace in merged:
        assert sorted(look(bench.root, trace).passes) == sorted((passes["EXTEND"] + passes["DECODE"]) * 2)
    assert row.plan.merge == bool(merged)


@pytest.mark.parametrize(("discrete", "contents", "ranks"), MATRIX)
def test_step_2_of_the_selected_ranks(bench: Bench, discrete: bool, contents: str, ranks: tuple[int, ...]) -> None:
    """SGLang profiles the whole group; of rank 1 alone, only the trace of the second node is reported."""
    window = FEW if contents == "detailed" else None
    plan = torch_plan(*CONTENTS[contents], discrete=discrete, ranks=ranks, window=window)
    plan = replace(plan, steps=frozenset({2}))
    early = bench.plane.start_profile(1, plan, replicas=[0]).wait()
    assert conclusions(early)["0.0"] == Skipped(Reason.STEP_NOT_SELECTED)
    acted(bench.plane.start_profile(2, plan, replicas=[0]).wait())
    bench.work()
    stopped = acted(bench.plane.stop_profile(2, replicas=[0], timeout=60).wait())
    collected = acted(bench.plane.collect_traces(2, plan, replicas=[0]).wait(), "0.1")
    traces = (*stopped.traces, *collected.traces)
    assert [trace.rank for trace in traces] == [*(ranks or (0, 1))]
    assert (stopped.ranks_without_trace, collected.ranks_without_trace) == ((), ())
    for trace in traces:
        found = look(bench.root, trace)
        assert found.passes == (PASSES[slice(*FEW)] if window else PASSES)
        assert found.contents == frozenset(CONTENTS[contents]) - {"cpu"}
    assert len(list((bench.root / "global_step_2" / "replica_0").iterdir())) == 2, "the other rank's stays where it is"
    shutil.rmtree(bench.root / "global_step_2")


def test_modules_are_named_by_stacks(bench: Bench) -> None:
    stopped, _ = bench.session(ProfilePlan(with_modules=True, window=Window(0, 2)))
    assert look(bench.root, stopped.traces[0]).modules


# --- windows ----------------------------------------------------------------------------------------------------------


def test_window_that_is_not_filled_leaves_no_session(bench: Bench) -> None:
    plan = ProfilePlan(window=Window(0, 50))
    for filled, passes in ((plan, PASSES), (replace(plan, window=Window(0, 1)), PASSES[:1])):
        stopped, _ = bench.session(filled)
        assert look(bench.root, stopped.traces[0]).passes == passes
        assert stopped.auto_stopped == (passes != PASSES)


def test_stages_that_never_came_are_recorded_in_no_later_step(bench: Bench) -> None:
    """SGLang would begin with the first prompt and the first token, whenever they come."""
    plan = ProfilePlan(by_stage=True, window=Window(0, 2))
    bench.start(plan)
    stopped, _ = bench.stop(plan)
    assert (stopped.traces, stopped.ranks_without_trace, stopped.auto_stopped) == ((), (0,), False)
    bench.work()
    place = bench.root / f"global_step_{bench.step}" / "replica_0"
    later, _ = bench.session(ProfilePlan())
    assert look(bench.root, later.traces[0]).passes == PASSES
    assert list(place.iterdir()) == []


def test_stage_that_came_alone_leaves_the_other_unarmed(bench: Bench) -> None:
    plan = ProfilePlan(by_stage=True, window=Window(0, 2))
    bench.start(plan)
    bench.generate([9] * 5, 1)  # a prompt and its one token, and nothing decoded
    stopped, _ = bench.stop(plan)
    (trace,) = stopped.traces
    assert look(bench.root, trace).passes == ["P5"] and not stopped.auto_stopped
    bench.work()
    assert [file.name for file in (bench.root / trace.path).parent.glob("*DECODE*")] == []
    later, _ = bench.session(ProfilePlan())
    assert look(bench.root, later.traces[0]).passes == PASSES


# --- where traces lie, and end up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["verl", "verl_step"])
def test_steps_in_verls_directories_overwrite_nothing_and_are_relocated(bench: Bench, layout: str) -> None:
    plan = ProfilePlan(layout=layout, finish=Finish(relocate=True))  # type: ignore[arg-type]
    left = [trace for _ in range(2) for outcome in bench.session(plan) for trace in outcome.traces]
    steps = (bench.step - 1, bench.step)
    places = ["agent_loop_rollout_replica_0"] * 4
    if layout == "verl_step":
        places = [f"rollout_step_{step}/agent_loop_replica_0" for step in steps for _ in range(2)]
    assert [entry.path.rpartition("/")[0] for entry in left] == places
    assert len({entry.path for entry in left}) == 4
    content = {(entry.rank, entry.path.rpartition("/")[2]): (bench.root / entry.path).read_bytes() for entry in left}
    report = bench.plane.publish(
        ProfileCommand(action="finish", step=bench.step, plan=plan, profiled_steps=steps), [0]
    ).wait()
    for trace in (trace for node in NODES for trace in acted(report, node).traces):
        name = trace.path.removeprefix(f"rollout-replica0-globalrank{trace.rank}_")
        assert (bench.root / trace.path).read_bytes() == content.pop((trace.rank, name))
    assert content == {} and not any((bench.root / place).exists() for place in places)


# --- when something goes wrong ---------------------------------------------------------------------------------------


def test_a_foreign_session_survives_our_start_and_stop(bench: Bench) -> None:
    foreign = bench.root.parent / "foreign"
    arguments = {"output_dir": str(foreign), "activities": ["CPU"], "with_stack": False}
    httpx.post(f"{bench.url}/start_profile", json=arguments).raise_for_status()
    Bench.step += 1
    refused = failed(bench.plane.start_profile(bench.step, replicas=[0]).wait())
    assert refused.error is ErrorKind.ENGINE_ERROR and "did not start" in refused.message
    bench.work()
    assert conclusions(bench.plane.stop_profile(bench.step, replicas=[0]).wait())["0.0"] == Skipped(
        Reason.NOT_PROFILING
    )
    httpx.post(f"{bench.url}/stop_profile", timeout=60).raise_for_status()
    assert [look_into(file).passes for file in foreign.iterdir()] == [PASSES] * 2
    later, _ = bench.session(ProfilePlan())
    assert look(bench.root, later.traces[0]).passes == PASSES
