"""The interpreter's switch interval is short while commands are open, and as it was before and after."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane import ControlPlane
from controlplane.bus.switching import SwitchInterval
from schemas.config import BusConfig
from schemas.errors import ConfigError
from tests.unit.small_bus import PRIMARY, Engine
from tests.unit.test_plane import ADDRESS, agents
from tests.waiting import wait_until

BEFORE_S = 0.004


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(BEFORE_S)
    yield
    sys.setswitchinterval(before_s)


def restored() -> bool:
    return sys.getswitchinterval() == pytest.approx(BEFORE_S)


@pytest.mark.parametrize("ends", ["answered", "missing", "closed"])
def test_the_interval_is_short_while_a_command_is_open(tmp_path: Path, ends: str) -> None:
    config = BusConfig(head_interval_ms=50, heartbeat_ms=40, switch_interval_us=500)
    engine = Engine()
    with ControlPlane(ADDRESS, log=tmp_path / "run.db", config=config) as plane:
        with agents(plane.address, tmp_path, {PRIMARY: engine}):
            plane.wait_for_agents(1, timeout=20).wait()
            assert restored()
            seen: list[float] = []
            engine.begun = lambda: seen.append(sys.getswitchinterval())
            ticket = plane.flush(timeout=10)
            assert ticket.wait(20).acted == ("0.0",) and seen == [pytest.approx(0.0005)]
            wait_until(restored)
        if ends == "missing":
            plane.flush(timeout=0.1).wait(20)
        elif ends == "closed":
            plane.flush(timeout=60)
    assert restored()


def test_nothing_is_changed_unless_the_trainer_wants_it(tmp_path: Path) -> None:
    with ControlPlane(ADDRESS, log=tmp_path / "run.db") as plane:
        plane.bus.orders.add(lambda _: seen.append(sys.getswitchinterval()))
        seen: list[float] = []
        plane.flush(timeout=1).wait(20)
        assert seen == [pytest.approx(BEFORE_S)] and restored()
    with pytest.raises(ConfigError, match="switch_interval_us"):
        ControlPlane(ADDRESS, log=tmp_path / "run.db", config=BusConfig(switch_interval_us=1))


def test_the_last_of_several_buses_restores_it_and_none_makes_it_longer() -> None:
    first, second, long = SwitchInterval(1000), SwitchInterval(500), SwitchInterval(100_000)
    for bus in (first, second, long, second):
        bus.shorten()
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    for bus in (first, second, second):
        bus.restore()
        assert not restored()
    long.restore()
    assert restored()
