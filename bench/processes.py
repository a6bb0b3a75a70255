"""Child processes that hold the agents of one system while it is measured."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROCESSES = 2
"""Processes that the agents of a system are spread over: one for each core of the machine that the limits are for."""

Worker = Callable[[], None]
"""Runs one exchange: a command to all agents, all outcomes back."""


def shares(agents: int) -> list[tuple[int, int]]:
    """(first, count) for each process."""
    sizes = [agents // PROCESSES + (index < agents % PROCESSES) for index in range(PROCESSES)]
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes) if size]


@contextmanager
def spawn(system: str, agents: int, *arguments: str) -> Iterator[None]:
    """Start the processes with `python -m bench.fanout --serve`, and end them."""
    children = [
        subprocess.Popen([sys.executable, "-m", "bench.fanout", "--serve", system, str(first), str(count), *arguments])
        for first, count in shares(agents)
    ]
    try:
        yield
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()
