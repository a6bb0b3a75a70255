"""Checkpoints are read while the engine still serves, so that a load only exchanges two sets of tensors.

`stage` reads when the source is checked, which is before the pause, and `take` returns what was read, unless the files
were written again meanwhile. The set that a load has replaced is the memory for the next one: to get new memory takes
longer than to fill it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from schemas.commands import Checkpoint, Manifest
from schemas.safetensors.format import TensorSpec, find_tensors
from schemas.safetensors.manifest import check_layout, content_differs, require_same_model
from schemas.safetensors.paths import resolve_below
from schemas.safetensors.reading import FileState, file_states, read_tensors
from workers.engines.checkpoint import TORCH_DTYPES
from workers.engines.tiny.model import memory_of


class StagedWeights(NamedTuple):
    """Weights that were read from a checkpoint, and that no model holds yet.

    Attributes:
        digest: Their content digest; None if the manifest has none to compare it with.
        read_from: The source and its manifest, and its files as they were.
    """

    tensors: dict[str, Tensor]
    digest: str | None
    read_from: tuple[Checkpoint, Manifest | None, tuple[FileState, ...]]


class Staging:
    """The second set of an engine's weights. Not thread-safe.

    Args:
        root: Root of the checkpoint paths in commands.
        layout: The tensors of the model.
    """

    def __init__(self, root: Path, layout: Mapping[str, TensorSpec]) -> None:
        self._root, self._layout = root, layout
        self._staged: StagedWeights | None = None
        self._spare: dict[str, Tensor] = {}

    def stage(self, source: Checkpoint, manifest: Manifest | None) -> StagedWeights:
        """Read a source. Raises CheckpointError unless the model can load every byte of it."""
        self.discard()
        directory = resolve_below(self._root, source.path)
        states = file_states(directory)
        places = find_tensors(directory)
        offered = {name: place.spec for name, place in places.items()}
        require_same_model(directory, self._layout, offered)
        if manifest is not None:
            check_layout(directory, offered, manifest)
        content = manifest.content if manifest is not None else None
        tensors = self._spare or {name: _empty(spec) for name, spec in self._layout.items()}
        self._spare = tensors
        memory = {name: memory_of(tensor) for name, tensor in tensors.items()}
        found = read_tensors(places, memory, content=content is not None)
        if manifest is not None and found is not None and found != content:
            raise content_differs(directory, found, manifest)
        self._staged, self._spare = StagedWeights(tensors, found, (source, manifest, states)), {}
        return self._staged

    def take(self, source: Checkpoint, manifest: Manifest | None) -> StagedWeights:
        """Return the weights of a source, read again if need be. Raises CheckpointError, as `stage`."""
        states = file_states(resolve_below(self._root, source.path))
        staged = self._staged
        if staged is None or staged.read_from != (source, manifest, states):
            staged = self.stage(source, manifest)
        return staged

    def replaced(self, tensors: dict[str, Tensor]) -> None:
        """The engine holds what was staged, and no longer these tensors."""
        self._staged, self._spare = None, tensors

    def discard(self) -> None:
        """Forget what was staged. Its memory is kept for the next load."""
        if self._staged is not None:
            self._spare, self._staged = self._staged.tensors, None

    def release(self) -> None:
        """Free all memory."""
        self._staged, self._spare = None, {}


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, TORCH_DTYPES[spec.dtype]))
