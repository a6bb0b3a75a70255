"""Profiles of a real vLLM on the CPU: each plan is checked by what its traces hold, or refused with advice.

Replica 0 was launched to record nothing but the passes, replica 1 with stacks, shapes and memory as well, which vLLM
then records whether or not they are asked for.
"""

import shutil
from collections.abc import Iterator

import httpx
import psutil
import pytest
from msgspec.structs import replace

from schemas.commands import Finish, ProfileCommand, ProfilePlan
from schemas.outcomes import Acted, ErrorKind, Reason, Skipped
from tests.engines.profiles import (
    CONTENTS,
    MATRIX,
    ORTHOGONAL,
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
from tests.engines.reports import acted, conclusions, failed, refuses
from tests.engines.servers import generate, wait_for
from tests.engines.vllm_fleet import VLLMFleet

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(480)]

EVERYTHING = frozenset({"stack", "shapes", "memory"})
WORLD = (2, 1)
"""GPUs of replica 0, of whose nodes the second has no server, and of replica 1."""


class Bench:
    """The fleet, and the step of the next session."""

    step = 100

    def __init__(self, fleet: VLLMFleet) -> None:
        self.plane, self.fleet = fleet.plane, fleet
        self.root = fleet.folder / "traces"

    def work(self, replica: int) -> None:
        url = (self.fleet.first.url, self.fleet.second_url)[replica]
        work(lambda prompt, tokens: generate("vllm", url, prompt, tokens, self.fleet.first.model))

    def session(self, plan: ProfilePlan, replica: int = 0) -> tuple[Acted, list[Found]]:
        """One session on one replica, and what is in the traces of its first rank."""
        Bench.step += 1
        acted(self.plane.start_profile(self.step, plan, replicas=[replica]).wait(), f"{replica}.0")
        self.work(replica)
        stopped = self.stop(replica)
        return stopped, [look(self.root, trace) for trace in of_rank(stopped, replica * WORLD[replica])]

    def stop(self, replica: int = 0) -> Acted:
        return acted(self.plane.stop_profile(self.step, replicas=[replica], timeout=120).wait(), f"{replica}.0")

    def refuses(self, plan: ProfilePlan, why: str, replica: int = 0) -> None:
        Bench.step += 1
        refuses(self.plane, self.step, plan, why, replica)


@pytest.fixture
def bench(vllm_fleet: VLLMFleet) -> Iterator[Bench]:
    yield Bench(vllm_fleet)
    vllm_fleet.rest()


@pytest.mark.parametrize("row", ORTHOGONAL.values(), ids=ORTHOGONAL)
def test_trace_holds_what_the_plan_says_or_the_plan_is_refused(bench: Bench, row: Row) -> None:
    if (why := row.refused.get("vllm")) is not None:
        bench.refuses(row.plan, why, 1)
        return
    if row.wanted:
        key = {"stack": "torch_profiler_with_stack", "shapes": "torch_profiler_record_shapes"}
        bench.refuses(row.plan, f"launch it with {key['stack' if 'stack' in row.wanted else 'shapes']}")
        check = ProfileCommand(action="check", step=0, plan=row.plan)
        acted(bench.plane.publish(check, replicas=[1]).wait(), "1.0")
        _, (found,) = bench.session(torch_plan(*row.contents, window=WITHIN), 1)
        assert (found.passes, found.contents) == (["D"], EVERYTHING)
    stopped, (found,) = bench.session(torch_plan("cpu", window=row.window))
    assert found.passes == within(VLLM_PASSES, row.window) and found.contents == frozenset()
    assert stopped.auto_stopped == (row.window is not None)


@pytest.mark.parametrize(("discrete", "contents", "ranks"), MATRIX)
def test_step_2_of_the_selected_ranks(bench: Bench, discrete: bool, contents: str, ranks: tuple[int, ...]) -> None:
    """Rank 1 is replica 1's only one, and on replica 0 that of the node which has no server."""
    replica = 1 if contents == "detailed" or ranks else 0
    window = WITHIN if replica else None
    plan = torch_plan(*CONTENTS[contents], discrete=discrete, ranks=ranks, window=window)
    plan = replace(plan, steps=frozenset({2}))
    agent = f"{replica}.0"
    early = bench.plane.start_profile(1, plan, replicas=[replica]).wait()
    assert conclusions(early)[agent] == Skipped(Reason.STEP_NOT_SELECTED)
    acted(bench.plane.start_profile(2, plan, replicas=[replica]).wait(), agent)
    bench.work(replica)
    stopped = acted(bench.plane.stop_profile(2, replicas=[replica], timeout=120).wait(), agent)
    (found,) = (look(bench.root, trace) for trace in of_rank(stopped, replica))
    assert found.passes == within(VLLM_PASSES, window)
    assert found.contents == (EVERYTHING if replica else frozenset())
    shutil.rmtree(bench.root / "global_step_2")


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (ProfilePlan(activities=frozenset({"cpu", "npu"})), "an NPU's work: its device is cpu"),
        (ProfilePlan(tool="npu"), "an NPU's work: its device is cpu"),
        (ProfilePlan(with_modules=True), "launch it with torch_profiler_with_stack"),
        (ProfilePlan(activities=frozenset({"cpu", "memory"})), "launch it with torch_profiler_with_memory"),
    ],
)
def test_what_it_was_not_launched_for_is_refused_with_advice(bench: Bench, plan: ProfilePlan, why: str) -> None:
    bench.refuses(plan, why)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(0, 1), (1, 3), (2, 5)])
