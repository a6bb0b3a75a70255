"""The decision table, rule by rule, in the order of `docs/decision-table.md`. Each rule has a test of its number."""

import re
from pathlib import Path

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
from schemas.events import Answer, EngineObserved, EngineReturned, Perform, RequestResend, Returned, Tick
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
    fold,
    manifest,
    sync,
)
from workers.machine.gate import GATE
from workers.machine.state import AgentState

DOCUMENT = (Path(__file__).parents[2] / "docs" / "decision-table.md").read_text("utf-8")
PAUSE, RESUME, FLUSH, ABORT = (EngineCommand(operation=one) for one in ("pause", "resume", "flush", "abort"))


def decided(state: AgentState, body: Command | UnknownCommand, **how: object) -> Answer:
    """The answer to one command that is answered at once. What is desired may have changed by it, and is settled."""
    _, effects = fold(state, command(body, **how))  # type: ignore[arg-type]
    (answer,) = answers(effects)
    return answer


def skipped(row: int, reason: Reason) -> tuple[int, Outcome]:
    return row, Skipped(reason)


def said(answer: Answer) -> tuple[int, Outcome]:
    return answer.rule, answer.outcome


# --- order: rows 1 to 3 -----------------------------------------------------------------------------------------------


def test_row_1_an_older_epoch_is_refused_and_leaves_no_mark() -> None:
    state = agent(epoch=2)
    after, effects = fold(state, command(PAUSE, epoch=1))
    assert [said(one) for one in answers(effects)] == [skipped(1, Reason.STALE_EPOCH)]
    assert after == state


def test_row_1_comes_before_all_others_also_for_other_targets() -> None:
    state = agent(SECOND, epoch=2)
    answer = decided(state, PAUSE, epoch=1, target=Target(replicas=frozenset({9})))
    assert said(answer) == skipped(1, Reason.STALE_EPOCH)


def test_row_1_a_skipped_command_of_a_new_epoch_fences_the_old_one() -> None:
    """A sketch that noted the epoch only when it acted obeyed a dead trainer."""
    state, _ = fold(agent(), command(PAUSE, 1, epoch=2, target=Target(replicas=frozenset({9}))))
    assert said(decided(state, PAUSE, seq=2, epoch=1)) == skipped(1, Reason.STALE_EPOCH)


def test_row_2_a_second_copy_gets_the_stored_outcome() -> None:
    state, first = fold(agent(SECOND), command(PAUSE))
    after, second = fold(state, command(PAUSE))
    assert answers(first) == answers(second) and after == state


def test_row_2_a_copy_of_what_is_under_way_gets_no_second_answer() -> None:
    state, _ = fold(agent(), command(PAUSE))
    assert fold(state, command(PAUSE)) == (state, [])


def test_row_2_what_a_snapshot_stands_for_is_superseded() -> None:
    assert said(decided(agent(seq=5), PAUSE, seq=3)) == skipped(2, Reason.SUPERSEDED)


def test_row_3_a_hole_is_held_and_asked_for() -> None:
    state, effects = fold(agent(SECOND), command(FLUSH, 3))
    assert effects == [RequestResend(1)] and state.seq == 0
    state, effects = fold(state, command(PAUSE, 1), command(RESUME, 2))
    assert [one.seq for one in answers(effects)] == [1, 2, 3] and state.seq == 3


# --- eligibility: rows 4 to 9 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [PAUSE, START, sync("prepare")], ids=["engine", "profile", "weights"])
def test_row_4_what_comes_too_late_expires(body: Command) -> None:
    assert said(decided(agent(), body, ttl_ms=0)) == skipped(4, Reason.EXPIRED)


def test_row_4_a_command_that_expired_in_the_queue_is_answered_so() -> None:
    state, _ = fold(agent(), command(PAUSE, 1, ttl_ms=5000), command(START, 2, at_ms=1, ttl_ms=10))
    assert state.activity is not None
    done = EngineReturned(
        at_ms=100,
        call_id=state.activity.call_id,
        result=Returned(),
        observation=replace(PRESENT, generating=False),
    )
    _, effects = fold(state, done)
    assert [(one.seq, one.rule) for one in answers(effects)] == [(1, 10), (2, 4)]


def test_row_5_another_replicas_command_is_not_for_us() -> None:
    answer = decided(agent(), PAUSE, target=Target(replicas=frozenset({1, 2})))
    assert said(answer) == skipped(5, Reason.NOT_TARGETED)


