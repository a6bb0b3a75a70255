"""Thousands of schedules of a whole cluster, with every promise checked after every step.

A seed that fails is run alone, with its story, by `python -m tests.simulation.cluster SEED`.
"""

import pytest

from tests.simulation.cluster import simulate
from tests.simulation.promises import Broken

BLOCK = 100
SEEDS = range(0, 1500, BLOCK)


@pytest.mark.parametrize("first", SEEDS)
def test_promises_hold_whatever_the_weather(first: int) -> None:
    for seed in range(first, first + BLOCK):
        try:
            simulate(seed)
        except Broken as broken:
            pytest.fail(f"seed {seed}: {broken}. Its story: python -m tests.simulation.cluster {seed}", pytrace=False)


def test_a_seed_is_a_run() -> None:
    first, second = simulate(236), simulate(236)
    assert first.log.records == second.log.records
    assert [slot.journal for slot in first.slots] == [slot.journal for slot in second.slots]
