"""What an agent's machine sees (events), what it asks for (effects), and the engine calls among them.

They are logged as they are: a `Decision` is one event with the effects that the machine gave back, and folding the
machine over the recorded events must give the recorded effects, byte for byte. So an event carries everything that
the decision needs: the time, ids, what the engine answered. `at_ms` is the agent's monotonic clock.
"""

from typing import Literal

from msgspec import Raw, Struct

from schemas.commands import Command, Manifest, ProfilePlan, Source, Target, UnknownCommand
from schemas.desired import Desired, ProfileSession
from schemas.identity import Count, Identity, InFlight, Name, Operation, Positive, Tag, Text
from schemas.outcomes import Outcome, Trace

# --- calls: what a machine asks its engine to do, one at a time ------------------------------------------------------


class CheckSource(Struct, frozen=True, tag="check_source"):
    """Look whether the source of `version` can be loaded, without touching the engine."""

    source: Source
    manifest: Manifest | None
    version: Positive


class Pause(Struct, frozen=True, tag="pause"):
    """Stop generating. Returns when no request runs."""

    mode: InFlight


class Resume(Struct, frozen=True, tag="resume"):
    """Generate again."""


class Sleep(Struct, frozen=True, tag="sleep", omit_defaults=True):
    """Release memory. The engine is paused when this is called.   discard: weights need not be kept for the wake."""

    tags: frozenset[Tag]
    discard: bool = False


class Wake(Struct, frozen=True, tag="wake"):
    """Take memory back. Every tag is one that was released."""

    tags: frozenset[Tag]


class Load(Struct, frozen=True, tag="load"):
    """Replace the weights; the engine is paused and its weights awake. Returns the digest of what it holds."""

    version: Positive
    source: Source
    manifest: Manifest | None


class Flush(Struct, frozen=True, tag="flush"):
    """Drop every cached prefix: what old weights computed is of no use to new ones."""


class Abort(Struct, frozen=True, tag="abort"):
    """Abort the requests that run or wait."""


class StartProfile(Struct, frozen=True, tag="start_profile"):
    """Open a session. directory: relative to the agent's traces root; fresh, and made by the agent."""

    session: ProfileSession
    directory: Text


class StopProfile(Struct, frozen=True, tag="stop_profile"):
    """Close the session, whether or not the engine has closed it by itself. Returns the traces."""

    session: ProfileSession
    directory: Text


class CollectTraces(Struct, frozen=True, tag="collect_traces"):
    """Look for the traces of this node's ranks in the directory of a session that was stopped. Calls no engine."""

    session: ProfileSession
    directory: Text


class CheckProfile(Struct, frozen=True, tag="check_profile"):
    """Can this engine, as it was launched, record what the plan asks? Nothing is started."""

    plan: ProfilePlan


class FinishProfile(Struct, frozen=True, tag="finish_profile"):
    """Relocate the traces in these directories, and run the hook, as `plan.finish` says. Calls no engine."""

    plan: ProfilePlan
    directories: tuple[Text, ...]
    steps: tuple[Count, ...]


EngineCall = (
    CheckSource | Pause | Resume | Sleep | Wake | Load | Flush | Abort | CheckProfile | StartProfile | StopProfile
)
DiskCall = CollectTraces | FinishProfile
Call = EngineCall | DiskCall

# --- what the engine is seen to be ------------------------------------------------------------------------------------


