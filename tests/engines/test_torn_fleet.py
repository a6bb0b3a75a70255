"""The fleet that today's trainers leave behind, on real engines: one replica loads the new weights, the other can't.

The other one is quarantined: paused, on its old version, named in the report, and without requests until a sync repairs
it. The first one serves the new version. A bus, two agents, two engines, and clients that really generate.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from controlplane.machine.events import SyncRequested
from schemas.commands import Checkpoint
from schemas.errors import CommandFailed
from schemas.reports import SyncReport
from schemas.safetensors.manifest import build_manifest
from tests.engines.tiny_fleet import TinyFleet, model
from workers.engines.tiny.model import TinyConfig, digest, save, weights

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


class Fleet(TinyFleet):
    """Each replica has a checkpoint root of its own, so that they can get different files."""

    def root(self, replica: int) -> Path:
        return self.folder / f"checkpoints-{replica}"

    async def sync(self, version: int, *, quorum: int | None = None) -> SyncReport:
        path = f"v{version}"
        manifest = build_manifest(self.root(0) / path, content=True)
        with anyio.fail_after(60):
            return await self.bus.sync(
                SyncRequested(
                    version=version, source=Checkpoint(path), manifest=manifest, quorum=quorum, timeout_ms=20_000
                )
            )

    def write(self, version: int, *replicas: int, config: TinyConfig | None = None) -> None:
        for replica in replicas:
            save(model(version, config), self.root(replica) / f"v{version}")

    def weights_of(self, replica: int) -> tuple[int | None, str | None]:
        held = self.held(replica)
        return held.version, held.digest


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[Fleet]:
    async with Fleet.of_two(folder) as made:
        made.write(1, 0, 1)
        (await made.sync(1)).raise_unless_committed()
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

        assert torn.weights_of(0) == (2, digest(weights(model(2))))
        assert torn.weights_of(1) == (1, digest(weights(model(1))))
        assert await torn.generates_on(0, 10) == 2
        assert await torn.generates_on(1, 0.5) is None

        torn.write(3, 0, 1)
        healed = await torn.sync(3)
        assert (healed.status, healed.loaded, healed.quarantined) == ("committed", (0, 1), ())
        healed.raise_for_failures()
        for replica in (0, 1):
            assert torn.weights_of(replica) == (3, digest(weights(model(3))))
            assert await torn.generates_on(replica, 10) == 3


async def test_without_a_quorum_the_whole_fleet_keeps_its_version(tmp_path: Path) -> None:
    async with fleet(tmp_path) as torn:
        spoil(torn, "another shape")
        report = await torn.sync(2)
        assert (report.status, report.loaded, report.quarantined) == ("aborted", (), ())
        for replica in (0, 1):
            assert torn.weights_of(replica) == (1, digest(weights(model(1))))
            assert await torn.generates_on(replica, 10) == 1
