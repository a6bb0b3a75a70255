"""What lets an unmodified verl 0.9.1 train on a CPU: a platform, a process group, and the place of an engine stand-in.

verl imports this module in each of its processes (`VERL_USE_EXTERNAL_MODULES`), through doors that its documentation
names. Nothing of verl is replaced. Its package is imported by this name alone, and not as one of `tests`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "standin"
"""Of the rollout engine, in verl's configuration."""


def _nothing(*_: object, **__: object) -> None:
    """Stand for a call that has no effect on a CPU."""


DEVICE = SimpleNamespace(
    __name__="cpu",
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: "cpu",
    set_device=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    get_device_name=lambda *_: "cpu",
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (1 << 33, 1 << 34),
    reset_peak_memory_stats=_nothing,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    device_name = "cpu"
    vendor_name = "none"
    device_module: Any = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # goes to torch's `to`, where a number means an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _group_on_cpu(*arguments: Any, backend: str | None = None, **named: Any) -> None:
    """Make a process group. torch refuses `cpu:gloo,cpu:gloo`, which verl asks for on a platform named cpu."""
    _make_group(*arguments, backend=",".join(dict.fromkeys(backend.split(","))) if backend else None, **named)


_make_group: Any = torch.distributed.init_process_group
torch.distributed.init_process_group = _group_on_cpu
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # FSDP is registered for that name, and works here too

from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: E402  # the platform comes first
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402


def _load_replica() -> type[Any]:
    from .replica import StandInReplica

    return StandInReplica


_ROLLOUT_REGISTRY[NAME, "async"] = f"{__package__}.replica.ServerAdapter"
RolloutReplicaRegistry.register(NAME, _load_replica)
