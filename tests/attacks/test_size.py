"""Attacks by size: a fleet that has to come back at once, and peers that make up places in it."""

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from controlplane.analysis.invariants import verify
from controlplane.record.log import RunLog
from schemas import wire
from schemas.identity import Identity, agent_of
from tests.running import started

TRAINER = """
import sys
from controlplane import ControlPlane
from schemas.config import BusConfig
from tests.waiting import wait_until
config = BusConfig(agents_max=int(sys.argv[4]), agent_timeout_ms=2000, heartbeat_ms=500)
with ControlPlane(sys.argv[1], log=sys.argv[2], config=config) as plane:
    print(plane.address, flush=True)
    plane.wait_for_agents(int(sys.argv[3]), 200).wait()
    report = plane.flush().wait()
    report.raise_for_failures()
    print(len(report.acted), flush=True)
    for line in sys.stdin:
        if line.strip() == "flush":
            plane.flush().wait().raise_for_failures()
        elif line.strip() == "wait":
            wait_until(lambda: len(plane.bus.state.members) == 1)
        print(len(plane.bus.state.members), len(plane.bus.state.desired), flush=True)
"""
AGENTS = """
import sys
from pathlib import Path
import anyio, zmq
from schemas.config import AgentConfig
from schemas.identity import Identity
from tests.unit.small_bus import Engine
from workers.agent import Agent

async def serve(number, context):
    engine, place = Engine(), Identity(replica=number, node_rank=0)
    state = Path(sys.argv[4])
    config = AgentConfig(hello_retry_ms=100)
    async with Agent(
        bus=sys.argv[1], identity=place, engine=engine, state_dir=state, context=context, config=config
    ) as agent:
        await agent.run()

async def main():
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    async with anyio.create_task_group() as tasks:
        for number in range(int(sys.argv[2]), int(sys.argv[3])):
            tasks.start_soon(serve, number, context)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()

anyio.run(main)
"""


def shortly_and(full: int, short: int) -> pytest.MarkDecorator:
    """Run a test with a few in the suite, and with many among the attacks."""
    return pytest.mark.parametrize("count", [short, pytest.param(full, marks=pytest.mark.attacks)])


@contextmanager
def trainer(
    address: str, log: Path, agents: int, agents_max: int = 8192
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A trainer's process and its address. Its next line says how many agents acted once all are there."""
    with started("-c", TRAINER, address, log, agents, agents_max) as process:
        yield process, line(process)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline().strip()
    assert text, "the process has died"
    return text


def tell(process: subprocess.Popen[str], word: str) -> tuple[int, ...]:
    """Let the trainer do something; returns the number of its places and of its desired states."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    return tuple(map(int, line(process).split()))


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(100) == 0


@shortly_and(256, short=16)
def test_a_fleet_is_whole_again_after_its_bus_was_killed(tmp_path: Path, count: int) -> None:
    log = tmp_path / "run.db"
    with ExitStack() as fleet:
        with trainer("tcp://127.0.0.1:0", log, count) as (first, address):
            halves = ((0, count // 2), (count // 2, count))
            agents = [fleet.enter_context(started("-c", AGENTS, address, *half, tmp_path)) for half in halves]
            assert line(first) == str(count)
            first.send_signal(signal.SIGKILL)
            first.wait()
        with trainer(address, log, count) as (second, _):
            assert line(second) == str(count)
            for process in agents:
                end(process)
            end(second)
    entries = list(RunLog.read(log))
    assert list(verify(entries)) == []
    joins = Counter(
        (agent_of(event.peer), event.peer.split("/")[1])  # type: ignore[union-attr]
        for event in (entry.typed_event() for entry in entries if entry.kind == "join")
    )
    assert len(joins) == count and min(joins.values()) >= 2  # each incarnation joined both lives of the bus


@shortly_and(4000, short=64)
def test_made_up_places_are_limited_named_nowhere_and_forgotten(tmp_path: Path, count: int) -> None:
    limit = count // 2
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 8)
    with trainer("tcp://127.0.0.1:0", tmp_path / "run.db", 1, agents_max=limit) as (process, address):
        with started("-c", AGENTS, address, 0, 1, tmp_path) as agent:
            assert line(process) == "1"
            dealers = [say_hello(context, address, number) for number in range(1, count)]
            answers = Counter(type(wire.decode_downward(dealer.recv_multipart()[1])) for dealer in dealers)
            assert answers.total() == count - 1 and answers.keys() == {wire.Welcome, wire.Rejoin}
            places, desired = tell(process, "flush")  # in which no agent that never joined is missing
            assert places <= limit and desired == 1
            for dealer in dealers:
                dealer.close(0)
            assert tell(process, "wait") == (1, 1)
            end(agent)
        end(process)
    context.destroy(0)


def say_hello(context: zmq.Context[zmq.Socket[bytes]], address: str, number: int) -> zmq.Socket[bytes]:
    """Say hello from a free place."""
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.RCVTIMEO, 60_000)
    dealer.connect(address)
    hello = wire.Hello(
        identity=Identity(replica=number, node_rank=0), incarnation=f"i{number}", journal="j", host="h", pid=1
    )
    dealer.send_multipart([wire.encode_header(0), wire.encode(hello)])
    return dealer
