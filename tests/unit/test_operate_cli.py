"""The command line at a running bus: what is printed, and the exit codes."""

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
from controlplane.cli.agent import RARE, SECTIONS, agent
from tests.running import environment, rolloutctl, typed
from tests.unit.small_bus import Engine
from tests.unit.test_plane import pair

pytestmark = pytest.mark.xdist_group("operate")

REPLAYS = Path(__file__).parents[1] / "replays"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[ControlPlane]:
    with pair(tmp_path_factory.mktemp("operate"), engine) as opened:
        yield opened


def test_status_shows_the_fleet(plane: ControlPlane) -> None:
    shown = typed("status", env={"ROLLOUTCTL_BUS": plane.address})
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "run.db" in shown.stdout and "v0, " in shown.stdout
    rows = [line.split() for line in shown.stdout.splitlines() if line.startswith((" 0.0", " 0.1", "0.0", "0.1"))]
    assert [row[0] for row in rows] == ["0.0", "0.1"]
    assert all("live" in row and "s" in row for row in rows), "each agent, and how long it has been silent"


def test_status_in_a_pipe_has_one_line_for_each_agent(plane: ControlPlane) -> None:
    shown = typed("status", env={"ROLLOUTCTL_BUS": plane.address, "COLUMNS": "40", "FORCE_COLOR": ""})
    lines = [line for line in shown.stdout.splitlines() if re.match(r"0\.[01] ", line)]
    assert len(lines) == 2 and all("live" in line and "fake 1" in line for line in lines)
    assert not {"─", "━", "\x1b", "…"} & set(shown.stdout)


def test_status_as_json(plane: ControlPlane) -> None:
    shown = json.loads(typed("status", "--json", env={"ROLLOUTCTL_BUS": plane.address}).stdout)
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
    done = typed(*args, "--json", env={"ROLLOUTCTL_BUS": plane.address})
    assert done.returncode == 0, done.stderr
    outcomes = {outcome["agent"]: outcome["conclusion"] for outcome in json.loads(done.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "acted", "calls": calls}
    assert outcomes["0.1"] == {"type": "skipped", "reason": "not_primary"}


def test_a_failure_is_printed_and_exits_with_1(plane: ControlPlane, engine: Engine) -> None:
    engine.raises = RuntimeError("no profiler in this build")
    try:
        done = typed("profile", "start", "--step", "3", "--window", "0", "2", env={"ROLLOUTCTL_BUS": plane.address})
    finally:
        engine.raises = None
    assert done.returncode == 1
    assert "engine_error" in done.stdout and "no profiler in this build" in done.stdout
    assert typed("profile", "stop", "--step", "3", env={"ROLLOUTCTL_BUS": plane.address}).returncode == 0


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
    done = typed(*args)
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
    done = typed(*words)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[0]) == (0, "", first)


def test_no_answer_exits_with_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        bus = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        done = typed("status", "--bus", bus, "--timeout", "0.2")
    assert done.returncode == 3
    assert done.stderr.startswith(f"rolloutctl: no bus answered at {bus}")
    assert len(done.stderr.splitlines()) == 1


