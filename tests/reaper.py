"""Ends what a test run has started and not ended, however the run itself ends: by SIGKILL, too.

Fixtures end their processes; they can't when pytest or one of its workers is killed. So pytest, and each worker, starts
this program beside it. It waits for the end of its input, which comes when that process is gone, and then kills every
process that carries the run's mark in its environment, and all of their descendants. A worker's mark begins with the
mark of the run, so the reaper of the run ends the workers as well.

Uses nothing but the standard library, so that it starts in a few milliseconds.
"""

import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "ROLLOUTCTL_TEST_RUN"


def start() -> subprocess.Popen[bytes]:
    """Mark the environment of this process, for all that it starts from now on, and start its reaper."""
    os.environ[MARK] = f"{os.environ.get(MARK, 'run')}-{uuid.uuid4().hex}"
    command = [sys.executable, "-I", "-S", __file__, os.environ[MARK]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def finish(reaper: subprocess.Popen[bytes]) -> None:
    """Have the reaper end what is left, and wait until it has."""
    os.environ[MARK] = os.environ[MARK].rpartition("-")[0]
    reaper.communicate()


def left(mark: str) -> set[int]:
    """The processes of the run that are alive, and their descendants."""
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            environment = (place / "environ").read_bytes()
            command = (place / "cmdline").read_bytes()
        except OSError:  # it has just ended, or is not ours
            continue
        if state == b"Z" or os.fsencode(__file__) in command.split(b"\0"):
            continue
        parents[int(place.name)] = int(parent)
        if any(line.startswith(f"{MARK}={mark}".encode()) for line in environment.split(b"\0")):
            marked.add(int(place.name))
    while below := {pid for pid, parent in parents.items() if parent in marked} - marked:
        marked |= below
    return marked


def reap(mark: str) -> None:
    """Kill until nothing is left: a process may have started another while the list was made."""
    while pids := left(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
