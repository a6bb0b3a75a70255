"""The tiny engine of another process, for an agent that only observes it: it asks the engine's front end what it is."""

from anyio import to_thread
from msgspec.structs import replace

from schemas.errors import ConfigError, EngineError
from schemas.events import Observation
from workers.engines.tiny.server import SCHEME, TinyClient

READ_TIMEOUT_S = 5.0


class ObservedTiny:
    """A tiny engine, seen over its front end. Raises ConfigError."""

    def __init__(self, address: str | None) -> None:
        if address is not None and not address.startswith(SCHEME):
            raise ConfigError(f"--url {address}: a tiny engine is reached at {SCHEME}PATH.")
        self._client = TinyClient(address, READ_TIMEOUT_S) if address is not None else None

    async def open(self) -> None:
        """Do nothing: each question opens a connection."""

    async def observe(self) -> Observation:
        if self._client is None:
            return Observation(engine="tiny", tokenizer="absent")
        try:
            held = await to_thread.run_sync(self._client.describe)
        except EngineError:
            return Observation(engine="tiny", tokenizer="unknown")
        return replace(held, operations=frozenset(), label=str(held.version))

    async def close(self) -> None:
        """Do nothing: there is no connection."""
