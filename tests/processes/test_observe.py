"""`rolloutctl observe` and `rolloutctl agent --observe` as processes: the engine never notices that it is looked at."""

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from controlplane.bus.operator import ask_status
from controlplane.cli.agent import agent as agent_command
from schemas.agent_status import Observed
from schemas.commands import ProfilePlan
from schemas.desired import ProfileSession
from schemas.errors import ConfigError, RolloutctlError
from schemas.events import Pause, StartProfile
from schemas.identity import Identity
from schemas.reports import FleetStatus
from tests.running import rolloutctl, started, typed
from tests.waiting import wait_until
from workers.engines.tiny.engine import TinyEngine

VIEW = "tests.engines.observed_tiny:ObservedTiny"
OBSERVE = ("-m", "controlplane.cli", "observe", "--address", "tcp://127.0.0.1:0", "--log")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TinyEngine]:
    """An engine that a trainer drives: it is paused, and a session is open."""
    driven = TinyEngine(
        Identity(replica=0, node_rank=0), checkpoints=tmp_path, traces=tmp_path / "traces", serve=front(tmp_path)
    )
    anyio.run(driven.open)
    anyio.run(driven.perform, Pause("abort"), 10.0)
    anyio.run(driven.perform, StartProfile(ProfileSession(3, ProfilePlan()), "s3"), 10.0)
    yield driven
    anyio.run(driven.close)


def front(folder: Path) -> str:
    return f"ipc://{folder}/engine"


def state_of(engine: TinyEngine) -> tuple[Any, ...]:
    """Everything that a call could change."""
    scheduler = engine._scheduler
    assert scheduler is not None
    return scheduler.observation, scheduler.forwards, scheduler._profile, dict(scheduler._kept), scheduler._requests[:]


def agent(bus: str, folder: Path, *options: object) -> list[str]:
    words = ["agent", "--bus", bus, "--replica", 0, "--state-dir", folder / "state", *options]
    return ["-m", "controlplane.cli", *map(str, words)]


def fleet(bus: str) -> FleetStatus | None:
    try:
        return anyio.run(ask_status, bus, 5.0, None)
    except RolloutctlError:
        return None


def onlooker(bus: str, state: str = "live") -> str:
    """Return the incarnation of the agent in this state that sees what the engine is; empty while there is none."""
    status = fleet(bus)
    seen = Observed(label="0", generating=False, profiling=True)
    lines = status.agents if status is not None else ()
    found = [line for line in lines if line.state == state and line.status and line.status.observed == seen]
    return found[0].incarnation if found else ""


def is_another(bus: str, killed: str) -> bool:
    return onlooker(bus) not in ("", killed)


def test_an_engine_is_the_same_after_any_observer_however_that_ends(engine: TinyEngine, tmp_path: Path) -> None:
    before, log = state_of(engine), tmp_path / "run.db"
    with ExitStack() as stack:
        limits = ("--paused-after", 0.001, "--profiling-after", 0.001)
        bus = stack.enter_context(started(*OBSERVE, log, *limits, stderr=subprocess.DEVNULL))
        assert bus.stdout is not None
        address = bus.stdout.readline().split()[2].rstrip(",")
        killed = ""
        for ended_by in (signal.SIGKILL, signal.SIGTERM):
            looker = subprocess.Popen(
                [sys.executable, *agent(address, tmp_path, "--observe", "--engine", VIEW, "--url", front(tmp_path))],
                stderr=subprocess.DEVNULL,
            )
            try:
                wait_until(partial(is_another, address, killed))
                killed = onlooker(address)
                assert state_of(engine) == before
            finally:
                looker.send_signal(ended_by)
                looker.wait(60)
            assert state_of(engine) == before
        wait_until(lambda: onlooker(address, "left") == killed)

        commanding = rolloutctl(*agent(address, tmp_path / "other", "--engine", "tests.unit.small_bus:Engine")[2:])
        assert commanding.returncode == 3
        assert "this bus only observes, and agent 0.0 would command its engine" in commanding.stderr
        asked = typed("resume", "--bus", address)
        assert asked.returncode == 1
        assert state_of(engine) == before

        bus.send_signal(signal.SIGINT)
        assert bus.wait(60) == 130
    verified = typed("log", "verify", log)
    assert verified.returncode == 1 and re.findall(r"\b[IO]\d+ at", verified.stdout) == ["O2 at", "O3 at"]
    assert typed("report", log, "-o", tmp_path / "run.html").returncode == 0
    page = (tmp_path / "run.html").read_text()
    assert page.index("The run that was observed went wrong") < page.index("<nav") < page.index("h-observed")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--launch",), "--observe does not go with --launch: an observing agent changes nothing"),
        (("--mode", "hybrid"), "--observe does not go with --mode"),
        (("--router", "http://h:1"), "--observe does not go with --router"),
        (("--traces", "t"), "--observe does not go with --traces"),
        (("--", "python"), "--observe does not go with a server's command"),
        ((), "--engine vllm on node rank 0 needs --url of its server, http://HOST:PORT"),
    ],
)
def test_options_that_are_about_commands_are_refused(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        words = agent("tcp://127.0.0.1:1", tmp_path, "--observe", "--engine", "vllm", *options)
        agent_command.main(words[3:], standalone_mode=False)


def test_a_bus_that_observes_serves_metrics_where_it_says(tmp_path: Path) -> None:
    with started(*OBSERVE, tmp_path / "run.db", "--metrics-port", "0") as bus:
        assert bus.stdout is not None
        said = re.fullmatch(r"metrics at (http://127\.0\.0\.1:\d+/metrics)\n", bus.stdout.readline())
        assert said is not None
        with urllib.request.urlopen(said[1], timeout=60) as answer:
            assert b"rolloutctl_bus_up 1.0" in answer.read()
