"""A peer that floods a bus is cut off, and one that answers it quickly is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.bus.bus_loop import FLOOD_TURNS, TURN_MAX, BusLoop
from controlplane.record.log import RunLog
from schemas.config import BusConfig


class CutOff:
    """Stands for the router: counts connections that are cut off."""

    def __init__(self) -> None:
        self.times = 0

    def cut_off_sender(self) -> None:
        self.times += 1


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[BusLoop]:
    with RunLog.open(tmp_path / "run.db") as log:
        yield BusLoop(log, BusConfig())


def full_turns(turns: BusLoop, connections: int, count: int) -> int:
    """Take in turns in which these send one message after the other. Returns how many of them are cut off."""
    turns.router = router = CutOff()  # type: ignore[assignment]
    messages = [[b"%d" % (number % connections), b"", b""] for number in range(TURN_MAX)]
    for _ in range(count):
        turns._note_backlog(messages)
    return router.times


def test_a_connection_that_sends_faster_than_the_bus_reads_is_cut_off(turns: BusLoop) -> None:
    assert full_turns(turns, 1, FLOOD_TURNS - 1) == 0
    assert full_turns(turns, 1, 1) == 1


def test_several_that_flood_together_are_cut_off_too(turns: BusLoop) -> None:
    assert full_turns(turns, 2, 4 * FLOOD_TURNS) > 0


def test_a_fleet_that_answers_many_commands_in_lockstep_is_not_cut_off(turns: BusLoop) -> None:
    assert full_turns(turns, 64, 20 * FLOOD_TURNS) == 0  # each turn ends with the same agent's answer
