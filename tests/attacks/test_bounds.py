"""Numbers and sizes beyond their bounds, over real sockets: they are refused by name, and the fleet goes on."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from msgspec import msgpack

from controlplane.bus.bus import Bus
from controlplane.bus.operator import submit
from controlplane.cli.__main__ import cli
from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.events import SyncRequested
from controlplane.machine.profiling import ranks_absent
from controlplane.record.log import RunLog
from schemas import wire
from schemas.commands import Broadcast, Checkpoint, ProfileCommand, ProfilePlan, Target
from schemas.config import AgentConfig, BusConfig
from schemas.errors import CommandError, ConfigError
from schemas.identity import GPUS_PER_NODE_MAX, NODES_MAX, REPLICAS_MAX, TIME_MAX_MS, Identity
from schemas.profiler.config import ProfilerConfig
from schemas.transport.sockets import Context, agent_dealer
from tests.unit.small_bus import FLUSH, PAUSE, PRIMARY, Engine, running
from workers.agent import Agent

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, agent_timeout_ms=2_000, retransmit_ms=50)
ALL = Target()


@asynccontextmanager
async def one_agent(folder: Path, context: Context) -> AsyncIterator[tuple[Bus, Agent]]:
    log = RunLog.open(folder / "run.db")
    async with (
        Bus("tcp://127.0.0.1:0", log, QUICK, context=context) as bus,
        running(bus.address, context, Engine(), folder, PRIMARY) as agent,
    ):
        await reached(bus, lambda state: any(member.state == "live" for member in state.members.values()))
        yield bus, agent
        report = await bus.publish(FLUSH, ALL, 10_000)
        assert report.acted == ("0.0",), "the fleet goes on"
        assert agent.state.seq == report.seq == bus.state.seq


async def reached(bus: Bus, holds: Callable[[CoordinatorState], bool]) -> None:
    with anyio.fail_after(20):
        await bus.wait_until(holds)


async def ask(bus: Bus, context: Context, request: dict[str, Any]) -> object:
    """The reply to an operator's request that this project's own code would not send."""
    async with agent_dealer(context, bus.address) as dealer:
        with anyio.fail_after(10):
            await dealer.send([wire.encode_header(0), wire.encode(request)])
            _, body = wire.parse_frames(await dealer.recv())
    return wire.decode_downward(body)


@pytest.mark.parametrize("timeout_ms", [TIME_MAX_MS + 1, 10**16, 2**31, 2**53, 2**63 - 1, 2**64 - 1, 0, -1])
async def test_a_timeout_beyond_its_bounds_is_refused_and_the_fleet_goes_on(
    tmp_path: Path, context: Context, timeout_ms: Any
) -> None:
    async with one_agent(tmp_path, context) as (bus, _):
        with pytest.raises(
            CommandError, match=rf"Expected `int` .*timeout_ms`, which is {timeout_ms}\. Nothing was sent"
        ):
            bus.publish(PAUSE, ALL, timeout_ms)
        with pytest.raises(ConfigError, match="must be between"):
            await submit(bus.address, PAUSE, ALL, timeout_ms / 1000)
        wanted = {"type": "submit", "command": msgpack.decode(wire.encode(PAUSE)), "target": {}}
        reply = await ask(bus, context, {**wanted, "timeout_ms": timeout_ms})
        assert isinstance(reply, wire.RequestRejected) and "timeout_ms" in reply.reason
        assert bus.state.seq == 1


@pytest.mark.parametrize("replicas", [{REPLICAS_MAX}, {2**63 - 1}, {-1}, set(range(100_000))])
async def test_a_target_on_the_command_line_is_refused_before_it_is_sent(replicas: set[int]) -> None:
    with pytest.raises((ConfigError, CommandError), match=r"target.replicas|of at most 261,120. Nothing was sent"):
        await submit("tcp://127.0.0.1:1", PAUSE, Target(replicas=frozenset(replicas)), 1.0)


@pytest.mark.parametrize("timeout", ["1e13", "inf", "nan", "-1", "604801"])
def test_a_timeout_on_the_command_line_is_refused(timeout: str) -> None:
    for command in ("pause", "status"):
        result = CliRunner().invoke(cli, [command, "--bus", "tcp://127.0.0.1:1", "--timeout", timeout])
        assert result.exit_code == 2 or isinstance(result.exception, ConfigError)


async def test_a_timeout_at_its_bound_is_published_and_answered(tmp_path: Path, context: Context) -> None:
    async with one_agent(tmp_path, context) as (bus, _):
        with anyio.fail_after(10):
            assert (await bus.publish(PAUSE, ALL, TIME_MAX_MS)).acted == ("0.0",)
            assert (await submit(bus.address, FLUSH, ALL, TIME_MAX_MS / 1000)).acted == ("0.0",)


@pytest.mark.parametrize(
    ("command", "target"),
    [
        (PAUSE, Target(replicas=frozenset(range(100_000)))),
        (ProfileCommand(action="start", step=1, plan=ProfilePlan(ranks=frozenset(range(100_000)))), ALL),
        (ProfileCommand(action="start", step=1, roles={f"r{i}": ProfilePlan() for i in range(20_000)}), ALL),
    ],
    ids=["target", "ranks", "roles"],
)
async def test_a_record_that_outgrows_a_message_is_refused_with_its_size(
    tmp_path: Path, context: Context, command: Any, target: Target
) -> None:
    async with one_agent(tmp_path, context) as (bus, _):
        with pytest.raises(CommandError, match=r"takes [\d,]+ bytes, of at most 65,536; nothing was published"):
            await bus.publish(command, target, 10_000)
        assert bus.state.seq == 1


async def test_a_sync_whose_record_outgrows_a_message_is_refused_with_its_size(
    tmp_path: Path, context: Context
) -> None:
    many = tuple(range(1, 100_000))  # a target that names every known replica means all of them, and is none
    wide = Broadcast(host="h", port=1, group="g", replicas=many)
    async with one_agent(tmp_path, context) as (bus, _):
        for source, target in ((wide, ALL), (Checkpoint("v1"), Target(replicas=frozenset(many)))):
            with pytest.raises(CommandError, match=r"takes [\d,]+ bytes, of at most 65,536; nothing was published"):
                await bus.sync(SyncRequested(version=1, source=source, manifest=None, target=target, timeout_ms=10_000))
        assert bus.state.seq == 1 and bus.state.sync is None


async def test_the_largest_record_reaches_an_agent_live_and_as_a_resend(tmp_path: Path, context: Context) -> None:
    """64 KB of ranks and 64 KB of targets, to an agent that hears them and to one whose commands are resent."""
    ranks, replicas = frozenset(range(21_600)), frozenset(range(21_700))
    command = ProfileCommand(action="check", step=1, plan=ProfilePlan(ranks=ranks))
    assert 60_000 < len(wire.encode(command)) <= wire.MAX_COMMAND_BYTES
    async with one_agent(tmp_path, context) as (bus, agent):
        report = await bus.publish(command, Target(replicas=replicas), 10_000)
        assert report.acted == ("0.0",)
        record = bus.state.history[-1][0]
        assert len(wire.encode(wire.Replay(records=(record,)))) < wire.MAX_BYTES - 1024
        assert agent.malformed == 0


@pytest.mark.parametrize(
    "claim",
    [
        {"gpus_per_node": 2**60},
        {"gpus_per_node": GPUS_PER_NODE_MAX + 1},
        {"nnodes": 2**60},
        {"nnodes": NODES_MAX + 1},
        {"replica": REPLICAS_MAX},
        {"replica": 2**63 - 1, "nnodes": NODES_MAX},
        {"replica": -1},
    ],
)
async def test_a_hello_beyond_the_bounds_is_malformed(tmp_path: Path, context: Context, claim: dict[str, int]) -> None:
    identity: dict[str, Any] = {"replica": 5, "node_rank": 0, "nnodes": 1, "gpus_per_node": 1, **claim}
    hello = {"type": "hello", "identity": identity, "incarnation": "a", "journal": "j", "host": "h", "pid": 1}
    async with one_agent(tmp_path, context) as (bus, _):
        async with agent_dealer(context, bus.address) as dealer:
            await dealer.send([wire.encode_header(0), wire.encode(hello)])
            with anyio.fail_after(10):
                while not bus.inbox.malformed:
                    await anyio.lowlevel.checkpoint()
        assert bus.state.members.keys() == {"0.0"}
    with pytest.raises(ConfigError):
        Agent(bus=bus.address, identity=Identity(**identity), engine=Engine(), state_dir=tmp_path)


def test_the_largest_replicas_cost_nothing_to_look_up() -> None:
    largest = [
        Identity(replica=replica, node_rank=0, nnodes=NODES_MAX, gpus_per_node=GPUS_PER_NODE_MAX)
        for replica in range(REPLICAS_MAX - 4096, REPLICAS_MAX)
    ]
    first = largest[0].global_ranks.start
    config = ProfilerConfig(plan=ProfilePlan(enabled=True, ranks=frozenset({first, first - 1, 3})))
    assert ranks_absent(config, largest) == {first - 1, 3}


@pytest.mark.parametrize(
    "settings",
    [
        {"heartbeat_ms": 2**60},
        {"lease_ms": TIME_MAX_MS + 1},
        {"history": 10**9},
        {"queue": 0},
        {"head_interval_ms": 1e300},
    ],
)
def test_settings_beyond_their_bounds_are_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    from controlplane.plane import ControlPlane

    with pytest.raises(ConfigError, match=next(iter(settings))):
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=BusConfig(**settings))
    with pytest.raises(ConfigError, match="batch"):
        Agent(
            bus="tcp://127.0.0.1:1",
            identity=PRIMARY,
            engine=Engine(),
            state_dir=tmp_path,
            config=AgentConfig(batch=10**9),
        )
