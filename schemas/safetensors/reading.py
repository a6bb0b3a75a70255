"""Reads the tensors of checkpoint files: into memory, into a digest, or into both in one pass, on several threads.

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
    """A piece of a tensor in a file, and the memory that it goes to, if any."""

    path: Path
    file: int
    start: int
    size: int
    memory: memoryview | None


def content_digest(places: Mapping[str, TensorPlace]) -> ContentDigest:
    """Return the content digest of tensors in files. Reads every byte. Raises CheckpointError."""
    return _read_and_hash(places, {})


def read_tensors(places: Mapping[str, TensorPlace], memory: Mapping[str, memoryview], *, content: bool) -> str | None:
    """Read tensors into memory. Raises CheckpointError; what is in memory then is undefined.

    Returns:
        With `content`, the content digest of what is in memory now, in hex.
    """
    if content:
        return _read_and_hash(places, memory).hexdigest()
    with ExitStack() as stack:
        pieces = list(_pieces(places, memory, stack))
        deque(stack.enter_context(reading_threads()).map(_read, pieces), maxlen=0)
    return None


def _read_and_hash(places: Mapping[str, TensorPlace], memory: Mapping[str, memoryview]) -> ContentDigest:
    digest = ContentDigest()
    with ExitStack() as stack:
        pieces = list(_pieces(places, memory, stack))
        hashes = stack.enter_context(reading_threads()).map(_hash, pieces)
        for name in sorted(places):
            spec = places[name].spec
            digest.add_tensor(name, spec.dtype, spec.shape, spec.nbytes, hashes)
    return digest


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


def _pieces(places: Mapping[str, TensorPlace], memory: Mapping[str, memoryview], stack: ExitStack) -> Iterator[_Piece]:
    """Yield the pieces of all tensors, in the order of a digest. Their files stay open until the stack is closed."""
    files: dict[Path, int] = {}
    for name in sorted(places):
        path, start, spec = places[name].path, places[name].start, places[name].spec
        if path not in files:
            files[path] = stack.enter_context(open_file(path)).fileno()
        held = memory.get(name)
        for offset in range(0, spec.nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, spec.nbytes - offset)
            into = None if held is None else held[offset : offset + size]
            yield _Piece(path, files[path], start + offset, size, into)


def _read(piece: _Piece) -> None:
    assert piece.memory is not None
    _read_into(piece, piece.memory, 0)


def _hash(piece: _Piece) -> bytes:
    """Read a piece step by step; return its sha256."""
    digest = hashlib.sha256()
    memory = piece.memory if piece.memory is not None else memoryview(bytearray(min(piece.size, _STEP_BYTES)))
    for offset in range(0, piece.size, _STEP_BYTES):
        size = min(_STEP_BYTES, piece.size - offset)
        step = memory[:size] if piece.memory is None else memory[offset : offset + size]
        _read_into(piece, step, offset)
        digest.update(step)
    return digest.digest()


def _read_into(piece: _Piece, memory: memoryview, offset: int) -> None:
    done = 0
    while done < memory.nbytes:
        try:
            count = os.preadv(piece.file, [memory[done:]], piece.start + offset + done)
        except OSError as error:
            raise checkpoint_refused(piece.path, f"can't be read: {error.strerror}", UNTOUCHED) from error
        if not count:
            raise checkpoint_refused(piece.path, "became shorter while it was read", CUT_OFF)
        done += count
