"""The life of an agent: joining, losing the bus, calls that fail or take too long, restarts in the middle of a call."""

import pytest
from msgspec.structs import replace

from schemas import events
from schemas.commands import (
    Checkpoint,
    Command,
    EngineCommand,
    EpochStart,
    Finish,
    ProfileCommand,
    ProfilePlan,
    Target,
)
from schemas.desired import ALL_TAGS, Committed, Desired, ProfileSession, Syncing
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from tests.unit.machines import (
    PRESENT,
    PRIMARY,
    SECOND,
    START,
    agent,
    answers,
    called,
    carry_out,
    command,
    fault,
    fold,
    manifest,
    observed,
    sync,
)
from workers.machine.decide import next_deadline
from workers.machine.readiness import in_sync
from workers.machine.state import REMEMBERED, AgentState, call_name

PAUSE, RESUME, FLUSH, SLEEP, WAKE = (
    EngineCommand(operation=name) for name in ("pause", "resume", "flush", "sleep", "wake")
)
V1 = Committed(1, Checkpoint("v1"), manifest(1))
PAUSED = replace(PRESENT, generating=False)
RESTARTED = events.Started(at_ms=0, identity=PRIMARY, incarnation="b")


def snapshot(desired: Desired | None = None, seq: int = 0, epoch: int = 1) -> events.SnapshotReceived:
    return events.SnapshotReceived(at_ms=0, epoch=epoch, seq=seq, desired=desired or Desired())


def error(outcome: Outcome) -> ErrorKind:
    assert isinstance(outcome, Failed)
    return outcome.error


# --- joining ----------------------------------------------------------------------------------------------------------


def test_nothing_is_called_before_the_first_snapshot() -> None:
    state, effects = fold(
        AgentState(), RESTARTED, observed(PAUSED), command(PAUSE), events.HeadSeen(at_ms=0, epoch=1, seq=9)
    )
    assert effects == [] and not in_sync(state)


def test_commands_received_before_the_snapshot_are_decided_after_it_unless_it_contains_them() -> None:
    state, _ = fold(AgentState(), RESTARTED, observed(), command(PAUSE, 1), command(FLUSH, 2))
    state, effects = fold(state, snapshot(seq=1))
    assert state.seq == 2 and called(effects) == ["flush"]


def test_a_late_joiner_is_brought_to_the_desired_state_without_a_command() -> None:
    state, effects = fold(AgentState(), RESTARTED, observed(PAUSED), snapshot(Desired(committed=V1), seq=7))
    state, calls, seen = carry_out(state, effects, PAUSED)
    # It was found paused, so requests may be frozen, and those that can't be computed anew would refuse the flush.
    assert [call_name(call) for call in calls] == ["check_source", "load", "resume", "flush"]
    assert answers(effects) == [] and in_sync(state) and seen.generating


def test_a_higher_node_rank_has_nothing_to_reconcile() -> None:
    state = agent(SECOND, replace(PAUSED, tokenizer="absent"), Desired(committed=V1))
    assert in_sync(state) and state.activity is None


def test_an_engine_that_missed_syncs_while_it_launched_is_brought_to_the_newest_only() -> None:
    launching = agent(seen=replace(PAUSED, tokenizer="unknown"))
    waiting = [sync("prepare", 1), sync("load", 1), sync("commit", 1), sync("prepare", 2)]
    state, _ = fold(launching, *(command(body, seq) for seq, body in enumerate(waiting, start=1)))
    state, effects = fold(state, observed(PAUSED))
    state, calls, seen = carry_out(state, effects, PAUSED)
    assert [call_name(call) for call in calls] == ["check_source"]
    assert [answer.outcome for answer in answers(effects)[:3]] == [Skipped(Reason.SUPERSEDED)] * 3
    state, effects = fold(state, command(sync("load", 2), 5))
    state, calls, seen = carry_out(state, effects, seen)
    assert [call_name(call) for call in calls] == ["load"] and seen.version == 2
    assert state.desired.committed == V1  # until version 2 is committed


def test_an_older_snapshot_is_ignored() -> None:
    state = agent(seq=5, epoch=2)
    for older in (snapshot(Desired(generation="paused"), 4, 2), snapshot(Desired(generation="paused"), 9, 1)):
        assert fold(state, older) == (state, [])


