"""The machine of one agent: `decide(state, event) -> (state, effects)`. Everything an agent decides is decided here.

Rules
1. Pure: no I/O, no clock, no randomness, no logging; the same state and event give the same decision for ever.
2. Total: it never raises for an input. What can't be done is an outcome.
3. A decision is written to the journal before its effects are performed, so a `Perform` in the journal without a later
   `EngineReturned` means: cut off in the middle. That is the whole write-ahead protocol.
4. One engine call at a time, in the order of the commands. A call is never taken back: past its deadline the command
   is failed and the call's result awaited.

Theory of operation. A command first passes *order* (`ORDER`, rows 1 to 3): is it of a living epoch, new, next in
line? Those rows leave the position where it is, and row 3 holds the command until replay has filled the hole. From
row 4 on the command is in order: it moves the position and changes what is desired, *also when it is skipped*. Then
*eligibility* (`GATE`, rows 4 to 9), then the command's own rule (row 10, `workers/rules/commands.py`), which compares
what is desired with what the engine is (`workers/rules/settle.py`) and gives the calls to make.

When nothing is left to do for a command and the engine is not as desired (a late joiner, a restart, a missed
command, the lease), the machine makes the same calls on its own account.

The transition that is missing on purpose: an agent never serves before a snapshot has told it what is desired.
"""

from collections.abc import Callable
from typing import NamedTuple, assert_never

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import ProfileCommand, UnknownCommand, WeightSync
from schemas.desired import Desired, intend, orphaned
from schemas.events import (
    Answer,
    AskSnapshot,
    Call,
    CheckSource,
    CommandReceived,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    Load,
    Need,
    Perform,
    Returned,
    Settings,
    SnapshotReceived,
    Started,
    StartProfile,
    Tick,
)
from schemas.identity import Count, Identity, Positive
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped, Trace
from workers.rules.commands import required, rule
from workers.rules.settle import EngineState, believe, holds, interrupted, learn, name, settle

LOGIC = 1
"""Version of the decisions below. It is recorded with every log; a change of behaviour is a new number."""

REMEMBERED = 128
"""Outcomes kept for commands that arrive again."""


class Activity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engine calls under way: for a command, or (cause None) on the machine's own account.

    calls: still to be made; the first is in flight.   made: names of those that returned well.
    overdue: the deadline passed and the command was answered; the call in flight is still awaited.
    """

    cause: CommandReceived | None
    calls: tuple[Call, ...]
    call_id: Positive
    deadline_ms: int
    made: tuple[str, ...] = ()
    auto_stopped: bool = False
    traces: tuple[Trace, ...] = ()
    overdue: bool = False


class AgentState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything an agent knows. Nothing that can be derived is stored.

    epoch, seq: newest bus epoch seen; last command applied in order.   origin: epoch of the record at `seq`.
    joined: a snapshot was applied in this incarnation.   astray: the lease ran out or histories diverged; only a
    snapshot helps.   queue: in order, not decided yet.   held: after a hole.   needs: first seq asked for, 0 if none.
    inhibited: settling failed and waits for something new before it is tried again.
    interrupted: what was under way when the last incarnation ended; settled once the engine has been read.
    """

    identity: Identity = Identity(replica=0, node_rank=0)
    incarnation: str = ""
    settings: Settings = Settings()
    epoch: Count = 0
    seq: Count = 0
    desired: Desired = Desired()
    engine: EngineState = EngineState()
    joined: bool = False
    astray: bool = False
    queue: tuple[CommandReceived, ...] = ()
    held: tuple[CommandReceived, ...] = ()
    needs: Count = 0
    activity: Activity | None = None
    calls_made: Count = 0
    answers: tuple[Answer, ...] = ()
    inhibited: bool = False
    interrupted: Activity | None = None


Decided = tuple[AgentState, tuple[Effect, ...]]


class Row(NamedTuple):
    """One row of the decision table."""

    number: int
    when: Callable[[AgentState, CommandReceived], bool]
    then: Callable[[AgentState, CommandReceived], Outcome]


def _not_targeted(state: AgentState, event: CommandReceived) -> bool:
    replicas = event.target.replicas
    return replicas is not None and state.identity.replica not in replicas


