"""`rolloutctl agent --replica auto` as processes: the bus says which replica each of them is."""

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from controlplane.bus.key_folder import KeyFolder
from tests.processes.test_agent_process import ALERT, CALM, Node, lives
from tests.running import typed
from tests.waiting import wait_until

LATEST: Final = re.compile(r"agent (\d+)\.0 is up")


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def auto(bus: str, folder: Path, *options: str) -> Node:
    light = ("--engine", "tests.unit.small_bus:Engine")  # which place it has is the same for any engine
    return Node(bus, folder, "auto", 0, "--nnodes", "1", *light, *options)


def places(node: Node) -> list[int]:
    """Which replica each life of a process was."""
    return [int(index) for index in LATEST.findall(node.output)]


def restart(node: Node) -> None:
    node.process.kill()
    node.process.wait()
    lives_before = len(places(node))
    node.start()
    wait_until(lambda: len(places(node)) > lives_before)


def test_agents_get_places_of_their_own_keep_them_and_take_up_those_that_were_retired(
    tmp_path: Path, started: ExitStack
) -> None:
    log, bus = tmp_path / "run.db", str(tmp_path / "bus")
    config = replace(ALERT, address_file=bus)
    nodes = [started.enter_context(auto(bus, tmp_path / name)) for name in "ab"]
    with ControlPlane("tcp://127.0.0.1:0", log=log, config=config) as plane:
        address = plane.address
        plane.wait_for_agents(2, timeout=120).wait()
        assert sorted(map(places, nodes)) == [[0], [1]] and lives(plane) == {"0.0": "live", "1.0": "live"}
        first, second = sorted(nodes, key=places)
        restart(first)
        assert places(first) == [0, 0]
    restart(second)  # while no bus answers: it has an engine to look after
    with ControlPlane(address, log=log, run="resume", config=config) as plane:
        third = started.enter_context(auto(bus, tmp_path / "c"))
        plane.wait_for_agents(3, timeout=120).wait()
        assert (places(first), places(second), places(third)) == ([0, 0], [1, 1], [2])
        plane.drain(0, grace=0).wait()
        assert first.process.wait(60) == 0
        late = started.enter_context(auto(bus, tmp_path / "d"))
        plane.wait_for_agents(3, timeout=120).wait()
        assert places(late) == [0] and sorted(lives(plane)) == ["0.0", "1.0", "2.0"]
    assert typed("log", "verify", log).returncode == 0
    replayed = typed("log", "replay", log)
    assert replayed.returncode == 0, replayed.stderr


def test_one_whose_place_another_has_taken_gets_a_new_one_when_it_is_started_again(
    tmp_path: Path, started: ExitStack
) -> None:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=ALERT) as plane:
        node = started.enter_context(auto(plane.address, tmp_path / "a"))
        plane.wait_for_agents(1, timeout=120).wait()
        (memory,) = (tmp_path / "a").rglob("replica")
        (copy := tmp_path / "b" / memory.relative_to(tmp_path / "a")).parent.mkdir(parents=True)
        copy.write_text(memory.read_text())  # as of a disk that was cloned
        twin = started.enter_context(auto(plane.address, tmp_path / "b"))
        assert twin.process.wait(120) == 3 and "agent 0.0 is running as incarnation" in twin.output
        twin.start()
        plane.wait_for_agents(2, timeout=120).wait()
        assert (places(node), places(twin)) == ([0], [0, 1])


def test_a_key_that_is_bound_to_places_wants_an_index_and_any_other_gets_one(
    tmp_path: Path, started: ExitStack
) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.make_server()
    bound, free = folder.add("bound", "agent", ("1",)), folder.add("free", "agent", ())
    log = tmp_path / "run.db"
    with ControlPlane("tcp://127.0.0.1:0", log=log, config=CALM, keys=folder.path) as plane:
        refused = started.enter_context(auto(plane.address, tmp_path / "a", "--key", str(bound)))
        assert refused.process.wait(120) == 3
        assert "key bound is for 1: start its agent with that --replica" in refused.output
        node = started.enter_context(auto(plane.address, tmp_path / "b", "--key", str(free)))
        plane.wait_for_agents(1, timeout=120).wait()
        assert places(node) == [0]
        assert node.end(signal.SIGTERM) == 0
