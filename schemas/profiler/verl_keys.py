"""The keys of verl's configuration that have to do with profiling, from its pull request 3090 to its release 0.9. Pure.

DEFAULTS is what holds where a file says nothing: verl's own inheritance, written as verl writes it.
"""

from collections.abc import Mapping
from typing import Final

ACTOR: Final = "actor_rollout_ref.actor.profiler"
REF: Final = "actor_rollout_ref.ref.profiler"
ROLLOUT: Final = "actor_rollout_ref.rollout.profiler"
CRITIC: Final = "critic.profiler"
REWARD: Final = "reward.profiler"
REWARD_MODEL: Final = "reward_model.profiler"
"""Where the reward model's stood before there was a section `reward`."""
ROLES: Final = {ACTOR: "actor", REF: "ref", CRITIC: "critic", REWARD: "reward", REWARD_MODEL: "reward"}
"""Where the profiler of each training role stands, and the role that agents beside its ranks are started with."""

TOOLS: Final = ("torch", "npu", "nsys", "torch_memory", "precision_debugger")
LEVELS: Final = ("level_none", "level0", "level1", "level2")
STAGES: Final = (
    *("actor_update", "actor_compute_log_prob", "ref_compute_log_prob"),
    *("compute_values", "critic_update", "compute_rm_score"),
)

_COMMON_CONTENTS: Final = frozenset({"cpu", "memory", "shapes", "stack", "module"})
_STAGED: Final = frozenset({"profile-by-stage", "profile_by_stage", "merge-profiles", "merge_profiles"})
CONTENTS: Final = {
    "torch": _COMMON_CONTENTS | _STAGED | {"cuda", "gpu", "MEM"},
    "npu": _COMMON_CONTENTS | _STAGED | {"npu"},
}

_NAMED: Final = frozenset({"_target_", "name"})
_WINDOW: Final = frozenset({"step_start", "step_end", "num_steps", "profile_token_start", "profile_token_end"})
SCHEDULE_KEYS: Final = _NAMED | {"skip_first", "wait", "warmup", "active", "repeat"}
TOOL_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "torch": _NAMED | _WINDOW | {"contents", "discrete", "schedule", "profile_by_stage", "merge_profiles"},
    "npu": _NAMED | _WINDOW | {"contents", "discrete", "level", "analysis", "profile_by_stage", "merge_profiles"},
    "nsys": _NAMED | {"discrete", "controller_nsight_options", "worker_nsight_options"},
    "torch_memory": _NAMED
    | {"trace_alloc_max_entries", "stack_depth", "memory_snapshot_num_steps", "context", "stacks", "kw_args"},
    "precision_debugger": _NAMED | {"config_path", "steps", "stages", "strict"},
}
_FINISH: Final = frozenset({"relocate_results", "finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"})
GLOBAL_KEYS: Final = _FINISH | {
    *("_target_", "tool", "steps", "profile_continuous_steps", "save_path", "global_tool_config")
}
PROFILER_KEYS: Final = _FINISH | {
    *("_target_", "tool", "enable", "all_ranks", "ranks", "save_path", "tool_config", "global_tool_config")
}

MISPLACED: Final = {
    **dict.fromkeys(("enable", "all_ranks", "ranks"), "write it in the profiler section of a role"),
    **dict.fromkeys(("contents", "discrete", "schedule", "level", "analysis"), "write it in tool_config.<tool>"),
    **dict.fromkeys(
        ("activities", "with_stack", "record_shapes", "profile_memory"),
        "write contents, of which cpu, cuda, stack, shapes and memory say this",
    ),
    "tool_config": "write it in the profiler section of a role, or as global_tool_config",
}
"""Keys that are known, and stand in a wrong place: what to do."""

OUTDATED: Final = {
    "trainer.profile_steps": "write global_profiler.steps",
    "trainer.npu_profile": "write global_profiler.tool: npu",
    "trainer.worker_nsight_options": "write global_profiler.global_tool_config.nsys",
    "trainer.controller_nsight_options": "write global_profiler.global_tool_config.nsys",
    "actor_rollout_ref.profiler": f"write {ACTOR} and {ROLLOUT}",
    "profiler": "it belongs to verl's supervised fine-tuning; write a role's, such as critic.profiler",
}
"""Keys of an older verl, or of another of its trainers: what to do."""

