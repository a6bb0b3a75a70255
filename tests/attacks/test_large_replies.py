"""Replies about a fleet of thousands come in parts and are whole again."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from controlplane.bus import bus_loop
from controlplane.bus.bus import Bus
from controlplane.bus.operator import ask_status
from controlplane.cli.__main__ import cli
from controlplane.machine.status import OPEN_MAX, WAITS_FOR_MAX, fleet_status
from controlplane.record.log import RunLog
from schemas import wire
from schemas.agent_status import AgentStatus
from schemas.commands import EngineCommand, WeightSync
from schemas.identity import Identity
from schemas.outcomes import Acted
from schemas.reports import AgentOutcome, FleetStatus, Report, SyncReport
from schemas.transport.sockets import Context
from tests.unit.fleets import Coordinator

AGENTS = 4096
PAUSE = EngineCommand(operation="pause")


@cache
def large_fleet() -> FleetStatus:
    """4,096 agents that wait for a hundred commands."""
    bus = Coordinator("0.0")
    status = AgentStatus(ready=True, engine="sglang 0.5.23", generating=True, tokenizer="present")
    member = bus.state.members["0.0"]
    members = {
        f"{replica}.0": replace(
            member,
            peer=f"{replica}.0/a",
            hello=replace(
                member.hello, identity=Identity(replica=replica, node_rank=0), host=f"node-{replica:04}.cluster"
            ),
            status=status,
        )
        for replica in range(AGENTS)
    }
    bus.state = replace(bus.state, members=members)
    for _ in range(100):
        bus.issue(PAUSE)
    return fleet_status(bus.state, 0, "/runs/run.db", {})


def large_report() -> SyncReport:
    """Of a sync whose phases each take several messages."""
    outcomes = tuple(AgentOutcome(agent=f"{replica}.0", conclusion=Acted(calls=("load",))) for replica in range(AGENTS))
    load = Report(seq=2, origin=1, command=WeightSync(phase="load", version=3), outcomes=outcomes)
    return SyncReport(version=3, status="aborted", loaded=(), quarantined=(), phases=(load, load))


@pytest.mark.parametrize("made", [large_fleet, large_report])
def test_a_large_reply_is_sent_in_parts_and_is_whole_again(made: Callable[[], wire.Reply]) -> None:
    reply = made()
    bodies = wire.encode_reply(reply)
    assert all(len(body) < wire.MAX_BYTES - 512 for body in bodies)
    parts = [part for part in map(wire.decode_downward, bodies) if isinstance(part, wire.ReplyPart)]
    assert [part.left for part in parts] == list(reversed(range(len(bodies)))) and 1 < len(parts) < 20
    assert wire.decode_downward(b"".join(part.part for part in parts)) == reply


def test_the_status_of_thousands_names_so_many_commands_and_no_more() -> None:
    fleet = large_fleet()
    assert len(fleet.agents) == AGENTS
    assert len(fleet.open) == OPEN_MAX + 1 and fleet.open[-1] == "36 more commands"
    assert all(len(line.waits_for) == WAITS_FOR_MAX for line in fleet.agents)


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_operator_gets_the_status_of_thousands(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = large_fleet()  # a second of work, which would hold up the bus in its own turn
    monkeypatch.setattr(bus_loop, "fleet_status", lambda *_: large)
    async with Bus("tcp://127.0.0.1:0", RunLog.open(tmp_path / "run.db"), context=context) as bus:
        found: FleetStatus = await ask_status(bus.address)
        assert found == large_fleet()
        shown = await anyio.to_thread.run_sync(
            CliRunner(env={"COLUMNS": "250"}).invoke, cli, ["status", "--bus", bus.address]
        )
        assert shown.exit_code == 0 and "node-4095.cluster" in shown.output and "node-0000" in shown.output
