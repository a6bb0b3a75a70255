"""The machine of the trainer's side: `decide(state, event) -> (state, effects)`. It decides which command gets which
seq, who is in the fleet, who has answered, what a late joiner is sent, and which phase a weight sync is in.

Rules
1. Pure and total, like the agents' machine: no I/O, no clock, no randomness; it never raises for an input. A state is
   replaced, never changed.
2. A decision is in the log before its effects are performed, so a command is recorded before it is published.
3. Every command ends, with one outcome for each agent that the run knows, and that neither is retired nor leaves the
   fleet meanwhile. It is open for those that are live when it is issued, and ends for each of them with an answer, or
   as `missing`: at the deadline, when the agent is lost, or when another incarnation replaces it. For those that are
   away it ends at once, as `absent`.
4. The desired state of a replica is the fold of the run's commands (`schemas.desired.desired_after`), not of its
   answers. One exception: a profile session that failed to open is no longer desired, so that no agent opens it late.

Theory of operation. Commands get seq 1, 2, 3 … in one total order that continues through restarts; the first command of
a life is `EpochStart`. Agents say hello (which reserves their place in the fleet), join (from then on they hear every
command) and are lost. An unknown sender is always told to say hello. An agent that misses records is sent them, or a
snapshot if they are too old. A command that stays unanswered is retransmitted to the agents that are late, at growing
intervals; the agents' machine makes a repetition harmless.

One transition is missing on purpose: nothing takes a conclusion back. An answer that arrives after its agent was
concluded as missing changes nothing; what the agent did is in its own decisions, and in the status that it reports.
"""

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine import adapters, agents, drains, events, sessions, sync
from controlplane.machine.coordinator_state import (
    UNKNOWN_PEER,
    CoordinatorState,
    Effects,
    OpenCommand,
    conclude,
    member_at,
    send,
)
from controlplane.machine.provenance import with_counted, with_holders
from controlplane.machine.publishing import oversize, publish, retransmit
from controlplane.machine.quorum import with_digests_compared
from controlplane.machine.replicas import note_outcomes, note_shown, served_digests
from schemas.commands import AdapterSync, Drain, EpochStart, Target, WeightSync
from schemas.outcomes import Missing
from schemas.reports import AgentOutcome, Report

LOGIC = 8
"""Version of the decisions below, recorded in every log. A change of behaviour gets a new number."""

EPOCH_START_TIMEOUT_MS = 60_000

__all__ = ["LOGIC", "CoordinatorState", "decide", "next_deadline"]


def decide(
    state: CoordinatorState, event: events.CoordinatorEvent
) -> tuple[CoordinatorState, tuple[events.CoordinatorEffect, ...]]:
    """Return the next state, and the effects to perform, in order."""
    effects: Effects = []
    state = REACTIONS[type(event)](state, event, effects)
    if type(event) in _MAY_END_COMMANDS:
        state = _conclude(state, event, effects)
    return state, tuple(effects)


def next_deadline(state: CoordinatorState) -> int | None:
    """Return when the machine wants a `TimerFired`, in µs of the bus's clock; None if nothing is pending."""
    held_us = state.sync.held_until_us if state.sync is not None else None
    moments = [min(command.deadline_us, command.retransmit_us) for command in state.open]
    return min(moments if held_us is None else [*moments, held_us], default=None)


# --- a life of the bus ------------------------------------------------------------------------------------------------


def _on_opened(state: CoordinatorState, event: events.Opened, effects: Effects) -> CoordinatorState:
    """A new life: agents must join again, and what an earlier trainer left open ends."""
    state = _conclude(replace(_all_missing(state), syncs={}), event, effects)
    members = {  # since when they were away was on another life's clock
        name: replace(member, state="left" if member.state == "left" else "gone", away_us=event.at_us)
        for name, member in state.members.items()
        if member.joined
    }
    previous = state.epoch
    state = replace(
        state,
        run=event.run,
        epoch=previous + 1,
        settings=event.settings,
        members=members,
        claims={},
        assigned={token: (replica, event.at_us) for token, (replica, _) in state.assigned.items()},
        trainer_session=None,
        adapters=adapters.in_a_new_life(state.adapters, state.seq + 1),
        history=tuple((record, 0) for record, _ in state.history),  # their time ran on another life's clock
    )
    start = EpochStart(previous_epoch=previous, logic=event.logic)
    return publish(state, start, Target(), EPOCH_START_TIMEOUT_MS, event, effects)


def _on_closed(state: CoordinatorState, event: events.Closed, effects: Effects) -> CoordinatorState:
    """An orderly end: the last commands end, and syncs in progress are aborted."""
    unfinished = [other for other in state.syncs.values() if sync.is_abandoned_by_close(other)]
    committing = {key: other for key, other in state.syncs.items() if other not in unfinished}
    state = _conclude(replace(_all_missing(state), syncs=committing), event, effects)
    for other in unfinished:
        state = sync.abort_at_close(state, other, event, effects)
    return state


def _all_missing(state: CoordinatorState) -> CoordinatorState:
    ended = (
        conclude(command, command.waiting, Missing("bus_restarted"), command.deadline_us) for command in state.open
    )
    return replace(state, open=tuple(ended))


# --- agents -----------------------------------------------------------------------------------------------------------


def _on_status(state: CoordinatorState, event: events.StatusReceived, effects: Effects) -> CoordinatorState:
    """A status may say that the engine is down, and then no command waits for its agent."""
    state = agents.on_status(state, event, effects)
    return _conclude(state, event, effects) if event.status.tokenizer == "unknown" else state


