"""What a profile command means to whom: replicas, their nodes, training ranks; and what is asked before and after."""

import pytest
from msgspec.structs import replace

from schemas.commands import (
    EngineCommand,
    EpochStart,
    Finish,
    Npu,
    ProfileCommand,
    ProfilePlan,
    Target,
    Window,
)
from schemas.desired import Desired, ProfileSession
from schemas.events import (
    Answer,
    CheckProfile,
    CollectTraces,
    Effect,
    EngineObserved,
    EngineReturned,
    Fault,
    FinishProfile,
    Observation,
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
from tests.unit.machines import PRESENT, SECOND, START, STOP, agent, answers, carry_out, command, fold, sync
from workers.machine.decide import AgentState, in_sync

ACTOR = Identity(replica=3, node_rank=0, role="actor")
PROFILER = Observation(engine="torch", tokenizer="present", operations=frozenset({Operation.PROFILE}), profiling=False)
PAUSE = EngineCommand(operation="pause")
FINISHED = ProfilePlan(finish=Finish(relocate=True, hook=True))


def told(state: AgentState, body: ProfileCommand | EngineCommand, **how: object) -> Outcome:
    _, effects = fold(state, command(body, **how))  # type: ignore[arg-type]
    (answer,) = answers(effects)
    return answer.outcome


def asked(state: AgentState, body: ProfileCommand, seq: int = 1) -> list[object]:
    """The calls that the command leads to at once."""
    _, effects = fold(state, command(body, seq))
    return [one.call for one in effects if isinstance(one, Perform)]


# --- who is meant -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "replicas", "meant"),
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
    ranks: set[int] | None, replicas: set[int] | None, meant: set[int]
) -> None:
    plan = ProfilePlan(
        ranks=frozenset(ranks) if ranks is not None else None,
        replicas=frozenset(replicas) if replicas is not None else None,
    )
    begun = set()
    for replica in range(8):
        place = Identity(replica=replica, node_rank=0, gpus_per_node=2)
        _, effects = fold(agent(place), command(replace(START, plan=plan)))
        if any(isinstance(one, Perform) for one in effects):
            begun.add(replica)
        else:
            assert answers(effects)[0].outcome == Skipped(Reason.RANK_NOT_SELECTED)
    assert begun == meant


def test_a_training_rank_follows_the_plan_of_its_role() -> None:
    plan = ProfilePlan(tool="npu", options=Npu(level="level1"), ranks=frozenset({3, 4}))
    body = replace(START, roles={"actor": plan})
    directory = "global_step_3/actor_rank_3"
    assert asked(agent(ACTOR, PROFILER), body) == [StartProfile(ProfileSession(3, plan), directory)]
    assert told(agent(replace(ACTOR, replica=5), PROFILER), body) == Skipped(Reason.RANK_NOT_SELECTED)
    assert told(agent(replace(ACTOR, role="critic"), PROFILER), body) == Skipped(Reason.DISABLED)
    assert told(agent(ACTOR, PROFILER), START) == Skipped(Reason.DISABLED)


def test_each_role_has_its_tools() -> None:
    nsys = ProfilePlan(tool="nsys")
    assert told(agent(), replace(START, plan=nsys)) == Skipped(Reason.TOOL_UNSUPPORTED)
    assert asked(agent(ACTOR, PROFILER), replace(START, roles={"actor": nsys})) != []
    other = ProfilePlan(tool="perf")
    assert told(agent(ACTOR, PROFILER), replace(START, roles={"actor": other})) == Skipped(Reason.TOOL_UNSUPPORTED)


@pytest.mark.parametrize(
    "body",
    [sync("prepare", 1), sync("commit", 1), *(EngineCommand(operation=one) for one in ("pause", "sleep", "flush"))],
    ids=str,
)
def test_a_training_rank_has_no_engine(body: EngineCommand) -> None:
    state, effects = fold(agent(ACTOR, PROFILER), command(body))
    (answer,) = answers(effects)
    assert (answer.rule, answer.outcome) == (5, Skipped(Reason.NOT_AN_ENGINE))
    assert state.desired == Desired() and in_sync(state)


def test_replicas_in_a_target_are_no_training_ranks() -> None:
    body = replace(START, roles={"actor": ProfilePlan()})
    target = Target(replicas=frozenset({3}))
    assert told(agent(ACTOR, PROFILER), body, target=target) == Skipped(Reason.NOT_TARGETED)


