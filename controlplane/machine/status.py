"""The fleet as one message, for people and programs that watch it. Pure."""

from collections.abc import Mapping

from controlplane.machine.fleet import CoordinatorState, OpenCommand
from schemas.formatting import agent_order, describe
from schemas.reports import AgentLine, FleetStatus


def fleet_status(state: CoordinatorState, now_us: int, log: str, last_heard_us: Mapping[str, int]) -> FleetStatus:
    """Return the fleet at one moment.

    Args:
        now_us: Monotonic clock of the bus.
        log: Path of the run's log.
        last_heard_us: When each peer last sent a message, on the same clock. The bus's inbox keeps it.
    """
    agents = tuple(
        AgentLine(
            agent=name,
            incarnation=member.hello.incarnation,
            host=member.hello.host,
            state=member.state,
            silent_ms=max(0, now_us - last_heard_us.get(member.peer, now_us)) // 1000,
            seq=member.seq,
            status=member.status,
            waits_for=tuple(_name(command) for command in state.open if name in command.waiting),
        )
        for name, member in sorted(state.members.items(), key=lambda item: agent_order(item[0]))
    )
    return FleetStatus(
        run=state.run,
        epoch=state.epoch,
        seq=state.seq,
        version=max(desired.version for desired in (state.default_desired, *state.desired.values())),
        log=log,
        agents=agents,
        open=tuple(f"{_name(command)} waits for {', '.join(sorted(command.waiting))}" for command in state.open),
    )


def _name(command: OpenCommand) -> str:
    return f"{describe(command.command)} (seq {command.record.seq})"
