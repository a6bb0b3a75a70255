"""Checkpoints and adapters that must be refused, made from a good one. Of any size: their data are holes in files."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from anyio import to_thread

from schemas import events
from schemas.commands import Manifest
from schemas.safetensors.format import safetensors_files
from schemas.safetensors.manifest import ADAPTER_CONFIG, build_manifest
from workers.conformance.engine_under_test import CheckResult, EngineUnderTest, if_true

OTHER_MODEL: Final = "of another model"
OTHER_SHAPES: Final = "of other shapes"

Calls = Callable[[str, Manifest], tuple[events.EngineCall, events.EngineCall]]


async def refused(engine: EngineUnderTest, root: Path, good: str, calls: Calls, paused: bool) -> CheckResult:
    """Judge that files made from good ones below `root` are refused by both calls, and nothing else changes."""
    before, faults = await engine.observe("before bad files"), list[str]()
    if paused:
        await engine.perform(events.Pause("abort"))
    with TemporaryDirectory(prefix="conform-", dir=root) as folder:
        bad = await to_thread.run_sync(_write_bad, Path(folder), root, good)
        for what, path in bad.items():
            own = what in (OTHER_MODEL, OTHER_SHAPES)
            manifest = await to_thread.run_sync(build_manifest, root / (path if own else good), False)
            for name, call in zip(("check", "load"), calls(path, manifest), strict=True):
                answer = await engine.answer(call)
                due = f"{what}: the {name} {answer}, where CheckpointError is due"
                faults += if_true(answer != "raised CheckpointError", due)
    if paused:
        await engine.perform(events.Resume())
    after = await engine.observe("after bad files")
    faults += if_true(before.instance != after.instance, "the engine did not survive: another one answers")
    faults += if_true(before.version != after.version, "its label changed")
    faults += if_true(before.adapters != after.adapters, "it lists other adapters")
    faults += await engine.changed()
    return CheckResult(faults, f"{', '.join(bad)}: refused, and the engine serves as before")


def _write_bad(folder: Path, root: Path, good: str) -> dict[str, str]:
    """Write bad files below a folder of the root. Returns the path of each."""
    bad: dict[str, tuple[object, int]] = {}
    config = root / good / ADAPTER_CONFIG
    for file in safetensors_files(root / good):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        data = file.stat().st_size - 8 - size
        renamed = {name if name == "__metadata__" else f"{name}.other": entry for name, entry in header.items()}
        bad = {"cut off": (header, data // 2), OTHER_MODEL: (renamed, data)}
        if config.exists():
            bad[OTHER_SHAPES] = {name: _wider(entry) for name, entry in header.items()}, 2 * data
        for what, (changed, nbytes) in bad.items():
            write_safetensors(folder / what / file.name, changed, nbytes)
            if config.exists():
                shutil.copy(config, folder / what)
    paths = {what: f"{folder.name}/{what}" for what in ("missing", *bad)}
    return paths | {"outside the root": f"../{root.resolve().name}/{good}"}


def _wider(entry: dict[str, Any]) -> dict[str, Any]:
    """A tensor of an adapter of rank 1, for a model that is twice as wide."""
    shape = [extent if extent == 1 else 2 * extent for extent in entry["shape"]]
    return entry | {"shape": shape, "data_offsets": [2 * offset for offset in entry["data_offsets"]]}


def write_safetensors(file: Path, header: object, nbytes: int) -> None:
    """Write a file whose data are a hole of `nbytes` bytes, and make its directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + nbytes)