def test_a_snapshot_supersedes_waiting_commands_and_cancels_no_call() -> None:
    state, effects = fold(agent(), command(PAUSE, 1), command(FLUSH, 2))
    assert called(effects) == ["pause"]
    state, effects = fold(state, snapshot(Desired(generation="paused"), 2))
    assert [(answer.seq, answer.outcome) for answer in answers(effects)] == [
        (2, Skipped(Reason.SUPERSEDED)),
        (1, Skipped(Reason.SUPERSEDED)),
    ]
    assert state.activity is not None and called(effects) == []
    state, effects = fold(
        state, events.EngineReturned(at_ms=1, call_id=1, result=events.Returned(), observation=PAUSED)
    )
    assert effects == [] and in_sync(state)


# --- holes and heads --------------------------------------------------------------------------------------------------


def test_a_head_reveals_that_the_last_command_was_lost() -> None:
    assert fold(agent(seq=3), events.HeadSeen(at_ms=0, epoch=1, seq=4))[1] == [events.RequestResend(4)]


@pytest.mark.parametrize(("epoch", "seq"), [(2, 3), (2, 2), (1, 9)])
def test_a_head_with_nothing_new_changes_nothing(epoch: int, seq: int) -> None:
    state = agent(seq=3, epoch=2)
    assert fold(state, events.HeadSeen(at_ms=0, epoch=epoch, seq=seq)) == (state, [])


def test_a_hole_is_requested_once_and_again_at_each_head() -> None:
    state, effects = fold(agent(), command(FLUSH, 3), command(FLUSH, 4))
    assert effects == [events.RequestResend(1)]
    _, effects = fold(state, events.HeadSeen(at_ms=0, epoch=1, seq=4))
    assert effects == [events.RequestResend(1)]


def test_a_new_epoch_empties_the_reorder_buffer_and_begins_with_a_snapshot() -> None:
    state, _ = fold(agent(), command(FLUSH, 3))
    state, effects = fold(state, events.HeadSeen(at_ms=0, epoch=2, seq=5))
    assert effects == [events.RequestSnapshot()] and state.reorder_buffer == () and state.epoch == 2
    _, effects = fold(state, command(FLUSH, 1, epoch=2, origin=1))
    assert effects == [events.RequestSnapshot()]


def test_a_full_reorder_buffer_drops_the_command_furthest_ahead() -> None:
    state, _ = fold(agent(), *(command(FLUSH, seq) for seq in (9, 3, 8, 4, 7, 5)))
    assert [buffered.seq for buffered in state.reorder_buffer] == [3, 4, 5, 7]


def ahead() -> AgentState:
    """Return an agent that applied the commands 1 to 3 of epoch 1, of which the log lost the last two."""
    return fold(agent(SECOND), *(command(FLUSH, seq) for seq in (1, 2, 3)))[0]


EPOCH_START = EpochStart(previous_epoch=1, logic=1)


@pytest.mark.parametrize(
    "first",
    [
        events.HeadSeen(at_ms=0, epoch=2, seq=2),
        events.HeadSeen(at_ms=0, epoch=2, seq=9),
        command(EPOCH_START, 2, epoch=2),
        command(FLUSH, 4, epoch=2),
    ],
    ids=["head behind", "head ahead", "record under an applied seq", "record that seems to be next"],
)
def test_an_agent_ahead_of_a_bus_that_lost_its_tail_takes_the_snapshot_that_it_asks_for(first: events.Event) -> None:
    state, effects = fold(ahead(), first)
    assert effects == [events.RequestSnapshot()] and state.needs_snapshot and not in_sync(state)
    state, effects = fold(state, snapshot(Desired(), 2, 2))
    assert (state.epoch, state.seq, state.needs_snapshot) == (2, 2, False) and in_sync(state)
    state, effects = fold(state, command(FLUSH, 3, epoch=2))
    first_answer = answers(effects)[0]
    assert (first_answer.seq, first_answer.rule) == (3, 6)  # not the answer of the lost command
    (again,) = answers(fold(state, command(FLUSH, 3, epoch=2))[1])
    assert again.epoch == 2


def test_a_bus_that_lost_nothing_is_followed_without_a_snapshot() -> None:
    state, effects = fold(ahead(), events.HeadSeen(at_ms=0, epoch=2, seq=4), command(EPOCH_START, 4, epoch=2))
    assert [answer.seq for answer in answers(effects)] == [4] and not state.needs_snapshot


