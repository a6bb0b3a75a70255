"""The machine of the trainer's side: `decide(state, event) -> (state, effects)`. It decides which command gets which
seq, who is in the fleet, who has answered, what a late joiner is sent, and which phase a weight sync is in.

Rules
1. Pure and total, like the agents' machine: no I/O, no clock, no randomness; it never raises for an input. A state is
   replaced, never changed. What one agent causes costs the same in a fleet of any size (`tables.py`).
2. A decision is in the log before its effects are performed, so a command is recorded before it is published.
3. Every command ends, with one outcome for each agent that the run knows and that is not retired. It is open for those
   that are live when it is issued, and ends for each of them with an answer, or as `missing`: at the deadline, when the
   agent is lost, or when another incarnation replaces it. For those that are away it ends at once, as `absent`.
4. The desired state of a replica is the fold of the run's commands (`schemas.desired.desired_after`), not of its
   answers. One exception: a profile session that failed to open is no longer desired, so that nobody opens it late.

Theory of operation. Commands get seq 1, 2, 3 … in one total order that continues through restarts; the first command of
a life is `EpochStart`. Agents say hello (which reserves their place in the fleet), join (from then on they hear every
command) and are lost. An unknown sender is always told to say hello. An agent that misses records is sent them, or a
snapshot if they are too old. A command that stays unanswered is retransmitted to the agents that are late, at growing
intervals; the agents' machine makes a repetition harmless.

One transition is missing on purpose: nothing takes a conclusion back. An answer that arrives after its agent was
concluded as missing changes nothing; what the agent did is in its own decisions, and in the status that it reports.
"""

from collections.abc import Callable
from heapq import nsmallest
from typing import Any, Final

from msgspec import Raw, Struct
from msgspec.structs import replace

from controlplane.machine import events, fleet, folding, membership, sessions, syncs
from controlplane.machine.fleet import PAGE, CoordinatorState, Effects, MissingReason, OpenCommand
from controlplane.machine.members import Members
from controlplane.machine.serving import note_outcomes
from controlplane.machine.tables import with_entries
from schemas.commands import Command, EpochStart, Target
from schemas.outcomes import Missing
from schemas.reports import AgentOutcome, Report
from schemas.wire import CommandRecord, Envelope, Replay, encode

LOGIC = 6
"""Version of the decisions below, recorded in every log. A change of behaviour gets a new number."""

EPOCH_START_TIMEOUT_MS = 60_000

__all__ = ["LOGIC", "CoordinatorState", "decide", "next_deadline"]


class _Now(Struct, frozen=True, gc=False):
    """The moment of an event: the bus's monotonic clock, and the wall clock."""

    us: int
    ns: int


def _now(event: events.CoordinatorEvent) -> _Now:
    return _Now(event.at_us, event.at_ns)


def decide(
    state: CoordinatorState, event: events.CoordinatorEvent
) -> tuple[CoordinatorState, tuple[events.CoordinatorEffect, ...]]:
    """Return the next state, and the effects to perform, in order."""
    effects: Effects = []
    state = REACTIONS[type(event)](state, event, effects)
    return state, tuple(effects)


def next_deadline(state: CoordinatorState) -> int | None:
    """Return when the machine wants a `TimerFired`, in µs of the bus's clock; None if nothing is pending."""
    held_us = state.sync.held_until_us if state.sync is not None else None
    moments = [min(command.deadline_us, command.retransmit_us) for command in state.open]
    return min(moments if held_us is None else [*moments, held_us], default=None)


# --- agents -----------------------------------------------------------------------------------------------------------


def _on_status(state: CoordinatorState, event: events.StatusReceived, effects: Effects) -> CoordinatorState:
    """A status may say that the engine is down, and then no command waits for its agent."""
    state = fleet.on_status(state, event, effects)
    return _conclude(state, _now(event), effects) if event.status.tokenizer == "unknown" else state


def _on_lost(state: CoordinatorState, event: events.PeerLost, effects: Effects) -> CoordinatorState:
    """No command waits for an agent that is lost."""
    return _conclude(fleet.on_lost(state, event), _now(event), effects)


# --- issuing ----------------------------------------------------------------------------------------------------------


def _on_opened(state: CoordinatorState, event: events.Opened, effects: Effects) -> CoordinatorState:
    """A new life: agents must join again, and what an earlier trainer left open ends."""
    state = _conclude(replace(_all_missing(state, "bus_restarted"), sync=None), _now(event), effects)
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
        members=Members(members),
        desired=folding.shared(state),
        claims={},
        trainer_session=None,
        history=tuple((record, 0) for record, _ in state.history),  # their time ran on another life's clock
    )
    start = EpochStart(previous_epoch=previous, logic=event.logic)
    state = _publish(state, start, Target(), EPOCH_START_TIMEOUT_MS, _now(event), effects)
    return _conclude(state, _now(event), effects)


