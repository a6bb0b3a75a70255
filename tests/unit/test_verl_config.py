"""verl's configuration as ours: its files, its inheritance, its three generations of keys; and each error in full."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from schemas.commands import Finish, Npu, PrecisionDebugger, ProfilePlan, Schedule, TorchMemory, Window
from schemas.profiler import own_yaml, verl
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.files import ConfigWarning
from schemas.profiler.verl_keys import CONTENTS, DEFAULTS, TOOLS
from tests.unit.verl_trees import ACTOR, ROLLOUT, TORCH, actor, critic, plan, refused, remarks, rollout

CONFIGS = Path(__file__).parents[1] / "configs"


# --- whole files ------------------------------------------------------------------------------------------------------


def test_a_file_with_every_key_of_verl() -> None:
    with pytest.warns(ConfigWarning) as said:
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
            finish=Finish(relocate=True),  # the hook is the training ranks' business, or a node would run it twice
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
            "reward": ProfilePlan(
                tool="precision_debugger",
                options=PrecisionDebugger(
                    config_path="/etc/msprobe.json", stages=frozenset({"actor_update"}), strict=True
                ),
                finish=finish,
            ),
        },
        steps=(1, 2, 5),
        save_path="math/long run/profile",
        finish_hook_cmd='upload "$VERL_PROFILE_SAVE_PATH"',
    )
    nsys = "global_profiler.global_tool_config.nsys"
    advice = "training processes are launched with such options, and not by us; give them to `nsys profile` there"
    assert [str(one.message) for one in said] == [
        (
            f"{TORCH}.contents names cuda and not cpu: engines record CUDA alone, where verl 0.9 has them record the "
            "CPU too; name both for that"
        ),
        (
            "actor_rollout_ref.ref.profiler says other things than the actor's: it counts only for a worker that has "
            "the reference model alone, and in a worker that has both the actor's section decides"
        ),
        "reward.profiler.ranks is not acted on, by verl neither: msprobe picks the ranks, from its own file",
        (
            "actor_rollout_ref.ref.profiler.relocate_results is true and the tool is nsys, whose reports are not ours "
            "to move: they lie where nsys was told to write; a finish_hook_cmd finds Ray's place for them in "
            "$VERL_PROFILE_RAY_NSIGHT_DIR"
        ),
        f"{nsys}.controller_nsight_options is not acted on: {advice}",
        f"{nsys}.worker_nsight_options is not acted on: {advice}",
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


def test_an_omegaconf_configuration_is_read_unresolved() -> None:
    tree = OmegaConf.load(CONFIGS / "verl_all_on.yaml")
    with pytest.warns(ConfigWarning):
        expected = ProfilerConfig.from_verl(CONFIGS / "verl_all_on.yaml")
        assert ProfilerConfig.from_verl(tree) == expected  # type: ignore[arg-type]


def test_sections_out_of_an_omegaconf_configuration_may_refer_to_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKS", "[0, 8]")
    whole = OmegaConf.create(
        {
            **rollout({"discrete": True}, ranks="${oc.env:RANKS}", all_ranks="???"),
            "trainer": {"name": "a", "steps": [3], "unknown": "${nothing.here}"},
            "critic": {"profiler": {"enable": False}, "theirs": ["${nothing.here}"]},
        }
    )
    whole.global_profiler.update({"save_path": "/d/${trainer.name}", "steps": "${trainer.steps}"})
    keys = ("global_profiler", "actor_rollout_ref", "critic")
    config = ProfilerConfig.from_verl({key: whole[key] for key in keys})
    assert config == ProfilerConfig.from_verl(whole)
    assert (config.save_path, config.steps, config.plan.ranks) == ("/d/a", (3,), frozenset({0, 8}))
    whole.global_profiler.save_path = "${nothing.here}"
    assert "global_profiler.save_path refers to nothing.here" in refused({key: whole[key] for key in keys})


class Frozen(Mapping[str, object]):
    """A mapping of a trainer's own, as verl's dataclasses are."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        return Frozen(value) if isinstance(value, Mapping) else tuple(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def test_any_mapping_and_sequence_will_do() -> None:
    tree = rollout({"contents": ["cpu"]}, ranks=[0, 3])
    assert ProfilerConfig.from_verl(Frozen(tree)) == ProfilerConfig.from_verl(tree)


