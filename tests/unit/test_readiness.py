"""When a replica is ready, and what is reported of one that is not."""

import pytest
from msgspec.structs import replace

from schemas import events
from schemas.commands import Checkpoint, ProfilePlan, Pushed, WeightSync
from schemas.desired import ALL_TAGS, Committed, Desired, ProfileSession
from schemas.identity import Identity, OnLostBus, Operation
from schemas.wire import encode
from tests.unit.machines import PRESENT, PRIMARY, SECOND, agent, called, carry_out, command, fault, fold, observed, sync
from tests.unit.test_machine_lives import FLUSH, PAUSE, PAUSED, RESUME, V1, snapshot
from workers.link.heartbeat import status_of
from workers.machine.decide import next_deadline
from workers.machine.progress import is_news
from workers.machine.readiness import is_ready, is_wedged, trouble
from workers.machine.state import AgentState, call_name
from workers.router import routable

ASLEEP = replace(PAUSED, asleep=ALL_TAGS)


def test_a_heartbeat_says_what_call_is_in_flight_and_since_when_and_nothing_more_when_none_is() -> None:
    busy, _ = fold(agent(), command(PAUSE, 1, at_ms=70))
    status = status_of(busy)
    assert (status.activity, status.since_ms) == ("pause", 70)
    later, _ = fold(busy, events.HeadSeen(at_ms=5000, epoch=1, seq=1))
    assert status_of(later) == status, "equal heartbeats leave no trace in the run's log"
    assert b"since_ms" not in encode(status_of(agent()))


def test_a_replica_is_not_ready_while_its_engine_does_not_answer_a_call_that_changes_nothing_desired() -> None:
    state, effects = fold(agent(), command(FLUSH, 1))
    assert called(effects) == ["flush"] and not is_ready(state)
    state, _ = fold(state, events.Tick(at_ms=2000))
    assert not is_ready(state) and "has not answered flush, past its deadline" in trouble(state)


def test_a_replica_that_cannot_load_what_is_committed_is_reported_as_it_is() -> None:
    state, effects = fold(agent(), snapshot(Desired(committed=V1), 3))
    assert called(effects) == ["check_source"]
    state, effects = fault(state, "It is not there.", PRESENT)
    state, _, seen = carry_out(state, effects)
    assert not seen.generating
    status = status_of(state)
    assert (status.ready, status.quarantined, status.version) == (False, 1, 0)
    assert status.trouble == "could not load version 1; waits for the next committed sync, or a restart"
    assert not routable(state)


def test_an_agent_that_has_not_been_sent_what_is_desired_says_so_in_its_first_life_and_after_its_bus() -> None:
    waits = "waits for the desired state from its bus"
    new, _ = fold(AgentState(), events.Started(at_ms=0, identity=PRIMARY, incarnation="i"), observed(PRESENT))
    assert trouble(new) == waits
    left, _ = fold(agent(), events.HeadSeen(at_ms=1, epoch=9, seq=0))
    assert left.joined and trouble(left) == waits


@pytest.mark.parametrize("seen", [PAUSED, ASLEEP], ids=["paused", "asleep"])
def test_a_replica_that_was_told_not_to_serve_is_not_ready_and_not_in_trouble(seen: events.Observation) -> None:
    state = agent(seen=seen, desired=Desired(generation="paused", asleep=seen.asleep or frozenset()))
    status = status_of(state)
    assert not status.ready and status.trouble == "" and status.held and "not ready" not in status.condition()


def test_a_replica_whose_resume_failed_says_what_it_waits_for() -> None:
    state, _ = fold(agent(desired=Desired(generation="paused"), seen=PAUSED), command(RESUME, 1))
    state, _ = fault(state, "No.", PAUSED)
    status = status_of(state)
    assert not status.ready and not status.held and "waits for another resume" in status.trouble


def test_a_follower_and_a_training_rank_are_ready_without_an_engine_that_generates() -> None:
    assert is_ready(agent(SECOND, replace(PAUSED, tokenizer="absent")))
    rank = replace(PRESENT, operations=frozenset({Operation.PROFILE}), generating=None)
    assert is_ready(agent(Identity(replica=3, node_rank=0, role="actor"), rank))


