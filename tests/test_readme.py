"""The README, run as it stands: its agents, its trainer in both faces, and its look at the log afterwards."""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.running import rolloutctl

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SHELL = [
    line for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
BUS = "tcp://127.0.0.1:5555"


def test_the_readme_shows_both_faces_and_an_agent() -> None:
    blocking, async_face, agent = PYTHON
    assert "\nwith ControlPlane(" in blocking and "async with ControlPlane(" in async_face and "Agent(" in agent
    assert len([line for line in blocking.splitlines() if line and "import" not in line]) <= 10


@pytest.fixture
def bus() -> str:
    """The README's address, on a port that is free here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def running(folder: Path, *command: str) -> Iterator[None]:
    """A process that is asked to end when the block does, and must end well."""
    with (folder / "agents.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=_environment(folder), stderr=log)
    try:
        yield
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=_environment(folder), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, (done.stderr, (folder / "agents.log").read_text())
    return done.stdout


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CONFIG_HOME": str(folder), "OMP_NUM_THREADS": "1"}


def checkpoints(folder: Path) -> None:
    from workers.engines.tiny.model import TinyConfig, TinyModel, save

    for step in range(10):
        save(TinyModel(TinyConfig(), seed=step), folder / f"ckpt/step_{step}")


@pytest.mark.timeout(600)  # its trainer waits up to 300 s for agents that a busy machine starts slowly
def test_the_readme_works(tmp_path: Path, bus: str) -> None:
    checkpoints(tmp_path)
    blocking, async_face, agent = (block.replace(BUS, bus) for block in PYTHON)
    starts = [shlex.split(line.replace(BUS, bus)) for line in SHELL if line.startswith("rolloutctl agent ")]
    assert len(starts) == 2
    last = [{"0": "1"}.get(word, word) if before == "--replica" else word for before, word in _pairs(starts[1])]
    with ExitStack() as stack:
        for _, *words in (*starts, last):
            stack.enter_context(running(tmp_path, "-m", "controlplane.cli", *words))
        stack.enter_context(running(tmp_path, "-c", agent))
        run(tmp_path, "-c", blocking)
        run(tmp_path, "-c", async_face)
    assert "weights commit v20" in run(tmp_path, "-m", "controlplane.cli", "log", "show", "run.db")
    run(tmp_path, "-m", "controlplane.cli", "log", "verify", "run.db")
    assert "same" in run(tmp_path, "-m", "controlplane.cli", "log", "replay", "run.db")


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(["", *words], words, strict=False))


@pytest.mark.parametrize("line", [line for line in SHELL if line.startswith("rolloutctl ")])
def test_every_command_of_the_readme_exists(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True)[1:] if not word.startswith("-")]
    names = [word for word in words if word.isalpha() and word not in ("tiny", "keep")]
    done = rolloutctl(*names, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage:")
