"""Checkpoints that must be refused, made from a good one. Of any size: their data are holes in sparse files."""

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from schemas.safetensors.format import safetensors_files

MISSING: Final = "missing"
OUTSIDE: Final = "outside the root"
CUT_OFF: Final = "cut off"
OTHER_MODEL: Final = "of another model"


@contextmanager
def bad_checkpoints(root: Path, good: str) -> Iterator[Mapping[str, str]]:
    """Write the bad checkpoints below `root`, and remove them afterwards. Yields the path of each."""
    folder = Path(tempfile.mkdtemp(prefix="conform-", dir=root))
    try:
        for file in safetensors_files(root / good):
            with file.open("rb") as opened:
                (size,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(size))
            data = file.stat().st_size - 8 - size
            _write(folder / CUT_OFF.replace(" ", "_") / file.name, header, data // 2)
            renamed = {name if name == "__metadata__" else f"{name}.other": entry for name, entry in header.items()}
            _write(folder / OTHER_MODEL.replace(" ", "_") / file.name, renamed, data)
        yield {
            MISSING: f"{folder.name}/missing",
            OUTSIDE: f"../{root.resolve().name}/{good}",
            CUT_OFF: f"{folder.name}/{CUT_OFF.replace(' ', '_')}",
            OTHER_MODEL: f"{folder.name}/{OTHER_MODEL.replace(' ', '_')}",
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(file: Path, header: object, data_bytes: int) -> None:
    file.parent.mkdir(exist_ok=True)
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        opened.truncate(8 + len(text) + data_bytes)
