"""The machine of one agent: `decide(state, event) -> (state, effects)`. Every decision of an agent is made here.

Rules
1. Pure: no I/O, no clock, no randomness, no logging. The same state and event always give the same decision.
2. Total: it never raises for any input. What cannot be done is an outcome.
3. A decision is in the journal before its effects are performed. So a `Perform` in the journal without a later
   `EngineReturned` is a call that was cut off. That is the whole write-ahead protocol.
4. One engine call at a time, in the order of the commands. A call is never cancelled: when it passes its deadline, the
   command fails, and the result of the call is still awaited.

Theory of operation. `ORDER`, `ELIGIBILITY` and `_act` are the decision table (`docs/decision-table.md`), in the order
in which its rules are applied. A command first passes the rules of order: does it come from the current epoch, is it
new, and is it next in line? Then it waits until the engine is free, and the other rules decide it. It changes the
desired state *even if it is skipped*. The engine calls that it needs come from `reconcile.py`, which compares the
desired state with what is believed about the engine (`observe.py`).

Every event ends in `_proceed`, which goes on until something has to be awaited. When no command is left and the engine
differs from the desired state (a late joiner, a restart, a missed command, the lease), the machine makes the same calls
by itself. But what something else did to the engine is not undone before the bus was heard again: an agent that is cut
off may have a successor, which commands the same engine.

One transition is missing on purpose: no engine serves before a snapshot has brought the desired state, unless no bus
brings one for the length of a lease.
"""

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from schemas import events
from schemas.commands import Drain, EngineCommand, EpochStart, ProfileCommand, WeightSync
from schemas.desired import Desired, desired_after, orphaned
from schemas.identity import OBSERVED
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome
from workers.machine import rules
from workers.machine.commands import acted, calls_for, finish_call, memory_missing, merged, needs_free_engine, stranded
from workers.machine.deadlines import next_deadline
from workers.machine.lora import has_place_again, postponed
from workers.machine.observe import (
    apply_interruption,
    apply_observation,
    apply_result,
    changed_by_others,
    only_observed,
    relaunched,
    taken_over,
)
from workers.machine.progress import apply_time, with_progress
from workers.machine.readiness import out_of_service
from workers.machine.reconcile import HARMLESS, NOT_REPEATED, needs_place, own_calls, reconcile, unloads_now
from workers.machine.rules import SUPERSEDED, is_targeted
from workers.machine.state import (
    NOTHING_SUPPRESSED,
    Activity,
    AgentState,
    Remembered,
    call_name,
    remember,
    with_engine_state,
    with_fault,
)
from workers.machine.suppressed import (
    clear_suppressed,
    left_by_window,
    only_recorded,
    still_desired,
    suppress,
    with_recorded,
    with_room,
    without_trainer,
)
from workers.machine.weights import adopt_pushed, distrusted, expect_push

__all__ = ["LOGIC", "Activity", "AgentState", "decide", "next_deadline"]

LOGIC = 8
"""Version of the decisions below. It is recorded with every log; a change of behaviour is a new number."""

RETRY_FIRST_MS: Final = 1000
"""Time after which the machine makes a call again that it had made by itself and that failed. Each time it doubles."""
RETRY_LAST_MS: Final = 15_000
"""Longest such time."""

Effects = list[events.Effect]
"""Every function with `effects` appends to it and returns the next state."""

# --- the rules, in the order in which they are applied ----------------------------------------------------------------

ORDER: Final[tuple[tuple[int, Callable[[AgentState, events.CommandReceived, Effects], AgentState | None]], ...]] = (
    (1, rules.stale_epoch),
    (2, rules.applied_already),
    (3, rules.leaves_a_hole),
)
"""Applied on arrival."""

ELIGIBILITY: Final[tuple[tuple[int, Callable[[AgentState, events.CommandReceived, int], Outcome | None]], ...]] = (
    (4, rules.expired),
    (5, rules.not_for_this_agent),
    (6, rules.not_primary),
    (7, rules.never_launched),
    (8, rules.tokenizer_missing),
    (9, rules.unsupported),
    (10, rules.superseded),
)
"""Applied once the command is in order and the engine is free. What they let pass is decided by `_act` (rule 10)."""

