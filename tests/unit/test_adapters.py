"""LoRA adapters on an agent: what it loads and unloads, what it believes of its engine, and what its status says."""

from typing import Literal

import pytest
from msgspec.structs import replace

from schemas.commands import AdapterDrop, AdapterSync, AdapterVersion, EngineCommand
from schemas.desired import Adapter, Desired
from schemas.events import (
    Call,
    CheckAdapter,
    EngineObserved,
    EngineReturned,
    Fault,
    HeadSeen,
    LeaseExpired,
    LoadAdapter,
    Observation,
    Perform,
    Returned,
    Started,
    Tick,
    UnloadAdapter,
)
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from tests.unit.machines import PRESENT, agent, answers, carry_out, command, fault, fold, performed
from workers.link.heartbeat import status_of
from workers.machine.decide import decide, next_deadline
from workers.machine.readiness import is_ready
from workers.machine.state import AgentState, call_name

Phase = Literal["prepare", "load", "commit", "abort"]
PHASES: tuple[Phase, ...] = ("prepare", "load", "commit")
LISTING = replace(PRESENT, adapters={})
GRACE_MS = 600_000


def version(number: int, name: str = "policy", path: str = "") -> AdapterVersion:
    return AdapterVersion(name=name, version=number, path=path or f"{name}/{number}")


def phase(name: Phase, number: int, keep: int = 2) -> AdapterSync:
    return AdapterSync(phase=name, adapter=version(number), keep=keep)


def wanting(*numbers: int, loading: int = 0) -> Desired:
    adapter = Adapter(tuple(map(version, numbers)), version(loading) if loading else None)
    return Desired(adapters={"policy": adapter})


def holding(*numbers: int) -> Observation:
    return replace(PRESENT, adapters={version(number).model: version(number).path for number in numbers})


def lost_answer(state: AgentState, seen: Observation | None) -> tuple[AgentState, list[Call]]:
    """The call in flight is not answered."""
    assert state.activity is not None
    unanswered = Fault("unanswered", "no answer")
    returned = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=unanswered, observation=seen)
    state, effects = decide(state, returned)
    return state, performed(effects)


# --- a sync -----------------------------------------------------------------------------------------------------------


def test_a_sync_checks_then_loads_and_its_commit_makes_no_call() -> None:
    state, seen = agent(seen=LISTING), LISTING
    calls = []
    for seq, name in enumerate(PHASES, 1):
        state, effects = fold(state, command(phase(name, 1), seq))
        state, made, seen = carry_out(state, effects, seen)
        calls.append(made)
        assert isinstance(answers(effects)[0].outcome, Acted)
    assert calls == [[CheckAdapter(version(1))], [LoadAdapter(version(1))], []]
    assert state.desired.adapters["policy"].versions == (version(1),)


def test_a_load_phase_is_of_a_sync_that_an_agent_does_not_join_again_in() -> None:
    """A new key waits for its end, as in a sync of base weights."""
    state, seen = agent(seen=LISTING), LISTING
    within = []
    for seq, name in enumerate(PHASES, 1):
        state, effects = fold(state, command(phase(name, 1), seq))
        state, _, seen = carry_out(state, effects, seen)
        within.append(state.in_a_sync)
    assert within == [False, True, False]


def test_a_commit_unloads_what_is_not_kept_and_an_abort_what_was_loaded() -> None:
    state, effects = fold(agent(seen=holding(1, 2), desired=wanting(1, loading=2)), command(phase("commit", 2, keep=1)))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=False)]
    state, effects = fold(agent(seen=holding(1, 2), desired=wanting(1, loading=2)), command(phase("abort", 2)))
    assert performed(effects) == [UnloadAdapter("policy-v2", waited=False)]


