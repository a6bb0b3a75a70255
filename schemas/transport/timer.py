"""Calls a function at a moment of the event loop's clock."""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from schemas.transport.wakeup import callback_context

_ROUNDED_S: Final = 0.001
"""uvloop rounds to milliseconds. A timer that fires too early is set again, and fires at once, and again."""


class Timer:
    """Fires at or before the moment that was set: the callee checks the clock, and sets the next moment.

    `serve` does it, until cancelled. That wakes no task, and to set a later moment costs nothing.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._at_s = math.inf
        self._loop: asyncio.AbstractEventLoop | None = None  # while it serves
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        """Fire at this moment, unless it fires before."""
        if at_s < self._at_s:
            self._at_s = at_s
            if self._loop is not None:
                self._plan(self._loop)

    async def serve(self) -> None:
        """Fire when it is time, until cancelled. Raises what the function raises."""
        self._loop = loop = asyncio.get_running_loop()
        self._context = callback_context()
        self._ended: asyncio.Future[None] = loop.create_future()
        try:
            if self._at_s < math.inf:
                self._plan(loop)
            await self._ended
        finally:
            self._loop = None
            if self._handle is not None:
                self._handle.cancel()

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = loop.call_at(self._at_s + _ROUNDED_S, self._on_time, context=self._context)

    def _on_time(self) -> None:
        self._at_s, self._handle = math.inf, None
        try:
            self._on_due()
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)
