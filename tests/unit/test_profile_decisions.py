"""What profile commands mean to replicas, their nodes and training ranks: start, check, finish and collect."""

import pytest
from msgspec.structs import replace

from schemas.commands import EngineCommand, EpochStart, Finish, Npu, ProfileCommand, ProfilePlan, Target, Window
from schemas.desired import Desired, ProfileSession
from schemas.events import (
    Answer,
    Call,
    CheckProfile,
    CollectTraces,
    Effect,
    EngineObserved,
    EngineReturned,
    Fault,
    FinishProfile,
    LeaseExpired,
    Observation,
    Observe,
    Pause,
    Perform,
    Returned,
    SnapshotReceived,
    Started,
    StartProfile,
    Tick,
)
from schemas.identity import Identity, Operation
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped, Trace
from schemas.selection import trace_directory
from tests.unit.machines import PRESENT, SECOND, START, STOP, agent, answers, carry_out, command, fold, performed, sync
from workers.machine.readiness import in_sync
from workers.machine.state import AgentState

ACTOR = Identity(replica=3, node_rank=0, role="actor")
PROFILER = Observation(engine="torch", tokenizer="present", operations=frozenset({Operation.PROFILE}), profiling=False)
PAUSE = EngineCommand(operation="pause")
FINISHED = ProfilePlan(finish=Finish(relocate=True, hook=True))


def outcome_of(state: AgentState, body: ProfileCommand | EngineCommand, **how: object) -> Outcome:
    _, effects = fold(state, command(body, **how))  # type: ignore[arg-type]
    (answer,) = answers(effects)
    return answer.outcome


def calls_for(state: AgentState, body: ProfileCommand, seq: int = 1) -> list[Call]:
    """Return the calls that the command leads to at once."""
    _, effects = fold(state, command(body, seq))
    return performed(effects)


# --- which take part --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "replicas", "expected"),
    [
        ({0, 8}, None, {0, 4}),  # with 2 GPUs a replica
        ({1}, None, {0}),
        ({15}, None, {7}),
        ({16}, None, set()),
        (None, {0, 3}, {0, 3}),  # verl up to 0.9.0 counts replicas
        ({0}, {3}, {0, 3}),
        (set(), None, set()),
        (None, None, set(range(8))),
    ],
)
def test_ranks_select_the_replicas_that_own_them(
    ranks: set[int] | None, replicas: set[int] | None, expected: set[int]
) -> None:
    plan = ProfilePlan(
        ranks=frozenset(ranks) if ranks is not None else None,
        replicas=frozenset(replicas) if replicas is not None else None,
    )
    started = set()
    for replica in range(8):
        place = Identity(replica=replica, node_rank=0, gpus_per_node=2)
        _, effects = fold(agent(place), command(replace(START, plan=plan)))
        if any(isinstance(effect, Perform) for effect in effects):
            started.add(replica)
        else:
            assert answers(effects)[0].outcome == Skipped(Reason.RANK_NOT_SELECTED)
    assert started == expected


def test_a_training_rank_follows_the_plan_of_its_role() -> None:
    plan = ProfilePlan(tool="npu", options=Npu(level="level1"), ranks=frozenset({3, 4}))
    body = replace(START, roles={"actor": plan})
    directory = "global_step_3/actor_rank_3"
    assert calls_for(agent(ACTOR, PROFILER), body) == [StartProfile(ProfileSession(3, plan), directory)]
    assert outcome_of(agent(replace(ACTOR, replica=5), PROFILER), body) == Skipped(Reason.RANK_NOT_SELECTED)
    assert outcome_of(agent(replace(ACTOR, role="critic"), PROFILER), body) == Skipped(Reason.DISABLED)
    assert outcome_of(agent(ACTOR, PROFILER), START) == Skipped(Reason.DISABLED)


def test_each_role_has_its_tools() -> None:
    nsys = ProfilePlan(tool="nsys")
    assert outcome_of(agent(), replace(START, plan=nsys)) == Skipped(Reason.TOOL_UNSUPPORTED)
    assert calls_for(agent(ACTOR, PROFILER), replace(START, roles={"actor": nsys})) != []
    other = ProfilePlan(tool="perf")
    assert outcome_of(agent(ACTOR, PROFILER), replace(START, roles={"actor": other})) == Skipped(
        Reason.TOOL_UNSUPPORTED
    )


