"""What is read of SGLang and vLLM, and how.

`ObservedEngine` is all that an observing agent has: it holds an `EngineReader`, which can't change the engine.
"""

from collections.abc import Callable, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from msgspec import Struct

from schemas.errors import EngineError
from schemas.events import Observation
from schemas.identity import Identity, Operation
from workers.engines.client import CallRefused, EngineReader, Methods, Unanswered, version_of
from workers.engines.counters import CounterNames, Counters, read_counters

LABEL_MAX: Final = 200
"""Characters of an engine's label that are kept."""


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
        return frozenset(Operation).difference(self.missing)


LaunchT = TypeVar("LaunchT", bound=Launch)


class EngineKind(NamedTuple, Generic[LaunchT]):
    """What differs between kinds of engines.

    Attributes:
        read_launch: Reads the launch settings, and the methods that the engine has.
    """

    name: str
    counters: CounterNames
    read_launch: Callable[[Mapping[str, object], Methods], LaunchT]


class ObservedEngine(Generic[LaunchT]):
    """One engine, seen from one node of its replica. It is read, and never commanded.

    Args:
        identity: This node's place.
        reader: Reaches this node's own front end; None where there is none.
        unready: What a server that is not ready for requests does, where its pause can't be read: False says that it
            does not generate; None that nobody knows. It may be paused, still starting, or unhealthy.
    """

    def __init__(
        self,
        kind: EngineKind[LaunchT],
        identity: Identity,
        reader: EngineReader | None,
        *,
        unready: bool | None = False,
    ) -> None:
        self._kind, self._identity, self._reader, self._unready = kind, identity, reader, unready
        self._launch: LaunchT | None = None
        self._counts = True  # until it refuses

    async def open(self) -> None:
        if self._reader is not None:
            await self._reader.open()

    async def observe(self) -> Observation:
        kind, reader = self._kind.name, self._reader
        if reader is None:
            return Observation(engine=kind, tokenizer="absent")
        try:
            launch = await self.current_launch(reader)
            if launch is None:
                return Observation(engine=kind, tokenizer="absent", trouble=self._no_front_end(reader))
            generating = await self._generating(reader, launch)
            asleep = await self._read(reader, launch, "is_sleeping")
            label = await self._read(reader, launch, "get_weight_version")
            counters = await self._count(reader, launch)
        except EngineError as error:
            self._launch = None  # the next answer may come from another engine
            self._counts = True
            trouble = _refusal(error, reader) if isinstance(error, CallRefused) else None
            return Observation(engine=kind, tokenizer="unknown", trouble=trouble)
        return Observation(
            engine=f"{kind} {launch.version}",
            instance=launch.instance,
            tokenizer="present",
            operations=launch.operations,
            generating=generating,
            asleep=frozenset() if asleep is False else None,
            version=version_of(label),
            label=label[:LABEL_MAX] if isinstance(label, str) else None,
            running=counters.running,
            generated=counters.generated,
        )

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()

    async def current_launch(self, reader: EngineReader) -> LaunchT | None:
        """Return None on a node without a front end. Raises EngineError while the engine is not up."""
        if self._launch is None:
            methods = await reader.methods()
            if methods is None:
                raise Unanswered(f"{self._kind.name} was not called: it is not up.")
            info = await reader.info()
            self._launch = None if info is None else self._kind.read_launch(info, methods)
        return self._launch

    async def _read(self, reader: EngineReader, launch: LaunchT, method: str) -> object:
        return await reader.read(method) if method in launch.methods else None

    async def _count(self, reader: EngineReader, launch: LaunchT) -> Counters:
        """Read the engine's counters, if it has any. A server without metrics is asked once for each launch."""
        if not self._counts:
            return Counters()
        try:
            text = await self._read(reader, launch, "get_metrics")
        except CallRefused:
            text = None
        self._counts = isinstance(text, str)
        return read_counters(text, self._kind.counters) if isinstance(text, str) else Counters()

    def _no_front_end(self, reader: EngineReader) -> str | None:
        """Node rank 0 must have a front end. Other nodes answer without one."""
        if self._identity.node_rank > 0:
            return None
        return f"{reader.where} is no front end of {self._kind.name}: another server listens there, or another node's"

    async def _generating(self, reader: EngineReader, launch: LaunchT) -> bool | None:
        """A server without `is_paused` generates if it is ready."""
        if "is_paused" in launch.methods:
            paused = await reader.read("is_paused")
            return not paused if isinstance(paused, bool) else None
        try:
            return True if await self._read(reader, launch, "is_ready") is not None else None
        except CallRefused:
            return self._unready


def _refusal(error: CallRefused, reader: EngineReader) -> str:
    """Return what is wrong with an engine that answers and refuses: the same text each time, so it is news once."""
    if error.status in (401, 403):
        return f"engine refuses this agent: {reader.where} answers {error.status}, check the API key"
    if error.status == 404:
        return f"{reader.where} has not the routes of an engine: it answers 404. Is it another server?"
    return f"engine is up and does not work: {reader.where} answers {error.status or error.body[:200]}"
