"""verl's configuration as ours: its files, its inheritance and its three generations of keys."""

from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

from schemas.commands import Finish, Npu, ProfilePlan, Schedule, TorchMemory, Window
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.readers import ConfigWarning
from schemas.profiler.settings import TOOLS
from schemas.profiler.verl_keys import NpuContent, TorchContent
from tests.unit.verl_trees import ROLLOUT, TORCH, actor, critic, error_of, plan, read, rollout, warnings_of

CONFIGS = Path(__file__).parents[1] / "configs"


# --- whole files ------------------------------------------------------------------------------------------------------


def test_a_file_with_every_key_of_verl() -> None:
    with pytest.warns(ConfigWarning) as issued:
        config = ProfilerConfig.from_verl(CONFIGS / "verl_all_on.yaml")
    finish = Finish(relocate=True, hook=True, hook_ranks=frozenset({0, 8}))
    both = frozenset({0, 8})
    assert config == ProfilerConfig(
        plan=ProfilePlan(
            ranks=both,
            window=Window(12, 46),
            activities=frozenset({"cuda"}),
            with_stack=True,
            discrete=True,
            finish=Finish(relocate=True),  # training ranks run the hook; here it would run a second time
        ),
        roles={
            "actor": ProfilePlan(
                ranks=both,
                activities=frozenset({"cpu", "cuda"}),
                with_stack=True,
                discrete=True,
                schedule=Schedule(skip_first=1, warmup=1, active=2, repeat=1),
                finish=finish,
            ),
            "ref": ProfilePlan(tool="nsys", discrete=True, finish=finish),
            "critic": ProfilePlan(
                tool="torch_memory",
                ranks=frozenset({0}),
                options=TorchMemory(max_entries=50_000, context="alloc", stacks="python", snapshot_steps=2),
                finish=finish,
            ),
        },
        steps=(1, 2, 5),
        save_path="math/long run/profile",
        finish_hook_cmd='upload "$VERL_PROFILE_SAVE_PATH"',
    )
    assert [str(warning.message) for warning in issued] == [
        "reward.profiler.enable is true and reward.profiler.tool is 'precision_debugger': nothing is profiled there",
    ]


def test_the_example_of_pull_request_5025_loads_as_it_is() -> None:
    config = ProfilerConfig.from_verl(CONFIGS / "verl_pull_5025.yaml", ranks="replica", layout="verl_step")
    assert config == ProfilerConfig(
        plan=ProfilePlan(
            replicas=frozenset({0, 1, 2}),
            window=Window(0, 1),
            activities=frozenset({"cpu", "cuda"}),
            with_stack=True,
            record_shapes=True,
            by_stage=True,
            merge=True,
            discrete=True,
            layout="verl_step",
        ),
        steps=(1, 2),
        save_path="./outputs/profile",
    )


def test_an_omegaconf_configuration_need_not_be_resolved() -> None:
    tree = OmegaConf.load(CONFIGS / "verl_all_on.yaml")
    with pytest.warns(ConfigWarning):
        expected = ProfilerConfig.from_verl(CONFIGS / "verl_all_on.yaml")
        assert ProfilerConfig.from_verl(tree) == expected  # type: ignore[arg-type]


def frozen(value: object) -> Any:
    """Return mappings and sequences of other types, as verl's dataclasses have them."""
    if isinstance(value, dict):
        return MappingProxyType({key: frozen(entry) for key, entry in value.items()})
    return tuple(value) if isinstance(value, list) else value


def test_any_mapping_and_sequence_is_read() -> None:
    tree = rollout({"contents": ["cpu"]}, ranks=[0, 3])
    assert ProfilerConfig.from_verl(frozen(tree)) == ProfilerConfig.from_verl(tree)


