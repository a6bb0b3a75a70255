"""The decision table, rule by rule, in the order of `docs/decision-table.md`. Each rule has a test of its number."""

import re
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from schemas.commands import (
    Checkpoint,
    Command,
    EngineCommand,
    EpochStart,
    ProfileCommand,
    ProfilePlan,
    Target,
    UnknownCommand,
)
from schemas.desired import Committed, Desired
from schemas.events import Answer, EngineObserved, EngineReturned, Event, Perform, RequestResend, Returned, Tick
from schemas.identity import Identity, Operation, RolloutMode
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped, Trace
from tests.unit.machines import (
    PRESENT,
    SECOND,
    START,
    STOP,
    agent,
    answers,
    carry_out,
    command,
    fault,
    fold,
    manifest,
    sync,
)
from workers.machine.decide import ELIGIBILITY, ORDER, REACTIONS
from workers.machine.state import AgentState, call_name
from workers.machine.suppressed import still_desired

DOCUMENT = (Path(__file__).parents[2] / "docs" / "decision-table.md").read_text("utf-8")
PAUSE, RESUME, FLUSH, ABORT = (EngineCommand(operation=name) for name in ("pause", "resume", "flush", "abort"))


def decided(state: AgentState, body: Command | UnknownCommand, **how: object) -> Answer:
    """Return the answer to a command that is answered at once."""
    _, effects = fold(state, command(body, **how))  # type: ignore[arg-type]
    (answer,) = answers(effects)
    return answer


def skipped(rule: int, reason: Reason) -> tuple[int, Outcome]:
    return rule, Skipped(reason)


def rule_and_outcome(answer: Answer) -> tuple[int, Outcome]:
    return answer.rule, answer.outcome


def test_every_kind_of_event_has_a_reaction() -> None:
    assert set(REACTIONS) == set(get_args(Event))


# --- order: rules 1 to 3 ----------------------------------------------------------------------------------------------


def test_rule_1_an_older_epoch_is_refused_and_leaves_no_mark() -> None:
    state = agent(epoch=2)
    after, effects = fold(state, command(PAUSE, epoch=1))
    assert [rule_and_outcome(answer) for answer in answers(effects)] == [skipped(1, Reason.STALE_EPOCH)]
    assert after == state


def test_rule_1_applies_before_all_others_even_to_other_targets() -> None:
    state = agent(SECOND, epoch=2)
    answer = decided(state, PAUSE, epoch=1, target=Target(replicas=frozenset({9})))
    assert rule_and_outcome(answer) == skipped(1, Reason.STALE_EPOCH)


def test_rule_1_a_skipped_command_of_a_new_epoch_fences_the_old_one() -> None:
    """A sketch that noted the epoch only when it acted obeyed a dead trainer."""
    state, _ = fold(agent(), command(PAUSE, 1, epoch=2, target=Target(replicas=frozenset({9}))))
    assert rule_and_outcome(decided(state, PAUSE, seq=2, epoch=1)) == skipped(1, Reason.STALE_EPOCH)


def test_rule_2_a_second_copy_gets_the_stored_outcome() -> None:
    state, first = fold(agent(SECOND), command(PAUSE))
    after, second = fold(state, command(PAUSE))
    assert answers(first) == answers(second) and after == state


def test_rule_2_a_copy_of_a_command_being_carried_out_gets_no_second_answer() -> None:
    state, _ = fold(agent(), command(PAUSE))
    assert fold(state, command(PAUSE)) == (state, [])


def test_rule_2_a_command_that_a_snapshot_replaced_is_superseded() -> None:
    assert rule_and_outcome(decided(agent(seq=5), PAUSE, seq=3)) == skipped(2, Reason.SUPERSEDED)


