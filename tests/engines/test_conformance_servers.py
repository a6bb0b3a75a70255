"""`rolloutctl conform` against real engines: it finds nothing wrong with them and their adapters."""

from pathlib import Path

import pytest

from tests.engines.models import save_model, save_weights, weights
from tests.engines.servers import EngineServer
from tests.engines.vllm_fleet import PLAIN, profiler_options
from tests.running import python

ALL = {
    *("generate", "abort", "pause (abort)", "pause (wait)", "pause (keep)", "resume", "calls made twice"),
    *("load", "bad checkpoint", "flush", "sleep", "wake", "profile", "late call", "cancelled call", "observe"),
}


def conforms(server: EngineServer, folder: Path) -> str:
    """Run the kit against a server, and return its table."""
    where = ("--url", server.url, "--checkpoints", folder, "--traces", folder / "traces", "--up-within", "60")
    words = ("conform", "--engine", server.kind, *where, "--load", "a", "--load", "b", "--yes")
    done = python("-m", "controlplane.cli", *words, env={"COLUMNS": "200"}, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.engine_vllm
@pytest.mark.timeout(400)
def test_vllm_conforms(tmp_path: Path) -> None:
    save_model(tmp_path / "a", 1)
    save_weights(tmp_path / "b", weights(2))
    with EngineServer("vllm", tmp_path / "a", tmp_path, *profiler_options(tmp_path / "raw", PLAIN)) as server:
        server.wait_up()
        table = conforms(server, tmp_path)
    assert table.count("passed") == len(ALL), table


@pytest.mark.engine_sglang
@pytest.mark.timeout(400)
def test_sglang_conforms(tmp_path: Path) -> None:
    save_model(tmp_path / "a", 1)
    save_weights(tmp_path / "b", weights(2))
    with EngineServer("sglang", tmp_path / "a", tmp_path) as server:
        server.wait_up()
        table = conforms(server, tmp_path)
    assert table.count("passed") == len(ALL), table
