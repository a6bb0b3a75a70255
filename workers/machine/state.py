"""What one agent knows: the state of its machine between two events, and what it believes about its engine."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import AdapterVersion
from schemas.desired import Committed, Desired, ProfileSession
from schemas.events import (
    Answer,
    AwaitIdle,
    AwaitPush,
    Call,
    CommandReceived,
    Effect,
    FinishProfile,
    MachineSettings,
    Observation,
    Perform,
    Returned,
)
from schemas.identity import Count, Identity, Memory, Operation, Positive, Tag
from schemas.outcomes import Skipped

REMEMBERED = 16
"""Number of stored answers: at least this many, at most twice as many."""
_MOST_REMEMBERED = 2 * REMEMBERED

NOTHING_REPORTED = Returned()
PAUSE_AND_RESUME = frozenset({Operation.PAUSE, Operation.RESUME})
"""An engine without these two keeps its weights and memory as they are: changing either needs a pause."""
_SLEEP_AND_WAKE = frozenset({Operation.SLEEP, Operation.WAKE})
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
    """What the machine believes about its engine: the effect of its calls, corrected by each observation. What has the
    name of a field of `Observation` or `Remedies` is that.

    Attributes:
        name: Engine and version, as observed.
        generating: False while paused; None if not known.
        memory: Who releases its memory.
        asleep: Memory that the agent has released.
        unknown: Memory that may or may not be released.
        asleep_by_trainer: Memory that the trainer's own data plane has released.
        session: The open profiling session.
        opening: Its start was cut off or not answered: it may not be open.
        closing: Its stop was cut off or not answered: it may still be open.
        version: Version of the weights in the engine; 0 as launched.
        label: The engine's own label of its weights, as last observed; None if it reports none.
        version_label: The label that it had when `version` was established.
        launch_label: The label that this launch had when it was first seen, if that is none of a launch.
        maybe_pushed: A trainer may have pushed weights since the last observation.
        digest: Digest of those weights, where the engine reports one.
        launched_from: Where the weights of the launch can be loaded from again; None if not known.
        torn: It is not known which weights are in the engine: a load failed or was cut off, or they were discarded.
        stale_cache: The cache holds prefixes that other weights computed.
        loaded: The weights that the last load asked for. The version alone does not identify weights, since an aborted
            version may be tried again from another source.
        checked: The weights whose source last passed its check.
        requests_kept: The last pause froze the requests, which will continue; or may have, if it was not made here.
        progress: Progress of the running requests; None if none run, or the engine does not count.
        seen: The last observation as it was, if the agent only observes: then nothing else is believed.
        unshown: Calls since the last observation that leave a mark: a launch that was not seen may have made them.
        stale_adapters: Those that have to be loaded again, since their memory was discarded.
        checked_adapter: The version whose files last passed their check.
    """

    name: str = "unknown"
    instance: str | None = None
    tokenizer: Literal["present", "absent", "unknown"] = "unknown"
    operations: frozenset[Operation] = frozenset()
    idempotent: frozenset[Operation] = frozenset()
    generating: bool | None = True
    memory: Memory = "agent"
    asleep: frozenset[Tag] = frozenset()
    unknown: frozenset[Tag] = frozenset()
    asleep_by_trainer: frozenset[Tag] = frozenset()
    session: ProfileSession | None = None
    opening: bool = False
    closing: bool = False
    version: Count = 0
    label: str | None = None
    version_label: str | None = None
    launch_label: str | None = None
    maybe_pushed: bool = False
    digest: str | None = None
    launched_from: str | None = None
    torn: bool = False
    stale_cache: bool = False
    loaded: Committed | None = None
    checked: Committed | None = None
    requests_kept: bool = False
    recomputes: bool = False
    progress: Progress | None = None
    trouble: str | None = None
    seen: Observation | None = None
    unshown: tuple[Call, ...] = ()
    adapters: Mapping[str, str] = {}
    stale_adapters: frozenset[str] = frozenset()
    checked_adapter: AdapterVersion | None = None
    adapter_places: Count | None = None

    @property
    def label_changed(self) -> bool:
        """Whether another program has changed the weights: their label is not the one that goes with `version`."""
        return self.label != self.version_label

    def may_profile(self, step: int) -> bool:
        """Whether the session of this step is open, or may still be."""
        return self.session is not None and self.session.step == step

    @property
    def lost(self) -> bool:
        """Whether the engine's state is not known, and asking again could kill it. Only a relaunch helps."""
        paused = self.generating is not None or self.idempotent >= PAUSE_AND_RESUME
        return not (paused and (not self.unknown or self.idempotent >= _SLEEP_AND_WAKE))


