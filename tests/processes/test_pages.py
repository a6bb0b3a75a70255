"""The trainers of docs/embedding.md, run as they stand with real agents; and the traps that the page names."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from safetensors.torch import save_file

from controlplane import ControlPlane
from schemas.outcomes import ErrorKind, Failed
from tests.pages import blocks, module_of
from tests.running import ROOT, python, started, typed
from tests.waiting import wait_until
from workers.engines.tiny.model import TinyConfig, TinyModel, save

PAGE = "docs/embedding.md"
BUS = "tcp://127.0.0.1:5555"
LEARN = """
from pathlib import Path
from shutil import copytree

def learn(step):
    copytree(Path("made") / str(step), Path("ckpt") / f"step_{step}", dirs_exist_ok=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trainer's folder: its `learn`, three checkpoints to be, and the toy engine of the page on backends."""
    (tmp_path / "my_trainer.py").write_text(LEARN)
    module_of("docs/backends.md", "echo", tmp_path)
    for step in range(3):
        (tmp_path / "made" / str(step)).mkdir(parents=True)
        tensor = torch.full((64,), step, dtype=torch.uint8)
        save_file({"echo": tensor}, tmp_path / "made" / str(step) / "model.safetensors")
    return tmp_path


def written(name: str, folder: Path) -> tuple[Path, str]:
    """The trainer of the page, at an address that nothing else takes meanwhile. Returns its file and the address."""
    bus = f"ipc://{folder}/bus"
    file = module_of(PAGE, name, folder)
    file.write_text(file.read_text().replace(BUS, bus))
    return file, bus


def paths(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}


@contextmanager
def agent(bus: str, folder: Path, replica: int = 0) -> Iterator[None]:
    words = ("agent", "--bus", bus, "--replica", replica, "--engine", "echo:Echo", "--state-dir", folder / "state")
    with (
        (folder / "agent.log").open("ab") as log,
        started("-m", "controlplane.cli", *words, cwd=folder, env=paths(folder), stderr=log),
    ):
        yield


def test_a_tiny_engine_gives_tokens_as_docs_engines_md_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("docs/engines.md")
    address = f"ipc://{tmp_path}/engine-0"
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db") as plane:
        words = ("agent", "--bus", plane.address, "--replica", 0, "--engine", "tiny", "--serve", address)
        with started("-m", "controlplane.cli", *words, "--state-dir", tmp_path, cwd=tmp_path, env=paths(tmp_path)):
            plane.wait_for_agents(1, timeout=100).wait()
            exec(block.replace("ipc:///tmp/engine-0", address), {})
    assert capsys.readouterr().out.endswith(" [0, 0, 0, 0]\n")


@pytest.mark.parametrize("name", ["blocking_trainer", "async_trainer"])
def test_a_trainer_of_the_page_trains(name: str, folder: Path) -> None:
    file, bus = written(name, folder)
    with agent(bus, folder):
        done = python(file, cwd=folder, env=paths(folder))
    trained(done, folder)


def trained(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Check that the trainer ended well, and that its log has three committed versions."""
    log = folder / "agent.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    shown = typed("log", "show", folder / "run.db").stdout
    assert [version for version in (1, 2, 3) if f"weights commit v{version}" in shown] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trainer_under_torchrun_trains(folder: Path) -> None:
    file, bus = written("torchrun_trainer", folder)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, file)
    with agent(bus, folder):
        trained(python(*launch, cwd=folder, env=paths(folder)), folder)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ray")
def test_a_trainer_on_ray_trains(tmp_path: Path) -> None:
    (tmp_path / "my_trainer.py").write_text(LEARN)
    for step in range(3):
        save(TinyModel(TinyConfig(), seed=step), tmp_path / "made" / str(step))
    file, _ = written("ray_trainer", tmp_path)
    done = python(file, cwd=tmp_path, env=paths(tmp_path) | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"})
    trained(done, tmp_path)
    assert done.stdout.count("committed") == 3


# --- traps ------------------------------------------------------------------------------------------------------------


def test_sigterm_closes_the_bus_of_the_page(folder: Path) -> None:
    (folder / "my_trainer.py").write_text(
        "import signal\n\ndef learn(step):\n    print('learning', flush=True)\n    signal.pause()\n"
    )
    file, bus = written("blocking_trainer", folder)
    with agent(bus, folder), started(file, cwd=folder, env=paths(folder)) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "learning\n"
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(60) == 143
        with ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db"):
            pass  # it was closed in order, and has let go of its log


def test_a_late_joiner_whose_checkpoint_was_removed_names_version_and_path(folder: Path) -> None:
    with (
        ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", checkpoints=folder) as plane,
        agent(plane.address, folder, 0),
    ):
        plane.wait_for_agents(1).wait()
        plane.sync_weights(1, "made/0").wait().raise_for_failures()
        rmtree(folder / "made" / "0")
        with agent(plane.address, folder, 1):
            wait_until(lambda: any("could not load version 1" in line.condition for line in plane.status().agents))
            plane.pause().wait()
            report = plane.resume().wait()
            late = next(outcome for outcome in report.outcomes if outcome.agent == "1.0").conclusion
            assert isinstance(late, Failed) and late.error is ErrorKind.QUARANTINED
            assert "version 1 (checkpoint 'made/0')" in late.message
            plane.sync_weights(2, "made/1").wait().raise_for_failures()  # and it is back
    assert "made/0 does not exist" in (folder / "agent.log").read_text()
