"""What a caller holds while a command is in flight: resolved by the bus, waited for in any thread or event loop."""

import os
from collections.abc import Callable, Generator
from threading import Lock
from typing import Final, Generic, TypeVar, cast

from schemas.logs import logger_of
from schemas.transport.forks import forks, used_after_fork
from schemas.transport.wakeup import Wakeup

logger = logger_of("bus")

FOREVER_US: Final = 1 << 62
R = TypeVar("R")


class Ticket(Generic[R]):
    """The result to come of one request to the bus: `await ticket`, or `ticket.wait()` without an event loop.

    A ticket always ends: at the latest at the deadline of the request, or when the bus is closed. The command
    proceeds whether or not it is waited for. Waiting raises CommandError and its subclasses, BusFaulted, BusClosed and,
    in a fork of the bus's process, BusError for a ticket that was open.

    Attributes:
        number: Identifies the request in the run's log.
        version: Of a sync: the version that it brings, known at once; 0 for other requests.
        adapter: Of a sync: the name of its adapter; empty for weights.
        advice: What its caller is told as well if the sync is refused, or stale. For the bus.
        timeout_us: Longest time that the request takes. For the bus.
        deadline_us: The moment on the bus's clock by which it has ended, whatever happens. For the bus.
    """

    def __init__(self, number: int) -> None:
        # Two bare locks, because a `concurrent.futures.Future` costs the bus and its caller several times as much.
        self.number, self.version, self.adapter, self.advice = number, 0, "", ""
        self.timeout_us = self.deadline_us = FOREVER_US
        self._process, self._generation = os.getpid(), len(forks)
        self._lock = Lock()  # around a change of the callbacks
        self._callbacks: list[Callable[[], object]] | None = []  # None once it has ended
        self._gate = Lock()  # held until it has ended
        self._gate.acquire()
        self._result: R | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Ticket {self.number}, {'done' if self.done else 'open'}>"

    @property
    def done(self) -> bool:
        """Whether waiting would return or raise at once."""
        return self._callbacks is None

    def wait(self, timeout: float | None = None) -> R:
        """Block the thread until the result is there, and return it.

        Args:
            timeout: Seconds to wait; None for as long as it takes. The ticket ends by itself in any case.

        Raises:
            BusError: The ticket is of the process that this one was forked from.
            TimeoutError: `timeout` is over. The command is still in flight, and may be waited for again.
        """
        if self._callbacks is not None:
            self._check_process()
            if not self._gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                raise TimeoutError(f"ticket {self.number} is still open after {timeout:g} s")
            self._gate.release()  # for other waiters
        return self._outcome()

    def __await__(self) -> Generator[object, None, R]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> R:
        if self._callbacks is not None:
            self._check_process()
            wakeup = Wakeup()
            try:
                self._on_end(wakeup.notify)
                await wakeup.wait()
            finally:
                wakeup.close()
        return self._outcome()

    def when_done(self, callback: Callable[["Ticket[R]"], object]) -> None:
        """Call `callback` with this ticket when it ends, in a thread of the bus. It must neither block nor raise."""
        self._on_end(lambda: callback(self))

    def resolve(self, result: R) -> None:
        """Set the result. For the bus; without effect on a ticket that has ended."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """Set an error. For the bus; without effect on a ticket that has ended."""
        self._end(None, error)

    def _check_process(self) -> None:
        """Only the process of the bus learns the end of an open ticket."""
        if self._generation != len(forks):
            raise used_after_fork("ticket", self._process)

    def _on_end(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        _call(callback)

    def _end(self, result: R | None, error: BaseException | None) -> None:
        with self._lock:
            callbacks = self._callbacks
            if callbacks is None:
                return
            self._result, self._error, self._callbacks = result, error, None
        self._gate.release()
        for callback in callbacks:
            _call(callback)

    def _outcome(self) -> R:
        if self._error is not None:
            raise self._error
        return cast(R, self._result)


def _call(callback: Callable[[], object]) -> None:
    """Call it in a thread that others depend on: it must not end for an error of one caller."""
    try:
        callback()
    except Exception:
        logger.exception("what was to be called at the end of a ticket raised")
