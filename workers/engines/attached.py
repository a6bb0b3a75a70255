"""What the backends of SGLang and vLLM share: how they attach to an engine that they command."""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, Generic

from anyio import CancelScope, sleep, to_thread

from schemas.commands import AdapterVersion, Checkpoint
from schemas.errors import CheckpointError, ConfigError, EngineError, RefusedError, UnansweredError, UnsupportedError
from schemas.events import CheckAdapter, CheckSource, Load, LoadAdapter, Observation, Restore, Returned, UnloadAdapter
from schemas.identity import LAUNCH_LABEL, Digests, Identity, Operation
from schemas.safetensors.format import read_layout
from schemas.wire import PeerFound
from workers.engines.adapter_files import adapter_path, checked_adapter
from workers.engines.checkpoint import Lacking, SourceChecker, Taken, missing_beside
from workers.engines.client import READ_TIMEOUT_S, RETRY_S, CallRefused, EngineClient, begun, mapping_at, retry_time_s
from workers.engines.observed import EngineKind, Launch, LaunchT, LoRALimits, ObservedEngine, listed_adapters

READ_AHEAD_SHARE: Final = 0.5
"""Share of the time left to a command for which it reads ahead: a pause comes after that."""
_OF_THE_ADAPTER: Final = (400, 404, 422)
"""Statuses with which a server turns an adapter away, and serves on."""