class Suppressed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parts of the desired state that this agent has given up; see `workers/machine/suppressed.py`.

    Attributes:
        session: The desired profiling session failed to open, or its command expired.
        recorded: A session that had ended with its window when the bus was lost: it is not opened again.
        reported: What that session left, for the outcome of its stop.
        sync: Version of the weight sync that this replica has dropped out of; 0 if none.
        quarantined: Version that this replica could not load; 0 if none. The replica stays paused until the next
            commit, or until that sync is aborted.
        generation: What the replica continues to be, because a pause or a resume failed; None if neither did.
        awake: Memory that could not be released, and stays awake.
        asleep: Memory that could not be woken, and stays asleep.
        adapters: Versions of adapters that could not be loaded, by their names in the engine.
    """

    session: bool = False
    recorded: ProfileSession | None = None
    reported: Returned = NOTHING_REPORTED
    sync: Count = 0
    quarantined: Count = 0
    generation: Literal["running", "paused"] | None = None
    awake: frozenset[Tag] = frozenset()
    asleep: frozenset[Tag] = frozenset()
    adapters: frozenset[str] = frozenset()


class Unload(Struct, frozen=True):
    """When to unload a version of an adapter that is no longer wanted.

    Attributes:
        ask_ms: When to ask the engine next.
        until_ms: From then on also if the engine can't tell which requests run on it.
    """

    ask_ms: int
    until_ms: int


NOTHING_SUPPRESSED = Suppressed()


class Activity(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Engine calls that are being made, one at a time.

    Attributes:
        trigger: The command that needs them; None if the machine makes them by itself, to reconcile.
        calls: Calls not yet returned. The first is in flight.
        call_id: Number of the call in flight.
        deadline_ms: When the command fails with `engine_timeout`.
        completed: Names of the calls that succeeded.
        reported: What those calls reported about a profiling session, or about a load.
        overdue: The deadline has passed and the command was answered. The call in flight is still awaited.
        before: What was desired before the trigger, if that is an engine command or begins a sync; if it fails, that is
            pursued again.
        since_ms: When the call in flight began.
        stacks: Once it is overdue: where its stacks are; empty if none were taken.
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
    stacks: str = ""


class Remembered(Struct, frozen=True):
    """What was desired of one launch of the engine when an incarnation of its agent ended."""

    desired: Desired
    instance: str | None


class AgentState(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Everything an agent knows. Nothing that can be derived is stored.

    Attributes:
        identity: The place of this node in the fleet.
        incarnation: Names this life of the agent.
        settings: Limits of the machine.
        epoch: Newest bus epoch seen.
        snapshot_epoch: Epoch of the snapshot that the position builds on; 0 before the first one of this incarnation.
        seq: Position: the last command that was taken in order.
        desired: The fold of the run's commands up to `seq`.
        suppressed: Parts of `desired` that are not pursued.
        engine: What is believed about the engine.
        remembered: What an earlier incarnation knew, until a snapshot comes; None if that was nothing.
        bus_lost: The lease has expired since the last snapshot.
        queue: Commands in order, not decided yet.
        reorder_buffer: Commands behind a hole.
        resend_from: First seq of the pending resend request; 0 if none.
        activity: Engine calls that are being made.
        calls_made: Number of calls begun so far; the last `call_id`.
        answers: The newest answers, for commands that arrive again.
        reconcile_blocked: Reconciling failed, and is not tried again until something changes, or until `retry_at_ms`.
        retry_at_ms: When a call that does no harm if it is made twice is tried again; 0 if none is.
        retries: How many times it was tried.
        changed_by_others: Something else has changed the engine since the bus was last heard: perhaps its new
            commander, so the change stands until the bus is heard again.
        relabelled: How often something else has replaced the weights since the last command: at the second time it is
            a commander that undoes what this one does.
        deferred_finish: A finish that waits until the engine has written its last trace.
        interrupted: What was under way when the last incarnation ended. It is resolved by the next observation.
        stopping: The agent was asked to end. The call in flight is awaited, and no other is begun.
        unloads: When to unload each version of an adapter that the engine holds and that is no longer wanted.
        faults: How often each fault of a game day was injected, by its name.
    """

    identity: Identity = Identity(replica=0, node_rank=0)
    incarnation: str = ""
    settings: MachineSettings = MachineSettings()
    epoch: Count = 0
    snapshot_epoch: Count = 0
    seq: Count = 0
    desired: Desired = Desired()
    suppressed: Suppressed = NOTHING_SUPPRESSED
    engine: EngineState = EngineState()
    remembered: Remembered | None = None
    bus_lost: bool = False
    queue: tuple[CommandReceived, ...] = ()
    reorder_buffer: tuple[CommandReceived, ...] = ()
    resend_from: Count = 0
    activity: Activity | None = None
    calls_made: Count = 0
    answers: tuple[Answer, ...] = ()
    reconcile_blocked: bool = False
    retry_at_ms: int = 0
    retries: Count = 0
    changed_by_others: bool = False
    relabelled: Count = 0
    deferred_finish: FinishProfile | None = None
    interrupted: Activity | None = None
    stopping: bool = False
    unloads: Mapping[str, Unload] = {}
    faults: Mapping[str, Count] = {}

    @property
    def joined(self) -> bool:
        """Whether a snapshot was applied in this incarnation."""
        return self.snapshot_epoch > 0

    @property
    def informed(self) -> bool:
        """Whether `desired` is what this agent pursues: a snapshot brought it, or the lease has expired without one and
        the engine is still the launch that is remembered. Of another launch nothing is known: it may be of another run.
        """
        known = self.remembered is not None and self.remembered.instance == self.engine.instance
        return self.joined or (self.bus_lost and known)

    @property
    def needs_snapshot(self) -> bool:
        """Whether only a snapshot helps: the lease expired, or a bus began a new life, whose log may have lost what
        this agent applied.
        """
        return self.bus_lost or 0 < self.snapshot_epoch < self.epoch

    @property
    def weights_changed(self) -> bool:
        """Whether the engine holds weights that another program gave it, which no sync of the run explains."""
        return self.engine.label_changed and self.desired.sync is None and self.identity.syncs

    @property
    def contested(self) -> bool:
        """Whether something else undoes what this agent does: two of them would take turns for ever."""
        return self.changed_by_others and self.relabelled > 1

    @property
    def awaits_push(self) -> bool:
        """Whether the call under way only waits for weights that the trainer pushes. No engine is called meanwhile."""
        activity = self.activity
        return activity is not None and not activity.overdue and isinstance(activity.calls[0], AwaitPush)

    @property
    def idle_at_ms(self) -> int | None:
        """Until when the call under way waits for running requests to end; None if none does."""
        activity = self.activity
        if activity is None or activity.trigger is None or activity.overdue:
            return None
        call = activity.calls[0]
        return activity.trigger.at_ms + call.grace_ms if isinstance(call, AwaitIdle) else None

    @property
    def in_a_sync(self) -> bool:
        """Whether a sync is open here, or one that was received and not decided may be."""
        loading = any(adapter.loading is not None for adapter in self.desired.adapters.values())
        return self.desired.sync is not None or loading or bool(self.queue)

    @property
    def waits_paused(self) -> bool:
        """Whether the engine may not generate before a bus is back."""
        return self.bus_lost and self.settings.on_lost_bus == "pause"


