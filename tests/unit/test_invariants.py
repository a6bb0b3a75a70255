"""Each invariant is seen to be broken, in the record of a real run in which one thing is changed."""

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from controlplane.analysis import invariants
from controlplane.analysis.invariants import Violation, verify
from controlplane.machine.events import AnswersReceived, Conclude, Publish, Send, StatusReceived
from controlplane.record.entries import LogEntry
from controlplane.replay.recorded_run import RecordedRun
from schemas.commands import Checkpoint, EngineCommand, Pushed, Target, WeightSync
from schemas.desired import Committed, Desired
from schemas.events import (
    Answer,
    CommandReceived,
    EngineObserved,
    EngineReturned,
    Event,
    Observation,
    Pause,
    Perform,
    Returned,
    SnapshotReceived,
    Started,
)
from schemas.identity import Identity, RolloutMode
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from schemas.reports import Report, SyncReport
from schemas.wire import Rejoin, decode_command, encode
from tests.unit.fleets import DONE, NO
from tests.unit.machines import PRESENT, PRIMARY, command, observed
from tests.unit.test_report import Recorded
from workers.machine.decide import decide
from workers.machine.state import AgentState

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


@pytest.mark.parametrize("tried_again", [False, True])
def test_i1_a_replica_that_did_not_pause_and_was_left_to_generate(tried_again: bool) -> None:
    """A failure excuses the decision that holds it, and nothing after it. The log goes on for two minutes."""

    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        # replica 1 is quarantined and paused; this is its agent's answer to seq 6, after which it decides nothing
        answers = [effect for effect in effects if isinstance(effect, Answer) and effect.seq == 6]
        if not (isinstance(event, EngineReturned) and answers and event.observation is not None):
            return None
        failed = replace(answers[0], outcome=Failed(ErrorKind.ENGINE_ERROR, "No."))
        again = (Perform(call_id=99, call=Pause("abort")),) if tried_again else ()
        return replace(event, observation=replace(event.observation, generating=True)), (failed, *again)

    entries = list(edited(TORN, edit, "1.0"))
    at = next(
        number
        for number, entry in enumerate(entries)
        if entry.agent == "1.0"
        and any(isinstance(effect, Answer) and effect.seq == 6 for effect in entry.typed_effects())
    )
    bus = [entry for entry in entries[at + 1 :] if not entry.agent and entry.kind == "status"][:1]
    later = [replace(entry, at_ns=entry.at_ns + 120_000_000_000) for entry in bus]
    found = [str(violation) for violation in verify([*entries[: at + 1], *later])]
    if tried_again:
        assert found == []
    else:
        (text,) = found
        assert text.startswith("I1 at record") and text.endswith(
            "(1.0): generates, though quarantined since the sync to v2; a call failed, and none followed in a minute"
        )


def test_i2_other_weights_under_the_right_number() -> None:
    assert broken(TRAINED, see(digest="0" * 64), "0.0") == {"I2"}


@pytest.mark.parametrize(("digest", "instance", "found"), [("b", "one", ["I2"]), ("a", "one", []), ("b", "two", [])])
def test_i2_other_bytes_than_before_under_a_committed_version(digest: str, instance: str, found: list[str]) -> None:
    """Also where no sync has announced a digest. Another launch may arrange the same weights in another way."""
    seen = Observation(
        engine="tiny 1", instance="one", tokenizer="present", generating=True, version=1, label="step 1", digest="a"
    )
    decided: list[Event] = [
        Started(at_ms=0, identity=Identity(replica=0, node_rank=0), incarnation="i"),
        SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=Desired(committed=Committed(1, Pushed("step 1"), None))),
        EngineObserved(at_ms=1, observation=seen),
        EngineObserved(at_ms=2, observation=replace(seen, digest=None)),
        EngineObserved(at_ms=3, observation=replace(seen, digest=digest, instance=instance)),
    ]
    entries = [recorded(number, event, ()) for number, event in enumerate(decided, start=1)]
    assert [violation.invariant for violation in verify(entries)] == found


def test_i3_two_outcomes_for_one_command() -> None:
    def edit(event: Any, effects: tuple[Any, ...]) -> Edited:
        if not any(isinstance(effect, Answer) and isinstance(effect.outcome, Acted) for effect in effects):
            return None
        (answer,) = (effect for effect in effects if isinstance(effect, Answer))
        other = replace(answer, outcome=Acted(calls=("something else",)))
        return event, (*effects, other)

    assert broken(TRAINED, edit, "0.0") == {"I3"}


