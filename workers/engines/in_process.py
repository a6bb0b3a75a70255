"""What the clients of engines in this process share.

Such an engine belongs to one asyncio event loop: called from another it hangs, or its answer reaches nobody. A call
that has begun always runs to its end: SGLang gives the late reply of a cancelled call to the next caller.
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

_instance_ids: Final[WeakKeyDictionary[object, str]] = WeakKeyDictionary()
_running: Final[set[Task[Any]]] = set()  # a loop holds its tasks only weakly


class EngineLoop:
    """The event loop that an engine lives on.

    Args:
        engine: The engine's name, for messages.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._loop: AbstractEventLoop | None = None

    def require(self, known: AbstractEventLoop | None) -> None:
        """Check that this runs on the engine's loop.

        Args:
            known: The engine's loop; None while it has none. Then the loop of the first use counts.

        Raises:
            EngineError: This runs on another loop, or on no asyncio loop.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineError(
                f"{self._engine} was not called: it belongs to an asyncio event loop, and the agent runs on another "
                "kind (trio?). Run the agent as a task of the loop that generates."
            ) from None
        self._loop = known or self._loop or running
        if self._loop is not running:
            raise EngineError(
                f"{self._engine} was not called: it belongs to another event loop than the one that the agent runs on. "
                "Run the agent as a task of the loop that generates: in its thread, and within one asyncio.run()."
            )


async def run_to_end(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a call that completes even if the caller is cancelled."""
    task = asyncio.get_running_loop().create_task(call)
    _running.add(task)
    task.add_done_callback(_running.discard)
    with CancelScope(shield=True):
        await asyncio.wait([task])  # unlike awaiting the task itself, this survives asyncio's own cancellation
    return task.result()


async def call_and_await(method: Callable[..., Any], /, *values: object, **named: object) -> Any:
    """Call an engine's method and return its result, whether or not it is a coroutine function."""
    result = method(*values, **named)
    return await result if isinstance(result, Awaitable) else result


def parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a method's own parameters."""
    return frozenset(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def instance_id(engine: object) -> str:
    """Return an id of this engine object, unique and constant for as long as it lives."""
    return _instance_ids.setdefault(engine, secrets.token_hex(8))