# --- cut off from the bus ---------------------------------------------------------------------------------------------


def started(on_lost_bus: OnLostBus) -> list[events.Event]:
    settings = events.MachineSettings(on_lost_bus=on_lost_bus)
    return [events.Started(at_ms=0, identity=PRIMARY, incarnation="a", settings=settings)]


def cut_off(
    on_lost_bus: OnLostBus, desired: Desired | None = None, joined: bool = True
) -> tuple[AgentState, list[str]]:
    """Return an agent whose lease has expired, and the calls that it then made."""
    state, _ = fold(AgentState(), *started(on_lost_bus), observed())
    seen = PRESENT
    if joined:
        state, effects = fold(state, snapshot(desired, 1))
        state, _, seen = carry_out(state, effects)
    state, effects = fold(state, events.LeaseExpired(at_ms=9))
    state, calls, _ = carry_out(state, effects, seen)
    return state, [call_name(call) for call in calls]


def test_a_replica_that_lost_its_bus_serves_on_and_leaves_its_router() -> None:
    state, calls = cut_off("serve")
    assert calls == [] and state.engine.generating
    assert not is_ready(state) and not routable(state) and "waits for the bus" in status_of(state).trouble
    state, _ = fold(state, snapshot(seq=1))
    assert is_ready(state) and routable(state)


def test_a_replica_that_is_to_pause_without_a_bus_resumes_by_a_bus_alone() -> None:
    state, calls = cut_off("pause")
    assert calls == ["observe", "pause"] and not state.engine.generating
    for event in (events.HeadSeen(at_ms=10, epoch=1, seq=1), command(FLUSH, 2), events.LeaseExpired(at_ms=20)):
        state, effects = fold(state, event)
        assert called(effects) == []
    _, effects = fold(state, snapshot(seq=2))
    assert called(effects) == ["resume"]


def test_without_a_bus_the_pause_comes_after_the_end_of_what_the_trainer_left_open() -> None:
    state, calls = cut_off("pause", Desired(profile=ProfileSession(3, ProfilePlan())))
    assert calls == ["observe", "stop_profile", "pause"]
    assert not state.engine.generating and state.engine.session is None


@pytest.mark.parametrize(("on_lost_bus", "rest"), [("serve", ["flush", "resume"]), ("pause", ["flush"])])
def test_a_commit_that_the_lease_overtakes_resumes_no_engine_that_is_to_pause(
    on_lost_bus: OnLostBus, rest: list[str]
) -> None:
    state, _ = fold(AgentState(), *started(on_lost_bus), observed(), snapshot())
    seen, effects = PRESENT, list[events.Effect]()
    for seq, phase in enumerate(("prepare", "load"), start=1):
        state, effects = fold(state, command(sync(phase), seq))
        state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(sync("commit"), 3), events.LeaseExpired(at_ms=9))
    state, calls, seen = carry_out(state, effects, seen)
    assert [call_name(call) for call in calls] == rest
    assert seen.generating is (on_lost_bus == "serve") and state.activity is None


def test_a_replica_that_reads_its_weights_again_without_a_bus_does_not_resume_either() -> None:
    labelled = replace(PRESENT, label="default")
    state, _ = fold(AgentState(), *started("pause"), observed(labelled), snapshot())
    state, effects = fold(state, command(WeightSync(phase="prepare", version=1, source=Pushed("step 1")), 1))
    state, _, seen = carry_out(state, effects, labelled)
    state, effects = fold(state, events.LeaseExpired(at_ms=9))
    assert called(effects) == ["observe"]
    state, calls, seen = carry_out(state, effects, seen)
    assert (len(calls), seen.generating, state.activity) == (1, False, None)


@pytest.mark.parametrize(("on_lost_bus", "calls"), [("serve", []), ("pause", ["observe", "pause"])])
def test_an_agent_restarted_without_a_bus_keeps_to_the_same_choice(on_lost_bus: OnLostBus, calls: list[str]) -> None:
    assert cut_off(on_lost_bus, joined=False)[1] == calls


# --- wedged -----------------------------------------------------------------------------------------------------------


