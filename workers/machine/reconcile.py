"""Engine calls that bring an engine to its desired state: after a command, a late join, a restart, an expired lease.

Each aspect of the engine (session, weights, memory, generation) has a function that plans its calls; `reconcile` merges
the plans in the one order that is safe. Calls that would kill an engine cannot occur: memory is released only after a
pause, only tags that were released are woken, weights are loaded only while the engine is paused and they are awake,
and the cache is flushed between new weights and the first request on them.

One transition is missing on purpose: nothing here leads out of quarantine. Only a commit, an abort of the same sync, or
a restart of the agent changes `desired` so that a load is wanted again.
"""

from typing import NamedTuple

from msgspec.structs import replace

from schemas.commands import Checkpoint, Manifest, Pushed, durable_source
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.events import (
    AwaitPush,
    Call,
    CheckSource,
    Flush,
    Load,
    Observe,
    Pause,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import COLOCATED, Identity, Operation
from schemas.selection import trace_directory
from workers.machine.state import EngineState

PAUSE_AND_RESUME = frozenset({Operation.PAUSE, Operation.RESUME})
"""An engine without these two keeps its weights and memory as they are: changing either needs a pause."""
NEED_MEMORY = Load | Flush | Resume
"""Calls that would kill an engine whose memory is released."""
_RECONCILED = frozenset({Operation.SLEEP, Operation.WAKE, Operation.PROFILE, Operation.LOAD}) | PAUSE_AND_RESUME


class SessionPlan(NamedTuple):
    """Calls for the profiling session."""

    close: tuple[Call, ...] = ()
    open: tuple[Call, ...] = ()


class WeightsPlan(NamedTuple):
    """Calls for the weights.

    Attributes:
        check: Check the source of weights that are not held.
        load: Load them.
        unreachable: The engine can't get the weights that it should hold, so it must not serve.
    """

    check: tuple[Call, ...] = ()
    load: tuple[Call, ...] = ()
    unreachable: bool = False


class MemoryPlan(NamedTuple):
    """Calls for the memory: what is woken before a load, what is woken after it, and what is released."""

    wake: tuple[Call, ...] = ()
    wake_rest: tuple[Call, ...] = ()
    release: tuple[Call, ...] = ()


class GenerationPlan(NamedTuple):
    """Calls for generation, and for the cache that it uses."""

    pause: tuple[Call, ...] = ()
    flush: tuple[Call, ...] = ()
    resume: tuple[Call, ...] = ()


def reconcile(
    desired: Desired, engine: EngineState, identity: Identity, live: bool = False, fresh: bool = False
) -> tuple[Call, ...]:
    """Return the engine calls that bring `engine` to `desired`, in the order in which they must be made.

    The order matters. An engine may generate by itself as soon as all of its memory is awake, so weights are woken and
    loaded before the rest of the memory is woken; the cache is flushed only after the weights that made it stale were
    replaced.

    `live` says that a load was just commanded. Only then does the trainer send or push weights; at any other time the
    same weights must come from a durable source.

    After a sync of pushed weights that did not load, nobody here knows what the trainer did to the engine; nor does
    anybody where the trainer releases memory. Then the engine is observed first, and the other calls are planned again
    from what that shows. `fresh` says that it was just observed.
    """
    if _serves_what_is_desired(desired, engine):
        return ()
    if engine.unread and desired.sync is None and not desired.quarantined:
        return (Observe(),)
    desired = attainable(desired, engine)
    session = plan_session(desired, engine, identity)
    weights = plan_weights(desired, engine, identity, live)
    memory = plan_memory(desired, engine, identity, loading=bool(weights.load))
    generation = plan_generation(desired, engine, weights, releasing=bool(memory.release))
    calls = (
        *session.close,
        *weights.check,
        *generation.pause,
        *memory.wake,
        *weights.load,
        *memory.wake_rest,
        *generation.flush,
        *memory.release,
        *generation.resume,
        *session.open,
    )
    if engine.memory == "trainer" and not fresh and any(isinstance(call, NEED_MEMORY) for call in calls):
        return (Observe(),)
    return calls


def lacks_memory(call: Call, engine: EngineState) -> bool:
    """Whether the call would kill the engine, because the trainer has released memory that it needs."""
    if isinstance(call, Load):
        return "weights" in engine.released
    return bool(engine.released) and isinstance(call, NEED_MEMORY)


def _serves_what_is_desired(desired: Desired, engine: EngineState) -> bool:
    """Recognize the usual case fast: it serves the committed weights, and nothing else is desired."""
    return (
        engine.generating
        and desired.generation == "running"
        and desired.sync is None
        and not (desired.asleep or desired.quarantined)
        and desired.profile is None
        and engine.session is None
        and not (engine.stale_cache or engine.asleep)
        and (engine.loaded is None or engine.loaded == desired.committed)
        and holds_committed(desired, engine)
    )


def attainable(desired: Desired, engine: EngineState) -> Desired:
    """Return `desired` without what this engine has no operation for; commands for that fail as `unsupported`."""
    if engine.operations >= _RECONCILED:
        return desired
    if not engine.operations >= PAUSE_AND_RESUME:
        desired = Desired(profile=desired.profile)
    if not {Operation.SLEEP, Operation.WAKE} <= engine.operations:
        desired = replace(desired, asleep=frozenset())
    return desired if Operation.PROFILE in engine.operations else replace(desired, profile=None)


# --- one plan for each aspect -----------------------------------------------------------------------------------------


def plan_session(desired: Desired, engine: EngineState, identity: Identity) -> SessionPlan:
    """Close a session that is not desired, and open the desired one unless it is open."""
    current, wanted = engine.session, desired.profile
    if current is not None and wanted is not None and current.step == wanted.step:
        return SessionPlan()
    return SessionPlan(
        close=() if current is None else (StopProfile(current, _directory(current, identity)),),
        open=() if wanted is None else (StartProfile(wanted, _directory(wanted, identity)),),
    )


def plan_weights(desired: Desired, engine: EngineState, identity: Identity, live: bool) -> WeightsPlan:
    """Check the source of a sync that is prepared; load weights that are wanted and not held."""
    wanted = wanted_weights(desired, identity)
    # Until the trainer wakes the memory of weights, none are loaded, and the engine can't serve either.
    if wanted is not None and (_is_held(engine, wanted, live) or "weights" in desired.asleep):
        wanted = None
    can_load = Operation.LOAD in engine.operations
    preparing = desired.sync if desired.sync is not None and desired.sync.phase == "prepare" else None
    load = None if wanted is None or not can_load else _load_of(as_committed(wanted), live)
    unchecked: Syncing | Load | AwaitPush | None = preparing if can_load and preparing is not None else load
    check: tuple[Call, ...] = ()
    if (
        unchecked is not None
        and not isinstance(unchecked.source, Pushed)  # which can't be read before the engine has it
        and engine.checked != Committed(unchecked.version, unchecked.source, unchecked.manifest)
    ):
        check = (CheckSource(unchecked.source, unchecked.manifest, unchecked.version),)
    if load is None:
        return WeightsPlan(check, unreachable=wanted is not None)
    return WeightsPlan(check, load=(load,))


def _load_of(wanted: Committed, live: bool) -> Load | AwaitPush | None:
    """Return the call that brings these weights; None if there is none before the next sync."""
    source = wanted.source if live else durable_source(wanted.source)
    if isinstance(source, Pushed):
        return AwaitPush(wanted.version, source, wanted.manifest)
    return None if source is None else Load(wanted.version, source, wanted.manifest, label_of(wanted) or "")


def plan_memory(desired: Desired, engine: EngineState, identity: Identity, loading: bool) -> MemoryPlan:
    """Wake what should be awake, and release what should be asleep. `loading` says that weights are loaded as well."""
    waking, releasing = engine.asleep - desired.asleep, desired.asleep - engine.asleep
    if not (waking or releasing):
        return MemoryPlan()
    first = waking & {"weights"} if loading and len(waking) > 1 else waking
    rest = waking - first
    # A replica that never syncs could not load its weights again.
    discard = desired.discard and "weights" in releasing and identity.mode is not COLOCATED
    return MemoryPlan(
        wake=(Wake(first),) if first else (),
        wake_rest=(Wake(rest),) if rest else (),
        release=(Sleep(releasing, discard=discard),) if releasing else (),
    )


def plan_generation(desired: Desired, engine: EngineState, weights: WeightsPlan, releasing: bool) -> GenerationPlan:
    """Pause for a load, for a release and while the engine must not serve; flush a stale cache; resume at the end."""
    sync = desired.sync
    pausable = engine.operations >= PAUSE_AND_RESUME
    serving = may_serve(desired, engine) and not weights.unreachable
    pausing = pausable and engine.generating and (not serving or bool(weights.load) or releasing)
    mode = sync.in_flight if sync is not None else desired.pause_mode
    requests_kept = engine.requests_kept or (pausing and mode == "keep")
    stale = (engine.stale_cache or bool(weights.load)) and not requests_kept
    flushing = stale and serving and sync is None and "kv_cache" not in desired.asleep
    resuming = pausable and serving and (pausing or not engine.generating)
    return GenerationPlan(
        pause=(Pause(mode),) if pausing else (),
        flush=(Flush(),) if flushing else (),
        resume=(Resume(),) if resuming else (),
    )


def _directory(session: ProfileSession, identity: Identity) -> str:
    return trace_directory(session.step, session.plan, identity)


# --- weights: which are wanted, which are held ------------------------------------------------------------------------


def wanted_weights(desired: Desired, identity: Identity) -> Committed | Syncing | None:
    """Return the weights that the engine should hold now, or None if it should keep what it has."""
    if identity.mode is COLOCATED:
        return None
    if desired.sync is not None:  # also for a replica in quarantine: a sync is its way back
        return desired.sync if desired.sync.phase == "load" else None
    return desired.committed if desired.quarantined == 0 else None


def as_committed(weights: Committed | Syncing | CheckSource | Load | AwaitPush) -> Committed:
    """Return what identifies weights: version, source and manifest."""
    if isinstance(weights, Committed):
        return weights
    if isinstance(weights, Load) and weights.label and isinstance(weights.source, Checkpoint):
        return Committed(weights.version, Pushed(weights.label, weights.source.path), weights.manifest)
    return Committed(weights.version, weights.source, weights.manifest)


def label_of(weights: Committed) -> str | None:
    """Return the label that the trainer gave to weights that it pushes; None for others."""
    return weights.source.label if isinstance(weights.source, Pushed) else None


def durable(weights: Committed) -> Committed | None:
    """Return the same weights with a source that can be read at any time; None if there is none."""
    source = durable_source(weights.source)
    return Committed(weights.version, source, weights.manifest) if source is not None else None


def _is_held(engine: EngineState, weights: Committed | Syncing, live: bool) -> bool:
    """Whether nothing has to be loaded. A label alone is not enough for a load that was just commanded: a sync that was
    aborted may have used the same version for other weights.
    """
    only_label = engine.loaded is None or engine.loaded.version != engine.version
    return holds_weights(engine, weights) and not (live and only_label)


def holds_weights(engine: EngineState, weights: Committed | Syncing) -> bool:
    """Whether the engine holds these weights, as far as anybody knows.

    The number of a label proves a version only where agents set the labels. A trainer that pushes has its own.
    """
    if not _is_known(engine) or engine.version != weights.version:
        return False
    loaded, wanted = engine.loaded, as_committed(weights)
    if loaded is None or loaded.version != engine.version:
        return label_of(wanted) is None
    return loaded in (wanted, durable(wanted))


def _is_known(engine: EngineState) -> bool:
    """Whether the engine holds the weights of `version`."""
    return not (engine.torn or engine.unread) and engine.label == engine.version_label


def adopt_pushed(engine: EngineState, desired: Desired, identity: Identity) -> EngineState:
    """Return `engine` with the version of the wanted weights if their label shows that the trainer pushed them."""
    if engine.label is None or (engine.unread and desired.sync is None) or (engine.torn and not engine.foreign):
        return engine
    wanted = wanted_weights(desired, identity)
    if wanted is None or label_of(pushed := as_committed(wanted)) != engine.label or engine.loaded == pushed:
        return engine
    if differs(engine.digest, pushed.manifest):
        return engine
    return replace(engine, version=pushed.version, version_label=engine.label, loaded=pushed, torn=False, unread=False)


def differs(digest: str | None, manifest: Manifest | None) -> bool:
    """Whether weights are not those that the manifest announced, where both digests are of the weights' bytes."""
    content = manifest.content if manifest is not None else None
    return content is not None and digest is not None and digest != content and ":" not in digest


def is_stranded(desired: Desired, engine: EngineState, identity: Identity) -> bool:
    """Whether the engine can't get back to weights that it may serve before the next sync."""
    if identity.mode is COLOCATED or desired.sync is not None or desired.quarantined or engine.unread:
        return False
    # Weights wait for their memory only where a command releases it: nothing wakes what this engine can't put to sleep.
    if holds_committed(desired, engine) or "weights" in attainable(desired, engine).asleep:
        return False
    return desired.committed is None or durable(desired.committed) is None


def holds_committed(desired: Desired, engine: EngineState) -> bool:
    """Whether the engine holds the committed weights, or those it was launched with if nothing was committed."""
    if desired.committed is None:
        return engine.version == 0 and _is_known(engine)
    return holds_weights(engine, desired.committed)


def may_serve(desired: Desired, engine: EngineState) -> bool:
    """Whether the engine may generate once everything that `desired` asks for is done.

    An engine that holds uncommitted or torn weights must not, if nothing was committed that it could go back to.
    """
    lost = desired.committed is None and not holds_committed(desired, engine)
    return desired.serving and not lost
