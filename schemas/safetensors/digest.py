"""Digests of a model's layout and of its content."""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

from schemas.safetensors.format import CHUNK_BYTES, CUT_OFF, TensorPlace, TensorSpec, open_file, refused

Bytes = bytes | bytearray | memoryview


def layout_digest(layout: Mapping[str, TensorSpec]) -> str:
    """sha256 over name, dtype and shape of all tensors, as the head of this file defines it. Any order."""
    digest = _Digest(b"rolloutctl layout 1\n")
    for name in sorted(layout):
        digest.describe(name, layout[name].dtype, layout[name].shape)
    return digest.hex()


def tensor_digest(items: Iterable[tuple[str, str, Sequence[int], Bytes]]) -> str:
    """sha256 over name, dtype, shape and bytes of all tensors, as the head of this file defines it.

    items: (name, dtype as safetensors calls it, shape, raw bytes), sorted by name, so that an engine can fetch one
    tensor after the other. Raises ValueError when they are not sorted, or one comes twice.
    """
    digest = _Digest(b"rolloutctl content 1\n")
    for name, dtype, shape, raw in items:
        data = memoryview(raw).cast("B")
        digest.describe(name, dtype, shape)
        digest.measure(data.nbytes)
        digest.feed(data)
    return digest.hex()


class _Digest:
    """The encoding that both digests share."""

    def __init__(self, domain: bytes) -> None:
        self._sha256 = hashlib.sha256(domain)
        self._last: str | None = None

    def describe(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        if self._last is not None and name <= self._last:
            raise ValueError(f"tensors are digested in the order of their names: {name!r} came after {self._last!r}")
        self._last = name
        for word in (name.encode(), dtype.encode()):
            self._sha256.update(struct.pack("<I", len(word)) + word)
        self._sha256.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))

    def measure(self, nbytes: int) -> None:
        self._sha256.update(struct.pack("<Q", nbytes))

    def feed(self, data: Bytes) -> None:
        self._sha256.update(data)

    def hex(self) -> str:
        return self._sha256.hexdigest()


def content_digest(places: Mapping[str, TensorPlace]) -> str:
    digest = _Digest(b"rolloutctl content 1\n")
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name in sorted(places):
        place = places[name]
        digest.describe(name, place.spec.dtype, place.spec.shape)
        digest.measure(place.spec.nbytes)
        with open_file(place.path) as file:
            file.seek(place.start)
            left = place.spec.nbytes
            while left:
                if not (got := file.readinto(buffer[: min(left, CHUNK_BYTES)])):
                    raise refused(place.path, "became shorter while it was read", CUT_OFF)
                digest.feed(buffer[:got])
                left -= got
    return digest.hex()
