"""Waiting in tests for what another task, thread or process does, where nothing can be awaited."""

import threading
import time
from collections.abc import Callable

import anyio

SHORTEST_S, LONGEST_S = 0.001, 0.01
"""Between two looks, which may cost more than what is waited for: the longer it takes, the rarer they are."""


async def until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Let the other tasks run until `holds()`."""
    pause_s = SHORTEST_S
    with anyio.fail_after(timeout_s):
        while not holds():
            await anyio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, LONGEST_S)


def wait_until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Let the other threads run until `holds()`."""
    deadline = time.monotonic() + timeout_s
    never, pause_s = threading.Event(), SHORTEST_S
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {timeout_s:g} s"
        never.wait(pause_s)
        pause_s = min(1.2 * pause_s, LONGEST_S)