def _on_closed(state: CoordinatorState, event: events.Closed, effects: Effects) -> CoordinatorState:
    """An orderly end. A sync in progress is aborted, so that the fleet resumes without waiting for its lease."""
    sync = state.sync
    state = _conclude(replace(_all_missing(state, "bus_restarted"), sync=None), _now(event), effects)
    if sync is None:
        return state
    reason = f"the bus was closed in the {sync.phase} phase of the sync to version {sync.version}; it was aborted"
    effects.append(events.Refuse(ticket=sync.request.ticket, kind="closed", reason=reason))
    return _open_phase(state, syncs.abort_of(sync), _now(event), effects)


def _on_issued(state: CoordinatorState, event: events.Issued, effects: Effects) -> CoordinatorState:
    if reason := fleet.oversize(event.command, event.target) or sessions.refused_start(state, event):
        effects.append(events.Refuse(ticket=event.ticket, kind="command", reason=reason))
        return state
    now = _now(event)
    state = replace(state, trainer_session=sessions.session_after(state, event))
    state = _publish(state, event.command, event.target, event.timeout_ms, now, effects, event.ticket)
    return _conclude(state, now, effects)


def _open_phase(state: CoordinatorState, phase: syncs.Phase | None, now: _Now, effects: Effects) -> CoordinatorState:
    """Publish the next phase of a sync, if one follows."""
    if phase is None:
        return state
    return _publish(state, phase.command, phase.target, phase.timeout_ms, now, effects, phase.ticket)


def _on_sync_event(
    state: CoordinatorState,
    event: events.SyncRequested | events.PhaseRequested | events.SendFailed,
    effects: Effects,
) -> CoordinatorState:
    return _go_on(*_SYNC_REACTIONS[type(event)](state, event, effects), _now(event), effects)


def _go_on(state: CoordinatorState, phase: syncs.Phase | None, now: _Now, effects: Effects) -> CoordinatorState:
    """Publish the phase of a sync that follows, and end what nobody is waited for."""
    return _conclude(_open_phase(state, phase, now, effects), now, effects)