def test_rule_3_a_command_behind_a_hole_is_buffered_and_the_hole_requested() -> None:
    state, effects = fold(agent(SECOND), command(FLUSH, 3))
    assert effects == [RequestResend(1)] and state.seq == 0
    state, effects = fold(state, command(PAUSE, 1), command(RESUME, 2))
    assert [answer.seq for answer in answers(effects)] == [1, 2, 3] and state.seq == 3


# --- eligibility: rules 4 to 9 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [PAUSE, START, sync("prepare")], ids=["engine", "profile", "weights"])
def test_rule_4_a_command_that_arrives_too_late_expires(body: Command) -> None:
    assert rule_and_outcome(decided(agent(), body, ttl_ms=0)) == skipped(4, Reason.EXPIRED)


def test_rule_4_a_command_may_expire_in_the_queue() -> None:
    state, _ = fold(agent(), command(PAUSE, 1, ttl_ms=5000), command(START, 2, at_ms=1, ttl_ms=10))
    assert state.activity is not None
    done = EngineReturned(
        at_ms=100, call_id=state.activity.call_id, result=Returned(), observation=replace(PRESENT, generating=False)
    )
    _, effects = fold(state, done)
    assert [(answer.seq, answer.rule) for answer in answers(effects)] == [(1, 10), (2, 4)]


def test_rule_5_a_command_for_other_replicas_is_skipped() -> None:
    answer = decided(agent(), PAUSE, target=Target(replicas=frozenset({1, 2})))
    assert rule_and_outcome(answer) == skipped(5, Reason.NOT_TARGETED)


@pytest.mark.parametrize("tokenizer", ["present", "absent", "unknown"])
@pytest.mark.parametrize("body", [PAUSE, START, STOP, sync("prepare"), sync("commit")])
def test_rule_6_a_higher_node_rank_never_acts_whatever_its_tokenizer(tokenizer: str, body: Command) -> None:
    seen = replace(PRESENT, tokenizer=tokenizer)
    assert rule_and_outcome(decided(agent(SECOND, seen), body)) == skipped(6, Reason.NOT_PRIMARY)


def test_rule_7_commands_wait_while_the_engine_launches() -> None:
    launching = replace(PRESENT, tokenizer="unknown")
    state, effects = fold(agent(seen=launching), command(PAUSE))
    assert effects == [] and state.seq == 1
    state, effects = fold(state, EngineObserved(at_ms=5, observation=PRESENT))
    assert [type(effect) for effect in effects] == [Perform]


def test_rule_7_a_waiting_command_fails_when_its_time_is_over() -> None:
    state, _ = fold(agent(seen=replace(PRESENT, tokenizer="unknown")), command(PAUSE, ttl_ms=50))
    _, effects = fold(state, Tick(at_ms=50))
    (answer,) = answers(effects)
    assert answer.rule == 7
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.ENGINE_NOT_READY


def test_rule_8_a_primary_without_a_tokenizer_fails_and_says_where_to_look() -> None:
    answer = decided(agent(seen=replace(PRESENT, tokenizer="absent")), START)
    assert answer.rule == 8
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.TOKENIZER_MISSING
    assert "check how it was launched" in answer.outcome.message


@pytest.mark.parametrize(
    ("body", "lacks"),
    [
        (START, Operation.PROFILE),
        (PAUSE, Operation.PAUSE),
        (sync("prepare"), Operation.LOAD),
        (sync("prepare"), Operation.PAUSE),
        (FLUSH, Operation.FLUSH),
        (EngineCommand(operation="sleep"), Operation.SLEEP),
    ],
)
def test_rule_9_an_operation_that_the_engine_lacks_is_named(body: Command, lacks: Operation) -> None:
    seen = replace(PRESENT, operations=frozenset(Operation) - {lacks})
    answer = decided(agent(seen=seen), body)
    assert answer.rule == 9
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.UNSUPPORTED
    assert f"tiny 1 has no operation {lacks}" in answer.outcome.message


