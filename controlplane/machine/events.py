"""What the coordinator sees (events) and what it asks its bus to do (effects). Logged as they are, so a log replays.

`at_us` is the bus's monotonic clock in microseconds, `at_ns` its wall clock; `peer` is one connection of an agent. A
`ticket` names the caller that waits for the result, and is unique in one life of the bus.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from schemas.agent_status import AgentStatus
from schemas.commands import AdapterRequest, Command, Grace, Manifest, Source, Target
from schemas.config import ObservePolicy
from schemas.identity import Count, InFlight, Label, Milliseconds, Name, Port, Positive, Text, Token
from schemas.outcomes import Outcome
from schemas.reports import Report, SyncReport
from schemas.wire import Downward, Envelope, Hello

Peer = Annotated[str, Meta(max_length=255)]
Proof = Literal["proven", "launch", "unproven", "aborted", "unknown"]
"""Whether weights were proven to be what a replica had, see `controlplane.machine.provenance`."""
PROVEN: Final[tuple[Proof, ...]] = ("proven", "launch")
OnUnreachable = Literal["skip", "wait"]
"""What a sync does about replicas that are known to be unable to answer: skip them, or wait for them."""


class CoordinatorSettings(Struct, frozen=True, kw_only=True):
    """Limits of the coordinator, from `BusConfig`."""

    heartbeat_ms: Milliseconds
    agent_timeout_ms: Milliseconds
    lease_ms: Milliseconds
    history: Positive
    retransmit_ms: Milliseconds
    publish_port: Port | None = None
    head_interval_ms: Milliseconds | None = None
    agents_max: Positive = 8_192
    after_send_ms: Milliseconds = 10_000
    observe: ObservePolicy | None = None


# --- events -----------------------------------------------------------------------------------------------------------


class _Moment(Struct, frozen=True, kw_only=True):
    """What every event has: when it happened. The bus sets it, to the moment of the turn that decides the event."""

    at_us: int = 0
    at_ns: int = 0


class Opened(_Moment, frozen=True, kw_only=True, tag="opened"):
    """A bus opens this log. The log's earlier events have been folded already."""

    run: Name
    settings: CoordinatorSettings
    logic: Positive


class Issued(_Moment, frozen=True, kw_only=True, tag="issued"):
    """The trainer or an operator wants a command published.

    Attributes:
        operator: It is an operator's.
        force: A start of a profiling session may take over the trainer's.
    """

    ticket: Positive
    command: Command
    target: Target
    timeout_ms: Milliseconds
    operator: bool = False
    force: bool = False


class SyncRequested(_Moment, frozen=True, kw_only=True, tag="sync_requested"):
    """The trainer or an operator wants the fleet on new weights.

    Attributes:
        version: None for the next of the run: one more than the newest that was ever requested.
        quorum: Replicas that must load; None for more than half.
        timeout_ms: For each phase.
        on_unreachable: Whether a phase waits for replicas whose engines are known to be down, though it has its quorum.
        operator: It is an operator's.
        sends: The trainer sends the weights itself, and says so when it has (`SendReturned`).
        adapter: The LoRA adapter that it is a version of; None for base weights.
    """

    ticket: Count = 0
    version: Positive | None
    source: Source
    manifest: Manifest | None
    in_flight: InFlight = "abort"
    quorum: Positive | None = None
    target: Target = Target()
    timeout_ms: Milliseconds
    on_unreachable: OnUnreachable = "skip"
    operator: bool = False
    sends: bool = False
    adapter: AdapterRequest | None = None


class RetireRequested(_Moment, frozen=True, kw_only=True, tag="retire_requested"):
    """The trainer or an operator takes places out of the run for good: replicas by index, or agents by name."""

    ticket: Positive
    places: tuple[Name, ...]


class LeaveRequested(_Moment, frozen=True, kw_only=True, tag="leave_requested"):
    """An agent wants its replica to leave the fleet, and to be retired."""

    peer: Peer
    grace_ms: Grace


class PlaceRequested(_Moment, frozen=True, kw_only=True, tag="place_requested"):
    """An agent that has not said hello asks which replica to be."""

    peer: Peer
    token: Token


class SendFailed(_Moment, frozen=True, kw_only=True, tag="send_failed"):
    """The trainer could not send the weights that the load phase of the sync with this ticket waits for."""

    ticket: Positive
    reason: Text


class SendReturned(_Moment, frozen=True, kw_only=True, tag="send_returned"):
    """The trainer has sent the weights that the load phase of the sync with this ticket waits for."""

    ticket: Positive


