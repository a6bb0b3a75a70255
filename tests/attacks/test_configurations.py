"""Configurations that stand for far more than they say: refused at once, with one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.profiler.config import ConfigReading, ProfilerConfig, read_config, read_verl_config
from schemas.profiler.readers import TEXT_MAX, VALUES_MAX


def doubled(levels: int, first: str, each: str, last: str) -> str:
    """`first`, then lines that each name the one before twice, then `last`."""
    lines = [each.format(this=f"k{level}", before=f"k{level - 1}") for level in range(1, levels + 1)]
    return "\n".join([first, *lines, last.format(top=f"k{levels}")]) + "\n"


ALIASES = doubled(40, "k0: &k0 [1]", "{this}: &{this} [*{before},*{before}]", "steps: *{top}")
VERL = "global_profiler:\n  tool: {tool}\n  steps: {steps}\n"
PLAIN = VERL.format(tool="torch", steps="[1]")


@pytest.mark.parametrize(
    "text",
    [
        *(ALIASES, PLAIN + ALIASES),
        "steps: " + "[" * 100_000,
        "steps: " + "{a: " * 50_000,
        "- " * 100_000 + "\n",
        "a: &a [*a, *a]\nsteps: *a\n",
        "global_profiler: &a {steps: *a}\n",
        "steps: [" + "1," * TEXT_MAX + "]\n",
        "steps: [" + "1," * (VALUES_MAX + 1) + "]\n",
        "steps: [0x" + "f" * 100_000 + "]\n",
        "steps: [" + "9" * 5_000 + "]\n",
        "global_profiler: {steps: [" + "9" * 4_000 + "]}\n",
        "plan: {replicas: [1048576]}\n",
        "plan: {ranks: [9007199254740993]}\n",
        "timeout_ms: 604800001\nsteps: [1]\n",
        "? [[a, b]]\n: 1\nglobal_profiler: 5\n",
    ],
)
def test_a_configuration_that_stands_for_too_much_is_refused_with_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(text)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("read", [ProfilerConfig.from_yaml, read_verl_config])
def test_a_mapping_that_contains_itself_or_too_much_is_refused(
    read: Callable[[dict[str, object]], ProfilerConfig | ConfigReading],
) -> None:
    endless: dict[str, object] = {"global_profiler": {}}
    endless["plan"] = endless
    wide: object = [1]
    for _ in range(60):
        wide = [wide, wide]
    for tree in (endless, {"steps": wide, "global_profiler": {"steps": wide}}):
        with pytest.raises(ConfigError, match=r"contains itself|stands for more than"):
            read(tree)


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="too large for a configuration"):
        read_config(Path("/dev/zero"))


def test_what_a_trainer_has_is_far_within_the_bounds() -> None:
    section = {f"key{index}": {"list": list(range(20)), "text": "${global_profiler.tool}"} for index in range(200)}
    tree = {"global_profiler": {"tool": "torch", "steps": [1, 2]}, "trainer": section, "data": section}
    assert read_verl_config(tree).config.steps == (1, 2)
