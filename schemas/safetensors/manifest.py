"""What a checkpoint must hold: building a manifest of it, and checking it against one."""

from collections.abc import Mapping
from pathlib import Path

from schemas.commands import Manifest
from schemas.errors import CheckpointError
from schemas.safetensors.digest import content_digest, layout_digest
from schemas.safetensors.format import UNTOUCHED, TensorSpec, refused, scan


def build_manifest(directory: Path, content: bool) -> Manifest:
    """What the directory holds now. content: also digest every byte of it (about a second per gigabyte).

    Raises what `read_layout` raises.
    """
    places = scan(directory)
    return Manifest(
        tensors=len(places),
        nbytes=sum(place.spec.nbytes for place in places.values()),
        layout=layout_digest({name: place.spec for name, place in places.items()}),
        content=content_digest(places) if content else None,
    )


def manifest_of(layout: Mapping[str, TensorSpec]) -> Manifest:
    """The manifest of tensors that lie in no file, e.g. a model in the trainer's memory that it will broadcast."""
    return Manifest(
        tensors=len(layout), nbytes=sum(one.nbytes for one in layout.values()), layout=layout_digest(layout)
    )


def check_directory(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the directory holds what the manifest says. Returns without a word when it does.

    The content is compared when the manifest has a digest of it.
    """
    places = scan(directory)
    check_layout(directory, {name: place.spec for name, place in places.items()}, manifest)
    if manifest.content is not None and (seen := content_digest(places)) != manifest.content:
        raise content_differs(directory, seen, manifest)


def check_layout(directory: Path, layout: Mapping[str, TensorSpec], manifest: Manifest) -> None:
    """Raise CheckpointError unless a layout read from the directory is the manifest's. Names what differs first."""
    nbytes = sum(spec.nbytes for spec in layout.values())
    if len(layout) != manifest.tensors:
        what = f"holds {len(layout):,} tensors, the trainer's manifest has {manifest.tensors:,}"
    elif nbytes != manifest.nbytes:
        what = f"holds {nbytes:,} bytes of tensors, the trainer's manifest has {manifest.nbytes:,}"
    elif (seen := layout_digest(layout)) != manifest.layout:
        what = (
            f"holds {len(layout):,} tensors of {nbytes:,} bytes as the trainer's manifest says, but a name, dtype or "
            f"shape differs (layout {seen[:12]}, the manifest has {manifest.layout[:12]})"
        )
    else:
        return
    raise refused(
        directory,
        what,
        f"{UNTOUCHED} It is another model's, a file of it is missing, or this node sees an older state of the disk: "
        "look at `source`, and sync again.",
    )


def require_same_model(directory: Path, held: Mapping[str, TensorSpec], offered: Mapping[str, TensorSpec]) -> None:
    """Raise CheckpointError unless tensors of one layout can take the place of another's: same names, dtypes, shapes.

    held: what the engine's model is made of.   offered: what was read from the directory.
    """
    wrong = []
    for name in sorted(held.keys() | offered.keys()):
        if name not in offered:
            wrong.append(f"it lacks {name} ({held[name]})")
        elif name not in held:
            wrong.append(f"it has {name} ({offered[name]}), which the model has not")
        elif held[name] != offered[name]:
            wrong.append(f"{name} is {offered[name]}, and the model's is {held[name]}")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise refused(directory, f"is of another model: {'; '.join(wrong[:3])}{more}", UNTOUCHED)


def content_differs(directory: Path, seen: str, manifest: Manifest) -> CheckpointError:
    """The error for tensors whose digest is not the manifest's."""
    return refused(
        directory,
        f"has the right tensors with other values: content {seen[:12]}, the trainer's manifest has "
        f"{(manifest.content or '')[:12]}",
        f"{UNTOUCHED} It was written again after the manifest was made, or this node sees an older state of the disk: "
        "build the manifest again, and sync again.",
    )
