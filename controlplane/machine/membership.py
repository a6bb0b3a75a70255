"""Which places belong to the run, whether or not an agent is there now: absent and retired ones, those of a sync. Pure.

A place is known from the first time that an agent joins there, through restarts of the bus, until an operator retires
it. A hello alone proves nothing: anybody can make up places.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.fleet import CoordinatorState, Effects
from controlplane.machine.members import Member, Members
from schemas.commands import Target
from schemas.formatting import agent_order, format_agents, format_list
from schemas.identity import ROLLOUT, replica_and_node
from schemas.outcomes import Missing
from schemas.reports import AgentOutcome

_ALIVE = ("joining", "live")


def absent_outcomes(state: CoordinatorState, at_us: int) -> tuple[AgentOutcome, ...]:
    """Return what a command that is issued now concludes for each known agent that is not live."""
    return tuple(
        AgentOutcome(agent=name, conclusion=Missing("absent", max(0, at_us - member.away_us) // 1000))
        for name in state.roster.away
        for member in (state.members[name],)
    )


def on_retire_requested(state: CoordinatorState, event: events.RetireRequested, effects: Effects) -> CoordinatorState:
    """Take places out of the run for good: all that were named, or none."""
    matches = _agents_at(state, event.places)
    unknown = [place for place, agents in matches.items() if not agents]
    agents = frozenset[str]().union(*matches.values())
    alive = [name for name in agents if name in state.members and state.members[name].state in _ALIVE]
    if unknown or alive:
        reason = f"agent {format_agents(alive)} is running: stop it first" if alive else ""
        reason = reason or f"this run has no agent {format_list(unknown)}"
        effects.append(events.Refuse(ticket=event.ticket, kind="retire", reason=f"{reason}. Nothing was retired"))
        return state
    members = {name: member for name, member in state.members.items() if name not in agents}
    gone_units = {state.members[name].hello.identity.unit for name in agents if name in state.members}
    gone_units -= {member.hello.identity.unit for member in members.values()}
    effects.append(events.Retired(ticket=event.ticket, agents=tuple(sorted(agents, key=agent_order))))
    return replace(
        state,
        members=Members(members),
        desired={unit: desired for unit, desired in state.desired.items() if unit not in gone_units},
        claims={name: claim for name, claim in state.claims.items() if name not in agents},
        retired=state.retired | agents,
    )


def _agents_at(state: CoordinatorState, places: Iterable[str]) -> dict[str, set[str]]:
    """The agents that each place names: one agent, or all of a replica. Those that are retired already count."""
    known = state.members.keys() | state.retired
    replicas: dict[int, set[str]] = {}
    for name in sorted(known):
        if (node := replica_and_node(name)) is not None:
            replicas.setdefault(node[0], set()).add(name)
    return {place: replicas.get(int(place), set()) if place.isdecimal() else {place} & known for place in places}


# --- the replicas of a sync -------------------------------------------------------------------------------------------


def syncing_replicas(state: CoordinatorState, target: Target) -> frozenset[int]:
    """Return the known replicas that a sync with this target is for."""
    syncing = state.roster.syncing
    return syncing if target.replicas is None else syncing & target.replicas


def whole_target(state: CoordinatorState, target: Target) -> Target:
    """Return the target of a sync. One that names every known replica means the same as one that names none."""
    every = syncing_replicas(state, Target())
    return Target() if target.replicas is not None and every and every <= target.replicas else target


def speaks_for_replica(member: Member) -> bool:
    """Return whether the agent speaks for a replica."""
    return (member.hello.identity.role, member.hello.identity.node_rank) == (ROLLOUT, 0)


def is_engine_down(member: Member) -> bool:
    """Return whether this is a primary whose engine is known to be down."""
    return (
        member.state == "live"
        and speaks_for_replica(member)
        and member.status is not None
        and member.status.tokenizer == "unknown"
    )