@pytest.mark.parametrize(
    "body",
    [sync("prepare", 1), sync("commit", 1), *(EngineCommand(operation=name) for name in ("pause", "sleep", "flush"))],
    ids=str,
)
def test_a_training_rank_has_no_engine(body: EngineCommand) -> None:
    state, effects = fold(agent(ACTOR, PROFILER), command(body))
    (answer,) = answers(effects)
    assert (answer.rule, answer.outcome) == (5, Skipped(Reason.NOT_AN_ENGINE))
    assert state.desired == Desired() and in_sync(state)


def test_a_training_rank_that_is_not_observed_yet_has_no_engine_to_wait_for() -> None:
    state, effects = fold(agent(ACTOR, replace(PROFILER, tokenizer="unknown")), command(sync("prepare")))
    (answer,) = answers(effects)
    assert (answer.rule, answer.outcome) == (5, Skipped(Reason.NOT_AN_ENGINE)) and not state.queue


def test_replicas_in_a_target_are_no_training_ranks() -> None:
    body = replace(START, roles={"actor": ProfilePlan()})
    target = Target(replicas=frozenset({3}))
    assert outcome_of(agent(ACTOR, PROFILER), body, target=target) == Skipped(Reason.NOT_TARGETED)


def test_a_new_trainer_ends_the_session_of_a_training_rank() -> None:
    body = replace(START, roles={"actor": ProfilePlan()})
    state, effects = fold(agent(ACTOR, PROFILER), command(body))
    state, _, _ = carry_out(state, effects, PROFILER)
    assert state.engine.session is not None
    _, effects = fold(state, command(EpochStart(previous_epoch=1, logic=2), 2, epoch=2))
    assert [type(effect.call).__name__ for effect in effects if isinstance(effect, Perform)] == ["StopProfile"]


@pytest.mark.parametrize("seen", [replace(PRESENT, operations=frozenset()), replace(PRESENT, tokenizer="unknown")])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (replace(START, plan=ProfilePlan(enabled=False), roles={"actor": ProfilePlan()}), Reason.DISABLED),
        (replace(START, plan=ProfilePlan(ranks=frozenset({9}))), Reason.RANK_NOT_SELECTED),
        (replace(START, plan=ProfilePlan(steps=frozenset({9}))), Reason.STEP_NOT_SELECTED),
        (replace(START, plan=ProfilePlan(tool="nsys")), Reason.TOOL_UNSUPPORTED),
        (ProfileCommand(action="check", step=3, plan=ProfilePlan(enabled=False)), Reason.DISABLED),
        (STOP, Reason.NOT_PROFILING),
    ],
    ids=str,
)
def test_a_command_that_needs_no_engine_is_skipped_even_if_it_is_launching_or_has_no_profiler(
    seen: Observation, body: ProfileCommand, reason: Reason
) -> None:
    _, effects = fold(agent(seen=seen), command(body))
    (answer,) = answers(effects)
    assert (answer.rule, answer.outcome) == (10, Skipped(reason))


def test_a_step_that_is_not_selected_is_skipped_even_if_the_engine_is_busy() -> None:
    state, _ = fold(agent(), command(PAUSE, ttl_ms=10), Tick(at_ms=10))
    assert state.activity is not None and state.activity.overdue
    other = replace(START, plan=ProfilePlan(steps=frozenset({9})))
    assert outcome_of(state, other, seq=2) == Skipped(Reason.STEP_NOT_SELECTED)
    busy = outcome_of(state, START, seq=2)
    assert isinstance(busy, Failed) and busy.error is ErrorKind.ENGINE_BUSY


# --- check ------------------------------------------------------------------------------------------------------------

CHECK = ProfileCommand(action="check", step=3, plan=ProfilePlan(steps=frozenset({9}), window=Window(0, 2)))


def test_a_check_asks_the_engine_and_changes_nothing() -> None:
    before = agent()
    state, effects = fold(before, command(CHECK))
    assert performed(effects) == [CheckProfile(CHECK.plan)]
    state, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=PRESENT))
    assert answers(effects)[0].outcome == Acted(calls=("check_profile",))
    assert (state.desired, state.suppressed, state.engine) == (before.desired, before.suppressed, before.engine)


def test_a_failed_check_names_what_is_missing_and_suppresses_nothing() -> None:
    state, _ = fold(agent(), command(CHECK))
    refused = Fault("unsupported", "fake 1 can't record memory.")
    state, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=refused, observation=PRESENT))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNSUPPORTED and "memory" in outcome.message
    assert not state.reconcile_blocked and calls_for(state, replace(START, step=9), 2) != []


# --- finish -----------------------------------------------------------------------------------------------------------

