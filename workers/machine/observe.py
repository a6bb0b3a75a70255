"""What the machine believes about its engine after an observation, after a call, and after a call that was cut off.

An engine's answer is not trusted where the engine can be read: a call that succeeded has to be visible afterwards, and
what an observation reports replaces what was believed. What an engine cannot report is still believed.
"""

from typing import Final, assert_never

from msgspec.structs import replace

from schemas.commands import Checkpoint, split_model
from schemas.desired import ALL_TAGS, Committed, Desired
from schemas.events import (
    Abort,
    AwaitIdle,
    AwaitPush,
    Call,
    CheckAdapter,
    CheckProfile,
    CheckSource,
    CollectTraces,
    Fault,
    FinishProfile,
    Flush,
    Load,
    LoadAdapter,
    Observation,
    Observe,
    Pause,
    Restore,
    Resume,
    Returned,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    Wake,
)
from schemas.identity import Operation
from schemas.outcomes import ErrorKind, Failed
from workers.machine.lora import after_adapter_call, in_doubt, is_held, not_shown, with_listed
from workers.machine.state import PAUSE_AND_RESUME, EngineState, call_name, with_engine_state
from workers.machine.weights import as_committed, differs, label_of

_LOADS: Final = (Load, Restore, AwaitPush)
_REFUSALS: Final = ("source_refused", "unsupported", "refused")
SHOWS_NOTHING: Final = frozenset({Flush, Abort, CheckSource, CheckAdapter, CheckProfile, CollectTraces, FinishProfile})
"""Calls of which no observation shows whether they were made."""


def apply_observation(engine: EngineState, observation: Observation) -> EngineState:
    """Return `engine` corrected by an observation. Of an engine that was relaunched only the observation is known, and
    that it may have been given what was called since the last one.
    """
    if _other_instance(engine, observation):
        launch = apply_observation(EngineState(instance=observation.instance, memory=engine.memory), observation)
        launch = _torn(launch) if launch.version or launch.label_changed else launch  # under whatever label
        for call in engine.unshown:
            if observation.version is None or not isinstance(call, Load | Restore):
                launch = _by_either_launch(launch, call, observation)
        return launch
    if engine.instance is None and observation.instance is not None:
        engine = _as_found(engine, observation)
    if engine.memory != "agent":
        engine, observation = _without_memory(engine, observation)
    profiling, asleep = _profiling(engine, observation), observation.asleep
    relabelled = engine.label != observation.label and observation.label is not None
    return replace(
        with_listed(_with_label(engine, observation), observation.adapters),
        name=observation.engine,
        instance=observation.instance or engine.instance,
        tokenizer=observation.tokenizer,
        operations=observation.operations,
        idempotent=observation.remedies.idempotent if observation.remedies is not None else frozenset(),
        generating=engine.generating if observation.generating is None else observation.generating,
        requests_kept=engine.requests_kept or _paused_by_others(engine, observation),
        asleep=engine.asleep if asleep is None else asleep,
        unknown=engine.unknown if asleep is None else frozenset(),
        session=None if profiling is False else engine.session,
        opening=engine.opening and profiling is None,
        closing=engine.closing and profiling is None,
        digest=observation.digest or (None if relabelled and engine.label is not None else engine.digest),
        torn=engine.torn or _has_other_bytes(engine, observation),
        launched_from=engine.launched_from or _launched_from(engine, observation),
        recomputes=observation.recomputes,
        adapter_places=observation.adapter_places,
        trouble=observation.trouble,
        unshown=engine.unshown if observation.instance is None else (),
    )


def _profiling(engine: EngineState, observation: Observation) -> bool | None:
    """Whether a session is open. One with a window may have ended by itself, and still needs its stop."""
    windowed = engine.session is not None and engine.session.plan.window is not None and not engine.closing
    return None if windowed and not observation.profiling else observation.profiling


def _as_found(engine: EngineState, observation: Observation) -> EngineState:
    """Return what is believed of a launch that is met for the first time, or again without a journal.

    One that is paused, and was given weights, may have a cache of others. One that does not say whether it is paused
    may be, and is told what to do, if that does no harm; not where the trainer releases memory: a resume would do some.
    """
    if engine.memory != "agent" and observation.asleep != frozenset():
        return engine
    given = bool(observation.version) or _is_unproven(engine, observation)
    if observation.generating is not None:
        return replace(engine, stale_cache=given and not observation.generating)
    if observation.remedies is None or not observation.remedies.idempotent >= PAUSE_AND_RESUME:
        return engine
    return replace(engine, generating=None, stale_cache=given)


