"""Work that may hang, such as a write to a disk, on a thread of its own, for which a task on an event loop can wait.

The end of the process waits for the threads of `anyio.to_thread`: one that has such a thread on a disk that hangs never
ends.
"""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import anyio

from schemas.transport.wakeup import Wakeup

T = TypeVar("T")


def begin(work: Callable[[], T], name: str, *, daemon: bool) -> "Future[T]":
    """Run `work` on a new thread. The end of the process waits for it, unless it is a daemon."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=daemon).start()
    return future


async def done_within(work: "Future[T]", timeout_s: float | None = None) -> bool:
    """Wait until the work is done or the timeout has passed. Returns whether it is done."""
    wakeup = Wakeup()
    try:
        work.add_done_callback(lambda _: wakeup.notify())
        with anyio.move_on_after(timeout_s):
            await wakeup.wait()
    finally:
        wakeup.close()
    return work.done()
