"""The machine of the trainer's side: `decide(state, event) -> (state, effects)`. Who gets which seq, who is in the
fleet, who has answered, what a late joiner is told, which phase a weight sync is in: all decided here.

Rules
1. Pure and total, as the agents' machine: no I/O, no clock, no randomness; never raises for an input.
2. A decision is in the log before its effects are performed, so a command is recorded before it is published.
3. Every command ends. It is open for the agents that were in the fleet when it was issued, and each of them concludes
   it: by its answer, or as `missing` when time is up, when it is lost, or when another incarnation takes its place.
4. What is desired of a replica is the fold of the run's commands (`schemas.desired.intend`), not of its answers. One
   exception: a profile session that failed to open is not desired any more, so that nobody opens it late.

Theory of operation. Commands get seq 1, 2, 3 … of one total order that goes on through restarts; the first command
of a life is `EpochStart`. Agents say hello (a place in the fleet), join (from then on they hear everything) and are
lost. A stranger is never met with silence: it is told to say hello. An agent that has a hole is sent the records, or
a snapshot when they are too old. A command that stays unanswered is repeated, ever more rarely, to those who are
late: the agents' machine makes a repetition harmless.

The transition that is missing on purpose: nothing takes a conclusion back. An answer that comes after its agent was
given up as missing changes nothing; what the agent did is in its own decisions, and in the state that it reports.
"""

from typing import assert_never

from msgspec import Raw
from msgspec.structs import replace

from controlplane.machine import fleet
from controlplane.machine.events import (
    AnswersReceived,
    Closed,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    Issued,
    JoinReceived,
    Opened,
    PeerAnswer,
    PeerLost,
    Publish,
    Refuse,
    ResendRequested,
    StatusReceived,
    SyncRequested,
    TimerFired,
)
from controlplane.machine.fleet import PAGE, CoordinatorState, Effects, OpenCommand, Why
from controlplane.machine.weights import Sync, first_phase, next_phase
from schemas.commands import Command, EpochStart, ProfileCommand, Target, WeightSync
from schemas.desired import Desired, desired_after
from schemas.identity import Identity, identity_of
from schemas.outcomes import Failed
from schemas.reports import AgentOutcome, Report, SyncReport
from schemas.wire import MAX_COMMAND_BYTES, CommandRecord, Envelope, Rejoin, Replay, encode

LOGIC = 3
"""Version of the decisions below; recorded in every log. A change of behaviour is a new number."""

EPOCH_START_TIMEOUT_MS = 60_000
STRANGER = Identity(replica=2**31 - 1, node_rank=0)
"""Stands for a replica that was never seen: no quarantine and no set of ranks names it."""

__all__ = ["LOGIC", "CoordinatorState", "decide", "next_deadline"]

Decided = tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]


def decide(state: CoordinatorState, event: CoordinatorEvent) -> Decided:
    """The next state, and what is to be done about it, in order."""
    effects: Effects = []
    match event:
        case AnswersReceived():
            state = _answers(state, event, effects)
        case StatusReceived():
            state = fleet.status(state, event, effects)
        case Issued():
            state = _issue(state, event, effects)
        case SyncRequested():
            state = _sync(state, event, effects)
        case ResendRequested():
            state = fleet.resend(state, event, effects)
        case HelloReceived():
            state = _conclude(fleet.hello(state, event, effects), event.at_us, effects)
        case JoinReceived():
            state = fleet.join(state, event, effects)
        case PeerLost():
            state = _conclude(fleet.lost(state, event, effects), event.at_us, effects)
        case TimerFired():
            state = _time(state, event, effects)
        case Opened():
            state = _opened(state, event, effects)
        case Closed():
            state = _closed(state, event, effects)
        case _:
            assert_never(event)
    return state, tuple(effects)


def next_deadline(state: CoordinatorState) -> int | None:
    """When the machine wants a `TimerFired`, in µs of the bus's clock; None when nothing is pending."""
    return min((min(one.deadline_us, one.retransmit_us) for one in state.open), default=None)


# --- issuing ----------------------------------------------------------------------------------------------------------


def _opened(state: CoordinatorState, event: Opened, effects: Effects) -> CoordinatorState:
    """A new life: agents must join again, and what an earlier trainer left open is over."""
    state = _conclude(replace(_missing_all(state, "bus_restarted"), sync=None), event.at_us, effects)
    members = {name: replace(one, state="gone") for name, one in state.members.items() if one.state != "left"}
    previous = state.epoch
    state = replace(
        state,
        run=event.run,
        epoch=previous + 1,
        settings=event.settings,
        members=members,
        claims={},
        history=tuple((record, 0) for record, _ in state.history),  # another life's clock: their time is over
    )
    start = EpochStart(previous_epoch=previous, logic=event.logic)
    state = _publish(state, start, Target(), EPOCH_START_TIMEOUT_MS, None, event.at_us, event.at_ns, effects)
    return _conclude(state, event.at_us, effects)


