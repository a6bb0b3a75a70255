"""From what an engine is to what it is to be: which calls, in which order, and what is believed after each of them."""

from itertools import combinations

import pytest
from msgspec.structs import replace

from schemas.commands import Broadcast, Checkpoint, Manifest, ProfilePlan, Window
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.events import (
    Call,
    CheckSource,
    Fault,
    Flush,
    Load,
    Observation,
    Pause,
    Resume,
    Returned,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Identity, Operation, RolloutMode, Tag
from schemas.outcomes import ErrorKind
from tests.unit.machines import PRESENT, PRIMARY
from workers.machine.observe import (
    apply_interruption,
    apply_observation,
    apply_result,
    contradiction,
    relaunched,
    with_engine_state,
)
from workers.machine.reconcile import holds_weights, may_serve, reconcile, wanted_weights
from workers.machine.state import EngineState, call_name

V1 = Committed(1, Checkpoint("v1"), None)
V2 = Committed(2, Checkpoint("v2"), None)
LOAD_1, LOAD_2 = (Load(one.version, one.source, one.manifest) for one in (V1, V2))
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


def words(desired: Desired, engine: EngineState, identity: Identity = PRIMARY) -> list[str]:
    """The calls by name, with what tells them apart."""
    said = []
    for call in reconcile(desired, engine, identity):
        match call:
            case Pause():
                said.append(f"pause {call.mode}")
            case Sleep() | Wake():
                said.append(" ".join([call_name(call), *sorted(call.tags)]))
            case Load() | CheckSource():
                said.append(f"{call_name(call)} {call.version}")
            case _:
                said.append(call_name(call))
    return said


def without(*operations: Operation) -> EngineState:
    return replace(READY, operations=frozenset(Operation) - set(operations))


# --- calls and their order --------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Desired, EngineState, list[str]]] = {
    "as launched": (Desired(), READY, []),
    "found paused": (Desired(), PAUSED, ["resume"]),
    "pause": (Desired(generation="paused", pause_mode="keep"), READY, ["pause keep"]),
    "paused already": (Desired(generation="paused"), PAUSED, []),
    "sleep pauses first": (Desired(asleep=BOTH), READY, ["pause abort", "sleep kv_cache weights"]),
    "only what is awake is put to sleep": (
        Desired(asleep=BOTH),
        replace(PAUSED, asleep=WEIGHTS),
        ["sleep kv_cache"],
    ),
    "wake resumes last": (Desired(), replace(PAUSED, asleep=BOTH), ["wake kv_cache weights", "resume"]),
    "only what sleeps is woken": (
        Desired(asleep=CACHE),
        replace(PAUSED, asleep=BOTH),
        ["wake weights"],
    ),
    "wake and sleep in one go": (
        Desired(asleep=CACHE),
        replace(PAUSED, asleep=WEIGHTS),
        ["wake weights", "sleep kv_cache"],
    ),
    "paused and awake again": (Desired(generation="paused"), replace(PAUSED, asleep=CACHE), ["wake kv_cache"]),
    "a late joiner loads what is committed": (
        Desired(committed=V1),
        READY,
        ["check_source 1", "pause abort", "load 1", "flush", "resume"],
    ),
    "a source found good is not looked at twice": (
        Desired(committed=V1),
        replace(PAUSED, checked=V1),
        ["load 1", "flush", "resume"],
    ),
    "the same number from another place is another version": (
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
    "frozen requests keep their cache": (
        Desired(committed=V2),
        replace(READY, generating=False, version=2, loaded=V2, stale_cache=True, requests_kept=True),
        ["resume"],
    ),
    "weights that sleep are loaded when they are woken": (
        Desired(committed=V1, asleep=WEIGHTS),
        replace(PAUSED, asleep=BOTH),
        ["wake kv_cache"],
    ),
    "woken weights are loaded before the engine serves": (
        Desired(committed=V1),
        replace(PAUSED, asleep=WEIGHTS),
        ["check_source 1", "wake weights", "load 1", "flush", "resume"],
    ),
    "quarantine pauses and loads nothing": (Desired(committed=V2, quarantined=2), ON_V1, ["pause abort"]),
    "a sync is the way out of quarantine": (
        Desired(committed=V1, sync=syncing("load"), quarantined=1),
        PAUSED,
        ["check_source 2", "load 2"],
    ),
    "aborted with nothing to go back to": (
        Desired(),
        replace(PAUSED, version=1, loaded=V1),
        [],
    ),
    "uncommitted weights never generate": (Desired(), ON_V1, ["pause abort"]),
    "a session opens last": (
        Desired(profile=SESSION),
        PAUSED,
        ["resume", "start_profile"],
    ),
    "a session nobody wants closes first": (
        Desired(generation="paused"),
        replace(READY, session=SESSION),
        ["stop_profile", "pause abort"],
    ),
    "another step's session closes before the next opens": (
        Desired(profile=SESSION),
        replace(READY, session=OTHER),
        ["stop_profile", "start_profile"],
    ),
    "the session that is wanted stays open": (Desired(profile=SESSION), replace(READY, session=SESSION), []),
    "no sleep: it goes on awake": (Desired(asleep=BOTH), without(Operation.SLEEP), []),
    "no profile: no session": (Desired(profile=SESSION), without(Operation.PROFILE), []),
    "no load: it is paused, since it can't follow": (Desired(committed=V1), without(Operation.LOAD), ["pause abort"]),
    "no pause: it is left as it is": (Desired(committed=V1, asleep=BOTH), without(Operation.PAUSE), []),
}


@pytest.mark.parametrize("case", CASES)
def test_the_calls_that_lead_from_one_to_the_other(case: str) -> None:
    desired, engine, calls = CASES[case]
    assert words(desired, engine) == calls


def test_a_replica_that_never_syncs_loads_nothing() -> None:
    assert words(Desired(committed=V1), READY, JUDGE) == []
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
    *(Desired(generation=one) for one in ("running", "paused")),
    *(Desired(asleep=one) for one in (BOTH, WEIGHTS, CACHE)),
    *(Desired(committed=V1, sync=syncing(one)) for one in ("prepare", "load")),
    Desired(committed=V1),
    Desired(committed=V2),
    Desired(committed=V2, quarantined=2),
    Desired(profile=SESSION),
    Desired(profile=OTHER, committed=V1),
]


