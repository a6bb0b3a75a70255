"""Calls a function at a moment of the event loop's clock."""

import asyncio
import math
from collections.abc import Callable
from typing import Final

import anyio
from anyio import CancelScope

from schemas.carriers.wakeup import callback_context, under_asyncio

_ROUNDED_S: Final = 0.001
"""uvloop rounds to milliseconds. An alarm that rings too early is set anew, and rings at once, and again."""


class Alarm:
    """Rings at the moment that was set, or earlier: who is rung looks at the clock, and sets the next moment.

    `serve` does it, until cancelled. Under asyncio that wakes no task, and to set a later moment costs nothing.

    Args:
        ring: Called in the loop.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at_s = math.inf
        self._moved: anyio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # while it serves under asyncio

    def set(self, at_s: float) -> None:
        """Ring at this moment, unless it rings before."""
        if at_s >= self._at_s:
            return
        self._at_s = at_s
        if self._loop is not None:
            self._plan()
        elif self._moved is not None:
            self._moved.set()

    async def serve(self) -> None:
        """Ring when it is time, until cancelled. Raises what the function raises."""
        if under_asyncio():
            await self._serve_by_callbacks()
        while True:
            self._moved = anyio.Event()
            with CancelScope(deadline=self._at_s):
                await self._moved.wait()
                continue
            self._at_s = math.inf
            self._ring()

    async def _serve_by_callbacks(self) -> None:
        self._loop, self._context = asyncio.get_running_loop(), callback_context()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._handle: asyncio.TimerHandle | None = None
        try:
            if self._at_s < math.inf:
                self._plan()
            await self._ended
        finally:
            self._loop = None
            if self._handle is not None:
                self._handle.cancel()

    def _plan(self) -> None:
        assert self._loop is not None
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(self._at_s + _ROUNDED_S, self._on_time, context=self._context)

    def _on_time(self) -> None:
        self._at_s, self._handle = math.inf, None
        try:
            self._ring()
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)
