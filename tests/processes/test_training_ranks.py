"""Training ranks and a rollout engine on one bus, as processes: profiled at the same step, each in its own way."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

import pytest

from controlplane import ControlPlane
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.report.verdict import verdict
from schemas.commands import Finish, ProfileCommand, ProfilePlan, Schedule
from schemas.config import AgentConfig
from schemas.fault_plan import read_plan
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report
from tests.processes.test_agent_process import ALERT, CALM
from tests.running import environment, python
from tests.unit.rank_sessions import operators, read, stages
from tests.waiting import wait_until
from workers.engines.tiny.server import TinyClient
from workers.profilers import TrainingRank

pytestmark = pytest.mark.xdist_group("training ranks")

NAMES = ("stops", "loses", "dies")
FAULTS = """
fault = [
  {name = "stops", what = "stop_agent", role = "actor", replicas = [2], seconds = 8.0},
  {name = "loses", what = "lose_answer", role = "actor", call = "start_profile"},
  {name = "dies", what = "kill_agent", role = "actor", call = "stop_profile"},
]
"""
"""The first stops for longer than a rank may be silent, which is longer than a busy machine holds one up."""
PROGRAM = Path(__file__).with_name("training_rank.py")


class Rank:
    """One rank as a process, driven step by step."""

    def __init__(self, bus: str, folder: Path, number: int, world: int = 2, faults: Path | str = "") -> None:
        words = [sys.executable, str(PROGRAM), bus, str(number), str(world), str(folder)]
        self._log = (folder / f"actor.{number}.log").open("ab")
        pipe = subprocess.PIPE
        plan = {"ROLLOUTCTL_AGENT_FAULTS": str(faults)}
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=self._log, text=True, bufsize=1, env=environment(plan)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.__exit__(None, None, None)  # closes its pipes, and waits
        self._log.close()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def train(self, step: int) -> None:
        self.tell(f"step {step}")
        assert self.heard() == f"done {step}"


class Fleet:
    """Two training ranks and one rollout engine on one bus."""

    def __init__(self, folder: Path, profiler: ProfilerConfig, stack: ExitStack) -> None:
        self.folder = folder
        log = folder / "run.db"
        self.plane: ControlPlane = stack.enter_context(
            ControlPlane("tcp://127.0.0.1:0", log=log, config=ALERT, checkpoints=folder, profiler=profiler)
        )
        bus = self.plane.address
        front = f"ipc://{folder}/engine"
        place = ["--engine", "tiny", "--replica", "0", "--serve", front]
        folders = ["--checkpoints", folder, "--traces", folder / "traces", "--state-dir", folder / "state"]
        words = [sys.executable, "-m", "controlplane.cli", "agent", "--bus", bus, *place, *map(str, folders)]
        self.engine = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        stack.callback(self.engine.wait)
        stack.callback(self.engine.kill)
        self.ranks = [stack.enter_context(Rank(bus, folder, number)) for number in range(2)]
        self.client = TinyClient(front)
        for rank in self.ranks:
            assert rank.heard() == "up"
        self.plane.wait_for_agents(3, timeout=60).wait()
        check = ProfileCommand(action="check", step=0)  # it may hold an agent up for longer than this bus waits
        wait_until(lambda: not ((checked := self.plane.publish(check).wait()).missing or checked.failed))

    def step(self, number: int) -> None:
        """What a training step does: roll out, then train."""
        self.client.generate([[3]], 4, temperature=0)
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.train(number)

    def traces(self, report: Report) -> dict[str, dict[str, Any]]:
        """By path below the root."""
        acted = [outcome.conclusion for outcome in report.outcomes if isinstance(outcome.conclusion, Acted)]
        paths = [trace.path for conclusion in acted for trace in conclusion.traces]
        return {path: read(self.folder / "traces" / path) for path in paths}


def profile(action: Literal["start", "stop"], actor: ProfilePlan) -> ProfileCommand:
    """At step 3, engines with the plan of defaults."""
    return ProfileCommand(action=action, step=3, roles={"actor": actor})


def by_agent(report: Report) -> dict[str, object]:
    return {outcome.agent: outcome.conclusion for outcome in report.outcomes}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One for all tests: three processes that import torch take seconds to start."""
    folder = tmp_path_factory.mktemp("fleet")
    roles = {"actor": ProfilePlan(schedule=Schedule(active=1, skip_first=1, repeat=1))}
    config = ProfilerConfig(roles=roles, steps=(5, 7), save_path=str(folder / "traces"))
    with ExitStack() as stack:
        yield Fleet(folder, config, stack)


