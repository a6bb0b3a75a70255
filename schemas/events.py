"""Events that an agent's machine sees, the effects that it returns, and the engine calls among them.

Both are logged as they are. A `Decision` is one event with the effects that followed, and folding the machine over the
recorded events must give the recorded effects again, byte for byte. An event therefore carries everything that the
decision needs: the time, ids, the answer of the engine. `at_ms` is the agent's monotonic clock in milliseconds.
"""

from typing import Literal

from msgspec import Raw, Struct

from schemas.commands import Command, EngineSource, Manifest, ProfilePlan, Pushed, Target, UnknownCommand
from schemas.desired import Desired, ProfileSession
from schemas.identity import (
    Count,
    Identity,
    InFlight,
    Label,
    Memory,
    Milliseconds,
    MillisecondsLeft,
    Moment,
    Name,
    OnLostBus,
    Operation,
    Positive,
    Tag,
    Text,
)
from schemas.outcomes import Outcome, Trace

# --- calls, made one at a time ----------------------------------------------------------------------------------------


class CheckSource(Struct, frozen=True, tag="check_source"):
    """Check that the source of `version` can be loaded, without touching the engine."""

    source: EngineSource
    manifest: Manifest | None
    version: Positive


class Pause(Struct, frozen=True, tag="pause"):
    """Stop generating. Returns when no request is running."""

    mode: InFlight


class Resume(Struct, frozen=True, tag="resume"):
    """Generate again."""


class Sleep(Struct, frozen=True, tag="sleep", omit_defaults=True):
    """Release memory of a paused engine. With `discard`, the weights need not be kept for the wake."""

    tags: frozenset[Tag]
    discard: bool = False


class Wake(Struct, frozen=True, tag="wake"):
    """Allocate memory again. Every tag is one that was released."""

    tags: frozenset[Tag]


class Load(Struct, frozen=True, tag="load", omit_defaults=True):
    """Replace the weights of a paused engine whose weights are awake. Returns the digest of what it holds.

    Attributes:
        label: The label that the engine reports of these weights from then on; empty for the number of the version.
    """

    version: Positive
    source: EngineSource
    manifest: Manifest | None
    label: Label = ""


class AwaitPush(Struct, frozen=True, tag="await_push"):
    """Observe the engine until it reports the label of weights that the trainer pushes. Calls no engine.

    It ends early when the load phase does. Then it has no result.
    """

    version: Positive
    source: Pushed
    manifest: Manifest | None


class Observe(Struct, frozen=True, tag="observe"):
    """Observe the engine, whose weights or memory the trainer may have changed since. Calls no engine."""


class Flush(Struct, frozen=True, tag="flush"):
    """Drop every cached prefix: it was computed with the old weights."""


class Abort(Struct, frozen=True, tag="abort"):
    """Abort all running and waiting requests."""


class StartProfile(Struct, frozen=True, tag="start_profile"):
    """Open a session. The agent creates `directory`, which must be new, below its traces root."""

    session: ProfileSession
    directory: Text


class StopProfile(Struct, frozen=True, tag="stop_profile"):
    """Close the session, even if the engine may have closed it already. Returns the traces."""

    session: ProfileSession
    directory: Text


class CollectTraces(Struct, frozen=True, tag="collect_traces"):
    """Find the traces that this node's ranks left in the directory of a stopped session. Calls no engine."""

    session: ProfileSession
    directory: Text


class CheckProfile(Struct, frozen=True, tag="check_profile"):
    """Check that this engine, as it was launched, can record what the plan asks. Starts nothing."""

    plan: ProfilePlan


class FinishProfile(Struct, frozen=True, tag="finish_profile"):
    """Move the traces in these directories and run the hook, as `plan.finish` says. Calls no engine."""

    plan: ProfilePlan
    directories: tuple[Text, ...]
    steps: tuple[Count, ...]


EngineCall = (
    CheckSource | Pause | Resume | Sleep | Wake | Load | Flush | Abort | CheckProfile | StartProfile | StopProfile
)
DiskCall = CollectTraces | FinishProfile
Call = EngineCall | DiskCall | AwaitPush | Observe

# --- the state of the engine ------------------------------------------------------------------------------------------