_ABANDONED_BY_RULE: dict[type[Struct], tuple[int, ...]] = {ProfileCommand: (4, 7, 8, 9), EngineCommand: (8, 9)}
"""By which rules a refused command's wish is not pursued either. A late profile start would profile another step; an
engine that launches (rule 7) is brought to the desired state once it is up.
"""


def decide(state: AgentState, event: events.Event) -> tuple[AgentState, tuple[events.Effect, ...]]:
    """Return the next state, and the effects to perform, in order."""
    if state.stopping and not isinstance(event, events.EngineReturned | events.Started):
        return state, ()
    effects: Effects = []
    after = REACTIONS[type(event)](state, event, effects)
    if after.engine is not state.engine and relaunched(state.engine, after.engine) and out_of_service(after):
        effects.append(events.Restart())
    return after, tuple(effects)


# --- commands ---------------------------------------------------------------------------------------------------------


def _on_command(state: AgentState, event: events.CommandReceived, effects: Effects) -> AgentState:
    if rules.is_next(state, event) and not rules.waits(state, event, event.at_ms):
        after = _decide_command(state, event, event.seq, event.at_ms, effects)
        unchanged = after.desired is state.desired and after.suppressed is state.suppressed
        if unchanged and not state.reconcile_blocked:
            return after  # the usual skip: the engine was in sync before, and still is
        return _proceed(after, event.at_ms, effects)
    after = _take_in(state, event, effects)
    return _proceed(after, event.at_ms, effects) if after.seq != state.seq else after


def _take_in(state: AgentState, event: events.CommandReceived, effects: Effects) -> AgentState:
    """Apply rules 1 to 3 to a command, and queue it if it is next in line."""
    state = rules.enter_epoch(state, event.epoch)
    if rules.continues_history(state, event):
        state = replace(state, snapshot_epoch=event.epoch)
    for _, rule in ORDER:
        after = rule(state, event, effects)
        if after is not None:
            return after
    return rules.drain_buffer(replace(state, seq=event.seq, queue=(*state.queue, event)))


def _decide_command(
    state: AgentState, event: events.CommandReceived, seq: int, now_ms: int, effects: Effects
) -> AgentState:
    """Apply rules 4 to 10 to a command that is in order and has left the queue. `seq` is the new position.

    The command changes the desired state whatever its outcome.
    """
    if state.relabelled:
        state = replace(state, relabelled=0, changed_by_others=state.changed_by_others and not state.contested)
    command, suppressed, targeted = event.command, state.suppressed, is_targeted(state, event)
    if targeted and suppressed is not NOTHING_SUPPRESSED:
        suppressed = clear_suppressed(suppressed, command, state.desired, state.identity)
    desired = desired_after(state.desired, command, targeted, state.identity)
    if desired is not state.desired:
        state = replace(state, engine=distrusted(state.engine, desired))
    refused = _refusal(state, event, now_ms)
    if refused is None:
        engine = expect_push(state.engine, state.desired, desired) if desired is not state.desired else state.engine
        decided = replace(
            state,
            seq=seq,
            desired=desired,
            engine=engine,
            suppressed=suppressed,
            reconcile_blocked=False,
            resend_from=0,
        )
        return _act(decided, state, event, now_ms, effects)
    effects.append(refused)
    after = replace(
        state,
        seq=seq,
        desired=desired,
        suppressed=suppressed,
        reconcile_blocked=False,
        resend_from=state.resend_from if refused.rule in (4, 7) else 0,
        answers=remember(state.answers, refused),
    )
    if targeted and refused.rule in _ABANDONED_BY_RULE.get(type(command), ()):
        return suppress(after, command, still_desired(state.desired, state.suppressed))
    return after


def _refusal(state: AgentState, event: events.CommandReceived, now_ms: int) -> events.Answer | None:
    """Return the answer of the first rule from 4 on that applies."""
    for number, rule in ELIGIBILITY:
        outcome = rule(state, event, now_ms)
        if outcome is not None:
            return events.Answer(epoch=event.origin, seq=event.seq, outcome=outcome, rule=number)
    return None


