"""What failed is not carried out later, and what failed for others takes nothing away."""

import pytest
from msgspec.structs import replace

from schemas import events
from schemas.commands import Checkpoint, EngineCommand, EpochStart, ProfileCommand, ProfilePlan, Target, Window
from schemas.desired import ALL_TAGS, Desired, ProfileSession, Syncing
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped, Trace
from tests.unit.machines import (
    PRESENT,
    START,
    agent,
    answers,
    called,
    carry_out,
    command,
    fault,
    fold,
    looked,
    observed,
    sync,
)
from tests.unit.test_machine_lives import (
    FLUSH,
    PAUSE,
    PAUSED,
    RESTARTED,
    RESUME,
    SLEEP,
    V1,
    WAKE,
    error,
    snapshot,
)
from workers.machine.readiness import in_sync, is_ready
from workers.machine.state import AgentState, call_name
from workers.machine.suppressed import still_desired

ON_V1 = replace(PRESENT, version=1)
TRACE = Trace("global_step_7/replica_0/t.json", 9, "aa", 0)
OTHERS = Target(replicas=frozenset({9}))
OPENED = replace(START, step=7)
LEFT = Acted(calls=(), auto_stopped=True, traces=(TRACE,), ranks_without_trace=(1,))
STOP = ProfileCommand(action="stop", step=7)
WINDOWED = replace(OPENED, plan=ProfilePlan(window=Window(0, 3)))
STILL_WANTED = Desired(profile=ProfileSession(7, ProfilePlan(window=Window(0, 3))))


def profiling(body: ProfileCommand = OPENED) -> tuple[AgentState, events.Observation]:
    """Return an agent whose engine has a session of step 7 open, and what is observed of it."""
    state, effects = fold(agent(), command(body, 1))
    state, _, seen = carry_out(state, effects)
    assert state.engine.session is not None and in_sync(state)
    return state, seen


# --- profiling sessions -----------------------------------------------------------------------------------------------


def test_a_stop_of_another_step_leaves_the_session_open() -> None:
    state, _ = profiling()
    state, effects = fold(state, command(replace(STOP, step=5), 2))
    assert [answer.outcome for answer in answers(effects)] == [Skipped(Reason.NOT_PROFILING)]
    assert called(effects) == [] and state.desired.profile is not None and state.desired.profile.step == 7
    state, effects = fold(state, command(STOP, 3))
    assert called(effects) == ["stop_profile"]


@pytest.mark.parametrize(
    ("late", "target"),
    [
        (replace(START, step=8), OTHERS),
        (STOP, OTHERS),
        (replace(START, step=8, plan=ProfilePlan(ranks=frozenset({99}))), Target()),
        (OPENED, Target()),
    ],
    ids=["start for others", "stop for others", "start of which this replica is no part", "the same start again"],
)
def test_an_expired_command_that_asks_nothing_of_this_replica_leaves_its_session_open(
    late: ProfileCommand, target: Target
) -> None:
    state, _ = profiling()
    state, effects = fold(state, command(late, 2, ttl_ms=0, target=target))
    assert [(answer.rule, answer.outcome) for answer in answers(effects)] == [(4, Skipped(Reason.EXPIRED))]
    assert called(effects) == [] and state.engine.session is not None


def test_an_expired_start_of_another_step_ends_the_session_and_opens_none() -> None:
    state, seen = profiling()
    state, effects = fold(state, command(replace(START, step=8), 2, ttl_ms=0))
    _, calls, seen = carry_out(state, effects, seen)
    assert [call_name(call) for call in calls] == ["stop_profile"] and not seen.profiling


def test_a_session_that_failed_to_open_is_not_opened_by_the_stop_of_another_step() -> None:
    state, effects = fold(agent(), command(OPENED, 1))
    state, effects = fault(state, "No.", PRESENT)
    for seq, body in enumerate((replace(STOP, step=5), replace(START, plan=ProfilePlan(enabled=False))), 2):
        state, effects = fold(state, command(body, seq))
        assert called(effects) == []
    _, effects = fold(state, command(OPENED, 4))
    assert called(effects) == ["start_profile"]


