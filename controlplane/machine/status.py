"""The fleet as one message, and which replicas are proven to serve. For people and programs that watch it. Pure."""

from collections.abc import Mapping
from typing import Final

from controlplane.machine.fleet import CoordinatorState, Member, OpenCommand
from controlplane.machine.membership import syncing_replicas
from schemas.commands import Target
from schemas.desired import Desired
from schemas.formatting import agent_order, describe, format_agents, format_duration
from schemas.identity import ROLLOUT, RolloutMode, identity_of
from schemas.reports import AgentLine, FleetStatus

OPEN_MAX: Final = 64
"""Open commands that a status names, the oldest first."""
WAITS_FOR_MAX: Final = 4
"""Commands that a status names for one agent."""


def fleet_status(state: CoordinatorState, now_us: int, log: str, last_heard_us: Mapping[str, int]) -> FleetStatus:
    """Return the fleet at one moment.

    Args:
        now_us: Monotonic clock of the bus.
        log: Path of the run's log.
        last_heard_us: When each peer last sent a message, on the same clock. The bus's inbox keeps it.
    """
    unproven = unproven_replicas(state)
    waits_for = _waits_for(state)
    agents = (
        AgentLine(
            agent=name,
            incarnation=member.hello.incarnation,
            host=member.hello.host,
            state=member.state,
            silent_ms=max(0, now_us - last_heard_us.get(member.peer, now_us)) // 1000,
            seq=member.seq,
            status=member.status,
            waits_for=tuple(waits_for.get(name, ())),
            away_ms=_away_ms(member, now_us),
        )
        for name, member in state.members.items()
    )
    return FleetStatus(
        run=state.run,
        epoch=state.epoch,
        seq=state.seq,
        version=max(desired.version for desired in (state.default_desired, *state.desired.values())),
        log=log,
        agents=tuple(sorted(agents, key=lambda line: (identity_of(line.agent).unit not in unproven, line.urgency))),
        open=_open(state),
        unproven=tuple(sorted(unproven)),
    )


def _open(state: CoordinatorState) -> tuple[str, ...]:
    lines = [f"{_name(command)} waits for {format_agents(command.waiting)}" for command in state.open[:OPEN_MAX]]
    more = len(state.open) - len(lines)
    return (*lines, f"{more} more commands") if more else tuple(lines)


def _waits_for(state: CoordinatorState) -> dict[str, list[str]]:
    """The oldest commands that each agent has not answered."""
    waits_for: dict[str, list[str]] = {}
    for command in state.open[:OPEN_MAX]:
        for name in sorted(command.waiting):
            commands = waits_for.setdefault(name, [])
            if len(commands) < WAITS_FOR_MAX:
                commands.append(_name(command))
    return waits_for


def _away_ms(member: Member, now_us: int) -> int:
    return max(0, now_us - member.away_us) // 1000 if member.state != "live" else 0


def _name(command: OpenCommand) -> str:
    return f"{describe(command.command)} (seq {command.record.seq})"


# --- who serves -------------------------------------------------------------------------------------------------------


def unproven_replicas(state: CoordinatorState) -> frozenset[int]:
    """Return the known replicas that are not proven to hold their committed weights, since there are some."""
    proven = {
        member.hello.identity.replica
        for member in state.members.values()
        if member.state == "live" and _speaks(member)
        if _just_loaded(state, member) or not _wrong_weights(member, _desired(state, member))
    }
    committed = {unit for unit, desired in state.desired.items() if desired.version > 0}
    return (syncing_replicas(state, Target()) & committed) - proven


def _just_loaded(state: CoordinatorState, member: Member) -> bool:
    """Whether the report of the newest sync says more about the replica than its last heartbeat, which is older."""
    return member.hello.identity.replica in state.loaded and member.status_us <= state.loaded_us


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
        return f"its agent is {member.state} (away for {format_duration(_away_ms(member, since_us))} at the call)"
    if status is None or member.status_us <= since_us:
        return "no heartbeat since the call"
    if not _speaks(member):
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
    syncs = member.hello.identity.mode is not RolloutMode.COLOCATED
    if syncs and status.version != desired.version:
        return f"it holds v{status.version}, and v{desired.version} is committed"
    return ""


def _speaks(member: Member) -> bool:
    """Whether the agent speaks for a replica."""
    return (member.hello.identity.role, member.hello.identity.node_rank) == (ROLLOUT, 0)


def _desired(state: CoordinatorState, member: Member) -> Desired:
    return state.desired.get(member.hello.identity.unit, state.default_desired)
