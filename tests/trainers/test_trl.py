"""The real TRL, unmodified, on two real vLLM servers that their agents launched, on the CPU."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from controlplane.analysis.invariants import verify
from controlplane.cli.replay_log import replay_log
from controlplane.record.log import RunLog
from controlplane.replay.recorded_run import RecordedRun
from controlplane.report.collect import collect
from schemas.commands import Drain
from schemas.events import CheckAdapter, LoadAdapter, Perform, UnloadAdapter
from schemas.outcomes import Acted
from tests.engines.servers import free_port
from tests.environments import VLLM_VERSION, python
from tests.running import ROOT, environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.trainer_trl, pytest.mark.timeout(900)]

DEMO: Final = ROOT / "docs" / "examples" / "grpo_vllm.py"
ASYNC: Final = Path(__file__).parent / "async_grpo.py"
REFUSALS: Final = Path(__file__).parent / "trl_refusals.py"
SCALED: Final = Path(__file__).parent / "scaled_grpo.py"

SAME: Final = 1e-4
"""Logprobs of vLLM and of the trainer, both in float32, for the same weights: 1e-6 to 4e-6 in all steps of ten runs."""
OTHER: Final = 1e-2
"""And for other weights: 0.26 in the mean for noise of half a standard deviation."""

LORA: Final = DEMO.with_name("grpo_lora.py")

STEP: Final = re.compile(r"step (\d+): reward ([\d.]+), replicas \(([\d, ]+)\), logprobs off by (\de[-+]\d+)")


@contextmanager
def program(
    file: Path, out: Path, *arguments: object, under: tuple[object, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A program in TRL's environment, in a process group of its own; `under` is a command that starts it."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [*under, python("trl"), "-W", "ignore::FutureWarning", file, out, python("vllm"), *arguments]
    with subprocess.Popen(
        [str(word) for word in words],
        cwd=out.parent,
        env=environment(quiet),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def processes_of(out: Path) -> list[psutil.Process]:
    """What runs for that folder: trainer, agents, guards, servers and their engines."""
    return [
        process for process in psutil.process_iter(["cmdline"]) if str(out) in " ".join(process.info["cmdline"] or ())
    ]


def engines_below(out: Path) -> list[psutil.Process]:
    return [process for process in processes_of(out) if "vllm.entrypoints.openai.api_server" in process.info["cmdline"]]


def check_log(log: Path) -> None:
    assert list(verify(RunLog.read(log))) == []
    assert replay_log(RunLog.read(log)).compared > 100


def result_of(file: Path, out: Path, *arguments: object) -> tuple[dict[str, Any], str]:
    """Run a program to its good end, of all that it started too. Returns its result, and its output."""
    out.mkdir()
    with program(file, out, *arguments) as process:
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output[-6000:]
    assert processes_of(out) == []
    check_log(out / "run.db")
    return json.loads((out / "result.json").read_text()), output


def learned(demo: Path, out: Path) -> tuple[str, int]:
    """Run a demo in which one of two servers is killed, and check that it learned. Returns its output and its steps."""
    with program(demo, out) as process:
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output[-6000:]
    steps = [(int(step), float(reward), replicas, float(gap)) for step, reward, replicas, gap in STEP.findall(output)]
    assert [step for step, *_ in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 44
    assert max(gap for *_, gap in steps) < SAME, "a token was sampled from another version, or from the base"
    rewards = [reward for _, reward, *_ in steps]
    assert rewards[0] < 0.05 and max(rewards[-5:]) > 0.5  # 0.97 and more in each run
    sampled_by = [replicas for _, _, replicas, _ in steps]
    assert sampled_by[:5] == ["0, 1"] * 5 and "0," in sampled_by[5:] and sampled_by[-1] == "0, 1"
    assert "launched (2)" in (out / "agent-1.log").read_text()
    return output, len(steps)


def check_stale(log: Path, said: str) -> None:
    """Samples waited while weights were synced, and the gate let none of those pass: the report has both."""
    found = collect(RunLog.walk(log)).samples
    steps = 6
    assert found[0].accepted >= 16 * steps and found[0].refused == 0, "each step trained on the newest weights"
    stale = [summary for behind, summary in found.items() if behind]
    assert sum(summary.refused for summary in stale) > 0 and not any(summary.accepted for summary in stale)
    refused = sum(summary.refused for summary in found.values())
    assert said.startswith(f"samples: {found[0].accepted} accepted, {refused} refused")


def test_what_cannot_work_is_refused_by_one_line(tmp_path: Path) -> None:
    with program(REFUSALS, tmp_path) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    found = json.loads(output.splitlines()[-1])
    assert found["processes"].startswith("ConfigError: TRL trains in 2 processes: FleetSync reads the weights of one.")
    assert found["use_vllm"].startswith("ConfigError: use_vllm=True: TRL would sync a server of its own.")
    assert found["adapters"].startswith("ConfigError: the active adapters of the model are ['a', 'b']: engines serve")
    assert found["sharded"].startswith("ConfigError: TRL trains in 2 processes: there the adapter can't be synced")
    files = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert found["saved"] == {"default": ["q_proj", *files], "other": ["v_proj", *files]}
    assert found["agents"].startswith("AgentsMissing: no agent of a replica has joined the bus at tcp://127.0.0.1:")
    assert found["every"].startswith("ConfigError: every is 0")
    assert re.match(r"EngineError: vLLM's logprobs differ .* more than 0\.0001: replica 1 by [4-9]", found["logprobs"])
    assert found["seen"] == []
    assert found["unseen"] == ["trl 2.0.0 was not seen before: rolloutctl was run with 1.16.0"]


def test_grpo_learns_from_two_servers_of_which_one_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    _, steps = learned(DEMO, out)
    traced = {trace.relative_to(out / "traces").parts[:2] for trace in (out / "traces").rglob("*.pt.trace.json.gz")}
    assert traced == {("global_step_3", place) for place in ("replica_0", "replica_1", "actor_rank_0")}
    assert (out / "run.perfetto.json.gz").exists()
    assert sorted(out.glob("new/*")) == sorted([out / "new" / f"step_{steps - back}" for back in (0, 1)])
    assert processes_of(out) == []
    check_log(out / "run.db")


def test_a_game_day_of_the_demo_is_lived_through_and_judged(tmp_path: Path) -> None:
    out, plan = tmp_path / "run", DEMO.with_name("gameday.toml")
    log = out / "run.db"
    under = (sys.executable, "-m", "controlplane.cli", "chaos", "run", plan, "--log", log, "--")
    with program(DEMO, out, plan, under=under) as process:
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output[-6000:]
    *_, first, second, third, repair, end = output.splitlines()
    assert "server dies while it loads (kill_engine) on 1.0: out of service for" in first
    assert "answer of a load is lost (lose_answer) on 0.0: " in second
    assert "agent stands still (stop_agent) on 1.0: out of service for" in third
    assert repair.startswith("time to repair: median ") and end == "3 faults: all promises held"
    assert max(float(gap) for *_, gap in STEP.findall(output)) < SAME
    check_log(log)


def test_a_fleet_is_scaled_from_two_to_three_to_one_to_two_and_no_step_fails(tmp_path: Path) -> None:
    result, _ = result_of(SCALED, out := tmp_path / "run")
    steps, asked = result["steps"], [tuple(step["asked"]) for step in result["steps"]]
    assert [size for size, _ in itertools.groupby(asked)] == [(0, 1), (0, 1, 2), (0,), (0, 1)]
    assert all(set(step["asked"]) <= set(step["served"]) for step in steps), "one was asked that did not serve"
    assert max(step["gap"] for step in steps) < SAME
    assert [step["sync"][:2] for step in steps] == [[version, "committed"] for version in range(1, len(steps) + 1)]
    assert not any(step["sync"][3] or step["unproven"] for step in steps), "a sync failed for one that joins or leaves"
    assert result["ended"] == [0, 0, 0] and result["serving"] == [0, 1]
    drains = [report for report in RecordedRun(out / "run.db").reports.values() if isinstance(report.command, Drain)]
    left = [outcome.conclusion for report in drains for outcome in report.outcomes if outcome.agent in report.acted]
    idle = Acted(calls=("await_idle", "pause"))
    assert len(left) >= 2 and all(one == idle for one in left), "a request was cut short"


def test_what_syncs_in_its_midst_cut_off_is_sampled_again_and_no_step_fails(tmp_path: Path) -> None:
    """What is asked while they pause by `abort` waits for their end; vLLM refuses it with 503 from 0.33 on."""
    result, output = result_of(SCALED, tmp_path / "run", "synced")
    steps = result["steps"]
    assert [step["whole"] for step in steps] == [64] * 8 and max(step["gap"] for step in steps) < SAME
    assert [step["sync"][:2] for step in steps] == [[version, "committed"] for version in range(1, 33, 4)]
    assert ("it answers 503: " in output) == (VLLM_VERSION != "0.32.0")


def test_ctrl_c_ends_the_demo_with_all_that_it_started(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with program(DEMO, out) as process:
        wait_until(lambda: len(engines_below(out)) >= 2, timeout_s=120)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: trainer and agents get it
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0 and "KeyboardInterrupt" in output
        wait_until(lambda: processes_of(out) == [])


def test_async_grpo_moves_its_weights_over_the_bus(tmp_path: Path) -> None:
    result, _ = result_of(ASYNC, out := tmp_path / "run", free_port(), free_port(), "vllm")
    assert result["versions"] == [1, 2, 3, 4, 5, 6]  # one before the first step, then one after each
    assert result["committed"] == [7, [0, 1]] and result["labels"] == ["7", "7"]
    assert result["same"] < SAME and result["other"] > OTHER
    check_stale(out / "run.db", result["samples"])


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_an_adapter_learns_on_two_servers_of_which_one_is_killed_and_nothing_is_paused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    output, steps = learned(LORA, out)
    last = steps + 1  # the first came before the first step
    assert f"policy v{last} (policy-v{last}) on replica" in output
    left = {path.name.split("-")[1] for path in out.glob("new/*")}
    assert {f"step_{last - 1}", f"step_{last - 2}"} <= left and len(left) <= 4, "engines read no older ones again"
    record = RecordedRun(out / "run.db")
    assert {(sync.adapter, sync.status) for sync in record.syncs} == {("policy", "committed")}
    calls = [effect.call for _, effects in record.decisions("0.0") for effect in effects if isinstance(effect, Perform)]
    assert {type(call) for call in calls} == {CheckAdapter, LoadAdapter, UnloadAdapter}, "a sync paused its engine"
    assert processes_of(out) == []
    check_log(out / "run.db")


def test_async_grpo_moves_an_adapter_over_the_bus_and_leaves_its_base_as_it_is(tmp_path: Path) -> None:
    result, _ = result_of(ASYNC, out := tmp_path / "run", free_port(), free_port(), "lora")
    assert result["versions"] == [1, 2, 3, 4, 5, 6] and result["committed"] == [7, [0, 1]]
    assert all({"policy-v6", "policy-v7"} <= set(adapters) for adapters in result["adapters"])
    assert result["base"], "the trainer's base is no longer the one that the servers have"
    assert result["same"] < SAME and result["other"] > OTHER
    check_stale(out / "run.db", result["samples"])
