"""What the clients of engines in this process share.

A trainer that embeds an engine runs the agent beside the tasks that generate, on the same asyncio event loop:

    engine = VLLMEngine(identity, AsyncLLMClient(async_llm), checkpoints=checkpoints, traces=traces)
    node_traces = NodeTraces(traces, identity)
    async with (
        Agent(bus=bus, identity=identity, engine=engine, state_dir=state_dir, traces=node_traces) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(agent.run)
        await agent.wait_ready()
        ...                           # async_llm.generate(...)
        tasks.cancel_scope.cancel()   # afterwards, async_llm.shutdown()

Such an engine belongs to one asyncio event loop: called from another, it hangs, or its answer is lost. A call that has
begun always runs to its end, because SGLang gives the late reply of a cancelled call to the next caller.
"""

import asyncio
import inspect
import secrets
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, Task
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from anyio import CancelScope

from schemas.errors import RefusedError
from workers.engines.client import CallRefused, Methods

T = TypeVar("T")

_instance_ids: Final[WeakKeyDictionary[object, str]] = WeakKeyDictionary()
_running: Final[set[Task[Any]]] = set()  # a loop holds its tasks only weakly


class InProcessClient(ABC):
    """The part of an `EngineClient` that both engines share: the event loop, and calls that run to their end."""

    where: str
    _owner: str

    def __init__(self, engine: Any, requests: ModuleType | None = None) -> None:
        self._engine, self._requests = engine, requests
        self._loop: AbstractEventLoop | None = None

    async def open(self) -> None:
        self._require_loop()

    async def close(self) -> None:  # noqa: B027 (both engines need nothing)
        """Do nothing: there is no connection."""

    @abstractmethod
    async def methods(self) -> Methods | None: ...

    @abstractmethod
    def _engine_loop(self) -> AbstractEventLoop | None:
        """Return the engine's loop; None while it has none. Then the loop of the first use counts."""

    def _require_loop(self) -> None:
        running = None
        with suppress(RuntimeError):  # under trio
            running = asyncio.get_running_loop()
        self._loop = self._engine_loop() or self._loop or running
        if running is None or self._loop is not running:
            raise RefusedError(
                f"{self._owner} {self.where} was not called: it belongs to an asyncio event loop, and the agent runs "
                "on another event loop. Run the agent as a task of the loop that generates: in its thread, and within "
                "one asyncio.run()."
            )

    def _failure(self, method: str, error: Exception) -> CallRefused:
        reason = f"{type(error).__name__}: {error}"
        return CallRefused(f"{self.where}.{method} failed: {reason}", None, reason)

    async def call(self, method: str, /, **arguments: object) -> object:
        self._require_loop()
        return await run_to_end(self._call(method, arguments))

    async def parameters(self, method: str, /, *names: str) -> frozenset[str]:
        """A signature is proof enough."""
        return (await self.methods() or {}).get(method, frozenset()) & frozenset(names)

    @abstractmethod
    async def _call(self, method: str, arguments: dict[str, object]) -> object: ...


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