class AttachedEngine(ABC, Generic[LaunchT]):
    """One engine, seen from one node of its replica.

    Args:
        identity: This node's place.
        client: Reaches this node's own front end; None where there is none.
        checkpoints: Root of the checkpoint paths in commands.
        traces: Root of the session directories. The server must see both roots under the same absolute path.
        digests: After which loads the engine is asked for checksums.
        copied: The engine whose weights the launch of this one has copied.
    """

    kind: ClassVar[EngineKind]  # type: ignore[type-arg]
    _fuses: ClassVar[bool]  # see `missing_beside`
    _loaded_option: ClassVar[str]  # of its launch: how many adapters it holds
    _checksums: ClassVar[tuple[str, str]]  # the method that returns them, and a parameter that shows that it does

    def __init__(
        self,
        identity: Identity,
        client: EngineClient | None,
        *,
        checkpoints: Path,
        traces: Path,
        digests: Digests = "announced",
        copied: PeerFound | None = None,
    ) -> None:
        self._identity, self._client = identity, client
        self._observed: ObservedEngine[LaunchT] = ObservedEngine(
            self.kind, identity, client, unready=None, checkpoints=checkpoints
        )
        self._called = False  # since the last observation
        self._traces, self._checkpoints, self._digests = traces.resolve(), checkpoints, digests
        self._sources, self._copied = SourceChecker(checkpoints), copied or PeerFound()
        self._joined: tuple[str | None, str] | None = None  # a launch of the engine, and the broadcast group it is in

    async def open(self) -> None:
        await self._observed.open()

    async def observe(self) -> Observation:
        called, self._called = self._called, False  # the engine may be paused until this observation is made
        return await self._observed.observe(counters=not called)

    async def close(self) -> None:
        await self._observed.close()

    async def _attached(self) -> tuple[EngineClient, LaunchT]:
        self._called = True
        try:
            launch = await self._observed.current_launch(self._client) if self._client is not None else None
        except (EngineError, ConfigError) as error:
            raise RefusedError(f"{self.kind.name} was not called: {error}") from error
        if self._client is None or launch is None:
            raise RefusedError(f"{self.kind.name} was not called: this node has no front end.")
        return self._client, launch

    def _directory(self, launch: LaunchT, call: Load | Restore) -> Taken:
        """Return where the weights of a call are, after checking them. Raises CheckpointError."""
        if isinstance(call, Load):
            assert isinstance(call.source, Checkpoint)
            return self._sources.checked_directory(call.source, call.manifest, launch.model, self._missing(launch))
        read_layout(Path(call.directory))
        return Taken(Path(call.directory))

    async def _check_source(self, client: EngineClient, launch: LaunchT, call: CheckSource, timeout_s: float) -> None:
        if await self._holds_copy(client, launch, call):
            return
        until = time.monotonic() + timeout_s * READ_AHEAD_SHARE
        where = call.source, call.manifest, launch.model, self._identity
        await to_thread.run_sync(self._sources.check, *where, until, self._missing(launch))

    def _missing(self, launch: LaunchT) -> Lacking:
        return partial(missing_beside, precision=launch.precision, fuses=self._fuses)

    async def _loaded(self, client: EngineClient, launch: LaunchT, call: Load | Restore, took: str) -> Returned:
        """Return the result of a load, with a digest of the checksums that the engine computes over its own tensors.

        It identifies the contents of engines of this kind and layout, not of files: engines fuse and prepack tensors.
        """
        announced = isinstance(call, Load) and call.manifest is not None and call.manifest.content is not None
        asked = self._digests == "always" or (announced and self._digests == "announced")
        return Returned(digest=await self._digest(client, launch) if asked else None, took=took)

    async def _holds_copy(self, client: EngineClient, launch: LaunchT, call: CheckSource | Load) -> bool:
        """Return whether the engine holds these weights because its launch copied them. Its checksums show that."""
        content = call.manifest.content if call.manifest is not None else None
        if content == self._copied.content and self._copied.digest:
            with suppress(EngineError):
                return await self._digest(client, launch) == self._copied.digest
        return False

    async def _digest(self, client: EngineClient, launch: LaunchT) -> str | None:
        method, parameter = self._checksums
        if parameter not in launch.methods.get(method, ()):
            return None
        sums = named_checksums(await client.call(method, action="checksum"))
        arranged = [launch.version, launch.device, launch.world, launch.precision, sorted(sums)]
        layout, content = (
            hashlib.sha256(json.dumps(part).encode()).hexdigest() for part in (arranged, sorted(sums.items()))
        )
        return f"{self.kind.name}:{layout[:16]}:{content}"

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def _adapter(
        self, client: EngineClient, launch: LaunchT, call: CheckAdapter | LoadAdapter | UnloadAdapter, timeout_s: float
    ) -> None:
        """Check, load or unload a version of an adapter."""
        if (reason := launch.missing.get(Operation.ADAPTERS)) is not None:
            raise UnsupportedError(f"{self.kind.name} {launch.version} takes no adapters: {reason}.")
        listed = await self._listed_before(client, timeout_s)
        if isinstance(call, UnloadAdapter):
            if call.model in listed:
                await self._unload_adapter(client, launch, call)
            return
        adapter = call.adapter
        if listed.get(adapter.model) in (adapter.path, ""):
            return  # an answer was lost, or it is checked again
        if isinstance(call, LoadAdapter) and adapter.model in listed:
            raise RefusedError(
                f"{self.kind.name} has {adapter.model} from {listed[adapter.model]}, and {adapter.path} was not loaded "
                "over it: requests would change their weights in the middle. Unload it first."
            )
        limits = launch.lora or LoRALimits()
        if limits.loaded is not None and len(listed.keys() - {adapter.model}) >= limits.loaded:
            raise RefusedError(
                f"{self.kind.name} holds {limits.loaded} adapters at most: {', '.join(sorted(listed))[:500]}; "
                f"{adapter.model} was not loaded. Drop versions, or launch with a larger {self._loaded_option}."
            )
        await to_thread.run_sync(self._check_adapter, launch, adapter, limits)
        if isinstance(call, LoadAdapter):
            await self._load_adapter(client, adapter)

    def _check_adapter(self, launch: LaunchT, adapter: AdapterVersion, limits: LoRALimits) -> None:
        checked_adapter(self._checkpoints, adapter, self._sources.model_layout(launch.model), limits)

    async def _load_adapter(self, client: EngineClient, adapter: AdapterVersion) -> None:
        place = adapter_path(self._checkpoints, adapter.path)
        try:
            await client.call("load_lora_adapter", lora_name=adapter.model, lora_path=str(place))
        except CallRefused as error:
            with begun():
                listed = await self._listed(client)
            if listed.get(adapter.model) in (adapter.path, ""):
                return  # by an earlier call whose answer was lost
            if error.status in _OF_THE_ADAPTER:
                raise CheckpointError(f"adapter refused: {error}. It was not loaded.") from error
            raise

    async def _unload_adapter(self, client: EngineClient, launch: LaunchT, call: UnloadAdapter) -> None:
        """Unload what the engine lists. It also counts if another call has done it meanwhile."""
        if "count_lora_requests" in launch.methods:  # in process
            counts = await client.read("count_lora_requests")
            in_use: bool | None = isinstance(counts, dict) and counts.get(call.model, 0) > 0
        else:
            in_use = await self._in_use(client, launch, call.model)
        if in_use or (in_use is None and not call.waited):
            found = "requests run on it" if in_use else "it can't be told which requests run on it"
            raise RefusedError(f"{self.kind.name} still has {call.model}: {found}. It was not unloaded.")
        try:
            await client.call("unload_lora_adapter", lora_name=call.model)
        except CallRefused:
            with begun():
                listed = await self._listed(client)
            if call.model in listed:
                raise

    async def _listed_before(self, client: EngineClient, timeout_s: float) -> dict[str, str]:
        """Ask for as long as the command lasts: the front end of an engine that serves may stand still for seconds."""
        until = time.monotonic() + retry_time_s(timeout_s) - READ_TIMEOUT_S
        while True:
            try:
                return await self._listed(client)
            except EngineError as error:
                if not isinstance(error, UnansweredError) or time.monotonic() > until:
                    reason = f"it does not list its adapters. {error}"
                    raise RefusedError(f"{self.kind.name} was not called: {reason}") from error
            await sleep(RETRY_S)

    async def _listed(self, client: EngineClient) -> dict[str, str]:
        models = await client.read("list_models")
        if not isinstance(models, list):
            raise EngineError(f"{client.where} answered a request for its models with something else.")
        return listed_adapters(models, self._checkpoints)

    @abstractmethod
    async def _in_use(self, client: EngineClient, launch: LaunchT, model: str) -> bool | None:
        """Return whether requests of a server run on an adapter; None if that can't be told.

        Raises:
            RefusedError: It must not be unloaded now, whether they do or not.
        """


