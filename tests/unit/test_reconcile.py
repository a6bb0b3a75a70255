"""Reconciling an engine with its desired state: which calls, and in which order."""

from itertools import combinations

import pytest
from msgspec.structs import replace

from schemas.commands import Broadcast, Checkpoint, ProfilePlan, Pushed
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.events import Call, CheckSource, Load, Pause, Resume, Returned, Sleep, StartProfile, Wake
from schemas.identity import Identity, Operation, RolloutMode, Tag
from tests.unit.machines import PRIMARY
from workers.machine.observe import apply_result
from workers.machine.reconcile import attainable, may_serve, reconcile
from workers.machine.state import EngineState, call_name
from workers.machine.weights import holds_weights, wanted_weights

V1 = Committed(1, Checkpoint("v1"), None)
V2 = Committed(2, Checkpoint("v2"), None)
SESSION = ProfileSession(3, ProfilePlan())
OTHER = ProfileSession(2, ProfilePlan())
BOTH: frozenset[Tag] = frozenset({"weights", "kv_cache"})
WEIGHTS: frozenset[Tag] = frozenset({"weights"})
CACHE: frozenset[Tag] = frozenset({"kv_cache"})
JUDGE = Identity(replica=0, node_rank=0, mode=RolloutMode.COLOCATED)

READY = EngineState(name="e", instance="one", tokenizer="present", operations=frozenset(Operation))
ON_V1 = replace(READY, version=1, loaded=V1)
PAUSED = replace(READY, generating=False)


def syncing(phase: str, version: int = 2) -> Syncing:
    return Syncing(version, Checkpoint(f"v{version}"), None, "wait", "load" if phase == "load" else "prepare")


def planned(desired: Desired, engine: EngineState, identity: Identity = PRIMARY) -> list[str]:
    """Return the calls by name, with mode, tags or version."""
    names = []
    for call in reconcile(desired, engine, identity):
        match call:
            case Pause():
                names.append(f"pause {call.mode}")
            case Sleep() | Wake():
                names.append(" ".join([call_name(call), *sorted(call.tags)]))
            case Load() | CheckSource():
                names.append(f"{call_name(call)} {call.version}")
            case _:
                names.append(call_name(call))
    return names


def without(*operations: Operation) -> EngineState:
    return replace(READY, operations=frozenset(Operation) - set(operations))