def test_a_new_trainer_ends_the_session_of_a_training_rank() -> None:
    body = replace(START, roles={"actor": ProfilePlan()})
    state, effects = fold(agent(ACTOR, PROFILER), command(body))
    state, _, _ = carry_out(state, effects, PROFILER)
    assert state.engine.session is not None
    _, effects = fold(state, command(EpochStart(previous_epoch=1, logic=2), 2, epoch=2))
    assert [type(one.call).__name__ for one in effects if isinstance(one, Perform)] == ["StopProfile"]


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
def test_an_engine_that_nothing_is_asked_of_need_not_be_up_nor_have_a_profiler(
    seen: Observation, body: ProfileCommand, reason: Reason
) -> None:
    _, effects = fold(agent(seen=seen), command(body))
    (answer,) = answers(effects)
    assert (answer.rule, answer.outcome) == (10, Skipped(reason))


def test_an_engine_that_is_busy_keeps_nobody_from_saying_that_a_step_is_not_its_own() -> None:
    state, _ = fold(agent(), command(PAUSE, ttl_ms=10), Tick(at_ms=10))
    assert state.activity is not None and state.activity.overdue
    other = replace(START, plan=ProfilePlan(steps=frozenset({9})))
    assert told(state, other, seq=2) == Skipped(Reason.STEP_NOT_SELECTED)
    busy = told(state, START, seq=2)
    assert isinstance(busy, Failed) and busy.error is ErrorKind.ENGINE_BUSY


# --- the question before ----------------------------------------------------------------------------------------------

CHECK = ProfileCommand(action="check", step=3, plan=ProfilePlan(steps=frozenset({9}), window=Window(0, 2)))


def test_a_check_asks_the_engine_and_leaves_no_mark() -> None:
    before = agent()
    state, effects = fold(before, command(CHECK))
    assert [one.call for one in effects if isinstance(one, Perform)] == [CheckProfile(CHECK.plan)]
    state, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=PRESENT))
    assert answers(effects)[0].outcome == Acted(calls=("check_profile",))
    assert (state.desired, state.suppressed, state.engine) == (before.desired, before.suppressed, before.engine)


def test_a_check_that_fails_names_what_can_not_be_and_gives_nothing_up() -> None:
    state, _ = fold(agent(), command(CHECK))
    refused = Fault("unsupported", "fake 1 can't record memory.")
    state, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=refused, observation=PRESENT))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNSUPPORTED and "memory" in outcome.message
    assert not state.reconcile_blocked and asked(state, replace(START, step=9), 2) != []


def test_a_check_concerns_whom_the_start_will_concern() -> None:
    others = replace(CHECK, plan=ProfilePlan(ranks=frozenset({7})))
    assert told(agent(), others) == Skipped(Reason.RANK_NOT_SELECTED)
    assert told(agent(), replace(CHECK, plan=ProfilePlan(enabled=False))) == Skipped(Reason.DISABLED)
    assert told(agent(SECOND), CHECK) == Skipped(Reason.NOT_PRIMARY)


# --- the end ----------------------------------------------------------------------------------------------------------

FINISH = ProfileCommand(action="finish", step=3, plan=FINISHED, profiled_steps=(1, 3))


@pytest.mark.parametrize("place", [Identity(replica=0, node_rank=0, nnodes=2), SECOND])
def test_every_node_finishes_what_lies_on_its_disk(place: Identity) -> None:
    directories = ("global_step_1/replica_0", "global_step_3/replica_0")
    assert asked(agent(place), FINISH) == [FinishProfile(FINISHED, directories, (1, 3))]


@pytest.mark.parametrize(
    ("plan", "place", "acts"),
    [
        (ProfilePlan(), SECOND, False),  # nothing to be done
        (ProfilePlan(enabled=False, finish=Finish(hook=True, hook_all_ranks=True)), SECOND, False),
        (ProfilePlan(ranks=frozenset({7}), finish=Finish(relocate=True)), SECOND, False),
        (ProfilePlan(ranks=frozenset({7}), finish=Finish(hook=True, hook_all_ranks=True)), SECOND, True),
        (ProfilePlan(ranks=frozenset({7}), finish=Finish(hook=True, hook_ranks=frozenset({1}))), SECOND, True),
        (ProfilePlan(finish=Finish(hook=True, hook_ranks=frozenset({0}))), SECOND, False),
        (ProfilePlan(finish=Finish(hook=True, relocate=True, hook_ranks=frozenset({0}))), SECOND, True),
    ],
)
def test_who_has_something_to_finish(plan: ProfilePlan, place: Identity, acts: bool) -> None:
    calls = asked(agent(place), replace(FINISH, plan=plan))
    assert [type(one).__name__ for one in calls] == (["FinishProfile"] if acts else [])


