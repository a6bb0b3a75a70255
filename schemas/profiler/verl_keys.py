"""The keys of verl's configuration that have to do with profiling, from its pull request 3090 to its release 0.9. Pure.

The Structs are the sections as verl's dataclasses have them (0.9.1), with the keys of earlier generations beside them.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from schemas.identity import Count, Positive

ACTOR: Final = "actor_rollout_ref.actor.profiler"
REF: Final = "actor_rollout_ref.ref.profiler"
ROLLOUT: Final = "actor_rollout_ref.rollout.profiler"
REWARD: Final = "reward.profiler"
REWARD_MODEL: Final = "reward_model.profiler"
"""Where the reward model's section was before there was a section `reward`."""
ROLES: Final = {ACTOR: "actor", REF: "ref", "critic.profiler": "critic", REWARD: "reward", REWARD_MODEL: "reward"}
"""Where each training role has its profiler section, and the role that agents beside its ranks are started with."""

SECTIONS: Final = ("global_profiler", "actor_rollout_ref", "critic", "reward", "reward_model")
"""Top-level sections that hold profiling keys."""
PARENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("global_profiler", "actor_rollout_ref"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "actor_rollout_ref.actor": ("profiler",),
    "actor_rollout_ref.ref": ("profiler",),
    "actor_rollout_ref.rollout": ("profiler",),
    "critic": ("profiler",),
}
"""Sections that hold other things as well, and the profiling sections directly below them."""

ToolName = Literal["torch", "npu", "nsys", "torch_memory", "precision_debugger"]
"""The tools that verl has. The last is not offered here."""
Numbers = Annotated[tuple[Count, ...], Meta(description="a list of whole numbers of at least 0")]
Bound = Annotated[int, Meta(ge=-1)]
"""A forward step; -1 is unset."""
Common = Literal["cpu", "memory", "shapes", "stack", "module"]
EngineOnly = Literal["profile-by-stage", "profile_by_stage", "merge-profiles", "merge_profiles"]
TorchContent = Literal[Common, EngineOnly, "cuda", "gpu", "MEM"]
NpuContent = Literal[Common, EngineOnly, "npu"]


class VerlSchedule(Struct, frozen=True, kw_only=True):
    """`schedule` of the torch tool. With `active: 0` there is none."""

    skip_first: Count = 0
    wait: Count = 0
    warmup: Count = 0
    active: Count = 0
    repeat: Count = 0


class VerlWindow(Struct, frozen=True, kw_only=True):
    """Keys of a window of forward steps: `step_*` and `num_steps` of pull request 5025, `profile_token_*` of 5760."""

    step_start: Bound | None = None
    step_end: Bound | None = None
    num_steps: Positive | None = None
    profile_token_start: Count | None = None
    profile_token_end: Count | None = None
    profile_by_stage: bool | None = None
    merge_profiles: bool | None = None
    discrete: bool = False


class VerlTorch(VerlWindow, frozen=True, kw_only=True):
    """`tool_config.torch`."""

    contents: tuple[TorchContent, ...] = ()
    schedule: VerlSchedule = VerlSchedule()


class VerlNpu(VerlWindow, frozen=True, kw_only=True):
    """`tool_config.npu`. `contents: null` is everything, an empty list only the CPU."""

    contents: tuple[NpuContent, ...] | None = ()
    level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    analysis: bool = False


class VerlNsys(Struct, frozen=True, kw_only=True):
    """`tool_config.nsys`. The options are for launching nsys, which is not up to us."""

    discrete: bool = False
    controller_nsight_options: dict[str, object] = {}
    worker_nsight_options: dict[str, object] = {}


class VerlMemory(Struct, frozen=True, kw_only=True):
    """`tool_config.torch_memory`. `stack_depth` and `kw_args` have no effect here."""

    trace_alloc_max_entries: Positive = 100_000
    memory_snapshot_num_steps: Positive = 1
    context: Literal["state", "alloc", "all"] | None = "all"
    stacks: Literal["python", "all"] = "all"
    stack_depth: Positive = 32
    kw_args: dict[str, object] = {}


class VerlTools(Struct, frozen=True, kw_only=True):
    """`tool_config` of a role."""

    torch: VerlTorch = VerlTorch()
    npu: VerlNpu = VerlNpu()
    nsys: VerlNsys = VerlNsys()
    torch_memory: VerlMemory = VerlMemory()
    precision_debugger: dict[str, object] = {}


class VerlGlobalTools(Struct, frozen=True, kw_only=True):
    """`global_profiler.global_tool_config`."""

    nsys: VerlNsys = VerlNsys()
    torch_memory: VerlMemory = VerlMemory()
    precision_debugger: dict[str, object] = {}


class VerlFinish(Struct, frozen=True, kw_only=True):
    """Keys that `global_profiler` and the roles' sections have in common."""

    tool: ToolName | None = None
    save_path: str = ""
    relocate_results: bool = False
    finish_hook_cmd: str = ""
    finish_hook_all_ranks: bool = False
    finish_hook_ranks: Numbers = ()


class VerlGlobal(VerlFinish, frozen=True, kw_only=True):
    """`global_profiler`."""

    steps: Numbers | None = None
    profile_continuous_steps: bool = False
    global_tool_config: VerlGlobalTools = VerlGlobalTools()


class VerlProfiler(VerlFinish, frozen=True, kw_only=True):
    """The `profiler` section of a role, or of the rollouts."""

    enable: bool = False
    all_ranks: bool = False
    ranks: Numbers = ()
    tool_config: VerlTools = VerlTools()
