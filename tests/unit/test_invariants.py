"""Each invariant is seen to be broken, in the record of a real run in which one thing is changed."""

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
from schemas.reports import Report, SyncReport
from schemas.wire import Rejoin, decode_command, encode

REPLAYS = Path(__file__).parents[1] / "replays"
TORN = RecordedRun(REPLAYS / "torn-fleet.db").entries
TRAINED = RecordedRun(REPLAYS / "trained.db").entries
KILLED = RecordedRun(REPLAYS / "killed.db").entries

Edited = tuple[Any, tuple[Any, ...]] | None
Edit = Callable[[Any, tuple[Any, ...]], Edited]
"""Returns changed event and effects of a record; None to leave it as it is."""


def edited(entries: tuple[LogEntry, ...], edit: Edit, agent: str = "", times: int = 1) -> Iterator[LogEntry]:
    """The log, with `edit` applied to the first `times` records of one machine that it changes."""
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
    return {entry.invariant for entry in verify(edited(entries, edit, agent, times))}


def change(kind: type, make: Callable[[Any], object]) -> Edit:
    """Replace the first effect of this kind for which `make` returns another one."""

    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        for position, effect in enumerate(effects):
            if isinstance(effect, kind) and (made := make(effect)) is not None:
                return event, (*effects[:position], made, *effects[position + 1 :])
        return None

    return edit


def without_rule(answer: Answer) -> Answer | None:
    return replace(answer, rule=0) if isinstance(answer.outcome, Skipped) else None


def see(**other: object) -> Edit:
    """After the call that ended a command, the engine is observed in another state."""

    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        seen = getattr(event, "observation", None)
        ended = any(isinstance(effect, Answer) for effect in effects)
        if not (isinstance(event, EngineReturned) and ended and seen is not None and seen.generating):
            return None
        return replace(event, observation=replace(seen, **other)), effects

    return edit


def test_the_unedited_runs_break_nothing() -> None:
    for entries in (TORN, TRAINED, KILLED):
        assert list(verify(entries)) == []


def test_i1_an_engine_left_on_other_weights() -> None:
    assert broken(TRAINED, see(version=77), "0.0") == {"I1"}


def test_i1_a_replica_out_of_service_that_generates() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        # replica 1 is quarantined and paused; this is its agent's answer to seq 6
        if isinstance(event, EngineReturned) and any(
            isinstance(effect, Answer) and effect.seq == 6 for effect in effects
        ):
            assert event.observation is not None
            return replace(event, observation=replace(event.observation, generating=True)), effects
        return None

    (violation,) = verify(edited(TORN, edit, "1.0"))
    assert violation.invariant == "I1" and violation.agents == ("1.0",)
    assert "quarantined since the sync to v2" in violation.text


def test_i2_other_weights_under_the_right_number() -> None:
    assert broken(TRAINED, see(digest="0" * 64), "0.0") == {"I2"}


def test_i3_two_outcomes_for_one_command() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        if not any(isinstance(effect, Answer) and isinstance(effect.outcome, Acted) for effect in effects):
            return None
        (answer,) = (effect for effect in effects if isinstance(effect, Answer))
        other = replace(answer, outcome=Acted(calls=("something else",)))
        return event, (*effects, other)

    assert broken(TRAINED, edit, "0.0") == {"I3"}


@pytest.mark.parametrize(
    ("seq", "other"), [(2, {"seq": 3}), (2, {"seq": 1}), (1, {"epoch": 9})], ids=["hole", "back", "older epoch"]
)
def test_i4_seq_and_epoch_go_up(seq: int, other: dict[str, int]) -> None:
    """An epoch of 9 in the first command makes that of all others older."""
    edit = change(Publish, lambda effect: replace(effect, **other) if effect.seq == seq else None)
    assert "I4" in broken(TRAINED, edit)


def test_i4_a_committed_version_never_goes_back() -> None:
    def make(effect: Publish) -> Publish | None:
        command = decode_command(effect.envelope.body)
        if not isinstance(command, WeightSync) or command.phase != "commit":
            return None
        body = Raw(encode(replace(command, version=99)))
        return replace(effect, envelope=replace(effect.envelope, body=body))

    assert broken(TRAINED, change(Publish, make)) == {"I4"}


def test_i5_a_command_that_never_ends() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        kept = tuple(
            effect for effect in effects if not (isinstance(effect, Conclude) and isinstance(effect.report, Report))
        )
        return (event, kept) if kept != effects and event.__struct_config__.tag == "answers" else None

    assert broken(TRAINED, edit) == {"I5"}


