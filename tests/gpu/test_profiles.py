"""Profiles of what runs on a GPU: kernels, memory, snapshots, and all of a run on one clock."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch

from controlplane import ControlPlane
from controlplane.timeline.perfetto import write_timeline
from schemas.commands import ProfilePlan, Schedule, TorchMemory, Window
from schemas.config import AgentConfig, BusConfig
from schemas.desired import ProfileSession
from schemas.events import Resume, StartProfile, StopProfile
from schemas.outcomes import Acted
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report
from tests.gpu.engine_process import PLACE, started
from tests.timeline.trace_events import problems
from tests.timeline.trace_events import read as read_exactly
from tests.unit.rank_sessions import Commanded, read, stages
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.profile import FORWARD
from workers.profilers import TrainingRank, annotate, mini_batch

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.one_loop]

DEVICE = "cuda"
BOTH = ProfilePlan(activities=frozenset({"cpu", "cuda"}))
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=200)
MEGABYTE = 1 << 20
ERROR_US = 1000
"""Of the clocks, on one machine."""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Commanded]:
    with Commanded(tmp_path) as commanded:
        yield commanded


def kernels(trace: dict[str, Any]) -> Counter[str]:
    """Return how many kernels a trace has, by a word of their names."""
    words = ("exp", "sin", "gemm")
    names = [event["name"].lower() for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return Counter(next((word for word in words if word in name), name) for name in names)


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_a_trace_has_the_kernels_of_its_stage_and_no_others(rank: Commanded) -> None:
    """The last ones are still queued when the stage ends."""
    tensor = torch.ones(1 << 24, device=DEVICE)
    rank.start(BOTH)
    tensor.sin()
    with annotate("update"):
        for _ in range(200):
            tensor.exp()
    tensor.sin()
    (trace,) = rank.traces(rank.stop()).values()
    assert kernels(trace) == {"exp": 200}
    launched = {event["args"]["External id"] for event in trace["traceEvents"] if event.get("cat") == "kernel"}
    operators = {event["args"]["External id"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}
    assert launched <= operators  # each is one of an operator of the trace


def test_a_trace_without_the_activity_has_no_kernels(rank: Commanded) -> None:
    rank.start(ProfilePlan())
    with annotate("update"):
        torch.ones(64, device=DEVICE).exp()
    (trace,) = rank.traces(rank.stop()).values()
    assert not kernels(trace) and stages(trace) == ["update"]


def test_a_schedule_records_the_kernels_of_its_mini_batches(rank: Commanded) -> None:
    schedule = Schedule(active=2, wait=1, warmup=1, repeat=1)
    rank.start(ProfilePlan(discrete=True, schedule=schedule, activities=frozenset({"cpu", "cuda"})))
    tensor = torch.ones(64, device=DEVICE)
    with annotate("update", scheduled=True):
        for batch in range(6):
            for _ in range(batch + 1):
                tensor.exp()
            torch.cuda.synchronize()
            mini_batch()
    (trace,) = rank.traces(rank.stop()).values()
    assert kernels(trace) == {"exp": 3 + 4}


def test_stages_of_many_sessions_are_each_recorded_whole(rank: Commanded, measured: Callable[[str], None]) -> None:
    tensor, took = torch.ones(64, device=DEVICE), []
    for step in range(1, 21):
        rank.start(BOTH, step=step)
        start = perf_counter()
        with annotate("update"):
            for _ in range(step):
                tensor.exp()
        took.append(1000 * (perf_counter() - start))
        (trace,) = rank.traces(rank.stop()).values()
        assert kernels(trace) == {"exp": step}
    measured(f"a recorded stage of some kernels: {median(took):.1f} ms at the median of 20, at most {max(took):.0f} ms")


def test_memory_of_the_gpu_is_in_the_trace(rank: Commanded) -> None:
    rank.start(ProfilePlan(activities=frozenset({"cpu", "cuda", "memory"}), with_stack=True, record_shapes=True))
    with annotate("update"):
        taken = torch.ones(10 * MEGABYTE, dtype=torch.uint8, device=DEVICE)
        del taken
    (trace,) = rank.traces(rank.stop()).values()
    noted = [event["args"] for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    gpu = [args["Bytes"] for args in noted if args["Device Type"] == 1]
    assert gpu == [10 * MEGABYTE, -10 * MEGABYTE]


async def test_a_window_of_the_engine_has_the_kernels_of_its_forwards(tmp_path: Path) -> None:
    """Forwards 2 and 3 of 8, counted from 0, and nothing of the others."""
    engine = TinyEngine(PLACE, checkpoints=tmp_path, traces=tmp_path, device=DEVICE)
    await engine.open()
    try:
        await engine.perform(Resume(), 10)
        seen = []
        for step, (begin, end) in enumerate([(2, 3), (3, 4), (2, 4)], start=1):
            plan = ProfilePlan(window=Window(begin, end), activities=BOTH.activities)
            session = ProfileSession(step, plan)
            await engine.perform(StartProfile(session, f"step{step}"), 10)
            assert len([token async for token in engine.generate([1, 2, step], 8)]) == 8
            returned = await engine.perform(StopProfile(session, f"step{step}"), 60)
            (trace,) = [read(tmp_path / trace.path) for trace in returned.traces]
            assert stages(trace) == [FORWARD] * (end - begin)
            seen.append(sum(kernels(trace).values()))
        assert returned.auto_stopped
    finally:
        await engine.close()
    second, third, both = seen
    assert second > 0 and both == second + third


# --- snapshots of the allocator ---------------------------------------------------------------------------------------


def taken_in(snapshot: dict[str, Any]) -> list[int]:
    """Return the sizes of what was allocated while the history was recorded."""
    return [entry["size"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]


def test_a_snapshot_has_what_was_allocated_between_start_and_stop(rank: Commanded) -> None:
    kept = [torch.empty(3 * MEGABYTE, dtype=torch.uint8, device=DEVICE)]
    rank.start(ProfilePlan(tool="torch_memory", options=TorchMemory(stacks="python")))
    with annotate("update"):
        kept.append(torch.empty(5 * MEGABYTE, dtype=torch.uint8, device=DEVICE))
    (trace,) = rank.stop().traces
    kept.append(torch.empty(7 * MEGABYTE, dtype=torch.uint8, device=DEVICE))
    snapshot = pickle.loads((rank.root / trace.path).read_bytes())
    assert taken_in(snapshot) == [5 * MEGABYTE]
    (entry,) = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    assert any(frame["filename"] == __file__ for frame in entry["frames"])
    assert len(kept) == 3 and not any(torch.cuda.memory._snapshot()["device_traces"])


def test_one_snapshot_covers_steps(rank: Commanded) -> None:
    plan, kept = ProfilePlan(tool="torch_memory", options=TorchMemory(snapshot_steps=2)), []
    for step in (3, 4):
        rank.start(plan, step=step)
        with annotate("update"):
            kept.append(torch.empty(step * MEGABYTE, dtype=torch.uint8, device=DEVICE))
        returned = rank.stop()
        assert len(returned.traces) == (step == 4)
    snapshot = pickle.loads((rank.root / returned.traces[0].path).read_bytes())
    assert taken_in(snapshot) == [3 * MEGABYTE, 4 * MEGABYTE]


# --- an engine and a training rank, over the bus ----------------------------------------------------------------------


def traces_of(folder: Path, report: Report) -> dict[str, dict[str, Any]]:
    """Return the traces that a report announces, by agent."""
    return {
        outcome.agent: read(folder / "traces" / trace.path)
        for outcome in report.outcomes
        if isinstance(outcome.conclusion, Acted)
        for trace in outcome.conclusion.traces
    }


def one_ended(trace: dict[str, Any]) -> int:
    """Return how many arrows of a trace have one end."""
    ends: Counter[object] = Counter()
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]] += 1
    return sum(count == 1 for count in ends.values())


def test_kernels_of_engine_and_trainer_are_in_the_traces_that_are_announced_and_on_one_clock(
    tmp_path: Path, measured: Callable[[str], None]
) -> None:
    plan = ProfilePlan(activities=frozenset({"cpu", "cuda", "memory"}), with_stack=True, discrete=True)
    config = ProfilerConfig(plan=plan, roles={"actor": plan}, steps=(1,), save_path=str(tmp_path / "traces"))
    weight = torch.ones(512, 512, device=DEVICE, requires_grad=True)
    log = tmp_path / "run.db"
    with (
        ControlPlane("tcp://127.0.0.1:0", log=log, config=QUICK, checkpoints=tmp_path, profiler=config) as plane,
        started(plane.address, tmp_path, DEVICE) as engine,
        TrainingRank(
            bus=plane.address,
            role="actor",
            rank=0,
            world_size=1,
            state_dir=tmp_path / "rank",
            profiler=config,
            config=AgentConfig(hello_retry_ms=20),
        ) as rank,
    ):
        plane.wait_for_agents(2, timeout=60).wait()
        for step in range(3):
            with plane.step(step):
                engine.generate()
                with rank.annotate("update_actor"):
                    (weight @ weight).exp().mean().backward()  # type: ignore[no-untyped-call]
        (stop,) = [report for report in plane.profile_reports if report.command.action == "stop"]  # type: ignore[union-attr]
    stop.raise_for_failures()
    found = traces_of(tmp_path, stop)
    assert set(found) == {"0.0", "actor.0"}
    counted = {agent: sum(kernels(trace).values()) for agent, trace in found.items()}
    assert min(counted.values()) > 0 and kernels(found["actor.0"])["exp"] == 1

    written = write_timeline(log, tmp_path / "timeline.json", [tmp_path / "traces"])
    events = read_exactly(Path(written.path))["traceEvents"]
    assert not written.warnings, written.warnings
    wrong = problems(events)
    assert all("has one end only" in text for text in wrong), wrong
    assert len(wrong) == sum(map(one_ended, found.values()))  # torch draws no other end for some calls, as for a wait
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    drawn = Counter(processes[event["pid"]] for event in events if event.get("cat") == "kernel")
    assert sorted(drawn.values()) == sorted(counted.values()), drawn
    streams = {
        event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("GPU ")
    }
    assert any(stream.startswith("GPU 0 stream ") for stream in streams), streams
    sessions = [event for event in events if event["ph"] == "X" and event["name"] == "profile step 1"]
    assert len(sessions) == 3  # the bus's and its two agents'
    begin, end = max(event["ts"] for event in sessions), min(event["ts"] + event["dur"] for event in sessions)
    for event in events:
        if event.get("cat") == "kernel":
            assert begin - ERROR_US < event["ts"] < end + ERROR_US
    measured(f"kernels in the traces of a step: {counted}; drawn as {', '.join(sorted(streams))}")