# --- calls and their order --------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Desired, EngineState, list[str]]] = {
    "as launched": (Desired(), READY, []),
    "found paused": (Desired(), PAUSED, ["resume"]),
    "pause": (Desired(generation="paused", pause_mode="keep"), READY, ["pause keep"]),
    "paused already": (Desired(generation="paused"), PAUSED, []),
    "sleep pauses first": (Desired(asleep=BOTH), READY, ["pause abort", "sleep kv_cache weights"]),
    "only what is awake is put to sleep": (Desired(asleep=BOTH), replace(PAUSED, asleep=WEIGHTS), ["sleep kv_cache"]),
    "wake resumes last": (Desired(), replace(PAUSED, asleep=BOTH), ["wake kv_cache weights", "resume"]),
    "only what is asleep is woken": (Desired(asleep=CACHE), replace(PAUSED, asleep=BOTH), ["wake weights"]),
    "wake and sleep at once": (
        Desired(asleep=CACHE),
        replace(PAUSED, asleep=WEIGHTS),
        ["wake weights", "sleep kv_cache"],
    ),
    "paused and awake again": (Desired(generation="paused"), replace(PAUSED, asleep=CACHE), ["wake kv_cache"]),
    "what is committed is loaded": (Desired(committed=V1), ON_V1, []),
    "a late joiner loads what is committed": (
        Desired(committed=V1),
        READY,
        ["check_source 1", "pause abort", "load 1", "flush", "resume"],
    ),
    "a source that passed its check is not checked again": (
        Desired(committed=V1),
        replace(PAUSED, checked=V1),
        ["load 1", "flush", "resume"],
    ),
    "the same version from another source is loaded": (
        Desired(committed=Committed(1, Checkpoint("elsewhere"), None)),
        ON_V1,
        ["check_source 1", "pause abort", "load 1", "flush", "resume"],
    ),
    "torn weights are loaded again": (
        Desired(committed=V1),
        replace(ON_V1, torn=True, generating=False),
        ["check_source 1", "load 1", "flush", "resume"],
    ),
    "prepare checks before it pauses": (
        Desired(committed=V1, sync=syncing("prepare")),
        ON_V1,
        ["check_source 2", "pause wait"],
    ),
    "load neither flushes nor resumes": (
        Desired(committed=V1, sync=syncing("load")),
        replace(ON_V1, generating=False, checked=V2),
        ["load 2"],
    ),
    "commit flushes, then resumes": (
        Desired(committed=V2),
        replace(READY, generating=False, version=2, loaded=V2, stale_cache=True),
        ["flush", "resume"],
    ),
    "frozen requests are computed anew": (
        Desired(committed=V2),
        replace(ON_V1, generating=False, version=2, loaded=V2, stale_cache=True, requests_kept=True, recomputes=True),
        ["flush", "resume"],
    ),
    "frozen requests that can't be computed anew keep their cache": (
        Desired(committed=V2),
        replace(READY, generating=False, version=2, loaded=V2, stale_cache=True, requests_kept=True),
        ["resume"],
    ),
    "weights that are asleep are loaded once they are awake": (
        Desired(committed=V1, asleep=WEIGHTS),
        replace(PAUSED, asleep=BOTH),
        ["wake kv_cache"],
    ),
    "woken weights are loaded before the engine serves": (
        Desired(committed=V1),
        replace(PAUSED, asleep=WEIGHTS),
        ["check_source 1", "wake weights", "load 1", "flush", "resume"],
    ),
    "the rest of the memory is woken after the load": (
        Desired(committed=V1),
        replace(PAUSED, asleep=BOTH),
        ["check_source 1", "wake weights", "load 1", "wake kv_cache", "flush", "resume"],
    ),
    "without sleeping weights all memory is woken before the load": (
        Desired(committed=V1),
        replace(PAUSED, asleep=CACHE),
        ["check_source 1", "wake kv_cache", "load 1", "flush", "resume"],
    ),
    "a load under frozen requests flushes their cache if they can be computed anew": (
        Desired(committed=V1),
        replace(PAUSED, requests_kept=True, recomputes=True),
        ["check_source 1", "load 1", "flush", "resume"],
    ),
    "a load under other frozen requests does not flush their cache": (
        Desired(committed=V1),
        replace(PAUSED, requests_kept=True),
        ["check_source 1", "load 1", "resume"],
    ),
    "quarantine pauses and loads nothing": (Desired(committed=V2, quarantined=2), ON_V1, ["pause abort"]),
    "a sync is the way out of quarantine": (
        Desired(committed=V1, sync=syncing("load"), quarantined=1),
        PAUSED,
        ["check_source 2", "load 2"],
    ),
    "aborted, with nothing committed to go back to": (Desired(), replace(PAUSED, version=1, loaded=V1), []),
    "uncommitted weights never generate": (Desired(), ON_V1, ["pause abort"]),
    "a session opens last": (Desired(profile=SESSION), PAUSED, ["resume", "start_profile"]),
    "a session that is not desired closes first": (
        Desired(generation="paused"),
        replace(READY, session=SESSION),
        ["stop_profile", "pause abort"],
    ),
    "another step's session closes before the next opens": (
        Desired(profile=SESSION),
        replace(READY, session=OTHER),
        ["stop_profile", "start_profile"],
    ),
    "the desired session stays open": (Desired(profile=SESSION), replace(READY, session=SESSION), []),
    "without sleep it stays awake": (Desired(asleep=BOTH), without(Operation.SLEEP), []),
    "without profile no session opens": (Desired(profile=SESSION), without(Operation.PROFILE), []),
    "without load it is paused, for it cannot follow": (
        Desired(committed=V1),
        without(Operation.LOAD),
        ["pause abort"],
    ),
    "without pause it is left as it is": (Desired(committed=V1, asleep=BOTH), without(Operation.PAUSE), []),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_bring_an_engine_to_its_desired_state_in_a_safe_order(case: str) -> None:
    desired, engine, calls = CASES[case]
    assert planned(desired, engine) == calls


