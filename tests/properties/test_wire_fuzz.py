"""Whatever bytes arrive, decoding returns a message or raises WireError."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from schemas.errors import WireError
from schemas.events import CommandReceived, HeadSeen
from schemas.identity import TIME_MAX_MS, Identity
from schemas.wire import (
    TOPIC_COMMAND,
    Page,
    decode_command,
    decode_downward,
    decode_envelope,
    decode_upward,
    encode,
    encode_header,
    event_decoder,
    parse_frames,
)
from tests.golden.samples import SAMPLES
from workers.link.frames import read_control, read_publication, read_replay
from workers.machine.decide import decide
from workers.machine.state import AgentState

DECODERS: tuple[Callable[[bytes], object], ...] = (decode_upward, decode_downward, decode_envelope)
ENCODED = [encode(sample) for sample in SAMPLES]
FUZZ = settings(max_examples=500, derandomize=True, deadline=None)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A message with some bytes changed, removed or inserted."""
    body = bytearray(draw(st.sampled_from(ENCODED)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        change = draw(st.sampled_from(("replace", "remove", "insert")))
        if change == "replace" and at < len(body):
            body[at] = draw(st.integers(0, 255))
        elif change == "remove":
            del body[at : at + draw(st.integers(1, 8))]
        else:
            body[at:at] = draw(st.binary(max_size=8))
    return bytes(body)


@FUZZ
@given(body=st.one_of(st.binary(max_size=200), damaged()))
@example(body=b"\x91" * 20_000)
@example(body=b"\xdd\xff\xff\xff\xff")
def test_a_body_is_a_message_or_a_wire_error(body: bytes) -> None:
    for decode in DECODERS:
        try:
            message = decode(body)
        except WireError:
            continue
        assert decode(encode(message)) == message


BOUNDS = (
    0,
    1,
    -1,
    63,
    64,
    65,
    2**20 - 1,
    2**20,
    TIME_MAX_MS,
    TIME_MAX_MS + 1,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**64 - 1,
)
"""Numbers at the bounds of the types of the wire, and beyond them."""
TREES = [msgspec.msgpack.decode(body, strict=False) for body in ENCODED]


@st.composite
def at_bounds(draw: st.DrawFn) -> bytes:
    """A message, some of whose numbers are at their bounds or beyond, or whose sets and texts are large."""
    tree: Any = copy.deepcopy(draw(st.sampled_from(TREES)))
    places = list(numbers_in(tree))
    for container, key in draw(st.lists(st.sampled_from(places), max_size=3)) if places else ():
        container[key] = draw(st.sampled_from(BOUNDS) | st.lists(st.sampled_from(BOUNDS), max_size=3))
    return encode(tree)


def numbers_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the place of every number below the top."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        if isinstance(value, int) and not isinstance(value, bool):
            yield tree, key
        yield from numbers_in(value)


@FUZZ
@given(body=at_bounds(), numbers=st.tuples(*[st.sampled_from(BOUNDS[:2] + (7, 2**53 - 1, 2**53, 2**63))] * 3))
def test_numbers_at_their_bounds_are_read_or_refused_and_what_is_read_can_be_recorded(
    body: bytes, numbers: tuple[int, int, int]
) -> None:
    for decode in DECODERS:
        with suppress(WireError):
            message = decode(body)
            assert decode(encode(message)) == message
    epoch, origin, seq = numbers
    frames = [TOPIC_COMMAND, encode_header(epoch, origin, seq), body]
    page = encode({"type": "replay", "records": [{"origin": origin, "seq": seq, "envelope": msgspec.Raw(body)}]})
    in_order = min(numbers) > 0 and max(numbers) < 2**53
    events: list[CommandReceived | HeadSeen] = []
    with suppress(WireError):
        events.append(read_publication(frames, "run-1", 5))
        head, message = read_control([encode_header(epoch, 0, seq), page])
        assert isinstance(message, Page)
        events += read_replay(head, message, "run-1", 5)
    for event in events:
        assert event_decoder.decode(encode(event)) == event, "an agent could not restart from its journal"
        identity = Identity(replica=0, node_rank=0)
        state, _ = decide(AgentState(identity=identity, snapshot_epoch=epoch, epoch=epoch, seq=seq - 1), event)
        assert state.seq == seq, "it moves the position, whatever is in it"
    assert len(events) == 2 * in_order or b"run-1" not in body


@FUZZ
@given(frames=st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(ENCODED), damaged()), max_size=4))
def test_frames_are_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    try:
        head, body = parse_frames(frames)
    except WireError:
        return
    assert body == frames[1] and min(head.epoch, head.origin, head.seq) >= 0


@FUZZ
@given(body=st.one_of(st.binary(max_size=200), damaged()))
def test_a_command_never_raises(body: bytes) -> None:
    decode_command(Raw(body))


@FUZZ
@given(number=st.integers(0, len(SAMPLES) - 1))
def test_encoding_is_the_same_each_time(number: int) -> None:
    assert encode(SAMPLES[number]) == ENCODED[number]