def _paused_by_others(engine: EngineState, observation: Observation) -> bool:
    """Whether it is paused, and by no call that is known here, as after the journal is lost: it may be a pause that
    froze requests.
    """
    return engine.generating is True and observation.generating is False


def _launched_from(engine: EngineState, observation: Observation) -> str | None:
    """Where the engine was launched from: some report the directory that they loaded last, so the first one counts."""
    loaded = engine.version or observation.version or engine.torn or _is_unproven(engine, observation)
    return None if loaded or observation.remedies is None else observation.remedies.launched_from


def _without_memory(engine: EngineState, observation: Observation) -> tuple[EngineState, Observation]:
    """Return both without the memory that the trainer's own data plane releases, and the pause that comes with it."""
    asleep, generating = observation.asleep, observation.generating
    paused_with_it = asleep is None and generating is False and engine.generating
    released = ALL_TAGS if paused_with_it else asleep or frozenset()
    observation = replace(
        observation,
        asleep=frozenset(),
        generating=None if released else generating,
        operations=observation.operations - {Operation.SLEEP, Operation.WAKE},
    )
    return replace(engine, asleep_by_trainer=released), observation


def _with_label(engine: EngineState, observation: Observation) -> EngineState:
    """Return `engine` with the weights that the observed label stands for.

    A trainer chooses the labels of what it pushes, and an earlier run counted its own versions, so a number alone is no
    version of ours: only after a load is the label that of the load, if it is the one that a load gives. Of an engine
    that is seen for the first time, or again without a journal, only the label of its launch is believed.
    """
    label = observation.label
    version = engine.version if observation.version is None else observation.version
    if label is None:
        return replace(engine, version=version)
    if _is_unproven(engine, observation):
        stale = engine.stale_cache or engine.label not in (None, label)
        return replace(engine, label=label, launch_label=engine.launch_label or label, stale_cache=stale)
    loaded, given = engine.loaded, engine.version_label
    if given is None and loaded is not None and observation.version != loaded.version:
        given = label_of(loaded) or str(loaded.version)
    if given not in (None, label):
        return replace(engine, label=label, stale_cache=True)
    return replace(engine, label=label, version_label=label, version=version if loaded is None else engine.version)


def _has_other_bytes(engine: EngineState, observation: Observation) -> bool:
    """Whether the weights of a sync were replaced under their label: a version stands for the same bytes for ever."""
    given = engine.loaded is not None and engine.label == observation.label
    return given and None not in (engine.digest, observation.digest) and engine.digest != observation.digest


def _is_unproven(engine: EngineState, observation: Observation) -> bool:
    """Whether the observed label is the first one that is known of this launch, and not the label of a launch."""
    if not observation.label or observation.version == 0:
        return False
    return engine.loaded is None and engine.version_label is None


def only_observed(engine: EngineState, observation: Observation) -> EngineState:
    """Return the engine of an agent that only observes: what it saw now, and nothing of what it saw before."""
    engine = apply_observation(EngineState(instance=observation.instance, progress=engine.progress), observation)
    return replace(engine, version=observation.version or 0, version_label=engine.label, seen=observation)


def relaunched(before: EngineState, after: EngineState) -> bool:
    """Whether the engine was relaunched in between, and has lost everything it was given."""
    return before.instance is not None and before.instance != after.instance


def changed_by_others(before: EngineState, after: EngineState, desired: Desired) -> bool:
    """Whether an observation between two calls shows what none of them did, nor the trainer that pushes its weights."""
    if relaunched(before, after):
        return False
    if any(split_model(model)[0] in desired.adapters for model in after.adapters.keys() - before.adapters.keys()):
        return True
    awaited = label_of(as_committed(desired.sync)) if desired.sync is not None else None
    explained = before.torn or before.label is None or after.label == awaited
    return (
        (before.generating is not None and after.generating != before.generating)
        or (not before.unknown and after.asleep != before.asleep)
        or (not explained and (after.label, after.version, after.torn) != (before.label, before.version, False))
    )


