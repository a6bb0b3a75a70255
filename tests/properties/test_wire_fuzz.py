"""Whatever bytes arrive, decoding returns a message or raises WireError."""

from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from schemas.errors import WireError
from schemas.wire import decode_command, decode_downward, decode_envelope, decode_upward, encode, parse_frames
from tests.golden.samples import SAMPLES

DECODERS: tuple[Callable[[bytes], object], ...] = (decode_upward, decode_downward, decode_envelope)
ENCODED = [encode(sample) for sample in SAMPLES]
FUZZ = settings(max_examples=1500, derandomize=True, deadline=None)


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