def test_what_was_settled_wants_nothing_more_from_any_state_to_any_other() -> None:
    for before, after in combinations([*POINTS, *reversed(POINTS)], 2):
        engine = carried_out(READY, reconcile(before, READY, PRIMARY))
        engine = carried_out(engine, reconcile(after, engine, PRIMARY))
        assert reconcile(after, engine, PRIMARY) == (), f"from {before} to {after}"


def test_the_preconditions_that_would_kill_an_engine_hold_before_every_call() -> None:
    for before, after in combinations([*POINTS, *reversed(POINTS)], 2):
        engine = carried_out(READY, reconcile(before, READY, PRIMARY))
        for call in reconcile(after, engine, PRIMARY):
            if isinstance(call, Sleep | Load):
                assert not engine.generating, f"{call_name(call)} of a running engine, from {before} to {after}"
            if isinstance(call, Load):
                assert "weights" not in engine.asleep, f"load into memory that sleeps, from {before} to {after}"
            if isinstance(call, Wake):
                assert call.tags <= engine.asleep, f"wakes what is awake, from {before} to {after}"
            if isinstance(call, Resume):
                assert not engine.asleep and not engine.torn, f"serves without memory, from {before} to {after}"
            if isinstance(call, StartProfile):
                assert engine.session is None, f"a second session, from {before} to {after}"
            engine = carried_out(engine, (call,))


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
    assert may_serve(desired, engine) is may


def test_torn_weights_are_held_by_nobody() -> None:
    assert holds_weights(ON_V1, V1)
    assert not holds_weights(replace(ON_V1, torn=True), V1)


def test_an_engine_that_names_its_version_holds_it_though_we_did_not_load_it() -> None:
    assert holds_weights(replace(READY, version=1), V1)


# --- believing what is read -------------------------------------------------------------------------------------------


def test_what_an_engine_can_not_tell_stays_as_believed() -> None:
    engine = replace(ON_V1, generating=False, asleep=CACHE, session=SESSION, digest="d")
    silent = Observation(engine="e", tokenizer="present", operations=frozenset(Operation))
    assert apply_observation(engine, silent) == engine


def test_what_is_read_corrects_what_was_believed() -> None:
    engine = replace(READY, session=SESSION)
    seen = replace(PRESENT, generating=False, asleep=WEIGHTS, version=4, digest="d")
    found = apply_observation(engine, seen)
    assert (found.generating, found.asleep, found.session) == (False, WEIGHTS, None)
    assert (found.version, found.digest) == (4, "d")