def test_rows_4_to_9_move_the_position() -> None:
    state, _ = fold(agent(), command(PAUSE, target=Target(replicas=frozenset({1}))))
    assert state.seq == 1


@pytest.mark.parametrize("tokenizer", ["present", "absent", "unknown"])
@pytest.mark.parametrize("body", [PAUSE, START, STOP, sync("prepare"), sync("commit")])
def test_row_6_a_higher_node_rank_never_acts_whatever_its_tokenizer(tokenizer: str, body: Command) -> None:
    seen = replace(PRESENT, tokenizer=tokenizer)
    assert said(decided(agent(SECOND, seen), body)) == skipped(6, Reason.NOT_PRIMARY)


def test_row_7_an_engine_that_still_launches_holds_its_commands() -> None:
    launching = replace(PRESENT, tokenizer="unknown")
    state, effects = fold(agent(seen=launching), command(PAUSE))
    assert effects == [] and state.seq == 1
    state, effects = fold(state, EngineObserved(at_ms=5, observation=PRESENT))
    assert [type(one) for one in effects] == [Perform]


def test_row_7_until_their_time_is_over() -> None:
    state, _ = fold(agent(seen=replace(PRESENT, tokenizer="unknown")), command(PAUSE, ttl_ms=50))
    _, effects = fold(state, Tick(at_ms=50))
    (answer,) = answers(effects)
    assert answer.rule == 7
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.ENGINE_NOT_READY


def test_row_8_a_primary_without_a_tokenizer_fails_and_says_where_to_look() -> None:
    answer = decided(agent(seen=replace(PRESENT, tokenizer="absent")), START)
    assert answer.rule == 8
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.TOKENIZER_MISSING
    assert "look at its launch" in answer.outcome.message


@pytest.mark.parametrize(
    ("body", "lacks"),
    [
        (START, Operation.PROFILE),
        (PAUSE, Operation.PAUSE),
        (sync("prepare"), Operation.LOAD),
        (sync("prepare"), Operation.PAUSE),
        (FLUSH, Operation.FLUSH),
    ],
)
def test_row_9_an_operation_that_the_engine_lacks_is_named(body: Command, lacks: Operation) -> None:
    seen = replace(PRESENT, operations=frozenset(Operation) - {lacks})
    answer = decided(agent(seen=seen), body)
    assert answer.rule == 9
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.UNSUPPORTED
    assert f"tiny 1 has no operation {lacks}" in answer.outcome.message


def test_row_9_a_command_of_a_newer_bus_is_unsupported() -> None:
    answer = decided(agent(), UnknownCommand("teleport"))
    assert answer.rule == 9 and isinstance(answer.outcome, Failed)
    assert "knows no command 'teleport'" in answer.outcome.message


# --- row 10: profiles -------------------------------------------------------------------------------------------------

PROFILING = replace(PRESENT, profiling=True)


def profiling(step: int = 3) -> AgentState:
    """An agent with an open session."""
    state, effects = fold(agent(), command(ProfileCommand(action="start", step=step)))
    state, calls, _ = carry_out(state, effects)
    assert [str(one.__struct_config__.tag) for one in calls] == ["start_profile"]
    return state


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (ProfilePlan(enabled=False), Reason.DISABLED),
        (ProfilePlan(steps=frozenset({1, 2})), Reason.STEP_NOT_SELECTED),
        (ProfilePlan(ranks=frozenset({2, 3})), Reason.RANK_NOT_SELECTED),
        (ProfilePlan(tool="nsys"), Reason.TOOL_UNSUPPORTED),
        (ProfilePlan(enabled=False, steps=frozenset({1})), Reason.DISABLED),
        (ProfilePlan(steps=frozenset({1}), ranks=frozenset({9})), Reason.STEP_NOT_SELECTED),
    ],
)
def test_row_10_a_profile_that_does_not_concern_the_replica_is_skipped(plan: ProfilePlan, reason: Reason) -> None:
    assert said(decided(agent(), ProfileCommand(action="start", step=3, plan=plan))) == skipped(10, reason)


def test_row_10_ranks_are_global_and_a_replica_owns_those_of_all_its_nodes() -> None:
    place = Identity(replica=4, node_rank=0, nnodes=1, gpus_per_node=2)
    chosen = ProfileCommand(action="start", step=3, plan=ProfilePlan(ranks=frozenset({0, 8})))
    _, effects = fold(agent(place), command(chosen))
    assert [type(one) for one in effects] == [Perform]