FINISH = ProfileCommand(action="finish", step=3, plan=FINISHED, profiled_steps=(1, 3))


@pytest.mark.parametrize("place", [Identity(replica=0, node_rank=0, nnodes=2), SECOND])
def test_every_node_finishes_the_traces_on_its_disk(place: Identity) -> None:
    directories = ("global_step_1/replica_0", "global_step_3/replica_0")
    assert calls_for(agent(place), FINISH) == [FinishProfile(FINISHED, directories, (1, 3))]


@pytest.mark.parametrize(
    ("plan", "place", "acts"),
    [
        (ProfilePlan(), SECOND, False),  # nothing to do
        (ProfilePlan(enabled=False, finish=Finish(hook=True, hook_all_ranks=True)), SECOND, False),
        (ProfilePlan(ranks=frozenset({7}), finish=Finish(relocate=True)), SECOND, False),
        (ProfilePlan(ranks=frozenset({7}), finish=Finish(hook=True, hook_all_ranks=True)), SECOND, True),
        (ProfilePlan(ranks=frozenset({7}), finish=Finish(hook=True, hook_ranks=frozenset({1}))), SECOND, True),
        (ProfilePlan(finish=Finish(hook=True, hook_ranks=frozenset({0}))), SECOND, False),
        (ProfilePlan(finish=Finish(hook=True, relocate=True, hook_ranks=frozenset({0}))), SECOND, True),
    ],
)
def test_a_finish_without_anything_to_relocate_or_run_is_skipped(
    plan: ProfilePlan, place: Identity, acts: bool
) -> None:
    calls = calls_for(agent(place), replace(FINISH, plan=plan))
    assert [type(call).__name__ for call in calls] == (["FinishProfile"] if acts else [])


def test_a_finish_that_continues_in_the_background_says_so() -> None:
    state, _ = fold(agent(), command(FINISH))
    found = Returned(traces=(Trace("rollout-replica0_x", 1, "sha", 0),), still_running=True)
    _, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=found, observation=PRESENT))
    assert answers(effects)[0].outcome == Acted(calls=("finish_profile",), traces=found.traces, still_running=True)


def late_stop() -> AgentState:
    """Return an agent whose engine still writes the last trace after the deadline of the stop."""
    state, _ = fold(agent(), command(START))
    begun = replace(PRESENT, profiling=True)
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=begun))
    state, _ = fold(state, command(STOP, 2, ttl_ms=10), Tick(at_ms=10))
    return state


def finished(effects: list[Effect]) -> bool:
    return performed(effects) == calls_for(agent(), FINISH)


def test_a_finish_waits_for_the_last_trace() -> None:
    state, effects = fold(late_stop(), command(FINISH, 3))
    assert effects == [Answer(epoch=1, seq=3, outcome=Acted(calls=(), still_running=True), rule=10)]
    state, effects = fold(state, command(PAUSE, 4))
    (busy,) = answers(effects)
    assert isinstance(busy.outcome, Failed) and busy.outcome.error is ErrorKind.ENGINE_BUSY
    state, effects = fold(state, EngineReturned(at_ms=99, call_id=2, result=Returned(), observation=PRESENT))
    assert finished(effects) and answers(effects) == []
    state, effects = fold(state, EngineReturned(at_ms=100, call_id=3, result=Returned(), observation=PRESENT))
    assert not finished(effects), "once"


def test_a_deferred_finish_survives_a_failed_stop() -> None:
    state, _ = fold(late_stop(), command(FINISH, 3))
    _, effects = fold(
        state, EngineReturned(at_ms=99, call_id=2, result=Fault("engine_error", "No."), observation=PRESENT)
    )
    assert finished(effects)


def test_a_deferred_finish_survives_a_restart_of_the_agent() -> None:
    state, _ = fold(late_stop(), command(FINISH, 3))
    started = Started(at_ms=0, incarnation="next", identity=state.identity, settings=state.settings)
    state, effects = fold(state, started, EngineObserved(at_ms=1, observation=PRESENT))
    assert effects == [], "nothing before the desired state is known"
    snapshot = SnapshotReceived(at_ms=2, epoch=1, seq=3, desired=state.desired)
    _, effects = fold(state, snapshot)
    assert finished(effects)