def _act(
    state: AgentState, earlier: AgentState, event: events.CommandReceived, now_ms: int, effects: Effects
) -> AgentState:
    """Rule 10: make the calls that the command needs, or answer it at once. `earlier` is the state before it."""
    command = event.command
    before = still_desired(earlier.desired, earlier.suppressed)
    if state.activity is not None and needs_free_engine(command, state.engine, state.identity):
        return _act_while_overdue(state, state.activity, before, event, effects)
    state = _recognize_pushed(state) if state.activity is None else state
    desired = still_desired(state.desired, state.suppressed)
    syncing = earlier.desired.sync.version if earlier.desired.sync is not None else 0
    result = calls_for(command, before, desired, syncing, state.engine, state.identity)
    if isinstance(result, tuple):
        if not result:
            return _answer(state, event, acted(state.engine, command, ()), effects)
        call_id, deadline_ms = state.calls_made + 1, event.at_ms + event.ttl_ms
        begins = isinstance(command, WeightSync) and command.phase == "prepare"
        again = before if begins or isinstance(command, EngineCommand) else None
        activity = Activity(
            trigger=event, calls=result, call_id=call_id, deadline_ms=deadline_ms, before=again, since_ms=now_ms
        )
        return _call(state, activity, effects)
    if isinstance(result, Failed):
        state = suppress(state, command, before)
    return _answer(state, event, left_by_window(command, earlier.suppressed) or result, effects)


def _act_while_overdue(
    state: AgentState, overdue: Activity, before: Desired, event: events.CommandReceived, effects: Effects
) -> AgentState:
    """Fail a command while an overdue call is awaited. Only a finish is deferred until the engine is free."""
    command = event.command
    if isinstance(command, ProfileCommand) and command.action == "finish":
        finish = finish_call(command, state.identity)
        if state.deferred_finish in (None, finish):  # another one that waits is not forgotten for this
            state = replace(state, deferred_finish=finish)
            return _answer(state, event, Acted(calls=(), still_running=True), effects)
    call = call_name(overdue.calls[0])
    message = f"{state.engine.name} has not answered {call} yet, past its deadline. Nothing else is sent until it does."
    return _answer(suppress(state, command, before), event, Failed(ErrorKind.ENGINE_BUSY, message), effects)


def _answer(
    state: AgentState, event: events.CommandReceived, outcome: Outcome, effects: Effects, rule: int = 10
) -> AgentState:
    """Send the outcome of a command, and store it."""
    answer = events.Answer(epoch=event.origin, seq=event.seq, outcome=outcome, rule=rule)
    effects.append(answer)
    return replace(state, answers=remember(state.answers, answer))


# --- what comes next --------------------------------------------------------------------------------------------------


def _proceed(state: AgentState, now_ms: int, effects: Effects) -> AgentState:
    """Decide queued commands while the engine is free; then reconcile."""
    if state.stopping:
        return state
    while state.queue:
        if state.awaits_push and any(_ends_wait(state, event) for event in state.queue):
            state = _end_activity(state, SUPERSEDED, effects)
        if state.activity is not None and not state.activity.overdue:
            return state
        event = state.queue[0]
        if rules.waits(state, event, now_ms):
            state, calls = unloads_now(state, now_ms, awaited=True)
            return _begin(state, calls, now_ms, effects)
        state = _decide_command(replace(state, queue=state.queue[1:]), event, state.seq, now_ms, effects)
        if state.reorder_buffer:
            state = rules.drain_buffer(state)
    if state.activity is not None:
        return state
    state = _recognize_pushed(state)
    calls = own_calls(state)
    if not calls or needs_place(calls, state):
        state, unloads = unloads_now(state, now_ms)
        calls = unloads or calls
    if calls and calls[0] is state.deferred_finish:
        state = replace(state, deferred_finish=None)
    return _begin(state, calls, now_ms, effects)


def _begin(state: AgentState, calls: tuple[events.Call, ...], now_ms: int, effects: Effects) -> AgentState:
    """Make calls that no command has asked for."""
    if not calls:
        return state
    call_id, deadline_ms = state.calls_made + 1, now_ms + state.settings.reconcile_timeout_ms
    activity = Activity(trigger=None, calls=calls, call_id=call_id, deadline_ms=deadline_ms, since_ms=now_ms)
    return _call(state, activity, effects)


