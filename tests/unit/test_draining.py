"""What an agent does when its replica is drained: requests end, or are aborted, and the engine stays paused."""

from msgspec.structs import replace

from schemas.commands import Checkpoint, Command, Drain, EngineCommand, EpochStart, Target
from schemas.desired import Committed, Desired
from schemas.events import (
    Abort,
    AwaitIdle,
    EngineObserved,
    EngineReturned,
    HeadSeen,
    LeaseExpired,
    Observation,
    Pause,
    Perform,
    Returned,
    SnapshotReceived,
    Stopping,
    Tick,
)
from schemas.identity import Identity, Operation
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from tests.unit.machines import PRESENT, agent, answers, called, carry_out, command, fault, fold, sync
from workers.link.heartbeat import status_of
from workers.machine.decide import next_deadline
from workers.machine.readiness import is_ready
from workers.machine.state import AgentState
from workers.router import routable

DRAIN = command(Drain(grace_ms=5000), ttl_ms=19_000, at_ms=100)
IDLE = AwaitIdle(5000)


def draining(seen: Observation = PRESENT, desired: Desired | None = None) -> AgentState:
    state, effects = fold(agent(seen=seen, desired=desired), DRAIN)
    assert effects == [Perform(call_id=1, call=IDLE)]
    return state


def idle(state: AgentState, seen: Observation = PRESENT) -> EngineReturned:
    assert state.activity is not None
    return EngineReturned(at_ms=200, call_id=state.activity.call_id, result=Returned(), observation=seen)


def test_a_replica_that_drains_leaves_the_router_at_once_and_is_not_ready() -> None:
    before = agent()
    assert routable(before) and is_ready(before)
    state = draining()
    assert not routable(state) and not is_ready(state) and status_of(state).trouble == "leaves the fleet"


def test_requests_end_then_the_engine_is_paused_and_the_drain_answered() -> None:
    state, effects = fold(draining(), idle(draining()))
    assert effects == [Perform(call_id=2, call=Pause("abort"))]
    state, _, _ = carry_out(state, effects)
    assert answers(effects)[0].outcome == Acted(calls=("await_idle", "pause"))
    assert state.engine.generating is False and not routable(state)


def test_a_replica_that_could_not_be_paused_before_is_paused_when_it_leaves() -> None:
    state, _ = fold(agent(), command(EngineCommand(operation="pause"), 1))
    state, _ = fault(state, "No.", PRESENT)
    assert state.suppressed.generation == "running" and state.engine.generating
    state, _ = fold(state, command(Drain(grace_ms=5000), 2, ttl_ms=19_000, at_ms=100))
    state, effects = fold(state, idle(state))
    assert called(effects) == ["pause"]


def test_requests_that_still_run_after_the_grace_are_aborted() -> None:
    state = draining()
    assert next_deadline(state) == 5100
    state, effects = fold(state, Tick(at_ms=5099))
    assert effects == []
    state, effects = fold(state, Tick(at_ms=5100))
    assert effects == [Perform(call_id=2, call=Pause("abort"))]
    state, _, _ = carry_out(state, effects)
    assert answers(effects)[0].outcome == Acted(calls=("pause",)), "nothing was seen to be idle"


def test_an_engine_that_went_down_while_its_requests_had_their_grace_is_not_called() -> None:
    down = EngineObserved(at_ms=300, observation=Observation(engine="model", tokenizer="unknown"))
    state, effects = fold(draining(), down, Tick(at_ms=5100))
    assert [effect for effect in effects if isinstance(effect, Perform)] == []
    assert answers(effects)[0].outcome == Acted(calls=())


def test_nothing_that_follows_changes_what_a_drained_replica_does() -> None:
    state, effects = fold(draining(), idle(draining()))
    state, _, seen = carry_out(state, effects)
    before = state.desired
    later: list[Command] = [sync("prepare"), sync("load"), sync("commit"), EngineCommand(operation="resume")]
    for seq, body in enumerate(later, 2):
        state, effects = fold(state, command(body, seq, at_ms=300))
        assert [answer.outcome for answer in answers(effects)] == [Skipped(Reason.NOT_TARGETED)]
    state, effects = fold(state, command(EpochStart(previous_epoch=1, logic=1), 6, at_ms=300), LeaseExpired(at_ms=400))
    assert not [effect for effect in effects if isinstance(effect, Perform) and isinstance(effect.call, Pause)]
    assert state.desired == before and seen.generating is False


