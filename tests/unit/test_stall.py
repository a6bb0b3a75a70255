"""`rolloutctl stall`: who waits for whom, from a status, and at a bus with an engine that hangs."""

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
from controlplane.cli.stall import waits
from schemas.config import BusConfig
from schemas.events import Call, Returned
from schemas.reports import AgentLine, FleetStatus, HeldSync, PendingCommand
from tests.running import rolloutctl
from tests.screens import FLEET, FOLLOWS, SERVES, line
from tests.unit.small_bus import PRIMARY, SECOND, Engine
from tests.unit.test_plane import agents
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("stall")

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=100)
WELL = replace(FLEET, agents=(line("0.0", SERVES, 12), line("0.1", FOLLOWS)), open=(), unproven=(), failures=())


def pending(name: str, left_ms: int, waiting: int = 1) -> PendingCommand:
    return PendingCommand(name=name, age_ms=12_000, left_ms=left_ms, waiting=waiting)


def said(fleet: FleetStatus) -> list[str]:
    return [line.text for wait in waits(fleet) for line in wait.lines()]


def of(*lines: AgentLine, **changes: object) -> FleetStatus:
    return replace(WELL, agents=lines, **changes)


def test_nothing_waits_in_a_fleet_that_serves() -> None:
    assert waits(WELL) == []
    held = replace(SERVES, ready=False, generating=False)
    assert waits(of(line("0.0", held, 12))) == [], "it was paused by a command that has ended"


def test_a_command_says_how_long_it_may_wait_and_what_each_agent_is_doing() -> None:
    name = "pause (seq 61)"
    busy = replace(SERVES, activity="pause", queued=2)
    fleet = of(
        line("0.0", busy, 12, waits_for=(name,), silent_ms=1000),
        line("1.0", SERVES, 12, waits_for=(name,), silent_ms=14_000),
        pending=(pending(name, 18_000, waiting=2),),
    )
    assert said(fleet) == [
        "pause (seq 61) waits for 2 agents: published 12 s ago, 18 s until its deadline",
        "  0.0 on node-a: v12, generating, busy: pause; 2 more queued for its engine; last heard 1 s ago",
        (
            "  1.0 on node-c: v12, generating; no engine call in flight: the command or its answer is on its way;"
            " last heard 14 s ago"
        ),
    ]


def test_commands_without_a_deadline_in_the_status_are_not_left_out() -> None:
    """A bus names 64 commands, and an earlier one names no deadlines."""
    more = of(line("0.0", SERVES, waits_for=("x",)), pending=(pending("x", 1000),), open=("x waits", "2 more commands"))
    assert [text for text in said(more) if not text.startswith("  ")][1:] == ["2 more commands"]
    assert said(of(line("0.0", SERVES, waits_for=("x",)), open=("x waits for 0.0",))) == ["x waits for 0.0"]


def test_agents_that_do_the_same_share_a_line() -> None:
    busy = replace(SERVES, activity="load")
    rows = [
        line(f"{replica}.0", busy, waits_for=("x",), silent_ms=replica * 1000, call_ms=(10 + replica) * 1000)
        for replica in range(4)
    ]
    fleet = of(*rows, pending=(pending("x", 1000, waiting=4),))
    assert said(fleet)[1:] == ["  0.0 … 3.0: v12, generating, busy: load; in load for 13 s; last heard 3 s ago"]
    (wait,) = waits(fleet)
    assert [(waiting.call, waiting.call_ms) for waiting in wait.agents][:2] == [("load", 10_000), ("load", 11_000)]


def test_the_nearest_deadline_comes_first_and_what_nobody_gives_up_last() -> None:
    fleet = of(
        line("0.0", replace(SERVES, activity="flush"), 12),
        *(each for each in FLEET.agents if each.agent in ("3.0", "3.1")),
        line("1.0", SERVES, 12, waits_for=("late (seq 2)", "soon (seq 3)")),
        pending=(pending("late (seq 2)", 60_000), pending("soon (seq 3)", 500)),
        held=HeldSync(version=13, phase="load", left_ms=9000),
        unproven=(2, 3),
    )
    assert [text for text in said(fleet) if not text.startswith("  ")] == [
        "soon (seq 3) waits for 1 agent: published 12 s ago, 0 s until its deadline",
        "late (seq 2) waits for 1 agent: published 12 s ago, 1 min until its deadline",
        "the sync to v13 waits for the trainer to ask for its load phase: 9 s until it is given up",
        "no open command waits for these engine calls: it was answered at its deadline, or the agent reconciles",
        "no command waits for these, and they are not fit to serve",
        "replica 2 not proven to hold v12",
    ]
    assert "  3.1 on node-h: gone for 3 min (was a healthy follower, node rank 1)" in said(fleet)
    assert any(text.startswith("  3.0 on node-g: not ready, quarantined since v12") for text in said(fleet))


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
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK) as opened,
        agents(opened.address, tmp_path, {PRIMARY: engine, SECOND: Engine()}),
    ):
        opened.wait_for_agents(2, timeout=20).wait()
        yield opened


def test_an_engine_that_hangs_is_named_with_its_call(plane: ControlPlane, engine: Hangs) -> None:
    env = {"ROLLOUTCTL_BUS": plane.address}
    well = rolloutctl("stall", env=env)
    assert (well.returncode, well.stdout, well.stderr) == (0, "nothing waits\n", "")
    assert json.loads(rolloutctl("stall", "--json", env=env).stdout) == []

    ticket = plane.pause(timeout=60)
    wait_until(lambda: any(line.call_ms for line in plane.status().agents))
    shown = rolloutctl("stall", env=env)
    as_json = rolloutctl("stall", "--json", env=env)
    engine.released.set()
    ticket.wait()
    assert (shown.returncode, as_json.returncode) == (1, 1), shown.stderr
    first, second = shown.stdout.splitlines()[:2]
    assert first.startswith("pause (seq ") and "waits for 1 agent: published " in first
    assert second.startswith("  0.0 on ") and re.search(r"busy: pause; in pause for \d+ s; last heard", second)
    (wait,) = json.loads(as_json.stdout)
    assert 0 < wait["left_ms"] <= 60_000 and [each["agent"] for each in wait["agents"]] == ["0.0"]
    assert wait["agents"][0]["call"] == "pause" and wait["agents"][0]["call_ms"] > 0
    assert rolloutctl("stall", env=env).returncode == 0
