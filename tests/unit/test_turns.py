"""The turns of a bus: what one takes and leaves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio
import pytest

from controlplane.bus import bus_loop, callers
from controlplane.bus.bus import Bus
from controlplane.machine.events import CoordinatorEvent, Issued
from controlplane.record.log import RunLog
from schemas import wire
from schemas.agent_status import AgentStatus
from schemas.commands import Target
from schemas.config import BusConfig
from schemas.identity import Identity
from schemas.transport.async_socket import AsyncZmqSocket
from schemas.transport.sockets import Context, agent_dealer
from tests.unit.small_bus import FLUSH, PRIMARY
from tests.waiting import until

pytestmark = pytest.mark.anyio

SELDOM = 3_600_000


@asynccontextmanager
async def opened(
    folder: Path, context: Context, durability: Literal["os", "disk"] = "os", address: str = "tcp://127.0.0.1:0"
) -> AsyncIterator[Bus]:
    """A bus that nothing wakes by itself."""
    config = BusConfig(head_interval_ms=SELDOM, heartbeat_ms=SELDOM, agent_timeout_ms=SELDOM, durability=durability)
    async with Bus(address, RunLog.open(folder / "run.db"), config, context=context) as bus:
        yield bus


async def say_hello(dealer: AsyncZmqSocket, place: Identity) -> None:
    """Say it, and wait for the welcome."""
    hello = wire.Hello(identity=place, incarnation="a", journal="j", host="h", pid=1)
    await dealer.send([wire.encode_header(0), wire.encode(hello)])
    with anyio.fail_after(20):
        _, body = wire.parse_frames(await dealer.recv())
    assert isinstance(wire.decode_downward(body), wire.Welcome)


@pytest.mark.one_loop
async def test_a_bus_tells_a_large_fleet_to_send_heartbeats_less_often(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BusConfig(heartbeat_ms=100, agent_timeout_ms=SELDOM)
    async with (
        Bus("tcp://127.0.0.1:0", RunLog.open(tmp_path / "run.db"), config, context=context) as bus,
        agent_dealer(context, bus.address) as dealer,
    ):
        await say_hello(dealer, PRIMARY)
        told = []
        for signs in (1_000, 4):
            monkeypatch.setattr(bus_loop, "HEARTBEATS_PER_S", signs)
            await dealer.send([wire.encode_header(1), wire.encode(wire.TimeRequest(sent_ns=1))])
            with anyio.fail_after(20):
                reply = wire.decode_downward(wire.parse_frames(await dealer.recv())[1])
            assert isinstance(reply, wire.TimeReply)
            told.append(reply.heartbeat_ms)
    assert told == [None, 250]


@pytest.mark.parametrize(("limit", "most", "in_one_turn"), [("EVENTS_MAX", 4, 4), ("BYTES_MAX", 1, 1)])
@pytest.mark.parametrize("durability", ["os", "disk"])
async def test_what_one_turn_leaves_is_taken_by_the_next_and_nothing_has_to_wake_it(
    tmp_path: Path,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    durability: Literal["os", "disk"],
    limit: str,
    most: int,
    in_one_turn: int,
) -> None:
    monkeypatch.setattr(bus_loop, limit, most)
    async with opened(tmp_path, context, durability) as bus, agent_dealer(context, bus.address) as dealer:
        await say_hello(dealer, PRIMARY)
        taken: list[int] = []
        take_events = bus.inbox.take_events

        def counted() -> list[CoordinatorEvent]:
            events = take_events()
            taken.append(len(events))
            return events

        monkeypatch.setattr(bus.inbox, "take_events", counted)
        for queued in range(100):
            assert dealer.send_nowait([wire.encode_header(1), wire.encode(AgentStatus(ready=True, queued=queued))])
        await until(lambda: getattr(bus.state.members["0.0"].status, "queued", 0) == 99)
        assert max(taken) <= in_one_turn and sum(taken) == 100


@pytest.mark.parametrize("durability", ["os", "disk"])
@pytest.mark.parametrize("ended", ["by the commands", "by the bus"])
async def test_orders_that_one_turn_leaves_are_taken_by_the_next_in_order(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch, durability: Literal["os", "disk"], ended: str
) -> None:
    monkeypatch.setattr(callers, "ORDERS_MAX", 3)
    async with opened(tmp_path, context, durability) as bus:
        tickets = [bus.publish(FLUSH, Target(), timeout_ms=60_000) for _ in range(10)]
        if ended == "by the commands":
            with anyio.fail_after(20):
                assert [(await ticket).seq for ticket in tickets] == list(range(2, 12))
    entries = [entry.kind for entry in RunLog.read(tmp_path / "run.db")]
    assert entries.count("issued") == 10 and entries[-1] == "closed"


def test_a_large_fleet_has_fewer_orders_in_a_turn(tmp_path: Path) -> None:
    waiting = callers.Callers(limit=1000, reply=lambda *_: None)
    for number in range(100):
        waiting.queue(Issued(at_us=0, at_ns=0, ticket=number + 1, command=FLUSH, target=Target(), timeout_ms=1))
    taken = [len(waiting.take_orders(agents)) for agents in (4096, 10_000, 1024, 64, 0)]
    assert taken == [1, 1, 4, 64, 30] and not waiting.has_orders