def test_a_session_that_ends_with_its_window_is_not_opened_again_and_is_still_stopped() -> None:
    state, _ = profiling(WINDOWED)
    state, effects = fold(state, observed(PRESENT), events.Tick(at_ms=1))
    assert effects == [] and in_sync(state)
    state, _ = fold(state, command(STOP, 2))
    _, effects = stopped(state)
    assert [answer.outcome for answer in answers(effects)] == [replace(LEFT, calls=("stop_profile",))]


def without_bus(auto_stopped: bool = True) -> AgentState:
    """Return an agent that has closed a session with a window because its lease ended."""
    state, seen = profiling(WINDOWED)
    state, effects = looked(*fold(state, events.LeaseExpired(at_ms=1)), seen)
    assert called(effects) == ["stop_profile"]
    return stopped(state, auto_stopped)[0]


def stopped(state: AgentState, auto_stopped: bool = True) -> tuple[AgentState, list[events.Effect]]:
    """Let the stop in flight succeed."""
    assert state.activity is not None
    result = events.Returned(auto_stopped=auto_stopped, traces=(TRACE,), ranks_without_trace=(1,))
    return fold(
        state, events.EngineReturned(at_ms=1, call_id=state.activity.call_id, result=result, observation=PRESENT)
    )


@pytest.mark.parametrize("lives", [[], [RESTARTED, observed()]], ids=["", "restarted"])
def test_a_step_whose_window_had_ended_when_the_bus_was_lost_is_not_recorded_again(lives: list[events.Event]) -> None:
    state, effects = fold(without_bus(), *lives, snapshot(STILL_WANTED, 1), snapshot(STILL_WANTED, 1))
    assert effects == [] and in_sync(state)
    _, effects = fold(state, snapshot(seq=2), snapshot(STILL_WANTED, 3))
    assert called(effects) == ["start_profile"], "it was asked for again in between"
    _, effects = fold(state, command(WINDOWED, 2))
    assert called(effects) == ["start_profile"]
    _, effects = fold(state, *(command(stop, seq) for seq, stop in enumerate((replace(STOP, step=5), STOP, STOP), 2)))
    skipped = Skipped(Reason.NOT_PROFILING)
    assert [answer.outcome for answer in answers(effects)] == [skipped, LEFT, skipped], "no other outcome names it"


def test_a_bus_that_is_back_during_the_stop_finds_the_step_recorded() -> None:
    state, seen = profiling(WINDOWED)
    state, _ = looked(*fold(state, events.LeaseExpired(at_ms=1)), seen)
    state, _ = fold(state, snapshot(STILL_WANTED, 1))
    state, effects = stopped(state)
    assert effects == [] and in_sync(state)


def test_a_session_that_a_lost_bus_cut_short_is_opened_again() -> None:
    _, effects = fold(without_bus(auto_stopped=False), snapshot(STILL_WANTED, 1))
    assert called(effects) == ["start_profile"]


def test_a_new_trainer_records_a_step_again() -> None:
    _, effects = fold(without_bus(), events.HeadSeen(at_ms=1, epoch=2, seq=3), snapshot(STILL_WANTED, 3, epoch=2))
    assert called(effects) == ["start_profile"]


def test_the_late_failure_of_one_session_does_not_give_up_the_next() -> None:
    state, _ = fold(agent(), command(replace(START, step=3), 1, ttl_ms=50), events.Tick(at_ms=50))
    state, _ = fold(state, snapshot(Desired(profile=ProfileSession(4, ProfilePlan())), 2))
    state, effects = fault(state, "No.", PRESENT)
    assert called(effects) == ["start_profile"]


def test_a_session_that_came_too_late_for_a_launching_engine_is_not_opened_when_it_is_up() -> None:
    state = agent(seen=replace(PRESENT, tokenizer="unknown"))
    state, effects = fold(state, command(START, 1, ttl_ms=50), events.Tick(at_ms=50))
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_NOT_READY
    _, effects = fold(state, observed())
    assert called(effects) == []


# --- engine commands --------------------------------------------------------------------------------------------------


