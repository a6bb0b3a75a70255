"""`rolloutctl agent --config` and `--print-config`: which value counts, and what a file may not say."""

import tomllib
from pathlib import Path

import click
import pytest

from controlplane import ControlPlane
from controlplane.cli.agent import agent
from controlplane.cli.config_file import config_text
from schemas.config import BusConfig
from schemas.errors import ConfigError
from tests.running import rolloutctl, started

EVERY = [
    *("--bus", "tcp://trainer:5555", "--keys", "a.key", "--replica", "auto", "--node-rank", "auto", "--nnodes", "2"),
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
    *("--metrics-port", "9100", "--memory", "trainer", "--wedged-after", "9", "--dump-stacks"),
    *("--log-format", "json", "--observe", "--verbose", "--quiet"),
    *("--launch", "--", "python", "-m", "a b"),
]


def printed(*words: str) -> str:
    context = agent.make_context("agent", ["--print-config", *words], auto_envvar_prefix="ROLLOUTCTL_AGENT")
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
    names = {max(option.opts, key=len).lstrip("-") for option in agent.params}
    assert set(found) == names - {"config", "print-config"}
    assert found["command"] == ["python", "-m", "a b"] and found["up-within"] == 60.5 and found["replica"] == "auto"
    assert found["finish-hook"] == 'echo "it\'s done" \\ \t\x7f ü'


def test_what_was_not_set_is_a_comment_with_its_default() -> None:
    lines = printed().splitlines()
    assert tomllib.loads("\n".join(lines)) == {}
    assert {"# nnodes = 1", '# mode = "hybrid"', '# keys = ""', "# launch = false", "# command = []"} <= set(lines)
    uncommented = [line.removeprefix("# ") for line in lines if " = " in line]
    assert len(tomllib.loads("\n".join(uncommented))) == len(agent.params) - 2
    assert any("env var: ROLLOUTCTL_AGENT_NNODES" in line for line in lines)


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(
        tmp_path, 'nnodes = 2\ngpus-per-node = 2\nseed = 2\nbus = "tcp://a:1"\ncommand = ["file"]\nlaunch = true'
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
        ("zzz = 1", "has no option 'zzz'; there are bus, keys, replica"),
        ("config = 'x'", "has no option 'config'"),
        ("replica = true", "agent.toml: replica is true: it must be a whole number or 'auto'"),
        ("nnodes = 1025", "agent.toml: nnodes is 1025: 1025 is not in the range 1<=x<=1024"),
        ("seed = 1.5", "seed is 1.5: it must be a whole number"),
        ("up-within = '9'", "up-within is '9': it must be a number"),
        ("launch = 1", "launch is 1: it must be true or false"),
        ("mode = 'fast'", "mode is 'fast': 'fast' is not one of 'hybrid', 'standalone', 'colocated'"),
        ("command = 'python -m x'", "it must be a list of strings"),
        ("bus = 1", "bus is 1: it must be a string"),
        ("bus = tcp", "agent.toml is not TOML: Invalid value"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_key(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        printed("--config", write(tmp_path, text))
    assert error in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        printed("--config", str(tmp_path / "none.toml"))


def test_without_print_config_what_is_required_is() -> None:
    with pytest.raises(click.MissingParameter, match="bus"):
        agent.make_context("agent", ["--replica", "0"])


def test_what_stands_before_the_command_goes_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'log-format = "json"\nbus = "tcp://a:1"')
    done = rolloutctl("--log-format", "text", "agent", "--config", file, "--print-config")
    assert done.returncode == 0 and 'log-format = "text"' in done.stdout and 'bus = "tcp://a:1"' in done.stdout


def test_an_agent_takes_its_options_from_a_file_and_its_place_from_slurm(tmp_path: Path) -> None:
    slurm = {"SLURM_NODEID": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "6"}
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=BusConfig(head_interval_ms=50)) as plane:
        lines = [f'bus = "{plane.address}"', 'replica = "auto"', 'node-rank = "auto"', "nnodes = 2", 'engine = "tiny"']
        file = write(tmp_path, "\n".join([*lines, f'state-dir = "{tmp_path}/state"']))
        log = tmp_path / "agent.log"
        with (
            log.open("ab") as stderr,
            started("-m", "controlplane.cli", "agent", "--config", file, env=slurm, stderr=stderr) as process,
        ):
            plane.wait_for_agents(1, timeout=60).wait()
            assert [member.agent for member in plane.status().agents] == ["2.1"]
            process.terminate()
            assert process.wait(60) == 0
    said = "INFO agent 2.1: --replica 2 from SLURM_NODEID=5 // 2; --node-rank 1 from SLURM_NODEID=5 % 2"
    assert said in log.read_text()
