"""What is said of a verl configuration: remarks on what does not do what it looks like, and each error in full."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.files import ConfigWarning
from tests.unit.verl_trees import ACTOR, ROLLOUT, TORCH, critic, nested, refused, remarks, rollout

# --- remarks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("global_profiler.profile_continous_steps", "; did you mean profile_continuous_steps?"),
        ("global_profiler.enable", "; write it in the profiler section of a role"),
        ("global_profiler.contents", "; write it in tool_config.<tool>"),
        ("global_profiler.global_tool_config.torch", "; write it in tool_config of a role"),
        ("global_profiler.global_tool_config.torch_mem", "; did you mean torch_memory?"),
        ("global_profiler.global_tool_config.nsys.discreet", "; did you mean discrete?"),
        ("critic.profiler.rank", "; did you mean ranks?"),
        ("critic.profiler.discrete", "; write it in tool_config.<tool>"),
        ("critic.profiler.tool_config.Torch", "; did you mean torch?"),
        (f"{TORCH}.with_stack", "; write contents, of which cpu, cuda, stack, shapes and memory say this"),
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
def test_an_unknown_key_is_named_with_what_was_meant(key: str, advice: str) -> None:
    assert remarks(nested(key, {})) == [f"{key} is unknown there, and nothing follows from it{advice}"]


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("trainer.profile_steps", "write global_profiler.steps"),
        ("actor_rollout_ref.profiler", f"write {ACTOR} and {ROLLOUT}"),
        ("profiler", "it belongs to verl's supervised fine-tuning; write a role's, such as critic.profiler"),
    ],
)
def test_a_key_of_another_time_is_named_with_its_successor(key: str, advice: str) -> None:
    assert remarks(nested(key, {"all_ranks": True})) == [f"{key} is not read: {advice}"]


@pytest.mark.parametrize("key", ["global_profiler.steps", f"{ROLLOUT}.enable", f"+{ROLLOUT}.enable", "critic.profiler"])
def test_a_key_as_it_stands_on_a_command_line_is_named(key: str) -> None:
    assert remarks({key: True}) == [
        f"{key} is one key with dots in it, and is not read: write each part of it as a key below the one before it"
    ]


def test_a_key_that_is_unknown_is_named_where_a_reference_leads_to_it() -> None:
    tree = {"shared": {"rank": [1], "tool_config": {"torch": {"stp": 1}}}, "critic": {"profiler": "${shared}"}}
    assert remarks(tree) == [
        "critic.profiler.rank is unknown there, and nothing follows from it; did you mean ranks?",
        "critic.profiler.tool_config.torch.stp is unknown there, and nothing follows from it",
    ]


def test_a_file_that_hydra_has_not_put_together_is_told_from_one_that_it_has() -> None:
    assert remarks({"defaults": ["ppo_trainer", "_self_"]}) == [
        (
            "defaults names files that Hydra would put together, and they are not read: hand over the configuration "
            "that it makes of them"
        )
    ]


def test_what_is_no_configuration_of_verl_s_is_told_from_one_that_profiles_nothing() -> None:
    assert remarks({"config": {"global_profiler": {"steps": [1]}}, "name": "a"}) == [
        (
            "no section of verl's is there, such as global_profiler, but a mapping with config, name: nothing is "
            "profiled; hand over the whole configuration of the trainer"
        )
    ]
    assert remarks({}) == []


def test_keys_that_are_none_of_our_business_are_left_alone() -> None:
    assert remarks({"data": {"profile": 1}, "trainer": {"steps": 2}, "critic": {"optim": {"lr": 1}}}) == []


def test_remarks_are_warnings_on_the_line_that_asked() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ProfilerConfig.from_verl({"global_profilers": 1})
    assert [(one.category, Path(one.filename).name) for one in caught] == [(ConfigWarning, Path(__file__).name)]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {
                "global_profiler": {"tool": "torch", "steps": [1, 2], "profile_continuous_steps": True},
                "actor_rollout_ref": {
                    "actor": {"profiler": {"enable": True, "tool_config": {"torch": {"discrete": True}}}}
                },
            },
            (
                f"global_profiler.profile_continuous_steps is true and {ROLLOUT}, {ACTOR} is discrete, which "
                f"verl's manual rules out: rollouts have one session over each run of steps, ranks a trace of "
                "each stage"
            ),
        ),
        (
            {"global_profiler": {"steps": [1]}, "critic": {"profiler": {"enable": True}}},
            "critic.profiler.enable is true and critic.profiler.tool is null: nothing is profiled there",
        ),
        (
            {"global_profiler": {"tool": "torch"}, "critic": {"profiler": {"enable": True}}},
            "global_profiler.steps is null: no step is profiled",
        ),
        (
            {"global_profiler": {"tool": "torch", "steps": []}, "critic": {"profiler": {"enable": True}}},
            "global_profiler.steps is []: no step is profiled",
        ),
        (
            {"global_profiler": {"tool": "torch", "steps": [3]}},
            "global_profiler.steps names steps and no section has enable: true: nothing is profiled",
        ),
        (
            rollout({"contents": ["gpu", "stack"]}),
            (
                f"{TORCH}.contents names cuda and not cpu: engines record CUDA alone, where verl 0.9 has them "
                f"record the CPU too; name both for that"
            ),
        ),
        (
            rollout({"contents": ["profile-by-stage"]}),
            (
                f"{TORCH}.contents asks for a trace of each stage and there is no window: SGLang makes those only "
                f"of a given number of forward steps, so its agents answer unsupported; write step_start and step_end"
            ),
        ),
        (
            rollout({"schedule": {"active": 1}}),
            (
                f"{TORCH}.schedule is not acted on: it counts mini-batches of a training rank; for the forward "
                f"steps of a rollout write step_start and step_end"
            ),
        ),
        (
            critic("torch", step_start=0, step_end=2),
            (
                f"critic.profiler.tool_config.torch has a window that is not acted on: it counts forward steps of "
                f"an engine; write it in {ROLLOUT}.tool_config.torch, and of a training rank's mini-batches write "
                "a schedule"
            ),
        ),
        (
            critic("torch", schedule={"active": 1}),
            (
                "critic.profiler.tool_config.torch.schedule is set and critic.profiler.tool_config.torch.discrete is "
                "not: only mini-batches are recorded, where verl keeps the stages before them too; with discrete: true "
                "each stage has its trace"
            ),
        ),
        (
            critic("torch", schedule={"wait": 2, "warmup": 1}),
            (
                "critic.profiler.tool_config.torch.schedule is not acted on: active is not set, or 0, which is no "
                "schedule; write how many mini-batches are recorded"
            ),
        ),
        (
            rollout(finish_hook_cmd="send", finish_hook_all_ranks=True, finish_hook_ranks=[1]),
            (
                f"{ROLLOUT}.finish_hook_ranks is [1] and {ROLLOUT}.finish_hook_all_ranks is true, which counts, as in "
                "verl: all are meant; for those alone write finish_hook_all_ranks: false"
            ),
        ),
        (
            rollout(global_tool_config={"nsys": {"discrete": True}}),
            f"{ROLLOUT}.global_tool_config is unknown there, and nothing follows from it; write it in global_profiler",
        ),
        (
            critic("torch_memory", stack_depth=64),
            (
                "critic.profiler.tool_config.torch_memory.stack_depth is not acted on: torch records whole "
                "stacks; narrow `stacks` instead"
            ),
        ),
        (
            critic("torch_memory", kw_args={"a": 1}),
            (
                "critic.profiler.tool_config.torch_memory.kw_args is not acted on: write context, stacks and "
                "trace_alloc_max_entries"
            ),
        ),
        (
            critic("precision_debugger", steps=[1]),
            (
                "critic.profiler.tool_config.precision_debugger.steps is not acted on, by verl neither: write "
                "global_profiler.steps"
            ),
        ),
        (
            {
                **critic("precision_debugger"),
                "global_profiler": {"steps": [1], "global_tool_config": {"precision_debugger": {"steps": [3]}}},
            },
            (
                "global_profiler.global_tool_config.precision_debugger.steps is not acted on, by verl neither: write "
                "global_profiler.steps"
            ),
        ),
        (
            critic("precision_debugger", stages=["actor_updat"]),
            (
                "critic.profiler.tool_config.precision_debugger.stages holds 'actor_updat', which is no stage of "
                "verl; did you mean actor_update?"
            ),
        ),
    ],
)
def test_what_does_not_do_what_it_looks_like(tree: dict[str, Any], said: str) -> None:
    assert remarks(tree) == [said]


# --- errors -----------------------------------------------------------------------------------------------------------

COUNTS = "whole numbers of at least 0"


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (nested("global_profiler.steps", 3), f"global_profiler.steps is 3: allowed is a list of {COUNTS}"),
        (nested("global_profiler.steps", [1, "x"]), f"global_profiler.steps holds 'x': allowed are {COUNTS}"),
        (nested("global_profiler.steps", [True]), f"global_profiler.steps holds true: allowed are {COUNTS}"),
        (nested("global_profiler.steps", ["1-2"]), f"global_profiler.steps holds '1-2': allowed are {COUNTS}"),
        (
            nested("global_profiler.tool", "nsight"),
            "global_profiler.tool is 'nsight': allowed is one of torch, npu, nsys, torch_memory, precision_debugger",
        ),
        (nested("global_profiler.tool", "torch_memry"), "torch_memory, precision_debugger; did you mean torch_memory?"),
        (
            nested("global_profiler.profile_continuous_steps", "maybe"),
            "global_profiler.profile_continuous_steps is 'maybe': allowed is true or false",
        ),
        (
            nested("global_profiler.tool", ["torch"]),
            "global_profiler.tool is ['torch']: allowed is one of torch, npu, nsys, torch_memory, precision_debugger",
        ),
        (
            nested("global_profiler.global_tool_config.torch_memory", [1]),
            "global_profiler.global_tool_config.torch_memory is [1]: allowed is a mapping of keys",
        ),
        (
            rollout(tool="npu", tool_config={"npu": {}, "torch": "all"}),
            f"{TORCH} is 'all': allowed is a mapping of keys",
        ),
        (nested("global_profiler.save_path", 3), "save_path is 3: allowed is a text"),
        (nested("global_profiler", [1]), "global_profiler is [1]: allowed is a mapping of keys"),
        (nested("global_profiler.global_tool_config", 1), "global_tool_config is 1: allowed is a mapping of keys"),
        (nested("actor_rollout_ref", [1]), "actor_rollout_ref is [1]: allowed is a mapping of keys"),
        (nested("actor_rollout_ref.actor", "on"), "actor_rollout_ref.actor is 'on': allowed is a mapping of keys"),
        (
            {"steps": [1], "rollout": {"ranks": [0]}},
            (
                "rollout is a key of our own YAML, and no section of verl's is there: read the file with "
                "ProfilerConfig.from_yaml, or without --verl"
            ),
        ),
        (nested("critic.profiler.enable", 1), "critic.profiler.enable is 1: allowed is true or false"),
        (nested("critic.profiler.ranks", "0,1"), f"critic.profiler.ranks is '0,1': allowed is a list of {COUNTS}"),
        (nested("critic.profiler.tool_config", 1), "critic.profiler.tool_config is 1: allowed is a mapping of keys"),
        (
            rollout({"contents": ["cuda", "shape"]}),
            (
                f"{TORCH}.contents holds 'shape': allowed are MEM, cpu, cuda, gpu, memory, merge-profiles, "
                f"merge_profiles, module, profile-by-stage, profile_by_stage, shapes, stack; did you mean shapes?"
            ),
        ),
        (rollout({"contents": "cpu"}), f"{TORCH}.contents is 'cpu': allowed is a list of MEM, cpu, cuda, gpu, memory"),
        (
            critic("npu", contents=["cuda"]),
            "critic.profiler.tool_config.npu.contents holds 'cuda': allowed are cpu, memory",
        ),
        (
            critic("npu", level="level3"),
            "critic.profiler.tool_config.npu.level is 'level3': allowed is one of level_none, level0, level1, level2",
        ),
        (
            critic("torch", schedule={"active": 1, "wait": -1}),
            "critic.profiler.tool_config.torch.schedule.wait is -1: allowed is a whole number of at least 0",
        ),
        (
            critic("torch_memory", trace_alloc_max_entries=0),
            (
                "critic.profiler.tool_config.torch_memory.trace_alloc_max_entries is 0: allowed is a whole number of "
                "at least 1"
            ),
        ),
        (
            critic("torch_memory", context="some"),
            "critic.profiler.tool_config.torch_memory.context is 'some': allowed is one of null, state, alloc, all",
        ),
        (
            critic("precision_debugger", stages=["x"], strict=True),
            (
                "critic.profiler.tool_config.precision_debugger.stages holds 'x': allowed are actor_compute_log_prob, "
                "actor_update, compute_rm_score, compute_values, critic_update, ref_compute_log_prob"
            ),
        ),
        (
            critic("precision_debugger", stages=[""]),
            "critic.profiler.tool_config.precision_debugger.stages holds '': allowed are names of 1 to 200 characters",
        ),
        (
            critic("precision_debugger", config_path="x" * 600),
            "config_path is '" + "x" * 76 + "…: allowed is a text of at most 512 characters",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(tree: dict[str, Any], text: str) -> None:
    assert text in refused(tree)


def test_the_arguments_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="ranks is 'gpu': allowed are global and replica"):
        ProfilerConfig.from_verl({}, ranks="gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layout is 'flat': allowed are step, verl_step and verl"):
        ProfilerConfig.from_verl({}, layout="flat")  # type: ignore[arg-type]
