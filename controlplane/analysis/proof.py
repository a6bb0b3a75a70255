"""I11: a sync report names each known replica that is not proven to serve. For `record.invariants`. Pure.

What is desired is followed here by the meaning of the commands alone, so that a report is judged by nothing that the
machine of the bus believes.
"""

from collections.abc import Iterable, Iterator

from controlplane.machine import events
from controlplane.machine.coordinator_state import CoordinatorState
from schemas.commands import Command, ProfileCommand, Target, UnknownCommand, sync_key
from schemas.desired import Desired, changes_nothing, desired_after
from schemas.formatting import format_replicas
from schemas.identity import ROLLOUT, Identity, agent_of, replica_and_node
from schemas.outcomes import Acted, Reason, Skipped
from schemas.reports import SyncReport
from schemas.wire import Snapshot, Welcome, decode_command


class Proofs:
    """What one log shows about the replicas of its run."""

    def __init__(self, begin: CoordinatorState) -> None:
        self._places: dict[str, Identity] = {name: member.hello.identity for name, member in begin.members.items()}
        # Of the newest phase of each sync: of base weights under "", of adapters under their names.
        self._targets: dict[str, Target] = {key: sync.request.target for key, sync in begin.syncs.items()}
        self.desired: dict[int | str, Desired] = {
            unit: desired for unit, desired in begin.desired.items() if isinstance(unit, int)
        }

    def follow(self, event: events.CoordinatorEvent, effects: tuple[events.CoordinatorEffect, ...]) -> None:
        """Note the identities, and the target of a sync."""
        for effect in effects:
            match effect:
                case events.Send(message=Welcome()) if isinstance(event, events.HelloReceived):
                    self._welcome(event.hello.identity)
                case events.Send(message=Snapshot(desired=desired)):
                    if (place := replica_and_node(agent_of(effect.peer))) is not None:
                        self.desired[place[0]] = desired
                case events.Publish(envelope=envelope):
                    command = decode_command(envelope.body)
                    if (key := sync_key(command)) is not None:
                        self._targets[key] = envelope.target
                    if not changes_nothing(command) and not isinstance(command, ProfileCommand):
                        self._fold(command, envelope.target)
                case _:
                    pass

    def _welcome(self, place: Identity) -> None:
        """Note a node. A replica that takes part in syncs from now on, or no more, begins as a new one does."""
        first = self._first_nodes(self._places).get(place.unit)
        if first is not None and first.syncs != place.syncs:
            self.desired.pop(place.unit, None)
        self._places[place.agent] = place

    def _fold(self, command: Command | UnknownCommand, target: Target) -> None:
        places = self._first_nodes(self._places)
        for unit, before in self.desired.items():
            place = places.get(unit) or Identity(replica=int(unit), node_rank=0)
            self.desired[unit] = desired_after(before, command, target.includes(place), place)

    def wrong(self, report: SyncReport, known: Iterable[str]) -> Iterator[str]:
        """Yield what a report keeps back or says without proof. `known` are the agents of the run."""
        target, places = self._targets.get(report.adapter, Target()), self._first_nodes(known).values()
        replicas = {place.replica for place in places if place.syncs and target.includes(place)}
        said = {replica for stop in report.stopped for replica in stop.replicas}
        stopped = {unit for unit, desired in self.desired.items() if desired.generation == "paused" or desired.asleep}
        if silent := (replicas & stopped) - said:
            yield f"the report of v{report.version} does not say that {format_replicas(silent)} is paused or asleep"
        out = {unit for unit, desired in self.desired.items() if desired.quarantined and not report.adapter}
        if silent := (replicas & out) - {*report.quarantined, *report.unproven}:
            yield f"the report of v{report.version} does not name {format_replicas(silent)}, which is in quarantine"
        if report.status != "committed":
            return
        named = {*report.loaded, *report.quarantined, *report.unproven, *report.joining}
        if silent := replicas - named:
            yield f"the report of v{report.version} does not name {format_replicas(silent)}"
        proven = {
            place[0]
            for outcome in report.phases[-1].outcomes
            if (place := replica_and_node(outcome.agent)) is not None and place[1] == 0
            if isinstance(outcome.conclusion, Acted)
            or outcome.conclusion == Skipped(Reason.ALREADY)
            or (
                outcome.conclusion == Skipped(Reason.STALE_VERSION)
                and self.desired.get(place[0], Desired()).version == report.version
            )
        }
        if unfounded := set(report.loaded) - proven:
            yield f"the report of v{report.version} says without proof that {format_replicas(unfounded)} serves it"

    def _first_nodes(self, names: Iterable[str]) -> dict[int | str, Identity]:
        """The first of these nodes of each replica, which says of what kind it is."""
        first: dict[int | str, Identity] = {}
        for place in (self._places[name] for name in names):
            held = first.get(place.unit)
            if place.role == ROLLOUT and (held is None or place.node_rank < held.node_rank):
                first[place.unit] = place
        return first
