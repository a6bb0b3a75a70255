"""A bus decides all events of a turn on one copy of its tables. That changes nothing but what it costs."""

from random import Random

import pytest

from controlplane.machine.coordinator import CoordinatorState, decide
from controlplane.machine.events import CoordinatorEvent
from controlplane.machine.fleet import begin_turn, end_turn
from schemas.wire import encode
from tests.simulation.bus import event_decoder
from tests.simulation.cluster import simulate
from tests.unit.fleets import Coordinator


@pytest.mark.parametrize("seed", range(5))
def test_a_turn_decides_what_its_events_decide_one_by_one(seed: int) -> None:
    """And leaves the state before it as it was."""
    rng, world = Random(seed), simulate(seed)
    records = [(event_decoder.decode(event), effects) for event, effects in world.log.records]
    alone = CoordinatorState()
    while records:
        turn, records = records[: (size := rng.randrange(1, 9))], records[size:]
        before, was = alone, repr(alone)
        state = begin_turn(before)
        for event, recorded in turn:
            state, effects = decide(state, event)
            assert encode(effects) == recorded
            alone, _ = decide(alone, event)
        assert end_turn(state) == alone
        assert repr(before) == was


def hellos_joins_and_statuses(count: int) -> list[CoordinatorEvent]:
    bus = Coordinator(*(f"{replica}.0" for replica in range(count)))
    return [event for event in bus.history if hasattr(event, "peer")]


def test_a_turn_copies_each_table_once_whatever_the_number_of_events() -> None:
    peer_events = hellos_joins_and_statuses(300)
    state = begin_turn(Coordinator("400.0").state)
    members, desired = state.members, state.desired
    for event in peer_events:
        state, _ = decide(state, event)
        assert state.members is members and state.desired is desired
    assert len(members) == 301
