"""Manifests: what a checkpoint must hold, built by the trainer and checked by each agent.

The trainer builds a manifest of what it wrote. Each agent checks its own view of the disk against it before it touches
the engine. A check reads headers only, some kilobytes whatever the size of the model, unless the manifest has a digest
of the content: then every byte is read once.
"""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from schemas.commands import Manifest
from schemas.errors import CheckpointError
from schemas.safetensors.digest import layout_digest
from schemas.safetensors.format import UNTOUCHED, TensorPlace, TensorSpec, checkpoint_refused, find_tensors, open_file
from schemas.safetensors.reading import content_digest

ADAPTER_CONFIG: Final = "adapter_config.json"
"""PEFT's file with the rank, the scale and the target modules of an adapter."""
CONFIG_BYTES_MAX: Final = 1 << 20


def build_manifest(directory: Path, content: bool) -> Manifest:
    """Return the manifest of what the directory holds now. Raises CheckpointError, as `read_layout`.

    Args:
        directory: The checkpoint.
        content: Digest every byte too, 0.7 seconds per gigabyte and core, on up to 8 cores.
    """
    places = find_tensors(directory)
    layout = {name: place.spec for name, place in places.items()}
    return manifest_of(layout, content_digest(places).hexdigest() if content else None)


def require_all_changed(
    delta: Path, changed: Collection[str], base: Mapping[str, bytes], whole: Mapping[str, bytes]
) -> None:
    """Raise CheckpointError if a delta, whose tensors are `changed`, lacks one whose digest is not that of its base."""
    missed = [name for name, digest in whole.items() if name not in changed and base.get(name) != digest]
    if missed:
        what = f"lacks {len(missed):,} of the tensors that differ from its base: {', '.join(missed)[:200]}"
        raise checkpoint_refused(delta, what, f"{UNTOUCHED} Write them into the delta, or sync without one.")


def find_delta(directory: Path, whole: Mapping[str, TensorPlace]) -> dict[str, TensorPlace]:
    """Return where a delta's tensors are. Raises CheckpointError unless each is one of the `whole` checkpoint's."""
    places = find_tensors(directory)
    for name, place in places.items():
        if name not in whole or whole[name].spec != place.spec:
            has = f"as {whole[name].spec}" if name in whole else "not at all"
            what = f"holds {name[:200]!r} ({place.spec}), which the whole checkpoint has {has}"
            raise checkpoint_refused(directory, what, f"{UNTOUCHED} A delta is a part of the checkpoint beside it.")
    return places


class CheckpointFiles(NamedTuple):
    """What a sync says of the files of a checkpoint or an adapter."""

    manifest: Manifest
    config: str = ""


def read_checkpoint(directory: Path, adapter: bool) -> CheckpointFiles:
    """Return what a sync says of a directory. Raises CheckpointError, as `read_layout`."""
    manifest = build_manifest(directory, content=adapter)
    return CheckpointFiles(manifest, config_digest(read_config(directory)) if adapter else "")


def config_digest(config: bytes) -> str:
    """Return the sha256 of an adapter's configuration, in hex."""
    return hashlib.sha256(config).hexdigest()


def read_config(directory: Path) -> bytes:
    """Return an adapter's configuration. Raises CheckpointError if there is none that can be read."""
    path = directory / ADAPTER_CONFIG
    with open_file(path) as file:
        config = file.read(CONFIG_BYTES_MAX + 1)
    if len(config) > CONFIG_BYTES_MAX:
        raise checkpoint_refused(path, f"has more than {CONFIG_BYTES_MAX:,} bytes", UNTOUCHED)
    return config


def manifest_of(layout: Mapping[str, TensorSpec], content: str | None = None) -> Manifest:
    """Return the manifest of tensors. They need not be in a file: a trainer may broadcast them instead.

    Args:
        layout: Data type and shape of each tensor, by name.
        content: Content digest, if it is known.
    """
    nbytes = sum(spec.nbytes for spec in layout.values())
    return Manifest(tensors=len(layout), nbytes=nbytes, layout=layout_digest(layout), content=content)


def check_directory(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the directory holds what the manifest says.

    Args:
        directory: A checkpoint.
        manifest: What it must hold; the content is compared only if it has a digest of that.
    """
    check_tensors(directory, find_tensors(directory), manifest)


def check_tensors(directory: Path, places: Mapping[str, TensorPlace], manifest: Manifest) -> None:
    """Check the tensors that were found in the directory, like `check_directory`."""
    check_layout(directory, {name: place.spec for name, place in places.items()}, manifest)
    if manifest.content is not None and (found := content_digest(places).hexdigest()) != manifest.content:
        raise content_differs(directory, found, manifest)


def check_layout(directory: Path, layout: Mapping[str, TensorSpec], manifest: Manifest) -> None:
    """Raise CheckpointError unless `layout`, read from the directory, is that of the manifest."""
    found = manifest_of(layout, manifest.content)
    if found == manifest:
        return
    has, due = (f"{one.tensors:,} tensors, {one.nbytes:,} bytes, layout {one.layout[:12]}" for one in (found, manifest))
    raise checkpoint_refused(
        directory,
        f"holds {has}, the trainer's manifest has {due}",
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
    names = sorted(name for name in held.keys() | offered.keys() if held.get(name) != offered.get(name))
    if names:
        first = "; ".join(
            f"{name} is {offered.get(name, 'missing')}, and {held.get(name, 'missing')} in the model"
            for name in names[:3]
        )
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        raise checkpoint_refused(directory, f"is of another model: {first}{more}", UNTOUCHED)


def content_differs(directory: Path, found: str, manifest: Manifest) -> CheckpointError:
    """Return the error for tensors whose content digest is `found` and not the manifest's."""
    return checkpoint_refused(
        directory,
        f"has the right tensors with other values: content {found[:12]}, the trainer's manifest has "
        f"{(manifest.content or '')[:12]}",
        f"{UNTOUCHED} Either it was written again after the manifest was built, or this node sees an older state of "
        "the disk: build the manifest again, then sync again.",
    )
