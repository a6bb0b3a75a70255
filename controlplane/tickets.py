"""What a caller holds while a command is in flight: resolved by the bus, waited for in any thread or event loop."""

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeVar

from schemas.carriers.wakeup import Wakeup

R = TypeVar("R")


class Ticket(Generic[R]):
    """The result to come of one request to the bus: `await ticket`, or `ticket.wait()` without an event loop.

    A ticket always ends: at the latest at the deadline of the request, or when the bus is closed. The command
    proceeds whether or not anybody waits. Waiting raises CommandError and its subclasses, BusFaulted and BusClosed.

    Attributes:
        number: Identifies the request in the run's log.
    """

    __slots__ = ("_future", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._future: Future[R] = Future()

    def __repr__(self) -> str:
        return f"<Ticket {self.number}, {'done' if self.done else 'open'}>"

    @property
    def done(self) -> bool:
        """Whether waiting would return or raise at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> R:
        """Block the thread until the result is there, and return it.

        Args:
            timeout: Seconds to wait; None for as long as it takes. The ticket ends by itself in any case.

        Raises:
            TimeoutError: `timeout` is over. The command is still in flight, and may be waited for again.
        """
        return self._future.result(timeout)

    def __await__(self) -> Generator[object, None, R]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> R:
        if not self._future.done():
            wakeup = Wakeup()
            try:
                self._future.add_done_callback(lambda _: wakeup.notify())
                await wakeup.wait()
            finally:
                wakeup.close()
        return self._future.result()

    def when_done(self, callback: Callable[["Ticket[R]"], object]) -> None:
        """Call `callback` with this ticket when it ends, in the bus's thread. It must neither block nor raise."""
        self._future.add_done_callback(lambda _: callback(self))

    def resolve(self, result: R) -> None:
        """Set the result. For the bus; without effect on a ticket that has ended."""
        with suppress(InvalidStateError):
            self._future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Set an error. For the bus; without effect on a ticket that has ended."""
        with suppress(InvalidStateError):
            self._future.set_exception(error)
