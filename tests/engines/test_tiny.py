"""The tiny engine, each operation checked by its effect on what it really generates, holds and records."""

import json
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from msgspec.structs import replace

from schemas.commands import Checkpoint, ProfilePlan
from schemas.desired import ProfileSession
from schemas.errors import CheckpointError, EngineError
from schemas.events import (
    CheckSource,
    EngineCall,
    Flush,
    Load,
    Pause,
    Restore,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Identity, Operation, Tag
from schemas.safetensors.manifest import build_manifest
from tests.running import python
from workers.conformance.engine_under_test import Setup, opened
from workers.conformance.kit import Kit
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, save, weights
from workers.engines.tiny.scheduler import Scheduler
from workers.engines.tiny.server import Completion, TinyClient

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PRIMARY = Identity(replica=0, node_rank=0, nnodes=2)
SECOND = Identity(replica=0, node_rank=1, nnodes=2)
LONG = 60
"""Tokens of a completion that is still running when the next command arrives."""


class Bench:
    """An engine, a client of it, and threads for requests that run beside the test."""

    def __init__(self, engine: TinyEngine, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.engine, self.folder, self._pool = engine, folder, pool
        self.client = TinyClient(f"ipc://{folder}/front", timeout_s=20)

    async def do(self, *calls: EngineCall) -> Any:
        returned = None
        for call in calls:
            returned = await self.engine.perform(call, 10.0)
        return returned

    def begin(self, prompt: list[int], tokens: int, temperature: float = 0.0) -> Future[Completion]:
        """Generate in another thread."""
        return self._pool.submit(lambda: self.client.generate([prompt], tokens, temperature)[0])

    @property
    def scheduler(self) -> Scheduler:
        assert self.engine._scheduler is not None
        return self.engine._scheduler

    async def begin_long(self, prompt: list[int]) -> Future[Completion]:
        """Begin a long request, and wait for its first tokens."""
        scheduler = self.scheduler
        before = scheduler.forwards
        begun = self.begin(prompt, LONG)
        while scheduler.forwards < before + 3:
            await anyio.lowlevel.checkpoint()
        return begun

    def generate(self, prompt: list[int], tokens: int = 8, temperature: float = 0.0) -> Completion:
        return self.client.generate([prompt], tokens, temperature)[0]

    def save(self, version: int, model: TinyModel | None = None) -> Load:
        save(model or TinyModel(TinyConfig(), seed=version), self.folder / f"v{version}")
        return Load(version, Checkpoint(f"v{version}"), build_manifest(self.folder / f"v{version}", content=True))


@asynccontextmanager
async def tiny(folder: Path, identity: Identity = PRIMARY) -> AsyncIterator[Bench]:
    engine = TinyEngine(identity, checkpoints=folder, traces=folder / "traces", serve=f"ipc://{folder}/front", seed=7)
    with ThreadPoolExecutor(4) as pool:
        await engine.open()
        try:
            yield Bench(engine, folder, pool)
        finally:
            await engine.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """The engine of node rank 0, still paused."""
    async with tiny(tmp_path) as bench:
        yield bench


# --- launch -----------------------------------------------------------------------------------------------------------


async def test_it_starts_paused_and_describes_itself(bench: Bench) -> None:
    seen = await bench.engine.observe()
    assert (seen.tokenizer, seen.generating, seen.version) == ("present", False, 0)
    assert seen.operations == frozenset(Operation)
    assert seen.digest == digest(weights(TinyModel(TinyConfig(), seed=7)))
    waiting = bench.begin([1], 4)
    with pytest.raises(NotYet):
        waiting.result(0.3)
    await bench.do(Resume())
    assert len(waiting.result(20).tokens) == 4


async def test_it_computes_on_one_core_and_leaves_others_theirs(bench: Bench) -> None:
    before = torch.get_num_threads()
    assert bench.scheduler.run(torch.get_num_threads) == 1
    assert torch.get_num_threads() == before


async def test_each_launch_is_another_instance(tmp_path: Path) -> None:
    async with tiny(tmp_path) as first:
        instance = (await first.engine.observe()).instance
    async with tiny(tmp_path) as second:
        assert (await second.engine.observe()).instance != instance


async def test_a_higher_node_rank_has_no_tokenizer_and_nothing_to_call(tmp_path: Path) -> None:
    async with tiny(tmp_path, SECOND) as bench:
        seen = await bench.engine.observe()
        assert (seen.tokenizer, seen.operations) == ("absent", frozenset())
        with pytest.raises(EngineError, match="no engine to call"):
            await bench.do(Resume())


def test_importing_the_backend_and_the_client_loads_no_torch() -> None:
    code = "import sys, workers.engines.tiny.engine, workers.engines.tiny.server; assert 'torch' not in sys.modules"
    assert python("-c", code).returncode == 0


@pytest.mark.timeout(300)
async def test_it_conforms(tmp_path: Path) -> None:
    """The kit sees each operation by its effect; the other tests look at what is this engine's own."""
    for seed in (1, 2):
        save(TinyModel(TinyConfig(), seed), tmp_path / str(seed))
    setup = Setup(root=tmp_path, checkpoints=("1", "2"), traces=tmp_path / "traces", silence_s=0.1)
    engine = TinyEngine(PRIMARY, checkpoints=tmp_path, traces=tmp_path / "traces")
    async with opened(engine, 1), anyio.create_task_group() as tasks:
        rows = await Kit(engine, engine, setup, tasks).run(lambda row: None)
        tasks.cancel_scope.cancel()
    assert {row.verdict for row in rows} == {"passed"}, rows


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_not_saved_over_another(tmp_path: Path) -> None:
    save(TinyModel(TinyConfig(), seed=1), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(
        FileExistsError, match=r"/model\.safetensors is there already, and no checkpoint is ever replaced"
    ):
        save(TinyModel(TinyConfig(), seed=2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


async def test_a_load_reads_again_what_was_written_since_the_check(bench: Bench) -> None:
    load = bench.save(1)
    file = bench.folder / "v1" / "model.safetensors"
    await bench.do(CheckSource(load.source, load.manifest, load.version))
    file.unlink()
    save(TinyModel(TinyConfig(), seed=2), file.parent)
    with pytest.raises(CheckpointError, match="the right tensors with other values"):
        await bench.do(load)
    await bench.do(replace(load, manifest=None))
    assert digest(weights(bench.scheduler.model)) == digest(weights(TinyModel(TinyConfig(), seed=2)))


async def test_weights_without_a_digest_are_digested_when_it_is_asked_for(bench: Bench) -> None:
    await bench.do(replace(bench.save(1), manifest=None))
    assert (await bench.engine.observe()).digest is None
    assert bench.client.describe().digest == digest(weights(TinyModel(TinyConfig(), seed=1)))


async def test_it_samples_what_the_trainer_would(bench: Bench) -> None:
    import torch

    from workers.engines.tiny.model import log_probs

    await bench.do(Resume())
    drawn = bench.generate([5], 12, temperature=1.0)
    tokens = torch.tensor([[5, *drawn.tokens]])
    expected = log_probs(TinyModel(TinyConfig(), seed=7), tokens)[0].tolist()
    assert drawn.logprobs == pytest.approx(expected, abs=1e-4)
    assert drawn.versions == [0] * 12


# --- pausing ----------------------------------------------------------------------------------------------------------


async def test_pause_keep_freezes_requests_through_a_load(bench: Bench) -> None:
    """Partial rollouts of an async trainer need this: a completion with tokens of two versions, which it names."""
    load = bench.save(1)
    await bench.do(Resume())
    begun = await bench.begin_long([1])
    with pytest.raises(EngineError, match="flush was refused: 1 requests are running"):
        await bench.do(Flush())
    await bench.do(Pause("keep"), load, Flush(), Resume())
    done = begun.result(20)
    assert len(done.tokens) == LONG and done.finish_reason == "length"
    assert set(done.versions) == {0, 1} and sorted(done.versions) == done.versions
    old = done.versions.index(1)
    rest = bench.generate([1, *done.tokens[:old]], LONG - old)
    assert done.tokens[old:] == rest.tokens and set(rest.versions) == {1}  # of the new weights alone


async def test_a_frozen_request_outlives_the_release_of_its_cache(bench: Bench) -> None:
    await bench.do(Resume())
    tokens, cache = bench.generate([1], LONG).tokens, frozenset[Tag]({"kv_cache"})
    begun = await bench.begin_long([1])
    await bench.do(Pause("keep"), Sleep(cache), Wake(cache), Resume())
    assert begun.result(20).tokens == tokens


# --- memory -----------------------------------------------------------------------------------------------------------


async def test_calls_that_would_break_it_are_refused(bench: Bench) -> None:
    load, sleep = bench.save(1), Sleep(frozenset({"weights"}))
    await bench.do(Resume())
    for running in (load, sleep):
        with pytest.raises(EngineError, match="was refused: requests may run"):
            await bench.do(running)
    await bench.do(Pause("abort"), sleep)
    refused: dict[EngineCall, str] = {
        load: "the weights are asleep",
        sleep: "asleep already",
        Wake(frozenset({"kv_cache"})): "is awake",
        Resume(): "Wake it first",
    }
    for call, reason in refused.items():
        with pytest.raises(EngineError, match=reason):
            await bench.do(call)


# --- profiles ---------------------------------------------------------------------------------------------------------


def session(step: int) -> tuple[StartProfile, StopProfile]:
    opened, directory = ProfileSession(step, ProfilePlan()), f"global_step_{step}/replica_0"
    return StartProfile(opened, directory), StopProfile(opened, directory)


async def test_profiles_that_cannot_be_recorded_are_refused_with_a_reason(bench: Bench, tmp_path: Path) -> None:
    start, stop = session(1)
    with pytest.raises(EngineError, match="no profile to stop"):
        await bench.do(stop)
    await bench.do(start)
    with pytest.raises(EngineError, match="a second profile was refused"):
        await bench.do(session(2)[0])
    await bench.do(stop)
    taken = tmp_path / "traces" / "global_step_4" / "replica_0"
    taken.mkdir(parents=True)
    (taken / "somebody's.json").write_text("{}")
    with pytest.raises(EngineError, match="nothing is ever overwritten"):
        await bench.do(session(4)[0])
    assert not (await bench.engine.observe()).profiling


# --- its front end ----------------------------------------------------------------------------------------------------


async def test_requests_that_cannot_be_served_are_refused_with_a_reason(bench: Bench) -> None:
    await bench.do(Resume())
    for prompts, tokens, reason in (
        ([], 4, "at least one prompt"),
        ([[]], 4, "at least one prompt and one token"),
        ([[1], [1, 2]], 4, "of the same length"),
        ([[1]], 64, "have room for 64"),
        ([[99]], 4, r"must be 0\.\.31"),
    ):
        with pytest.raises(EngineError, match=reason):
            bench.client.generate(prompts, tokens)


async def test_prompts_in_one_request_do_not_affect_each_other(bench: Bench) -> None:
    await bench.do(Resume())
    prompts = [[number % 32] for number in range(100)]
    together = [completion.tokens for completion in bench.client.generate(prompts, 6, temperature=0)]
    alone = [bench.generate(prompt, 6).tokens for prompt in prompts[:5]]
    assert together[:5] == alone


async def test_a_line_that_is_no_request_is_refused_and_the_next_client_is_served(bench: Bench, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "front"))
        connection.sendall(b'{"type": "generate", "prompts": [[-1]]}\n')
        assert json.loads(connection.recv(4096))["type"] == "refused"
    await bench.do(Resume())
    assert len(bench.generate([1], 4).tokens) == 4


def test_an_engine_that_is_gone_is_named_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"ipc://{tmp_path}/missing did not answer"):
        TinyClient(f"ipc://{tmp_path}/missing").describe()
    with pytest.raises(EngineError, match="is reached at ipc://PATH"):
        TinyClient("tcp://127.0.0.1:1").describe()


async def test_it_goes_back_to_the_weights_of_its_launch(tmp_path: Path) -> None:
    async with tiny(tmp_path) as bench:
        launched = await bench.engine.observe()
        assert launched.remedies is not None and launched.remedies.launched_from is not None
        await bench.do(bench.save(1))
        assert (await bench.engine.observe()).digest != launched.digest
        await bench.do(Restore(launched.remedies.launched_from))
        seen = await bench.engine.observe()
    assert (seen.digest, seen.version) == (launched.digest, 0)
