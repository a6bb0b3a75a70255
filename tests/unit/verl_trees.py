"""Small configurations in verl's layout, and readers for them."""

from collections.abc import Mapping
from typing import Any

import pytest

from schemas.commands import ProfilePlan
from schemas.errors import ConfigError
from schemas.profiler.config import ConfigReading, ProfilerConfig, read_verl_config

TORCH = "actor_rollout_ref.rollout.profiler.tool_config.torch"
ROLLOUT = "actor_rollout_ref.rollout.profiler"

read = read_verl_config


def rollout(torch: Mapping[str, object] | None = None, **profiler: object) -> dict[str, Any]:
    """Return a file that profiles rollouts in step 1. `torch` holds the torch tool's keys."""
    section = {"enable": True, "tool_config": {"torch": torch or {}}, **profiler}
    return {"global_profiler": {"tool": "torch", "steps": [1]}, "actor_rollout_ref": {"rollout": {"profiler": section}}}


def actor(**profiler: object) -> dict[str, Any]:
    """Return a file that profiles the actor in step 1, and so, as in verl, the rollouts too."""
    section = {"enable": True, **profiler}
    tools = {tool: {"discrete": True} for tool in ("torch", "npu")}  # otherwise verl skips its engines
    roles = {"actor": {"profiler": section}, "rollout": {"profiler": {"tool_config": tools}}}
    return {"global_profiler": {"tool": "torch", "steps": [1]}, "actor_rollout_ref": roles}


def critic(tool: str, **options: object) -> dict[str, Any]:
    """Return a file that profiles the critic in step 1. `options` are the tool's keys."""
    section = {"enable": True, "tool": tool, "tool_config": {tool: options}}
    return {"global_profiler": {"steps": [1]}, "critic": {"profiler": section}}


def nested(key: str, value: object) -> dict[str, Any]:
    """Return a file with one key, given as a dotted path."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def plan(torch: Mapping[str, object] | None = None, **profiler: object) -> ProfilePlan:
    return ProfilerConfig.from_verl(rollout(torch, **profiler)).plan


def warnings_of(tree: Mapping[str, object]) -> list[str]:
    reading: ConfigReading = read(tree)
    return reading.warnings


def error_of(tree: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.from_verl(tree)  # type: ignore[arg-type]
    return str(caught.value)
