"""The command line at a running bus, as processes: what is printed, and the exit codes."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from controlplane import ControlPlane
from controlplane.cli.__main__ import cli
from controlplane.cli.command_line import Group
from schemas.config import BusConfig
from tests.running import environment, rolloutctl
from tests.unit.small_bus import PRIMARY, SECOND, Engine
from tests.unit.test_plane import agents

pytestmark = pytest.mark.xdist_group("operate")

REPLAYS = Path(__file__).parents[1] / "replays"
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


def test_status_in_a_pipe_has_one_line_for_each_agent(plane: ControlPlane) -> None:
    shown = rolloutctl("status", env={"ROLLOUTCTL_BUS": plane.address, "COLUMNS": "40", "FORCE_COLOR": ""})
    lines = [line for line in shown.stdout.splitlines() if re.match(r"0\.[01] ", line)]
    assert len(lines) == 2 and all("live" in line and "fake 1" in line for line in lines)
    assert not {"─", "━", "\x1b", "…"} & set(shown.stdout)


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
        (("stats",), "No such command 'stats'; did you mean status?"),
        (("log", "shw"), "No such command 'shw'; did you mean show?"),
        (("stats", "report"), "No such command 'stats'; did you mean status?"),
        (("pause", "--replica", "0"), "--replicas"),
        (("pause", "--bus", "tcp://127.0.0.1:1", "--replicas", "3-1"), "'3-1' ends before it begins"),
        (("pause", "--bus", "tcp://127.0.0.1:1", "--replicas", "0-99999999999"), "out of bounds"),
        (("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", "--node-rank", "2", "--engine", "tiny"), "nnodes"),
        (("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", "--engine", "abacus"), "abacus"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exits_with_2(args: tuple[str, ...], says: str) -> None:
    done = rolloutctl(*args)
    assert done.returncode == 2, done
    assert says in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("help",), "Usage: rolloutctl [OPTIONS] COMMAND [ARGS]..."),
        (("help", "status"), "Usage: rolloutctl status [OPTIONS]"),
        (("help", "log", "show"), "Usage: rolloutctl log show [OPTIONS] FILE"),
        (("log", "help", "show"), "Usage: rolloutctl log show [OPTIONS] FILE"),
    ],
    ids=" ".join,
)
def test_help_is_also_a_word(words: tuple[str, ...], first: str) -> None:
    done = rolloutctl(*words)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[0]) == (0, "", first)


def test_no_answer_exits_with_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        bus = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        done = rolloutctl("status", "--bus", bus, "--timeout", "0.2")
    assert done.returncode == 3
    assert done.stderr.startswith(f"rolloutctl: no bus answered at {bus}")
    assert len(done.stderr.splitlines()) == 1


def test_a_refused_port_is_said_at_once() -> None:
    """Within a timeout that the test would not survive."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        bus = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        done = rolloutctl("pause", "--bus", bus, "--timeout", "3600")
    assert done.returncode == 3
    assert done.stderr.startswith(f"rolloutctl: nobody listens at {bus} (Connection refused)")


@pytest.mark.parametrize("words", ["status", f"log show {REPLAYS}/torn-fleet.db"], ids=["status", "log show"])
def test_a_closed_pipe_is_no_error(plane: ControlPlane, words: str) -> None:
    command = f"{sys.executable} -m controlplane.cli {words} | head -c 0"
    shell = ["bash", "-o", "pipefail", "-c", command]
    env = environment({"ROLLOUTCTL_BUS": plane.address})
    done = subprocess.run(shell, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_asks_for_nobody_is_told(plane: ControlPlane, tmp_path: Path) -> None:
    env = {"ROLLOUTCTL_BUS": plane.address}
    some = rolloutctl("flush", "--replicas", "0,3-5", env=env)
    assert some.returncode == 1 and "1 acted" in some.stdout
    assert some.stderr == "rolloutctl: this run has no replicas 3 … 5: it has replica 0\n"
    none = rolloutctl("flush", "--replicas", "7", env=env)
    assert none.returncode == 1 and "this run has no replica 7" in none.stderr
    ranks = rolloutctl("profile", "start", "--step", "5", "--ranks", "77", env=env)
    assert ranks.returncode == 1 and "--ranks 77 selected none of the agents" in ranks.stderr
    rolloutctl("profile", "stop", "--step", "5", env=env)
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "empty.db") as empty:
        for words in (("flush",), ("status",), ("status", "--json")):
            done = rolloutctl(*words, env={"ROLLOUTCTL_BUS": empty.address})
            assert done.returncode == 1 and "no agent has joined this run" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--bus", "ADDRESS", "--json", "flush", "--replicas", "0"),
        ("flush", "--json", "-v", "--bus", "ADDRESS", "--replicas=0"),
        ("-q", "--replicas", "0", "flush", "--bus", "ADDRESS", "--json"),
        ("--json", "--bus=ADDRESS", "profile", "--step", "9", "collect"),
    ],
    ids=" ".join,
)
def test_options_stand_before_or_after_the_command(plane: ControlPlane, words: tuple[str, ...]) -> None:
    done = rolloutctl(*(word.replace("ADDRESS", plane.address) for word in words))
    assert done.returncode == 0, done.stderr
    assert {outcome["agent"] for outcome in json.loads(done.stdout)["outcomes"]} == {"0.0", "0.1"}


def test_every_option_can_come_from_the_environment(plane: ControlPlane) -> None:
    env = {"ROLLOUTCTL_BUS": plane.address, "ROLLOUTCTL_FLUSH_REPLICAS": "8-9", "ROLLOUTCTL_FLUSH_JSON": "1"}
    done = rolloutctl("flush", env=env)
    assert "replicas 8, 9" in done.stderr and json.loads(done.stdout)["outcomes"]


def _commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from _commands(found, (*path, name))


def test_the_variable_of_an_option_does_not_depend_on_who_asks_first() -> None:
    @click.group("keeper", cls=Group)
    def keeper() -> None: ...

    @keeper.command("new-key")
    @click.option("--bound-to", "place")
    def new(place: str) -> None: ...

    (option,) = [option for option in new.get_params(click.Context(new)) if option.name == "place"]
    assert option.envvar == "ROLLOUTCTL_KEEPER_NEW_KEY_BOUND_TO"


@pytest.mark.parametrize("path", list(_commands(cli)), ids=" ".join)
def test_the_help_names_the_variable_of_every_option(path: tuple[str, ...]) -> None:
    context = cli.make_context("rolloutctl", [], resilient_parsing=True, auto_envvar_prefix="ROLLOUTCTL")
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(context, name)
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=name)
    shown = " ".join(command.get_help(context).split()).replace("env var:", "env var: ")
    assert "_HELP" not in shown and "ROLLOUTCTL_VERSION" not in shown
    for option in command.get_params(context):
        if isinstance(option, click.Option) and not option.is_eager:
            assert str(option.envvar).startswith("ROLLOUTCTL_") and str(option.envvar) in shown.replace(" ", "")


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
    unknown = rolloutctl("retire", "7-9", env=env)
    assert unknown.returncode != 0 and "this run has no agent 7, 8, 9" in unknown.stderr
    assert "it has 0.0, 0.1" in unknown.stderr
    near = rolloutctl("retire", "0.12", env=env)
    assert near.returncode != 0 and "did you mean 0.1?" in near.stderr
