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
import io
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from schemas.errors import CheckpointError

HEADER_BYTES_MAX: Final = 100_000_000
"""Largest header that safetensors itself accepts."""
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
UNTOUCHED: Final = "Nothing was loaded."
CUT_OFF: Final = f"The file is still being written, or was cut off. {UNTOUCHED} Save it whole, then sync again."
_DAMAGED: Final = f"The file is damaged, or no safetensors file. {UNTOUCHED} Save the checkpoint again."
_HOSTILE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)

_Extent = Annotated[int, Meta(ge=0, le=2**63 - 1)]


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


class TensorPlace(Struct, frozen=True):
    """Where a tensor lies. start: offset of its first byte in the file."""

    path: Path
    start: int
    spec: TensorSpec


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


def read_layout(directory: Path) -> dict[str, TensorSpec]:
    """Name, dtype and shape of all tensors in the directory's `*.safetensors` files, sorted by name.

    Raises CheckpointError: no such directory, no such file in it, a file that is cut off or damaged, a tensor in two
    files, a format that is not safe to read.
    """
    return {name: place.spec for name, place in scan(directory).items()}


# --- digests ----------------------------------------------------------------------------------------------------------


# --- files ------------------------------------------------------------------------------------------------------------


def scan(directory: Path) -> dict[str, TensorPlace]:
    """Where each tensor of the directory lies, sorted by name."""
    places: dict[str, TensorPlace] = {}
    for path in safetensors_files(directory):
        for name, place in _read_header(path).items():
            if name in places:
                raise refused(
                    path,
                    f"holds the tensor {name[:200]!r}, which is in {places[name].path.name} too",
                    f"Two checkpoints lie in one directory. {UNTOUCHED} Give each a directory of its own.",
                )
            places[name] = place
    if not places:
        raise refused(directory, "holds no tensor in its *.safetensors files", UNTOUCHED)
    return {name: places[name] for name in sorted(places)}


def safetensors_files(directory: Path) -> list[Path]:
    """The directory's `*.safetensors` files, sorted by name. Raises CheckpointError when there are none."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        what = "does not exist" if error.errno == errno.ENOENT else f"can't be listed: {error.strerror}"
        todo = "Is the disk mounted on this node, and was the checkpoint saved before the sync was asked for?"
        raise refused(directory, what, f"{UNTOUCHED} {todo}") from error
    files = [directory / name for name in names if name.endswith(".safetensors")]
    if files:
        return files
    if unsafe := [name for name in names if Path(name).suffix in _UNSAFE]:
        raise refused(
            directory,
            f"holds {_some(unsafe)} and no *.safetensors file",
            f"To read that format is to unpickle it, which runs whatever its author wrote. {UNTOUCHED} Save it with "
            "safetensors.",
        )
    raise refused(
        directory,
        f"has no *.safetensors file; it holds {_some(names) or 'nothing'}",
        f"{UNTOUCHED} Is it the directory with the weights, and has the trainer finished writing?",
    )


def refused(where: Path, what: str, then: str) -> CheckpointError:
    return CheckpointError(f"checkpoint refused: {where} {what}. {then}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[io.FileIO]:
    """The file, if it is one: to open a pipe that somebody left there would wait for ever."""
    try:
        with open(path, "rb", buffering=0, opener=_open_now) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refused(path, "is not a regular file", UNTOUCHED)
            yield file
    except OSError as error:
        raise refused(path, f"can't be read: {error.strerror}", UNTOUCHED) from error


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _read_header(path: Path) -> dict[str, TensorPlace]:
    """Where each tensor of one file lies."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise refused(path, f"is {size} bytes, too short for a header", CUT_OFF)
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > HEADER_BYTES_MAX:
            what = f"claims a header of {header_size:,} bytes; at most {HEADER_BYTES_MAX:,} are read"
            raise refused(path, what, _DAMAGED)
        if 8 + header_size > size:
            raise refused(path, f"is {size:,} bytes, its header alone is {header_size:,}", CUT_OFF)
        header = file.read(header_size)
    try:
        raw = _header_decoder.decode(header)
        if (metadata := raw.pop("__metadata__", None)) is not None:
            _metadata_decoder.decode(metadata)
        entries = {name: _entry_decoder.decode(entry) for name, entry in raw.items()}
    except _HOSTILE as error:
        raise refused(path, f"has an unreadable header ({error})", _DAMAGED) from None
    data_size = _check_entries(path, entries)
    first = 8 + header_size
    if first + data_size != size:
        todo = CUT_OFF if size < first + data_size else _DAMAGED
        raise refused(path, f"is {size:,} bytes, its header promises {first + data_size:,}", todo)
    return {
        name: TensorPlace(path, first + entry.data_offsets[0], TensorSpec(entry.dtype, entry.shape))
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
        raise refused(path, f"has a tensor {name[:200]!r} that {what}", _DAMAGED)
    return end
