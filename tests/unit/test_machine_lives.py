"""An agent's life: it joins, loses the bus, is restarted in the middle of a call, and what becomes of each command."""

import pytest
from msgspec.structs import replace

from schemas.commands import Checkpoint, Command, EngineCommand, EpochStart, ProfileCommand, ProfilePlan, Target
from schemas.desired import ALL_TAGS, Committed, Desired, ProfileSession, Syncing
from schemas.events import (
    Answer,
    Effect,
    EngineObserved,
    EngineReturned,
    HeadSeen,
    LeaseExpired,
    Observation,
    Pause,
    Perform,
    RequestResend,
    RequestSnapshot,
    Restart,
    Returned,
    SnapshotReceived,
    Started,
    StopProfile,
    Tick,
)
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from tests.unit.machines import (
    PRESENT,
    PRIMARY,
    SECOND,
    START,
    agent,
    answers,
    carry_out,
    command,
    fault,
    fold,
    manifest,
    sync,
)
from workers.machine.decide import AgentState, in_sync, next_deadline
from workers.machine.state import REMEMBERED, call_name

PAUSE, RESUME, FLUSH, SLEEP, WAKE = (
    EngineCommand(operation=one) for one in ("pause", "resume", "flush", "sleep", "wake")
)
V1 = Committed(1, Checkpoint("v1"), manifest(1))
PAUSED = replace(PRESENT, generating=False)
RESTARTED = Started(at_ms=0, identity=PRIMARY, incarnation="b")


def snapshot(desired: Desired | None = None, seq: int = 0, epoch: int = 1) -> SnapshotReceived:
    return SnapshotReceived(at_ms=0, epoch=epoch, seq=seq, desired=desired or Desired())


def observed(seen: Observation = PRESENT) -> EngineObserved:
    return EngineObserved(at_ms=0, observation=seen)


def names(effects: list[Effect]) -> list[str]:
    """The calls among the effects."""
    return [call_name(one.call) for one in effects if isinstance(one, Perform)]


def error(outcome: Outcome) -> ErrorKind:
    assert isinstance(outcome, Failed)
    return outcome.error


# --- joining ----------------------------------------------------------------------------------------------------------


def test_nothing_is_done_before_a_snapshot_has_told_what_is_desired() -> None:
    state, effects = fold(AgentState(), RESTARTED, observed(PAUSED), command(PAUSE), HeadSeen(at_ms=0, epoch=1, seq=9))
    assert effects == [] and not in_sync(state)


def test_what_came_before_the_snapshot_is_decided_after_it_unless_it_is_in_it() -> None:
    state, _ = fold(AgentState(), RESTARTED, observed(), command(PAUSE, 1), command(FLUSH, 2))
    state, effects = fold(state, snapshot(seq=1))
    assert state.seq == 2 and names(effects) == ["flush"]


def test_a_late_joiner_is_brought_to_what_is_desired_on_its_own_account() -> None:
    state, effects = fold(AgentState(), RESTARTED, observed(PAUSED), snapshot(Desired(committed=V1), seq=7))
    state, calls, seen = carry_out(state, effects, PAUSED)
    assert [call_name(one) for one in calls] == ["check_source", "load", "flush", "resume"]
    assert answers(effects) == [] and in_sync(state) and seen.generating


def test_a_higher_node_rank_has_nothing_to_settle() -> None:
    state = agent(SECOND, replace(PAUSED, tokenizer="absent"), Desired(committed=V1))
    assert in_sync(state) and state.activity is None


def test_an_engine_that_still_launches_is_settled_when_it_is_up() -> None:
    state = agent(seen=replace(PAUSED, tokenizer="unknown"))
    assert not in_sync(state)
    _, effects = fold(state, observed(PAUSED))
    assert names(effects) == ["resume"]


def test_an_older_snapshot_is_passed_over() -> None:
    state = agent(seq=5, epoch=2)
    for older in (snapshot(Desired(generation="paused"), 4, 2), snapshot(Desired(generation="paused"), 9, 1)):
        assert fold(state, older) == (state, [])


def test_a_snapshot_stands_in_for_what_waited_and_takes_no_call_back() -> None:
    state, effects = fold(agent(), command(PAUSE, 1), command(FLUSH, 2))
    assert names(effects) == ["pause"]
    state, effects = fold(state, snapshot(Desired(generation="paused"), 2))
    assert [(one.seq, one.outcome) for one in answers(effects)] == [
        (2, Skipped(Reason.SUPERSEDED)),
        (1, Skipped(Reason.SUPERSEDED)),
    ]
    assert state.activity is not None and names(effects) == []
    state, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=PAUSED))
    assert effects == [] and in_sync(state)