def test_an_empty_configuration_profiles_nothing() -> None:
    config = ProfilerConfig.from_verl({})
    assert (config.plan.enabled, config.roles, config.steps, config.save_path) == (False, {}, (), "outputs/profile")
    assert ProfilerConfig.from_verl("global_profiler: {tool: null, steps: null}") == config
    assert ProfilerConfig.from_verl({"global_profiler": None, "critic": {"profiler": None}}) == config


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_every_tool_has_valid_defaults(tool: str) -> None:
    for sections in ({"critic": {"profiler": {"enable": True}}}, actor()):
        config = read({**sections, "global_profiler": {"tool": tool, "steps": [0]}}).config
        assert {plan.tool for plan in config.roles.values()} == {tool}


# --- inheritance ------------------------------------------------------------------------------------------------------


def test_rollouts_inherit_from_the_actor_as_in_verl() -> None:
    tool = {"contents": ["cpu", "shapes"], "discrete": True, "profile_token_start": 1, "profile_token_end": 2}
    with pytest.warns(ConfigWarning, match="has a window, which has no effect"):
        config = ProfilerConfig.from_verl(
            actor(ranks=[4], relocate_results=True, finish_hook_all_ranks=True, tool_config={"torch": tool})
        )
    inherited = config.plan
    assert (inherited.enabled, inherited.ranks, inherited.record_shapes) == (True, frozenset({4}), True)
    assert (inherited.discrete, inherited.activities) == (True, frozenset({"cpu"}))
    assert inherited.finish == Finish(relocate=True, hook_all_ranks=True)
    assert inherited.window is None


def test_a_roles_own_value_overrides_an_inherited_one() -> None:
    tree = actor(ranks=[4])
    tree["actor_rollout_ref"]["rollout"] = {"profiler": {"enable": False, "tool": "npu"}}
    tree["critic"] = {"profiler": {"enable": True, "tool": "nsys"}}
    config = ProfilerConfig.from_verl(tree)
    assert (config.plan.enabled, config.plan.tool) == (False, "npu")
    assert {role: plan.tool for role, plan in config.roles.items()} == {"actor": "torch", "critic": "nsys"}


def test_a_role_that_is_switched_off_is_left_out_but_still_checked() -> None:
    assert ProfilerConfig.from_verl({"critic": {"profiler": {"enable": False, "tool": "nsys"}}}).roles == {}
    error = error_of({"critic": {"profiler": {"enable": False, "ranks": [-1]}}})
    assert error == "critic.profiler.ranks[0] is -1: allowed is a whole number of at least 0"


@pytest.mark.parametrize("nothing", [None, "None", "none"])
def test_a_tool_of_none_is_no_tool_in_every_spelling(nothing: str | None) -> None:
    tree: dict[str, Any] = {"global_profiler": {"tool": nothing}, "actor_rollout_ref": {"actor": {"profiler": {}}}}
    assert read(tree) == (ProfilerConfig.from_verl({}), [])
    tree["critic"] = {"profiler": {"enable": True}}
    tree["global_profiler"]["steps"] = [1]
    assert warnings_of(tree) == [
        "critic.profiler.enable is true and critic.profiler.tool is null: nothing is profiled there"
    ]


def test_a_file_from_a_verl_whose_ranks_were_replicas_is_recognized() -> None:
    section = {"_target_": "verl.utils.profiler.ProfilerConfig", "ranks": [0, 2]}
    composed = rollout({"discrete": True}, **section)
    assert warnings_of(composed) == [
        (
            f"{ROLLOUT}.ranks is [0, 2], read as global ranks, and the file is from a verl up to 0.9.0 (its sections "
            "have no relocate_results), where they were replicas: to read them as replicas, pass "
            'ranks="replica" (--ranks replica)'
        )
    ]
    assert read(composed, ranks="replica").warnings == []
    for quiet in ({"ranks": [0]}, {"all_ranks": True, "ranks": []}, {"relocate_results": False}):
        assert warnings_of(rollout({"discrete": True}, **section | quiet)) == []
    composed["global_profiler"]["relocate_results"] = False
    assert warnings_of(composed) == []


