"""Connections that look alive and carry nothing, between a real agent and a real bus."""

import logging
from pathlib import Path

import anyio
import pytest

from schemas.config import BusConfig
from schemas.transport.sockets import Context
from tests.attacks.proxy import HOST, Proxy, proxied
from tests.attacks.test_transport import trainer
from tests.unit.small_bus import FLUSH, PRIMARY, Engine, running
from tests.unit.test_bus import ALL, QUICK, live, opened, outcomes, reached
from tests.waiting import until
from workers.link.connection import Connection

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

HEALED_S = 15
"""Time in which an agent has joined again, whatever broke."""
LENGTHS = [pytest.param(QUICK, id="quick"), pytest.param(BusConfig(), id="as shipped", marks=pytest.mark.attacks)]


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of a quick bus loses patience quickly, too."""
    if request.node.callspec.params.get("config") is QUICK:
        monkeypatch.setattr("workers.link.link.SILENT_MS", 300)
        monkeypatch.setattr("workers.link.connection.ANSWER_S", 0.5)
        monkeypatch.setattr("workers.link.connection.BUSY_S", 0.1)
        monkeypatch.setattr("schemas.transport.sockets.HANDSHAKE_MS", 300)


@pytest.mark.parametrize("silent", ["control", "publish", "both"])
@pytest.mark.parametrize("config", LENGTHS)
async def test_an_agent_with_a_half_open_connection_joins_again_soon_after_the_heal(
    tmp_path: Path, context: Context, config: BusConfig, silent: str
) -> None:
    async with opened(tmp_path, context, config=config) as bus:
        control, publish = int(bus.address.rpartition(":")[2]), bus.state.settings.publish_port
        assert publish is not None
        cut = {"control": {control}, "publish": {publish}, "both": {control, publish}}[silent]
        address = f"tcp://{HOST}:{control}"
        async with proxied(control, publish) as proxy, running(address, context, Engine(), tmp_path, PRIMARY):
            await reached(bus, lambda state: live(state) == {"0.0"})
            assert proxy.accepted == {control: 1, publish: 1}
            before = bus.state.members["0.0"].peer
            proxy.silent |= cut
            await until(lambda: any(proxy.accepted[port] > 1 for port in cut))  # and the new connection is silent, too
            proxy.silent.clear()
            proxy.carried.clear()
            with anyio.fail_after(HEALED_S):
                await until(lambda: _carries(proxy, control, publish))
                if control in cut:
                    await bus.wait_until(lambda state: state.members["0.0"].peer != before)
                await bus.wait_until(lambda state: live(state) == {"0.0"})
            assert outcomes(await bus.publish(FLUSH, ALL, 10_000)) == {"0.0": "acted"}


@pytest.mark.parametrize(("hold_ms", "silent_ms"), [(3_000, 0), pytest.param(12_000, 3_000, marks=pytest.mark.attacks)])
async def test_a_trainer_that_holds_the_gil_longer_than_agents_wait_keeps_its_fleet(
    tmp_path: Path,
    context: Context,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    hold_ms: int,
    silent_ms: int,
) -> None:
    asked: list[Connection] = []
    original = Connection._try_second_connection

    async def ask_elsewhere(self: Connection) -> None:
        asked.append(self)
        await original(self)

    monkeypatch.setattr("workers.link.link.SILENT_MS", silent_ms)
    monkeypatch.setattr(Connection, "_try_second_connection", ask_elsewhere)
    caplog.set_level(logging.INFO)
    with trainer(tmp_path) as victim:
        async with running(f"tcp://127.0.0.1:{victim.control}", context, Engine(), tmp_path, PRIMARY) as agent:
            with anyio.fail_after(20):
                await agent.wait_until(lambda state: state.joined)
            victim.hold(hold_ms)
            assert await anyio.to_thread.run_sync(victim.line) == "alive"
            assert asked
            assert "joining again" not in caplog.text and "saying hello again" not in caplog.text
        victim.close()


def _carries(proxy: Proxy, *ports: int) -> bool:
    return all(proxy.carried[port] for port in ports)