def test_a_drop_unloads_all_versions_and_none_of_another_name() -> None:
    seen = replace(
        holding(1, 2), adapters={**dict(holding(1, 2).adapters or {}), "house": "house", "policy-v2-v1": "x"}
    )
    state, effects = fold(agent(seen=seen, desired=wanting(1, 2)), command(AdapterDrop(name="policy")))
    _, calls, seen = carry_out(state, effects, seen)
    assert {call.model for call in calls if isinstance(call, UnloadAdapter)} == {"policy-v1", "policy-v2"}
    assert seen.adapters == {"house": "house", "policy-v2-v1": "x"}


def test_versions_are_loaded_in_one_order_whatever_order_a_snapshot_names_them_in() -> None:
    adapters = {name: Adapter((version(1, name),)) for name in ("b", "a")}
    _, effects = fold(agent(seen=LISTING), command(EngineCommand(operation="flush")))
    state, first, _ = carry_out(agent(seen=LISTING, desired=Desired(adapters=adapters)), [], LISTING)
    assert state.activity is not None and state.activity.calls[0] == CheckAdapter(version(1, "a"))
    assert first == [] and performed(effects)


def test_a_replica_that_has_newer_versions_says_so_and_loads_nothing() -> None:
    _, effects = fold(agent(seen=holding(3), desired=wanting(3)), command(phase("load", 2)))
    assert answers(effects)[0].outcome == Skipped(Reason.STALE_VERSION) and performed(effects) == []


def launched(*waiting: AdapterSync | AdapterDrop) -> tuple[AgentState, list[Outcome], list[Call]]:
    """What becomes of syncs that waited for an engine to be launched again."""
    launching = agent(seen=replace(LISTING, tokenizer="unknown"))
    state, _ = fold(launching, *(command(body, seq) for seq, body in enumerate(waiting, 1)))
    state, effects = fold(state, EngineObserved(at_ms=1, observation=LISTING))
    state, calls, _ = carry_out(state, effects, LISTING)
    return state, [answer.outcome for answer in answers(effects)], calls


def test_a_launched_engine_loads_no_version_that_newer_syncs_have_replaced_meanwhile() -> None:
    """They would take the places of those that are wanted, and their files are gone."""
    state, outcomes, calls = launched(*(phase(name, number, keep=1) for number in (1, 2) for name in PHASES))
    assert outcomes[:3] == [Skipped(Reason.SUPERSEDED)] * 3
    assert all(isinstance(outcome, Acted) for outcome in outcomes[3:]) and len(outcomes) == 6
    assert calls == [CheckAdapter(version(2)), LoadAdapter(version(2))]
    assert state.engine.adapters.keys() == {"policy-v2"}


def test_a_version_whose_successor_was_aborted_is_loaded() -> None:
    state, _, calls = launched(*map(phase, PHASES, (1, 1, 1)), phase("prepare", 2), phase("abort", 2))
    assert LoadAdapter(version(1)) in calls and state.engine.adapters.keys() == {"policy-v1"}


def test_a_sync_of_another_adapter_replaces_none() -> None:
    other = AdapterSync(phase="prepare", adapter=version(9, "judge"), keep=2)
    _, outcomes, calls = launched(*map(phase, PHASES, (1, 1, 1)), other)
    assert Skipped(Reason.SUPERSEDED) not in outcomes and LoadAdapter(version(1)) in calls


def test_an_engine_without_the_operation_says_so() -> None:
    state = agent(seen=replace(PRESENT, operations=frozenset(Operation) - {Operation.ADAPTERS}))
    _, effects = fold(state, command(phase("prepare", 1)))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.UNSUPPORTED


# --- what is read back ------------------------------------------------------------------------------------------------


def test_a_load_that_the_engine_does_not_show_has_failed() -> None:
    state, effects = fold(agent(seen=LISTING), command(phase("load", 1)))
    state, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=LISTING))
    assert performed(effects) == [LoadAdapter(version(1))]
    _, effects = fold(state, EngineReturned(at_ms=1, call_id=2, result=Returned(), observation=LISTING))
    outcome = answers(effects)[0].outcome
    assert isinstance(outcome, Failed) and outcome.error is ErrorKind.NO_EFFECT