def _tokenizer_missing(state: AgentState, event: CommandReceived) -> Outcome:
    return Failed(
        ErrorKind.TOKENIZER_MISSING,
        f"replica {state.identity.replica} has no tokenizer manager on its node rank 0, so nobody can command its "
        "engine. The engine was not called: look at its launch.",
    )


def _unsupported(state: AgentState, event: CommandReceived) -> bool:
    operation = required(event.command)
    return operation is not None and operation not in state.engine.operations


def _say_unsupported(state: AgentState, event: CommandReceived) -> Outcome:
    operation = required(event.command)
    has = ", ".join(sorted(state.engine.operations)) or "none"
    return Failed(ErrorKind.UNSUPPORTED, f"{state.engine.name} has no operation {operation}; it has: {has}.")


def _say_unknown(state: AgentState, event: CommandReceived) -> Outcome:
    tag = event.command.tag if isinstance(event.command, UnknownCommand) else ""
    return Failed(ErrorKind.UNSUPPORTED, f"this agent knows no command {tag!r}: it is older than its bus.")


GATE: tuple[Row, ...] = (  # the first row that holds wins; row 4 is asked when the command's turn comes
    Row(5, _not_targeted, lambda s, e: Skipped(Reason.NOT_TARGETED)),
    Row(6, lambda s, e: s.identity.node_rank > 0, lambda s, e: Skipped(Reason.NOT_PRIMARY)),
    # row 7 (tokenizer unknown: hold) has no outcome of its own: see `_turn`
    Row(8, lambda s, e: s.engine.tokenizer == "absent", _tokenizer_missing),
    Row(9, lambda s, e: isinstance(e.command, UnknownCommand), _say_unknown),
    Row(9, _unsupported, _say_unsupported),
)


def decide(state: AgentState, event: Event) -> Decided:
    """The next state, and what is to be done about it, in order."""
    match event:
        case CommandReceived():
            return _command(state, event)
        case EngineReturned():
            return _returned(state, event)
        case HeadSeen():
            return _head(state, event)
        case SnapshotReceived():
            return _snapshot(state, event)
        case EngineObserved():
            return _observe(state, event)
        case LeaseExpired():
            return _orphan(state, event)
        case Tick():
            return _tick(state, event)
        case Started():
            return _start(state, event)
        case _:
            assert_never(event)


def next_deadline(state: AgentState) -> int | None:
    """When the machine wants a `Tick`, in ms of its own clock; None when nothing is pending."""
    deadlines = [event.at_ms + event.ttl_ms for event in state.queue]
    if state.activity is not None and not state.activity.overdue:
        deadlines.append(state.activity.deadline_ms)
    return min(deadlines, default=None)


def settled(state: AgentState) -> bool:
    """Is the engine as desired, with nothing under way? Only then is the replica ready for traffic."""
    if not state.joined or state.astray or state.activity is not None or state.queue:
        return False
    if state.identity.node_rank > 0:
        return True
    return state.engine.tokenizer == "present" and not settle(state.desired, state.engine, state.identity)


# --- order: rows 1 to 3 -----------------------------------------------------------------------------------------------


def _command(state: AgentState, event: CommandReceived) -> Decided:
    if event.epoch < state.epoch:  # row 1
        return state, (Answer(epoch=event.origin, seq=event.seq, outcome=Skipped(Reason.STALE_EPOCH), row=1),)
    if event.epoch > state.epoch:
        state = replace(state, epoch=event.epoch, held=(), needs=0)  # a hole is asked for anew under a new epoch
    if not state.joined or state.astray:  # row 3, and the hole is everything
        state = _hold(state, event)
        return state, ((AskSnapshot(),) if state.astray else ())
    if event.seq <= state.seq:  # row 2
        return _again(state, event)
    if event.seq > state.seq + 1:  # row 3
        held = _hold(state, event)
        if state.needs == state.seq + 1:
            return held, ()
        return replace(held, needs=state.seq + 1), (Need(state.seq + 1),)
    if state.activity is None and not state.queue and not state.held:
        return _turn(replace(state, seq=event.seq, needs=0), event, event.at_ms, [])
    return _proceed(_advance(replace(state, seq=event.seq, queue=(*state.queue, event))), event.at_ms, [])


def _hold(state: AgentState, event: CommandReceived) -> AgentState:
    """Keep a command for later, in order of seq. The furthest ahead is dropped first: it can be asked for again."""
    if any(other.seq == event.seq for other in state.held):
        return state
    held = tuple(sorted((*state.held, event), key=lambda one: one.seq))
    return replace(state, held=held[: state.settings.hold])


