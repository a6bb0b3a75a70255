"""Adapters on the tiny engine: what requests get. tests/trainers/test_gateway_adapters.py syncs them to a fleet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch
from anyio import to_thread

from schemas.commands import AdapterVersion, Checkpoint
from schemas.errors import CheckpointError, EngineError, RefusedError
from schemas.events import CheckAdapter, Flush, Load, LoadAdapter, Resume, UnloadAdapter
from schemas.identity import Identity
from schemas.safetensors.manifest import build_manifest
from tests.engines.tiny_lora import PROMPT, expected, lora
from tests.waiting import until
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save, save_adapter
from workers.engines.tiny.server import Completion, TinyClient

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]


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
