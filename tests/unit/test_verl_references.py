"""References in verl's configuration, which OmegaConf resolves."""

import pytest
from omegaconf import OmegaConf

from schemas.profiler.config import ProfilerConfig, read_verl_config
from schemas.profiler.verl_format import deep_merge
from tests.running import python
from tests.unit.verl_trees import error_of, nested, rollout

STEPS = "global_profiler.steps"


@pytest.mark.parametrize(
    "reference",
    [
        "${trainer.steps}",
        "${oc.select:trainer.steps,[9]}",
        "${oc.decode:${oc.env:STEPS}}",
        "${trainer.${trainer.name}}",
    ],
)
def test_every_kind_of_reference_is_resolved(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "[1, 5]")
    trainer = {"steps": [1, 5], "missing": "???", "name": "steps", "unused": "${nothing.here}"}
    tree = {"trainer": trainer, "global_profiler": {"steps": reference, "more_steps": "${trainer.steps}"}}
    assert read_verl_config(tree).config.steps == (1, 5)


def test_a_key_that_is_still_to_be_given_is_absent() -> None:
    tree = rollout({"discrete": True, "contents": "???"}, ranks="???")
    assert ProfilerConfig.from_verl(tree) == ProfilerConfig.from_verl(rollout({"discrete": True}))


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("${nothing.here}", "Interpolation key 'nothing.here' not found"),
        ("${global_profiler.steps}", "Recursive interpolation detected"),
        ("${nothing", "no viable alternative at input"),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_named(reference: str, problem: str) -> None:
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


def test_the_upper_tree_counts_and_null_leaves_the_section_below_it() -> None:
    below = {"a": {"x": 1, "y": 2}, "b": {"z": 3}, "c": 4, "d": 5}
    above = {"a": {"x": 9, "w": 8}, "b": None, "c": None, "d": "???", "e": 7}
    assert deep_merge(below, above) == {"a": {"x": 9, "y": 2, "w": 8}, "b": {"z": 3}, "c": None, "d": 5, "e": 7}


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
        "ExtraMissing: verl's configuration is read with OmegaConf, which is not installed: "
        "install rolloutctl with its extra `verl` (docs/installation.md)\n"
    )
