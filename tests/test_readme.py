"""The README, run as it stands: a first run in an empty folder, a second trainer, an agent in a program, commands."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane import ControlPlane
from tests.pages import blocks
from tests.running import environment, started

PAGE = "README.md"
BUS = "tcp://127.0.0.1:5555"
TRAINER, ASYNC_TRAINER, AGENT = blocks(PAGE)
FIRST_RUN, PICTURE, BY_HAND = blocks(PAGE, "sh")
(SHOWN,) = blocks(PAGE, "text")

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("readme")]  # a busy machine starts agents slowly


@pytest.fixture(scope="module")
def bus() -> str:
    """The README's address, on a port that is free here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first-run")


@pytest.fixture(scope="module")
def first_run(folder: Path, bus: str) -> str:
    """What the first run prints, typed into a shell in an empty folder."""
    (folder / "trainer.py").write_text(TRAINER.replace(BUS, bus))
    return shell(folder, FIRST_RUN, bus)


def shell(folder: Path, block: str, bus: str) -> str:
    """Run a block in a shell to its end, and to the end of all that it started. Returns what it printed."""
    done = subprocess.run(
        ["bash", "-c", block.replace(BUS, bus)], cwd=folder, env=surroundings(folder), capture_output=True, text=True
    )
    logs = "".join(path.read_text() for path in folder.glob("agent-*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "Traceback" not in done.stderr + logs, done.stderr + logs
    return done.stdout


def surroundings(folder: Path) -> dict[str, str]:
    """Of a shell in which the environment with this package is active."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environment({"PATH": path, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"})


def test_the_first_run_prints_what_the_readme_shows(first_run: str, folder: Path) -> None:
    *trained, report = first_run.splitlines()
    shown = SHOWN.splitlines()
    assert [without_times(line) for line in trained[: len(shown)]] == [without_times(line) for line in shown]
    assert report.startswith("run.html: ") and "<html" in (folder / "run.html").read_text()


def without_times(line: str) -> str:
    return re.sub(r"[\d.]+ m?s\b", "0 ms", line)


def test_the_first_run_waits_for_as_many_agents_as_it_starts() -> None:
    agents = FIRST_RUN.count("rolloutctl agent ")
    for trainer in (TRAINER, ASYNC_TRAINER):
        assert f"wait_for_agents({agents}," in trainer


@contextmanager
def agents(folder: Path, bus: str) -> Iterator[None]:
    """The README's first agent as a process of the command line, and that of replica 1 in a program."""
    first = next(line for line in FIRST_RUN.splitlines() if line.startswith("rolloutctl agent "))
    command = first.partition(" 2> ")[0].replace(BUS, bus).split()
    env = {"XDG_STATE_HOME": str(folder)}
    with (
        (folder / "serve.log").open("wb") as log,
        started("-m", "controlplane.cli", *command[1:], cwd=folder, env=env, stderr=subprocess.DEVNULL),
        started("-c", AGENT.replace(BUS, bus), cwd=folder, env=env, stderr=log),
    ):
        yield


def test_the_run_goes_on_and_is_driven_by_hand_and_drawn(first_run: str, folder: Path, bus: str) -> None:
    assert "v3 committed" in first_run
    with agents(folder, bus):
        with started("-c", ASYNC_TRAINER.replace(BUS, bus), cwd=folder, stderr=subprocess.PIPE) as trainer:
            printed, errors = trainer.communicate(timeout=400)
            assert trainer.returncode == 0 and "weights v6 committed on replicas 0, 1" in printed, errors
        assert "agent 1.0" in (folder / "serve.log").read_text(), "an agent in a program says what it does"
        with ControlPlane(bus, log=folder / "run.db", run="resume", checkpoints=folder) as plane:
            plane.wait_for_agents(2, timeout=300).wait()
            shown = shell(folder, f"set -e\n{BY_HAND}", bus)
    assert "weights commit v6" in shown and "same" in shown
    (folder / "trainer.yaml").write_text(blocks("docs/profiling.md", "yaml")[0])
    assert "sessions: 1" in shell(folder, f"set -e\n{PICTURE}", bus)
    for timeline in blocks("docs/timeline.md", "sh"):
        (folder / "run.perfetto.json.gz").unlink()
        assert "of 2 traces" in shell(folder, timeline, bus)
