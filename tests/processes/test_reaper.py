"""What a killed test run leaves behind is ended: its children, and what those have started, even if detached."""

import subprocess
import sys

import psutil

from tests import reaper
from tests.running import ROOT
from tests.waiting import wait_until

RUN = """
import subprocess, sys
from tests import reaper
reaper.start()
quiet = "import signal; signal.pause()"
start = f"subprocess.Popen([sys.executable, '-c', {quiet!r}], env={{}})"
hidden = f"import subprocess, sys; print({start}.pid, flush=True); {quiet}"
child = subprocess.Popen([sys.executable, "-c", hidden], stdout=subprocess.PIPE, text=True, start_new_session=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
child.wait()
"""


def running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_run_leaves_no_process() -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout is not None
        children = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
        assert len(children) == 2
        run.kill()
    wait_until(lambda: not any(running(child) for child in children))


def test_a_reaper_ends_with_a_run_that_ends_well() -> None:
    started = reaper.start()
    reaper.finish(started)
    assert started.returncode == 0
