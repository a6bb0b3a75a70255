"""The demo, as a newcomer runs it: short, with and without a fault. `make demo` is the same with more steps."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


def demo(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "controlplane.cli", "demo", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("fault", [(), ("--fault", "kill-agent")], ids=["plain", "killed"])
def test_it_trains_syncs_profiles_and_replays(tmp_path: Path, fault: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    done = demo("--out", out, "--steps", "6", *fault)
    assert done.returncode == 0, done.stderr + done.stdout
    said = " ".join(done.stdout.split())
    assert "after each of 7 syncs, both engines held the trainer's weights, byte for byte" in said
    assert "every one came out the same" in said
    assert ("agent 1.0 was killed" in said) is bool(fault)
    assert ("agent 1.0 is back" in said) is bool(fault)
    assert re.search(r"profile stop step \d 0\.0 1\.0 0\.1 1\.1 not_primary", said)
    places = sorted(path.relative_to(out / "traces").as_posix() for path in (out / "traces").glob("*/*"))
    assert places == [f"global_step_{step}/replica_{replica}" for step in (1, 4) for replica in (0, 1)]
    for trace in (out / "traces").glob("*/*/*.json"):
        assert any(one.get("name") == "tiny.forward" for one in json.loads(trace.read_text())["traceEvents"])
    verified = subprocess.run([sys.executable, "-m", "controlplane.cli", "log", "verify", str(out / "run.db")])
    assert verified.returncode == 0


def test_it_writes_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    done = demo("--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("rolloutctl: ") and "is not empty" in done.stderr