def test_row_10_a_session_of_the_same_step_is_open_already() -> None:
    answer = decided(profiling(), START, seq=2)
    assert said(answer) == skipped(10, Reason.ALREADY_PROFILING)


def test_row_10_a_session_of_another_step_is_stopped_first() -> None:
    state, effects = fold(profiling(step=2), command(START, 2))
    _, calls, _ = carry_out(state, effects, PROFILING)
    assert [str(one.__struct_config__.tag) for one in calls] == ["stop_profile", "start_profile"]
    assert answers(effects)[-1].outcome == Acted(calls=("stop_profile", "start_profile"))


def test_row_10_a_stop_without_a_session_is_skipped() -> None:
    assert said(decided(agent(), STOP)) == skipped(10, Reason.NOT_PROFILING)


def test_row_10_a_stop_is_never_skipped_because_a_window_was_set() -> None:
    """The engine may have closed the session by itself, and may not have reached the window's end."""
    state, effects = fold(profiling(), command(STOP, 2))
    (perform,) = (one for one in effects if isinstance(one, Perform))
    trace = Trace("global_step_3/replica_0/t.json", 9, "aa")
    closed = Returned(auto_stopped=True, traces=(trace,))
    _, effects = fold(state, EngineReturned(at_ms=1, call_id=perform.call_id, result=closed, observation=PRESENT))
    assert answers(effects)[0].outcome == Acted(calls=("stop_profile",), auto_stopped=True, traces=(trace,))


# --- row 10: weights --------------------------------------------------------------------------------------------------


def synced(version: int = 1, *phases: str) -> AgentState:
    """An agent that went through these phases of a sync."""
    state, seen = agent(), PRESENT
    for seq, phase in enumerate(phases, start=1):
        state, effects = fold(state, command(sync(phase, version), seq))
        state, _, seen = carry_out(state, effects, seen)
    return state


def test_row_10_a_sync_goes_prepare_load_commit() -> None:
    state, seen, made = agent(), PRESENT, []
    for seq, phase in enumerate(("prepare", "load", "commit"), start=1):
        state, effects = fold(state, command(sync(phase), seq))
        state, calls, seen = carry_out(state, effects, seen)
        made.append([str(one.__struct_config__.tag) for one in calls])
        outcome = answers(effects)[-1].outcome
        assert isinstance(outcome, Acted) and outcome.version == (0 if phase == "prepare" else 1)
    assert made == [["check_source", "pause"], ["load"], ["flush", "resume"]]


def test_row_10_an_abort_puts_the_replica_back() -> None:
    state = synced(1, "prepare", "load")
    state, effects = fold(state, command(sync("abort"), 3))
    _, calls, seen = carry_out(state, effects, replace(PRESENT, generating=False, version=1))
    assert not seen.generating  # nothing was ever committed, so there is nothing to go back to: it may not serve


def test_row_10_a_replica_that_never_syncs_says_so() -> None:
    judge = Identity(replica=0, node_rank=0, mode=RolloutMode.COLOCATED)
    assert said(decided(agent(judge), sync("prepare"))) == skipped(10, Reason.MODE_NEVER_SYNCS)


@pytest.mark.parametrize("version", [4, 5])
def test_row_10_a_version_that_is_not_newer_is_stale(version: int) -> None:
    desired = Desired(committed=Committed(5, Checkpoint("v5"), manifest(5)))
    state = agent(seen=replace(PRESENT, version=5), desired=desired)
    assert said(decided(state, sync("prepare", version))) == skipped(10, Reason.STALE_VERSION)


def test_row_10_a_load_that_was_not_prepared_is_refused() -> None:
    outcome = decided(agent(), sync("load")).outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.NO_SUCH_SYNC


def test_row_10_weights_that_are_asleep_are_not_synced() -> None:
    desired = Desired(asleep=frozenset({"weights"}))
    asleep = replace(PRESENT, asleep=frozenset({"weights"}), generating=False)
    outcome = decided(agent(seen=asleep, desired=desired), sync("prepare")).outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.WEIGHTS_ASLEEP