def recorded(number: int, event: Event, effects: tuple[Answer, ...]) -> LogEntry:
    """A decision of agent 0.0, as the run's log has it."""
    return LogEntry(
        position=number,
        at_ns=number,
        agent="0.0",
        kind=str(event.__struct_config__.tag),
        journal="a",
        number=number,
        event=Raw(encode(event)),
        effects=Raw(encode(effects)),
    )


def decisions(count: int) -> Iterator[LogEntry]:
    """An agent that joins, and answers commands, each with an outcome of its own."""
    for number in range(1, count + 1):
        event: Event = SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=Desired())
        effects: tuple[Answer, ...] = ()
        if number > 1:
            flush = EngineCommand(operation="flush")
            event = CommandReceived(
                at_ms=number, epoch=1, origin=1, seq=number, ttl_ms=1, command=flush, target=Target()
            )
            failed = Failed(ErrorKind.ENGINE_ERROR, f"No. {number}")
            effects = (Answer(epoch=1, seq=number, outcome=failed, rule=10),)
        yield recorded(number, event, effects)


def test_many_commands_that_waited_for_a_launch_and_are_answered_at_once_count_all_the_same() -> None:
    """More than the answers that are kept: what is desired follows from all of them."""
    first, syncs = Desired(committed=Committed(1, Checkpoint("v1"), None)), range(2, invariants.ANSWERS_KEPT * 3)
    serving = Observation(engine="tiny 1", tokenizer="present", generating=True, version=syncs[-1])
    decided: list[tuple[Event, tuple[Answer, ...]]] = [
        (Started(at_ms=0, identity=Identity(replica=0, node_rank=0), incarnation="i"), ()),
        (SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=first), ()),
    ]
    for version in syncs:
        commit = WeightSync(phase="commit", version=version, source=Checkpoint(f"v{version}"))
        received = CommandReceived(at_ms=0, epoch=1, origin=1, seq=version, ttl_ms=1, command=commit, target=Target())
        decided.append((received, ()))
    skipped = Skipped(Reason.SUPERSEDED)
    answers = tuple(Answer(epoch=1, seq=version, outcome=skipped, rule=10) for version in syncs)
    decided.append((EngineObserved(at_ms=1, observation=serving), answers))
    entries = [recorded(number, *decision) for number, decision in enumerate(decided, start=1)]
    assert [str(found) for found in verify(entries)] == []


def test_the_memory_of_a_check_does_not_grow_with_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "INTERNED_MAX", 256)
    sizes = []

    def measured() -> Iterator[LogEntry]:
        for entry in decisions(6_000):
            if entry.position % 2_000 == 0:
                sizes.append(tracemalloc.get_traced_memory()[0])
            yield entry

    tracemalloc.start()
    try:
        assert list(verify(measured())) == []
    finally:
        tracemalloc.stop()
    assert sizes[-1] - sizes[0] < 50_000, "4,000 answers are a megabyte"


@pytest.mark.parametrize(
    ("seq", "other"), [(2, {"seq": 3}), (2, {"seq": 1}), (1, {"epoch": 9})], ids=["hole", "back", "older epoch"]
)
def test_i4_seq_and_epoch_go_up(seq: int, other: dict[str, int]) -> None:
    """An epoch of 9 in the first command makes that of all others older."""
    edit = change(Publish, lambda effect: replace(effect, **other) if effect.seq == seq else None)
    assert "I4" in broken(TRAINED, edit)


@pytest.mark.parametrize("same", [False, True], ids=["other weights", "the same weights, for those that missed them"])
def test_i4_a_committed_version_never_goes_back(same: bool) -> None:
    def make(effect: Publish) -> Publish | None:
        command = decode_command(effect.envelope.body)
        if not isinstance(command, WeightSync) or command.phase != "commit":
            return None
        source = Checkpoint("the same") if same else command.source
        body = Raw(encode(replace(command, version=99, source=source, manifest=None)))
        return replace(effect, envelope=replace(effect.envelope, body=body))

    assert ("I4" in broken(TRAINED, change(Publish, make), times=99)) is not same


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


def test_a_violation_says_where_and_of_which_agent() -> None:
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


