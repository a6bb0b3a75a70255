"""The bytes of a framed file, which is how an agent's journal lies on its disk. Pure: I/O is in `framed_file`.

    magic    "rolloutctl journal 1\\n"    what the file is, and its format
    header   a frame of kind 0          see `FileHeader`
    frames   any number

    frame    marker    3 bytes          C1 F5 FE, which no text in UTF-8 has
             kind      1 byte           what the payload holds; not looked into here
             length    4 bytes          of the payload; all numbers are little-endian
             sequence  8 bytes          one more than that of the frame before
             head      4 bytes          CRC-32 of the 16 bytes before, begun with the file's seed
             checksum  4 bytes          the same CRC-32, continued over the payload
             payload
             end       1 byte           0A, so that no whole frame ends in a zero

Theory of operation.

- A frame is a group of records that was written with one call. A kill in the middle leaves the first part of it, so it
  is in the file completely or not at all, and needs no other sign that it is the last of a group.
- What was not written to its end is normal at the end of a file, and does not count: a frame whose head is sound and
  whose rest is missing, or what a power cut filled with zeros.
- Anything else that is no frame is damage. So is what a whole frame follows, since each frame was complete before the
  next one was begun.
- Every frame has its place: one that was lost, moved or repeated has the wrong sequence, and is damage too.
- The seed is random. So neither a frame inside a payload nor one of another file, which a disk may bring back in an old
  block, is ever taken for a frame of this file.
"""

import re
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from zlib import crc32

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from schemas.errors import LogCorrupt, LogError

Read = Callable[[int, int], bytes]
"""Returns bytes of a file: from an offset, at most so many. There are fewer at the file's end."""

MAGIC: Final = b"rolloutctl journal 1\n"
PAYLOAD_MAX: Final = 1 << 28
"""Largest payload. A greater length is damage, and is not believed."""
READ_BYTES: Final = 1 << 17
"""Bytes that are read at a time."""

_MARKER: Final = b"\xc1\xf5\xfe"
_END: Final = b"\n"
_HEAD: Final = struct.Struct("<3sBIQ")
_CHECKSUMS: Final = struct.Struct("<II")
_PREFIX: Final = _HEAD.size + _CHECKSUMS.size
_AROUND: Final = _PREFIX + len(_END)
_FORMAT: Final = re.compile(rb"rolloutctl journal \d+\n")


class FileHeader(Struct, frozen=True):
    """The first frame of a file.

    Attributes:
        seed: Where each checksum of the other frames begins: 32 random bits.
        first: Sequence of the first frame after this one. It is not 1 where older frames were dropped.
        values: Given at creation.
    """

    seed: int
    first: int
    values: dict[str, str]


class FramePlace(NamedTuple):
    """Where a frame begins.

    Attributes:
        at: Bytes before it.
        sequence: Its sequence.
    """

    at: int
    sequence: int


class Frame(NamedTuple):
    """One whole frame: where it begins and what it holds, and where the next one begins."""

    place: FramePlace
    kind: int
    payload: bytes
    following: FramePlace


_encode_header = Encoder().encode
_header_decoder = Decoder(FileHeader)


def encode_frame(kind: int, sequence: int, seed: int, payload: bytes) -> bytes:
    """Return the bytes of a frame. Raises ValueError if the payload is too large."""
    if len(payload) > PAYLOAD_MAX:
        raise ValueError(f"a group of {len(payload)} bytes; the limit is {PAYLOAD_MAX}")
    head = _HEAD.pack(_MARKER, kind, len(payload), sequence)
    check = crc32(head, seed)
    return b"".join((head, _CHECKSUMS.pack(check, crc32(payload, check)), payload, _END))


def encode_start(header: FileHeader) -> bytes:
    """Return what a file begins with."""
    return MAGIC + encode_frame(0, 0, 0, _encode_header(header))


