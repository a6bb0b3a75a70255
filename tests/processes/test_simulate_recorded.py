"""A run of real processes, and what the simulator makes of its log: the same without a change, and what another policy
really cost.
"""

from pathlib import Path

import pytest
import torch

from controlplane import ControlPlane
from controlplane.record.log import RunLog
from controlplane.simulate.costs import RunCosts
from controlplane.simulate.fit import fit
from controlplane.simulate.fleet_model import Tree, checked, varied
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
STEPS = 12


def recorded(folder: Path, quorum: int) -> tuple[Tree, RunCosts]:
    """Record a run of three replicas, and read its log."""
    folder.mkdir()
    torch.manual_seed(0)
    save(TinyModel(TinyConfig()), folder / "weights")
    with (
        StagingFleet(folder, 3, FAULTS, folder) as fleet,
        ControlPlane(fleet.bus, log=folder / "run.db", checkpoints=folder) as plane,
    ):
        plane.wait_for_agents(3, timeout=120).wait()
        for _ in range(STEPS):
            plane.sync_weights(None, "weights", quorum=quorum).wait()
    return fit(RunLog.walk(folder / "run.db"))


def test_a_recorded_run_is_simulated_as_it_was_and_another_policy_as_it_is(tmp_path: Path) -> None:
    tree, all_must = recorded(tmp_path / "all", quorum=3)
    again = simulate(checked(tree, "run.db"))
    assert (again.syncs, again.aborted, again.behind) == (STEPS, all_must.aborted, all_must.behind)
    assert all_must.aborted > 0
    for name in ("sync_p50", "sync_p99", "hours", "gpu_hours", "paused"):  # the stated error
        assert getattr(again, name) == pytest.approx(getattr(all_must, name), rel=0.1), name

    predicted = simulate(checked(varied(tree, "quorum", "1"), "run.db"))
    _, one_must = recorded(tmp_path / "one", quorum=1)
    assert (predicted.aborted, one_must.aborted) == (0, 0)
    assert predicted.hours == pytest.approx(one_must.hours, rel=0.3)
