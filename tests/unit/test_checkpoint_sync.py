"""Weights of a trainer, brought to its fleet as checkpoint directories."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs

from controlplane import ControlPlane
from controlplane.tickets import Ticket
from controlplane.trainers.checkpoints import CheckpointSync
from schemas.errors import AgentsMissing, CheckpointError, CommandFailed, ConfigError, SyncInProgress
from schemas.reports import SyncReport
from tests.timeline.real_run import PLACES, QUICK, agents, front
from tests.waiting import wait_until
from workers.engines.tiny.model import TinyConfig, TinyModel, save, save_adapter
from workers.engines.tiny.server import TinyClient


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A bus with two tiny engines."""
    with ControlPlane(
        "tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path / "new"
    ) as plane:
        (tmp_path / "new").mkdir()
        with agents(plane.address, tmp_path, checkpoints=tmp_path / "new"):
            plane.wait_for_agents(len(PLACES), timeout=60).wait()
            yield plane


def weights(seed: int) -> Callable[[Path], None]:
    return lambda folder: save(TinyModel(TinyConfig(), seed=seed), folder)


def adapter(seed: int) -> Callable[[Path], None]:
    torch.manual_seed(seed)
    linear = {
        name: (torch.randn(2, module.in_features), torch.randn(module.out_features, 2))
        for name, module in TinyModel(TinyConfig()).named_modules()
        if name.startswith("blocks.") and isinstance(module, torch.nn.Linear)
    }

    def write(folder: Path) -> None:
        save_adapter(linear, 1.0, folder / "saved")
        for file in (folder / "saved").iterdir():
            file.rename(folder / file.name)
        (folder / "saved").rmdir()

    return write


def test_every_replica_gets_each_version_and_the_newest_checkpoints_stay(plane: ControlPlane, tmp_path: Path) -> None:
    sync = CheckpointSync(plane, keep=2)
    sync.require_replicas()
    for seed in (1, 2, 3):
        report = sync.publish(f"step_{seed}", weights(seed))
        assert (report.version, report.status, report.loaded) == (seed, "committed", (0, 1))
    assert sorted(path.name for path in plane.checkpoints.iterdir()) == ["step_2", "step_3"]
    held = [TinyClient(front(tmp_path, place)).describe() for place in PLACES]
    (first, second) = ((each.version, each.digest, each.label) for each in held)
    assert first == second and plane.serving() == {0: 3, 1: 3}


def test_a_name_that_is_taken_gets_a_number(plane: ControlPlane) -> None:
    (plane.checkpoints / "step_1").mkdir()  # of an earlier life of the trainer
    CheckpointSync(plane).publish("step_1", weights(1))
    assert sorted(path.name for path in plane.checkpoints.iterdir()) == ["step_1", "step_1-1"]
    assert list((plane.checkpoints / "step_1").iterdir()) == []


def test_a_trainer_that_goes_on_deletes_what_its_earlier_lives_published_and_nothing_else(
    plane: ControlPlane, tmp_path: Path
) -> None:
    save(TinyModel(TinyConfig(), seed=9), plane.checkpoints / "its_own")
    CheckpointSync(plane).publish("step_1", weights(1))
    killed = plane.checkpoints / ".step_2.7.partial"
    killed.mkdir()
    (killed / ".rolloutctl").touch()
    (plane.checkpoints / ".other.7.partial").mkdir()
    again = CheckpointSync(plane, keep=1)
    assert not killed.exists() and plane.needed_checkpoints() == {"step_1"}
    again.publish("step_1", weights(2))  # as it resumes at that step
    assert plane.needed_checkpoints() == {"step_1-1"}
    assert sorted(path.name for path in plane.checkpoints.iterdir()) == [".other.7.partial", "its_own", "step_1-1"]


