"""The guard: a small process between an agent and the engine server that the agent launched.

It runs as a file, `python -P guard.py`, and is never imported into a server. It needs only the standard library and
psutil, so it starts at once and stays small. Its stdin is the agent's control of it: one order line, then end of file
when the agent lets go or dies. Its stdout carries a report, one line of JSON, at each change. Its stderr goes to the
log, as the server's output does.

Theory of operation: Linux makes every orphaned descendant of a "subreaper" its child. The guard is a subreaper, so the
tree below it is everything that the server ever started, even through sessions and double forks. When that tree is
empty, nothing of the server is left. Between agent and guard is a fork of the guard, its keeper. It is a subreaper too
and only waits: if the guard is killed, it inherits the tree and ends it.

Rule 1  The server does not outlive the agent, however the agent died, nor the guard, however the guard died.
Rule 2  A launch never runs beside the remains of the one before: the tree is ended first.
Rule 3  A guard acts on a server only while it holds the lock of its log. So an agent that was killed and restarted at
        once waits until its former server is gone, with its ports and its memory.
"""

import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

LAUNCH_LINE: Final = "--- rolloutctl: launch "
"""Begins the line in the log that separates the output of two launches."""

KILL_S: Final = 10.0
"""Seconds that processes may take to end after SIGKILL. One that hangs in a driver can't be ended at all."""
POLL_S: Final = 0.1
"""Seconds between polls for what the kernel does not signal: a grandchild that ended, a lock that was released."""

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LIBC = ctypes.CDLL(None, use_errno=True)


class RestartPolicy(NamedTuple):
    """How often a server that ended is restarted, and after what wait.

    Attributes:
        first_wait_s: Wait before the first restart; doubles for each further one within the window.
    """

    most: int = 5
    window_s: float = 3600.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0

    def wait_s(self, ended: Sequence[float], now: float) -> float | None:
        """Return the seconds to wait before the next start, or None to give up."""
        recent = sum(now - moment < self.window_s for moment in ended)
        if recent > self.most:
            return None
        return min(self.first_wait_s * 2.0 ** min(recent - 1, 60), self.longest_wait_s)


class GuardOrder(NamedTuple):
    """The agent's order, a JSON array on stdin.

    Attributes:
        first: The command of the first launch.
        command: That of every other one.
    """

    first: list[str]
    command: list[str]
    log: str
    grace_s: float
    launches: int
    restarts: RestartPolicy