def _closed(state: CoordinatorState, event: Closed, effects: Effects) -> CoordinatorState:
    """An orderly end. A sync in the middle is aborted, so that the fleet need not wait for its lease to go on."""
    sync = state.sync
    state = _conclude(replace(_missing_all(state, "bus_restarted"), sync=None), event.at_us, effects)
    if sync is None:
        return state
    why = f"the bus was closed in the {sync.phase} phase of the sync to version {sync.version}; it was aborted"
    effects.append(Refuse(ticket=sync.ticket, kind="closed", reason=why))
    abort = WeightSync(phase="abort", version=sync.version)
    return _publish(state, abort, sync.target, sync.timeout_ms, None, event.at_us, event.at_ns, effects)


def _issue(state: CoordinatorState, event: Issued, effects: Effects) -> CoordinatorState:
    size = len(encode(event.command))
    if size > MAX_COMMAND_BYTES:
        why = f"the command takes {size} bytes, a command has at most {MAX_COMMAND_BYTES}; nothing was published"
        effects.append(Refuse(ticket=event.ticket, kind="command", reason=why))
        return state
    state = _publish(
        state, event.command, event.target, event.timeout_ms, event.ticket, event.at_us, event.at_ns, effects
    )
    return _conclude(state, event.at_us, effects)


def _sync(state: CoordinatorState, event: SyncRequested, effects: Effects) -> CoordinatorState:
    if state.sync is not None:
        why = (
            f"a sync to version {state.sync.version} is in its {state.sync.phase} phase; two at once would split the "
            "fleet. Wait for its report, then ask again"
        )
        effects.append(Refuse(ticket=event.ticket, kind="sync_in_progress", reason=why))
        return state
    sync = Sync(
        ticket=event.ticket,
        version=event.version,
        source=event.source,
        manifest=event.manifest,
        in_flight=event.in_flight,
        quorum=event.quorum,
        target=event.target,
        timeout_ms=event.timeout_ms,
    )
    state = replace(state, sync=replace(sync, seq=state.seq + 1))
    state = _publish(state, first_phase(sync), event.target, event.timeout_ms, None, event.at_us, event.at_ns, effects)
    return _conclude(state, event.at_us, effects)


