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
*eligibility* (rows 4 to 9, `workers/machine/gate.py`), then the command's own rule (row 10,
`workers/machine/commands.py`), which compares what is desired with what the engine is (`workers/machine/reconcile.py`)
and gives the calls to make.

When nothing is left to do for a command and the engine is not as desired (a late joiner, a restart, a missed
command, the lease), the machine makes the same calls on its own account.

The transition that is missing on purpose: an agent never serves before a snapshot has told it what is desired.
"""

from typing import assert_never

from msgspec.structs import replace

from schemas.commands import Command, ProfileCommand, UnknownCommand, WeightSync, durable_source
from schemas.desired import desired_after, orphaned
from schemas.events import (
    Answer,
    Call,
    CheckProfile,
    CheckSource,
    CommandReceived,
    DiskCall,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    Load,
    Perform,
    RequestResend,
    RequestSnapshot,
    Restart,
    Returned,
    SnapshotReceived,
    Started,
    Tick,
)
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from workers.machine.commands import finish_call, is_disk_command, needs_no_engine, verdict_on
from workers.machine.gate import GATE, not_targeted
from workers.machine.reconcile import (
    STEERABLE,
    apply_interruption,
    apply_observation,
    apply_result,
    call_name,
    holds_committed,
    may_serve,
    reconcile,
    relaunched,
    with_engine_state,
)
from workers.machine.state import NOTHING_REPORTED, Activity, AgentState
from workers.machine.suppressed import NOTHING_SUPPRESSED, clear_suppressed, still_desired, suppress

__all__ = ["GATE", "LOGIC", "REMEMBERED", "Activity", "AgentState", "decide", "next_deadline", "in_sync"]

LOGIC = 3
"""Version of the decisions below. It is recorded with every log; a change of behaviour is a new number."""

REMEMBERED = 16
"""Outcomes kept for commands that arrive again: at least this many, and at most twice as many."""

# Outcomes that most agents of a fleet give to most commands: built once, since building one costs a tenth of deciding.
_STALE_EPOCH = Skipped(Reason.STALE_EPOCH)
_SUPERSEDED = Skipped(Reason.SUPERSEDED)
_EXPIRED = Skipped(Reason.EXPIRED)

Effects = list[Effect]


def decide(state: AgentState, event: Event) -> tuple[AgentState, tuple[Effect, ...]]:
    """The next state, and what is to be done about it, in order."""
    before = state.engine
    effects: Effects = []
    match event:
        case CommandReceived():
            state = _command(state, event, effects)
        case EngineReturned():
            state = _returned(state, event, effects)
        case HeadSeen():
            state = _head(state, event, effects)
        case SnapshotReceived():
            state = _snapshot(state, event, effects)
        case EngineObserved():
            state = _observe(state, event, effects)
        case LeaseExpired():
            state = _lease_expired(state, event, effects)
        case Tick():
            state = _tick(state, event, effects)
        case Started():
            state = _start(state, event)
        case _:
            assert_never(event)
    if before is not state.engine and relaunched(before, state.engine) and _out_of_service(state):
        effects.append(Restart())
    return state, tuple(effects)


def _out_of_service(state: AgentState) -> bool:
    """Does only a sync or a new start lead back?"""
    left = still_desired(state.desired, state.suppressed)
    apart = state.desired.sync is not None and left.sync is None
    return state.joined and (left.quarantined > 0 or apart)


def next_deadline(state: AgentState) -> int | None:
    """When the machine wants a `Tick`, in ms of its own clock; None when nothing is pending."""
    if state.activity is not None and not state.activity.overdue:
        return state.activity.deadline_ms  # what is queued has its turn after that, whatever its own time
    return state.queue[0].at_ms + state.queue[0].ttl_ms if state.queue else None


def in_sync(state: AgentState) -> bool:
    """Is the engine as desired, with nothing under way? Only then is the replica ready for traffic."""
    if not state.joined or state.diverged or state.activity is not None or state.queue:
        return False
    if state.identity.node_rank > 0:
        return True
    left, engine = still_desired(state.desired, state.suppressed), state.engine
    if not engine.operations >= STEERABLE and not (may_serve(left, engine) and holds_committed(left, engine)):
        return False  # it goes on with what nobody wants, and can't be stopped
    committed = left.committed
    if committed is not None and durable_source(committed.source) is None and not holds_committed(left, engine):
        return False  # it waits for the next sync: what is committed was to be had only once
    return engine.tokenizer == "present" and not reconcile(left, engine, state.identity)


# --- order: rows 1 to 3 -----------------------------------------------------------------------------------------------
# The functions below append to `effects` and return the next state.


def _command(state: AgentState, event: CommandReceived, effects: Effects) -> AgentState:
    if event.epoch != state.epoch:
        if event.epoch < state.epoch:  # row 1
            effects.append(Answer(epoch=event.origin, seq=event.seq, outcome=_STALE_EPOCH, rule=1))
            return state
        state = replace(
            state, epoch=event.epoch, reorder_buffer=(), resend_from=0
        )  # a hole is asked for anew under a new epoch
    if not state.joined or state.diverged:  # row 3, and the hole is everything
        if state.diverged:
            effects.append(RequestSnapshot())
        return _buffer(state, event)
    if event.seq <= state.seq:  # row 2
        return _again(state, event, effects)
    if event.seq > state.seq + 1:  # row 3
        return _ask(_buffer(state, event), effects)
    if len(state.queue) >= state.settings.max_buffered:
        return _buffer(state, event)  # no room: it is next in line, and taken when the queue moves
    if state.queue or state.reorder_buffer or state.activity is not None:
        state = _advance(replace(state, seq=event.seq, queue=(*state.queue, event)))
        return _proceed(state, event.at_ms, effects)
    if state.engine.tokenizer == "unknown" and _must_wait(state, event, event.at_ms):
        return replace(state, seq=event.seq, queue=(event,), resend_from=0)
    turned = _turn(state, event, event.seq, event.at_ms, effects)
    if turned.desired is state.desired and turned.suppressed is state.suppressed and not state.reconcile_blocked:
        return turned
    return _proceed(turned, event.at_ms, effects)  # also a command that was refused changes what is desired


def _ask(state: AgentState, effects: Effects) -> AgentState:
    """Ask for the first record that is missing, unless that was done; the head beacon asks again."""
    if state.resend_from == state.seq + 1:
        return state
    effects.append(RequestResend(state.seq + 1))
    return replace(state, resend_from=state.seq + 1)


def _buffer(state: AgentState, event: CommandReceived) -> AgentState:
    """Keep a command for later, in order of seq. The furthest ahead is dropped first: it can be asked for again."""
    if any(other.seq == event.seq for other in state.reorder_buffer):
        return state
    reorder_buffer = tuple(sorted((*state.reorder_buffer, event), key=lambda one: one.seq))
    return replace(state, reorder_buffer=reorder_buffer[: state.settings.max_buffered])


def _advance(state: AgentState) -> AgentState:
    """Move held commands that are next in line into the queue, while it has room."""
    seq, queue, reorder_buffer = state.seq, list(state.queue), state.reorder_buffer
    while reorder_buffer and reorder_buffer[0].seq <= seq + 1 and len(queue) < state.settings.max_buffered:
        if reorder_buffer[0].seq == seq + 1:
            queue.append(reorder_buffer[0])
            seq += 1
        reorder_buffer = reorder_buffer[1:]
    resend_from = state.resend_from if reorder_buffer and state.resend_from == seq + 1 else 0
    return replace(state, seq=seq, queue=tuple(queue), reorder_buffer=reorder_buffer, resend_from=resend_from)


def _again(state: AgentState, event: CommandReceived, effects: Effects) -> AgentState:
    """Row 2. Another record under a seq that was applied means that two histories exist: only a snapshot helps."""
    for answer in state.answers:
        if answer.seq == event.seq:
            if answer.epoch != event.origin:
                effects.append(RequestSnapshot())
                return replace(state, diverged=True)
            effects.append(answer)
            return state
    cause = state.activity.cause if state.activity is not None else None
    if any(other.seq == event.seq for other in state.queue) or (cause is not None and cause.seq == event.seq):
        return state
    effects.append(Answer(epoch=event.origin, seq=event.seq, outcome=_SUPERSEDED, rule=2))
    return state


def _head(state: AgentState, event: HeadSeen, effects: Effects) -> AgentState:
    if event.epoch < state.epoch:
        return state
    if event.epoch > state.epoch:
        state = replace(state, epoch=event.epoch, reorder_buffer=(), resend_from=0)
    if state.diverged:
        effects.append(RequestSnapshot())
        return state
    if not state.joined or event.seq <= state.seq or len(state.queue) >= state.settings.max_buffered:
        return state
    return _ask(replace(state, resend_from=0), effects)


# --- eligibility and turns: rows 4 to 10 ------------------------------------------------------------------------------


def _proceed(state: AgentState, now_ms: int, effects: Effects) -> AgentState:
    """Give queued commands their turn while the engine is free; then settle what is not as desired."""
    while state.queue and (state.activity is None or state.activity.overdue):
        event = state.queue[0]
        if _must_wait(state, event, now_ms):
            return state
        state = _turn(replace(state, queue=state.queue[1:]), event, state.seq, now_ms, effects)
        if state.reorder_buffer:
            state = _advance(state)
    if state.activity is not None or not state.joined:
        return state
    if state.deferred_finish is not None:
        deferred_finish = (state.deferred_finish,)
        return _begin(
            replace(state, deferred_finish=None),
            None,
            deferred_finish,
            now_ms + state.settings.reconcile_timeout_ms,
            effects,
        )
    if state.reconcile_blocked:
        return state
    if state.identity.node_rank > 0 or state.engine.tokenizer != "present":
        return state
    calls = reconcile(still_desired(state.desired, state.suppressed), state.engine, state.identity)
    if not calls:
        return state
    return _begin(state, None, calls, now_ms + state.settings.reconcile_timeout_ms, effects)


def _must_wait(state: AgentState, event: CommandReceived, now_ms: int) -> bool:
    """Row 7: a primary whose engine still launches holds its commands until it knows, or until their time is over."""
    return _launching(state, event) and now_ms < event.at_ms + event.ttl_ms


def _launching(state: AgentState, event: CommandReceived) -> bool:
    if state.identity.node_rank > 0 or state.engine.tokenizer != "unknown" or not_targeted(state, event):
        return False
    return not (is_disk_command(event.command) or needs_no_engine(event.command, state.engine, state.identity))


def _turn(state: AgentState, event: CommandReceived, seq: int, now_ms: int, effects: Effects) -> AgentState:
    """Decide one command that is in order. It changes what is desired whatever the outcome. seq: the new position."""
    before, suppressed = state.desired, state.suppressed
    targeted = not not_targeted(state, event)
    desired = desired_after(before, event.command, targeted, state.identity)
    if targeted and suppressed is not NOTHING_SUPPRESSED:
        suppressed = clear_suppressed(suppressed, event.command, before)
    if now_ms >= event.at_ms + event.ttl_ms:
        late = replace(state, seq=seq, desired=desired, suppressed=suppressed, reconcile_blocked=False)
        return _expired(late, event, effects)
    for number, when, then in GATE:
        if when(state, event):
            answer = Answer(epoch=event.origin, seq=event.seq, outcome=then(state, event), rule=number)
            effects.append(answer)
            remembered = _remember(state.answers, answer)
            return replace(
                state,
                seq=seq,
                desired=desired,
                suppressed=suppressed,
                reconcile_blocked=False,
                resend_from=0,
                answers=remembered,
            )
    earlier = still_desired(before, state.suppressed)
    state = replace(state, seq=seq, desired=desired, suppressed=suppressed, reconcile_blocked=False, resend_from=0)
    if state.activity is not None and not _spared(state, event):
        if isinstance(event.command, ProfileCommand) and event.command.action == "finish":
            return _defer_finish(state, event, event.command, effects)
        return _answer(_suppress(state, event.command), event, _busy(state), 10, effects)
    syncing = before.sync.version if before.sync is not None else 0
    verdict = verdict_on(
        event.command, earlier, still_desired(desired, suppressed), syncing, state.engine, state.identity
    )
    if isinstance(verdict, tuple):
        if verdict:
            return _begin(state, event, verdict, event.at_ms + event.ttl_ms, effects)
        return _answer(state, event, _acted(state, event, ()), 10, effects)
    if isinstance(verdict, Failed):
        state = _suppress(state, event.command)
    return _answer(state, event, verdict, 10, effects)


def _spared(state: AgentState, event: CommandReceived) -> bool:
    """Is a busy engine not in the way? Of a stop it is: the start may be what is under way."""
    stopping = isinstance(event.command, ProfileCommand) and event.command.action == "stop"
    return not stopping and needs_no_engine(event.command, state.engine, state.identity)


def _defer_finish(state: AgentState, event: CommandReceived, command: ProfileCommand, effects: Effects) -> AgentState:
    """The last trace is still being written, past the deadline of its stop: it is finished when the engine is free."""
    owing = replace(state, deferred_finish=finish_call(command, state.identity))
    return _answer(owing, event, Acted(calls=(), still_running=True), 10, effects)


def _expired(state: AgentState, event: CommandReceived, effects: Effects) -> AgentState:
    """Rows 4 and 7: the time is over. A session must not open in a step that nobody chose; the rest is settled late."""
    if _launching(state, event):
        return _answer(state, event, _not_ready(state), 7, effects)
    state = _suppress(state, event.command) if isinstance(event.command, ProfileCommand) else state
    return _answer(state, event, _EXPIRED, 4, effects)


def _answer(state: AgentState, event: CommandReceived, outcome: Outcome, rule: int, effects: Effects) -> AgentState:
    answer = Answer(epoch=event.origin, seq=event.seq, outcome=outcome, rule=rule)
    effects.append(answer)
    return replace(state, answers=_remember(state.answers, answer))


def _remember(answers: tuple[Answer, ...], answer: Answer) -> tuple[Answer, ...]:
    """Trimmed by half at a time: cutting one off for each one added would copy more than it keeps."""
    return (answers[-REMEMBERED:] if len(answers) >= 2 * REMEMBERED else answers) + (answer,)


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
    call = call_name(state.activity.calls[0]) if state.activity is not None else "a call"
    return Failed(
        ErrorKind.ENGINE_BUSY,
        f"{state.engine.name} has not answered {call} yet, past its deadline. Nothing else is sent until it does.",
    )


def _suppress(state: AgentState, failed: Command | UnknownCommand | Call) -> AgentState:
    left = still_desired(state.desired, state.suppressed)
    return replace(state, suppressed=suppress(state.suppressed, failed, left, state.engine))


# --- engine calls -----------------------------------------------------------------------------------------------------


def _begin(
    state: AgentState, cause: CommandReceived | None, calls: tuple[Call, ...], deadline_ms: int, effects: Effects
) -> AgentState:
    call_id = state.calls_made + 1
    activity = Activity(cause=cause, calls=calls, call_id=call_id, deadline_ms=deadline_ms)
    effects.append(Perform(call_id=call_id, call=calls[0]))
    return replace(state, activity=activity, calls_made=call_id)


def _returned(state: AgentState, event: EngineReturned, effects: Effects) -> AgentState:
    activity = state.activity
    if activity is None or activity.call_id != event.call_id:
        return state  # an answer to a call of an earlier life
    call, result = activity.calls[0], event.result
    engine, failure = apply_result(state.engine, call, result, event.observation)
    if failure is None and relaunched(state.engine, engine):
        died = f"{engine.name} was launched anew during {call_name(call)}."
        failure = Failed(ErrorKind.ENGINE_ERROR, with_engine_state(died, engine))
    if failure is not None:
        harmless = isinstance(call, CheckSource | Load | CheckProfile | DiskCall)  # settling would not try it again
        reconcile_blocked = not (relaunched(state.engine, engine) or harmless)
        return _failed(
            replace(state, engine=engine, reconcile_blocked=reconcile_blocked), activity, failure, event.at_ms, effects
        )
    made = (*activity.made, call_name(call))
    reported = _together(activity.reported, result) if isinstance(result, Returned) else activity.reported
    rest = activity.calls[1:]
    if rest and not activity.overdue:
        call_id = state.calls_made + 1
        activity = replace(activity, calls=rest, call_id=call_id, made=made, reported=reported)
        effects.append(Perform(call_id=call_id, call=rest[0]))
        return replace(state, engine=engine, activity=activity, calls_made=call_id)
    state = replace(state, engine=engine, activity=None)
    cause = activity.cause
    if cause is not None and not activity.overdue:
        acted = _acted(state, cause, made)
        if reported is not NOTHING_REPORTED:
            acted = replace(
                acted,
                auto_stopped=reported.auto_stopped,
                traces=reported.traces,
                ranks_without_trace=reported.ranks_without_trace,
            )
            acted = replace(acted, still_running=True) if reported.still_running else acted
        state = _answer(state, cause, acted, 10, effects)
    return _proceed(state, event.at_ms, effects)


def _together(reported: Returned, more: Returned) -> Returned:
    """What two calls of one command gave back of a profiling session."""
    if not (more.auto_stopped or more.traces or more.ranks_without_trace or more.still_running):
        return reported
    return Returned(
        auto_stopped=reported.auto_stopped or more.auto_stopped,
        traces=reported.traces + more.traces,
        ranks_without_trace=reported.ranks_without_trace + more.ranks_without_trace,
        still_running=reported.still_running or more.still_running,
    )


def _failed(state: AgentState, activity: Activity, failure: Failed, now_ms: int, effects: Effects) -> AgentState:
    cause = activity.cause
    state = replace(_suppress(state, cause.command if cause is not None else activity.calls[0]), activity=None)
    if cause is not None and not activity.overdue:
        state = _answer(state, cause, failure, 10, effects)
    if cause is not None and isinstance(cause.command, WeightSync):
        state = replace(state, reconcile_blocked=False)
    return _proceed(state, now_ms, effects)


def _tick(state: AgentState, event: Tick, effects: Effects) -> AgentState:
    activity = state.activity
    if activity is not None and not activity.overdue and event.at_ms >= activity.deadline_ms:
        if activity.cause is not None:
            late = Failed(
                ErrorKind.ENGINE_TIMEOUT,
                f"{state.engine.name} has not answered {call_name(activity.calls[0])} by the deadline. The call is not "
                "taken back; until it ends, nothing else is sent to this engine.",
            )
            state = _answer(_suppress(state, activity.cause.command), activity.cause, late, 10, effects)
        state = replace(state, activity=replace(activity, overdue=True))
    return _proceed(state, event.at_ms, effects)


# --- joining, losing the bus, starting again --------------------------------------------------------------------------


def _snapshot(state: AgentState, event: SnapshotReceived, effects: Effects) -> AgentState:
    newer = event.epoch > state.epoch
    if event.epoch < state.epoch or (event.seq < state.seq and not newer and state.joined):
        return state
    for waiting in state.queue:  # the snapshot holds what they asked for
        state = _answer(state, waiting, _SUPERSEDED, 2, effects)
    activity = state.activity
    if activity is not None:
        if activity.cause is not None and not activity.overdue:
            state = _answer(state, activity.cause, _SUPERSEDED, 2, effects)
        activity = replace(activity, cause=None, calls=activity.calls[:1])
    state = replace(
        state,
        epoch=event.epoch,
        seq=event.seq,
        desired=event.desired,
        suppressed=NOTHING_SUPPRESSED,
        joined=True,
        diverged=False,
        queue=(),
        reorder_buffer=tuple(one for one in state.reorder_buffer if one.seq > event.seq),
        resend_from=0,
        activity=activity,
        reconcile_blocked=False,
    )
    return _proceed(_advance(state), event.at_ms, effects)


def _lease_expired(state: AgentState, event: LeaseExpired, effects: Effects) -> AgentState:
    """The trainer is gone: go on with what is committed, and ask for the desired state before obeying again."""
    if not state.joined:
        return state
    state = replace(state, desired=orphaned(state.desired), diverged=True, reconcile_blocked=False)
    return _proceed(state, event.at_ms, effects)


def _start(state: AgentState, event: Started) -> AgentState:
    """A new incarnation: what was received and not decided is forgotten, what was decided is not.

    Nothing is done to the engine before it was read: it may have gone on, or been launched anew, in the meantime.
    """
    return AgentState(
        identity=event.identity,
        incarnation=event.incarnation,
        settings=event.settings,
        epoch=state.epoch,
        seq=state.seq,
        engine=replace(state.engine, tokenizer="unknown"),
        calls_made=state.calls_made,
        answers=state.answers,
        deferred_finish=state.deferred_finish,
        interrupted=state.activity or state.interrupted,
    )


def _observe(state: AgentState, event: EngineObserved, effects: Effects) -> AgentState:
    """Correct the belief; after a restart, first settle the call that was cut off."""
    cut = state.interrupted
    if cut is None or event.observation.tokenizer == "unknown":
        engine = apply_observation(state.engine, event.observation)
        reconcile_blocked = state.reconcile_blocked and not relaunched(state.engine, engine)
        return _proceed(replace(state, engine=engine, reconcile_blocked=reconcile_blocked), event.at_ms, effects)
    call = cut.calls[0]
    engine, done = apply_interruption(state.engine, call, event.observation)
    state = replace(state, engine=engine, interrupted=None)
    if cut.cause is not None and not cut.overdue:
        died = f"the agent was restarted during {call_name(call)}, and whether it was done can't be read back."
        outcome: Outcome = Failed(ErrorKind.UNKNOWN, with_engine_state(died, engine))
        if done and len(cut.calls) == 1:
            outcome = _acted(state, cut.cause, (*cut.made, call_name(call)))
        state = _answer(state, cut.cause, outcome, 10, effects)
    return _proceed(state, event.at_ms, effects)
