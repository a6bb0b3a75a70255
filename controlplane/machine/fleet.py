"""The fleet as the coordinator knows it: who said hello, who hears the commands, who is lost, who misses records. Pure.

Life of a member: `joining` after its hello, `live` from its join on, then `gone` (silent or unreachable) or `left` (in
good order). A lost member becomes live again only by a new hello and join, after which it gets a snapshot.

The `on_…` functions handle one event each: they return the next state and append to `effects`.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct, convert
from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.members import Member, Members, Roster
from controlplane.machine.tables import as_dict, with_entries, without
from controlplane.machine.weights import Sync
from schemas.commands import Command, Target
from schemas.config import BusConfig
from schemas.desired import Committed, Desired
from schemas.identity import ROLLOUT, Count, Identity, Positive, RolloutMode, agent_of
from schemas.outcomes import Missing
from schemas.reports import AgentOutcome
from schemas.wire import (
    MAX_COMMAND_BYTES,
    MAX_TARGET_BYTES,
    CommandRecord,
    Downward,
    Rejoin,
    Replay,
    Snapshot,
    Welcome,
    encode,
)

PAGE = 64
"""Records in one page of replay, at most."""
PAGE_BYTES = 192 * 1024
"""Bytes of commands in one page, at most."""
UNKNOWN_PEER = Rejoin(reason="the bus does not know you: say hello")

MissingReason = Literal["deadline", "gone", "restarted", "engine_down", "not_sent", "aborted", "bus_restarted"]
"""Why an agent that was waited for is missing."""
Effects = list[events.CoordinatorEffect]


class OpenCommand(Struct, frozen=True, kw_only=True):
    """A command in flight.

    Attributes:
        retransmit_us: When to send it again.
        expected: Agents that owe an answer: those that were live when it was issued.
        outcomes: Of those of them for whom it has ended, in the order in which it did.
        absent: Outcomes of the known agents that were away when it was issued.
    """

    record: CommandRecord
    command: Command
    ticket: Positive | None
    issued_us: int
    deadline_us: int
    retransmit_us: int
    retransmits: Count = 0
    expected: frozenset[str]
    outcomes: Mapping[str, AgentOutcome] = {}
    absent: tuple[AgentOutcome, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether it waits for nobody."""
        return len(self.outcomes) == len(self.expected)

    @property
    def waiting(self) -> frozenset[str]:
        """Agents that have not answered yet."""
        return self.expected.difference(self.outcomes)

    def waits_for(self, name: str) -> bool:
        """Whether this agent has not answered yet."""
        return name in self.expected and name not in self.outcomes

    @property
    def all_outcomes(self) -> tuple[AgentOutcome, ...]:
        """Everything that is known of how it ended."""
        return (*self.absent, *self.outcomes.values())


class CoordinatorState(Struct, frozen=True, kw_only=True):
    """Everything the bus knows.

    Attributes:
        open: Commands in flight, oldest first.
        history: The newest commands, each with the moment (µs) at which its time to live ends.
        desired: Of each replica (by index) and training rank (by name) that was ever seen.
        default_desired: Of replicas that have not been seen yet.
        sync: The weight sync in progress.
        newest_version: The newest that a sync was ever requested for.
        loaded: Weights that entered the load phase of a sync, the newest of them, in the order of their versions.
        claims: Places in the fleet that another incarnation claims: which one, and since when (µs).
        retired: Agents that an operator took out of the run for good.
        trainer_session: Step of the profiling session that the trainer opened, until a stop of that step.
    """

    run: str = ""
    epoch: Count = 0
    seq: Count = 0
    settings: events.CoordinatorSettings = convert(BusConfig(), events.CoordinatorSettings, from_attributes=True)
    members: Mapping[str, Member] = {}
    open: tuple[OpenCommand, ...] = ()
    history: tuple[tuple[CommandRecord, int], ...] = ()
    desired: Mapping[int | str, Desired] = {}
    default_desired: Desired = Desired()
    sync: Sync | None = None
    newest_version: Count = 0
    loaded: tuple[Committed, ...] = ()
    claims: Mapping[str, tuple[str, int]] = {}
    retired: frozenset[str] = frozenset()
    trainer_session: Count | None = None

    @property
    def roster(self) -> Roster:
        """Who the members are."""
        return _members(self.members).roster


def plain(state: CoordinatorState) -> CoordinatorState:
    """Return `state` with dicts as its tables, so that it can be encoded."""
    return replace(
        state,
        members=as_dict(state.members),
        desired=as_dict(state.desired),
        claims=as_dict(state.claims),
        open=tuple(replace(command, outcomes=as_dict(command.outcomes)) for command in state.open),
    )