def test_window_is_these_passes_and_no_other(bench: Bench, window: tuple[int, int]) -> None:
    stopped, (found,) = bench.session(torch_plan("cpu", window=window))
    assert found.passes == within(VLLM_PASSES, window) and stopped.auto_stopped


@pytest.mark.parametrize(("window", "passes"), [((2, 50), VLLM_PASSES[2:]), ((49, 50), None)])
def test_window_that_is_not_filled_leaves_no_session(
    bench: Bench, window: tuple[int, int], passes: list[str] | None
) -> None:
    stopped, found = bench.session(torch_plan("cpu", window=window))
    assert [content.passes for content in found] == ([passes] if passes else [])
    assert not stopped.auto_stopped and stopped.ranks_without_trace == (() if passes else (0,))
    _, (after,) = bench.session(ProfilePlan())
    assert after.passes == VLLM_PASSES


# --- where traces lie, and end up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["verl", "verl_step"])
def test_steps_in_verls_directories_overwrite_nothing_and_are_relocated(bench: Bench, layout: str) -> None:
    plan = ProfilePlan(layout=layout, finish=Finish(relocate=True))  # type: ignore[arg-type]
    left = [trace for _ in range(2) for trace in bench.session(plan)[0].traces]
    steps = (bench.step - 1, bench.step)
    assert len({entry.path for entry in left}) == len(left)
    content = {entry.path.rpartition("/")[2]: (bench.root / entry.path).read_bytes() for entry in left}
    finish = ProfileCommand(action="finish", step=bench.step, plan=plan, profiled_steps=steps)
    ended = acted(bench.plane.publish(finish, replicas=[0]).wait()).traces
    for trace in ended:
        name = trace.path.removeprefix("rollout-replica0-globalrank0_")
        assert (bench.root / trace.path).read_bytes() == content.pop(name)
    assert content == {}


# --- when something goes wrong ---------------------------------------------------------------------------------------


def test_a_foreign_session_survives_our_start_and_stop(bench: Bench) -> None:
    url = bench.fleet.first.url
    assert httpx.post(f"{url}/start_profile", json={"profile_prefix": "foreign"}).status_code == 200
    Bench.step += 1
    refused = failed(bench.plane.start_profile(bench.step, replicas=[0]).wait())
    assert refused.error is ErrorKind.ENGINE_ERROR and "already active" in refused.message
    bench.work(0)
    assert conclusions(bench.plane.stop_profile(bench.step, replicas=[0]).wait())["0.0"] == Skipped(
        Reason.NOT_PROFILING
    )
    assert httpx.post(f"{url}/stop_profile", timeout=120).status_code == 200
    raw = bench.fleet.folder / "raw-0"
    (foreign,) = raw.glob("foreign_rank0*.json.gz")
    assert look_into(foreign).passes == VLLM_PASSES
    _, (ours,) = bench.session(ProfilePlan())
    assert ours.passes == VLLM_PASSES and foreign.exists()  # foreign is not brought home with ours
    shutil.rmtree(raw)
    raw.mkdir()


def test_a_full_disk_fails_the_stop_and_nothing_else(bench: Bench) -> None:
    Bench.step += 1
    acted(bench.plane.start_profile(bench.step, ProfilePlan(), replicas=[0]).wait())
    bench.work(0)
    worker = next(process for process in bench.fleet.first.family() if "Worker" in process.name())
    no_limit = worker.rlimit(psutil.RLIMIT_FSIZE)
    worker.rlimit(psutil.RLIMIT_FSIZE, (4096, no_limit[1]))
    try:
        full = failed(bench.plane.stop_profile(bench.step, replicas=[0], timeout=120).wait())
    finally:
        worker.rlimit(psutil.RLIMIT_FSIZE, no_limit)
    assert full.error is ErrorKind.ENGINE_ERROR and "Is its disk full" in full.message
    _, (found,) = bench.session(ProfilePlan())
    assert found.passes == VLLM_PASSES


def test_a_trace_that_takes_long_is_reported_late_and_blocks_nobody(bench: Bench) -> None:
    Bench.step += 1
    acted(bench.plane.start_profile(bench.step, ProfilePlan(), replicas=[0]).wait())
    bench.work(0)
    bench.fleet.proxy.on["/stop_profile"] = bench.fleet.first.freeze
    late = failed(bench.plane.stop_profile(bench.step, replicas=[0], timeout=2).wait())
    assert late.error is ErrorKind.ENGINE_TIMEOUT
    flushed = bench.plane.flush(timeout=5).wait()
    assert failed(flushed).error is ErrorKind.ENGINE_BUSY and isinstance(conclusions(flushed)["1.0"], Acted)
    bench.fleet.first.thaw()
    wait_for("the call has ended", lambda: bench.fleet.status("0.0").activity is None)
    _, (found,) = bench.session(ProfilePlan())
    assert found.passes == VLLM_PASSES


def test_an_unwritable_root_is_reported_before_the_first_step(bench: Bench) -> None:
    raw = bench.fleet.folder / "raw-0"
    raw.rmdir()
    raw.write_text("a file")
    try:
        check = ProfileCommand(action="check", step=0)
        refused = failed(bench.plane.publish(check, replicas=[0]).wait())
        assert refused.error is ErrorKind.ENGINE_ERROR and str(raw) in refused.message
    finally:
        raw.unlink()
        raw.mkdir()
