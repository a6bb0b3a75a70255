"""I11: a sync report names each known replica that is not proven to serve. For `record.invariants`. Pure."""

from collections.abc import Iterable, Iterator

from controlplane.machine import events
from controlplane.machine.fleet import CoordinatorState
from schemas.commands import Target, WeightSync
from schemas.formatting import format_replicas
from schemas.identity import Identity, replica_and_node
from schemas.outcomes import Acted, Reason, Skipped
from schemas.reports import SyncReport
from schemas.wire import Welcome, decode_command


class Proofs:
    """What one log shows about the replicas of its run."""

    def __init__(self, begin: CoordinatorState) -> None:
        self._places: dict[str, Identity] = {name: member.hello.identity for name, member in begin.members.items()}
        self._target = begin.sync.request.target if begin.sync else Target()  # of the newest phase of a sync

    def follow(self, event: events.CoordinatorEvent, effects: tuple[events.CoordinatorEffect, ...]) -> None:
        """Note who is who, and whom a sync is for."""
        for effect in effects:
            match effect:
                case events.Send(message=Welcome()) if isinstance(event, events.HelloReceived):
                    self._places[event.hello.identity.agent] = event.hello.identity
                case events.Publish(envelope=envelope) if isinstance(decode_command(envelope.body), WeightSync):
                    self._target = envelope.target

    def wrong(self, report: SyncReport, known: Iterable[str]) -> Iterator[str]:
        """Yield what a committed report keeps back or says without proof. `known` are the agents of the run."""
        if report.status != "committed":
            return
        named = {*report.loaded, *report.quarantined, *report.unproven}
        if silent := self._replicas(known) - named:
            yield f"the report of v{report.version} does not name {format_replicas(silent)}"
        proven = {
            place[0]
            for outcome in report.phases[-1].outcomes
            if (place := replica_and_node(outcome.agent)) is not None and place[1] == 0
            if isinstance(outcome.conclusion, Acted) or outcome.conclusion == Skipped(Reason.ALREADY)
        }
        if unfounded := set(report.loaded) - proven:
            yield f"the report of v{report.version} says without proof that {format_replicas(unfounded)} serves it"

    def _replicas(self, known: Iterable[str]) -> set[int]:
        return {
            place.replica
            for place in (self._places[name] for name in known)
            if place.syncs and self._target.includes(place)
        }
