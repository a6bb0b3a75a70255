"""What is believed about an engine after an observation, after a call, and after a call that was cut off."""

import pytest
from msgspec.structs import replace

from schemas import events
from schemas.commands import Checkpoint, Manifest, ProfilePlan, Pushed, Window
from schemas.desired import Committed, Desired, ProfileSession
from schemas.identity import Operation, Tag
from schemas.outcomes import ErrorKind
from tests.unit.machines import PRESENT, PRIMARY
from tests.unit.test_reconcile import (
    BOTH,
    CACHE,
    ON_V1,
    PAUSED,
    READY,
    SESSION,
    V2,
    WEIGHTS,
    carried_out,
    planned,
)
from workers.machine.observe import apply_interruption, apply_observation, apply_result, contradiction, relaunched
from workers.machine.state import EngineState, with_engine_state
from workers.machine.weights import adopt_pushed

LOAD_2 = events.Load(2, Checkpoint("v2"), None)
# --- observations -----------------------------------------------------------------------------------------------------


def test_what_an_engine_cannot_report_stays_as_believed() -> None:
    engine = replace(ON_V1, generating=False, asleep=CACHE, session=SESSION, digest="d")
    silent = events.Observation(engine="e", tokenizer="present", operations=frozenset(Operation))
    assert apply_observation(engine, silent) == engine


def test_an_observation_corrects_what_was_believed() -> None:
    engine = replace(READY, session=SESSION)
    seen = replace(PRESENT, generating=False, asleep=WEIGHTS, version=4, digest="d")
    found = apply_observation(engine, seen)
    assert (found.generating, found.asleep, found.session) == (False, WEIGHTS, None)
    assert (found.version, found.digest) == (4, "d")


def test_nothing_is_believed_about_a_relaunched_engine_but_the_observation() -> None:
    engine = replace(ON_V1, generating=False, torn=True, session=SESSION)
    silent = events.Observation(engine="e", instance="two", tokenizer="present", operations=frozenset(Operation))
    found = apply_observation(engine, silent)
    assert found == replace(READY, name="e", instance="two")
    assert relaunched(engine, found)


@pytest.mark.parametrize(("label", "version"), [("1", 1), ("step 1", None), (None, 1)])
def test_a_relaunched_engine_holds_the_weights_of_its_launch_whatever_it_calls_them(
    label: str | None, version: int | None
) -> None:
    engine = apply_observation(ON_V1, replace(PRESENT, instance="two", label=label, version=version))
    v1 = Committed(1, Checkpoint("v1"), None)
    assert engine.torn and engine.launch_label == label
    assert planned(Desired(committed=v1), engine) == ["check_source 1", "pause abort", "load 1", "flush", "resume"]
    pushed = Desired(committed=Committed(1, Pushed(label or "step 1"), None))
    assert adopt_pushed(engine, pushed, PRIMARY) == engine


def test_an_engine_without_an_instance_counts_as_the_same_one() -> None:
    silent = events.Observation(engine="e", tokenizer="present")
    assert not relaunched(READY, apply_observation(READY, silent))
    assert not relaunched(EngineState(), READY)


@pytest.mark.parametrize(("label", "proven"), [("push 2", False), ("push 3", True), ("push 4", False)])
def test_a_load_that_was_cut_off_is_proven_by_its_digest_with_its_own_label(label: str, proven: bool) -> None:
    load = events.Load(3, Checkpoint("v3"), Manifest(tensors=1, nbytes=1, layout="l", content="c"), "push 3")
    seen = replace(PRESENT, generating=False, version=None, label=label, digest="c")
    after, done = apply_interruption(replace(ON_V1, generating=False, digest="b"), load, seen)
    assert (done, after.torn) == (proven, not proven)


@pytest.mark.parametrize(("label", "version"), [("3", 3), ("step 3", None), ("0", None)])
def test_the_label_of_an_engine_that_is_seen_for_the_first_time_proves_no_version(
    label: str, version: int | None
) -> None:
    """Another program may have set it, or an earlier run, which counted its own versions. It never changes later."""
    seen = replace(PRESENT, label=label, version=version, remedies=events.Remedies(launched_from="/models/last"))
    engine = apply_observation(apply_observation(EngineState(), seen), seen)
    assert engine.label_changed and f"labelled '{label}'" in with_engine_state("No.", engine)
    assert planned(Desired(), engine) == ["pause abort"] and engine.launched_from is None
    load = events.Load(3, Checkpoint("v3"), None)
    v3 = Committed(3, load.source, None)
    assert planned(Desired(committed=v3), engine) == ["check_source 3", "pause abort", "load 3", "flush", "resume"]
    loaded, failure = apply_result(engine, load, events.Returned(), replace(seen, version=3))
    assert failure is None and not loaded.label_changed