def _advance(state: AgentState) -> AgentState:
    """Move held commands that are next in line into the queue."""
    seq, queue, held = state.seq, list(state.queue), state.held
    while held and held[0].seq <= seq + 1:
        if held[0].seq == seq + 1:
            queue.append(held[0])
            seq += 1
        held = held[1:]
    needs = state.needs if held and state.needs == seq + 1 else 0
    return replace(state, seq=seq, queue=tuple(queue), held=held, needs=needs)


def _again(state: AgentState, event: CommandReceived) -> Decided:
    """Row 2. Another record under a seq that was applied means that two histories exist: only a snapshot helps."""
    for answer in state.answers:
        if answer.seq == event.seq:
            if answer.epoch != event.origin:
                return replace(state, astray=True), (AskSnapshot(),)
            return state, (answer,)
    waiting = [other for other in state.queue if other.seq == event.seq]
    cause = state.activity.cause if state.activity is not None else None
    if waiting or (cause is not None and cause.seq == event.seq):
        return state, ()
    return state, (Answer(epoch=event.origin, seq=event.seq, outcome=Skipped(Reason.SUPERSEDED), row=2),)


def _head(state: AgentState, event: HeadSeen) -> Decided:
    if event.epoch < state.epoch:
        return state, ()
    if event.epoch > state.epoch:
        state = replace(state, epoch=event.epoch, held=(), needs=0)
    if state.astray:
        return state, (AskSnapshot(),)
    if not state.joined or event.seq <= state.seq:
        return state, ()
    return replace(state, needs=state.seq + 1), (Need(state.seq + 1),)


# --- eligibility and turns: rows 4 to 10 ------------------------------------------------------------------------------


def _proceed(state: AgentState, now_ms: int, effects: list[Effect]) -> Decided:
    """Give queued commands their turn while the engine is free; then settle what is not as desired."""
    while state.queue and (state.activity is None or state.activity.overdue):
        event = state.queue[0]
        if _must_wait(state, event, now_ms):
            break
        state, given = _turn(replace(state, queue=state.queue[1:]), event, now_ms, effects)
        effects = list(given)
    if state.activity is not None or state.queue or not state.joined or state.inhibited:
        return state, tuple(effects)
    if state.identity.node_rank > 0 or state.engine.tokenizer != "present":
        return state, tuple(effects)
    calls = settle(state.desired, state.engine, state.identity)
    if not calls:
        return state, tuple(effects)
    return _begin(state, None, calls, now_ms + state.settings.settle_ms, effects)


def _must_wait(state: AgentState, event: CommandReceived, now_ms: int) -> bool:
    """Row 7: a primary whose engine still launches holds its commands until it knows, or until their time is over."""
    launching = state.identity.node_rank == 0 and state.engine.tokenizer == "unknown"
    return launching and not _not_targeted(state, event) and now_ms < event.at_ms + event.ttl_ms


def _turn(state: AgentState, event: CommandReceived, now_ms: int, effects: list[Effect]) -> Decided:
    """Decide one command that is in order. It changes what is desired whatever the outcome."""
    if _must_wait(state, event, now_ms):
        return replace(state, queue=(event, *state.queue)), tuple(effects)
    before = state.desired
    targeted = not _not_targeted(state, event)
    desired = intend(before, event.command, targeted, state.identity)
    state = replace(state, desired=desired, inhibited=False)
    if now_ms >= event.at_ms + event.ttl_ms:
        if state.identity.node_rank == 0 and state.engine.tokenizer == "unknown" and targeted:
            return _answer(state, event, _not_ready(state), 7, effects)
        late = isinstance(event.command, ProfileCommand)  # a session must not open in a step that nobody chose
        return _answer(_concede(state, event) if late else state, event, Skipped(Reason.EXPIRED), 4, effects)
    for row in GATE:
        if row.when(state, event):
            return _answer(state, event, row.then(state, event), row.number, effects)
    if state.activity is not None:
        return _answer(_concede(state, event), event, _busy(state), 10, effects)
    if isinstance(event.command, UnknownCommand):
        return _answer(state, event, _say_unknown(state, event), 9, effects)
    verdict = rule(event.command, before, desired, state.engine, state.identity)
    if isinstance(verdict, Skipped):
        return _answer(state, event, verdict, 10, effects)
    if isinstance(verdict, Failed):
        return _answer(_concede(state, event), event, verdict, 10, effects)
    if not verdict:
        return _answer(state, event, _acted(state, event, ()), 10, effects)
    return _begin(state, event, verdict, event.at_ms + event.ttl_ms, effects)