def test_nothing_said_is_nothing_profiled() -> None:
    config = ProfilerConfig.from_verl({})
    assert (config.plan.enabled, config.roles, config.steps, config.save_path) == (False, {}, (), "outputs/profile")
    assert ProfilerConfig.from_verl("global_profiler: {tool: null, steps: null}") == config
    assert ProfilerConfig.from_verl({"global_profiler": None, "critic": {"profiler": None}}) == config


def test_defaults_resolve_and_stay_within_what_is_allowed() -> None:
    for tool in TOOLS:
        for sections in ({"critic": {"profiler": {"enable": True}}}, actor()):
            tree = {**sections, "global_profiler": {"tool": tool, "steps": [0]}}
            config = verl.read(tree, {}).config
            assert all(one.tool == tool for one in config.roles.values()) and config.roles
    assert set(DEFAULTS) >= {"global_profiler", "actor_rollout_ref", "critic"}


# --- inheritance ------------------------------------------------------------------------------------------------------


def test_rollouts_are_heirs_of_the_actor_as_in_verl() -> None:
    tool = {"contents": ["cpu", "shapes"], "discrete": True, "profile_token_start": 1, "profile_token_end": 2}
    with pytest.warns(ConfigWarning, match="has a window that is not acted on"):
        config = ProfilerConfig.from_verl(
            actor(ranks=[4], relocate_results=True, finish_hook_all_ranks=True, tool_config={"torch": tool})
        )
    inherited = config.plan
    assert (inherited.enabled, inherited.ranks, inherited.record_shapes) == (True, frozenset({4}), True)
    assert (inherited.discrete, inherited.activities) == (True, frozenset({"cpu"}))
    assert inherited.finish == Finish(relocate=True, hook_all_ranks=True)
    assert inherited.window is None


def test_what_a_role_says_itself_goes_before_what_it_inherits() -> None:
    tree = actor(ranks=[4])
    tree["actor_rollout_ref"]["rollout"] = {"profiler": {"enable": False, "tool": "npu"}}
    tree["critic"] = {"profiler": {"enable": True, "tool": "nsys"}}
    config = ProfilerConfig.from_verl(tree)
    assert (config.plan.enabled, config.plan.tool) == (False, "npu")
    assert {role: one.tool for role, one in config.roles.items()} == {"actor": "torch", "critic": "nsys"}


def test_a_role_that_is_switched_off_is_left_out_and_its_values_are_checked_all_the_same() -> None:
    assert ProfilerConfig.from_verl({"critic": {"profiler": {"enable": False, "tool": "nsys"}}}).roles == {}
    said = refused({"critic": {"profiler": {"enable": False, "ranks": [-1]}}})
    assert said == "critic.profiler.ranks holds -1: allowed are whole numbers of at least 0"


@pytest.mark.parametrize("nothing", [None, "None", "none"])
def test_no_tool_is_none_however_a_command_line_spells_it(nothing: str | None) -> None:
    tree: dict[str, Any] = {"global_profiler": {"tool": nothing}, "actor_rollout_ref": {"actor": {"profiler": {}}}}
    assert verl.read(tree, {}) == (ProfilerConfig.from_verl({}), [])
    tree["critic"] = {"profiler": {"enable": True}}
    tree["global_profiler"]["steps"] = [1]
    assert remarks(tree) == [
        "critic.profiler.enable is true and critic.profiler.tool is null: nothing is profiled there"
    ]


def test_a_file_of_a_verl_that_took_ranks_for_replicas_is_told_by_what_it_has_not() -> None:
    section = {"_target_": "verl.utils.profiler.ProfilerConfig", "ranks": [0, 2]}
    composed = rollout({"discrete": True}, **section)
    (remark,) = remarks(composed)
    assert remark == (
        f"{ROLLOUT}.ranks is [0, 2], read as global ranks, and the file is of a verl up to 0.9.0 (its "
        "sections have no relocate_results), which took them for replicas: for those, read it with "
        'ranks="replica" (--ranks replica)'
    )
    assert verl.read(composed, {}, ranks="replica").remarks == []
    for quiet in ({"ranks": [0]}, {"all_ranks": True, "ranks": []}, {"relocate_results": False}):
        assert remarks(rollout({"discrete": True}, **section | quiet)) == []
    composed["global_profiler"]["relocate_results"] = False
    assert remarks(composed) == []


