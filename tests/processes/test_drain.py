"""Replicas that leave and come back, as processes: an agent at SIGTERM, `rolloutctl drain`, a place taken up again."""

import json
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from controlplane import ControlPlane
from schemas.commands import Checkpoint
from schemas.errors import CommandError, EngineError
from tests.processes.test_agent_process import CALM, Node, lives
from tests.running import typed
from tests.waiting import wait_until
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.engines.tiny.server import TinyClient

TOKENS = 32
"""Of each request."""


class Traffic:
    """A client that sends one request after the other while `wanted()`, and counts those that were cut short."""

    def __init__(self, front: str, wanted: Callable[[], bool]) -> None:
        self.sent = self.cut_short = 0
        self._client, self._wanted = TinyClient(front), wanted
        self._thread = threading.Thread(target=self._send)
        self._thread.start()
        wait_until(lambda: self.sent > 3)

    def _send(self) -> None:
        while self._wanted():
            with suppress(EngineError):  # its server ends while the request is on its way
                self.cut_short += len(self._client.generate([[3]], TOKENS)[0].tokens) < TOKENS
            self.sent += 1

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def checkpoints(folder: Path, count: int) -> None:
    for version in range(1, count + 1):
        save(TinyModel(TinyConfig(), seed=version), folder / f"v{version}")


def sync(plane: ControlPlane, version: int) -> None:
    """Sync as a trainer does that goes on only if nothing is amiss."""
    report = plane.sync_weights(version, Checkpoint(f"v{version}"), timeout=120).wait()
    report.raise_for_failures()
    assert report.status == "committed"


def test_at_sigterm_a_replica_ends_its_requests_leaves_and_no_sync_fails_for_it(tmp_path: Path) -> None:
    checkpoints(tmp_path, 4)
    front = f"ipc://{tmp_path}/engine"
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CALM, checkpoints=tmp_path) as plane,
        Node(plane.address, tmp_path, 0, 0, "--engine", "tests.unit.small_bus:Engine"),  # which needs no torch
        Node(plane.address, tmp_path, 1, 0, "--serve", front, "--drain", "60") as leaving,
    ):
        plane.wait_for_agents(2, timeout=120).wait()
        sync(plane, 1)
        assert plane.serving() == {0: 1, 1: 1}
        traffic = Traffic(front, lambda: 1 in plane.serving())
        leaving.process.send_signal(signal.SIGTERM)
        wait_until(lambda: plane.serving() == {0: 1})
        sync(plane, 2)
        traffic.join()
        sync(plane, 3)
        assert leaving.process.wait(60) == 0 and "its replica has left the fleet" in leaving.output
        sync(plane, 4)
        assert lives(plane) == {"0.0": "live"} and traffic.cut_short == 0
    verified = typed("log", "verify", tmp_path / "run.db")
    assert verified.returncode == 0, verified.stdout


def test_an_agent_that_no_bus_hears_ends_and_says_what_becomes_of_its_replica(tmp_path: Path) -> None:
    with Node(f"{tmp_path}/bus", tmp_path, 0, 1, "--drain", "60") as node:
        wait_until(lambda: "agent 0.1 is up" in node.output)
        assert node.end(signal.SIGTERM) == 0
        assert "no bus has retired agent 0.1: reports name it until it is back, or retired" in node.output


def test_a_drain_by_hand_aborts_what_still_runs_and_ends_the_agent(tmp_path: Path) -> None:
    front = f"ipc://{tmp_path}/engine"
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CALM) as plane,
        Node(plane.address, tmp_path, 0, 0, "--engine", "tests.unit.small_bus:Engine"),  # which needs no torch
        Node(plane.address, tmp_path, 1, 0, "--serve", front) as drained,
    ):
        plane.wait_for_agents(2, timeout=120).wait()
        traffic = Traffic(front, lambda: drained.process.poll() is None)
        done = typed("drain", "1", "--grace", "0.1", "--json", "--bus", plane.address)
        assert done.returncode == 0, done.stderr + done.stdout
        outcomes = {outcome["agent"]: outcome["conclusion"] for outcome in json.loads(done.stdout)["outcomes"]}
        assert outcomes["1.0"]["calls"] == ["pause"]
        assert drained.process.wait(60) == 0
        traffic.join()
        plane.flush().wait().raise_for_failures()
        assert lives(plane) == {"0.0": "live"}
        with pytest.raises(CommandError, match="this run has no replica 1"):
            plane.drain(1).wait()


def test_a_retired_place_is_taken_up_again_by_an_agent_that_says_so_and_by_no_other(tmp_path: Path) -> None:
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CALM) as plane,
        Node(plane.address, tmp_path, 1, 1) as drained,
    ):
        plane.wait_for_agents(1, timeout=120).wait()
        assert plane.drain(1, grace=60).wait(timeout=60).skipped == ("1.1",)
        assert drained.process.wait(60) == 0 and lives(plane) == {}
        drained.start()
        assert drained.process.wait(60) == 3 and "was retired from this run" in drained.output.splitlines()[-1]
        with Node(plane.address, tmp_path, 1, 1, "--rejoin", "--drain", "60") as again:
            plane.wait_for_agents(1, timeout=120).wait()
            assert plane.flush().wait().skipped == ("1.1",)
            assert again.end(signal.SIGTERM) == 0 and lives(plane) == {}
            again.start()
            plane.wait_for_agents(1, timeout=120).wait()
            assert lives(plane) == {"1.1": "live"}