def test_a_push_that_replaces_weights_of_an_earlier_run_leaves_their_cache_to_be_flushed() -> None:
    seen = replace(PRESENT, label="3", version=3, generating=False, recomputes=True)
    engine = replace(apply_observation(EngineState(), seen), stale_cache=False)  # it was flushed since
    pushed = Committed(1, Pushed("push 1"), None)
    engine = apply_observation(engine, replace(seen, label="push 1", version=None))
    engine = adopt_pushed(engine, Desired(committed=pushed), PRIMARY)
    assert planned(Desired(committed=pushed), engine) == ["flush", "resume"]


@pytest.mark.parametrize(("label", "version"), [("default", 0), ("", None), (None, None)])
def test_the_label_of_a_launch_is_believed(label: str | None, version: int | None) -> None:
    engine = apply_observation(EngineState(), replace(PRESENT, label=label, version=version))
    assert (engine.version, engine.label_changed) == (0, False) and planned(Desired(), engine) == []


# --- calls that returned ----------------------------------------------------------------------------------------------

CONTENT = Manifest(tensors=1, nbytes=1, layout="l", content="right")
EXACT = events.Load(2, Checkpoint("v2"), CONTENT)

CONTRADICTED: dict[str, tuple[events.Call, events.Observation, str]] = {
    "pause": (events.Pause("abort"), replace(PRESENT, generating=True), "it still generates"),
    "resume": (events.Resume(), replace(PRESENT, generating=False), "it is still paused"),
    "sleep": (events.Sleep(BOTH), replace(PRESENT, asleep=WEIGHTS), "still awake: kv_cache"),
    "wake": (events.Wake(BOTH), replace(PRESENT, asleep=WEIGHTS), "still asleep: weights"),
    "start_profile": (events.StartProfile(SESSION, "d"), replace(PRESENT, profiling=False), "no session is open"),
    "stop_profile": (events.StopProfile(SESSION, "d"), replace(PRESENT, profiling=True), "a session is still open"),
    "load": (LOAD_2, replace(PRESENT, version=1), "it holds version 1, not 2"),
}


@pytest.mark.parametrize("call", CONTRADICTED)
def test_a_success_that_the_observation_contradicts_is_a_failure(call: str) -> None:
    made, seen, message = CONTRADICTED[call]
    failure = contradiction(made, events.Returned(), seen)
    assert failure is not None and failure.error is ErrorKind.NO_EFFECT
    assert failure.message == f"tiny 1 reported success for {call}, but {message}."


@pytest.mark.parametrize("call", CONTRADICTED)
def test_an_engine_that_cannot_report_is_believed(call: str) -> None:
    assert (
        contradiction(CONTRADICTED[call][0], events.Returned(), events.Observation(engine="e", tokenizer="present"))
        is None
    )


def test_a_session_whose_window_closed_before_the_observation_still_needs_a_stop() -> None:
    windowed = ProfileSession(3, ProfilePlan(window=Window(0, 1)))
    seen = replace(PRESENT, profiling=False)
    engine, failure = apply_result(READY, events.StartProfile(windowed, "d"), events.Returned(), seen)
    assert failure is None and engine.session == windowed


def test_weights_that_differ_from_the_source_are_a_mismatch_and_torn() -> None:
    seen = replace(PRESENT, version=2, digest="wrong", generating=False)
    engine, failure = apply_result(PAUSED, EXACT, events.Returned(), seen)
    assert failure is not None and failure.error is ErrorKind.DIGEST_MISMATCH
    assert "digest wrong, not the source's right" in failure.message
    assert engine.torn


def test_the_digest_that_the_load_returned_is_compared_too() -> None:
    seen = replace(PRESENT, version=2, generating=False)
    assert contradiction(EXACT, events.Returned(digest="right"), seen) is None
    failure = contradiction(EXACT, events.Returned(digest="wrong"), seen)
    assert failure is not None and failure.error is ErrorKind.DIGEST_MISMATCH


