"""Profiles of the tiny engine through a trainer's bus and agents: each plan is checked by what its traces hold."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
from anyio import to_thread
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile, record_function

from controlplane import ControlPlane
from schemas.commands import Finish, ProfileCommand, ProfilePlan, Window
from schemas.desired import ProfileSession
from schemas.errors import EngineError
from schemas.events import Resume, StartProfile, StopProfile
from schemas.identity import Identity
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from tests.engines.profiles import (
    CONTENTS,
    MATRIX,
    ORTHOGONAL,
    PASSES,
    Found,
    Row,
    look,
    of_rank,
    torch_plan,
    work,
)
from tests.engines.reports import BUS, acted, conclusions, failed
from tests.engines.servers import AgentProcess
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.server import TinyClient

pytestmark = pytest.mark.xdist_group("tiny fleet")


class Fleet:
    """Two replicas of one rank, each in a process of its own, and the trainer's control plane."""

    def __init__(self, folder: Path, open_: ExitStack) -> None:
        self.root, self.step = folder / "traces", 100
        self.plane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder)
        )
        self.agents: list[AgentProcess] = []
        self._clients: list[TinyClient] = []
        for replica in (0, 1):
            front = f"ipc://{folder}/front-{replica}"
            options = ("--engine", "tiny", "--serve", front, "--finish-hook", "true")
            self.agents.append(
                open_.enter_context(AgentProcess(self.plane.address, folder, f"{replica}.0", 1, *options))
            )
            self._clients.append(TinyClient(front, timeout_s=30))
        self.plane.wait_for_agents(2, timeout=60).wait()

    def work(self) -> None:
        """Do `WORK` on both replicas, without prefixes kept from before."""
        self.plane.flush().wait()
        for client in self._clients:
            work(partial(_generate, client))


def _generate(client: TinyClient, prompt: list[int], tokens: int) -> None:
    client.generate([[token % 32 for token in prompt]], tokens)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as open_:
        yield Fleet(tmp_path_factory.mktemp("tiny"), open_)


def session(fleet: Fleet, plan: ProfilePlan, replica: int = 0) -> tuple[Acted, list[Found]]:
    """Run one session on one replica; return its outcome and what is in the traces of its rank."""
    fleet.step += 1
    acted(fleet.plane.start_profile(fleet.step, plan, replicas=[replica]).wait(), f"{replica}.0")
    fleet.work()
    stopped = acted(fleet.plane.stop_profile(fleet.step, replicas=[replica]).wait(), f"{replica}.0")
    return stopped, [look(fleet.root, trace) for trace in of_rank(stopped, replica)]


def refusals(fleet: Fleet, plan: ProfilePlan) -> list[Failed]:
    """Return the answers to a check of the plan, and to a start with it."""
    fleet.step += 1
    checked = fleet.plane.publish(ProfileCommand(action="check", step=fleet.step, plan=plan), replicas=[0]).wait()
    return [failed(checked), failed(fleet.plane.start_profile(fleet.step, plan, replicas=[0]).wait())]


@pytest.mark.parametrize("row", ORTHOGONAL.values(), ids=ORTHOGONAL)
def test_trace_holds_what_the_plan_says_or_the_plan_is_refused(fleet: Fleet, row: Row) -> None:
    if (why := row.refused.get("tiny")) is not None:
        for refused in refusals(fleet, row.plan):
            assert refused.error is ErrorKind.UNSUPPORTED and why in refused.message
        return
    acted(fleet.plane.publish(ProfileCommand(action="check", step=0, plan=row.plan), replicas=[0]).wait())
    stopped, (found,) = session(fleet, row.plan)
    assert found.contents == row.wanted
    assert found.passes == (row.passes if "shapes" in row.wanted else ["?"] * len(row.passes))
    assert stopped.auto_stopped == (row.window is not None) and stopped.ranks_without_trace == ()


@pytest.mark.parametrize(("discrete", "contents", "ranks"), MATRIX)
def test_step_2_of_the_selected_ranks(fleet: Fleet, discrete: bool, contents: str, ranks: tuple[int, ...]) -> None:
    plan = torch_plan(*CONTENTS[contents], discrete=discrete, ranks=ranks)
    plan = replace(plan, steps=frozenset({2}))
    early = conclusions(fleet.plane.start_profile(1, plan).wait())
    assert set(early.values()) <= {Skipped(Reason.STEP_NOT_SELECTED), Skipped(Reason.RANK_NOT_SELECTED)}
    started = conclusions(fleet.plane.start_profile(2, plan).wait())
    fleet.work()
    stopped = fleet.plane.stop_profile(2).wait()
    for replica in (0, 1):
        if ranks and replica not in ranks:
            assert started["0.0"] == Skipped(Reason.RANK_NOT_SELECTED)
            assert conclusions(stopped)["0.0"] == Skipped(Reason.NOT_PROFILING)
            continue
        outcome = acted(stopped, f"{replica}.0")
        (found,) = (look(fleet.root, trace) for trace in of_rank(outcome, replica))
        assert len(found.passes) == len(PASSES) and found.contents == frozenset(CONTENTS[contents]) - {"cpu"}
    shutil.rmtree(fleet.root / "global_step_2")


@pytest.mark.parametrize("tool", ["torch", "npu"])
def test_an_npu_plan_is_refused(fleet: Fleet, tool: str) -> None:
    for refused in refusals(fleet, ProfilePlan(tool=tool, activities=frozenset({"cpu", "npu"}))):
        assert refused.error is ErrorKind.UNSUPPORTED and "NPU" in refused.message


