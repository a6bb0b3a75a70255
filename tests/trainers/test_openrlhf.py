"""The recipe for OpenRLHF in docs/trainers/openrlhf.md, in real Ray actors, with stand-ins that have its methods.

What the recipe uses was read at 3c3be623 and in the package 0.11.2: `BasePPOTrainer` (`trainer/ppo_trainer.py`) with
`args`, `vllm_engines` and `actor_model_group`, a `RayActorGroup` (`trainer/ray/launcher.py`, `async_run_method`), and
`RolloutRayActor` (`trainer/ray/vllm_engine.py`), an async actor whose `llm` is an `AsyncLLM`, whose `output_handler` is
a task.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from controlplane.analysis.invariants import verify
from controlplane.record.log import RunLog
from tests.pages import module_of
from tests.trainers.conftest import RayWith
from tests.trainers.gateway_fleet import digest_of
from workers.engines.tiny.server import TinyClient

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.long]

STAND_IN = '''
"""What the recipe finds in OpenRLHF."""

import asyncio
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import ray

from workers.engines.tiny.model import TinyConfig, TinyModel, save


class BasePPOTrainer:
    def __init__(self, actor_model_group, vllm_engines, output_dir):
        self.actor_model_group, self.vllm_engines = actor_model_group, vllm_engines
        self.args = SimpleNamespace(ckpt=SimpleNamespace(output_dir=output_dir))

    def broadcast_to_vllm(self):
        raise AssertionError("OpenRLHF's own broadcast")


@ray.remote
class TrainingActor(BasePPOTrainer):
    """As in ppo_trainer_async.py: it calls the method of its base."""

    def broadcast_to_vllm(self):
        try:
            super().broadcast_to_vllm()
        except Exception as error:
            return type(error).__name__


@ray.remote
class PolicyModelActor:
    def __init__(self, output_dir):
        self.output_dir, self.step, self.hidden = Path(output_dir), 0, 48

    def save_model(self):
        self.step += 1
        rmtree(self.output_dir, ignore_errors=True)
        save(TinyModel(TinyConfig(hidden=self.hidden), seed=self.step), self.output_dir)

    def grow(self):
        self.hidden = 32


class RayActorGroup:
    def __init__(self, actors):
        self._actor_handlers = actors

    def async_run_method(self, method_name, *args, **kwargs):
        return [getattr(actor, method_name).remote(*args, **kwargs) for actor in self._actor_handlers]


@ray.remote
class RolloutRayActor:
    async def __init__(self):
        parallel = SimpleNamespace(world_size=2)
        handler = asyncio.create_task(asyncio.sleep(3600))
        self.llm = SimpleNamespace(output_handler=handler, vllm_config=SimpleNamespace(parallel_config=parallel))

    async def reset_prefix_cache(self):
        """A method of its own, so that the actor is an asynchronous one."""
'''


@pytest.fixture
def recipe(tmp_path: Path, ray_with: RayWith) -> Iterator[Any]:
    """The recipe's module, whose engines are tiny ones, and OpenRLHF's classes, in a cluster with the hook."""
    module = module_of("docs/trainers/openrlhf.md", "openrlhf_bus", tmp_path)
    text = module.read_text()
    for theirs, ours in (
        ("workers.engines.vllm.engine import VLLMEngine", "workers.engines.tiny.engine import TinyEngine"),
        ("    from workers.engines.vllm.in_process import AsyncLLMClient\n", ""),
        (
            "identity, client = Identity(replica=replica, node_rank=0, gpus_per_node=gpus), AsyncLLMClient(actor.llm)",
            "identity = Identity(replica=replica, node_rank=0, gpus_per_node=gpus)",
        ),
        ("VLLMEngine(identity, client,", 'TinyEngine(identity, serve=f"ipc://{FOLDER}/front-{replica}", seed=7,'),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    module.write_text(text)
    with ray_with("openrlhf.trainer.ppo_trainer", STAND_IN, worker_process_setup_hook="openrlhf_bus.hook"):
        from openrlhf.trainer import ppo_trainer  # type: ignore[import-not-found]

        yield ppo_trainer


def test_openrlhf_brings_all_engines_to_each_policy_or_none(recipe: Any, tmp_path: Path) -> None:
    policy = recipe.PolicyModelActor.remote(str(tmp_path / "policy"))
    engines = [recipe.RolloutRayActor.remote() for _ in range(2)]
    trainer = recipe.TrainingActor.remote(recipe.RayActorGroup([policy]), engines, str(tmp_path / "policy"))

    def held() -> list[str | None]:
        return [TinyClient(f"ipc://{tmp_path}/front-{number}", timeout_s=20).describe().digest for number in range(2)]

    for step in (1, 2):
        assert ray.get(trainer.broadcast_to_vllm.remote()) is None
        assert held() == [digest_of(step)] * 2
    ray.get(policy.grow.remote())  # another shape: it fits no engine
    assert ray.get(trainer.broadcast_to_vllm.remote()) == "CommandFailed"
    assert held() == [digest_of(2)] * 2
    ray.kill(trainer)
    assert list(verify(RunLog.read(tmp_path / "run.db"))) == []