def test_row_10_a_replica_in_quarantine_is_paused_and_then_skips() -> None:
    state, effects = fold(agent(), command(sync("load", 1, frozenset({0})), 1))
    state, calls, seen = carry_out(state, effects)
    assert [str(one.__struct_config__.tag) for one in calls] == ["pause"] and not seen.generating
    _, effects = fold(state, command(sync("commit", 1, frozenset({0})), 2))
    assert said(answers(effects)[0]) == skipped(10, Reason.QUARANTINED)


# --- row 10: the engine itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [("pause", "pause"), ("sleep", "sleep"), (None, "resume"), (None, "wake")],
)
def test_row_10_what_holds_already_is_skipped(first: str | None, second: str) -> None:
    state, seen = agent(), PRESENT
    if first is not None:
        state, effects = fold(state, command(EngineCommand(operation=first), 1))  # type: ignore[arg-type]
        state, _, seen = carry_out(state, effects, seen)
    _, effects = fold(state, command(EngineCommand(operation=second), state.seq + 1))  # type: ignore[arg-type]
    assert [said(one) for one in answers(effects)] == [skipped(10, Reason.ALREADY)]


@pytest.mark.parametrize("operation", ["flush", "abort"])
def test_row_10_what_leaves_no_state_is_done_each_time(operation: str) -> None:
    state, seen = agent(), PRESENT
    for seq in (1, 2):
        state, effects = fold(state, command(EngineCommand(operation=operation), seq))  # type: ignore[arg-type]
        state, calls, seen = carry_out(state, effects, seen)
        assert [str(one.__struct_config__.tag) for one in calls] == [operation]


@pytest.mark.parametrize("operation", ["pause", "resume", "sleep", "wake"])
def test_row_10_nothing_disturbs_a_sync(operation: str) -> None:
    state = synced(1, "prepare")
    _, effects = fold(state, command(EngineCommand(operation=operation), 2))  # type: ignore[arg-type]
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.SYNC_IN_PROGRESS


def test_row_10_a_resume_does_not_lead_out_of_quarantine() -> None:
    state, effects = fold(agent(), command(sync("load", 1, frozenset({0})), 1))
    state, _, _ = carry_out(state, effects)
    _, effects = fold(state, command(RESUME, 2))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.QUARANTINED


def test_row_10_an_engine_that_does_not_answer_keeps_nobody_waiting() -> None:
    state, _ = fold(agent(), command(PAUSE, 1, ttl_ms=50), Tick(at_ms=50))
    _, effects = fold(state, command(FLUSH, 2, at_ms=60))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.ENGINE_BUSY


def test_row_10_a_new_epoch_ends_what_its_predecessor_left_behind() -> None:
    state, effects = fold(agent(), command(PAUSE, 1))
    state, _, seen = carry_out(state, effects)
    state, effects = fold(state, command(EpochStart(previous_epoch=1, logic=1), 2, epoch=2))
    _, calls, seen = carry_out(state, effects, seen)
    assert [str(one.__struct_config__.tag) for one in calls] == ["resume"] and seen.generating


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_document_has_the_rows_of_the_code_in_their_order() -> None:
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)]
    assert rows == list(range(1, 11))
    assert [row.number for row in GATE] == [number for number in rows if number in (5, 6, 8, 9)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (1, {Reason.STALE_EPOCH}),
        (2, {Reason.SUPERSEDED}),
        (4, {Reason.EXPIRED}),
        (5, {Reason.NOT_TARGETED, Reason.NOT_AN_ENGINE}),
        (6, {Reason.NOT_PRIMARY}),
        (7, {ErrorKind.ENGINE_NOT_READY}),
        (8, {ErrorKind.TOKENIZER_MISSING}),
        (9, {ErrorKind.UNSUPPORTED}),
    ],
)
def test_each_row_of_the_document_gives_its_own_answer(row: int, words: set[str]) -> None:
    (line,) = re.findall(rf"^\| {row} \|.*$", DOCUMENT, re.MULTILINE)
    said = set(re.findall(r"`(\w+)`", line))
    assert said & {*Reason, *ErrorKind} == words


def test_the_document_names_every_reason_and_every_error() -> None:
    for word in [*Reason, *ErrorKind]:
        assert f"`{word}`" in DOCUMENT, f"docs/decision-table.md does not say when an agent answers {word}"


def test_every_row_has_a_test_and_is_named_by_it() -> None:
    tested = {int(number) for name in globals() for number in re.findall(r"^test_row_(\d+)_", name)}
    assert tested == set(range(1, 11))