@pytest.mark.parametrize("previous", [1, 3])
def test_a_life_that_does_not_follow_the_history_of_the_agent_is_entered_by_a_snapshot_only(previous: int) -> None:
    state = agent(SECOND, epoch=2)
    state, effects = fold(state, command(EpochStart(previous_epoch=previous, logic=1), 1, epoch=4))
    assert effects == [events.RequestSnapshot()] and state.needs_snapshot and state.seq == 0


def test_a_version_that_is_tried_again_behind_its_abort_supersedes_no_part_of_the_first_try() -> None:
    launching = agent(seen=replace(PAUSED, tokenizer="unknown"))
    waiting = [sync("prepare", 1), sync("abort", 1), sync("prepare", 1)]
    state, _ = fold(launching, *(command(body, seq) for seq, body in enumerate(waiting, start=1)))
    state, effects = fold(state, observed(PAUSED))
    _, _, _ = carry_out(state, effects, PAUSED)
    assert [answer.seq for answer in answers(effects)] == [1, 2, 3]
    assert Skipped(Reason.SUPERSEDED) not in [answer.outcome for answer in answers(effects)]


def test_the_newest_answers_are_stored() -> None:
    state = agent(SECOND)
    for seq in range(1, 5 * REMEMBERED):
        state, _ = fold(state, command(FLUSH, seq))
        assert min(seq, REMEMBERED) <= len(state.answers) <= 2 * REMEMBERED
    newest, oldest = 5 * REMEMBERED - 1, 1
    (again,) = answers(fold(state, command(FLUSH, newest))[1])
    assert again.outcome == Skipped(Reason.NOT_PRIMARY)
    (again,) = answers(fold(state, command(FLUSH, oldest))[1])
    assert again.outcome == Skipped(Reason.SUPERSEDED)


# --- the lease --------------------------------------------------------------------------------------------------------


def test_without_a_trainer_the_agent_returns_to_the_committed_weights() -> None:
    half = Desired(
        committed=V1,
        sync=Syncing(2, Checkpoint("v2"), manifest(2), "abort", "load"),
        profile=ProfileSession(3, ProfilePlan()),
    )
    seen = replace(PAUSED, version=2)
    state = agent(seen=seen, desired=half)
    state, _ = fault(state)  # it cannot load version 2
    state, effects = fold(state, events.LeaseExpired(at_ms=0))
    _, calls, seen = carry_out(state, effects, seen)
    assert seen.generating and seen.version == 1


def test_sleeping_memory_is_not_woken_without_a_trainer() -> None:
    asleep = replace(PAUSED, asleep=ALL_TAGS)
    state = agent(seen=asleep, desired=Desired(asleep=ALL_TAGS))
    assert fold(state, events.LeaseExpired(at_ms=0))[1] == []


def test_after_the_lease_no_command_is_obeyed_before_a_snapshot() -> None:
    state, _ = fold(agent(), events.LeaseExpired(at_ms=0))
    assert not in_sync(state)
    state, effects = fold(state, command(PAUSE))
    assert effects == [events.RequestSnapshot()]
    _, effects = fold(state, snapshot())
    assert called(effects) == ["pause"]


def test_the_lease_of_an_agent_that_never_joined_means_nothing() -> None:
    state, _ = fold(AgentState(), RESTARTED, observed(PAUSED))
    assert fold(state, events.LeaseExpired(at_ms=0)) == (state, [])


# --- a call that takes too long, or fails -----------------------------------------------------------------------------


def test_past_its_deadline_a_command_fails_and_its_call_is_awaited() -> None:
    state, _ = fold(agent(), command(PAUSE, ttl_ms=50))
    assert next_deadline(state) == 50
    state, effects = fold(state, events.Tick(at_ms=49))
    assert effects == []
    state, effects = fold(state, events.Tick(at_ms=50))
    (answer,) = answers(effects)
    assert error(answer.outcome) is ErrorKind.ENGINE_TIMEOUT
    assert state.activity is not None and next_deadline(state) is None
    state, effects = fold(
        state, events.EngineReturned(at_ms=99, call_id=1, result=events.Returned(), observation=PAUSED)
    )
    _, calls, seen = carry_out(state, effects, PAUSED)
    assert [call_name(call) for call in calls] == ["resume"] and seen.generating  # it failed, so it does not last


def test_the_rest_of_an_overdue_command_is_not_begun_when_its_call_ends() -> None:
    state, effects = fold(agent(), command(SLEEP, ttl_ms=50), events.Tick(at_ms=50))
    assert called(effects) == ["pause"]
    _, effects = fold(state, events.EngineReturned(at_ms=99, call_id=1, result=events.Returned(), observation=PAUSED))
    assert called(effects) == ["resume"] and answers(effects) == []


