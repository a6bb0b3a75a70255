"""What the machine believes about its engine after an observation, after a call, and after a call that was cut off.

An engine's answer is not trusted where the engine can be read: a call that succeeded has to be visible afterwards, and
what an observation reports replaces what was believed. What an engine cannot report is still believed.
"""

from typing import Final, assert_never

from msgspec.structs import replace

from schemas.commands import Pushed
from schemas.desired import ALL_TAGS
from schemas.events import (
    Abort,
    AwaitPush,
    Call,
    CheckProfile,
    CheckSource,
    CollectTraces,
    Fault,
    FinishProfile,
    Flush,
    Load,
    Observation,
    Observe,
    Pause,
    Resume,
    Returned,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import Operation
from schemas.outcomes import ErrorKind, Failed
from workers.machine.reconcile import as_committed, differs, label_of
from workers.machine.state import EngineState, call_name

_LOADS: Final = (Load, AwaitPush)
_SHOWS_NOTHING: Final = frozenset({Flush, Abort, CheckSource, CheckProfile, CollectTraces, FinishProfile})
"""Calls of which no observation shows whether they were made."""


def apply_observation(engine: EngineState, observation: Observation) -> EngineState:
    """Return `engine` corrected by an observation. Of an engine that was relaunched only the observation is known."""
    if _other_instance(engine, observation):
        engine = EngineState(memory=engine.memory)
    if engine.memory != "agent":
        engine, observation = _without_memory(engine, observation)
    return replace(
        _relabelled(engine, observation),
        name=observation.engine,
        instance=observation.instance or engine.instance,
        tokenizer=observation.tokenizer,
        operations=observation.operations,
        generating=engine.generating if observation.generating is None else observation.generating,
        asleep=engine.asleep if observation.asleep is None else observation.asleep,
        session=None if observation.profiling is False else engine.session,
        digest=engine.digest if observation.digest is None else observation.digest,
        trouble=observation.trouble,
    )


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
    return replace(engine, released=released), observation


def _relabelled(engine: EngineState, observation: Observation) -> EngineState:
    """Return `engine` with the weights that the observed label stands for.

    A trainer chooses the labels of what it pushes, so their numbers are no versions of ours.
    """
    label = observation.label
    version = engine.version if observation.version is None else observation.version
    if label is None:
        return replace(engine, version=version)
    pushed = engine.loaded is not None and isinstance(engine.loaded.source, Pushed)
    if label == engine.version_label or (pushed and engine.version_label is None):
        return replace(engine, label=label, version_label=label)
    if engine.version_label is not None and (observation.version is None or pushed or engine.unread):
        return replace(engine, label=label, stale_cache=True)
    return replace(engine, label=label, version_label=label, version=version)


def only_observed(engine: EngineState, observation: Observation) -> EngineState:
    """Return the engine of an agent that only observes: what it saw now, and nothing of what it saw before."""
    return replace(apply_observation(EngineState(progress=engine.progress), observation), seen=observation)


def relaunched(before: EngineState, after: EngineState) -> bool:
    """Whether the engine was relaunched in between, and has lost everything it was given."""
    return before.instance is not None and before.instance != after.instance


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
        after = _after_fault(engine, call, result)
        if observation is not None:
            intact = not engine.torn and _same_digest(engine, observation)
            after = apply_observation(after, observation)
            after = replace(after, torn=(after.torn or _discards(call)) and not intact)
        return after, Failed(ErrorKind(result.kind), with_engine_state(result.message, after))
    called = _after_success(engine, call, result)
    if type(call) is Observe and (observation is None or (engine.unread and observation.label is None)):
        after = called if observation is None else apply_observation(called, observation)
        message = f"{after.name} did not say what it holds, which the trainer may have changed."
        return after, Failed(ErrorKind.ENGINE_ERROR, with_engine_state(message, after))
    if observation is None:
        return called, None
    if type(call) in _SHOWS_NOTHING:
        return apply_observation(called, observation), None
    failure = contradiction(call, result, observation)
    after = apply_observation(called, observation)
    if _discards(call):  # even if the engine was relaunched meanwhile: either launch may have made the call
        after = replace(after, torn=True)
    if failure is not None:
        torn = after.torn or isinstance(call, _LOADS)
        return replace(after, torn=torn), Failed(failure.error, with_engine_state(failure.message, after))
    if isinstance(call, Observe):
        after = replace(after, unread=False)
    if isinstance(call, StartProfile):  # its window may have closed before the observation: it still needs a stop
        after = replace(after, session=called.session)
    return after, None


def _after_fault(engine: EngineState, call: Call, fault: Fault) -> EngineState:
    match call:
        case Load() if fault.kind != "source_refused":
            return replace(engine, torn=True, stale_cache=True)
        case Sleep():
            return replace(engine, torn=engine.torn or _discards(call))
        case StopProfile() | StartProfile():
            return replace(engine, session=None)
        case _:
            return engine


def _after_success(engine: EngineState, call: Call, result: Returned) -> EngineState:
    match call:
        case Flush():
            return replace(engine, stale_cache=False) if engine.stale_cache else engine
        case Pause():
            return replace(engine, generating=False, requests_kept=call.mode == "keep")
        case Resume():
            return replace(engine, generating=True, requests_kept=False)
        case CheckSource():
            return replace(engine, checked=as_committed(call))
        case Load() | AwaitPush():
            return replace(
                engine,
                version=call.version,
                label=None,
                version_label=None,
                unread=False,
                digest=result.digest,
                torn=False,
                stale_cache=True,
                loaded=as_committed(call),
                checked=None,
            )
        case StartProfile():
            return replace(engine, session=call.session)
        case StopProfile():
            return replace(engine, session=None)
        case Sleep():
            stale = engine.stale_cache and "kv_cache" not in call.tags
            torn = engine.torn or _discards(call)
            return replace(engine, asleep=engine.asleep | call.tags, stale_cache=stale, torn=torn)
        case Wake():
            return replace(engine, asleep=engine.asleep - call.tags)
        case Observe() | Abort() | CollectTraces() | CheckProfile() | FinishProfile():
            return engine
        case _:
            assert_never(call)


def contradiction(call: Call, result: Returned, observation: Observation) -> Failed | None:
    """Return why a call that the engine reported as done did not take effect; None if it did, or nobody can tell."""
    found = _contradicting(call, observation)
    if found is not None:
        return Failed(ErrorKind.NO_EFFECT, f"{observation.engine} reported success for {call_name(call)}, but {found}.")
    return _digest_contradiction(call, result, observation) if isinstance(call, _LOADS) else None


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


# --- a call was cut off -----------------------------------------------------------------------------------------------


def apply_interruption(engine: EngineState, call: Call, observation: Observation) -> tuple[EngineState, bool]:
    """Return the engine after its agent died during `call`, and whether the observation proves that the call was done.

    A profile start that may have happened counts as done, so that the session gets stopped. A load that can't be
    proven complete leaves the engine torn, so that it is loaded again: a checkpoint may be loaded twice.
    """
    after = apply_observation(engine, observation)
    if _other_instance(engine, observation):
        if isinstance(call, StartProfile) and observation.profiling:  # it may have been relaunched before the call
            after = replace(after, session=call.session)
        return after, False
    intact = _same_digest(engine, observation)
    match call:
        case Pause():
            after = replace(after, requests_kept=call.mode == "keep")
        case Sleep():
            after = replace(after, torn=after.torn or (call.discard and not intact))
        case StartProfile() if observation.profiling is not False:
            after = replace(after, session=call.session)
        case Load() | AwaitPush() if _is_visible(call, observation):
            loaded = as_committed(call)
            after = replace(after, torn=False, stale_cache=True, unread=False, loaded=loaded, version=call.version)
            after = replace(after, version_label=after.label)
        case Load():
            after = replace(after, torn=after.torn or not intact, stale_cache=True)
        case _:
            pass
    return after, _is_visible(call, observation)


def _is_visible(call: Call, observation: Observation) -> bool:
    """Whether the observation shows the effect of the call."""
    asleep = observation.asleep
    match call:
        case Pause():
            return observation.generating is False
        case Resume():
            return observation.generating is True
        case Sleep():
            return asleep is not None and call.tags <= asleep
        case Wake():
            return asleep is not None and not call.tags & asleep
        case StopProfile():
            return observation.profiling is False
        case AwaitPush():
            return observation.label == call.source.label
        case Load() if call.manifest is not None and call.manifest.content is not None:
            holds = observation.label == call.label if call.label else observation.version == call.version
            return holds and observation.digest == call.manifest.content
        case _:
            return False


def with_engine_state(message: str, engine: EngineState) -> str:
    """Return an error message with a sentence on what the engine holds now, if weights can be loaded into it at all."""
    if Operation.LOAD not in engine.operations:
        return message
    weights = "weights that nobody can vouch for" if engine.torn else f"version {engine.version}"
    if engine.foreign:
        weights = f"weights labelled {engine.label!r}, which are not those of version {engine.version}"
    return f"{message} The engine holds {weights} and is {'running' if engine.generating else 'paused'}."


def _discards(call: Call) -> bool:
    return isinstance(call, Sleep) and call.discard


def _same_digest(engine: EngineState, observation: Observation) -> bool:
    """Whether the engine proves that it holds the same weights as before."""
    return observation.digest is not None and observation.digest == engine.digest
