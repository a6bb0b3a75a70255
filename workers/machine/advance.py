"""What an agent does next: decides the commands that are in order, answers them, and begins engine calls.

`decide.py` handles the events and ends in `proceed`, which goes on until something has to be awaited. A command that
is decided changes the desired state, *even if it is skipped*. The gate (rules 4 to 9, `gate.py`) says whether this
agent may act on it, and the command's own rule (10, `commands.py`) which engine calls it needs. When no command is
left, the calls come from `reconcile.py` alone.

All functions with `effects` append to it and return the next state.
"""

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import Command, EngineCommand, EpochStart, ProfileCommand, Pushed, UnknownCommand, WeightSync
from schemas.desired import Desired, desired_after
from schemas.events import AwaitPush, Call, CommandReceived, Effect, Pause, Perform, Returned
from schemas.identity import OBSERVED
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from workers.machine.commands import calls_for, finish_call, needs_no_engine
from workers.machine.gate import answer_to, expiry, is_targeted, must_wait, refusal, superseded
from workers.machine.order import drain_buffer
from workers.machine.reconcile import PAUSE_AND_RESUME, adopt_pushed, reconcile
from workers.machine.state import (
    NOTHING_REPORTED,
    NOTHING_SUPPRESSED,
    Activity,
    AgentState,
    EngineState,
    call_name,
    remember,
)
from workers.machine.suppressed import clear_suppressed, still_desired, suppress

Effects = list[Effect]

_SUPERSEDED = Skipped(Reason.SUPERSEDED)
_GIVEN_UP: dict[type[Struct], tuple[int, ...]] = {ProfileCommand: (4, 7, 8, 9), EngineCommand: (8, 9)}
"""By which rules a refused command's wish is not pursued either. A late profile start would profile another step; an
engine that launches (rule 7) is brought to the desired state once it is up.
"""


def proceed(state: AgentState, now_ms: int, effects: Effects) -> AgentState:
    """Decide queued commands while the engine is free; then reconcile."""
    if state.stopping:
        return state
    while state.queue:
        if awaits_push(state) and any(_ends_wait(state, event) for event in state.queue):
            state = end_wait(state, _SUPERSEDED, effects)
        if state.activity is not None and not state.activity.overdue:
            return state
        event = state.queue[0]
        if must_wait(state, event, now_ms):
            return state
        state = decide_command(replace(state, queue=state.queue[1:]), event, state.seq, now_ms, effects)
        if state.reorder_buffer:
            state = drain_buffer(state)
    if state.activity is not None:
        return state
    state = _adopted(state)
    calls = _own_calls(state)
    if not calls:
        return state
    if state.deferred_finish is not None:
        state = replace(state, deferred_finish=None)
    return _begin(state, None, calls, now_ms, now_ms + state.settings.reconcile_timeout_ms, effects)


def awaits_push(state: AgentState) -> bool:
    """Whether the call under way only waits for weights that the trainer pushes. No engine is called meanwhile."""
    activity = state.activity
    if activity is None or activity.overdue:
        return False
    return isinstance(activity.calls[0], AwaitPush)


def end_wait(state: AgentState, outcome: Outcome, effects: Effects) -> AgentState:
    """Stop waiting for pushed weights, and answer the command that waited."""
    assert state.activity is not None
    trigger = state.activity.trigger
    state = replace(state, activity=None)
    return state if trigger is None else answer_command(state, trigger, outcome, effects)


def _ends_wait(state: AgentState, event: CommandReceived) -> bool:
    """Whether a command ends the load phase that a wait belongs to."""
    command = event.command
    return isinstance(command, EpochStart) or (isinstance(command, WeightSync) and is_targeted(state, event))


def expect_push(engine: EngineState, desired: Desired) -> EngineState:
    """Return `engine`, unread while a sync is in progress in which the trainer pushes weights into it."""
    pushing = desired.sync is not None and isinstance(desired.sync.source, Pushed)
    return replace(engine, unread=True) if pushing and not engine.unread and engine.label is not None else engine


def _adopted(state: AgentState) -> AgentState:
    """Recognize wanted weights that the trainer has pushed, by their label."""
    if state.engine.label is None or not state.joined:
        return state
    desired = still_desired(state.desired, state.suppressed)
    engine = adopt_pushed(state.engine, desired, state.identity)
    return state if engine is state.engine else replace(state, engine=engine)


def _own_calls(state: AgentState) -> tuple[Call, ...]:
    """Return the calls that an idle machine makes by itself. One that only observes makes none, whatever it saw."""
    if state.identity.mode is OBSERVED:
        return ()
    if state.deferred_finish is not None and state.joined:
        return (state.deferred_finish,)
    if state.reconcile_blocked or state.identity.node_rank > 0 or state.engine.tokenizer != "present":
        return ()
    if state.engine.released:  # a call could kill the engine, and the trainer is at work on it
        return ()
    if not state.joined:  # nothing is known to be desired
        pausable = state.engine.generating and state.engine.operations >= PAUSE_AND_RESUME
        return (Pause("abort"),) if state.waits_paused and pausable else ()
    desired = still_desired(state.desired, state.suppressed)
    if state.bus_lost and state.waits_paused:
        desired = replace(desired, generation="paused")
    return reconcile(desired, state.engine, state.identity)


