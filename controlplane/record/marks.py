"""Marks in a run's log: the coordinator's state after all records up to a position.

A bus that opens the log begins at the newest mark instead of the first record, and a log whose beginning was dropped
begins with one. A mark is a copy: one that can't be read, or that other logic wrote, is passed over, and a replay
compares each with the fold of the records before it.
"""

from msgspec import MsgspecError, Raw, Struct
from msgspec.msgpack import Decoder, Encoder

from controlplane.machine.coordinator import LOGIC, CoordinatorState
from controlplane.record.entries import LogMark
from schemas.identity import Count, Positive


class CoordinatorMark(Struct, frozen=True, kw_only=True):
    """The body of a mark; `recorded` has the newest decision that the log has, by agent and journal."""

    logic: Positive
    state: Raw
    recorded: dict[str, dict[str, Count]]


_mark_decoder = Decoder(CoordinatorMark)
_state_decoder = Decoder(CoordinatorState)
# In the order of each dict, unlike `schemas.wire.encode`: a state that was read must lead to the same bytes later on.
_encode = Encoder().encode


def encode_mark(state: CoordinatorState, recorded: dict[str, dict[str, int]]) -> bytes:
    """Return the body of a mark."""
    return _encode(CoordinatorMark(logic=LOGIC, state=Raw(_encode(state)), recorded=recorded))


def decode_mark(body: bytes) -> CoordinatorMark:
    """Decode the body of a mark. Raises MsgspecError."""
    return _mark_decoder.decode(body)


def decode_state(mark: CoordinatorMark | LogMark) -> CoordinatorState | None:
    """Return the state of a mark; None if other logic wrote it, or it can't be read."""
    if mark.logic != LOGIC:
        return None
    try:
        return _state_decoder.decode(mark.state)
    except MsgspecError:
        return None
