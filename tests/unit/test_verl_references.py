"""References in verl's configuration, which OmegaConf resolves, and in our own YAML, which knows one kind."""

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from schemas.profiler.config import ProfilerConfig, read_verl_config
from schemas.profiler.readers import yaml_text
from schemas.profiler.verl_format import overlaid
from tests.running import python
from tests.unit.verl_trees import error_of, nested, rollout

STEPS = "global_profiler.steps"


@pytest.mark.parametrize(
    "reference",
    [
        "${trainer.steps}",
        "${.more_steps}",
        "${trainer[steps]}",
        "${oc.select:trainer.steps,[9]}",
        "${oc.select:trainer.nothing,${trainer.steps}}",
        "${oc.select:trainer.missing,[1, 5]}",
        "${oc.decode:${oc.env:STEPS}}",
        "${oc.decode:${oc.env:NOT_SET,'[1, 5]'}}",
        "${trainer.${trainer.name}}",
    ],
)
def test_every_kind_of_reference_is_resolved(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "[1, 5]")
    monkeypatch.delenv("NOT_SET", raising=False)
    trainer = {"steps": [1, 5], "missing": "???", "name": "steps", "unused": "${nothing.here}"}
    tree = {"trainer": trainer, "global_profiler": {"steps": reference, "more_steps": "${trainer.steps}"}}
    assert read_verl_config(tree).config.steps == (1, 5)


def test_references_within_a_text_are_resolved_in_place() -> None:
    tree = {"trainer": {"name": "a"}, "global_profiler": {"save_path": r"/d/${trainer.name}/\${x}"}}
    assert ProfilerConfig.from_verl(tree).save_path == "/d/a/${x}"


def test_a_key_that_is_still_to_be_given_is_absent() -> None:
    tree = rollout({"discrete": True, "contents": "???"}, ranks="???")
    assert ProfilerConfig.from_verl(tree) == ProfilerConfig.from_verl(rollout({"discrete": True}))


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("${nothing.here}", "Interpolation key 'nothing.here' not found"),
        ("${global_profiler.steps}", "Recursive interpolation detected"),
        ("${now:%Y}", "Unsupported interpolation type now"),
        ("${oc.env:NOT_SET}", "KeyError raised while resolving interpolation"),
        ("${trainer.missing}", "MissingMandatoryValue while resolving interpolation"),
        ("${nothing", "no viable alternative at input"),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_named(
    reference: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    error = error_of({"trainer": {"missing": "???"}, **nested(STEPS, reference)})
    assert error.startswith(f"{STEPS} has a reference that can't be resolved: {problem}")


def test_resolvers_that_a_trainer_registered_are_used() -> None:
    OmegaConf.register_resolver("its_own", lambda text: {"day": "2026-01-01", "ranks": [0, 8]}[text])
    try:
        whole = OmegaConf.create(
            {
                **rollout({"discrete": True}, ranks="${its_own:ranks}"),
                "trainer": {"root": "${its_own:day}", "other": "${its_own:nothing}", "unknown": "${nobody_s:x}"},
            }
        )
        whole.global_profiler.update({"save_path": "/d/${trainer.root}", "finish_hook_cmd": r"send \${HOME}"})
        for tree in (whole, {key: whole[key] for key in ("global_profiler", "actor_rollout_ref")}):
            config = ProfilerConfig.from_verl(tree)
            assert (config.save_path, config.finish_hook_cmd) == ("/d/2026-01-01", "send ${HOME}")
            assert config.plan.ranks == frozenset({0, 8})
    finally:
        OmegaConf.clear_resolver("its_own")


def test_a_part_of_an_omegaconf_configuration_may_refer_to_the_rest_of_it() -> None:
    whole = OmegaConf.create({"name": "a", "trainer": rollout({"discrete": True})})
    whole.trainer.global_profiler.save_path = "/d/${name}"
    assert ProfilerConfig.from_verl(whole.trainer).save_path == "/d/a"


def test_the_upper_tree_counts_and_null_leaves_the_section_below_it() -> None:
    below = {"a": {"x": 1, "y": 2}, "b": {"z": 3}, "c": 4, "d": 5}
    above = {"a": {"x": 9, "w": 8}, "b": None, "c": None, "d": "???", "e": 7}
    assert overlaid(below, above) == {"a": {"x": 9, "y": 2, "w": 8}, "b": {"z": 3}, "c": None, "d": 5, "e": 7}


def test_only_verls_configuration_needs_omegaconf() -> None:
    code = """
import sys
sys.modules["omegaconf"] = None  # as if it were not installed
from schemas.profiler.config import ProfilerConfig
print(ProfilerConfig.from_yaml("steps: [3]").steps)
ProfilerConfig.from_verl({})
"""
    done = python("-c", code)
    assert done.stdout == "(3,)\n"
    assert done.stderr.endswith(
        "ConfigError: verl's configuration is read with OmegaConf, which is not installed: "
        "pip install 'rolloutctl[verl]'\n"
    )


# --- our own YAML -----------------------------------------------------------------------------------------------------


def own(source: Any) -> ProfilerConfig:
    return ProfilerConfig.from_yaml(source)


def test_an_environment_variable_fills_a_text_or_stands_for_any_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROOT": "/data", "ALL": "all", "SOME": "[1, 2]", "ONE": "3", "OFF": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOT_SET", raising=False)
    config = own(
        {
            "steps": ["${oc.env:ONE}", "5-6"],
            "save_path": "${oc.env:ROOT}/${oc.env:NOT_SET,profile}",
            "rollout": {"ranks": "${oc.env:SOME}", "replicas": "${oc.env:ALL}", "window": [0, "${oc.env:ONE}"]},
            "roles": {"actor": "${oc.env:OFF}"},
        }
    )
    assert (config.steps, config.save_path) == ((3, 5, 6), "/data/profile")
    assert (config.plan.ranks, config.plan.replicas) == (frozenset({1, 2}), None)
    assert config.plan.window is not None and config.plan.window.end == 3
    assert not config.roles["actor"].enabled


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("${oc.env:NOT_SET}", "save_path needs the environment variable NOT_SET, which is not set"),
        (
            "send ${HOME}",
            "save_path is 'send ${HOME}': allowed is ${oc.env:NAME}, or \\${ for plain text",
        ),
        ("${", "save_path is '${': allowed is ${oc.env:NAME}, or \\${ for plain text"),
    ],
)
def test_any_other_reference_is_an_error(path: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ValueError, match=re.escape(text)):
        own({"save_path": path})


@pytest.mark.parametrize("text", ["${a}", r"\${a}", "${", "$${b}/${c}", "${oc.env:HOME}"])
def test_a_text_that_looks_like_a_reference_is_written_as_plain_text(text: str) -> None:
    config = ProfilerConfig(save_path=text, finish_hook_cmd=text)
    assert own(yaml_text(config)) == config
