"""A bus with keys, agents at work on it, and peers that it should not let in."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from controlplane.bus.bus import Bus
from controlplane.bus.key_folder import KeyFolder
from controlplane.record.log import RunLog
from schemas.commands import EngineCommand
from schemas.config import AgentConfig, BusConfig
from schemas.fault_plan import parse_plan
from schemas.identity import Identity
from schemas.transport.handshakes import DialledSocket
from schemas.transport.keys import KeyPair, KeySource, PeerKeys
from tests.unit.small_bus import Engine
from workers.agent import Agent
from workers.faults import FaultInjector

ANYWHERE = "tcp://0.0.0.0:0"
HERE = "tcp://127.0.0.1:0"
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=2_000, retransmit_ms=200)
HASTY = AgentConfig(hello_retry_ms=20, observe_ms=50)
FLUSH = EngineCommand(operation="flush")
NOBODY = "it does not know it, or it was revoked"


@asynccontextmanager
async def bus_of(folder: KeyFolder | None, log: Path, address: str = ANYWHERE, **options: Any) -> AsyncIterator[Bus]:
    async with Bus(address, RunLog.open(log / "run.db"), QUICK, keys=folder, **options) as bus:
        yield bus


def reach(bus: Bus) -> str:
    """The address of a bus on 0.0.0.0, as a peer dials it."""
    return bus.address.replace("0.0.0.0", "127.0.0.1")


def stranger(folder: KeyFolder) -> PeerKeys:
    """Well-made keys that nobody allowed."""
    return PeerKeys(name="stranger", pair=KeyPair.generate(), server=folder.server_pair().public)


def source(keys: PeerKeys | Path | None) -> KeySource | None:
    return KeySource.find(keys) if keys is not None else None


async def first(dealer: DialledSocket) -> str:
    """Why the first handshake failed; empty if it did not."""
    with anyio.fail_after(20):
        refused = await dealer.refusal()
    return refused.reason if refused is not None else ""


@asynccontextmanager
async def agent_of(
    bus: str, keys: PeerKeys | Path | None, state: Path, replica: int = 0, engine: Engine | None = None, plan: str = ""
) -> AsyncIterator[tuple[Agent, list[BaseException]]]:
    """An agent at work, and the errors that ended it."""
    ended: list[BaseException] = []

    async def run(agent: Agent) -> None:
        try:
            await agent.run()
        except Exception as error:
            ended.append(error)

    identity, engine = Identity(replica=replica, node_rank=0), engine or Engine()
    options: dict[str, Any] = {"state_dir": state, "config": HASTY, "keys": keys}
    faults = FaultInjector(parse_plan(plan), identity) if plan else None
    async with (
        Agent(bus=bus, identity=identity, engine=engine, faults=faults, **options) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run, agent)
        yield agent, ended
        tasks.cancel_scope.cancel()


def live(bus: Bus) -> list[str]:
    return sorted(name for name, member in bus.state.members.items() if member.state == "live")


def following(bus: Bus) -> list[str]:
    """Agents that have reported the position of the bus. None of them still waits for a snapshot, which would supersede
    a command that is issued before it.
    """
    return [name for name in live(bus) if bus.state.members[name].seq == bus.state.seq]