def test_the_reward_models_section_is_found_under_its_old_and_new_name() -> None:
    on = {"profiler": {"enable": True, "tool": "torch", "ranks": [2]}}
    steps = {"global_profiler": {"steps": [1]}}
    for key in ("reward", "reward_model"):
        config = ProfilerConfig.from_verl({key: on, **steps})
        assert config.roles["reward"].ranks == frozenset({2})
    error = error_of({"reward": on, "reward_model": on})
    assert error == "reward.profiler and reward_model.profiler are two names of one section: allowed is one of them"


def test_rollouts_that_verl_would_silently_skip_are_profiled() -> None:
    tree: dict[str, Any] = {"global_profiler": {"tool": "torch", "steps": [1]}}
    tree["actor_rollout_ref"] = {"actor": {"profiler": {"enable": True}}}
    config, warnings = read(tree)
    assert config.plan.enabled and not config.plan.discrete and warnings == []


def test_agents_of_engines_run_the_hook_only_if_no_training_rank_does() -> None:
    hook = {"finish_hook_cmd": "send", "relocate_results": True}
    config = ProfilerConfig.from_verl(actor(**hook))
    assert config.roles["actor"].finish == Finish(relocate=True, hook=True)
    assert config.plan.finish == Finish(relocate=True)
    alone = plan(finish_hook_cmd="send", relocate_results=True)
    assert alone.finish == Finish(relocate=True, hook=True)


def test_a_hook_for_all_ranks_drops_the_ranks_beside_it() -> None:
    tree = rollout(finish_hook_cmd="send", finish_hook_all_ranks=True, finish_hook_ranks=[1])
    assert read(tree).config.plan.finish == Finish(hook=True, hook_all_ranks=True)


def test_other_objects_of_a_trainer_are_left_alone() -> None:
    class Array:
        """Like numpy's: comparing it yields no bool."""

        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

    tree = rollout()
    assert ProfilerConfig.from_verl({**tree, "data": {"weights": Array()}}) == ProfilerConfig.from_verl(tree)


def test_all_ranks_counts_where_ranks_are_listed_too() -> None:
    config = read(rollout(all_ranks=True, ranks=[3])).config
    assert (config.plan.ranks, config.plan.replicas) == (None, None)


@pytest.mark.parametrize(
    ("tool", "options"),
    [("npu", {"schedule": {"active": 2}}), ("nsys", {"profile_by_stage": True}), ("torch_memory", {"discrete": True})],
)
def test_a_key_that_its_tool_does_not_have_changes_nothing(tool: str, options: dict[str, Any]) -> None:
    """An agent would refuse a plan that has it."""
    config, warnings = read(critic(tool, **options))
    assert config == read(critic(tool)).config
    assert warnings == [f"critic.profiler.tool_config.{tool}.{key} is unknown and has no effect" for key in options]


def test_a_training_rank_makes_no_trace_of_prefill_and_decode() -> None:
    """Its agent would refuse the plan. What rollouts inherit from the actor stays."""
    tree = actor(tool_config={"torch": {"contents": ["profile-by-stage", "merge-profiles"]}})
    config = read(tree).config
    assert (config.plan.by_stage, config.plan.merge) == (True, True)
    assert (config.roles["actor"].by_stage, config.roles["actor"].merge) == (False, False)


# --- who --------------------------------------------------------------------------------------------------------------


def test_ranks_of_rollouts_are_global_ranks_or_replicas() -> None:
    tree = rollout(ranks=[0, 8])
    parsed = ProfilerConfig.from_verl(tree).plan
    assert (parsed.ranks, parsed.replicas) == (frozenset({0, 8}), None)
    parsed = ProfilerConfig.from_verl(tree, ranks="replica").plan
    assert (parsed.ranks, parsed.replicas) == (None, frozenset({0, 8}))