SECTIONS: Final = frozenset({"global_profiler", "actor_rollout_ref", "critic", "reward", "reward_model"})
"""What stands at the top of a file and has to do with profiling."""

NEIGHBOURS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("global_profiler", "actor_rollout_ref"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "actor_rollout_ref.actor": ("profiler",),
    "actor_rollout_ref.ref": ("profiler",),
    "actor_rollout_ref.rollout": ("profiler",),
    "critic": ("profiler",),
}
"""Sections that have other things in them as well, and what is looked for there."""


def _profiler(heir_of: str, tools: Mapping[str, object]) -> dict[str, object]:
    """A role's section. heir_of: where it takes what it does not say from, besides tool and path."""
    own = {"enable": False, "all_ranks": False, "ranks": []}
    shared: dict[str, object] = {
        "relocate_results": False,
        "finish_hook_cmd": None,
        "finish_hook_all_ranks": False,
        "finish_hook_ranks": [],
    }
    inherited = {**own, **shared} if heir_of == ACTOR else shared
    return {
        **own,
        "tool": "${oc.select:global_profiler.tool,null}",
        "save_path": "${oc.select:global_profiler.save_path,null}",
        **{key: f"${{oc.select:{heir_of}.{key},{_spelled(value)}}}" for key, value in inherited.items()},
        "tool_config": tools,
    }


def _below(path: str, defaults: Mapping[str, object]) -> dict[str, str]:
    """Values that are taken from another section, key by key."""
    return {key: f"${{oc.select:{path}.{key},{_spelled(value)}}}" for key, value in defaults.items()}


def _spelled(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_TORCH: Final[dict[str, object]] = {"contents": [], "discrete": False}
_NPU: Final[dict[str, object]] = {"contents": [], "level": "level0", "analysis": False, "discrete": False}
_NSYS: Final[dict[str, object]] = {"discrete": False}
_MEMORY: Final[dict[str, object]] = {
    **{"trace_alloc_max_entries": 100_000, "stack_depth": 32, "memory_snapshot_num_steps": 1},
    **{"context": "all", "stacks": "all", "kw_args": {}},
}
_DEBUGGER: Final[dict[str, object]] = {"config_path": None, "stages": None, "strict": False}
_GLOBAL_TOOLS: Final = "global_profiler.global_tool_config"
_RANK: Final = _profiler(
    "global_profiler",
    {
        **{"torch": _TORCH, "npu": {**_NPU, "analysis": True}},
        "nsys": _below(f"{_GLOBAL_TOOLS}.nsys", _NSYS),
        "torch_memory": _below(f"{_GLOBAL_TOOLS}.torch_memory", _MEMORY),
        "precision_debugger": _below(f"{_GLOBAL_TOOLS}.precision_debugger", _DEBUGGER),
    },
)
_ENGINE: Final = _profiler(
    ACTOR,
    {
        tool: _below(f"{ACTOR}.tool_config.{tool}", defaults)
        for tool, defaults in (("torch", _TORCH), ("npu", _NPU), ("nsys", _NSYS), ("precision_debugger", _DEBUGGER))
    },
)

DEFAULTS: Final[dict[str, object]] = {
    "global_profiler": {
        **{"tool": None, "steps": None, "profile_continuous_steps": False, "save_path": "outputs/profile"},
        **{"relocate_results": False, "finish_hook_cmd": None, "finish_hook_all_ranks": False, "finish_hook_ranks": []},
        "global_tool_config": {"nsys": _NSYS, "torch_memory": _MEMORY, "precision_debugger": _DEBUGGER},
    },
    "actor_rollout_ref": {
        "actor": {"profiler": _RANK},
        "ref": {"profiler": _RANK},
        "rollout": {"profiler": _ENGINE},
    },
    "critic": {"profiler": _RANK},
    "reward": {"profiler": _RANK},
    "reward_model": {"profiler": _RANK},
}
