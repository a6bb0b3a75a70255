"""Each invariant is seen to be broken: a recorded run of real processes, with one thing in it made otherwise."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from controlplane.cli.recorded import RecordedRun
from controlplane.machine.events import AnswersReceived, Conclude, Publish, Send, StatusReceived
from controlplane.record.entries import LogEntry
from controlplane.record.invariants import Violation, verify
from schemas.commands import WeightSync
from schemas.events import Answer, EngineReturned
from schemas.outcomes import Acted, Failed, Skipped
from schemas.reports import Report
from schemas.wire import Rejoin, decode_command, encode

REPLAYS = Path(__file__).parents[1] / "replays"
TORN = RecordedRun(REPLAYS / "torn-fleet.db").entries
TRAINED = RecordedRun(REPLAYS / "trained.db").entries
KILLED = RecordedRun(REPLAYS / "killed.db").entries

Edit = Callable[[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]] | None]
"""Event and effects of a record, made otherwise; None for a record that is to be left as it is."""


def edited(entries: tuple[LogEntry, ...], edit: Edit, agent: str = "", times: int = 1) -> Iterator[LogEntry]:
    """The log with the first records of one machine that `edit` takes made otherwise."""
    left = times
    for entry in entries:
        if left and entry.agent == agent:
            made = edit(entry.typed_event(), entry.typed_effects())
            if made is not None:
                left -= 1
                entry = replace(entry, event=Raw(encode(made[0])), effects=Raw(encode(made[1])))
        yield entry
    assert left < times, "nothing was edited: the test would prove nothing"


def broken(entries: tuple[LogEntry, ...], edit: Edit, agent: str = "", times: int = 1) -> set[str]:
    return {one.invariant for one in verify(edited(entries, edit, agent, times))}


def see(**other: object) -> Edit:
    """The engine, after the call that ended a command, is seen to be something else."""

    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        seen = getattr(event, "observation", None)
        ended = any(isinstance(one, Answer) for one in effects)
        if not (isinstance(event, EngineReturned) and ended and seen is not None and seen.generating):
            return None
        return replace(event, observation=replace(seen, **other)), effects

    return edit


def test_the_runs_as_they_are_break_nothing() -> None:
    for entries in (TORN, TRAINED, KILLED):
        assert list(verify(entries)) == []


def test_i1_an_engine_left_on_other_weights() -> None:
    assert broken(TRAINED, see(version=77), "0.0") == {"I1"}


def test_i1_a_replica_out_of_service_that_generates() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        # replica 1 in quarantine is paused: its agent's last word on seq 6
        if isinstance(event, EngineReturned) and any(isinstance(one, Answer) and one.seq == 6 for one in effects):
            assert event.observation is not None
            return replace(event, observation=replace(event.observation, generating=True)), effects
        return None

    (violation,) = verify(edited(TORN, edit, "1.0"))
    assert violation.invariant == "I1" and violation.agents == ("1.0",)
    assert "quarantined since the sync to v2" in violation.text


def test_i2_other_weights_under_the_right_number() -> None:
    assert broken(TRAINED, see(digest="0" * 64), "0.0") == {"I2"}


def test_i3_two_outcomes_for_one_command() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        if not any(isinstance(one, Answer) and isinstance(one.outcome, Acted) for one in effects):
            return None
        (answer,) = (one for one in effects if isinstance(one, Answer))
        other = replace(answer, outcome=Acted(calls=("something else",)))
        return event, (*effects, other)

    assert broken(TRAINED, edit, "0.0") == {"I3"}


@pytest.mark.parametrize("other", [{"seq": 3}, {"seq": 1}, {"epoch": 1}], ids=["hole", "back", "older epoch"])
def test_i4_seq_and_epoch_go_up(other: dict[str, int]) -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        wanted = next((one for one in effects if isinstance(one, Publish) and one.seq == 2), None)
        if "epoch" in other:  # the first command of a later epoch than all that follow
            wanted = next((one for one in effects if isinstance(one, Publish) and one.seq == 1), None)
        if wanted is None:
            return None
        made = replace(wanted, epoch=9) if "epoch" in other else replace(wanted, **other)
        return event, tuple(made if one is wanted else one for one in effects)

    assert "I4" in broken(TRAINED, edit)


def test_i4_a_committed_version_never_goes_back() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        for one in effects:
            if isinstance(one, Publish):
                command = decode_command(one.envelope.body)
                if isinstance(command, WeightSync) and command.phase == "commit":
                    body = Raw(encode(replace(command, version=99)))
                    made = replace(one, envelope=replace(one.envelope, body=body))
                    return event, tuple(made if effect is one else effect for effect in effects)
        return None

    assert broken(TRAINED, edit) == {"I4"}


def test_i5_a_command_that_never_ends() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        kept = tuple(one for one in effects if not (isinstance(one, Conclude) and isinstance(one.report, Report)))
        return (event, kept) if kept != effects and event.__struct_config__.tag == "answers" else None

    assert broken(TRAINED, edit) == {"I5"}


@pytest.mark.parametrize("outcomes", [lambda o: o[1:], lambda o: (*o, o[0])], ids=["left out", "twice"])
def test_i5_an_agent_without_exactly_one_outcome(outcomes: Callable[[Any], Any]) -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        for one in effects:
            if isinstance(one, Conclude) and isinstance(one.report, Report) and one.report.outcomes:
                made = replace(one, report=replace(one.report, outcomes=outcomes(one.report.outcomes)))
                return event, tuple(made if effect is one else effect for effect in effects)
        return None

    assert broken(TRAINED, edit) == {"I5"}


def test_i6_a_skip_without_a_rule() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        if any(isinstance(one, Answer) and isinstance(one.outcome, Skipped) for one in effects):
            return event, tuple(replace(one, rule=0) for one in effects)
        return None

    assert broken(TRAINED, edit, "0.1") == {"I6"}


def test_i6_a_failure_without_a_word() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        for one in effects:
            if isinstance(one, Answer) and isinstance(one.outcome, Failed):
                made = replace(one, outcome=replace(one.outcome, message=""))
                return event, tuple(made if effect is one else effect for effect in effects)
        return None

    assert broken(TORN, edit, "1.0") == {"I6"}


def test_i7_a_profile_left_open() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        stopped = any(isinstance(one, Answer) and getattr(one.outcome, "traces", ()) for one in effects)
        if not (isinstance(event, EngineReturned) and event.observation is not None and stopped):
            return None
        return replace(event, observation=replace(event.observation, profiling=True)), effects

    assert broken(TRAINED, edit, "0.0") == {"I7"}


def test_i8_who_was_lost_counts_for_nothing() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        if isinstance(event, StatusReceived):
            return replace(event, peer="1.0/somebody-else"), effects
        return None

    assert broken(TRAINED, edit) == {"I8"}


def test_i8_a_stranger_that_is_told_so_is_no_trouble() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        if isinstance(event, StatusReceived):
            told = Send(peer="1.0/somebody-else", epoch=1, seq=1, message=Rejoin(reason="say hello"))
            return replace(event, peer="1.0/somebody-else"), (told,)
        return None

    assert broken(TRAINED, edit) == set()


def test_answers_of_strangers_are_looked_at_too() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        if isinstance(event, AnswersReceived):
            return replace(event, answers=(*event.answers, replace(event.answers[0], peer="5.0/nobody"))), effects
        return None

    assert broken(TRAINED, edit) == {"I8"}


@pytest.mark.parametrize("entries", [TORN, TRAINED, KILLED], ids=["torn-fleet", "trained", "killed"])
@pytest.mark.parametrize("missing", [1, 5])
def test_a_hole_in_the_log_is_no_fault_of_the_run(entries: tuple[LogEntry, ...], missing: int) -> None:
    journals = sorted({(one.agent, one.journal) for one in entries if one.agent})
    for journal in journals:
        for first in range(1, 30):
            hole = range(first, first + missing)
            left = [one for one in entries if (one.agent, one.journal) != journal or one.number not in hole]
            assert [str(one) for one in verify(left)] == [], f"without {hole} of {journal}"


def test_what_needs_no_past_is_checked_behind_a_hole_too() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        if any(isinstance(one, Answer) and isinstance(one.outcome, Skipped) for one in effects):
            return event, tuple(replace(one, rule=0) for one in effects)
        return None

    left = tuple(one for one in TRAINED if not (one.agent == "0.1" and one.number == 2))
    assert broken(left, edit, "0.1") == {"I6"}


def test_a_violation_says_where_and_who() -> None:
    assert str(Violation("I1", 7, ("0.0",), "generates")) == "I1 at record 7 (0.0): generates"
