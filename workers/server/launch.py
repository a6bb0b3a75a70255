"""An engine server as a child of its agent: the process, and an engine that lives and dies with it.

There are three processes: agent, guard (`workers.server.guard`), server. The agent sends requests and reads reports,
and never waits for either; whatever must also happen when the agent is gone is the guard's work. So this module is
small: a handle on the guard, and `LaunchedEngine`, which launches a server for any engine that attaches to one.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, assert_never

import anyio
import msgspec
from anyio import CancelScope
from msgspec import Struct
from msgspec.structs import replace

from schemas.errors import ConfigError
from schemas.events import EngineCall, Observation, Returned
from schemas.logs import logger_of
from schemas.transport.keys import environment_of_children
from workers.engine import Engine
from workers.server import guard
from workers.server.guard import GuardOrder, RestartPolicy

logger = logger_of("launch")

STARTING_LOG_S: Final = 10.0
"""Seconds between two "still starting" log lines."""
TAIL_LINES: Final = 20
"""Lines of the log that a status carries."""
_TAIL_BYTES, _LINE_MAX = 8192, 300
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

State = Literal["starting", "running", "waiting to restart", "given up", "ended"]

# --- the process ------------------------------------------------------------------------------------------------------


class ServerStatus(Struct, frozen=True, kw_only=True):
    """The state of a server.

    Attributes:
        state: `starting` until it is launched, `running` while its process lives, whether or not it answers yet.
        since_s: When that state began, on the machine's monotonic clock.
        exit_code: Exit code of the last process that ended; if negative, minus the number of the signal.
        log_tail: The last lines of the log since it was started.
    """

    state: State
    since_s: float
    pid: int | None = None
    launches: int = 0
    exit_code: int | None = None
    note: str = ""
    log_tail: tuple[str, ...] = ()

    @property
    def last_exit(self) -> str:
        """How the last process ended, as a phrase."""
        if self.exit_code is None:
            return "never ran"
        if self.exit_code >= 0:
            return f"ended with exit code {self.exit_code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"was killed by signal {-self.exit_code}"


_reports: Final = msgspec.json.Decoder(ServerStatus)


class ServerProcess:
    """A server that runs while this handle is held.

    It ends, with everything that it started, by `end` or when the process that holds the handle dies. Only `end` waits.
    For one task of one event loop.

    Args:
        command: What to run, as for `subprocess`. Its output is appended to `log`, and its input is empty.
        log: A separate file for each server on this machine. It is locked, so that launches never overlap.
        first: What to run the first time, if that differs.
        name: For messages.
        restarts: When to restart it.
        grace_s: Seconds from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        first: Sequence[str] = (),
        name: str = "the server",
        restarts: RestartPolicy | None = None,
        grace_s: float = 20.0,
    ) -> None:
        self.name, self.log = name, log.absolute()
        self._first, self._command, self._grace_s = tuple(first or command), tuple(command), grace_s
        self._restarts = restarts or RestartPolicy()
        self._guard: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._last = ServerStatus(state="ended", since_s=time.monotonic(), note="never started")
        self._ending = False
        self._lost: list[float] = []  # when a guard was found to have ended without a final report
        self._guard_due: float | None = None  # when the next guard starts, after one was lost

    def start(self) -> None:
        """Start the guard, which starts the server. Raises ConfigError if the command or the log can't be used."""
        if self._guard is not None:
            return
        if sys.platform != "linux":
            raise ConfigError(
                f"{self.name}: only Linux can end everything that a server started. "
                "Start it yourself, and leave --launch out."
            )
        program = self._command[0] if self._command else ""
        if shutil.which(program) is None:
            raise ConfigError(f"{self.name}: there is no program {program!r} to launch: give its path, or fix PATH.")
        if self.log.exists() and not self.log.is_file():
            raise ConfigError(
                f"{self.name}: its output can't be written to {self.log}, which is not a plain file. Give each server "
                "a log file of its own: its lock keeps two launches apart."
            )
        self._ending, self._guard_due = False, None
        self._lost.clear()
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._start_guard()
        except OSError as error:
            raise ConfigError(f"{self.name}: its output can't be written to {self.log}: {error}") from error

    def status(self) -> ServerStatus:
        """Return the server's state, as of the guard's last report."""
        self._read_reports()
        return replace(self._last, log_tail=self._log_tail())

    def restart(self, launch: int) -> None:
        """Kill the server of this launch; the guard starts the next. Any other launch is left alone."""
        status = self.status()
        if status.launches == launch and status.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(status.pid, signal.SIGKILL)

    async def end(self) -> ServerStatus:
        """End the server and everything that it started; return once they are gone. Continues if this is cancelled."""
        self._ending = True
        if self._guard_due is not None:
            self._guard_due, self._last = None, replace(self._last, state="ended")
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
        while (out := self._reports_fd()) is not None:
            await anyio.wait_readable(out)
            self._read_reports()
        return self.status()

    def _start_guard(self) -> None:
        commands = list(self._first), list(self._command)
        order = GuardOrder(*commands, str(self.log), self._grace_s, self._last.launches, self._restarts)
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-P", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=environment_of_children(),
                start_new_session=True,  # Ctrl-C in the agent's terminal must reach only the agent
            )
        assert self._guard.stdin is not None and self._guard.stdout is not None
        os.set_blocking(self._guard.stdout.fileno(), False)
        self._partial = b""
        self._last = replace(self._last, state="starting", since_s=time.monotonic(), pid=None, note="")
        # Sent through the pipe: in the guard's own command line it would mislead a search for the server's process.
        with suppress(BrokenPipeError):  # its reports show that a guard is gone
            self._guard.stdin.write(msgspec.json.encode(order) + b"\n")

    def _reports_fd(self) -> int | None:
        return None if self._guard is None or self._guard.stdout is None else self._guard.stdout.fileno()

    def _read_reports(self) -> None:
        if self._guard_due is not None and time.monotonic() >= self._guard_due:
            self._guard_due = None
            logger.warning("%s: %s; starting a new guard", self.name, self._last.note)
            try:
                self._start_guard()
            except OSError as error:
                self._await_guard(f"a new guard can't start: {error}")
        while (out := self._reports_fd()) is not None:
            try:
                chunk = os.read(out, 65536)
            except BlockingIOError:
                return
            if not chunk:
                self._guard_gone()
                continue
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            if lines:
                self._last = _reports.decode(lines[-1])

    def _guard_gone(self) -> None:
        """Its reports have ended. Without a final one it was killed, and its server with it: start a new guard."""
        assert self._guard is not None and self._guard.stdin is not None and self._guard.stdout is not None
        self._guard.stdin.close()
        self._guard.stdout.close()
        code = self._guard.wait()  # returns at once: it closed its reports by ending
        self._guard = None
        if self._last.state in ("given up", "ended"):
            return
        self._await_guard(f"its guard was lost ({code}), and the server with it")

    def _await_guard(self, note: str) -> None:
        """Start the next guard after a wait that grows, or give up."""
        now = time.monotonic()
        self._lost.append(now)
        wait_s = self._restarts.wait_s(self._lost, now)
        state: State = "ended" if self._ending else "given up" if wait_s is None else "waiting to restart"
        if state == "given up":
            note = f"its guard was lost {len(self._lost)} times"
        if state == "waiting to restart" and wait_s is not None:
            self._guard_due = now + wait_s
        self._last = replace(self._last, state=state, since_s=now, pid=None, note=note)

    def _log_tail(self) -> tuple[str, ...]:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ()
        _, launched, output = text.rpartition(guard.LAUNCH_LINE)
        lines = (_ESCAPES.sub("", line).rstrip()[:_LINE_MAX] for line in output.splitlines()[1 if launched else 0 :])
        return tuple(line for line in lines if line)[-TAIL_LINES:]


