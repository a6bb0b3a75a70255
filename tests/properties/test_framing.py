"""A framed file that was cut, flipped, zeroed, moved or repeated never yields a wrong group, nor hides a loss."""

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.carriers import framing
from schemas.carriers.framing import (
    FileHeader,
    Frame,
    FramePlace,
    encode_frame,
    encode_start,
    read_start,
    sound_frames,
    whole_frames,
)
from schemas.errors import LogCorrupt, LogError

Group = tuple[int, bytes]

SEED = 0x5EED5EED
payloads = st.binary(max_size=60) | st.sampled_from([b"", b"\0", b"\n", bytes(40), b"\xc1\xf5\xfe", b"x" * 5000])
groups = st.lists(st.tuples(st.integers(1, 255), payloads), min_size=1, max_size=6)


@pytest.fixture(autouse=True, params=[1 << 17, 30], ids="reads of {} bytes".format)
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few bytes are read at a time."""
    monkeypatch.setattr(framing, "READ_BYTES", request.param)


class File(NamedTuple):
    """The bytes of a file, and where each of its groups begins and ends."""

    data: bytes
    bounds: list[int]

    @property
    def first(self) -> int:
        return self.bounds[0]


def written(content: list[Group], first: int = 1, seed: int = SEED) -> File:
    data = encode_start(FileHeader(seed, first, {"journal": "j"}))
    bounds = [len(data)]
    for sequence, (kind, payload) in enumerate(content, first):
        data += encode_frame(kind, sequence, seed, payload)
        bounds.append(len(data))
    return File(data, bounds)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda at, count: data[at : at + count]


def read(data: bytes) -> tuple[list[Group], LogCorrupt | None]:
    """The groups that can be read, and the damage behind them."""
    found: list[Frame] = []
    header, place = read_start("file", reader(data))
    try:
        for frame in whole_frames("file", reader(data), place, header.seed):
            found.append(frame)  # noqa: PERF402
    except LogCorrupt as damage:
        return [(frame.kind, frame.payload) for frame in found], damage
    return [(frame.kind, frame.payload) for frame in found], None


@given(groups, st.integers(1, 1 << 40))
def test_what_was_written_is_read(content: list[Group], first: int) -> None:
    assert read(written(content, first).data) == (content, None)


@given(groups, st.data())
def test_a_write_that_was_cut_off_does_not_count_and_is_no_damage(content: list[Group], data: st.DataObject) -> None:
    file = written(content)
    cut = data.draw(st.integers(file.first, len(file.data)))
    whole = sum(bound <= cut for bound in file.bounds[1:])
    assert read(file.data[:cut]) == (content[:whole], None)


@given(groups, st.data(), st.integers(1, 5000))
def test_zeros_at_the_end_are_no_damage(content: list[Group], data: st.DataObject, zeros: int) -> None:
    """A power cut leaves them: the file has its length already, and not yet its content."""
    file = written(content)
    cut = data.draw(st.integers(file.first, len(file.data)))
    whole = sum(bound <= cut for bound in file.bounds[1:])
    assert read(file.data[:cut] + bytes(zeros)) == (content[:whole], None)


@given(groups, st.data())
def test_a_flipped_bit_is_damage_of_its_group(content: list[Group], data: st.DataObject) -> None:
    file = written(content)
    at = data.draw(st.integers(file.first, len(file.data) - 1))
    spoiled = bytearray(file.data)
    spoiled[at] ^= 1 << data.draw(st.integers(0, 7))
    hit = sum(bound <= at for bound in file.bounds[1:])
    found, damage = read(bytes(spoiled))
    assert found == content[:hit]
    assert damage is not None and damage.position == hit + 1
    assert f"group {hit + 1}, at byte {file.bounds[hit]}, is damaged" in str(damage)


@given(groups, st.data())
def test_an_overwritten_range_is_damage_unless_it_reaches_the_end(content: list[Group], data: st.DataObject) -> None:
    file = written(content)
    begin = data.draw(st.integers(file.first, len(file.data) - 1))
    end = data.draw(st.integers(begin + 1, len(file.data)))
    what = data.draw(st.binary(min_size=end - begin, max_size=end - begin) | st.just(bytes(end - begin)))
    spoiled = file.data[:begin] + what + file.data[end:]
    changed = next((at for at in range(begin, end) if spoiled[at] != file.data[at]), len(file.data))
    hit = sum(bound <= changed for bound in file.bounds[1:])
    found, damage = read(spoiled)
    assert found == content[:hit]
    if hit < len(content) and end < len(file.data):
        assert damage is not None and damage.position == hit + 1


@given(groups, st.data())
def test_a_group_that_was_lost_moved_or_repeated_is_damage(content: list[Group], data: st.DataObject) -> None:
    file = written(content)
    frames = [file.data[begin:end] for begin, end in zip(file.bounds, file.bounds[1:], strict=False)]
    order = data.draw(st.lists(st.integers(0, len(frames) - 1), max_size=8))
    kept = next((at for at, number in enumerate(order) if at != number), len(order))
    found, damage = read(file.data[: file.first] + b"".join(frames[number] for number in order))
    assert found == content[:kept]
    assert (damage is None) == (kept == len(order))


@given(groups, groups, st.data())
def test_groups_of_another_file_are_never_taken_for_its_own(
    content: list[Group], others: list[Group], data: st.DataObject
) -> None:
    """They may lie in a block that a disk brings back, or inside a payload."""
    file, other = written(content), written(others, len(content) + 1, SEED + 1)
    found, damage = read(file.data + other.data[other.first :])
    assert found == content and damage is not None
    inside = written([(1, other.data)])
    cut = data.draw(st.integers(inside.first, len(inside.data) - 1))
    assert read(inside.data[:cut]) == ([], None)


@given(groups, st.binary(min_size=1, max_size=3000))
def test_garbage_behind_the_groups_changes_none_of_them(content: list[Group], garbage: bytes) -> None:
    found, damage = read(written(content).data + garbage)
    assert found == content
    if len(garbage) > 40 and not garbage.endswith(b"\0"):
        assert damage is not None and damage.position == len(content) + 1


@given(groups, st.data())
def test_a_damaged_start_is_named_and_nothing_is_read(content: list[Group], data: st.DataObject) -> None:
    file = written(content)
    spoiled = bytearray(file.data)
    spoiled[data.draw(st.integers(0, file.first - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(LogError, match=r"not a journal|header of this journal is damaged|newer rolloutctl"):
        read(bytes(spoiled))
    with pytest.raises(LogCorrupt):
        read(file.data[: data.draw(st.integers(0, file.first - 1))])


def test_a_huge_length_is_not_believed() -> None:
    asked: list[int] = []

    def read_some(at: int, count: int) -> bytes:
        asked.append(count)
        return data[at : at + count]

    file = written([(1, b"a"), (1, b"b")])
    head = framing._HEAD.pack(framing._MARKER, 1, 0xFFFFFFFF, 3)
    check = crc32(head, SEED)
    data = file.data + head + framing._CHECKSUMS.pack(check, check)
    frames = list(sound_frames(read_some, FramePlace(file.first, 1), SEED))
    assert [frame.payload for frame in frames] == [b"a", b"b"]
    assert max(asked) <= max(framing.READ_BYTES, 100)
    with pytest.raises(ValueError, match="the limit is"):
        encode_frame(1, 1, SEED, bytes(framing.PAYLOAD_MAX + 1))


def test_a_group_that_is_completed_while_it_is_read_is_no_damage() -> None:
    """A reader finds half of a group, and, when it looks behind it, the whole and the next one."""
    file = written([(1, b"a"), (1, b"b" * 100), (1, b"c")])
    sizes = iter([file.bounds[1] + 50] * 5)

    def read_later(at: int, count: int) -> bytes:
        return file.data[: next(sizes, len(file.data))][at : at + count]

    frames = list(whole_frames("file", read_later, FramePlace(file.first, 1), SEED))
    assert [frame.payload for frame in frames] == [b"a", b"b" * 100, b"c"]


def test_a_file_of_a_newer_format_asks_for_an_update() -> None:
    with pytest.raises(LogError, match="newer rolloutctl.*Update"):
        read_start("file", reader(b"rolloutctl journal 12\nwhatever"))
