"""Events that an agent's machine sees, the effects that it returns, and the engine calls among them.

Both are logged as they are. A `Decision` is one event with the effects that followed, and folding the machine over the
recorded events must give the recorded effects again, byte for byte. An event therefore carries everything that the
decision needs: the time, ids, the answer of the engine. `at_ms` is the agent's monotonic clock in milliseconds.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Raw, Struct

from schemas.commands import (
    AdapterVersion,
    Command,
    EngineSource,
    Grace,
    Manifest,
    ProfilePlan,
    Pushed,
    Target,
    UnknownCommand,
)
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
    """Check that the source of `version` can be loaded, without touching the engine.

    Attributes:
        source: Where the weights are.
        manifest: What the source must hold; None if that is not known.
        version: Number of the weights.
    """

    source: EngineSource
    manifest: Manifest | None
    version: Positive


class Pause(Struct, frozen=True, tag="pause"):
    """Stop generating. Returns when no request is running.

    Attributes:
        mode: What happens to running requests.
    """

    mode: InFlight


class Resume(Struct, frozen=True, tag="resume"):
    """Generate again."""


class Sleep(Struct, frozen=True, tag="sleep", omit_defaults=True):
    """Release memory of a paused engine. With `discard`, the weights need not be kept for the wake.

    Attributes:
        tags: Parts of the memory to release.
        discard: Drop the weights instead of keeping a copy.
    """

    tags: frozenset[Tag]
    discard: bool = False


class Wake(Struct, frozen=True, tag="wake"):
    """Allocate memory again. Every tag is one that was released.

    Attributes:
        tags: Parts of the memory to take back.
    """

    tags: frozenset[Tag]


class Load(Struct, frozen=True, tag="load", omit_defaults=True):
    """Replace the weights of a paused engine whose weights are awake. Returns the digest of what it holds.

    Attributes:
        version: Number of the weights.
        source: Where the weights are.
        manifest: What the source must hold; None if that is not known.
        label: The label that the engine reports of these weights from then on; empty for the number of the version.
    """

    version: Positive
    source: EngineSource
    manifest: Manifest | None
    label: Label = ""


class Restore(Struct, frozen=True, tag="restore"):
    """Load the weights of the launch again into a paused engine: a sync failed before anything was committed.

    Attributes:
        directory: Where the engine was launched from, as it reported then.
    """

    directory: Text


class AwaitPush(Struct, frozen=True, tag="await_push"):
    """Observe the engine until it reports the label of weights that the trainer pushes. Calls no engine.

    It ends early when the load phase does. Then it has no result.
    """

    version: Positive
    source: Pushed
    manifest: Manifest | None


class AwaitIdle(Struct, frozen=True, tag="await_idle"):
    """Observe the engine until it has run no request for a moment, as it must before its replica leaves the fleet.

    Calls no engine. After `grace_ms`, counted from the receipt of the drain, what still runs is not waited for.
    """

    grace_ms: Grace


class Observe(Struct, frozen=True, tag="observe"):
    """Observe the engine, whose weights or memory the trainer may have changed since. Calls no engine."""


class Flush(Struct, frozen=True, tag="flush"):
    """Drop every cached prefix: it was computed with the old weights. Frozen requests that lose theirs are computed
    anew, by an engine that `recomputes`.
    """


class Abort(Struct, frozen=True, tag="abort"):
    """Abort all running and waiting requests."""


class StartProfile(Struct, frozen=True, tag="start_profile"):
    """Open a session. The agent creates `directory`, which must be new, below its traces root.

    Attributes:
        session: Its step and plan.
        directory: Where the traces go, below the agent's root.
    """

    session: ProfileSession
    directory: Text


class StopProfile(Struct, frozen=True, tag="stop_profile"):
    """Close the session, even if the engine may have closed it already. Returns the traces.

    Attributes:
        session: Its step and plan.
        directory: Where the traces go, below the agent's root.
    """

    session: ProfileSession
    directory: Text


class CollectTraces(Struct, frozen=True, tag="collect_traces"):
    """Find the traces that this node's ranks left in the directory of a stopped session. Calls no engine."""

    session: ProfileSession
    directory: Text


class CheckProfile(Struct, frozen=True, tag="check_profile"):
    """Check that this engine, as it was launched, can record what the plan asks. Starts nothing.

    Attributes:
        plan: What to record.
    """

    plan: ProfilePlan


class FinishProfile(Struct, frozen=True, tag="finish_profile"):
    """Move the traces in these directories and run the hook, as `plan.finish` says. Calls no engine."""

    plan: ProfilePlan
    directories: tuple[Text, ...]
    steps: tuple[Count, ...]


class CheckAdapter(Struct, frozen=True, tag="check_adapter"):
    """Check that the engine can serve a version of an adapter, from its files and what the engine was launched with.

    Attributes:
        adapter: The version.
    """

    adapter: AdapterVersion


class LoadAdapter(Struct, frozen=True, tag="load_adapter"):
    """Load a version of an adapter beside what the engine has, under its own name, and never in place.

    Attributes:
        adapter: The version.
    """

    adapter: AdapterVersion


class UnloadAdapter(Struct, frozen=True, tag="unload_adapter"):
    """Unload a version of an adapter that no request runs on. Refused if one does, or if that can't be known.

    Attributes:
        model: What the engine calls it.
        waited: The time of policy is over, after which an engine that can't tell which requests run on it may be asked.
    """

    model: Name
    waited: bool


