"""Another torch profiler runs in the process that trains: there is one per process, and the other one continues."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from schemas.commands import ProfilePlan, Schedule
from schemas.errors import EngineError
from tests.unit.rank_sessions import Commanded, operators, stages, work
from workers.profilers import annotate, mini_batch

DISCRETE = ProfilePlan(discrete=True)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Commanded]:
    gc.freeze()  # other profilers are searched for among all objects that are not frozen: the suite has millions
    try:
        with Commanded(tmp_path) as commanded:
            yield commanded
    finally:
        gc.unfreeze()


def test_another_profiler_is_left_alone(rank: Commanded) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as other:
        with pytest.raises(EngineError, match="another torch profiler records in this process"):
            rank.start()
        work()
    assert any(event.name == "aten::linear" for event in other.events())


def test_another_profiler_that_started_later_is_left_alone_and_reported(rank: Commanded) -> None:
    rank.start(DISCRETE)
    with profile(activities=[ProfilerActivity.CPU]) as other, annotate("twice"):
        work()
    with annotate("once"):
        work()
    assert any(event.name == "aten::linear" for event in other.events())
    with pytest.raises(EngineError, match=r"stage twice is not recorded: another torch profiler .* 1 traces were"):
        rank.stop()


def runs_inside(other: profile) -> None:
    with annotate("a"):
        work()
        other.start()
        work()
        other.stop()
        work()


def ends_later(other: profile) -> None:
    with annotate("a"):
        work()
        other.start()
        with annotate("b"):
            work()
    work()
    other.stop()


def runs_on_another_thread(other: profile) -> None:
    def run() -> None:
        other.start()
        work()
        other.stop()

    with annotate("a"):
        work()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        work()


def warms_up_inside(other: profile) -> None:
    with annotate("a"):
        work()
        other.prepare_trace()
    other.start_trace()
    with annotate("a"):
        work()
    other.stop_trace()


@pytest.mark.parametrize("crossed", [runs_inside, ends_later, runs_on_another_thread, warms_up_inside])
def test_another_profiler_that_starts_inside_of_a_stage_replaces_ours_and_the_process_survives(
    rank: Commanded, crossed: Callable[[profile], None]
) -> None:
    """torch gives the recording of one to the other, and writing either would crash the process."""
    other = profile(activities=[ProfilerActivity.CPU])
    rank.start()
    crossed(other)
    with pytest.raises(EngineError, match="another torch profiler was started during this recording"):
        rank.stop()
    other.export_chrome_trace(str(rank.root / "other.json"))
    assert "aten::linear" in (rank.root / "other.json").read_text()
    rank.start(step=4)
    with annotate("alone"):
        work()
    (trace,) = rank.traces(rank.stop()).values()
    assert stages(trace) == ["alone"] and 30 < operators(trace) < 80  # of one `work`


def test_another_schedule_that_warms_up_is_left_alone_and_reported(rank: Commanded) -> None:
    written = rank.root / "other.json"
    once = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    rank.start(DISCRETE)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=once,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(written)),
    ) as other:
        for step in range(5):
            with annotate(f"step-{step}"):
                work()
            other.step()
    with pytest.raises(EngineError, match=r"step-1 is not .*warms up.*step-2 is not .*records in .* 3 traces were"):
        rank.stop()
    assert "step-2" not in written.read_text() and "aten::linear" in written.read_text()


def test_another_profiler_replaces_a_window_that_warms_up(rank: Commanded) -> None:
    rank.start(ProfilePlan(schedule=Schedule(active=1, warmup=1)))
    with annotate("update", scheduled=True):
        with profile(activities=[ProfilerActivity.CPU]):
            work()
        mini_batch()
        with record_function("mini-batch 1"):
            work()
        mini_batch()
    (trace,) = rank.traces(rank.stop()).values()
    assert stages(trace) == ["mini-batch 1"] and operators(trace) > 10


def test_a_step_of_another_profiler_that_is_left_open_keeps_the_next_stage_from_being_recorded(rank: Commanded) -> None:
    """The end of its span would be written into memory that torch has freed."""
    never = torch.profiler.schedule(wait=9, warmup=1, active=1, repeat=1)
    rank.start(DISCRETE)
    with profile(activities=[ProfilerActivity.CPU], schedule=never) as other:
        for step in range(3):
            with annotate(f"step-{step}"):
                work()
                other.step()
    with pytest.raises(EngineError, match=r"step-1 is not recorded: a `step\(\)` of another profiler.* 2 traces were"):
        rank.stop()
