"""Manifests: what a checkpoint must hold, built by the trainer and checked by each agent.

The trainer builds a manifest of what it wrote. Each agent checks its own view of the disk against it before it touches
the engine. A check reads headers only, some kilobytes whatever the size of the model, unless the manifest has a digest
of the content: then every byte is read once.
"""

from collections.abc import Mapping
from pathlib import Path

from schemas.commands import Manifest
from schemas.errors import CheckpointError
from schemas.safetensors.digest import layout_digest
from schemas.safetensors.format import UNTOUCHED, TensorPlace, TensorSpec, checkpoint_refused, find_tensors
from schemas.safetensors.reading import content_digest


def build_manifest(directory: Path, content: bool) -> Manifest:
    """Return the manifest of what the directory holds now. Raises CheckpointError, as `read_layout`.

    Args:
        directory: The checkpoint.
        content: Digest every byte too, 0.7 seconds per gigabyte and core, on up to 8 cores.
    """
    places = find_tensors(directory)
    layout = {name: place.spec for name, place in places.items()}
    return manifest_of(layout, content_digest(places) if content else None)


def manifest_of(layout: Mapping[str, TensorSpec], content: str | None = None) -> Manifest:
    """Return the manifest of tensors. They need not be in a file: a trainer may broadcast them instead."""
    nbytes = sum(spec.nbytes for spec in layout.values())
    return Manifest(tensors=len(layout), nbytes=nbytes, layout=layout_digest(layout), content=content)


def check_directory(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the directory holds what the manifest says.

    The content is compared only if the manifest has a digest of it.
    """
    check_tensors(directory, find_tensors(directory), manifest)


def check_tensors(directory: Path, places: Mapping[str, TensorPlace], manifest: Manifest) -> None:
    """Check the tensors that were found in the directory, like `check_directory`."""
    check_layout(directory, {name: place.spec for name, place in places.items()}, manifest)
    if manifest.content is not None and (found := content_digest(places)) != manifest.content:
        raise content_differs(directory, found, manifest)


def check_layout(directory: Path, layout: Mapping[str, TensorSpec], manifest: Manifest) -> None:
    """Raise CheckpointError unless `layout`, read from the directory, is that of the manifest."""
    found = manifest_of(layout, manifest.content)
    if found == manifest:
        return
    if found.tensors != manifest.tensors:
        what = f"holds {found.tensors:,} tensors, the trainer's manifest has {manifest.tensors:,}"
    elif found.nbytes != manifest.nbytes:
        what = f"holds {found.nbytes:,} bytes of tensors, the trainer's manifest has {manifest.nbytes:,}"
    else:
        what = (
            f"holds {found.tensors:,} tensors of {found.nbytes:,} bytes as the trainer's manifest says, but a name, "
            f"dtype or shape differs (layout {found.layout[:12]}, the manifest has {manifest.layout[:12]})"
        )
    raise checkpoint_refused(
        directory,
        what,
        f"{UNTOUCHED} Either it is of another model, a file is missing, or this node sees an older state of the disk: "
        "check `source`, then sync again.",
    )


def require_same_model(directory: Path, held: Mapping[str, TensorSpec], offered: Mapping[str, TensorSpec]) -> None:
    """Raise CheckpointError unless a checkpoint has the names, dtypes and shapes of the engine's model.

    Args:
        directory: The checkpoint, for the message.
        held: Tensors of the engine's model.
        offered: Tensors of the checkpoint.
    """
    if held == offered:
        return
    differences = []
    for name in sorted(held.keys() | offered.keys()):
        if name not in offered:
            differences.append(f"it lacks {name} ({held[name]})")
        elif name not in held:
            differences.append(f"it has {name} ({offered[name]}), which the model lacks")
        elif held[name] != offered[name]:
            differences.append(f"{name} is {offered[name]}, but {held[name]} in the model")
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        what = f"is of another model: {'; '.join(differences[:3])}{more}"
        raise checkpoint_refused(directory, what, UNTOUCHED)


def content_differs(directory: Path, found: str, manifest: Manifest) -> CheckpointError:
    """Return the error for tensors whose content digest is `found` and not the manifest's."""
    return checkpoint_refused(
        directory,
        f"has the right tensors with other values: content {found[:12]}, the trainer's manifest has "
        f"{(manifest.content or '')[:12]}",
        f"{UNTOUCHED} Either it was written again after the manifest was built, or this node sees an older state of "
        "the disk: build the manifest again, then sync again.",
    )
