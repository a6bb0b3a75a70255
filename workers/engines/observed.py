"""What is read of SGLang and vLLM, and how.

`ObservedEngine` is all that an observing agent has: it holds an `EngineReader`, which can't change the engine.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from anyio import create_task_group, move_on_after, to_thread
from msgspec import Struct

from schemas.errors import CheckpointError, ConfigError, EngineError, RefusedError, UnansweredError
from schemas.events import Observation, Remedies
from schemas.identity import Identity, Operation
from schemas.safetensors.format import safetensors_files
from workers.engines.client import CallRefused, EngineReader, Methods, text_at, version_of
from workers.engines.counters import CounterNames, Counters, read_counters

LABEL_MAX: Final = 200
"""Characters of an engine's label that are kept."""
NAME_MAX: Final = 200
"""Characters of a name that an engine lists. A longer one is not ours."""
FIRST_ANSWER_S: Final = 5.0
"""How long the start of an agent waits for an engine that is up. One that answers later is compared then."""


class LoRALimits(Struct, frozen=True, kw_only=True):
    """What an engine was launched for, as far as it says. None where it does not.

    Attributes:
        loaded: Most adapters that it holds at once.
        modules: Last names of the modules that an adapter may change; None for all.
        refuses: Settings of `adapter_config.json` that this kind of engine does not serve; `target_modules` if they are
            an expression.
        needs: Modules that it serves only with others of the same layer, all by their last names.
    """

    rank: int | None = None
    loaded: int | None = None
    modules: frozenset[str] | None = None
    refuses: frozenset[str] = frozenset()
    needs: Mapping[str, tuple[str, ...]] = {}


class Launch(Struct, frozen=True, kw_only=True):
    """How an engine was launched, as far as it reports that, and what follows for its operations.

    Attributes:
        node_rank: The front end's node; None if the engine does not count nodes.
        missing: What the engine can't do, each operation with the reason and the remedy.
        load_format: How it read the weights of its launch; None if it does not say.
        precision: Its dtype and quantization, in its own words.
        recomputes: Frozen requests can lose their cache, and are computed anew when they continue.
        lora: What it was launched for, as to LoRA adapters; None if not for any, or if it does not say.
    """

    version: str
    instance: str | None
    model: str | None
    load_format: str | None
    device: str | None
    precision: str
    node_rank: int | None
    nnodes: int | None
    world: int | None
    methods: Methods
    missing: Mapping[Operation, str]
    recomputes: bool
    lora: LoRALimits | None = None

    @property
    def operations(self) -> frozenset[Operation]:
        """What the engine can do."""
        return frozenset(Operation).difference(self.missing)


LaunchT = TypeVar("LaunchT", bound=Launch)


class EngineKind(NamedTuple, Generic[LaunchT]):
    """What differs between kinds of engines."""

    name: str
    counters: CounterNames
    read_launch: Callable[[Mapping[str, object], Methods], LaunchT]
    idempotent: frozenset[Operation]


class ObservedEngine(Generic[LaunchT]):
    """One engine, seen from one node of its replica. It is read, and never commanded.

    Args:
        kind: How an engine of this kind is read, e.g. `workers.engines.vllm.launch.VLLM`.
        identity: This node's place.
        reader: Reaches this node's own front end; None where there is none.
        unready: What a server that is not ready for requests does, where its pause can't be read: False says that it
            does not generate; None that this is not known. It may be paused, still starting, or unhealthy.
        checkpoints: Root of the paths in commands, to which those of adapters are relative.
    """

    def __init__(
        self,
        kind: EngineKind[LaunchT],
        identity: Identity,
        reader: EngineReader | None,
        *,
        unready: bool | None = False,
        checkpoints: Path | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._kind, self._identity, self._reader, self._unready = kind, identity, reader, unready
        self._launch: LaunchT | None = None
        self._launched_from: str | None = None
        self._counts = True  # until it refuses

    async def open(self) -> None:
        """Attach. Raises ConfigError if the engine is up and is not what was configured."""
        if self._reader is None:
            return
        await self._reader.open()
        with suppress(EngineError), move_on_after(FIRST_ANSWER_S):
            await self.current_launch(self._reader)

    async def observe(self, *, counters: bool = True) -> Observation:
        """Read the engine's state. Without the counters it takes half the time."""
        kind, reader = self._kind.name, self._reader
        if reader is None:
            return Observation(engine=kind, tokenizer="absent")
        try:
            launch = await self.current_launch(reader)
            if launch is None:
                return Observation(engine=kind, tokenizer="absent", trouble=self._no_front_end(reader))
            generating, asleep, label, counted, adapters = await at_once(
                lambda: self._generating(reader, launch),
                lambda: self._read(reader, launch, "is_sleeping"),
                lambda: self._read(reader, launch, "get_weight_version"),
                lambda: self._count(reader, launch, wanted=counters),
                lambda: self._adapters(reader, launch),
            )
        except ConfigError as error:
            return Observation(engine=kind, tokenizer="unknown", trouble=str(error))
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
            running=counted.running,
            waiting=counted.waiting,
            generated=counted.generated,
            remedies=Remedies(idempotent=self._kind.idempotent, launched_from=self._launched_from),
            recomputes=launch.recomputes,
            adapters=adapters,
            adapter_places=launch.lora.loaded if launch.lora is not None else None,
        )

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()

    async def current_launch(self, reader: EngineReader) -> LaunchT | None:
        """Return None on a node without a front end.

        Raises:
            EngineError: The engine is not up.
            ConfigError: It is not the engine that was configured.
        """
        if self._launch is None:
            methods = await reader.methods()
            if methods is None:
                raise RefusedError(f"{self._kind.name} was not called: it is not up.")
            info = await reader.info()
            launch = None if info is None else self._kind.read_launch(info, methods)
            if launch is not None:
                self._launched_from = await to_thread.run_sync(_loadable_again, launch)
                name = f"{self._kind.name} {launch.version} at {reader.where}"
                require_configured(name, self._identity, launch.world, launch.nnodes, launch.node_rank)
            self._launch = launch
        return self._launch

    async def _adapters(self, reader: EngineReader, launch: LaunchT) -> dict[str, str] | None:
        """Return the adapters that the engine lists; None if it has none to list, or refuses."""
        if launch.lora is None:
            return None
        try:
            models = await self._read(reader, launch, "list_models")
        except CallRefused:
            return None
        return listed_adapters(models, self._checkpoints) if isinstance(models, list) else None

    async def _read(self, reader: EngineReader, launch: LaunchT, method: str) -> object:
        return await reader.read(method) if method in launch.methods else None

    async def _count(self, reader: EngineReader, launch: LaunchT, *, wanted: bool) -> Counters:
        """Read the engine's counters, if it has any. A server without metrics is asked once for each launch."""
        if not self._counts or not wanted:
            return Counters()
        try:
            text = await self._read(reader, launch, "get_metrics")
        except CallRefused:
            text = None
        except UnansweredError:  # too large, say: vLLM's grow with each set of adapters that requests ever ran on
            return Counters()
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


