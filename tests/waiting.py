"""Waiting in tests for what another task, thread or process does, where nothing can be awaited."""

import threading
import time
from collections.abc import Callable

import anyio


async def until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Let the other tasks run until `holds()`."""
    with anyio.fail_after(timeout_s):
        while True:
            if holds():
                return
            await anyio.sleep(0.001)


def wait_until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Let the other threads run until `holds()`."""
    deadline = time.monotonic() + timeout_s
    never = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {timeout_s:g} s"
        never.wait(0.001)
