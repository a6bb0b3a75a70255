"""Child processes that hold the agents of one system while it is measured."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

PROCESSES = 2
"""Processes that the agents of a system are spread over: one for each core of the machine that the limits are for."""


class Fleet:
    """The processes of one system's agents."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self.children = children

    def stop(self) -> None:
        """Stop them for a while, so that they cost nothing while another system is measured."""
        for child in self.children:
            child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them go on."""
        for child in self.children:
            child.send_signal(signal.SIGCONT)


class System(NamedTuple):
    """One system that is ready.

    Attributes:
        exchange: Runs one exchange: a command to all agents, all outcomes back.
        fleet: The processes of its agents.
    """

    exchange: Callable[[], None]
    fleet: Fleet


def shares(agents: int) -> list[tuple[int, int]]:
    """(first, count) for each process."""
    sizes = [agents // PROCESSES + (index < agents % PROCESSES) for index in range(PROCESSES)]
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes) if size]


@contextmanager
def spawn(system: str, agents: int, *arguments: str, module: str = "bench.fanout") -> Iterator[Fleet]:
    """Start the processes with `python -m MODULE --serve`, and end them."""
    words = [sys.executable, "-m", module, "--serve", system]
    with own_temporary_files() as environment:
        children = [
            subprocess.Popen([*words, str(first), str(count), *arguments], env=environment)
            for first, count in shares(agents)
        ]
        try:
            yield Fleet(children)
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.wait()


@contextmanager
def own_temporary_files() -> Iterator[dict[str, str]]:
    """The environment for processes that will be killed, and leave their temporary files: those go with the block."""
    with tempfile.TemporaryDirectory() as folder:
        yield {**os.environ, "TMPDIR": folder}
