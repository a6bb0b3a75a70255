"""A torch.distributed group of a trainer and engines, as trainers create it: rank 0 is the trainer's."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from schemas.commands import Broadcast

LIMIT = timedelta(seconds=60)


def sender(source: Broadcast, gpus_per_replica: int, tensors: dict[str, torch.Tensor]) -> Callable[[Any], None]:
    """What `sync_weights(send=...)` takes: make the group, then broadcast the tensors in ascending order of names.

    The engines' end is `init_custom_process_group` (sglang/srt/utils/common.py, 0.5.23); both must make the same store.
    """

    def send(replicas: tuple[int, ...]) -> None:
        broadcast(source, 0, 1 + len(source.replicas) * gpus_per_replica, tensors)

    return send


def broadcast(source: Broadcast, rank: int, world: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make the group as one of its ranks, and broadcast from rank 0 into the tensors of the others."""
    store, _, _ = next(iter(rendezvous(f"tcp://{source.host}:{source.port}", rank, world, timeout=LIMIT)))
    store.set_timeout(LIMIT)
    group, _ = c10d._new_process_group_helper(
        world,
        rank,
        [],
        c10d.Backend(source.backend),
        c10d.PrefixStore(source.group, store),
        group_name=c10d.GroupName(source.group),
        timeout=LIMIT,
    )
    for name in sorted(tensors):
        group.broadcast(tensors[name], 0).wait(LIMIT)
