"""Agents that are given no index: which replica the bus has each of them be."""

from random import Random

import pytest
from msgspec.structs import replace

from controlplane.machine.coordinator_state import ALIVE
from controlplane.machine.events import PeerLost, RetireRequested
from schemas.wire import Rejoin
from tests.unit.fleets import SECOND_US, SETTINGS, Coordinator

LEASE_US = SETTINGS.lease_ms * 1000


def retire(bus: Coordinator, place: str) -> None:
    bus.tickets += 1
    bus.feed(RetireRequested(at_us=0, at_ns=0, ticket=bus.tickets, places=(place,)))


def lose(bus: Coordinator, replica: int) -> None:
    if (member := bus.state.members.get(f"{replica}.0")) is not None and member.state in ALIVE:
        bus.feed(PeerLost(at_us=0, peer=member.peer, reason="silent"))


def test_ranks_of_a_trainer_take_no_place_from_replicas() -> None:
    assert Coordinator("actor.0").ask("a") == 0


def test_a_place_whose_agent_is_gone_is_not_free_and_a_retired_one_is() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.lose("0.0")
    assert bus.ask("a") == 2
    retire(bus, "0.0")
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


@pytest.mark.parametrize("seed", range(20))
def test_no_two_agents_have_one_place_whatever_happens(seed: int) -> None:
    """Agents ask, come, are lost and retired, and the bus starts again, at random moments."""
    random, bus, at_us = Random(seed), Coordinator(), 0
    places: dict[str, tuple[int, int]] = {}  # of each token that was answered: which one, and until when it is kept
    here: dict[int, str] = {}  # places that are known, by whose they are
    for number in range(300):
        at_us += random.choice([0, SECOND_US, 10 * SECOND_US])
        token = random.choice([*places, f"token-{number}"])
        replica, until_us = places.get(token, (-1, 0))
        match random.choice(["ask", "come", "come", "lose", "retire", "open"]):
            case "ask" if here.get(replica) != token:
                replica = bus.ask(token, at_us)  # type: ignore[assignment]
                others = {other for name, (other, end) in places.items() if name != token and end > at_us}
                lowest = min({*range(400)} - others - here.keys())
                assert replica == (lowest if until_us <= at_us else places[token][0])
                if until_us <= at_us:
                    places[token] = replica, at_us + LEASE_US
            case "come" if until_us > at_us and here.setdefault(replica, token) == token:
                lose(bus, replica)
                bus.hello(f"{replica}.0", f"life-{number}", at_us=at_us, rejoin=True, nnodes=1)
                bus.join(f"{replica}.0", f"life-{number}")
            case "lose":
                lose(bus, replica)
            case "retire" if here.get(replica) == token:
                lose(bus, replica)
                retire(bus, f"{replica}.0")
                del here[replica], places[token]
            case "open":
                bus.open(at_us)
                places = {
                    name: (other, at_us + LEASE_US if name in bus.state.assigned else until_us)
                    for name, (other, until_us) in places.items()
                }
            case _:
                pass
