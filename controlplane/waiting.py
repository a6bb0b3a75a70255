"""Waits for agents that serve, and says what they still lack."""

from typing import Final

from anyio import current_time, move_on_after

from controlplane.bus.bus import Bus
from controlplane.machine.replicas import all_serve, not_ready_reasons
from schemas.errors import AgentsMissing
from schemas.logs import logger_of
from schemas.reports import FleetStatus
from schemas.transport.addresses import as_dialled

logger = logger_of("plane")

SAY_AGAIN_S: Final = 10
"""Time between two log lines."""
LACKS_SHOWN: Final = 4
"""Agents that such a line names."""


async def await_agents(bus: Bus, count: int, timeout_s: float) -> FleetStatus:
    """Wait until this many agents are live, and none of them lacks anything. Raises AgentsMissing."""
    since_us, until = bus.refresh_statuses(), current_time() + timeout_s
    while (left_s := until - current_time()) > 0:
        with move_on_after(min(SAY_AGAIN_S, left_s)):
            await bus.wait_until(lambda state: all_serve(state, count, since_us))
            break
        lacks = not_ready_reasons(bus.state, since_us)
        first = "".join(f"; {name} lacks: {what}" for name, what in list(lacks.items())[:LACKS_SHOWN])
        live = sum(member.state == "live" for member in bus.state.members.values())
        logger.warning(
            "waiting for %d agents that serve: %d joined, %d lack something%s", count, live, len(lacks), first
        )
    else:
        lacking = (f"  {name} lacks: {what}" for name, what in not_ready_reasons(bus.state, since_us).items())
        fleet = bus.status()
        expected = "1 agent that serves" if count == 1 else f"{count} agents, all of them serving,"
        lines = [f"expected {expected} within {timeout_s:g} s:", *lacking, str(fleet)]
        advice = (
            f"Agents must be started with --bus {as_dialled(bus.address)}. Read the logs of those that are not here: "
            "each says which address it connects to and what it waits for"
        )
        raise AgentsMissing("\n".join([*lines, advice])) from None
    return bus.status()