def test_rule_9_a_command_of_a_newer_bus_is_unsupported() -> None:
    answer = decided(agent(), UnknownCommand("teleport"))
    assert answer.rule == 9 and isinstance(answer.outcome, Failed)
    assert "does not know the command 'teleport'" in answer.outcome.message


# --- rule 10: profiles ------------------------------------------------------------------------------------------------

PROFILING = replace(PRESENT, profiling=True)


def profiling(step: int = 3) -> AgentState:
    """An agent with an open session."""
    state, effects = fold(agent(), command(ProfileCommand(action="start", step=step)))
    state, calls, _ = carry_out(state, effects)
    assert [call_name(call) for call in calls] == ["start_profile"]
    return state


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (ProfilePlan(enabled=False), Reason.DISABLED),
        (ProfilePlan(steps=frozenset({1, 2})), Reason.STEP_NOT_SELECTED),
        (ProfilePlan(ranks=frozenset({2, 3})), Reason.RANK_NOT_SELECTED),
        (ProfilePlan(tool="nsys"), Reason.TOOL_UNSUPPORTED),
        (ProfilePlan(enabled=False, steps=frozenset({1}), tool="nsys"), Reason.DISABLED),
        (ProfilePlan(steps=frozenset(), ranks=frozenset({9}), tool="nsys"), Reason.STEP_NOT_SELECTED),
        (ProfilePlan(ranks=frozenset(), tool="nsys"), Reason.RANK_NOT_SELECTED),
    ],
)
def test_rule_10_a_profile_that_does_not_concern_the_replica_is_skipped(plan: ProfilePlan, reason: Reason) -> None:
    assert rule_and_outcome(decided(agent(), ProfileCommand(action="start", step=3, plan=plan))) == skipped(10, reason)


def test_rule_10_a_session_of_the_same_step_is_open_already() -> None:
    answer = decided(profiling(), START, seq=2)
    assert rule_and_outcome(answer) == skipped(10, Reason.ALREADY_PROFILING)


def test_rule_10_a_session_of_another_step_is_stopped_first() -> None:
    state, effects = fold(profiling(step=2), command(START, 2))
    _, calls, _ = carry_out(state, effects, PROFILING)
    assert [call_name(call) for call in calls] == ["stop_profile", "start_profile"]
    assert answers(effects)[-1].outcome == Acted(calls=("stop_profile", "start_profile"))


def test_rule_10_a_stop_without_a_session_is_skipped() -> None:
    assert rule_and_outcome(decided(agent(), STOP)) == skipped(10, Reason.NOT_PROFILING)


def test_rule_10_a_stop_is_never_skipped_because_of_a_window() -> None:
    """The engine may have closed the session by itself, and may not have reached the window's end."""
    state, effects = fold(profiling(), command(STOP, 2))
    (perform,) = (effect for effect in effects if isinstance(effect, Perform))
    trace = Trace("global_step_3/replica_0/t.json", 9, "aa")
    closed = Returned(auto_stopped=True, traces=(trace,))
    _, effects = fold(state, EngineReturned(at_ms=1, call_id=perform.call_id, result=closed, observation=PRESENT))
    assert answers(effects)[0].outcome == Acted(calls=("stop_profile",), auto_stopped=True, traces=(trace,))


# --- rule 10: weights -------------------------------------------------------------------------------------------------


def synced(version: int = 1, *phases: str) -> AgentState:
    """Return an agent after these phases of a sync."""
    state, seen = agent(), PRESENT
    for seq, phase in enumerate(phases, start=1):
        state, effects = fold(state, command(sync(phase, version), seq))
        state, _, seen = carry_out(state, effects, seen)
    return state


def test_rule_10_a_sync_goes_prepare_load_commit() -> None:
    state, seen, calls_made = agent(), PRESENT, []
    for seq, phase in enumerate(("prepare", "load", "commit"), start=1):
        state, effects = fold(state, command(sync(phase), seq))
        state, calls, seen = carry_out(state, effects, seen)
        calls_made.append([call_name(call) for call in calls])
        outcome = answers(effects)[-1].outcome
        assert isinstance(outcome, Acted) and outcome.version == (0 if phase == "prepare" else 1)
    assert calls_made == [["check_source", "pause"], ["load"], ["flush", "resume"]]