def read_start(name: str, read: Read) -> tuple[FileHeader, FramePlace]:
    """Return the header of a file, and the place of its first frame.

    Args:
        name: Of the file, for errors.
        read: Reads it.

    Raises:
        LogError: It has a newer format.
        LogCorrupt: It is no framed file, or its header is damaged.
    """
    begun = read(0, 2 * len(MAGIC))
    if not begun.startswith(MAGIC):
        if _FORMAT.match(begun):
            raise LogError(f"{name}: written by a newer rolloutctl, in another format. Update rolloutctl")
        raise LogCorrupt(f"{name}: not a journal of rolloutctl, or its start is damaged")
    frame = next(sound_frames(read, FramePlace(len(MAGIC), 0), 0), None)
    try:
        if frame is not None and frame.kind == 0:
            header = _header_decoder.decode(frame.payload)
            return header, FramePlace(frame.following.at, header.first)
    except MsgspecError:
        pass
    raise LogCorrupt(f"{name}: the header of this journal is damaged, and without it nothing in it can be checked")


def sound_frames(read: Read, place: FramePlace, seed: int) -> Iterator[Frame]:
    """Yield the frames from a place on, up to the first bytes that are not the frame that belongs there."""
    data, base = b"", place.at  # `data` begins at `base`
    while True:
        start = place.at - base
        length = _length(data, start, seed)
        if length is None or len(data) - start < _AROUND + length:
            data, base, start = read(place.at, READ_BYTES), place.at, 0
            length = _length(data, 0, seed)
            if length is not None and len(data) < _AROUND + length:
                data = read(place.at, _AROUND + length)
        payload = None if length is None else _payload(data, start, length)
        if payload is None:
            return
        _, kind, _, sequence = _HEAD.unpack_from(data, start)
        if sequence != place.sequence:
            return
        following = FramePlace(place.at + _AROUND + len(payload), sequence + 1)
        yield Frame(place, kind, payload, following)
        place = following


def whole_frames(name: str, read: Read, place: FramePlace, seed: int) -> Iterator[Frame]:
    """Yield all frames from a place on, also while they are written.

    What is behind the last one is the first part of a write that was cut off, or is still under way.

    Raises:
        LogCorrupt: After all frames before the first one that is damaged, moved or missing.
    """
    while True:
        for frame in sound_frames(read, place, seed):
            yield frame
            place = frame.following
        behind, cut_off = _look_behind(read, place.at, seed)
        if behind is None and cut_off:
            return
        # A writer may have completed the frame after it was read here, and gone on. Then it is whole by now.
        if next(sound_frames(read, place, seed), None) is None:
            follows = "" if behind is None else f", and a whole one follows at byte {behind}"
            raise LogCorrupt(
                f"{name}: group {place.sequence}, at byte {place.at}, is damaged or missing{follows}. The groups "
                "before it are readable, and nothing in the file was changed",
                place.sequence,
            )


def _look_behind(read: Read, at: int, seed: int) -> tuple[int | None, bool]:
    """Where the next whole frame begins, of whatever sequence; and if none does: whether a write was cut off here."""
    begun = read(at, _PREFIX)
    length = _length(begun, 0, seed)
    end = at
    while True:
        begin = max(at, end - len(_MARKER) + 1)  # a marker may begin in the last bytes of what was read
        data = read(begin, READ_BYTES)
        if begin + len(data) <= end:
            break
        end = begin + len(data)
        start = data.find(_MARKER)
        while start >= 0:
            if _is_whole(read, begin + start, seed):
                return begin + start, False
            start = data.find(_MARKER, start + 1)
    missing = len(begun) < _PREFIX or (length is not None and end < at + _AROUND + length)
    return None, missing or data.endswith(b"\0")


def _is_whole(read: Read, at: int, seed: int) -> bool:
    length = _length(read(at, _PREFIX), 0, seed)
    return length is not None and _payload(read(at, _AROUND + length), 0, length) is not None


def _length(data: bytes, start: int, seed: int) -> int | None:
    """The length of the payload of the frame that begins at `start`, if its head is sound."""
    if len(data) - start < _PREFIX:
        return None
    marker, _, length, _ = _HEAD.unpack_from(data, start)
    head, _ = _CHECKSUMS.unpack_from(data, start + _HEAD.size)
    sound = marker == _MARKER and length <= PAYLOAD_MAX and crc32(data[start : start + _HEAD.size], seed) == head
    return int(length) if sound else None


def _payload(data: bytes, start: int, length: int) -> bytes | None:
    """The payload of the frame with a sound head that begins at `start`, if it is there and sound."""
    head, checksum = _CHECKSUMS.unpack_from(data, start + _HEAD.size)
    begin = start + _PREFIX
    payload = data[begin : begin + length]
    sound = crc32(payload, head) == checksum and data[begin + length : begin + length + 1] == _END
    return payload if sound else None
