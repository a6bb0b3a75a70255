"""The agents of the fleet: which said hello, hear the commands, are lost, or were retired for good. Pure.

Life of a member: `joining` after its hello, `live` from its join on, then `gone` (silent or unreachable) or `left` (in
good order). A lost member becomes live again only by a new hello and join, after which it gets a snapshot.

A place is known from the first time that an agent joins there, through restarts of the bus, until an operator retires
it. A hello alone proves nothing: places can be made up.

The `on_…` functions handle one event each: they return the next state and append to `effects`.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import TypeVar

from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.coordinator_state import (
    ALIVE,
    UNKNOWN_PEER,
    CoordinatorState,
    Effects,
    Member,
    conclude,
    member_at,
    send,
    with_sync,
)
from controlplane.machine.provenance import with_holders
from controlplane.machine.publishing import send_missing
from controlplane.machine.replicas import identities, is_settled
from schemas.desired import Adapter, Desired
from schemas.formatting import agent_order, format_agents, format_list
from schemas.identity import ROLLOUT, Identity, RolloutMode, replica_and_node
from schemas.outcomes import Missing
from schemas.wire import PlaceAssigned, Rejoin, Snapshot, Welcome

K = TypeVar("K")
V = TypeVar("V")


def on_place_requested(state: CoordinatorState, event: events.PlaceRequested, effects: Effects) -> CoordinatorState:
    """Assign the lowest free replica, also a retired one. It is kept for a lease, in which its agent says hello."""
    identities = (member.hello.identity for member in state.members.values())
    known = {identity.replica for identity in identities if identity.role == ROLLOUT}
    assigned = {
        token: (replica, at_us)
        for token, (replica, at_us) in state.assigned.items()
        if event.at_us - at_us < state.settings.lease_ms * 1000
    }
    taken = known.union(replica for replica, _ in assigned.values())
    if event.token not in assigned:
        if len(taken) >= state.settings.agents_max:
            send(state, event.peer, Rejoin(reason=_full(state), give_up=True), effects)
            return state
        assigned[event.token] = next(index for index in count() if index not in taken), event.at_us
    send(state, event.peer, PlaceAssigned(replica=assigned[event.token][0]), effects)
    return replace(state, assigned=assigned)


def on_hello(state: CoordinatorState, event: events.HelloReceived, effects: Effects) -> CoordinatorState:
    """A new agent, a new incarnation of one that was lost, or a living one that lost its connection."""
    hello, settings = event.hello, state.settings
    name = hello.identity.agent
    holder = state.members.get(name)
    if name in state.retired and (not hello.rejoin or hello.incarnation == state.retired[name]):
        send(state, event.peer, Rejoin(reason=_retired(name), give_up=True), effects)
        return state
    if settings.observe is not None and hello.identity.mode is not RolloutMode.OBSERVED:
        reason = f"this bus only observes, and agent {name} would command its engine: start the agent with --observe"
        send(state, event.peer, Rejoin(reason=reason, give_up=True), effects)
        return state
    same = holder is not None and holder.hello.incarnation == hello.incarnation
    if holder is not None and same and hello.attempt < holder.hello.attempt:
        return state  # it waited in the queue of a connection that the agent has replaced
    if not same and hello.identity.unit in state.draining:
        send(state, event.peer, Rejoin(reason=f"replica {hello.identity.unit} leaves the fleet"), effects)
        return state
    if holder is not None and not same and holder.state in ALIVE:
        return _dispute(state, event, holder, _taken(holder), effects)
    other = _of_other_shape(state, hello.identity)
    if other is not None:
        return _dispute(state, event, other, _differs(hello.identity, other.hello.identity), effects)
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
        fresh=not same or (holder is not None and holder.fresh),
        joined=holder is not None and holder.joined,
        settled=holder is not None and holder.settled,
        away_us=away_us,
    )
    desired, first = state.desired, _first_node(state, hello.identity)
    if first is not None and first.hello.identity.syncs != hello.identity.syncs:  # the replica begins as a new one does
        desired = _without(desired, hello.identity.unit)
    return replace(
        state,
        members={**state.members, name: member},
        claims=_without(state.claims, name),
        desired=desired,
    )


def _of_other_shape(state: CoordinatorState, identity: Identity) -> Member | None:
    """Return a node of the same replica that differs in what they must have in common; None if there is none.

    Of nodes that are away only those before it count. So a replica whose nodes all return with another shape is let in,
    the first node first; and what is desired of it follows from the first node.
    """
    for other in _nodes(state, identity) if identity.role == ROLLOUT else ():
        theirs = other.hello.identity
        if theirs.node_rank == identity.node_rank or theirs.shape == identity.shape:
            continue
        if other.state in ALIVE or (other.joined and theirs.node_rank < identity.node_rank):
            return other
    return None


def _first_node(state: CoordinatorState, identity: Identity) -> Member | None:
    """Return the first known node of the same replica, which says of what kind it is; for a training rank itself."""
    return next(_nodes(state, identity), None) if identity.role == ROLLOUT else state.members.get(identity.agent)


def _nodes(state: CoordinatorState, identity: Identity) -> Iterator[Member]:
    """Yield the known nodes of a replica, in order."""
    holder = state.members.get(identity.agent)
    nnodes = max(identity.nnodes, holder.hello.identity.nnodes if holder is not None else 0)
    for rank in range(nnodes + 1):
        if (member := state.members.get(f"{identity.replica}.{rank}")) is not None:
            yield member


def _differs(claimed: Identity, known: Identity) -> str:
    def words(place: Identity) -> str:
        return f"mode {place.mode.value}, {place.nnodes} nodes, {place.gpus_per_node} GPUs on each"

    return (
        f"agent {claimed.agent} was given {words(claimed)}, and agent {known.agent} of the same replica "
        f"{words(known)}: give all nodes of a replica the same --mode, --nnodes and --gpus-per-node"
    )


def _taken(holder: Member) -> str:
    hello = holder.hello
    return (
        f"agent {hello.identity.agent} is running as incarnation {hello.incarnation} on {hello.host}, "
        f"pid {hello.pid}. Two agents can't share a replica and node rank: stop the other, or start this one "
        "with a different replica or node rank"
    )


def _full(state: CoordinatorState) -> str:
    return (
        f"the run has places for {state.settings.agents_max} agents (`agents_max` in BusConfig), and all of them are "
        "taken, some perhaps by agents that are gone for good"
    )


def _dispute(
    state: CoordinatorState, event: events.HelloReceived, holder: Member, reason: str, effects: Effects
) -> CoordinatorState:
    """Two agents claim what only one of them can have. A ping, or its silence, shows whether the holder is dead. Until
    then the claimant waits; it is turned away once a holder that lives has had time to fall silent and has not.
    """
    name, settings = event.hello.identity.agent, state.settings
    claimant, since_us = state.claims.get(name, ("", event.at_us))
    if claimant != event.hello.incarnation:  # the claim of one that died meanwhile must not count against this one
        since_us = event.at_us
    lives = holder.state in ALIVE
    give_up = lives and event.at_us - since_us > (settings.agent_timeout_ms + settings.heartbeat_ms) * 1000
    if lives:
        effects.append(events.Ping(peer=holder.peer))
    send(state, event.peer, Rejoin(reason=reason, give_up=give_up), effects)
    return replace(state, claims={**state.claims, name: (event.hello.incarnation, since_us)})


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
    if name in state.retired and identity.syncs:  # its engine may be the one of then
        desired = replace(desired, adapters={**dict.fromkeys(state.adapters, Adapter()), **desired.adapters})
    if member.fresh and identity.node_rank == 0 and identity.role == ROLLOUT:
        desired = _leave_quarantine(desired, state.default_desired)
        for sync in state.syncs.values():
            joining = sync.joining if member.joined else sync.joining | {identity.replica}
            state = with_sync(state, replace(sync, restarted=sync.restarted | {identity.replica}, joining=joining))
    send(state, event.peer, Snapshot(desired=desired), effects)
    member = replace(member, state="live", fresh=False, joined=True)
    return replace(
        state,
        members={**state.members, name: member},
        desired={**state.desired, identity.unit: desired},
        assigned={token: place for token, place in state.assigned.items() if place[0] != identity.unit},
        retired=_without(state.retired, name),
    )


def _leave_quarantine(desired: Desired, default_desired: Desired) -> Desired:
    """A restart ends the quarantine: the agent loads the committed weights before its engine may serve."""
    return replace(desired, quarantined=0, sync=default_desired.sync) if desired.quarantined else desired


def _first_desired(default_desired: Desired, identity: Identity) -> Desired:
    """The desired state of a unit seen for the first time. A training rank takes part from the next session on."""
    if identity.role != ROLLOUT:
        return Desired()
    if identity.mode is RolloutMode.OBSERVED:
        return Desired()
    if identity.syncs:
        return default_desired
    return replace(default_desired, committed=None, sync=None, uncommitted=None, fallback=None, adapters={})


def on_status(state: CoordinatorState, event: events.StatusReceived, effects: Effects) -> CoordinatorState:
    """Keep what an agent reports of itself: for people, for `wait_for_agents`, and for a sync whose engine is down."""
    name = member_at(state, event.peer)
    if name is None:
        send(state, event.peer, UNKNOWN_PEER, effects)
        return state
    member = replace(state.members[name], command_acked=None, sync_acked=None, adapters_acked={})
    member = replace(member, seq=event.seq, status=event.status, status_us=event.at_us)
    member = replace(member, settled=is_settled(state, member))
    return with_holders(replace(state, members={**state.members, name: member}), (name,))


def on_lost(state: CoordinatorState, event: events.PeerLost, _: Effects) -> CoordinatorState:
    """The agent is out of the fleet, and missing from every open command. If its place is claimed, it restarted."""
    name = member_at(state, event.peer)
    if name is None:
        return state
    if not state.members[name].joined:
        return replace(state, members=_without(state.members, name), claims=_without(state.claims, name))
    left = event.reason == "left"
    member = state.members[name]
    away_us = event.at_us if member.state == "live" else member.away_us
    member = replace(member, state="left" if left else "gone", away_us=away_us)
    reason = Missing("restarted" if name in state.claims and not left else "gone")
    commands = tuple(conclude(command, (name,), reason, event.at_us) for command in state.open)
    return replace(state, members={**state.members, name: member}, open=commands)


def _retired(name: str) -> str:
    return (
        f"agent {name} was retired from this run. To take up a retired place again, start a new agent with --rejoin; "
        "or start it under another replica index"
    )


def on_resend_requested(state: CoordinatorState, event: events.ResendRequested, effects: Effects) -> CoordinatorState:
    """Send a page of the missing records, or a snapshot if the history does not reach back that far."""
    if member_at(state, event.peer) is None:
        send(state, event.peer, UNKNOWN_PEER, effects)
        return state
    if not state.history or event.first < state.history[0][0].seq:
        return on_join(state, event, effects)
    send_missing(state, event, effects)
    return state


def on_retire_requested(state: CoordinatorState, event: events.RetireRequested, effects: Effects) -> CoordinatorState:
    """Take places out of the run for good: all that were named, or none."""
    matches = _agents_at(state, event.places)
    unknown = [place for place, agents in matches.items() if not agents]
    agents = frozenset[str]().union(*matches.values())
    alive = [name for name in agents if name in state.members and state.members[name].state in ALIVE]
    if unknown or alive:
        reason = f"agent {format_agents(alive)} is running: stop it first, or drain its replica" if alive else ""
        reason = reason or f"this run has no agent {format_list(unknown)}"
        effects.append(events.Refuse(ticket=event.ticket, kind="retire", reason=f"{reason}. Nothing was retired"))
        return state
    return retire(state, agents, event.ticket, effects)


def retire(state: CoordinatorState, agents: frozenset[str], ticket: int | None, effects: Effects) -> CoordinatorState:
    """Take agents out of the run. Those that still run are told to end."""
    gone = {name: state.members[name] for name in sorted(agents, key=agent_order) if name in state.members}
    members = {name: member for name, member in state.members.items() if name not in gone}
    gone_units = {member.hello.identity.unit for member in gone.values()}
    gone_units -= {member.hello.identity.unit for member in members.values() if member.joined}
    left = identities(replace(state, members=members))  # where a new first node syncs, or no more, all begins anew
    gone_units |= {unit for unit, place in identities(state).items() if left.get(unit, place).syncs != place.syncs}
    effects.append(events.Retired(ticket=ticket, agents=tuple(sorted(agents, key=agent_order))))
    for name, member in gone.items():
        if member.state in ALIVE:
            send(state, member.peer, Rejoin(reason=_retired(name), give_up=True), effects)
    incarnations = {name: member.hello.incarnation for name, member in gone.items()}
    return replace(
        state,
        members=members,
        desired={unit: desired for unit, desired in state.desired.items() if unit not in gone_units},
        claims={name: claim for name, claim in state.claims.items() if name not in agents},
        stops={unit: stop for unit, stop in state.stops.items() if unit not in gone_units},
        retired={**dict.fromkeys(agents, ""), **state.retired, **incarnations},
    )


def _agents_at(state: CoordinatorState, places: Iterable[str]) -> dict[str, set[str]]:
    """The agents that each place names: one agent, or all of a replica. Those that are retired already count."""
    known = state.members.keys() | state.retired.keys()
    replicas: dict[int, set[str]] = {}
    for name in sorted(known):
        if (node := replica_and_node(name)) is not None:
            replicas.setdefault(node[0], set()).add(name)
    return {place: replicas.get(int(place), set()) if place.isdecimal() else {place} & known for place in places}


def _without(table: Mapping[K, V], key: K) -> Mapping[K, V]:
    return {other: value for other, value in table.items() if other != key} if key in table else table