def _answer(state: AgentState, event: CommandReceived, outcome: Outcome, row: int, effects: list[Effect]) -> Decided:
    answer = Answer(epoch=event.origin, seq=event.seq, outcome=outcome, row=row)
    effects.append(answer)
    return replace(state, answers=(*state.answers[1 - REMEMBERED :], answer)), tuple(effects)


def _acted(state: AgentState, event: CommandReceived, made: tuple[str, ...]) -> Acted:
    if isinstance(event.command, WeightSync):
        return Acted(calls=made, version=state.engine.version, digest=state.engine.digest)
    return Acted(calls=made)


def _not_ready(state: AgentState) -> Failed:
    return Failed(
        ErrorKind.ENGINE_NOT_READY,
        f"the engine of replica {state.identity.replica} was still launching when the command's time was over. "
        "It was not called; it is brought to what is desired as soon as it is up.",
    )


def _busy(state: AgentState) -> Failed:
    call = name(state.activity.calls[0]) if state.activity is not None else "a call"
    return Failed(
        ErrorKind.ENGINE_BUSY,
        f"{state.engine.name} has not answered {call} yet, past its deadline. Nothing else is sent until it does.",
    )


def _concede(state: AgentState, failed: CommandReceived | Call) -> AgentState:
    """Give up what failed and must not be tried again unasked, and leave a replica that can't follow out of service.

    A replica that refused to prepare was not touched and goes on as before the sync. One that did not load is
    quarantined: it could otherwise serve weights that nobody committed.
    """
    desired = state.desired
    command = failed.command if isinstance(failed, CommandReceived) else None
    if isinstance(command, ProfileCommand) or isinstance(failed, StartProfile):
        return replace(state, desired=replace(desired, profile=None))
    if isinstance(command, WeightSync) and command.phase == "prepare":
        return replace(state, desired=replace(desired, sync=None))
    if isinstance(command, WeightSync) or isinstance(failed, CheckSource | Load):
        if desired.sync is not None:
            return replace(state, desired=replace(desired, sync=None, quarantined=desired.sync.version))
        if state.engine.torn or state.engine.version != desired.version:
            return replace(state, desired=replace(desired, quarantined=max(1, desired.version)))
    return state


# --- engine calls -----------------------------------------------------------------------------------------------------


def _begin(
    state: AgentState, cause: CommandReceived | None, calls: tuple[Call, ...], deadline_ms: int, effects: list[Effect]
) -> Decided:
    call_id = state.calls_made + 1
    activity = Activity(cause=cause, calls=calls, call_id=call_id, deadline_ms=deadline_ms)
    effects.append(Perform(call_id=call_id, call=calls[0]))
    return replace(state, activity=activity, calls_made=call_id), tuple(effects)


def _returned(state: AgentState, event: EngineReturned) -> Decided:
    activity = state.activity
    if activity is None or activity.call_id != event.call_id:
        return state, ()  # an answer to a call of an earlier life
    call, result = activity.calls[0], event.result
    engine, failure = learn(state.engine, call, result, event.observation)
    state = replace(state, engine=engine)
    if failure is not None:
        return _failed(state, activity, failure, event.at_ms)
    if isinstance(result, Returned):
        activity = replace(
            activity,
            made=(*activity.made, name(call)),
            auto_stopped=activity.auto_stopped or result.auto_stopped,
            traces=activity.traces + result.traces,
        )
    rest = activity.calls[1:]
    if rest and not activity.overdue:
        call_id = state.calls_made + 1
        activity = replace(activity, calls=rest, call_id=call_id)
        return replace(state, activity=activity, calls_made=call_id), (Perform(call_id=call_id, call=rest[0]),)
    effects: list[Effect] = []
    state = replace(state, activity=None)
    if activity.cause is not None and not activity.overdue:
        acted = _acted(state, activity.cause, activity.made)
        acted = replace(acted, auto_stopped=activity.auto_stopped, traces=activity.traces)
        state, given = _answer(state, activity.cause, acted, 10, effects)
    return _proceed(state, event.at_ms, effects)


