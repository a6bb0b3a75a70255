"""One record of a run's log, decoded as far as anyone wants it: replay, invariants and people read these."""

from msgspec import Raw, Struct
from msgspec.msgpack import Decoder

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from schemas.errors import LogCorrupt
from schemas.events import Effect, Event
from schemas.wire import DECODE_ERRORS, effects_decoder, event_decoder

coordinator_event_decoder: Decoder[CoordinatorEvent] = Decoder(CoordinatorEvent)
coordinator_effects_decoder = Decoder(tuple[CoordinatorEffect, ...])


class LogEntry(Struct, frozen=True, kw_only=True):
    """One record. agent: '' for the coordinator.   journal, number: '' and 0 for the coordinator.

    event, effects: encoded; `typed_event` and `typed_effects` decode them.
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
        """What the machine saw. Raises LogCorrupt for an event that this version can't read."""
        try:
            return event_decoder.decode(self.event) if self.agent else coordinator_event_decoder.decode(self.event)
        except DECODE_ERRORS as error:
            raise self._unreadable("event", error) from error

    def typed_effects(self) -> tuple[CoordinatorEffect, ...] | tuple[Effect, ...]:
        """What it decided. Raises LogCorrupt for effects that this version can't read."""
        try:
            if self.agent:
                return effects_decoder.decode(self.effects)
            return coordinator_effects_decoder.decode(self.effects)
        except DECODE_ERRORS as error:
            raise self._unreadable("effects", error) from error

    def _unreadable(self, what: str, error: Exception) -> LogCorrupt:
        who = f"agent {self.agent}" if self.agent else "the coordinator"
        return LogCorrupt(f"record {self.position}: the {what} of {who} can't be read: {error}", self.position)
