"""Reads the tensors of checkpoint files, into memory or into a digest, on several threads.

Files are read, not mapped: a mapped file that is cut off kills the process that looks at it.
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from schemas.safetensors.digest import PIECE_BYTES, ContentDigest, reading_threads
from schemas.safetensors.format import CUT_OFF, UNTOUCHED, TensorPlace, checkpoint_refused, open_file, safetensors_files

_STEP_BYTES: Final = 1 << 20
"""Read at a time for a digest: these bytes are still in the core's cache when they are hashed."""


class FileState(NamedTuple):
    """What the file system knows of a file. Each write to the file changes it."""

    name: str
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class _Piece(NamedTuple):
    """A piece of a tensor in a file."""

    tensor: str
    offset: int
    path: Path
    file: int
    start: int
    size: int


def content_digest(places: Mapping[str, TensorPlace]) -> ContentDigest:
    """Return the content digest of tensors in files. Reads every byte. Raises CheckpointError."""
    digest = ContentDigest()
    with ExitStack() as stack:
        hashes = stack.enter_context(reading_threads()).map(_hash, list(_pieces(places, stack)))
        for name in sorted(places):
            spec = places[name].spec
            digest.add_tensor(name, spec.dtype, spec.shape, spec.nbytes, hashes)
    return digest


def read_tensors(places: Mapping[str, TensorPlace], memory: Mapping[str, memoryview]) -> None:
    """Read tensors into memory. Raises CheckpointError; what is in memory then is undefined."""
    with ExitStack() as stack:
        pieces = list(_pieces(places, stack))
        parts = (memory[piece.tensor][piece.offset :][: piece.size] for piece in pieces)
        deque(stack.enter_context(reading_threads()).map(_read_into, pieces, parts), maxlen=0)


def file_states(directory: Path) -> tuple[FileState, ...]:
    """Return what shows, when it is compared, whether the directory's tensors were written since.

    Raises CheckpointError.
    """
    states = []
    for path in safetensors_files(directory):
        with open_file(path) as file:
            found = os.fstat(file.fileno())
        states.append(FileState(path.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(states)


def _pieces(places: Mapping[str, TensorPlace], stack: ExitStack) -> Iterator[_Piece]:
    """Yield the pieces of all tensors, in the order of a digest. Their files stay open until the stack is closed."""
    files: dict[Path, int] = {}
    for name in sorted(places):
        path, start, spec = places[name].path, places[name].start, places[name].spec
        if path not in files:
            files[path] = stack.enter_context(open_file(path)).fileno()
        for offset in range(0, spec.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, spec.nbytes - offset)
            yield _Piece(name, offset, path, files[path], start + offset, size)


def _hash(piece: _Piece) -> bytes:
    """Read a piece step by step; return its sha256."""
    digest = hashlib.sha256()
    memory = memoryview(bytearray(min(piece.size, _STEP_BYTES)))
    for offset in range(0, piece.size, _STEP_BYTES):
        step = memory[: piece.size - offset]
        _read_into(piece, step, offset)
        digest.update(step)
    return digest.digest()


def _read_into(piece: _Piece, memory: memoryview, offset: int = 0) -> None:
    done = 0
    while done < memory.nbytes:
        try:
            count = os.preadv(piece.file, [memory[done:]], piece.start + offset + done)
        except OSError as error:
            raise checkpoint_refused(piece.path, f"can't be read: {error.strerror}", UNTOUCHED) from error
        if not count:
            raise checkpoint_refused(piece.path, "became shorter while it was read", CUT_OFF)
        done += count