def decide_command(state: AgentState, event: CommandReceived, seq: int, now_ms: int, effects: Effects) -> AgentState:
    """Apply rules 4 to 10 to a command that is in order and has left the queue. `seq` is the new position.

    The command changes the desired state whatever its outcome.
    """
    command, suppressed = event.command, state.suppressed
    targeted = is_targeted(state, event)
    if targeted and suppressed is not NOTHING_SUPPRESSED:
        suppressed = clear_suppressed(suppressed, command, state.desired, state.identity)
    desired = desired_after(state.desired, command, targeted, state.identity)
    expired = now_ms >= event.at_ms + event.ttl_ms
    refused = expiry(state, event) if expired else refusal(state, event, targeted)
    if refused is None and state.queue:
        refused = superseded(state, event)
    if refused is None:
        engine = expect_push(state.engine, desired) if desired is not state.desired else state.engine
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
    if targeted and refused.rule in _GIVEN_UP.get(type(command), ()):
        before = still_desired(state.desired, state.suppressed)
        suppressed = suppress(suppressed, command, before, still_desired(desired, suppressed), state.engine)
    return replace(
        state,
        seq=seq,
        desired=desired,
        suppressed=suppressed,
        reconcile_blocked=False,
        resend_from=state.resend_from if expired else 0,
        answers=remember(state.answers, refused),
    )


def _act(state: AgentState, earlier: AgentState, event: CommandReceived, now_ms: int, effects: Effects) -> AgentState:
    """Rule 10: make the calls that the command needs, or answer it at once. `earlier` is the state before it."""
    command = event.command
    before = still_desired(earlier.desired, earlier.suppressed)
    if state.activity is not None and not _needs_no_free_engine(state, command):
        return _act_while_overdue(state, state.activity, before, event, effects)
    if state.activity is None:
        state = _adopted(state)
    sync = earlier.desired.sync
    result = calls_for(
        command,
        before,
        still_desired(state.desired, state.suppressed),
        sync.version if sync is not None else 0,
        state.engine,
        state.identity,
    )
    if isinstance(result, tuple):
        if result:
            pursued_again = before if isinstance(command, EngineCommand) else None
            return _begin(state, event, result, now_ms, event.at_ms + event.ttl_ms, effects, pursued_again)
        return answer_command(state, event, acted(state.engine, command, ()), effects)
    if isinstance(result, Failed):
        state = suppress_failed(state, command, before)
    return answer_command(state, event, result, effects)


def _needs_no_free_engine(state: AgentState, command: Command | UnknownCommand) -> bool:
    """Whether a command can be decided while a call is in flight. A stop cannot: that call may be its start."""
    stopping = isinstance(command, ProfileCommand) and command.action == "stop"
    return not stopping and needs_no_engine(command, state.engine, state.identity)


def _act_while_overdue(
    state: AgentState, overdue: Activity, before: Desired, event: CommandReceived, effects: Effects
) -> AgentState:
    """Fail a command while an overdue call is awaited. Only a finish is deferred until the engine is free."""
    command = event.command
    if isinstance(command, ProfileCommand) and command.action == "finish":
        state = replace(state, deferred_finish=finish_call(command, state.identity))
        return answer_command(state, event, Acted(calls=(), still_running=True), effects)
    call = call_name(overdue.calls[0])
    message = f"{state.engine.name} has not answered {call} yet, past its deadline. Nothing else is sent until it does."
    return answer_command(
        suppress_failed(state, command, before), event, Failed(ErrorKind.ENGINE_BUSY, message), effects
    )


def answer_command(
    state: AgentState, event: CommandReceived, outcome: Outcome, effects: Effects, rule: int = 10
) -> AgentState:
    """Send the outcome of a command, and store it."""
    answer = answer_to(event, outcome, rule)
    effects.append(answer)
    return replace(state, answers=remember(state.answers, answer))


def acted(
    engine: EngineState,
    command: Command | UnknownCommand,
    calls: tuple[str, ...],
    reported: Returned = NOTHING_REPORTED,
) -> Acted:
    """Return the outcome of a command whose calls succeeded, with what they reported."""
    if type(command) is WeightSync:
        return Acted(calls=calls, version=engine.version, digest=engine.digest)
    if reported is NOTHING_REPORTED:
        return Acted(calls=calls)
    return Acted(
        calls=calls,
        auto_stopped=reported.auto_stopped,
        traces=reported.traces,
        ranks_without_trace=reported.ranks_without_trace,
        still_running=reported.still_running,
    )


def suppress_failed(
    state: AgentState, failed: Command | UnknownCommand | Call, before: Desired | None = None
) -> AgentState:
    """Give up what a command, or a call that no command had asked for, did not bring about."""
    remaining = still_desired(state.desired, state.suppressed)
    return replace(state, suppressed=suppress(state.suppressed, failed, before, remaining, state.engine))


def _begin(
    state: AgentState,
    trigger: CommandReceived | None,
    calls: tuple[Call, ...],
    now_ms: int,
    deadline_ms: int,
    effects: Effects,
    before: Desired | None = None,
) -> AgentState:
    call_id = state.calls_made + 1
    activity = Activity(
        trigger=trigger, calls=calls, call_id=call_id, deadline_ms=deadline_ms, before=before, since_ms=now_ms
    )
    effects.append(Perform(call_id=call_id, call=calls[0]))
    return replace(state, activity=activity, calls_made=call_id)
