"""Samples that a trainer judges, and what the log, its checks, the report and the metrics have of them."""

import io
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from controlplane import ControlPlane, RecordedRun
from controlplane.analysis.invariants import verify
from controlplane.analysis.log_lines import format_bus_event
from controlplane.cli.replay_log import replay_log
from controlplane.machine.events import SamplesCounted
from controlplane.machine.provenance import Provenance, TokenSpan
from controlplane.metrics import BusCollector
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.report.page import write_page
from controlplane.samples import KINDS_MAX, SampleCounts
from tests.running import typed
from tests.unit.small_bus import PRIMARY, Engine
from tests.unit.test_plane import ADDRESS, QUICK, agents, checkpoint
from tests.waiting import wait_until


def answer(*spans: tuple[str, int, int]) -> dict[str, object]:
    named = [{"version": label, "start": begin, "end": end} for label, begin, end in spans]
    return {"meta_info": {"weight_versions": named}}


@pytest.fixture
def judged(tmp_path: Path) -> Path:
    """The log of a run of two steps, whose trainer takes one sample of weights that it knows nothing of."""
    plane = ControlPlane(ADDRESS, log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path)
    with plane, agents(plane.address, tmp_path, {PRIMARY: Engine()}):
        plane.wait_for_agents(1, timeout=20).wait()
        registry = CollectorRegistry()
        registry.register(BusCollector(plane))
        for step in (1, 2):
            with plane.step(step):
                plane.sync_weights(step, checkpoint(tmp_path / str(step)), timeout=20).wait()
                for labels in ([("1", 0, 40)], [("1", 0, 30), (str(step), 30, 50)], [("7", 0, 10)]):
                    (sample,) = plane.provenance(answer(*labels), replica=0)
                    plane.accepts(sample, max_staleness=0)
        (unknown,) = plane.provenance(answer(("7", 0, 10)), replica=0)
        assert plane.accepts(unknown, unproven=True)
        plane.step(3)
        value = registry.get_sample_value
        judged = "samples: 3 accepted, 4 refused; the newest 0.8 versions behind"
        assert str(plane.status()).splitlines()[1] == f"  {judged}"
        assert judged in typed("status", "--bus", plane.address).stdout.splitlines()
        wait_until(lambda: value("rolloutctl_sample_tokens_total", {"behind": "1", "result": "refused"}) == 70)
        assert value("rolloutctl_sample_tokens_total", {"behind": "more", "result": "accepted"}) == 10
        assert value("rolloutctl_sample_tokens_total", {"behind": "3", "result": "accepted"}) == 0
    return tmp_path / "run.db"


def test_the_log_has_what_was_judged_step_by_step_and_no_token(judged: Path) -> None:
    run = RecordedRun(judged)
    records = [entry.typed_event() for entry in run.entries if not entry.agent]
    counted = [event for event in records if isinstance(event, SamplesCounted)]
    assert [(event.step, sum(count.sequences for count in event.counts)) for event in counted] == [(1, 3), (2, 4)]
    assert format_bus_event(counted[0]) == (
        "samples; v1, 0 behind, proven: 2 accepted, 90 tokens; version unknown, unknown: 1 refused, 10 tokens"
    )
    assert replay_log(RunLog.walk(judged)).compared == len(run.entries), "and it replays"


def test_log_verify_names_what_was_taken_of_weights_that_are_not_proven(judged: Path) -> None:
    (found,) = [violation for violation in verify(RunLog.walk(judged)) if violation.invariant == "I15"]
    assert found.text == "step 2: 10 tokens of an unknown version were taken, whose weights are unknown"


def test_the_report_has_the_samples_by_staleness(judged: Path) -> None:
    report = collect(RunLog.walk(judged))
    assert {behind: (found.accepted, found.refused) for behind, found in report.samples.items()} == {
        0: (2, 0),
        1: (0, 2),
        None: (1, 2),
    }
    assert report.staleness == [(1, 0.0), (2, pytest.approx(70 / 90))]
    page = io.StringIO()
    write_page(page, report, "run", "run.db")
    assert "Versions of samples" in page.getvalue() and "<polyline" in page.getvalue()


def test_a_recorded_run_answers_for_the_moment_of_a_record(judged: Path) -> None:
    run = RecordedRun(judged)
    first, second = (entry.position for entry in run.entries if entry.kind == "samples_counted")
    (then,) = run.fleet_at(first).provenance(answer(("1", 0, 5)), replica=0)
    (now,) = run.fleet_at().provenance(answer(("1", 0, 5)), replica=0)
    assert [(found.staleness, found.proof) for found in (then, now)] == [(0, "proven"), (1, "proven")]
    assert second > first


def test_a_record_stays_small_whatever_is_counted() -> None:
    counts = SampleCounts()
    for version in range(2 * KINDS_MAX):
        counts.add(Provenance((TokenSpan(0, 2, str(version), version, 0, "proven"),)), accepted=True)
    taken = counts.take()
    assert len(taken) == KINDS_MAX + 1 and sum(count.tokens for count in taken) == 4 * KINDS_MAX
    assert {(count.staleness, count.proof) for count in taken} == {(0, "proven")}, "which I15 goes by"
    assert (taken[-1].version, taken[-1].tokens) == (None, 2 * KINDS_MAX)
    shown = format_bus_event(SamplesCounted(at_us=0, at_ns=0, step=1, counts=taken[-1:]))
    assert shown == "samples; other versions, 0 behind, proven: 256 accepted, 512 tokens"
    for staleness in range(4 * KINDS_MAX):
        counts.add(Provenance((TokenSpan(0, 2, "1", 1, staleness, "proven"),)), accepted=True)
    assert len(counts.take()) == 2 * KINDS_MAX + 1
    assert counts.take() == ()


def test_a_trainer_that_judges_nothing_records_nothing(tmp_path: Path) -> None:
    with ControlPlane("inproc://none", log=tmp_path / "run.db"):
        pass
    assert [entry.kind for entry in RunLog.read(tmp_path / "run.db")] == ["opened", "closed"]
