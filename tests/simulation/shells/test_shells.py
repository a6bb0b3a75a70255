"""Whole clusters of real agents and buses in any weather, on a virtual clock: every promise of the simulation holds.

`python -m tests.simulation.shells.world SEED` runs one seed alone, and prints its story.
"""

import pytest

from tests.simulation.promises import Broken
from tests.simulation.recorded import unexplained
from tests.simulation.shells.world import simulate

SHORT = 12
BLOCK = 50
AT_LENGTH = (pytest.mark.long, pytest.mark.timeout(600))
SEEDS = [
    pytest.param(0, SHORT, id="0"),
    pytest.param(97, 98, id="an agent that is cut off looks"),
    pytest.param(114, 115, id="other bytes are pushed under a committed label"),
    pytest.param(289, 290, id="a command is superseded before its call begins"),
    *(pytest.param(first, first + BLOCK, marks=AT_LENGTH, id=str(first)) for first in range(0, 400, BLOCK)),
]
"""The first seed of each block, and the one after the last; and worlds that the judges once took for wrong."""


@pytest.mark.parametrize(("first", "end"), SEEDS)
def test_promises_hold_with_real_shells(first: int, end: int) -> None:
    for seed in range(first, end):
        try:
            world = simulate(seed)
        except Broken as broken:
            story = f"python -m tests.simulation.shells.world {seed}"
            pytest.fail(f"seed {seed}: {broken}. Its story: {story}", pytrace=False)
        twice = {slot.name for slot in world.slots if slot.identity.unit in world.doubled_until}
        assert unexplained(world, world.violations, twice) == [], f"seed {seed}"


@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_is_a_run(seed: int) -> None:
    first, second = simulate(seed), simulate(seed)
    assert first.log.records == second.log.records
    assert first.now == second.now