def test_a_successful_load_leaves_a_stale_cache_and_an_unchecked_source() -> None:
    engine, failure = apply_result(replace(PAUSED, checked=V2, torn=True), LOAD_2, events.Returned(digest="d"), None)
    assert failure is None
    assert engine == replace(PAUSED, version=2, digest="d", loaded=V2, stale_cache=True, unshown=(LOAD_2,))


def test_a_released_cache_is_no_longer_stale() -> None:
    stale = replace(PAUSED, stale_cache=True)
    assert not carried_out(stale, (events.Sleep(CACHE),)).stale_cache
    assert carried_out(stale, (events.Sleep(WEIGHTS),)).stale_cache


def test_kept_requests_are_remembered_until_the_resume() -> None:
    kept = carried_out(READY, (events.Pause("keep"),))
    assert kept.requests_kept
    assert not carried_out(kept, (events.Resume(),)).requests_kept


def test_a_pause_that_is_not_known_here_may_have_frozen_requests() -> None:
    paused = replace(PRESENT, generating=False)
    assert apply_observation(EngineState(), paused).requests_kept  # without a journal, or of another program
    assert not apply_observation(carried_out(READY, (events.Pause("abort"),)), paused).requests_kept
    cut_off, done = apply_interruption(READY, events.Pause("abort"), paused)
    assert done and not cut_off.requests_kept


def test_a_commit_on_an_engine_found_paused_resumes_before_it_flushes() -> None:
    found = replace(apply_observation(EngineState(), replace(PRESENT, generating=False)), recomputes=False)
    loaded = carried_out(found, (LOAD_2,))
    resumed = carried_out(loaded, (events.Resume(),))
    assert planned(Desired(committed=V2), loaded) == ["resume"]
    assert planned(Desired(committed=V2), resumed) == ["flush"]


@pytest.mark.parametrize(
    ("kind", "torn"), [("engine_error", True), ("source_refused", False)], ids=["engine", "source"]
)
def test_a_failed_load_leaves_torn_weights_only_if_it_reached_the_engine(kind: str, torn: bool) -> None:
    refused = events.Fault("engine_error" if kind == "engine_error" else "source_refused", "It is not there.")
    engine, failure = apply_result(ON_V1, LOAD_2, refused, None)
    assert engine.torn is torn and failure is not None and failure.error == kind
    held = "weights that can't be trusted" if torn else "version 1"
    assert failure.message == f"It is not there. The engine holds {held} and is running."


def test_a_failed_load_that_left_the_digest_unchanged_did_no_harm() -> None:
    engine = replace(ON_V1, generating=False, digest="d")
    seen = replace(PRESENT, generating=False, version=1, digest="d")
    after, _ = apply_result(engine, LOAD_2, events.Fault("engine_error", "No."), seen)
    assert not after.torn
    after, _ = apply_result(replace(engine, torn=True), LOAD_2, events.Fault("engine_error", "No."), seen)
    assert after.torn, "it is not known of which weights that digest is"


@pytest.mark.parametrize(("asleep", "unknown"), [(None, WEIGHTS), (WEIGHTS, frozenset()), (frozenset(), frozenset())])
def test_a_launch_that_was_not_observed_before_may_have_made_the_sleep(
    asleep: frozenset[Tag] | None, unknown: frozenset[Tag]
) -> None:
    """The engine may have been relaunched before the call; then what it does not report is not what it was launched
    with.
    """
    seen = replace(PRESENT, instance="two", asleep=asleep)
    engine, _ = apply_result(PAUSED, events.Sleep(WEIGHTS), events.Returned(), seen)
    assert (engine.instance, engine.asleep, engine.unknown) == ("two", asleep or frozenset(), unknown)


@pytest.mark.parametrize("generating", [None, False, True])
def test_a_launch_that_was_not_observed_before_may_have_made_the_pause(generating: bool | None) -> None:
    twice = events.Remedies(idempotent=frozenset({Operation.PAUSE, Operation.RESUME}))
    seen = replace(PRESENT, instance="two", generating=generating, remedies=twice)
    engine, _ = apply_result(READY, events.Pause("keep"), events.Returned(), seen)
    assert engine.generating is generating
    assert planned(Desired(), engine)[-1:] == ([] if generating else ["resume"])


RELAUNCHED = replace(
    PRESENT,
    instance="two",
    generating=False,
    version=None,
    recomputes=True,
    remedies=events.Remedies(launched_from="/models/policy"),
)