def test_an_evicted_version_is_loaded_again_by_itself() -> None:
    state = agent(seen=holding(1), desired=wanting(1))
    assert is_ready(state)
    state, effects = fold(state, EngineObserved(at_ms=1, observation=LISTING))
    assert performed(effects) == [CheckAdapter(version(1))] and not is_ready(state)
    state, calls, _ = carry_out(state, effects, LISTING)
    assert calls[-1] == LoadAdapter(version(1)) and is_ready(state)


def test_other_bytes_under_the_name_are_unloaded_before_the_right_ones_are_loaded() -> None:
    seen = replace(PRESENT, adapters={"policy-v1": "elsewhere"})
    state = agent(seen=seen, desired=wanting(1))
    state, effects = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=seen))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=False)]
    _, calls, _ = carry_out(state, effects, seen)
    assert calls[-1] == LoadAdapter(version(1))


def test_an_engine_that_lists_no_paths_is_believed_to_hold_what_was_loaded() -> None:
    state, effects = fold(agent(seen=LISTING), command(phase("load", 1)))
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=LISTING))
    named = replace(PRESENT, adapters={"policy-v1": ""})
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=2, result=Returned(), observation=named))
    assert state.engine.adapters == {"policy-v1": "policy/1"}


def test_what_was_discarded_is_unloaded_and_loaded_again_and_the_replica_is_not_ready_before() -> None:
    seen = holding(1)
    state = agent(seen=seen, desired=wanting(1))
    state, effects = fold(state, command(EngineCommand(operation="sleep", discard=True)))
    state, _, seen = carry_out(state, effects, seen)
    assert seen.adapters == {"policy-v1": "policy/1"} and status_of(state).adapters_missing == ("policy-v1",)
    state = replace(state, engine=replace(state.engine, torn=False))
    state, effects = fold(state, command(EngineCommand(operation="wake"), 2))
    state, calls, _ = carry_out(state, effects, seen)
    assert calls[-3:] == [CheckAdapter(version(1)), UnloadAdapter("policy-v1", waited=True), LoadAdapter(version(1))]
    assert status_of(state).adapters_missing == ()


def test_while_a_sleep_discards_the_status_proves_no_adapter() -> None:
    state = agent(seen=holding(1), desired=wanting(1))
    state, _ = fold(state, command(EngineCommand(operation="sleep", discard=True)))
    assert status_of(state).adapters_missing == ("policy-v1",)


# --- answers that are lost --------------------------------------------------------------------------------------------


def test_of_a_listing_engine_a_lost_answer_is_no_doubt() -> None:
    state, _ = fold(agent(seen=LISTING), command(phase("load", 1)))
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=LISTING))
    done, _ = lost_answer(state, holding(1))
    assert done.engine.stale_adapters == frozenset() and done.answers[-1].outcome == Acted(
        calls=("check_adapter", "load_adapter")
    )
    not_done, _ = lost_answer(state, LISTING)
    assert not_done.engine.adapters == {} and isinstance(not_done.answers[-1].outcome, Failed)


def test_an_engine_that_lists_nothing_may_have_what_was_not_answered_so_it_is_unloaded_first() -> None:
    state, _ = fold(agent(), command(phase("load", 1)))
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=PRESENT))
    state, calls = lost_answer(state, PRESENT)
    assert state.engine.stale_adapters == {"policy-v1"} and calls == []
    _, effects = fold(state, command(phase("load", 1), 2))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=True)]


@pytest.mark.parametrize("result", [Returned(), Fault("unanswered", "no answer")])
def test_a_launch_that_lists_nothing_may_have_what_was_loaded_when_it_was_first_seen(result: Returned | Fault) -> None:
    """It may have been there already when the call was made."""
    state, _ = fold(agent(), command(phase("load", 2)))
    assert state.activity is not None and isinstance(state.activity.calls[0], CheckAdapter)
    state, _ = fold(
        state, EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=PRESENT)
    )
    assert state.activity is not None
    other = replace(PRESENT, instance="another")
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=state.activity.call_id, result=result, observation=other))
    assert version(2).model in state.engine.adapters


