"""What the adapters of SGLang and vLLM share: how they attach to an engine, and what they read of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from anyio import to_thread
from msgspec import Struct

from schemas.errors import EngineError
from schemas.events import CheckSource, Observation
from schemas.identity import Identity, Operation
from workers.engines.checkpoint import SourceChecker
from workers.engines.client import CallRefused, EngineClient, Methods, Unanswered, version_of
from workers.engines.counters import CounterNames, Counters, read_counters


class Launch(Struct, frozen=True, kw_only=True):
    """How an engine was launched, as far as it reports that, and what follows for its operations.

    Attributes:
        instance: Differs between two launches.
        world: GPUs of the engine.
        missing: What the engine can't do, each operation with the reason and the remedy.
    """

    version: str
    instance: str | None
    model: str | None
    device: str | None
    node_rank: int | None
    nnodes: int | None
    world: int | None
    methods: Methods
    missing: Mapping[Operation, str]

    @property
    def operations(self) -> frozenset[Operation]:
        """What the engine can do."""
        return frozenset(Operation) - self.missing.keys()


LaunchT = TypeVar("LaunchT", bound=Launch)


class AttachedEngine(ABC, Generic[LaunchT]):
    """One engine, seen from one node of its replica.

    Args:
        identity: This node's place.
        client: Reaches this node's own front end; None where there is none.
        checkpoints: Root of the checkpoint paths in commands.
        traces: Root of the session directories. The server must see both roots under the same absolute path.
    """

    kind: ClassVar[str]
    counters: ClassVar[CounterNames]

    def __init__(self, identity: Identity, client: EngineClient | None, *, checkpoints: Path, traces: Path) -> None:
        self._identity, self._client = identity, client
        self._traces = traces.resolve()
        self._sources = SourceChecker(checkpoints)
        self._launch: LaunchT | None = None
        self._group: str | None = None  # the broadcast group that the engine has joined
        self._counts = True  # until it refuses

    @abstractmethod
    def _read_launch(self, info: Mapping[str, object], methods: Methods) -> LaunchT: ...

    async def open(self) -> None:
        if self._client is not None:
            await self._client.open()

    async def observe(self) -> Observation:
        if self._client is None:
            return Observation(engine=self.kind, tokenizer="absent")
        try:
            launch = await self._current_launch(self._client)
            if launch is None:
                return Observation(engine=self.kind, tokenizer="absent", trouble=self._no_front_end(self._client))
            generating = await self._generating(self._client, launch)
            asleep = await self._read(self._client, launch, "is_sleeping")
            label = await self._read(self._client, launch, "get_weight_version")
            counters = await self._count(self._client, launch)
        except EngineError as error:
            self._launch = self._group = None  # the next answer may come from another engine
            self._counts = True
            trouble = _refusal(error, self._client) if isinstance(error, CallRefused) else None
            return Observation(engine=self.kind, tokenizer="unknown", trouble=trouble)
        return Observation(
            engine=f"{self.kind} {launch.version}",
            instance=launch.instance,
            tokenizer="present",
            operations=launch.operations,
            generating=generating,
            asleep=frozenset() if asleep is False else None,
            version=version_of(label),
            running=counters.running,
            generated=counters.generated,
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _attached(self) -> tuple[EngineClient, LaunchT]:
        launch = await self._current_launch(self._client) if self._client is not None else None
        if self._client is None or launch is None:
            raise EngineError(f"{self.kind} was not called: this node has no front end.")
        return self._client, launch

    async def _current_launch(self, client: EngineClient) -> LaunchT | None:
        """Return None on a node without a front end. Raises EngineError while the engine is not up."""
        if self._launch is None:
            methods = await client.methods()
            if methods is None:
                raise Unanswered(f"{self.kind} was not called: it is not up.")
            info = await client.info()
            self._launch = None if info is None else self._read_launch(info, methods)
        return self._launch

    async def _read(self, client: EngineClient, launch: LaunchT, method: str) -> object:
        return await client.read(method) if method in launch.methods else None

    async def _count(self, client: EngineClient, launch: LaunchT) -> Counters:
        """Read the engine's counters, if it has any. A server without metrics is asked once for each launch."""
        if not self._counts:
            return Counters()
        try:
            text = await self._read(client, launch, "get_metrics")
        except CallRefused:
            text = None
        self._counts = isinstance(text, str)
        return read_counters(text, self.counters) if isinstance(text, str) else Counters()

    def _no_front_end(self, client: EngineClient) -> str | None:
        """Node rank 0 must have a front end. Other nodes answer without one."""
        if self._identity.node_rank > 0:
            return None
        return f"{client.where} is no front end of {self.kind}: another server listens there, or another node's"

    async def _generating(self, client: EngineClient, launch: LaunchT) -> bool | None:
        """A server without `is_paused` generates if it is ready. If it is not ready, it may be paused or unhealthy."""
        if "is_paused" in launch.methods:
            paused = await client.read("is_paused")
            return not paused if isinstance(paused, bool) else None
        try:
            return True if await self._read(client, launch, "is_ready") is not None else None
        except CallRefused:
            return None

    async def _check_source(self, launch: LaunchT, call: CheckSource) -> None:
        await to_thread.run_sync(self._sources.check, call.source, call.manifest, launch.model, self._identity)


def _refusal(error: CallRefused, client: EngineClient) -> str:
    """Return what is wrong with an engine that answers and refuses: the same text each time, so it is news once."""
    if error.status in (401, 403):
        return f"engine refuses this agent: {client.where} answers {error.status}, check the API key"
    if error.status == 404:
        return f"{client.where} has not the routes of an engine: it answers 404. Is it another server?"
    return f"engine is up and does not work: {client.where} answers {error.status or error.body[:200]}"
