"""The recipe for ROLL in docs/trainers/roll.md, in real Ray actors, with stand-ins that have its methods.

What the recipe uses was read at 8eb27cc2: `AgenticPipeline` (`roll/pipeline/agentic/agentic_pipeline.py`) with
`pipeline_config` and `actor_infer`, `BasePipeline.model_update` (`roll/pipeline/base_pipeline.py`), which calls
`ModelUpdateGroup.model_update` (`roll/distributed/executor/model_update_group.py`), a `Cluster` with its `workers`
(`cluster.py`), and `InferWorker` (`roll/pipeline/base_worker.py`), an async actor whose `strategy.model` is a
`CustomAsyncLLM` (`roll/third_party/vllm/async_llm.py`), which is vLLM's `AsyncLLM` with methods for the weights.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ray

from controlplane.analysis.invariants import verify
from controlplane.record.log import RunLog
from schemas.errors import CommandFailed
from tests.pages import module_of
from tests.trainers.conftest import RayWith

pytestmark = pytest.mark.xdist_group("ray")

STAND_IN = '''
"""What the recipe finds in ROLL, and in the vLLM below it."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import ray

from tests.engines.strict import stand_in
from tests.engines.surfaces import read


class BasePipeline:
    def __init__(self, pipeline_config):
        self.pipeline_config, self.model_update_groups = pipeline_config, []

    def set_model_update_pair(self, src_cluster, tgt_cluster, frequency=1):
        self.model_update_groups.append(ModelUpdateGroup(src_cluster, tgt_cluster, self.pipeline_config, frequency))

    def model_update(self, global_step):
        metrics = {}
        for model_update_group in self.model_update_groups:
            metrics.update(model_update_group.model_update(global_step))
            model_update_group.tgt_cluster.process_weights_after_loading()
        return metrics


class AgenticPipeline(BasePipeline):
    def __init__(self, pipeline_config):
        super().__init__(pipeline_config)
        self.actor_infer = Cluster([InferWorker.remote() for _ in range(2)])
        self.actor_train = Cluster([ActorWorker.remote()])
        frequency = pipeline_config.actor_train.model_update_frequency
        self.set_model_update_pair(self.actor_train, self.actor_infer, frequency)


class Cluster:
    def __init__(self, workers):
        self.workers = workers

    def process_weights_after_loading(self):
        ray.get([worker.process_weights_after_loading.remote() for worker in self.workers])


class ModelUpdateGroup:
    def __init__(self, src_cluster, tgt_cluster, pipeline_config, frequency=1):
        self.src_cluster, self.tgt_cluster, self.frequency = src_cluster, tgt_cluster, frequency
        ray.get([each.setup_model_update.remote(infer_cluster=tgt_cluster) for each in src_cluster.workers])

    def model_update(self, step=None):
        if step % self.frequency != 0:
            return {}
        return ray.get([each.start_model_update.remote() for each in self.src_cluster.workers])[0]


@ray.remote
class ActorWorker:
    step = 0

    def setup_model_update(self, infer_cluster):
        self.infer = infer_cluster.workers

    def start_model_update(self):
        """As `_separated_model_update`: bucket by bucket, each to all workers."""
        self.step += 1
        for name in ("embed", "head"):
            bucket = {"names": [f"{name} {self.step}"], "dtypes": ["float"], "shapes": [(1,)], "group_name": "update"}
            ray.get([worker.broadcast_parameter.remote(**bucket, is_lora=False) for worker in self.infer])
        return {"time/actor_train/model_update/total": 1.0}


@ray.remote
class InferWorker:
    async def __init__(self):
        self.strategy = SimpleNamespace(model=CustomAsyncLLM())

    async def broadcast_parameter(self, *args, **kwargs):
        await self.strategy.model.broadcast_parameter(*args, **kwargs)

    async def process_weights_after_loading(self):
        await self.strategy.model.process_weights_after_loading()


@dataclass
class ParallelConfig:
    world_size: int = 2
    data_parallel_size: int = 1


