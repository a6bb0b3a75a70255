"""Marks in a run's log: the coordinator's state after all records up to a position.

A bus that opens the log begins at the newest mark instead of the first record, and a log whose beginning was dropped
begins with one. A mark is a copy: one that can't be read, or that other logic wrote, is passed over, and `MarkChecker`
compares each with the fold of the records before it.
"""

from msgspec import MsgspecError, Raw, Struct
from msgspec.msgpack import Decoder, Encoder

from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide
from controlplane.record.entries import LogEntry, LogMark
from schemas.identity import Count, Positive


class CoordinatorMark(Struct, frozen=True, kw_only=True):
    """The body of a mark.

    Attributes:
        recorded: By agent and journal, the number of the newest decision that the log has.
    """

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


class MarkChecker:
    """Folds the coordinator over its records, and compares each mark with the state.

    Attributes:
        state: Of the coordinator. Code that folds it already sets it, and calls `note` instead of `feed`.
    """

    def __init__(self) -> None:
        self.state = CoordinatorState()
        self.compared = 0
        self._recorded: dict[str, dict[str, int]] = {}

    def feed(self, entry: LogEntry) -> None:
        """Follow one record. Raises LogCorrupt if it can't be read."""
        if entry.agent:
            self.note(entry.agent, entry.journal, entry.number)
        else:
            self.state = decide(self.state, entry.typed_event())[0]  # type: ignore[arg-type]

    def note(self, agent: str, journal: str, number: int) -> None:
        """Say which is the newest decision of an agent's journal."""
        self._recorded.setdefault(agent, {})[journal] = number

    def begin(self, mark: LogMark) -> bool:
        """Begin with a mark, because the records before it were dropped. Returns whether it can be read."""
        state = decode_state(mark)
        if state is not None:
            self.state, self._recorded = state, {agent: dict(numbers) for agent, numbers in mark.recorded.items()}
        return state is not None

    def difference(self, mark: LogMark) -> str | None:
        """Return how a mark differs from the records before it; None if it does not, or if other logic wrote it."""
        if mark.logic != LOGIC:
            return None
        self.compared += 1
        state_differs = decode_state(mark) != self.state
        if not state_differs and mark.recorded == self._recorded:
            return None
        what = "state of the coordinator" if state_differs else "numbers of the agents' decisions"
        return f"the mark after record {mark.position} has another {what} than the records before it lead to"
