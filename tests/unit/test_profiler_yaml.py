"""Our own YAML for profiling: everything that a plan can say can be written, and read back; and each error in full."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.commands import (
    Finish,
    Npu,
    PrecisionDebugger,
    ProfilePlan,
    Schedule,
    TorchMemory,
    Window,
)
from schemas.errors import ConfigError
from schemas.profiler import files
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.own_yaml import runs, written

CONFIGS = Path(__file__).parents[1] / "configs"
BOTH = frozenset({"cpu", "cuda"})


def read(source: Any) -> ProfilerConfig:
    return ProfilerConfig.from_yaml(source)


def refused(source: Any) -> str:
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


def test_a_file_is_named_by_path_or_text_or_is_a_text_itself() -> None:
    path = CONFIGS / "profiler.yaml"
    assert read(path) == read(str(path)) == read(path.read_text("utf-8"))
    assert read("steps: [1]") == read({"steps": [1]}) == read("{steps: [1]}")


def test_who_is_named_is_profiled_and_rollouts_when_nobody_is() -> None:
    assert read("steps: [1]").plan.enabled
    only = read({"steps": [1], "roles": {"actor": True}})
    assert (only.plan.enabled, only.roles["actor"].enabled) == (False, True)
    assert read({"rollout": {}, "roles": {"actor": None}}).plan.enabled
    assert not read({"rollout": False}).plan.enabled
    assert not read({"rollout": {"enabled": False}}).plan.enabled


def test_what_is_taken_when_nothing_is_said() -> None:
    plan = read({"rollout": {}}).plan
    assert plan == ProfilePlan(activities=frozenset({"cpu", "cuda"}))
    assert read({"rollout": {"tool": "npu"}}).plan.activities == frozenset({"cpu", "npu"})
    assert read({"rollout": {"contents": []}}).plan.activities == frozenset()


def test_all_is_a_word_for_everybody_and_an_empty_list_for_nobody() -> None:
    plan = read({"rollout": {"ranks": "all", "replicas": "all", "steps": "all"}}).plan
    assert (plan.ranks, plan.replicas, plan.steps) == (None, None, None)
    assert read({"rollout": {"ranks": []}}).plan.ranks == frozenset()


def test_the_end_is_said_once_for_all_and_changed_for_one() -> None:
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


def test_a_layout_is_said_once_for_all_and_changed_for_one() -> None:
    config = read({"layout": "verl", "rollout": {}, "roles": {"actor": {"layout": "step"}}})
    assert (config.plan.layout, config.roles["actor"].layout) == ("verl", "step")


def test_references_are_resolved_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT", "/data")
    monkeypatch.setenv("STEPS", "[1, 2]")
    config = read({"save_path": "${oc.env:ROOT}/profile", "steps": "${oc.env:STEPS}"})
    assert (config.save_path, config.steps) == ("/data/profile", (1, 2))


def test_a_variable_says_whatever_a_file_could(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ALL": "all", "SOME": "[1, 2]", "ONE": "3", "OFF": "false"}.items():
        monkeypatch.setenv(name, value)
    config = read(
        {
            "steps": ["${oc.env:ONE}", "5-6"],
            "rollout": {"ranks": "${oc.env:SOME}", "replicas": "${oc.env:ALL}", "window": [0, "${oc.env:ONE}"]},
            "roles": {"actor": "${oc.env:OFF}"},
            "finish": {"ranks": "${oc.env:SOME}"},
        }
    )
    assert (config.steps, config.plan.ranks, config.plan.replicas) == ((3, 5, 6), frozenset({1, 2}), None)
    assert (config.plan.window, config.plan.finish.hook_ranks) == (Window(0, 3), frozenset({1, 2}))
    assert not config.roles["actor"].enabled


def test_a_date_is_a_text_and_so_is_a_number_to_the_base_of_60_or_8() -> None:
    assert read("save_path: 2026-02-30\n").save_path == "2026-02-30"
    assert refused("steps: [1:30]") == f"steps holds '1:30': allowed are {LIST}"
    assert refused("steps: [010]") == f"steps holds '010': allowed are {LIST}"


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
def test_everything_that_can_be_said_is_read_back_from_what_is_written(config: ProfilerConfig) -> None:
    assert read(written(config)) == config
    assert read(files.yaml_text(config)) == config


@given(st.frozensets(st.integers(0, 500), max_size=60))
def test_ranges_hold_the_steps_and_nothing_else(steps: frozenset[int]) -> None:
    spelled = [f"{first}-{last}" for first, last in runs(steps)]
    assert frozenset(read({"steps": spelled}).steps) == steps


@given(st.integers(0, 10_000), st.integers(-5, 10_000))
def test_a_window_is_what_was_written_or_an_error(start: int, end: int) -> None:
    tree = {"rollout": {"window": [start, end]}}
    if end > start:
        assert read(tree).plan.window == Window(start, end)
    else:
        assert refused(tree) == (
            f"rollout.window is [{start}, {end}]: allowed is two whole numbers [start, end) of which the end is "
            f"larger, such as [0, 4], "
            "or [4, null] without an end"
        )


# --- errors -----------------------------------------------------------------------------------------------------------

LIST = 'whole numbers of at least 0 and of ranges such as "5-8"'
PLAN = (
    "allowed are enabled, tool, steps, ranks, replicas, window, contents, by_stage, merge, discrete, schedule, "
    "options, layout, finish"
)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (
            {"step": [1]},
            (
                "step is unknown; did you mean steps?; allowed are steps, continuous, timeout_ms, save_path, "
                "layout, rollout, roles, finish"
            ),
        ),
        (
            {"global_profiler": {}},
            "global_profiler is a key of verl: read the file with ProfilerConfig.from_verl, or with --verl",
        ),
        ({"steps": 3}, f"steps is 3: allowed is a list of {LIST}"),
        ({"steps": ["5-"]}, f"steps holds '5-': allowed are {LIST}"),
        ({"steps": ["8-5"]}, 'steps holds "8-5": allowed is a range upwards, "5-8"'),
        ({"steps": ["0-1000000"]}, 'steps holds "0-1000000": allowed is a range of at most 1000000 numbers'),
        ({"steps": [2**70]}, f"steps holds {2**70}: allowed are {LIST}, below 2^63"),
        ({"timeout_ms": 2**63}, f"timeout_ms is {2**63}: allowed is a whole number of at least 1, below 2^63"),
        ({"steps": [-1]}, f"steps holds -1: allowed are {LIST}"),
        ({"continuous": "x"}, "continuous is 'x': allowed is true or false"),
        ({"timeout_ms": 0}, "timeout_ms is 0: allowed is a whole number of at least 1"),
        ({"save_path": [1]}, "save_path is [1]: allowed is a text"),
        ({"layout": "flat"}, "layout is 'flat': allowed is one of step, verl_step, verl"),
        ({"rollout": 3}, "rollout is 3: allowed is a mapping of keys, true or false"),
        ({"rollout": {"rank": [0]}}, f"rollout.rank is unknown; did you mean ranks?; {PLAN}"),
        (
            {"rollout": {"tool": "nsight"}},
            "rollout.tool is 'nsight': allowed is one of npu, nsys, precision_debugger, torch, torch_memory",
        ),
        ({"rollout": {"ranks": "some"}}, f"rollout.ranks is 'some': allowed is all, or a list of {LIST}"),
        ({"rollout": {"ranks": [0.5]}}, f"rollout.ranks holds 0.5: allowed are {LIST}"),
        (
            {"rollout": {"window": 4}},
            (
                "rollout.window is 4: allowed is a list of two whole numbers [start, end) of which the end is "
                "larger, such as [0, 4], "
                "or [4, null] without an end"
            ),
        ),
        (
            {"rollout": {"window": [1, 2, 3]}},
            (
                "rollout.window is [1, 2, 3]: allowed is two whole numbers [start, end) of which the end is "
                "larger, such as [0, 4], "
                "or [4, null] without an end"
            ),
        ),
        (
            {"rollout": {"contents": ["shape"]}},
            (
                "rollout.contents holds 'shape': allowed are cpu, cuda, memory, modules, npu, shapes, stack; did "
                "you mean shapes?"
            ),
        ),
        (
            {"rollout": {"schedule": {}}},
            "rollout.schedule.active is null: allowed is a whole number of at least 1: mini-batches to record",
        ),
        (
            {"rollout": {"schedule": {"activ": 1}}},
            (
                "rollout.schedule.activ is unknown; did you mean active?; allowed are active, wait, warmup, repeat, "
                "skip_first"
            ),
        ),
        ({"rollout": {"schedule": 1}}, "rollout.schedule is 1: allowed is a mapping of keys"),
        (
            {"rollout": {"options": {"level": "level1"}}},
            "rollout.options is given and the tool is torch, which has none: leave them out",
        ),
        (
            {"roles": {"a": {"tool": "npu", "options": {"level": "high"}}}},
            "roles.a.options.level is 'high': allowed is one of level_none, level0, level1, level2",
        ),
        (
            {"roles": {"a": {"tool": "torch_memory", "options": {"max_entrys": 3}}}},
            (
                "roles.a.options.max_entrys is unknown; did you mean max_entries?; allowed are max_entries, "
                "context, stacks, snapshot_steps"
            ),
        ),
        (
            {"roles": {"a": {"tool": "torch_memory", "options": {"context": "few"}}}},
            "roles.a.options.context is 'few': allowed is one of state, alloc, all",
        ),
        (
            {"roles": {"a": {"tool": "precision_debugger", "options": {"stages": [3]}}}},
            "roles.a.options.stages is [3]: allowed is a list of names of 1 to 200 characters",
        ),
        (
            {"rollout": {"schedule": {"active": 1}}},
            (
                "rollout.schedule is a mapping with active, and has no meaning there: it counts mini-batches, and "
                "rollouts have none; write a window of forward steps"
            ),
        ),
        (
            {"roles": {"a": {"replicas": [0]}}},
            "roles.a.replicas is [0], and has no meaning there: a training rank belongs to none; write ranks",
        ),
        (
            {"roles": {"a": {"window": [0, 4]}}},
            (
                "roles.a.window is [0, 4], and has no meaning there: it counts forward steps of an engine; write a "
                "schedule, which counts mini-batches"
            ),
        ),
        (
            {"roles": {"a": {"by_stage": True}}},
            (
                "roles.a.by_stage is true, and has no meaning there: only an engine makes a trace of each stage; "
                "write discrete"
            ),
        ),
        (
            {"roles": {"a": {"merge": True}}},
            "roles.a.merge is true, and has no meaning there: only an engine merges traces",
        ),
        (
            {"roles": {"a": {"tool": "npu", "schedule": {"active": 1}}}},
            (
                "roles.a.schedule is a mapping with active, and has no meaning there: only the tool torch has one, "
                "and this is npu"
            ),
        ),
        (
            {"roles": {"a": {"tool": "nsys", "contents": ["cuda", "stack"]}}},
            "roles.a.contents is ['cuda', 'stack'], and has no meaning there: nsys has none",
        ),
        (
            {"roles": {"a": {"tool": "torch_memory", "discrete": True}}},
            "roles.a.discrete is true, and has no meaning there: a snapshot is of whole sessions",
        ),
        ({"roles": {"rollout": {}}}, "roles.rollout is no training role: write it as `rollout`, beside `roles`"),
        (
            {"roles": {"Actor": {}}},
            "roles.Actor names a role: allowed are 1 to 32 small letters, digits, _ and -, a letter first",
        ),
        ({"roles": ["actor"]}, "roles is ['actor']: allowed is a mapping of keys"),
        ({"finish": {"hook": 3}}, "finish.hook is 3: allowed is a command, true or false"),
        (
            {"rollout": {"finish": {"hook": "send"}}},
            (
                "rollout.finish.hook is 'send': allowed is true or false; the command itself is for finish.hook of "
                "the file"
            ),
        ),
        ({"rollout": {"finish": {"hook": 3}}}, "rollout.finish.hook is 3: allowed is true or false"),
        ({"finish": {"ranks": "none"}}, f"finish.ranks is 'none': allowed is all, profiled, or a list of {LIST}"),
        ({"finish": {"rank": 1}}, "finish.rank is unknown; did you mean ranks?; allowed are relocate, hook, ranks"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(tree: dict[str, object], text: str) -> None:
    assert refused(tree) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("steps: [1", "the text is no YAML: .*expected ',' or ']'"),
        ("- 1\n- 2", "the text holds list: allowed is a mapping of keys"),
        ("steps: [1]\nsteps: [2]", "the text is no YAML: key 'steps' stands twice.*line 2"),
        ("rollout: &a\n  finish: *a\n", "the text has an anchor that stands within itself"),
        ("save_path: {{ root }}", "the text is no YAML: a key is a list or a mapping.*line 1, column 13"),
        ("? [1]\n: 2", "the text is no YAML: a key is a list or a mapping"),
        ("steps: [1]\nsave_path: /a\x1b\n", "the text is no YAML: unacceptable character"),
        ("a: " + "[" * 2000 + "]" * 2000, "the text is nested too deeply"),
        ("continuous: !!bool x\n", "the text is no YAML: 'x'"),
        ("steps: [!!int x]\n", "the text is no YAML: invalid literal"),
        ("x: !!python/object:os.system {}", "the text is no YAML: could not determine a constructor"),
        ("not_there.yaml", "not_there.yaml can't be read: .*No such file"),
        (3, "the source is 3: allowed is a mapping, a file or a text of YAML"),
    ],
)
def test_a_source_that_can_t_be_read(source: object, text: str) -> None:
    assert re.match(text, refused(source), re.DOTALL)


def test_a_file_is_named_in_its_error(tmp_path: Path) -> None:
    file = tmp_path / "profile.yaml"
    file.write_bytes(b"\xff\xfe\xff")
    assert refused(file).startswith(f"{file} can't be read: ")
    file.write_text("[1]")
    assert refused(file) == f"{file} holds list: allowed is a mapping of keys"
    file.write_text("")
    assert read(file) == read({})


def test_merged_keys_are_no_double_ones() -> None:
    text = "x: &common\n  ranks: [1]\nrollout:\n  <<: *common\n  ranks: [2]\n"
    with pytest.raises(ConfigError, match="^x is unknown"):
        read(text)
    assert read("rollout: &common\n  ranks: [1]\nroles:\n  a:\n    <<: *common\n    ranks: [2]\n").roles[
        "a"
    ].ranks == frozenset({2})


@pytest.mark.parametrize("text", ["${a}", r"\${a}", "${", "$${b}/${c}"])
def test_what_looks_like_a_reference_and_is_none_is_written_as_none(text: str) -> None:
    options = PrecisionDebugger(config_path=text, stages=frozenset({text}))
    plan = ProfilePlan(tool="precision_debugger", options=options)
    config = ProfilerConfig(plan=plan, save_path=text, finish_hook_cmd=text)
    assert read(files.yaml_text(config)) == config


def test_a_variable_of_the_hook_s_shell_needs_a_backslash_if_it_has_braces() -> None:
    assert (
        read({"finish": {"hook": r"send \${VERL_PROFILE_SAVE_PATH}"}}).finish_hook_cmd
        == "send ${VERL_PROFILE_SAVE_PATH}"
    )
    assert refused({"finish": {"hook": "send ${VERL_PROFILE_SAVE_PATH}"}}) == (
        "finish.hook refers to VERL_PROFILE_SAVE_PATH, and nothing stands there: give it a value, or write \\${ where "
        "no reference is meant"
    )