def remember(answers: tuple[Answer, ...], answer: Answer) -> tuple[Answer, ...]:
    """Return `answers` with `answer` added. Half are dropped at a time: dropping one each time would copy more."""
    return (answers[-REMEMBERED:] if len(answers) >= _MOST_REMEMBERED else answers) + (answer,)


def with_fault(state: AgentState, name: str) -> AgentState:
    """Return the state with one more fault of a game day. Nothing else: an agent under test decides as any other."""
    return replace(state, faults={**state.faults, name: state.faults.get(name, 0) + 1})


def call_name(call: Call) -> str:
    """Return the name of a call in outcomes and logs: its tag."""
    return _CALL_NAMES[type(call)]


def with_engine_state(message: str, engine: EngineState) -> str:
    """Return an error message with a sentence on what the engine holds now, if weights can be loaded into it at all."""
    if Operation.LOAD not in engine.operations:
        return message
    weights = "weights that can't be trusted" if engine.torn else f"version {engine.version}"
    if engine.label_changed:
        weights = f"weights labelled {engine.label!r}, which are not those of version {engine.version}"
    runs = "running or paused" if engine.generating is None else "running" if engine.generating else "paused"
    message += f" The engine holds {weights} and is {runs}."
    return f"{message} Which of its memory is released is not known." if engine.unknown else message


def is_written_first(before: AgentState, effects: Sequence[Effect]) -> bool:
    """Whether a decision, made in the state `before`, must be in the journal before its effects are performed.

    It calls the engine, answers with more than a skip, or answers the command whose call is under way. A restart makes
    any other decision again, in the same way. But a call that it finds in the journal is resolved by observing the
    engine: its command would be answered once more, and differently.
    """
    trigger = before.activity.trigger if before.activity is not None else None
    answered = trigger.seq if trigger is not None else None
    return any(
        isinstance(effect, Perform)
        or (isinstance(effect, Answer) and (type(effect.outcome) is not Skipped or effect.seq == answered))
        for effect in effects
    )
