"""What broken backends are made of, and the kit's run against one of them."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from schemas.errors import EngineError
from schemas.events import EngineCall, Returned
from workers.conformance.engine_under_test import Setup, opened
from workers.conformance.kit import Kit, Row

ADAPTERS = ("adapter", "second adapter", "adapter unload", "bad adapter")
"""The kit's checks of adapters."""


async def judged(
    engine: Any,
    folder: Path,
    *only: str,
    checkpoints: tuple[str, str] | None = ("a", "b"),
    request_s: float = 30.0,
) -> dict[str, Row]:
    """The rows of a run. With some faults it waits until the end of this time for requests that never end."""
    times = {"silence_s": 0.03, "call_s": 10.0, "request_s": request_s}
    setup = Setup(root=folder / "ckpt", checkpoints=checkpoints, traces=folder / "traces", **times)
    async with opened(engine, 1), anyio.create_task_group() as tasks:
        rows = await Kit(engine, engine, setup, tasks).run(lambda row: None, only)
        tasks.cancel_scope.cancel()
    return {row.operation: row for row in rows}


def answer(
    engine: Any, kind: type | tuple[type, ...], way: Callable[[Any, Callable[[], Awaitable[Returned]]], Any]
) -> None:
    """Have the engine answer calls of one kind in another way."""
    right = engine.perform

    async def perform(call: EngineCall, timeout_s: float) -> Returned:
        if not isinstance(call, kind):
            return await right(call, timeout_s)  # type: ignore[no-any-return]
        returned = await way(call, lambda: right(call, timeout_s))
        return returned if isinstance(returned, Returned) else Returned()

    engine.perform = perform


async def ignored(call: Any, right: Any) -> None:
    """Report success, and do nothing."""


def then(effect: Callable[[Any], None]) -> Callable[[Any], Callable[[Any, Any], Awaitable[Returned]]]:
    """Do it right, and something more."""

    def bound(engine: Any) -> Callable[[Any, Any], Awaitable[Returned]]:
        async def way(call: Any, right: Any) -> Returned:
            returned: Returned = await right()
            effect(engine)
            return returned

        return way

    return bound


def raising(error: Exception) -> Callable[[Any, Any], Awaitable[None]]:
    async def way(call: Any, right: Any) -> None:
        raise error

    return way


def does(kind: type | tuple[type, ...], way: Any) -> Callable[[Any], None]:
    return lambda engine: answer(engine, kind, way)


def bound(kind: type | tuple[type, ...], make: Any) -> Callable[[Any], None]:
    return lambda engine: answer(engine, kind, make(engine))


bad = raising(EngineError("it broke"))
