"""A sync that fails before anything was committed: back to the weights of the launch, where they can be read again."""

import pytest
from msgspec.structs import replace

from schemas import events
from schemas.commands import Broadcast, Pushed
from schemas.desired import ALL_TAGS, Committed, Desired
from schemas.identity import Operation
from schemas.outcomes import Acted, ErrorKind, Failed
from tests.unit.machines import PRESENT, PRIMARY, agent, answers, carry_out, command, fault, fold, sync
from workers.machine.observe import apply_observation, apply_result
from workers.machine.readiness import in_sync, is_ready, trouble
from workers.machine.reconcile import reconcile
from workers.machine.state import AgentState, call_name
from workers.machine.weights import adopt_pushed

KNOWN = replace(PRESENT, remedies=events.Remedies(launched_from="/models/policy"))


def failed_load(seen: events.Observation, kind: str = "engine_error") -> tuple[AgentState, events.Observation]:
    """Return an agent whose engine failed the load of the run's first sync."""
    state, effects = fold(agent(seen=seen), command(sync("prepare"), 1))
    state, _, seen = carry_out(state, effects, seen)
    state, effects = fold(state, command(sync("load"), 2))
    assert state.activity is not None
    failed = events.Fault(kind, "out of memory")  # type: ignore[arg-type]
    returned = events.EngineReturned(at_ms=1, call_id=state.activity.call_id, result=failed, observation=seen)
    state, _ = fold(state, returned)
    return state, seen


@pytest.mark.parametrize("kind", ["engine_error", "unanswered"])
def test_a_replica_whose_first_load_failed_goes_back_to_the_weights_of_its_launch(kind: str) -> None:
    state, seen = failed_load(KNOWN, kind)
    assert state.engine.torn and not is_ready(state)
    state, effects = fold(state, command(sync("abort"), 3))
    state, calls, seen = carry_out(state, effects, seen)
    assert [call_name(call) for call in calls] == ["restore", "flush", "resume"]
    assert calls[0] == events.Restore("/models/policy")
    assert isinstance(answers(effects)[0].outcome, Acted) and is_ready(state)
    assert (state.engine.version, state.engine.torn, seen.generating) == (0, False, True)


def test_a_replica_that_took_an_aborted_first_version_goes_back_too() -> None:
    state, effects = fold(agent(seen=KNOWN), command(sync("prepare"), 1))
    state, _, seen = carry_out(state, effects, KNOWN)
    for seq, phase in ((2, "load"), (3, "abort")):
        state, effects = fold(state, command(sync(phase), seq))
        state, calls, seen = carry_out(state, effects, seen)
    assert calls[0] == events.Restore("/models/policy") and is_ready(state) and seen.version == 0


def test_without_a_directory_it_stays_paused_and_says_what_it_waits_for() -> None:
    state, seen = failed_load(PRESENT)
    state, effects = fold(state, command(sync("abort"), 3))
    state, calls, seen = carry_out(state, effects, seen)
    (answer,) = answers(effects)
    assert isinstance(answer.outcome, Failed) and answer.outcome.error is ErrorKind.QUARANTINED
    assert not calls and not seen.generating and "waits for the next committed sync" in trouble(state)


def test_a_way_back_that_fails_is_not_tried_again_before_the_next_sync() -> None:
    state, seen = failed_load(KNOWN)
    state, _ = fold(state, command(sync("abort"), 3))
    state, effects = fault(state, "no", seen)
    state, calls, seen = carry_out(state, effects, seen)
    assert not calls and not seen.generating and not is_ready(state)
    state, effects = fold(state, command(sync("prepare", 2), 4))
    state, _, seen = carry_out(state, effects, seen)
    for seq, phase in ((5, "load"), (6, "commit")):
        state, effects = fold(state, command(sync(phase, 2), seq))
        state, _, seen = carry_out(state, effects, seen)
    assert is_ready(state) and seen.version == 2


def test_what_an_engine_loaded_last_is_not_taken_for_what_it_was_launched_from() -> None:
    state, seen = failed_load(KNOWN)
    moved = replace(seen, version=0, remedies=events.Remedies(launched_from="/sync/v1"))
    assert apply_observation(state.engine, moved).launched_from == "/models/policy"
    late = agent(seen=replace(moved, version=1), desired=Desired())
    assert late.engine.launched_from is None


