"""Reads new weights into the page cache while the engine generates, so that its own reload, in the pause, is short.

It is only a help: whatever goes wrong here, the engine reads the files from the disk, as it would have done.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import repeat
from pathlib import Path
from typing import Final, NamedTuple

from schemas.errors import CheckpointError
from schemas.safetensors.digest import PIECE_BYTES, reading_threads
from schemas.safetensors.format import open_file, safetensors_files

STEP_BYTES: Final = 1 << 20
"""Looked at, and read, at a time."""
SHARE: Final = 0.5
"""Share of the free memory that is filled. Requests need some too, and the engine a copy of what it loads."""


class _Stretch(NamedTuple):
    file: int
    start: int
    end: int


def read_ahead(directory: Path, until: float, most_bytes: int | None = None) -> int:
    """Read what the page cache lacks of a directory's tensors, in the order in which engines read them.

    Args:
        directory: Holds the `*.safetensors` files.
        until: When to stop, by `time.monotonic()`.
        most_bytes: Most bytes to have in the cache; None for what memory allows.

    Returns:
        The number of bytes that are in the cache, as far as it got.
    """
    left = int(free_bytes() * SHARE) if most_bytes is None else most_bytes
    with ExitStack() as stack, suppress(CheckpointError):  # what is wrong with them, the check says
        stretches = list(_stretches(directory, left, stack))
        return sum(stack.enter_context(reading_threads()).map(_read, stretches, repeat(until)))
    return 0


def free_bytes(root: Path = Path("/")) -> int:
    """Return how much memory there is for more files, on this machine and in this process's control group (version 2).

    0 where that can't be read.

    Args:
        root: Where `proc` and `sys` are.
    """
    try:
        found = [1024 * _field(root / "proc/meminfo", "MemAvailable:")]
        group = root / "sys/fs/cgroup" / (root / "proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    except (OSError, ValueError):
        return 0
    with suppress(OSError, ValueError):  # it has none, or its limit is the word "max"
        used = int((group / "memory.current").read_text()) - _field(group / "memory.stat", "file")
        found.append(int((group / "memory.max").read_text()) - used)
    return max(0, min(found))


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    raise ValueError(f"{path} has no {name}")


def _stretches(directory: Path, left: int, stack: ExitStack) -> Iterator[_Stretch]:
    """Yield the first bytes of the files, as many as are left. The files stay open until the stack is closed."""
    for path in safetensors_files(directory):
        file = stack.enter_context(open_file(path)).fileno()
        size = min(left, os.fstat(file).st_size)
        left -= size
        for start in range(0, size, PIECE_BYTES):
            yield _Stretch(file, start, min(start + PIECE_BYTES, size))


def _read(stretch: _Stretch, until: float) -> int:
    """Read what is not in the cache. Returns how many bytes are, as far as it got."""
    for start in range(stretch.start, stretch.end, STEP_BYTES):
        if time.monotonic() >= until:
            return start - stretch.start
        end = min(start + STEP_BYTES, stretch.end)
        if not (_is_cached(stretch.file, start) and _is_cached(stretch.file, end - 1)):
            with suppress(OSError):
                os.pread(stretch.file, end - start, start)
    return stretch.end - stretch.start


def _is_cached(file: int, place: int) -> bool:
    """Whether a byte comes without the disk. False where the file system can't tell."""
    try:
        return os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except OSError:
        return False