@pytest.mark.parametrize("result", [events.Returned(), events.Fault("engine_error", "no")], ids=["done", "failed"])
@pytest.mark.parametrize("version", [None, 0])
def test_a_launch_that_was_not_observed_before_may_have_made_the_load(
    result: events.Returned | events.Fault, version: int | None
) -> None:
    """What it was launched with is then no longer what it holds, or only in part."""
    engine, _ = apply_result(PAUSED, LOAD_2, result, replace(RELAUNCHED, version=version))
    assert (engine.instance, engine.torn, engine.launched_from) == ("two", True, "/models/policy")
    assert planned(Desired(), engine) == ["restore", "flush", "resume"]


@pytest.mark.parametrize(("digest", "torn"), [("d", False), ("other", True), (None, True)])
def test_a_launch_that_shows_the_digest_of_before_the_load_has_not_begun_it(digest: str | None, torn: bool) -> None:
    seen = replace(RELAUNCHED, version=0, digest=digest)
    engine, _ = apply_interruption(replace(PAUSED, digest="d"), LOAD_2, seen)
    assert engine.torn is torn and planned(Desired(), engine)[:1] == (["restore"] if torn else ["resume"])


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_new_launch_that_names_the_directory_of_a_load_as_its_own_has_no_way_back(cut_off: bool) -> None:
    seen = replace(RELAUNCHED, remedies=events.Remedies(launched_from="/shared/checkpoints/v2"))
    if cut_off:
        engine, _ = apply_interruption(PAUSED, LOAD_2, seen)
    else:
        engine, _ = apply_result(PAUSED, LOAD_2, events.Returned(), seen)
    assert engine.torn and engine.launched_from is None and planned(Desired(), engine) == []
    assert apply_observation(engine, seen).launched_from is None


# --- calls that were cut off ------------------------------------------------------------------------------------------

LOADED = replace(PRESENT, version=2, digest="right", generating=False)
CUT: dict[str, tuple[events.Call, events.Observation, bool]] = {
    "a pause that is seen": (events.Pause("abort"), replace(PRESENT, generating=False), True),
    "a pause that is not": (events.Pause("abort"), PRESENT, False),
    "a resume that is seen": (events.Resume(), PRESENT, True),
    "a resume that is not": (events.Resume(), replace(PRESENT, generating=False), False),
    "a sleep that is seen": (events.Sleep(CACHE), replace(PRESENT, asleep=BOTH), True),
    "a sleep that is seen in part": (events.Sleep(BOTH), replace(PRESENT, asleep=CACHE), False),
    "a sleep that cannot be seen": (events.Sleep(CACHE), replace(PRESENT, asleep=None), False),
    "a wake that is seen": (events.Wake(CACHE), replace(PRESENT, asleep=WEIGHTS), True),
    "a wake that is seen in part": (events.Wake(BOTH), replace(PRESENT, asleep=CACHE), False),
    "a profile stop that is seen": (events.StopProfile(SESSION, "d"), PRESENT, True),
    "a profile stop that is not": (events.StopProfile(SESSION, "d"), replace(PRESENT, profiling=True), False),
    "a profile start, whatever is seen": (events.StartProfile(SESSION, "d"), replace(PRESENT, profiling=True), False),
    "a load with the source's digest": (EXACT, LOADED, True),
    "a load with another digest": (EXACT, replace(LOADED, digest="wrong"), False),
    "a load of which only the version is seen": (LOAD_2, LOADED, False),
    "a flush": (events.Flush(), PRESENT, False),
}


@pytest.mark.parametrize("case", CUT)
def test_an_observation_proves_that_a_cut_off_call_was_done(case: str) -> None:
    call, seen, done = CUT[case]
    assert apply_interruption(READY, call, seen)[1] is done


def test_a_relaunched_engine_has_not_done_the_call_that_was_cut_off() -> None:
    engine, done = apply_interruption(READY, events.Pause("abort"), replace(PRESENT, instance="two", generating=False))
    assert not done and engine.instance == "two"


@pytest.mark.parametrize(("profiling", "believed"), [(True, SESSION), (None, SESSION), (False, None)])
def test_a_profile_start_that_may_have_happened_counts_as_done(
    profiling: bool | None, believed: ProfileSession | None
) -> None:
    engine, _ = apply_interruption(
        READY, events.StartProfile(SESSION, "d"), replace(PRESENT, instance="one", profiling=profiling)
    )
    assert engine.session == believed
    assert planned(Desired(), engine) == (["stop_profile"] if believed else [])


