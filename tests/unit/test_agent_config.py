"""`rolloutctl agent --config` and `--print-config`: which value counts, and what a file may not say."""

import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from controlplane import ControlPlane
from controlplane.cli.agent import agent
from controlplane.cli.config_file import config_text
from schemas.config import BusConfig
from schemas.errors import ConfigError
from tests.running import started

EVERY = [
    *("--bus", "tcp://trainer:5555", "--key", "a.key", "--replica", "2", "--node-rank", "1", "--nnodes", "2"),
    *("--gpus-per-node", "8", "--mode", "standalone", "--engine", "sglang", "--url", "http://127.0.0.1:30000"),
    *("--api-key-file", "engine.key", "--dist-init", "h:1", "--launch-log", "server.log", "--up-within", "60.5"),
    *("--router", "http://r", "--worker-url", "http://w", "--serve", "ipc:///e", "--seed", "7", "--checkpoints", "/c"),
    *(
        "--traces",
        "/t",
        "--finish-hook",
        'echo "it\'s done" \\ \t\x7f ü',
        "--state-dir",
        "/s",
        "--on-lost-bus",
        "pause",
    ),
    *("--metrics-port", "9100", "--memory", "trainer", "--wedged-after", "9", "--dump-stacks", "--digests", "always"),
    *("--drain", "60", "--rejoin", "--faults", __file__),
    "--observe",
    *("--launch", "--", "python", "-m", "a b"),
]


NEEDED = ("--bus", "tcp://a:1", "--replica", "0", "--engine", "tiny")


def printed(*words: str) -> str:
    context = agent.make_context("agent", ["--print-config", *words])
    with context:
        return config_text(context)


def values(*words: str) -> dict[str, object]:
    return tomllib.loads(printed(*words))


def write(folder: Path, text: str) -> str:
    (folder / "agent.toml").write_text(text)
    return str(folder / "agent.toml")


def test_what_is_printed_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    profiler = tmp_path / "profiler.yaml"
    profiler.write_text("steps: [1]\n")
    text = printed("--profiler", str(profiler), *EVERY)
    assert printed("--config", write(tmp_path, text)) == text
    found = tomllib.loads(text)
    names = {max(option.opts, key=len).lstrip("-") for option in agent.params if option.expose_value}
    assert set(found) == names - {"print-config"}
    assert found["command"] == ["python", "-m", "a b"] and found["up-within"] == 60.5 and found["replica"] == 2
    assert found["finish-hook"] == 'echo "it\'s done" \\ \t\x7f ü'


def test_what_was_not_set_is_a_comment_with_its_default() -> None:
    lines = printed(*NEEDED).splitlines()
    assert tomllib.loads("\n".join(lines)) == {"bus": "tcp://a:1", "replica": 0, "engine": "tiny"}
    assert {"# nnodes = 1", '# mode = "hybrid"', '# key = ""', "# launch = false", "# command = []"} <= set(lines)


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
    assert (found["nnodes"], found["gpus-per-node"], found["seed"], found["bus"]) == (4, 3, 2, "tcp://a:1")
    assert found["command"] == ["line"] and values()["command"] == ["file"]


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
        printed(
            *(() if "replica" in text else NEEDED[2:4]), *NEEDED[:2], *NEEDED[4:], "--config", write(tmp_path, text)
        )
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
    assert tomllib.loads(printed(*NEEDED, "--config", str(file)))["finish-hook"] == "echo"


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
        printed("--config", str(tmp_path / "none.toml"))


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