def test_an_engine_that_holds_the_weights_of_its_launch_is_left_alone() -> None:
    assert in_sync(agent(seen=KNOWN))


def test_an_engine_that_can_not_be_paused_is_not_given_other_weights() -> None:
    unable = replace(KNOWN, operations=KNOWN.operations - {Operation.PAUSE}, version=3)
    state = agent(seen=replace(KNOWN, operations=unable.operations))
    state, effects = fold(state, events.EngineObserved(at_ms=1, observation=unable))
    assert effects == [] and state.activity is None and not in_sync(state)


def test_an_engine_that_can_load_nothing_stays_paused_with_weights_that_nothing_vouches_for() -> None:
    engine = replace(
        agent(seen=KNOWN).engine, torn=True, generating=False, operations=KNOWN.operations - {Operation.LOAD}
    )
    assert reconcile(Desired(), engine, PRIMARY) == ()


def test_a_label_that_was_there_before_the_weights_were_discarded_proves_nothing() -> None:
    pushed = Committed(1, Pushed("push 1"), None)
    seen = replace(PRESENT, generating=False, version=None, label="push 1")
    engine = replace(agent().engine, generating=False, label="push 1", version_label="default")
    discarded, _ = apply_result(engine, events.Sleep(ALL_TAGS, discard=True), events.Fault("unanswered", "no"), seen)
    assert discarded.torn
    assert adopt_pushed(discarded, Desired(committed=pushed), PRIMARY).torn
    again = apply_observation(discarded, replace(seen, label="push 2"))
    assert not adopt_pushed(again, Desired(committed=Committed(2, Pushed("push 2"), None)), PRIMARY).torn


def test_an_agent_without_its_journal_serves_no_push_that_was_not_committed() -> None:
    """The engine's label is the first that it sees, and the number of no version: it proves nothing, not even that the
    directory that it names is that of its launch.
    """
    pushed = Committed(1, Pushed("push 1"), None)
    holds = replace(KNOWN, generating=False, version=None, label="push 1")
    state, effects = fold(
        AgentState(),
        events.Started(at_ms=0, identity=PRIMARY, incarnation="a"),
        events.EngineObserved(at_ms=0, observation=holds),
        events.SnapshotReceived(at_ms=0, epoch=1, seq=3, desired=Desired(uncommitted=pushed)),
    )
    assert effects == [] and not is_ready(state) and "waits for the next sync" in trouble(state)


def without_journal(path: str) -> tuple[AgentState, list[str]]:
    """Return an agent that begins anew beside an engine labelled 2, which received a broadcast; and its calls."""
    received = Broadcast(host="trainer", port=1, group="g", replicas=(0,), path=path)
    seen = replace(PRESENT, version=2, label="2")
    state, effects = fold(
        AgentState(),
        events.Started(at_ms=0, identity=PRIMARY, incarnation="b"),
        events.EngineObserved(at_ms=0, observation=seen),
        events.SnapshotReceived(at_ms=0, epoch=1, seq=3, desired=Desired(committed=Committed(2, received, None))),
    )
    state, calls, _ = carry_out(state, effects, seen)
    return state, [call_name(call) for call in calls]


def test_an_agent_without_its_journal_says_that_a_broadcast_can_not_be_proven_and_waits_for_the_next_sync() -> None:
    """Trainers read labels as integers, so the number of a version is no proof: an earlier run counted too."""
    state, calls = without_journal(path="")
    assert calls == ["pause"] and not is_ready(state)
    assert (
        trouble(state)
        == "its engine holds weights labelled '2', of which its agent has no record; waits for the next sync"
    )


def test_an_agent_without_its_journal_loads_the_checkpoint_beside_a_broadcast() -> None:
    state, calls = without_journal(path="v2")
    assert calls == ["check_source", "pause", "load", "flush", "resume"] and is_ready(state)


def test_a_sync_that_waits_for_its_engine_counts_as_open() -> None:
    """So an agent does not join again with a new key, and answer it with `superseded`."""
    launching = agent(seen=replace(KNOWN, tokenizer="unknown"))
    assert not launching.in_a_sync
    waiting, _ = fold(launching, command(sync("prepare")))
    assert waiting.desired.sync is None and waiting.in_a_sync