@pytest.mark.parametrize("profiling", [True, None, False])
def test_a_session_that_a_new_launch_may_have_open_after_a_start_that_was_cut_off_is_stopped(
    profiling: bool | None,
) -> None:
    """The engine may have been relaunched before the call, and not been observed since."""
    seen = replace(PRESENT, instance="two", profiling=profiling)
    engine, done = apply_interruption(READY, events.StartProfile(SESSION, "d"), seen)
    assert not done and engine.session == (None if profiling is False else SESSION)
    assert planned(Desired(), engine) == ([] if profiling is False else ["stop_profile"])


@pytest.mark.parametrize("profiling", [True, None, False])
def test_a_session_that_was_opened_without_a_look_at_the_engine_is_not_opened_twice(profiling: bool | None) -> None:
    """As when a command waits: the engine may have been relaunched before the call, and has the session then."""
    opened, _ = apply_result(READY, events.StartProfile(SESSION, "d"), events.Returned(), None)
    engine = apply_observation(opened, replace(PRESENT, instance="two", profiling=profiling))
    assert planned(Desired(profile=SESSION), engine) == (["start_profile"] if profiling is False else [])
    seen = apply_observation(apply_observation(opened, PRESENT), replace(PRESENT, instance="two", profiling=None))
    assert planned(Desired(profile=SESSION), seen) == ["start_profile"], "the old launch was seen to have it"


@pytest.mark.parametrize("kept", [frozenset(), WEIGHTS])
def test_what_was_called_without_a_look_at_the_engine_may_have_been_done_by_a_new_launch(kept: frozenset[Tag]) -> None:
    engine = READY
    for call in (events.Pause("keep"), LOAD_2, events.Sleep(CACHE), events.Sleep(kept), events.Sleep(CACHE)):
        engine, _ = apply_result(engine, call, events.Returned(), None)
    assert len(engine.unshown) == 4
    seen = replace(RELAUNCHED, generating=None, asleep=None)
    launch = apply_observation(engine, seen)
    assert (launch.torn, launch.generating, launch.unknown) == (True, None, CACHE | kept) and not launch.unshown
    unreadable = apply_observation(engine, replace(seen, instance=None, tokenizer="unknown"))
    assert unreadable.unshown == engine.unshown


def test_a_load_that_was_cut_off_is_repeated_unless_it_is_proven() -> None:
    engine = replace(PAUSED, checked=V2)
    torn, _ = apply_interruption(engine, LOAD_2, replace(PRESENT, generating=False, version=2))
    assert torn.torn and planned(Desired(committed=V2), torn) == ["load 2", "flush", "resume"]
    whole, _ = apply_interruption(engine, EXACT, LOADED)
    assert not whole.torn and planned(Desired(committed=Committed(2, EXACT.source, CONTENT)), whole) == [
        "flush",
        "resume",
    ]


def test_a_load_that_was_cut_off_before_it_began_did_no_harm() -> None:
    engine = replace(ON_V1, generating=False, digest="d")
    seen = replace(PRESENT, generating=False, version=1, digest="d")
    assert not apply_interruption(engine, EXACT, seen)[0].torn


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (ON_V1, "No. The engine holds version 1 and is running."),
        (replace(PAUSED, torn=True), "No. The engine holds weights that can't be trusted and is paused."),
        (EngineState(name="torch profiler", operations=frozenset({Operation.PROFILE})), "No."),  # of a training rank
    ],
)
def test_an_error_names_the_weights_that_the_engine_holds(engine: EngineState, message: str) -> None:
    assert with_engine_state("No.", engine) == message


def test_a_digest_of_the_engines_own_kind_is_not_compared_with_the_source() -> None:
    seen = replace(PRESENT, version=2, generating=False)
    assert contradiction(EXACT, events.Returned(digest="vllm:of its own tensors"), seen) is None


@pytest.mark.parametrize("discard", [True, False])
def test_a_sleep_that_failed_or_was_cut_off_may_have_discarded_the_weights(discard: bool) -> None:
    call = events.Sleep(BOTH, discard=discard)
    failed, _ = apply_result(ON_V1, call, events.Fault("engine_error", "no"), None)
    cut, _ = apply_interruption(ON_V1, call, replace(PRESENT, version=1, asleep=None))
    assert failed.torn == cut.torn == discard
