"""Weights that go from a trainer's GPU tensors to an engine of another process: by CUDA IPC handles, and by broadcast.

One GPU is as far as this goes. NCCL refuses two ranks on one, so what it is asked here is how its refusal ends a sync.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple
from uuid import uuid4

import pytest
import torch
from torch import Tensor

from controlplane import ControlPlane
from schemas.commands import Broadcast, Pushed
from schemas.config import BusConfig
from schemas.errors import EngineError
from schemas.reports import SyncReport
from schemas.safetensors.manifest import manifest_of
from tests.engines.groups import sender
from tests.engines.servers import free_port
from tests.gpu.engine_process import EngineProcess, config_of, started, used
from workers.engines.tiny.model import TinyModel, digest, layout, weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

DEVICE = "cuda"
WIDTH = 1024
"""200 MB of weights."""
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)


class Run(NamedTuple):
    """A trainer's plane, and the process of its only engine, on the same GPU."""

    plane: ControlPlane
    engine: EngineProcess

    def push(self, label: str, tensors: dict[str, Tensor]) -> SyncReport:
        """Sync by IPC handles."""
        return self.plane.sync_weights(
            None, Pushed(label), send=lambda replicas: self.engine.push(label, tensors), timeout=60
        ).wait()

    def broadcast(self, version: int, tensors: dict[str, Tensor], backend: Literal["nccl", "gloo"]) -> SyncReport:
        source = Broadcast(
            host="127.0.0.1", port=free_port(), group=f"weights-{uuid4().hex}", replicas=(0,), backend=backend
        )
        manifest = manifest_of(layout(tensors), digest(tensors))
        return self.plane.sync_weights(
            version, source, manifest=manifest, send=sender(source, 1, tensors), timeout=60
        ).wait()

    def serves(self, tensors: dict[str, Tensor]) -> bool:
        return bool(self.engine.ask("digest") == digest(tensors)) and len(self.engine.generate()) == 8


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as plane,
        started(plane.address, tmp_path, DEVICE, WIDTH) as engine,
    ):
        plane.wait_for_agents(1, timeout=60).wait()
        yield Run(plane, engine)


def trained(step: int) -> dict[str, Tensor]:
    """Return the trainer's weights after a step, on its GPU."""
    return weights(TinyModel(config_of(WIDTH), seed=step).to(DEVICE))


def test_tensors_are_handed_to_the_engine_by_their_handles_and_are_the_trainers_again(
    run: Run, measured: Callable[[str], None]
) -> None:
    tensors = trained(1)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    run.push("step 1", tensors).raise_for_failures()
    reserved = run.engine.ask("bytes")
    for step in (2, 3):
        for tensor in tensors.values():
            tensor.mul_(1.5)
        start = perf_counter()
        report = run.push(f"step {step}", tensors)
        took = perf_counter() - start
        report.raise_for_failures()
        assert (report.status, report.loaded) == ("committed", (0,))
        assert run.serves(tensors)
    before = digest(tensors)
    for tensor in tensors.values():
        tensor.zero_()  # the trainer goes on training in the memory that it handed over
    assert run.engine.ask("digest") == before and run.engine.client.describe().label == "step 3"
    assert run.engine.ask("bytes") <= reserved + nbytes // 4  # the engine holds one copy
    full = used()
    del tensor, tensors
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    assert full - used() > nbytes // 2  # and nothing of the trainer's
    measured(f"a sync of {nbytes >> 20} MiB by CUDA IPC handles: {1000 * took:.0f} ms, with both digests")


def test_a_push_of_another_model_ends_the_sync_and_the_engine_serves_what_it_held(run: Run) -> None:
    tensors = trained(1)
    run.push("step 1", tensors).raise_for_failures()
    other = weights(TinyModel(config_of(WIDTH // 2), seed=1).to(DEVICE))
    report = run.push("step 2", other)
    assert report.status == "aborted" and "not those of the model" in report.reason
    assert run.serves(tensors) and run.engine.client.describe().label == "step 1"
    with pytest.raises(EngineError, match="not those of the model"):
        run.engine.push("step 3", other)


def test_a_broadcast_over_gloo_reaches_the_memory_of_the_gpu(run: Run, measured: Callable[[str], None]) -> None:
    for version in (1, 2):
        tensors = trained(version)
        start = perf_counter()
        report = run.broadcast(version, tensors, "gloo")
        took = perf_counter() - start
        report.raise_for_failures()
        assert (report.status, report.loaded) == ("committed", (0,)) and run.serves(tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    measured(f"a sync of {nbytes >> 20} MiB of CUDA tensors by a broadcast over gloo: {took:.2f} s, with its digests")


def test_a_group_that_nccl_refuses_ends_the_sync_and_the_next_one_goes_through(
    run: Run, measured: Callable[[str], None]
) -> None:
    """Trainer and engine are on one GPU, and NCCL takes a GPU once in a group."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    first, second, third = trained(1), trained(2), trained(3)
    run.broadcast(1, first, "gloo").raise_for_failures()
    start = perf_counter()
    report = run.broadcast(2, second, "nccl")
    took = perf_counter() - start
    assert report.status == "aborted" and "nccl" in report.reason.lower()
    measured(f"NCCL's refusal of a second rank on the GPU ends the sync in {took:.1f} s: {report.reason[:200]}")
    run.broadcast(3, third, "gloo").raise_for_failures()
    assert run.serves(third)


def test_a_group_of_one_broadcasts_over_nccl() -> None:
    """What is left of NCCL on one GPU: the trainer's end makes its communicator and sends."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    tensors = {"weight": torch.arange(1024.0, device=DEVICE)}
    source = Broadcast(host="127.0.0.1", port=free_port(), group="alone", replicas=(), backend="nccl")
    partial(sender(source, 1, tensors), ())()
    torch.cuda.synchronize()
    assert torch.equal(tensors["weight"].cpu(), torch.arange(1024.0))