# --- holes and heads --------------------------------------------------------------------------------------------------


def test_a_last_command_that_was_lost_is_noticed_by_the_head() -> None:
    assert fold(agent(seq=3), HeadSeen(at_ms=0, epoch=1, seq=4))[1] == [RequestResend(4)]


@pytest.mark.parametrize(("epoch", "seq"), [(2, 3), (2, 2), (1, 9)])
def test_a_head_that_says_nothing_new_changes_nothing(epoch: int, seq: int) -> None:
    state = agent(seq=3, epoch=2)
    assert fold(state, HeadSeen(at_ms=0, epoch=epoch, seq=seq)) == (state, [])


def test_a_hole_is_asked_for_once_and_again_by_each_head() -> None:
    state, effects = fold(agent(), command(FLUSH, 3), command(FLUSH, 4))
    assert effects == [RequestResend(1)]
    _, effects = fold(state, HeadSeen(at_ms=0, epoch=1, seq=4))
    assert effects == [RequestResend(1)]


def test_what_was_held_is_forgotten_under_a_new_epoch_and_asked_for_anew() -> None:
    state, _ = fold(agent(), command(FLUSH, 3))
    state, effects = fold(state, HeadSeen(at_ms=0, epoch=2, seq=5))
    assert effects == [RequestResend(1)] and state.reorder_buffer == () and state.epoch == 2


def test_the_furthest_ahead_is_dropped_when_too_much_is_held() -> None:
    state, _ = fold(agent(), *(command(FLUSH, seq) for seq in (9, 3, 8, 4, 7, 5)))
    assert [one.seq for one in state.reorder_buffer] == [3, 4, 5, 7]


def test_another_record_under_a_seq_that_was_applied_means_that_only_a_snapshot_helps() -> None:
    state, _ = fold(agent(SECOND, epoch=2), command(PAUSE, 1, epoch=2, origin=1))
    state, effects = fold(state, command(PAUSE, 1, epoch=2, origin=2))
    assert effects == [RequestSnapshot()] and state.diverged and not in_sync(state)
    state, effects = fold(state, command(RESUME, 2, epoch=2))
    assert effects == [RequestSnapshot()]
    state, effects = fold(state, HeadSeen(at_ms=0, epoch=2, seq=2))
    assert effects == [RequestSnapshot()]
    state, effects = fold(state, snapshot(Desired(), 2, 2))
    assert not state.diverged and in_sync(state)


def test_outcomes_are_remembered_for_a_while() -> None:
    state = agent(SECOND)
    for seq in range(1, 5 * REMEMBERED):
        state, _ = fold(state, command(FLUSH, seq))
    assert REMEMBERED <= len(state.answers) <= 2 * REMEMBERED
    newest, oldest = 5 * REMEMBERED - 1, 1
    (again,) = answers(fold(state, command(FLUSH, newest))[1])
    assert again.outcome == Skipped(Reason.NOT_PRIMARY)
    (again,) = answers(fold(state, command(FLUSH, oldest))[1])
    assert again.outcome == Skipped(Reason.SUPERSEDED)


# --- the lease --------------------------------------------------------------------------------------------------------


def test_without_a_trainer_the_agent_goes_on_with_what_is_committed() -> None:
    half = Desired(
        committed=V1,
        sync=Syncing(2, Checkpoint("v2"), manifest(2), "abort", "load"),
        profile=ProfileSession(3, ProfilePlan()),
    )
    seen = replace(PAUSED, version=2)
    state = agent(seen=seen, desired=half)
    state, _ = fault(state)  # it can't take the source of version 2
    state, effects = fold(state, LeaseExpired(at_ms=0))
    _, calls, seen = carry_out(state, effects, seen)
    assert seen.generating and seen.version == 1


def test_memory_that_sleeps_is_not_woken_without_a_trainer() -> None:
    asleep = replace(PAUSED, asleep=ALL_TAGS)
    state = agent(seen=asleep, desired=Desired(asleep=ALL_TAGS))
    assert fold(state, LeaseExpired(at_ms=0))[1] == []