def test_an_engine_that_lists_nothing_may_still_have_what_was_to_be_unloaded() -> None:
    state, effects = fold(agent(desired=wanting(1)))
    state, _, _ = carry_out(*fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=PRESENT)))
    state, effects = fold(state, command(AdapterDrop(name="policy")))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=False)]
    state, _ = lost_answer(state, PRESENT)
    state, effects = fold(state, Tick(at_ms=10_000))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=False)]


# --- requests that run on a version -----------------------------------------------------------------------------------


def test_a_refused_unload_is_asked_again_and_after_the_time_of_policy_whether_or_not_the_engine_can_tell() -> None:
    state, effects = fold(agent(seen=holding(1), desired=wanting(1)), command(AdapterDrop(name="policy")))
    state, _ = fault(state, seen=holding(1))
    assert next_deadline(state) == 5_001 and status_of(state).adapters_left == ("policy-v1",)
    state, effects = fold(state, Tick(at_ms=5_001))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=False)]
    state, _ = fault(state, seen=holding(1))
    _, effects = fold(state, Tick(at_ms=GRACE_MS))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=True)]


def test_a_paused_engine_is_not_asked_and_what_it_froze_has_all_of_its_time_afterwards() -> None:
    paused = replace(holding(1), generating=False)
    state = agent(seen=paused, desired=replace(wanting(1), generation="paused"))
    state, effects = fold(state, command(AdapterDrop(name="policy")))
    assert performed(effects) == []
    state, effects = fold(state, Tick(at_ms=GRACE_MS))
    assert performed(effects) == [] and state.unloads["policy-v1"].until_ms > 2 * GRACE_MS


def test_a_version_that_is_being_loaded_still_needs_its_files_when_it_is_no_longer_wanted() -> None:
    state, _ = fold(agent(seen=LISTING), command(phase("load", 1), ttl_ms=1000))
    state, _ = fold(state, EngineReturned(at_ms=1, call_id=1, result=Returned(), observation=LISTING))
    state, _ = fold(state, Tick(at_ms=1000), command(phase("abort", 1), 2, at_ms=1001))
    status = status_of(state)
    assert status.queued == 0 and status.adapters_left == ("policy-v1",)


# --- what could not be loaded -----------------------------------------------------------------------------------------


def test_a_version_that_fails_is_left_out_and_all_others_are_served() -> None:
    state = agent(seen=holding(1), desired=wanting(1, 2))
    state, _ = fault(state, seen=holding(1))
    assert is_ready(state) and status_of(state).adapters_missing == ("policy-v2",)


def test_the_next_sync_of_the_adapter_gives_its_older_versions_another_chance() -> None:
    state = agent(seen=holding(1), desired=wanting(1, 2))
    state, _ = fault(state, seen=holding(1))
    state, effects = fold(state, command(phase("prepare", 3), 1))
    _, calls, _ = carry_out(state, effects, holding(1))
    assert calls == [CheckAdapter(version(3)), CheckAdapter(version(2)), LoadAdapter(version(2))]


def test_a_replica_whose_memory_the_trainer_has_is_not_ready_without_its_adapters() -> None:
    state = agent(seen=holding(1), desired=wanting(1))
    lost = replace(state.engine, adapters={}, asleep_by_trainer=frozenset({"weights"}))
    assert is_ready(state) and not is_ready(replace(state, engine=lost))


# --- places -----------------------------------------------------------------------------------------------------------


def full(*numbers: int, places: int = 2) -> Observation:
    return replace(holding(*numbers), adapter_places=places)