def named_checksums(answer: object) -> dict[str, str]:
    """Return the checksums in an engine's answer, by the names of its tensors: vLLM's are one mapping, SGLang's one for
    each rank. Raises EngineError.
    """
    ranks = answer if isinstance(answer, list) else [{"checksums": answer}]
    named = (mapping_at(part, "checksums") if isinstance(part, Mapping) else {} for part in ranks)
    sums = {f"{rank}:{name}": str(each) for rank, part in enumerate(named) for name, each in part.items()}
    if not sums:
        raise EngineError(f"the engine was asked for checksums of its weights, and answered {str(answer)[:200]!r}.")
    return sums


def label_after(call: Load | Restore) -> str:
    """Return how the engine is to label the weights that a call has loaded."""
    return LAUNCH_LABEL if isinstance(call, Restore) else call.label or str(call.version)


@asynccontextmanager
async def weight_update(client: EngineClient, launch: Launch, begin: str, end: str) -> AsyncIterator[None]:
    """Begin and end a weight update, where the engine has these methods. One that is left open blocks every later one.

    Raises:
        EngineError: Never a refusal once the update has begun.
    """
    opens = begin in launch.methods
    if opens:
        try:
            await client.call(begin)
        except CallRefused:  # an earlier one was cut off
            await client.call(end)
            await client.call(begin)
    with begun():
        try:
            yield
        except BaseException:
            if opens:
                with CancelScope(shield=True), suppress(EngineError):  # the first error is the one to report
                    await client.call(end)
            raise
        if opens:
            await client.call(end)