@pytest.mark.parametrize("unit", ["global", "replica"])
def test_without_ranks_the_replica_of_rank_0_is_profiled_and_with_all_ranks_every_replica(unit: Any) -> None:
    parsed = ProfilerConfig.from_verl(rollout(), ranks=unit).plan
    assert (parsed.ranks, parsed.replicas) == (None, frozenset({0}))
    parsed = ProfilerConfig.from_verl(rollout(all_ranks=True), ranks=unit).plan
    assert (parsed.ranks, parsed.replicas) == (None, None)
    assert ProfilerConfig.from_verl(actor(), ranks=unit).roles["actor"].ranks == frozenset({0})


# --- windows ----------------------------------------------------------------------------------------------------------

EMPTY = "allowed is an end larger than the start; the window [start, end) would be empty"


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({}, None),
        ({"step_start": 0, "step_end": -1}, None),
        ({"step_start": 0, "step_end": 1}, Window(0, 1)),
        ({"step_end": 2}, Window(0, 2)),
        ({"num_steps": 3}, Window(0, 3)),
        ({"step_start": 0, "step_end": -1, "num_steps": 3}, Window(0, 3)),
        ({"profile_token_start": None, "profile_token_end": None}, None),
        ({"profile_token_start": None, "profile_token_end": 3}, Window(0, 3)),
        ({"profile_token_start": 12, "profile_token_end": None}, Window(12)),
        ({"step_start": -1, "step_end": -1, "profile_token_start": 12, "profile_token_end": 46}, Window(12, 46)),
        ({"step_start": 2, "step_end": 5, "profile_token_start": 2, "profile_token_end": 5}, Window(2, 5)),
    ],
)
def test_a_window_in_the_keys_of_each_generation(keys: dict[str, object], window: Window | None) -> None:
    assert plan(keys).window == window


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"step_end": 0}, f"step_end is 0 and the start is 0: {EMPTY}"),
        ({"step_start": -2, "step_end": 5}, "step_start is -2: allowed is a whole number of at least -1"),
        ({"step_start": 1, "step_end": -3}, "step_end is -3: allowed is a whole number of at least -1"),
        ({"profile_token_start": -1}, "profile_token_start is -1: allowed is a whole number of at least 0"),
        ({"step_start": 1.5}, "step_start is 1.5: allowed is a whole number of at least -1"),
        ({"step_end": True}, "step_end is true: allowed is a whole number of at least -1"),
        ({"num_steps": 0}, "num_steps is 0: allowed is a whole number of at least 1"),
    ],
)
def test_an_impossible_window_is_an_error(keys: dict[str, object], text: str) -> None:
    assert error_of(rollout(keys)) == f"{TORCH}.{text}"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"step_start": 1, "step_end": 4, "profile_token_start": 2},
            "step_start is 1, profile_token_start is 2, step_end is 4",
        ),
        ({"step_end": 4, "profile_token_end": 5}, "step_end is 4, profile_token_end is 5"),
        ({"step_start": 1, "step_end": 4, "num_steps": 2}, "step_start is 1, step_end is 4, num_steps is 2"),
    ],
)
def test_two_generations_of_keys_may_not_contradict_each_other(keys: dict[str, object], text: str) -> None:
    allowed = "allowed is one start and one end, or equal values"
    assert error_of(rollout(keys)) == f"{TORCH} contradicts itself: {text}; {allowed}"


def test_an_npus_window_is_read_from_its_own_section() -> None:
    tools = {"npu": {"profile_token_start": 1, "profile_token_end": 3}, "torch": {"step_start": 7, "step_end": 3}}
    assert plan(tool="npu", tool_config=tools).window == Window(1, 3)