def test_a_hook_that_goes_on_is_told() -> None:
    state, _ = fold(agent(), command(FINISH))
    found = Returned(traces=(Trace("rollout-replica0_x", 1, "sha", 0),), still_running=True)
    _, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=found, observation=PRESENT))
    assert answers(effects)[0].outcome == Acted(calls=("finish_profile",), traces=found.traces, still_running=True)


def late_stop() -> AgentState:
    """The engine still writes the last trace when the time of the stop is over."""
    state, _ = fold(agent(), command(START))
    begun = replace(PRESENT, profiling=True)
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=begun))
    state, _ = fold(state, command(STOP, 2, ttl_ms=10), Tick(at_ms=10))
    return state


def finished(effects: list[Effect]) -> bool:
    return [one.call for one in effects if isinstance(one, Perform)] == asked(agent(), FINISH)


def test_a_finish_that_comes_before_the_last_trace_is_written_goes_on_when_it_is() -> None:
    state, effects = fold(late_stop(), command(FINISH, 3))
    assert effects == [Answer(epoch=1, seq=3, outcome=Acted(calls=(), still_running=True), rule=10)]
    state, effects = fold(state, command(PAUSE, 4))
    (busy,) = answers(effects)
    assert isinstance(busy.outcome, Failed) and busy.outcome.error is ErrorKind.ENGINE_BUSY
    state, effects = fold(state, EngineReturned(at_ms=99, call_id=2, result=Returned(), observation=PRESENT))
    assert finished(effects) and answers(effects) == []
    state, effects = fold(state, EngineReturned(at_ms=100, call_id=3, result=Returned(), observation=PRESENT))
    assert not finished(effects), "once"


def test_a_finish_that_is_owed_outlives_a_stop_that_failed() -> None:
    state, _ = fold(late_stop(), command(FINISH, 3))
    _, effects = fold(
        state, EngineReturned(at_ms=99, call_id=2, result=Fault("engine_error", "No."), observation=PRESENT)
    )
    assert finished(effects)


def test_a_finish_that_is_owed_outlives_the_agent() -> None:
    state, _ = fold(late_stop(), command(FINISH, 3))
    started = Started(at_ms=0, incarnation="next", identity=state.identity, settings=state.settings)
    state, effects = fold(state, started, EngineObserved(at_ms=1, observation=PRESENT))
    assert effects == [], "nothing before it knows what is wanted"
    snapshot = SnapshotReceived(at_ms=2, epoch=1, seq=3, desired=state.desired)
    _, effects = fold(state, snapshot)
    assert finished(effects)


def test_a_finish_that_is_not_for_this_agent_waits_for_nothing() -> None:
    state, _ = fold(agent(), command(PAUSE, ttl_ms=10), Tick(at_ms=10))
    assert told(state, replace(FINISH, plan=ProfilePlan()), seq=2) == Skipped(Reason.DISABLED)
    assert told(state, FINISH, seq=2, target=Target(replicas=frozenset({5}))) == Skipped(Reason.NOT_TARGETED)


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
def test_directories(layout: str, place: Identity, directory: str) -> None:
    assert trace_directory(3, ProfilePlan(layout=layout), place) == directory  # type: ignore[arg-type]


# --- collecting what a session left -----------------------------------------------------------------------------------

COLLECT = ProfileCommand(action="collect", step=3)


@pytest.mark.parametrize("tokenizer", ["present", "absent", "unknown"])
def test_collect_looks_at_the_disk_of_every_node_rank_above_0(tokenizer: str) -> None:
    state, effects = fold(agent(SECOND, replace(PRESENT, tokenizer=tokenizer)), command(COLLECT))
    assert effects == [
        Perform(call_id=1, call=CollectTraces(ProfileSession(3, ProfilePlan()), "global_step_3/replica_0"))
    ]
    found = Returned(traces=(Trace("global_step_3/replica_0/x-TP-1.trace.json.gz", 10, "sha"),))
    _, effects = fold(state, EngineReturned(at_ms=0, call_id=1, result=found, observation=None))
    (answer,) = answers(effects)
    assert answer.outcome == Acted(calls=("collect_traces",), traces=found.traces)


def test_collect_is_told_already_by_the_primary() -> None:
    assert told(agent(), COLLECT) == Skipped(Reason.ALREADY)


def test_collect_concerns_the_same_replicas_as_the_start() -> None:
    others = ProfileCommand(action="collect", step=3, plan=ProfilePlan(ranks=frozenset({7})))
    assert told(agent(SECOND), others) == Skipped(Reason.RANK_NOT_SELECTED)


def test_collect_opens_nothing_and_gives_nothing_up() -> None:
    opened, _ = fold(agent(SECOND), command(START, 1))
    state, _ = fold(opened, command(COLLECT, 2))
    assert state.desired == opened.desired and state.suppressed == opened.suppressed
