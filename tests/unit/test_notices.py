"""What the trainer's log says of its fleet, and how often at most."""

import logging
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from controlplane.bus.notices import note_event, note_report
from schemas.errors import AgentsMissing
from schemas.logs import RateLimit
from schemas.reports import SyncReport
from tests.unit.fleets import Coordinator
from tests.unit.small_bus import PRIMARY, SECOND, Engine
from tests.unit.test_plane import ADDRESS, QUICK, agents, checkpoint
from tests.waiting import wait_until

LINES = 20


def test_the_log_says_which_agents_join_and_are_lost_and_how_syncs_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path)
    with caplog.at_level(logging.INFO, logger="rolloutctl.bus"), plane:
        with agents(plane.address, tmp_path, {PRIMARY: engine, SECOND: Engine()}):
            plane.wait_for_agents(2, timeout=20).wait()
            plane.sync_weights(1, checkpoint(tmp_path / "one")).wait(20)
            engine.raises = RuntimeError("no memory")
            plane.sync_weights(2, checkpoint(tmp_path / "two"), timeout=5).wait(20)
        wait_until(lambda: "is lost (left)" in caplog.text)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, text in lines if re.match(r"agent 0\.0 joined; \d of \d live", text)] == ["INFO"]
    assert ("INFO", "weights v1 committed on replica 0") in lines
    assert [level for level, text in lines if text.startswith("weights v2 aborted")] == ["WARNING"]


def test_an_agent_that_does_not_say_goodbye_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Coordinator("0.0", "1.0")
    before = fleet.state
    fleet.lose("0.0")
    note_event(fleet.history[-1], before, fleet.state)
    assert caplog.messages == ["agent 0.0 is lost (silent); 1 of 2 live"]


def test_a_trainer_that_waits_for_its_agents_says_for_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.waiting.SAY_AGAIN_S", 0.05)
    with ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK) as plane, pytest.raises(AgentsMissing):
        plane.wait_for_agents(2, timeout=0.2).wait(20)
    assert "waiting for 2 agents that serve: 0 joined, 0 lack something" in caplog.text


def test_many_good_lines_hide_no_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.bus.notices.logger.filters", [RateLimit(LINES, 60.0)])
    caplog.set_level(logging.INFO, "rolloutctl.bus")
    fleet = Coordinator(*(f"{replica}.0" for replica in range(LINES + 2)))
    for event in fleet.history:
        note_event(event, fleet.state, fleet.state)
    before = fleet.state
    fleet.lose("0.0")
    note_event(fleet.history[-1], before, fleet.state)
    committed = SyncReport(version=1, status="committed", loaded=(0,), quarantined=(), phases=())
    for _ in range(LINES + 2):
        note_report(committed)
    note_report(replace(committed, quarantined=(1,)))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(caplog.messages) == 2 * LINES + 2 and lines == [
        f"agent 0.0 is lost (silent); {LINES + 1} of {LINES + 2} live",
        "weights v1 committed on replica 0; quarantined: replica 1",
    ]
