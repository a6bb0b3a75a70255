"""The machine of the trainer's side: `decide(state, event) -> (state, effects)`. Who gets which seq, who is in the
fleet, who has answered, what a late joiner is told, which phase a weight sync is in: all decided here.

Rules
1. Pure and total, as the agents' machine: no I/O, no clock, no randomness; never raises for an input.
2. A decision is in the log before its effects are performed, so a command is recorded before it is published.
3. Every command ends. It is open for the agents that were in the fleet when it was issued, and each of them concludes
   it: by its answer, or as `missing` when time is up, when it is lost, or when another incarnation takes its place.
4. What is desired of a replica is the fold of the run's commands (`schemas.desired.intend`), never of its answers.

Theory of operation. Commands get seq 1, 2, 3 … of one total order that goes on through restarts; the first command
of a life is `EpochStart`. Agents say hello (a place in the fleet), join (from then on they hear everything) and are
lost. A stranger is never met with silence: it is told to say hello. An agent that has a hole is sent the records, or
a snapshot when they are too old. A command that stays unanswered is repeated, ever more rarely, to those who are
late: the agents' machine makes a repetition harmless.

The transition that is missing on purpose: nothing makes a lost agent live again but a new hello and join, after which
it gets a snapshot. Silence proves nothing about what happened in between.
"""

from typing import assert_never

from msgspec import Raw, Struct
from msgspec.structs import replace

from controlplane.events import (
    AnswersReceived,
    Closed,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSettings,
    HelloReceived,
    Issued,
    JoinReceived,
    NeedReceived,
    Opened,
    PeerAnswer,
    PeerLost,
    Probe,
    Publish,
    Refuse,
    Send,
    StatusReceived,
    SyncReport,
    SyncRequested,
    TimeCame,
)
from controlplane.weights import Sync, first_phase, next_phase
from schemas.commands import Command, EngineCommand, EpochStart, ProfileCommand, Target, WeightSync
from schemas.desired import Desired, intend
from schemas.identity import Count, Identity, Positive, RolloutMode
from schemas.outcomes import Failed, Missing
from schemas.wire import (
    MAX_COMMAND_BYTES,
    AgentLine,
    AgentOutcome,
    Downward,
    Envelope,
    FleetStatus,
    Hello,
    Record,
    Rejoin,
    Replay,
    Report,
    Snapshot,
    Status,
    Welcome,
    encode,
)

LOGIC = 1
"""Version of the decisions below; recorded in every log. A change of behaviour is a new number."""

PAGE = 64
"""Records in one page of replay, at most."""
PAGE_BYTES = 192 * 1024
"""Bytes of commands in one page, at most."""
EPOCH_START_TIMEOUT_MS = 60_000
STRANGER = Identity(replica=0, node_rank=0)


class Member(Struct, frozen=True, kw_only=True):
    """One agent that said hello. life: joining until it hears the commands, then live, then gone or left.

    fresh: an incarnation that has not joined yet; a reconnect of a living process is not fresh.
    """

    peer: str
    hello: Hello
    life: str
    fresh: bool
    seq: Count = 0
    status: Status | None = None


class Open(Struct, frozen=True, kw_only=True):
    """A command that is not concluded. waiting: agents that owe an answer.   nudge_us: when to repeat it next."""

    record: Record
    command: Command
    ticket: Positive | None
    issued_us: int
    deadline_us: int
    nudge_us: int
    nudges: Count = 0
    waiting: frozenset[str]
    outcomes: tuple[AgentOutcome, ...] = ()


class CoordinatorState(Struct, frozen=True, kw_only=True):
    """Everything the bus knows.

    ring: newest commands, with the moment at which their time is over.   desired: per replica that was ever seen;
    `blank` is what a replica that was never seen is to be.   contested: since when a place is claimed by a second
    incarnation.
    """

    run: str = ""
    epoch: Count = 0
    seq: Count = 0
    settings: CoordinatorSettings | None = None
    members: dict[str, Member] = {}
    open: tuple[Open, ...] = ()
    ring: tuple[tuple[Record, int], ...] = ()
    desired: dict[int, Desired] = {}
    blank: Desired = Desired()
    sync: Sync | None = None
    contested: dict[str, int] = {}


