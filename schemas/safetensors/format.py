"""What a checkpoint on a disk holds, read from the headers of its safetensors files, without torch and without trust.

The trainer builds a manifest of what it wrote; each agent checks its own view of the disk against it before the engine
is touched. A check reads headers only, some kilobytes whatever the size of the model, unless the manifest carries a
digest of the content: then every byte is read once, in chunks.

The format (safetensors 0.8): 8 bytes little endian, the size of the header; the header, a JSON object that gives dtype,
shape and place of each tensor; the data. A file is accepted when it is exactly these three, and its tensors fill the
data without gap or overlap. Pickled formats are refused by name: to read them is to run what their author wrote.

The digests. sha256, as 64 lower-case hex digits, over a domain word and then each tensor in ascending order of its name
(by code points, which is the order of the UTF-8 bytes too). Every integer is little endian:

    domain   b"rolloutctl layout 1\\n" or b"rolloutctl content 1\\n"
    tensor   u32 bytes of the name, the name in UTF-8
             u32 bytes of the dtype, the dtype in ASCII as safetensors calls it ("F32", "BF16", ...)
             u32 number of dimensions, then one u64 per dimension
             content only: u64 bytes of the data, then the data, row-major and little endian, as in the file

Any engine can compute the second from the tensors that it holds: `tensor_digest`.
"""

import contextlib
import errno
import hashlib
import io
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from schemas.commands import Manifest
from schemas.errors import CheckpointError

HEADER_BYTES_MAX: Final = 100_000_000
"""Largest header that safetensors itself accepts."""
PATH_BYTES_MAX: Final = 512
CHUNK_BYTES: Final = 8 << 20
"""Read at a time for a digest of the content."""

DTYPE_BITS: Final[Mapping[str, int]] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""The dtypes of safetensors 0.8, and the bits of one element."""

_UNSAFE: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
_UNTOUCHED: Final = "Nothing was loaded."
_CUT_OFF: Final = f"The file is still being written, or was cut off. {_UNTOUCHED} Save it whole, then sync again."
_DAMAGED: Final = f"The file is damaged, or no safetensors file. {_UNTOUCHED} Save the checkpoint again."
_HOSTILE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)

_Extent = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Bytes = bytes | bytearray | memoryview


class TensorSpec(Struct, frozen=True):
    """Type and shape of one tensor. dtype: as safetensors calls it.   shape: empty for a scalar."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data, row-major without padding."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor, as a file's header describes it."""

    dtype: str
    shape: Annotated[tuple[_Extent, ...], Meta(max_length=32)]
    data_offsets: tuple[_Extent, _Extent]


class _Place(Struct, frozen=True):
    """Where a tensor lies. start: offset of its first byte in the file."""

    path: Path
    start: int
    spec: TensorSpec


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


def resolve(root: Path, relative: str) -> Path:
    """The place below `root` that a path in a command means. It need not exist yet.

    Raises CheckpointError for a path that is empty, absolute, holds `..` or a NUL, begins with `~`, is longer than
    PATH_BYTES_MAX or leads out of the root through a symbolic link.
    """
    why: str | None = None
    try:
        size = len(relative.encode())
    except UnicodeEncodeError:
        size, why = 0, "is not valid text"
    if size > PATH_BYTES_MAX:
        why = f"has {size} bytes, and at most {PATH_BYTES_MAX} are allowed"
    elif not relative.strip():
        why = "is empty"
    elif "\0" in relative:
        why = "holds a NUL"
    elif relative.startswith(("/", "~")):
        why = "is not relative"
    elif ".." in relative.split("/"):
        why = "holds `..`"
    if why is not None:
        raise CheckpointError(
            f"path refused: {relative[:PATH_BYTES_MAX]!r} {why}. Nothing was touched. Give a path relative to {root}, "
            "the root that is configured on this side."
        )
    try:
        base = root.resolve()
        place = (base / relative).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise CheckpointError(f"path refused: {relative!r} below {root}: {error}. Nothing was touched.") from error
    if not place.is_relative_to(base):
        raise CheckpointError(
            f"path refused: {relative!r} leads to {place}, outside {base}, through a symbolic link. Nothing was "
            "touched. Put the files below the root, or configure the root where they are."
        )
    return place


def read_layout(directory: Path) -> dict[str, TensorSpec]:
    """Name, dtype and shape of all tensors in the directory's `*.safetensors` files, sorted by name.

    Raises CheckpointError: no such directory, no such file in it, a file that is cut off or damaged, a tensor in two
    files, a format that is not safe to read.
    """
    return {name: place.spec for name, place in _scan(directory).items()}


