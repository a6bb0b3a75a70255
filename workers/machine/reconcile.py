"""From what an engine is to what it is to be: the one function behind commands, late joiners, restarts and the lease.

`reconcile(desired, engine) -> calls` gives the engine calls, in order, that lead from one to the other; none when it
holds already. Preconditions that would kill an engine are met here by construction: memory is released only after a
pause, only tags that were released are woken, weights are loaded only while paused and awake, and the cache is
flushed between new weights and the first request on them.

The transition that is missing on purpose: nothing leads out of quarantine. Only a commit, an abort of the same sync,
or a new start of the agent changes `desired` so that a load is wanted again.
"""

from typing import Literal, assert_never

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import durable_source
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.events import (
    Abort,
    Call,
    CheckProfile,
    CheckSource,
    CollectTraces,
    Fault,
    FinishProfile,
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
from schemas.identity import Count, Identity, Operation, RolloutMode, Tag
from schemas.outcomes import ErrorKind, Failed
from schemas.selection import trace_directory

STEERABLE = frozenset({Operation.PAUSE, Operation.RESUME})
"""What an engine must have to be brought anywhere: without it, weights and memory are left as they are."""
_NEEDED = frozenset({Operation.SLEEP, Operation.WAKE, Operation.PROFILE, Operation.LOAD}) | STEERABLE


class EngineState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the machine believes of its engine: what its calls brought about, corrected by each observation.

    version: of the weights held, 0 as launched.   torn: a load was cut off or failed and nobody knows what is held, or
    the weights were discarded.
    loaded: what the last load was to bring; a number alone does not tell weights apart, since one that was aborted may
    be tried again from another source.   checked: the source that was last found good.
    stale_cache: prefixes in the cache were computed by other weights.
    kept: requests were frozen by the last pause and continue, so their cache must not be dropped.
    """

    name: str = "unknown"
    instance: str | None = None
    tokenizer: Literal["present", "absent", "unknown"] = "unknown"
    operations: frozenset[Operation] = frozenset()
    generating: bool = True
    asleep: frozenset[Tag] = frozenset()
    session: ProfileSession | None = None
    version: Count = 0
    digest: str | None = None
    torn: bool = False
    stale_cache: bool = False
    loaded: Committed | None = None
    checked: Committed | None = None
    kept: bool = False


def _directory(session: ProfileSession, identity: Identity) -> str:
    return trace_directory(session.step, session.plan, identity)


def wanted_weights(desired: Desired, identity: Identity) -> Committed | Syncing | None:
    """The weights the engine is to hold now, or None when it is to keep what it has."""
    if identity.mode is RolloutMode.COLOCATED:
        return None
    if desired.sync is not None:  # also of a replica in quarantine: a sync is its way back
        return desired.sync if desired.sync.phase == "load" else None
    return desired.committed if desired.quarantined == 0 else None


def as_committed(weights: Committed | Syncing | CheckSource | Load) -> Committed:
    """What tells weights apart: number, source and manifest."""
    if isinstance(weights, Committed):
        return weights
    return Committed(weights.version, weights.source, weights.manifest)


def reloadable(weights: Committed) -> Committed | None:
    """The same weights from where they can be had at any time; None when they were to be had only once."""
    source = durable_source(weights.source)
    return Committed(weights.version, source, weights.manifest) if source is not None else None


def holds_weights(engine: EngineState, weights: Committed | Syncing) -> bool:
    """Does the engine hold these weights, as far as anybody knows?"""
    if engine.torn or engine.version != weights.version:
        return False
    loaded, wanted = engine.loaded, as_committed(weights)
    return loaded is None or loaded.version != engine.version or loaded in (wanted, reloadable(wanted))


def holds_committed(desired: Desired, engine: EngineState) -> bool:
    """Does the engine hold what is committed: the weights of the newest commit, or else those it was launched with?"""
    if desired.committed is None:
        return engine.version == 0 and not engine.torn
    return holds_weights(engine, desired.committed)


def may_serve(desired: Desired, engine: EngineState) -> bool:
    """May the engine generate once everything that `desired` asks for is done?

    An engine that holds uncommitted or torn weights, with nothing committed to go back to, may not.
    """
    lost = desired.committed is None and not holds_committed(desired, engine)
    return desired.serving and not lost


def attainable(desired: Desired, engine: EngineState) -> Desired:
    """`desired` without what this engine has no operation for: it was answered `unsupported`, and is not asked for."""
    if engine.operations >= _NEEDED:
        return desired
    if not engine.operations >= STEERABLE:
        desired = Desired(profile=desired.profile)
    if not {Operation.SLEEP, Operation.WAKE} <= engine.operations:
        desired = replace(desired, asleep=frozenset())
    return desired if Operation.PROFILE in engine.operations else replace(desired, profile=None)


def reconcile(desired: Desired, engine: EngineState, identity: Identity, live: bool = False) -> tuple[Call, ...]:
    """The calls that bring the engine to `desired`, in the order in which they must be made.

    live: in answer to a load that was just commanded. Only then is somebody there who broadcasts; whoever comes later
    takes the same weights from where they can be had again, or can't follow.
    """
    if (
        engine.generating
        and desired.generation == "running"
        and desired.sync is None
        and not (desired.asleep or desired.quarantined)
        and desired.profile is None
        and engine.session is None
        and not (engine.torn or engine.stale_cache or engine.asleep)
        and engine.version == desired.version
        and (engine.loaded is None or engine.loaded == desired.committed)
    ):
        return ()  # the usual case: it serves what is committed, and nothing else is wanted
    calls: list[Call] = []
    desired = attainable(desired, engine)
    closing = engine.session is not None and (desired.profile is None or engine.session.step != desired.profile.step)
    if closing and engine.session is not None:
        calls.append(StopProfile(engine.session, _directory(engine.session, identity)))

    sync = desired.sync
    weights = wanted_weights(desired, identity)
    if weights is not None and holds_weights(engine, weights):
        weights = None
    if weights is not None and "weights" in desired.asleep:
        weights = None  # loaded when the trainer wakes them; the engine can't serve before that either
    missed = weights is not None and not live and durable_source(weights.source) is None
    if weights is not None and not live:
        weights = reloadable(as_committed(weights))
    unchecked = sync if sync is not None and sync.phase == "prepare" else weights
    if unchecked is not None and Operation.LOAD in engine.operations and engine.checked != as_committed(unchecked):
        calls.append(CheckSource(unchecked.source, unchecked.manifest, unchecked.version))

    releasing = desired.asleep - engine.asleep if desired.asleep else desired.asleep
    serving = may_serve(desired, engine)
    if missed or (weights is not None and Operation.LOAD not in engine.operations):
        weights, serving = None, False  # it can't follow, and must not serve what nobody wants
    steered = engine.operations >= STEERABLE
    pausing = steered and engine.generating and (not serving or weights is not None or bool(releasing))
    mode = sync.in_flight if sync is not None else desired.pause_mode
    if pausing:
        calls.append(Pause(mode))
    waking = engine.asleep - desired.asleep if engine.asleep else engine.asleep
    # Weights before the rest: an engine may generate by itself as soon as all its memory is awake.
    first = waking & {"weights"} if weights is not None and len(waking) > 1 else waking
    if first:
        calls.append(Wake(first))
    if weights is not None:
        calls.append(Load(weights.version, weights.source, weights.manifest))
    if waking - first:
        calls.append(Wake(waking - first))
    stale = (engine.stale_cache or weights is not None) and not (engine.kept or (pausing and mode == "keep"))
    if stale and serving and sync is None and "kv_cache" not in desired.asleep:
        calls.append(Flush())
    if releasing:
        regained = identity.mode is not RolloutMode.COLOCATED  # what never syncs must keep what it has
        calls.append(Sleep(releasing, discard=desired.discard and regained and "weights" in releasing))
    if serving and steered and (pausing or not engine.generating):
        calls.append(Resume())
    if desired.profile is not None and (closing or engine.session is None):
        calls.append(StartProfile(desired.profile, _directory(desired.profile, identity)))
    return tuple(calls)


def apply_observation(engine: EngineState, seen: Observation) -> EngineState:
    """Correct the belief by what was read. What the engine can't tell stays as believed.

    Another instance than the one that was believed in is an engine of which nothing is known but what was read.
    """
    if seen.instance is not None and engine.instance is not None and seen.instance != engine.instance:
        engine = EngineState()
    return replace(
        engine,
        name=seen.engine,
        instance=seen.instance or engine.instance,
        tokenizer=seen.tokenizer,
        operations=seen.operations,
        generating=engine.generating if seen.generating is None else seen.generating,
        asleep=engine.asleep if seen.asleep is None else seen.asleep,
        session=None if seen.profiling is False else engine.session,
        version=engine.version if seen.version is None else seen.version,
        digest=engine.digest if seen.digest is None else seen.digest,
    )


def relaunched(before: EngineState, after: EngineState) -> bool:
    """Was the engine launched again in between? Then nothing that it had been told holds any more."""
    return before.instance is not None and before.instance != after.instance


def apply_result(
    engine: EngineState, call: Call, result: Returned | Fault, seen: Observation | None
) -> tuple[EngineState, Failed | None]:
    """The belief after a call returned, and why the call failed if it did: refused, or contradicted by reading back."""
    known = engine.digest
    if isinstance(result, Fault):
        learned = _after_fault(engine, call, result)
        if seen is not None:
            learned = apply_observation(learned, seen)
            unharmed = seen.digest is not None and seen.digest == known and not engine.torn
            learned = replace(learned, torn=(learned.torn or _discards(call)) and not unharmed)
        return learned, Failed(ErrorKind(result.kind), with_engine_state(result.message, learned))
    learned = _after_success(engine, call, result)
    if seen is None:
        return learned, None
    failure = contradiction(call, result, seen)
    session = learned.session if isinstance(call, StartProfile) else None
    learned = apply_observation(learned, seen)
    if _discards(call):  # whichever engine it was that answered, if it was launched again meanwhile
        learned = replace(learned, torn=True)
    if failure is None:  # a window may have closed by now: the session still wants its stop
        return (learned if session is None else replace(learned, session=session)), None
    torn = learned.torn or isinstance(call, Load)
    return replace(learned, torn=torn), Failed(failure.error, with_engine_state(failure.message, learned))


def apply_interruption(engine: EngineState, call: Call, seen: Observation) -> tuple[EngineState, bool]:
    """The belief about an engine whose agent died during `call`, and whether reading it back shows that it was done.

    A profile start that may have happened is believed in, so that it is stopped. A load that can't be proven complete
    leaves the engine torn, and settling loads again: a checkpoint may be loaded twice.
    """
    if seen.instance is not None and engine.instance is not None and seen.instance != engine.instance:
        return apply_observation(engine, seen), False
    before = engine.digest
    engine = apply_observation(engine, seen)
    match call:
        case Pause():
            return replace(engine, kept=call.mode == "keep"), seen.generating is False
        case Resume():
            return engine, seen.generating is True
        case Sleep():
            unharmed = seen.digest is not None and seen.digest == before
            torn = engine.torn or (call.discard and not unharmed)
            return replace(engine, torn=torn), seen.asleep is not None and call.tags <= seen.asleep
        case Wake():
            return engine, seen.asleep is not None and not (call.tags & seen.asleep)
        case StartProfile():
            return (engine if seen.profiling is False else replace(engine, session=call.session)), False
        case StopProfile():
            return engine, seen.profiling is False
        case Load():
            wanted = call.manifest.content if call.manifest is not None else None
            done = wanted is not None and seen.digest == wanted and seen.version == call.version
            unharmed = seen.digest is not None and seen.digest == before
            loaded = as_committed(call) if done else engine.loaded
            torn = not done and (engine.torn or not unharmed)  # torn weights that nothing touched are still torn
            return replace(engine, torn=torn, stale_cache=True, loaded=loaded), done
        case _:
            return engine, False


def with_engine_state(message: str, engine: EngineState) -> str:
    """An error's message, and one sentence more on what the engine holds now, if it is one that is given weights."""
    if Operation.LOAD not in engine.operations:
        return message
    weights = "weights that nobody can vouch for" if engine.torn else f"version {engine.version}"
    return f"{message} The engine holds {weights} and is {'running' if engine.generating else 'paused'}."


def _discards(call: Call) -> bool:
    return isinstance(call, Sleep) and call.discard


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
            return replace(engine, generating=False, kept=call.mode == "keep")
        case Resume():
            return replace(engine, generating=True, kept=False)
        case CheckSource():
            return replace(engine, checked=as_committed(call))
        case Load():
            fresh = replace(engine, version=call.version, digest=result.digest, torn=False, stale_cache=True)
            return replace(fresh, loaded=as_committed(call), checked=None)
        case StartProfile():
            return replace(engine, session=call.session)
        case StopProfile():
            return replace(engine, session=None)
        case Sleep():
            stale = engine.stale_cache and "kv_cache" not in call.tags
            return replace(
                engine, asleep=engine.asleep | call.tags, stale_cache=stale, torn=engine.torn or _discards(call)
            )
        case Wake():
            return replace(engine, asleep=engine.asleep - call.tags)
        case Abort() | CollectTraces() | CheckProfile() | FinishProfile():
            return engine
        case _:
            assert_never(call)


def contradiction(call: Call, result: Returned, seen: Observation) -> Failed | None:
    """What reading the engine back says against a call that it answered with yes. None when it holds, or can't tell."""
    what: str | None = None
    match call:
        case Pause() if seen.generating:
            what = "it still generates"
        case Resume() if seen.generating is False:
            what = "it is still paused"
        case Sleep() if seen.asleep is not None and not call.tags <= seen.asleep:
            what = f"still awake: {', '.join(sorted(call.tags - seen.asleep))}"
        case Wake() if seen.asleep is not None and call.tags & seen.asleep:
            what = f"still asleep: {', '.join(sorted(call.tags & seen.asleep))}"
        case StartProfile() if seen.profiling is False and call.session.plan.window is None:
            what = "no session is open"
        case StopProfile() if seen.profiling:
            what = "a session is still open"
        case Load() if seen.version is not None and seen.version != call.version:
            what = f"it holds version {seen.version}, not {call.version}"
        case Load():
            return _digest_contradiction(call, result, seen)
        case _:
            pass
    if what is None:
        return None
    return Failed(ErrorKind.NO_EFFECT, f"{seen.engine} answered yes to {call_name(call)}, but {what}.")


def _digest_contradiction(call: Load, result: Returned, seen: Observation) -> Failed | None:
    wanted = call.manifest.content if call.manifest is not None else None
    held = seen.digest or result.digest
    if wanted is None or held is None or wanted == held or ":" in held:  # a digest of the engine's own kind
        return None
    return Failed(
        ErrorKind.DIGEST_MISMATCH,
        f"{seen.engine} answered yes to load of version {call.version}, but holds weights with digest {held[:12]}, "
        f"not the source's {wanted[:12]}. It stays paused and out of service until a sync succeeds.",
    )


def call_name(call: Call) -> str:
    """The word for a call in outcomes and logs: its tag."""
    return str(call.__struct_config__.tag)
