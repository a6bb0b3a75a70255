"""Syncs that keep requests in flight: what becomes of the cache. What the machine does by itself gives way."""

from typing import Literal

import pytest
from msgspec.structs import replace

from schemas.commands import EngineCommand, ProfilePlan, WeightSync
from schemas.desired import Committed, Desired, ProfileSession
from schemas.events import (
    Effect,
    EngineReturned,
    Fault,
    Flush,
    Observation,
    Pause,
    Resume,
    Returned,
    SnapshotReceived,
    StopProfile,
    Tick,
)
from schemas.outcomes import Acted, Failed, Skipped
from tests.unit.machines import PRESENT, START, after, agent, answers, carry_out, command, fold, performed, sync
from workers.machine.decide import RETRY_FIRST_MS, RETRY_LAST_MS, next_deadline
from workers.machine.readiness import in_sync, is_ready, trouble
from workers.machine.state import AgentState, call_name
from workers.router import routable

RECOMPUTES = replace(PRESENT, recomputes=True)


def keep(phase: str, version: int) -> WeightSync:
    """Return one phase of a sync that keeps requests in flight."""
    return replace(sync(phase, version), in_flight="keep")


def synced(state: AgentState, seen: Observation, version: int) -> tuple[AgentState, Observation, list[list[str]]]:
    """Carry out a whole sync. Also returns the calls of each phase."""
    made = []
    for phase in ("prepare", "load", "commit"):
        state, effects = fold(state, command(keep(phase, version), state.seq + 1, ttl_ms=10_000))
        state, calls, seen = carry_out(state, effects, seen)
        assert isinstance(answers(effects)[0].outcome, Acted), phase
        made.append([call_name(call) for call in calls])
    return state, seen, made


def refused(state: AgentState, at_ms: int, seen: Observation) -> tuple[AgentState, list[Effect]]:
    """Have the engine refuse the call in flight."""
    return failed(state, Fault("engine_error", "requests still use the cache."), at_ms, seen)


def failed(state: AgentState, fault: Fault, at_ms: int, seen: Observation) -> tuple[AgentState, list[Effect]]:
    """Have the call in flight fail."""
    assert state.activity is not None
    return fold(state, EngineReturned(at_ms=at_ms, call_id=state.activity.call_id, result=fault, observation=seen))


def frozen_out() -> tuple[AgentState, Observation]:
    """Return an agent that has committed a sync on an engine which can't compute frozen requests anew. Its flush, which
    no command asked for, is in flight.
    """
    state, seen = agent(), PRESENT
    for phase in ("prepare", "load"):
        state, effects = fold(state, command(keep(phase, 1), state.seq + 1))
        state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(keep("commit", 1), 3))
    assert performed(effects) == [Resume()]
    assert state.activity is not None
    seen = after(seen, Resume())
    returned = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=seen)
    state, effects = fold(state, returned)
    assert isinstance(answers(effects)[0].outcome, Acted) and performed(effects) == [Flush()]
    return state, seen


# --- engines that compute frozen requests anew ------------------------------------------------------------------------


def test_a_sync_that_keeps_requests_flushes_while_they_are_frozen_and_leaves_nothing_to_do() -> None:
    state, seen = agent(seen=RECOMPUTES), RECOMPUTES
    for version in (1, 2, 3):
        state, seen, made = synced(state, seen, version)
        assert made == [["check_source", "pause"], ["load"], ["flush", "resume"]]
        assert state.activity is None and not state.engine.stale_cache
        assert in_sync(state) and is_ready(state) and routable(state)


def test_an_engine_that_was_frozen_by_hand_is_flushed_after_the_load_too() -> None:
    state, seen = agent(seen=RECOMPUTES), RECOMPUTES
    for body in (EngineCommand(operation="pause", mode="keep"), keep("prepare", 1), keep("load", 1), keep("commit", 1)):
        state, effects = fold(state, command(body, state.seq + 1))
        state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(EngineCommand(operation="resume"), state.seq + 1))
    _, calls, _ = carry_out(state, effects, seen)
    assert calls == [Flush(), Resume()]


# --- engines that can't -----------------------------------------------------------------------------------------------


def test_a_replica_with_a_cache_of_older_weights_is_not_ready_and_gets_no_requests() -> None:
    state, _ = frozen_out()
    assert state.engine.generating and state.engine.stale_cache
    assert not is_ready(state) and not routable(state)
    assert "its cache holds prefixes of other weights" in trouble(state)


def test_a_flush_of_its_own_is_tried_again_later_and_later_until_requests_have_ended() -> None:
    state, seen = frozen_out()
    now_ms, waits = 1, []
    for _ in range(7):
        state, effects = refused(state, now_ms, seen)
        assert performed(effects) == [] and not is_ready(state)
        due_ms = next_deadline(state)
        assert due_ms is not None
        state, effects = fold(state, Tick(at_ms=due_ms - 1))
        assert performed(effects) == []
        state, effects = fold(state, Tick(at_ms=due_ms))
        assert performed(effects) == [Flush()]
        waits.append(due_ms - now_ms)
        now_ms = due_ms
    assert waits == [*(RETRY_FIRST_MS << times for times in range(4)), *3 * [RETRY_LAST_MS]]
    state, effects = fold(state, EngineReturned(at_ms=now_ms, call_id=state.calls_made, result=Returned()))
    assert effects == [] and is_ready(state) and routable(state) and state.retries == 0