def test_the_reward_model_s_section_is_found_where_it_was_and_where_it_is() -> None:
    on = {"profiler": {"enable": True, "tool": "torch", "ranks": [2]}}
    steps = {"global_profiler": {"steps": [1]}}
    for key in ("reward", "reward_model"):
        config = ProfilerConfig.from_verl({key: on, **steps})
        assert config.roles["reward"].ranks == frozenset({2})
    said = refused({"reward": on, "reward_model": on})
    assert said == "reward.profiler and reward_model.profiler stand for the same: allowed is one of them"


def test_a_reference_model_of_its_own_is_told_from_one_in_the_actor_s_worker() -> None:
    tree: dict[str, Any] = {
        "global_profiler": {"tool": "torch", "steps": [1]},
        "actor_rollout_ref": {"ref": {"profiler": {"enable": True}}},
    }
    assert remarks(tree) == [
        (
            "actor_rollout_ref.ref.profiler.enable is true and the actor's is not: it counts only for a worker "
            "that has the reference model alone, and in a worker that has both the actor's section decides"
        )
    ]
    tree["actor_rollout_ref"]["actor"] = {"profiler": {"enable": True}}
    tree["actor_rollout_ref"]["rollout"] = {"profiler": {"enable": False}}
    assert remarks(tree) == []
    tree["actor_rollout_ref"]["ref"]["profiler"]["ranks"] = [4]
    (remark,) = remarks(tree)
    assert remark.startswith("actor_rollout_ref.ref.profiler says other things than the actor's: it counts only")


def test_rollouts_that_verl_would_leave_alone_without_a_word_are_profiled_with_one() -> None:
    tree: dict[str, Any] = {"global_profiler": {"tool": "torch", "steps": [1]}}
    tree["actor_rollout_ref"] = {"actor": {"profiler": {"enable": True}}}
    config, (remark,) = verl.read(tree, {})
    assert config.plan.enabled and not config.plan.discrete
    assert "verl does not profile its engines then" in remark and "write enable: false" in remark


def test_the_hook_is_run_by_training_ranks_and_by_agents_of_engines_only_without_them() -> None:
    hook = {"finish_hook_cmd": "send", "relocate_results": True}
    config = ProfilerConfig.from_verl(actor(**hook))
    assert config.roles["actor"].finish == Finish(relocate=True, hook=True)
    assert config.plan.finish == Finish(relocate=True)
    tree = actor(**hook, finish_hook_ranks=[0])
    assert remarks(tree) == []
    tree["actor_rollout_ref"]["rollout"]["profiler"]["finish_hook_ranks"] = [8]
    assert remarks(tree) == [
        (
            f"{ROLLOUT}.finish_hook_ranks is not acted on, by verl neither: training ranks run the command, and those "
            "that their sections name"
        )
    ]
    alone = plan(finish_hook_cmd="send", relocate_results=True)
    assert alone.finish == Finish(relocate=True, hook=True)


def test_sections_that_are_references_are_read_as_what_they_stand_for() -> None:
    tree = actor(ranks=[4])
    tree["actor_rollout_ref"]["actor"]["profiler"]["tool_config"] = {"torch": {"contents": ["cpu"], "discrete": True}}
    tree["actor_rollout_ref"]["rollout"] = {"profiler": {"tool_config": f"${{{ACTOR}.tool_config}}"}}
    config = ProfilerConfig.from_verl(tree)
    assert (config.plan.activities, config.plan.discrete) == (frozenset({"cpu"}), True)
    tree = actor(tool="nsys")
    tree["shared"] = {"nsys": {"discrete": True}}
    tree["global_profiler"]["global_tool_config"] = "${shared}"
    assert ProfilerConfig.from_verl(tree).roles["actor"].discrete


def test_a_hook_for_all_ranks_is_not_one_for_some() -> None:
    """So that what is written as our YAML is read back as the same."""
    asked, _ = verl.read(rollout(finish_hook_cmd="send", finish_hook_all_ranks=True, finish_hook_ranks=[1]), {})
    assert asked.plan.finish == Finish(hook=True, hook_all_ranks=True)
    assert own_yaml.read(own_yaml.written(asked), {}) == asked