def overdue_flush(desired: Desired | None = None, seen: events.Observation = PRESENT) -> AgentState:
    """Return an agent whose engine has not answered a flush by its deadline."""
    state, effects = fold(agent(desired=desired, seen=seen), command(FLUSH, 1, ttl_ms=50), events.Tick(at_ms=50))
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_TIMEOUT
    return state


ALL_ASLEEP = Desired(generation="paused", asleep=frozenset({"weights"}))


@pytest.mark.parametrize(
    ("failing", "desired", "seen"),
    [
        (PAUSE, None, PRESENT),
        (RESUME, Desired(generation="paused"), PAUSED),
        (SLEEP, None, PRESENT),
        (WAKE, ALL_ASLEEP, replace(PAUSED, asleep=frozenset({"weights"}))),
        (FLUSH, None, PRESENT),
    ],
    ids=lambda value: value.operation if isinstance(value, EngineCommand) else "",
)
def test_a_command_that_was_answered_as_failed_is_not_carried_out_later(
    failing: EngineCommand, desired: Desired | None, seen: events.Observation
) -> None:
    state = overdue_flush(desired, seen)
    state, effects = fold(state, command(failing, 2, at_ms=60))
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_BUSY
    state, effects = fold(state, events.EngineReturned(at_ms=99, call_id=1, result=events.Returned(), observation=seen))
    assert called(effects) == []
    state, effects = fold(state, command(PAUSE, 3, at_ms=100, target=Target(replicas=frozenset({9}))))
    assert called(effects) == []  # nor when a command for others lets it reconcile again


def test_a_failed_command_is_carried_out_when_it_is_asked_for_again() -> None:
    state, _ = fold(overdue_flush(), command(PAUSE, 2, at_ms=60))
    state, _ = fold(state, events.EngineReturned(at_ms=99, call_id=1, result=events.Returned(), observation=PRESENT))
    _, effects = fold(state, command(PAUSE, 3, at_ms=100))
    assert called(effects) == ["pause"]


def test_a_failed_resume_is_made_good_by_the_next_commit() -> None:
    state, effects = fold(agent(desired=Desired(generation="paused"), seen=PAUSED), command(RESUME, 1))
    state, effects = fault(state, "No.", PAUSED)
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_ERROR and called(effects) == []
    seen = PAUSED
    for seq, phase in enumerate(("prepare", "load", "commit"), 2):
        state, effects = fold(state, command(sync(phase), seq))
        state, _, seen = carry_out(state, effects, seen)
    assert seen.generating


def test_a_sleep_that_fails_half_way_is_taken_back() -> None:
    state, effects = fold(agent(), command(SLEEP, 1))
    state, _ = fold(state, events.EngineReturned(at_ms=1, call_id=1, result=events.Returned(), observation=PAUSED))
    state, effects = fault(state, "No.", PAUSED)
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_ERROR
    assert called(effects) == ["resume"]


def test_a_failed_sleep_of_one_tag_is_not_made_good_by_a_wake_of_another() -> None:
    both = replace(PAUSED, asleep=frozenset({"kv_cache"}))
    state = agent(seen=both, desired=Desired(asleep=frozenset({"kv_cache"})))
    state, effects = fold(state, command(EngineCommand(operation="sleep", tags=frozenset({"weights"})), 1))
    assert called(effects) == ["sleep"]
    state, effects = fault(state, "No.", both)
    assert called(effects) == []
    state, effects = fold(state, command(EngineCommand(operation="wake", tags=frozenset({"kv_cache"})), 2))
    _, calls, seen = carry_out(state, effects, both)
    assert "sleep" not in [call_name(call) for call in calls] and seen.generating and not seen.asleep


def test_a_sync_wakes_what_no_wake_could_because_its_weights_could_not_be_loaded() -> None:
    """A failed wake leaves the memory asleep, and the sync that would help was refused because of that."""
    gone = replace(PAUSED, asleep=ALL_TAGS)
    state = agent(seen=gone, desired=Desired(committed=V1, asleep=ALL_TAGS, discard=True))
    state, effects = fold(state, command(WAKE, 1))
    assert called(effects) == ["check_source"]
    state, effects = fault(state, "It is not there.", gone)
    assert isinstance(answers(effects)[0].outcome, Failed) and called(effects) == [] and in_sync(state)
    seen = gone
    for seq, phase in enumerate(("prepare", "load", "commit"), start=2):
        state, effects = fold(state, command(sync(phase, 2), seq))
        state, _, seen = carry_out(state, effects, seen)
        assert isinstance(answers(effects)[0].outcome, Acted), phase
    assert (seen.version, seen.asleep, seen.generating) == (2, frozenset(), True) and is_ready(state)


