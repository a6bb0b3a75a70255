"""Tool `nsys`: the ranges of the CUDA profiler API and the NVTX ranges of a training rank, as Nvidia's tools see them.

Nsight Systems is what they are for. Nsight Compute obeys the same API and shows the same ranges for each kernel, and is
on machines where the former is not.
"""

import csv
import glob
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import ROOT, environment

pytestmark = pytest.mark.gpu

FUNCTION = re.compile(r"(sin|cos|exp|tanh)_kernel")
RECORDED = {
    "whole": [("exp", "rollout"), ("cos", ""), ("tanh", "update")],
    "discrete": [("exp", "rollout"), ("tanh", "update")],
}
HOW = pytest.mark.parametrize("how", sorted(RECORDED))


def tool(name: str, *places: str) -> str:
    """Return the program, from ROLLOUTCTL_TEST_NSYS or _NCU, the PATH, or where Nvidia installs it. Skips without."""
    found = (os.environ.get(f"ROLLOUTCTL_TEST_{name.upper()}"), shutil.which(name))
    programs = [*filter(None, found), *(program for place in places for program in sorted(glob.glob(place)))]
    if not programs:
        pytest.skip(f"{name} is not installed: neither on the PATH nor at {', '.join(places)}")
    return programs[0]


def run(folder: Path, how: str, *words: str) -> str:
    """Run the rank under a tool, and return what was printed. It must reach its end."""
    command = [*words, sys.executable, "-m", "tests.gpu.ranges", str(folder / "traces"), how]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    printed = done.stdout + done.stderr
    assert done.returncode == 0 and "trained to the end" in printed, printed[-3000:]
    return printed


@HOW
def test_nsight_compute_sees_the_kernels_of_a_session_in_the_ranges_of_their_stages(tmp_path: Path, how: str) -> None:
    ncu = tool("ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu")
    log = tmp_path / "kernels.csv"
    limits = ("--profile-from-start", "off", "--clock-control", "none", "--metrics", "gpu__time_duration.sum")
    run(tmp_path, how, ncu, *limits, "--nvtx", "--csv", "--page", "raw", "--log-file", str(log))
    lines = [line for line in log.read_text().splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row["ID"]]
    assert [(named(row["Kernel Name"]), stage_of(row)) for row in rows] == RECORDED[how], log.read_text()[-3000:]


def named(kernel: str) -> str:
    found = FUNCTION.search(kernel)
    return found[1] if found else kernel


def stage_of(row: dict[str, str]) -> str:
    ranges = " ".join(value or "" for column, value in row.items() if column and "Range" in column)
    return " ".join(stage for stage in ("rollout", "update") if stage in ranges)


@HOW
def test_nsight_systems_records_a_session_and_lets_the_trainer_go_on(
    tmp_path: Path, how: str, measured: Callable[[str], None]
) -> None:
    places = ("/opt/nvidia/nsight-systems/*/bin/nsys", "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys")
    nsys = tool("nsys", *places)
    capture = ("--capture-range=cudaProfilerApi", "--capture-range-end=repeat")
    what = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none")
    printed = run(tmp_path, how, nsys, "profile", *what, *capture, "--output", str(tmp_path / "report"))
    reports = sorted(tmp_path.glob("report*.nsys-rep"))
    if not reports:
        raw = sorted(tmp_path.glob("report*.qdstrm"))
        assert raw, printed[-3000:]
        assert len(raw) == (2 if how == "discrete" else 1)
        words = (b"rollout", b"update", b"exp_kernel", b"cos_kernel", b"tanh_kernel", b"sin_kernel")
        seen = [[word.decode() for word in words if word in file.read_bytes()] for file in raw]
        measured(f"nsys ({how}): {len(raw)} .qdstrm files, which have the words {seen}, and no report of them")
        return
    assert [row for report in reports for row in recorded(nsys, report)] == RECORDED[how]
    measured(f"nsys ({how}): {len(reports)} reports")


def recorded(nsys: str, report: Path) -> list[tuple[str, str]]:
    """Return the kernels of a report in their order, each with the range in which it was launched."""
    database = report.with_suffix(".sqlite")
    subprocess.run([nsys, "export", "--type=sqlite", "--output", str(database), str(report)], check=True, timeout=100)
    query = """
        select names.value, (select coalesce(text, value) from NVTX_EVENTS left join StringIds on id = textId
                             where NVTX_EVENTS.start <= calls.start and calls.end <= NVTX_EVENTS.end)
        from CUPTI_ACTIVITY_KIND_KERNEL as kernels join CUPTI_ACTIVITY_KIND_RUNTIME as calls using (correlationId)
        join StringIds as names on names.id = kernels.demangledName order by kernels.start
    """
    with sqlite3.connect(database) as rows:
        return [(named(kernel), stage or "") for kernel, stage in rows.execute(query)]