def test_what_else_a_trainer_keeps_is_left_alone() -> None:
    class Array:
        """As numpy's: whether it is equal to something is no yes or no."""

        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

    tree = rollout()
    assert ProfilerConfig.from_verl({**tree, "data": {"weights": Array()}}) == ProfilerConfig.from_verl(tree)


def test_what_verl_takes_for_everybody_s_is_said_to_be() -> None:
    asked, remarks = verl.read(rollout(all_ranks=True, ranks=[3]), {})
    assert (asked.plan.ranks, asked.plan.replicas) == (None, None)
    assert remarks == [
        (
            f"{ROLLOUT}.ranks is [3] and {ROLLOUT}.all_ranks is true, which counts, as in verl: all are meant; for "
            "those alone write all_ranks: false"
        )
    ]


@pytest.mark.parametrize(
    ("tool", "options", "others"),
    [
        ("npu", {"schedule": {"active": 2}}, "torch"),
        ("nsys", {"profile_by_stage": True}, "torch and npu"),
        ("torch_memory", {"discrete": True}, "torch, npu and nsys"),
    ],
)
def test_a_key_that_its_tool_does_not_have_changes_nothing(tool: str, options: dict[str, Any], others: str) -> None:
    """An agent would refuse a plan that has it, as one that it can't honour."""
    read = verl.read(critic(tool, **options), {})
    assert read.config == verl.read(critic(tool), {}).config
    (key,) = options
    assert read.remarks == [
        (
            f"critic.profiler.tool_config.{tool}.{key} is unknown there, and nothing follows from it; it is a key of "
            f"{others}"
        )
    ]


def test_a_training_rank_makes_no_trace_of_prefill_and_decode() -> None:
    """Its agent would refuse the plan; what rollouts have from the actor stays."""
    tree = actor(tool_config={"torch": {"contents": ["profile-by-stage", "merge-profiles"]}})
    config, (of_rollouts, of_the_actor) = verl.read(tree, {})
    assert (config.plan.by_stage, config.plan.merge) == (True, True)
    assert (config.roles["actor"].by_stage, config.roles["actor"].merge) == (False, False)
    assert "SGLang makes those only" in of_rollouts
    assert of_the_actor == (
        f"{ACTOR}.tool_config.torch asks for a trace of each stage, which is not acted on: only an engine makes "
        f"those; write it in {ROLLOUT}.tool_config.torch"
    )


# --- who --------------------------------------------------------------------------------------------------------------


def test_ranks_of_rollouts_are_global_ranks_or_replicas() -> None:
    tree = rollout(ranks=[0, 8])
    asked = ProfilerConfig.from_verl(tree).plan
    assert (asked.ranks, asked.replicas) == (frozenset({0, 8}), None)
    asked = ProfilerConfig.from_verl(tree, ranks="replica").plan
    assert (asked.ranks, asked.replicas) == (None, frozenset({0, 8}))


@pytest.mark.parametrize("unit", ["global", "replica"])
def test_without_ranks_the_replica_of_rank_0_is_meant_and_with_all_ranks_everybody(unit: Any) -> None:
    asked = ProfilerConfig.from_verl(rollout(), ranks=unit).plan
    assert (asked.ranks, asked.replicas) == (None, frozenset({0}))
    asked = ProfilerConfig.from_verl(rollout(all_ranks=True), ranks=unit).plan
    assert (asked.ranks, asked.replicas) == (None, None)
    assert ProfilerConfig.from_verl(actor(), ranks=unit).roles["actor"].ranks == frozenset({0})


def test_msprobe_picks_its_ranks_itself() -> None:
    tree = {"global_profiler": {"steps": [1]}, "critic": {"profiler": {"enable": True, "tool": "precision_debugger"}}}
    assert ProfilerConfig.from_verl(tree).roles["critic"].ranks is None


@given(st.lists(st.integers(0, 10_000), min_size=1), st.lists(st.integers(0, 10_000)))
def test_ranks_and_steps_are_kept_whatever_their_order(ranks: list[int], steps: list[int]) -> None:
    tree = rollout(ranks=ranks)
    tree["global_profiler"]["steps"] = steps
    config = verl.read(tree, {}).config
    assert config.plan.ranks == frozenset(ranks)
    assert config.steps == tuple(sorted(set(steps)))