class SampleCount(Struct, frozen=True, kw_only=True):
    """Sequences and tokens that one version of the weights made.

    Attributes:
        adapter: That made them; empty for base weights alone.
        version: In this run; None if it is not known, or if there were too many to tell them apart.
        staleness: By how many versions it was behind the newest committed one; None likewise.
        proof: Whether their replica was proven to hold these weights, as in `TokenSpan`.
        accepted: The trainer took them.
        sequences: Those whose first token it made.
        tokens: All that it made.
    """

    adapter: Label = ""
    version: Count | None
    staleness: Count | None
    proof: Proof
    accepted: bool
    sequences: Count
    tokens: Count


class SamplesCounted(_Moment, frozen=True, kw_only=True, tag="samples_counted"):
    """What the trainer has judged since the last record of this kind.

    Attributes:
        ticket: 0, since no caller waits for it.
        step: The training step; 0 before the first.
    """

    ticket: Count = 0
    step: Count
    counts: tuple[SampleCount, ...]


class HelloReceived(_Moment, frozen=True, kw_only=True, tag="hello"):
    """An agent introduced itself.

    Attributes:
        recorded_decisions: How many of its journal's decisions the log has.
    """

    peer: Peer
    hello: Hello
    recorded_decisions: Count


class JoinReceived(_Moment, frozen=True, kw_only=True, tag="join"):
    """An agent hears the publish socket and asks for the desired state."""

    peer: Peer


class StatusReceived(_Moment, frozen=True, kw_only=True, tag="status"):
    """A heartbeat that differs from the one before."""

    peer: Peer
    seq: Count
    status: AgentStatus


class PeerAnswer(Struct, frozen=True, kw_only=True, gc=False):
    """One outcome in a batch."""

    peer: Peer
    origin: Count
    seq: Count
    outcome: Outcome
    rule: Count


class AnswersReceived(_Moment, frozen=True, kw_only=True, tag="answers"):
    """All outcomes that were on the socket in one turn."""

    answers: tuple[PeerAnswer, ...]


class ResendRequested(_Moment, frozen=True, kw_only=True, tag="resend_requested"):
    """An agent misses the records from `first` on, and takes at most `credit` of them."""

    peer: Peer
    first: Positive
    credit: Positive


class PeerLost(_Moment, frozen=True, kw_only=True, tag="lost"):
    """An agent was silent too long, can't be reached, said goodbye, or has a key that is not accepted any more."""

    peer: Peer
    reason: Literal["silent", "unreachable", "left", "refused"]


class TimerFired(_Moment, frozen=True, kw_only=True, tag="timer"):
    """A moment that `coordinator.next_deadline` named has passed."""


class Closed(_Moment, frozen=True, kw_only=True, tag="closed"):
    """The bus closes in good order. Commands that are still open will not be answered."""


PeerEvent = HelloReceived | JoinReceived | StatusReceived | ResendRequested | LeaveRequested | PeerLost | PlaceRequested
CallerEvent = Issued | SyncRequested | RetireRequested | SendFailed | SendReturned | SamplesCounted
CoordinatorEvent = Opened | CallerEvent | PeerEvent | AnswersReceived | TimerFired | Closed

# --- effects ----------------------------------------------------------------------------------------------------------


class Publish(Struct, frozen=True, kw_only=True, tag="publish"):
    """Send a command to every agent. The decision that holds this is in the log before it is sent."""

    epoch: Positive
    seq: Positive
    envelope: Envelope


class Send(Struct, frozen=True, kw_only=True, tag="send"):
    """Send a control message to one agent."""

    peer: Peer
    epoch: Positive
    seq: Count
    message: Downward


class Ping(Struct, frozen=True, kw_only=True, tag="ping"):
    """Find out whether the peer can still be reached. If not, `PeerLost(unreachable)` follows."""

    peer: Peer


class Conclude(Struct, frozen=True, kw_only=True, tag="conclude"):
    """A command or a sync has ended: every agent of its fleet has an outcome.

    Attributes:
        ticket: None if no caller waits for it.
    """

    ticket: Positive | None
    report: Report | SyncReport


class Refuse(Struct, frozen=True, kw_only=True, tag="refuse"):
    """The command was not published, the sync was ended, or nothing was retired."""

    ticket: Positive
    kind: Literal["command", "sync_in_progress", "closed", "retire"]
    reason: Text


class Retired(Struct, frozen=True, kw_only=True, tag="retired"):
    """These agents no longer belong to the run.

    Attributes:
        ticket: None if no caller waits for it: they were drained.
    """

    ticket: Positive | None
    agents: tuple[Name, ...]


CoordinatorEffect = Publish | Send | Ping | Conclude | Refuse | Retired
CoordinatorEffects = tuple[CoordinatorEffect, ...]
