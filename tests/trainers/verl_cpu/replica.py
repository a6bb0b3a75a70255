"""verl's side of the engine stand-in: a replica that launches it, and the backend through which weights reach it."""

import os
from collections.abc import Iterator
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.profiler.profile import build_rollout_dist_profiler
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from .server import StandInServer


class StandInReplica(RolloutReplica):  # type: ignore[misc]
    """One server actor on the node of the replica's first worker."""

    async def launch_servers(self) -> None:
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        profiler = self.config.profiler
        tool = profiler.tool_config.get(profiler.tool) if profiler is not None and profiler.tool else None
        server = (
            ray.remote(StandInServer)
            .options(
                name=f"standin_server_{self.replica_rank}_0",
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(
                model=self.model_config.path,
                mode=self.rollout_mode,
                replica=self.replica_rank,
                config=self.config,
                profiler=build_rollout_dist_profiler(self.replica_rank, self.world_size, profiler, tool),
                adapter=self.model_config.lora_rank > 0 and not self.model_config.lora.get("merge", False),
            )
        )
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, f"standin:{self.replica_rank}"


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """Sends the weights of one training rank's replica to its server, in the order of vLLM's backend."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank
        self.is_leader_rank = True
        self._handle: Any = None

    @property
    def server(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(f"standin_server_{self.replica_rank}_0")
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        peft_config: Any = None,
        base_sync_done: bool = False,
        **_: Any,
    ) -> None:
        tensors = {name.replace(".base_layer", ""): tensor.detach().cpu().clone() for name, tensor in weights}
        await self.server.load.remote(tensors, global_steps, peft_config if base_sync_done else None)
        await self.server.clear_kv_cache.remote()
        if global_steps is not None:
            await self.server.set_global_steps.remote(global_steps)