def taken_over(before: EngineState, call: Call, after: EngineState, desired: Desired) -> bool:
    """Whether the engine shows, after a call that was made without a bus, that another agent commands it."""
    if isinstance(call, Observe):
        before = replace(before, label=None) if before.maybe_pushed else before  # its own trainer may have pushed
        return changed_by_others(before, after, desired)
    if isinstance(call, _LOADS) or before.torn or relaunched(before, after):
        return False
    read_first = before.label is None and after.label is not None  # after a load of its own
    return not read_first and (before.label, before.version) != (after.label, after.version)


def _other_instance(engine: EngineState, observation: Observation) -> bool:
    return None not in (observation.instance, engine.instance) and observation.instance != engine.instance


# --- a call returned --------------------------------------------------------------------------------------------------


def apply_result(
    engine: EngineState, call: Call, result: Returned | Fault, observation: Observation | None
) -> tuple[EngineState, Failed | None]:
    """Return the engine after a call, and why the call failed if it did.

    `engine` is what was believed before the call, `observation` what was read after it (None: nothing could be read).
    """
    if not isinstance(result, Returned):
        return _apply_fault(engine, call, result, observation)
    called = _after_success(engine, call, result)
    if type(call) is Observe and _tells_nothing(engine, observation):
        after = called if observation is None else apply_observation(called, observation)
        message = f"{after.name} did not say what it holds, which the trainer may have changed."
        return after, Failed(ErrorKind.ENGINE_ERROR, with_engine_state(message, after))
    if observation is None:
        return _unshown(called, call), None
    if type(call) in SHOWS_NOTHING:
        return apply_observation(called, observation), None
    failure = contradiction(call, result, observation)
    after = apply_observation(called, observation)
    unlisted = isinstance(call, LoadAdapter) and observation.adapters is None
    unproven = (
        isinstance(call, Pause | Sleep)
        or unlisted
        or (isinstance(call, Load) and (failure is not None or observation.version is None))
    )
    if unproven and _other_instance(engine, observation):
        after = _by_either_launch(after, call, observation)
    if isinstance(call, Sleep) and call.discard:  # also if the engine was relaunched meanwhile
        after = replace(after, torn=True)
    if failure is not None:
        torn = after.torn or isinstance(call, _LOADS)
        if isinstance(call, StopProfile) and not _other_instance(engine, observation):
            after = replace(after, session=engine.session)
        return replace(after, torn=torn), Failed(failure.error, with_engine_state(failure.message, after))
    if isinstance(call, Observe):
        after = replace(after, maybe_pushed=False)
    if isinstance(call, StartProfile):  # its window may have closed before the observation: it still needs a stop
        after = replace(after, session=called.session)
    return after, None


def _tells_nothing(engine: EngineState, observation: Observation | None) -> bool:
    """Whether an observation that was asked for does not show what has to be known."""
    if observation is None or observation.tokenizer == "unknown":
        return True
    return engine.maybe_pushed and observation.label is None


def _apply_fault(
    engine: EngineState, call: Call, fault: Fault, observation: Observation | None
) -> tuple[EngineState, Failed | None]:
    """A refusal leaves the engine as it was. After any other fault, it is for the engine to show what was done."""
    kind, message = ErrorKind.UNKNOWN, fault.message
    if fault.kind in _REFUSALS:
        after = engine if observation is None else apply_observation(engine, observation)
        kind = ErrorKind(fault.kind)
    else:
        after, done = apply_interruption(engine, call, observation)
        if fault.kind == "engine_error":
            kind = ErrorKind.ENGINE_ERROR
            if isinstance(call, StartProfile | StopProfile) and not (observation and observation.profiling):
                after = replace(after, session=None, opening=False, closing=False)
        elif done:
            return after, None
        else:
            message += f" {call_name(call)} may or may not have been carried out."
    return after, Failed(kind, with_engine_state(message, after))


