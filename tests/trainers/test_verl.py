"""verl 0.9.1, unmodified, on the bus: `python -m verl.trainer.main_ppo` with two lines of configuration.

Each run takes about two minutes, most of it imports. Engines are stand-ins with the methods of verl's servers; trainer,
data plane and Ray are verl's own.
"""

import gzip
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from safetensors.torch import load_file

from controlplane.replay.recorded_run import RecordedRun
from schemas.commands import EpochStart, ProfileCommand, Pushed, WeightSync
from schemas.events import SnapshotReceived
from schemas.outcomes import Acted
from schemas.reports import SyncReport
from tests.engines.servers import Process, wait_for
from tests.running import rolloutctl
from tests.trainers.verl_cpu.server import digest
from tests.trainers.verl_runs import PROFILED, RUN_S, STEPS, diary, main_ppo, prepare

pytestmark = [pytest.mark.trainer_verl, pytest.mark.timeout(1500)]

ON_THE_BUS = "trainer.v1.trainer_mode=rolloutctl_sync"
CONSECUTIVE = (*PROFILED, "global_profiler.steps=[1,2]")


class Run(NamedTuple):
    """A run of verl that has ended."""

    folder: Path
    output: str
    code: int

    @property
    def log(self) -> Path:
        return self.folder / "checkpoints" / "rolloutctl" / "run.db"

    @property
    def record(self) -> RecordedRun:
        return RecordedRun(self.log)


def run(folder: Path, name: str, *options: str) -> Run:
    with main_ppo(folder, name, *options) as verl:
        return ended(folder, verl)


def ended(folder: Path, verl: Process) -> Run:
    code = verl.process.wait(RUN_S)
    return Run(folder, verl.output, code)


def label_of(record: RecordedRun, sync: SyncReport) -> str:
    """The label that verl gave to the weights of a sync."""
    command = sync.phases[0].command
    assert isinstance(command, WeightSync) and isinstance(command.source, Pushed)
    return command.source.label


