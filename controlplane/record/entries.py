"""One record of a run's log, decoded as far as its reader wants: for replay, invariants and people."""

from msgspec import Raw, Struct
from msgspec.msgpack import Decoder

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from schemas.errors import LogCorrupt
from schemas.events import Effect, Event
from schemas.wire import DECODE_ERRORS, effects_decoder, event_decoder

coordinator_event_decoder: Decoder[CoordinatorEvent] = Decoder(CoordinatorEvent)
coordinator_effects_decoder = Decoder(tuple[CoordinatorEffect, ...])


class LogEntry(Struct, frozen=True, kw_only=True):
    """One record.

    Attributes:
        agent: Whose decision it is; '' for the coordinator.
        journal: Of the agent; '' for the coordinator.
        number: Of the decision in the journal; 0 for the coordinator.
        event: Encoded; `typed_event` decodes it.
        effects: Encoded; `typed_effects` decodes them.
    """

    position: int
    at_ns: int
    agent: str
    kind: str
    journal: str
    number: int
    event: Raw
    effects: Raw

    def typed_event(self) -> CoordinatorEvent | Event:
        """Decode the event. Raises LogCorrupt if this version can't read it."""
        try:
            return event_decoder.decode(self.event) if self.agent else coordinator_event_decoder.decode(self.event)
        except DECODE_ERRORS as error:
            raise self._unreadable("event", error) from error

    def typed_effects(self) -> tuple[CoordinatorEffect, ...] | tuple[Effect, ...]:
        """Decode the effects. Raises LogCorrupt if this version can't read them."""
        try:
            if self.agent:
                return effects_decoder.decode(self.effects)
            return coordinator_effects_decoder.decode(self.effects)
        except DECODE_ERRORS as error:
            raise self._unreadable("effects", error) from error

    def _unreadable(self, part: str, error: Exception) -> LogCorrupt:
        who = f"agent {self.agent}" if self.agent else "the coordinator"
        return LogCorrupt(f"record {self.position}: the {part} of {who} can't be read: {error}", self.position)