def _ends_wait(state: AgentState, event: events.CommandReceived) -> bool:
    """Whether a command ends the load phase that a wait belongs to, or takes the replica out of it."""
    command = event.command
    return isinstance(command, EpochStart) or (isinstance(command, WeightSync | Drain) and is_targeted(state, event))


def _recognize_pushed(state: AgentState) -> AgentState:
    """Recognize wanted weights that the trainer has pushed, by their label."""
    if state.engine.label is None or not state.informed:
        return state
    desired = still_desired(state.desired, state.suppressed)
    engine = adopt_pushed(state.engine, desired, state.identity)
    return state if engine is state.engine else replace(state, engine=engine)


def _end_activity(state: AgentState, outcome: Outcome, effects: Effects) -> AgentState:
    """End the calls under way, and answer their command unless it was answered at its deadline."""
    assert state.activity is not None
    trigger = state.activity.trigger
    if trigger is None or state.activity.overdue:
        return replace(state, activity=None)
    return _answer(replace(state, activity=None), trigger, outcome, effects)


def _call(state: AgentState, activity: Activity, effects: Effects) -> AgentState:
    """Make the first call of an activity."""
    effects.append(events.Perform(call_id=activity.call_id, call=activity.calls[0]))
    return replace(state, activity=activity, calls_made=activity.call_id)


# --- engine calls -----------------------------------------------------------------------------------------------------


def _on_returned(state: AgentState, event: events.EngineReturned, effects: Effects) -> AgentState:
    activity = state.activity
    if activity is None or activity.call_id != event.call_id:
        return state  # the result of a call of an earlier incarnation
    call, result, observation = activity.calls[0], event.result, event.observation
    state = _resolve_interruption(state, observation, effects)  # a call that needed no engine may end before any look
    state = with_recorded(state, activity, result)
    engine, failure = apply_result(state.engine, call, result, observation)
    if observation is not None:
        engine = with_progress(engine, observation, event.at_ms)
    restarted = engine is not state.engine and relaunched(state.engine, engine)
    if restarted and failure is None:
        message = f"{engine.name} was relaunched during {call_name(call)}."
        failure = Failed(ErrorKind.ENGINE_ERROR, with_engine_state(message, engine))
    roomier = restarted or has_place_again(state.engine, engine)
    suppressed = with_room(state.suppressed) if roomier else state.suppressed
    if state.bus_lost and activity.trigger is None and taken_over(state.engine, call, engine, state.desired):
        state, activity = replace(state, changed_by_others=True), replace(activity, calls=activity.calls[:1])
    state = replace(state, engine=engine, suppressed=suppressed)
    if failure is None and type(call) is events.Observe:
        state, activity, failure = _plan_again(state, activity)
    if failure is not None:
        return _fail(state, activity, failure, restarted, event.at_ms, effects)
    completed, rest = (*activity.completed, call_name(call)), activity.calls[1:]
    reported = merged(activity.reported, result) if isinstance(result, events.Returned) else activity.reported
    if activity.trigger is None and state.queue and type(call) is not events.Observe:
        rest = ()  # gives way; what is left is planned again, with what the command changes
    if rest and state.waits_paused:  # a command that was decided before the bus was lost may still resume
        rest = tuple(call for call in rest if not isinstance(call, events.Resume))
    return _go_on(state, replace(activity, calls=rest, completed=completed, reported=reported), event.at_ms, effects)


def _go_on(state: AgentState, activity: Activity, now_ms: int, effects: Effects) -> AgentState:
    """Make the next call of an activity, or end it if none is left."""
    if activity.calls and not activity.overdue:
        if state.stopping:
            return _stop_within(state, activity, effects)
        return _call(state, replace(activity, call_id=state.calls_made + 1, since_ms=now_ms), effects)
    command = activity.trigger.command if activity.trigger is not None else None
    outcome = acted(state.engine, command, activity.completed, activity.reported, state.desired.sync)
    state = replace(state, retries=0) if state.retries else state
    return _proceed(_end_activity(state, outcome, effects), now_ms, effects)