@pytest.mark.parametrize("outcomes", [lambda o: o[1:], lambda o: (*o, o[0])], ids=["left out", "twice"])
def test_i5_an_agent_without_exactly_one_outcome(outcomes: Callable[[Any], Any]) -> None:
    def make(effect: Conclude) -> Conclude | None:
        if not isinstance(effect.report, Report) or not effect.report.outcomes:
            return None
        return replace(effect, report=replace(effect.report, outcomes=outcomes(effect.report.outcomes)))

    assert broken(TRAINED, change(Conclude, make)) == {"I5"}


def test_i6_a_skip_without_a_rule() -> None:
    assert broken(TRAINED, change(Answer, without_rule), "0.1") == {"I6"}


def test_i6_a_failure_without_a_message() -> None:
    def make(answer: Answer) -> Answer | None:
        failed = isinstance(answer.outcome, Failed)
        return replace(answer, outcome=replace(answer.outcome, message="")) if failed else None

    assert broken(TORN, change(Answer, make), "1.0") == {"I6"}


def test_i7_a_profile_left_open() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        stopped = any(isinstance(effect, Answer) and getattr(effect.outcome, "traces", ()) for effect in effects)
        if not (isinstance(event, EngineReturned) and event.observation is not None and stopped):
            return None
        return replace(event, observation=replace(event.observation, profiling=True)), effects

    assert broken(TRAINED, edit, "0.0") == {"I7"}


def test_i8_messages_of_a_lost_agent() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        if isinstance(event, StatusReceived):
            return replace(event, peer="1.0/somebody-else"), effects
        return None

    assert broken(TRAINED, edit) == {"I8"}


def test_i8_an_unknown_peer_that_is_told_to_say_hello_is_no_violation() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        if isinstance(event, StatusReceived):
            rejected = Send(peer="1.0/somebody-else", epoch=1, seq=1, message=Rejoin(reason="say hello"))
            return replace(event, peer="1.0/somebody-else"), (rejected,)
        return None

    assert broken(TRAINED, edit) == set()


def test_i8_answers_of_unknown_peers() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        if isinstance(event, AnswersReceived):
            return replace(event, answers=(*event.answers, replace(event.answers[0], peer="5.0/nobody"))), effects
        return None

    assert broken(TRAINED, edit) == {"I8"}


@pytest.mark.parametrize("entries", [TORN, TRAINED, KILLED], ids=["torn-fleet", "trained", "killed"])
@pytest.mark.parametrize("missing", [1, 5])
def test_a_hole_in_the_log_is_no_violation(entries: tuple[LogEntry, ...], missing: int) -> None:
    journals = sorted({(entry.agent, entry.journal) for entry in entries if entry.agent})
    for journal in journals:
        for first in range(1, 30):
            hole = range(first, first + missing)
            left = [entry for entry in entries if (entry.agent, entry.journal) != journal or entry.number not in hole]
            assert [str(violation) for violation in verify(left)] == [], f"without {hole} of {journal}"


def test_checks_that_need_no_history_continue_after_a_hole() -> None:
    left = tuple(entry for entry in TRAINED if not (entry.agent == "0.1" and entry.number == 2))
    assert broken(left, change(Answer, without_rule), "0.1") == {"I6"}


def test_a_violation_says_where_and_who() -> None:
    assert str(Violation("I1", 7, ("0.0",), "generates")) == "I1 at record 7 (0.0): generates"


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"loaded": (0,)}, "does not name replica 1"),
        ({"loaded": (0, 1, 7)}, "says without proof that replica 7 serves it"),
    ],
)
def test_i11_a_report_that_is_not_true(other: dict[str, Any], text: str) -> None:
    def make(effect: Conclude) -> Conclude | None:
        return (
            replace(effect, report=replace(effect.report, **other)) if isinstance(effect.report, SyncReport) else None
        )

    (violation,) = verify(edited(TRAINED, change(Conclude, make)))
    assert violation.invariant == "I11" and text in violation.text


def test_i12_a_replica_that_went_on_with_old_weights() -> None:
    """Its engine is never seen paused for the third sync, as if its agent had been cut off."""

    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        seen = getattr(event, "observation", None)
        if seen is None or seen.generating or seen.version not in (2, 3):
            return None
        return replace(event, observation=replace(seen, generating=True, version=2)), effects

    violations = list(verify(edited(TRAINED, edit, "0.0", times=99)))
    assert {violation.invariant for violation in violations} >= {"I12"}
    assert any("generated on v2 while out of reach, after v3" in violation.text for violation in violations)
