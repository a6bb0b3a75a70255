"""Child processes that hold the agents of one system while it is measured, and what runs agents of ours in them."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio

from schemas.identity import Identity
from workers.engine import Engine

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


def run_agents(numbers: range, bus: str, make: Callable[[int], tuple[Identity, Engine]], keys: str | None) -> None:
    """Run agents in this process, on one event loop, until it is killed.

    Args:
        numbers: One agent for each.
        make: Returns the identity and the engine of an agent, by its number.
        keys: Their key file; None without keys.
    """
    from workers.agent import Agent  # here, because a process of peers needs none

    async def run_agent(number: int, state: Path) -> None:
        identity, engine = make(number)
        async with Agent(bus=bus, identity=identity, engine=engine, state_dir=state, keys=keys) as agent:
            await agent.run()

    async def main() -> None:
        with tempfile.TemporaryDirectory() as state:
            async with anyio.create_task_group() as group:
                for number in numbers:
                    group.start_soon(run_agent, number, Path(state) / str(number))

    anyio.run(main, backend_options={"use_uvloop": True})
