"""What `rolloutctl top` and `log show --follow` show, without a terminal and without a bus."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.text import Text

from controlplane.bus.recent import FAILURES_KEPT, Recent
from controlplane.cli.top_screen import READ_ONLY, Confirmed, TopView, keys_in, press, top_screen
from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide
from controlplane.machine.events import Closed, CoordinatorEvent, Opened, TimerFired
from controlplane.record.follow import follow
from controlplane.record.log import RunLog
from schemas.commands import EngineCommand, Target
from schemas.errors import LogError
from schemas.formatting import Line
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing
from schemas.reports import AgentOutcome, FleetStatus, Report, SyncReport
from tests.screens import FLEET, FOLLOWS, SERVES, line, text
from tests.unit.fleets import SETTINGS

LARGE = replace(FLEET, agents=tuple(line(f"{replica}.0", FOLLOWS) for replica in range(8)) * 100)


# --- the screen -------------------------------------------------------------------------------------------------------


def test_why_a_command_was_refused_can_be_read_on_a_narrow_terminal() -> None:
    reason = f"the bus refused: checkpoint refused: /{'folder/' * 20}step_7 is not there"
    shown = text(FLEET, TopView(message=(reason,), trouble=True), 80, 24)
    assert len(shown) == 24 and "q quit" in shown[-1]
    assert "is not there" in shown[-2] and "the bus refused: checkpoint" in " ".join(shown[-5:-1])


def test_an_engine_call_says_how_long_it_has_been_in_flight() -> None:
    busy = replace(SERVES, activity="flush")
    fleet = replace(FLEET, agents=(line("0.0", busy, 12, call_ms=42_300), line("0.1", FOLLOWS)))
    row = next(row for row in text(fleet, TopView(), 200, 20) if row[2:7].strip() == "0.0")
    assert "v12, generating, busy: flush; in flush for 42 s" in row
    selected = text(fleet, TopView(replica=0), 80, 20)
    assert any("busy: flush; in flush for 42 s" in row for row in selected), "and below the table, uncut"


def test_status_and_screen_say_in_red_that_agents_inject_faults() -> None:
    fleet = replace(FLEET, agents=(line("0.0", replace(SERVES, faults=3)), line("1.0", replace(SERVES, faults=0))))
    said = "game day: 0.0, 1.0 inject faults on purpose, 3 so far"
    assert Line(f"  {said}", trouble=True) in fleet.lines()
    head = next(part for part in top_screen(fleet, TopView(), 100, 20).renderables if said in str(part))
    assert isinstance(head, Text) and head.style == "red"


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_names_state_version_waits_failures_and_latency(width: int) -> None:
    lines = text(FLEET, TopView(), width, 20)
    assert len(lines) == 20 and max(map(len, lines)) <= width
    assert lines[0].rstrip() == "8 agents, 2 in trouble, weights v12, run grpo-7b, epoch 1, seq 61"
    assert lines[1].startswith("replica 3 not proven to hold v12")
    rows = {row[2:7].strip(): row for row in lines[3:11]}
    assert list(rows) == ["3.0", "3.1", "0.0", "0.1", "1.0", "1.1", "2.0", "2.1"], "trouble comes first"
    assert all(word in rows["0.0"] for word in ("v12", "v12, generating", "flush (seq 61)", "2.3 ms", "0.4 s"))
    assert rows["3.0"][0] == rows["3.1"][0] == "!" and "8.1 s" in rows["3.0"] and "gone for 3 min" in rows["3.1"]
    assert any(row.startswith("open: flush (seq 61) waits for 0.0") for row in lines)
    assert any(row.startswith("1 min ago: weights load v12 (seq 58): 3.0: failed engine_error: CUDA") for row in lines)
    assert "q quit" in lines[-1] and "[all]" in lines[-1]
    assert ("node-a" in rows["0.0"]) == (width == 160)


@pytest.mark.parametrize("width", [80, 160])
def test_everything_about_the_selected_replica_is_shown_at_any_width(width: int) -> None:
    lines = text(FLEET, TopView(replica=3), width, 20)
    assert [row[0] for row in lines[3:6]] == [">", ">", " "] and "[replica 3]" in lines[-1]
    folded = " ".join(" ".join(lines).split())
    assert "3.0 on node-g, vLLM 0.32.0: not ready, quarantined since v12, v11, paused, waits for a sync" in folded
    assert "3.1 on node-h, vLLM 0.32.0: gone for 3 min (was a healthy follower, node rank 1)" in folded


@pytest.mark.parametrize("height", range(1, 30))
@pytest.mark.parametrize("fleet", [FLEET, LARGE, replace(FLEET, agents=())], ids=["some", "many", "none"])
def test_the_screen_fits_into_any_terminal(fleet: FleetStatus, height: int) -> None:
    lines = text(fleet, TopView(replica=7, question="pause", message=("one", "two")), 80, height)
    if height > 9:
        assert len(lines) == height and "q quit" in lines[-1] and "pause replica 7" in lines[-2]


def test_the_selected_replica_is_in_sight_and_the_others_are_counted() -> None:
    fleet = replace(
        FLEET, agents=tuple(line(f"{replica % 10}.0", FOLLOWS) for replica in range(10)), failures=(), open=()
    )
    lines = text(fleet, TopView(replica=9), 80, 10)
    assert any(row.startswith("> ") and " 9.0 " in row for row in lines)
    assert any("more agents" in row for row in lines)


def test_text_of_others_stays_in_its_line_and_does_nothing() -> None:
    hostile = replace(FLEET, open=("\x1b[2J[red]pause\nx",), run="[bold]r")
    lines = text(hostile, TopView(silent="a\nb"), 80, 20)
    assert len(lines) == 20 and all(row.isprintable() for row in lines)
    assert "[bold]r" in lines[0] and any("[red]pause x" in row for row in lines)


# --- keys -------------------------------------------------------------------------------------------------------------


def after(keys: str, fleet: FleetStatus = FLEET) -> tuple[TopView, list[Confirmed]]:
    view, orders = TopView(), list[Confirmed]()
    for key in keys_in(keys):
        view, order = press(view, key, fleet)
        orders += [order] if order is not None else []
    return view, orders


def test_arrows_select_replicas_in_the_order_of_the_screen() -> None:
    assert [after("\x1b[B" * count)[0].replica for count in range(1, 6)] == [3, 0, 1, 2, 2]
    assert after("\x1bOB\x1bOB\x1bOA")[0].replica == 3 and after("jja")[0].replica is None
    assert after("j", replace(FLEET, agents=()))[0].replica is None


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ("p\r", Confirmed(EngineCommand(operation="pause", mode="abort"), Target())),
        ("jr\n", Confirmed(EngineCommand(operation="resume"), Target(replicas=frozenset([3])))),
    ],
)
def test_a_command_is_sent_when_it_is_confirmed(keys: str, order: Confirmed) -> None:
    view, orders = after(keys)
    assert (orders, view.question) == ([order], None)


@pytest.mark.parametrize("keys", ["p", "pn", "p\x1b", "pq", "x\r\r", "\r"])
def test_nothing_is_sent_otherwise(keys: str) -> None:
    assert after(keys)[1] == []


def test_an_observer_is_told_that_he_can_only_look() -> None:
    for keys in ("p\r", "r\r"):
        view, orders = after(keys, replace(FLEET, read_only=True))
        assert (view.message, view.trouble, orders) == ((READ_ONLY,), True, [])
    assert "this key may read, and not command" in text(replace(FLEET, read_only=True), TopView(), 80, 20)[-1]


# --- what the bus remembers -------------------------------------------------------------------------------------------


def report(seq: int, **conclusions: Conclusion) -> Report:
    outcomes = tuple(
        AgentOutcome(agent=f"{name[1]}.{name[2]}", conclusion=each, latency_us=seq * 1000)
        for name, each in conclusions.items()
    )
    return Report(seq=seq, origin=1, command=EngineCommand(operation="flush"), outcomes=outcomes)


def test_the_status_has_the_last_failures_and_each_agents_newest_latency() -> None:
    recent = Recent()
    recent.note(report(1, a00=Acted(calls=()), a01=Acted(calls=())), 1_000_000)
    recent.note(report(2, a00=Acted(calls=()), a01=Missing(reason="absent")), 2_000_000)
    recent.note(report(3, a00=Failed(ErrorKind.ENGINE_ERROR, "no"), a01=Missing(reason="deadline")), 3_000_000)
    (failure,) = recent.failures(5_500_000)
    assert failure.ago_ms == 2500
    assert failure.text == "flush (seq 3): 0.0: failed engine_error: no; 0.1: missing (deadline)"
    assert recent.latencies_us() == {"0.0": 3000, "0.1": 1000}


def test_a_bus_that_fails_for_ever_keeps_few_failures() -> None:
    recent = Recent()
    for seq in range(1, 100):
        recent.note(report(seq, a00=Failed(ErrorKind.ENGINE_ERROR, chr(0x100 + seq) + "x" * 10_000)), seq)
    failures = recent.failures(100)
    assert len(failures) == FAILURES_KEPT and "seq 99" in failures[0].text
    assert max(len(each.text) for each in failures) < 500


def test_the_same_failure_again_and_again_is_one_line() -> None:
    recent = Recent()
    for version in range(1, 9):
        recent.note(report(version, a00=Failed(ErrorKind.ENGINE_ERROR, f"no v{version}")), version)
        recent.note(SyncReport(version=version, status="aborted", loaded=(), quarantined=(), phases=()), version)
    recent.note(report(9, a01=Failed(ErrorKind.ENGINE_ERROR, "another")), 10_000_000)
    assert [failure.line for failure in recent.failures(70_000_000)] == [
        "1 min ago: flush (seq 9): 0.1: failed engine_error: another",
        "1 min ago: weights v8 aborted (8 times)",
        "1 min ago: flush (seq 8): 0.0: failed engine_error: no v8 (8 times)",
    ]


# --- log show --follow ------------------------------------------------------------------------------------------------


class Writer:
    """A bus's log, written a step at a time: `next` does the next step whenever the reader waits."""

    def __init__(self, path: Path, *steps: Callable[["Writer"], object]) -> None:
        self.path, self._steps = path, iter(steps)
        self.begin("r")

    def begin(self, run: str) -> None:
        self.log = RunLog.open(self.path, run)
        self._state: CoordinatorState = self.log.state
        self.decide(Opened(at_us=1, at_ns=1, run=run, settings=SETTINGS, logic=LOGIC))

    def decide(self, event: CoordinatorEvent) -> None:
        self._state, effects = decide(self._state, event)
        self.log.append(event, effects, 1)
        self.log.commit()

    def next(self) -> None:
        next(self._steps)(self)


