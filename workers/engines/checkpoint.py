"""What stands between new weights and an engine that would die of bad ones.

An engine server loads by itself, from a path. vLLM 0.32's ends when a reload raises in a worker; SGLang falls back to
unpickling when it finds no safetensors. So the agent reads the files before the engine hears of them: whole, below
the allowed root, and of the model that the engine was launched with. What is broadcast is described by that model too:
both sides go through its tensors in ascending order of their names, and the manifest proves that they mean the same.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from schemas.commands import Broadcast, Checkpoint, Manifest, Source
from schemas.errors import CheckpointError, EngineError
from schemas.identity import Identity
from schemas.safetensors.format import TensorSpec, read_layout
from schemas.safetensors.manifest import check_directory, check_layout, require_same_model
from schemas.safetensors.paths import resolve_below

BUCKET_BYTES: Final = 512 << 20
"""Tensors handed over at once. An engine holds a bucket beside its weights for a moment."""

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


class Weights:
    """Where one engine's new weights come from, and whether they may. root: of the paths that commands name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._launched: tuple[str, dict[str, TensorSpec] | None] = ("", None)

    def check(self, source: Source, manifest: Manifest | None, model: str | None, identity: Identity) -> None:
        """Raise CheckpointError unless the engine may take the source.

        model: path that the engine was launched from; what lies there says which tensors it takes. When this node
        can't read it (a name on a hub), only a manifest can tell a wrong model, so a checkpoint needs one, and nothing
        can be broadcast.
        """
        if isinstance(source, Checkpoint):
            self.directory(source, manifest, model)
        else:
            self.announced(source, manifest, model, identity)

    def directory(self, source: Checkpoint, manifest: Manifest | None, model: str | None) -> Path:
        """The directory of the source, all of it found good. Raises CheckpointError."""
        directory = resolve_below(self._root, source.path)
        offered = read_layout(directory)
        held = self._held(model)
        if held is not None:
            require_same_model(directory, held, offered)
        elif manifest is None:
            raise CheckpointError(
                f"checkpoint refused: {directory}: the engine was launched from {model or 'an unknown place'}, which "
                "can't be read here, and the command carries no manifest. Nothing tells whether it is the same model. "
                "Nothing was loaded: sync with a manifest."
            )
        if manifest is not None:
            check_directory(directory, manifest)
        return directory

    def announced(self, source: Broadcast, manifest: Manifest | None, model: str | None, identity: Identity) -> Layout:
        """The tensors that will come, in the order in which they will. Raises CheckpointError."""
        if identity.replica not in source.replicas:
            raise CheckpointError(
                f"broadcast refused: replica {identity.replica} is not in group {source.group!r}, which is for "
                f"{list(source.replicas)}. Nothing was loaded: make the group with it, or name other replicas."
            )
        held = self._held(model)
        if held is None or manifest is None:
            raise CheckpointError(
                f"broadcast refused: the tensors of {model or 'the model'} can't be read here, or the command carries "
                "no manifest, so nothing tells what will come. Nothing was loaded: launch the engine from a directory "
                "that its agent can read, and sync with a manifest."
            )
        check_layout(Path(str(model)), held, manifest)
        return held

    def _held(self, model: str | None) -> dict[str, TensorSpec] | None:
        """What the engine's model is made of. Some engines name what they loaded last, which may be gone by now: then
        what was read before still holds, because no load changes the model.
        """
        if model is not None and self._launched[0] != model and Path(model).is_dir():
            with suppress(CheckpointError):
                self._launched = (model, read_layout(Path(model)))
        return self._launched[1]


def buckets(layout: Layout) -> Iterator[list[str]]:
    """Names in ascending order, in runs of at most BUCKET_BYTES, and at least one."""
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


def in_torchs_words(layout: Layout, names: list[str]) -> tuple[list[str], list[list[int]]]:
    """Dtypes and shapes. Raises EngineError for a dtype that torch has no name for."""
    for name in names:
        if layout[name].dtype not in TORCH_DTYPES:
            raise EngineError(f"{name} is {layout[name]}: torch has no such dtype to broadcast.")
    return [TORCH_DTYPES[layout[name].dtype] for name in names], [list(layout[name].shape) for name in names]


def ranks(source: Broadcast, identity: Identity) -> tuple[int, int]:
    """First rank of this replica in the group, and the size of the group. The trainer is rank 0."""
    world = identity.nnodes * identity.gpus_per_node
    return 1 + source.replicas.index(identity.replica) * world, 1 + len(source.replicas) * world
