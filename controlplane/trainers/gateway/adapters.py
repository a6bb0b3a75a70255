"""LoRA adapters of trainers: the copies that become versions, and what a request that names one asks the engine for.

A trainer loads versions under a name of its own: one name for all of them (prime-rl, SkyRL), or a name for each, such
as `policy-v7` (AReaL). The run counts its own, in directories of its own: each version is copied to one whose name
holds the trainer's. So the run knows what a trainer's name stands for, after a restart of the gateway too.
"""

import os
import shutil
from itertools import chain
from pathlib import Path
from typing import Final, cast

import msgspec
from msgspec import Raw

from controlplane.machine.adapters import holds_version, live_versions
from controlplane.machine.coordinator_state import CoordinatorState, UsedAdapter
from controlplane.machine.fleet_view import FleetView
from schemas.commands import AdapterVersion, split_model
from schemas.safetensors.format import UNTOUCHED, checkpoint_refused, open_file
from schemas.safetensors.manifest import ADAPTER_CONFIG
from schemas.safetensors.paths import resolve_below
from schemas.wire import DECODE_ERRORS

FOLDER: Final = "gateway-adapters"
"""Of all copies, below the root of checkpoints: RUN/LABEL.NUMBER in it, where the label is the trainer's name."""
FILES: Final = (ADAPTER_CONFIG, "adapter_model.safetensors")
"""What PEFT writes, and engines read. Trainers leave more in their directories."""
FIELDS: Final = frozenset({"model", "lora_path"})
"""Of a request for tokens: vLLM's name of an adapter, and SGLang's."""

_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_names_decoder = msgspec.json.Decoder(list[str | None] | str | None)


def adapter_of(label: str) -> str:
    """Return the adapter that a trainer's name is about: `policy-v7` is a version of `policy`."""
    return split_model(label)[0] or label


def label_of(version: AdapterVersion) -> str:
    """Return what requests call this version, and no other: the trainer's name, unless that is the adapter's."""
    folder, _, name = version.path.rpartition("/")
    label = name.rpartition(".")[0] if folder.startswith(f"{FOLDER}/") else version.name
    return version.model if label == version.name else label


def copy_adapter(root: Path, path: str, place: str) -> None:
    """Copy an adapter. Trainers write the next version into the same files, or delete them, while engines read ours.

    So it can't be a hard link: that is the same file, and `open(…, "w")` writes into a file that is there, as
    `safetensors` did up to 0.7.

    Raises:
        CheckpointError: A file is missing (then its cause is a FileNotFoundError), can't be copied, or was written
            meanwhile.
    """
    files = [resolve_below(root, f"{path}/{name}") for name in FILES]
    try:
        before = [_state(file) for file in files]
        os.makedirs(root / place)
        for name, file in zip(FILES, files, strict=True):
            with open_file(file) as original, open(root / place / name, "wb") as copy:
                shutil.copyfileobj(original, copy, 1 << 20)
        written = [_state(file) for file in files] != before
    except OSError as error:
        raise checkpoint_refused(root / path, f"can't be copied to {place}: {error}", UNTOUCHED) from error
    if written:
        raise checkpoint_refused(root / path, "was written while it was copied", f"{UNTOUCHED} Write it, then post.")


def _state(file: Path) -> tuple[int, ...]:
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def with_engine_names(state: CoordinatorState, body: bytes) -> tuple[bytes, list[UsedAdapter]]:
    """Return the body of a request for tokens with the engines' names of adapters, and the versions that it names.

    Raises:
        LookupError: It names a version of one of the run's adapters that is not served.
        ValueError: It is not a JSON object.
    """
    try:
        fields: dict[str, object] = dict(_fields_decoder.decode(body))
    except DECODE_ERRORS as error:
        raise ValueError(f"its body is not a JSON object: {error}") from None
    named: list[UsedAdapter] = []
    for field in FIELDS & fields.keys():
        try:
            names = _names_decoder.decode(cast("Raw", fields[field]))
        except DECODE_ERRORS:  # the engine says what is wrong with it
            continue
        many = [_engine_name(state, name, named) for name in (names if isinstance(names, list) else [names])]
        fields[field] = many if isinstance(names, list) else many[0]
    return (msgspec.json.encode(fields) if named else body), named


def replica_that_holds(view: FleetView, named: list[UsedAdapter], first: int, replicas: int) -> int | None:
    """Return the replica that takes a request which names these versions: the one that was asked, or the next one."""
    order = chain(range(first, replicas), range(first))
    held = (replica for replica in order if all(holds_version(view.state, replica, used) for used in named))
    return next((replica for replica in held if not view.unfit(replica)), None)


def _engine_name(state: CoordinatorState, label: str | None, named: list[UsedAdapter]) -> str | None:
    name = next((name for name in (label, adapter_of(label or "")) if name in state.adapters), None)
    if name is None:
        return label
    live = live_versions(state, name)
    for used in live:
        if label in (name, label_of(used.adapter)):
            named.append(used)
            return used.adapter.model
    if label == f"{name}-v0":  # engines may have been launched with it: a run counts from 1
        return label
    served = ", ".join(dict.fromkeys(label_of(used.adapter) for used in live)) or "none"
    raise LookupError(f"the adapter {name} has no version {label} that is served; served are: {served}")
