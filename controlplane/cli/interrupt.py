"""Ctrl-C cancels what a command has under way, and what is open is closed in order.

Some things never answer: a call into an engine is not cancelled, a thread of a library does not return. So after a
short time, or at a second Ctrl-C, the process ends without them, and its children with it. Journals and logs bear that,
as they bear a kill.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Final, NoReturn, TypeVar, cast

import anyio
import psutil

from schemas.logs import logger_of

logger = logger_of("cli")
T = TypeVar("T")

GRACE_S: Final = 1.5
"""Time for an orderly end."""
CODE: Final = 130


def run(function: Callable[..., Awaitable[T]], *arguments: object, ends: tuple[signal.Signals, ...] = ()) -> T:
    """Run an async function to its end, and return its result. Ctrl-C cancels it, and raises KeyboardInterrupt.

    The other signals of `ends` cancel it too: those of a service, which then has no result.
    """

    async def main() -> T:
        received: list[signal.Signals] = []

        def cancel(number: signal.Signals) -> None:
            logger.info("%s: shutting down", number.name)
            if number is signal.SIGINT:
                _end_soon(again=number in received)
            received.append(number)
            scope.cancel()

        with anyio.CancelScope() as scope:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, *ends):
                    asyncio.get_running_loop().add_signal_handler(number, cancel, number)
            try:
                return await function(*arguments)
            except ExceptionGroup as error:
                raise _alone(error) from None
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        return cast(T, None)  # of a service, which returns nothing

    return anyio.run(main, backend_options={"use_uvloop": find_spec("uvloop") is not None})


def is_behind(error: BaseException | None) -> bool:
    """Return whether an interrupt caused an error: CPython before 3.12 makes one of it within `__set_name__`."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or is_behind(error.__cause__))


def end() -> NoReturn:
    """End the process with code 130, and all that it started. It may not know of a child that was just being made.

    Not by sys.exit: after an interrupt within an exec, as that of a dataclass, CPython would end by the signal instead.
    """
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(CODE)


def _alone(error: Exception) -> Exception:
    """The error in a group of one, which a task group makes of it."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _end_soon(again: bool) -> None:
    if again:
        _give_up()
    timer = threading.Timer(GRACE_S, _give_up)
    timer.daemon = True
    timer.start()


def _give_up() -> NoReturn:
    with contextlib.suppress(Exception):
        os.write(2, b"rolloutctl: ended without waiting for what was under way\n")
    end()
