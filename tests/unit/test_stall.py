"""`rolloutctl stall`: what waits for which agents, from a status, and at a bus with an engine that hangs."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from schemas.events import Call, Returned
from tests.running import typed
from tests.screens import FLEET, FOLLOWS, SERVES, line
from tests.unit.small_bus import Engine
from tests.unit.test_plane import pair
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("stall")

WELL = replace(FLEET, agents=(line("0.0", SERVES, 12), line("0.1", FOLLOWS)), open=(), unproven=(), failures=())


def test_nothing_waits_in_a_fleet_that_serves() -> None:
    assert WELL.stalled.agents == ()
    held = replace(SERVES, ready=False, generating=False)
    assert replace(WELL, agents=(line("0.0", held, 12),)).stalled.agents == (), "it was paused by a command that ended"


def test_only_agents_that_something_waits_for_or_that_are_not_fit_to_serve_are_named() -> None:
    assert [each.agent for each in FLEET.stalled.agents] == ["3.0", "3.1", "0.0"]
    busy = replace(WELL, agents=(line("0.0", replace(SERVES, activity="flush"), 12), line("0.1", FOLLOWS)))
    assert [each.agent for each in busy.stalled.agents] == ["0.0"], "though no command waits for it any more"


def test_what_is_open_says_when_it_is_given_up() -> None:
    fleet = replace(FLEET, open=("pause (seq 61) waits for 0.0", "2 more commands"), left_ms=(18_000,))
    assert fleet.open_lines == ["pause (seq 61) waits for 0.0: 18 s until it is given up", "2 more commands"]


class Hangs(Engine):
    """An engine whose calls hang until a test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        await anyio.to_thread.run_sync(self.released.wait, abandon_on_cancel=True)
        return await super().perform(call, timeout_s)


@pytest.fixture
def engine() -> Iterator[Hangs]:
    engine = Hangs()
    yield engine
    engine.released.set()


@pytest.fixture
def plane(tmp_path: Path, engine: Hangs) -> Iterator[ControlPlane]:
    with pair(tmp_path, engine) as opened:
        yield opened


def test_an_engine_that_hangs_is_named_with_its_call(plane: ControlPlane, engine: Hangs) -> None:
    env = {"ROLLOUTCTL_BUS": plane.address}
    well = typed("stall", env=env)
    assert (well.returncode, well.stdout, well.stderr) == (0, "nothing waits\n", "")
    assert json.loads(typed("stall", "--json", env=env).stdout)["agents"] == []

    ticket = plane.pause(timeout=60)
    wait_until(lambda: any(line.call_ms for line in plane.status().agents))
    shown = typed("stall", env=env)
    as_json = typed("stall", "--json", env=env)
    engine.released.set()
    ticket.wait()
    assert (shown.returncode, as_json.returncode) == (1, 1), shown.stderr
    assert re.search(r"0\.0 .*busy: pause; in pause for \d+ s", shown.stdout), shown.stdout
    assert re.search(r"open: pause \(seq \d+\) waits for 0\.0: \d+ s until it is given up", shown.stdout)
    fleet = json.loads(as_json.stdout)
    assert 0 < fleet["left_ms"][0] <= 60_000 and [each["agent"] for each in fleet["agents"]] == ["0.0"]
    assert fleet["agents"][0]["status"]["activity"] == "pause" and fleet["agents"][0]["call_ms"] > 0
    wait_until(lambda: typed("stall", env=env).returncode == 0)


def test_a_replica_that_an_operator_has_paused_is_named_until_it_is_resumed(plane: ControlPlane, engine: Hangs) -> None:
    engine.released.set()
    env = {"ROLLOUTCTL_BUS": plane.address}
    assert typed("pause", env=env).returncode == 0
    paused = typed("stall", env=env)
    assert paused.returncode == 1 and "paused by an operator since" in paused.stdout, paused.stdout
    assert typed("resume", env=env).returncode == 0
    wait_until(lambda: typed("stall", env=env).stdout == "nothing waits\n")