Effects = list[CoordinatorEffect]
Decided = tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]


def decide(state: CoordinatorState, event: CoordinatorEvent) -> Decided:
    """The next state, and what is to be done about it, in order."""
    effects: Effects = []
    match event:
        case AnswersReceived():
            state = _answers(state, event, effects)
        case StatusReceived():
            state = _status(state, event, effects)
        case Issued():
            state = _issue(state, event, effects)
        case SyncRequested():
            state = _sync(state, event, effects)
        case NeedReceived():
            state = _need(state, event, effects)
        case HelloReceived():
            state = _hello(state, event, effects)
        case JoinReceived():
            state = _join(state, event, effects)
        case PeerLost():
            state = _lost(state, event, effects)
        case TimeCame():
            state = _time(state, event, effects)
        case Opened():
            state = _opened(state, event, effects)
        case Closed():
            state = _closed(state, event, effects)
        case _:
            assert_never(event)
    return state, tuple(effects)


def next_deadline(state: CoordinatorState) -> int | None:
    """When the machine wants a `TimeCame`, in µs of the bus's clock; None when nothing is pending."""
    return min((min(one.deadline_us, one.nudge_us) for one in state.open), default=None)


def fleet_status(state: CoordinatorState, now_us: int, log: str, heard: dict[str, int]) -> FleetStatus:
    """The fleet as one message. heard: when each peer was last heard (µs); the shell keeps that."""
    late = {name: [one for one in state.open if name in one.waiting] for name in state.members}
    lines = tuple(
        AgentLine(
            agent=name,
            incarnation=member.hello.incarnation,
            host=member.hello.host,
            life=member.life,
            silent_ms=max(0, now_us - heard.get(member.peer, now_us)) // 1000,
            seq=member.seq,
            status=member.status,
            waits_for=tuple(f"{describe(one.command)} (seq {one.record.seq})" for one in late[name]),
        )
        for name, member in sorted(state.members.items(), key=lambda item: _place(item[1]))
    )
    waiting = tuple(
        f"{describe(one.command)} (seq {one.record.seq}) waits for {', '.join(sorted(one.waiting))}"
        for one in state.open
    )
    return FleetStatus(
        run=state.run,
        epoch=state.epoch,
        seq=state.seq,
        version=state.blank.version,
        log=log,
        agents=lines,
        open=waiting,
    )


def describe(command: Command) -> str:
    """A command in a few words, for people."""
    match command:
        case ProfileCommand():
            return f"profile {command.action} step {command.step}"
        case EpochStart():
            return "epoch start"
        case WeightSync():
            return f"weights {command.phase} version {command.version}"
        case EngineCommand():
            return command.operation
        case _:
            assert_never(command)


def _place(member: Member) -> tuple[int, int]:
    return member.hello.identity.replica, member.hello.identity.node_rank


# --- issuing ----------------------------------------------------------------------------------------------------------