def test_an_open_session_ends_with_the_lease() -> None:
    state, effects = fold(agent(), command(START))
    state, _, _ = carry_out(state, effects)
    _, effects = fold(state, LeaseExpired(at_ms=0))
    assert names(effects) == ["stop_profile"]


def test_after_the_lease_nothing_is_obeyed_before_a_snapshot() -> None:
    state, _ = fold(agent(), LeaseExpired(at_ms=0))
    assert not in_sync(state)
    state, effects = fold(state, command(PAUSE))
    assert effects == [RequestSnapshot()]
    _, effects = fold(state, snapshot())
    assert names(effects) == ["pause"]


def test_a_lease_of_an_agent_that_never_joined_is_none() -> None:
    state, _ = fold(AgentState(), RESTARTED, observed(PAUSED))
    assert fold(state, LeaseExpired(at_ms=0)) == (state, [])


# --- a call that takes too long, or fails -----------------------------------------------------------------------------


def test_past_its_deadline_a_command_has_failed_and_its_call_is_awaited() -> None:
    state, _ = fold(agent(), command(PAUSE, ttl_ms=50))
    assert next_deadline(state) == 50
    state, effects = fold(state, Tick(at_ms=49))
    assert effects == []
    state, effects = fold(state, Tick(at_ms=50))
    (answer,) = answers(effects)
    assert error(answer.outcome) is ErrorKind.ENGINE_TIMEOUT
    assert state.activity is not None and next_deadline(state) is None
    state, effects = fold(state, EngineReturned(at_ms=99, call_id=1, result=Returned(), observation=PAUSED))
    assert effects == [] and in_sync(state)


def test_what_is_left_of_a_command_past_its_deadline_is_settled_when_the_call_ends() -> None:
    state, effects = fold(agent(), command(SLEEP, ttl_ms=50), Tick(at_ms=50))
    assert names(effects) == ["pause"]
    _, effects = fold(state, EngineReturned(at_ms=99, call_id=1, result=Returned(), observation=PAUSED))
    assert names(effects) == ["sleep"] and answers(effects) == []


def test_the_rest_of_an_overdue_plan_is_dropped_when_it_is_not_wanted_any_more() -> None:
    state, _ = fold(agent(), command(SLEEP, 1, ttl_ms=50), Tick(at_ms=50))
    state, effects = fold(state, command(WAKE, 2, at_ms=60))
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_BUSY
    _, effects = fold(state, EngineReturned(at_ms=99, call_id=1, result=Returned(), observation=PAUSED))
    assert names(effects) == ["resume"]


def test_an_answer_to_a_call_of_an_earlier_life_is_passed_over() -> None:
    state = agent()
    assert fold(state, EngineReturned(at_ms=1, call_id=7, result=Returned(), observation=PAUSED)) == (state, [])


def test_a_call_that_failed_is_not_made_again_unasked() -> None:
    state, _ = fold(agent(), command(PAUSE, 1))
    state, effects = fault(state, "No.", PRESENT)
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_ERROR and names(effects) == []
    _, effects = fold(state, command(PAUSE, 2))
    assert names(effects) == ["pause"]


def test_weights_with_another_digest_leave_the_replica_out_of_service() -> None:
    state, effects = fold(agent(), command(sync("prepare", content="right"), 1))
    state, _, seen = carry_out(state, effects)
    state, _ = fold(state, command(sync("load", content="right"), 2))
    wrong = EngineReturned(
        at_ms=1,
        call_id=state.calls_made,
        result=Returned(digest="wrong"),
        observation=replace(seen, version=1, digest="wrong"),
    )
    state, effects = fold(state, wrong)
    assert error(answers(effects)[0].outcome) is ErrorKind.DIGEST_MISMATCH
    state, calls, seen = carry_out(state, effects, replace(seen, version=1))
    assert not {"load", "resume"} & {call_name(one) for one in calls}
    assert not seen.generating and state.engine.torn


def test_a_late_joiner_that_can_not_load_what_is_committed_stays_out_of_service() -> None:
    state, effects = fold(AgentState(), RESTARTED, observed(), snapshot(Desired(committed=V1), 3))
    assert names(effects) == ["check_source"]
    state, effects = fault(state, "It is not there.")
    _, calls, seen = carry_out(state, effects)
    assert [call_name(one) for one in calls] == ["pause"] and not seen.generating