def of_step(folder: Path, step: int) -> str:
    """The digest of the weights that verl saved after a step."""
    return digest(
        load_file(folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface" / "model.safetensors")
    )


def verified_and_replayed(log: Path) -> None:
    for action in ("verify", "replay"):
        done = rolloutctl("log", action, str(log))
        assert done.returncode == 0, done.stdout + done.stderr


# --- a run to its end -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps of GRPO on two replicas; the rollouts of steps 1 and 2 are profiled."""
    folder = tmp_path_factory.mktemp("trained")
    prepare(folder)
    done = run(folder, "run", ON_THE_BUS, *CONSECUTIVE)
    assert done.code == 0, done.output[-4000:]
    return done


def test_every_update_of_the_weights_is_a_committed_version_with_its_step_as_label(trained: Run) -> None:
    syncs = trained.record.syncs
    assert [(sync.version, sync.status, sync.loaded) for sync in syncs] == [
        (number, "committed", (0, 1)) for number in range(1, STEPS + 2)
    ]
    assert [label_of(trained.record, sync) for sync in syncs] == [str(step) for step in range(STEPS + 1)]
    assert not any(sync.quarantined or sync.unproven for sync in syncs)
    assert len(re.findall(r"\bstep:\d+ - ", trained.output)) == STEPS


def test_each_engine_generates_with_the_bytes_of_its_step(trained: Run) -> None:
    """The trainer's own checkpoints say which bytes those are."""
    saved = {step: of_step(trained.folder, step) for step in range(1, STEPS + 1)}
    assert len(set(saved.values())) == STEPS
    for replica in (0, 1):
        loaded = diary(trained.folder, replica, "loaded")
        assert {line["step"]: line["digest"] for line in loaded if line["step"]} == saved
        assert all(line["paused"] for line in loaded), "weights were pushed into an engine that could generate"
        saved[0] = loaded[0]["digest"]
        generated = diary(trained.folder, replica, "generated")
        assert {line["label"] for line in generated} == set(range(STEPS))
        assert all(line["digest"] == saved[line["label"]] for line in generated)
        del saved[0]


def test_consecutive_steps_are_both_recorded_and_no_other(trained: Run) -> None:
    """verl alone stops at the end of the first, and starts nothing in the second."""
    stops = [
        report
        for report in trained.record.reports.values()
        if isinstance(report.command, ProfileCommand) and report.command.action == "stop"
    ]
    assert [report.command.step for report in stops if isinstance(report.command, ProfileCommand)] == [1, 2]
    for step, report in zip((1, 2), stops, strict=True):
        for outcome in report.outcomes:
            assert isinstance(outcome.conclusion, Acted), report
            (trace,) = outcome.conclusion.traces
            assert trace.path.startswith(f"global_step_{step}/replica_{outcome.agent[0]}/") and trace.sha256
            with gzip.open(trained.folder / "traces" / trace.path) as file:
                names = {event.get("name") for event in json.load(file)["traceEvents"]}
            assert "aten::multinomial" in names, "the trace has nothing of a generation"
    assert [line["label"] for line in diary(trained.folder, 0, "recorded")] == [0, 1]


def test_the_log_verifies_and_replays(trained: Run) -> None:
    verified_and_replayed(trained.log)


def test_the_colocated_asynchronous_trainer_is_on_the_bus_as_well(tmp_path: Path) -> None:
    """verl aborts and resumes generation by itself in this mode, around the updates that the bus commits."""
    prepare(tmp_path)
    done = run(tmp_path, "run", "trainer.v1.trainer_mode=rolloutctl_colocate_async", "trainer.total_training_steps=2")
    assert done.code == 0, done.output[-4000:]
    syncs = done.record.syncs
    assert [(label_of(done.record, sync), sync.status, sync.loaded) for sync in syncs] == [
        (str(step), "committed", (0, 1)) for step in range(3)
    ]
    assert all(line["paused"] for replica in (0, 1) for line in diary(tmp_path, replica, "loaded"))
    verified_and_replayed(done.log)


def test_an_adapter_that_verl_serves_as_one_is_replaced_under_the_pause_of_both_replicas(tmp_path: Path) -> None:
    """verl pushes the base once, and then the adapter of each step, under one name."""
    prepare(tmp_path)
    lora = ("actor_rollout_ref.model.lora_rank=4", "trainer.total_training_steps=2", "trainer.save_freq=-1")
    done = run(tmp_path, "run", ON_THE_BUS, *lora)
    assert done.code == 0, done.output[-4000:]
    assert [(label_of(done.record, sync), sync.status, sync.loaded) for sync in done.record.syncs] == [
        (str(step), "committed", (0, 1)) for step in range(3)
    ]
    first, second = (diary(tmp_path, replica, "adapted") for replica in (0, 1))
    adapters = {line["step"]: line["digest"] for line in first}
    assert len(set(adapters.values())) == 3 and adapters == {line["step"]: line["digest"] for line in second}
    assert all(line["paused"] for line in (*first, *second))
    for replica in (0, 1):
        assert [line["step"] for line in diary(tmp_path, replica, "loaded")] == [0]
        generated = {(line["label"], line["digest"]) for line in diary(tmp_path, replica, "generated")}
        assert generated == {(step, adapters[step]) for step in range(2)}
    verified_and_replayed(done.log)


# --- without the line -------------------------------------------------------------------------------------------------


def test_without_the_line_verl_is_as_without_us(tmp_path: Path) -> None:
    """The plugin is installed, and nobody asked for it. Of two consecutive steps, verl records the first."""
    prepare(tmp_path)
    done = run(tmp_path, "run", *CONSECUTIVE, "actor_rollout_ref.rollout.profiler.tool_config.torch.discrete=True")
    assert done.code == 0, done.output[-4000:]
    assert not (tmp_path / "checkpoints" / "rolloutctl").exists()
    assert [line["label"] for line in diary(tmp_path, 0, "recorded")] == [0]
    assert not any(line["paused"] for line in diary(tmp_path, 0, "loaded"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("trainer.v1.trainer_mode=rolloutctl_sink",), r"Unknown trainer 'rolloutctl_sink'.*rolloutctl_sync"),
        (
            (ON_THE_BUS, "+rolloutctl.adress=tcp://127.0.0.1:0"),
            r"rolloutctl\.adress is unknown; did you mean address\?",
        ),
    ],
)
def test_a_wrong_line_ends_the_run_at_its_start(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    prepare(tmp_path)
    done = run(tmp_path, "run", *options)
    assert done.code != 0 and re.search(says, done.output), done.output[-2000:]
    assert not diary(tmp_path, 0, "loaded")


# --- what breaks ------------------------------------------------------------------------------------------------------


def versions(folder: Path, label: str) -> list[int]:
    """The committed versions with that label, so far."""
    if not diary(folder, 0, "loaded"):
        return []  # the log may be in the making
    record = RecordedRun(Run(folder, "", 0).log)
    return [sync.version for sync in record.syncs if sync.status == "committed" and label_of(record, sync) == label]


def lives(folder: Path, agent: str) -> int:
    """How often that agent has joined."""
    decided = RecordedRun(Run(folder, "", 0).log).decisions(agent)
    return sum(isinstance(event, SnapshotReceived) for event, _ in decided)


def process_of(verl: Process, title: str = "", file: str = "") -> psutil.Process:
    """The process of a run with that title, or with that file open."""

    def found() -> psutil.Process | None:
        for process in verl.family():
            with suppress(psutil.Error):
                if file and any(open_.path.startswith(file) for open_ in process.open_files()):
                    return process
                if title and title in " ".join(process.cmdline()):
                    return process
        return None

    return wait_for(f"a process {title or file}", found)


class Troubled(NamedTuple):
    """A run whose agent was killed, whose label was lost and whose trainer was killed; and the run that resumed it."""

    killed: Run
    resumed: Run


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Troubled:
    folder = tmp_path_factory.mktemp("troubled")
    prepare(folder)
    for place in ("hold-1", "lose-1-2", "hold-3"):
        (folder / place).touch()
    options = (ON_THE_BUS, "trainer.total_training_steps=5", "+rolloutctl.timeout=20")
    with main_ppo(folder, "killed", *options) as verl:
        wait_for("step 1's weights are committed", lambda: versions(folder, "1"), RUN_S)
        journals = folder / "checkpoints" / "rolloutctl" / "agents"
        process_of(verl, file=str(journals / "agent-0.0")).kill()
        wait_for("another process of the agent has joined", lambda: lives(folder, "0.0") > 1, 120)
        (folder / "hold-1").unlink()
        wait_for("step 3's weights are committed", lambda: versions(folder, "3"), RUN_S)
        process_of(verl, title="ray::TaskRunnerV1").kill()
        killed = ended(folder, verl)
    (folder / "hold-3").unlink()
    (folder / "die-1-5").touch()
    return Troubled(killed, run(folder, "resumed", *options))


def test_an_agent_that_is_killed_is_back_before_the_next_update(troubled: Troubled) -> None:
    record = troubled.killed.record
    sync = next(sync for sync in record.syncs if label_of(record, sync) == "2")
    assert sync.loaded == (0,), "replica 0 is the one whose agent was killed; replica 1 lost its label"


def test_a_replica_that_can_not_prove_its_weights_gets_no_requests_until_it_can(troubled: Troubled) -> None:
    folder, record = troubled.killed.folder, troubled.killed.record
    by_label = {label_of(record, sync): sync for sync in record.syncs}
    assert by_label["2"].quarantined == (1,) and by_label["3"].loaded == (0, 1)
    assert {line["label"] for line in diary(folder, 0, "generated")} >= {0, 1, 2, 3}
    after = [line["label"] for line in diary(folder, 1, "generated")]
    assert 2 not in after and after.count(1) == after.count(0), "replica 1 generated while it was in quarantine"
    assert "replicas [1] are in quarantine" in troubled.killed.output


def test_a_trainer_that_was_killed_resumes_its_own_run(troubled: Troubled) -> None:
    assert troubled.killed.code != 0
    record = troubled.resumed.record
    versions = [sync.version for sync in record.syncs]
    assert versions == sorted(set(versions)), "a version was used twice"
    assert [label_of(record, sync) for sync in record.syncs] == ["0", "1", "2", "3", "3", "4", "5"]
    assert sum(isinstance(command, EpochStart) for command in record.commands.values()) == 2


def test_a_server_that_dies_in_an_update_ends_verl_itself_and_the_report_says_which(troubled: Troubled) -> None:
    """verl 0.9.1 raises the actor's death out of `update_weights`, and has nothing that starts a server again."""
    assert troubled.resumed.code != 0
    assert re.search(r"ActorDiedError|RayActorError", troubled.resumed.output)
    last = troubled.resumed.record.syncs[-1]
    assert last.status == "aborted"
    assert "verl's own update of the weights of step 5 failed" in troubled.resumed.output


def test_the_log_of_all_that_verifies_and_replays(troubled: Troubled) -> None:
    verified_and_replayed(troubled.resumed.log)
