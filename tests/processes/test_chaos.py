"""Game days on real processes: each fault happens, is in the log, and the fleet is whole again."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from controlplane import ControlPlane
from controlplane.cli import chaos
from controlplane.cli.__main__ import run
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.staging import StagingFleet
from schemas.errors import CommandFailed, LogError
from tests.pages import blocks, module_of
from tests.processes.test_chaos_trainer import chaos_run
from tests.running import python, typed
from tests.waiting import wait_until
from workers.engines.tiny.model import TinyConfig, TinyModel, save

pytestmark = pytest.mark.filterwarnings("error")

NAMES = ("dies", "stops", "is cut off", "is held", "loses", "refuses", "is slow", "is relabelled", "jumps", "is full")
FAULTS = """
seed = 3
fault = [
  {name = "dies", what = "kill_agent", replicas = [1], version = 2, phase = "load"},
  {name = "stops", what = "stop_agent", seconds = 1.0, replicas = [0], version = 3},
  {name = "is cut off", what = "cut", seconds = 1.0, replicas = [1], version = 4, phase = "load"},
  {name = "is held", what = "hold", connection = "control", seconds = 0.5, replicas = [0], version = 5, phase = "load"},
  {name = "loses", what = "lose_answer", call = "load", replicas = [0], version = 6},
  {name = "refuses", what = "refuse", call = "pause", replicas = [1], version = 7},
  {name = "is slow", what = "slow", call = "resume", seconds = 0.3, replicas = [0], version = 8},
  {name = "is relabelled", what = "label", seconds = 4.0, replicas = [0], version = 9, phase = "commit"},
  {name = "jumps", what = "jump_clock", seconds = 3600.0, replicas = [1], version = 10},
  {name = "is full", what = "fill_disk", seconds = 600.0, replicas = [0], version = 11},
]
"""


def checkpoint(folder: Path, number: int) -> str:
    torch.manual_seed(number)
    save(TinyModel(TinyConfig()), folder / f"step_{number}")
    return f"step_{number}"


def serves(plane: ControlPlane, version: int, out: tuple[int, ...] = ()) -> Callable[[], bool]:
    """Whether both replicas serve a version, but for those that the next sync has to bring back."""
    return lambda: plane.serving() == dict.fromkeys({0, 1}.difference(out), version)


def test_a_fleet_lives_through_a_game_day(fleet: Callable[..., StagingFleet], tmp_path: Path) -> None:
    staging = fleet(faults=FAULTS, checkpoints=tmp_path)
    with ControlPlane(staging.bus, log=tmp_path / "run.db", run="day", checkpoints=tmp_path) as plane:
        plane.wait_for_agents(2, timeout=60).wait()
        for number in range(1, 13):
            sync = plane.sync_weights(None, checkpoint(tmp_path, number), timeout=30, quorum=1).wait()
            assert sync.status == "committed", sync
            if number == 9:  # the foreign label is seen after the commit, and takes the replica out of service
                wait_until(lambda: 0 not in plane.serving())
            wait_until(serves(plane, sync.version, sync.quarantined))
        said = "game day: 0.0, 1.0 inject faults on purpose, 10 so far"
        wait_until(lambda: said in str(plane.status()))  # heartbeats count them
        wait_until(lambda: all(line.status is not None and line.status.ready for line in plane.status().agents))
    verdict = staging.judge(tmp_path / "run.db")
    report = collect(RunLog.walk(tmp_path / "run.db"))
    assert sorted(fault.name for fault in report.faults) == sorted(NAMES)
    assert all(fault.repaired_ns is not None for fault in report.faults), verdict
    assert verdict.endswith("10 faults: all promises held")
    shown = typed("log", "show", "--kind", "fault", tmp_path / "run.db").stdout
    assert all(name in shown for name in NAMES)
    assert typed("report", tmp_path / "run.db", "-o", tmp_path / "run.html").returncode == 0
    page = (tmp_path / "run.html").read_text()
    assert 'word-bad">These faults were injected on purpose' in page and all(name in page for name in NAMES)


def test_chaos_run_starts_the_trainer_kills_it_and_judges(fleet: Callable[..., StagingFleet], tmp_path: Path) -> None:
    plan = '[[fault]]\nname = "preempted"\nwhat = "kill_trainer"\nversion = 2\nphase = "load"\nseconds = 0.5\n'
    staging = fleet(checkpoints=tmp_path)
    for number in (1, 2, 3, 4):
        checkpoint(tmp_path, number)
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        "import sys\n"
        "from controlplane import ControlPlane\n"
        "bus, folder = sys.argv[1:]\n"
        "with ControlPlane(bus, log=f'{folder}/run.db', run='day', checkpoints=folder) as plane:\n"
        "    plane.wait_for_agents(2, timeout=60).wait()\n"
        "    for number in range(1, 5):\n"
        "        report = plane.sync_weights(None, f'step_{number}').wait()\n"
        "        report.raise_for_failures()\n"
    )
    done = chaos_run(tmp_path, "--", sys.executable, str(trainer), staging.bus, str(tmp_path), plan=plan)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fault 'preempted' on purpose: the trainer is killed" in done.stderr
    assert done.stdout.splitlines()[-1] == "0 faults: all promises held"
    assert collect(RunLog.walk(tmp_path / "run.db")).epochs == 2


def test_a_trainer_that_ignores_sigterm_is_killed_when_the_time_to_watch_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "STOP_S", 0.5)
    (tmp_path / "plan.toml").write_text('[[fault]]\nname = "dies"\nwhat = "kill_agent"\n')
    stubborn = "import pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    stubborn += f"pathlib.Path({str(tmp_path / 'began')!r}).touch(); signal.pause()"
    words = ["run", tmp_path / "plan.toml", "--log", tmp_path / "run.db", "--for", "2", "--", sys.executable, "-c"]
    done = CliRunner().invoke(chaos.chaos, [str(word) for word in (*words, stubborn)])
    assert (tmp_path / "began").exists()
    assert isinstance(done.exception, LogError), "no bus has written a log"


def test_a_fleet_that_is_not_whole_at_the_end_is_judged_so(
    fleet: Callable[..., StagingFleet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, log = tmp_path / "plan.toml", tmp_path / "run.db"
    plan.write_text('fault = [{name = "never", what = "refuse", call = "load", times = 0, replicas = [1]}]')
    staging = fleet(faults=plan.read_text(), checkpoints=tmp_path)
    with ControlPlane(staging.bus, log=log, checkpoints=tmp_path) as plane:
        plane.wait_for_agents(2, timeout=60).wait()
        assert plane.sync_weights(None, checkpoint(tmp_path, 1), quorum=1).wait().quarantined == (1,)
    with pytest.raises(CommandFailed, match="not whole at the end"):
        staging.judge(log)
    assert run(["chaos", "run", str(plan), "--log", str(log), "--json"]) == 1
    judged = json.loads(capsys.readouterr().out)
    assert (judged["good"], judged["violations"]) == (False, [])
    assert {(fault["name"], fault["agent"]) for fault in judged["faults"]} == {("never", "1.0")}
    assert "not whole at the end" in judged["verdict"][-1]


@pytest.mark.long
def test_the_pages_example_passes_and_its_plan_is_explained(tmp_path: Path) -> None:
    example = module_of("docs/gamedays.md", "test_my_trainer", tmp_path)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", example, cwd=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = blocks("docs/gamedays.md", "toml")
    (tmp_path / "plan.toml").write_text(plan)
    explained = typed("chaos", "explain", tmp_path / "plan.toml").stdout
    assert "stands still: stop_agent (20 s), on actor rank 0, at the prepare of the sync to v5" in explained
    assert "switch fails: cut (20 s), commands only, on every replica, 0.5 s after the commit of a sync" in explained
