"""`rolloutctl top`: a running fleet, live in the terminal. What it shows and what its keys do is in `top_screen`."""

import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import anyio
import click
from msgspec.structs import replace
from rich.console import Group
from rich.live import Live

from controlplane.bus.operator import ask_status, submit
from controlplane.cli import interrupt
from controlplane.cli.command_line import Command
from controlplane.cli.operate import bus_option, keys_option
from controlplane.cli.tables import Screen
from controlplane.cli.top_screen import Confirmed, TopView, keys_in, press, summary_of, top_screen
from schemas.errors import ConfigError, RolloutctlError
from schemas.reports import FleetStatus
from schemas.transport.keys import KeySource

TIMEOUT_S: Final = 30.0
"""For the agents' answers to a command, as for the commands of the command line."""


@click.command(cls=Command, short_help="Watch the fleet, and drive it by single keys.")
@bus_option
@keys_option
@click.option("--every", type=click.FloatRange(0.1, 3600), default=1.0, help="Seconds between two looks.")
def top(bus: str, keys: KeySource | None, every: float) -> None:
    """Show the fleet of a running bus, live: agents in trouble first, open commands, and the last failures.

    Keys select a replica, pause and resume it. Each command asks before it is sent. An observer's key only looks.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or Screen().is_dumb_terminal:
        raise ConfigError("top needs a terminal. Into a pipe or a file, `rolloutctl status` prints lines")
    fleet: FleetStatus = interrupt.run(partial(ask_status, bus, keys=keys))
    with _keys_at_once(sys.stdin.fileno()):
        code = interrupt.run(_Top(bus, keys, every, fleet).run)
    click.get_current_context().exit(code)


@contextmanager
def _keys_at_once(terminal: int) -> Iterator[None]:
    """Take each key as it is pressed, and leave the terminal as it was, however this ends."""
    before = termios.tcgetattr(terminal)

    try:
        tty.setcbreak(terminal)
        changed = termios.tcgetattr(terminal)
        changed[6][termios.VSUSP] = b"\0"  # stopped by Ctrl-Z, it would leave the shell its screen
        termios.tcsetattr(terminal, termios.TCSANOW, changed)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class _Top:
    """One screen, from its first status to its end."""

    def __init__(self, bus: str, keys: KeySource | None, every_s: float, fleet: FleetStatus) -> None:
        self._bus, self._keys, self._every_s = bus, keys, every_s
        self._fleet, self._view = fleet, TopView()
        self._console = Screen()
        self._live = Live(console=self._console, screen=True, auto_refresh=False, get_renderable=self._render)
        self._code = 0

    async def run(self) -> int:
        """Show the fleet until the operator leaves. Returns the exit code."""
        with self._live:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                tasks.start_soon(self._end_on_signal, tasks.cancel_scope)
                await self._read_keys(tasks)
                tasks.cancel_scope.cancel()
        return self._code

    def _render(self) -> Group:
        return top_screen(self._fleet, self._view, self._console.width, self._console.height)

    def _show(self, **changes: object) -> None:
        self._view = replace(self._view, **changes)
        self._live.refresh()

    async def _watch(self) -> None:
        """A bus that is silent may be restarted: it is asked again."""
        while True:
            await anyio.sleep(self._every_s)
            try:
                self._fleet = await ask_status(self._bus, keys=self._keys)
            except RolloutctlError as error:
                self._show(silent=str(error))
            else:
                self._show(silent="")

    async def _read_keys(self, tasks: anyio.abc.TaskGroup) -> None:
        terminal = sys.stdin.fileno()
        self._live.refresh()
        while not self._view.over:
            await anyio.wait_readable(terminal)
            text = ""
            with suppress(OSError):  # the terminal has gone
                text = os.read(terminal, 1024).decode("utf-8", "replace")
            if not text:
                return
            for key in keys_in(text):
                self._view, order = press(self._view, key, self._fleet)
                if order is not None:
                    tasks.start_soon(self._publish, order)
            self._live.refresh()

    async def _publish(self, order: Confirmed) -> None:
        try:
            report = await submit(self._bus, order.command, order.target, TIMEOUT_S, self._keys)
        except RolloutctlError as error:
            self._show(message=(str(error),), trouble=True)
        else:
            message, trouble = summary_of(report)
            self._show(message=message, trouble=trouble)

    async def _end_on_signal(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
            async for number in signals:
                self._code = 128 + number
                scope.cancel()
