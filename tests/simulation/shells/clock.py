"""A virtual clock for the real shells: time passes only while nothing is ready, and then in one step to the next timer.

Everything that the shells read from their surroundings comes from here: the monotonic clock and the wall clock of the
`time` module, random numbers and random names. So a seed is a run.
"""

import asyncio
import contextlib
import gc
import random
import secrets
import selectors
import time
from collections.abc import Iterator
from typing import Any, Final
from unittest.mock import patch

BEGIN_S: Final = 1000.0
"""Of the monotonic clock."""
TURN_S: Final = 1e-6
"""What a turn of the loop takes. Without it, a task that looks at the clock a little too early would look for ever."""
WALL_NS: Final = 1_700_000_000_000_000_000
"""Of the wall clock at the moment 0 of the monotonic clock."""


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: if no descriptor is ready, the clock moves on to the moment until which to wait."""

    now_s = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, or move the clock."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing will ever happen any more: each task waits, and no timer is set")
        self.now_s += TURN_S + (0.0 if ready or timeout is None else max(0.0, timeout))
        return ready


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address: anyio cancels the tasks of a scope in that order."""

    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _Task.made += 1
        self._made = _Task.made  # first: the loop puts it into a set
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._made


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self.set_task_factory(lambda loop, work, **kwargs: _Task(work, loop=loop, **kwargs))

    def time(self) -> float:
        """Return the moment, in seconds."""
        return self._jumping.now_s


@contextlib.contextmanager
def virtual(seed: int) -> Iterator[VirtualLoop]:
    """Let time be virtual, and all luck of the shells that of a seed.

    Args:
        seed: Of the luck of the shells. A world has luck of its own.

    Raises:
        Exception: What a callback or a task of the loop raised, and nothing took.
    """
    loop, failures = VirtualLoop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    luck, names = random.getstate(), random.Random(f"names {seed}")

    def monotonic_ns() -> int:
        return round(loop.time() * 1_000_000_000)

    random.seed(seed)
    _Task.made = 0
    try:
        with (
            patch.object(time, "monotonic_ns", monotonic_ns),
            patch.object(time, "monotonic", loop.time),
            patch.object(time, "time_ns", lambda: WALL_NS + monotonic_ns()),
            patch.object(secrets, "token_hex", lambda nbytes=32: names.randbytes(nbytes).hex()),
        ):
            yield loop
    finally:
        random.setstate(luck)
        loop.close()
    gc.collect()  # so that a task whose error nothing took says so
    if failures:
        raise failures[0].get("exception") or RuntimeError(failures[0]["message"])
