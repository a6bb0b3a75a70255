"""The demo as a newcomer runs it, but shorter, with and without a fault. `make demo` is the same with more steps."""

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from tests.running import environment, rolloutctl, typed


def in_terminal(columns: int, *words: object, env: dict[str, str]) -> tuple[int, str]:
    """Run a command in a terminal of this width. Return its exit code and all that it wrote.

    COLUMNS and LINES of this process are not passed on: they would stand for the size of that terminal.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-m", "controlplane.cli", *map(str, words)]
    inherited = {name: value for name, value in environment(env).items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=inherited)
    os.close(theirs)
    written = bytearray()
    with suppress(OSError):  # the other end is closed
        while data := os.read(ours, 65536):
            written += data
    os.close(ours)
    return process.wait(60), written.decode()


def check_output(written: str, killed: bool) -> None:
    assert "USDT" not in written
    output = " ".join(written.split())
    assert "after each of 7 syncs, both engines held the trainer's weights, byte for byte" in output
    assert "all are the same" in output
    assert ("agent 1.0 was killed" in output) is ("agent 1.0 is back" in output) is killed


def test_with_a_killed_agent_in_a_terminal_it_trains_syncs_profiles_and_replays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environ = {"TERM": "xterm-256color", "NO_COLOR": "1"}
    code, written = in_terminal(160, "demo", "--out", out, "--steps", "6", "--fault", "kill-agent", env=environ)
    assert code == 0, written
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)[0-9;]*m", written), "a colour"
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", written)
    check_output(written, killed=True)
    assert re.search(r"profile stop step \d \(seq \d+\): 3 acted, 2 skipped", written)
    places = sorted(path.relative_to(out / "traces").as_posix() for path in (out / "traces").glob("*/*"))
    folders = ("actor_rank_0", "replica_0", "replica_1")
    assert places == [f"global_step_{step}/{folder}" for step in (1, 4) for folder in folders]
    for trace in (out / "traces").glob("*/*/*.json"):
        assert any(event.get("name") == "tiny.forward" for event in json.loads(trace.read_text())["traceEvents"])
    assert typed("log", "verify", out / "run.db").returncode == 0


VERL = """
global_profiler: {tool: torch, steps: [2, 3], profile_continuous_steps: true, relocate_results: true}
actor_rollout_ref:
  actor: {profiler: {enable: true, all_ranks: true, relocate_results: true, tool_config: {torch: {contents: [cpu]}}}}
  rollout:
    profiler:
      ranks: [0, 2]
      tool_config: {torch: {contents: [cpu, shapes], discrete: true, step_start: 1, step_end: 4}}
"""


@pytest.mark.long
def test_in_a_pipe_it_prints_lines_and_verls_yaml_decides_what_is_profiled(tmp_path: Path) -> None:
    out, config = tmp_path / "out", tmp_path / "verl.yaml"
    config.write_text(VERL)
    done = rolloutctl("demo", "--out", out, "--steps", "6", "--profiler", config)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.startswith("2 engines of 2 nodes each"), "before anything that takes time"
    assert not {"─", "━", "\x1b", "…"} & set(done.stdout)
    assert len(re.findall(r"^step +\d of 6  reward 0\.\d\d  weights v\d$", done.stdout, re.MULTILINE)) == 6
    check_output(done.stdout, killed=False)
    names = sorted(re.sub(r"-[0-9a-f]{16}", "", file.name) for file in (out / "traces").iterdir() if file.is_file())
    assert names == [
        "actor-rank0_step_2_e2e.2.rank0.pt.trace.json.gz",  # of the second step of the session
        "actor-rank0_step_2_e2e.rank0.pt.trace.json.gz",
        "rollout-replica0-globalrank0_tiny-step2.pt.trace.json",
        "rollout-replica1-globalrank2_tiny-step2.pt.trace.json",
    ]
    for trace in (out / "traces").glob("rollout-*"):
        events = json.loads(trace.read_text())["traceEvents"]
        assert sum(event.get("name") == "tiny.forward" for event in events) == 3
    drawn = typed("timeline", out / "run.db", "--traces", out / "traces", "-o", tmp_path / "run.json", "--json")
    assert drawn.returncode == 0, drawn.stderr
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {"tiny.forward", "learn", "rollouts"} <= {event["name"] for event in events}
    page = typed("report", out / "run.db", "-o", tmp_path / "run.html")
    assert page.returncode == 0 and "profile stop step 2" in (tmp_path / "run.html").read_text()


def test_the_demo_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    done = typed("demo", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rolloutctl: ") and "is not empty" in done.stderr