def test_an_engine_that_was_launched_again_is_a_stranger() -> None:
    engine = replace(ON_V1, generating=False, torn=True, session=SESSION)
    silent = Observation(engine="e", instance="two", tokenizer="present", operations=frozenset(Operation))
    found = apply_observation(engine, silent)
    assert found == replace(READY, name="e", instance="two")
    assert relaunched(engine, found)


def test_an_engine_that_tells_no_instance_is_taken_for_the_same() -> None:
    silent = Observation(engine="e", tokenizer="present")
    assert not relaunched(READY, apply_observation(READY, silent))
    assert not relaunched(EngineState(), READY)


# --- a call that returned ---------------------------------------------------------------------------------------------

CONTENT = Manifest(tensors=1, nbytes=1, layout="l", content="right")
EXACT = Load(2, Checkpoint("v2"), CONTENT)

DENIED: dict[str, tuple[Call, Observation, str]] = {
    "pause": (Pause("abort"), replace(PRESENT, generating=True), "it still generates"),
    "resume": (Resume(), replace(PRESENT, generating=False), "it is still paused"),
    "sleep": (Sleep(BOTH), replace(PRESENT, asleep=WEIGHTS), "still awake: kv_cache"),
    "wake": (Wake(BOTH), replace(PRESENT, asleep=WEIGHTS), "still asleep: weights"),
    "start_profile": (StartProfile(SESSION, "d"), replace(PRESENT, profiling=False), "no session is open"),
    "stop_profile": (StopProfile(SESSION, "d"), replace(PRESENT, profiling=True), "a session is still open"),
    "load": (LOAD_2, replace(PRESENT, version=1), "it holds version 1, not 2"),
}


@pytest.mark.parametrize("call", DENIED)
def test_a_yes_that_reading_back_denies_is_not_held(call: str) -> None:
    asked, seen, says = DENIED[call]
    failure = contradiction(asked, Returned(), seen)
    assert failure is not None and failure.error is ErrorKind.NO_EFFECT
    assert failure.message == f"tiny 1 answered yes to {call}, but {says}."


@pytest.mark.parametrize("call", DENIED)
def test_an_engine_that_can_not_tell_is_taken_at_its_word(call: str) -> None:
    assert contradiction(DENIED[call][0], Returned(), Observation(engine="e", tokenizer="present")) is None


def test_a_session_whose_window_closed_before_it_was_read_still_wants_its_stop() -> None:
    windowed = ProfileSession(3, ProfilePlan(window=Window(0, 1)))
    seen = replace(PRESENT, profiling=False)
    engine, failure = apply_result(READY, StartProfile(windowed, "d"), Returned(), seen)
    assert failure is None and engine.session == windowed


def test_other_weights_than_the_source_s_are_a_mismatch_and_torn() -> None:
    seen = replace(PRESENT, version=2, digest="wrong", generating=False)
    engine, failure = apply_result(PAUSED, EXACT, Returned(), seen)
    assert failure is not None and failure.error is ErrorKind.DIGEST_MISMATCH
    assert "digest wrong, not the source's right" in failure.message
    assert engine.torn


def test_the_digest_that_the_load_itself_gave_back_is_compared_too() -> None:
    seen = replace(PRESENT, version=2, generating=False)
    assert contradiction(EXACT, Returned(digest="right"), seen) is None
    failure = contradiction(EXACT, Returned(digest="wrong"), seen)
    assert failure is not None and failure.error is ErrorKind.DIGEST_MISMATCH


def test_a_load_that_held_leaves_the_cache_stale_and_the_source_unchecked() -> None:
    engine, failure = apply_result(replace(PAUSED, checked=V2, torn=True), LOAD_2, Returned(digest="d"), None)
    assert failure is None
    assert engine == replace(PAUSED, version=2, digest="d", loaded=V2, stale_cache=True)


def test_releasing_the_cache_drops_what_was_stale_in_it() -> None:
    stale = replace(PAUSED, stale_cache=True)
    assert not carried_out(stale, (Sleep(CACHE),)).stale_cache
    assert carried_out(stale, (Sleep(WEIGHTS),)).stale_cache


def test_a_pause_that_keeps_its_requests_is_remembered_until_they_go_on() -> None:
    kept = carried_out(READY, (Pause("keep"),))
    assert kept.requests_kept
    assert not carried_out(kept, (Resume(),)).requests_kept


@pytest.mark.parametrize(
    ("kind", "torn"), [("engine_error", True), ("source_refused", False)], ids=["engine", "source"]
)
def test_only_a_load_that_reached_the_engine_tears_it(kind: str, torn: bool) -> None:
    refused = Fault("engine_error" if kind == "engine_error" else "source_refused", "It is not there.")
    engine, failure = apply_result(ON_V1, LOAD_2, refused, None)
    assert engine.torn is torn and failure is not None and failure.error == kind
    held = "weights that nobody can vouch for" if torn else "version 1"
    assert failure.message == f"It is not there. The engine holds {held} and is running."


