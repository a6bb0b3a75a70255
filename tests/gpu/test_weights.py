"""Weights in the memory of a GPU: loaded, compared, released to others and taken back, by the embedded engine."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch
from torch import Tensor

from controlplane import CheckpointSync, ControlPlane
from controlplane.tickets import Ticket
from schemas.commands import Checkpoint
from schemas.config import BusConfig
from schemas.events import CheckSource, Load, Pause, Resume
from schemas.identity import Identity
from schemas.reports import Report
from schemas.safetensors.manifest import build_manifest
from tests.gpu.engine_process import EngineProcess, config_of, started, used
from workers.conformance.engine_under_test import Setup, opened
from workers.conformance.kit import Kit
from workers.conformance.server_client import ServerClient
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, log_probs, save, weights

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.one_loop]

DEVICE = "cuda"
PLACE = Identity(replica=0, node_rank=0)
WIDE = config_of(1536)
"""450 MB of weights."""
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)
SLACK = 64 << 20
"""What others on this GPU may take or give meanwhile, and what the allocator rounds."""


def nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@asynccontextmanager
async def tiny(folder: Path, config: TinyConfig) -> AsyncIterator[TinyEngine]:
    engine = TinyEngine(PLACE, checkpoints=folder, traces=folder / "traces", seed=7, config=config, device=DEVICE)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


def held(engine: TinyEngine) -> dict[str, Tensor]:
    assert engine._scheduler is not None
    return weights(engine._scheduler.model)


async def generated(engine: TinyEngine, prompt: list[int]) -> list[int]:
    return [token async for token in engine.generate(prompt, 8)]


def test_a_digest_is_of_the_bytes_wherever_they_are(tmp_path: Path) -> None:
    """The trainer's model is on the GPU, its checkpoint on a disk, and what another engine holds on the CPU."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = TinyModel(TinyConfig(), seed=3).to(DEVICE, dtype)
        folder = tmp_path / str(dtype)
        save(model, folder)
        on_the_gpu = digest(weights(model))
        assert {tensor.device.type for tensor in weights(model).values()} == {DEVICE}
        assert on_the_gpu == build_manifest(folder, content=True).content == digest(weights(model.cpu()))


async def test_the_embedded_engine_conforms_on_a_gpu(tmp_path: Path) -> None:
    for seed in (1, 2):
        save(TinyModel(TinyConfig(), seed), tmp_path / str(seed))
    setup = Setup(root=tmp_path, checkpoints=("1", "2"), traces=tmp_path / "traces", silence_s=0.1)
    engine = TinyEngine(PLACE, checkpoints=tmp_path, traces=tmp_path / "traces", device=DEVICE)
    async with opened(engine, 1), anyio.create_task_group() as tasks:
        rows = await Kit(engine, engine, setup, tasks).run(lambda row: None)
        tasks.cancel_scope.cancel()
    assert {row.verdict for row in rows} == {"passed"}, rows


async def test_it_generates_what_the_trainer_would_on_the_cpu(tmp_path: Path) -> None:
    async with tiny(tmp_path, TinyConfig()) as engine:
        await engine.perform(Resume(), 10)
        tokens = await generated(engine, [5])
    model = TinyModel(TinyConfig(), seed=7)
    likely = log_probs(model, torch.tensor([[5, *tokens]]))[0]
    best = model(torch.tensor([[5, *tokens[:-1]]]))[0].log_softmax(-1).max(-1).values[0]
    assert likely.tolist() == pytest.approx(best.tolist(), abs=1e-3)


