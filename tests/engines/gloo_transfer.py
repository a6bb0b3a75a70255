"""Weights over gloo for vLLM, registered from outside: what its NCCL back-end does, on a machine without a GPU.

A server registers it by `--worker-extension-cls tests.engines.gloo_transfer.Extension`, a trainer by importing it. Only
what needs a GPU differs: the group, and how a tensor goes over it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

LIMIT = timedelta(seconds=15)


class Extension:
    """What `--worker-extension-cls` names; it needs no methods."""


def join(host: str, port: int, rank: int, world: int) -> Any:
    """Meet the others at a store of rank 0."""
    store, _, _ = next(iter(rendezvous(f"tcp://{host}:{port}", rank, world, timeout=LIMIT)))
    store.set_timeout(LIMIT)
    name, backend = f"gloo-{port}", c10d.Backend("gloo")
    prefixed = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        world, rank, [], backend, prefixed, group_name=c10d.GroupName(name), timeout=LIMIT
    )
    return group


class GlooEngine(NCCLWeightTransferEngine):  # type: ignore[misc]  # not installed beside our tools
    """The workers' side."""

    group: Any = None

    def init_transfer_engine(self, init_info: Any) -> None:
        own = self.parallel_config
        rank = init_info.rank_offset + own.data_parallel_index * own.world_size + own.rank
        self.group = join(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        update = self.parse_update_info(update_info)  # the base class goes on to synchronize an accelerator
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensor, 0).wait()
            self.model.load_weights([(name, tensor)])


@dataclass
class GlooTrainerInitInfo(NCCLTrainerInitInfo):  # type: ignore[misc]  # not installed beside our tools
    """Where to meet.

    Attributes:
        breaks_after: Number of tensors after which the sender fails; 0 for none.
    """

    backend: ClassVar[str] = "gloo"
    breaks_after: int = 0


class GlooTrainer(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]  # not installed beside our tools
    """The trainer's side."""

    init_info_cls = GlooTrainerInitInfo
    breaks_after = 0

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None) -> "GlooTrainer":
        made: GlooTrainer = super().trainer_init(init_info, client=client, source=source)
        made.breaks_after = init_info.breaks_after
        return made

    def _broadcast(self, source: Any, meta: Any) -> None:
        pairs: Iterator[tuple[str, torch.Tensor]] = self._checked_iter(source, meta)
        for sent, (_, tensor) in enumerate(pairs):
            if self.breaks_after == sent > 0:
                raise ConnectionError(f"broken after {sent} tensors")
            self.model_update_group.broadcast(tensor, 0).wait()


def open_trainer_endpoint(init_info: GlooTrainerInitInfo) -> Any:
    """As NCCL's: rank 0 of the group."""
    return join(init_info.master_address, init_info.master_port, 0, init_info.world_size)


nccl_engine.open_trainer_endpoint = open_trainer_endpoint
if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
    WeightTransferTrainerFactory.register_engine("gloo", GlooTrainer)