@pytest.mark.parametrize("name", ["prepare", "load"])
def test_a_sync_without_a_place_first_unloads_what_is_no_longer_wanted(name: Phase) -> None:
    state = agent(seen=full(1, 2), desired=wanting(2))
    assert state.activity is not None  # at the first chance, when requests ran on it
    state, _ = fault(state, seen=full(1, 2))
    state, effects = fold(state, command(phase(name, 3), ttl_ms=10_000, at_ms=10))
    assert not effects and next_deadline(state) == 510 and is_ready(state)
    state, effects = fold(state, Tick(at_ms=510))
    state, calls, _ = carry_out(state, effects, full(1, 2))
    assert calls[:2] == [UnloadAdapter("policy-v1", waited=False), CheckAdapter(version(3))]
    assert [answer.outcome for answer in answers(effects)] == [Acted(calls=tuple(map(call_name, calls[1:])))]


def test_a_sync_waits_half_of_its_time_for_requests_to_end_and_then_the_engine_refuses_it() -> None:
    state, _ = fault(agent(seen=full(1, 2), desired=wanting(2)), seen=full(1, 2))
    state, effects = fold(state, command(phase("prepare", 3), ttl_ms=1400, at_ms=10))
    asked_ms: list[int] = []
    while CheckAdapter(version(3)) not in performed(effects):
        deadline_ms = next_deadline(state)
        assert deadline_ms is not None and len(asked_ms) < 5
        state, effects = fold(state, Tick(at_ms=deadline_ms))
        asked_ms.append(deadline_ms)
        if performed(effects) == [UnloadAdapter("policy-v1", waited=False)]:
            assert state.activity is not None
            still = Fault("refused", "requests run on it")
            call_id, seen = state.activity.call_id, full(1, 2)
            state, effects = fold(
                state, EngineReturned(at_ms=deadline_ms, call_id=call_id, result=still, observation=seen)
            )
    assert asked_ms == [510, 710]
    state, effects = fold(state, Tick(at_ms=10 + 1400))
    assert [type(answer.outcome) for answer in answers(effects)] == [Failed]


def test_a_sync_waits_for_a_place_though_a_call_of_the_agent_itself_has_failed() -> None:
    """Requests use the cache, so it can't be flushed yet."""
    state, _ = fault(agent(seen=full(1, 2), desired=wanting(2)), seen=full(1, 2))
    state, _ = fold(replace(state, reconcile_blocked=True), command(phase("prepare", 3), ttl_ms=10_000, at_ms=10))
    _, effects = fold(state, Tick(at_ms=510))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=False)]


def test_what_is_behind_a_sync_that_waits_for_a_place_does_not_wait_for_it() -> None:
    state, _ = fault(agent(seen=full(1, 2), desired=wanting(2)), seen=full(1, 2))
    other = AdapterSync(phase="prepare", adapter=version(1, "judge"), keep=1)
    state, effects = fold(state, command(phase("prepare", 3), ttl_ms=10_000), command(other, 2, ttl_ms=10_000))
    assert performed(effects) == []
    for later in (EngineCommand(operation="pause"), phase("abort", 3)):
        _, effects = fold(state, command(later, 3, ttl_ms=10_000))
        assert performed(effects) == [CheckAdapter(version(3))]


def test_a_sync_waits_for_no_place_of_what_is_wanted_or_of_a_paused_engine() -> None:
    for seen, desired in ((full(1, 2), wanting(1, 2)), (replace(full(1, 2), generating=False), wanting(2))):
        state = replace(
            agent(seen=seen, desired=replace(desired, generation="paused" if not seen.generating else "running"))
        )
        _, effects = fold(state, command(phase("prepare", 3), ttl_ms=10_000))
        assert performed(effects) == [CheckAdapter(version(3))]


def test_a_commit_on_a_replica_that_has_no_place_takes_that_of_the_version_which_it_drops() -> None:
    state = agent(seen=full(1, places=1), desired=wanting(1, loading=2))
    state, effects = fold(state, command(phase("commit", 2, keep=1)))
    calls = [UnloadAdapter("policy-v1", waited=False), CheckAdapter(version(2)), LoadAdapter(version(2))]
    assert carry_out(state, effects, full(1, places=1))[1] == calls


