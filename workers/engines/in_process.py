"""What the fronts of engines within this process share.

Such an engine is an object of one asyncio event loop: called from another it hangs, or answers to nobody. And a call
that was begun is brought to its end: SGLang gives the late reply of a cancelled one to the next caller.
"""

import asyncio
import inspect
import secrets
from asyncio import AbstractEventLoop, Task
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from anyio import CancelScope

from schemas.errors import EngineError

T = TypeVar("T")

_marks: Final[WeakKeyDictionary[object, str]] = WeakKeyDictionary()
_under_way: Final[set[Task[Any]]] = set()  # a loop holds its tasks weakly


class Home:
    """The event loop that an engine lives on. what: for messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._loop: AbstractEventLoop | None = None

    def require(self, known: AbstractEventLoop | None) -> None:
        """Raises EngineError unless this runs on the engine's loop.

        known: the loop as the engine tells it, None as long as it has none. Then it is the one of the first use.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineError(
                f"{self._what} was not called: it belongs to an asyncio event loop, and the agent runs on another kind "
                "(trio?). Run the agent as a task of the loop that generates."
            ) from None
        self._loop = known or self._loop or running
        if self._loop is not running:
            raise EngineError(
                f"{self._what} was not called: it belongs to another event loop than the one that the agent runs on. "
                "Run the agent as a task of the loop that generates: in its thread, and within one asyncio.run()."
            )


async def finished(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that goes on to its end, whoever is cancelled meanwhile."""
    task = asyncio.get_running_loop().create_task(call)
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    with CancelScope(shield=True):
        await asyncio.wait([task])  # unlike an await of the task itself, asyncio's own cancellation leaves it alone
    return task.result()


async def result_of(method: Callable[..., Any], /, *given: object, **named: object) -> Any:
    """What a method of the engine gives back; some are coroutines, some are not."""
    result = method(*given, **named)
    return await result if isinstance(result, Awaitable) else result


def takes(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a method's own parameters."""
    return frozenset(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def mark(engine: object) -> str:
    """A word for this engine and no other, the same for as long as it lives."""
    if engine not in _marks:
        _marks[engine] = secrets.token_hex(8)
    return _marks[engine]
