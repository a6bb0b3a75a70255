"""`rolloutctl agent --config`: which value counts, and what a file may not say."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from controlplane import ControlPlane
from controlplane.cli.agent import agent
from schemas.config import BusConfig
from schemas.errors import ConfigError
from tests.running import started

NEEDED = ("--bus", "tcp://a:1", "--replica", "0", "--engine", "tiny")


def values(*words: str) -> dict[str, object]:
    with agent.make_context("agent", list(words)) as context:
        return context.params


def write(folder: Path, text: str) -> str:
    (folder / "agent.toml").write_text(text)
    return str(folder / "agent.toml")


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(
        tmp_path,
        'replica = 0\nengine = "tiny"\nnnodes = 2\n'
        'gpus-per-node = 2\nseed = 2\nbus = "tcp://a:1"\ncommand = ["file"]\nlaunch = true',
    )
    monkeypatch.setenv("ROLLOUTCTL_AGENT_NNODES", "3")
    monkeypatch.setenv("ROLLOUTCTL_AGENT_GPUS_PER_NODE", "3")
    monkeypatch.setenv("ROLLOUTCTL_AGENT_CONFIG", file)
    found = values("--nnodes", "4", "--", "line")
    assert (found["nnodes"], found["gpus_per_node"], found["seed"], found["bus"]) == (4, 3, 2, "tcp://a:1")
    assert found["command"] == ("line",) and values()["command"] == ("file",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("node_rank = 1", "agent.toml: `rolloutctl agent` has no option 'node_rank'; did you mean node-rank?"),
        ("zzz = 1", "has no option 'zzz'; there are bus, key, replica"),
        ("config = 'x'", "has no option 'config'"),
        ("replica = true", "'--replica': 'true' is not a valid integer"),
        ("nnodes = 1025", "'--nnodes': 1025 is not in the range 1<=x<=1024"),
        ("seed = 1.5", "'--seed': '1.5' is not a valid integer"),
        ("up-within = 'soon'", "'--up-within': 'soon' is not a valid float"),
        ("launch = 2", "'--launch': '2' is not a valid boolean"),
        ("mode = 'fast'", "'--mode': 'fast' is not one of 'hybrid', 'standalone', 'colocated'"),
        ("command = 'python -m x'", "agent.toml: command is 'python -m x': it must be a list of strings"),
        ("bus = ['a']", "agent.toml: bus is ['a']: it must be one value"),
        ("bus = tcp", "agent.toml is not TOML: Invalid value"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_key(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises((ConfigError, click.BadParameter)) as raised:
        values(*(() if "replica" in text else NEEDED[2:4]), *NEEDED[:2], *NEEDED[4:], "--config", write(tmp_path, text))
    shown = raised.value.format_message() if isinstance(raised.value, click.BadParameter) else str(raised.value)
    assert error in shown


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_a_file_that_everybody_can_write_is_refused_since_it_names_commands(tmp_path: Path, mode: int) -> None:
    file = Path(write(tmp_path, 'finish-hook = "echo"'))
    profiler = tmp_path / "profiler.yaml"
    profiler.write_text("finish_hook_cmd: echo\n")
    for path, word in ((file, "--config"), (profiler, "--profiler")):
        path.chmod(mode)
        words = ["--bus", "tcp://127.0.0.1:1", "--replica", "0", "--engine", "tiny", word, str(path)]
        error = CliRunner().invoke(agent, words).exception
        assert isinstance(error, ConfigError) and f"{path} (mode {mode:04o})" in str(error) and "o-w" in str(error)
    file.chmod(0o664)  # as many systems make files
    assert values(*NEEDED, "--config", str(file))["finish_hook"] == "echo"


def test_only_replicas_of_one_node_can_leave_their_index_to_the_bus(tmp_path: Path) -> None:
    assert values("--bus", "tcp://a:1", "--replica", "auto", "--engine", "tiny")["replica"] == "auto"
    words = ["--bus", "tcp://a:1", "--replica", "auto", "--nnodes", "2", "--engine", "tiny", "--state-dir", tmp_path]
    error = CliRunner().invoke(agent, list(map(str, words))).exception
    assert isinstance(error, ConfigError) and "give all nodes of a larger one the same index" in str(error)
    (tmp_path / "auto-tiny").write_text("")
    words[words.index("2")] = "1"
    error = CliRunner().invoke(agent, list(map(str, words))).exception
    assert isinstance(error, ConfigError) and "name another --state-dir" in str(error)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        values("--config", str(tmp_path / "none.toml"))


def test_an_agent_takes_its_options_from_a_file(tmp_path: Path) -> None:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=BusConfig(head_interval_ms=50)) as plane:
        lines = [f'bus = "{plane.address}"', "replica = 2", "node-rank = 1", "nnodes = 2", 'engine = "tiny"']
        file = write(tmp_path, "\n".join([*lines, f'state-dir = "{tmp_path}/state"']))
        with started("-m", "controlplane.cli", "agent", "--config", file) as process:
            plane.wait_for_agents(1, timeout=60).wait()
            assert [member.agent for member in plane.status().agents] == ["2.1"]
            process.terminate()
            assert process.wait(60) == 0


def test_a_place_that_was_remembered_and_is_none_is_named_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "auto-tiny" / "replica"
    file.parent.mkdir()
    file.write_text("one")
    words = ["--bus", "tcp://127.0.0.1:1", "--replica", "auto", "--engine", "tiny", "--state-dir", str(tmp_path)]
    error = CliRunner().invoke(agent, words).exception
    assert isinstance(error, ConfigError) and f"{file} names no replica: delete it" in str(error)
