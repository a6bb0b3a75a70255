"""Digests of a model: of its layout (names, dtypes, shapes), and of its content (the bytes as well).

A digest is sha256 over a domain string and then over each tensor in ascending order of its name. The order is that of
code points, which is also the order of the UTF-8 bytes. All integers are little endian:

    domain    b"rolloutctl layout 1\\n" or b"rolloutctl content 1\\n"
    tensor    u32 size of the name, the name in UTF-8
              u32 size of the dtype, the dtype in ASCII as safetensors calls it ("F32", "BF16", ...)
              u32 number of dimensions, then one u64 per dimension
              content only: u64 size of the data, then the data, row-major and little endian, as in the file

Any engine can compute its content digest from the tensors that it holds: `tensor_digest`.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from schemas.safetensors.format import CUT_OFF, TensorPlace, TensorSpec, checkpoint_refused, open_file

_CHUNK_BYTES: Final = 8 << 20  # read from a file at a time
_CONTENT: Final = b"rolloutctl content 1\n"

Bytes = bytes | bytearray | memoryview


def layout_digest(layout: Mapping[str, TensorSpec]) -> str:
    """Return the layout digest in hex. The order of `layout` does not matter."""
    digest = _Digest(b"rolloutctl layout 1\n")
    for name in sorted(layout):
        digest.add_spec(name, layout[name].dtype, layout[name].shape)
    return digest.hex()


def tensor_digest(items: Iterable[tuple[str, str, Sequence[int], Bytes]]) -> str:
    """Return the content digest, in hex, of tensors in memory.

    Args:
        items: (name, dtype as safetensors calls it, shape, raw bytes) of each tensor, sorted by name. May be lazy, so
            that an engine can fetch one tensor after the other.

    Raises:
        ValueError: The items are not sorted, or a name occurs twice.
    """
    digest = _Digest(_CONTENT)
    for name, dtype, shape, raw in items:
        data = memoryview(raw).cast("B")
        digest.add_spec(name, dtype, shape)
        digest.add_size(data.nbytes)
        digest.add(data)
    return digest.hex()


def content_digest(places: Mapping[str, TensorPlace]) -> str:
    """Return the content digest, in hex, of tensors in files. Reads every byte. Raises CheckpointError."""
    digest = _Digest(_CONTENT)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for name in sorted(places):
        place = places[name]
        digest.add_spec(name, place.spec.dtype, place.spec.shape)
        digest.add_size(place.spec.nbytes)
        with open_file(place.path) as file:
            file.seek(place.start)
            left = place.spec.nbytes
            while left:
                size = file.readinto(buffer[: min(left, _CHUNK_BYTES)])
                if not size:
                    raise checkpoint_refused(place.path, "became shorter while it was read", CUT_OFF)
                digest.add(buffer[:size])
                left -= size
    return digest.hex()


class _Digest:
    """The encoding that both digests share."""

    def __init__(self, domain: bytes) -> None:
        self._sha256 = hashlib.sha256(domain)
        self._last: str | None = None

    def add_spec(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        if self._last is not None and name <= self._last:
            raise ValueError(f"tensors are digested in the order of their names: {name!r} came after {self._last!r}")
        self._last = name
        for text in (name.encode(), dtype.encode()):
            self._sha256.update(struct.pack("<I", len(text)) + text)
        self._sha256.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))

    def add_size(self, nbytes: int) -> None:
        self._sha256.update(struct.pack("<Q", nbytes))

    def add(self, data: Bytes) -> None:
        self._sha256.update(data)

    def hex(self) -> str:
        return self._sha256.hexdigest()
