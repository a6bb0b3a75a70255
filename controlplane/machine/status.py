"""The fleet as one message, for people and programs that watch it. Pure."""

from collections.abc import Generator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Final

from controlplane.machine.fleet import CoordinatorState, OpenCommand
from controlplane.machine.members import Member
from controlplane.machine.membership import speaks_for_replica
from controlplane.machine.serving import away_ms, proven_replicas
from controlplane.machine.tables import as_dict
from schemas.formatting import describe, format_agents
from schemas.identity import identity_of
from schemas.reports import AgentLine, FleetStatus, HeldSync, PendingCommand

OPEN_MAX: Final = 64
"""Open commands that a status names, the oldest first."""
LINES_AT_ONCE: Final = 256
"""Agents that one step describes."""
WAITS_FOR_MAX: Final = 4
"""Commands that a status names for one agent."""


def fleet_status(
    state: CoordinatorState,
    now_us: int,
    log: str,
    last_heard_us: Mapping[str, int],
    latencies_us: Mapping[str, int] = MappingProxyType({}),
    wall_ns: int | None = None,
) -> FleetStatus:
    """Return the fleet at one moment. The arguments are those of `status_steps`."""
    return finished(status_steps(state, now_us, log, last_heard_us, latencies_us, wall_ns))


def finished(steps: Generator[None, None, FleetStatus]) -> FleetStatus:
    """Take all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            fleet: FleetStatus = end.value
            return fleet


def status_steps(
    state: CoordinatorState,
    now_us: int,
    log: str,
    last_heard_us: Mapping[str, int],
    latencies_us: Mapping[str, int],
    wall_ns: int | None = None,
) -> Generator[None, None, FleetStatus]:
    """Return the steps that make the status of a fleet, of at most two milliseconds each. They return it.

    Args:
        now_us: Monotonic clock of the bus.
        log: Path of the run's log.
        last_heard_us: When each peer last sent a message, on the same clock. The bus's inbox keeps it.
        latencies_us: From publishing a command to the arrival of its newest answer, by agent.
        wall_ns: Wall clock of the bus; None to leave out how long engine calls have taken.
    """
    (serving, unproven), waits_for = proven_replicas(state), _waits_for(state)
    yield
    lines: list[tuple[tuple[object, ...], AgentLine]] = []
    for name, member in as_dict(state.members).items():
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
            serving=serving.get(replica) if speaks_for_replica(member) else None,
            latency_us=latencies_us.get(name),
            call_ms=_call_ms(member, wall_ns),
        )
        lines.append(((not _is_one_of(line, unproven), line.urgency), line))
        if len(lines) % LINES_AT_ONCE == 0:
            yield
    lines.sort(key=itemgetter(0))
    yield
    return FleetStatus(
        run=state.run,
        epoch=state.epoch,
        seq=state.seq,
        version=max(desired.version for desired in (state.default_desired, *state.desired.values())),
        log=log,
        agents=tuple(line for _, line in lines),
        open=_open(state),
        unproven=tuple(sorted(unproven)),
        pending=tuple(_pending(command, now_us) for command in state.open[:OPEN_MAX]),
        held=_held(state, now_us),
    )


def _call_ms(member: Member, wall_ns: int | None) -> int | None:
    """How long the engine call in flight has taken, as the member's newest heartbeat and its clock have it."""
    status = member.status
    if status is None or status.since_ms is None or status.clock is None or wall_ns is None:
        return None
    if member.state not in ("joining", "live"):
        return None
    return max(0, wall_ns - status.clock.bus_ns(status.since_ms)) // 1_000_000


def _is_one_of(line: AgentLine, replicas: frozenset[int]) -> bool:
    return bool(replicas) and identity_of(line.agent).unit in replicas


def _open(state: CoordinatorState) -> tuple[str, ...]:
    commands = [(command, command.waiting) for command in state.open[:OPEN_MAX]]
    named = {waiting: format_agents(waiting) for waiting in dict.fromkeys(waiting for _, waiting in commands)}
    lines = [f"{_name(command)} waits for {named[waiting]}" for command, waiting in commands]
    more = len(state.open) - len(lines)
    return (*lines, f"{more} more commands") if more else tuple(lines)


def _pending(command: OpenCommand, now_us: int) -> PendingCommand:
    return PendingCommand(
        name=_name(command),
        age_ms=max(0, now_us - command.issued_us) // 1000,
        left_ms=max(0, command.deadline_us - now_us) // 1000,
        waiting=len(command.waiting),
    )


def _held(state: CoordinatorState, now_us: int) -> HeldSync | None:
    sync = state.sync
    if sync is None or sync.held_until_us is None:
        return None
    return HeldSync(version=sync.version, phase=sync.phase, left_ms=max(0, sync.held_until_us - now_us) // 1000)


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
