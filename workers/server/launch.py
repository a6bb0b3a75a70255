"""An engine server as a child of its agent: the process, and an engine that lives and dies with it.

Three processes: agent, guard (`workers.server.guard`), server. The agent asks and reads reports, and never waits for
either; what must happen also when the agent is gone, the guard does. So this module is small: a handle on the guard,
and `LaunchedEngine`, which puts a server under any engine that attaches to one.
"""

import logging
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
from workers.engine import Engine
from workers.server import guard
from workers.server.guard import GuardOrder, RestartPolicy

logger = logging.getLogger("rolloutctl.launch")

TOLD_EVERY_S: Final = 10.0
"""How often is told that a server still starts."""
SAID_LINES: Final = 20
"""Lines of the log that a status carries."""
_SAID_BYTES, _SAID_LETTERS = 8192, 300
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

State = Literal["starting", "running", "waiting to start again", "given up", "ended"]

# --- the process ------------------------------------------------------------------------------------------------------


class ServerStatus(Struct, frozen=True, kw_only=True):
    """How a server stands.

    state: `starting` until it was launched, `running` while its process lives, whether or not it answers yet.
    since_s: when that began, on the machine's monotonic clock.   pid: while it runs.
    launches: how often it was started.   exit_code: of the last that ended; below 0 it is minus the signal's number.
    note: why the state is what it is.   said: the last lines of the log since it was started.
    log_from: where in the log those begin.
    """

    state: State
    since_s: float
    pid: int | None = None
    launches: int = 0
    exit_code: int | None = None
    note: str = ""
    said: tuple[str, ...] = ()
    log_from: int = 0

    @property
    def last_exit(self) -> str:
        """How the last one ended, in words."""
        if self.exit_code is None:
            return "never ran"
        if self.exit_code >= 0:
            return f"ended with exit code {self.exit_code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"was killed by signal {-self.exit_code}"


_reports: Final = msgspec.json.Decoder(ServerStatus)


class ServerProcess:
    """A server that runs while this handle is held: it is ended, with all that it started, by `end`, and when the
    process that holds the handle dies.

    command: what to run, as for `subprocess`; its output is appended to `log`, and its input is empty.
    log: one file for each server of this machine. It is locked, so that no second launch runs beside the first.
    name: for messages.   grace_s: from SIGTERM to SIGKILL.

    Nothing here waits, but `end`. For one task of one loop.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        name: str = "the server",
        restarts: RestartPolicy | None = None,
        grace_s: float = 20.0,
    ) -> None:
        self.name, self.log = name, log.absolute()
        self._command, self._grace_s = tuple(command), grace_s
        self._restarts = restarts or RestartPolicy()
        self._guard: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._last = ServerStatus(state="ended", since_s=time.monotonic(), note="never started")
        self._ending = False
        self._lost: list[float] = []  # moments at which a guard was gone without a last word

    def start(self) -> None:
        """Start the guard, which starts the server. Raises ConfigError if the command or the log can't be used."""
        if self._guard is not None:
            return
        program = self._command[0] if self._command else ""
        if shutil.which(program) is None:
            raise ConfigError(f"{self.name}: there is no program {program!r} to launch: give its path, or mend PATH.")
        self._ending = False
        self._lost.clear()
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._start_guard()
        except OSError as error:
            raise ConfigError(f"{self.name}: its output can't be written to {self.log}: {error}") from error

    def status(self) -> ServerStatus:
        """How the server stands, as far as the guard has told."""
        self._read_reports()
        return replace(self._last, said=self._said())

    def start_again(self, launch: int) -> None:
        """Have this launch ended, and made again as if it had ended by itself. Another launch is left alone."""
        if self._guard is not None and self._guard.stdin is not None and not self._ending:
            with suppress(BrokenPipeError):
                self._guard.stdin.write(b"%d\n" % launch)

    async def end(self) -> ServerStatus:
        """End the server and all that it started, and return when they are gone. It goes on when this is cancelled."""
        self._ending = True
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
        while (out := self._reports_fd()) is not None:
            await anyio.wait_readable(out)
            self._read_reports()
        return self.status()

    def _start_guard(self) -> None:
        restarts = self._restarts
        limits = [restarts.most, restarts.window_s, restarts.first_wait_s, restarts.longest_wait_s]
        order = GuardOrder(list(self._command), str(self.log), self._grace_s, self._last.launches, limits)
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-P", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,  # Ctrl-C in the agent's terminal is the agent's alone
            )
        assert self._guard.stdin is not None and self._guard.stdout is not None
        os.set_blocking(self._guard.stdout.fileno(), False)
        self._partial = b""
        self._last = replace(self._last, state="starting", since_s=time.monotonic(), pid=None, note="")
        # The command goes through the pipe: in the guard's own it would be found by whoever looks for the server's.
        with suppress(BrokenPipeError):  # a guard that is gone is seen by its reports
            self._guard.stdin.write(msgspec.json.encode(order) + b"\n")

    def _reports_fd(self) -> int | None:
        return None if self._guard is None or self._guard.stdout is None else self._guard.stdout.fileno()

    def _read_reports(self) -> None:
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
        """Its reports are at their end. Without a last word it was killed, and its server with it: have a new one."""
        assert self._guard is not None and self._guard.stdin is not None and self._guard.stdout is not None
        self._guard.stdin.close()
        self._guard.stdout.close()
        code = self._guard.wait()  # at once: it closed its reports by ending
        self._guard = None
        if self._last.state in ("given up", "ended"):
            return
        now = time.monotonic()
        self._lost.append(now)
        self._last = replace(self._last, state="ended", since_s=now, pid=None, note=f"its guard was lost ({code})")
        if self._ending:
            return
        if self._restarts.wait_s(self._lost, now) is None:
            self._last = replace(self._last, state="given up", note=f"its guard was lost {len(self._lost)} times")
            return
        logger.warning("%s: its guard was lost (%d), and the server with it; a new one starts", self.name, code)
        try:
            self._start_guard()
        except OSError as error:
            self._last = replace(self._last, state="given up", note=f"its guard was lost, no new one starts: {error}")

    def _said(self) -> tuple[str, ...]:
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log_from = self._last.log_from if self._last.log_from <= size else 0  # somebody cut it off
                log.seek(max(log_from, size - _SAID_BYTES))
                text = log.read(_SAID_BYTES).decode(errors="replace")
        except OSError:
            return ()
        lines = (_ESCAPES.sub("", line).rstrip()[:_SAID_LETTERS] for line in text.splitlines())
        return tuple(line for line in lines if line)[-SAID_LINES:]


