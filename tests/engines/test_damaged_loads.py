"""A load that an engine carries out with other bytes than were meant, and says nothing: no digest was announced.

Each of three replicas has a copy of the checkpoints of its own. One byte of replica 1's copy is flipped once its agent
has checked the files, right before the engine reads them. The engines' own checksums show it before the commit.
"""

from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import anyio
import pytest

from controlplane import ControlPlane
from controlplane.machine.events import SyncRequested
from schemas.commands import Checkpoint
from schemas.events import CheckSource, Load
from schemas.identity import Digests
from schemas.outcomes import Acted, ErrorKind
from schemas.reports import SyncReport
from schemas.safetensors.format import find_tensors
from schemas.safetensors.manifest import build_manifest
from tests.engines.models import save_model, save_weights, weights
from tests.engines.reports import BUS, conclusions, failed
from tests.engines.servers import AgentProcess, EngineServer, Proxy
from tests.engines.tiny_fleet import TinyFleet, model
from tests.engines.vllm_fleet import UNI, UNI_ENVIRONMENT
from workers.engines.checkpoint import Taken
from workers.engines.tiny.model import save

REPLICAS = (0, 1, 2)
PROVEN = "model.embed_tokens.weight"
PREPACKED = "model.layers.3.mlp.down_proj.weight"
"""On a CPU vLLM prepacks linear layers, and its checksums are of nothing there."""


def flip(directory: Path, tensor: str) -> None:
    """Flip one bit in the middle of a tensor."""
    place = find_tensors(directory)[tensor]
    with place.path.open("r+b") as file:
        file.seek(place.start + place.spec.nbytes // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


class DamagedFleet:
    """Three servers of one kind, each with an agent that has checkpoints of its own."""

    def __init__(self, kind: str, folder: Path, open_: ExitStack) -> None:
        self.kind, self.folder, self.version = kind, folder, 0
        self.plane: ControlPlane = open_.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=BUS, checkpoints=folder / "0")
        )
        options, variables = (UNI, UNI_ENVIRONMENT) if kind == "vllm" else ((), {})
        for replica in REPLICAS:
            save_model(folder / str(replica) / "a", 1)
            save_weights(folder / str(replica) / "b", weights(2))
        self.servers = [
            open_.enter_context(EngineServer(kind, folder / str(replica) / "a", folder, *options, variables=variables))
            for replica in REPLICAS
        ]
        self.proxies = [open_.enter_context(Proxy(server.port)) for server in self.servers]
        for server in self.servers:
            server.wait_up("/health" if kind == "vllm" else "/server_info")
        for replica, proxy in enumerate(self.proxies):
            own = ("--checkpoints", str(folder / str(replica)), "--digests", "always")
            place = (self.plane.address, folder, f"{replica}.0", 1)
            open_.enter_context(AgentProcess(*place, "--engine", kind, "--url", proxy.url, *own))
        self.plane.wait_for_agents(3, timeout=300).wait()

    def sync(self, path: str) -> SyncReport:
        self.version += 1
        return self.plane.sync_weights(self.version, Checkpoint(path), timeout=60).wait()

    def damages(self, path: str, tensor: str) -> None:
        """Have replica 1 read other bytes in its next load than its agent has checked."""
        route = "/collective_rpc" if self.kind == "vllm" else "/update_weights_from_disk"
        self.proxies[1].on[route] = lambda: flip(self.folder / "1" / path, tensor)


@pytest.fixture(
    params=[
        pytest.param("vllm", marks=pytest.mark.engine_vllm),
        pytest.param("sglang", marks=pytest.mark.engine_sglang),
    ]
)
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DamagedFleet]:
    with ExitStack() as open_:
        yield DamagedFleet(request.param, tmp_path, open_)


@pytest.mark.timeout(600)
def test_one_flipped_byte_after_the_check_is_found_before_the_commit(damaged: DamagedFleet) -> None:
    whole = damaged.sync("b")
    assert (whole.status, whole.loaded) == ("committed", REPLICAS)
    digests = {load.digest for load in conclusions(whole.phases[1]).values() if isinstance(load, Acted)}
    assert len(digests) == 1 and str(*digests).startswith(f"{damaged.kind}:")
    damaged.sync("a").raise_unless_committed()

    damaged.damages("b", PROVEN)
    report = damaged.sync("b")
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 2), (1,))
    assert failed(report.phases[1], "1.0").error is ErrorKind.DIGEST_MISMATCH
    tokens = [damaged.servers[replica].complete() for replica in (0, 2)]
    assert tokens[0] == tokens[1]

    save_weights(damaged.folder / "1" / "b", weights(2))
    assert damaged.sync("b").loaded == REPLICAS, "the next sync is its way back"
    assert damaged.servers[1].complete() == tokens[0]

    damaged.damages("a", PREPACKED)
    blind = damaged.sync("a")
    assert blind.quarantined == (() if damaged.kind == "vllm" else (1,)), "docs/engines.md says so"


# --- tiny -------------------------------------------------------------------------------------------------------------


class TinyReplicas(TinyFleet):
    """Each has a checkpoint root of its own."""

    def root(self, replica: int) -> Path:
        return self.folder / str(replica)

    def damages(self, replica: int) -> None:
        """Have a replica read other bytes in its next load than it has checked."""
        engine = self.engines[replica]
        checked = engine._directory

        def damaging(call: CheckSource | Load) -> Taken:
            found = checked(call)
            if isinstance(call, Load):
                flip(found.whole, next(iter(find_tensors(found.whole))))
                engine._directory = checked  # type: ignore[method-assign]
            return found

        engine._directory = damaging  # type: ignore[method-assign]

    async def sync(self, version: int, digests: Digests) -> SyncReport:
        manifest = build_manifest(self.root(0) / f"v{version}", content=digests == "announced")
        with anyio.fail_after(60):
            return await self.bus.sync(
                SyncRequested(version=version, source=Checkpoint(f"v{version}"), manifest=manifest, timeout_ms=20_000)
            )


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize(
    ("digests", "replicas", "error"),
    [
        ("always", 3, ErrorKind.DIGEST_MISMATCH),
        ("always", 2, ErrorKind.DIGEST_MISMATCH),
        ("announced", 3, ErrorKind.SOURCE_REFUSED),
        ("announced", 2, ErrorKind.SOURCE_REFUSED),
        ("never", 3, None),
    ],
)
async def test_a_tiny_engine_with_other_bytes_is_found_where_a_digest_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digests: Digests, replicas: int, error: ErrorKind | None
) -> None:
    for replica in range(replicas):
        for version in (1, 2, 3):
            save(model(version), tmp_path / str(replica) / f"v{version}")
    monkeypatch.setattr(TinyReplicas, "digests", digests)
    everyone = tuple(range(replicas))
    async with TinyReplicas.of_two(tmp_path) as fleet, AsyncExitStack() as more:
        for replica in everyone[2:]:
            await more.enter_async_context(fleet.replica(replica))
        assert (await fleet.sync(1, digests)).loaded == everyone
        fleet.damages(1)
        report = await fleet.sync(2, digests)
        if error is None:
            assert report.loaded == everyone
            return
        assert failed(report.phases[1], "1.0").error is error
        most = replicas == 3
        assert (report.status, report.quarantined) == (("committed", (1,)) if most else ("aborted", ()))
        assert await fleet.generates_on(0) == (2 if most else 1)
        assert await fleet.generates_on(1, 0.5 if most else 10) == (None if most else 1)
        assert (await fleet.sync(3, digests)).loaded == everyone, "the next sync is its way back"
        assert await fleet.generates_on(1) == 3