def _after_success(engine: EngineState, call: Call, result: Returned) -> EngineState:
    match call:
        case Flush():
            return replace(engine, stale_cache=False) if engine.stale_cache else engine
        case Pause():
            return replace(engine, generating=False, requests_kept=call.mode == "keep")
        case Resume():
            return replace(engine, generating=True, requests_kept=False)
        case CheckSource():
            return replace(engine, checked=Committed(call.version, call.source, call.manifest))
        case Load() | AwaitPush() | Restore():
            loaded = None if isinstance(call, Restore) else as_committed(call)
            return replace(
                engine,
                version=0 if loaded is None else loaded.version,
                label=None,
                version_label=None,
                maybe_pushed=False,
                digest=result.digest,
                torn=False,
                stale_cache=True,
                loaded=loaded,
                checked=None,
            )
        case StartProfile():
            return replace(engine, session=call.session, opening=False, closing=False)
        case StopProfile():
            return replace(engine, session=None, opening=False, closing=False)
        case Sleep():
            stale = engine.stale_cache and "kv_cache" not in call.tags
            engine = _discarded(engine) if call.discard else engine
            asleep, unknown = engine.asleep | call.tags, engine.unknown - call.tags
            return replace(engine, asleep=asleep, unknown=unknown, stale_cache=stale)
        case Wake():
            return replace(engine, asleep=engine.asleep - call.tags, unknown=engine.unknown - call.tags)
        case CheckAdapter() | LoadAdapter() | UnloadAdapter():
            return after_adapter_call(engine, call)
        case Observe() | AwaitIdle() | Abort() | CollectTraces() | CheckProfile() | FinishProfile():
            return engine
        case _:
            assert_never(call)


def contradiction(call: Call, result: Returned, observation: Observation) -> Failed | None:
    """Return why a call that the engine reported as done did not take effect; None if it did, or that can't be seen."""
    found = _contradicting(call, observation)
    if found is not None:
        return Failed(ErrorKind.NO_EFFECT, f"{observation.engine} reported success for {call_name(call)}, but {found}.")
    return _digest_contradiction(call, result, observation) if isinstance(call, Load | AwaitPush) else None


def _contradicting(call: Call, observation: Observation) -> str | None:
    asleep = observation.asleep
    match call:
        case Pause() if observation.generating:
            return "it still generates"
        case Resume() if observation.generating is False:
            return "it is still paused"
        case Sleep() if asleep is not None and not call.tags <= asleep:
            return f"still awake: {', '.join(sorted(call.tags - asleep))}"
        case Wake() if asleep is not None and call.tags & asleep:
            return f"still asleep: {', '.join(sorted(call.tags & asleep))}"
        case StartProfile() if observation.profiling is False and call.session.plan.window is None:
            return "no session is open"
        case StopProfile() if observation.profiling:
            return "a session is still open"
        case Load() | AwaitPush():
            return _other_weights(call, observation)
        case LoadAdapter() | UnloadAdapter() if observation.adapters is not None:
            return not_shown(call, observation.adapters)
        case Restore() if observation.version:
            return f"it holds version {observation.version}, not those of its launch"
        case _:
            return None


def _other_weights(call: Load | AwaitPush, observation: Observation) -> str | None:
    wanted, found = label_of(as_committed(call)), observation.label
    if wanted is None and observation.version not in (None, call.version):
        return f"it holds version {observation.version}, not {call.version}"
    if wanted is not None and found not in (None, wanted):
        return f"its weights are labelled {found!r}, not {wanted!r}"
    return None


def _digest_contradiction(call: Load | AwaitPush, result: Returned, observation: Observation) -> Failed | None:
    actual = observation.digest or result.digest
    if call.manifest is None or actual is None or not differs(actual, call.manifest):
        return None
    return Failed(
        ErrorKind.DIGEST_MISMATCH,
        f"{observation.engine} reported success for the load of version {call.version}, but holds weights with digest "
        f"{actual[:12]}, not the source's {str(call.manifest.content)[:12]}. It stays paused and out of service until "
        "a sync succeeds.",
    )


# --- a call was cut off, or not answered ------------------------------------------------------------------------------