def test_a_load_that_failed_and_left_the_digest_as_it_was_did_no_harm() -> None:
    engine = replace(ON_V1, generating=False, digest="d")
    seen = replace(PRESENT, generating=False, version=1, digest="d")
    after, _ = apply_result(engine, LOAD_2, Fault("engine_error", "No."), seen)
    assert not after.torn
    after, _ = apply_result(replace(engine, torn=True), LOAD_2, Fault("engine_error", "No."), seen)
    assert after.torn, "nobody knows of which weights that digest is"


@pytest.mark.parametrize("call", [StartProfile(SESSION, "d"), StopProfile(SESSION, "d")], ids=call_name)
def test_a_profile_call_that_failed_leaves_no_session_to_wait_for(call: Call) -> None:
    engine, failure = apply_result(replace(READY, session=SESSION), call, Fault("engine_error", "No."), None)
    assert engine.session is None and failure is not None


# --- a call that an agent's death cut off -----------------------------------------------------------------------------

LOADED = replace(PRESENT, version=2, digest="right", generating=False)
CUT: dict[str, tuple[Call, Observation, bool]] = {
    "a pause that is seen": (Pause("abort"), replace(PRESENT, generating=False), True),
    "a pause that is not": (Pause("abort"), PRESENT, False),
    "a resume that is seen": (Resume(), PRESENT, True),
    "a resume that is not": (Resume(), replace(PRESENT, generating=False), False),
    "a sleep that is seen": (Sleep(CACHE), replace(PRESENT, asleep=BOTH), True),
    "a sleep that is seen in part": (Sleep(BOTH), replace(PRESENT, asleep=CACHE), False),
    "a sleep that nobody can see": (Sleep(CACHE), replace(PRESENT, asleep=None), False),
    "a wake that is seen": (Wake(CACHE), replace(PRESENT, asleep=WEIGHTS), True),
    "a wake that is seen in part": (Wake(BOTH), replace(PRESENT, asleep=CACHE), False),
    "a profile stop that is seen": (StopProfile(SESSION, "d"), PRESENT, True),
    "a profile stop that is not": (StopProfile(SESSION, "d"), replace(PRESENT, profiling=True), False),
    "a profile start, whatever is seen": (StartProfile(SESSION, "d"), replace(PRESENT, profiling=True), False),
    "a load with the source's digest": (EXACT, LOADED, True),
    "a load with another digest": (EXACT, replace(LOADED, digest="wrong"), False),
    "a load of which only the number is seen": (LOAD_2, LOADED, False),
    "a flush": (Flush(), PRESENT, False),
}


@pytest.mark.parametrize("case", CUT)
def test_whether_a_call_that_was_cut_off_is_seen_to_be_done(case: str) -> None:
    call, seen, done = CUT[case]
    assert apply_interruption(READY, call, seen)[1] is done


def test_an_engine_that_was_launched_again_did_nothing_of_what_was_cut_off() -> None:
    engine, done = apply_interruption(READY, Pause("abort"), replace(PRESENT, instance="two", generating=False))
    assert not done and engine.instance == "two"


@pytest.mark.parametrize(("profiling", "believed"), [(True, SESSION), (None, SESSION), (False, None)])
def test_a_profile_start_that_may_have_happened_is_believed_in(
    profiling: bool | None, believed: ProfileSession | None
) -> None:
    engine, _ = apply_interruption(
        READY, StartProfile(SESSION, "d"), replace(PRESENT, instance="one", profiling=profiling)
    )
    assert engine.session == believed
    assert words(Desired(), engine) == (["stop_profile"] if believed else [])


def test_a_load_that_was_cut_off_is_done_again_unless_it_is_proven() -> None:
    engine = replace(PAUSED, checked=V2)
    torn, _ = apply_interruption(engine, LOAD_2, replace(PRESENT, generating=False, version=2))
    assert torn.torn and words(Desired(committed=V2), torn) == ["load 2", "flush", "resume"]
    whole, _ = apply_interruption(engine, EXACT, LOADED)
    assert not whole.torn and words(Desired(committed=Committed(2, EXACT.source, CONTENT)), whole) == [
        "flush",
        "resume",
    ]