def tick(writer: Writer) -> None:
    writer.decide(TimerFired(at_us=2, at_ns=2))


def close(writer: Writer) -> None:
    writer.decide(Closed(at_us=3, at_ns=3))
    writer.log.close()


def replace_after_a_kill(writer: Writer) -> None:
    """The last record of the old run comes just before its log is put aside."""
    tick(writer)
    writer.log.close()
    for end in ("", "-wal", "-shm"):
        if Path(f"{writer.path}{end}").exists():
            Path(f"{writer.path}{end}").rename(f"{writer.path.with_suffix('.old.db')}{end}")


def begin_anew(writer: Writer) -> None:
    writer.begin("s")


def followed(tmp_path: Path, *steps: Callable[[Writer], object]) -> Iterator[tuple[int, str]]:
    writer = Writer(tmp_path / "run.db", *steps)
    for entry in follow(writer.path, 1, writer.next):
        yield entry.position, entry.kind
    writer.log.close()


def test_a_log_is_followed_until_its_bus_closes(tmp_path: Path) -> None:
    found = [*followed(tmp_path, tick, lambda _: None, tick, close)]
    assert found == [(1, "opened"), (2, "timer"), (3, "timer"), (4, "closed")]
    closed = follow(tmp_path / "run.db", 3, lambda: pytest.fail("it waits"))
    assert [entry.position for entry in closed] == [3, 4]


def test_following_ends_at_a_log_in_the_place_of_the_followed_one_and_after_its_last_record(tmp_path: Path) -> None:
    found: list[tuple[int, str]] = []
    with pytest.raises(LogError, match="was replaced by another file"):
        found.extend(followed(tmp_path, replace_after_a_kill, begin_anew, lambda _: None))
    assert found == [(1, "opened"), (2, "timer")]
