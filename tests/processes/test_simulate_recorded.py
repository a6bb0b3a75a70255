"""A run of real processes, and what the simulator makes of its log: the same without a change, and what another policy
really cost.
"""

from pathlib import Path

import pytest
import torch

from controlplane import ControlPlane
from controlplane.record.entries import LogEntry, LogItem
from controlplane.record.log import RunLog
from controlplane.simulate.costs import CostCounter
from controlplane.simulate.fit import fit
from controlplane.simulate.fleet_model import checked, varied
from controlplane.simulate.simulator import simulate
from controlplane.staging import StagingFleet
from workers.engines.tiny.model import TinyConfig, TinyModel, save

FAULTS = """
seed = 5

[[fault]]
name = "slow loads"
what = "slow"
call = "load"
seconds = 0.4
rate = 0.5
times = 0

[[fault]]
name = "slow pauses of one replica"
what = "slow"
call = "pause"
seconds = 0.2
replicas = [1]
rate = 0.5
times = 0

[[fault]]
name = "loads that fail"
what = "refuse"
call = "load"
replicas = [2]
rate = 0.3
times = 0
"""
DEATH = """
[[fault]]
name = "slow loads"
what = "slow"
call = "load"
seconds = 0.4
times = 0

[[fault]]
name = "dies, with its engine"
what = "kill_agent"
replicas = [1]
version = 4
phase = "load"
after_s = 0.2
"""
STEPS = 12

pytestmark = pytest.mark.long


def sync(fleet: StagingFleet, folder: Path, quorum: int) -> list[LogItem]:
    """Record syncs of three replicas, and return all of the run's log."""
    with ControlPlane(fleet.bus, log=folder / "run.db", checkpoints=folder, run="auto") as plane:
        plane.wait_for_agents(3, timeout=100).wait()
        for _ in range(STEPS):
            report = plane.sync_weights(None, "weights", quorum=quorum).wait()
            if report.version == 5:
                plane.wait_for_agents(3, timeout=100).wait()
    return list(RunLog.walk(folder / "run.db"))


def test_a_recorded_run_is_simulated_as_it_was_and_another_policy_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(TinyModel(TinyConfig()), tmp_path / "weights")
    with StagingFleet(tmp_path, 3, FAULTS, tmp_path) as fleet:
        recorded = sync(fleet, tmp_path, quorum=3)
        other = sync(fleet, tmp_path, quorum=1)

    tree, all_must = fit(recorded)
    again = simulate(checked(tree, "run.db"))
    assert (again.syncs, again.aborted, again.behind) == (STEPS, all_must.aborted, all_must.behind)
    assert all_must.aborted > 0
    for name in ("sync_p50", "sync_p99", "hours", "gpu_hours", "paused"):  # the stated error
        assert getattr(again, name) == pytest.approx(getattr(all_must, name), rel=0.1), name

    predicted, measured = simulate(checked(varied(tree, "quorum", "1"), "run.db")), CostCounter()
    for entry in other:
        if isinstance(entry, LogEntry) and not entry.agent and entry.position > recorded[-1].position:
            measured.decided_by_bus(entry.typed_event(), entry.typed_effects())  # type: ignore[arg-type]
    one_must = measured.finish()
    assert (predicted.aborted, one_must.aborted, one_must.syncs) == (0, 0, STEPS)
    assert predicted.hours < again.hours
    assert predicted.hours == pytest.approx(one_must.hours, rel=0.3)


def test_an_agent_that_died_in_a_recorded_run_dies_again_at_the_same_time_and_for_as_long(tmp_path: Path) -> None:
    save(TinyModel(TinyConfig()), tmp_path / "weights")
    with StagingFleet(tmp_path, 3, DEATH, tmp_path) as fleet:
        tree, recorded = fit(sync(fleet, tmp_path, quorum=1))
    model = checked(tree, "run.db")
    died = [(failure.what, failure.agent, failure.sync, failure.phase) for failure in model.failures.recorded]
    assert died == [(what, "1.0", 4, "load") for what in ("agent", "cut", "engine")]
    again = simulate(model)
    assert (again.syncs, again.aborted, again.left_out) == (STEPS, recorded.aborted, recorded.left_out)
    for name in ("hours", "sync_p50", "sync_p99", "paused", "down", "lost_share"):  # the stated error
        assert getattr(again, name) == pytest.approx(getattr(recorded, name), rel=0.1), name
