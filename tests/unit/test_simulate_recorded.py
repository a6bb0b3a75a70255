"""Recorded runs of real processes, and what the simulator makes of their logs: the same without a change, and what
another policy really cost.
"""

from pathlib import Path

import pytest

from controlplane.record.log import RunLog
from controlplane.simulate.costs import RunCosts
from controlplane.simulate.fit import fit
from controlplane.simulate.fleet_model import FleetModel, Tree, checked, varied
from controlplane.simulate.simulator import simulate
from tests.replays.record import STEPS

REPLAYS = Path(__file__).parent.parent / "replays"


def fitted(run: str) -> tuple[Tree, RunCosts]:
    return fit(RunLog.walk(REPLAYS / f"{run}.db"))


def failures(model: FleetModel) -> list[tuple[str, str, int, str]]:
    return [(failure.what, failure.agent, failure.sync, failure.phase) for failure in model.failures.recorded]


def test_a_recorded_run_is_simulated_as_it_was_and_another_policy_as_it_is() -> None:
    tree, all_must = fitted("all-must")
    again = simulate(checked(tree, "run.db"))
    assert (again.syncs, again.aborted, again.behind) == (STEPS, all_must.aborted, all_must.behind)
    assert all_must.aborted > 0
    for name in ("sync_p50", "sync_p99", "hours", "gpu_hours", "paused"):  # the stated error
        assert getattr(again, name) == pytest.approx(getattr(all_must, name), rel=0.1), name

    predicted, (_, one_must) = simulate(checked(varied(tree, "quorum", "1"), "run.db")), fitted("one-must")
    assert (predicted.aborted, one_must.aborted, one_must.syncs) == (0, 0, STEPS)
    assert predicted.hours < again.hours
    assert predicted.hours == pytest.approx(one_must.hours, rel=0.3)


def test_an_agent_that_died_in_a_recorded_run_dies_again_at_the_same_time_and_for_as_long() -> None:
    tree, recorded = fitted("died")
    model = checked(tree, "run.db")
    assert failures(model) == [(what, "1.0", 4, "load") for what in ("agent", "cut", "engine")]
    again = simulate(model)
    assert (again.syncs, again.aborted, again.left_out) == (STEPS, recorded.aborted, recorded.left_out)
    for name in ("hours", "sync_p50", "sync_p99", "paused", "down", "lost_share"):  # the stated error
        assert getattr(again, name) == pytest.approx(getattr(recorded, name), rel=0.1), name


def test_an_agent_that_stood_still_in_a_recorded_run_is_given_up_for_silence_again() -> None:
    tree, recorded = fitted("stood-still")
    model = checked(tree, "run.db")
    assert failures(model) == [("silence", "1.0", 4, "load")]
    calm = simulate(checked(varied(tree, "failures.recorded", "[]"), "run.db"))
    assert calm.sync_p99 < recorded.sync_p99, "a call takes no longer because its agent stands still"
    again = simulate(model)
    assert (again.syncs, again.aborted, again.left_out) == (STEPS, recorded.aborted, recorded.left_out)
    for name in ("hours", "sync_p50", "sync_p99", "lost_share"):  # the stated error
        assert getattr(again, name) == pytest.approx(getattr(recorded, name), rel=0.1), name
