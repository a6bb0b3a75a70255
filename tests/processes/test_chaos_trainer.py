"""The trainer that `rolloutctl chaos run` starts: it is let finish, and what it started ends with it."""

import sqlite3
import sys
import threading
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from controlplane.cli import chaos
from schemas.errors import LogError
from tests.running import rolloutctl

pytestmark = pytest.mark.filterwarnings("error")


def chaos_run(folder: Path, *command: str, plan: str = "") -> CompletedProcess[str]:
    (folder / "plan.toml").write_text(plan)
    return rolloutctl("chaos", "run", folder / "plan.toml", "--log", folder / "run.db", *command)


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


def test_a_log_whose_beginning_is_being_written_is_waited_for_and_another_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "run.db"
    sqlite3.connect(log).execute("create table another (a)").connection.close()
    monkeypatch.setattr(chaos, "LOOKS_MAX", 2)
    with pytest.raises(LogError, match=r"not a record file of rolloutctl"):
        list(chaos._watched(log, threading.Event()))
    log.unlink()
    sqlite3.connect(log).execute("vacuum").connection.close()
    monkeypatch.setattr(chaos, "LOOKS_MAX", 1_000)
    ended = threading.Event()
    timer = threading.Timer(1.0, ended.set)
    timer.start()
    assert list(chaos._watched(log, ended)) == []
