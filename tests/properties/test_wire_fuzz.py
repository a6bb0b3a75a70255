"""Whatever bytes arrive, the guard says WireError or gives a message, and nothing else comes of it."""

from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from schemas.errors import WireError
from schemas.wire import decode_command, decode_downward, decode_envelope, decode_upward, encode, parse_frames
from tests.golden.samples import SAMPLES

GUARDS: tuple[Callable[[bytes], object], ...] = (decode_upward, decode_downward, decode_envelope)
ENCODED = [encode(one) for one in SAMPLES]
FUZZ = settings(max_examples=1500, derandomize=True, deadline=None)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A message of ours with some bytes changed, cut off, or put in."""
    body = bytearray(draw(st.sampled_from(ENCODED)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        what = draw(st.sampled_from(("change", "cut", "insert")))
        if what == "change" and at < len(body):
            body[at] = draw(st.integers(0, 255))
        elif what == "cut":
            del body[at : at + draw(st.integers(1, 8))]
        else:
            body[at:at] = draw(st.binary(max_size=8))
    return bytes(body)


@FUZZ
@given(body=st.one_of(st.binary(max_size=200), spoiled()))
@example(body=b"\x91" * 20_000)
@example(body=b"\xdd\xff\xff\xff\xff")
def test_a_body_is_a_message_or_a_wire_error(body: bytes) -> None:
    for guard in GUARDS:
        try:
            message = guard(body)
        except WireError:
            continue
        assert guard(encode(message)) == message


@FUZZ
@given(frames=st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(ENCODED), spoiled()), max_size=4))
def test_frames_are_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    try:
        head, body = parse_frames(frames)
    except WireError:
        return
    assert body == frames[1] and min(head.epoch, head.origin, head.seq) >= 0


@FUZZ
@given(body=st.one_of(st.binary(max_size=200), spoiled()))
def test_a_command_never_raises(body: bytes) -> None:
    decode_command(Raw(body))


@FUZZ
@given(number=st.integers(0, len(SAMPLES) - 1))
def test_encoding_is_the_same_each_time(number: int) -> None:
    assert encode(SAMPLES[number]) == ENCODED[number]