def test_a_session_of_a_late_joiner_that_failed_to_open_is_not_tried_again() -> None:
    state, effects = fold(
        AgentState(), RESTARTED, observed(), snapshot(Desired(profile=ProfileSession(3, ProfilePlan())), 3)
    )
    assert names(effects) == ["start_profile"]
    state, effects = fault(state, "No.", PRESENT)
    assert effects == []
    _, effects = fold(state, command(FLUSH, 4))
    assert names(effects) == ["flush"]


# --- a restart in the middle of a call --------------------------------------------------------------------------------

ASLEEP = replace(PAUSED, asleep=ALL_TAGS)
RUNNING = replace(PRESENT, profiling=True)
DIGEST = replace(PAUSED, version=1, digest="right")


COMMANDS: dict[str, tuple[Command, ...]] = {
    "pause": (PAUSE,),
    "resume": (PAUSE, RESUME),
    "sleep": (PAUSE, SLEEP),
    "wake": (PAUSE, SLEEP, WAKE),
    "flush": (FLUSH,),
    "start_profile": (START,),
    "stop_profile": (START, ProfileCommand(action="stop", step=3)),
    "load": (sync("prepare", content="right"), sync("load", content="right")),
}
"""What leads to a call of this name, and nothing else, by the last command."""


def cut_off(call: str) -> tuple[AgentState, int]:
    """An agent that died in the middle of `call`, and started again; with the seq of the call's command."""
    state, seen = agent(), PRESENT
    *before, last = COMMANDS[call]
    for seq, body in enumerate(before, start=1):
        state, effects = fold(state, command(body, seq))
        state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(last, len(before) + 1), RESTARTED)
    assert names(effects) == [call]
    return state, len(before) + 1


DONE: dict[str, Observation] = {
    "pause": PAUSED,
    "resume": PRESENT,
    "sleep": ASLEEP,
    "wake": PAUSED,
    "stop_profile": PRESENT,
    "load": DIGEST,
}
NOT_DONE: dict[str, Observation] = {
    "pause": PRESENT,
    "resume": PAUSED,
    "sleep": PAUSED,
    "wake": ASLEEP,
    "flush": PRESENT,
    "start_profile": RUNNING,
    "stop_profile": RUNNING,
    "load": PAUSED,
}


@pytest.mark.parametrize("call", DONE)
def test_a_call_that_was_cut_off_and_is_seen_to_be_done_has_acted(call: str) -> None:
    state, seq = cut_off(call)
    _, effects = fold(state, observed(DONE[call]))
    (answer,) = answers(effects)
    assert answer.seq == seq
    assert isinstance(answer.outcome, Acted) and answer.outcome.calls[-1] == call


@pytest.mark.parametrize("call", NOT_DONE)
def test_a_call_that_was_cut_off_and_can_not_be_seen_is_unknown(call: str) -> None:
    state, seq = cut_off(call)
    _, effects = fold(state, observed(NOT_DONE[call]))
    (answer,) = answers(effects)
    assert answer.seq == seq
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.UNKNOWN
    assert answer.outcome.message.startswith(f"the agent was restarted during {call}, ")


@pytest.mark.parametrize("call", NOT_DONE)
def test_nothing_is_called_between_a_restart_and_the_next_snapshot(call: str) -> None:
    state, _ = cut_off(call)
    state, effects = fold(state, observed(NOT_DONE[call]))
    assert names(effects) == [] and not in_sync(state)


def test_an_engine_that_still_launches_can_not_tell_what_was_cut_off() -> None:
    state, _ = cut_off("pause")
    state, effects = fold(state, observed(replace(PRESENT, tokenizer="unknown")))
    assert effects == [] and state.interrupted is not None
    _, effects = fold(state, observed(PAUSED))
    assert [type(one) for one in effects] == [Answer]


def test_a_profile_start_that_was_cut_off_is_stopped_if_nobody_wants_it() -> None:
    state, _ = cut_off("start_profile")
    _, effects = fold(state, observed(replace(PRESENT, profiling=None)), snapshot(Desired(), 1))
    assert isinstance(effects[-1], Perform) and isinstance(effects[-1].call, StopProfile)


def test_a_load_that_was_cut_off_is_done_again_before_the_engine_serves() -> None:
    state, _ = cut_off("load")
    state, effects = fold(state, observed(replace(DIGEST, digest=None)), snapshot(Desired(committed=V1), 3))
    _, calls, seen = carry_out(state, effects, DIGEST)
    assert [call_name(one) for one in calls] == ["check_source", "load", "flush", "resume"] and seen.generating


