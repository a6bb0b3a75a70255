"""A replica that is cut off from a living bus, and generates on, while the fleet commits other weights. And many agents
that fall silent at once.
"""

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from msgspec.structs import replace

from controlplane import ControlPlane
from controlplane.analysis.invariants import verify
from controlplane.bus.bus import Bus
from controlplane.machine.events import SyncRequested
from controlplane.record.log import RunLog
from schemas import wire
from schemas.commands import Checkpoint
from schemas.config import BusConfig
from schemas.errors import CommandFailed
from schemas.events import Call, Load, Returned
from schemas.identity import Identity
from schemas.reports import SyncReport
from schemas.transport.sockets import Context, agent_dealer
from tests.attacks.proxy import HOST, proxied
from tests.processes.test_agent_process import Node
from tests.unit.small_bus import Engine, running
from tests.unit.test_bus import ALL, QUICK, live, opened, reached
from tests.waiting import until
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.engines.tiny.server import TinyClient

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

NEAR, FAR = Identity(replica=0, node_rank=0), Identity(replica=1, node_rank=0)


class LoadingEngine(Engine):
    """One that must be paused for a load."""

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        assert not (isinstance(call, Load) and self.generating), "loaded while it generates"
        return await super().perform(call, timeout_s)


async def sync(bus: Bus, version: int) -> SyncReport:
    source = Checkpoint(f"v{version}")
    return await bus.sync(
        SyncRequested(version=version, source=source, manifest=None, quorum=1, target=ALL, timeout_ms=10_000)
    )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"link.SILENT_MS": 300, "connection.ANSWER_S": 0.5, "connection.BUSY_S": 0.1}.items():
        monkeypatch.setattr(f"workers.link.{name}", value)
    monkeypatch.setattr("schemas.transport.sockets.HANDSHAKE_MS", 300)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.attacks)])
async def test_a_replica_out_of_reach_is_named_in_every_report_until_it_is_back(
    tmp_path: Path, context: Context, rounds: int
) -> None:
    near, far = LoadingEngine(), LoadingEngine()
    async with opened(tmp_path, context) as bus:
        control, publish = int(bus.address.rpartition(":")[2]), bus.state.settings.publish_port
        assert publish is not None
        async with (
            proxied(control, publish) as proxy,
            running(bus.address, context, near, tmp_path / "near", NEAR),
            running(f"tcp://{HOST}:{control}", context, far, tmp_path / "far", FAR),
        ):
            for old in range(1, 3 * rounds, 3):
                await reached(bus, lambda state: live(state) == {"0.0", "1.0"})
                together = await sync(bus, old)
                together.raise_for_failures()
                assert (together.loaded, far.version) == ((0, 1), old)
                proxy.silent |= {control, publish}
                await reached(bus, lambda state: live(state) == {"0.0"})
                for version in (old + 1, old + 2):
                    report = await sync(bus, version)
                    assert (report.status, report.loaded, report.unproven) == ("committed", (0,), (1,))
                    with pytest.raises(CommandFailed, match="unproven: replica 1"):
                        report.raise_for_failures()
                    assert (far.version, far.generating) == (old, True), "nothing can stop it from afar"
                    assert bus.status().unproven == (1,) and bus.status().agents[0].agent == "1.0"
                proxy.silent.clear()
                await until(lambda newest=old + 2: far.version == newest and far.generating)  # type: ignore[misc]
            await until(lambda: bus.status().unproven == ())
    found = list(verify(RunLog.read(tmp_path / "run.db")))
    assert {violation.invariant for violation in found} == {"I12"} and {found.agents for found in found} == {("1.0",)}


