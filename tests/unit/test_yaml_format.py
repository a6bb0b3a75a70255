"""Our own YAML for profiling: every plan can be written and read back, and each error is shown in full."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.commands import Finish, Npu, PrecisionDebugger, ProfilePlan, Schedule, TorchMemory, Window
from schemas.errors import ConfigError
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.readers import yaml_text
from schemas.profiler.yaml_format import ranges
from tests.unit.verl_trees import nested

CONFIGS = Path(__file__).parents[1] / "configs"


def read(source: Any) -> ProfilerConfig:
    return ProfilerConfig.from_yaml(source)


def error_of(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(source)
    return str(caught.value)


def test_a_file() -> None:
    finish = Finish(relocate=True, hook=True, hook_all_ranks=True)
    assert read(CONFIGS / "profiler.yaml") == ProfilerConfig(
        plan=ProfilePlan(
            ranks=frozenset({0, 8}),
            window=Window(0, 4),
            activities=frozenset({"cpu", "cuda"}),
            with_stack=True,
            record_shapes=True,
            finish=finish,
        ),
        roles={
            "actor": ProfilePlan(
                ranks=frozenset({0}),
                activities=frozenset({"cpu", "cuda"}),
                discrete=True,
                schedule=Schedule(active=2, warmup=1),
                finish=finish,
            ),
            "critic": ProfilePlan(
                tool="torch_memory",
                options=TorchMemory(snapshot_steps=2),
                finish=Finish(hook=True, hook_all_ranks=True),
            ),
        },
        steps=(1, 5, 6, 7, 8),
        save_path="/data/profile",
        finish_hook_cmd="upload $VERL_PROFILE_SAVE_PATH",
    )


def test_the_source_is_a_path_or_yaml_text_or_a_mapping() -> None:
    path = CONFIGS / "profiler.yaml"
    assert read(path) == read(str(path)) == read(path.read_text("utf-8"))
    assert read("steps: [1]") == read({"steps": [1]}) == read("{steps: [1]}")


def test_the_sections_of_a_file_are_profiled_and_without_any_the_rollouts() -> None:
    assert read("steps: [1]").plan.enabled
    only = read({"steps": [1], "roles": {"actor": True}})
    assert (only.plan.enabled, only.roles["actor"].enabled) == (False, True)
    assert read({"rollout": {}, "roles": {"actor": None}}).plan.enabled
    assert not read({"rollout": False}).plan.enabled
    assert not read({"rollout": {"enabled": False}}).plan.enabled


def test_defaults_of_a_section() -> None:
    plan = read({"rollout": {}}).plan
    assert plan == ProfilePlan(activities=frozenset({"cpu", "cuda"}))
    assert read({"rollout": {"tool": "npu"}}).plan.activities == frozenset({"cpu", "npu"})
    assert read({"rollout": {"contents": []}}).plan.activities == frozenset()


def test_all_selects_everything_and_an_empty_list_nothing() -> None:
    plan = read({"rollout": {"ranks": "all", "replicas": "all", "steps": "all"}}).plan
    assert (plan.ranks, plan.replicas, plan.steps) == (None, None, None)
    assert read({"rollout": {"ranks": []}}).plan.ranks == frozenset()


def test_finish_applies_to_all_sections_and_each_may_change_it() -> None:
    config = read(
        {
            "rollout": {},
            "roles": {"actor": {"finish": {"hook": False}}, "critic": {"finish": {"ranks": [3, "5-6"]}}, "ref": {}},
            "finish": {"relocate": True, "hook": "send", "ranks": "profiled"},
        }
    )
    assert config.finish_hook_cmd == "send"
    assert config.plan.finish == config.roles["ref"].finish == Finish(relocate=True, hook=True)
    assert config.roles["actor"].finish == Finish(relocate=True)
    assert config.roles["critic"].finish == Finish(relocate=True, hook=True, hook_ranks=frozenset({3, 5, 6}))


def test_a_layout_applies_to_all_sections_and_each_may_change_it() -> None:
    config = read({"layout": "verl", "rollout": {}, "roles": {"actor": {"layout": "step"}}})
    assert (config.plan.layout, config.roles["actor"].layout) == ("verl", "step")


def test_a_date_is_text_and_so_are_numbers_that_yaml_1_1_reads_in_base_60_or_8() -> None:
    assert read("save_path: 2026-02-30\n").save_path == "2026-02-30"
    assert error_of("steps: [1:30]") == f"steps[0] is '1:30': allowed is {NUMBER}"
    assert error_of("steps: [010]") == f"steps[0] is '010': allowed is {NUMBER}"


# --- there and back ---------------------------------------------------------------------------------------------------

some = st.frozensets(st.integers(0, 60))
count = st.integers(0, 9)
windows = st.builds(lambda start, length: Window(start, start + length), st.integers(0, 99), st.integers(1, 99))
options = {
    "torch": st.none(),
    "nsys": st.none(),
    "npu": st.none()
    | st.builds(Npu, level=st.sampled_from(["level_none", "level0", "level2"]), analysis=st.booleans()),
    "torch_memory": st.none()
    | st.builds(
        TorchMemory,
        max_entries=st.integers(1, 9),
        context=st.sampled_from([None, "state", "alloc", "all"]),
        stacks=st.sampled_from(["python", "all"]),
        snapshot_steps=st.integers(1, 9),
    ),
    "precision_debugger": st.none()
    | st.builds(
        PrecisionDebugger,
        config_path=st.text("/a.:# '", max_size=9),
        stages=st.none() | st.frozensets(st.sampled_from(["actor_update", "null", "1", "a b"])),
        strict=st.booleans(),
    ),
}
finishes = st.builds(Finish, relocate=st.booleans(), hook=st.booleans(), hook_ranks=some) | st.builds(
    Finish, relocate=st.booleans(), hook=st.booleans(), hook_all_ranks=st.just(True)
)
schedules = st.builds(Schedule, active=st.integers(1, 9), wait=count, warmup=count, repeat=count, skip_first=count)


def plan(tool: str, role: bool) -> st.SearchStrategy[ProfilePlan]:
    chosen, nothing = tool in ("torch", "npu"), ProfilePlan().activities
    return st.builds(
        ProfilePlan,
        enabled=st.booleans(),
        tool=st.just(tool),
        steps=st.none() | some,
        ranks=st.none() | some,
        replicas=st.just(None) if role else st.none() | some,
        window=st.just(None) if role else st.none() | windows,
        activities=st.frozensets(st.sampled_from(["cpu", "cuda", "memory", "npu"])) if chosen else st.just(nothing),
        with_stack=st.booleans() if chosen else st.just(False),
        with_modules=st.booleans() if chosen else st.just(False),
        record_shapes=st.booleans() if chosen else st.just(False),
        by_stage=st.just(False) if role else st.booleans(),
        merge=st.just(False) if role else st.booleans(),
        discrete=st.just(False) if tool == "torch_memory" else st.booleans(),
        schedule=st.none() | schedules if role and tool == "torch" else st.none(),
        options=options[tool],
        layout=st.sampled_from(["step", "verl_step", "verl"]),
        finish=finishes,
    )


tools = st.sampled_from(sorted(options))
plans = tools.flatmap(lambda tool: plan(tool, role=False))
of_roles = tools.flatmap(lambda tool: plan(tool, role=True))
configs = st.builds(
    ProfilerConfig,
    plan=plans,
    roles=st.dictionaries(st.sampled_from(["actor", "critic", "ref", "no", "my-role_2"]), of_roles, max_size=3),
    steps=some.map(lambda steps: tuple(sorted(steps))),
    continuous=st.booleans(),
    timeout_ms=st.integers(1, 99_999),
    save_path=st.text("/a.:# '${}", max_size=9),
    finish_hook_cmd=st.text("${}a:#'\" \n", max_size=9),
)


@given(configs)
def test_every_configuration_is_read_back_from_the_yaml_it_is_written_as(config: ProfilerConfig) -> None:
    assert read(yaml_text(config)) == config


@given(st.frozensets(st.integers(0, 500), max_size=60))
def test_ranges_hold_the_steps_and_nothing_else(steps: frozenset[int]) -> None:
    assert frozenset(read({"steps": list(ranges(steps))}).steps) == steps


@given(st.integers(0, 10_000), st.integers(-5, 10_000))
def test_a_window_is_what_was_written_or_an_error(start: int, end: int) -> None:
    tree = {"rollout": {"window": [start, end]}}
    if end > start:
        assert read(tree).plan.window == Window(start, end)
    else:
        assert error_of(tree) == f"rollout.window is [{start}, {end}]: allowed is {WINDOW}"


# --- errors -----------------------------------------------------------------------------------------------------------

NUMBER = 'a whole number of at least 0 or a range such as "5-8"'
LIST = 'a list of whole numbers of at least 0 and of ranges such as "5-8"'
WINDOW = "two whole numbers [start, end), the end larger than the start, such as [0, 4]; or [4, null]"
TOOLS = "npu, nsys, precision_debugger, torch, torch_memory"
CONTENTS = "cpu, cuda, memory, modules, npu, shapes, stack"
RANGE = "allowed is an ascending range, and at most 1000000 numbers in all ranges"
DEBUGGER = {"tool": "precision_debugger", "options": {"stages": [3]}}
ROLE = "allowed are 1 to 32 lower-case letters, digits, _ and -, a letter first"
MINI_BATCHES = "it counts mini-batches, and rollouts have none; write a window of forward steps"
FORWARD_STEPS = "it counts forward steps of an engine; write a schedule, which counts mini-batches"
PLAN = (
    "enabled, tool, steps, ranks, replicas, window, contents, by_stage, merge, discrete, schedule, options, layout, "
    "finish"
)
COMMAND = "allowed is true or false; the command itself belongs in the file's own finish.hook"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("steps", 3, f" is 3: allowed is {LIST}"),
        ("steps", ["5-"], f"[0] is '5-': allowed is {NUMBER}"),
        ("steps", ["8-5"], f' has "8-5": {RANGE}'),
        ("steps", ["0-1000000"], f' has "0-1000000": {RANGE}'),
        ("steps", [2**70], f"[0] is {2**70}: allowed is a whole number of at most 2^53"),
        ("timeout_ms", 2**63, f" is {2**63}: allowed is a whole number of at most 2^53"),
        ("steps", [-1], f"[0] is -1: allowed is {NUMBER}"),
        ("continuous", "x", " is 'x': allowed is true or false"),
        ("timeout_ms", 0, " is 0: allowed is a whole number of at least 1 and at most 604800000"),
        ("save_path", [1], " is [1]: allowed is a text"),
        ("layout", "flat", " is 'flat': allowed is one of step, verl, verl_step"),
        ("rollout", 3, " is 3: allowed is a mapping of keys, true or false"),
        ("rollout.tool", "nsight", f" is 'nsight': allowed is one of {TOOLS}"),
        ("rollout.ranks", "some", f" is 'some': allowed is all or {LIST}"),
        ("rollout.ranks", [0.5], f"[0] is 0.5: allowed is {NUMBER}"),
        ("rollout.window", 4, f" is 4: allowed is {WINDOW}"),
        ("rollout.window", [1, 2, 3], f" is [1, 2, 3]: allowed is {WINDOW}"),
        ("rollout.window", [-1, 2], f" is [-1, 2]: allowed is {WINDOW}"),
        ("rollout.contents", ["shape"], f"[0] is 'shape': allowed is one of {CONTENTS}; did you mean shapes?"),
        ("rollout.schedule", 1, " is 1: allowed is a mapping of keys"),
        ("rollout.finish.hook", "send", f" is 'send': {COMMAND}"),
        ("roles", ["actor"], " is ['actor']: allowed is a mapping of keys"),
        ("roles.Actor", {}, f" is not the name of a role: {ROLE}"),
        ("roles.rollout", {}, " is not a training role: write it as `rollout`, beside `roles`"),
        ("roles.a.schedule", {}, ".active is missing: allowed is a whole number of at least 1"),
        ("roles.a", DEBUGGER, ".options.stages[0] is 3: allowed is a text of 1 to 200 characters"),
        ("finish.hook", 3, " is 3: allowed is true, false, or (in the file's own `finish`) a command"),
        ("finish.ranks", "none", f" is 'none': allowed is all, profiled or {LIST}"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key: str, value: object, text: str) -> None:
    assert error_of(nested(key, value)) == key + text


@pytest.mark.parametrize(
    ("tool", "options", "text"),
    [
        ("npu", {"level": "high"}, "level is 'high': allowed is one of level0, level1, level2, level_none"),
        ("torch_memory", {"context": "few"}, "context is 'few': allowed is one of all, alloc, state"),
    ],
)
def test_the_options_of_a_tool_are_checked(tool: str, options: dict[str, object], text: str) -> None:
    assert error_of({"roles": {"a": {"tool": tool, "options": options}}}) == f"roles.a.options.{text}"


@pytest.mark.parametrize(
    ("key", "meant", "allowed"),
    [
        ("step", "steps", "steps, continuous, timeout_ms, save_path, layout, rollout, roles, finish"),
        ("rollout.schedule.activ", "active", "active, wait, warmup, repeat, skip_first"),
        ("finish.rank", "ranks", "relocate, hook, ranks"),
        ("rollout.rank", "ranks", PLAN),
        ("roles.a.options.stack", "stacks", "max_entries, context, stacks, snapshot_steps"),
    ],
)
@pytest.mark.parametrize("value", [1, None])
def test_an_unknown_key_is_named_with_those_that_are_known(key: str, meant: str, allowed: str, value: object) -> None:
    tree = nested(key, value)
    if "roles" in tree:
        tree["roles"]["a"]["tool"] = "torch_memory"
    assert error_of(tree) == f"{key} is unknown; did you mean {meant}?; allowed are {allowed}"


def test_a_file_of_verl_is_distinguished_from_one_of_ours() -> None:
    advice = "read the file with ProfilerConfig.from_verl, or with --verl"
    assert error_of({"global_profiler": {}}) == f"global_profiler is a key of verl: {advice}"


@pytest.mark.parametrize(
    ("key", "value", "tool", "reason"),
    [
        ("rollout.schedule", {"active": 1}, "torch", MINI_BATCHES),
        ("rollout.options", {"level": "level1"}, "torch", "torch has none"),
        ("roles.a.replicas", [0], "torch", "a training rank belongs to none; write ranks"),
        ("roles.a.window", [0, 4], "torch", FORWARD_STEPS),
        ("roles.a.by_stage", True, "torch", "only an engine makes a trace of each stage; write discrete"),
        ("roles.a.merge", True, "torch", "only an engine merges traces"),
        ("roles.a.schedule", {"active": 1}, "npu", "only the tool torch has one, and this is npu"),
        ("roles.a.contents", ["cuda", "stack"], "nsys", "nsys has none"),
        ("roles.a.discrete", True, "torch_memory", "a snapshot covers whole sessions"),
    ],
)
def test_a_key_without_effect_is_an_error(key: str, value: object, tool: str, reason: str) -> None:
    section, _, name = key.rpartition(".")
    tree = nested(section, {"tool": tool, name: value})
    assert error_of(tree) == f"{key} has no effect there: {reason}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("steps: [1", "the text is not valid YAML: .*expected ',' or ']'"),
        ("- 1\n- 2", "the text holds a list: allowed is a mapping of keys"),
        ("false\n", "the text holds a bool: allowed is a mapping of keys"),
        ("steps: [1]\nsteps: [2]", "the text is not valid YAML: key 'steps' occurs twice.*line 2"),
        ("rollout: &a\n  finish: *a\n", "the text is nested too deeply"),
        ("save_path: {{ root }}", "the text is not valid YAML: .*found unhashable key.*line 1, column 13"),
        ("? [1]\n: 2", "the text is not valid YAML: .*found unhashable key"),
        ("steps: [1]\nsave_path: /a\x1b\n", "the text is not valid YAML: unacceptable character"),
        ("a: " + "[" * 2000 + "]" * 2000, "the text is nested too deeply"),
        ("continuous: !!bool x\n", "the text is not valid YAML: 'x'"),
        ("steps: [!!int x]\n", "the text is not valid YAML: invalid literal"),
        ("x: !!python/object:os.system {}", "the text is not valid YAML: could not determine a constructor"),
        ("not_there.yaml", "not_there.yaml can't be read: .*No such file"),
        (3, "the source is 3: allowed is a mapping, a file or YAML text"),
    ],
)
def test_a_source_that_cannot_be_read(source: object, text: str) -> None:
    assert re.match(text, error_of(source), re.DOTALL)


def test_a_file_is_named_in_its_error(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_bytes(b"\xff\xfe\xff")
    assert error_of(file).startswith(f"{file} can't be read: ")
    file.write_text("[1]")
    assert error_of(file) == f"{file} holds a list: allowed is a mapping of keys"
    file.write_text("")
    assert read(file) == read({})


def test_a_merged_key_may_occur_again() -> None:
    text = "x: &common\n  ranks: [1]\nrollout:\n  <<: *common\n  ranks: [2]\n"
    with pytest.raises(ConfigError, match="^x is unknown"):
        read(text)
    assert read("rollout: &common\n  ranks: [1]\nroles:\n  a:\n    <<: *common\n    ranks: [2]\n").roles[
        "a"
    ].ranks == frozenset({2})


def test_a_shell_variable_with_braces_needs_a_backslash() -> None:
    hook = r"send \${VERL_PROFILE_SAVE_PATH}"
    assert read({"finish": {"hook": hook}}).finish_hook_cmd == "send ${VERL_PROFILE_SAVE_PATH}"
    assert error_of({"finish": {"hook": "send ${VERL_PROFILE_SAVE_PATH}"}}) == (
        "finish.hook is 'send ${VERL_PROFILE_SAVE_PATH}': allowed is ${oc.env:NAME}, or \\${ for plain text"
    )