def test_rule_10_an_abort_with_nothing_committed_leaves_the_replica_paused() -> None:
    state = synced(1, "prepare", "load")
    state, effects = fold(state, command(sync("abort"), 3))
    _, calls, seen = carry_out(state, effects, replace(PRESENT, generating=False, version=1))
    assert not seen.generating  # nothing was committed that it could go back to


def test_rule_10_a_colocated_replica_skips_syncs() -> None:
    judge = Identity(replica=0, node_rank=0, mode=RolloutMode.COLOCATED)
    assert rule_and_outcome(decided(agent(judge), sync("prepare"))) == skipped(10, Reason.MODE_NEVER_SYNCS)
    busy, _ = fold(agent(judge), command(FLUSH, 1, ttl_ms=50), Tick(at_ms=50))
    busy = replace(busy, engine=replace(busy.engine, version=3))
    state, effects = fold(busy, command(sync("abort"), 2, at_ms=60))
    assert rule_and_outcome(answers(effects)[0]) == skipped(10, Reason.MODE_NEVER_SYNCS)
    assert still_desired(state.desired, state.suppressed).serving, "no sync would lift its quarantine"


@pytest.mark.parametrize("version", [4, 5])
def test_rule_10_a_version_that_is_not_newer_is_stale(version: int) -> None:
    desired = Desired(committed=Committed(5, Checkpoint("v5"), manifest(5)))
    state = agent(seen=replace(PRESENT, version=5), desired=desired)
    assert rule_and_outcome(decided(state, sync("prepare", version))) == skipped(10, Reason.STALE_VERSION)


def test_rule_10_a_load_that_was_not_prepared_is_refused() -> None:
    outcome = decided(agent(), sync("load")).outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.NO_SUCH_SYNC


def test_rule_10_weights_that_are_asleep_are_not_synced() -> None:
    desired = Desired(asleep=frozenset({"weights"}))
    asleep = replace(PRESENT, asleep=frozenset({"weights"}), generating=False)
    outcome = decided(agent(seen=asleep, desired=desired), sync("prepare")).outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.WEIGHTS_ASLEEP


def test_rule_10_a_replica_in_quarantine_is_paused_and_then_skips() -> None:
    state, effects = fold(agent(), command(sync("load", 1, frozenset({0})), 1))
    state, calls, seen = carry_out(state, effects)
    assert [call_name(call) for call in calls] == ["pause"] and not seen.generating
    _, effects = fold(state, command(sync("commit", 1, frozenset({0})), 2))
    assert rule_and_outcome(answers(effects)[0]) == skipped(10, Reason.QUARANTINED)


def test_rule_10_an_abort_that_leaves_an_older_quarantine_says_so() -> None:
    """Else its bus would take it for a replica that serves, until the heartbeat that follows."""
    state, effects = fold(agent(desired=Desired(committed=Committed(1, Checkpoint("v1"), None))))
    state, _ = fault(state, seen=replace(PRESENT, generating=False))
    assert state.suppressed.quarantined == 1
    for seq, phase in enumerate(("prepare", "abort"), 1):
        state, effects = fold(state, command(sync(phase, 2), seq))
        state, _, _ = carry_out(state, effects, replace(PRESENT, generating=False))
    assert rule_and_outcome(answers(effects)[-1]) == skipped(10, Reason.QUARANTINED)