def test_a_deferred_finish_survives_the_pause_of_an_engine_that_waits_for_a_bus() -> None:
    state, _ = fold(late_stop(), command(FINISH, 3))
    settings = replace(state.settings, on_lost_bus="pause")
    started = Started(at_ms=0, incarnation="next", identity=state.identity, settings=settings)
    relaunched = replace(PRESENT, instance="two")
    state, effects = fold(state, started, EngineObserved(at_ms=1, observation=relaunched), LeaseExpired(at_ms=2))
    state, calls, _ = carry_out(state, effects, relaunched)
    assert calls == [Observe(), Pause("abort")]
    _, effects = fold(state, SnapshotReceived(at_ms=2, epoch=1, seq=3, desired=state.desired))
    assert finished(effects)


def test_a_deferred_finish_is_made_once_though_a_bus_comes_back_while_the_agent_looks_at_its_engine() -> None:
    state, _ = fold(late_stop(), command(FINISH, 3))
    settings = replace(state.settings, on_lost_bus="pause")
    started = Started(at_ms=0, incarnation="next", identity=state.identity, settings=settings)
    relaunched = replace(PRESENT, instance="two")
    state, effects = fold(state, started, EngineObserved(at_ms=1, observation=relaunched), LeaseExpired(at_ms=2))
    state, _ = fold(state, SnapshotReceived(at_ms=2, epoch=1, seq=3, desired=state.desired))
    _, calls, _ = carry_out(state, effects, relaunched)
    assert sum(isinstance(call, FinishProfile) for call in calls) == 1


def test_a_second_finish_that_cannot_wait_beside_the_first_is_refused_and_forgets_neither() -> None:
    state, _ = fold(late_stop(), command(FINISH, 3))
    state, effects = fold(state, command(replace(FINISH, profiled_steps=(7,)), 4))
    (busy,) = answers(effects)
    assert isinstance(busy.outcome, Failed) and busy.outcome.error is ErrorKind.ENGINE_BUSY
    state, effects = fold(state, command(FINISH, 5))
    assert answers(effects)[0].outcome == Acted(calls=(), still_running=True), "the same again"
    state, effects = fold(state, EngineReturned(at_ms=99, call_id=2, result=Returned(), observation=PRESENT))
    assert finished(effects)


def test_a_finish_for_other_agents_is_skipped_at_once() -> None:
    state, _ = fold(agent(), command(PAUSE, ttl_ms=10), Tick(at_ms=10))
    assert outcome_of(state, replace(FINISH, plan=ProfilePlan()), seq=2) == Skipped(Reason.DISABLED)
    assert outcome_of(state, FINISH, seq=2, target=Target(replicas=frozenset({5}))) == Skipped(Reason.NOT_TARGETED)


# --- directories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "place", "directory"),
    [
        ("step", SECOND, "global_step_3/replica_0"),
        ("verl_step", SECOND, "rollout_step_3/agent_loop_replica_0"),
        ("verl", SECOND, "agent_loop_rollout_replica_0/.step_3"),
        ("step", ACTOR, "global_step_3/actor_rank_3"),
        ("verl", ACTOR, "."),
    ],
)
def test_each_layout_has_its_directories(layout: str, place: Identity, directory: str) -> None:
    assert trace_directory(3, ProfilePlan(layout=layout), place) == directory  # type: ignore[arg-type]


# --- collect ----------------------------------------------------------------------------------------------------------

COLLECT = ProfileCommand(action="collect", step=3)


@pytest.mark.parametrize("tokenizer", ["present", "absent", "unknown"])
def test_collect_acts_on_every_node_rank_above_0(tokenizer: str) -> None:
    state, effects = fold(agent(SECOND, replace(PRESENT, tokenizer=tokenizer)), command(COLLECT))
    assert effects == [
        Perform(call_id=1, call=CollectTraces(ProfileSession(3, ProfilePlan()), "global_step_3/replica_0"))
    ]
    found = Returned(traces=(Trace("global_step_3/replica_0/x-TP-1.trace.json.gz", 10, "sha"),))
    _, effects = fold(state, EngineReturned(at_ms=0, call_id=1, result=found, observation=None))
    (answer,) = answers(effects)
    assert answer.outcome == Acted(calls=("collect_traces",), traces=found.traces)


def test_collect_is_skipped_by_the_primary_whose_stop_named_its_traces() -> None:
    assert outcome_of(agent(), COLLECT) == Skipped(Reason.ALREADY)


def test_collect_applies_to_the_replicas_of_the_start() -> None:
    others = ProfileCommand(action="collect", step=3, plan=ProfilePlan(ranks=frozenset({7})))
    assert outcome_of(agent(SECOND), others) == Skipped(Reason.RANK_NOT_SELECTED)
