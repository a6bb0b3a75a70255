"""The thread in which a trainer's bus lives. It ends with the bus, and never outlives the trainer.

Rule 1  Ctrl-C interrupts the caller that waits for the end, not the end itself: the bus still closes in order.
Rule 2  A bus without a trainer must not go on, since its heads would keep engines paused for it. The thread ends when
        the main thread has ended, or the one that opened it if that lives longer, and always before the process.
Rule 3  Nothing waits for a bus that hangs, as on a disk that does: a second thread ends what must end in time. The bus
        is made in its thread, since to open its log may hang as well.
"""

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib.util import find_spec
from typing import Final

import anyio

from controlplane.bus.bus import Bus
from schemas.errors import BusError, BusFaulted, LogError
from schemas.logs import logger_of
from schemas.transport.forks import forks, used_after_fork
from schemas.transport.wakeup import Wakeup

logger = logger_of("bus")

WATCH_S: Final = 0.03
"""Time between two looks at the bus, and at the threads that it belongs to."""
OPEN_S: Final = 30.0
"""Longest time that a trainer waits for the bus to open, and its log to be read."""
COPY_OPEN_S: Final = 300.0
"""The same where the log has a copy: a writer that died is watched for, and a log of gigabytes is copied whole."""
CLOSE_S: Final = 30.0
"""Longest time that a trainer waits for the bus to close."""
LAST_WAIT_S: Final = 10.0
"""And that the end of the process does."""


class BusThread:
    """Runs a bus on a daemon thread with an event loop of its own, from `start` to `end`.

    Args:
        make: Opens the log, and returns the bus, not entered yet.
        owner: The thread that opened it, and keeps it alive beside the main thread.
        reads: What `make` reads, as an error names it.
        open_s: Longest time that `start` waits.
    """

    def __init__(
        self, make: Callable[[], Bus], owner: threading.Thread, reads: str, open_s: float | None = None
    ) -> None:
        self._open_s = open_s or OPEN_S
        self._make, self._owners, self._reads = make, (threading.main_thread(), owner), reads
        self._started: Future[Bus] = Future()
        self._ended: Future[None] = Future()
        self._ending = threading.Event()
        self._end_now: Wakeup | None = None
        self._process, self._generation = os.getpid(), len(forks)
        self._thread = threading.Thread(target=self._run, name="rolloutctl-bus", daemon=True)
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="rolloutctl-bus-watch", daemon=True)

    def start(self) -> Bus:
        """Start the thread, and return the bus once it is open. Raises what opening raises.

        Raises LogError if it takes too long: a bus that opens later closes at once.
        """
        atexit.register(self._end_with_the_process)
        self._thread.start()
        try:
            if wait([self._started], self._open_s).done:
                self._bus = self._started.result()
                self._watching.start()
                return self._bus
        except BaseException:
            self.ask_to_end()
            raise
        self.ask_to_end()
        atexit.unregister(self._end_with_the_process)
        raise LogError(
            f"{self._reads} could not be opened within {self._open_s:g} s: the disk hangs. No agent was told anything. "
            "The thread that opens it is left alone, and lets go of it once the disk goes on"
        )

    @property
    def misused(self) -> BusError | None:
        """The error of a fork that uses this: the thread runs in its parent only."""
        return used_after_fork("control plane", self._process) if self._generation != len(forks) else None

    def ask_to_end(self) -> None:
        """Let the bus close. Returns at once."""
        self._ending.set()
        wakeup = self._end_now
        if wakeup is not None:
            wakeup.notify()

    def end(self) -> None:
        """Let the bus close, and wait for it. Raises what closing it raises, and BusFaulted if that takes too long."""
        self.ask_to_end()
        try:
            self._ended.result(CLOSE_S)
        except TimeoutError:
            raise BusFaulted(
                f"the bus has not closed within {CLOSE_S:g} s. {self._bus.hangs}. It is left alone, and ends with the "
                "process at the latest; what agents were told stays as it is until their leases end"
            ) from None
        self._thread.join()

    def _end_with_the_process(self) -> None:
        if self.misused is not None:
            return
        self._end_unclosed()
        self._thread.join(LAST_WAIT_S)

    def _run(self) -> None:
        try:
            bus = self._make()
            if self._ending.is_set():  # no caller waits for it any more
                bus.close_log()
            else:
                options = {"use_uvloop": find_spec("uvloop") is not None}
                anyio.run(self._serve, bus, backend_options=options)
            self._ended.set_result(None)
        except BaseException as error:
            (self._ended if self._started.done() else self._started).set_exception(error)
        finally:
            self._over.set()
            atexit.unregister(self._end_with_the_process)

    async def _serve(self, bus: Bus) -> None:
        wakeup = Wakeup()
        try:
            async with bus:
                self._end_now = wakeup
                self._started.set_result(bus)
                if not self._ending.is_set():
                    await wakeup.wait()
        finally:
            self._end_now = None
            wakeup.close()

    def _watch(self) -> None:
        said = ""
        while not self._over.wait(WATCH_S):
            try:
                self._bus.watch()
            except Exception as error:  # such as no free descriptor: nothing else ends what must end in time
                if said != repr(error):
                    said = repr(error)
                    logger.exception("what ends in time could not be looked at, and is looked at again")
            if not any(thread.is_alive() for thread in self._owners):
                self._end_unclosed()

    def _end_unclosed(self) -> None:
        if not self._ending.is_set():
            logger.error("the main thread has ended without closing the bus: closing it, so that engines resume")
        self.ask_to_end()