# --- commands ---------------------------------------------------------------------------------------------------------


def _on_issued(state: CoordinatorState, event: events.Issued, effects: Effects) -> CoordinatorState:
    reason = oversize(event.command, event.target) or sessions.refused_start(state, event)
    reason = reason or adapters.refused_drop(state, event.command)
    if reason := reason or drains.refused_drain(state, event.command, event.target):
        effects.append(events.Refuse(ticket=event.ticket, kind="command", reason=reason))
        return state
    state = replace(state, trainer_session=sessions.trainer_session_after(state, event))
    asked = event.command, event.target, event.timeout_ms, event
    state = publish(state, *asked, effects, ticket=event.ticket, operator=event.operator)
    return drains.released(state, event.target) if isinstance(event.command, Drain) else state


def _on_answers(state: CoordinatorState, event: events.AnswersReceived, effects: Effects) -> CoordinatorState:
    new: dict[int, dict[str, AgentOutcome]] = {}  # by seq and agent
    commands = {command.record.seq: command for command in state.open}
    for answer in event.answers:
        name = member_at(state, answer.peer)
        if name is None:
            send(state, answer.peer, UNKNOWN_PEER, effects)
            continue
        command = commands.get(answer.seq)
        if command is None or answer.origin != command.record.origin or not command.waits_for(name):
            continue
        latency_us = event.at_us - command.issued_us
        outcome = AgentOutcome(agent=name, conclusion=answer.outcome, rule=answer.rule, latency_us=latency_us)
        new.setdefault(answer.seq, {}).setdefault(name, outcome)
    for seq, outcomes in sorted(new.items()):
        state = sessions.withdraw_failed_session(state, commands[seq], outcomes.values())
        state = note_shown(state, outcomes.values())
        state = note_outcomes(state, commands[seq].command, outcomes.values())
        if isinstance(commands[seq].command, WeightSync | AdapterSync):
            state = with_holders(state, outcomes)
    open_commands = (
        replace(command, outcomes={**command.outcomes, **new[command.record.seq]})
        if command.record.seq in new
        else command
        for command in state.open
    )
    return replace(state, open=tuple(open_commands)) if new else state


def _on_timer(state: CoordinatorState, event: events.TimerFired, effects: Effects) -> CoordinatorState:
    open_commands = []
    for command in state.open:
        if event.at_us >= command.deadline_us:
            command = conclude(command, command.waiting, Missing("deadline"), event.at_us)
        elif event.at_us >= command.retransmit_us:
            command = retransmit(state, command, event.at_us, effects)
        open_commands.append(command)
    state = _conclude(replace(state, open=tuple(open_commands)), event, effects)
    return sync.on_time(state, event, effects)


def _conclude(state: CoordinatorState, event: events.CoordinatorEvent, effects: Effects) -> CoordinatorState:
    """End every command that waits for no agent, and go on with the sync whose phase that was."""
    while True:
        state = sync.conclude_down_engines(state, event.at_us)
        ended = [command for command in state.open if command.ended]
        if not ended:
            return state
        state = replace(state, open=tuple(command for command in state.open if not command.ended))
        for command in ended:
            state = _end(state, command, event, effects)


def _end(
    state: CoordinatorState, ended: OpenCommand, event: events.CoordinatorEvent, effects: Effects
) -> CoordinatorState:
    """Report a command that waits for no agent."""
    record = ended.record
    outcomes = with_digests_compared(ended.command, ended.all_outcomes, served_digests(state))
    report = Report(seq=record.seq, origin=record.origin, command=ended.command, outcomes=outcomes)
    missing = [outcome for outcome in report.outcomes if type(outcome.conclusion) is Missing]
    state = note_outcomes(state, ended.command, missing)
    effects.append(events.Conclude(ticket=ended.ticket, report=report))
    if isinstance(ended.command, Drain):
        return drains.retire_drained(state, ended, effects)
    return sync.on_phase_ended(state, ended, report, event, effects)


REACTIONS: Final[dict[type[Struct], Callable[[CoordinatorState, Any, Effects], CoordinatorState]]] = {
    events.Opened: _on_opened,
    events.Issued: _on_issued,
    events.SyncRequested: sync.begin,
    events.SendFailed: sync.on_send_failed,
    events.SendReturned: sync.on_send_returned,
    events.RetireRequested: agents.on_retire_requested,
    events.SamplesCounted: lambda state, event, _: replace(state, samples=with_counted(state.samples, event)),
    events.PlaceRequested: agents.on_place_requested,
    events.HelloReceived: agents.on_hello,
    events.JoinReceived: agents.on_join,
    events.StatusReceived: _on_status,
    events.ResendRequested: agents.on_resend_requested,
    events.LeaveRequested: drains.on_leave_requested,
    events.PeerLost: agents.on_lost,
    events.AnswersReceived: _on_answers,
    events.TimerFired: _on_timer,
    events.Closed: _on_closed,
}
"""What each kind of event leads to. A dict: ten patterns of classes that do not match take a microsecond."""

_MAY_END_COMMANDS: Final = (
    *(events.Opened, events.Issued, events.SyncRequested, events.SendFailed, events.SendReturned),
    *(events.PeerLost, events.LeaveRequested, events.AnswersReceived, events.TimerFired),
)
"""Events after which a command may wait for no agent any more."""
