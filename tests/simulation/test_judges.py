"""The judges of the simulation themselves: each lets pass what is right, and still catches what it is there for."""

from msgspec.structs import replace

from schemas.desired import Desired
from schemas.wire import Snapshot
from tests.simulation.agent import Process
from tests.simulation.cluster import World
from tests.simulation.verdicts import LEASE_LATE_MS, leased
from tests.simulation.weather import Weather
from workers.machine.state import AgentState


def lonely(epoch: int) -> Process:
    """Return an agent that has seen this epoch, and whose bus is gone since 0 ms."""
    world = World(0)
    world.weather = Weather()
    process = Process(world.slots[0])
    process.slot.process, process.state = process, replace(AgentState(), epoch=epoch)
    return process


def judged_at(process: Process, ms: int) -> str:
    process.world.now = ms
    return leased(process)


def test_a_lease_counts_from_the_last_snapshot_though_its_bus_is_gone_by_now() -> None:
    process = lonely(epoch=1)
    lease_ms = process.world.settings.lease_ms
    process.world.now = lease_ms
    process.on_control(1, 0, Snapshot(desired=Desired()))
    assert judged_at(process, 2 * lease_ms + LEASE_LATE_MS) == ""
    assert "its lease goes on" in judged_at(process, 2 * lease_ms + LEASE_LATE_MS + 1)


def test_a_snapshot_of_a_bus_that_was_replaced_prolongs_no_lease() -> None:
    process = lonely(epoch=2)
    lease_ms = process.world.settings.lease_ms
    process.world.now = lease_ms
    process.on_control(1, 0, Snapshot(desired=Desired()))
    assert "its lease goes on" in judged_at(process, lease_ms + LEASE_LATE_MS + 1)


def test_an_agent_whose_lease_is_over_is_let_be() -> None:
    process = lonely(epoch=1)
    process.lease_over = True
    assert judged_at(process, 100_000) == ""