# --- windows ----------------------------------------------------------------------------------------------------------

KEYS = [("step_start", "step_end"), ("profile_token_start", "profile_token_end")]


@pytest.mark.parametrize(("first", "last"), KEYS)
@given(start=st.integers(0, 10_000), length=st.integers(1, 10_000))
def test_a_window_is_what_was_written(first: str, last: str, start: int, length: int) -> None:
    assert plan({first: start, last: start + length}).window == Window(start, start + length)
    assert plan({first: start, "num_steps": length}).window == Window(start, start + length)
    assert plan({first: start, last: start + length, "num_steps": length}).window == Window(start, start + length)


@pytest.mark.parametrize(("first", "last"), KEYS)
@given(start=st.integers(0, 100), end=st.integers(0, 100))
def test_a_window_that_holds_nothing_is_an_error_with_both_values(first: str, last: str, start: int, end: int) -> None:
    if end <= start:
        assert refused(rollout({first: start, last: end})) == (
            f"{TORCH}.{last} is {end} and {first} is {start}: allowed is an end larger than the start, or else the "
            "window [start, end) holds no forward step"
        )


@pytest.mark.parametrize(
    ("said", "window"),
    [
        ({}, None),
        ({"step_start": 0, "step_end": -1}, None),
        ({"step_start": -1, "step_end": -1}, None),
        ({"step_start": 0, "step_end": 1}, Window(0, 1)),
        ({"step_end": 2}, Window(0, 2)),
        ({"num_steps": 3}, Window(0, 3)),
        ({"step_start": 0, "step_end": -1, "num_steps": 3}, Window(0, 3)),
        ({"profile_token_start": None, "profile_token_end": None}, None),
        ({"profile_token_start": None, "profile_token_end": 3}, Window(0, 3)),
        ({"profile_token_start": 12, "profile_token_end": None}, Window(12)),
        ({"step_start": 5}, Window(5)),
        ({"step_start": 0, "step_end": -1}, None),
        ({"step_start": -1, "step_end": -1, "profile_token_start": 12, "profile_token_end": 46}, Window(12, 46)),
        ({"step_start": 2, "step_end": 5, "profile_token_start": 2, "profile_token_end": 5}, Window(2, 5)),
    ],
)
def test_each_generation_s_way_to_say_nothing(said: dict[str, object], window: Window | None) -> None:
    assert plan(said).window == window


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"step_end": 0},
            (
                "step_end is 0 and the start is not set, which is 0: allowed is an end larger than the start, or "
                "else the window [start, end) holds no forward step"
            ),
        ),
        (
            {"step_start": -2, "step_end": 5},
            "step_start is -2 (step_end is 5): allowed is a whole number of at least -1",
        ),
        (
            {"step_start": 1, "step_end": -3},
            "step_end is -3 (step_start is 1): allowed is a whole number of at least -1",
        ),
        (
            {"profile_token_start": -1, "profile_token_end": 5},
            "profile_token_start is -1 (profile_token_end is 5): allowed is a whole number of at least 0",
        ),
        ({"step_start": 1.5}, "step_start is 1.5: allowed is a whole number of at least -1"),
        ({"step_end": True}, "step_end is true: allowed is a whole number of at least -1"),
        ({"num_steps": 0}, "num_steps is 0: allowed is a whole number of at least 1"),
    ],
)
def test_a_window_that_can_t_be_kept(said: dict[str, object], text: str) -> None:
    assert refused(rollout(said)) == f"{TORCH}.{text}"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"step_start": 1, "step_end": 4, "profile_token_start": 2},
            "step_start is 1, profile_token_start is 2, step_end is 4; allowed is one of the two, or equal values",
        ),
        (
            {"step_end": 4, "profile_token_end": 5},
            "step_end is 4, profile_token_end is 5; allowed is one of the two, or equal values",
        ),
        (
            {"step_start": 1, "step_end": 4, "num_steps": 2},
            "step_start is 1, step_end is 4, num_steps is 2; allowed is an end or a number",
        ),
    ],
)
def test_a_window_that_is_said_in_two_ways(said: dict[str, object], text: str) -> None:
    assert refused(rollout(said)) == f"{TORCH} says two things: {text}"


