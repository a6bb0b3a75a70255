"""Our own YAML for profiling: what is read, and each error in full. tests/properties writes it and reads it back."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.commands import Finish, ProfilePlan, Schedule, TorchMemory, Window
from schemas.errors import ConfigError
from schemas.profiler.config import ProfilerConfig
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
                ranks=frozenset({0}), discrete=True, schedule=Schedule(active=2, warmup=1), finish=Finish(relocate=True)
            ),
            "critic": ProfilePlan(tool="torch_memory", options=TorchMemory(snapshot_steps=2)),
        },
        steps=(1, 5, 6, 7, 8),
        save_path="/data/profile",
        finish_hook_cmd="upload $VERL_PROFILE_SAVE_PATH",
    )


def test_the_source_is_a_path_or_yaml_text_or_a_mapping() -> None:
    path = CONFIGS / "profiler.yaml"
    assert read(path) == read(str(path)) == read(path.read_text("utf-8"))
    assert read("steps: [1]") == read({"steps": [1]}) == read("{steps: [1]}")


def test_what_a_file_leaves_out_is_as_in_python() -> None:
    assert read({}) == read({"plan": None, "roles": None}) == ProfilerConfig()
    assert read({"roles": {"actor": None}}) == ProfilerConfig(roles={"actor": ProfilePlan()})


def test_a_date_is_text_and_so_are_numbers_that_yaml_1_1_reads_in_base_60_or_8() -> None:
    assert read("save_path: 2026-02-30\n").save_path == "2026-02-30"
    assert error_of("steps: [1:30]") == f"steps[0] is '1:30': allowed is {NUMBER}"
    assert error_of("steps: [010]") == f"steps[0] is '010': allowed is {NUMBER}"


# --- errors -----------------------------------------------------------------------------------------------------------

NUMBER = "a whole number of at least 0"
TOOLS = "torch, npu, nsys, torch_memory"
ROLE = "allowed are 1 to 32 lower-case letters, digits, _ and -, a letter first"
MINI_BATCHES = "it counts mini-batches, and rollouts have none; write a window of forward steps"
FORWARD_STEPS = "it counts forward steps of an engine; write a schedule, which counts mini-batches"
MEMORY = {"type": "torch_memory"}
PLAN = ", ".join(ProfilePlan.__struct_fields__)
CONFIG = ", ".join(ProfilerConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("steps", 3, " is 3: allowed is a list"),
        ("steps", ["5-8"], f"[0] is '5-8': allowed is {NUMBER}"),
        ("steps", [2**70], f"[0] is {2**70}: allowed is a whole number of at most 2^53"),
        ("timeout_ms", 2**63, f" is {2**63}: allowed is a whole number of at most 2^53"),
        ("steps", [-1], f"[0] is -1: allowed is {NUMBER}"),
        ("continuous", "x", " is 'x': allowed is true or false"),
        ("timeout_ms", 0, " is 0: allowed is a whole number of at least 1 and at most 604800000"),
        ("save_path", [1], " is [1]: allowed is a text"),
        ("plan", 3, " is 3: allowed is a mapping of keys"),
        ("plan.layout", "flat", " is 'flat': allowed is one of step, verl, verl_step"),
        ("plan.tool", "nsight", f" is 'nsight': allowed is one of {TOOLS}"),
        ("plan.ranks", "some", " is 'some': allowed is a list"),
        ("plan.ranks", [0.5], f"[0] is 0.5: allowed is {NUMBER}"),
        ("plan.window", [0, 4], " is [0, 4]: allowed is a mapping of keys"),
        ("plan.window", {"start": -1}, f".start is -1: allowed is {NUMBER}"),
        ("plan.activities", ["cpus"], "[0] is 'cpus': allowed is one of cpu, cuda, memory, npu; did you mean cpu?"),
        ("plan.schedule", 1, " is 1: allowed is a mapping of keys"),
        ("plan.finish.hook", "send", " is 'send': allowed is true or false"),
        ("roles", ["actor"], " is ['actor']: allowed is a mapping of keys"),
        ("roles.Actor", {}, f" is not the name of a role: {ROLE}"),
        ("roles.a", 3, " is 3: allowed is a mapping of keys"),
        ("roles.a.tool", "nsight", f" is 'nsight': allowed is one of {TOOLS}"),
        ("roles.rollout", {}, " is not a training role: write it as `plan`, beside `roles`"),
        ("roles.a.schedule", {}, ".active is missing: allowed is a whole number of at least 1"),
        ("roles.a.options", {"type": "x"}, ".type is 'x': allowed is one of npu, torch_memory"),
        ("roles.a.options", MEMORY | {"context": "few"}, ".context is 'few': allowed is one of all, alloc, state"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key: str, value: object, text: str) -> None:
    assert error_of(nested(key, value)) == key + text


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_a_window_is_what_was_written_or_an_error(start: int, end: int) -> None:
    window = {"start": start, "end": end}
    if end > start:
        assert read({"plan": {"window": window}}).plan.window == Window(start, end)
    else:
        empty = f"window [{start}, {end}) is empty: end must be larger than start"
        assert error_of({"plan": {"window": window}}) == f"plan.window is {window}: {empty}"


@pytest.mark.parametrize(
    ("key", "meant", "allowed"),
    [
        ("step", "steps", CONFIG),
        ("plan.schedule.activ", "active", "active, wait, warmup, repeat, skip_first"),
        ("plan.finish.hooks", "hook", "relocate, hook, hook_all_ranks, hook_ranks"),
        ("plan.rank", "ranks", PLAN),
        ("roles.a.rank", "ranks", PLAN),
    ],
)
@pytest.mark.parametrize("value", [1, None])
def test_an_unknown_key_is_named_with_those_that_are_known(key: str, meant: str, allowed: str, value: object) -> None:
    assert error_of(nested(key, value)) == f"{key} is unknown; did you mean {meant}?; allowed are {allowed}"


def test_a_file_of_verl_is_distinguished_from_one_of_ours() -> None:
    advice = "read the file with ProfilerConfig.from_verl, or with --verl"
    assert error_of({"global_profiler": {}}) == f"global_profiler is a key of verl: {advice}"


@pytest.mark.parametrize(
    ("key", "value", "tool", "reason"),
    [
        ("plan.schedule", {"active": 1}, "torch", MINI_BATCHES),
        ("plan.options", {"type": "npu"}, "torch", "these are not options of the tool torch"),
        ("roles.a.options", MEMORY, "npu", "these are not options of the tool npu"),
        ("roles.a.replicas", [0], "torch", "a training rank belongs to none; write ranks"),
        ("roles.a.window", {"start": 0, "end": 4}, "torch", FORWARD_STEPS),
        ("roles.a.by_stage", True, "torch", "only an engine makes a trace of each stage; write discrete"),
        ("roles.a.merge", True, "torch", "only an engine merges traces"),
        ("roles.a.schedule", {"active": 1}, "npu", "only the tool torch has one, and this is npu"),
        ("roles.a.activities", ["cuda"], "nsys", "nsys has none"),
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
        ("plan: &a\n  finish: *a\n", "the text is nested too deeply"),
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
    text = "x: &common\n  ranks: [1]\nplan:\n  <<: *common\n  ranks: [2]\n"
    with pytest.raises(ConfigError, match="^x is unknown"):
        read(text)
    assert read("plan: &common\n  ranks: [1]\nroles:\n  a:\n    <<: *common\n    ranks: [2]\n").roles[
        "a"
    ].ranks == frozenset({2})


def test_a_shell_variable_is_plain_text() -> None:
    assert read({"finish_hook_cmd": "send ${VERL_PROFILE_SAVE_PATH}"}).finish_hook_cmd.endswith(
        "${VERL_PROFILE_SAVE_PATH}"
    )
