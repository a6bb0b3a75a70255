"""Checks new weights before the engine gets them, since bad ones would kill it.

An engine server loads by itself, from a path. vLLM 0.32's server ends when a reload raises in a worker; SGLang falls
back to unpickling when it finds no safetensors. So the agent reads the files first: they must be complete, below the
allowed root, and of the model that the engine was launched with. That model also defines what a broadcast contains:
both sides go through its tensors in ascending order of their names, and the manifest proves that they mean the same.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from schemas.commands import Broadcast, Checkpoint, EngineSource, Manifest
from schemas.errors import CheckpointError, EngineError
from schemas.identity import Identity
from schemas.outcomes import BY_DELTA
from schemas.safetensors.format import TensorPlace, TensorSpec, find_tensors, read_layout
from schemas.safetensors.manifest import check_layout, check_tensors, find_delta, require_same_model
from schemas.safetensors.paths import resolve_below
from schemas.safetensors.reading import FileState, file_states
from workers.engines.page_cache import read_ahead

CLOCK_NS: Final = 20_000_000
"""More than the resolution of a file system's clock (10 ms at most): two writes within that time can look like one."""
BUCKET_BYTES: Final = 512 << 20
"""Most bytes of tensors received at once. An engine holds a bucket beside its weights for a moment."""

TORCH_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names for safetensors' dtypes."""

Layout = Mapping[str, TensorSpec]
Lacking = Callable[[Layout, Layout], str]
"""Returns why an engine can't load only those tensors, of all tensors of the same weights; empty if it can."""

FLOATS: Final = frozenset({"F32", "F16", "BF16"})
FUSED: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Modules that engines fuse."""
_ALONE: Final = ("o_proj", "down_proj", "embed_tokens", "lm_head")
"""Modules that they don't fuse, beside norms."""


class Taken(NamedTuple):
    """What an engine is to read of a source: all of its weights, or its delta; and why, as `Returned.took` says it."""

    whole: Path
    delta: Path | None = None
    took: str = ""

    @property
    def directory(self) -> Path:
        """What it is to read."""
        return self.delta or self.whole


class _Checked(NamedTuple):
    """A directory that was checked against a manifest and the layout of a model, and its files as they were. With a
    delta, both are.
    """

    directory: Path
    delta: Path | None
    manifest: Manifest | None
    states: tuple[FileState, ...]
    layout: Layout | None
    missing: str = ""  # for an engine that is to load the delta alone

    def still_holds(self, found: "_Checked") -> bool:
        """Whether a check of what was found now would say the same."""
        return self[:4] == found[:4] and self.layout is found.layout

    def taken(self) -> Taken:
        """Return what of it an engine is to read."""
        if self.missing:
            return Taken(self.directory, took=f"whole: {self.missing}")
        return Taken(self.directory, self.delta, BY_DELTA if self.delta is not None else "")

    def is_settled(self, now_ns: int) -> bool:
        """Whether a later write to its files would show."""
        return all(state.modified_ns < now_ns - CLOCK_NS for state in self.states)