def test_the_result_of_a_call_of_an_earlier_incarnation_is_ignored() -> None:
    state = agent()
    assert fold(state, events.EngineReturned(at_ms=1, call_id=7, result=events.Returned(), observation=PAUSED)) == (
        state,
        [],
    )


def test_a_failed_call_is_not_repeated_without_a_command() -> None:
    state, _ = fold(agent(), command(PAUSE, 1))
    state, effects = fault(state, "No.", PRESENT)
    assert error(answers(effects)[0].outcome) is ErrorKind.ENGINE_ERROR and called(effects) == []
    _, effects = fold(state, command(PAUSE, 2))
    assert called(effects) == ["pause"]


def test_weights_with_a_wrong_digest_leave_the_replica_out_of_service() -> None:
    state, effects = fold(agent(), command(sync("prepare", content="right"), 1))
    state, _, seen = carry_out(state, effects)
    state, _ = fold(state, command(sync("load", content="right"), 2))
    wrong = events.EngineReturned(
        at_ms=1,
        call_id=state.calls_made,
        result=events.Returned(digest="wrong"),
        observation=replace(seen, version=1, digest="wrong"),
    )
    state, effects = fold(state, wrong)
    assert error(answers(effects)[0].outcome) is ErrorKind.DIGEST_MISMATCH
    state, calls, seen = carry_out(state, effects, replace(seen, version=1))
    assert not {"load", "resume"} & {call_name(call) for call in calls}
    assert not seen.generating and state.engine.torn


def test_a_late_joiner_that_cannot_load_the_committed_weights_stays_out_of_service() -> None:
    state, effects = fold(AgentState(), RESTARTED, observed(), snapshot(Desired(committed=V1), 3))
    assert called(effects) == ["check_source"]
    state, effects = fault(state, "It is not there.")
    _, calls, seen = carry_out(state, effects)
    assert [call_name(call) for call in calls] == ["pause"] and not seen.generating


def test_a_late_joiner_tries_to_open_the_session_only_once() -> None:
    state, effects = fold(
        AgentState(), RESTARTED, observed(), snapshot(Desired(profile=ProfileSession(3, ProfilePlan())), 3)
    )
    assert called(effects) == ["start_profile"]
    state, effects = fault(state, "No.", PRESENT)
    assert effects == []
    _, effects = fold(state, command(FLUSH, 4))
    assert called(effects) == ["flush"]


# --- a restart in the middle of a call --------------------------------------------------------------------------------

COMMANDS: dict[str, Command] = {"pause": PAUSE, "start_profile": START}
"""Commands of which each leads to exactly this call. tests/unit/test_unanswered.py has all calls."""
NOT_DONE = {"pause": PRESENT, "start_profile": replace(PRESENT, profiling=True)}


def cut_off(call: str) -> tuple[AgentState, int]:
    """Return an agent that died in the middle of `call` and was started again, and the seq of the call's command."""
    state, effects = fold(agent(), command(COMMANDS[call], 1), RESTARTED)
    assert called(effects) == [call]
    return state, 1


def test_a_cut_off_call_whose_effect_is_observed_has_acted() -> None:
    state, seq = cut_off("pause")
    _, effects = fold(state, observed(PAUSED))
    (answer,) = answers(effects)
    assert answer.seq == seq
    assert isinstance(answer.outcome, Acted) and answer.outcome.calls[-1] == "pause"


@pytest.mark.parametrize("call", NOT_DONE)
def test_a_cut_off_call_whose_effect_is_not_observed_is_unknown(call: str) -> None:
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
    assert called(effects) == [] and not in_sync(state)


def test_a_launching_engine_does_not_resolve_a_cut_off_call() -> None:
    state, _ = cut_off("pause")
    state, effects = fold(state, observed(replace(PRESENT, tokenizer="unknown")))
    assert effects == [] and state.interrupted is not None
    _, effects = fold(state, observed(PAUSED))
    assert [type(effect) for effect in effects] == [events.Answer]


