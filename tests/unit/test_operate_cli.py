"""The command line at a running bus, as processes: what is printed, and the exit codes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from controlplane import ControlPlane
from schemas.config import BusConfig
from tests.running import rolloutctl
from tests.unit.small_bus import PRIMARY, SECOND, Engine
from tests.unit.test_plane import agents

pytestmark = pytest.mark.xdist_group("operate")

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=100)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("operate")
    with (
        ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db", config=QUICK) as opened,
        agents(opened.address, folder, {PRIMARY: engine, SECOND: Engine()}),
    ):
        opened.wait_for_agents(2, timeout=20).wait()
        yield opened


def test_status_shows_the_fleet(plane: ControlPlane) -> None:
    shown = rolloutctl("status", env={"ROLLOUTCTL_BUS": plane.address})
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "run.db" in shown.stdout and "v0, " in shown.stdout
    rows = [line.split() for line in shown.stdout.splitlines() if line.startswith((" 0.0", " 0.1", "0.0", "0.1"))]
    assert [row[0] for row in rows] == ["0.0", "0.1"]
    assert all("live" in row and "s" in row for row in rows), "each agent, and how long it has been silent"


def test_status_as_json(plane: ControlPlane) -> None:
    shown = json.loads(rolloutctl("status", "--json", env={"ROLLOUTCTL_BUS": plane.address}).stdout)
    assert [agent["agent"] for agent in shown["agents"]] == ["0.0", "0.1"]
    assert all(agent["status"]["ready"] for agent in shown["agents"])


@pytest.mark.parametrize(
    ("args", "calls"),
    [
        (("pause", "--in-flight", "keep"), ["pause"]),
        (("resume",), ["resume"]),
        (("flush",), ["flush"]),
        (("abort", "--replicas", "0"), ["abort"]),
    ],
    ids=lambda value: str(value[0]),
)
def test_an_operation_is_reported_for_every_agent(plane: ControlPlane, args: tuple[str, ...], calls: list[str]) -> None:
    (plane.pause() if args == ("resume",) else plane.resume()).wait()
    done = rolloutctl(*args, "--json", env={"ROLLOUTCTL_BUS": plane.address})
    assert done.returncode == 0, done.stderr
    outcomes = {outcome["agent"]: outcome["conclusion"] for outcome in json.loads(done.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "acted", "calls": calls}
    assert outcomes["0.1"] == {"type": "skipped", "reason": "not_primary"}


def test_a_failure_is_printed_and_exits_with_1(plane: ControlPlane, engine: Engine) -> None:
    engine.raises = RuntimeError("no profiler in this build")
    try:
        done = rolloutctl(
            "profile", "start", "--step", "3", "--window", "0", "2", env={"ROLLOUTCTL_BUS": plane.address}
        )
    finally:
        engine.raises = None
    assert done.returncode == 1
    assert "engine_error" in done.stdout and "no profiler in this build" in done.stdout
    assert rolloutctl("profile", "stop", "--step", "3", env={"ROLLOUTCTL_BUS": plane.address}).returncode == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("pause",), "--bus"),
        (("pause", "--bus", "tcp://127.0.0.1:1", "--replicas", "one"), "is not a list of numbers"),
        (("profile", "start", "--bus", "tcp://127.0.0.1:1", "--step", "1", "--window", "3", "2"), "is empty"),
        (("status", "--bus", "nonsense"), "nonsense"),
        (("explode",), "No such command"),
        (("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", "--node-rank", "2", "--engine", "tiny"), "nnodes"),
        (("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", "--engine", "abacus"), "abacus"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exits_with_2(args: tuple[str, ...], says: str) -> None:
    done = rolloutctl(*args)
    assert done.returncode == 2, done
    assert says in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_answer_exits_with_3() -> None:
    done = rolloutctl("status", "--bus", "tcp://127.0.0.1:9", "--timeout", "0.2")
    assert done.returncode == 3
    assert done.stderr.startswith("rolloutctl: no bus answered at tcp://127.0.0.1:9")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_is_no_error(plane: ControlPlane) -> None:
    command = f"{sys.executable} -m controlplane.cli status | head -c 0"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, env={"ROLLOUTCTL_BUS": plane.address})
    assert "Traceback" not in done.stderr


def test_version_is_the_packages() -> None:
    assert rolloutctl("--version").stdout.strip().endswith(f"version {version('rolloutctl')}")


def test_traces_of_other_nodes_can_be_collected_by_hand(plane: ControlPlane) -> None:
    done = rolloutctl("profile", "collect", "--step", "3", "--json", env={"ROLLOUTCTL_BUS": plane.address})
    outcomes = {outcome["agent"]: outcome["conclusion"] for outcome in json.loads(done.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "skipped", "reason": "already"}
    assert outcomes["0.1"]["calls"] == ["collect_traces"]


def test_a_configuration_can_be_checked_by_hand(plane: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "profiler.yaml").write_text("steps: [1]\nrollout: {ranks: [77]}\nroles: {actor: {ranks: [0]}}\n")
    config = ("--config", str(tmp_path / "profiler.yaml"))
    done = rolloutctl("profile", "check", *config, "--json", env={"ROLLOUTCTL_BUS": plane.address})
    outcomes = {outcome["agent"]: outcome["conclusion"] for outcome in json.loads(done.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "skipped", "reason": "rank_not_selected"}
    done = rolloutctl("profile", "start", "--step", "1", *config, "--ranks", "0", env={"ROLLOUTCTL_BUS": plane.address})
    assert done.returncode == 2 and "--config contains the whole plan" in done.stderr
    (tmp_path / "profiler.yaml").write_text("steps: [0]\nrollout: {rank: [77]}\n")
    done = rolloutctl("profile", "check", *config, env={"ROLLOUTCTL_BUS": plane.address})
    assert done.returncode == 2 and "did you mean ranks?" in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--engine", "vllm"), "needs --url"),
        (("--engine", "vllm", "--url", "ftp://h:1"), "give http://HOST:PORT"),
        (("--engine", "sglang", "--url", "http://h:1", "--", "python"), "follows `--launch --`"),
        (("--engine", "sglang", "--url", "http://h:1", "--launch"), "takes a server's command"),
        (("--engine", "tiny", "--launch", "--", "python"), "takes a server's command"),
        (("--engine", "sglang", "--url", "http://h:1", "--router", "nowhere"), "give http://HOST:PORT"),
        (("--engine", "tiny", "--router", "http://h:1"), "--router needs --url"),
        (("--engine", "vllm", "--url", "http://h:1", "--api-key-file", "/nowhere/key"), "can't be read"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_agent_rejects_wrong_engine_options_before_it_starts(args: tuple[str, ...], says: str) -> None:
    done = rolloutctl("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", *args)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_place_is_retired_only_if_nobody_is_there(plane: ControlPlane) -> None:
    env = {"ROLLOUTCTL_BUS": plane.address}
    refused = rolloutctl("retire", "0", "0.1", env=env)
    assert refused.returncode != 0 and "agent 0.0, 0.1 is running: stop it first" in refused.stderr
    unknown = rolloutctl("retire", "7", env=env)
    assert unknown.returncode != 0 and "this run has no agent 7" in unknown.stderr