class Observation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State that an adapter read from its engine. None where this engine can't tell.

    Attributes:
        engine: Name and version of the engine.
        instance: Identifies one launch of the engine. A change means that the engine has lost all earlier state.
        tokenizer: `present`, `absent`, or `unknown` while the engine is launching.
        operations: What this engine can do.
        generating: False when paused.
        asleep: Regions of memory that are released.
        profiling: A session is open.
        version: Version of the weights, if the label is a number; 0 for those of the launch.
        label: The engine's own label of its weights, as it reports it; empty if it has none yet.
        digest: sha256 of the weights themselves.
        running: Requests that are being generated.
        generated: Tokens generated since the launch.
        trouble: Why the engine can't be used from here, in its own words: it refuses the key, say.
    """

    engine: Name
    instance: Name | None = None
    tokenizer: Literal["present", "absent", "unknown"]
    operations: frozenset[Operation] = frozenset()
    generating: bool | None = None
    asleep: frozenset[Tag] | None = None
    profiling: bool | None = None
    version: Count | None = None
    label: Label | None = None
    digest: Name | None = None
    running: Count | None = None
    generated: Count | None = None
    trouble: Text | None = None


class Returned(Struct, frozen=True, kw_only=True, tag="ok", omit_defaults=True):
    """Result of a call that succeeded. Each field means the same as in `Acted`."""

    digest: Name | None = None
    auto_stopped: bool = False
    traces: tuple[Trace, ...] = ()
    ranks_without_trace: tuple[Count, ...] = ()
    still_running: bool = False


class Fault(Struct, frozen=True, tag="fault"):
    """Result of a call that failed. Only `engine_error` means that the engine was touched."""

    kind: Literal["source_refused", "unsupported", "engine_error"]
    message: Text


# --- events -----------------------------------------------------------------------------------------------------------


class MachineSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits and choices of one machine.

    Attributes:
        max_buffered: Most commands queued, and most commands buffered behind a hole.
        reconcile_timeout_ms: Deadline of an engine call that belongs to no command.
        on_lost_bus: What the engine does once the lease has expired: serve the committed weights, or pause.
        memory: Who releases the engine's memory.
        wedged_after_ms: An engine whose running requests make no progress for this long is wedged.
        dump_stacks: Ask for the stacks of an engine that does not answer, shortly before the deadline of its call.
    """

    max_buffered: Positive = 256
    reconcile_timeout_ms: Milliseconds = 600_000
    on_lost_bus: OnLostBus = "serve"
    memory: Memory = "agent"
    wedged_after_ms: Milliseconds = 300_000
    dump_stacks: bool = False


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """First event of every incarnation. After a restart it follows the events replayed from the journal."""

    at_ms: Moment
    identity: Identity
    incarnation: Name
    settings: MachineSettings = MachineSettings()


class CommandReceived(Struct, frozen=True, kw_only=True, tag="command"):
    """A command, live or resent.

    Attributes:
        epoch: Epoch of the sender, used for fencing.
        origin: Epoch in which the command was recorded, not used for fencing.
        seq: Position of the command in the run.
        ttl_ms: Time left to act.
        command: The command; `UnknownCommand` if this version can't read it.
        target: Which replicas the command is for.
    """

    at_ms: Moment
    epoch: Positive
    origin: Positive
    seq: Positive
    ttl_ms: MillisecondsLeft
    command: Command | UnknownCommand
    target: Target = Target()


class HeadSeen(Struct, frozen=True, kw_only=True, tag="head"):
    """A head beacon: the newest seq of the bus."""

    at_ms: Moment
    epoch: Positive
    seq: Count


class SnapshotReceived(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """The desired state of this replica as of `seq`. Replaces the commands up to there."""

    at_ms: Moment
    epoch: Positive
    seq: Count
    desired: Desired


class EngineObserved(Struct, frozen=True, kw_only=True, tag="observed"):
    """The engine's state was read outside a call: after start, and at intervals."""

    at_ms: Moment
    observation: Observation


class EngineReturned(Struct, frozen=True, kw_only=True, tag="returned"):
    """A call ended. `observation` was read after it."""

    at_ms: Moment
    call_id: Positive
    result: Returned | Fault
    observation: Observation | None = None


class StacksDumped(Struct, frozen=True, kw_only=True, tag="stacks"):
    """The dump that `DumpStacks` asked for has ended.

    Attributes:
        call_id: The call that had not returned.
        note: Where the stacks are, or why there are none: a sentence for the outcome.
    """

    at_ms: Moment
    call_id: Positive
    note: Text


class LeaseExpired(Struct, frozen=True, kw_only=True, tag="lease_expired"):
    """The bus was silent for the length of the lease."""

    at_ms: Moment


class Tick(Struct, frozen=True, kw_only=True, tag="tick"):
    """A deadline that `workers.machine.decide.next_deadline` returned has passed."""

    at_ms: Moment


class Stopping(Struct, frozen=True, kw_only=True, tag="stopping"):
    """The agent was asked to end. It awaits the call in flight and begins no other; what is queued is not decided."""

    at_ms: Moment


Event = (
    Started
    | CommandReceived
    | HeadSeen
    | SnapshotReceived
    | EngineObserved
    | EngineReturned
    | StacksDumped
    | LeaseExpired
    | Tick
    | Stopping
)

# --- effects ----------------------------------------------------------------------------------------------------------


class Perform(Struct, frozen=True, kw_only=True, tag="perform"):
    """Make one call. The decision with this effect is durable in the journal before the call is made."""

    call_id: Positive
    call: Call


class Answer(Struct, frozen=True, kw_only=True, tag="answer"):
    """Send the outcome of one command, with the rule of the decision table that led to it."""

    epoch: Positive
    seq: Positive
    outcome: Outcome
    rule: Count


class RequestResend(Struct, frozen=True, tag="request_resend"):
    """Ask the bus to resend the commands from `first` on."""

    first: Positive


class RequestSnapshot(Struct, frozen=True, tag="request_snapshot"):
    """Ask the bus for the desired state, because resent commands can't repair what this agent holds."""


class Restart(Struct, frozen=True, tag="restart"):
    """End this incarnation and begin another, because the engine of a quarantined replica was launched again.

    A new incarnation ends the quarantine: everything done to the old engine went with it.
    """


class DumpStacks(Struct, frozen=True, tag="dump_stacks"):
    """Write down where the processes of the engine are, because a call is about to pass its deadline."""

    call_id: Positive


Effect = Perform | Answer | RequestResend | RequestSnapshot | Restart | DumpStacks


class Decision(Struct, frozen=True):
    """One step of a machine, as journalled and logged: the encoded event and the encoded effects that followed."""

    event: Raw
    effects: Raw
