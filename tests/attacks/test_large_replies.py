"""Replies about a fleet of thousands come in parts and are whole again. One with too large a part is refused."""

from collections.abc import Generator
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from controlplane.bus import turns
from controlplane.bus.bus import Bus
from controlplane.bus.operator import ask_status
from controlplane.cli.__main__ import cli
from controlplane.machine.fleet import CoordinatorState
from controlplane.machine.members import Member
from controlplane.machine.status import OPEN_MAX, WAITS_FOR_MAX, fleet_status
from controlplane.record.log import RunLog
from schemas import wire
from schemas.carriers.sockets import Context
from schemas.commands import Checkpoint, EngineCommand, WeightSync
from schemas.identity import Identity
from schemas.outcomes import Acted, ErrorKind, Failed
from schemas.reports import AgentOutcome, AgentStatus, FleetStatus, Report, SyncReport
from tests.unit.fleets import Coordinator

AGENTS = 4096
PAUSE = EngineCommand(operation="pause")


def large_fleet() -> CoordinatorState:
    """4,096 agents that wait for a hundred commands."""
    bus = Coordinator("0.0")
    status = AgentStatus(ready=True, engine="sglang 0.5.23", generating=True, tokenizer="present")
    hello = bus.state.members["0.0"].hello
    members = {
        f"{replica}.0": Member(
            peer=f"{replica}.0/a",
            hello=replace(hello, identity=Identity(replica=replica, node_rank=0), host=f"node-{replica:04}.cluster"),
            state="live",
            fresh=False,
            status=status,
        )
        for replica in range(AGENTS)
    }
    bus.state = replace(bus.state, members=members)
    for _ in range(100):
        bus.issue(PAUSE)
    return bus.state


FLEET = fleet_status(large_fleet(), 0, "/runs/run.db", {})


def sent(reply: wire.Reply) -> list[wire.Downward | wire.Reply]:
    bodies = wire.encode_reply(reply)
    assert all(len(body) < wire.MAX_BYTES - 512 for body in bodies)
    return [wire.decode_downward(body) for body in bodies]


def test_a_large_status_is_sent_in_parts_and_is_whole_again() -> None:
    assert len(FLEET.agents) == AGENTS
    assert len(FLEET.open) == OPEN_MAX + 1 and FLEET.open[-1] == "36 more commands"
    assert all(len(line.waits_for) == WAITS_FOR_MAX for line in FLEET.agents)
    replies = sent(FLEET)
    parts = [reply for reply in replies if isinstance(reply, wire.ReplyPart)]
    assert 1 < len(parts) == len(replies) < 20
    assert [part.left for part in parts] == sorted((part.left for part in parts), reverse=True) and parts[-1].left == 0
    assert wire.join_parts([part.part for part in parts]) == FLEET


def test_a_large_report_is_sent_in_parts_and_is_whole_again() -> None:
    outcome = Failed(ErrorKind.ENGINE_ERROR, "It burns. " * 20)
    outcomes = tuple(AgentOutcome(agent=f"{replica}.0", conclusion=outcome) for replica in range(AGENTS))
    report = Report(seq=1, origin=1, command=PAUSE, outcomes=outcomes)
    parts = [reply.part for reply in sent(report) if isinstance(reply, wire.ReplyPart)]
    assert len(parts) > 1 and wire.join_parts(parts) == report


def test_a_large_report_of_a_sync_is_sent_in_parts_and_is_whole_again() -> None:
    outcomes = tuple(AgentOutcome(agent=f"{replica}.0", conclusion=Acted(calls=("load",))) for replica in range(AGENTS))
    phases = (
        Report(
            seq=1,
            origin=1,
            command=WeightSync(phase="prepare", version=3, source=Checkpoint("step_3")),
            outcomes=outcomes,
        ),
        Report(seq=2, origin=1, command=WeightSync(phase="load", version=3), outcomes=outcomes),
        Report(seq=3, origin=1, command=WeightSync(phase="abort", version=3), outcomes=()),
    )
    report = SyncReport(version=3, status="aborted", loaded=(), quarantined=(), phases=phases)
    parts = [reply for reply in sent(report) if isinstance(reply, wire.ReplyPart)]
    assert len(parts) > 3 and [part.left == 0 for part in parts] == [False] * (len(parts) - 1) + [True]
    assert wire.join_parts([part.part for part in parts]) == report


def test_a_reply_of_which_one_part_is_too_large_is_refused_with_its_size() -> None:
    too_large = AgentOutcome(agent="0.0", conclusion=Acted(calls=("x" * 199,) * 2000))
    (refused,) = sent(Report(seq=1, origin=1, command=PAUSE, outcomes=(too_large,) * 2))
    assert isinstance(refused, wire.RequestRejected) and "the reply takes 8" in refused.reason


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_operator_gets_the_status_of_thousands(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(*_: object) -> Generator[None, None, FleetStatus]:
        yield
        return FLEET

    monkeypatch.setattr(turns, "status_steps", steps)
    async with Bus("tcp://127.0.0.1:0", RunLog.open(tmp_path / "run.db"), context=context) as bus:
        found: FleetStatus = await ask_status(bus.address)
        assert found == FLEET
        shown = await anyio.to_thread.run_sync(
            CliRunner(env={"COLUMNS": "250"}).invoke, cli, ["status", "--bus", bus.address]
        )
        assert shown.exit_code == 0 and "node-4095.cluster" in shown.output and "node-0000" in shown.output