def forgotten(bus: Recorded, **other: Any) -> list[str]:
    """What the checker says of a run, as it was, and with something left out of its last sync report."""
    assert [str(violation) for violation in verify(bus.entries)] == []
    *earlier, last = bus.entries
    effects = tuple(
        replace(effect, report=replace(effect.report, **other))
        if isinstance(effect, Conclude) and isinstance(effect.report, SyncReport)
        else effect
        for effect in last.typed_effects()
    )
    found = list(verify([*earlier, replace(last, effects=Raw(encode(effects)))]))
    assert {violation.invariant for violation in found} == {"I11"}
    return [violation.text for violation in found]


def test_i11_a_report_that_keeps_back_that_a_replica_is_paused() -> None:
    bus = Recorded("0.0", "1.0")
    bus.issue(EngineCommand(operation="pause"), target=Target(replicas=frozenset({1})), operator=True)
    bus.answer(a0_0=Skipped(Reason.NOT_TARGETED), a1_0=DONE)
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE)
    assert forgotten(bus, stopped=()) == ["the report of v1 does not say that replica 1 is paused or asleep"]


def test_i11_a_replica_that_comes_back_in_another_mode_was_told_nothing_yet() -> None:
    bus = Recorded("0.0")
    bus.arrive("1.0", mode=RolloutMode.COLOCATED)
    bus.issue(EngineCommand(operation="pause"), target=Target(replicas=frozenset({1})), operator=True)
    bus.answer(a0_0=Skipped(Reason.NOT_TARGETED), a1_0=DONE)
    bus.lose("1.0")
    bus.hello("1.0", "b", mode=RolloutMode.HYBRID)
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE)
    assert bus.synced[-1].status == "committed"
    assert [str(violation) for violation in verify(bus.entries)] == []


def test_i11_an_aborted_report_that_keeps_back_a_replica_in_quarantine() -> None:
    bus = Recorded("0.0", "1.0", "2.0")
    bus.sync(1)
    for left_out in (DONE, NO, DONE):
        bus.answer(a0_0=DONE, a1_0=DONE, a2_0=left_out)
    bus.sync(2)
    bus.answer(a0_0=NO, a1_0=NO, a2_0=DONE)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE)
    assert forgotten(bus, quarantined=()) == ["the report of v2 does not name replica 2, which is in quarantine"]


def test_i11_a_replica_that_served_the_version_before_is_proven_by_that() -> None:
    stale, others = Skipped(Reason.STALE_VERSION), Skipped(Reason.NOT_TARGETED)
    bus = Recorded("0.0", "1.0")
    bus.sync(1, target=Target(replicas=frozenset({1})))
    for _ in range(3):
        bus.answer(a0_0=others, a1_0=DONE)
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=stale)
    assert bus.synced[0].loaded == (0, 1)
    assert forgotten(bus, loaded=(0,)) == ["the report of v1 does not name replica 1"]


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


def test_i12_an_engine_that_comes_up_is_not_blamed_for_commits_that_waited_for_it() -> None:
    """A server that was launched again serves the weights of its launch until it is paused. Later commits count."""

    def sync(version: int, at: int) -> list[CommandReceived]:
        source = Checkpoint("w")
        phases = (
            WeightSync(phase="prepare", version=version, source=source),
            WeightSync(phase="load", version=version),
            WeightSync(phase="commit", version=version, source=source),
        )
        return [command(phase, at + number) for number, phase in enumerate(phases)]

    def returned(call_id: int, seen: Observation) -> EngineReturned:
        return EngineReturned(at_ms=1, call_id=call_id, result=Returned(), observation=seen)

    def found(*events: Event) -> list[str]:
        state, entries = AgentState(), []
        launching = Observation(engine="tiny", tokenizer="unknown")
        joined = SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired())
        begun = (Started(at_ms=0, identity=PRIMARY, incarnation="a"), observed(launching), joined)
        for number, event in enumerate((*begun, *events), start=1):
            state, effects = decide(state, event)
            kind, made = str(type(event).__struct_config__.tag), (Raw(encode(event)), Raw(encode(effects)))
            place: dict[str, Any] = {"position": number, "number": number, "agent": "0.0", "journal": "j"}
            entries.append(LogEntry(at_ns=1, kind=kind, event=made[0], effects=made[1], **place))
        return [str(violation) for violation in verify(entries)]

    paused = replace(PRESENT, generating=False)
    first, second, third = sync(1, 1), sync(2, 4), sync(3, 7)
    up = (observed(PRESENT), returned(1, PRESENT))
    assert found(*first, *up, second[0], returned(2, paused)) == []
    (text,) = found(*first, *up, *second, third[0], returned(2, paused))
    assert "I12" in text and "generated on v0 while out of reach, after v2 was committed" in text
