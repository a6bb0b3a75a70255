"""`rolloutctl log` and the pytest plugin over recorded, damaged and wrong files, as processes."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Raw

from controlplane.analysis.invariants import verify
from controlplane.analysis.log_lines import format_decision, json_line
from controlplane.cli.replay_log import replay_file
from controlplane.record.bodies import deflated, inflated
from controlplane.record.log import RunLog
from controlplane.replay.recorded_run import find_logs
from controlplane.report.collect import collect
from controlplane.timeline.survey import LogSurvey
from schemas.errors import ConfigError
from schemas.events import Decision, Tick
from schemas.storage.record_file import RecordFile
from schemas.storage.records import Record
from schemas.wire import DecisionBatch, encode
from tests.running import PYTEST, environment, python, rolloutctl, typed

REPLAYS = Path(__file__).parents[1] / "replays"


def log(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return typed("log", *args)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return Path(shutil.copy(REPLAYS / "torn-fleet.db", tmp_path / "run.db"))


@pytest.fixture
def altered(good: Path) -> Path:
    """An undamaged file in which one recorded decision of an agent was changed."""
    old, new = b"\xa5calls\x92\xaccheck_source", b"\xa5calls\x92\xaccheck_sauces"

    def body(record: Record) -> bytes:
        return deflated(inflated(record.body).replace(old, new)) if record.agent == "0.0" else record.body

    return copied(good, body)


def copied(log: Path, body: Callable[[Record], bytes], **header: str) -> Path:
    """A copy with other bodies and another header."""
    copy = log.with_name("copy.db")
    copy.unlink(missing_ok=True)
    with RecordFile.open(log) as source, RecordFile.open(copy, {**source.header, **header}) as file:
        for record in source.records():
            file.append(record.kind, record.agent, record.at_ns, body(record))
    return copy


@pytest.fixture
def cut(good: Path) -> Path:
    """A log with its end cut off."""
    data = good.read_bytes()
    good.write_bytes(data[: len(data) // 2])
    return good


def test_show_prints_every_decision(good: Path) -> None:
    shown = log("show", good)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert len(shown.stdout.splitlines()) == len(list(RunLog.read(good)))
    assert "failed source_refused: checkpoint refused" in shown.stdout
    assert "weights v2 committed on replica 0; quarantined: replica 1" in shown.stdout


def test_show_can_be_filtered(good: Path) -> None:
    shown = log("show", good, "--agent", "1.0", "--kind", "command", "--from", "5").stdout.splitlines()
    assert shown and all(" 1.0 " in line and "seq" in line for line in shown)
    assert all("bus " in line for line in log("show", good, "--agent", "bus").stdout.splitlines())


def test_a_filter_that_matches_nothing_is_an_error(good: Path) -> None:
    for words, says in (
        (("--agent", "0.00"), "has no decision of agent 0.00; did you mean 0.0?"),
        (("--agent", "9"), "has no decision of agent 9; there are 0.0, "),
        (("--kind", "comand"), "has no event of kind comand; did you mean command?"),
        (("--from", "100000"), "from record 100000 on has no such record"),
    ):
        done = log("show", good, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("rolloutctl: nothing to show: ") and says in done.stderr


def test_a_moment_is_shown_with_its_date_and_zone(good: Path) -> None:
    first = rolloutctl("log", "show", good, env={"TZ": "Asia/Tokyo"}).stdout.splitlines()[0]
    assert re.match(r" +1  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+09:00  bus ", first)


def test_show_json_prints_one_object_per_line(good: Path) -> None:
    lines = [json.loads(line) for line in log("show", good, "--json").stdout.splitlines()]
    positions = [line["position"] for line in lines]  # answers that came together share one
    assert positions == sorted(positions) and set(positions) == set(range(1, positions[-1] + 1))
    assert lines[0]["event"]["type"] == "opened"


def test_verify_finds_no_violation_in_a_good_run(good: Path) -> None:
    verified = log("verify", good)
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "no violation" in verified.stdout
    result = json.loads(log("verify", good, "--json").stdout)
    assert result["violations"] == [] and result["damage"] is None


def test_replay_of_a_good_run_is_the_same(good: Path) -> None:
    replayed = log("replay", good)
    assert (replayed.returncode, replayed.stderr) == (0, "")
    assert "all are the same" in replayed.stdout
    assert json.loads(log("replay", good, "--json").stdout)["same"] is True


def test_replay_shows_the_first_difference_as_a_diff(altered: Path) -> None:
    replayed = log("replay", altered)
    assert replayed.returncode == 1
    assert re.match(r"record \d+, agent 0\.0, decision \d+ of its journal", replayed.stdout)
    assert '-        "check_sauces"' in replayed.stdout and '+        "check_source"' in replayed.stdout
    result = json.loads(log("replay", altered, "--json").stdout)
    assert result["same"] is False and "check_sauces" in result["difference"]


def test_a_damaged_log_is_read_up_to_the_damage(cut: Path) -> None:
    verified = log("verify", cut)
    assert verified.returncode in (1, 3)
    assert "Traceback" not in verified.stderr
    output = verified.stdout + verified.stderr
    assert str(cut) in output and "damage" in output
    shown = log("show", cut)
    assert shown.returncode == 3 and shown.stderr.startswith("rolloutctl: ")


def test_who_does_not_read_what_is_wrong_still_gets_its_exit_code(cut: Path) -> None:
    command = f"{sys.executable} -m controlplane.cli log verify {cut} | head -c 0"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, capture_output=True, text=True, env=environment())
    assert done.returncode in (1, 3) and "Traceback" not in done.stderr


def test_a_log_of_another_logic_names_the_version_that_replays_it(good: Path) -> None:
    for key in ("major", "logic"):
        other = copied(good, lambda record: record.body, **{key: "99"})
        replayed = log("replay", other)
        assert (replayed.returncode, replayed.stdout) == (3, "")
        assert str(other) in replayed.stderr and "Replay it with a version of rolloutctl that has" in replayed.stderr
        assert "99" in replayed.stderr
        assert log("verify", other).returncode == 0
    done = pytest_in(good.parent, "--replay-log", other)
    assert "can't be replayed" in done.stdout and "1 failed, 1 passed" in done.stdout


EVENT, EFFECTS = encode(Tick(at_ms=1)), encode(())
GARBAGE = {
    "text": (EVENT, b"\x91\xa2\xff\xfe"),
    "ext": (EVENT, b"\xd4\x05\x01"),
    "key": (EVENT, b"\x81\x91\x01\x01"),
    "event of no kind that there is": (encode({"type": "gossip", "at_ms": 1}), EFFECTS),
    "event without its fields": (encode({"type": "command", "at_ms": "soon"}), EFFECTS),
    "a command within that is none": (encode({"type": "snapshot", "at_ms": 1, "epoch": 1, "desired": []}), EFFECTS),
    "nested deep": (b"\x82\xa4type\xa4tick\xa4more" + b"\x91" * 300 + b"\x00", EFFECTS),
    "effects that are a map": (EVENT, encode({"a": b"\x1b[2J"})),
}


def sent_to(log: Path, garbage: Decision) -> Path:
    """Append what an agent sent instead of a decision, then decisions that can be read."""
    good = Decision(Raw(EVENT), Raw(EFFECTS))
    with RunLog.open(log) as file:
        file.append_batch("7.0", DecisionBatch(journal="j", first=1, decisions=(garbage, good)), 1)
        file.append_batch("1.0", DecisionBatch(journal="k", first=1, decisions=(good,)), 1)
    return log


@pytest.mark.parametrize("what", GARBAGE)
def test_what_an_agent_sent_instead_of_a_decision_hides_nothing_else(good: Path, what: str) -> None:
    """Its key is all that it needs to send it. Every reader names the agent, and reads on."""
    event, effects = GARBAGE[what]
    misled = sent_to(good, Decision(Raw(event), Raw(effects)))
    entries = list(RunLog.read(misled))
    at = entries[-3].position
    assert format_decision(entries[-3]).startswith(f"unreadable: record {at}: the e")
    assert [(entry.position, entry.agent, entry.number) for entry in entries[-3:]] == [
        (at, "7.0", 1),
        (at, "7.0", 2),
        (at + 1, "1.0", 1),
    ]
    assert {entry.position for entry in entries} == set(range(1, at + 2))
    shown = [json.loads(json_line(entry)) for entry in entries]
    assert [(line["position"], line["agent"], line["number"]) for line in shown] == [
        (entry.position, entry.agent, entry.number) for entry in entries
    ]
    assert [(found.invariant, found.position, found.agents) for found in verify(RunLog.walk(misled))] == [
        ("I13", at, ("7.0",))
    ]
    replayed = replay_file(misled)
    assert (replayed.records, replayed.compared) == (len(entries), len(entries) - 2)
    assert len(replayed.holes) == 1 and replayed.holes[0].startswith(f"agent 7.0 from 1 on (record {at}: the e")
    report = collect(RunLog.walk(misled))
    assert (report.damage, report.records, len(report.violations)) == ("", len(entries), 1)
    survey = LogSurvey(RunLog.read(misled))
    assert (survey.damage, survey.unreadable, survey.last) == ("", [at], at + 1)


def test_the_commands_say_which_peer_sent_what_can_not_be_read(good: Path, tmp_path: Path) -> None:
    misled = sent_to(good, Decision(Raw(EVENT), Raw(b"\x91\xa2\xff\xfe")))
    records = len(list(RunLog.read(misled)))
    shown = log("show", misled, "--agent", "7.0")
    assert shown.returncode == 0 and "unreadable: record" in shown.stdout
    as_json = json.loads(log("show", misled, "--agent", "7.0", "--json").stdout.splitlines()[0])
    assert (as_json["effects"], "of agent 7.0 can't be read" in as_json["unreadable"]) == ("kaL//g==", True)
    verified = log("verify", misled)
    assert verified.returncode == 1 and f"{records} decisions read, 1 violations" in verified.stdout
    replayed = log("replay", misled)
    assert replayed.returncode == 0 and "could not be compared" in replayed.stdout


def test_a_decision_of_the_coordinator_that_can_not_be_read_is_damage(good: Path) -> None:
    last = max(entry.position for entry in RunLog.read(good) if not entry.agent)
    nothing = encode(Decision(Raw(b"\xc0"), Raw(EFFECTS)))
    damaged = copied(good, lambda record: nothing if record.position == last else record.body)
    for args in (("show",), ("verify",), ("replay",)):
        done = log(*args, damaged)
        assert done.returncode in (1, 3) and "Traceback" not in done.stderr
        assert f"record {last}" in done.stdout + done.stderr and "of the coordinator" in done.stdout + done.stderr


@pytest.mark.parametrize("args", [("show",), ("verify",), ("replay",)])
@pytest.mark.parametrize("what", ["text", "missing", "journal", "empty", "pipe"])
def test_a_file_of_another_kind_is_one_clear_line(tmp_path: Path, args: tuple[str], what: str) -> None:
    file = tmp_path / "file.db"
    if what == "empty":
        file.touch()
    elif what == "pipe":
        os.mkfifo(file)
    if what == "text":
        file.write_text("this is no log\n" * 1000)
    elif what == "journal":
        RecordFile.open(file, {"agent": "0.0"}).close()
    done = log(*args, file)
    assert done.returncode == (2 if what == "missing" else 3)
    assert str(file) in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


# --- pytest -----------------------------------------------------------------------------------------------------------


def pytest_in(folder: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return python(*PYTEST, "-q", *args, cwd=folder)


def test_a_log_that_differs_or_is_damaged_fails_with_its_difference_only(
    tmp_path: Path, altered: Path, cut: Path
) -> None:
    RecordFile.open(tmp_path / "agent-0.0.db", {"agent": "0.0"}).close()  # a file of another kind is left out
    done = pytest_in(tmp_path, "--replay-log", tmp_path)
    assert done.returncode == 1 and "3 failed, 1 passed" in done.stdout
    assert "check_sauces" in done.stdout and str(cut) in done.stdout
    assert "Traceback" not in done.stdout and "def _replay" not in done.stdout


def test_each_log_becomes_two_tests_and_one_of_each_test_with_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(run_log):\n"
        "    assert run_log.syncs[0].status == 'committed'\n"
        "    assert run_log.reports.keys() == run_log.commands.keys()\n"
    )
    done = pytest_in(tmp_path, "--replay-log", REPLAYS, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "21 passed" in done.stdout


def test_a_place_without_logs_fails_at_once(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--replay-log", ".")
    assert done.returncode == 4
    assert "--replay-log .: there is no recorded run" in done.stderr
    with pytest.raises(ConfigError, match="--replay-log nowhere: there is no such file"):
        find_logs(Path("nowhere"))


def test_without_the_option_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\n\ndef test_mine():\n    assert not {'controlplane.replay.replayer', 'zmq'} & sys.modules.keys()\n"
    )
    assert pytest_in(tmp_path).returncode == 0
