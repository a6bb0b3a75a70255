"""Deltas in a fleet of tiny engines, whose digest proves that what they hold is the whole checkpoint."""

from pathlib import Path

import anyio
import pytest
import safetensors.torch
import torch

from controlplane.machine.events import SyncRequested
from schemas.commands import Checkpoint, Target
from schemas.outcomes import ErrorKind
from schemas.reports import SyncReport
from schemas.safetensors.manifest import build_manifest
from tests.engines.deltas import took
from tests.engines.reports import failed
from tests.engines.tiny_fleet import TinyFleet, model
from workers.engines.tiny.model import digest, save, weights

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


class Fleet(TinyFleet):
    """Whose version n + 1 differs from version n in two tensors."""

    def save(self, version: int) -> None:
        """Write a version, and beside it what has changed in it."""
        changing, names = model(1), ("head.weight", "blocks.0.qkv.weight")
        with torch.no_grad():
            for name in names:
                weights(changing)[name].mul_(version)
        save(changing, self.folder / f"v{version}")
        (self.folder / f"v{version}-delta").mkdir()
        changed = {name: weights(changing)[name] for name in names}
        safetensors.torch.save_file(changed, self.folder / f"v{version}-delta" / "model.safetensors")

    async def sync(self, version: int, base: int = 0, *replicas: int, path: str = "") -> SyncReport:
        path = path or f"v{version}"
        source = Checkpoint(path, f"v{version}-delta", base) if base else Checkpoint(path)
        manifest = build_manifest(self.folder / path, content=True)
        target = Target(replicas=frozenset(replicas)) if replicas else Target()
        with anyio.fail_after(60):
            return await self.bus.sync(
                SyncRequested(version=version, source=source, manifest=manifest, target=target, timeout_ms=20_000)
            )


async def test_replicas_at_the_base_load_what_has_changed_and_the_others_everything(tmp_path: Path) -> None:
    async with Fleet.of_two(tmp_path) as fleet:
        for version in (1, 2, 3, 4):
            fleet.save(version)
        assert (await fleet.sync(1)).by_delta == ()
        async with fleet.replica(2) as late:
            with anyio.fail_after(30):
                await late.wait_ready()  # it has loaded version 1 by itself
            first = await fleet.sync(2, 1, 0, 2)
            assert (first.loaded, first.by_delta) == ((0, 2), (0, 2))
            second = await fleet.sync(3, 2)
            assert (second.loaded, second.by_delta) == ((0, 1, 2), (0, 2))
            assert took(second)["1.0"] == "whole: it takes no delta, or was not known to hold version 2"
            expected = build_manifest(tmp_path / "v3", content=True).content
            assert {fleet.held(replica).digest for replica in (0, 1, 2)} == {expected}
            assert [await fleet.generates_on(replica) for replica in (0, 1, 2)] == [3, 3, 3]
            assert (await fleet.sync(4, 3)).by_delta == (0, 1, 2)
        async with fleet.replica(2) as back:  # another engine in its place, with an agent that knows what it held
            with anyio.fail_after(30):
                await back.wait_ready()
            assert fleet.held(2).digest == build_manifest(tmp_path / "v4", content=True).content


async def test_a_delta_that_does_not_make_the_whole_of_its_base_is_refused_by_the_digest(tmp_path: Path) -> None:
    async with Fleet.of_two(tmp_path) as fleet:
        fleet.save(2)
        save(model(5), tmp_path / "v1")  # which differs from version 2 in more than the delta says
        assert (await fleet.sync(1)).loaded == (0, 1)
        report = await fleet.sync(2, 1)
        assert report.status == "aborted"
        assert failed(report.phases[1], "1.0").error is ErrorKind.SOURCE_REFUSED
        assert [await fleet.generates_on(replica) for replica in (0, 1)] == [1, 1]
        assert fleet.held(0).digest == digest(weights(model(5)))
        assert (await fleet.sync(2, path="v2")).loaded == (0, 1)  # the same weights, from the whole checkpoint