def build_manifest(directory: Path, content: bool) -> Manifest:
    """What the directory holds now. content: also digest every byte of it (about a second per gigabyte).

    Raises what `read_layout` raises.
    """
    places = _scan(directory)
    return Manifest(
        tensors=len(places),
        nbytes=sum(place.spec.nbytes for place in places.values()),
        layout=layout_digest({name: place.spec for name, place in places.items()}),
        content=_content_digest(places) if content else None,
    )


def manifest_of(layout: Mapping[str, TensorSpec]) -> Manifest:
    """The manifest of tensors that lie in no file, e.g. a model in the trainer's memory that it will broadcast."""
    return Manifest(
        tensors=len(layout), nbytes=sum(one.nbytes for one in layout.values()), layout=layout_digest(layout)
    )


def check(directory: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the directory holds what the manifest says. Returns without a word when it does.

    The content is compared when the manifest has a digest of it.
    """
    places = _scan(directory)
    check_layout(directory, {name: place.spec for name, place in places.items()}, manifest)
    if manifest.content is not None and (seen := _content_digest(places)) != manifest.content:
        raise content_differs(directory, seen, manifest)


def check_layout(directory: Path, layout: Mapping[str, TensorSpec], manifest: Manifest) -> None:
    """Raise CheckpointError unless a layout read from the directory is the manifest's. Names what differs first."""
    nbytes = sum(spec.nbytes for spec in layout.values())
    if len(layout) != manifest.tensors:
        what = f"holds {len(layout):,} tensors, the trainer's manifest has {manifest.tensors:,}"
    elif nbytes != manifest.nbytes:
        what = f"holds {nbytes:,} bytes of tensors, the trainer's manifest has {manifest.nbytes:,}"
    elif (seen := layout_digest(layout)) != manifest.layout:
        what = (
            f"holds {len(layout):,} tensors of {nbytes:,} bytes as the trainer's manifest says, but a name, dtype or "
            f"shape differs (layout {seen[:12]}, the manifest has {manifest.layout[:12]})"
        )
    else:
        return
    raise _refused(
        directory,
        what,
        f"{_UNTOUCHED} It is another model's, a file of it is missing, or this node sees an older state of the disk: "
        "look at `source`, and sync again.",
    )


def require_same_model(directory: Path, held: Mapping[str, TensorSpec], offered: Mapping[str, TensorSpec]) -> None:
    """Raise CheckpointError unless tensors of one layout can take the place of another's: same names, dtypes, shapes.

    held: what the engine's model is made of.   offered: what was read from the directory.
    """
    wrong = []
    for name in sorted(held.keys() | offered.keys()):
        if name not in offered:
            wrong.append(f"it lacks {name} ({held[name]})")
        elif name not in held:
            wrong.append(f"it has {name} ({offered[name]}), which the model has not")
        elif held[name] != offered[name]:
            wrong.append(f"{name} is {offered[name]}, and the model's is {held[name]}")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise _refused(directory, f"is of another model: {'; '.join(wrong[:3])}{more}", _UNTOUCHED)


def content_differs(directory: Path, seen: str, manifest: Manifest) -> CheckpointError:
    """The error for tensors whose digest is not the manifest's."""
    return _refused(
        directory,
        f"has the right tensors with other values: content {seen[:12]}, the trainer's manifest has "
        f"{(manifest.content or '')[:12]}",
        f"{_UNTOUCHED} It was written again after the manifest was made, or this node sees an older state of the disk: "
        "build the manifest again, and sync again.",
    )


# --- digests ----------------------------------------------------------------------------------------------------------


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


def _content_digest(places: Mapping[str, _Place]) -> str:
    digest = _Digest(b"rolloutctl content 1\n")
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name in sorted(places):
        place = places[name]
        digest.describe(name, place.spec.dtype, place.spec.shape)
        digest.measure(place.spec.nbytes)
        with _opened(place.path) as file:
            file.seek(place.start)
            left = place.spec.nbytes
            while left:
                if not (got := file.readinto(buffer[: min(left, CHUNK_BYTES)])):
                    raise _refused(place.path, "became shorter while it was read", _CUT_OFF)
                digest.feed(buffer[:got])
                left -= got
    return digest.hex()


# --- files ------------------------------------------------------------------------------------------------------------


def _scan(directory: Path) -> dict[str, _Place]:
    """Where each tensor of the directory lies, sorted by name."""
    places: dict[str, _Place] = {}
    for path in safetensors_files(directory):
        for name, place in _read_header(path).items():
            if name in places:
                raise _refused(
                    path,
                    f"holds the tensor {name[:200]!r}, which is in {places[name].path.name} too",
                    f"Two checkpoints lie in one directory. {_UNTOUCHED} Give each a directory of its own.",
                )
            places[name] = place
    if not places:
        raise _refused(directory, "holds no tensor in its *.safetensors files", _UNTOUCHED)
    return {name: places[name] for name in sorted(places)}


def safetensors_files(directory: Path) -> list[Path]:
    """The directory's `*.safetensors` files, sorted by name. Raises CheckpointError when there are none."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        what = "does not exist" if error.errno == errno.ENOENT else f"can't be listed: {error.strerror}"
        todo = "Is the disk mounted on this node, and was the checkpoint saved before the sync was asked for?"
        raise _refused(directory, what, f"{_UNTOUCHED} {todo}") from error
    files = [directory / name for name in names if name.endswith(".safetensors")]
    if files:
        return files
    if unsafe := [name for name in names if Path(name).suffix in _UNSAFE]:
        raise _refused(
            directory,
            f"holds {_some(unsafe)} and no *.safetensors file",
            f"To read that format is to unpickle it, which runs whatever its author wrote. {_UNTOUCHED} Save it with "
            "safetensors.",
        )
    raise _refused(
        directory,
        f"has no *.safetensors file; it holds {_some(names) or 'nothing'}",
        f"{_UNTOUCHED} Is it the directory with the weights, and has the trainer finished writing?",
    )


def _refused(where: Path, what: str, then: str) -> CheckpointError:
    return CheckpointError(f"checkpoint refused: {where} {what}. {then}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.FileIO]:
    """The file, if it is one: to open a pipe that somebody left there would wait for ever."""
    try:
        with open(path, "rb", buffering=0, opener=_open_now) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _refused(path, "is not a regular file", _UNTOUCHED)
            yield file
    except OSError as error:
        raise _refused(path, f"can't be read: {error.strerror}", _UNTOUCHED) from error


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _read_header(path: Path) -> dict[str, _Place]:
    """Where each tensor of one file lies."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _refused(path, f"is {size} bytes, too short for a header", _CUT_OFF)
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > HEADER_BYTES_MAX:
            what = f"claims a header of {header_size:,} bytes; at most {HEADER_BYTES_MAX:,} are read"
            raise _refused(path, what, _DAMAGED)
        if 8 + header_size > size:
            raise _refused(path, f"is {size:,} bytes, its header alone is {header_size:,}", _CUT_OFF)
        header = file.read(header_size)
    try:
        raw = _header_decoder.decode(header)
        if (metadata := raw.pop("__metadata__", None)) is not None:
            _metadata_decoder.decode(metadata)
        entries = {name: _entry_decoder.decode(entry) for name, entry in raw.items()}
    except _HOSTILE as error:
        raise _refused(path, f"has an unreadable header ({error})", _DAMAGED) from None
    data_size = _check_entries(path, entries)
    first = 8 + header_size
    if first + data_size != size:
        todo = _CUT_OFF if size < first + data_size else _DAMAGED
        raise _refused(path, f"is {size:,} bytes, its header promises {first + data_size:,}", todo)
    return {
        name: _Place(path, first + entry.data_offsets[0], TensorSpec(entry.dtype, entry.shape))
        for name, entry in entries.items()
    }


def _check_entries(path: Path, entries: Mapping[str, _Entry]) -> int:
    """Check dtypes, sizes and places; return the bytes of data that the file must have."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        bits = DTYPE_BITS.get(entry.dtype)
        if bits is None:
            what = f"has the unknown dtype {entry.dtype[:40]!r}"
        elif entry.data_offsets[0] != end:
            what = f"begins at byte {entry.data_offsets[0]:,} of the data, where {end:,} is next: a gap or an overlap"
        elif (needed := math.prod(entry.shape) * bits) != (entry.data_offsets[1] - end) * 8:
            what = (
                f"is {TensorSpec(entry.dtype, entry.shape)}, which takes {-(-needed // 8):,} bytes, and has "
                f"{entry.data_offsets[1] - end:,}"
            )
        else:
            end = entry.data_offsets[1]
            continue
        raise _refused(path, f"has a tensor {name[:200]!r} that {what}", _DAMAGED)
    return end
