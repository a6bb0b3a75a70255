"""The fleet as the coordinator knows it: who said hello, who hears the commands, who is lost, who lacks records. Pure.

Life of a member: `joining` after its hello, `live` from its join on, then `gone` (silent or unreachable) or `left` (in
good order). Nothing makes a lost member live again but a new hello and join, after which it gets a snapshot.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.events import (
    CoordinatorEffect,
    CoordinatorSettings,
    HelloReceived,
    JoinReceived,
    PeerLost,
    Ping,
    ResendRequested,
    Send,
    StatusReceived,
)
from controlplane.machine.weights import Sync
from schemas.commands import Command
from schemas.desired import Desired
from schemas.identity import ROLLOUT, Count, Identity, Positive, RolloutMode
from schemas.outcomes import Missing
from schemas.reports import AgentOutcome, AgentStatus
from schemas.wire import CommandRecord, Downward, Hello, Rejoin, Replay, Snapshot, Welcome, encode

PAGE = 64
"""Records in one page of replay, at most."""
PAGE_BYTES = 192 * 1024
"""Bytes of commands in one page, at most."""


class Member(Struct, frozen=True, kw_only=True):
    """One agent that said hello. life: joining until it hears the commands, then live, then gone or left.

    fresh: an incarnation that has not joined yet; a reconnect of a living process is not fresh.
    """

    peer: str
    hello: Hello
    state: str
    fresh: bool
    seq: Count = 0
    status: AgentStatus | None = None


class OpenCommand(Struct, frozen=True, kw_only=True):
    """A command that is not concluded. waiting: agents that owe an answer.   nudge_us: when to repeat it next."""

    record: CommandRecord
    command: Command
    ticket: Positive | None
    issued_us: int
    deadline_us: int
    retransmit_us: int
    retransmits: Count = 0
    waiting: frozenset[str]
    outcomes: tuple[AgentOutcome, ...] = ()


class CoordinatorState(Struct, frozen=True, kw_only=True):
    """Everything the bus knows.

    ring: newest commands, with the moment at which their time is over.   desired: of each replica and training rank
    that was ever seen; `blank` is what a replica that was never seen is to be.   contested: by which
    other incarnation a place is claimed, and since when (µs).
    """

    run: str = ""
    epoch: Count = 0
    seq: Count = 0
    settings: CoordinatorSettings | None = None
    members: dict[str, Member] = {}
    open: tuple[OpenCommand, ...] = ()
    history: tuple[tuple[CommandRecord, int], ...] = ()
    desired: dict[int | str, Desired] = {}
    default_desired: Desired = Desired()
    sync: Sync | None = None
    claims: dict[str, tuple[str, int]] = {}


Effects = list[CoordinatorEffect]
Why = Literal["deadline", "gone", "restarted", "bus_restarted"]


def missing(one: OpenCommand, agents: frozenset[str], why: Why, at_us: int) -> OpenCommand:
    """Conclude the command as missing for those of `agents` that still owe an answer."""
    lost = one.waiting & agents
    if not lost:
        return one
    lines = tuple(
        AgentOutcome(agent=name, conclusion=Missing(why), latency_us=max(0, at_us - one.issued_us))
        for name in sorted(lost)
    )
    return replace(one, waiting=one.waiting - lost, outcomes=one.outcomes + lines)


# --- membership -------------------------------------------------------------------------------------------------------


def hello(state: CoordinatorState, event: HelloReceived, effects: Effects) -> CoordinatorState:
    """A new agent, a new incarnation of one that was lost, or a living one that lost its connection."""
    greeting = event.hello
    name = greeting.identity.agent
    holder = state.members.get(name)
    settings = state.settings
    if settings is None:
        return state
    if holder is not None and holder.hello.incarnation != greeting.incarnation and holder.state in ("joining", "live"):
        return _dispute(state, event, holder, settings, effects)
    same = holder is not None and holder.hello.incarnation == greeting.incarnation
    member = Member(peer=event.peer, hello=greeting, state="joining", fresh=not same)
    welcome = Welcome(
        run=state.run,
        publish_port=settings.publish_port,
        heartbeat_ms=settings.heartbeat_ms,
        lease_ms=settings.lease_ms,
        recorded_decisions=event.recorded_decisions,
    )
    send(state, event.peer, welcome, effects)
    claims = {place: claim for place, claim in state.claims.items() if place != name}
    # The same process still owes what it owed; another one owes nothing yet.
    return replace(state, members={**state.members, name: member}, claims=claims)


def _dispute(
    state: CoordinatorState, event: HelloReceived, holder: Member, settings: CoordinatorSettings, effects: Effects
) -> CoordinatorState:
    """Two incarnations claim one place. A holder that is dead is found out by a probe or by its silence; while it may
    live, the newcomer waits, and when it had time enough to fall silent and did not, the newcomer is turned away.
    """
    name = event.hello.identity.agent
    claimant, since = state.claims.get(name, ("", event.at_us))
    if claimant != event.hello.incarnation:  # the hello of one that died meanwhile must not count against this one
        since = event.at_us
    final = event.at_us - since > (settings.agent_timeout_ms + settings.heartbeat_ms) * 1000
    why = (
        f"agent {name} is held by incarnation {holder.hello.incarnation} on {holder.hello.host}, "
        f"pid {holder.hello.pid}. Two agents can't have one replica and node rank: stop the other, or start this one "
        "with a place of its own"
    )
    effects.append(Ping(peer=holder.peer))
    send(state, event.peer, Rejoin(reason=why, give_up=final), effects)
    return replace(state, claims={**state.claims, name: (event.hello.incarnation, since)})


def join(state: CoordinatorState, event: JoinReceived, effects: Effects) -> CoordinatorState:
    """The agent hears the commands: from here on it owes an answer to each. Tell it what is desired."""
    name = member_at(state, event.peer)
    if name is None:
        send(state, event.peer, Rejoin(reason="the bus does not know you: say hello"), effects)
        return state
    member = state.members[name]
    identity = member.hello.identity
    desired = state.desired.get(identity.unit) or _unseen(state.default_desired, identity)
    if member.fresh and identity.node_rank == 0 and identity.role == ROLLOUT:
        desired = _leave_quarantine(desired, state.default_desired, identity)
        if state.sync is not None:
            state = replace(state, sync=replace(state.sync, restarted=state.sync.restarted | {identity.replica}))
    send(state, event.peer, Snapshot(desired=desired), effects)
    return replace(
        state,
        members={**state.members, name: replace(member, state="live", fresh=False)},
        desired={**state.desired, identity.unit: desired},
    )


def _leave_quarantine(desired: Desired, default_desired: Desired, identity: Identity) -> Desired:
    """A new start leads out of quarantine: the agent loads what is committed before its engine may serve."""
    if desired.quarantined == 0:
        return desired
    sync = None if identity.mode is RolloutMode.COLOCATED else default_desired.sync
    return replace(desired, quarantined=0, sync=sync)


def _unseen(default_desired: Desired, identity: Identity) -> Desired:
    """Of a place that was never seen. A training rank takes part from the next session on."""
    if identity.role != ROLLOUT:
        return Desired()
    if identity.mode is RolloutMode.COLOCATED:
        return replace(default_desired, committed=None, sync=None)
    return default_desired


def status(state: CoordinatorState, event: StatusReceived, effects: Effects) -> CoordinatorState:
    """What an agent says of itself, kept for people and for `wait_for_agents`; no decision rests on it."""
    name = member_at(state, event.peer)
    if name is None:
        send(state, event.peer, Rejoin(reason="the bus does not know you: say hello"), effects)
        return state
    member = replace(state.members[name], seq=event.seq, status=event.status)
    return replace(state, members={**state.members, name: member})


def lost(state: CoordinatorState, event: PeerLost, effects: Effects) -> CoordinatorState:
    """An agent is out of the fleet; what it owes is missing. Lost to a claimant of its place, it was restarted."""
    name = member_at(state, event.peer)
    if name is None:
        return state
    life = "left" if event.reason == "left" else "gone"
    members = {**state.members, name: replace(state.members[name], state=life)}
    reason: Why = "restarted" if name in state.claims and event.reason != "left" else "gone"
    still = tuple(missing(one, frozenset({name}), reason, event.at_us) for one in state.open)
    return replace(state, members=members, open=still)


def member_at(state: CoordinatorState, peer: str) -> str | None:
    """The name under which the peer is a member now. Routing ids begin with the agent's name; the rest must match."""
    name = peer.partition("/")[0]
    member = state.members.get(name)
    return name if member is not None and member.peer == peer and member.state in ("joining", "live") else None


# --- replay -----------------------------------------------------------------------------------------------------------


def resend(state: CoordinatorState, event: ResendRequested, effects: Effects) -> CoordinatorState:
    """A page of what is missing, or a snapshot when the ring does not reach back that far."""
    name = member_at(state, event.peer)
    if name is None:
        send(state, event.peer, Rejoin(reason="the bus does not know you: say hello"), effects)
        return state
    if not state.history or event.first < state.history[0][0].seq:
        return join(state, JoinReceived(at_us=event.at_us, peer=event.peer), effects)
    page: list[CommandRecord] = []
    size = 0
    start = event.first - state.history[0][0].seq
    for record, over_us in state.history[start : start + min(event.credit, PAGE)]:
        size += len(encode(record))
        if page and size > PAGE_BYTES:
            break
        left_ms = max(0, over_us - event.at_us) // 1000
        page.append(replace(record, envelope=replace(record.envelope, ttl_ms=left_ms)))
    if page:
        send(state, event.peer, Replay(records=tuple(page)), effects)
    return state


def send(state: CoordinatorState, peer: str, message: Downward, effects: Effects) -> None:
    """Append a control message to `effects`."""
    effects.append(Send(peer=peer, epoch=max(1, state.epoch), seq=state.seq, message=message))
