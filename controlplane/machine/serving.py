"""Which replicas are proven to serve, and what keeps the others from it. Pure.

Two things prove what a replica serves: its heartbeat, and its answer to a command that lets it serve or not. The newer
one counts. So a replica that has just committed is known to serve before its next heartbeat, and one that was told to
resume and has not answered yet is not.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from controlplane.machine.fleet import CoordinatorState, with_members
from controlplane.machine.members import Member
from controlplane.machine.membership import speaks_for_replica, syncing_replicas
from controlplane.machine.tables import as_dict
from schemas.commands import Command, EngineCommand, Target, WeightSync
from schemas.desired import Desired
from schemas.formatting import agent_order, format_duration
from schemas.identity import ROLLOUT
from schemas.outcomes import Acted, Conclusion, Missing, Reason, Skipped
from schemas.reports import AgentOutcome

_SAYS_NOTHING: Final = tuple(map(Skipped, (Reason.NOT_TARGETED, Reason.MODE_NEVER_SYNCS, Reason.OBSERVING)))


def note_outcomes(state: CoordinatorState, command: Command, outcomes: Iterable[AgentOutcome]) -> CoordinatorState:
    """Keep what these outcomes prove of what replicas serve, until their next heartbeats."""
    if not _lets_serve(command):
        return state
    changed: dict[str, Member] = {}
    for outcome in outcomes:
        member = state.members.get(outcome.agent)
        if member is None or not speaks_for_replica(member) or _says_nothing(outcome.conclusion):
            continue
        obeyed = _carried_out(outcome.conclusion)
        loaded = member.loaded
        if isinstance(command, WeightSync):
            loaded = obeyed and member.hello.identity.replica not in command.quarantine
        changed[outcome.agent] = replace(member, obeyed=obeyed, loaded=loaded)
    return with_members(state, changed) if changed else state


def _lets_serve(command: Command) -> bool:
    """Whether a replica may serve afterwards and did not before, or the other way round."""
    if isinstance(command, WeightSync):
        return command.phase in ("commit", "abort")
    return isinstance(command, EngineCommand) and command.operation not in ("flush", "abort")


def _says_nothing(conclusion: Conclusion) -> bool:
    return conclusion in _SAYS_NOTHING or (isinstance(conclusion, Missing) and conclusion.reason == "absent")


def _carried_out(conclusion: Conclusion) -> bool:
    return isinstance(conclusion, Acted) or conclusion == Skipped(Reason.ALREADY)


class ProvenReplicas(NamedTuple):
    """What is proven of the replicas.

    Attributes:
        serving: Those that are proven to serve, each with its version. One that never syncs has none.
        unproven: Known replicas that are not proven to hold their committed weights, since there are some.
    """

    serving: dict[int, int]
    unproven: frozenset[int]


def proven_replicas(state: CoordinatorState) -> ProvenReplicas:
    """Return what is proven of all replicas."""
    waiting = frozenset[str]().union(*(command.waiting for command in state.open if _lets_serve(command.command)))
    serving: dict[int, int] = {}
    holding: list[int] = []
    for replica, member, desired in _live_primaries(state):
        if _in_doubt(member, desired):
            continue
        holding.append(replica)
        identity = member.hello.identity
        if desired.serving and _generates(member) and identity.syncs and not (waiting and identity.agent in waiting):
            serving[replica] = desired.version
    committed = state.roster.syncing.intersection(unit for unit, desired in state.desired.items() if desired.committed)
    return ProvenReplicas(dict(sorted(serving.items())), committed.difference(holding))


def _live_primaries(state: CoordinatorState) -> Iterator[tuple[int, Member, Desired]]:
    """The live agents that speak for a replica, each with its index and what is desired of it."""
    desired_of = as_dict(state.desired)
    for member in state.members.values():
        identity = member.hello.identity
        if member.state == "live" and identity.node_rank == 0 and identity.role == ROLLOUT:
            yield identity.replica, member, desired_of.get(identity.replica, state.default_desired)


def _generates(member: Member) -> bool:
    """Whether a replica that should generate is proven to."""
    status = member.status
    if member.obeyed is not None:
        return member.obeyed and not (status is not None and status.wedged)
    return status is not None and status.ready and status.generating


def _in_doubt(member: Member, desired: Desired) -> bool:
    """Whether the replica is not proven to hold its committed weights."""
    return not member.loaded if member.loaded is not None else bool(_wrong_weights(member, desired))


def oldest_version(state: CoordinatorState) -> int:
    """Return the oldest version that a known replica, or one that is new, may still have to load."""
    versions = [state.desired[replica].version for replica in syncing_replicas(state, Target()) & state.desired.keys()]
    return min(versions, default=state.default_desired.version)


def all_serve(state: CoordinatorState, count: int, since_us: int) -> bool:
    """Return whether `count` agents are live, and none that is live lacks anything."""
    live = [member for member in state.members.values() if member.state == "live"]
    return len(live) >= count and all(not _lacks(state, member, since_us) for member in live)


def what_agents_lack(state: CoordinatorState, since_us: int) -> dict[str, str]:
    """Return what keeps each known agent from serving; only what it reported after `since_us` counts."""
    lacking = {name: _lacks(state, member, since_us) for name, member in state.members.items()}
    return {name: lacking[name] for name in sorted(lacking, key=agent_order) if lacking[name]}


def _lacks(state: CoordinatorState, member: Member, since_us: int) -> str:
    status = member.status
    if member.state != "live":
        return f"its agent is {member.state} (away for {format_duration(away_ms(member, since_us))} at the call)"
    if status is None or member.status_us <= since_us:
        return "no heartbeat since the call"
    if not speaks_for_replica(member):
        return ""
    if wrong := _wrong_weights(member, _desired(state, member)):
        return wrong
    return "" if status.ready and status.generating else f"it does not serve: {status.condition()}"


def _wrong_weights(member: Member, desired: Desired) -> str:
    status = member.status
    if status is None:
        return "no heartbeat yet"
    if status.quarantined:
        return f"quarantined since v{status.quarantined}"
    if status.torn:
        return "its weights are torn"
    if member.hello.identity.syncs and status.version != desired.version:
        return f"it holds v{status.version}, and v{desired.version} is committed"
    return ""


def _desired(state: CoordinatorState, member: Member) -> Desired:
    return state.desired.get(member.hello.identity.unit, state.default_desired)


def away_ms(member: Member, now_us: int) -> int:
    """Return how long the agent has been away; 0 if it is live."""
    return max(0, now_us - member.away_us) // 1000 if member.state != "live" else 0
