"""Reads the tensors of a checkpoint directory from the headers of its safetensors files, without torch.

Nothing in a file is trusted. A file (safetensors 0.8) has three parts, and is accepted only if they are all there:

    8 bytes    size of the header, little endian
    header     JSON object with dtype, shape and offsets of each tensor
    data       the tensors, without gap or overlap, up to the end of the file

A file that ends too early is reported as cut off, because it is often still being written; any other fault means that
it is damaged. Pickled formats are refused by name: reading one runs whatever code its author put into it.
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
from schemas.wire import DECODE_ERRORS

HEADER_BYTES_MAX: Final = 100_000_000
"""Largest header that the safetensors library itself accepts."""
KEYS_MAX: Final = 2_000_000
"""Keys in a header, roughly: a tensor has four, so this is half a million tensors in one file."""

DTYPE_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits per element of each dtype of safetensors 0.8."""

_UNSAFE: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
UNTOUCHED: Final = "Nothing was loaded."
CUT_OFF: Final = f"The file is still being written, or was cut off. {UNTOUCHED} Save it whole, then sync again."
_DAMAGED: Final = f"The file is damaged, or no safetensors file. {UNTOUCHED} Save the checkpoint again."

_Extent = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class TensorSpec(Struct, frozen=True):
    """Type and shape of one tensor.

    Attributes:
        dtype: Name of the dtype in safetensors, such as `BF16`.
        shape: Empty for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data, without padding."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


class TensorPlace(Struct, frozen=True):
    """Where the data of a tensor is: `start` is the offset of its first byte in the file."""

    path: Path
    start: int
    spec: TensorSpec


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the header of a file. Offsets are counted from the start of the data."""

    dtype: str
    shape: Annotated[tuple[_Extent, ...], Meta(max_length=32)]
    data_offsets: tuple[_Extent, _Extent]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


def read_layout(directory: Path) -> dict[str, TensorSpec]:
    """Return dtype and shape of all tensors in the directory's `*.safetensors` files, sorted by name.

    Raises:
        CheckpointError: The directory or its safetensors files are missing, a file is cut off or damaged, a tensor is
            in two files, or the format is unsafe to read.
    """
    return {name: place.spec for name, place in find_tensors(directory).items()}


def find_tensors(directory: Path) -> dict[str, TensorPlace]:
    """Return where each tensor of the directory is, sorted by name. Raises CheckpointError, as `read_layout`."""
    places: dict[str, TensorPlace] = {}
    for path in safetensors_files(directory):
        for name, place in _read_header(path).items():
            if name in places:
                raise checkpoint_refused(
                    path,
                    f"holds the tensor {name[:200]!r}, which is in {places[name].path.name} too",
                    f"Two checkpoints share this directory. {UNTOUCHED} Give each a directory of its own.",
                )
            places[name] = place
    if not places:
        raise checkpoint_refused(directory, "holds no tensor in its *.safetensors files", UNTOUCHED)
    return {name: places[name] for name in sorted(places)}


def safetensors_files(directory: Path) -> list[Path]:
    """Return the directory's `*.safetensors` files, sorted by name. Raises CheckpointError if there are none."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        what = "does not exist" if error.errno == errno.ENOENT else f"can't be listed: {error.strerror}"
        advice = "Check that the disk is mounted on this node, and that the checkpoint is saved before the sync starts."
        raise checkpoint_refused(directory, what, f"{UNTOUCHED} {advice}") from error
    files = [directory / name for name in names if name.endswith(".safetensors")]
    if files:
        return files
    if unsafe := [name for name in names if Path(name).suffix in _UNSAFE]:
        raise checkpoint_refused(
            directory,
            f"holds {_list(unsafe)} and no *.safetensors file",
            f"That format is pickled, and reading it runs any code inside. {UNTOUCHED} Save it with safetensors.",
        )
    raise checkpoint_refused(
        directory,
        f"has no *.safetensors file; it holds {_list(names) or 'nothing'}",
        f"{UNTOUCHED} Check that this is the directory with the weights, and that the trainer has finished writing.",
    )


def checkpoint_refused(path: Path, what: str, advice: str) -> CheckpointError:
    """Return the error for a file or directory: what is wrong with it, then what to do."""
    return CheckpointError(f"checkpoint refused: {path} {what}. {advice}")


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[io.FileIO]:
    """Open a regular file for reading. Never blocks, as opening a pipe would. Raises CheckpointError."""
    try:
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        with open(path, "rb", buffering=0, opener=lambda name, given: os.open(name, given | flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise checkpoint_refused(path, "is not a regular file", UNTOUCHED)
            yield file
    except OSError as error:
        raise checkpoint_refused(path, f"can't be read: {error.strerror}", UNTOUCHED) from error


def _read_header(path: Path) -> dict[str, TensorPlace]:
    """Return where each tensor of one file is."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise checkpoint_refused(path, f"is {size} bytes, too short for a header", CUT_OFF)
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > HEADER_BYTES_MAX:
            what = f"claims a header of {header_size:,} bytes, and at most {HEADER_BYTES_MAX:,} are allowed"
            raise checkpoint_refused(path, what, _DAMAGED)
        if 8 + header_size > size:
            raise checkpoint_refused(path, f"is {size:,} bytes, its header alone is {header_size:,}", CUT_OFF)
        header = file.read(header_size)
    entries = _parse_header(path, header)
    data_start = 8 + header_size
    promised = data_start + _check_entries(path, entries)
    if promised != size:
        advice = CUT_OFF if size < promised else _DAMAGED
        raise checkpoint_refused(path, f"is {size:,} bytes, its header promises {promised:,}", advice)
    return {
        name: TensorPlace(path, data_start + entry.data_offsets[0], TensorSpec(entry.dtype, entry.shape))
        for name, entry in entries.items()
    }


def _parse_header(path: Path, header: bytes) -> dict[str, _Entry]:
    if header.count(b":") > KEYS_MAX:  # counted first: in memory, the smallest entry is thirty times as large
        raise checkpoint_refused(path, f"has a header of more than {KEYS_MAX:,} keys", _DAMAGED)
    try:
        raw = _header_decoder.decode(header)
        if (metadata := raw.pop("__metadata__", None)) is not None:
            _metadata_decoder.decode(metadata)
        return {name: _entry_decoder.decode(entry) for name, entry in raw.items()}
    except DECODE_ERRORS as error:
        raise checkpoint_refused(path, f"has an unreadable header ({error})", _DAMAGED) from None


def _check_entries(path: Path, entries: Mapping[str, _Entry]) -> int:
    """Check dtypes, sizes and offsets; return the bytes of data that the file must have."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if (problem := _problem(entry, end)) is not None:
            raise checkpoint_refused(path, f"has a tensor {name[:200]!r} that {problem}", _DAMAGED)
        end = entry.data_offsets[1]
    return end


def _problem(entry: _Entry, expected: int) -> str | None:
    """What is wrong with an entry whose data should start at `expected`."""
    start, end = entry.data_offsets
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        return f"has the unknown dtype {entry.dtype[:40]!r}"
    if start != expected:
        return f"begins at byte {start:,} of the data instead of byte {expected:,}: a gap or an overlap"
    needed = math.prod(entry.shape) * bits
    if needed != (end - start) * 8:
        spec = TensorSpec(entry.dtype, entry.shape)
        return f"is {spec}, which takes {-(-needed // 8):,} bytes, but has {end - start:,}"
    return None
