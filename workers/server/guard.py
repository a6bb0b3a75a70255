"""The guard: a small process between an agent and the engine server that the agent launched.

Run as a file, `python -P guard.py`, never imported into a server. It needs the standard library and psutil alone, so it
is there in an instant and stays small. Its stdin is the agent's hold on it: a line with the order, later perhaps the
number of a launch that is to be ended and made again, and the end of it when the agent lets go or dies. Its stdout
carries a report, one line of JSON, at each change. Its stderr, like all that the server says, goes to the log.

Theory of operation. Linux gives a process that is a "subreaper" every orphan among its descendants as a child. The
guard is one, so the tree below it is all that the server ever started, sessions and double forks or not; and when that
tree is empty, nothing of the server is left.

Rule 1  The server does not outlive the agent, however the agent died; nor the guard, however the guard died.
Rule 2  There is never a second launch beside what is left of the first: the tree is ended before each.
Rule 3  A guard acts on a server only while it holds the lock of its log. So an agent that was killed and is started
        again at once waits until its former server is gone, with its ports and its memory.
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
from dataclasses import dataclass
from typing import Final, NamedTuple

import psutil

LOG_VARIABLE: Final = "ROLLOUTCTL_SERVER_LOG"
"""Environment variable that everything a server starts inherits: which log, and so which server, it belongs to."""

KILL_S: Final = 10.0
"""How long what was sent SIGKILL may take to be gone. A process that hangs in a driver can't be ended at all."""
LOOK_S: Final = 0.1
"""How often is looked for what the kernel tells nobody of: a grandchild that ended, a lock that was let go."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When a server that ended is started again: at most `most` times in any `window_s`, after a growing wait.

    first_wait_s: before the first of them; each further one within the window waits twice as long, up to
    `longest_wait_s`.
    """

    most: int = 5
    window_s: float = 3600.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0

    def wait_s(self, ended: Sequence[float], now: float) -> float | None:
        """Seconds to wait before the next start, or None to give up. ended: moments of all ends up to this one."""
        recent = sum(now - moment < self.window_s for moment in ended)
        if recent > self.most:
            return None
        return min(self.first_wait_s * 2.0 ** min(recent - 1, 60), self.longest_wait_s)


class GuardOrder(NamedTuple):
    """What the agent wants, as it comes through stdin: a JSON array of these.

    log: absolute path.   grace_s: from SIGTERM to SIGKILL.   launches: made by guards before this one.   restarts: the
    fields of `RestartPolicy`, in their order.
    """

    command: list[str]
    log: str
    grace_s: float
    launches: int
    restarts: list[float]