def listed_adapters(models: object, root: Path | None) -> dict[str, str]:
    """Return the adapters among the models that an engine lists, each with its path as an observation has it.

    Args:
        models: `data` of the answer of `/v1/models`. A base model has no parent.
        root: The checkpoint root; None if it is not known.
    """
    cards = [card for card in models if isinstance(card, Mapping)] if isinstance(models, list) else []
    named = ((text_at(card, "id") or "", text_at(card, "root") or "") for card in cards if text_at(card, "parent"))
    prefix = f"{root.resolve()}/" if root is not None else ""
    return {name: path.removeprefix(prefix) for name, path in named if 0 < len(name) <= NAME_MAX}


async def at_once(*reads: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Return what each read returns, all made at once. Raises EngineError if one does, or was cancelled from within."""
    found: dict[int, Any] = {}
    failed: list[EngineError] = []

    async def make(place: int, read: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[place] = await read()
        except EngineError as error:
            failed.append(error)

    async with create_task_group() as tasks:
        for place, read in enumerate(reads):
            tasks.start_soon(make, place, read)
    if failed or len(found) < len(reads):
        raise failed[0] if failed else EngineError("a task that read the engine was cancelled from within.")
    return [found[place] for place in range(len(reads))]


def require_configured(
    engine: str, identity: Identity, world: int | None, nnodes: int | None, node_rank: int | None
) -> None:
    """Raise ConfigError if the engine reports another number than the agent was given. What it lacks is believed."""
    given = f"--nnodes {identity.nnodes}, --gpus-per-node {identity.gpus_per_node}"
    for what, reported, configured in (
        ("GPUs", world, identity.nnodes * identity.gpus_per_node),
        ("nodes", nnodes, identity.nnodes),
    ):
        if reported not in (None, configured):
            raise ConfigError(
                f"{engine} reports {reported} {what}, and its agent was given {configured} ({given}). Nothing was "
                "called: start the agent with the engine's own numbers, or name the right engine."
            )
    if node_rank not in (None, identity.node_rank):
        raise ConfigError(
            f"{engine} is node rank {node_rank} of its replica, and its agent was given --node-rank "
            f"{identity.node_rank}. Nothing was called: name the server of the agent's own node."
        )


def _loadable_again(launch: Launch) -> str | None:
    """Return the directory of the engine's own weights, if a reload can read them there."""
    if launch.model is None or launch.load_format not in (None, "auto", "safetensors"):
        return None
    with suppress(CheckpointError):  # of a name on a hub, for example
        safetensors_files(Path(launch.model))
        return launch.model
    return None


def _refusal(error: CallRefused, reader: EngineReader) -> str:
    """Return what is wrong with an engine that answers and refuses: the same text each time, so it is news once."""
    if error.status in (401, 403):
        return f"engine refuses this agent: {reader.where} answers {error.status}, check the API key"
    if error.status in (200, 404):
        return f"{reader.where} has not the routes of an engine: it answers {error.status}. Is it another server?"
    return f"engine is up and does not work: {reader.where} answers {error.status or error.body[:200]}"