def counted(generated: int, at_ms: int, running: int = 2) -> events.EngineObserved:
    seen = replace(PRESENT, running=running, generated=generated)
    return events.EngineObserved(at_ms=at_ms, observation=seen)


AFTER_MS = events.MachineSettings().wedged_after_ms


def test_an_engine_that_runs_requests_and_generates_nothing_is_wedged_after_a_time() -> None:
    state, _ = fold(agent(), counted(50, 1000))
    assert next_deadline(state) is None  # one observation shows no progress, and no lack of it
    state, _ = fold(state, counted(50, 2000))
    assert next_deadline(state) == 1000 + AFTER_MS
    state, _ = fold(state, events.Tick(at_ms=999 + AFTER_MS))
    assert is_ready(state)
    state, _ = fold(state, events.Tick(at_ms=1000 + AFTER_MS))
    status = status_of(state)
    assert is_wedged(state) and status.wedged and not status.ready and "generates nothing" in status.trouble
    assert not routable(state) and next_deadline(state) is None


@pytest.mark.parametrize(
    "event",
    [counted(51, 3000), counted(50, 3000, running=0), observed(replace(PAUSED, running=2, generated=50))],
    ids=["a token", "no request left", "paused"],
)
def test_an_engine_that_makes_progress_or_has_nothing_to_do_is_not_wedged(event: events.Event) -> None:
    state, _ = fold(agent(), counted(50, 1000), counted(50, 2000), event, events.Tick(at_ms=9 * AFTER_MS))
    assert not is_wedged(state)


def test_a_wedged_engine_is_ready_again_with_its_next_token() -> None:
    state, _ = fold(agent(), counted(50, 1000), counted(50, 2000), events.Tick(at_ms=1000 + AFTER_MS))
    state, _ = fold(state, counted(51, 2000 + AFTER_MS))
    assert is_ready(state) and routable(state)


def test_a_restarted_agent_counts_anew() -> None:
    state, _ = fold(agent(), counted(50, 1000), counted(50, 2000))
    state, _ = fold(state, events.Started(at_ms=5, identity=PRIMARY, incarnation="b"))
    assert next_deadline(state) is None


@pytest.mark.parametrize(
    ("committed", "operations", "words"),
    [
        (Committed(2, Pushed("push 2"), None), frozenset(Operation), "can't be read again; waits for the next sync"),
        (Committed(2, Checkpoint("v2"), None), frozenset(Operation) - {Operation.LOAD}, "can load no weights"),
    ],
)
def test_a_replica_that_can_not_get_the_committed_weights_says_so(
    committed: Committed, operations: frozenset[Operation], words: str
) -> None:
    seen = replace(PRESENT, generating=False, operations=operations)
    assert words in trouble(agent(seen=seen, desired=Desired(committed=committed)))
    assert not trouble(agent(SECOND, seen=seen, desired=Desired(committed=committed)))


@pytest.mark.parametrize(
    ("fallback", "missing"),
    [(Committed(8, Checkpoint("v8"), None), "version 8"), (None, "the weights of its launch")],
    ids=["fallback", "launch"],
)
def test_a_replica_that_holds_weights_of_another_run_and_can_load_none_says_so(
    fallback: Committed | None, missing: str
) -> None:
    operations = frozenset(Operation) - {Operation.LOAD}
    remedies = events.Remedies(launched_from="launched")
    seen = replace(PRESENT, generating=False, operations=operations, remedies=remedies)
    state = agent(seen=seen, desired=Desired(fallback=fallback))
    state, _ = fold(state, observed(replace(seen, version=2)))
    assert trouble(state) == f"tiny 1 can load no weights, and does not hold {missing}"


def test_counters_that_move_are_no_news_until_they_stop_or_go_on_again() -> None:
    before = replace(PRESENT, running=1, generated=5)
    after = replace(before, generated=9)
    stalls = [(0, 0), (0, 1), (1, 2), (2, 3), (3, 0), (1, 0)]
    assert [is_news(before, after, *counts) for counts in stalls] == [False, True, True, False, True, True]
    assert is_news(None, before, 0, 0) and is_news(before, replace(before, generating=False), 0, 0)