def _plan_again(state: AgentState, activity: Activity) -> tuple[AgentState, Activity, Failed | None]:
    """Plan the rest of an activity, now that the engine was observed."""
    desired = still_desired(state.desired, state.suppressed)
    state = replace(state, engine=adopt_pushed(state.engine, desired, state.identity))
    if activity.trigger is None:
        rest = own_calls(replace(state, deferred_finish=None), just_observed=True)  # it comes after these
        if memory_missing(rest, state.engine, state.identity) is not None:
            rest = ()  # its time comes when the trainer takes the memory back
        return state, replace(activity, calls=(*activity.calls[:1], *rest)), None
    failure = stranded(activity.trigger.command, desired, state.engine, state.identity)
    planned = reconcile(desired, state.engine, state.identity, just_observed=True)
    rest = (*planned, *(call for call in activity.calls[1:] if call not in planned))
    lacking = memory_missing(rest, state.engine, state.identity)
    return state, replace(activity, calls=(*activity.calls[:1], *rest)), failure or lacking


def _on_stopping(state: AgentState, _: events.Stopping, effects: Effects) -> AgentState:
    if state.awaits_push or state.idle_at_ms is not None:
        what = "the trainer to push the weights" if state.awaits_push else "running requests to end"
        message = f"the agent was asked to end while it waited for {what}."
        state = _end_activity(state, Failed(ErrorKind.UNKNOWN, with_engine_state(message, state.engine)), effects)
    return replace(state, stopping=True)


def _stop_within(state: AgentState, activity: Activity, effects: Effects) -> AgentState:
    """End a command of several calls between two of them, because the agent was asked to end."""
    rest, completed = ", ".join(map(call_name, activity.calls)), ", ".join(activity.completed)
    message = f"the agent was asked to end after {completed}; {rest} was not begun."
    return _end_activity(state, Failed(ErrorKind.UNKNOWN, with_engine_state(message, state.engine)), effects)


def _fail(
    state: AgentState, activity: Activity, failure: Failed, restarted: bool, now_ms: int, effects: Effects
) -> AgentState:
    """End an activity whose call failed. `restarted` says that the engine was relaunched during the call."""
    call, trigger = activity.calls[0], activity.trigger
    # Reconciling does not repeat these calls, nor the commands, which are suppressed.
    given_up = isinstance(call, NOT_REPEATED) or (trigger is not None and not isinstance(trigger.command, EpochStart))
    if isinstance(call, events.UnloadAdapter):
        state = replace(state, unloads=postponed(state.unloads, (call.model,), now_ms))
    state = suppress(state, trigger.command if trigger is not None else call, activity.before)
    blocked, retry_at_ms, retries = not (restarted or given_up), 0, 0
    if blocked and trigger is None and isinstance(call, HARMLESS):
        retry_at_ms = now_ms + min(RETRY_FIRST_MS << min(state.retries, 10), RETRY_LAST_MS)
        retries = state.retries + 1
    state = replace(state, reconcile_blocked=blocked, retry_at_ms=retry_at_ms, retries=retries)
    return _proceed(_end_activity(state, failure, effects), now_ms, effects)


def _on_tick(state: AgentState, event: events.Tick, effects: Effects) -> AgentState:
    activity = state.activity
    if activity is not None and state.idle_at_ms is not None and event.at_ms >= state.idle_at_ms:
        rest = activity.calls[1:] if state.engine.tokenizer == "present" else ()  # of another launch no request is left
        return _go_on(state, replace(activity, calls=rest), event.at_ms, effects)
    if activity is not None and state.awaits_push and event.at_ms >= activity.deadline_ms:
        state = _miss_push(state, activity, effects)
    elif activity is not None and not activity.overdue and event.at_ms >= activity.deadline_ms:
        if activity.trigger is not None:
            message = (
                f"{state.engine.name} has not answered {call_name(activity.calls[0])} by the deadline. The call is "
            )
            message += f"not cancelled; until it ends, nothing else is sent to this engine. {event.stacks}"
            state = suppress(state, activity.trigger.command, activity.before)
            state = _answer(state, activity.trigger, Failed(ErrorKind.ENGINE_TIMEOUT, message.rstrip()), effects)
        state = replace(state, activity=replace(activity, overdue=True, before=None, stacks=event.stacks))
    engine = apply_time(state.engine, state.settings.wedged_after_ms, event.at_ms)
    state = replace(state, engine=engine) if engine is not state.engine else state
    if state.reconcile_blocked and 0 < state.retry_at_ms <= event.at_ms:
        state = replace(state, reconcile_blocked=False, retry_at_ms=0)
    return _proceed(state, event.at_ms, effects)


