"""What a caller holds while a command is under way: resolved by the bus, awaited from any thread or in the loop."""

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeVar

import anyio

from controlplane.events import SyncReport
from schemas.wire import Report

R = TypeVar("R", Report, SyncReport)


class Ticket(Generic[R]):
    """One command that was handed to the bus. It always ends: at the latest when the command's time is up, or when the
    bus is closed. number: names it in the run's log.
    """

    __slots__ = ("_future", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._future: Future[R] = Future()

    def __repr__(self) -> str:
        return f"<Ticket {self.number}, {'concluded' if self.done else 'open'}>"

    @property
    def done(self) -> bool:
        """Whether there is something to return or raise."""
        return self._future.done()

    def wait(self) -> R:
        """The report, for a thread without an event loop; in a loop use `outcome`.

        Raises CommandError and its kinds, BusFaulted, BusClosed.
        """
        return self._future.result()

    async def outcome(self) -> R:
        """The report, in the loop that the bus runs on. Raises what `wait` raises."""
        if not self._future.done():
            event = anyio.Event()
            # The bus resolves tickets in its loop, so the event is set there.
            self._future.add_done_callback(lambda _: event.set())
            await event.wait()
        return self._future.result()

    def resolve(self, report: R) -> None:
        """By the bus, once."""
        with suppress(InvalidStateError):
            self._future.set_result(report)

    def fail(self, error: Exception) -> None:
        """By the bus. Without effect on a ticket that has ended."""
        with suppress(InvalidStateError):
            self._future.set_exception(error)
