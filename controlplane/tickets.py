"""What a caller holds while a command is under way: resolved by the bus, waited for in any thread or event loop."""

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeVar

from schemas.carriers.wakeup import Wakeup

R = TypeVar("R")


class Ticket(Generic[R]):
    """One thing that was asked of the bus. `await ticket`, or `ticket.wait()` in a thread without an event loop.

    It always ends: at the latest when the time of what was asked is up, or when the bus is closed. Nothing is undone
    when nobody waits. number: names a command in the run's log.

    Both ways raise CommandError and its kinds, BusFaulted, BusClosed.
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
        """What came of it. Blocks the thread."""
        return self._future.result()

    def __await__(self) -> Generator[object, None, R]:
        return self._awaited().__await__()

    async def _awaited(self) -> R:
        if not self._future.done():
            wakeup = Wakeup()
            try:
                self._future.add_done_callback(lambda _: wakeup.notify())
                await wakeup.wait()
            finally:
                wakeup.close()
        return self._future.result()

    def when_done(self, tell: Callable[["Ticket[R]"], object]) -> None:
        """Have `tell` called with this ticket when it ends, in the bus's thread: it must neither block nor raise."""
        self._future.add_done_callback(lambda _: tell(self))

    def resolve(self, result: R) -> None:
        """By the bus, once."""
        with suppress(InvalidStateError):
            self._future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """By the bus. Without effect on a ticket that has ended."""
        with suppress(InvalidStateError):
            self._future.set_exception(error)