def _miss_push(state: AgentState, activity: Activity, effects: Effects) -> AgentState:
    """Fail a load whose weights the trainer did not push by the deadline, or not to this launch of the engine."""
    call = activity.calls[0]
    wanted = call.source.label if isinstance(call, events.AwaitPush) else None
    message = f"the trainer did not push the weights labelled {wanted!r} in time: the engine's label is "
    message += f"{state.engine.label!r}."
    if activity.trigger is not None:
        state = suppress(state, activity.trigger.command, activity.before)
    failed = Failed(ErrorKind.ENGINE_TIMEOUT, with_engine_state(message, state.engine))
    return _end_activity(state, failed, effects)


# --- joining, losing the bus, starting again --------------------------------------------------------------------------


def _on_head(state: AgentState, event: events.HeadSeen, effects: Effects) -> AgentState:
    """Compare the position with the bus's. An agent that is in reach of its bus is the engine's one commander."""
    after = rules.apply_head(state, event, effects)
    if not after.changed_by_others or after.needs_snapshot or after.contested or event.epoch < after.epoch:
        return after
    return _proceed(replace(after, changed_by_others=False), event.at_ms, effects)


def _on_snapshot(state: AgentState, event: events.SnapshotReceived, effects: Effects) -> AgentState:
    """Take the desired state of the snapshot, which stands for every command up to its position."""
    if event.epoch < state.epoch or (event.epoch == state.snapshot_epoch and event.seq < state.seq):
        return state
    state = rules.enter_epoch(state, event.epoch)
    for queued in state.queue:
        state = _answer(state, queued, SUPERSEDED, effects, rule=2)
    activity = state.activity
    drains_on = event.desired.draining and state.idle_at_ms is not None  # its requests have the rest of their time
    if activity is not None and not drains_on:
        waited = state.awaits_push or state.idle_at_ms is not None
        if activity.trigger is not None and not activity.overdue:
            state = _answer(state, activity.trigger, SUPERSEDED, effects, rule=2)
        activity = None if waited else replace(activity, trigger=None, calls=activity.calls[:1], before=None)
    state = replace(
        state,
        snapshot_epoch=event.epoch,
        seq=event.seq,
        desired=event.desired,
        suppressed=only_recorded(state.suppressed, event.desired.profile),
        engine=expect_push(distrusted(state.engine, event.desired), state.desired, event.desired),
        remembered=None,
        bus_lost=False,
        changed_by_others=False,
        relabelled=0,
        queue=(),
        reorder_buffer=tuple(buffered for buffered in state.reorder_buffer if buffered.seq > event.seq),
        resend_from=0,
        activity=activity,
        reconcile_blocked=False,
    )
    return _proceed(rules.drain_buffer(state), event.at_ms, effects)


def _on_lease_expired(state: AgentState, event: events.LeaseExpired, effects: Effects) -> AgentState:
    """Return to the committed weights, since the trainer is gone, and serve or pause, as the settings say.

    An agent that was restarted without a bus returns to those that its last incarnation knew of. No command is obeyed
    before the next snapshot.
    """
    if not state.joined and state.remembered is None and state.settings.on_lost_bus == "serve":
        return state
    if state.awaits_push:
        state = _end_activity(state, SUPERSEDED, effects)
    if state.joined or state.remembered is not None:
        desired = state.remembered.desired if state.remembered is not None else state.desired
        suppressed = without_trainer(state.suppressed, desired)
        state = replace(state, desired=orphaned(desired), suppressed=suppressed)
    state = replace(state, bus_lost=True, reconcile_blocked=False)
    return _proceed(state, event.at_ms, effects)


