"""Fifteen hundred schedules of a whole cluster, with every promise checked after every step.

`python -m tests.simulation.cluster SEED` runs one seed alone, and prints its story.
"""

import pytest

from controlplane.analysis.invariants import verify
from tests.simulation.cluster import simulate
from tests.simulation.promises import Broken
from tests.simulation.recorded import entries, unexplained

BLOCK = 25
SEEDS = [
    *range(0, 50, BLOCK),
    *(pytest.param(first, marks=pytest.mark.long) for first in range(50, 1500, BLOCK)),
]
"""The first seed of each block."""


@pytest.mark.parametrize("first", SEEDS)
def test_promises_hold_in_any_weather(first: int) -> None:
    for seed in range(first, first + BLOCK):
        try:
            world = simulate(seed)
        except Broken as broken:
            pytest.fail(f"seed {seed}: {broken}. Its story: python -m tests.simulation.cluster {seed}", pytrace=False)
        if seed % 10 == 0:
            assert unexplained(world, verify(entries(world))) == [], f"seed {seed}"


@pytest.mark.parametrize("seed", [236, 948])
def test_a_seed_is_a_run(seed: int) -> None:
    first, second = simulate(seed), simulate(seed)
    assert first.log.records == second.log.records
    assert [slot.journal for slot in first.slots] == [slot.journal for slot in second.slots]
