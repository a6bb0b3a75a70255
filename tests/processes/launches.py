"""Servers that a test launches, and what is seen of their processes."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import psutil

from tests.waiting import until
from workers.server.guard import RestartPolicy
from workers.server.launch import ServerProcess, ServerStatus

AT_ONCE = RestartPolicy(first_wait_s=0.01)
LONGEST_S = 60.0

QUIET = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {QUIET}"
TREE = """
import os, signal, subprocess, sys
quiet = [sys.executable, "-c", "import signal; signal.pause()"]
other_session = subprocess.Popen(quiet, start_new_session=True)
out, into = os.pipe()
between = os.fork()
if between == 0:
    os.setsid()
    os.write(into, b"%d" % subprocess.Popen(quiet, env={}).pid)
    os._exit(0)
os.waitpid(between, 0)
os.write(1, b"tree %d %d %d\\n" % (os.getpid(), other_session.pid, int(os.read(out, 20))))
signal.pause()
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


async def status_when(server: ServerProcess, holds: Callable[[ServerStatus], bool]) -> ServerStatus:
    """Wait until the server's status is one that `holds`, and return that status."""
    with anyio.fail_after(LONGEST_S):
        while True:
            if holds(status := server.status()):
                return status
            await anyio.sleep(0.01)


def printed(word: str) -> Callable[[ServerStatus], bool]:
    return lambda status: status.state == "running" and any(line.startswith(word) for line in status.log_tail)


def tree(status: ServerStatus) -> list[psutil.Process]:
    """The processes of TREE: the server, its child in another session, and the orphan, which has no environment."""
    pids = next(line for line in status.log_tail if line.startswith("tree")).split()[1:]
    found = [psutil.Process(int(pid)) for pid in pids]
    assert len(found) == 3 and len({os.getsid(process.pid) for process in found}) == 3
    return found


async def gone(processes: Sequence[psutil.Process]) -> None:
    await until(lambda: not any(lives(process) for process in processes))


def lives(process: psutil.Process) -> bool:
    """Whether it runs. When its zombie is reaped is up to the machine's init."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def guard_of(server: psutil.Process) -> psutil.Process:
    parent = server.parent()
    assert parent is not None
    return parent


class Servers:
    """Starts servers in a folder, and ends them all."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder, self._stack = folder, stack

    def __call__(self, code: str, *, restarts: RestartPolicy = AT_ONCE, grace_s: float = 20.0) -> ServerProcess:
        server = ServerProcess(
            python(code), log=self.folder / "server.log", name="tiny server", restarts=restarts, grace_s=grace_s
        )
        self._stack.push_async_callback(server.end)
        return server

    async def up(self, code: str, *, grace_s: float = 20.0) -> ServerProcess:
        """A server that runs, and has printed `up`."""
        server = self(code, grace_s=grace_s)
        server.start()
        await status_when(server, printed("up"))
        return server

    async def tree(self) -> tuple[ServerProcess, list[psutil.Process]]:
        """The server of TREE, and its processes."""
        server = self(TREE)
        server.start()
        return server, tree(await status_when(server, printed("tree")))