def test_one_command_profiles_engines_and_the_ranks_it_names(fleet: Fleet) -> None:
    actor = ProfilePlan(discrete=True, ranks=frozenset({1}), record_shapes=True)
    fleet.step(2)
    started = fleet.plane.publish(profile("start", actor)).wait()
    assert by_agent(started) == {
        "0.0": Acted(calls=("start_profile",)),
        "actor.0": Skipped(Reason.RANK_NOT_SELECTED),
        "actor.1": Acted(calls=("start_profile",)),
    }
    fleet.step(3)
    stopped = fleet.plane.publish(profile("stop", actor)).wait()
    fleet.step(4)
    assert (sorted(stopped.acted), stopped.skipped) == (["0.0", "actor.1"], ("actor.0",))
    outcome = by_agent(stopped)["actor.1"]
    assert isinstance(outcome, Acted) and [trace.rank for trace in outcome.traces] == [1, 1]
    traces = fleet.traces(stopped)
    folder = "global_step_3/actor_rank_1"
    names = [f"{folder}/{stage}.rank1.pt.trace.json.gz" for stage in ("compute_log_prob", "update_actor")]
    assert [path for path in traces if "actor" in path] == names
    assert [path.split("/")[1] for path in traces if path not in names] == ["replica_0"]
    batches = [f"step 3 mini-batch {index}" for index in range(3)]
    # torch's optimizers mark themselves too
    seen = [[stage for stage in stages(traces[name]) if "#" not in stage] for name in names]
    assert seen == [["compute_log_prob"], ["update_actor", *batches]]
    assert all(operators(traces[name]) for name in names)
    assert {name: traces[name]["distributedInfo"]["rank"] for name in names} == dict.fromkeys(names, 1)


def test_a_step_of_the_plane_profiles_ranks_by_configuration(fleet: Fleet) -> None:
    for number in (4, 5, 6):
        with fleet.plane.step(number):
            fleet.step(number)
    stopped = fleet.plane.profile_reports[-1]
    traces = {path: trace for path, trace in fleet.traces(stopped).items() if "actor" in path}
    assert sorted(traces) == [
        f"global_step_5/actor_rank_{number}/e2e.rank{number}.mb1-1.pt.trace.json.gz" for number in range(2)
    ]
    for trace in traces.values():
        assert [stage for stage in stages(trace) if "#" not in stage] == ["step 5 mini-batch 1"]


def test_a_rank_that_stops_loses_an_answer_and_dies_by_plan_is_missing_and_the_step_goes_on(fleet: Fleet) -> None:
    plan = fleet.folder / "faults.toml"
    plan.write_text(FAULTS)
    with Rank(fleet.plane.address, fleet.folder, 2, world=3, faults=plan) as third:
        assert third.heard() == "up"
        wait_until(lambda: "game day: actor.2 inject faults on purpose, 1 so far" in str(fleet.plane.status()))
        fleet.plane.wait_for_agents(4, timeout=60).wait()
        with fleet.plane.step(7):
            fleet.step(7)
        assert third.process.wait(60) == -signal.SIGKILL
    *_, started, stopped = fleet.plane.profile_reports
    assert started.failed == stopped.missing == ("actor.2",)
    assert sorted(stopped.acted) == ["0.0", "actor.0", "actor.1"]
    assert len([path for path in fleet.traces(stopped) if "actor" in path]) == 2
    with fleet.plane.step(8), Rank(fleet.plane.address, fleet.folder, 2, world=3, faults=plan) as third:
        fleet.step(8)
        fleet.plane.wait_for_agents(4, timeout=60).wait()
        wait_until(lambda: "game day: actor.2 inject faults on purpose, 3 so far" in str(fleet.plane.status()))
        third.process.communicate(timeout=60)  # its log is whole when it has said goodbye
    report = collect(RunLog.walk(fleet.folder / "run.db"))
    assert [(fault.name, fault.agent) for fault in report.faults] == [(name, "actor.2") for name in NAMES]
    assert all(fault.repaired_ns is not None for fault in report.faults), verdict(read_plan(plan), report)
    assert [fault.out_ns > 0 for fault in report.faults] == [True, False, True]