def test_a_load_that_was_cut_off_before_it_began_did_no_harm() -> None:
    engine = replace(ON_V1, generating=False, digest="d")
    seen = replace(PRESENT, generating=False, version=1, digest="d")
    assert not apply_interruption(engine, EXACT, seen)[0].torn


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (ON_V1, "No. The engine holds version 1 and is running."),
        (replace(PAUSED, torn=True), "No. The engine holds weights that nobody can vouch for and is paused."),
        (
            EngineState(name="torch profiler", operations=frozenset({Operation.PROFILE})),
            "No.",
        ),  # of a training rank
    ],
)
def test_an_error_says_what_the_engine_holds_now(engine: EngineState, says: str) -> None:
    assert with_engine_state("No.", engine) == says


# Weights that were discarded


def test_discarded_weights_are_vouched_for_by_nobody_until_they_are_loaded_again() -> None:
    asleep = carried_out(ON_V1, (Pause("abort"), Sleep(BOTH, discard=True)))
    assert asleep.torn and reconcile(Desired(committed=V1, asleep=BOTH, discard=True), asleep, PRIMARY) == ()
    calls = reconcile(Desired(committed=V1), asleep, PRIMARY)
    assert [call_name(one) for one in calls] == ["check_source", "wake", "load", "wake", "flush", "resume"]
    assert calls[1] == Wake(WEIGHTS) and calls[3] == Wake(CACHE)


def test_discarded_weights_with_nothing_committed_stay_out_of_service() -> None:
    asleep = carried_out(READY, (Pause("abort"), Sleep(BOTH, discard=True)))
    assert reconcile(Desired(), asleep, PRIMARY) == (Wake(BOTH),)


def test_only_weights_are_discarded_and_never_those_of_a_replica_that_never_syncs() -> None:
    for wanted, identity, discards in (
        (BOTH, PRIMARY, True),
        (WEIGHTS, PRIMARY, True),
        (CACHE, PRIMARY, False),
        (BOTH, JUDGE, False),
    ):
        assert reconcile(Desired(asleep=wanted, discard=True), PAUSED, identity) == (Sleep(wanted, discard=discards),)


@pytest.mark.parametrize("discard", [True, False])
def test_sleep_that_failed_or_was_cut_off_may_have_discarded(discard: bool) -> None:
    call = Sleep(BOTH, discard=discard)
    failed, _ = apply_result(ON_V1, call, Fault("engine_error", "no"), None)
    cut, _ = apply_interruption(ON_V1, call, replace(PRESENT, version=1, asleep=None))
    assert failed.torn == cut.torn == discard


def test_digest_of_the_engines_own_kind_is_not_compared_with_the_files() -> None:
    seen = replace(PRESENT, version=2, generating=False)
    assert contradiction(EXACT, Returned(digest="vllm:of its own tensors"), seen) is None


# Weights that are broadcast


def sent(path: str = "") -> Broadcast:
    return Broadcast(host="trainer", port=29600, group="g", replicas=(0,), path=path)


def receiving(source: Broadcast, phase: str = "load") -> Desired:
    return Desired(sync=Syncing(2, source, None, "abort", "load" if phase == "load" else "prepare"))


def test_broadcast_is_received_only_in_answer_to_its_own_load() -> None:
    ready = replace(PAUSED, checked=Committed(2, sent(), None))
    assert reconcile(receiving(sent()), ready, PRIMARY, live=True) == (Load(2, sent(), None),)
    assert reconcile(receiving(sent()), ready, PRIMARY) == ()  # a restart in the middle: nobody would send to it


def test_broadcast_that_was_received_is_what_is_committed() -> None:
    loaded = carried_out(PAUSED, (Load(2, sent(), None),))
    assert [call_name(one) for one in reconcile(Desired(committed=Committed(2, sent(), None)), loaded, PRIMARY)] == [
        "flush",
        "resume",
    ]


def test_who_missed_a_broadcast_stays_paused_until_the_next_sync() -> None:
    committed = Desired(committed=Committed(2, sent(), None))
    assert reconcile(committed, ON_V1, PRIMARY) == (Pause("abort"),)
    assert reconcile(committed, replace(ON_V1, generating=False), PRIMARY) == ()


def test_who_missed_a_broadcast_takes_the_checkpoint_that_it_names_and_keeps_it() -> None:
    committed = Desired(committed=Committed(2, sent("v2"), None))
    calls = reconcile(committed, ON_V1, PRIMARY)
    assert Load(2, Checkpoint("v2"), None) in calls
    assert reconcile(committed, carried_out(ON_V1, calls), PRIMARY) == ()
