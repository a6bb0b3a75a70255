"""`rolloutctl chaos`: a game day on a staging fleet: what a plan of faults will do, and a verdict on what it did."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import click

from controlplane.cli.command_line import FILE, PATH, Command, Group, json_option, note_problem
from controlplane.machine.events import Publish
from controlplane.record.entries import LogEntry
from controlplane.record.follow import follow
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.report.verdict import verdict
from schemas.commands import AdapterSync, WeightSync
from schemas.config import TIMEOUT_MAX_S
from schemas.errors import ConfigError, LogError
from schemas.fault_plan import MEANINGS, PlannedFault, described, is_due, occasion_of, read_plan
from schemas.formatting import json_text, one_line
from schemas.logs import logger_of
from schemas.wire import decode_command

logger = logger_of("chaos")

LOOK_S: Final = 0.2
"""Between two looks at the log."""
STOP_S: Final = 30.0
"""From SIGTERM to SIGKILL, for a trainer that has not ended by itself."""
LOOKS_MAX: Final = 50
"""Looks at a file that is no log, before it is taken for another one's: a bus is still writing its beginning."""

_plan = click.argument("plan", type=FILE)


@click.group(cls=Group, short_help="Hold a game day on a staging fleet.")
def chaos() -> None:
    """Have things go wrong on purpose, and see what the fleet makes of it.

    Agents of the staging fleet are started with the same plan: `rolloutctl agent --faults plan.toml`. No command on the
    bus causes a fault.
    """


@chaos.command(cls=Command, short_help="Print what a plan will do.")
@_plan
def explain(plan: Path) -> None:
    """Print when each fault of PLAN happens, where, and how often; then what each kind of fault does."""
    read = read_plan(plan)
    for fault in read.fault:
        click.echo(one_line(described(read, fault)))
    for what in dict.fromkeys(fault.what for fault in read.fault):
        click.echo(one_line(f"# {what}: {MEANINGS[what]}"))


@chaos.command(cls=Command, short_help="Watch a run, and judge it.")
@_plan
@click.option("--log", type=PATH, default="run.db", help="The run's log, or where it will be.")
@click.option(
    "--for", "for_s", type=click.FloatRange(1, TIMEOUT_MAX_S), help="Seconds to watch.  [default: to its end]"
)
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(plan: Path, log: Path, for_s: float | None, as_json: bool, command: Sequence[str]) -> None:
    """Watch the run that writes the log, until its bus closes, and print what each fault of PLAN did to the fleet.

    With a trainer's command after `--`, start that trainer, carry out the faults that kill it, and let it finish. The
    log must not be there yet. The exit code is 1 if a promise broke (`rolloutctl log verify` names it), or if the fleet
    was not whole at the end.

    \b
      rolloutctl chaos run plan.toml --log run.db
      rolloutctl chaos run plan.toml --log run.db -- python trainer.py
    """
    read = read_plan(plan)
    ended, kills = threading.Event(), [fault for fault in read.fault if fault.what == "kill_trainer"]
    if kills and not command:
        text = f"rolloutctl: {plan} kills the trainer, which is not done here: its command is not given after `--`."
        click.echo(one_line(text), err=True)
    if command and log.exists():
        raise ConfigError(f"{log} is there already: move it away, or name another log for the trainer that starts now")
    if for_s is not None:
        timer = threading.Timer(for_s, ended.set)
        timer.daemon = True
        timer.start()
    with _Trainer(command, ended) as trainer:
        for entry in _watched(log, ended):
            for fault in _due(kills if command else [], entry):
                kills.remove(fault)
                trainer.kill_later(fault)
        if command:
            ended.wait()  # a trainer may save its model after it has closed the bus
    report = collect(RunLog.walk(log))
    lines, good = verdict(read, report)
    lines[:0] = [f"{fault.name}: never happened" for fault in kills if command]
    if not good:
        note_problem()
    if as_json:
        click.echo(json_text({"good": good, "faults": report.faults, "violations": report.broken, "verdict": lines}))
    else:
        for line in lines:
            click.echo(one_line(line))


# --- watching ---------------------------------------------------------------------------------------------------------


class _Over(Exception):
    """It was watched for long enough."""


def _watched(log: Path, ended: threading.Event) -> Iterator[LogEntry]:
    """Yield the records of a log that may not be there yet, until its bus has closed it or `ended` is set."""

    def wait() -> None:
        if ended.wait(LOOK_S):
            raise _Over

    looks = 0
    with suppress(_Over):
        while True:
            try:
                RunLog.header(log)
                break
            except LogError:
                looks += log.exists()
                if looks > LOOKS_MAX:
                    raise
            wait()
        yield from follow(log, 1, wait)


def _due(kills: Sequence[PlannedFault], entry: LogEntry) -> Iterator[PlannedFault]:
    """Yield the faults of the trainer that are due when this was published."""
    for effect in entry.typed_effects() if kills and not entry.agent else ():
        command = decode_command(effect.envelope.body) if isinstance(effect, Publish) else None
        if isinstance(command, WeightSync | AdapterSync):
            yield from [fault for fault in kills if is_due(fault, occasion_of(entry.position, command))]


class _Trainer:
    """The trainer's process, if `chaos run` started it; sets `ended` when it has ended by itself."""

    def __init__(self, command: Sequence[str], ended: threading.Event) -> None:
        self._command, self._ended = command, ended
        self._killed: PlannedFault | None = None
        self._leaving, self._starting = threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        if self._command:
            self._process = self._started()
            self._keeper = threading.Thread(target=self._keep)
            self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:
            self._leaving.set()
        if self._command:
            self._signal(signal.SIGTERM)
            self._keeper.join(STOP_S)
            if self._keeper.is_alive():
                logger.warning("the trainer has not ended within %g s of SIGTERM, and is killed", STOP_S)
                self._signal(signal.SIGKILL)
                self._keeper.join()

    def kill_later(self, fault: PlannedFault) -> None:
        """Kill the trainer, and have it started again."""
        timer = threading.Timer(fault.after_s, self._kill, [fault])
        timer.daemon = True
        timer.start()

    def _kill(self, fault: PlannedFault) -> None:
        if self._process.poll() is None:
            logger.warning("fault %r on purpose: the trainer is killed", fault.name)
            self._killed = fault
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Signal the trainer and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _keep(self) -> None:
        """Start it again after each kill, until it ends by itself."""
        try:
            while True:
                code = self._process.wait()
                fault, self._killed = self._killed, None
                if fault is None or self._leaving.wait(fault.seconds):
                    break
                with self._starting:
                    if self._leaving.is_set():
                        break
                    self._process = self._started()
            if code and not self._leaving.is_set():
                logger.warning("the trainer ended with exit code %d", code)
        finally:
            self._ended.set()

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(self._command, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"the trainer {self._command[0]!r} can't be started: {error.strerror}") from error