# --- rule 10: the engine itself ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), [("pause", "pause"), ("sleep", "sleep"), (None, "resume"), (None, "wake")]
)
def test_rule_10_a_command_whose_effect_already_holds_is_skipped(first: str | None, second: str) -> None:
    state, seen = agent(), PRESENT
    if first is not None:
        state, effects = fold(state, command(EngineCommand(operation=first), 1))  # type: ignore[arg-type]
        state, _, seen = carry_out(state, effects, seen)
    _, effects = fold(state, command(EngineCommand(operation=second), state.seq + 1))  # type: ignore[arg-type]
    assert [rule_and_outcome(answer) for answer in answers(effects)] == [skipped(10, Reason.ALREADY)]


@pytest.mark.parametrize("operation", ["flush", "abort"])
def test_rule_10_flush_and_abort_are_carried_out_each_time(operation: str) -> None:
    state, seen = agent(), PRESENT
    for seq in (1, 2):
        state, effects = fold(state, command(EngineCommand(operation=operation), seq))  # type: ignore[arg-type]
        state, calls, seen = carry_out(state, effects, seen)
        assert [call_name(call) for call in calls] == [operation]


@pytest.mark.parametrize("operation", ["pause", "resume", "sleep", "wake"])
def test_rule_10_engine_commands_fail_during_a_sync(operation: str) -> None:
    state = synced(1, "prepare")
    _, effects = fold(state, command(EngineCommand(operation=operation), 2))  # type: ignore[arg-type]
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.SYNC_IN_PROGRESS


def test_rule_10_a_resume_does_not_lead_out_of_quarantine() -> None:
    state, effects = fold(agent(), command(sync("load", 1, frozenset({0})), 1))
    state, _, _ = carry_out(state, effects)
    _, effects = fold(state, command(RESUME, 2))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.QUARANTINED


def test_rule_10_commands_fail_at_once_while_an_overdue_call_is_awaited() -> None:
    state, _ = fold(agent(), command(PAUSE, 1, ttl_ms=50), Tick(at_ms=50))
    _, effects = fold(state, command(FLUSH, 2, at_ms=60))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.ENGINE_BUSY


def test_rule_10_an_epoch_start_ends_what_the_previous_trainer_left_paused() -> None:
    state, effects = fold(agent(), command(PAUSE, 1))
    state, _, seen = carry_out(state, effects)
    state, effects = fold(state, command(EpochStart(previous_epoch=1, logic=1), 2, epoch=2))
    _, calls, seen = carry_out(state, effects, seen)
    assert [call_name(call) for call in calls] == ["resume"] and seen.generating


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_page_has_ten_rules_in_order() -> None:
    rules = [int(number) for number in re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)]
    assert rules == list(range(1, 11)) == [number for number, _ in (*ORDER, *ELIGIBILITY)]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (1, {Reason.STALE_EPOCH}),
        (2, {Reason.SUPERSEDED}),
        (4, {Reason.EXPIRED}),
        (5, {Reason.NOT_TARGETED, Reason.OBSERVING, Reason.NOT_AN_ENGINE}),
        (6, {Reason.NOT_PRIMARY}),
        (7, {ErrorKind.ENGINE_NOT_READY}),
        (8, {ErrorKind.TOKENIZER_MISSING}),
        (9, {ErrorKind.UNSUPPORTED}),
    ],
)
def test_each_rule_of_the_page_has_its_own_answer(rule: int, words: set[str]) -> None:
    (line,) = re.findall(rf"^\| {rule} \|.*$", DOCUMENT, re.MULTILINE)
    answers_in_line = set(re.findall(r"`(\w+)`", line))
    assert answers_in_line & {*Reason, *ErrorKind} == words


def test_the_page_names_every_reason_and_every_error() -> None:
    for word in [*Reason, *ErrorKind]:
        assert f"`{word}`" in DOCUMENT, f"docs/decision-table.md does not say when an agent answers {word}"


def test_every_rule_has_a_test_that_names_it() -> None:
    tested = {int(number) for name in globals() for number in re.findall(r"^test_rule_(\d+)_", name)}
    assert tested == set(range(1, 11))
