"""The adapters within a trainer's own process, on the real engines: each operation is seen by what it brings about.

`embedded.py` runs once for each engine, in the engine's environment; here its report is judged. The greedy tokens of
two seeds differ from the first one on, so that they tell which weights an engine generates with.
"""

import gzip
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines import environments
from tests.engines.embedded import LONG, SHORT

pytestmark = pytest.mark.timeout(900)  # the environment of an engine may have to be built

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
KINDS = [
    pytest.param("vllm", marks=pytest.mark.engine_vllm),
    pytest.param("sglang", marks=pytest.mark.engine_sglang),
]
SETTINGS = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1"},
}


class Seen(NamedTuple):
    """What the program reported, and where it worked."""

    kind: str
    folder: Path
    report: dict[str, Any]


@pytest.fixture(scope="module", params=KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The program, run to its end."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    paths = [ROOT, environments.STANDINS] if kind == "sglang" else [ROOT]
    settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1", **SETTINGS[kind]}
    command = [str(environments.python(kind)), "-m", "tests.engines.embedded", kind, str(folder)]
    log = folder / "engine.log"
    with open(log, "wb") as written:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **settings},
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            _end(process.pid)
            process.wait()
    assert code == 0, f"embedded.py ended with {code}:\n{log.read_text(errors='replace')[-4000:]}"
    yield Seen(kind, folder, json.loads((folder / "report.json").read_text()))


def _end(group: int) -> None:
    """Every process of the group: the program leaves those of its engine to us."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def test_tokens_change_with_the_weights_and_come_back_with_them(seen: Seen) -> None:
    launched, new, back = seen.report["weights"]
    assert len(launched["tokens"]) == SHORT
    assert new["tokens"][0] != launched["tokens"][0]
    assert back["tokens"] == launched["tokens"]
    assert [one["version"] for one in (launched, new, back)] == [0, 1, 2]  # as the engine itself tells it
    assert all(one["generating"] for one in (launched, new, back))


def test_nothing_but_a_load_changes_the_tokens(seen: Seen) -> None:
    assert seen.report["after"] == seen.report["weights"][-1]["tokens"]
    assert seen.report["same_tokens"]


def test_a_flush_leaves_no_prefix_behind(seen: Seen) -> None:
    before, after = seen.report["cached"]
    assert before >= 128  # the prompt, or its whole blocks
    assert after == 0


def test_a_paused_engine_generates_nothing_until_it_is_resumed(seen: Seen) -> None:
    first, later = seen.report["running"]
    assert later > first  # in as many turns as the paused one was given
    frozen, late, frozen_later, late_later = seen.report["paused"]
    assert frozen_later == frozen < LONG
    assert late == late_later == 0
    assert seen.report["paused_generating"] is False
    assert seen.report["resumed"] == [LONG, LONG]


def test_an_abort_ends_every_request(seen: Seen) -> None:
    assert [finish for finish, _ in seen.report["aborted"]] == ["abort", "abort"]
    assert all(count < LONG for _, count in seen.report["aborted"])


def test_a_sleeping_engine_generates_when_it_is_awake(seen: Seen) -> None:
    assert seen.report["asleep"] == []
    assert seen.report["awake"] == seen.report["weights"][-1]["tokens"]


def test_each_session_leaves_traces_of_its_own_that_parse(seen: Seen) -> None:
    sessions = seen.report["traces"]
    assert len(sessions) == 2
    for step, files in zip((3, 4), sessions, strict=True):
        assert all(one.startswith(f"global_step_{step}/replica_0/") for one in files)
        traces = [one for one in files if one.endswith(".trace.json.gz")]
        assert traces
        for one in traces:
            with gzip.open(seen.folder / "traces" / one) as stream:
                assert json.load(stream)["traceEvents"], one


def test_every_operation_is_had_and_was_called(seen: Seen) -> None:
    assert seen.report["operations"] == ["abort", "flush", "load", "pause", "profile", "resume", "sleep", "wake"]
    asked = {"flush", "pause", "resume", "abort", "sleep", "wake", "start_profile", "stop_profile"}
    assert asked == set(seen.report["calls"])
    assert seen.report["engine"].startswith(seen.kind)


def test_an_agent_on_another_loop_is_told_so(seen: Seen) -> None:
    assert "another event loop" in seen.report["elsewhere"]
    assert "the loop that generates" in seen.report["elsewhere"]


def test_an_engine_that_died_is_seen_to_be_gone(seen: Seen) -> None:
    if seen.kind == "sglang":
        assert "dead" not in seen.report  # SGLang ends the whole process with its scheduler
        return
    tokenizer, methods, said = seen.report["dead"]
    assert (tokenizer, methods) == ("unknown", None)
    assert said.startswith("Unanswered: ") and "EngineDeadError" in said