class SourceChecker:
    """Checks the sources of one engine's new weights.

    Args:
        root: Root of the checkpoint paths in commands.
        layout: Tensors of the engine's model, if they are known without the files of its launch.
    """

    def __init__(self, root: Path, layout: Layout | None = None) -> None:
        self._root = root
        self._launched: tuple[str, Layout | None] = ("", layout)
        self._checked: _Checked | None = None

    def check(
        self,
        source: EngineSource,
        manifest: Manifest | None,
        model: str | None,
        identity: Identity,
        until: float,
        missing: Lacking,
    ) -> None:
        """Check that the engine may load the source, and read ahead what it will load. Raises CheckpointError.

        Args:
            source: Where the weights are.
            manifest: What the source must hold, if that is known.
            model: Path that the engine was launched from; the files there show which tensors it takes. If this node
                can't read it (a name on a hub), only a manifest reveals a wrong model: a checkpoint then needs one, and
                nothing can be broadcast.
            identity: The place of this agent.
            until: When to stop reading ahead, by `time.monotonic()`.
            missing: Says whether the engine can load a delta.
        """
        if isinstance(source, Checkpoint):
            directory = self.checked_directory(source, manifest, model, missing).directory
            if manifest is None or manifest.content is None:  # for a digest it was all read just now
                read_ahead(directory, until)
        else:
            self.checked_layout(source, manifest, model, identity)

    def checked_directory(
        self, source: Checkpoint, manifest: Manifest | None, model: str | None, missing: Lacking = lambda *_: ""
    ) -> Taken:
        """Return what the engine is to read of the source, after checking all of it. Raises CheckpointError.

        A sync asks before the pause, and again for the load. Files that have not been written since they were checked
        are not read again, so generation does not stand still for that. A manifest is of all weights: with a digest,
        that of the delta's tensors and the others' is its digest.
        """
        directory = resolve_below(self._root, source.path)
        delta = resolve_below(self._root, source.delta) if source.delta else None
        layout = self.model_layout(model)
        began_ns, states = time.time_ns(), file_states(directory) + (file_states(delta) if delta is not None else ())
        found = _Checked(directory, delta, manifest, states, layout)
        if self._checked is not None and self._checked.still_holds(found):
            return self._checked.taken()
        self._checked = None
        places = find_tensors(directory)
        whole = _layout_of(places)
        if delta is not None:
            changed = find_delta(delta, places)
            found = found._replace(missing=missing(_layout_of(changed), whole))
            places |= changed if not found.missing else {}
        if layout is not None:
            require_same_model(directory, layout, whole)
        elif manifest is None:
            raise CheckpointError(
                f"checkpoint refused: {directory}: the engine was launched from {model or 'an unknown place'}, which "
                "can't be read here, and the command carries no manifest, so nothing shows that it is the same model. "
                "Nothing was loaded: sync with a manifest."
            )
        if manifest is not None:
            check_tensors(directory, places, manifest)
        if found.is_settled(began_ns):
            self._checked = found
        return found.taken()

    def checked_layout(
        self, source: Broadcast, manifest: Manifest | None, model: str | None, identity: Identity
    ) -> Layout:
        """Return the tensors that will be broadcast. Raises CheckpointError."""
        if identity.replica not in source.replicas:
            raise CheckpointError(
                f"broadcast refused: replica {identity.replica} is not in group {source.group!r}, which has replicas "
                f"{list(source.replicas)}. Nothing was loaded: make the group with it, or name other replicas."
            )
        layout = self.model_layout(model)
        if layout is None or manifest is None:
            raise CheckpointError(
                f"broadcast refused: the tensors of {model or 'the model'} can't be read here, or the command carries "
                "no manifest, so nothing shows what will arrive. Nothing was loaded: launch the engine from a "
                "directory that its agent can read, and sync with a manifest."
            )
        check_layout(Path(str(model)), layout, manifest)
        return layout

    def model_layout(self, model: str | None) -> Layout | None:
        """Return the tensors of the engine's model; None if they can't be read here.

        Some engines report the path that they loaded last, which may be deleted by now. Then what was read earlier
        still holds, because no load changes the model.
        """
        if model is not None and self._launched[0] != model and Path(model).is_dir():
            with suppress(CheckpointError):
                self._launched = (model, read_layout(Path(model)))
        return self._launched[1]


def missing_beside(changed: Layout, whole: Layout, *, precision: str, fuses: bool) -> str:
    """Return why an engine can't load only the tensors that have changed; empty if it can. Pure.

    Args:
        changed: Those tensors.
        whole: All tensors of the same weights.
        precision: The engine's, see `Launch`.
        fuses: It makes a fused module anew in a load, so that what does not come is whatever was in that memory.
    """
    plain = precision.endswith(" None") and {spec.dtype for spec in whole.values()} <= FLOATS
    if not plain or any(".experts." in name for name in whole):
        return "no delta of experts or of quantized weights was seen to be right"
    modules = {_module(name) for name in changed} if fuses else ()
    lacking = next((name for name in whole if name not in changed and _module(name) in modules), "")
    return f"the engine fuses what has changed with {lacking[:200]!r}" if lacking else ""


def _module(name: str) -> str:
    """The module of an engine that a tensor goes into. For one of a kind that is not known, all around it."""
    around, _, last = name.rpartition(".")[0].rpartition(".")
    alone = last in _ALONE or last.endswith("norm")
    return f"{around}.{last if alone else FUSED[last]}" if alone or last in FUSED else around


def _layout_of(places: Mapping[str, TensorPlace]) -> Layout:
    return {name: place.spec for name, place in places.items()}


def buckets(layout: Layout) -> Iterator[list[str]]:
    """Yield the tensors' names in ascending order, at least one and at most BUCKET_BYTES at a time."""
    bucket: list[str] = []
    size = 0
    for name in sorted(layout):
        if bucket and size + layout[name].nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += layout[name].nbytes
    if bucket:
        yield bucket


def torch_dtypes_and_shapes(layout: Layout, names: list[str]) -> tuple[list[str], list[list[int]]]:
    """Return the dtypes, by torch's names, and the shapes. Raises EngineError for a dtype that torch does not have."""
    for name in names:
        if layout[name].dtype not in TORCH_DTYPES:
            raise EngineError(f"{name} is {layout[name]}: torch has no such dtype to broadcast.")
    return [TORCH_DTYPES[layout[name].dtype] for name in names], [list(layout[name].shape) for name in names]


def group_ranks(source: Broadcast, identity: Identity) -> tuple[int, int]:
    """Return this replica's first rank in the group, and the group's size. The trainer is rank 0."""
    world = identity.nnodes * identity.gpus_per_node
    return 1 + source.replicas.index(identity.replica) * world, 1 + len(source.replicas) * world
