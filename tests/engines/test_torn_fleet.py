"""The fleet that today's trainers leave behind, on real engines: one replica loads the new weights, the other can't.

The other one is quarantined: paused, on its old version, named in the report, and answering nobody until a sync repairs
it. The first one serves the new version. A bus, two agents, two engines, and clients that really generate.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from controlplane.bus.bus import Bus
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint, Target
from schemas.config import AgentConfig, BusConfig
from schemas.errors import CommandFailed, EngineError
from schemas.identity import Identity
from schemas.reports import SyncReport
from schemas.safetensors.manifest import build_manifest
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, save, weights
from workers.engines.tiny.server import TinyClient

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)


def model(version: int, config: TinyConfig | None = None) -> TinyModel:
    return TinyModel(config or TinyConfig(), seed=version)


class Fleet:
    """Two replicas of one node, each with its own checkpoint root, so that they can get different files."""

    def __init__(self, folder: Path, bus: Bus) -> None:
        self.folder, self.bus = folder, bus

    def root(self, replica: int) -> Path:
        return self.folder / f"checkpoints-{replica}"

    def front(self, replica: int) -> str:
        return f"ipc://{self.folder}/engine-{replica}"

    @asynccontextmanager
    async def replica(self, replica: int) -> AsyncIterator[Agent]:
        identity = Identity(replica=replica, node_rank=0)
        engine = TinyEngine(
            identity,
            checkpoints=self.root(replica),
            traces=self.folder / "traces",
            serve=self.front(replica),
            seed=100 + replica,
        )
        config = AgentConfig(hello_retry_ms=20, observe_ms=20)
        state = self.folder / "state"
        async with (
            Agent(bus=self.bus.address, identity=identity, engine=engine, state_dir=state, config=config) as agent,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(agent.run)
            with anyio.fail_after(30):
                await agent.wait_ready()
            yield agent
            tasks.cancel_scope.cancel()

    async def sync(self, version: int, *, quorum: int | None = None) -> SyncReport:
        path = f"v{version}"
        manifest = build_manifest(self.root(0) / path, content=True)
        with anyio.fail_after(60):
            return await self.bus.sync(
                version,
                Checkpoint(path),
                manifest,
                in_flight="abort",
                quorum=quorum,
                target=Target(),
                timeout_ms=20_000,
            )

    def write(self, version: int, *replicas: int, config: TinyConfig | None = None) -> None:
        for replica in replicas:
            save(model(version, config), self.root(replica) / f"v{version}")

    def held(self, replica: int) -> tuple[int, str]:
        held = TinyClient(self.front(replica), timeout_s=10).weights()
        return held.version, held.digest

    async def generates_on(self, replica: int, timeout_s: float) -> int | None:
        """Return the version that the replica generates on; None if it does not answer."""
        client = TinyClient(self.front(replica), timeout_s=timeout_s)
        try:
            (completion,) = await to_thread.run_sync(client.generate, [[1]], 4)
        except EngineError:
            return None
        (version,) = set(completion.versions)
        return version


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus("tcp://127.0.0.1:0", RunLog.open(folder / "run.db"), QUICK))
        made = Fleet(folder, bus)
        made.write(1, 0, 1)
        for replica in (0, 1):
            await stack.enter_async_context(made.replica(replica))
        with anyio.fail_after(20):
            await bus.wait_until(lambda state: [member.state for member in state.members.values()] == ["live", "live"])
        assert (await made.sync(1)).status == "committed"
        yield made


def spoil(fleet: Fleet, how: str) -> None:
    """Write version 2, good for replica 0 and damaged for replica 1."""
    fleet.write(2, 0)
    if how == "other weights":  # same names and shapes: only the bytes differ
        save(model(7), fleet.root(1) / "v2")
    elif how == "another shape":
        fleet.write(2, 1, config=TinyConfig(hidden=32))
    elif how == "cut off":
        fleet.write(2, 1)
        file = fleet.root(1) / "v2" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("how", ["missing", "cut off", "another shape", "other weights"])
async def test_a_replica_that_cannot_load_is_quarantined_until_the_next_sync(tmp_path: Path, how: str) -> None:
    async with fleet(tmp_path) as torn:
        spoil(torn, how)
        report = await torn.sync(2, quorum=1)
        assert (report.status, report.loaded, report.quarantined) == ("committed", (0,), (1,))
        with pytest.raises(CommandFailed, match="quarantined: replica 1"):
            report.raise_for_failures()

        assert torn.held(0) == (2, digest(weights(model(2))))
        assert torn.held(1) == (1, digest(weights(model(1))))
        assert await torn.generates_on(0, 10) == 2
        assert await torn.generates_on(1, 0.5) is None

        torn.write(3, 0, 1)
        healed = await torn.sync(3)
        assert (healed.status, healed.loaded, healed.quarantined) == ("committed", (0, 1), ())
        healed.raise_for_failures()
        for replica in (0, 1):
            assert torn.held(replica) == (3, digest(weights(model(3))))
            assert await torn.generates_on(replica, 10) == 3


async def test_without_a_quorum_the_whole_fleet_keeps_its_version(tmp_path: Path) -> None:
    async with fleet(tmp_path) as torn:
        spoil(torn, "another shape")
        report = await torn.sync(2)
        assert (report.status, report.loaded, report.quarantined) == ("aborted", (), ())
        for replica in (0, 1):
            assert torn.held(replica) == (1, digest(weights(model(1))))
            assert await torn.generates_on(replica, 10) == 1