def with_members(state: CoordinatorState, members: Mapping[str, Member]) -> CoordinatorState:
    """Return `state` with some members, new or changed."""
    return replace(state, members=_members(state.members).with_entries(members))


def _members(members: Mapping[str, Member]) -> Members:
    return members if isinstance(members, Members) else Members(members)


def conclude_missing(command: OpenCommand, agents: Iterable[str], reason: MissingReason, at_us: int) -> OpenCommand:
    """Return `command`, concluded as missing for those of `agents` that have not answered."""
    silent = sorted(filter(command.waits_for, agents))
    if not silent:
        return command
    conclusion, latency_us = Missing(reason), max(0, at_us - command.issued_us)
    outcomes = {name: AgentOutcome(agent=name, conclusion=conclusion, latency_us=latency_us) for name in silent}
    return replace(command, outcomes=with_entries(command.outcomes, outcomes))


# --- membership -------------------------------------------------------------------------------------------------------


def member_at(state: CoordinatorState, peer: str) -> str | None:
    """Return the name under which the peer is a member now; None if it is not."""
    name = agent_of(peer)
    member = state.members.get(name)
    return name if member is not None and member.peer == peer and member.state in ("joining", "live") else None


def on_hello(state: CoordinatorState, event: events.HelloReceived, effects: Effects) -> CoordinatorState:
    """A new agent, a new incarnation of one that was lost, or a living one that lost its connection."""
    hello, settings = event.hello, state.settings
    name = hello.identity.agent
    holder = state.members.get(name)
    if name in state.retired:
        send(state, event.peer, Rejoin(reason=_retired(name), give_up=True), effects)
        return state
    if settings.observe is not None and hello.identity.mode is not RolloutMode.OBSERVED:
        send(state, event.peer, Rejoin(reason=_would_command(name), give_up=True), effects)
        return state
    same = holder is not None and holder.hello.incarnation == hello.incarnation
    if holder is not None and same and hello.attempt < holder.hello.attempt:
        return state  # it waited in the queue of a connection that the agent has replaced
    if holder is not None and not same and holder.state in ("joining", "live"):
        return _dispute(state, event, holder, effects)
    if holder is None and len(state.members) >= settings.agents_max:
        send(state, event.peer, Rejoin(reason=_full(state)), effects)
        return state
    welcome = Welcome(
        run=state.run,
        publish_port=settings.publish_port,
        heartbeat_ms=settings.heartbeat_ms,
        lease_ms=settings.lease_ms,
        recorded_decisions=event.recorded_decisions,
        head_interval_ms=settings.head_interval_ms,
    )
    send(state, event.peer, welcome, effects)
    # Commands stay open for the same process. A new one owes no answer yet.
    away_us = holder.away_us if holder is not None and holder.state != "live" else event.at_us
    member = Member(
        peer=event.peer,
        hello=hello,
        state="joining",
        fresh=not same,
        joined=holder is not None and holder.joined,
        away_us=away_us,
    )
    return replace(with_members(state, {name: member}), claims=without(state.claims, name))


def _would_command(name: str) -> str:
    return f"this bus only observes, and agent {name} would command its engine: start the agent with --observe"


def _full(state: CoordinatorState) -> str:
    return (
        f"the run has places for {state.settings.agents_max} agents (`agents_max` in BusConfig), and all of them are "
        "taken, some perhaps by agents that are gone for good"
    )


def _dispute(
    state: CoordinatorState, event: events.HelloReceived, holder: Member, effects: Effects
) -> CoordinatorState:
    """Two incarnations claim one place. A ping, or its silence, shows whether the holder is dead. Until then the
    claimant waits; it is turned away once the holder has had time to fall silent and has not.
    """
    name, settings = event.hello.identity.agent, state.settings
    claimant, since_us = state.claims.get(name, ("", event.at_us))
    if claimant != event.hello.incarnation:  # the claim of one that died meanwhile must not count against this one
        since_us = event.at_us
    give_up = event.at_us - since_us > (settings.agent_timeout_ms + settings.heartbeat_ms) * 1000
    reason = (
        f"agent {name} is running as incarnation {holder.hello.incarnation} on {holder.hello.host}, "
        f"pid {holder.hello.pid}. Two agents can't share a replica and node rank: stop the other, or start this one "
        "with a different replica or node rank"
    )
    effects.append(events.Ping(peer=holder.peer))
    send(state, event.peer, Rejoin(reason=reason, give_up=give_up), effects)
    return replace(state, claims=with_entries(state.claims, {name: (event.hello.incarnation, since_us)}))


