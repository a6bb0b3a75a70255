"""A replica that is cut off from a living bus, and generates on, while the fleet commits other weights."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane.bus.bus import Bus
from controlplane.record.invariants import verify
from controlplane.record.log import RunLog
from schemas.carriers.sockets import Context
from schemas.commands import Checkpoint
from schemas.errors import CommandFailed
from schemas.events import Call, Load, Observation, Returned
from schemas.identity import Identity
from schemas.reports import SyncReport
from tests.attacks.proxy import HOST, proxied
from tests.unit.small_bus import Engine, running
from tests.unit.test_bus import ALL, live, opened, reached
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

NEAR, FAR = Identity(replica=0, node_rank=0), Identity(replica=1, node_rank=0)


class LoadingEngine(Engine):
    """One that holds the version that it loaded last."""

    version = 0

    async def observe(self) -> Observation:
        return replace(await super().observe(), version=self.version)

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        paused = not self.generating
        returned = await super().perform(call, timeout_s)
        if isinstance(call, Load):
            assert paused, "loaded while it generates"
            self.version, self.generating = call.version, False
        return returned


async def sync(bus: Bus, version: int) -> SyncReport:
    source = Checkpoint(f"v{version}")
    return await bus.sync(version, source, None, in_flight="abort", quorum=1, target=ALL, timeout_ms=10_000)


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.attacks)])
async def test_a_replica_out_of_reach_is_named_in_every_report_until_it_is_back(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    for name, value in {"SILENT_MS": 300, "ANSWER_S": 0.5, "BUSY_S": 0.1}.items():
        monkeypatch.setattr(f"workers.link.link.{name}", value)
    monkeypatch.setattr("schemas.carriers.sockets.HANDSHAKE_MS", 300)
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
                    assert (far.version, far.generating) == (old, True), "nobody can stop it from afar"
                    assert bus.status().unproven == (1,) and bus.status().agents[0].agent == "1.0"
                proxy.silent.clear()
                await until(lambda newest=old + 2: far.version == newest and far.generating)  # type: ignore[misc]
            await until(lambda: bus.status().unproven == ())
    found = list(verify(RunLog.read(tmp_path / "run.db")))
    assert {violation.invariant for violation in found} == {"I12"} and {found.agents for found in found} == {("1.0",)}
