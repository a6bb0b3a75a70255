"""Agents that are given no index: which replica the bus has each of them be."""

from msgspec.structs import replace

from schemas.wire import Rejoin
from tests.unit.fleets import SETTINGS, Coordinator

LEASE_US = SETTINGS.lease_ms * 1000


def test_ranks_of_a_trainer_take_no_place_from_replicas() -> None:
    assert Coordinator("actor.0").ask("a") == 0


def test_a_place_whose_agent_is_gone_is_not_free_and_a_retired_one_is() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.lose("0.0")
    assert bus.ask("a") == 2
    bus.retire("0.0")
    assert bus.ask("b") == 0


def test_a_place_is_kept_for_a_lease_for_an_agent_that_does_not_come() -> None:
    bus = Coordinator()
    assert [bus.ask("a"), bus.ask("b", LEASE_US - 1)] == [0, 1]
    assert [bus.ask("c", LEASE_US), bus.ask("a", LEASE_US)] == [0, 2]
    bus.ask("d", 9 * LEASE_US)
    assert set(bus.state.assigned) == {"d"}, "places that no agent takes do not pile up"


def test_a_place_is_kept_also_by_a_bus_that_was_started_again() -> None:
    bus = Coordinator()
    assert bus.ask("a", 5 * LEASE_US) == 0
    bus.open(at_us=7)
    assert [bus.ask("b", 8), bus.ask("c", 7 + LEASE_US)] == [1, 0]


def test_one_that_was_given_its_index_may_take_an_assigned_place() -> None:
    bus = Coordinator()
    assert bus.ask("a") == 0
    bus.arrive("0.0")
    assert bus.ask("a") == 1 and set(bus.state.assigned) == {"a"}


def test_a_place_that_was_made_up_is_free_once_its_agent_is_lost() -> None:
    bus = Coordinator()
    bus.hello("0.0")
    assert bus.ask("a") == 1
    bus.lose("0.0")
    assert bus.ask("b") == 0


def test_a_full_run_has_no_place() -> None:
    bus = Coordinator("0.0", settings=replace(SETTINGS, agents_max=2))
    assert bus.ask("a") == 1
    answer = bus.ask("b")
    assert isinstance(answer, Rejoin) and answer.give_up and "has places for 2 agents" in answer.reason
    assert bus.ask("a") == 1 and set(bus.state.assigned) == {"a"}