def _on_started(state: AgentState, event: events.Started, _: Effects) -> AgentState:
    """Begin an incarnation. Commands that were received but not decided are forgotten; decisions are not.

    The engine is not called before it has been observed: it may have changed or been relaunched in the meantime.
    """
    unseen = replace(state.engine, tokenizer="unknown", asleep_by_trainer=frozenset(), progress=None, seen=None)
    return AgentState(
        identity=event.identity,
        incarnation=event.incarnation,
        settings=event.settings,
        epoch=state.epoch,
        seq=state.queue[0].seq - 1 if state.queue else state.seq,  # which `desired` goes up to
        suppressed=only_recorded(state.suppressed, state.suppressed.recorded),
        engine=replace(unseen, memory=event.settings.memory, trouble=None),
        remembered=Remembered(state.desired, state.engine.instance) if state.joined else state.remembered,
        calls_made=state.calls_made,
        answers=state.answers,
        deferred_finish=state.deferred_finish,
        interrupted=state.activity or state.interrupted,
        faults=state.faults,
    )


def _on_observed(state: AgentState, event: events.EngineObserved, effects: Effects) -> AgentState:
    """Correct what is believed about the engine. After a restart, first resolve the call that was cut off."""
    observation = event.observation
    if state.identity.mode is OBSERVED:
        engine = with_progress(only_observed(state.engine, observation), observation, event.at_ms)
        return _proceed(replace(state, engine=engine), event.at_ms, effects)
    resolved = _resolve_interruption(state, observation, effects)
    if resolved is not state:
        return _proceed(resolved, event.at_ms, effects)
    engine = with_progress(apply_observation(state.engine, observation), observation, event.at_ms)
    restarted = relaunched(state.engine, engine)
    roomier = restarted or has_place_again(state.engine, engine)
    # After a restart, a snapshot is newer than what the last incarnation saw.
    known = state.engine.tokenizer == "present" or (not state.joined and state.engine.instance is not None)
    changed = known and changed_by_others(state.engine, engine, state.desired)
    read_again = state.engine.tokenizer == "unknown" and engine.tokenizer != "unknown"  # so no retry has to wait
    state = replace(
        state,
        engine=engine,
        suppressed=with_room(state.suppressed) if roomier else state.suppressed,
        reconcile_blocked=state.reconcile_blocked and not (restarted or read_again),
        changed_by_others=state.changed_by_others or changed,
        relabelled=state.relabelled + (changed and engine.label_changed),
    )
    if restarted and state.activity is not None and state.awaits_push:
        state = _miss_push(state, state.activity, effects)
    return _proceed(state, event.at_ms, effects)


def _resolve_interruption(state: AgentState, observation: events.Observation | None, effects: Effects) -> AgentState:
    """Answer the command whose call was cut off: it acted if the engine shows that its last call was done."""
    interrupted = state.interrupted
    if interrupted is None or observation is None or observation.tokenizer == "unknown":
        return state
    call, trigger = interrupted.calls[0], interrupted.trigger  # as for a call that was not answered
    engine, done = apply_interruption(state.engine, call, observation)
    state = replace(state, engine=engine, interrupted=None)
    if trigger is not None and not interrupted.overdue:
        message = f"the agent was restarted during {call_name(call)}, and the engine can't tell whether it was done."
        outcome: Outcome = Failed(ErrorKind.UNKNOWN, with_engine_state(message, engine))
        if done and len(interrupted.calls) == 1:
            outcome = acted(engine, trigger.command, (*interrupted.completed, call_name(call)))
        state = _answer(state, trigger, outcome, effects)
    return state


REACTIONS: Final[dict[type[events.Event], Callable[[AgentState, Any, Effects], AgentState]]] = {
    events.CommandReceived: _on_command,
    events.EngineReturned: _on_returned,
    events.HeadSeen: _on_head,
    events.SnapshotReceived: _on_snapshot,
    events.EngineObserved: _on_observed,
    events.LeaseExpired: _on_lease_expired,
    events.Tick: _on_tick,
    events.Started: _on_started,
    events.Stopping: _on_stopping,
    events.FaultInjected: lambda state, event, _: with_fault(state, event.name),
}
"""What each kind of event leads to. A dict: patterns of classes that do not match take as long as a whole function."""