def test_a_stop_that_times_out_in_a_long_stage_still_leads_to_a_relocated_trace(fleet: Fleet) -> None:
    actor = ProfilePlan(ranks=frozenset({0}), finish=Finish(relocate=True))
    fleet.plane.publish(profile("start", actor)).wait()
    rank = fleet.ranks[0]
    rank.tell("hang 3")
    assert rank.heard() == "inside 3"
    late = by_agent(fleet.plane.publish(profile("stop", actor), timeout=5).wait())["actor.0"]
    assert isinstance(late, Failed) and late.error is ErrorKind.ENGINE_TIMEOUT
    finish = ProfileCommand(action="finish", step=3, roles={"actor": actor}, profiled_steps=(3,))
    assert by_agent(fleet.plane.publish(finish).wait())["actor.0"] == Acted(calls=(), still_running=True)
    rank.tell("go on")
    assert rank.heard() == "done 3"
    moved = [fleet.folder / "traces" / f"actor-rank0_step_3_{name}.rank0.pt.trace.json.gz" for name in ("e2e", "e2e.2")]
    wait_until(lambda: all(trace.exists() for trace in moved))
    seen = [stage for trace in moved for stage in stages(read(trace))]
    assert [stage for stage in seen if "actor" in stage or "log" in stage] == ["compute_log_prob", "update_actor"]


def test_a_rank_says_goodbye_and_trains_on_without_a_bus(tmp_path: Path) -> None:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CALM) as plane:
        address = plane.address
        with here(address, tmp_path):
            plane.wait_for_agents(1, timeout=60).wait()
        wait_until(lambda: [agent.state for agent in plane.status().agents] == ["left"])
        assert plane.flush().wait().missing == ("actor.0",)
    with here(address, tmp_path) as rank, rank.annotate("update_actor"):  # nothing listens there any more
        rank.mini_batch()
    assert rank.failure is None


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "raise SystemExit(0)",
        "rank._portal.call(anyio.to_thread.run_sync, int)",  # as when traces were relocated: its worker lives on
    ],
)
def test_a_trainer_that_forgets_to_close_the_rank_still_ends(tmp_path: Path, ending: str) -> None:
    code = (
        "import sys, anyio; from workers.profilers import TrainingRank\n"
        "rank = TrainingRank(bus=sys.argv[1], role='actor', rank=0, world_size=1, traces=sys.argv[2],"
        " state_dir=sys.argv[2])\n"
        f"rank.open()\n{ending}\n"
    )
    done = python("-c", code, f"ipc://{tmp_path}/nobody", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stage_that_outlives_a_window_does_not_crash_the_process(tmp_path: Path) -> None:
    """torch would write the end of a span into freed memory if the next window is recorded by then."""
    code = """
import sys, pathlib
from schemas.commands import ProfilePlan, Schedule
from tests.unit.rank_sessions import Commanded, work
from workers.profilers import annotate, mini_batch
rank = Commanded(pathlib.Path(sys.argv[1]))
for step in range(40):
    rank.start(ProfilePlan(schedule=Schedule(active=1)), step=step)
    with annotate("update", scheduled=True):
        for _ in range(6):
            with annotate("forward"):
                work()
                mini_batch()
        work()
    assert len(rank.stop().traces) == 6
print("trained")
"""
    done = python("-c", code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n")


def test_a_second_agent_of_the_same_rank_ends_and_the_training_goes_on(tmp_path: Path) -> None:
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=ALERT))
        stack.enter_context(here(plane.address, tmp_path))
        plane.wait_for_agents(1, timeout=60).wait()
        second = stack.enter_context(here(plane.address, tmp_path / "other"))
        wait_until(lambda: second.failure is not None)
        with second.annotate("update_actor"):
            pass
        assert "actor.0 is running as" in str(second.failure)
        assert plane.flush().wait().skipped == ("actor.0",)


def here(bus: str, folder: Path) -> TrainingRank:
    """A rank in this process."""
    quick = AgentConfig(hello_retry_ms=20)
    return TrainingRank(bus=bus, role="actor", rank=0, world_size=2, traces=folder, state_dir=folder, config=quick)