def test_a_sync_for_which_the_memory_can_not_be_woken_leaves_it_asleep() -> None:
    gone = replace(PAUSED, asleep=ALL_TAGS, version=1)
    state = agent(seen=gone, desired=Desired(committed=V1, asleep=ALL_TAGS))
    state, _ = fold(state, command(WAKE, 1))
    state, effects = fault(state, "The trainer has it.", gone)
    assert called(effects) == [] and in_sync(state)
    state, effects = fold(state, command(sync("prepare", 2), 2))
    while state.activity is not None and call_name(state.activity.calls[0]) != "wake":
        done = events.EngineReturned(
            at_ms=1, call_id=state.activity.call_id, result=events.Returned(), observation=gone
        )
        state, more = fold(state, done)
        effects += more
    state, more = fault(state, "The trainer has it.", gone)
    assert isinstance(answers([*effects, *more])[0].outcome, Failed)
    assert called(more) == [] and in_sync(state) and still_desired(state.desired, state.suppressed).asleep == ALL_TAGS


@pytest.mark.parametrize(
    ("seen", "refused"),
    [
        (replace(PRESENT, tokenizer="absent"), ErrorKind.TOKENIZER_MISSING),
        (replace(PRESENT, operations=PRESENT.operations - {Operation.PAUSE}), ErrorKind.UNSUPPORTED),
    ],
    ids=["tokenizer", "operation"],
)
def test_an_engine_that_could_not_be_paused_at_all_is_not_paused_late_either(
    seen: events.Observation, refused: ErrorKind
) -> None:
    state, effects = fold(agent(seen=seen), command(PAUSE, 1))
    assert error(answers(effects)[0].outcome) is refused
    _, effects = fold(state, observed())
    assert called(effects) == []


def test_a_launching_engine_is_paused_as_soon_as_it_is_up() -> None:
    state = agent(seen=replace(PRESENT, tokenizer="unknown"))
    state, effects = fold(state, command(PAUSE, 1, ttl_ms=50), events.Tick(at_ms=50))
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_NOT_READY
    _, effects = fold(state, observed())
    assert called(effects) == ["pause"]


@pytest.mark.parametrize(
    "event",
    [snapshot(Desired(), 1), events.LeaseExpired(at_ms=9), command(EpochStart(previous_epoch=1, logic=1), 2, epoch=2)],
    ids=["snapshot", "lease", "next trainer"],
)
def test_a_failed_resume_is_made_good_when_the_desired_state_is_given_anew(event: events.Event) -> None:
    state, _ = fold(agent(desired=Desired(generation="paused"), seen=PAUSED), command(RESUME, 1))
    state, effects = fault(state, "No.", PAUSED)
    assert called(effects) == [] and state.suppressed.generation == "paused"
    state, effects = fold(state, event)
    if isinstance(event, events.LeaseExpired):
        state, effects = looked(state, effects, PAUSED)
    assert called(effects) == ["resume"]


def test_a_pause_that_was_refused_in_a_sync_changes_nothing_after_it() -> None:
    state, effects = fold(agent(), command(sync("prepare"), 1))
    state, _, seen = carry_out(state, effects)
    state, effects = fold(state, command(PAUSE, 2))
    assert error(answers(effects)[0].outcome) is ErrorKind.SYNC_IN_PROGRESS
    state, effects = fold(state, command(sync("abort"), 3))
    _, _, seen = carry_out(state, effects, seen)
    assert seen.generating


def out_of_version_1() -> AgentState:
    """Return an agent that could not load the committed weights, of version 1."""
    state = agent(desired=Desired(committed=V1))
    while state.activity is not None:  # it is paused, and checks the source
        state, _ = fault(state, "No such file.", PAUSED)
    assert state.suppressed.quarantined == 1
    return state