class Guard:
    """One guard's life: `run` in a fork, which returns once the tree below it is empty and is not to be restarted, and
    `keep` in the process that made the guard. Both hold the lock of the log.
    """

    def __init__(self, order: GuardOrder) -> None:
        self._order = order
        self._restarts = RestartPolicy(*order.restarts)
        self._reason = ""  # why to end; empty while there is no reason
        self._server: subprocess.Popen[bytes] | None = None  # while it runs
        self._launches = order.launches
        self._exit_code: int | None = None
        self._log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._awake = select.poll()
        self._signals = _signals_to_pipe()
        self._agent = -1  # the pipe does not suffice: children of the agent may hold it open as well
        with suppress(OSError):  # a kernel before 5.3
            self._agent = os.pidfd_open(os.getppid())
            self._awake.register(self._agent, select.POLLIN)
        self._awake.register(sys.stdin.fileno(), select.POLLIN)
        self._awake.register(self._signals, select.POLLIN)

    def run(self) -> None:
        """Keep the server running until asked to end, or until it has ended too often."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._me = psutil.Process()
        self._lock_log()
        ended: list[float] = []
        while not self._reason:
            if failure := self._launch():
                return self._report("given up", failure)
            while self._server is not None and not self._reason:
                self._wait()
            if self._reason:
                break
            self._report("waiting to restart", "once everything that it started is gone")
            if left := self._end_tree(self._order.grace_s):
                return self._report("given up", f"{left} of its processes can't be ended, so it can't be restarted")
            ended.append(time.monotonic())
            wait_s = self._restarts.wait_s(ended, ended[-1])
            if wait_s is None:
                most, window_s = self._restarts.most, self._restarts.window_s
                return self._report("given up", f"it was restarted {most} times within {window_s:g} s")
            self._report("waiting to restart", f"in {wait_s:g} s")
            while not self._reason and (left_s := ended[-1] + wait_s - time.monotonic()) > 0:
                self._wait(left_s)
        left = self._end_tree(self._order.grace_s)
        self._report("ended", f"{self._reason}; {left} of its processes can't be ended" if left else self._reason)

    def keep(self, guard: int) -> int:
        """Wait for the guard, and end what it left behind if it was killed. Returns its exit code."""
        _LIBC.prctl(_PR_SET_NAME, b"rolloutctl-keep", 0, 0, 0)  # who kills by the name `python` must not take both
        code = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
        self._me = psutil.Process()
        self._end_tree(0)
        return code if code >= 0 else 128 - code

    # --- the server ---------------------------------------------------------------------------------------------------

    def _lock_log(self) -> None:
        """Wait for the lock of the log. Where its file system has no locks, others can't be detected.

        The lock belongs to a file description that the server does not inherit, so it ends with this process.
        """
        waiting = False
        while not self._reason:
            try:
                fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not waiting:
                    self._report("starting", f"another server still runs with the log {self._order.log}")
                waiting = True
                self._wait(POLL_S)
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    return
                raise

    def _launch(self) -> str:
        """Start the server, in a session of its own. Returns why that failed, or an empty string."""
        number = self._launches + 1
        with suppress(OSError):  # a full disk
            os.write(self._log, f"{LAUNCH_LINE}{number} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        guard = os.getpid()
        try:
            self._server = subprocess.Popen(
                self._order.command if self._launches else self._order.first,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=sys.stderr,
                start_new_session=True,
                preexec_fn=lambda: _die_with(guard),
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"it can't be started: {error}"
        self._launches = number
        self._report("running", "")
        return ""

    def _end_tree(self, grace_s: float) -> str:
        """End everything below this process. Returns the pids of what is still there, or an empty string.

        The server alone gets SIGTERM first: it knows in which order to end its children. What it leaves behind gets
        SIGTERM once it is gone, and what is there after the grace period is killed.
        """
        over = time.monotonic() + grace_s
        terminated: set[psutil.Process] = set()
        while self._reap():
            now, tree = time.monotonic(), self._me.children(recursive=True)
            if now >= over + KILL_S:
                return ", ".join(str(process.pid) for process in tree) or "some"
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    if now >= over:
                        process.kill()
                    elif process not in terminated and self._server_pid in (None, process.pid):
                        terminated.add(process)
                        process.terminate()
            self._wait(min(POLL_S, over - now) if now < over else POLL_S)
        return ""

    @property
    def _server_pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    # --- what happens -------------------------------------------------------------------------------------------------

    def _wait(self, most_s: float | None = None) -> None:
        """Wait until something happens, at most `most_s` seconds, and record it."""
        ready = dict(self._awake.poll(None if most_s is None else max(most_s, 0) * 1000))
        if self._signals in ready:
            seen = {signal.Signals(number) for number in os.read(self._signals, 4096)}
            for ending in seen.intersection(_ENDING):
                self._reason = self._reason or f"the guard received {ending.name}"
        if self._agent in ready:
            self._reason = self._reason or "the agent died"
            self._awake.unregister(self._agent)
        if sys.stdin.fileno() in ready:
            self._reason = self._reason or "the agent ended it"
            self._awake.unregister(sys.stdin.fileno())
        self._reap()

    def _reap(self) -> bool:
        """Reap every child that ended, also those of others. Returns whether any is left.

        If none is left, the whole tree is gone, because orphans become children here. Only the kernel knows that; a
        list of processes is read one by one while they come and go. `Popen.wait` would lose its own child here.
        """
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if self._server is not None and pid == self._server.pid:
                    self._server.returncode = self._exit_code = os.waitstatus_to_exitcode(status)
                    self._server = None
        except ChildProcessError:
            return False
        return True

    def _report(self, state: str, note: str) -> None:
        """Send the agent the present state; each report is complete. An agent that is gone needs none."""
        report = {
            "state": state,
            "pid": self._server_pid,
            "launches": self._launches,
            "exit_code": self._exit_code,
            "note": note,
            "since_s": time.monotonic(),
        }
        with suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")


def _signals_to_pipe() -> int:
    """Make signals wake a poll: their numbers arrive as bytes at the returned descriptor."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the server must not inherit what the agent blocks
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (*_ENDING, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reading


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when the guard ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the guard ended before the kernel knew
        os._exit(1)


def main() -> None:
    """Read the order and carry it out."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(sys.stdin.fileno(), 65536)
        if not chunk:
            return  # the agent died before it sent one
        line += chunk
    guard = Guard(GuardOrder(*json.loads(line)))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    pid = os.fork()
    if pid:
        sys.exit(guard.keep(pid))
    guard.run()


if __name__ == "__main__":
    main()