def _publish(
    state: CoordinatorState,
    command: Command,
    target: Target,
    timeout_ms: int,
    now: _Now,
    effects: Effects,
    ticket: int | None = None,
) -> CoordinatorState:
    """Give the command the next seq, fold it into the desired state, and open it for every live agent.

    Agents get a little less time than the trainer waits, so that "no time left" arrives as an answer.
    """
    seq = state.seq + 1
    ttl_ms = timeout_ms - min(1000, timeout_ms // 10)
    envelope = Envelope(run=state.run, issued_at_ns=now.ns, ttl_ms=ttl_ms, body=Raw(encode(command)), target=target)
    record = CommandRecord(origin=state.epoch, seq=seq, envelope=envelope)
    open_command = OpenCommand(
        record=record,
        command=command,
        ticket=ticket,
        issued_us=now.us,
        deadline_us=now.us + timeout_ms * 1000,
        retransmit_us=now.us + state.settings.retransmit_ms * 1000,
        expected=state.roster.live,
        absent=membership.absent_outcomes(state, now.us),
    )
    history = (*state.history, (record, now.us + ttl_ms * 1000))
    effects.append(events.Publish(epoch=state.epoch, seq=seq, envelope=envelope))
    desired, default_desired = folding.folded(state, command, target)
    return replace(
        state,
        seq=seq,
        open=(*state.open, open_command),
        history=history[-state.settings.history :],
        desired=desired,
        default_desired=default_desired,
    )


# --- answers and ends -------------------------------------------------------------------------------------------------


def _on_answers(state: CoordinatorState, event: events.AnswersReceived, effects: Effects) -> CoordinatorState:
    new: dict[int, dict[str, AgentOutcome]] = {}  # by seq and agent
    commands = {command.record.seq: command for command in state.open}
    for answer in event.answers:
        name = fleet.member_at(state, answer.peer)
        if name is None:
            fleet.send(state, answer.peer, fleet.UNKNOWN_PEER, effects)
            continue
        command = commands.get(answer.seq)
        if command is None or answer.origin != command.record.origin or not command.waits_for(name):
            continue
        latency_us = event.at_us - command.issued_us
        outcome = AgentOutcome(agent=name, conclusion=answer.outcome, rule=answer.rule, latency_us=latency_us)
        new.setdefault(answer.seq, {}).setdefault(name, outcome)
    if not new:
        return _conclude(state, _now(event), effects)
    for seq, outcomes in sorted(new.items()):
        state = sessions.withdraw_failed_session(state, commands[seq], outcomes.values())
        state = note_outcomes(state, commands[seq].command, outcomes.values())
    open_commands = (
        replace(command, outcomes=with_entries(command.outcomes, new[command.record.seq]))
        if command.record.seq in new
        else command
        for command in state.open
    )
    return _conclude(replace(state, open=tuple(open_commands)), _now(event), effects)


def _all_missing(state: CoordinatorState, reason: MissingReason) -> CoordinatorState:
    ended = (fleet.conclude_missing(command, command.waiting, reason, command.deadline_us) for command in state.open)
    return replace(state, open=tuple(ended))


def _conclude(state: CoordinatorState, now: _Now, effects: Effects) -> CoordinatorState:
    """End every command that waits for nobody, and continue the sync whose phase that was."""
    while True:
        state = syncs.without_engines_down(state, now.us)
        ended = [command for command in state.open if command.ended]
        if not ended:
            return state
        gone = {command.record.seq for command in ended}
        state = replace(state, open=tuple(command for command in state.open if command.record.seq not in gone))
        for command in ended:
            state = _end(state, command, now, effects)


def _end(state: CoordinatorState, ended: OpenCommand, now: _Now, effects: Effects) -> CoordinatorState:
    """Report a command that waits for nobody."""
    record = ended.record
    report = Report(seq=record.seq, origin=record.origin, command=ended.command, outcomes=ended.all_outcomes)
    missing = [outcome for outcome in report.outcomes if type(outcome.conclusion) is Missing]
    state = note_outcomes(state, ended.command, missing)
    effects.append(events.Conclude(ticket=ended.ticket, report=report))
    if state.sync is None or state.sync.seq != report.seq:
        return state
    until_us = ended.issued_us + state.sync.request.timeout_ms * 1000
    return _open_phase(*syncs.end_phase(state, state.sync, report, until_us, effects), now, effects)


def _on_timer(state: CoordinatorState, event: events.TimerFired, effects: Effects) -> CoordinatorState:
    open_commands = []
    for command in state.open:
        if event.at_us >= command.deadline_us:
            command = fleet.conclude_missing(command, command.waiting, "deadline", event.at_us)
        elif event.at_us >= command.retransmit_us:
            command = _retransmit(state, command, event.at_us, effects)
        open_commands.append(command)
    state = _conclude(replace(state, open=tuple(open_commands)), _now(event), effects)
    return _go_on(*syncs.on_time(state, event.at_us, effects), _now(event), effects)


def _retransmit(state: CoordinatorState, command: OpenCommand, at_us: int, effects: Effects) -> OpenCommand:
    """Send the command again to agents that have not answered. Each interval is twice the one before."""
    envelope = command.record.envelope
    left_ms = max(0, command.issued_us + envelope.ttl_ms * 1000 - at_us) // 1000
    record = replace(command.record, envelope=replace(envelope, ttl_ms=left_ms))
    for name in nsmallest(PAGE, command.waiting):
        fleet.send(state, state.members[name].peer, Replay(records=(record,)), effects)
    next_us = command.issued_us + (command.retransmit_us - command.issued_us) * 2
    return replace(command, retransmits=command.retransmits + 1, retransmit_us=max(at_us + 1000, next_us))


_SYNC_REACTIONS: Final[
    dict[type[Struct], Callable[[CoordinatorState, Any, Effects], tuple[CoordinatorState, syncs.Phase | None]]]
] = {
    events.SyncRequested: syncs.on_requested,
    events.PhaseRequested: syncs.on_phase_requested,
    events.SendFailed: syncs.on_send_failed,
}
REACTIONS: Final[dict[type[Struct], Callable[[CoordinatorState, Any, Effects], CoordinatorState]]] = {
    events.AnswersReceived: _on_answers,
    events.StatusReceived: _on_status,
    events.Issued: _on_issued,
    events.SyncRequested: _on_sync_event,
    events.PhaseRequested: _on_sync_event,
    events.SendFailed: _on_sync_event,
    events.SendReturned: syncs.on_send_returned,
    events.TimerFired: _on_timer,
    events.HelloReceived: fleet.on_hello,
    events.JoinReceived: fleet.on_join,
    events.ResendRequested: fleet.on_resend_requested,
    events.PeerLost: _on_lost,
    events.RetireRequested: membership.on_retire_requested,
    events.Opened: _on_opened,
    events.Closed: _on_closed,
}
"""What each kind of event leads to. A dict: ten patterns of classes that do not match take a microsecond."""