ProfileCall = CheckProfile | StartProfile | StopProfile
EngineCall = (
    CheckSource
    | Pause
    | Resume
    | Sleep
    | Wake
    | Load
    | Restore
    | Flush
    | Abort
    | CheckAdapter
    | LoadAdapter
    | UnloadAdapter
    | ProfileCall
)
DiskCall = CollectTraces | FinishProfile
Call = EngineCall | DiskCall | AwaitPush | AwaitIdle | Observe

# --- the state of the engine ------------------------------------------------------------------------------------------


class Remedies(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What helps when a call of an engine failed or was not answered.

    Attributes:
        idempotent: Operations that do no harm when what they ask for holds already. Where the state can't be read, they
            are made again.
        launched_from: Directory from which `Restore` can load the weights of the launch again.
    """

    idempotent: frozenset[Operation] = frozenset()
    launched_from: Text | None = None


class Observation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State that a backend read from its engine. None where this engine can't tell.

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
        remedies: What helps when a call failed or was not answered; None for nothing.
        running: Requests that are being generated.
        waiting: Requests that wait until they are.
        generated: Tokens generated since the launch.
        recomputes: A flush also succeeds while requests are frozen, and they are computed anew when they continue.
        trouble: Why the engine can't be used from here, in its own words: it refuses the key, say.
        adapters: LoRA adapters that it lists, by the names that it has for them, each with the directory that it was
            loaded from: relative to the checkpoint root, absolute if it lies elsewhere, empty if the engine can't tell.
        adapter_places: How many adapters it holds at most; None for no limit, or if it does not say.
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
    remedies: Remedies | None = None
    running: Count | None = None
    waiting: Count | None = None
    generated: Count | None = None
    recomputes: bool = False
    trouble: Text | None = None
    adapters: Mapping[Name, Text] | None = None
    adapter_places: Count | None = None


class Returned(Struct, frozen=True, kw_only=True, tag="ok", omit_defaults=True):
    """Result of a call that succeeded. Each field means the same as in `Acted`.

    Attributes:
        digest: sha256 of the weights that the engine now holds, if it can tell.
        took: What a load from a source with a delta took.
        auto_stopped: The engine had ended the session by itself.
        traces: What the session left on this node.
        ranks_without_trace: Selected ranks that left none.
        still_running: It goes on in the background.
    """

    digest: Name | None = None
    took: Text = ""
    auto_stopped: bool = False
    traces: tuple[Trace, ...] = ()
    ranks_without_trace: tuple[Count, ...] = ()
    still_running: bool = False


class Fault(Struct, frozen=True, tag="fault"):
    """Result of a call that failed.

    Attributes:
        kind: `source_refused`, `unsupported` and `refused`: the engine is as it was. `engine_error`: it failed the
            call, and may have been touched. `unanswered`: it may or may not have carried the call out.
    """

    kind: Literal["source_refused", "unsupported", "refused", "engine_error", "unanswered"]
    message: Text


# --- events -----------------------------------------------------------------------------------------------------------


class MachineSettings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits and choices of one machine.

    Attributes:
        max_buffered: Most commands queued, and most commands buffered behind a hole.
        reconcile_timeout_ms: Deadline of an engine call that belongs to no command.
        on_lost_bus: What the engine does once the lease has expired: serve the committed weights, or pause.
        wedged_after_ms: An engine whose running requests make no progress for this long is wedged.
        adapter_grace_ms: Time for which requests may still run on a version of an adapter that is no longer wanted, if
            the engine can't tell which ones do.
        game_day: The agent was started with a plan of faults.
    """

    max_buffered: Positive = 256
    reconcile_timeout_ms: Milliseconds = 600_000
    on_lost_bus: OnLostBus = "serve"
    memory: Memory = "agent"
    wedged_after_ms: Milliseconds = 300_000
    adapter_grace_ms: Milliseconds = 600_000
    game_day: bool = False


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """First event of every incarnation. After a restart it follows the events replayed from the journal."""

    at_ms: Moment
    identity: Identity
    incarnation: Name
    settings: MachineSettings = MachineSettings()


class CommandReceived(Struct, frozen=True, kw_only=True, tag="command"):
    """A command, live or resent.

    Attributes:
        origin: Epoch in which the command was recorded, not used for fencing.
        command: The command; `UnknownCommand` if this version can't read it.
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


class LeaseExpired(Struct, frozen=True, kw_only=True, tag="lease_expired"):
    """The bus was silent for the length of the lease."""

    at_ms: Moment


class Tick(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tick"):
    """A deadline that `workers.machine.decide.next_deadline` returned has passed.

    Attributes:
        stacks: Of an engine that has not answered: a sentence for the outcome, where its stacks are, or why nowhere.
    """

    at_ms: Moment
    stacks: Text = ""


class Stopping(Struct, frozen=True, kw_only=True, tag="stopping"):
    """The agent was asked to end. It awaits the call in flight and begins no other; what is queued is not decided."""

    at_ms: Moment


class FaultInjected(Struct, frozen=True, kw_only=True, tag="fault"):
    """The agent does something wrong on purpose, as soon as this is in its journal. It changes no decision.

    Attributes:
        name: Of the fault in its plan.
        what: What goes wrong.
    """

    at_ms: Moment
    name: Name
    what: Name


Event = (
    Started
    | CommandReceived
    | HeadSeen
    | SnapshotReceived
    | EngineObserved
    | EngineReturned
    | LeaseExpired
    | Tick
    | Stopping
    | FaultInjected
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


Effect = Perform | Answer | RequestResend | RequestSnapshot | Restart


class Decision(Struct, frozen=True):
    """One step of a machine, as journalled and logged: the encoded event and the encoded effects that followed."""

    event: Raw
    effects: Raw
