"""One record of a run's log, decoded as far as its reader wants: for replay, invariants and people."""

from msgspec import Raw, Struct
from msgspec.msgpack import Decoder

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from schemas.errors import DecisionUnreadable, LogCorrupt
from schemas.events import Effect, Event
from schemas.identity import Count
from schemas.wire import DECODE_ERRORS, effects_decoder, event_decoder

coordinator_event_decoder: Decoder[CoordinatorEvent] = Decoder(CoordinatorEvent)
coordinator_effects_decoder = Decoder(tuple[CoordinatorEffect, ...])


class LogEntry(Struct, frozen=True, kw_only=True, gc=False):
    """One decision.

    Attributes:
        position: Of its record. Decisions of an agent that were uploaded together are one record.
    """

    position: int
    at_ns: int
    agent: str
    kind: str
    journal: str
    number: int
    event: bytes
    effects: bytes

    def typed_event(self) -> CoordinatorEvent | Event:
        """Decode the event. Raises LogCorrupt if this version can't read it, DecisionUnreadable if it is an agent's."""
        try:
            if self.agent:
                return event_decoder.decode(self.event)
            return coordinator_event_decoder.decode(self.event)
        except DECODE_ERRORS as error:
            raise self._unreadable("event", error) from error

    def typed_effects(self) -> tuple[CoordinatorEffect, ...] | tuple[Effect, ...]:
        """Decode the effects. Raises as `typed_event`."""
        try:
            if self.agent:
                return effects_decoder.decode(self.effects)
            return coordinator_effects_decoder.decode(self.effects)
        except DECODE_ERRORS as error:
            raise self._unreadable("effects", error) from error

    def _unreadable(self, part: str, error: Exception) -> LogCorrupt:
        who, kind = (f"agent {self.agent}", DecisionUnreadable) if self.agent else ("the coordinator", LogCorrupt)
        return kind(f"record {self.position}: the {part} of {who} can't be read: {error}", self.position)


class LogMark(Struct, frozen=True, kw_only=True):
    """A mark, as it is in the file; see `controlplane.record.marks`.

    Attributes:
        logic: Version of the logic that wrote it; 0 if it can't be read.
    """

    position: int
    at_ns: int
    logic: int
    state: Raw = Raw()
    recorded: dict[str, dict[str, Count]] = {}
    damage: str = ""


class AgentMark(Struct, frozen=True, kw_only=True):
    """The state of an agent's machine after a decision, as the agent sent it. A replay can begin there."""

    position: int
    agent: str
    journal: str
    number: int
    state: bytes


LogItem = LogEntry | LogMark | AgentMark
"""What a walk through a log yields."""