# --- what -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "engine", "rank"),
    [
        ([], {"cpu", "cuda"}, {"cpu", "cuda"}),
        (["cpu"], {"cpu"}, {"cpu"}),
        (["cuda"], {"cuda"}, {"cpu", "cuda"}),
        (["gpu"], {"cuda"}, {"cpu", "cuda"}),
        (["cpu", "cuda"], {"cpu", "cuda"}, {"cpu", "cuda"}),
        (["stack"], {"cpu", "cuda"}, {"cpu"}),
        (["memory"], {"cpu", "cuda", "memory"}, {"cpu", "memory"}),
        (["MEM", "cpu"], {"cpu", "memory"}, {"cpu", "memory"}),
    ],
)
def test_activities_of_torch(contents: list[str], engine: set[str], rank: set[str]) -> None:
    config = read(actor(tool_config={"torch": {"contents": contents}})).config
    assert set[str](config.plan.activities) == engine
    assert set[str](config.roles["actor"].activities) == rank


def test_an_npu_records_what_is_listed_and_everything_for_null() -> None:
    def read(contents: object) -> ProfilePlan:
        tool = {"npu": {"contents": contents, "level": "level1"}}
        return ProfilerConfig.from_verl(actor(tool="npu", tool_config=tool)).roles["actor"]

    assert read([]) == ProfilePlan(tool="npu", ranks=frozenset({0}), options=Npu(level="level1", analysis=True))
    assert read(["npu", "module"]).activities == {"cpu", "npu"} and read(["npu", "module"]).with_modules
    everything = read(None)
    assert everything.activities == {"cpu", "npu", "memory"}
    assert everything.with_stack and everything.with_modules and everything.record_shapes


@pytest.mark.parametrize(("tool", "kind"), [("torch", TorchContent), ("npu", NpuContent)])
def test_every_content_is_read_for_its_tool(tool: str, kind: Any) -> None:
    contents = sorted(content for literal in get_args(kind) for content in get_args(literal) or (literal,))
    parsed = plan(tool=tool, tool_config={tool: {"contents": contents, "num_steps": 1}})
    flags = (parsed.with_stack, parsed.with_modules, parsed.record_shapes, parsed.by_stage, parsed.merge)
    assert flags == (True,) * 5
    assert parsed.activities == {"cpu", "memory", {"torch": "cuda", "npu": "npu"}[tool]}


def test_a_schedule_is_on_when_it_records_something() -> None:
    torch = {"schedule": {"wait": 1, "warmup": 2, "active": 3, "repeat": 4, "skip_first": 5, "name": "torch_schedule"}}
    config = ProfilerConfig.from_verl(actor(tool_config={"torch": torch}))
    assert config.roles["actor"].schedule == Schedule(wait=1, warmup=2, active=3, repeat=4, skip_first=5)
    for schedule in (None, {"active": 0, "wait": 0}):
        config = ProfilerConfig.from_verl(actor(tool_config={"torch": {"schedule": schedule}}))
        assert config.roles["actor"].schedule is None


def test_a_schedule_without_repeat_has_one_window_for_each_session_as_in_verl() -> None:
    for discrete, repeat in ((False, 1), (True, 0)):
        torch = {"discrete": discrete, "schedule": {"active": 2, "skip_first": 1}}
        config = ProfilerConfig.from_verl(actor(tool_config={"torch": torch}))
        assert config.roles["actor"].schedule == Schedule(active=2, skip_first=1, repeat=repeat)


def test_a_run_has_one_root_and_one_command() -> None:
    tree = actor(save_path="/a", finish_hook_cmd="send")
    tree["global_profiler"]["save_path"] = "/a"
    tree["critic"] = {"profiler": {"enable": True, "save_path": "/b", "finish_hook_cmd": "post"}}
    tree["reward"] = {"profiler": {"enable": False, "save_path": "/c", "finish_hook_cmd": "never"}}
    config, warnings = read(tree)
    assert (config.save_path, config.finish_hook_cmd) == ("/a", "send")
    assert all(plan.finish.hook for plan in config.roles.values())
    assert warnings == []