# --- the engine -------------------------------------------------------------------------------------------------------


class LaunchedEngine:
    """An engine with the server that it attaches to: opened together, closed together.

    Args:
        engine: Need not find a server when it is opened, since a server takes minutes to come up.
        server: Not started yet.
        up_within_s: Seconds until the engine must see its server. Then the launch is restarted, as often as a server
            that ends by itself. None for no limit.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        engine: Engine,
        server: ServerProcess,
        *,
        up_within_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._server, self._clock = engine, server, clock
        self._up_within_s = up_within_s
        self._launch_prefix = ""
        self._seen: tuple[str, str] | None = None  # a launch, and the instance that the engine saw of it
        self._logged: ServerStatus | None = None
        self._logged_s = 0.0
        self._up = False  # the launch that was logged last has been up

    def server_pid(self) -> int | None:
        """Return the process of the server, which leads a session of its own; None while it does not run."""
        return self._server.status().pid

    async def open(self) -> None:
        """Start the server and attach. Raises ConfigError, EngineError; then nothing runs."""
        self._launch_prefix = secrets.token_hex(4)  # an earlier agent process may have had the same pids and counts
        self._server.start()
        try:
            await self._engine.open()
        except BaseException:
            with CancelScope(shield=True):
                await self._server.end()
            raise

    async def observe(self) -> Observation:
        """Read the engine's state. It is unknown while its server does not run."""
        before = self._server.status()
        seen = await self._engine.observe()
        status = self._server.status()
        launch = f"{self._launch_prefix}.{status.launches}.{status.pid or 0}"
        runs = status.state == "running" and (before.launches, before.pid) == (status.launches, status.pid)
        if not runs:  # whatever answered is not this server
            seen = Observation(engine=seen.engine, tokenizer="unknown")
        elif seen.instance is not None:
            self._seen = launch, seen.instance
        self._log_status(status, runs and seen.tokenizer != "unknown")
        self._restart_if_late(status)
        inner = f".{self._seen[1][:100]}" if self._seen is not None and self._seen[0] == launch else ""
        return replace(seen, instance=launch + inner)

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        return await self._engine.perform(call, timeout_s)

    async def close(self) -> None:
        """Detach from the engine, then end the server and everything that it started."""
        try:
            await self._engine.close()
        finally:
            await self._server.end()

    def _restart_if_late(self, status: ServerStatus) -> None:
        waited_s = self._clock() - status.since_s
        if self._up_within_s is None or self._up or status.state != "running" or waited_s < self._up_within_s:
            return
        logger.warning("%s is not up after %.0f s: restarting it", self._server.name, waited_s)
        self._server.restart(status.launches)

    def _log_status(self, status: ServerStatus, up: bool) -> None:
        """Log each change of the server's state, and now and then that it still starts."""
        name, now, logged = self._server.name, self._clock(), self._logged
        changed = logged is None or (logged.state, logged.launches) != (status.state, status.launches)
        self._logged = status
        waited_s = now - status.since_s
        if changed:
            self._logged_s, self._up = now, False
            self._log_change(status)
        if up and not self._up:
            self._up = True
            logger.info("%s is up, after %.0f s", name, waited_s)
        elif not self._up and now - self._logged_s >= STARTING_LOG_S and status.state in ("starting", "running"):
            self._logged_s = now
            last = status.note or (status.log_tail[-1] if status.log_tail else "no output yet")
            logger.info("%s still starting after %.0f s: %s", name, waited_s, last)

    def _log_change(self, status: ServerStatus) -> None:
        name, log, tail = self._server.name, self._server.log, "\n".join(("", *status.log_tail))
        match status.state:
            case "starting":
                logger.info("%s is about to start: %s", name, status.note or "its guard is starting")
            case "running":
                logger.info("%s launched (%d), pid %s; its log is %s", name, status.launches, status.pid, log)
            case "waiting to restart":
                logger.warning("%s %s; restarting %s. %s:%s", name, status.last_exit, status.note, log, tail)
            case "given up" | "ended":
                logger.error("%s %s and stays down: %s. %s:%s", name, status.last_exit, status.note, log, tail)
            case _:
                assert_never(status.state)