def refused_files() -> AgentState:
    """Return an agent that joined while version 2 was prepared, and found that its files are not there."""
    preparing = Desired(committed=V1, sync=Syncing(2, Checkpoint("v2"), None, "abort", phase="prepare"))
    state, effects = fold(agent(seen=ON_V1, desired=Desired(committed=V1)), snapshot(preparing, seq=4))
    assert called(effects) == ["check_source"] and state.activity is not None
    refused = events.Fault("source_refused", "It is not there.")
    returned = events.EngineReturned(at_ms=1, call_id=state.activity.call_id, result=refused, observation=ON_V1)
    state, effects = fold(state, returned)
    assert effects == []
    return state


def test_a_replica_that_finds_no_files_when_it_joins_a_sync_goes_on_until_the_others_load() -> None:
    state = refused_files()
    assert is_ready(state), "its engine was not touched, and the sync may still be aborted"
    state, effects = fold(state, command(sync("abort", 2), 5))
    assert called(effects) == [] and is_ready(state)


def test_a_replica_that_found_no_files_is_paused_before_others_serve_and_out_once_they_do() -> None:
    state, effects = fold(refused_files(), command(sync("load", 2), 5))
    assert error(answers(effects)[0].outcome) is ErrorKind.NO_SUCH_SYNC
    assert called(effects) == ["pause"] and not is_ready(state)
    loading, _, paused = carry_out(state, effects, ON_V1)
    back, effects = fold(loading, command(sync("abort", 2), 6))
    back, calls, _ = carry_out(back, effects, paused)
    assert [call_name(call) for call in calls] == ["resume"] and is_ready(back)
    state, effects = fold(loading, command(sync("commit", 2), 6))
    assert called(effects) == ["check_source"]
    state, effects = fault(state, "no", paused)
    assert (
        called(effects) == []
        and not is_ready(state)
        and still_desired(state.desired, state.suppressed).quarantined == 2
    )


@pytest.mark.parametrize("loads", [True, False], ids=["fails to load it", "is not asked to load it"])
def test_the_abort_of_a_later_sync_lifts_no_older_quarantine(loads: bool) -> None:
    state, effects = fold(out_of_version_1(), command(sync("prepare", 2), 1))
    state, _, _ = carry_out(state, effects, PAUSED)
    if loads:
        state, _ = fold(state, command(sync("load", 2), 2))
        state, effects = fault(state, "No such file.", PAUSED)
        assert called(effects) == []
    state, effects = fold(state, command(sync("abort", 2), state.seq + 1))
    assert state.suppressed.quarantined == 1 and called(effects) == []


# --- the end of an agent ----------------------------------------------------------------------------------------------


def test_an_agent_that_is_asked_to_end_awaits_the_call_in_flight_and_begins_no_other() -> None:
    state, effects = fold(agent(), command(SLEEP, 1), command(FLUSH, 2))
    assert called(effects) == ["pause"]
    state, effects = fold(state, events.Stopping(at_ms=5), command(RESUME, 3), events.Tick(at_ms=9999))
    assert effects == []
    returned = events.EngineReturned(at_ms=6, call_id=1, result=events.Returned(), observation=PAUSED)
    state, effects = fold(state, returned)
    assert called(effects) == [] and state.activity is None and not state.engine.generating
    (answer,) = answers(effects)
    assert (
        answer.seq == 1 and error(answer.outcome) is ErrorKind.UNKNOWN and "sleep was not begun" in str(answer.outcome)
    )


def test_an_agent_that_is_asked_to_end_still_answers_what_the_last_call_has_done() -> None:
    state, _ = fold(agent(), command(PAUSE, 1), events.Stopping(at_ms=5))
    returned = events.EngineReturned(at_ms=6, call_id=1, result=events.Returned(), observation=PAUSED)
    _, effects = fold(state, returned)
    assert [answer.outcome for answer in answers(effects)] == [Acted(calls=("pause",))]


def test_the_next_incarnation_is_not_stopping() -> None:
    state, _ = fold(
        agent(), events.Stopping(at_ms=5), events.Started(at_ms=6, identity=agent().identity, incarnation="b")
    )
    assert not state.stopping