def test_a_call_on_the_machine_s_own_account_that_was_cut_off_is_answered_to_nobody() -> None:
    state, _ = fold(AgentState(), RESTARTED, observed(PAUSED), snapshot())
    assert state.activity is not None and state.activity.trigger is None
    _, effects = fold(state, replace(RESTARTED, incarnation="c"), observed(PRESENT))
    assert effects == []


def test_a_second_restart_does_not_forget_what_the_first_cut_off() -> None:
    state, seq = cut_off("pause")
    _, effects = fold(state, replace(RESTARTED, incarnation="c"), observed(PAUSED))
    assert [one.seq for one in answers(effects)] == [seq]


def test_call_ids_go_on_through_restarts() -> None:
    state, _ = cut_off("pause")
    _, effects = fold(state, observed(PRESENT), snapshot(Desired(generation="paused"), 1))
    assert effects[-1] == Perform(call_id=2, call=Pause("abort"))


def test_outcomes_survive_a_restart() -> None:
    state, first = fold(agent(SECOND), command(FLUSH, 1), replace(RESTARTED, identity=SECOND))
    state, _ = fold(state, observed(), snapshot(seq=1))
    assert answers(fold(state, command(FLUSH, 1))[1]) == answers(first)


# --- an engine that lacks something -----------------------------------------------------------------------------------


def test_an_engine_that_can_not_be_paused_is_left_as_it_is_and_is_not_ready() -> None:
    unable = replace(PRESENT, operations=frozenset({Operation.PROFILE, Operation.LOAD}))
    state = agent(seen=unable, desired=Desired(committed=V1))
    assert state.activity is None and not in_sync(state)
    assert in_sync(agent(seen=unable))


# --- an epoch's start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [None, frozenset({9})])
def test_an_epoch_s_start_with_nothing_to_end_is_skipped(replicas: frozenset[int] | None) -> None:
    begin = command(EpochStart(previous_epoch=1, logic=1), 1, epoch=2, target=Target(replicas=replicas))
    _, effects = fold(agent(), begin)
    (answer,) = answers(effects)
    assert answer.outcome == Skipped(Reason.NOT_TARGETED if replicas else Reason.ALREADY)


def test_an_epoch_s_start_gives_up_a_sync() -> None:
    state, effects = fold(agent(), command(sync("prepare"), 1))
    state, _, _ = carry_out(state, effects)
    state, effects = fold(state, command(EpochStart(previous_epoch=1, logic=1), 2, epoch=2))
    _, calls, seen = carry_out(state, effects, PAUSED)
    assert [call_name(one) for one in calls] == ["resume"] and seen.generating


# An engine that is launched again


def quarantined() -> AgentState:
    """Its replica was left out of a commit."""
    return agent(desired=Desired(committed=Committed(2, Checkpoint("v2"), None), quarantined=2), seq=3)


def test_engine_launched_again_out_of_service_starts_its_agent_anew() -> None:
    again = EngineObserved(at_ms=0, observation=replace(PRESENT, instance="two"))
    _, effects = fold(quarantined(), again)
    assert effects[-1] == Restart()


def test_engine_launched_again_in_service_is_brought_back_by_the_same_agent() -> None:
    state = agent(desired=Desired(committed=Committed(2, Checkpoint("v2"), None)), seq=3)
    again = EngineObserved(at_ms=0, observation=replace(PRESENT, instance="two"))
    state, effects = fold(state, again)
    assert Restart() not in effects and not in_sync(state)


def test_engine_that_dies_in_a_load_and_comes_back_starts_its_agent_anew() -> None:
    state, effects = fold(agent(), command(sync("prepare", 2), 1))
    state, _, _ = carry_out(state, effects)
    state, _ = fold(state, command(sync("load", 2), 2))
    state, effects = fault(state, "the connection was closed", replace(PRESENT, tokenizer="unknown", instance=None))
    assert any(isinstance(one, Answer) and isinstance(one.outcome, Failed) for one in effects)
    state, effects = fold(state, EngineObserved(at_ms=0, observation=replace(PRESENT, instance="two")))
    assert effects[-1] == Restart()


def test_engine_seen_for_the_first_time_is_no_other_one() -> None:
    _, effects = fold(quarantined(), EngineObserved(at_ms=0, observation=replace(PRESENT, version=7)))
    assert Restart() not in effects
