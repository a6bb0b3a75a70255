"""What the coordinator sees and what it asks its bus to do. Logged as they are, so a log replays.

`at_us` is the bus's monotonic clock in microseconds; `peer` is an agent's routing id.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from schemas.commands import Command, Manifest, Source, Target
from schemas.errors import CommandFailed
from schemas.identity import Count, InFlight, Name, Positive, Text, replica_and_node
from schemas.outcomes import Failed, Missing, Outcome
from schemas.wire import Downward, Envelope, Hello, Report, Status

Peer = Annotated[str, Meta(max_length=255)]


class CoordinatorSettings(Struct, frozen=True, kw_only=True):
    """Limits of the coordinator, from `BusConfig`."""

    heartbeat_ms: Positive
    gone_ms: Positive
    lease_ms: Positive
    ring: Positive
    nudge_ms: Positive
    events_port: Positive | None = None


# --- events -----------------------------------------------------------------------------------------------------------


class Opened(Struct, frozen=True, kw_only=True, tag="opened"):
    """A bus starts its life on this log. The log's earlier events have been folded before it."""

    at_us: int
    at_ns: int
    run: Name
    settings: CoordinatorSettings
    logic: Positive


class Issued(Struct, frozen=True, kw_only=True, tag="issued"):
    """The trainer or an operator wants a command published. ticket: names the waiting caller, unique in this life."""

    at_us: int
    at_ns: int
    ticket: Positive
    command: Command
    target: Target
    timeout_ms: Positive


class SyncRequested(Struct, frozen=True, kw_only=True, tag="sync_requested"):
    """The trainer wants the fleet on new weights. quorum: replicas that must load; None for more than half."""

    at_us: int
    at_ns: int
    ticket: Positive
    version: Positive
    source: Source
    manifest: Manifest | None
    in_flight: InFlight
    quorum: Positive | None
    target: Target
    timeout_ms: Positive


class HelloReceived(Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent introduced itself. recorded: decisions of its journal that the log holds."""

    at_us: int
    peer: Peer
    hello: Hello
    recorded: Count


class JoinReceived(Struct, frozen=True, kw_only=True, tag="join"):
    """An agent hears the publish socket and asks for the desired state."""

    at_us: int
    peer: Peer


class StatusReceived(Struct, frozen=True, kw_only=True, tag="status"):
    """A heartbeat that says something new."""

    at_us: int
    peer: Peer
    seq: Count
    status: Status


class PeerAnswer(Struct, frozen=True, kw_only=True):
    """One outcome in a batch."""

    peer: Peer
    origin: Count
    seq: Count
    outcome: Outcome
    row: Count


class AnswersReceived(Struct, frozen=True, kw_only=True, tag="answers"):
    """Every outcome that lay on the socket at one moment."""

    at_us: int
    answers: tuple[PeerAnswer, ...]


class NeedReceived(Struct, frozen=True, kw_only=True, tag="need"):
    """An agent lacks the records from `first` on."""

    at_us: int
    peer: Peer
    first: Positive
    credit: Positive


class PeerLost(Struct, frozen=True, kw_only=True, tag="lost"):
    """An agent was silent too long, can't be reached any more, or said that it leaves."""

    at_us: int
    peer: Peer
    why: Literal["silent", "unreachable", "left"]


class TimeCame(Struct, frozen=True, kw_only=True, tag="time"):
    """A moment that `coordinator.next_deadline` named has come."""

    at_us: int


class Closed(Struct, frozen=True, kw_only=True, tag="closed"):
    """The bus ends its life in good order: what is still open will not be answered."""

    at_us: int
    at_ns: int


CoordinatorEvent = (
    Opened
    | Issued
    | SyncRequested
    | HelloReceived
    | JoinReceived
    | StatusReceived
    | AnswersReceived
    | NeedReceived
    | PeerLost
    | TimeCame
    | Closed
)

# --- effects ----------------------------------------------------------------------------------------------------------


class Publish(Struct, frozen=True, kw_only=True, tag="publish"):
    """Send a command to every agent. The decision that holds this is in the log before it is sent."""

    epoch: Positive
    seq: Positive
    envelope: Envelope


class Send(Struct, frozen=True, kw_only=True, tag="send"):
    """Send a control message to one agent. seq: what its header says."""

    peer: Peer
    epoch: Positive
    seq: Count
    message: Downward


class Probe(Struct, frozen=True, kw_only=True, tag="probe"):
    """Find out whether the peer can still be reached; `PeerLost(unreachable)` if not."""

    peer: Peer


class SyncReport(Struct, frozen=True, kw_only=True, tag="sync_report"):
    """How a weight sync ended.

    committed: the fleet serves `version`.   aborted: too few replicas could; the fleet serves what it served.
    stale: every replica holds this version or a newer one already.
    loaded: replicas that serve it.   quarantined: replicas out of service until a later sync or a restart.
    phases: the report of each phase, in order.
    """

    version: Positive
    status: Literal["committed", "aborted", "stale"]
    loaded: tuple[Count, ...]
    quarantined: tuple[Count, ...]
    phases: tuple[Report, ...]

    def raise_for_failures(self) -> None:
        """Raise CommandFailed unless every replica that syncs at all serves the new version."""
        troubled = [one.agent for one in self.phases[-1].outcomes if isinstance(one.conclusion, Failed | Missing)]
        places = [replica_and_node(agent) for agent in troubled]
        down = any(place is not None and place[1] == 0 for place in places)
        if self.status == "committed" and not self.quarantined and not down:
            return
        lines = [f"sync to version {self.version} {self.status}; out of service: {list(self.quarantined) or 'none'}"]
        for report in self.phases:
            try:
                report.raise_for_failures()
            except CommandFailed as failed:
                lines.append(str(failed))
        raise CommandFailed("\n".join(lines))


class Conclude(Struct, frozen=True, kw_only=True, tag="conclude"):
    """A command (or sync) ended: every agent of its fleet has an outcome. ticket: None when nobody waits for it."""

    ticket: Positive | None
    report: Report | SyncReport


class Refuse(Struct, frozen=True, kw_only=True, tag="refuse"):
    """The command was not published. kind: which error the caller gets."""

    ticket: Positive
    kind: Literal["command", "sync_in_progress", "closed"]
    why: Text


CoordinatorEffect = Publish | Send | Probe | Conclude | Refuse
