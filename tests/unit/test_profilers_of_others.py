"""Somebody else profiles with torch in the process that trains: both share one profiler, and theirs goes on."""

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
    commanded = Commanded(tmp_path)
    yield commanded
    commanded.close()
    assert not torch.autograd.profiler._is_profiler_enabled


def test_somebody_elses_profiler_is_left_alone(rank: Commanded) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        with pytest.raises(EngineError, match="another profiler of torch's records in this process"):
            rank.start()
        work()
    assert any(one.name == "aten::linear" for one in theirs.events())


def test_somebody_elses_profiler_that_came_later_is_left_alone_and_told(rank: Commanded) -> None:
    rank.start(DISCRETE)
    with profile(activities=[ProfilerActivity.CPU]) as theirs, annotate("twice"):
        work()
    with annotate("once"):
        work()
    assert any(one.name == "aten::linear" for one in theirs.events())
    with pytest.raises(EngineError, match=r"stage twice is not recorded: another profiler.* 1 traces were written"):
        rank.stop()


def theirs_inside(theirs: profile) -> None:
    with annotate("a"):
        work()
        theirs.start()
        work()
        theirs.stop()
        work()


def theirs_ends_later(theirs: profile) -> None:
    with annotate("a"):
        work()
        theirs.start()
        with annotate("b"):
            work()
    work()
    theirs.stop()


def theirs_on_another_thread(theirs: profile) -> None:
    def run() -> None:
        theirs.start()
        work()
        theirs.stop()

    with annotate("a"):
        work()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        work()


def theirs_warms_up_inside(theirs: profile) -> None:
    with annotate("a"):
        work()
        theirs.prepare_trace()
    theirs.start_trace()
    with annotate("a"):
        work()
    theirs.stop_trace()


@pytest.mark.parametrize(
    "crossed", [theirs_inside, theirs_ends_later, theirs_on_another_thread, theirs_warms_up_inside]
)
def test_somebody_elses_profiler_that_starts_inside_of_a_stage_takes_its_place_and_the_process_lives(
    rank: Commanded, crossed: Callable[[profile], None]
) -> None:
    """torch gives what one of the two recorded to the other, and both die when it is written."""
    theirs = profile(activities=[ProfilerActivity.CPU])
    rank.start()
    crossed(theirs)
    with pytest.raises(EngineError, match="another profiler of torch's was started while this stage was recorded"):
        rank.stop()
    theirs.export_chrome_trace(str(rank.root / "theirs.json"))
    assert "aten::linear" in (rank.root / "theirs.json").read_text()
    rank.start(step=4)
    with annotate("alone"):
        work()
    (trace,) = rank.traces(rank.stop()).values()
    assert stages(trace) == ["alone"] and 30 < operators(trace) < 80  # of one `work`


def test_somebody_elses_schedule_that_warms_up_is_left_alone_and_told(rank: Commanded) -> None:
    written = rank.root / "theirs.json"
    once = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    rank.start(DISCRETE)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=once,
        on_trace_ready=lambda one: one.export_chrome_trace(str(written)),
    ) as theirs:
        for step in range(5):
            with annotate(f"step-{step}"):
                work()
            theirs.step()
    with pytest.raises(EngineError, match=r"step-1 is not .*warms up.*step-2 is not .*records in .* 3 traces were"):
        rank.stop()
    assert "step-2" not in written.read_text() and "aten::linear" in written.read_text()


def test_somebody_elses_profiler_takes_the_place_of_a_window_that_warms_up(rank: Commanded) -> None:
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


def test_a_step_of_somebody_elses_profiler_that_is_left_open_by_a_stage_keeps_the_next_from_being_recorded(
    rank: Commanded,
) -> None:
    """Its end would be written into what torch has freed."""
    never = torch.profiler.schedule(wait=9, warmup=1, active=1, repeat=1)
    rank.start(DISCRETE)
    with profile(activities=[ProfilerActivity.CPU], schedule=never) as theirs:
        for step in range(3):
            with annotate(f"step-{step}"):
                work()
                theirs.step()
    with pytest.raises(EngineError, match=r"step-1 is not recorded: a `step\(\)` of another profiler.* 2 traces were"):
        rank.stop()