class Observation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an adapter read from its engine. None means that this engine can't tell.

    tokenizer: present, absent, or unknown while the engine still launches.
    version: the label of the weights it holds (0 as launched); digest: sha256 of the weights themselves.
    generating: false when paused.   asleep: tags released.   profiling: a session is open.
    instance: differs between two launches of the engine; a change means that all it was told is forgotten.
    """

    engine: Name
    instance: Name | None = None
    tokenizer: Literal["present", "absent", "unknown"]
    operations: frozenset[Operation] = frozenset()
    generating: bool | None = None
    asleep: frozenset[Tag] | None = None
    profiling: bool | None = None
    version: Count | None = None
    digest: Name | None = None


class Returned(Struct, frozen=True, kw_only=True, tag="ok", omit_defaults=True):
    """What a call gave back. digest: after Load. auto_stopped: after StopProfile.

    traces, ranks_without_trace, still_running: after StopProfile, CollectTraces and FinishProfile, as in `Acted`.
    """

    digest: Name | None = None
    auto_stopped: bool = False
    traces: tuple[Trace, ...] = ()
    ranks_without_trace: tuple[Count, ...] = ()
    still_running: bool = False


class Fault(Struct, frozen=True, tag="fault"):
    """A call that failed. kind: refused before the engine was touched (the source, the operation), or by the engine."""

    kind: Literal["source_refused", "unsupported", "engine_error"]
    message: Text


# --- events -----------------------------------------------------------------------------------------------------------


class Settings(Struct, frozen=True, kw_only=True):
    """Limits of one machine.

    max_buffered: commands kept for their turn, and as many behind a hole.   settle_ms: for calls that no command asked
    for.
    """

    max_buffered: Positive = 256
    reconcile_timeout_ms: Positive = 600_000


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """First event of every incarnation. After a restart the journal's events have been folded before it."""

    at_ms: int
    identity: Identity
    incarnation: Name
    settings: Settings = Settings()


class CommandReceived(Struct, frozen=True, kw_only=True, tag="command"):
    """A command, live or replayed. epoch: of the sender, which fences; origin: of the record, which does not."""

    at_ms: int
    epoch: Positive
    origin: Positive
    seq: Positive
    ttl_ms: Count
    command: Command | UnknownCommand
    target: Target = Target()


class HeadSeen(Struct, frozen=True, kw_only=True, tag="head"):
    """The newest seq of the bus."""

    at_ms: int
    epoch: Positive
    seq: Count


class SnapshotReceived(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """What is desired of this replica as of `seq`, in place of the commands up to it."""

    at_ms: int
    epoch: Positive
    seq: Count
    desired: Desired


class EngineObserved(Struct, frozen=True, kw_only=True, tag="observed"):
    """What the engine is, read without a call: after start, and while it launches."""

    at_ms: int
    observation: Observation


class EngineReturned(Struct, frozen=True, kw_only=True, tag="returned"):
    """A call ended, well or not; `observation` was read after it."""

    at_ms: int
    call_id: Positive
    result: Returned | Fault
    observation: Observation | None = None


class LeaseExpired(Struct, frozen=True, kw_only=True, tag="lease_expired"):
    """Nothing was heard of the bus for the length of the lease."""

    at_ms: int


class Tick(Struct, frozen=True, kw_only=True, tag="tick"):
    """A moment that `workers.machine.decide.next_deadline` named has come."""

    at_ms: int


Event = Started | CommandReceived | HeadSeen | SnapshotReceived | EngineObserved | EngineReturned | LeaseExpired | Tick

# --- effects ----------------------------------------------------------------------------------------------------------


class Perform(Struct, frozen=True, kw_only=True, tag="perform"):
    """Make one engine call. The decision that holds this is durable in the journal before the call is made."""

    call_id: Positive
    call: Call


class Answer(Struct, frozen=True, kw_only=True, tag="answer"):
    """The outcome of one command. rule: of the decision table, 0 when the command's effects ended it."""

    epoch: Positive
    seq: Positive
    outcome: Outcome
    rule: Count


class RequestResend(Struct, frozen=True, tag="request_resend"):
    """Ask the bus for the records from `first` on."""

    first: Positive


class RequestSnapshot(Struct, frozen=True, tag="request_snapshot"):
    """Ask the bus for the desired state: what this agent holds can't be mended by replay."""


class Restart(Struct, frozen=True, tag="restart"):
    """End this incarnation and begin another: the engine of a replica out of service was launched again. A new start
    leads out of quarantine, since all that was done to the old engine went with it.
    """


Effect = Perform | Answer | RequestResend | RequestSnapshot | Restart


class Decision(Struct, frozen=True):
    """One step of a machine, as journalled and logged: the event it saw and the effects it gave back, encoded."""

    event: Raw
    effects: Raw
