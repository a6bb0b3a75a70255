"""`rolloutctl conform` against real engines."""

import re
from pathlib import Path

import pytest

from tests.engines.lora_fleet import OPTIONS, VARIABLES
from tests.engines.models import save_model, save_weights, weights
from tests.engines.servers import EngineServer
from tests.engines.vllm_fleet import PLAIN, profiler_options
from tests.running import python

ALL = {
    *("generate", "abort", "pause (abort)", "pause (wait)", "pause (keep)", "resume", "calls made twice"),
    *("load", "bad checkpoint", "delta", "flush", "sleep", "wake", "profile", "late call", "cancelled call", "observe"),
    *("adapter", "second adapter", "adapter unload", "bad adapter"),
}


def judged(kind: str, url: str, folder: Path) -> tuple[int, dict[str, str]]:
    """Run the kit against a server. Returns its exit code, and the row of each operation."""
    where = ("--url", url, "--checkpoints", folder, "--traces", folder / "traces", "--up-within", "60")
    words = ("conform", "--engine", kind, *where, "--load", "a", "--load", "b", "--yes")
    done = python("-m", "controlplane.cli", *words, env={"COLUMNS": "200"}, timeout_s=800)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    rows = {found[1]: line for line in lines if (found := re.match("(.+?) (passed|failed|not offered) ", line))}
    assert set(rows) == ALL, done.stdout + done.stderr
    return done.returncode, rows


@pytest.mark.engine_vllm
@pytest.mark.timeout(1000)
def test_vllm_conforms_but_for_what_it_makes_while_it_wakes(tmp_path: Path) -> None:
    """Waking the last region un-pauses its scheduler. No route prevents that: the backend can only pause it again."""
    save_model(tmp_path / "a", 1)
    save_weights(tmp_path / "b", weights(2))
    options = (*profiler_options(tmp_path / "raw", PLAIN), *OPTIONS["vllm"])
    with EngineServer("vllm", tmp_path / "a", tmp_path, *options, variables=VARIABLES["vllm"]) as server:
        server.wait_up()
        code, rows = judged(server.kind, server.url, tmp_path)
    wake = rows.pop("wake")
    assert [row for row in rows.values() if " passed " not in row] == []
    assert (code == 0 and " passed " in wake) or (code == 1 and "failed it generates before the resume" in wake)


@pytest.mark.engine_sglang
@pytest.mark.timeout(1000)
def test_sglang_conforms(tmp_path: Path) -> None:
    save_model(tmp_path / "a", 1)
    save_weights(tmp_path / "b", weights(2))
    with EngineServer("sglang", tmp_path / "a", tmp_path, *OPTIONS["sglang"]) as server:
        server.wait_up()
        code, rows = judged(server.kind, server.url, tmp_path)
    assert [row for row in rows.values() if " passed " not in row] == [] and code == 0