class Guard:
    """One guard's life: `run` returns when the tree below it is empty and is not to be started again."""

    def __init__(self, order: GuardOrder) -> None:
        self._order = order
        most, window_s, first_wait_s, longest_wait_s = order.restarts
        self._restarts = RestartPolicy(
            most=int(most), window_s=window_s, first_wait_s=first_wait_s, longest_wait_s=longest_wait_s
        )
        self._me = psutil.Process()
        self._told = ""  # why to end, once somebody wants it
        self._unwanted = 0  # the launch that is to be made again
        self._server: subprocess.Popen[bytes] | None = None  # while it runs
        self._launches = order.launches
        self._exit_code: int | None = None
        self._log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._log_from = 0
        self._awake = select.poll()
        self._signals = _signals_to_pipe()
        self._agent = -1  # for what the pipe can't tell: children of the agent may hold it open as well
        with suppress(OSError):  # a kernel before 5.3
            self._agent = os.pidfd_open(os.getppid())
            self._awake.register(self._agent, select.POLLIN)
        self._awake.register(sys.stdin.fileno(), select.POLLIN)
        self._awake.register(self._signals, select.POLLIN)

    def run(self) -> None:
        """Keep the server running until told to end, or until it ended too often."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if self._take_turn():
            self._sweep()
        ended: list[float] = []
        while not self._told:
            if why_not := self._launch():
                return self._report("given up", why_not)
            while self._server is not None and not self._told and self._unwanted != self._launches:
                self._wait()
            if self._told:
                break
            self._report("waiting to start again", "once all that it started is gone")
            if left := self._end_tree():
                return self._report("given up", f"{left} of it can't be ended, so it can't be started again")
            ended.append(time.monotonic())
            wait_s = self._restarts.wait_s(ended, ended[-1])
            if wait_s is None:
                most, window_s = self._restarts.most, self._restarts.window_s
                return self._report("given up", f"it was started again {most} times within {window_s:g} s")
            self._report("waiting to start again", f"in {wait_s:g} s")
            while not self._told and (left_s := ended[-1] + wait_s - time.monotonic()) > 0:
                self._wait(left_s)
        left = self._end_tree()
        self._report("ended", f"{self._told}; {left} of it can't be ended" if left else self._told)

    # --- the server ---------------------------------------------------------------------------------------------------

    def _take_turn(self) -> bool:
        """Wait for the lock of the log. False where its file system has no locks: then nobody knows who else is here.

        The lock is on an opening of the file that the server does not get, so it falls with this process.
        """
        held = False
        while not self._told:
            try:
                fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if not held:
                    self._report("starting", f"another server still runs with the log {self._order.log}")
                held = True
                self._wait(LOOK_S)
            except OSError as error:
                if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    return False
                raise
        return False

    def _sweep(self) -> None:
        """Kill what a guard that was itself killed could not end: under this lock, it is nobody's any more.

        It is known by the mark, or by the log that it writes to: who sets a process title, as vLLM's engine cores do,
        overwrites its environment. Sessions of the agent and above may write to that file for reasons of their own.
        """
        over = time.monotonic() + KILL_S
        log, ours = os.fstat(self._log), {os.getsid(one.pid) for one in (self._me, *self._me.parents())}
        left = [
            process
            for process in psutil.process_iter()
            if _mark(process) == self._order.log or _writes_to(process, log, ours)
        ]
        while left and time.monotonic() < over:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._wait(LOOK_S)
            left = [process for process in left if _lives(process)]

    def _launch(self) -> str:
        """Start the server, in a session of its own. Returns why that is impossible, or nothing."""
        number = self._launches + 1
        line = f"--- rolloutctl: launch {number} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        os.write(self._log, line.encode())
        self._log_from = os.fstat(self._log).st_size
        guard = os.getpid()
        try:
            self._server = subprocess.Popen(
                self._order.command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                stderr=sys.stderr,
                env={**os.environ, LOG_VARIABLE: self._order.log},
                start_new_session=True,
                preexec_fn=lambda: _die_with(guard),
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"it can't be started: {error}"
        self._launches = number
        self._report("running", "")
        return ""

    def _end_tree(self) -> str:
        """End all that runs below this process. Returns the pids of what is there all the same, or nothing.

        The server is asked first, and alone: it knows in which order to end its own. What it leaves behind is asked
        when it is gone, and what is there when the grace is over is killed.
        """
        over = time.monotonic() + self._order.grace_s
        asked: set[psutil.Process] = set()
        while self._reap():
            now, tree = time.monotonic(), self._me.children(recursive=True)
            if now >= over + KILL_S:
                return ", ".join(str(process.pid) for process in tree) or "something"
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    if now >= over:
                        process.kill()
                    elif process not in asked and self._server_pid in (None, process.pid):
                        asked.add(process)
                        process.terminate()
            self._wait(min(LOOK_S, over - now) if now < over else LOOK_S)
        return ""

    @property
    def _server_pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    # --- what happens -------------------------------------------------------------------------------------------------

    def _wait(self, most_s: float | None = None) -> None:
        """Wait until something happens, or for `most_s`; take note of it."""
        ready = dict(self._awake.poll(None if most_s is None else max(most_s, 0) * 1000))
        if self._signals in ready:
            seen = {signal.Signals(number) for number in os.read(self._signals, 4096)}
            for ending in seen.intersection(_ENDING):
                self._told = self._told or f"the guard was told to end by {ending.name}"
        if self._agent in ready:
            self._told = self._told or "the agent died"
            self._awake.unregister(self._agent)
        if sys.stdin.fileno() in ready:
            if lines := os.read(sys.stdin.fileno(), 4096).split():
                self._unwanted = int(lines[-1])
            else:
                self._told = self._told or "told to end"
                self._awake.unregister(sys.stdin.fileno())
        self._reap()

    def _reap(self) -> bool:
        """Take leave of every child that ended, whoever started it. Returns whether any is left.

        If none is, nothing is: what has lost its parent is a child here. It is the kernel that says so; a list of
        processes is read one by one while they come and go. No `Popen.wait`: it would miss its own here.
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
        """Tell the agent how things stand now; each report is complete. An agent that is gone needs none."""
        report = {
            "state": state,
            "pid": self._server_pid,
            "launches": self._launches,
            "exit_code": self._exit_code,
            "note": note,
            "since_s": time.monotonic(),
            "log_from": self._log_from,
        }
        with suppress(BrokenPipeError):
            os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")


def _signals_to_pipe() -> int:
    """Have signals wake a poll: their numbers come as bytes out of the descriptor that is returned."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the agent blocks, the server shall not
    out, into = os.pipe()
    os.set_blocking(out, False)
    os.set_blocking(into, False)
    signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    for one in (*_ENDING, signal.SIGCHLD):
        signal.signal(one, lambda *_: None)
    return out


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _die_with(parent: int) -> None:
    """In the child, before it becomes the server: have the kernel kill it when the guard ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked for
        os._exit(1)


def _mark(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, OSError):
        return process.environ().get(LOG_VARIABLE)
    return None


def _writes_to(process: psutil.Process, file: os.stat_result, but: set[int]) -> bool:
    """Whether its stdout or stderr is this file, and its session none of those."""
    for number in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{process.pid}/fd/{number}"), file):
                return os.getsid(process.pid) not in but
    return False


def _lives(process: psutil.Process) -> bool:
    """Not a zombie: those are nobody's trouble, and in a container without an init they stay for ever."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def main() -> None:
    """Read the order and carry it out."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(sys.stdin.fileno(), 65536)
        if not chunk:
            return  # the agent died before it gave one
        line += chunk
    Guard(GuardOrder(*json.loads(line))).run()


if __name__ == "__main__":
    main()
