"""The thread in which a trainer's bus lives. It ends with the bus, and never outlives the trainer.

Rule 1  Ctrl-C interrupts the caller that waits for the end, not the end itself: the bus still closes in order.
Rule 2  A bus without a trainer must not go on, since its heads would keep engines paused for it. The thread ends when
        the main thread has ended, or the one that opened it if that lives longer, and always before the process.
"""

import atexit
import threading
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Final

import anyio
from anyio.from_thread import BlockingPortal

from controlplane.bus.bus import Bus
from schemas.carriers.wakeup import Wakeup
from schemas.errors import RolloutctlError
from schemas.logs import logger_of

logger = logger_of("bus")

WATCH_S: Final = 0.5
"""Time between two looks at the threads that the bus belongs to."""
LAST_WAIT_S: Final = 10.0
"""Longest time that the end of the process waits for the bus to close."""


class BusThread:
    """Runs a bus on a daemon thread with an event loop of its own, from `start` to `end`.

    Args:
        bus: Not entered yet.
        owner: The thread that opened it, and keeps it alive beside the main thread.

    Attributes:
        portal: Runs functions in the loop of the bus.
    """

    portal: BlockingPortal

    def __init__(self, bus: Bus, owner: threading.Thread) -> None:
        self._bus, self._owners = bus, (threading.main_thread(), owner)
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._ending = threading.Event()
        self._end_now: Wakeup | None = None
        self._thread = threading.Thread(target=self._run, name="rolloutctl-bus", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until the bus is open. Raises what opening it raises."""
        atexit.register(self._end_with_the_process)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.ask_to_end()
            raise

    def ask_to_end(self) -> None:
        """Let the bus close. Returns at once."""
        self._ending.set()
        wakeup = self._end_now
        if wakeup is not None:
            wakeup.notify()

    def end(self) -> None:
        """Let the bus close, and wait for it. Raises what closing it raises."""
        self.ask_to_end()
        self._ended.result()
        self._thread.join()

    def _end_with_the_process(self) -> None:
        self.ask_to_end()
        self._thread.join(LAST_WAIT_S)

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend_options={"use_uvloop": find_spec("uvloop") is not None})
            self._ended.set_result(None)
        except BaseException as error:
            (self._ended if self._started.done() else self._started).set_exception(error)
        finally:
            atexit.unregister(self._end_with_the_process)

    async def _serve(self) -> None:
        wakeup, failure = Wakeup(), None
        async with BlockingPortal() as portal:
            try:
                async with self._bus:
                    self.portal, self._end_now = portal, wakeup
                    self._started.set_result(None)
                    await self._wait_for_the_end(wakeup)
            except RolloutctlError as error:  # raised below: the portal would wrap it
                failure = error
            finally:
                self._end_now = None
                wakeup.close()
        if failure is not None:
            raise failure

    async def _wait_for_the_end(self, wakeup: Wakeup) -> None:
        while not self._ending.is_set():
            with anyio.move_on_after(WATCH_S):
                await wakeup.wait()
            if not any(thread.is_alive() for thread in self._owners):
                logger.error("the main thread has ended without closing the bus: closing it, so that engines resume")
                return
