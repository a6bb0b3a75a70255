"""`rolloutctl stall`: who waits for whom in a running fleet, the most urgent first."""

from collections.abc import Iterable
from functools import partial
from typing import Final

import click
import msgspec
from msgspec import Struct

from controlplane.bus.operator import ask_status
from controlplane.cli import interrupt
from controlplane.cli.command_line import Command, note_problem
from controlplane.cli.operate import NO_AGENTS, bus_option, keys_option
from controlplane.cli.tables import Screen
from schemas.carriers.keys import KeySource
from schemas.config import TIMEOUT_MAX_S
from schemas.formatting import Line, Printable, format_agents, format_duration, format_replicas
from schemas.identity import ROLLOUT, identity_of
from schemas.reports import AgentLine, FleetStatus, PendingCommand

_BUSY: Final = "no open command waits for these engine calls: it was answered at its deadline, or the agent reconciles"
_UNFIT: Final = "no command waits for these, and they are not fit to serve"


class Waiting(Struct, frozen=True, kw_only=True):
    """One agent that something waits for.

    Attributes:
        doing: What it and its engine are doing, in a few words.
        silent_ms: Time since its last message.
        call: The engine call in flight.
        call_ms: How long that has taken; None if none is in flight, or if the agent's clock is not known yet.
    """

    agent: str
    host: str
    doing: str
    silent_ms: int
    call: str | None = None
    call_ms: int | None = None


class Wait(Printable, frozen=True, kw_only=True):
    """One thing that waits.

    Attributes:
        text: What waits, and for how long it still may, in words.
        left_ms: Time until it is given up; None if nobody gives it up.
        agents: What it waits for.
    """

    text: str
    left_ms: int | None = None
    agents: tuple[Waiting, ...] = ()

    def lines(self) -> list[Line]:
        """What waits, then agents that do the same together."""
        groups: dict[str, list[Waiting]] = {}
        for waiting in self.agents:
            groups.setdefault(waiting.doing, []).append(waiting)
        return [Line(self.text, trouble=True), *(_group(doing, same) for doing, same in groups.items())]


def _group(doing: str, same: list[Waiting]) -> Line:
    host = f" on {same[0].host}" if len(same) == 1 else ""
    longest = max((waiting.call_ms for waiting in same if waiting.call_ms is not None), default=None)
    call = f"; in {same[0].call} for {format_duration(longest)}" if longest is not None else ""
    away = doing.startswith(("gone", "left"))
    heard = "" if away else f"; last heard {format_duration(max(waiting.silent_ms for waiting in same))} ago"
    return Line(f"  {format_agents(waiting.agent for waiting in same)}{host}: {doing}{call}{heard}")


def waits(fleet: FleetStatus) -> list[Wait]:
    """Return what waits in a fleet, the most urgent first. Pure.

    Open commands come first, by the time that they have left; then a sync that its trainer holds, engine calls that
    no open command waits for, agents that are not fit to serve, and replicas that are not proven to.
    """
    found = [_command(fleet, pending) for pending in sorted(fleet.pending, key=lambda pending: pending.left_ms)]
    found += [Wait(text=text) for text in fleet.open[len(fleet.pending) :]]  # more than a status has deadlines for
    if fleet.held is not None:
        held = fleet.held
        left = f"{format_duration(held.left_ms)} until it is given up"
        text = f"the sync to v{held.version} waits for the trainer to ask for its {held.phase} phase: {left}"
        found.append(Wait(text=text, left_ms=held.left_ms))
    unasked = [line for line in fleet.agents if not line.waits_for]
    busy = [line for line in unasked if line.state != "gone" and line.status is not None and line.status.activity]
    unfit = [line for line in unasked if line not in busy and (line.in_trouble or line.state == "joining")]
    found += [Wait(text=text, agents=_waiting(lines)) for text, lines in ((_BUSY, busy), (_UNFIT, unfit)) if lines]
    named = {_replica(waiting.agent) for wait in found for waiting in wait.agents}
    if rest := [replica for replica in fleet.unproven if replica not in named]:
        found.append(Wait(text=f"{format_replicas(rest)} not proven to hold v{fleet.version}"))
    return found


def _command(fleet: FleetStatus, pending: PendingCommand) -> Wait:
    lines = [line for line in fleet.agents if pending.name in line.waits_for]
    whom = f"{pending.waiting} agent{'' if pending.waiting == 1 else 's'}"
    when = f"published {format_duration(pending.age_ms)} ago, {format_duration(pending.left_ms)} until its deadline"
    return Wait(
        text=f"{pending.name} waits for {whom}: {when}", left_ms=pending.left_ms, agents=_waiting(lines, asked=True)
    )


def _waiting(lines: Iterable[AgentLine], *, asked: bool = False) -> tuple[Waiting, ...]:
    return tuple(
        Waiting(
            agent=line.agent,
            host=line.host,
            doing=_doing(line, asked=asked),
            silent_ms=line.silent_ms,
            call=line.status.activity if line.status is not None and line.state == "live" else None,
            call_ms=line.call_ms,
        )
        for line in sorted(lines, key=lambda line: line.urgency)
    )


def _doing(line: AgentLine, *, asked: bool) -> str:
    status = line.status
    if status is None or line.state != "live":
        return line.condition
    parts = [line.condition]
    parts += [f"{status.queued} more queued for its engine"] if status.queued else []
    parts += [f"{status.buffered} out of order, until those before them arrive"] if status.buffered else []
    idle = asked and not (status.activity or status.queued or status.buffered)
    parts += ["no engine call in flight: the command or its answer is on its way"] if idle else []
    return "; ".join(parts)


def _replica(agent: str) -> int | None:
    identity = identity_of(agent)
    return identity.replica if identity.role == ROLLOUT else None


@click.command(cls=Command, short_help="Show who waits for whom, the most urgent first.")
@bus_option
@keys_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.01, TIMEOUT_MAX_S),
    default=5.0,
    show_default=True,
    help="Seconds to wait.",
)
def stall(bus: str, keys: KeySource | None, as_json: bool, timeout: float) -> None:
    """Show who waits for whom in a running fleet, and what each of them is doing.

    Exits with 0 if nothing waits, with 1 if something does.
    """
    fleet: FleetStatus = interrupt.run(partial(ask_status, bus, timeout, keys))
    found = waits(fleet)
    if found or not fleet.agents:
        note_problem()
    screen = Screen()
    if as_json:
        click.echo(msgspec.json.encode(found))
    elif not found and fleet.agents:
        click.echo("nothing waits")
    else:
        for wait in found:
            screen.print(wait, soft_wrap=True, highlight=False)
    if not fleet.agents:
        click.echo(f"rolloutctl: {NO_AGENTS}", err=True)
