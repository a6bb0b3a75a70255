"""A trainer that is started a second time with the same log: it is told, and can say what it wants."""

import logging
from importlib.metadata import version
from pathlib import Path

import pytest

from controlplane import ControlPlane
from controlplane.machine.coordinator import LOGIC
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint, Manifest
from schemas.config import BusConfig
from schemas.errors import CommandError, CommandFailed, ConfigError, LogError, LogLocked
from schemas.storage.record_file import RecordFile
from schemas.wire import MAJOR
from tests.running import typed
from tests.unit.small_bus import PRIMARY, Engine
from tests.unit.test_plane import agents

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=100)
MANIFEST = Manifest(tensors=1, nbytes=4, layout="0" * 64)


def trained(log: Path, *versions: int, run: str | None = None, path: str = "a") -> str:
    """Train on one engine: sync each version, and return the id of the run."""
    with (
        ControlPlane("tcp://127.0.0.1:0", log=log, run=run, config=QUICK) as plane,
        agents(plane.address, log.parent, {PRIMARY: Engine()}),
    ):
        plane.wait_for_agents(1).wait()
        for version in versions:
            plane.sync_weights(version, Checkpoint(path), manifest=MANIFEST).wait().raise_for_failures()
        return plane.status().run


@pytest.mark.parametrize(
    ("path", "error"), [("a", CommandFailed), ("other", CommandError)], ids=["the same weights", "others"]
)
def test_a_version_of_an_earlier_run_is_refused_with_both_ways_out(
    tmp_path: Path, path: str, error: type[Exception]
) -> None:
    log = tmp_path / "run.db"
    run = trained(log, 1, 2)
    with pytest.raises(error) as refused:
        trained(log, 1, path=path)
    said = str(refused.value)
    assert f"the log {log} goes on with run {run}, which has committed version 2" in said
    assert "take versions above 2" in said and 'run="new"' in said
    trained(log, 3)


def test_to_go_on_with_a_run_is_never_done_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "run.db"
    run = trained(log, 1)
    assert "goes on with run" not in caplog.text
    assert trained(log, 2) == run
    (line,) = [record for record in caplog.records if "goes on with run" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert f"{log} goes on with run {run}, which has committed version 1" in line.getMessage()
    caplog.clear()
    assert trained(log, 3, run="resume") == run
    assert "goes on with run" not in caplog.text, "it was asked for"


def test_a_new_run_keeps_the_log_of_the_earlier_one(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    first = trained(log, 1, 2)
    second = trained(log, 1, run="new", path="b")
    assert second != first
    kept = tmp_path / f"run.{first}.db"
    assert RunLog.header(kept).run == first and RunLog.header(log).run == second
    assert len(list(RunLog.read(kept))) > 0
    assert trained(tmp_path / "other.db", 1, run="new") not in (first, second), "there need not be an earlier one"


def test_a_new_run_can_take_the_place_of_a_log_that_can_not_be_continued(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    log.write_bytes(b"no log at all")
    trained(log, 1, run="new")
    (kept,) = tmp_path.glob("run.*.db")
    assert kept.read_bytes() == b"no log at all"


def test_after_an_upgrade_each_way_out_that_is_named_is_one(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    header = {"run": "old", "created": "1", "major": str(MAJOR), "logic": str(LOGIC - 1), "package": "0.0.9"}
    with RecordFile.open(log, header):
        pass
    with pytest.raises(LogError) as refused, ControlPlane("tcp://127.0.0.1:0", log=log):
        pass
    said = str(refused.value)
    assert f"rolloutctl 0.0.9 wrote it with decision logic {LOGIC - 1} and protocol {MAJOR}" in said
    for command in ("show", "verify"):
        assert command in said and typed("log", command, log).returncode in (0, 1)  # 1: an empty one
    assert "report" in said and typed("report", log).returncode == 0
    assert 'run="new"' in said and trained(log, 1, run="new") != "old"
    assert RunLog.header(tmp_path / "run.old.db").run == "old" and RunLog.header(log).package == version("rolloutctl")


def test_a_run_that_is_not_there_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'run="resume": there is no log .*run.db'):
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", run="resume").open()
    assert not (tmp_path / "run.db").exists()


def test_a_new_run_takes_nothing_from_a_living_one(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    with ControlPlane("tcp://127.0.0.1:0", log=log) as plane:
        with pytest.raises(LogLocked), ControlPlane("tcp://127.0.0.1:0", log=log, run="new"):
            pass
        assert RunLog.header(log).run == plane.status().run
    assert [path.name for path in tmp_path.glob("*.db")] == ["run.db"]
