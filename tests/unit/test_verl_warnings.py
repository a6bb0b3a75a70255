"""Warnings about verl's configuration, and its errors in full."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.readers import ConfigWarning
from tests.unit.verl_trees import ROLLOUT, TORCH, critic, error_of, nested, rollout, warnings_of

# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("global_profiler.profile_continous_steps", "; did you mean profile_continuous_steps?"),
        ("global_profiler.enable", ""),
        ("global_profiler.global_tool_config.torch", ""),
        ("global_profiler.global_tool_config.torch_mem", "; did you mean torch_memory?"),
        ("global_profiler.global_tool_config.nsys.discreet", "; did you mean discrete?"),
        ("critic.profiler.rank", "; did you mean ranks?"),
        ("critic.profiler.tool_config.Torch", "; did you mean torch?"),
        (f"{TORCH}.with_stack", ""),
        ("actor_rollout_ref.ref.profiler.tool_config.torch.stp_start", "; did you mean step_start?"),
        ("actor_rollout_ref.actor.profiler.tool_config.torch.schedule.activ", "; did you mean active?"),
        ("reward.profiler.zzz", ""),
        ("global_profilers", "; did you mean global_profiler?"),
        ("critic.profilers", "; did you mean profiler?"),
        ("actor_rollout_ref.rollout.profile", "; did you mean profiler?"),
        ("actor_rollout_ref.rolout", "; did you mean rollout?"),
        ("actor_rolout_ref", "; did you mean actor_rollout_ref?"),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_probably_meant(key: str, advice: str) -> None:
    assert warnings_of(nested(key, {})) == [f"{key} is unknown and has no effect{advice}"]


def test_a_file_without_any_section_of_verl_is_named() -> None:
    assert warnings_of({"config": {"global_profiler": {"steps": [1]}}, "name": "a"}) == [
        (
            "none of verl's sections, such as global_profiler, is in ['config', 'name']: nothing is profiled; "
            "hand over the trainer's whole configuration"
        )
    ]
    assert warnings_of({}) == []


def test_other_keys_of_a_trainer_are_left_alone() -> None:
    assert warnings_of({"data": {"profile": 1}, "trainer": {"steps": 2}, "critic": {"optim": {"lr": 1}}}) == []


def test_a_warning_points_to_the_line_that_read_the_configuration() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ProfilerConfig.from_verl({"global_profilers": 1})
    assert [(warning.category, Path(warning.filename).name) for warning in caught] == [
        (ConfigWarning, Path(__file__).name)
    ]


def test_an_unknown_key_that_is_null_is_not_named() -> None:
    assert warnings_of(rollout({"discrete": True}, global_tool_config=None)) == []


# --- settings ---------------------------------------------------------------------------------------------------------


ON = {"critic": {"profiler": {"enable": True}}}
CRITIC = "critic.profiler.tool_config"


@pytest.mark.parametrize(
    ("tree", "warning"),
    [
        (
            {"global_profiler": {"steps": [1]}, **ON},
            "critic.profiler.enable is true and critic.profiler.tool is null: nothing is profiled there",
        ),
        ({"global_profiler": {"tool": "torch"}, **ON}, "global_profiler.steps is null: no step is profiled"),
        ({"global_profiler": {"tool": "torch", "steps": []}, **ON}, "global_profiler.steps is []: no step is profiled"),
        (
            {"global_profiler": {"tool": "torch", "steps": [3]}},
            "global_profiler.steps lists steps and no section has enable: true: nothing is profiled",
        ),
        (
            rollout({"schedule": {"active": 1}}),
            (
                f"{TORCH}.schedule has no effect: it counts mini-batches of a training rank; for forward steps of a "
                "rollout write step_start and step_end"
            ),
        ),
        (
            critic("torch", step_start=0, step_end=2),
            (
                f"{CRITIC}.torch has a window, which has no effect: it counts forward steps of an engine; write it in "
                f"{ROLLOUT}.tool_config.torch, and for mini-batches of a training rank write a schedule"
            ),
        ),
    ],
)
def test_a_setting_without_the_expected_effect(tree: dict[str, Any], warning: str) -> None:
    assert warnings_of(tree) == [warning]


# --- errors -----------------------------------------------------------------------------------------------------------

COUNTS = "a list of whole numbers of at least 0"
TOOL = "one of npu, nsys, precision_debugger, torch, torch_memory"
SECTION = "a mapping of keys"
OF_BOTH = "memory, merge-profiles, merge_profiles, module, "
STAGES = "profile-by-stage, profile_by_stage, shapes, stack"
CONTENTS = f"one of MEM, cpu, cuda, gpu, {OF_BOTH}{STAGES}"
NPU_CONTENTS = f"cpu, {OF_BOTH}npu, {STAGES}"
LEVELS = "level0, level1, level2, level_none"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("global_profiler.steps", 3, f" is 3: allowed is {COUNTS}"),
        ("global_profiler.steps", [1, "x"], "[1] is 'x': allowed is a whole number of at least 0"),
        ("global_profiler.steps", [True], "[0] is true: allowed is a whole number of at least 0"),
        ("global_profiler.steps", ["1-2"], "[0] is '1-2': allowed is a whole number of at least 0"),
        ("global_profiler.tool", "torch_memry", f" is 'torch_memry': allowed is {TOOL}; did you mean torch_memory?"),
        ("global_profiler.profile_continuous_steps", "maybe", " is 'maybe': allowed is true or false"),
        ("global_profiler.global_tool_config.torch_memory", [1], f" is [1]: allowed is {SECTION}"),
        ("global_profiler", [1], f" is [1]: allowed is {SECTION}"),
        ("actor_rollout_ref", [1], f" is [1]: allowed is {SECTION}"),
        ("actor_rollout_ref.actor", "on", f" is 'on': allowed is {SECTION}"),
        ("critic.profiler", 3, f" is 3: allowed is {SECTION}"),
        ("critic.profiler.enable", 1, " is 1: allowed is true or false"),
        ("critic.profiler.ranks", "0,1", f" is '0,1': allowed is {COUNTS}"),
        (f"{TORCH}", "all", f" is 'all': allowed is {SECTION}"),
        (f"{TORCH}.contents", ["cuda", "shape"], f"[1] is 'shape': allowed is {CONTENTS}; did you mean shapes?"),
        (f"{TORCH}.contents", "cpu", " is 'cpu': allowed is a list"),
        (f"{TORCH}.schedule.wait", -1, " is -1: allowed is a whole number of at least 0"),
        (f"{CRITIC}.npu.level", "level3", f" is 'level3': allowed is one of {LEVELS}; did you mean level2?"),
        (f"{CRITIC}.npu.contents", ["cuda"], f"[0] is 'cuda': allowed is one of {NPU_CONTENTS}"),
        (f"{CRITIC}.torch_memory.trace_alloc_max_entries", 0, " is 0: allowed is a whole number of at least 1"),
        (f"{CRITIC}.torch_memory.context", "some", " is 'some': allowed is one of all, alloc, state"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key: str, value: object, text: str) -> None:
    assert error_of(nested(key, value)) == key + text


def test_a_file_of_ours_is_distinguished_from_one_of_verl() -> None:
    assert error_of({"steps": [1], "plan": {"ranks": [0]}}) == (
        "plan is a key of our own YAML, and none of verl's sections is there: read the file with "
        "ProfilerConfig.from_yaml, or without --verl"
    )


def test_the_arguments_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="ranks is 'gpu': allowed are global and replica"):
        ProfilerConfig.from_verl({}, ranks="gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layout is 'flat': allowed are step, verl_step and verl"):
        ProfilerConfig.from_verl({}, layout="flat")  # type: ignore[arg-type]
