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
    assert "run.db" in shown.stdout and "0.1" in shown.stdout and "live" in shown.stdout


def test_status_for_machines(plane: ControlPlane) -> None:
    shown = json.loads(rolloutctl("status", "--json", env={"ROLLOUTCTL_BUS": plane.address}).stdout)
    assert [one["agent"] for one in shown["agents"]] == ["0.0", "0.1"]
    assert all(one["status"]["ready"] for one in shown["agents"])


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        (("pause", "--in-flight", "keep"), ["pause"]),
        (("resume",), ["resume"]),
        (("flush",), ["flush"]),
        (("abort", "--replicas", "0"), ["abort"]),
    ],
    ids=lambda value: str(value[0]),
)
def test_an_operation_is_reported_for_every_agent(
    plane: ControlPlane, words: tuple[str, ...], calls: list[str]
) -> None:
    said = rolloutctl(*words, "--json", env={"ROLLOUTCTL_BUS": plane.address})
    assert said.returncode == 0, said.stderr
    outcomes = {one["agent"]: one["conclusion"] for one in json.loads(said.stdout)["outcomes"]}
    assert outcomes["0.0"]["type"] == "acted"
    assert outcomes["0.0"]["calls"] == calls
    assert outcomes["0.1"] == {"type": "skipped", "reason": "not_primary"}


def test_what_fails_is_told_and_ends_with_1(plane: ControlPlane, engine: Engine) -> None:
    engine.raises = RuntimeError("no profiler in this build")
    try:
        said = rolloutctl(
            "profile", "start", "--step", "3", "--window", "0", "2", env={"ROLLOUTCTL_BUS": plane.address}
        )
    finally:
        engine.raises = None
    assert said.returncode == 1
    assert "engine_error" in said.stdout and "no profiler in this build" in said.stdout
    assert rolloutctl("profile", "stop", "--step", "3", env={"ROLLOUTCTL_BUS": plane.address}).returncode == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pause",), "--bus"),
        (("pause", "--bus", "tcp://127.0.0.1:1", "--replicas", "one"), "no list of numbers"),
        (("profile", "start", "--bus", "tcp://127.0.0.1:1", "--step", "1", "--window", "3", "2"), "is empty"),
        (("status", "--bus", "nonsense"), "nonsense"),
        (("explode",), "No such command"),
        (("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", "--node-rank", "2", "--engine", "tiny"), "nnodes"),
        (("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", "--engine", "abacus"), "abacus"),
    ],
)
def test_bad_usage_is_one_clear_line_and_ends_with_2(words: tuple[str, ...], says: str) -> None:
    said = rolloutctl(*words)
    assert said.returncode == 2, said
    assert says in said.stderr and "Traceback" not in said.stderr
    assert said.stdout == ""


def test_nobody_there_ends_with_3() -> None:
    said = rolloutctl("status", "--bus", "tcp://127.0.0.1:9", "--timeout", "0.2")
    assert said.returncode == 3
    assert said.stderr.startswith("rolloutctl: no bus answered at tcp://127.0.0.1:9")
    assert len(said.stderr.splitlines()) == 1


def test_a_reader_that_had_enough_is_no_error(plane: ControlPlane) -> None:
    command = f"{sys.executable} -m controlplane.cli status | head -c 0"
    shell = ["bash", "-o", "pipefail", "-c", command]
    said = subprocess.run(shell, capture_output=True, text=True, env={"ROLLOUTCTL_BUS": plane.address})
    assert "Traceback" not in said.stderr


def test_version_is_the_packages() -> None:
    assert rolloutctl("--version").stdout.strip().endswith(f"version {version('rolloutctl')}")


def test_traces_of_the_other_nodes_are_asked_for_by_hand(plane: ControlPlane) -> None:
    said = rolloutctl("profile", "collect", "--step", "3", "--json", env={"ROLLOUTCTL_BUS": plane.address})
    outcomes = {one["agent"]: one["conclusion"] for one in json.loads(said.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "skipped", "reason": "already"}
    assert outcomes["0.1"]["calls"] == ["collect_traces"]


def test_a_configuration_is_checked_by_hand_and_says_who_is_meant(plane: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "profiler.yaml").write_text("steps: [1]\nrollout: {ranks: [77]}\nroles: {actor: {ranks: [0]}}\n")
    config = ("--config", str(tmp_path / "profiler.yaml"))
    said = rolloutctl("profile", "check", *config, "--json", env={"ROLLOUTCTL_BUS": plane.address})
    outcomes = {one["agent"]: one["conclusion"] for one in json.loads(said.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "skipped", "reason": "rank_not_selected"}
    said = rolloutctl("profile", "start", "--step", "1", *config, "--ranks", "0", env={"ROLLOUTCTL_BUS": plane.address})
    assert said.returncode == 2 and "--config says all of the plan" in said.stderr
    (tmp_path / "profiler.yaml").write_text("steps: [0]\nrollout: {rank: [77]}\n")
    said = rolloutctl("profile", "check", *config, env={"ROLLOUTCTL_BUS": plane.address})
    assert said.returncode == 2 and "did you mean ranks?" in said.stderr


@pytest.mark.parametrize(
    ("words", "says"),
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
def test_an_agent_says_what_is_wrong_with_its_engine_before_it_begins(words: tuple[str, ...], says: str) -> None:
    said = rolloutctl("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", *words)
    assert said.returncode == 2 and says in said.stderr, said.stderr
    assert "Traceback" not in said.stderr
