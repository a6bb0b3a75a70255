"""The fleet as one message, for people and programs that watch it. Pure."""

from collections.abc import Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Final

from controlplane.machine.adapters import adapter_statuses
from controlplane.machine.coordinator_state import CoordinatorState, Member, OpenCommand
from controlplane.machine.replicas import away_ms, is_primary, proven_replicas
from controlplane.machine.stops import stopped_replicas
from schemas.agent_status import RequestCounts
from schemas.desired import Desired
from schemas.formatting import describe, format_agents
from schemas.reports import AgentLine, FleetStatus

OPEN_MAX: Final = 64
"""Open commands that a status names, the oldest first."""
WAITS_FOR_MAX: Final = 4
"""Commands that a status names for one agent."""


def fleet_status(
    state: CoordinatorState,
    now_us: int,
    log: str,
    last_heard_us: Mapping[str, int],
    latencies_us: Mapping[str, int] = MappingProxyType({}),
    request_counts: Mapping[str, RequestCounts] = MappingProxyType({}),
    wall_ns: int | None = None,
) -> FleetStatus:
    """Return the fleet at one moment."""
    (serving, unproven), waits_for = proven_replicas(state), _waits_for(state)
    lines: list[tuple[tuple[object, ...], AgentLine]] = []
    for name, member in state.members.items():
        replica = member.hello.identity.replica
        line = AgentLine(
            agent=name,
            incarnation=member.hello.incarnation,
            host=member.hello.host,
            state=member.state,
            silent_ms=max(0, now_us - last_heard_us.get(member.peer, now_us)) // 1000,
            seq=member.seq,
            status=member.status,
            waits_for=tuple(waits_for.get(name, ())),
            away_ms=away_ms(member, now_us),
            serving=serving.get(replica) if is_primary(member) else None,
            latency_us=latencies_us.get(name),
            call_ms=_call_ms(member, wall_ns),
            requests=request_counts.get(member.peer) if member.state == "live" else None,
            newer=_newer(member, state.desired.get(replica, state.default_desired), serving.get(replica)),
        )
        lines.append(((member.hello.identity.unit not in unproven, line.urgency), line))
    lines.sort(key=itemgetter(0))
    waiting = _waiting(state)
    return FleetStatus(
        run=state.run,
        epoch=state.epoch,
        seq=state.seq,
        version=max(desired.version for desired in (state.default_desired, *state.desired.values())),
        log=log,
        agents=tuple(line for _, line in lines),
        open=tuple(text for text, _ in waiting),
        left_ms=tuple(max(0, until_us - now_us) // 1000 for _, until_us in waiting if until_us is not None),
        unproven=tuple(sorted(unproven)),
        stopped=stopped_replicas(state),
        adapters=tuple(adapter_statuses(state).values()),
        samples=state.samples,
        draining=tuple(sorted(state.draining)),
    )


def _call_ms(member: Member, wall_ns: int | None) -> int | None:
    """How long the engine call in flight has taken, as the member's newest heartbeat and its clock have it."""
    status = member.status
    if status is None or status.since_ms is None or status.clock is None or wall_ns is None:
        return None
    if member.state not in ("joining", "live"):
        return None
    return max(0, wall_ns - status.clock.bus_ns(status.since_ms)) // 1_000_000


def _newer(member: Member, desired: Desired, serving: int | None) -> str:
    """What is known of a replica by outcomes and commands that the newest heartbeat of its primary does not say yet."""
    status = member.status
    if status is None or status.observed is not None or member.state != "live" or not is_primary(member):
        return ""
    serves = status.ready and status.generating
    if serving is not None:
        return "" if serves and status.version == serving else f"v{serving}, generating"
    if not serves:
        return ""
    if desired.draining:
        return "leaves the fleet"
    if desired.sync is not None:
        return f"in the sync to v{desired.sync.version}"
    if desired.quarantined:
        return f"quarantined since v{desired.quarantined}"
    if desired.asleep or desired.generation == "paused":
        return f"told to {'sleep' if desired.asleep else 'pause'}"
    return "did not carry out its last command" if member.command_acked is False else ""


def _waiting(state: CoordinatorState) -> list[tuple[str, int | None]]:
    """What is open, and when (µs) it is given up; of commands that are only counted nothing is said."""
    commands = [(command, command.waiting) for command in state.open[:OPEN_MAX]]
    named = {waiting: format_agents(waiting) for waiting in dict.fromkeys(waiting for _, waiting in commands)}
    lines: list[tuple[str, int | None]] = [
        (f"{_name(command)} waits for {named[waiting]}", command.deadline_us) for command, waiting in commands
    ]
    if (sync := state.sync) is not None and sync.held_until_us is not None:
        lines.append((f"the sync to v{sync.version} waits for the trainer to end its sending", sync.held_until_us))
    more = len(state.open) - len(commands)
    return [*lines, (f"{more} more commands", None)] if more else lines


def _waits_for(state: CoordinatorState) -> dict[str, list[str]]:
    """The oldest commands that each agent has not answered."""
    waits_for: dict[str, list[str]] = {}
    for command in state.open[:OPEN_MAX]:
        line = _name(command)
        for name in command.waiting:
            commands = waits_for.setdefault(name, [])
            if len(commands) < WAITS_FOR_MAX:
                commands.append(line)
    return waits_for


def _name(command: OpenCommand) -> str:
    return f"{describe(command.command)} (seq {command.record.seq})"