def test_a_second_sync_does_not_wait_for_the_flush_of_the_first() -> None:
    state, seen = frozen_out()
    state, _ = refused(state, 2, seen)
    state, seen, made = synced(state, seen, 2)
    assert made[0] == ["check_source", "pause"] and made[1] == ["load"] and made[2][0] == "resume"


def test_a_command_that_comes_during_that_flush_is_decided_when_it_returns() -> None:
    state, seen = frozen_out()
    state, effects = fold(state, command(EngineCommand(operation="pause"), state.seq + 1))
    assert effects == []
    state, effects = refused(state, 2, seen)
    assert performed(effects) == [Pause("abort")]


def test_a_call_that_fails_for_another_reason_is_not_made_again_by_that_clock() -> None:
    """The time of an earlier failure belongs to that failure."""
    state, seen = frozen_out()
    state, _ = refused(state, 1, seen)
    assert state.retry_at_ms
    state, effects = fold(state, command(EngineCommand(operation="sleep"), state.seq + 1))
    state, effects = refused(state, 2, seen)
    assert isinstance(answers(effects)[0].outcome, Failed) and state.retry_at_ms == 0


# --- what the machine does by itself ----------------------------------------------------------------------------------


def late_joiner() -> AgentState:
    """Return an agent that brings its engine to version 2; the check of the source is in flight."""
    committed = Committed(2, sync("prepare", 2).source, None)  # type: ignore[arg-type]
    state, effects = fold(
        agent(seen=RECOMPUTES), SnapshotReceived(at_ms=0, epoch=2, seq=1, desired=Desired(committed=committed))
    )
    assert [call_name(call) for call in performed(effects)] == ["check_source"]
    return state


def test_reconciling_gives_way_to_a_command_after_the_call_in_flight() -> None:
    state = late_joiner()
    state, effects = fold(state, command(keep("prepare", 3), 2, epoch=2))
    assert effects == []
    assert state.activity is not None
    returned = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=RECOMPUTES)
    state, effects = fold(state, returned)
    assert [call_name(call) for call in performed(effects)] == ["check_source"]  # of version 3: version 2 is not loaded
    assert state.activity is not None and state.activity.trigger is not None


def test_what_gave_way_is_done_after_the_command() -> None:
    state = late_joiner()
    state, _ = fold(state, command(EngineCommand(operation="abort"), 2, epoch=2))
    assert state.activity is not None
    returned = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=RECOMPUTES)
    state, effects = fold(state, returned)
    state, calls, _ = carry_out(state, effects, RECOMPUTES)
    assert [call_name(call) for call in calls] == ["abort", "pause", "load", "flush", "resume"]
    assert is_ready(state)


@pytest.mark.parametrize("kind", ["unanswered", "engine_error"])
def test_a_stop_of_its_own_that_fails_late_holds_up_no_pause(kind: Literal["unanswered", "engine_error"]) -> None:
    silent = replace(PRESENT, profiling=None)
    state, effects = fold(agent(seen=silent), command(START, 1))
    state, _, _ = carry_out(state, effects, silent)
    state, effects = fold(state, SnapshotReceived(at_ms=0, epoch=2, seq=1, desired=Desired()))
    (stop,) = performed(effects)
    assert isinstance(stop, StopProfile) and state.activity is not None
    pause = command(EngineCommand(operation="pause"), 2, epoch=2)
    state, effects = fold(state, pause, Tick(at_ms=state.activity.deadline_ms))
    assert isinstance(answers(effects)[0].outcome, Skipped), "it has expired, and is what is desired all the same"
    state, _ = failed(state, Fault(kind, "no"), 10**6, silent)
    state, effects = fold(state, Tick(at_ms=10**6 + RETRY_FIRST_MS))
    state, calls, _ = carry_out(state, effects, silent)
    assert calls == [*([stop] if kind == "unanswered" else []), Pause("abort")] and in_sync(state)


def test_a_start_of_its_own_that_fails_late_holds_up_no_pause() -> None:
    session = ProfileSession(3, ProfilePlan())
    state, effects = fold(agent(), SnapshotReceived(at_ms=0, epoch=2, seq=1, desired=Desired(profile=session)))
    assert [call_name(call) for call in performed(effects)] == ["start_profile"] and state.activity is not None
    pause = command(EngineCommand(operation="pause"), 2, epoch=2)
    state, _ = fold(state, pause, Tick(at_ms=state.activity.deadline_ms))
    state, effects = failed(state, Fault("engine_error", "no"), 10**6, PRESENT)
    assert performed(effects) == [Pause("abort")]


def test_a_pause_of_its_own_that_fails_is_made_again_and_succeeds_once_the_engine_can() -> None:
    paused = SnapshotReceived(at_ms=0, epoch=2, seq=1, desired=Desired(generation="paused"))
    state, effects = fold(agent(), paused)
    assert performed(effects) == [Pause("abort")]
    state, effects = refused(state, 5, PRESENT)
    assert performed(effects) == [] and next_deadline(state) == 5 + RETRY_FIRST_MS
    assert trouble(state) == "a call that the agent made by itself failed; it is made again"
    state, effects = fold(state, Tick(at_ms=5 + RETRY_FIRST_MS))
    assert performed(effects) == [Pause("abort")]
    state, _, _ = carry_out(state, effects)
    assert in_sync(state) and state.retries == 0
