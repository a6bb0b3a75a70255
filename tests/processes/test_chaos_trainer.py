"""The trainer that `rolloutctl chaos run` starts: it is let finish, and what it started ends with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT

pytestmark = pytest.mark.filterwarnings("error")


def chaos_run(folder: Path, *command: str, plan: str = "") -> "subprocess.CompletedProcess[str]":
    (folder / "plan.toml").write_text(plan)
    words = ["chaos", "run", str(folder / "plan.toml"), "--log", str(folder / "run.db"), *command]
    return subprocess.run(
        [sys.executable, "-m", "controlplane.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=100
    )


def trainer(folder: Path, after: str) -> list[str]:
    """A trainer that goes on once its bus is closed."""
    (folder / "trainer.py").write_text(
        f"import pathlib, subprocess, sys, threading\nfolder = pathlib.Path({str(folder)!r})\n"
        f"from controlplane import ControlPlane\n"
        f"with ControlPlane('tcp://127.0.0.1:0', log=folder / 'run.db', run='day'): pass\n{after}\n"
    )
    return ["--", sys.executable, str(folder / "trainer.py")]


def test_a_trainer_saves_its_model_after_its_bus_is_closed(tmp_path: Path) -> None:
    plan = "[[fault]]\nname='preempted'\nwhat='kill_trainer'\nversion=2\nseconds=1"
    saves = "threading.Event().wait(1.5)\n(folder / 'model').write_text('saved')"
    done = chaos_run(tmp_path, *trainer(tmp_path, saves), plan=plan)
    assert (tmp_path / "model").exists(), done.stdout + done.stderr
    assert done.returncode == 0
    assert "preempted: never happened" in done.stdout


def test_what_a_trainer_started_ends_with_it(tmp_path: Path) -> None:
    starts = "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    done = chaos_run(tmp_path, "--for", "4", *trainer(tmp_path, starts))  # captured output ends with the last process
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_log_that_is_there_before_its_trainer_is_not_judged_as_its_run(tmp_path: Path) -> None:
    words = trainer(tmp_path, "")
    assert chaos_run(tmp_path, *words).returncode == 0
    again = chaos_run(tmp_path, *words)
    assert "run.db is there already" in again.stderr
    assert again.returncode != 0
