"""The tiny engine of another process, for an agent that only observes it: it asks the engine's front end what it is."""

from anyio import to_thread
from msgspec.structs import replace

from schemas.errors import EngineError
from schemas.events import Call, Observation, Returned
from workers.engines.tiny.server import TinyClient

READ_TIMEOUT_S = 60.0
"""Longer than the first start of torch's profiler takes on a loaded machine: the engine answers nothing meanwhile."""


class ObservedTiny:
    """A tiny engine, seen over its front end."""

    def __init__(self, url: str) -> None:
        self._client = TinyClient(url, READ_TIMEOUT_S)

    async def open(self) -> None:
        """Do nothing: each question opens a connection."""

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        raise AssertionError("an agent that only observes has called its engine")

    async def observe(self) -> Observation:
        try:
            held = await to_thread.run_sync(self._client.describe)
        except EngineError:
            return Observation(engine="tiny", tokenizer="unknown")
        return replace(held, operations=frozenset(), label=str(held.version))

    async def close(self) -> None:
        """Do nothing: there is no connection."""