def test_an_agent_that_joins_a_full_engine_makes_the_place_that_it_needs_before_it_is_ready() -> None:
    state, effects = fold(agent(seen=full(1, 2), desired=wanting(3)))
    seen = full(1, 2)
    assert state.activity is not None and state.activity.calls == (UnloadAdapter("policy-v1", waited=False),)
    effects = [Perform(call_id=1, call=state.activity.calls[0])]
    assert not is_ready(state)
    state, calls, _ = carry_out(state, effects, seen)
    loads = [UnloadAdapter("policy-v1", waited=False), CheckAdapter(version(3)), LoadAdapter(version(3))]
    assert calls == [*loads, UnloadAdapter("policy-v2", waited=False)] and is_ready(state)


def test_what_had_no_place_is_loaded_once_there_is_one() -> None:
    state, _ = fault(agent(seen=full(1, 2), desired=wanting(2)), seen=full(1, 2))
    state, effects = fold(state, command(phase("commit", 3)))
    assert performed(effects) == [UnloadAdapter("policy-v1", waited=False)]
    state, _ = fault(state, seen=full(1, 2))
    assert is_ready(state) and status_of(state).adapters_missing == ("policy-v3",)
    state, effects = fold(state, EngineObserved(at_ms=2, observation=full(2)))
    assert performed(effects) == [CheckAdapter(version(3))]


# --- agents that are cut off ------------------------------------------------------------------------------------------


def test_an_agent_without_its_bus_neither_loads_nor_unloads() -> None:
    """Another one may command its engine, by what is committed now."""
    for seen in (LISTING, holding(1, 2)):
        state, effects = fold(agent(seen=holding(1), desired=wanting(1)), LeaseExpired(at_ms=1))
        state, effects = fold(state, EngineObserved(at_ms=2, observation=seen), Tick(at_ms=GRACE_MS))
        assert performed(effects) == []


def test_an_agent_that_starts_again_says_before_its_snapshot_what_its_engine_lacks() -> None:
    """Its position, which it reports with that, is the one of its last life."""
    before = agent(seen=holding(1, 2), desired=wanting(2))
    state, _ = fold(before, Started(at_ms=2, identity=before.identity, incarnation="b"))
    assert (status_of(state).adapters_missing, status_of(state).adapters_left) == ((), ("policy-v1",))
    state, _ = fold(state, EngineObserved(at_ms=3, observation=LISTING))
    assert (status_of(state).adapters_missing, status_of(state).adapters_left) == (("policy-v2",), ())


def test_what_an_agent_had_not_decided_when_it_ended_does_not_count_for_its_position() -> None:
    """It does not know yet that these are wanted, so that its silence about them would say that its engine has them."""
    busy, _ = fold(agent(seen=holding(1), desired=wanting(1)), command(phase("prepare", 2), seq=1, at_ms=1))
    before, _ = fold(busy, command(phase("load", 2), seq=2, at_ms=2), command(phase("commit", 2), seq=3, at_ms=3))
    assert (before.seq, len(before.queue)) == (3, 2)
    state, _ = fold(before, Started(at_ms=4, identity=before.identity, incarnation="b"))
    assert (state.seq, status_of(state).queued, status_of(state).adapters_missing) == (1, 0, ())


def test_a_version_that_something_else_has_loaded_stays_until_the_bus_is_heard() -> None:
    state, effects = fold(
        agent(seen=holding(1), desired=wanting(1)), EngineObserved(at_ms=1, observation=holding(1, 2))
    )
    assert performed(effects) == [] and state.changed_by_others
    _, effects = fold(state, HeadSeen(at_ms=2, epoch=1, seq=0), Tick(at_ms=5_001))
    assert performed(effects) == [UnloadAdapter("policy-v2", waited=False)]