def apply_interruption(engine: EngineState, call: Call, observation: Observation | None) -> tuple[EngineState, bool]:
    """Return the engine after a call that may or may not have been carried out, and whether the observation proves it.

    The agent died during the call, or the engine did not answer it. What the observation does not show stays unknown.
    A profile start counts as done then, so that the session gets stopped; a load leaves the engine torn, so that it is
    loaded again: a checkpoint may be loaded twice.
    """
    after = _interrupted(engine, call)
    if observation is None:
        return _unshown(after, call), False
    if _other_instance(engine, observation):
        after = apply_observation(engine, observation)
        # It may have been relaunched before the call, and what it does not report may be open.
        if isinstance(call, StartProfile) and observation.profiling is not False:
            after = replace(after, session=call.session, opening=observation.profiling is None)
        begun = isinstance(call, Load | Restore) and (engine.torn or not _same_digest(engine, observation))
        begun = begun or (isinstance(call, LoadAdapter) and observation.adapters is None)
        return _by_either_launch(after, call, observation) if begun else after, False
    if isinstance(call, LoadAdapter | UnloadAdapter) and observation.adapters is not None:
        after = engine  # which shows what it has
    if _same_digest(engine, observation):
        after = replace(after, torn=engine.torn, version_label=engine.version_label)
    after = apply_observation(after, observation)
    done = _is_visible(call, after, observation)
    if done and isinstance(call, Load | AwaitPush):
        loaded = as_committed(call)
        after = replace(after, torn=False, stale_cache=True, maybe_pushed=False, loaded=loaded, version=call.version)
        after = replace(after, version_label=after.label)
    return after, done


def _interrupted(engine: EngineState, call: Call) -> EngineState:
    """Return the engine without what the call may have changed."""
    match call:
        case Pause():
            return replace(engine, generating=None, requests_kept=call.mode == "keep")
        case Resume():
            return replace(engine, generating=None)
        case Sleep():
            unknown = engine.unknown | (call.tags - engine.asleep)
            return replace(_discarded(engine) if call.discard else engine, unknown=unknown)
        case Wake():  # an engine may generate by itself as soon as all of its memory is awake
            asleep, unknown = engine.asleep - call.tags, engine.unknown | call.tags
            return replace(engine, generating=None, asleep=asleep, unknown=unknown)
        case Load() | Restore():
            return replace(_torn(engine), stale_cache=True)
        case StartProfile():
            return replace(engine, session=call.session, opening=True, closing=False)
        case StopProfile():
            return replace(engine, closing=True)
        case LoadAdapter() | UnloadAdapter():
            return in_doubt(engine, call)
        case _:
            return engine


def _unshown(engine: EngineState, call: Call) -> EngineState:
    """Return the engine after a call of which no observation shows yet by which launch it was made."""
    if not isinstance(call, Pause | Sleep | Load | Restore | StartProfile):
        return engine
    others = tuple(other for other in engine.unshown if type(other) is not type(call) or isinstance(other, Sleep))
    return engine if call in others else replace(engine, unshown=(*others, call))


def _by_either_launch(after: EngineState, call: Call, observation: Observation) -> EngineState:
    """Return a new launch of the engine after a call that was made by it, or by the launch before it."""
    after, launched_from = apply_observation(_interrupted(after, call), observation), f"/{after.launched_from}"
    path = call.source.path if isinstance(call, Load) and isinstance(call.source, Checkpoint) else None
    # It may report the directory that it loaded last.
    return replace(after, launched_from=None) if path and launched_from.endswith(f"/{path}") else after


def _torn(engine: EngineState) -> EngineState:
    """Return the engine with weights that are not trusted. The label that it has now proves nothing about them."""
    return replace(engine, torn=True, version_label=engine.label)


def _discarded(engine: EngineState) -> EngineState:
    """Return the engine without its weights, and without those of its adapters, which it goes on listing."""
    return replace(_torn(engine), stale_adapters=frozenset(engine.adapters))


def _is_visible(call: Call, after: EngineState, observation: Observation) -> bool:
    """Whether the observation, which led to `after`, shows the effect of the call."""
    match call:
        case Pause():
            return after.generating is False
        case Resume():
            return after.generating is True
        case Sleep():
            return call.tags <= after.asleep
        case Wake():
            return not call.tags & (after.asleep | after.unknown)
        case StopProfile():
            return observation.profiling is False
        case LoadAdapter():
            return observation.adapters is not None and is_held(after, call.adapter)
        case UnloadAdapter():
            return observation.adapters is not None and call.model not in observation.adapters
        case AwaitPush():
            return observation.label == call.source.label and not differs(observation.digest, call.manifest)
        case Load() if call.manifest is not None and call.manifest.content is not None:
            holds = observation.label == call.label if call.label else observation.version == call.version
            return holds and observation.digest == call.manifest.content
        case _:
            return False


def _same_digest(engine: EngineState, observation: Observation) -> bool:
    """Whether the engine proves that it holds the same weights as before."""
    return observation.digest is not None and observation.digest == engine.digest
