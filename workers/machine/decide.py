"""The machine of one agent: `decide(state, event) -> (state, effects)`. Every decision of an agent is made here.

Rules
1. Pure: no I/O, no clock, no randomness, no logging. The same state and event always give the same decision.
2. Total: it never raises for any input. What cannot be done is an outcome.
3. A decision is in the journal before its effects are performed. So a `Perform` in the journal without a later
   `EngineReturned` is a call that was cut off. That is the whole write-ahead protocol.
4. One engine call at a time, in the order of the commands. A call is never cancelled: when it passes its deadline, the
   command fails, and the result of the call is still awaited.

Theory of operation. A command first passes the rules of order (1 to 3, `order.py`): does it come from the current
epoch, is it new, and is it next in line? A command that passes them is in order, and is decided once the engine is free
(rules 4 to 10, `advance.py`). The engine calls that it needs come from `reconcile.py`, which compares the desired state
with what is believed about the engine (`observe.py`).

When no command is left and the engine differs from the desired state (a late joiner, a restart, a missed command, the
lease), the machine makes the same calls by itself.

One transition is missing on purpose: no engine serves before a snapshot has brought the desired state.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from schemas.commands import EngineCommand, WeightSync, durable_source
from schemas.desired import orphaned
from schemas.events import (
    Answer,
    AwaitPush,
    CheckProfile,
    CheckSource,
    CommandReceived,
    DiskCall,
    DumpStacks,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    Load,
    Observation,
    Observe,
    Perform,
    Restart,
    Resume,
    Returned,
    SnapshotReceived,
    StacksDumped,
    Started,
    Stopping,
    Tick,
)
from schemas.identity import OBSERVED
from schemas.outcomes import ErrorKind, Failed, Outcome, Reason, Skipped
from workers.machine.advance import (
    Effects,
    acted,
    answer_command,
    awaits_push,
    decide_command,
    end_wait,
    expect_push,
    proceed,
    suppress_failed,
)
from workers.machine.commands import stranded, without_memory
from workers.machine.dumps import apply_stacks, ask_for_stacks, dump_at, stacks_clause
from workers.machine.gate import answer_to, must_wait
from workers.machine.observe import (
    apply_interruption,
    apply_observation,
    apply_result,
    only_observed,
    relaunched,
    with_engine_state,
)
from workers.machine.order import apply_head, drain_buffer, enter_epoch, is_next, take_in
from workers.machine.progress import apply_time, progress_after, wedged_at
from workers.machine.reconcile import (
    PAUSE_AND_RESUME,
    adopt_pushed,
    holds_committed,
    may_serve,
    reconcile,
)
from workers.machine.state import (
    NOTHING_SUPPRESSED,
    Activity,
    AgentState,
    EngineState,
    call_name,
    remember,
)
from workers.machine.suppressed import still_desired

__all__ = ["LOGIC", "Activity", "AgentState", "decide", "in_sync", "is_written_first", "next_deadline"]

LOGIC = 6
"""Version of the decisions below. It is recorded with every log; a change of behaviour is a new number."""

_SUPERSEDED = Skipped(Reason.SUPERSEDED)


def decide(state: AgentState, event: Event) -> tuple[AgentState, tuple[Effect, ...]]:
    """Return the next state, and the effects to perform, in order."""
    if state.stopping and not isinstance(event, EngineReturned | Started):
        return state, ()
    effects: Effects = []
    after = REACTIONS[type(event)](state, event, effects)
    if after.engine is not state.engine and relaunched(state.engine, after.engine) and _out_of_service(after):
        effects.append(Restart())
    return after, tuple(effects)


def next_deadline(state: AgentState) -> int | None:
    """Return when the machine needs a `Tick`, in ms of its own clock; None if nothing is pending."""
    if state.stopping:
        return None
    wedged_ms = wedged_at(state.engine, state.settings.wedged_after_ms)
    command_ms = _command_deadline(state)
    return wedged_ms if command_ms is None else command_ms if wedged_ms is None else min(command_ms, wedged_ms)


def _command_deadline(state: AgentState) -> int | None:
    if state.activity is not None and not state.activity.overdue:
        dump_ms = dump_at(state)  # queued commands are decided after the deadline, whatever their own
        return state.activity.deadline_ms if dump_ms is None else dump_ms
    return state.queue[0].at_ms + state.queue[0].ttl_ms if state.queue else None


def is_written_first(before: AgentState, effects: Sequence[Effect]) -> bool:
    """Whether a decision, made in the state `before`, must be in the journal before its effects are performed.

    It calls the engine or has its stacks dumped, answers with more than a skip, or answers the command whose call is
    under way. A restart makes any other decision again, in the same way. But a call that it finds in the journal is
    resolved by observing the engine: its command would be answered once more, and differently.
    """
    trigger = before.activity.trigger if before.activity is not None else None
    for effect in effects:
        match effect:
            case Perform() | DumpStacks():
                return True
            case Answer(seq=seq, outcome=outcome):
                if type(outcome) is not Skipped or (trigger is not None and seq == trigger.seq):
                    return True
    return False


def in_sync(state: AgentState) -> bool:
    """Whether the engine is as desired, with nothing under way. Only then is the replica ready for traffic."""
    if not state.joined or state.diverged or state.activity is not None or state.queue:
        return False
    if state.identity.node_rank > 0:
        return True
    if state.identity.mode is OBSERVED:
        return state.engine.tokenizer == "present"
    desired, engine = still_desired(state.desired, state.suppressed), state.engine
    held = holds_committed(desired, engine)
    if not engine.operations >= PAUSE_AND_RESUME and not (held and may_serve(desired, engine)):
        return False  # it serves what is not desired, and can't be paused
    committed = desired.committed
    if committed is not None and durable_source(committed.source) is None and not held:
        return False  # it missed a broadcast, and waits for the next sync
    return engine.tokenizer == "present" and not reconcile(desired, engine, state.identity)


def _out_of_service(state: AgentState) -> bool:
    """Whether only a sync or a new incarnation can bring the replica back."""
    remaining = still_desired(state.desired, state.suppressed)
    dropped_out = state.desired.sync is not None and remaining.sync is None
    return state.joined and (remaining.quarantined > 0 or dropped_out)


# --- commands ---------------------------------------------------------------------------------------------------------
# The functions below append to `effects` and return the next state.


def _on_command(state: AgentState, event: CommandReceived, effects: Effects) -> AgentState:
    launched = state.engine.tokenizer != "unknown"
    if is_next(state, event) and (launched or not must_wait(state, event, event.at_ms)):
        after = decide_command(state, event, event.seq, event.at_ms, effects)
        unchanged = after.desired is state.desired and after.suppressed is state.suppressed
        if unchanged and not state.reconcile_blocked:
            return after  # the usual skip: the engine was in sync before, and still is
        return proceed(after, event.at_ms, effects)
    after = take_in(state, event, effects)
    return proceed(after, event.at_ms, effects) if after.seq != state.seq else after


# --- engine calls -----------------------------------------------------------------------------------------------------


def _on_returned(state: AgentState, event: EngineReturned, effects: Effects) -> AgentState:
    activity = state.activity
    if activity is None or activity.call_id != event.call_id:
        return state  # the result of a call of an earlier incarnation
    call, result, observation = activity.calls[0], event.result, event.observation
    engine, failure = apply_result(state.engine, call, result, observation)
    if observation is not None:
        engine = _with_progress(engine, observation, event.at_ms)
    restarted = engine is not state.engine and relaunched(state.engine, engine)
    if restarted and failure is None:
        message = f"{engine.name} was relaunched during {call_name(call)}."
        failure = Failed(ErrorKind.ENGINE_ERROR, with_engine_state(message, engine))
    if failure is not None:
        return _fail(replace(state, engine=engine), activity, failure, restarted, event.at_ms, effects)
    completed = (*activity.completed, call_name(call))
    reported = _merge(activity.reported, result) if isinstance(result, Returned) else activity.reported
    if type(call) is Observe:
        state, activity, failure = _plan_again(replace(state, engine=engine), activity)
        if failure is not None:
            return _fail(state, activity, failure, restarted, event.at_ms, effects)
        engine = state.engine
    rest = activity.calls[1:]
    if rest and state.waits_paused:  # a command that was decided before the bus was lost may still resume
        rest = tuple(call for call in rest if not isinstance(call, Resume))
    if rest and not activity.overdue:
        if state.stopping:
            return _stop_within(replace(state, engine=engine), activity, completed, effects)
        call_id = state.calls_made + 1
        activity = replace(
            activity,
            calls=rest,
            call_id=call_id,
            completed=completed,
            reported=reported,
            since_ms=event.at_ms,
            stacks=None,
        )
        effects.append(Perform(call_id=call_id, call=rest[0]))
        return replace(state, engine=engine, activity=activity, calls_made=call_id)
    trigger, answers = activity.trigger, state.answers
    if trigger is not None and not activity.overdue:
        answer = answer_to(trigger, acted(engine, trigger.command, completed, reported))
        effects.append(answer)
        answers = remember(answers, answer)
    return proceed(replace(state, engine=engine, activity=None, answers=answers), event.at_ms, effects)


def _plan_again(state: AgentState, activity: Activity) -> tuple[AgentState, Activity, Failed | None]:
    """Plan the rest of an activity, now that the engine was observed."""
    desired = still_desired(state.desired, state.suppressed)
    state = replace(state, engine=adopt_pushed(state.engine, desired, state.identity))
    trigger = activity.trigger.command if activity.trigger is not None else None
    failure = stranded(trigger, desired, state.engine, state.identity)
    planned = reconcile(desired, state.engine, state.identity, fresh=True)
    rest = (*planned, *(call for call in activity.calls[1:] if call not in planned))
    lacking = without_memory(rest, state.engine, state.identity)
    if activity.trigger is None and lacking is not None:
        rest, lacking = (), None  # its time comes when the trainer takes the memory back
    return state, replace(activity, calls=(*activity.calls[:1], *rest)), failure or lacking


def _on_stopping(state: AgentState, _: Stopping, effects: Effects) -> AgentState:
    if awaits_push(state):
        message = "the agent was asked to end while it waited for the trainer to push the weights."
        state = end_wait(state, Failed(ErrorKind.UNKNOWN, with_engine_state(message, state.engine)), effects)
    return replace(state, stopping=True)


def _stop_within(state: AgentState, activity: Activity, completed: tuple[str, ...], effects: Effects) -> AgentState:
    """End a command of several calls between two of them, because the agent was asked to end."""
    state = replace(state, activity=None)
    if activity.trigger is None:
        return state
    rest = ", ".join(call_name(call) for call in activity.calls[1:])
    message = f"the agent was asked to end after {', '.join(completed)}; {rest} was not begun."
    failed = Failed(ErrorKind.UNKNOWN, with_engine_state(message, state.engine))
    return answer_command(state, activity.trigger, failed, effects)


def _merge(earlier: Returned, later: Returned) -> Returned:
    """Merge what two calls of one command reported about a profiling session."""
    if not (later.auto_stopped or later.traces or later.ranks_without_trace or later.still_running):
        return earlier
    return Returned(
        auto_stopped=earlier.auto_stopped or later.auto_stopped,
        traces=earlier.traces + later.traces,
        ranks_without_trace=earlier.ranks_without_trace + later.ranks_without_trace,
        still_running=earlier.still_running or later.still_running,
    )


def _fail(
    state: AgentState, activity: Activity, failure: Failed, restarted: bool, now_ms: int, effects: Effects
) -> AgentState:
    """End an activity whose call failed. `restarted` says that the engine was relaunched during the call."""
    call, trigger = activity.calls[0], activity.trigger
    # Reconciling does not repeat these calls, nor the commands, which are suppressed.
    not_repeated = isinstance(call, CheckSource | Load | CheckProfile | DiskCall)
    given_up = trigger is not None and isinstance(trigger.command, WeightSync | EngineCommand)
    state = suppress_failed(state, trigger.command if trigger is not None else call, activity.before)
    state = replace(state, activity=None, reconcile_blocked=not (restarted or not_repeated or given_up))
    if trigger is not None and not activity.overdue:
        state = answer_command(state, trigger, failure, effects)
    return proceed(state, now_ms, effects)


def _on_tick(state: AgentState, event: Tick, effects: Effects) -> AgentState:
    dump_ms = dump_at(state)
    if dump_ms is not None and event.at_ms >= dump_ms:
        state = ask_for_stacks(state, effects)
    activity = state.activity
    if activity is not None and awaits_push(state) and event.at_ms >= activity.deadline_ms:
        state = _miss_push(state, activity, effects)
    elif activity is not None and not activity.overdue and event.at_ms >= activity.deadline_ms:
        if activity.trigger is not None:
            message = (
                f"{state.engine.name} has not answered {call_name(activity.calls[0])} by the deadline. The call is not "
                "cancelled; until it ends, nothing else is sent to this engine."
            )
            message += stacks_clause(activity)
            state = suppress_failed(state, activity.trigger.command, activity.before)
            state = answer_command(state, activity.trigger, Failed(ErrorKind.ENGINE_TIMEOUT, message), effects)
        state = replace(state, activity=replace(activity, overdue=True, before=None))
    engine = apply_time(state.engine, state.settings.wedged_after_ms, event.at_ms)
    if engine is not state.engine:
        state = replace(state, engine=engine)
    return proceed(state, event.at_ms, effects)


def _miss_push(state: AgentState, activity: Activity, effects: Effects) -> AgentState:
    """Fail a load whose weights the trainer did not push by the deadline, or not to this launch of the engine."""
    call = activity.calls[0]
    wanted = call.source.label if isinstance(call, AwaitPush) else None
    message = f"the trainer did not push the weights labelled {wanted!r} in time: the engine's label is "
    message += f"{state.engine.label!r}."
    if activity.trigger is not None:
        state = suppress_failed(state, activity.trigger.command, activity.before)
    failed = Failed(ErrorKind.ENGINE_TIMEOUT, with_engine_state(message, state.engine))
    return end_wait(state, failed, effects)


# --- joining, losing the bus, starting again --------------------------------------------------------------------------


def _on_snapshot(state: AgentState, event: SnapshotReceived, effects: Effects) -> AgentState:
    """Take the desired state of the snapshot, which stands for every command up to its position."""
    if event.epoch < state.epoch or (event.epoch == state.history and event.seq < state.seq):
        return state
    state = enter_epoch(state, event.epoch)
    for queued in state.queue:
        state = answer_command(state, queued, _SUPERSEDED, effects, rule=2)
    activity = state.activity
    if activity is not None:
        waited = awaits_push(state)
        if activity.trigger is not None and not activity.overdue:
            state = answer_command(state, activity.trigger, _SUPERSEDED, effects, rule=2)
        activity = None if waited else replace(activity, trigger=None, calls=activity.calls[:1], before=None)
    state = replace(
        state,
        history=event.epoch,
        seq=event.seq,
        desired=event.desired,
        suppressed=NOTHING_SUPPRESSED,
        engine=expect_push(state.engine, event.desired),
        bus_lost=False,
        queue=(),
        reorder_buffer=tuple(buffered for buffered in state.reorder_buffer if buffered.seq > event.seq),
        resend_from=0,
        activity=activity,
        reconcile_blocked=False,
    )
    return proceed(drain_buffer(state), event.at_ms, effects)


def _on_lease_expired(state: AgentState, event: LeaseExpired, effects: Effects) -> AgentState:
    """Return to the committed weights, since the trainer is gone, and serve or pause, as the settings say.

    No command is obeyed before the next snapshot.
    """
    if not state.joined and state.settings.on_lost_bus == "serve":
        return state
    if awaits_push(state):
        state = end_wait(state, _SUPERSEDED, effects)
    if state.joined:
        suppressed = replace(state.suppressed, generation=None)
        state = replace(state, desired=orphaned(state.desired), suppressed=suppressed)
    state = replace(state, bus_lost=True, reconcile_blocked=False)
    return proceed(state, event.at_ms, effects)


def _on_started(state: AgentState, event: Started, _: Effects) -> AgentState:
    """Begin an incarnation. Commands that were received but not decided are forgotten; decisions are not.

    The engine is not called before it has been observed: it may have changed or been relaunched in the meantime.
    """
    return AgentState(
        identity=event.identity,
        incarnation=event.incarnation,
        settings=event.settings,
        epoch=state.epoch,
        seq=state.seq,
        engine=replace(
            state.engine,
            tokenizer="unknown",
            memory=event.settings.memory,
            released=frozenset(),
            progress=None,
            trouble=None,
            seen=None,
        ),
        calls_made=state.calls_made,
        answers=state.answers,
        deferred_finish=state.deferred_finish,
        interrupted=state.activity or state.interrupted,
    )


def _on_observed(state: AgentState, event: EngineObserved, effects: Effects) -> AgentState:
    """Correct what is believed about the engine. After a restart, first resolve the call that was cut off."""
    observation = event.observation
    if state.identity.mode is OBSERVED:
        engine = _with_progress(only_observed(state.engine, observation), observation, event.at_ms)
        return proceed(replace(state, engine=engine), event.at_ms, effects)
    if state.interrupted is not None and observation.tokenizer != "unknown":
        return _resolve_interruption(state, state.interrupted, event, effects)
    engine = _with_progress(apply_observation(state.engine, observation), observation, event.at_ms)
    restarted = relaunched(state.engine, engine)
    state = replace(state, engine=engine, reconcile_blocked=state.reconcile_blocked and not restarted)
    if restarted and state.activity is not None and awaits_push(state):
        state = _miss_push(state, state.activity, effects)
    return proceed(state, event.at_ms, effects)


def _with_progress(engine: EngineState, observation: Observation, at_ms: int) -> EngineState:
    progress = progress_after(engine.progress, observation, engine.generating, at_ms)
    return engine if progress is engine.progress else replace(engine, progress=progress)


def _resolve_interruption(
    state: AgentState, interrupted: Activity, event: EngineObserved, effects: Effects
) -> AgentState:
    """Answer the command whose call was cut off: it acted if the engine shows that its last call was done."""
    call, trigger = interrupted.calls[0], interrupted.trigger
    engine, done = apply_interruption(state.engine, call, event.observation)
    state = replace(state, engine=engine, interrupted=None)
    if trigger is not None and not interrupted.overdue:
        message = f"the agent was restarted during {call_name(call)}, and the engine can't tell whether it was done."
        outcome: Outcome = Failed(ErrorKind.UNKNOWN, with_engine_state(message, engine))
        if done and len(interrupted.calls) == 1:
            outcome = acted(engine, trigger.command, (*interrupted.completed, call_name(call)))
        state = answer_command(state, trigger, outcome, effects)
    return proceed(state, event.at_ms, effects)


REACTIONS: Final[dict[type[Event], Callable[[AgentState, Any, Effects], AgentState]]] = {
    CommandReceived: _on_command,
    EngineReturned: _on_returned,
    HeadSeen: apply_head,
    SnapshotReceived: _on_snapshot,
    EngineObserved: _on_observed,
    LeaseExpired: _on_lease_expired,
    Tick: _on_tick,
    Started: _on_started,
    Stopping: _on_stopping,
    StacksDumped: apply_stacks,
}
"""What each kind of event leads to. A dict: patterns of classes that do not match take as long as a whole function."""
