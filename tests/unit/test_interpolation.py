"""References in a configuration, against OmegaConf where it says something, and each error in full."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from schemas.errors import ConfigError
from schemas.profiler.config import ProfilerConfig
from schemas.profiler.interpolation import References, overlay
from schemas.profiler.sections import EnvironmentText, Section, literal, split
from tests.unit.verl_trees import rollout

TREE: dict[str, Any] = {
    "a": {"b": {"c": 3}, "same": "${.b.c}", "up": "${..top}", "list": [1, "${a.b.c}", {"x": "${top}"}]},
    "top": "text",
    "nothing": None,
    "missing": "???",
    "whole": "${a.b}",
    "number": "${a.b.c}",
    "below": "${whole.c}",
    "index": "${a.list.0}",
    "bracket": "${a[b][c]}",
    "inside": "<${top}/${a.b.c}>",
    "chosen": "${oc.select:a.b.c,9}",
    "chosen_null": "${oc.select:nothing,9}",
    "fallback": "${oc.select:a.x,9}",
    "fallback_missing": "${oc.select:missing,later}",
    "fallback_none": "${oc.select:a.x}",
    "fallback_list": "${oc.select:a.x,[]}",
    "fallback_words": "${oc.select:a.x,[p, 'q, r', 2]}",
    "fallback_nested": "${oc.select:a.x,${oc.select:a.y,${top}}}",
    "fallback_false": "${oc.select:a.x,False}",
    "fallback_text": "${oc.select:a.x,level0}",
    "name": "b",
    "nested": "${a.${name}.c}",
    "nested_whole": "${${oc.select:a.x,whole}.c}",
    "nested_more": "<${a.${oc.select:${name}x,b}.c}>",
    "spaced": "${ oc.select: a.x , 1 }",
    "escaped": r"\${top}",
    "env": "${oc.env:ROOT}/x",
    "list_nested": "${oc.select:a.x,[${number},'${top}, too',[${top}]]}",
    "quoted_nested": "${oc.select:a.x,'${top}, too'}",
    "grouped": "${oc.select:a.x,100_000}",
    "env_number": "${oc.env:NOT_SET,3}",
    "env_flag": "${oc.env:NOT_SET,true}",
    "decoded": "${oc.decode:${oc.env:NUMBERS}}",
    "decoded_default": "${oc.decode:${oc.env:NOT_SET,[1,2]}}",
    "decoded_null": "${oc.decode:null}",
    "env_default": "${oc.env:NOT_SET,none given}",
    "env_null": "${oc.env:NOT_SET,null}",
}
KEYS = sorted(set(TREE) - {"a", "missing", "spaced"})


@pytest.mark.parametrize("key", [*KEYS, "a.same", "a.up", "a.list"])
def test_a_reference_means_what_it_means_to_omegaconf(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"ROOT": "/data", "NUMBERS": "[1, 5]"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NOT_SET", raising=False)
    theirs = OmegaConf.select(OmegaConf.create(TREE), key)
    if OmegaConf.is_config(theirs):
        theirs = OmegaConf.to_container(theirs, resolve=True)
    assert References(TREE, variables).at(key) == theirs


def test_blanks_around_the_parts_do_not_count() -> None:
    assert References({"spaced": "${oc.select: a.x , 1 }"}, {}).at("spaced") == 1


def test_only_what_is_asked_for_is_resolved() -> None:
    assert References({"fine": 1, "theirs": "${their_resolver:x}"}, {}).at("fine") == 1


def test_what_is_still_to_be_given_is_not_there() -> None:
    references = References(TREE, {})
    assert references.at("missing") is None
    assert references.at("not.there") is None
    assert References({"a": {"b": "???", "c": 1}}, {}).at("a") == {"c": 1}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"x": "${x}"}, "x refers to itself: x -> x"),
        ({"x": "${y}", "y": "${z}", "z": "a ${x}"}, "x refers to itself: x -> y -> z -> x"),
        ({"x": {"y": "${x}"}}, "x.y refers to itself: x.y -> x.y"),
        ({"x": "${oc.select:x,1}"}, "x refers to itself: x -> x"),
        (
            {"x": "${a.b}"},
            "x refers to a.b, and nothing stands there: give it a value, or write \\${ where no reference is meant",
        ),
        (
            {"x": "${y}", "y": "???"},
            "x refers to y, and nothing stands there: give it a value, or write \\${ where no reference is meant",
        ),
        (
            {"x": "${now:%Y}"},
            (
                "x is resolved by 'now', which only the trainer knows: allowed are oc.select, oc.env, oc.decode and "
                "plain references, or a configuration that is resolved already"
            ),
        ),
        (
            {"x": "${oc.selct:y,1}"},
            (
                "x is resolved by 'oc.selct', which only the trainer knows: allowed are oc.select, oc.env, oc.decode "
                "and plain references, or a configuration that is resolved already; did you mean oc.select?"
            ),
        ),
        ({"x": "${oc.env:}"}, "x refers by oc.env to nothing: write ${oc.env:what is meant}"),
        ({"x": "${oc.select: }"}, "x refers by oc.select to nothing: write ${oc.select:what is meant}"),
        ({"x": "${oc.env:NOT_SET}"}, "x needs the environment variable NOT_SET, which is not set"),
        ({"x": "${y"}, "x is '${y': a reference is not closed, } is missing"),
        (
            {"x": "a ${y}", "y": [1]},
            "x is 'a ${y}', where ${y} is [1]: within a text allowed is a text, a number, true or false",
        ),
        (
            {"x": "${y}b", "y": None},
            "x is '${y}b', where ${y} is null: within a text allowed is a text, a number, true or false",
        ),
    ],
)
def test_a_reference_that_can_t_be_resolved(tree: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        References(tree, {}).at("x")


def test_a_text_from_the_environment_is_read_as_what_it_spells() -> None:
    variables = {"N": "12", "ON": "True", "RANKS": "[0, 8]", "PATH_": "007"}
    tree = {key: f"${{oc.env:{key}}}" for key in variables}
    section = Section({key: References(tree, variables).at(key) for key in tree})
    assert section.whole("N") == 12
    assert section.flag("ON") is True
    assert section.numbers("RANKS") == frozenset({0, 8})
    assert section.text("PATH_") == "007"
    with pytest.raises(ConfigError, match="^N is '12': allowed is true or false$"):
        section.flag("N")


def test_a_text_that_a_file_quotes_stays_a_text() -> None:
    with pytest.raises(ConfigError, match="^n is '12': allowed is a whole number of at least 0$"):
        Section({"n": "12"}).whole("n")


@given(st.recursive(st.none() | st.booleans() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=9))
def test_what_a_literal_spells(value: object) -> None:
    def spelled(one: object) -> str:
        if isinstance(one, list):
            return f"[{', '.join(map(spelled, one))}]"
        return "null" if one is None else str(one)

    assert literal(spelled(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5", 1.5),
        ("1e-3", 1e-3),
        ("{}", {}),
        ("'a, b'", "a, b"),
        ("level0", "level0"),
        ("", None),
        ("1.2.3", "1.2.3"),
    ],
)
def test_other_literals(text: str, value: object) -> None:
    assert literal(text) == value


def test_commas_split_outside_brackets_and_quotes() -> None:
    assert split("a.b,[1,2],{x,y},'q,r',s") == ["a.b", "[1,2]", "{x,y}", "'q,r'", "s"]
    assert split("a, b, c", most=1) == ["a", "b, c"]
    assert split(" ") == []


def test_what_lies_above_counts_and_what_is_not_given_shows_what_lies_below() -> None:
    below = {"a": {"x": 1, "y": 2}, "b": {"z": 3}, "c": 4, "d": 5}
    above = {"a": {"x": 9, "w": 8}, "b": None, "c": None, "d": "???", "e": 7}
    assert overlay(below, above) == {"a": {"x": 9, "y": 2, "w": 8}, "b": {"z": 3}, "c": None, "d": 5, "e": 7}


def test_environment_texts_are_texts() -> None:
    assert EnvironmentText("a") == "a"


def test_resolvers_that_a_trainer_registered_are_asked_in_the_trainer() -> None:
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