@pytest.mark.usefixtures("quick")
async def test_a_replica_that_may_not_serve_without_its_bus_waits_paused_for_one(
    tmp_path: Path, context: Context
) -> None:
    """`on_lost_bus="pause"`: cut off for longer than its lease, it serves neither the old version nor by itself."""
    near, far = LoadingEngine(), LoadingEngine()
    async with opened(tmp_path, context, config=replace(QUICK, lease_ms=600)) as bus:
        control, publish = int(bus.address.rpartition(":")[2]), bus.state.settings.publish_port
        assert publish is not None
        async with (
            proxied(control, publish) as proxy,
            running(bus.address, context, near, tmp_path / "near", NEAR),
            running(f"tcp://{HOST}:{control}", context, far, tmp_path / "far", FAR, on_lost_bus="pause") as agent,
        ):
            await reached(bus, lambda state: live(state) == {"0.0", "1.0"})
            (await sync(bus, 1)).raise_for_failures()
            proxy.silent |= {control, publish}
            await reached(bus, lambda state: live(state) == {"0.0"})
            await until(lambda: not far.generating)
            paused = len(far.calls)
            report = await sync(bus, 2)
            assert (report.status, report.loaded, report.unproven) == ("committed", (0,), (1,))
            heard_nothing = await agent.wait_until(lambda state: state.activity is None)
            assert (heard_nothing.bus_lost, far.generating, len(far.calls)) == (True, False, paused)
            proxy.silent.clear()
            await until(lambda: far.generating)
            assert [type(call).__name__ for call in far.calls[paused:]] == ["CheckSource", "Load", "Flush", "Resume"]
            assert far.version == 2
            await until(lambda: bus.status().unproven == ())
    assert list(verify(RunLog.read(tmp_path / "run.db"))) == []


@pytest.mark.attacks
async def test_requests_sent_to_a_replica_that_lost_its_bus_are_answered_by_newer_weights_only(tmp_path: Path) -> None:
    """The same with processes: `rolloutctl agent --on-lost-bus pause` with the tiny engine, behind a network that is
    cut.
    """
    config = BusConfig(head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=1000, retransmit_ms=200, lease_ms=2000)
    for version in (1, 2):
        save(TinyModel(TinyConfig(), seed=version), tmp_path / f"v{version}")
    async with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=config, checkpoints=tmp_path) as plane:
        control, publish = int(plane.address.rpartition(":")[2]), plane.bus.state.settings.publish_port
        assert publish is not None
        front = TinyClient(f"ipc://{tmp_path}/far")
        async with proxied(control, publish) as proxy:
            near = Node(plane.address, tmp_path, 0, 0)
            far = Node(f"tcp://{HOST}:{control}", tmp_path, 1, 0, "--serve", front.address, "--on-lost-bus", "pause")
            with near, far:
                await plane.wait_for_agents(2, timeout=60)
                (await plane.sync_weights(1, Checkpoint("v1"))).raise_for_failures()
                assert front.generate([[3]], 8)[0].versions == [1] * 8
                proxy.silent |= {control, publish}
                await until(lambda: "heard nothing from its bus" in far.output)
                report = await plane.sync_weights(2, Checkpoint("v2"), quorum=1)
                assert (report.loaded, report.unproven) == ((0,), (1,))
                completions = []
                async with anyio.create_task_group() as tasks:

                    async def ask() -> None:
                        completions.extend(await to_thread.run_sync(front.generate, [[3]], 8))

                    tasks.start_soon(ask)
                    with anyio.move_on_after(1):
                        await until(lambda: bool(completions))
                    assert completions == [], "it is paused"
                    proxy.silent.clear()
                assert completions[0].versions == [2] * 8
    assert list(verify(RunLog.read(tmp_path / "run.db"))) == []


async def test_agents_that_fall_silent_together_are_lost_a_few_in_each_turn(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.bus.inbox.LOST_MAX", 2)
    async with opened(tmp_path, context) as bus, AsyncExitStack() as dealers:
        for replica in range(5):
            identity = Identity(replica=replica, node_rank=0)
            hello = wire.Hello(identity=identity, incarnation="a", journal="j", host="h", pid=1)
            dealer = await dealers.enter_async_context(agent_dealer(context, bus.address))
            await dealer.send([wire.encode_header(0), wire.encode(hello)])
        await reached(bus, lambda state: len(state.members) == 5)
        await reached(bus, lambda state: not state.members)
        path = bus._log.path
    lost = [entry.typed_event() for entry in RunLog.read(path) if entry.kind == "lost"]
    turns = Counter(event.at_us for event in lost)  # type: ignore[union-attr]
    assert sum(turns.values()) == 5 and max(turns.values()) <= 2
