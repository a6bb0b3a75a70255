"""LoRA adapters on the tiny engine: what requests get, and a fleet of two that a trainer syncs them to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch
from anyio import to_thread

from controlplane import ControlPlane
from schemas.commands import AdapterVersion, Checkpoint
from schemas.config import AgentConfig, BusConfig
from schemas.errors import CheckpointError, EngineError, RefusedError
from schemas.events import CheckAdapter, Flush, Load, LoadAdapter, Resume, UnloadAdapter
from schemas.identity import Identity
from schemas.safetensors.manifest import build_manifest
from tests.engines.tiny_lora import PROMPT, expected, lora
from tests.waiting import until
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save, save_adapter
from workers.engines.tiny.server import Completion, TinyClient

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)


def write(folder: Path, number: int) -> AdapterVersion:
    save_adapter(lora(number), 1.0, folder / f"adapters/{number}")
    return AdapterVersion(name="policy", version=number, path=f"adapters/{number}")


@asynccontextmanager
async def running(
    folder: Path, replica: int = 0, places: int | None = None
) -> AsyncIterator[tuple[TinyEngine, TinyClient]]:
    front, identity = f"ipc://{folder}/front-{replica}", Identity(replica=replica, node_rank=0)
    engine = TinyEngine(identity, checkpoints=folder, traces=folder / "traces", serve=front, seed=7, places=places)
    await engine.open()
    try:
        yield engine, TinyClient(front, timeout_s=20)
    finally:
        await engine.close()


def greedy(client: TinyClient, model: str = "") -> Completion:
    return client.generate([PROMPT], 8, 0.0, model)[0]


# --- the engine -------------------------------------------------------------------------------------------------------


async def test_each_request_gets_the_adapter_that_it_names_and_others_the_base(tmp_path: Path) -> None:
    base = TinyModel(TinyConfig(), 7)
    versions = [write(tmp_path, number) for number in (1, 2)]
    async with running(tmp_path) as (engine, client):
        await engine.perform(Resume(), 10)
        for version in versions:
            await engine.perform(CheckAdapter(version), 10)
            await engine.perform(LoadAdapter(version), 10)
        assert (await engine.observe()).adapters == {"policy-v1": "adapters/1", "policy-v2": "adapters/2"}
        for model, number in (("policy-v1", 1), ("policy-v2", 2), ("", None), ("policy-v1", 1)):
            directory = tmp_path / f"adapters/{number}" if number else None
            assert greedy(client, model).tokens == expected(base, directory), model
        with pytest.raises(EngineError, match="no adapter policy-v9"):
            greedy(client, "policy-v9")


async def test_an_adapter_follows_its_base(tmp_path: Path) -> None:
    version = write(tmp_path, 1)
    save(TinyModel(TinyConfig(), 8), tmp_path / "v1")
    async with running(tmp_path) as (engine, client):
        await engine.perform(LoadAdapter(version), 10)
        await engine.perform(Load(1, Checkpoint("v1"), build_manifest(tmp_path / "v1", content=True)), 10)
        await engine.perform(Flush(), 10)
        await engine.perform(Resume(), 10)
        assert greedy(client, "policy-v1").tokens == expected(TinyModel(TinyConfig(), 8), tmp_path / "adapters/1")


def requests(client: TinyClient) -> int:
    seen = client.describe()
    return (seen.running or 0) + (seen.waiting or 0)


async def test_a_version_is_not_unloaded_under_a_request_nor_loaded_twice(tmp_path: Path) -> None:
    version = write(tmp_path, 1)
    async with running(tmp_path) as (engine, client), anyio.create_task_group() as tasks:
        await engine.perform(LoadAdapter(version), 10)
        with pytest.raises(RefusedError, match="loaded already"):
            await engine.perform(LoadAdapter(version), 10)
        tasks.start_soon(to_thread.run_sync, greedy, client, "policy-v1")  # waits: the engine is paused
        await until(lambda: client.describe().waiting == 1)
        with pytest.raises(RefusedError, match="1 requests run on it"):
            await engine.perform(UnloadAdapter("policy-v1", waited=True), 10)
        await engine.perform(Resume(), 10)
        await until(lambda: not requests(client))
        await engine.perform(UnloadAdapter("policy-v1", waited=False), 10)
        await engine.perform(UnloadAdapter("policy-v1", waited=False), 10)
        assert (await engine.observe()).adapters == {}


async def test_files_that_do_not_fit_the_model_are_refused_and_the_engine_serves_on(tmp_path: Path) -> None:
    wrong = {"blocks.0.qkv": (torch.zeros(2, 8), torch.zeros(8, 2))}
    save_adapter(wrong, 1.0, tmp_path / "adapters/1")
    version = AdapterVersion(name="policy", version=1, path="adapters/1")
    async with running(tmp_path) as (engine, client):
        for call in (CheckAdapter(version), LoadAdapter(version)):
            with pytest.raises(CheckpointError, match="blocks.0.qkv"):
                await engine.perform(call, 10)
        await engine.perform(Resume(), 10)
        assert greedy(client).tokens == expected(TinyModel(TinyConfig(), 7), None)


def test_an_adapter_is_not_saved_over_another(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(FileExistsError, match="no adapter is ever replaced"):
        write(tmp_path, 1)


# --- a fleet ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def replica(
    folder: Path, plane: ControlPlane, number: int, places: int | None = None
) -> AsyncIterator[TinyClient]:
    """An agent with its engine, once it is ready."""
    async with running(folder, number, places) as (engine, client):
        agent = Agent(
            bus=plane.address,
            identity=Identity(replica=number, node_rank=0),
            engine=engine,
            state_dir=folder / "state",
            config=AgentConfig(hello_retry_ms=20, observe_ms=20),
        )
        async with agent, anyio.create_task_group() as tasks:
            tasks.start_soon(agent.run)
            with anyio.fail_after(30):
                await agent.wait_ready()
            yield client
            tasks.cancel_scope.cancel()


async def test_versions_are_committed_on_all_replicas_and_one_that_is_launched_again_has_them_before_it_is_ready(
    tmp_path: Path,
) -> None:
    base = TinyModel(TinyConfig(), 7)
    plain = expected(base, None)
    a, b = (tmp_path / write(tmp_path, number).path for number in (1, 2))
    save_adapter(lora(1), 1.0, tmp_path / "adapters/3")  # the bytes of the first one again
    async with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as plane,
        replica(tmp_path, plane, 0) as first,
    ):
        async with replica(tmp_path, plane, 1) as second:
            for path, directory in (("adapters/1", a), ("adapters/2", b), ("adapters/3", a)):
                report = await plane.sync_adapter("policy", None, path)
                assert (report.status, report.loaded) == ("committed", (0, 1))
                served = plane.adapters()["policy"]
                assert served.replicas == (0, 1)
                for client in (first, second):
                    assert greedy(client, served.model).tokens == expected(base, directory)
                    assert greedy(client).tokens == plain
        async with replica(tmp_path, plane, 1) as again:
            assert again.describe().adapters == {"policy-v2": "adapters/2", "policy-v3": "adapters/3"}
            assert greedy(again, "policy-v3").tokens == expected(base, a)
        await plane.drop_adapter("policy")
        await until(lambda: not first.describe().adapters)


async def test_a_full_engine_unloads_what_is_no_longer_wanted_before_it_refuses_a_sync(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write(tmp_path, number)
    async with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as plane,
        replica(tmp_path, plane, 0, places=2) as client,
        anyio.create_task_group() as tasks,
    ):
        assert (await plane.sync_adapter("policy", 1, "adapters/1", keep=1)).loaded == (0,)
        await plane.pause("keep")
        tasks.start_soon(to_thread.run_sync, greedy, client, "policy-v1")
        await until(lambda: client.describe().waiting == 1)
        assert (await plane.sync_adapter("policy", 2, "adapters/2", keep=1)).loaded == (0,)
        assert client.describe().adapters == {"policy-v1": "adapters/1", "policy-v2": "adapters/2"}, "it is still used"
        await plane.resume()  # the agent goes on waiting: it would unload by itself in five seconds
        report = await plane.sync_adapter("policy", 3, "adapters/3", keep=1)
        assert (report.status, report.loaded) == ("committed", (0,)), report
        assert "policy-v1" not in (client.describe().adapters or {}) and not requests(client)