def on_join(
    state: CoordinatorState, event: events.JoinReceived | events.ResendRequested, effects: Effects
) -> CoordinatorState:
    """The agent hears the commands. Send it the desired state; from here on it has to answer each command."""
    name = member_at(state, event.peer)
    if name is None:
        send(state, event.peer, UNKNOWN_PEER, effects)
        return state
    member = state.members[name]
    identity = member.hello.identity
    desired = state.desired.get(identity.unit) or _first_desired(state.default_desired, identity)
    if member.fresh and identity.node_rank == 0 and identity.role == ROLLOUT:
        desired = _leave_quarantine(desired, state.default_desired, identity)
        if state.sync is not None:
            state = replace(state, sync=replace(state.sync, restarted=state.sync.restarted | {identity.replica}))
    send(state, event.peer, Snapshot(desired=desired), effects)
    state = with_members(state, {name: replace(member, state="live", fresh=False, joined=True)})
    if state.desired.get(identity.unit) is desired:
        return state
    return replace(state, desired=with_entries(state.desired, {identity.unit: desired}))


def _leave_quarantine(desired: Desired, default_desired: Desired, identity: Identity) -> Desired:
    """A restart ends the quarantine: the agent loads the committed weights before its engine may serve."""
    if desired.quarantined == 0:
        return desired
    sync = default_desired.sync if identity.syncs else None
    return replace(desired, quarantined=0, sync=sync)


def _first_desired(default_desired: Desired, identity: Identity) -> Desired:
    """The desired state of a unit seen for the first time. A training rank takes part from the next session on."""
    if identity.role != ROLLOUT:
        return Desired()
    if identity.mode is RolloutMode.OBSERVED:
        return Desired()
    return default_desired if identity.syncs else replace(default_desired, committed=None, sync=None)


def on_status(state: CoordinatorState, event: events.StatusReceived, effects: Effects) -> CoordinatorState:
    """Keep what an agent reports of itself: for people, for `wait_for_agents`, and for a sync whose engine is down."""
    name = member_at(state, event.peer)
    if name is None:
        send(state, event.peer, UNKNOWN_PEER, effects)
        return state
    member = replace(
        state.members[name], seq=event.seq, status=event.status, status_us=event.at_us, obeyed=None, loaded=None
    )
    return with_members(state, {name: member})


def on_lost(state: CoordinatorState, event: events.PeerLost) -> CoordinatorState:
    """The agent is out of the fleet, and missing from every open command. If its place is claimed, it restarted."""
    name = member_at(state, event.peer)
    if name is None:
        return state
    if not state.members[name].joined:
        members = _members(state.members).without(name)
        return replace(state, members=members, claims=without(state.claims, name))
    left = event.reason == "left"
    member = state.members[name]
    away_us = event.at_us if member.state == "live" else member.away_us
    member = replace(member, state="left" if left else "gone", away_us=away_us)
    reason: MissingReason = "restarted" if name in state.claims and not left else "gone"
    commands = tuple(conclude_missing(command, (name,), reason, event.at_us) for command in state.open)
    return replace(with_members(state, {name: member}), open=commands)


def _retired(name: str) -> str:
    return (
        f"agent {name} was retired from this run, and a retired place does not come back: start the agent under "
        "another replica index"
    )


# --- records ----------------------------------------------------------------------------------------------------------


def oversize(command: Command, target: Target) -> str:
    """Return why the record of a command is too large for a message; empty if it is not. Asked before it has a seq."""
    sizes = {"command": (len(encode(command)), MAX_COMMAND_BYTES), "target": (len(encode(target)), MAX_TARGET_BYTES)}
    problems = [
        f"the {part} takes {size:,} bytes, of at most {most:,}" for part, (size, most) in sizes.items() if size > most
    ]
    advice = "Name fewer replicas or ranks, or all of them by naming none"
    return f"{' and '.join(problems)}; nothing was published. {advice}" if problems else ""


def on_resend_requested(state: CoordinatorState, event: events.ResendRequested, effects: Effects) -> CoordinatorState:
    """Send a page of the missing records, or a snapshot if the history does not reach back that far."""
    if member_at(state, event.peer) is None:
        send(state, event.peer, UNKNOWN_PEER, effects)
        return state
    if not state.history or event.first < state.history[0][0].seq:
        return on_join(state, event, effects)
    page: list[CommandRecord] = []
    size = 0
    start = event.first - state.history[0][0].seq
    for record, expires_us in state.history[start : start + min(event.credit, PAGE)]:
        size += len(encode(record))
        if page and size > PAGE_BYTES:
            break
        left_ms = max(0, expires_us - event.at_us) // 1000
        page.append(replace(record, envelope=replace(record.envelope, ttl_ms=left_ms)))
    if page:
        send(state, event.peer, Replay(records=tuple(page)), effects)
    return state


def send(state: CoordinatorState, peer: str, message: Downward, effects: Effects) -> None:
    """Append a control message to `effects`."""
    effects.append(events.Send(peer=peer, epoch=max(1, state.epoch), seq=state.seq, message=message))
