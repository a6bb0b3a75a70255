"""What the adapters of SGLang and vLLM share: how they attach to an engine that they command."""

from pathlib import Path
from typing import ClassVar, Generic

from anyio import to_thread

from schemas.errors import EngineError
from schemas.events import CheckSource, Observation
from schemas.identity import Identity
from workers.engines.checkpoint import SourceChecker
from workers.engines.client import EngineClient
from workers.engines.observed import EngineKind, LaunchT, ObservedEngine


class AttachedEngine(Generic[LaunchT]):
    """One engine, seen from one node of its replica.

    Args:
        identity: This node's place.
        client: Reaches this node's own front end; None where there is none.
        checkpoints: Root of the checkpoint paths in commands.
        traces: Root of the session directories. The server must see both roots under the same absolute path.
    """

    kind: ClassVar[EngineKind]  # type: ignore[type-arg]

    def __init__(self, identity: Identity, client: EngineClient | None, *, checkpoints: Path, traces: Path) -> None:
        self._identity, self._client = identity, client
        self._observed: ObservedEngine[LaunchT] = ObservedEngine(self.kind, identity, client, unready=None)
        self._traces = traces.resolve()
        self._sources = SourceChecker(checkpoints)
        self._group: str | None = None  # the broadcast group that the engine has joined

    async def open(self) -> None:
        await self._observed.open()

    async def observe(self) -> Observation:
        observation = await self._observed.observe()
        if observation.tokenizer == "unknown":
            self._group = None  # the next answer may come from another engine
        return observation

    async def close(self) -> None:
        await self._observed.close()

    async def _attached(self) -> tuple[EngineClient, LaunchT]:
        launch = await self._observed.current_launch(self._client) if self._client is not None else None
        if self._client is None or launch is None:
            raise EngineError(f"{self.kind.name} was not called: this node has no front end.")
        return self._client, launch

    async def _check_source(self, launch: LaunchT, call: CheckSource) -> None:
        await to_thread.run_sync(self._sources.check, call.source, call.manifest, launch.model, self._identity)
