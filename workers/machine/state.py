"""What one agent knows: the state of its machine between two events, and what it believes about its engine."""

from typing import Literal, get_args

from msgspec import Struct

from schemas.desired import Committed, Desired, ProfileSession
from schemas.events import Answer, Call, CommandReceived, FinishProfile, MachineSettings, Observation, Returned
from schemas.identity import Count, Identity, Memory, Operation, Positive, Tag

REMEMBERED = 16
"""Number of stored answers: at least this many, at most twice as many."""
_MOST_REMEMBERED = 2 * REMEMBERED

NOTHING_REPORTED = Returned()
_CALL_NAMES = {kind: str(kind.__struct_config__.tag) for kind in get_args(Call)}


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Progress of the requests that an engine runs, by its own counter.

    Attributes:
        generated: Tokens generated since the launch, as last observed.
        since_ms: When that number was first observed.
        stalled: It was observed twice, with requests running.
        wedged: It has been so for too long.
    """

    generated: Count
    since_ms: int
    stalled: bool = False
    wedged: bool = False


class EngineState(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the machine believes about its engine: the effect of its calls, corrected by each observation.

    Attributes:
        name: Engine and version, as observed.
        instance: Differs between two launches of the engine; None if the engine has none.
        tokenizer: Whether this node has the request front end; unknown while the engine launches.
        operations: What the engine can be asked to do.
        generating: False while paused.
        memory: Who releases its memory.
        asleep: Memory that the agent has released.
        released: Memory that the trainer's own data plane has released.
        session: The open profiling session.
        version: Version of the weights in the engine; 0 as launched.
        label: The engine's own label of its weights, as last observed; None if it reports none.
        version_label: The label that it had when `version` was established.
        unread: A trainer may have pushed weights since the last observation.
        digest: Digest of those weights, where the engine reports one.
        torn: It is not known which weights are in the engine: a load failed or was cut off, or they were discarded.
        stale_cache: The cache holds prefixes that other weights computed.
        loaded: The weights that the last load asked for. The version alone does not identify weights, since an aborted
            version may be tried again from another source.
        checked: The weights whose source last passed its check.
        requests_kept: The last pause froze the requests. They will continue, so their cache must not be flushed.
        progress: Progress of the running requests; None if none run, or the engine does not count.
        trouble: Why the engine can't be used from here.
        seen: The last observation as it was, if the agent only observes: then nothing else is believed.
    """

    name: str = "unknown"
    instance: str | None = None
    tokenizer: Literal["present", "absent", "unknown"] = "unknown"
    operations: frozenset[Operation] = frozenset()
    generating: bool = True
    memory: Memory = "agent"
    asleep: frozenset[Tag] = frozenset()
    released: frozenset[Tag] = frozenset()
    session: ProfileSession | None = None
    version: Count = 0
    label: str | None = None
    version_label: str | None = None
    unread: bool = False
    digest: str | None = None
    torn: bool = False
    stale_cache: bool = False
    loaded: Committed | None = None
    checked: Committed | None = None
    requests_kept: bool = False
    progress: Progress | None = None
    trouble: str | None = None
    seen: Observation | None = None

    @property
    def foreign(self) -> bool:
        """Whether somebody else has changed the weights: their label is not the one that goes with `version`."""
        return self.label != self.version_label