def _opened(state: CoordinatorState, event: Opened, effects: Effects) -> CoordinatorState:
    """A new life: agents must join again, and what an earlier trainer left open is over."""
    state = _conclude(replace(_missing_all(state, "bus_restarted"), sync=None), event.at_us, effects)
    members = {name: replace(one, life="gone") for name, one in state.members.items() if one.life != "left"}
    previous = state.epoch
    state = replace(
        state,
        run=event.run,
        epoch=previous + 1,
        settings=event.settings,
        members=members,
        contested={},
        ring=tuple((record, 0) for record, _ in state.ring),  # another life's clock: their time is over
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
    effects.append(Refuse(ticket=sync.ticket, kind="closed", why=why))
    abort = WeightSync(phase="abort", version=sync.version)
    return _publish(state, abort, sync.target, sync.timeout_ms, None, event.at_us, event.at_ns, effects)


def _issue(state: CoordinatorState, event: Issued, effects: Effects) -> CoordinatorState:
    size = len(encode(event.command))
    if size > MAX_COMMAND_BYTES:
        why = f"the command takes {size} bytes, a command has at most {MAX_COMMAND_BYTES}; nothing was published"
        effects.append(Refuse(ticket=event.ticket, kind="command", why=why))
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
        effects.append(Refuse(ticket=event.ticket, kind="sync_in_progress", why=why))
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
    record = Record(origin=state.epoch, seq=seq, envelope=envelope)
    live = frozenset(name for name, member in state.members.items() if member.life == "live")
    nudge_us = (state.settings.nudge_ms if state.settings is not None else 1000) * 1000
    opened = Open(
        record=record,
        command=command,
        ticket=ticket,
        issued_us=at_us,
        deadline_us=at_us + timeout_ms * 1000,
        nudge_us=at_us + nudge_us,
        waiting=live,
    )
    limit = state.settings.ring if state.settings is not None else 1
    ring = (*state.ring, (record, at_us + ttl_ms * 1000))
    effects.append(Publish(epoch=state.epoch, seq=seq, envelope=envelope))
    return replace(
        state,
        seq=seq,
        open=(*state.open, opened),
        ring=ring[-limit:],
        desired=_fold(state, command, target),
        blank=intend(state.blank, command, target.replicas is None, STRANGER),
    )


def _fold(state: CoordinatorState, command: Command, target: Target) -> dict[int, Desired]:
    folded = state.desired
    for replica, before in state.desired.items():
        identity = _identity(state, replica)
        targeted = target.replicas is None or replica in target.replicas
        after = intend(before, command, targeted, identity)
        if after is not before:
            folded = {**folded, replica: after} if folded is state.desired else _set(folded, replica, after)
    return folded


def _set(folded: dict[int, Desired], replica: int, desired: Desired) -> dict[int, Desired]:
    folded[replica] = desired  # a copy that nobody else has seen
    return folded


def _identity(state: CoordinatorState, replica: int) -> Identity:
    """Any member of the replica: they agree on what `intend` looks at."""
    for member in state.members.values():
        if member.hello.identity.replica == replica:
            return member.hello.identity
    return Identity(replica=replica, node_rank=0)


# --- answers and ends -------------------------------------------------------------------------------------------------


def _answers(state: CoordinatorState, event: AnswersReceived, effects: Effects) -> CoordinatorState:
    by_seq: dict[int, dict[str, PeerAnswer]] = {}
    for answer in event.answers:
        name = _member_at(state, answer.peer)
        if name is None:
            _send(state, answer.peer, Rejoin(why="the bus does not know you: say hello"), effects)
        else:
            by_seq.setdefault(answer.seq, {}).setdefault(name, answer)
    still = []
    for one in state.open:
        answers = by_seq.get(one.record.seq, {})
        arrived = tuple(
            AgentOutcome(agent=name, conclusion=answer.outcome, row=answer.row, latency_us=event.at_us - one.issued_us)
            for name, answer in answers.items()
            if name in one.waiting and answer.origin == one.record.origin
        )
        if arrived:
            state = _disappointed(state, one, arrived)
            waiting = one.waiting.difference(line.agent for line in arrived)
            one = replace(one, waiting=waiting, outcomes=one.outcomes + arrived)
        still.append(one)
    return _conclude(replace(state, open=tuple(still)), event.at_us, effects)


def _disappointed(state: CoordinatorState, one: Open, arrived: tuple[AgentOutcome, ...]) -> CoordinatorState:
    """A session that failed to open is not desired any more: a late joiner must not try it again."""
    if not isinstance(one.command, ProfileCommand) or one.command.action != "start":
        return state
    desired = dict(state.desired)
    for line in arrived:
        replica = state.members[line.agent].hello.identity.replica
        if isinstance(line.conclusion, Failed) and replica in desired:
            desired[replica] = replace(desired[replica], profile=None)
    return replace(state, desired=desired)


def _missing_all(state: CoordinatorState, why: str) -> CoordinatorState:
    return replace(state, open=tuple(_missing(one, one.waiting, why, one.deadline_us) for one in state.open))


def _missing(one: Open, agents: frozenset[str], why: str, at_us: int) -> Open:
    lost = one.waiting & agents
    if not lost:
        return one
    lines = tuple(
        AgentOutcome(agent=name, conclusion=Missing(why), latency_us=max(0, at_us - one.issued_us))  # type: ignore[arg-type]
        for name in sorted(lost)
    )
    return replace(one, waiting=one.waiting - lost, outcomes=one.outcomes + lines)


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


def _time(state: CoordinatorState, event: TimeCame, effects: Effects) -> CoordinatorState:
    still = []
    for one in state.open:
        if event.at_us >= one.deadline_us:
            one = _missing(one, one.waiting, "deadline", event.at_us)
        elif event.at_us >= one.nudge_us:
            one = _nudge(state, one, event.at_us, effects)
        still.append(one)
    return _conclude(replace(state, open=tuple(still)), event.at_us, effects)


def _nudge(state: CoordinatorState, one: Open, at_us: int, effects: Effects) -> Open:
    """Repeat the command to those who have not answered; each pause is twice the one before."""
    left_ms = max(0, one.issued_us + one.record.envelope.ttl_ms * 1000 - at_us) // 1000
    record = replace(one.record, envelope=replace(one.record.envelope, ttl_ms=left_ms))
    for name in sorted(one.waiting)[:PAGE]:
        _send(state, state.members[name].peer, Replay(records=(record,)), effects)
    pause_us = (one.nudge_us - one.issued_us) * 2
    return replace(one, nudges=one.nudges + 1, nudge_us=max(at_us + 1000, one.issued_us + pause_us))


# --- membership -------------------------------------------------------------------------------------------------------


def _hello(state: CoordinatorState, event: HelloReceived, effects: Effects) -> CoordinatorState:
    hello = event.hello
    name = hello.identity.agent
    holder = state.members.get(name)
    settings = state.settings
    if settings is None:
        return state
    if holder is not None and holder.hello.incarnation != hello.incarnation and holder.life in ("joining", "live"):
        return _contest(state, event, holder, settings, effects)
    same = holder is not None and holder.hello.incarnation == hello.incarnation
    member = Member(peer=event.peer, hello=hello, life="joining", fresh=not same)
    welcome = Welcome(
        run=state.run,
        events_port=settings.events_port,
        heartbeat_ms=settings.heartbeat_ms,
        lease_ms=settings.lease_ms,
        recorded=event.recorded,
    )
    _send(state, event.peer, welcome, effects)
    contested = {place: since for place, since in state.contested.items() if place != name}
    state = replace(state, members={**state.members, name: member}, contested=contested)
    if same:
        return state  # the same process again: what it owes, it still owes
    still = tuple(_missing(one, frozenset({name}), "restarted", event.at_us) for one in state.open)
    return _conclude(replace(state, open=still), event.at_us, effects)


def _contest(
    state: CoordinatorState, event: HelloReceived, holder: Member, settings: CoordinatorSettings, effects: Effects
) -> CoordinatorState:
    """Two incarnations claim one place. A holder that is dead is found out by a probe or by its silence; while it may
    live, the newcomer waits, and when it had time enough to fall silent and did not, the newcomer is turned away.
    """
    name = event.hello.identity.agent
    since = state.contested.get(name, event.at_us)
    final = event.at_us - since > (settings.gone_ms + settings.heartbeat_ms) * 1000
    why = (
        f"agent {name} is held by incarnation {holder.hello.incarnation} on {holder.hello.host}, "
        f"pid {holder.hello.pid}. Two agents can't have one replica and node rank: stop the other, or start this one "
        "with a place of its own"
    )
    effects.append(Probe(peer=holder.peer))
    _send(state, event.peer, Rejoin(why=why, final=final), effects)
    return replace(state, contested={**state.contested, name: since})


def _join(state: CoordinatorState, event: JoinReceived, effects: Effects) -> CoordinatorState:
    name = _member_at(state, event.peer)
    if name is None:
        _send(state, event.peer, Rejoin(why="the bus does not know you: say hello"), effects)
        return state
    member = state.members[name]
    identity = member.hello.identity
    desired = state.desired.get(identity.replica, _for_mode(state.blank, identity))
    if member.fresh and identity.node_rank == 0:
        desired = _anew(desired, state.blank, identity)
        if state.sync is not None:
            state = replace(state, sync=replace(state.sync, anew=state.sync.anew | {identity.replica}))
    _send(state, event.peer, Snapshot(desired=desired), effects)
    return replace(
        state,
        members={**state.members, name: replace(member, life="live", fresh=False)},
        desired={**state.desired, identity.replica: desired},
    )


def _anew(desired: Desired, blank: Desired, identity: Identity) -> Desired:
    """A new start leads out of quarantine: the agent loads what is committed before its engine may serve."""
    if desired.quarantined == 0:
        return desired
    sync = None if identity.mode is RolloutMode.COLOCATED else blank.sync
    return replace(desired, quarantined=0, sync=sync)


def _for_mode(blank: Desired, identity: Identity) -> Desired:
    if identity.mode is RolloutMode.COLOCATED:
        return replace(blank, committed=None, sync=None)
    return blank


def _status(state: CoordinatorState, event: StatusReceived, effects: Effects) -> CoordinatorState:
    name = _member_at(state, event.peer)
    if name is None:
        _send(state, event.peer, Rejoin(why="the bus does not know you: say hello"), effects)
        return state
    member = replace(state.members[name], seq=event.seq, status=event.status)
    return replace(state, members={**state.members, name: member})


def _lost(state: CoordinatorState, event: PeerLost, effects: Effects) -> CoordinatorState:
    name = _member_at(state, event.peer)
    if name is None:
        return state
    life = "left" if event.why == "left" else "gone"
    members = {**state.members, name: replace(state.members[name], life=life)}
    still = tuple(_missing(one, frozenset({name}), "gone", event.at_us) for one in state.open)
    return _conclude(replace(state, members=members, open=still), event.at_us, effects)


def _member_at(state: CoordinatorState, peer: str) -> str | None:
    """The name under which the peer is a member now. Routing ids begin with the agent's name; the rest must match."""
    name = peer.partition("/")[0]
    member = state.members.get(name)
    return name if member is not None and member.peer == peer and member.life in ("joining", "live") else None


# --- replay -----------------------------------------------------------------------------------------------------------


def _need(state: CoordinatorState, event: NeedReceived, effects: Effects) -> CoordinatorState:
    """A page of what is missing, or a snapshot when the ring does not reach back that far."""
    name = _member_at(state, event.peer)
    if name is None:
        _send(state, event.peer, Rejoin(why="the bus does not know you: say hello"), effects)
        return state
    if not state.ring or event.first < state.ring[0][0].seq:
        return _join(state, JoinReceived(at_us=event.at_us, peer=event.peer), effects)
    page: list[Record] = []
    size = 0
    start = event.first - state.ring[0][0].seq
    for record, over_us in state.ring[start : start + min(event.credit, PAGE)]:
        size += len(encode(record))
        if page and size > PAGE_BYTES:
            break
        left_ms = max(0, over_us - event.at_us) // 1000
        page.append(replace(record, envelope=replace(record.envelope, ttl_ms=left_ms)))
    if page:
        _send(state, event.peer, Replay(records=tuple(page)), effects)
    return state


def _send(state: CoordinatorState, peer: str, message: Downward, effects: Effects) -> None:
    effects.append(Send(peer=peer, epoch=max(1, state.epoch), seq=state.seq, message=message))
