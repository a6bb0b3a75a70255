"""The status of the fleet is made in steps: the bus goes on in between, and who waits shares one."""

from collections.abc import Generator

import anyio
import pytest
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from bench.machines import Fleet
from controlplane.bus.statuses import Statuses
from controlplane.machine.status import LINES_AT_ONCE, finished, fleet_status, status_steps
from schemas import wire
from schemas.reports import FleetStatus
from tests.waiting import until

pytestmark = pytest.mark.anyio

AGENTS = 3 * LINES_AT_ONCE


def test_steps_lead_to_the_status_whatever_happens_in_between() -> None:
    fleet = Fleet(AGENTS)
    heard = dict.fromkeys(fleet.peers, 1_000)
    steps = status_steps(fleet.state, 5_000_000, "run.db", heard, {"1.0": 7})
    taken = 0
    for _ in range(4):
        next(steps)
        taken += 1
        heard[fleet.peers[-1]] = 6_000_000  # after the moment of the status
    status = finished(steps)
    assert taken == 4 and len(status.agents) == AGENTS
    lines = {line.agent: line for line in status.agents}
    assert lines[f"{AGENTS - 1}.0"].silent_ms == 0 and lines["1.0"].latency_us == 7
    assert replace(status, agents=()) == replace(fleet_status(fleet.state, 5_000_000, "run.db", heard), agents=())


async def test_who_asks_together_shares_a_status_and_who_asks_meanwhile_gets_the_next() -> None:
    sent = list[tuple[bytes, FleetStatus]]()
    begun = 0

    def steps() -> Generator[None, None, FleetStatus]:
        nonlocal begun
        begun += 1
        fleet = fleet_status(Fleet(1).state, 1, f"log {begun}", {})
        yield
        if begun == 1:
            statuses.ask(b"late", False)
        yield
        return fleet

    def send(connection: bytes, body: bytes) -> None:
        reply = wire.decode_downward(body)
        assert isinstance(reply, FleetStatus)
        sent.append((connection, reply))

    statuses = Statuses(steps, send)
    statuses.ask(b"first", False)
    statuses.ask(b"observer", True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(statuses.serve)
        await until(lambda: len(sent) == 3)
        tasks.cancel_scope.cancel()
    assert [(connection, reply.log, reply.read_only) for connection, reply in sent] == [
        (b"first", "log 1", False),
        (b"observer", "log 1", True),
        (b"late", "log 2", False),
    ]
    assert begun == 2


async def test_the_loop_goes_on_between_the_steps() -> None:
    order: list[str] = []

    def steps() -> Generator[None, None, FleetStatus]:
        for number in range(3):
            order.append(f"step {number}")
            yield
        return fleet_status(Fleet(1).state, 1, "log", {})

    async def another() -> None:
        for number in range(3):
            order.append(f"other {number}")
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Statuses(steps, lambda *_: None).made)
        tasks.start_soon(another)
    assert order.index("other 0") < order.index("step 1") and order.index("other 1") < order.index("step 2")