class Suppressed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parts of the desired state that this agent has given up; see `workers/machine/suppressed.py`.

    Attributes:
        session: The desired profiling session failed to open, or its command expired.
        sync: Version of the weight sync that this replica has dropped out of; 0 if none.
        quarantined: Version that this replica could not load; 0 if none. The replica stays paused until the next
            commit, or until that sync is aborted.
        generation: What the replica continues to be, because a pause or a resume failed; None if neither did.
        awake: Memory that could not be released, and stays awake.
        asleep: Memory that could not be woken, and stays asleep.
    """

    session: bool = False
    sync: Count = 0
    quarantined: Count = 0
    generation: Literal["running", "paused"] | None = None
    awake: frozenset[Tag] = frozenset()
    asleep: frozenset[Tag] = frozenset()


NOTHING_SUPPRESSED = Suppressed()


class Activity(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Engine calls that are being made, one at a time.

    Attributes:
        trigger: The command that needs them; None if the machine makes them by itself, to reconcile.
        calls: Calls not yet returned. The first is in flight.
        call_id: Number of the call in flight.
        deadline_ms: When the command fails with `engine_timeout`.
        completed: Names of the calls that succeeded.
        reported: What those calls reported about a profiling session.
        overdue: The deadline has passed and the command was answered. The call in flight is still awaited.
        before: What was desired before the trigger, if that is an engine command; if it fails, that is pursued again.
        since_ms: When the call in flight began.
        stacks: What became of the dump of its stacks; empty while it is taken, None if none was asked for.
    """

    trigger: CommandReceived | None
    calls: tuple[Call, ...]
    call_id: Positive
    deadline_ms: int
    completed: tuple[str, ...] = ()
    reported: Returned = NOTHING_REPORTED
    overdue: bool = False
    before: Desired | None = None
    since_ms: int = 0
    stacks: str | None = None


class AgentState(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Everything an agent knows. Nothing that can be derived is stored.

    Attributes:
        identity: The place of this node in the fleet.
        incarnation: Names this life of the agent.
        settings: Limits of the machine.
        epoch: Newest bus epoch seen.
        history: Epoch of the snapshot that the position builds on; 0 before the first one of this incarnation.
        seq: Position: the last command that was taken in order.
        desired: The fold of the run's commands up to `seq`.
        suppressed: Parts of `desired` that are not pursued.
        engine: What is believed about the engine.
        bus_lost: The lease has expired since the last snapshot.
        queue: Commands in order, not decided yet.
        reorder_buffer: Commands behind a hole.
        resend_from: First seq of the pending resend request; 0 if none.
        activity: Engine calls that are being made.
        calls_made: Number of calls begun so far; the last `call_id`.
        answers: The newest answers, for commands that arrive again.
        reconcile_blocked: Reconciling failed, and is not tried again until something changes.
        deferred_finish: A finish that waits until the engine has written its last trace.
        interrupted: What was under way when the last incarnation ended. It is resolved by the next observation.
        stopping: The agent was asked to end. The call in flight is awaited, and no other is begun.
    """

    identity: Identity = Identity(replica=0, node_rank=0)
    incarnation: str = ""
    settings: MachineSettings = MachineSettings()
    epoch: Count = 0
    history: Count = 0
    seq: Count = 0
    desired: Desired = Desired()
    suppressed: Suppressed = NOTHING_SUPPRESSED
    engine: EngineState = EngineState()
    bus_lost: bool = False
    queue: tuple[CommandReceived, ...] = ()
    reorder_buffer: tuple[CommandReceived, ...] = ()
    resend_from: Count = 0
    activity: Activity | None = None
    calls_made: Count = 0
    answers: tuple[Answer, ...] = ()
    reconcile_blocked: bool = False
    deferred_finish: FinishProfile | None = None
    interrupted: Activity | None = None
    stopping: bool = False

    @property
    def joined(self) -> bool:
        """Whether a snapshot was applied in this incarnation."""
        return self.history > 0

    @property
    def diverged(self) -> bool:
        """Whether only a snapshot helps: the lease expired, or a bus began a new life, whose log may have lost what
        this agent applied.
        """
        return self.bus_lost or 0 < self.history < self.epoch

    @property
    def waits_paused(self) -> bool:
        """Whether the engine may not generate before a bus is back."""
        return self.bus_lost and self.settings.on_lost_bus == "pause"


def remember(answers: tuple[Answer, ...], answer: Answer) -> tuple[Answer, ...]:
    """Return `answers` with `answer` added. Half are dropped at a time: dropping one each time would copy more."""
    return (answers[-REMEMBERED:] if len(answers) >= _MOST_REMEMBERED else answers) + (answer,)


def call_name(call: Call) -> str:
    """Return the name of a call in outcomes and logs: its tag."""
    return _CALL_NAMES[type(call)]