def test_a_trainer_that_goes_on_from_an_older_step_brings_the_fleet_back_to_it(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    versions, served = [], []
    with agents(f"{tmp_path}/bus", tmp_path, checkpoints=tmp_path / "ckpt"):
        for start in (0, 1):  # its own checkpoint is of step 1 when it is killed after step 3
            config = structs.replace(QUICK, address_file=f"{tmp_path}/bus")
            with ControlPlane(
                "tcp://127.0.0.1:0", log=tmp_path / "run.db", run="auto", config=config, checkpoints=tmp_path / "ckpt"
            ) as plane:
                sync = CheckpointSync(plane)
                plane.wait_for_agents(len(PLACES), timeout=60).wait()
                for step in range(start, 4):
                    versions.append(sync.publish(f"step_{step}", weights(step)).version)
                    served.append(TinyClient(front(tmp_path, PLACES[0])).describe().digest)
    assert versions == [1, 2, 3, 4, 5, 6, 7]
    assert served[4:] == served[1:4]
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["step_2-1", "step_3-1"]


def test_a_trainer_that_does_not_wait_knows_the_version_at_once(plane: ControlPlane) -> None:
    sync = CheckpointSync(plane, keep=1)
    tickets = [sync.begin(f"step_{step}", weights(step)) for step in (1, 2)]
    assert [ticket.version for ticket in tickets] == [1, 2]
    assert tickets[0].wait(20).version == 1
    with pytest.raises(SyncInProgress):
        tickets[1].wait(20)
    assert sync.begin("step_3", weights(3)).wait(20).version == 2  # what was refused was used for nothing
    assert sorted(path.name for path in plane.checkpoints.iterdir()) == ["step_1", "step_3"]
    third = sync.begin("step_4", weights(4))
    assert third.version == 3 and third.wait(20).status == "committed"
    assert sorted(path.name for path in plane.checkpoints.iterdir()) == ["step_3", "step_4"]


def test_a_checkpoint_that_is_committed_while_older_ones_are_deleted_stays(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, queued = CheckpointSync(plane, keep=1), Ticket[SyncReport](1)

    def before_a_turn_took_it() -> frozenset[str]:
        queued.resolve(report)
        return frozenset()

    report = sync.publish("step_1", weights(1))
    monkeypatch.setattr(sync, "_begin", lambda folder: sync._written.setdefault(folder, queued))
    sync._written[plane.checkpoints / "step_1"] = queued
    monkeypatch.setattr(plane, "needed_checkpoints", before_a_turn_took_it)
    sync.begin("step_2", weights(2))
    assert (plane.checkpoints / "step_1").exists()


def test_a_checkpoint_that_was_not_written_is_published_to_no_agent(plane: ControlPlane) -> None:
    def full(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        CheckpointSync(plane).publish("step_1", full)
    assert list(plane.checkpoints.iterdir()) == []
    with pytest.raises(CheckpointError):
        CheckpointSync(plane).publish("step_1", lambda folder: None)
    assert plane.serving() == {0: 0, 1: 0}


def test_a_sync_waits_for_that_of_an_operator_and_says_so(
    plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    save(TinyModel(TinyConfig(), seed=9), plane.checkpoints / "operators")
    sent = threading.Event()
    others = plane.sync_weights(None, "operators", send=lambda _: sent.wait(20))
    sync, reports = CheckpointSync(plane), list[SyncReport]()
    publishing = threading.Thread(target=lambda: reports.append(sync.publish("step_1", weights(1))))
    publishing.start()
    wait_until(lambda: "step_1 is not published yet, since another sync has not ended" in caplog.text)
    sent.set()
    others.wait(20)
    publishing.join(20)
    assert [(report.version, report.status) for report in reports] == [(2, "committed")]
    assert plane.serving() == {0: 2, 1: 2}


def test_a_checkpoint_whose_sync_has_no_report_is_deleted_once_no_replica_needs_it(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    sync = CheckpointSync(plane, keep=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("controlplane.tickets.Ticket.wait", interrupted)
        sync.publish("step_1", weights(1))
    for seed in (2, 3):
        sync.publish(f"step_{seed}", weights(seed))
    assert sorted(path.name for path in plane.checkpoints.iterdir()) == ["step_3"]


def test_versions_of_an_adapter_have_paths_of_their_own_and_go_when_no_replica_holds_them(plane: ControlPlane) -> None:
    sync = CheckpointSync(plane, adapter="policy", keep=1)
    for step in (1, 1, 2, 3):  # a trainer that began again
        report = sync.publish(f"step_{step}", adapter(step))
        assert (report.adapter, report.status, report.loaded) == ("policy", "committed", (0, 1))
    held = plane.adapters()["policy"]
    assert (held.version, held.model, held.replicas) == (4, "policy-v4", (0, 1))
    assert held.path.startswith("policy-step_3-") and plane.serving() == {0: 0, 1: 0}
    wait_until(lambda: plane.needed_checkpoints() == {held.path})
    assert plane.adapters()["policy"].oldest == 4
    last = sync.publish("step_1", adapter(4))
    paths = [plane.adapters()["policy"].path, held.path]
    assert last.version == 5 and sorted(path.name for path in plane.checkpoints.iterdir()) == sorted(paths)


def test_an_adapter_that_engines_refuse_ends_the_training_with_the_reason(plane: ControlPlane) -> None:
    def dora(folder: Path) -> None:
        adapter(1)(folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))

    with pytest.raises(CommandFailed, match="has use_dora True.* This engine does not serve that"):
        CheckpointSync(plane, adapter="policy").publish("step_1", dora)
    assert plane.adapters() == {}


def test_a_run_without_agents_is_told_how_to_start_one(tmp_path: Path) -> None:
    plane = ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", checkpoints=tmp_path)
    with plane, pytest.raises(AgentsMissing, match="no agent of a replica has joined .* --bus tcp://127.0.0.1:"):
        CheckpointSync(plane).require_replicas()


def test_wrong_settings_are_refused_before_the_training(tmp_path: Path) -> None:
    missing = ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", checkpoints=tmp_path / "none")
    with pytest.raises(ConfigError, match="none: no such directory. Make it where every agent can read it"):
        CheckpointSync(missing)
    with pytest.raises(ConfigError, match="keep is 0"):
        CheckpointSync(missing, keep=0)
