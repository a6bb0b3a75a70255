"""Any configuration is read, and can then be sent and written; or it is refused with an error for a person."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.commands import ProfileCommand
from schemas.errors import ConfigError
from schemas.identity import TIME_MAX_MS
from schemas.profiler.config import ProfilerConfig, read_verl_config
from schemas.profiler.readers import yaml_text
from schemas.profiler.settings import RankUnit

CONFIGS = Path(__file__).parents[1] / "configs"
VERL: list[dict[str, Any]] = [
    yaml.safe_load((CONFIGS / name).read_text("utf-8")) for name in ("verl_all_on.yaml", "verl_pull_5025.yaml")
]
OWN: dict[str, Any] = yaml.safe_load((CONFIGS / "profiler.yaml").read_text("utf-8"))


def nested(value: object, levels: int, mapping: bool) -> object:
    """Return the value within that many lists or mappings."""
    for _ in range(levels):
        value = {"a": value} if mapping else [value]
    return value


texts = st.sampled_from(
    [
        *("torch", "npu", "nsys", "torch_memory", "precision_debugger", "all", "1-3", "???"),
        *("${a.b}", "${", "", "x"),
    ]
)
bounds = st.sampled_from(
    (0, 1, -1, 2**20 - 1, 2**20, TIME_MAX_MS, TIME_MAX_MS + 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**64)
)
ranges = st.builds("{}-{}".format, bounds, bounds)
leaves = st.none() | st.booleans() | st.integers() | bounds | ranges | st.floats() | st.text(max_size=5) | texts
deep = st.builds(nested, leaves, st.sampled_from((2, 97, 101, 300)), st.booleans())
wide = st.builds(lambda leaf, count: [leaf] * count, leaves, st.sampled_from((2, 300)))
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
) | st.one_of(deep, wide)


def paths(tree: object, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of every value below the top."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path for key, value in inner for path in [(*above, key), *paths(value, (*above, key))]]


@st.composite
def altered(draw: st.DrawFn, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with other values at one to three of its places."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(paths(tree) or [("new",)]))
        node: Any = tree
        for key in above:
            node = node[key]
        node[last] = draw(values)
    return tree


def sendable(config: ProfilerConfig) -> bool:
    """Whether a command that carries it arrives unchanged. The decoder checks each bound."""
    command = ProfileCommand(action="start", step=0, plan=config.plan, roles=config.roles)
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=ProfileCommand)
    again = msgspec.json.decode(msgspec.json.encode(config), type=ProfilerConfig)
    return there == command and again == config


BASES = pytest.mark.parametrize("base", VERL, ids=["all_on", "pull_5025"])
ALTERED = given(data=st.data(), ranks=st.sampled_from(["global", "replica"]))


def check_verl(base: dict[str, Any], data: st.DataObject, ranks: RankUnit) -> None:
    tree = data.draw(altered(base))
    try:
        config, warnings = read_verl_config(tree, ranks=ranks)
    except ConfigError as error:
        assert str(error)
        return
    assert sendable(config)
    assert all(warnings) and len(set(warnings)) == len(warnings)
    assert ProfilerConfig.from_yaml(yaml_text(config)) == config


@BASES
@ALTERED
@settings(max_examples=25)
def test_a_configuration_of_verl(base: dict[str, Any], data: st.DataObject, ranks: RankUnit) -> None:
    check_verl(base, data, ranks)


@pytest.mark.long
@BASES
@ALTERED
@settings(max_examples=1_000)
def test_many_configurations_of_verl(base: dict[str, Any], data: st.DataObject, ranks: RankUnit) -> None:
    check_verl(base, data, ranks)


@given(altered(OWN))
def test_a_configuration_of_our_own(tree: dict[str, Any]) -> None:
    try:
        config = ProfilerConfig.from_yaml(tree)
    except ConfigError as error:
        assert str(error)
        return
    assert sendable(config)
    assert ProfilerConfig.from_yaml(yaml_text(config)) == config