def _failed(state: AgentState, activity: Activity, failure: Failed, now_ms: int) -> Decided:
    effects: list[Effect] = []
    cause = activity.cause
    state = replace(_concede(state, cause or activity.calls[0]), activity=None)
    if cause is not None and not activity.overdue:
        state, _ = _answer(state, cause, failure, 10, effects)
    syncing = cause is not None and isinstance(cause.command, WeightSync)
    weights = isinstance(activity.calls[0], CheckSource | Load)
    return _proceed(replace(state, inhibited=not (syncing or weights)), now_ms, effects)


def _tick(state: AgentState, event: Tick) -> Decided:
    activity = state.activity
    effects: list[Effect] = []
    if activity is not None and not activity.overdue and event.at_ms >= activity.deadline_ms:
        if activity.cause is not None:
            late = Failed(
                ErrorKind.ENGINE_TIMEOUT,
                f"{state.engine.name} has not answered {name(activity.calls[0])} by the deadline. The call is not "
                "taken back; until it ends, nothing else is sent to this engine.",
            )
            state, _ = _answer(_concede(state, activity.cause), activity.cause, late, 10, effects)
        state = replace(state, activity=replace(activity, overdue=True))
    return _proceed(state, event.at_ms, effects)


# --- joining, losing the bus, starting again --------------------------------------------------------------------------


def _snapshot(state: AgentState, event: SnapshotReceived) -> Decided:
    newer = event.epoch > state.epoch
    if event.epoch < state.epoch or (event.seq < state.seq and not newer and state.joined):
        return state, ()
    effects: list[Effect] = []
    for waiting in state.queue:  # the snapshot holds what they asked for
        state, _ = _answer(state, waiting, Skipped(Reason.SUPERSEDED), 2, effects)
    activity = state.activity
    if activity is not None:
        if activity.cause is not None and not activity.overdue:
            state, _ = _answer(state, activity.cause, Skipped(Reason.SUPERSEDED), 2, effects)
        activity = replace(activity, cause=None, calls=activity.calls[:1])
    state = replace(
        state,
        epoch=event.epoch,
        seq=event.seq,
        desired=event.desired,
        joined=True,
        astray=False,
        queue=(),
        held=tuple(one for one in state.held if one.seq > event.seq),
        needs=0,
        activity=activity,
        inhibited=False,
    )
    return _proceed(_advance(state), event.at_ms, effects)


def _orphan(state: AgentState, event: LeaseExpired) -> Decided:
    """The trainer is gone: go on with what is committed, and ask for the desired state before obeying again."""
    if not state.joined:
        return state, ()
    state = replace(state, desired=orphaned(state.desired), astray=True, inhibited=False)
    return _proceed(state, event.at_ms, [])


def _start(state: AgentState, event: Started) -> Decided:
    """A new incarnation: what was received and not decided is forgotten, what was decided is not."""
    return (
        AgentState(
            identity=event.identity,
            incarnation=event.incarnation,
            settings=event.settings,
            epoch=state.epoch,
            seq=state.seq,
            engine=state.engine,
            calls_made=state.calls_made,
            answers=state.answers,
            interrupted=state.activity or state.interrupted,
        ),
        (),
    )


def _observe(state: AgentState, event: EngineObserved) -> Decided:
    """Correct the belief; after a restart, first settle the call that was cut off."""
    cut = state.interrupted
    if cut is None or event.observation.tokenizer == "unknown":
        return _proceed(replace(state, engine=believe(state.engine, event.observation)), event.at_ms, [])
    call = cut.calls[0]
    engine, done = interrupted(state.engine, call, event.observation)
    state = replace(state, engine=engine, interrupted=None)
    effects: list[Effect] = []
    if cut.cause is not None and not cut.overdue:
        outcome: Outcome = Failed(
            ErrorKind.UNKNOWN,
            f"the agent was restarted during {name(call)}, and whether it was done can't be read back. {holds(engine)}",
        )
        if done and len(cut.calls) == 1:
            outcome = _acted(state, cut.cause, (*cut.made, name(call)))
        state, _ = _answer(state, cut.cause, outcome, 10, effects)
    return _proceed(state, event.at_ms, effects)