def test_a_drain_in_the_middle_of_a_sync_loads_nothing_and_never_serves_what_was_loaded() -> None:
    desired = Desired(committed=Committed(1, Checkpoint("v1"), None))
    state = agent(seen=replace(PRESENT, version=1), desired=desired)
    state, effects = fold(state, command(sync("prepare", 2)))
    state, _, seen = carry_out(state, effects, replace(PRESENT, version=1))
    state, effects = fold(state, command(sync("load", 2), 2))
    state, _, seen = carry_out(state, effects, seen)
    assert seen.version == 2
    state, effects = fold(state, replace(DRAIN, seq=3))
    assert [answer.outcome for answer in answers(effects)] == [Acted(calls=())]
    assert state.activity is None and state.desired.sync is None


def test_requests_that_a_pause_has_frozen_are_aborted_at_once() -> None:
    state, effects = fold(agent(), command(EngineCommand(operation="pause", mode="keep")))
    state, _, seen = carry_out(state, effects)
    state, effects = fold(state, replace(DRAIN, seq=2))
    assert effects == [Perform(call_id=2, call=Abort())]


def test_an_engine_that_launches_or_can_not_be_paused_holds_up_no_drain() -> None:
    unknown = Observation(engine="tiny 1", tokenizer="unknown")
    state, effects = fold(agent(seen=unknown), DRAIN)
    assert [answer.outcome for answer in answers(effects)] == [Acted(calls=())]
    seen = replace(PRESENT, operations=frozenset({Operation.LOAD}))
    state = draining(seen)
    state, effects = fold(state, idle(state, seen))
    assert [answer.outcome for answer in answers(effects)] == [Acted(calls=("await_idle",))]


def test_other_nodes_and_other_replicas_have_nothing_to_do() -> None:
    other = agent(identity=Identity(replica=3, node_rank=0))
    state, effects = fold(other, replace(DRAIN, target=Target(replicas=frozenset({0}))))
    assert [answer.outcome for answer in answers(effects)] == [Skipped(Reason.NOT_TARGETED)] and is_ready(state)
    _, effects = fold(agent(identity=Identity(replica=0, node_rank=1, nnodes=2)), DRAIN)
    assert [answer.outcome for answer in answers(effects)] == [Skipped(Reason.NOT_PRIMARY)]


def test_an_agent_that_must_end_does_not_wait_for_its_requests() -> None:
    state, effects = fold(draining(), Stopping(at_ms=300))
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.UNKNOWN
    assert "while it waited for running requests to end" in answer.outcome.message and state.activity is None


def test_a_head_does_not_bring_it_back() -> None:
    state, effects = fold(draining(), idle(draining()))
    state, _, _ = carry_out(state, effects)
    _, effects = fold(state, HeadSeen(at_ms=900, epoch=1, seq=1))
    assert effects == []


def test_an_agent_that_joins_again_gives_its_requests_the_rest_of_their_time() -> None:
    state = draining()
    state, effects = fold(state, SnapshotReceived(at_ms=150, epoch=1, seq=1, desired=state.desired))
    assert effects == [] and next_deadline(state) == 5100
    state, effects = fold(state, idle(state))
    state, _, _ = carry_out(state, effects)
    assert answers(effects)[0].outcome == Acted(calls=("await_idle", "pause"))


def test_a_trainer_that_knows_of_no_drain_has_its_replica_back_at_once() -> None:
    state, effects = fold(draining(), SnapshotReceived(at_ms=150, epoch=2, seq=0, desired=Desired()))
    assert [answer.outcome for answer in answers(effects)] == [Skipped(Reason.SUPERSEDED)]
    assert state.activity is None and is_ready(state)
