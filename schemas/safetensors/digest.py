"""Digests of a model: of its layout (names, dtypes, shapes), and of its content (the bytes as well).

A digest is sha256 over a domain string and then over each tensor in ascending order of its name. The order is that of
code points, which is also the order of the UTF-8 bytes. All integers are little endian:

    domain    b"rolloutctl layout 1\\n" or b"rolloutctl content 2\\n"
    tensor    u32 size of the name, the name in UTF-8
              u32 size of the dtype, the dtype in ASCII as safetensors calls it ("F32", "BF16", ...)
              u32 number of dimensions, then one u64 per dimension
              content only: u64 size of the data, then sha256 of each piece of PIECE_BYTES of the data, and of the rest

The data is row-major and little endian, as in the file. It is digested in pieces, so that several threads can share the
work: one core does 1.4 GB a second, and a model has hundreds.

Any engine can compute its content digest from the tensors that it holds: `tensor_digest`.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final

from schemas.safetensors.format import TensorSpec

PIECE_BYTES: Final = 16 << 20
"""Bytes of a tensor that are digested at a time. Part of the definition above."""
_THREADS_MAX: Final = 8
"""More would take cores from the engine. Two hash about as fast as a file is written."""

Bytes = bytes | bytearray | memoryview


def layout_digest(layout: Mapping[str, TensorSpec]) -> str:
    """Return the layout digest in hex. The order of `layout` does not matter."""
    digest = hashlib.sha256(b"rolloutctl layout 1\n")
    for name in sorted(layout):
        digest.update(_encode(name, layout[name].dtype, layout[name].shape))
    return digest.hexdigest()


def tensor_digest(items: Iterable[tuple[str, str, Sequence[int], Bytes]]) -> str:
    """Return the content digest, in hex, of tensors in memory.

    Args:
        items: (name, dtype as safetensors calls it, shape, raw bytes) of each tensor, sorted by name. May be lazy, so
            that an engine can fetch one tensor after the other.

    Raises:
        ValueError: The items are not sorted, or a name occurs twice.
    """
    content, last = ContentDigest(), None
    with reading_threads() as threads:
        for name, dtype, shape, raw in items:
            if last is not None and name <= last:
                raise ValueError(f"tensors are digested in the order of their names: {name!r} came after {last!r}")
            last, data = name, memoryview(raw).cast("B")
            hashes = map(_hash, _pieces(data)) if data.nbytes <= PIECE_BYTES else threads.map(_hash, _pieces(data))
            content.add_tensor(name, dtype, shape, data.nbytes, hashes)
    return content.hexdigest()


class ContentDigest:
    """A content digest that is computed tensor by tensor, from the digests of their pieces: `tensors` has these."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256(b"rolloutctl content 2\n")
        self.tensors: dict[str, bytes] = {}

    def add_tensor(self, name: str, dtype: str, shape: Sequence[int], nbytes: int, hashes: Iterator[bytes]) -> None:
        """Add the next tensor. `hashes` yields the sha256 of each of its pieces, and perhaps those of later tensors."""
        self._digest.update(_encode(name, dtype, shape, nbytes))
        self.tensors[name] = b"".join(islice(hashes, -(-nbytes // PIECE_BYTES)))
        self._digest.update(self.tensors[name])

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def reading_threads() -> ThreadPoolExecutor:
    """Return threads that share the work on one checkpoint, one for each core."""
    return ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1), "rolloutctl-checkpoint")


def _pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + PIECE_BYTES] for start in range(0, data.nbytes, PIECE_BYTES))


def _hash(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _encode(name: str, dtype: str, shape: Sequence[int], nbytes: int | None = None) -> bytes:
    """The table above for one tensor, up to its data."""
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (name.encode(), dtype.encode()))
    size = b"" if nbytes is None else struct.pack("<Q", nbytes)
    return texts + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + size
