"""`rolloutctl status --watch`: a line for whatever changes in a running fleet."""

import time
from collections.abc import Iterator
from typing import Any

import anyio
import click
import msgspec

from controlplane.bus.operator import ask_status
from schemas.carriers.keys import KeySource
from schemas.errors import BusUnreachable
from schemas.formatting import one_line
from schemas.logs import time_with_zone
from schemas.reports import INSECURE, AgentLine, FleetStatus


async def watch(bus: str, timeout_s: float, keys: KeySource | None, every_s: float, as_json: bool) -> None:
    """Print what changes, until cancelled. A bus that answered once may be restarted: it is asked again.

    Raises as `ask_status`, but BusUnreachable only before the first answer.
    """
    before: FleetStatus | None = None
    silent = False
    while True:
        try:
            fleet = await ask_status(bus, timeout_s, keys)
        except BusUnreachable as error:
            if before is None:
                raise
            if not silent:
                click.echo(one_line(f"rolloutctl: {error} It is asked again every {every_s:g} s"), err=True)
            silent = True
        else:
            for line in [msgspec.json.encode(fleet).decode()] if as_json else _stamped(changes(before, fleet)):
                click.echo(line)
            before, silent = fleet, False
        await anyio.sleep(every_s)


def _stamped(lines: Iterator[str]) -> Iterator[str]:
    moment = time_with_zone(time.time())
    return (one_line(f"{moment}  {line}") for line in lines)


def changes(before: FleetStatus | None, fleet: FleetStatus) -> Iterator[str]:
    """Yield a line for the run, each warning, agent, open command and failure that is not as before. Pure.

    Args:
        before: None for all lines.
    """
    if before is None or _run(before) != _run(fleet):
        yield f"run     {fleet.headline}"
    yield from (f"warning {text}" for text in _warnings(fleet) if before is None or text not in _warnings(before))
    known = {line.agent: _agent(line) for line in before.agents} if before is not None else {}
    for line in fleet.agents:
        if known.get(line.agent) != _agent(line):
            yield f"{line.agent:<7} {_agent(line)}"
    yield from (f"retired {agent}" for agent in known if agent not in {line.agent for line in fleet.agents})
    yield from (f"open    {text}" for text in fleet.open if before is None or text not in before.open)
    old = {failure.text for failure in before.failures} if before is not None else set[str]()
    yield from (f"failed  {failure.text}" for failure in reversed(fleet.failures) if failure.text not in old)


def _run(fleet: FleetStatus) -> tuple[Any, ...]:
    return fleet.run, fleet.epoch, fleet.version, fleet.log


def _warnings(fleet: FleetStatus) -> tuple[str, ...]:
    return (*((INSECURE,) if fleet.insecure else ()), *fleet.warnings)


def _agent(line: AgentLine) -> str:
    """What an agent does and waits for; without how long it has been away, which grows."""
    away_or_not = msgspec.structs.replace(line, away_ms=0).condition
    waits = f"; waits for {'; '.join(line.waits_for)}" if line.waits_for else ""
    return f"{line.state:<7} {line.host}  {away_or_not}{waits}"
