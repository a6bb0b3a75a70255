"""Ctrl-C ends a command within two seconds, whatever it does.

An interrupt first asks: it raises KeyboardInterrupt, or cancels what a command has under way, and what is open is
closed in order. Some things never answer: a call into an engine is not cancelled, a thread of a library does not
return, an import of an extension swallows the exception. So after a short time, or at a second Ctrl-C, the process ends
without them, and its children with it. Journals and logs bear that, as they bear a kill.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from types import FrameType
from typing import Final, NoReturn, TypeVar, cast

import anyio
import psutil

from schemas.logs import logger_of

logger = logger_of("cli")
T = TypeVar("T")

GRACE_S: Final = 1.5
"""Time for an orderly end."""
CODE: Final = 130


class Interrupted(KeyboardInterrupt):
    """What an interrupt raises.

    CPython notes each KeyboardInterrupt that leaves the code of an `exec` or `eval`, as imports have it, and ends a
    process of `python -m` by SIGINT later, although it was caught (run_eval_code_obj in Python/pythonrun.c, 3.11). It
    does not note one of a class of its own.
    """


_pending = threading.Event()


def install() -> None:
    """Handle SIGINT so from now on. Only in the main thread."""
    signal.signal(signal.SIGINT, _interrupt)


def end_soon() -> None:
    """End the process after the grace time, or at once if that has begun already."""
    if _pending.is_set():
        _end()
    _pending.set()
    timer = threading.Timer(GRACE_S, _end)
    timer.daemon = True
    timer.start()


def leave_if_asked(code: int) -> None:
    """End the process if Ctrl-C asked for it and all is closed. With torch, the interpreter's own end takes seconds.

    A child that is still there was started while the interrupt arrived, and is in no list yet: it ends as well.
    """
    if _pending.is_set():
        _kill_children()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def run(function: Callable[..., Awaitable[T]], *arguments: object, ends: tuple[signal.Signals, ...] = ()) -> T:
    """Run an async function to its end, and return its result. An interrupt cancels it.

    A program that calls a command from its own code keeps its own handling of Ctrl-C. Raises KeyboardInterrupt then.

    Args:
        function: What to run.
        arguments: Its arguments.
        ends: Other signals that cancel it: those of a service, which then has no result.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    ours = main_thread and (bool(ends) or signal.getsignal(signal.SIGINT) is _interrupt)

    async def main() -> T:
        outcome: list[T] = []
        failure: Exception | None = None
        received: list[signal.Signals] = []
        async with anyio.create_task_group() as tasks:
            if ours:
                await tasks.start(_cancel_on_signal, tasks.cancel_scope, (signal.SIGINT, *ends), received)
            try:
                outcome.append(await function(*arguments))
            except Exception as error:  # raised below: the task group would wrap it
                failure = _alone(error)
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if signal.SIGINT in received:
            raise Interrupted
        return outcome[0] if outcome else cast(T, None)  # of a service, which returns nothing

    return anyio.run(main, backend_options={"use_uvloop": find_spec("uvloop") is not None})


def _alone(error: Exception) -> Exception:
    """The error in a group of one, which a task group makes of it."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _cancel_on_signal(
    scope: anyio.CancelScope,
    awaited: tuple[signal.Signals, ...],
    received: list[signal.Signals],
    *,
    task_status: anyio.abc.TaskStatus[None],
) -> None:
    with anyio.open_signal_receiver(*awaited) as signals:
        task_status.started()
        async for number in signals:
            received.append(number)
            logger.info("%s: shutting down", number.name)
            if number is signal.SIGINT:
                end_soon()
            scope.cancel()


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    end_soon()
    raise Interrupted


def _end() -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stderr.write("rolloutctl: ended without waiting for what was under way\n")
        sys.stderr.flush()
    _kill_children()
    os._exit(CODE)


def _kill_children() -> None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
