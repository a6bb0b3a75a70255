"""Ten replicas that join in the middle of a sync: real agents on real sockets, with engines that a test holds up."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from controlplane.tickets import Ticket
from schemas.commands import Checkpoint
from schemas.events import Call, Load, Observation, Returned
from schemas.identity import Identity
from schemas.reports import SyncReport
from tests.unit.small_bus import Engine
from tests.unit.test_metrics import MANIFEST
from tests.unit.test_plane import ADDRESS, QUICK, agents
from tests.waiting import until, wait_until

OLD, NEW = (0, 1), tuple(range(2, 12))


class HeldUp(Engine):
    """It launches until `launched`, and loads until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.launched, self.released = threading.Event(), threading.Event()
        self.loading: list[int] = []

    async def observe(self) -> Observation:
        self.tokenizer = "present" if self.launched.is_set() else "unknown"
        return await super().observe()

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        if isinstance(call, Load):
            self.loading.append(call.version)
            await until(self.released.is_set)
        return await super().perform(call, timeout_s)


class Growing:
    """A fleet of two replicas that loads version 2, and the ten that join meanwhile."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self._folder, self._opened = folder, opened
        self.plane = opened.enter_context(
            ControlPlane(ADDRESS, log=folder / "run.db", config=replace(QUICK, agent_timeout_ms=60_000))
        )
        self.old, self.new = ({index: HeldUp() for index in indices} for indices in (OLD, NEW))
        for engine in self.old.values():
            engine.launched.set()
            engine.released.set()
        self._join(self.old)
        self.plane.wait_for_agents(2, timeout=60).wait()
        self.sync(1).wait(60).raise_for_failures()
        for engine in self.old.values():
            engine.released.clear()
        self.ticket = self.sync(2)
        wait_until(lambda: all(engine.loading == [1, 2] for engine in self.old.values()))

    def sync(self, version: int) -> Ticket[SyncReport]:
        return self.plane.sync_weights(version, Checkpoint(f"v{version}"), manifest=MANIFEST, timeout=600)

    def _join(self, engines: dict[int, HeldUp]) -> None:
        places: dict[Identity, Engine] = {
            Identity(replica=index, node_rank=0): engine for index, engine in engines.items()
        }
        self._opened.enter_context(agents(self.plane.address, self._folder, places))

    def grow(self) -> None:
        """Have the ten join."""
        self._join(self.new)
        wait_until(lambda: len(self.live) == 12)

    @property
    def live(self) -> list[str]:
        return [line.agent for line in self.plane.status().agents if line.state == "live" and line.status is not None]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Growing]:
    with ExitStack() as opened:
        fleet = Growing(tmp_path, opened)
        try:
            yield fleet
        finally:
            for engine in (fleet.old | fleet.new).values():
                engine.released.set()


def release(engines: dict[int, HeldUp]) -> None:
    for engine in engines.values():
        engine.launched.set()
        engine.released.set()


def test_replicas_whose_engines_launch_hold_up_no_sync_and_load_its_version_alone(fleet: Growing) -> None:
    fleet.grow()
    release(fleet.old)
    report = fleet.ticket.wait(60)
    report.raise_for_failures()
    assert (report.loaded, report.quarantined, report.joining) == (OLD, (), NEW)
    assert fleet.plane.serving() == {0: 2, 1: 2}
    release(fleet.new)
    wait_until(lambda: fleet.plane.serving() == dict.fromkeys((*OLD, *NEW), 2))
    assert [engine.loading for engine in fleet.new.values()] == [[2]] * 10, "no version in between"


def test_replicas_that_are_up_load_what_the_others_load_and_hold_up_neither_them_nor_the_sync(fleet: Growing) -> None:
    for engine in fleet.new.values():
        engine.launched.set()
    fleet.grow()
    wait_until(lambda: all(engine.loading == [2] for engine in fleet.new.values()))
    release(fleet.old)
    report = fleet.ticket.wait(60)
    report.raise_for_failures()
    assert (report.loaded, report.quarantined, report.joining) == (OLD, (), NEW)
    assert fleet.plane.serving() == {0: 2, 1: 2}
    report = fleet.sync(3).wait(60)  # they still load version 2
    report.raise_for_failures()
    assert (report.loaded, report.joining) == (OLD, NEW)
    release(fleet.new)
    wait_until(lambda: fleet.plane.serving() == dict.fromkeys((*OLD, *NEW), 3))
    assert [engine.loading for engine in fleet.new.values()] == [[2, 3]] * 10


def test_a_drain_waits_for_no_replica_but_its_own(fleet: Growing) -> None:
    release({1: fleet.old[1]})
    report = fleet.plane.drain(1, grace=0).wait(60)
    report.raise_for_failures()
    assert report.acted == ("1.0",) and fleet.live == ["0.0"], "replica 0 still loads"
