"""The backends within a trainer's own process, on the real engines: each operation is checked by its effect.

`embedded.py` runs once for each engine, in the engine's environment; here its report is checked. The greedy tokens of
two seeds differ from the first one on, so they show which weights an engine generates with.
"""

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import environments
from tests.engines.embedded import LONG, SHORT, STEPS, free_port
from tests.engines.models import save_model
from tests.engines.profiles import read_events
from tests.engines.servers import Process

pytestmark = pytest.mark.timeout(900)  # the environment of an engine may have to be built

ROOT = Path(__file__).parents[2]
STEP = {"vllm": re.compile(r"execute_context_(?!0\(0\)_generation_0\()"), "sglang": re.compile(r"step\[")}
"""How the events of one forward step begin; vLLM also has steps in which there is nothing to do."""
LIMIT_S = 240
KINDS = [pytest.param("vllm", marks=pytest.mark.engine_vllm), pytest.param("sglang", marks=pytest.mark.engine_sglang)]
SETTINGS = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "sglang": {"SGLANG_USE_CPU_ENGINE": "1"}}
NODES = {
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # so that an Engine on node rank 1 comes back from its making
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Seen(NamedTuple):
    """What the program reported, and the folder that it worked in."""

    kind: str
    folder: Path
    report: dict[str, Any]


def program(kind: str, module: str, folder: Path, name: str, *arguments: str, **variables: str) -> Process:
    """A program in the environment of an engine. Its output goes to NAME.log."""
    paths = [ROOT, environments.STANDINS] if kind == "sglang" else [ROOT]
    settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1", **SETTINGS[kind], **variables}
    command = [str(environments.python(kind)), "-m", f"tests.engines.{module}", *arguments]
    return Process(command, folder / f"{name}.log", settings, cwd=folder)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_come_and_go_beside_running_requests(kind: str, tmp_path: Path) -> None:
    save_model(tmp_path / "checkpoints" / "launched", 1)
    with program(kind, "embedded_adapters", tmp_path, "engine", kind, str(tmp_path)) as process:
        report = reported(process, tmp_path)
    base, a, b, again = report["tokens"]
    assert a == again and len({tuple(tokens) for tokens in (base, a, b)}) == 3
    assert report["held"] == {"policy-v1": "a1", "policy-v2": "a2", "policy-v3": "a3"}
    assert "requests run on it" in report["refused"] and report["request"][:SHORT] == a
    assert report["left"] == {"policy-v2": "a2", "policy-v3": "a3"}


def reported(program: Process, folder: Path) -> dict[str, Any]:
    """The report of a program, once it has ended well."""
    code = program.process.wait(LIMIT_S)
    assert code == 0, f"{program.log.stem} ended with {code}:\n{program.output[-4000:]}"
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.fixture(scope="module", params=KINDS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The program of one node, run to its end."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    with program(kind, "embedded", folder, "engine", kind, str(folder)) as process:
        return Seen(kind, folder, reported(process, folder))


def spans(seen: Seen, session: dict[str, Any]) -> list[str]:
    """Names of everything with a duration in the traces of one session."""
    files = [seen.folder / "traces" / name for name in session["files"] if name.endswith(".trace.json.gz")]
    return [str(event["name"]) for file in files for event in read_events(file) if event.get("ph") == "X"]


def test_tokens_change_with_the_weights_and_change_back_with_them(seen: Seen) -> None:
    launched, *later = seen.report["weights"]
    assert len(launched["tokens"]) == SHORT
    assert len(later) == 2 * (2 if seen.kind == "sglang" else 1)  # from files, by a broadcast
    for new, back in zip(later[::2], later[1::2], strict=True):
        assert new["tokens"][0] != launched["tokens"][0]
        assert new["tokens"] == later[0]["tokens"]
        assert back["tokens"] == launched["tokens"]
    every = seen.report["weights"]
    assert [entry["version"] for entry in every] == list(range(len(every)))  # as the engine itself tells it
    assert all(entry["generating"] for entry in every)


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
    """A vLLM refuses what comes before that, from 0.33 on."""
    refuses = seen.kind == "vllm" and environments.VLLM_VERSION != "0.32.0"
    assert seen.report["asleep"] == [] and seen.report["refused"] == ("RetryableRequestError" if refuses else "")
    assert seen.report["awake"] == seen.report["weights"][-1]["tokens"]


def test_each_session_leaves_traces_of_its_own_that_parse(seen: Seen) -> None:
    sessions = seen.report["sessions"]
    assert len(sessions) == 2
    for step, session in zip((3, 4), sessions, strict=True):
        assert all(entry.startswith(f"global_step_{step}/replica_0/") for entry in session["files"])
        assert spans(seen, session)


def test_a_window_holds_its_forward_steps(seen: Seen) -> None:
    whole, window = seen.report["sessions"]
    step = STEP[seen.kind]
    counted = [sum(bool(step.match(name)) for name in spans(seen, session)) for session in (whole, window)]
    assert counted == [SHORT, STEPS]
    assert [whole["ended"], window["ended"]] == [False, True]  # the second had ended by itself


def test_the_engine_has_every_operation_and_each_was_called(seen: Seen) -> None:
    assert seen.report["operations"] == ["abort", "flush", "load", "pause", "profile", "resume", "sleep", "wake"]
    expected = {"flush", "pause", "resume", "abort", "sleep", "wake", "start_profile", "stop_profile"}
    assert expected == set(seen.report["calls"])
    assert seen.report["engine"].startswith(seen.kind)


def test_an_agent_on_another_loop_gets_a_clear_error(seen: Seen) -> None:
    assert "another event loop" in seen.report["elsewhere"]
    assert "the loop that generates" in seen.report["elsewhere"]


def test_a_dead_engine_is_reported_as_gone(seen: Seen) -> None:
    if seen.kind == "sglang":
        assert "dead" not in seen.report  # SGLang ends the whole process with its scheduler
        return
    tokenizer, methods, message = seen.report["dead"]
    assert (tokenizer, methods) == ("unknown", None)
    assert message.startswith("UnansweredError: ") and "EngineDeadError" in message


# --- one replica over two nodes ---------------------------------------------------------------------------------------


@pytest.mark.engine_sglang
def test_of_two_nodes_the_one_with_the_tokenizer_acts_and_each_collects_its_own_traces(tmp_path: Path) -> None:
    save_model(tmp_path / "checkpoints" / "launched", seed=1)
    for place in ("traces", "state"):
        (tmp_path / place).mkdir()
    bus, meet = f"tcp://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        first, _ = (
            stack.enter_context(
                program("sglang", "embedded_nodes", tmp_path, f"node{rank}", str(tmp_path), rank, bus, meet, **NODES)
            )
            for rank in ("0", "1")
        )
        report = reported(first, tmp_path)

    launched, new, back = report["tokens"]
    assert new[0] != launched[0] and back == launched  # both halves of every tensor were loaded, on both nodes
    outcomes = report["outcomes"]
    for name, call in (("pause", "pause"), ("resume", "resume"), ("flush", "flush"), ("start", "start_profile")):
        assert outcomes[name] == {"0.0": ["acted", [call], []], "0.1": ["skipped", "not_primary"]}
    trace = "global_step_3/replica_0/global_step_3.replica_0-TP-{}.trace.json.gz"
    assert outcomes["stop"] == {
        "0.0": ["acted", ["stop_profile"], [trace.format(0)]],
        "0.1": ["skipped", "not_primary"],
    }
    assert outcomes["collect"]["0.1"][2] == [trace.format(1)]
