"""Options of `rolloutctl agent`: which value counts, and what is refused."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from controlplane.cli.agent import agent
from schemas.errors import ConfigError

NEEDED = ("--bus", "tcp://a:1", "--replica", "0", "--engine", "tiny")


def values(*words: str) -> dict[str, object]:
    with agent.make_context("agent", list(words)) as context:
        return context.params


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTCTL_AGENT_NNODES", "3")
    monkeypatch.setenv("ROLLOUTCTL_AGENT_GPUS_PER_NODE", "3")
    monkeypatch.setenv("ROLLOUTCTL_AGENT_LAUNCH", "true")
    found = values(*NEEDED, "--nnodes", "4", "--", "line")
    assert (found["nnodes"], found["gpus_per_node"], found["launch"]) == (4, 3, True)
    assert found["command"] == ("line",)


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_a_file_that_everybody_can_write_is_refused_since_it_names_commands(tmp_path: Path, mode: int) -> None:
    profiler = tmp_path / "profiler.yaml"
    profiler.write_text("finish_hook_cmd: echo\n")
    profiler.chmod(mode)
    error = CliRunner().invoke(agent, [*NEEDED, "--profiler", str(profiler)]).exception
    assert isinstance(error, ConfigError) and f"{profiler} (mode {mode:04o})" in str(error) and "o-w" in str(error)


def test_only_replicas_of_one_node_can_leave_their_index_to_the_bus(tmp_path: Path) -> None:
    assert values("--bus", "tcp://a:1", "--replica", "auto", "--engine", "tiny")["replica"] == "auto"
    words = ["--bus", "tcp://a:1", "--replica", "auto", "--nnodes", "2", "--engine", "tiny", "--state-dir", tmp_path]
    error = CliRunner().invoke(agent, list(map(str, words))).exception
    assert isinstance(error, ConfigError) and "give all nodes of a larger one the same index" in str(error)
    (tmp_path / "auto-tiny").write_text("")
    words[words.index("2")] = "1"
    error = CliRunner().invoke(agent, list(map(str, words))).exception
    assert isinstance(error, ConfigError) and "name another --state-dir" in str(error)


def test_a_place_that_was_remembered_and_is_none_is_named_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "auto-tiny" / "replica"
    file.parent.mkdir()
    file.write_text("one")
    words = ["--bus", "tcp://127.0.0.1:1", "--replica", "auto", "--engine", "tiny", "--state-dir", str(tmp_path)]
    error = CliRunner().invoke(agent, words).exception
    assert isinstance(error, ConfigError) and f"{file} names no replica: delete it" in str(error)