def test_a_colocated_replica_loads_nothing() -> None:
    assert planned(Desired(committed=V1), READY, JUDGE) == []
    assert wanted_weights(Desired(committed=V1), JUDGE) is None


def test_traces_go_below_the_step_and_the_replica() -> None:
    (start,) = reconcile(Desired(profile=SESSION), READY, Identity(replica=7, node_rank=0))
    assert isinstance(start, StartProfile) and start.directory == "global_step_3/replica_7"


def carried_out(engine: EngineState, calls: tuple[Call, ...]) -> EngineState:
    for call in calls:
        engine, failure = apply_result(engine, call, Returned(), None)
        assert failure is None
    return engine


POINTS = [
    *(Desired(generation=generation) for generation in ("running", "paused")),
    *(Desired(asleep=tags) for tags in (BOTH, WEIGHTS, CACHE)),
    *(Desired(committed=V1, sync=syncing(phase)) for phase in ("prepare", "load")),
    Desired(committed=V1),
    Desired(committed=V2),
    Desired(committed=V2, quarantined=2),
    Desired(profile=SESSION),
    Desired(profile=OTHER, committed=V1),
]


def test_no_call_violates_a_precondition_that_would_kill_an_engine() -> None:
    for before, after in combinations([*POINTS, *reversed(POINTS)], 2):
        engine = carried_out(READY, reconcile(before, READY, PRIMARY))
        for call in reconcile(after, engine, PRIMARY):
            if isinstance(call, Sleep | Load):
                assert not engine.generating, f"{call_name(call)} of a running engine, from {before} to {after}"
            if isinstance(call, Load):
                assert "weights" not in engine.asleep, f"load into sleeping memory, from {before} to {after}"
            if isinstance(call, Wake):
                assert call.tags <= engine.asleep, f"wakes what is awake, from {before} to {after}"
            if isinstance(call, Resume):
                assert not engine.asleep and not engine.torn, f"serves without memory, from {before} to {after}"
            if isinstance(call, StartProfile):
                assert engine.session is None, f"a second session, from {before} to {after}"
            engine = carried_out(engine, (call,))


def test_what_an_engine_has_no_operation_for_is_not_attainable() -> None:
    desired = Desired(committed=V1, asleep=BOTH, profile=SESSION)
    assert attainable(desired, READY) == desired
    assert attainable(desired, without(Operation.WAKE)) == replace(desired, asleep=frozenset())
    assert attainable(desired, without(Operation.PROFILE)) == replace(desired, profile=None)
    assert attainable(desired, without(Operation.RESUME)) == Desired(profile=SESSION)


# --- what may serve ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("desired", "engine", "may"),
    [
        (Desired(), READY, True),
        (Desired(), replace(READY, torn=True), False),
        (Desired(), ON_V1, False),
        (Desired(committed=V1), READY, True),
        (Desired(generation="paused"), READY, False),
        (Desired(asleep=CACHE), READY, False),
        (Desired(sync=syncing("prepare")), READY, False),
        (Desired(committed=V1, quarantined=1), ON_V1, False),
    ],
)
def test_an_engine_may_serve_only_what_is_committed_or_can_be_loaded(
    desired: Desired, engine: EngineState, may: bool
) -> None:
    assert may_serve(desired, engine, PRIMARY) is may


def test_an_engine_that_reports_the_committed_version_holds_it_though_its_agent_lost_its_journal() -> None:
    """The coordinator uses a version that was once loaded for one source only, so its label names these weights."""
    assert holds_weights(replace(READY, version=1), V1)
    assert not holds_weights(replace(READY, version=1), Committed(1, Pushed("1"), None))  # that number is the trainer's


def test_a_commanded_load_does_not_trust_the_label_of_an_engine_that_was_not_loaded_here() -> None:
    """An aborted sync may have left other weights under the same version, and its agent lost its journal."""
    labelled = replace(READY, version=1)
    loading = Desired(sync=Syncing(1, V1.source, V1.manifest, "abort", phase="load"))
    assert "load" in [call_name(call) for call in reconcile(loading, labelled, PRIMARY, load_commanded=True)]
    assert "load" not in [call_name(call) for call in reconcile(loading, labelled, PRIMARY)]


