"""`rolloutctl agent` as a process: it joins, answers, ends in good order, dies and comes back."""

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from schemas.commands import Checkpoint
from schemas.config import BusConfig
from schemas.errors import EngineError
from schemas.formatting import kind_and_reason
from tests.engines.servers import AgentProcess
from tests.running import python, started, typed
from tests.waiting import wait_until
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, save, weights
from workers.engines.tiny.server import Completion, TinyClient

CALM = BusConfig(head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=20_000, retransmit_ms=200)
"""A busy machine holds an agent up for seconds, and it is not missed."""
ALERT = replace(CALM, agent_timeout_ms=4_000)
"""For agents that are killed, or whose place another one wants: that is decided once an agent is missed."""


class Node(AgentProcess):
    """One agent process, with the tiny engine if no option names another. Its replica may be `auto`."""

    def __init__(self, bus: str, folder: Path, replica: int | str, node_rank: int, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(bus, folder, f"{replica}.{node_rank}", 2, "--engine", "tiny", *options)

    def end(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(with_signal)
        return self.process.wait(60)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    log = tmp_path / "run.db"
    with ControlPlane("tcp://127.0.0.1:0", log=log, config=CALM, checkpoints=tmp_path) as opened:
        yield opened


class Served(NamedTuple):
    """A tiny engine under an agent. Its front end is `front`."""

    plane: ControlPlane
    node: Node
    folder: Path
    front: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One for all tests that leave it as it was: a process that imports torch takes seconds to start."""
    folder = tmp_path_factory.mktemp("served")
    front = f"ipc://{folder}/engine"
    with (
        ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=CALM, checkpoints=folder) as plane,
        Node(plane.address, folder, 0, 0, "--serve", front, "--metrics-port", "0") as node,
    ):
        plane.wait_for_agents(1, timeout=60).wait()
        yield Served(plane, node, folder, front)


def lives(plane: ControlPlane) -> dict[str, str]:
    return {agent.agent: agent.state for agent in plane.status().agents}


@pytest.mark.parametrize(("ended_by", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_joins_answers_and_leaves(plane: ControlPlane, tmp_path: Path, ended_by: signal.Signals, code: int) -> None:
    with Node(plane.address, tmp_path, 0, 1) as node:
        plane.wait_for_agents(1, timeout=60).wait()
        assert plane.flush().wait().skipped == ("0.1",)
        assert "libtorch" not in Path(f"/proc/{node.process.pid}/maps").read_text()  # it has no tokenizer
        assert node.end(ended_by) == code
        away = plane.flush(timeout=600).wait(timeout=60)  # it said that it leaves, so no command waits for it
        assert [kind_and_reason(outcome.conclusion) for outcome in away.outcomes] == [("missing", "absent")]
        assert lives(plane) == {"0.1": "left"}
        assert "Traceback" not in node.output and "shutting down" in node.output
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d INFO agent 0\.1 ", node.output)


def test_it_says_when_it_joins_and_when_it_loses_and_finds_its_bus(tmp_path: Path) -> None:
    def lines() -> list[dict[str, str]]:
        return [json.loads(line) for line in node.output.splitlines()]

    def said(text: str) -> bool:
        return any(text in line["message"] for line in lines())

    with ExitStack() as stack:
        with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CALM) as first:
            address = first.address
            node = stack.enter_context(Node(address, tmp_path, 0, 1, "--log-format", "json"))
            first.wait_for_agents(1, timeout=60).wait()
            run = first.status().run
            wait_until(lambda: said(f"agent 0.1 joined run {run} at {address}: epoch 1, seq 1, committed weights v0"))
        wait_until(lambda: said(f"lost its bus: no answer from {address}"))
        with ControlPlane(address, log=tmp_path / "run.db", run="resume", config=CALM):
            wait_until(lambda: said("found its bus again after") and said(f"joined run {run} at {address}: epoch 2"))
    assert {line["logger"] for line in lines()} == {"rolloutctl.agent"}
    assert all(datetime.fromisoformat(line["time"]).tzinfo is not None for line in lines())
    assert {"info", "warning"} <= {line["level"] for line in lines()}


@pytest.mark.xdist_group("served")
def test_a_probe_finds_it_ready_while_requests_may_come(served: Served, tmp_path: Path) -> None:
    """Also while it is paused: requests wait at the engine, and a service without any replica would refuse them."""

    def at(node: Node) -> str:
        (address,) = re.findall(r"agent 0\.\d: metrics at (http://127\.0\.0\.1:\d+)/metrics", node.output)
        return str(address)

    def ready(node: Node) -> int:
        address = at(node)
        with suppress(HTTPError), urllib.request.urlopen(f"{address}/ready", timeout=60) as answer:
            return int(answer.status)
        return 503

    plane, node = served.plane, served.node
    with urllib.request.urlopen(f"{at(node)}/metrics", timeout=60) as answer:
        assert b"rolloutctl_agent_bus_connected 1.0" in answer.read()
    assert ready(node) == 200
    assert plane.pause().wait().acted and ready(node) == 200
    assert plane.sleep().wait().acted and ready(node) == 503
    assert plane.wake().wait().acted and plane.resume().wait().acted and ready(node) == 200
    with Node(f"ipc://{tmp_path}/no-bus", tmp_path, 0, 1, "--metrics-port", "0") as alone:
        wait_until(lambda: "metrics at" in alone.output)
        assert ready(alone) == 503


def test_killed_and_started_again_it_serves_nothing_but_the_newest_weights(tmp_path: Path) -> None:
    model = TinyModel(TinyConfig(), seed=1)
    save(model, tmp_path / "v1")
    front, log = f"ipc://{tmp_path}/engine", tmp_path / "run.db"
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane("tcp://127.0.0.1:0", log=log, config=ALERT, checkpoints=tmp_path))
        node = stack.enter_context(Node(plane.address, tmp_path, 0, 0, "--serve", front, "--seed", "99"))
        client = TinyClient(front)
        plane.wait_for_agents(1, timeout=60).wait()
        plane.sync_weights(1, Checkpoint("v1"), content=True).wait().raise_for_failures()
        assert "its engine holds weights v1 (before: v0)" in node.output
        before = client.generate([[3]], 8, temperature=0)[0].tokens
        node.process.kill()
        node.process.wait()
        report = plane.flush(timeout=30).wait()
        assert report.missing == ("0.0",)
        node.start()
        # Asked before it knows what is desired; answered by the weights that are.
        completions: list[Completion] = []

        def generated() -> bool:
            with suppress(EngineError):  # nothing listens yet
                completions.extend(client.generate([[3]], 8, temperature=0))
            return bool(completions)

        wait_until(generated)
        (after,) = completions
        assert (after.tokens, after.versions) == (before, [1] * 8)
        assert client.describe().digest == digest(weights(model))


@pytest.mark.xdist_group("served")
def test_an_engine_is_driven_by_hand(served: Served) -> None:
    plane, client = served.plane, TinyClient(served.front)

    def by_hand(*words: str) -> dict[str, str]:
        done = typed(*words, "--json", "--bus", plane.address)
        assert done.returncode == 0, done.stderr + done.stdout
        outcomes = json.loads(done.stdout)["outcomes"]
        return {outcome["agent"]: ",".join(outcome["conclusion"].get("calls", ())) for outcome in outcomes}

    tokens = client.generate([[3]], 8, temperature=0)[0].tokens
    assert by_hand("sleep", "--tag", "kv_cache") == {"0.0": "pause,sleep"}
    assert by_hand("sleep") == {"0.0": "sleep"}
    assert by_hand("wake") == {"0.0": "wake,resume"}
    assert by_hand("profile", "start", "--step", "2", "--window", "0", "3") == {"0.0": "start_profile"}
    assert client.generate([[3]], 8, temperature=0)[0].tokens == tokens
    assert by_hand("profile", "stop", "--step", "2") == {"0.0": "stop_profile"}
    assert len(list((served.folder / "traces" / "global_step_2" / "replica_0").iterdir())) == 1
    assert plane.sleep(["weights"]).wait().acted == plane.wake().wait().acted == ("0.0",)


def test_a_place_that_is_taken_ends_the_second_one(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=ALERT))
        stack.enter_context(Node(plane.address, tmp_path, 0, 1))
        plane.wait_for_agents(1, timeout=60).wait()
        second = stack.enter_context(Node(plane.address, other, 0, 1))
        assert second.process.wait(60) == 3
        last = second.output.splitlines()[-1]
        assert re.match(r"rolloutctl: agent 0\.1 is running as incarnation \w+ on .*, pid \d+\. Two agents can't", last)
        assert plane.flush().wait().skipped == ("0.1",)


def test_two_jobs_of_one_user_on_one_machine_do_not_meet(plane: ControlPlane, tmp_path: Path) -> None:
    home = tmp_path / "home"
    place = ["--replica", "0", "--nnodes", "2", "--node-rank", "1", "--engine", "tiny"]
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "other.db", config=CALM) as other, ExitStack() as stack:
        for job in (plane, other):
            words = ["-m", "controlplane.cli", "agent", "--bus", job.address, *place]
            stack.enter_context(started(*words, env={"XDG_STATE_HOME": str(home)}))
        for job in (plane, other):
            job.wait_for_agents(1, timeout=60).wait()
            assert job.flush().wait().skipped == ("0.1",)
    assert len({path.parent for path in home.glob("rolloutctl/*/*/agent-0.1*")}) == 2


def test_an_engine_without_its_packages_ends_the_agent_with_one_clear_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['safetensors'] = None; from controlplane.cli.__main__ import main; main()"
    words = [
        "agent",
        "--bus",
        f"ipc://{tmp_path}/bus",
        "--replica",
        "0",
        "--engine",
        "tiny",
        "--state-dir",
        str(tmp_path),
    ]
    done = python("-c", code, *words)
    assert done.returncode == 3
    logged, last = done.stderr.splitlines()
    assert "TinyEngine.open raised: the tiny engine needs torch" in logged
    assert last.startswith("rolloutctl: the tiny engine needs torch") and "its extra `torch`" in last


MURDERER = """
import asyncio
from tests.unit.small_bus import Engine as Small
class Engine(Small):
    async def observe(self):
        asyncio.current_task().cancel()
        return await super().observe()
"""


def test_an_agent_whose_backend_cancels_it_says_so_and_ends_with_3(tmp_path: Path) -> None:
    (tmp_path / "cancels.py").write_text(MURDERER)
    place = ["--bus", f"ipc://{tmp_path}/bus", "--replica", "0", "--state-dir", str(tmp_path / "state")]
    done = python("-m", "controlplane.cli", "agent", *place, "--engine", "cancels:Engine", cwd=tmp_path)
    assert done.returncode == 3
    assert "agent 0.0 ends: one of its tasks was cancelled from within" in done.stderr.splitlines()[-1]