async def test_a_load_puts_the_bytes_of_a_checkpoint_on_the_gpu(
    tmp_path: Path, measured: Callable[[str], None]
) -> None:
    model = TinyModel(WIDE, seed=1)
    save(model, tmp_path / "v1")
    manifest = build_manifest(tmp_path / "v1", content=True)
    before, size = torch.cuda.memory_allocated(), nbytes(weights(model))
    async with tiny(tmp_path, WIDE) as engine:
        times = [time.perf_counter()]
        source = Checkpoint("v1")
        for call in (CheckSource(source, manifest, 1), Pause("abort"), Load(1, source, manifest)):
            await engine.perform(call, 60)
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        assert {tensor.device.type for tensor in held(engine).values()} == {DEVICE}
        assert digest(held(engine)) == manifest.content == (await engine.observe()).digest
        assert size <= torch.cuda.memory_allocated() - before < 1.5 * size  # the weights of before are gone
    measured(
        f"load of {size >> 20} MiB from a checkpoint, with its digest: {1000 * (times[3] - times[2]):.0f} ms while "
        f"generation is paused; {1000 * (times[1] - times[0]):.0f} ms to check it before"
    )


async def test_the_kit_reads_the_memory_of_this_gpu() -> None:
    """`rolloutctl conform` asks `nvidia-smi`, since a server's memory can't be asked from outside."""
    client = ServerClient("vllm", "http://127.0.0.1:1")
    before = await client.memory_bytes()
    taken = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    after = await client.memory_bytes()
    await client.close()
    if before is None or after is None:
        pytest.skip("nvidia-smi is not on the PATH, or does not answer")
    assert after - before >= taken.nbytes - SLACK


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[ControlPlane, EngineProcess]]:
    """A trainer's plane, and an engine in a process of its own on the same GPU, as in hybrid mode."""
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as plane,
        started(plane.address, tmp_path, DEVICE, WIDE.hidden) as engine,
    ):
        plane.wait_for_agents(1, timeout=60).wait()
        yield plane, engine


def timed(ticket: Ticket[Report]) -> float:
    """Return the seconds that a command took."""
    start = time.perf_counter()
    ticket.wait().raise_for_failures()
    return time.perf_counter() - start


def test_sleep_gives_memory_to_the_trainer_and_wake_brings_the_same_bytes_back(
    shared: tuple[ControlPlane, EngineProcess], measured: Callable[[str], None]
) -> None:
    plane, engine = shared
    size = nbytes(weights(TinyModel(WIDE).to("meta")))
    plane.resume().wait().raise_for_failures()
    tokens, held_before = engine.generate(), engine.ask("digest")
    plane.pause().wait().raise_for_failures()
    awake = used()
    cache_s = timed(plane.sleep(["kv_cache"]))
    assert 0 <= awake - used() < size
    weights_s = timed(plane.sleep(["weights"]))
    freed = awake - used()
    assert freed >= size
    timed(plane.wake(["kv_cache"]))
    assert awake - used() >= size
    wake_s = timed(plane.wake(["weights"]))
    assert abs(awake - used()) < SLACK
    assert engine.ask("digest") == held_before
    plane.resume().wait().raise_for_failures()
    assert engine.generate() == tokens
    measured(
        f"sleep of {size >> 20} MiB of weights: {freed >> 20} MiB less in use on the GPU, {1000 * weights_s:.0f} ms by "
        f"the bus ({1000 * cache_s:.0f} ms for the cache alone); wake {1000 * wake_s:.0f} ms"
    )


def test_a_trainer_on_the_gpu_syncs_an_engine_of_another_process_on_it(
    shared: tuple[ControlPlane, EngineProcess], tmp_path: Path, measured: Callable[[str], None]
) -> None:
    plane, engine = shared
    model = TinyModel(WIDE, seed=1).to(DEVICE)
    size = nbytes(weights(model))
    sync = CheckpointSync(plane, keep=1)
    for version in (1, 2):
        with torch.no_grad():
            model.head.weight.mul_(2)
        start = time.perf_counter()
        report = sync.publish(f"v{version}", lambda folder: save(model, folder))
        took = time.perf_counter() - start
        report.raise_for_failures()
        assert engine.ask("digest") == digest(weights(model)) and len(engine.generate()) == 8
    for command in (plane.pause, plane.sleep, plane.wake, plane.resume):
        command().wait().raise_for_failures()
    assert engine.ask("digest") == digest(weights(model)) and len(engine.generate()) == 8
    measured(
        f"a sync of {size >> 20} MiB from a trainer's GPU tensors, by a checkpoint in {tmp_path.parts[1]}: {took:.2f} s"
    )
