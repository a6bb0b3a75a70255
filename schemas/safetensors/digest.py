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
    digest = hashlib.sha256(_CONTENT)
    last: str | None = None
    for name, dtype, shape, raw in items:
        if last is not None and name <= last:
            raise ValueError(f"tensors are digested in the order of their names: {name!r} came after {last!r}")
        last = name
        data = memoryview(raw).cast("B")
        digest.update(_encode(name, dtype, shape, data.nbytes))
        digest.update(data)
    return digest.hexdigest()


def content_digest(places: Mapping[str, TensorPlace]) -> str:
    """Return the content digest, in hex, of tensors in files. Reads every byte. Raises CheckpointError."""
    digest = hashlib.sha256(_CONTENT)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for name in sorted(places):
        place = places[name]
        left = place.spec.nbytes
        digest.update(_encode(name, place.spec.dtype, place.spec.shape, left))
        with open_file(place.path) as file:
            file.seek(place.start)
            while left:
                size = file.readinto(buffer[: min(left, _CHUNK_BYTES)])
                if not size:
                    raise checkpoint_refused(place.path, "became shorter while it was read", CUT_OFF)
                digest.update(buffer[:size])
                left -= size
    return digest.hexdigest()


def _encode(name: str, dtype: str, shape: Sequence[int], nbytes: int | None = None) -> bytes:
    """The table above for one tensor, up to its data."""
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (name.encode(), dtype.encode()))
    size = b"" if nbytes is None else struct.pack("<Q", nbytes)
    return texts + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + size