def test_modules_are_in_the_trace(fleet: Fleet) -> None:
    _, (found,) = session(fleet, ProfilePlan(with_modules=True))
    assert found.modules


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "passes"),
    [(Window(5, 6), PASSES[5:]), (Window(2, 50), PASSES[2:]), (Window(49, 50), []), (Window(3), PASSES[3:])],
)
def test_window_is_these_passes_and_leaves_no_session(fleet: Fleet, window: Window, passes: list[str]) -> None:
    stopped, found = session(fleet, ProfilePlan(window=window, record_shapes=True))
    assert [trace.passes for trace in found] == ([passes] if passes else [])
    assert stopped.auto_stopped is (window.end == 6) and stopped.ranks_without_trace == (() if passes else (0,))
    _, (after,) = session(fleet, torch_plan("cpu", "shapes"))
    assert after.passes == PASSES


# --- where traces are written and relocated to ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["verl", "verl_step"])
def test_steps_in_verls_directories_overwrite_nothing_and_are_relocated(fleet: Fleet, layout: str) -> None:
    plan = ProfilePlan(layout=layout, finish=Finish(relocate=True, hook=True))  # type: ignore[arg-type]
    fleet.step += 2
    steps, left = (fleet.step - 1, fleet.step), []
    for step in steps:
        acted(fleet.plane.start_profile(step, plan, replicas=[0]).wait())
        fleet.work()
        left += of_rank(acted(fleet.plane.stop_profile(step, replicas=[0]).wait()), 0)
    folders = ["agent_loop_rollout_replica_0"] * 2
    if layout == "verl_step":
        folders = [f"rollout_step_{step}/agent_loop_replica_0" for step in steps]
    assert [trace.path.rpartition("/")[0] for trace in left] == folders
    contents = [(fleet.root / trace.path).read_bytes() for trace in left]
    finish = ProfileCommand(action="finish", step=fleet.step, plan=plan, profiled_steps=steps)
    ended = acted(fleet.plane.publish(finish, replicas=[0]).wait()).traces
    assert [trace.path for trace in ended] == [f"rollout-replica0_{trace.path.rpartition('/')[2]}" for trace in left]
    assert [(fleet.root / trace.path).read_bytes() for trace in ended] == contents
    assert not any((fleet.root / folder).exists() for folder in folders)


# --- when something goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("window", [None, Window(0, 1)])
async def test_another_profiler_in_the_process_is_reported_and_loses_nothing(
    tmp_path: Path, window: Window | None
) -> None:
    front, identity = f"ipc://{tmp_path}/front", Identity(replica=0, node_rank=0)
    engine = TinyEngine(identity, checkpoints=tmp_path, traces=tmp_path, serve=front)
    await engine.open()
    opened = ProfileSession(1, ProfilePlan(window=window))
    client = TinyClient(front)
    with profile(activities=[ProfilerActivity.CPU]) as other:
        await engine.perform(Resume(), 10)
        with pytest.raises(EngineError, match="another torch profiler records in this process"):
            await engine.perform(StartProfile(opened, "1"), 10)
        with record_function("other"):
            await to_thread.run_sync(client.generate, [[1, 2]], 2)
    assert "other" in {event.name for event in other.events()}
    await engine.perform(StartProfile(opened, "1"), 10)
    await to_thread.run_sync(client.generate, [[1, 2]], 2)
    ended = await engine.perform(StopProfile(opened, "1"), 10)
    assert [len(look(tmp_path, trace).passes) for trace in ended.traces] == [2 if window is None else 1]
    await engine.close()


def test_a_full_disk_fails_the_stop_and_nothing_else(fleet: Fleet) -> None:
    fleet.step += 1
    acted(fleet.plane.start_profile(fleet.step, torch_plan("cpu", "stack", "shapes"), replicas=[0]).wait())
    fleet.work()
    engine = psutil.Process(fleet.agents[0].process.pid)
    no_limit = engine.rlimit(resource.RLIMIT_FSIZE)
    largest = max(file.stat().st_size for file in (fleet.root.parent / "state").iterdir())
    engine.rlimit(resource.RLIMIT_FSIZE, (largest + 50_000, no_limit[1]))
    try:
        full = failed(fleet.plane.stop_profile(fleet.step, replicas=[0]).wait())
    finally:
        engine.rlimit(resource.RLIMIT_FSIZE, no_limit)
    assert full.error is ErrorKind.ENGINE_ERROR and "is the disk full?" in full.message
    assert conclusions(fleet.plane.stop_profile(fleet.step, replicas=[0]).wait())["0.0"] == Skipped(
        Reason.NOT_PROFILING
    )
    _, (found,) = session(fleet, ProfilePlan())
    assert len(found.passes) == len(PASSES)


def test_an_unwritable_root_is_reported_before_the_first_step(fleet: Fleet) -> None:
    aside = fleet.root.with_name("aside")
    fleet.root.mkdir(exist_ok=True)
    fleet.root.rename(aside)
    fleet.root.write_text("a file")
    try:
        for refused in refusals(fleet, ProfilePlan()):
            assert refused.error is ErrorKind.ENGINE_ERROR and str(fleet.root) in refused.message
    finally:
        fleet.root.unlink()
        aside.rename(fleet.root)