def test_a_refused_port_is_said_at_once() -> None:
    """Within a timeout that the test would not survive."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        bus = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        done = typed("pause", "--bus", bus, "--timeout", "3600")
    assert done.returncode == 3
    assert done.stderr.startswith(f"rolloutctl: nothing listens at {bus} (Connection refused)")


@pytest.mark.parametrize("words", ["status", f"log show {REPLAYS}/torn-fleet.db"], ids=["status", "log show"])
def test_a_closed_pipe_is_no_error(plane: ControlPlane, words: str) -> None:
    command = f"{sys.executable} -m controlplane.cli {words} | head -c 0"
    shell = ["bash", "-o", "pipefail", "-c", command]
    env = environment({"ROLLOUTCTL_BUS": plane.address})
    done = subprocess.run(shell, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_asks_for_nobody_is_told(plane: ControlPlane, tmp_path: Path) -> None:
    env = {"ROLLOUTCTL_BUS": plane.address}
    some = typed("flush", "--replicas", "0,3-5", env=env)
    assert some.returncode == 1 and "1 acted" in some.stdout
    assert some.stderr == "rolloutctl: this run has no replicas 3 … 5: it has replica 0\n"
    none = typed("flush", "--replicas", "7", env=env)
    assert none.returncode == 1 and "this run has no replica 7" in none.stderr
    ranks = typed("profile", "start", "--step", "5", "--ranks", "77", env=env)
    assert ranks.returncode == 1 and "--ranks 77 selected none of the agents" in ranks.stderr
    typed("profile", "stop", "--step", "5", env=env)
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "empty.db") as empty:
        for words in (("flush",), ("status",), ("status", "--json")):
            done = typed(*words, env={"ROLLOUTCTL_BUS": empty.address})
            assert done.returncode == 1 and "no agent has joined this run" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("flush", "--json", "-v", "--bus", "ADDRESS", "--replicas=0"),
        ("-q", "flush", "--replicas", "0", "--bus", "ADDRESS", "--json"),
        ("profile", "-q", "collect", "--json", "--bus=ADDRESS", "--step", "9"),
    ],
    ids=" ".join,
)
def test_options_for_the_log_stand_before_or_after_the_command(plane: ControlPlane, words: tuple[str, ...]) -> None:
    done = typed(*(word.replace("ADDRESS", plane.address) for word in words))
    assert done.returncode == 0, done.stderr
    assert {outcome["agent"] for outcome in json.loads(done.stdout)["outcomes"]} == {"0.0", "0.1"}


def _commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from _commands(found, (*path, name))


@pytest.mark.parametrize("path", list(_commands(cli)), ids=" ".join)
def test_every_option_is_explained_without_its_variable(path: tuple[str, ...]) -> None:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    shown = command.get_help(click.Context(command, info_name=path[-1] if path else "rolloutctl"))
    assert "env var" not in shown
    for option in command.get_params(click.Context(command)):
        assert not isinstance(option, click.Option) or option.help, f"{path} {option.opts}"


def test_the_help_of_an_agent_fits_on_a_screen_and_help_all_has_each_option_in_a_section() -> None:
    named = [name for names in SECTIONS.values() for name in names]
    options = {str(option.name): option for option in agent.params if isinstance(option, click.Option)}
    assert sorted(named) == sorted({*options} - {"help_all", "verbose", "quiet", "log_format"})
    shown, everything = (typed("agent", word, env={"COLUMNS": "80"}).stdout for word in ("--help", "--help-all"))
    assert len(shown.splitlines()) <= 50
    assert {name for name in named if f"\n  {options[name].opts[0]} " not in shown} == {*RARE}
    assert all(f"\n  {options[name].opts[0]} " in everything for name in named)


def test_version_is_the_packages() -> None:
    assert rolloutctl("--version").stdout.strip().endswith(f"version {version('rolloutctl')}")


def test_traces_of_other_nodes_can_be_collected_by_hand(plane: ControlPlane) -> None:
    done = typed("profile", "collect", "--step", "3", "--json", env={"ROLLOUTCTL_BUS": plane.address})
    outcomes = {outcome["agent"]: outcome["conclusion"] for outcome in json.loads(done.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "skipped", "reason": "already"}
    assert outcomes["0.1"]["calls"] == ["collect_traces"]


def test_a_configuration_can_be_checked_by_hand(plane: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "profiler.yaml").write_text("steps: [1]\nplan: {ranks: [77]}\nroles: {actor: {ranks: [0]}}\n")
    config = ("--config", str(tmp_path / "profiler.yaml"))
    done = typed("profile", "check", *config, "--json", env={"ROLLOUTCTL_BUS": plane.address})
    outcomes = {outcome["agent"]: outcome["conclusion"] for outcome in json.loads(done.stdout)["outcomes"]}
    assert outcomes["0.0"] == {"type": "skipped", "reason": "rank_not_selected"}
    done = typed("profile", "start", "--step", "1", *config, "--ranks", "0", env={"ROLLOUTCTL_BUS": plane.address})
    assert done.returncode == 2 and "--config contains the whole plan" in done.stderr
    (tmp_path / "profiler.yaml").write_text("steps: [0]\nplan: {rank: [77]}\n")
    done = typed("profile", "check", *config, env={"ROLLOUTCTL_BUS": plane.address})
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
    done = typed("agent", "--bus", "tcp://127.0.0.1:1", "--replica", "0", *args)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_place_is_retired_only_if_no_agent_is_there(plane: ControlPlane) -> None:
    env = {"ROLLOUTCTL_BUS": plane.address}
    refused = typed("retire", "0", "0.1", env=env)
    assert refused.returncode != 0 and "0.0, 0.1 is running: stop it first, or drain its replica" in refused.stderr
    unknown = typed("retire", "7-9", env=env)
    assert unknown.returncode != 0 and "this run has no agent 7, 8, 9" in unknown.stderr
    assert "it has 0.0, 0.1" in unknown.stderr
    near = typed("retire", "0.12", env=env)
    assert near.returncode != 0 and "did you mean 0.1?" in near.stderr
