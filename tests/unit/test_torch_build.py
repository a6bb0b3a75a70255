"""What `make` fetches for torch: never a build with CUDA without a word. Its programs are stood in for here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")

CPU = ["torch", "sympy", "filelock"]
CUDA = [*CPU, "nvidia-cublas", "nvidia-cudnn-cu13", "triton", "cuda-bindings"]
STAND_IN = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
    *--dry-run*) cat {report} ;;
    *tests.torch_build*) shift 2; exec {python} {root}/tests/torch_build.py "$@" ;;
esac
"""


class Machine:
    """A virtual environment whose programs only note what they are asked for, and an index that serves some build."""

    def __init__(self, folder: Path, packages: list[str]) -> None:
        self._folder, self._log, self._report = folder, folder / "log", folder / "report.json"
        self._report.write_text(json.dumps({"install": [{"metadata": {"name": name}} for name in packages]}))
        (folder / "venv" / "bin").mkdir(parents=True)
        for program in ("venv/bin/python", "uv"):
            text = STAND_IN.format(log=self._log, report=self._report, python=sys.executable, root=ROOT)
            (folder / program).write_text(text)
            (folder / program).chmod(0o755)

    def make(self, *settings: str, stamp: str = ".demo-ready") -> subprocess.CompletedProcess[str]:
        words = ["make", "--no-print-directory", f"VENV={self._folder}/venv", *settings, f"{self._folder}/venv/{stamp}"]
        clean = {name: value for name, value in os.environ.items() if name not in ("TORCH", "UV", "MAKEFLAGS")}
        return subprocess.run(words, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines()


def test_a_build_with_cuda_is_not_fetched_unasked(tmp_path: Path) -> None:
    machine = Machine(tmp_path, CUDA)
    made = machine.make("UV=")
    assert made.returncode != 0 and made.stdout.startswith("Once: torch (torch==")
    assert "4 packages for NVIDIA GPUs" in made.stderr and "Nothing was fetched" in made.stderr
    assert "TORCH=" in made.stderr and "uv" in made.stderr
    assert not any("install torch" in call for call in machine.calls)


@pytest.mark.parametrize(
    ("packages", "settings", "asked"),
    [(CPU, ["UV="], True), (CUDA, ["UV=", "TORCH=torch==2.13.0"], False)],
    ids=["a CPU build", "chosen"],
)
def test_a_small_build_and_one_that_was_chosen_are_installed(
    tmp_path: Path, packages: list[str], settings: list[str], asked: bool
) -> None:
    machine = Machine(tmp_path, packages)
    made = machine.make(*settings)
    assert made.returncode == 0, made.stderr
    assert any(call.endswith("install torch==2.13.0") for call in machine.calls)
    assert any("--dry-run" in call for call in machine.calls) is asked


def test_uv_chooses_the_build_where_it_is_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, CUDA)
    made = machine.make(f"UV={tmp_path}/uv", "TORCH_BACKEND=auto")
    assert made.returncode == 0, made.stderr
    assert any("--torch-backend auto torch==2.13.0" in call for call in machine.calls)
    assert not any("--dry-run" in call for call in machine.calls)


def test_pip_that_fails_is_not_taken_for_a_small_build(tmp_path: Path) -> None:
    machine = Machine(tmp_path, CPU)
    (tmp_path / "report.json").write_text("")
    made = machine.make("UV=")
    assert made.returncode != 0 and "pip could not find out" in made.stderr


def test_the_demo_installs_nothing_that_only_developers_need(tmp_path: Path) -> None:
    machine = Machine(tmp_path, CPU)
    assert machine.make("UV=").returncode == 0
    assert [call.rpartition(" ")[2] for call in machine.calls if "--editable" in call] == [".[torch,speed]"]
    assert machine.make("UV=", stamp=".ready").returncode == 0
    assert [call.rpartition(" ")[2] for call in machine.calls if "--editable" in call][1:] == [".[dev]"]