# --- the engine -------------------------------------------------------------------------------------------------------


class LaunchedEngine:
    """An engine with the server that it attaches to: opened together, closed together.

    engine: need not find a server when it is opened: one takes minutes to come up.
    up_within_s: how long a launch may take until the engine sees its server; then it is ended and made again, as often
    as a server that ends by itself. None for as long as it likes.   clock: seconds, monotonic.
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
        self._mark = ""
        self._inner: tuple[str, str] | None = None  # a launch, and the instance that the engine saw of it
        self._told: ServerStatus | None = None
        self._told_s = 0.0
        self._up = False  # the launch that was last told of has been up
        self._unwanted = 0  # the launch that took too long

    async def open(self) -> None:
        """Start the server, attach. Raises ConfigError, EngineError; then nothing runs."""
        self._mark = secrets.token_hex(4)  # pids and counts of another agent's life may be the same
        self._server.start()
        try:
            await self._engine.open()
        except BaseException:
            with CancelScope(shield=True):
                await self._server.end()
            raise

    async def observe(self) -> Observation:
        """What the engine is. While its server does not run, that nothing is known of it."""
        before = self._server.status()
        seen = await self._engine.observe()
        status = self._server.status()
        launch = f"{self._mark}.{status.launches}.{status.pid or 0}"
        runs = status.state == "running" and (before.launches, before.pid) == (status.launches, status.pid)
        if not runs:  # what answered is not this server
            seen = Observation(engine=seen.engine, tokenizer="unknown")
        elif seen.instance is not None:
            self._inner = launch, seen.instance
        self._tell(status, runs and seen.tokenizer != "unknown")
        self._require_up(status)
        inner = f".{self._inner[1][:100]}" if self._inner is not None and self._inner[0] == launch else ""
        return replace(seen, instance=launch + inner)

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Make one call. Raises CheckpointError, EngineError."""
        return await self._engine.perform(call, timeout_s)

    async def close(self) -> None:
        """Let go of the engine, then end the server and all that it started."""
        try:
            await self._engine.close()
        finally:
            await self._server.end()

    def _require_up(self, status: ServerStatus) -> None:
        waited_s = self._clock() - status.since_s
        if self._up_within_s is None or self._up or status.state != "running" or waited_s < self._up_within_s:
            return
        if self._unwanted != status.launches:
            self._unwanted = status.launches
            logger.warning("%s is not up after %.0f s: it is ended and started again", self._server.name, waited_s)
            self._server.start_again(status.launches)

    def _tell(self, status: ServerStatus, up: bool) -> None:
        """One line for each thing that happens to the server, and one now and then while it starts."""
        name, now, told = self._server.name, self._clock(), self._told
        news = told is None or (told.state, told.launches) != (status.state, status.launches)
        self._told = status
        waited_s = now - status.since_s
        if news:
            self._told_s, self._up = now, False
            self._tell_news(status)
        if up and not self._up:
            self._up = True
            logger.info("%s is up, after %.0f s", name, waited_s)
        elif not self._up and now - self._told_s >= TOLD_EVERY_S and status.state in ("starting", "running"):
            self._told_s = now
            last = status.note or (status.said[-1] if status.said else "it has said nothing yet")
            logger.info("%s starts since %.0f s: %s", name, waited_s, last)

    def _tell_news(self, status: ServerStatus) -> None:
        name, log, said = self._server.name, self._server.log, "\n  ".join(("", *status.said))
        match status.state:
            case "starting":
                logger.info("%s is about to start: %s", name, status.note or "its guard gets ready")
            case "running":
                logger.info("%s is launched (%d), pid %s; its log is %s", name, status.launches, status.pid, log)
            case "waiting to start again":
                logger.warning("%s %s; it is started again %s. %s:%s", name, status.last_exit, status.note, log, said)
            case "given up" | "ended":
                logger.error("%s %s and stays down: %s. %s:%s", name, status.last_exit, status.note, log, said)
            case _:
                assert_never(status.state)