def CustomAsyncLLM():
    """A stand-in of vLLM 0.21, which has no label, with ROLL's methods."""
    held, seen, state = {}, [], {"paused": False}
    config = SimpleNamespace(
        instance_id="1",
        model_config=SimpleNamespace(model="org/model", enable_sleep_mode=True),
        load_config=SimpleNamespace(load_format="dummy"),
        device_config=SimpleNamespace(device="cuda"),
        parallel_config=ParallelConfig(),
    )

    def turn(paused):
        def answer(**_):
            state["paused"] = paused
            seen.append("paused" if paused else "resumed")

        return answer

    answers = {
        "is_paused": lambda: state["paused"],
        "is_sleeping": False,
        "reset_prefix_cache": True,
        "pause_generation": turn(True),
        "resume_generation": turn(False),
    }
    tracked = SimpleNamespace(request_states={}, parent_requests={})
    handler = asyncio.create_task(asyncio.sleep(3600))
    known = {"vllm_config": config, "output_processor": tracked, "output_handler": handler}
    engine = stand_in(read("vllm", "0.21.0"), answers, **known).engine

    async def broadcast_parameter(names, dtypes, shapes, group_name, is_lora=False):
        (name, step), = (name.split() for name in names)
        if state.get("breaks") == name:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        held[name] = int(step)
        seen.append(names[0])

    async def process_weights_after_loading():
        seen.append("processed")

    engine.held, engine.seen, engine.state = held, seen, state
    engine.broadcast_parameter = broadcast_parameter
    engine.process_weights_after_loading = process_weights_after_loading
    return engine
'''


@pytest.fixture
def pipeline(tmp_path: Path, ray_with: RayWith) -> Iterator[Any]:
    """The pipeline that the YAML names, made as `examples/start_agentic_pipeline.py` does."""
    module_of("docs/trainers/roll.md", "roll_bus", tmp_path)
    with ray_with("roll.pipeline.agentic.agentic_pipeline", STAND_IN):
        from types import SimpleNamespace

        config = SimpleNamespace(actor_train=SimpleNamespace(model_update_frequency=2))
        made = import_module("roll_bus").BusPipeline(pipeline_config=config)
        yield made
        made.plane.close()
    assert list(verify(RunLog.read(tmp_path / "run.db"))) == []


def test_roll_moves_its_weights_under_a_pause_of_all_engines_which_commit_together_or_not(pipeline: Any) -> None:
    def engines(look: Any) -> list[Any]:
        found: list[Any] = ray.get([each.__ray_call__.remote(look) for each in pipeline.actor_infer.workers])
        return found

    def seen(worker: Any) -> list[str]:
        model = worker.strategy.model
        return [model.seen.pop(0) for _ in range(len(model.seen))]

    def break_off(worker: Any) -> None:
        worker.strategy.model.state["breaks"] = "head"

    def mend(worker: Any) -> None:
        del worker.strategy.model.state["breaks"]

    assert pipeline.model_update(0) == {"time/actor_train/model_update/total": 1.0}
    assert engines(seen) == [["paused", "embed 1", "head 1", "processed", "resumed"]] * 2
    assert pipeline.plane.serving() == {0: 1, 1: 1}
    assert pipeline.model_update(1) == {}  # ROLL updates in each second step
    assert engines(seen) == [["processed"]] * 2

    ray.get(pipeline.actor_infer.workers[1].__ray_call__.remote(break_off))
    with pytest.raises(CommandFailed, match="illegal memory access"):
        pipeline.model_update(2)
    assert pipeline.plane.serving() == {}
    assert engines(lambda worker: worker.strategy.model.state["paused"]) == [True, True]

    ray.get(pipeline.actor_infer.workers[1].__ray_call__.remote(mend))
    pipeline.model_update(4)
    assert engines(lambda worker: worker.strategy.model.held) == [{"embed": 3, "head": 3}] * 2
    assert engines(lambda worker: worker.strategy.model.state["paused"]) == [False, False]
    assert len({*pipeline.plane.serving().values()}) == 1 and {*pipeline.plane.serving()} == {0, 1}