def _publish(
    state: CoordinatorState,
    command: Command,
    target: Target,
    timeout_ms: int,
    ticket: int | None,
    at_us: int,
    at_ns: int,
    effects: Effects,
) -> CoordinatorState:
    """Give the command the next seq, fold it into what is desired, and open it for everyone who is live.

    Agents are given a little less time than the trainer waits, so that "no time left" arrives as an answer.
    """
    seq = state.seq + 1
    ttl_ms = timeout_ms - min(1000, timeout_ms // 10)
    envelope = Envelope(run=state.run, issued_at_ns=at_ns, ttl_ms=ttl_ms, body=Raw(encode(command)), target=target)
    record = CommandRecord(origin=state.epoch, seq=seq, envelope=envelope)
    live = frozenset(name for name, member in state.members.items() if member.state == "live")
    retransmit_us = (state.settings.retransmit_ms if state.settings is not None else 1000) * 1000
    opened = OpenCommand(
        record=record,
        command=command,
        ticket=ticket,
        issued_us=at_us,
        deadline_us=at_us + timeout_ms * 1000,
        retransmit_us=at_us + retransmit_us,
        waiting=live,
    )
    limit = state.settings.history if state.settings is not None else 1
    history = (*state.history, (record, at_us + ttl_ms * 1000))
    effects.append(Publish(epoch=state.epoch, seq=seq, envelope=envelope))
    return replace(
        state,
        seq=seq,
        open=(*state.open, opened),
        history=history[-limit:],
        desired=_fold(state, command, target),
        default_desired=desired_after(state.default_desired, command, target.replicas is None, STRANGER),
    )


def _fold(state: CoordinatorState, command: Command, target: Target) -> dict[int | str, Desired]:
    # The members of one replica agree on what `desired_after` looks at.
    seen = {member.hello.identity.unit: member.hello.identity for member in state.members.values()}
    folded = state.desired
    for unit, before in state.desired.items():
        targeted = target.replicas is None or unit in target.replicas
        after = desired_after(before, command, targeted, seen.get(unit) or _left(unit))
        if after is not before:
            folded = {**folded, unit: after} if folded is state.desired else _set(folded, unit, after)
    return folded


def _left(unit: int | str) -> Identity:
    """Stands for one that left in an earlier life of the bus, until it comes back."""
    return identity_of(unit) if isinstance(unit, str) else Identity(replica=unit, node_rank=0)


def _set(folded: dict[int | str, Desired], unit: int | str, desired: Desired) -> dict[int | str, Desired]:
    folded[unit] = desired  # a copy that nobody else has seen
    return folded


# --- answers and ends -------------------------------------------------------------------------------------------------


def _answers(state: CoordinatorState, event: AnswersReceived, effects: Effects) -> CoordinatorState:
    by_seq: dict[int, dict[str, PeerAnswer]] = {}
    for answer in event.answers:
        name = fleet.member_at(state, answer.peer)
        if name is None:
            fleet.send(state, answer.peer, Rejoin(reason="the bus does not know you: say hello"), effects)
        else:
            by_seq.setdefault(answer.seq, {}).setdefault(name, answer)
    still = []
    for one in state.open:
        answers = by_seq.get(one.record.seq, {})
        arrived = tuple(
            AgentOutcome(
                agent=name, conclusion=answer.outcome, rule=answer.rule, latency_us=event.at_us - one.issued_us
            )
            for name, answer in answers.items()
            if name in one.waiting and answer.origin == one.record.origin
        )
        if arrived:
            state = _disappointed(state, one, arrived)
            waiting = one.waiting.difference(line.agent for line in arrived)
            one = replace(one, waiting=waiting, outcomes=one.outcomes + arrived)
        still.append(one)
    return _conclude(replace(state, open=tuple(still)), event.at_us, effects)


def _disappointed(state: CoordinatorState, one: OpenCommand, arrived: tuple[AgentOutcome, ...]) -> CoordinatorState:
    """A session that failed to open is not desired any more: a late joiner must not try it again."""
    if not isinstance(one.command, ProfileCommand) or one.command.action != "start":
        return state
    desired = dict(state.desired)
    for line in arrived:
        unit = state.members[line.agent].hello.identity.unit
        if isinstance(line.conclusion, Failed) and unit in desired:
            desired[unit] = replace(desired[unit], profile=None)
    return replace(state, desired=desired)


def _missing_all(state: CoordinatorState, why: Why) -> CoordinatorState:
    return replace(state, open=tuple(fleet.missing(one, one.waiting, why, one.deadline_us) for one in state.open))


def _conclude(state: CoordinatorState, at_us: int, effects: Effects) -> CoordinatorState:
    """End every command that nobody owes an answer to; go on with the sync whose phase that was."""
    while True:
        done = next((one for one in state.open if not one.waiting), None)
        if done is None:
            return state
        report = Report(seq=done.record.seq, origin=done.record.origin, command=done.command, outcomes=done.outcomes)
        state = replace(state, open=tuple(one for one in state.open if one is not done))
        effects.append(Conclude(ticket=done.ticket, report=report))
        if state.sync is not None and state.sync.seq == report.seq:
            state = _phase_ended(state, state.sync, report, done.record.envelope.issued_at_ns, at_us, effects)


def _phase_ended(
    state: CoordinatorState, sync: Sync, report: Report, at_ns: int, at_us: int, effects: Effects
) -> CoordinatorState:
    sync, following = next_phase(sync, report)
    if isinstance(following, SyncReport):
        effects.append(Conclude(ticket=sync.ticket, report=following))
        return replace(state, sync=None)
    state = replace(state, sync=replace(sync, seq=state.seq + 1))
    return _publish(state, following, sync.target, sync.timeout_ms, None, at_us, at_ns, effects)


def _time(state: CoordinatorState, event: TimerFired, effects: Effects) -> CoordinatorState:
    still = []
    for one in state.open:
        if event.at_us >= one.deadline_us:
            one = fleet.missing(one, one.waiting, "deadline", event.at_us)
        elif event.at_us >= one.retransmit_us:
            one = _nudge(state, one, event.at_us, effects)
        still.append(one)
    return _conclude(replace(state, open=tuple(still)), event.at_us, effects)


def _nudge(state: CoordinatorState, one: OpenCommand, at_us: int, effects: Effects) -> OpenCommand:
    """Repeat the command to those who have not answered; each pause is twice the one before."""
    left_ms = max(0, one.issued_us + one.record.envelope.ttl_ms * 1000 - at_us) // 1000
    record = replace(one.record, envelope=replace(one.record.envelope, ttl_ms=left_ms))
    for name in sorted(one.waiting)[:PAGE]:
        fleet.send(state, state.members[name].peer, Replay(records=(record,)), effects)
    pause_us = (one.retransmit_us - one.issued_us) * 2
    return replace(one, retransmits=one.retransmits + 1, retransmit_us=max(at_us + 1000, one.issued_us + pause_us))