def test_an_npu_s_window_is_read_from_its_own_section() -> None:
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
def test_torch_s_activities(contents: list[str], engine: set[str], rank: set[str]) -> None:
    config = verl.read(actor(tool_config={"torch": {"contents": contents}}), {}).config
    assert set[str](config.plan.activities) == engine
    assert set[str](config.roles["actor"].activities) == rank


def test_an_npu_takes_what_is_named_and_everything_for_null() -> None:
    def read(contents: object) -> ProfilePlan:
        config = ProfilerConfig.from_verl(
            actor(tool="npu", tool_config={"npu": {"contents": contents, "level": "level1"}})
        )
        return config.roles["actor"]

    assert read([]) == ProfilePlan(tool="npu", ranks=frozenset({0}), options=Npu(level="level1", analysis=True))
    assert read(["npu", "module"]).activities == {"cpu", "npu"} and read(["npu", "module"]).with_modules
    everything = read(None)
    assert everything.activities == {"cpu", "npu", "memory"}
    assert everything.with_stack and everything.with_modules and everything.record_shapes


@pytest.mark.parametrize("by_stage", ["profile-by-stage", "profile_by_stage"])
@pytest.mark.parametrize("merge", ["merge-profiles", "merge_profiles"])
def test_both_spellings_of_stages_and_merging(by_stage: str, merge: str) -> None:
    asked = plan({"contents": [by_stage, merge], "step_end": 2})
    assert asked.by_stage and asked.merge
    assert plan({"profile_by_stage": True, "merge_profiles": True, "step_end": 2}) == asked


def test_every_content_is_read_for_its_tool() -> None:
    for tool, contents in CONTENTS.items():
        asked = plan(tool=tool, tool_config={tool: {"contents": sorted(contents), "num_steps": 1}})
        flags = (asked.with_stack, asked.with_modules, asked.record_shapes, asked.by_stage, asked.merge)
        assert flags == (True,) * 5
        assert asked.activities == {"cpu", "memory", {"torch": "cuda", "npu": "npu"}[tool]}


@pytest.mark.parametrize("tool", ["nsys", "torch_memory", "precision_debugger"])
def test_what_no_engine_runs_stays_in_the_plan(tool: str) -> None:
    asked = plan(tool=tool)
    assert (asked.enabled, asked.tool) == (True, tool)


def test_a_schedule_is_on_when_it_records_something() -> None:
    torch = {"schedule": {"wait": 1, "warmup": 2, "active": 3, "repeat": 4, "skip_first": 5, "name": "torch_schedule"}}
    config = ProfilerConfig.from_verl(actor(tool_config={"torch": torch}))
    assert config.roles["actor"].schedule == Schedule(wait=1, warmup=2, active=3, repeat=4, skip_first=5)
    for schedule in (None, {"active": 0, "wait": 0}, {}):
        config = ProfilerConfig.from_verl(actor(tool_config={"torch": {"schedule": schedule}}))
        assert config.roles["actor"].schedule is None


def test_a_schedule_without_repeat_is_of_one_window_in_the_trace_of_a_session_as_verl_has_it() -> None:
    for discrete, repeat in ((False, 1), (True, 0)):
        torch = {"discrete": discrete, "schedule": {"active": 2, "skip_first": 1}}
        config = ProfilerConfig.from_verl(actor(tool_config={"torch": torch}))
        assert config.roles["actor"].schedule == Schedule(active=2, skip_first=1, repeat=repeat)


def test_a_run_has_one_root_and_one_command() -> None:
    tree = actor(save_path="/a", finish_hook_cmd="send")
    tree["global_profiler"]["save_path"] = "/a"
    tree["critic"] = {"profiler": {"enable": True, "save_path": "/b", "finish_hook_cmd": "post"}}
    tree["reward"] = {"profiler": {"enable": False, "save_path": "/c", "finish_hook_cmd": "never"}}
    config, said = verl.read(tree, {})
    assert (config.save_path, config.finish_hook_cmd) == ("/a", "send")
    assert all(one.finish.hook for one in config.roles.values())
    advice = "and a run has one, which is the latter: start the agents of the former with their own"
    assert said == [
        f"critic.profiler.save_path is '/b' and {ROLLOUT}.save_path is '/a', {advice}",
        f"critic.profiler.finish_hook_cmd is 'post' and {ROLLOUT}.finish_hook_cmd is 'send', {advice}",
    ]