# --- discarded weights ------------------------------------------------------------------------------------------------


def test_discarded_weights_are_torn_until_they_are_loaded_again() -> None:
    asleep = carried_out(ON_V1, (Pause("abort"), Sleep(BOTH, discard=True)))
    assert asleep.torn and reconcile(Desired(committed=V1, asleep=BOTH, discard=True), asleep, PRIMARY) == ()
    calls = reconcile(Desired(committed=V1), asleep, PRIMARY)
    assert [call_name(call) for call in calls] == ["check_source", "wake", "load", "wake", "flush", "resume"]
    assert calls[1] == Wake(WEIGHTS) and calls[3] == Wake(CACHE)


def test_an_engine_that_discarded_its_weights_stays_paused_if_nothing_is_committed() -> None:
    asleep = carried_out(READY, (Pause("abort"), Sleep(BOTH, discard=True)))
    assert reconcile(Desired(), asleep, PRIMARY) == (Wake(BOTH),)


def test_only_weights_are_discarded_and_never_those_of_a_colocated_replica() -> None:
    for wanted, identity, discards in (
        (BOTH, PRIMARY, True),
        (WEIGHTS, PRIMARY, True),
        (CACHE, PRIMARY, False),
        (BOTH, JUDGE, False),
    ):
        assert reconcile(Desired(asleep=wanted, discard=True), PAUSED, identity) == (Sleep(wanted, discard=discards),)


# --- weights that are broadcast ---------------------------------------------------------------------------------------


def broadcast(path: str = "") -> Broadcast:
    return Broadcast(host="trainer", port=29600, group="g", replicas=(0,), path=path)


def receiving(source: Broadcast, phase: str = "load") -> Desired:
    return Desired(sync=Syncing(2, source, None, "abort", "load" if phase == "load" else "prepare"))


def test_a_broadcast_is_received_only_in_answer_to_its_own_load() -> None:
    ready = replace(PAUSED, checked=Committed(2, broadcast(), None))
    assert reconcile(receiving(broadcast()), ready, PRIMARY, load_commanded=True) == (Load(2, broadcast(), None),)
    assert reconcile(receiving(broadcast()), ready, PRIMARY) == ()  # a restart in the middle: nothing is sent


def test_a_broadcast_that_is_sent_once_more_is_received_by_those_that_have_it_too() -> None:
    """Its group is not whole without them, and the others would wait in vain."""
    loaded = replace(carried_out(PAUSED, (Load(2, broadcast(), None),)), checked=Committed(2, broadcast(), None))
    assert reconcile(receiving(broadcast()), loaded, PRIMARY, load_commanded=True) == (Load(2, broadcast(), None),)
    file = Desired(sync=Syncing(2, Checkpoint("v2"), None, "abort", "load"))
    loaded = carried_out(PAUSED, (Load(2, Checkpoint("v2"), None),))
    assert reconcile(file, loaded, PRIMARY, load_commanded=True) == ()


def test_a_received_broadcast_counts_as_the_committed_weights() -> None:
    loaded = carried_out(PAUSED, (Load(2, broadcast(), None),))
    assert [
        call_name(call) for call in reconcile(Desired(committed=Committed(2, broadcast(), None)), loaded, PRIMARY)
    ] == ["flush", "resume"]


def test_a_replica_that_missed_a_broadcast_stays_paused_until_the_next_sync() -> None:
    committed = Desired(committed=Committed(2, broadcast(), None))
    assert reconcile(committed, ON_V1, PRIMARY) == (Pause("abort"),)
    assert reconcile(committed, replace(ON_V1, generating=False), PRIMARY) == ()


def test_a_replica_that_missed_a_broadcast_loads_its_checkpoint_instead() -> None:
    committed = Desired(committed=Committed(2, broadcast("v2"), None))
    calls = reconcile(committed, ON_V1, PRIMARY)
    assert Load(2, Checkpoint("v2"), None) in calls
    assert reconcile(committed, carried_out(ON_V1, calls), PRIMARY) == ()