def test_the_end_of_a_call_that_needed_no_engine_resolves_a_cut_off_call_too() -> None:
    state, seq = cut_off("start_profile")
    hidden = replace(PRESENT, profiling=None)
    plan = ProfilePlan(finish=Finish(relocate=True))
    finish = ProfileCommand(action="finish", step=3, plan=plan, profiled_steps=(3,))
    other = Desired(profile=ProfileSession(4, ProfilePlan()))
    state, effects = fold(state, snapshot(other, seq), command(finish, seq + 1))
    assert called(effects) == ["finish_profile"] and state.activity is not None
    done = events.EngineReturned(at_ms=1, call_id=state.activity.call_id, result=events.Returned(), observation=hidden)
    state, effects = fold(state, done)
    assert [answer.seq for answer in answers(effects)] == [seq, seq + 1] and called(effects) == ["stop_profile"]
    assert state.interrupted is None


def test_a_cut_off_call_without_a_command_has_no_answer() -> None:
    state, _ = fold(AgentState(), RESTARTED, observed(PAUSED), snapshot())
    assert state.activity is not None and state.activity.trigger is None
    _, effects = fold(state, replace(RESTARTED, incarnation="c"), observed(PRESENT))
    assert effects == []


def test_a_second_restart_does_not_forget_the_call_that_the_first_cut_off() -> None:
    state, seq = cut_off("pause")
    _, effects = fold(state, replace(RESTARTED, incarnation="c"), observed(PAUSED))
    assert [answer.seq for answer in answers(effects)] == [seq]


def test_call_ids_continue_through_restarts() -> None:
    state, _ = cut_off("pause")
    _, effects = fold(state, observed(PRESENT), snapshot(Desired(generation="paused"), 1))
    assert effects[-1] == events.Perform(call_id=2, call=events.Pause("abort"))


def test_outcomes_survive_a_restart() -> None:
    state, first = fold(agent(SECOND), command(FLUSH, 1), replace(RESTARTED, identity=SECOND))
    state, _ = fold(state, observed(), snapshot(seq=1))
    assert answers(fold(state, command(FLUSH, 1))[1]) == answers(first)


# --- an engine that lacks operations ----------------------------------------------------------------------------------


def test_an_engine_that_cannot_be_paused_is_left_as_it_is_and_is_not_ready() -> None:
    unable = replace(PRESENT, operations=frozenset({Operation.PROFILE, Operation.LOAD}))
    state = agent(seen=unable, desired=Desired(committed=V1))
    assert state.activity is None and not in_sync(state)
    assert in_sync(agent(seen=unable))


# --- the start of an epoch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [None, frozenset({9})])
def test_an_epoch_start_with_nothing_to_end_is_skipped(replicas: frozenset[int] | None) -> None:
    begin = command(EpochStart(previous_epoch=1, logic=1), 1, epoch=2, target=Target(replicas=replicas))
    _, effects = fold(agent(), begin)
    (answer,) = answers(effects)
    assert answer.outcome == Skipped(Reason.NOT_TARGETED if replicas else Reason.ALREADY)


# --- a relaunched engine ----------------------------------------------------------------------------------------------


def quarantined() -> AgentState:
    """Return an agent whose replica was left out of a commit."""
    return agent(desired=Desired(committed=Committed(2, Checkpoint("v2"), None), quarantined=2), seq=3)


def test_an_engine_relaunched_out_of_service_restarts_its_agent() -> None:
    again = events.EngineObserved(at_ms=0, observation=replace(PRESENT, instance="two"))
    _, effects = fold(quarantined(), again)
    assert effects[-1] == events.Restart()


def test_an_engine_relaunched_in_service_is_brought_back_by_the_same_incarnation() -> None:
    state = agent(desired=Desired(committed=Committed(2, Checkpoint("v2"), None)), seq=3)
    again = events.EngineObserved(at_ms=0, observation=replace(PRESENT, instance="two"))
    state, effects = fold(state, again)
    assert events.Restart() not in effects and not in_sync(state)


def test_an_engine_that_dies_during_a_load_and_returns_restarts_its_agent() -> None:
    state, effects = fold(agent(), command(sync("prepare", 2), 1))
    state, _, _ = carry_out(state, effects)
    state, _ = fold(state, command(sync("load", 2), 2))
    state, effects = fault(state, "the connection was closed", replace(PRESENT, tokenizer="unknown", instance=None))
    assert any(isinstance(answer.outcome, Failed) for answer in answers(effects))
    state, effects = fold(state, events.EngineObserved(at_ms=0, observation=replace(PRESENT, instance="two")))
    assert effects[-1] == events.Restart()


def test_the_first_observation_is_no_relaunch() -> None:
    _, effects = fold(quarantined(), events.EngineObserved(at_ms=0, observation=replace(PRESENT, version=7)))
    assert events.Restart() not in effects
