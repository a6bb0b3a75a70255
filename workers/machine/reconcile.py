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

from schemas.commands import AdapterVersion, Broadcast, Pushed, durable_source
from schemas.desired import Committed, Desired, ProfileSession, Syncing
from schemas.events import (
    AwaitPush,
    Call,
    CheckAdapter,
    CheckProfile,
    CheckSource,
    DiskCall,
    Flush,
    Load,
    LoadAdapter,
    Observe,
    Pause,
    Restore,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.identity import COLOCATED, OBSERVED, Identity, Operation
from schemas.selection import trace_directory
from workers.machine.lora import (
    NO_PAUSE,
    can_load,
    due,
    frozen,
    has_place,
    hurried,
    is_held,
    left,
    plan_adapters,
    postponed,
    with_unloads,
)
from workers.machine.state import PAUSE_AND_RESUME, AgentState, EngineState
from workers.machine.suppressed import still_desired
from workers.machine.weights import (
    as_committed,
    durable,
    holds_committed,
    holds_weights,
    label_of,
    source_to_take,
    wanted_weights,
)

NEED_MEMORY = Load | Restore | Flush | Resume
"""Calls that would kill an engine whose memory is released."""
HARMLESS = Pause | Resume | Flush | StopProfile | Observe
"""Calls that may be made twice: one that failed is made again by itself."""
NOT_REPEATED = CheckSource | Load | Restore | CheckProfile | StartProfile | DiskCall | NO_PAUSE
"""Calls that only a command, or what it left to be desired, asks for again."""
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
    desired: Desired, engine: EngineState, identity: Identity, load_commanded: bool = False, just_observed: bool = False
) -> tuple[Call, ...]:
    """Return the engine calls that bring `engine` to `desired`, in the order in which they must be made.

    The order matters. An engine may generate by itself as soon as all of its memory is awake, so weights are woken and
    loaded before the rest of the memory is woken; the cache is flushed only after the weights that made it stale were
    replaced.

    `load_commanded` says that a load was just commanded. Only then does the trainer send or push weights; at any
    other time the same weights must come from a durable source.

    After a sync of pushed weights that did not load, it is not known here what the trainer did to the engine; nor is it
    where the trainer releases memory. Then the engine is observed first, and the other calls are planned again
    from what that shows. `just_observed` says that it was just observed.
    """
    if _serves_what_is_desired(desired, engine):
        return ()
    if engine.lost:
        return plan_session(attainable(desired, engine), engine, identity).close
    if engine.maybe_pushed and desired.sync is None and not desired.quarantined:
        return (Observe(),)
    desired = attainable(desired, engine)
    session = plan_session(desired, engine, identity)
    weights = plan_weights(desired, engine, identity, load_commanded)
    memory = plan_memory(desired, engine, identity, loading=bool(weights.load))
    generation = plan_generation(desired, engine, identity, weights, releasing=bool(memory.release))
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
    if engine.memory == "trainer" and not just_observed and any(isinstance(call, NEED_MEMORY) for call in calls):
        return (Observe(),)
    return calls


def own_calls(state: AgentState, just_observed: bool = False) -> tuple[Call, ...]:
    """Return the calls that an idle machine makes by itself. Without its bus it looks at the engine first: perhaps
    another agent commands it by now.
    """
    calls = _calls_of_its_own(state, just_observed)
    alone = state.bus_lost and not just_observed
    return (Observe(),) if alone and calls and calls[0] is not state.deferred_finish else calls


def _calls_of_its_own(state: AgentState, just_observed: bool) -> tuple[Call, ...]:
    """One that only observes makes none, whatever it saw."""
    if state.identity.mode is OBSERVED:
        return ()
    if state.deferred_finish is not None and state.informed:
        return (state.deferred_finish,)
    if state.reconcile_blocked or not may_call(state):
        return ()
    # Of an engine whose state is not known too: a pause that does no harm if it is paused already is made all the same.
    engine = state.engine
    harmless = engine.generating or (engine.generating is None and Operation.PAUSE in engine.idempotent)
    pausing = state.waits_paused and harmless and engine.operations >= PAUSE_AND_RESUME
    pause = (Pause("abort"),) if pausing else ()
    if not state.informed:  # nothing is known to be desired
        return pause
    desired = still_desired(state.desired, state.suppressed)
    if state.waits_paused:
        desired = replace(desired, generation="paused")
    calls = reconcile(desired, engine, state.identity, just_observed=just_observed)
    if engine.lost:
        return (*calls, *pause)
    if calls or state.bus_lost or desired.draining:  # without a bus, another agent may command it by what holds now
        return calls
    return plan_adapters(desired, engine, state.suppressed.adapters)


def may_call(state: AgentState) -> bool:
    """Return whether the machine may call the engine by itself now, though perhaps not again what has just failed."""
    engine = state.engine
    if state.changed_by_others or state.identity.node_rank > 0:
        return False
    # Of memory that the trainer released: a call could kill the engine, and the trainer is at work on it.
    return engine.tokenizer == "present" and not engine.asleep_by_trainer


def unloads_now(state: AgentState, now_ms: int, awaited: bool = False) -> tuple[AgentState, tuple[Call, ...]]:
    """Return the call of an idle machine that unloads a version of an adapter, if it is time; else when it will be.

    An engine may take long to unload what requests still use, or for ever while it is paused. So this is the last thing
    that a machine does, unless a sync has no place for its version otherwise, and awaits one.
    """
    leftover = _unwanted(state)
    if not (leftover or state.unloads):
        return state, ()
    unloads = with_unloads(state.unloads, leftover, now_ms, state.settings.adapter_grace_ms)
    if awaited:
        unloads = hurried(unloads, now_ms)
    calls = due(unloads, now_ms)
    if calls and _may_unload(state):
        return replace(state, unloads=unloads), calls[:1]
    if state.engine.generating is not True and calls:
        return replace(state, unloads=frozen(unloads, now_ms, state.settings.adapter_grace_ms)), ()
    return replace(state, unloads=postponed(unloads, [call.model for call in calls], now_ms)), ()


def may_get_place(state: AgentState, adapter: AdapterVersion) -> bool:
    """Return whether the engine has no place for a version, and may unload another one, which is no longer wanted."""
    engine = state.engine
    if is_held(engine, adapter) or has_place(engine, adapter):
        return False
    return _may_unload(state) and bool(_unwanted(state))


def needs_place(calls: tuple[Call, ...], state: AgentState) -> bool:
    """Return whether calls load a version for which there may be a place once another one is unloaded."""
    first = calls[0] if calls else None
    return isinstance(first, CheckAdapter | LoadAdapter) and may_get_place(state, first.adapter)


def _unwanted(state: AgentState) -> tuple[str, ...]:
    known = state.informed and state.identity.node_rank == 0 and not state.bus_lost
    return left(state.desired, state.engine) if known else ()


def _may_unload(state: AgentState) -> bool:
    return may_call(state) and can_load(state.engine) and state.engine.generating is True


def lacks_memory(call: Call, engine: EngineState) -> bool:
    """Whether the call would kill the engine, because the trainer has released memory that it needs."""
    if isinstance(call, Load | Restore):
        return "weights" in engine.asleep_by_trainer
    return bool(engine.asleep_by_trainer) and isinstance(call, NEED_MEMORY)


def _serves_what_is_desired(desired: Desired, engine: EngineState) -> bool:
    """Recognize the usual case fast: it serves the committed weights, and nothing else is desired."""
    return (
        engine.generating is True
        and desired.generation == "running"
        and desired.sync is None
        and not (desired.asleep or desired.quarantined)
        and desired.profile is None
        and engine.session is None
        and not (engine.stale_cache or engine.asleep or engine.unknown)
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
    if current is not None and wanted is not None and current.step == wanted.step and not engine.closing:
        return SessionPlan()
    return SessionPlan(
        close=() if current is None else (StopProfile(current, _directory(current, identity)),),
        open=() if wanted is None else (StartProfile(wanted, _directory(wanted, identity)),),
    )


def plan_weights(desired: Desired, engine: EngineState, identity: Identity, load_commanded: bool) -> WeightsPlan:
    """Check the source of a sync that is prepared; load weights that are wanted and not held."""
    wanted = wanted_weights(desired, identity)
    # Until the trainer wakes the memory of weights, none are loaded, and the engine can't serve either.
    if wanted is not None and ("weights" in desired.asleep or _needs_none(desired, engine, wanted, load_commanded)):
        wanted = None
    can_load = Operation.LOAD in engine.operations
    preparing = desired.sync if desired.sync is not None and desired.sync.phase == "prepare" else None
    if goes_back(desired, engine, identity):
        return WeightsPlan(load=(Restore(engine.launched_from or ""),)) if can_load else WeightsPlan(unreachable=True)
    load = None if wanted is None or not can_load else _load_of(wanted, desired, engine, load_commanded)
    unchecked: Syncing | Load | AwaitPush | None = load
    if can_load and preparing is not None:
        unchecked = replace(preparing, source=source_to_take(preparing, desired, engine))
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


def _needs_none(desired: Desired, engine: EngineState, weights: Committed | Syncing, load_commanded: bool) -> bool:
    """Whether nothing has to be loaded. A label alone is not enough for a load that was just commanded: a sync that was
    aborted may have used the same version for other weights. And a broadcast ends for none of its receivers before all
    take part.
    """
    if desired.sync is None:
        return holds_committed(desired, engine)
    only_label = engine.loaded is None or engine.loaded.version != engine.version
    again = only_label or isinstance(weights.source, Broadcast)
    return holds_weights(engine, weights) and not (load_commanded and again)


def _load_of(
    wanted: Committed | Syncing, desired: Desired, engine: EngineState, load_commanded: bool
) -> Load | AwaitPush | None:
    """Return the call that brings these weights; None if there is none before the next sync."""
    source = source_to_take(wanted, desired, engine) if load_commanded else durable_source(wanted.source)
    if isinstance(source, Pushed):
        return AwaitPush(wanted.version, source, wanted.manifest)
    return (
        None if source is None else Load(wanted.version, source, wanted.manifest, label_of(as_committed(wanted)) or "")
    )


def plan_memory(desired: Desired, engine: EngineState, identity: Identity, loading: bool) -> MemoryPlan:
    """Wake what should be awake, and release what should be asleep. `loading` says that weights are loaded as well.

    What may be either is asked for again, one region at a time: together with another one it could be ignored.
    """
    waking, releasing = (engine.asleep | engine.unknown) - desired.asleep, desired.asleep - engine.asleep
    if not (waking or releasing):
        return MemoryPlan()
    first = waking & {"weights"} if (loading or engine.unknown) and len(waking) > 1 else waking
    rest = waking - first
    # A replica that never syncs could not load its weights again.
    discard = desired.discard and "weights" in releasing and identity.mode is not COLOCATED
    return MemoryPlan(
        wake=(Wake(first),) if first else (),
        wake_rest=(Wake(rest),) if rest else (),
        release=(Sleep(releasing, discard=discard),) if releasing else (),
    )


def plan_generation(
    desired: Desired, engine: EngineState, identity: Identity, weights: WeightsPlan, releasing: bool
) -> GenerationPlan:
    """Pause for a load, for a release and while the engine must not serve; flush a stale cache; resume at the end.

    Frozen requests are computed anew after the flush, and go on with the new weights alone. An engine that can't do
    that refuses the flush until they have ended: there it comes after the resume, at the first moment without requests.
    """
    sync = desired.sync
    pausable = engine.operations >= PAUSE_AND_RESUME
    serving = may_serve(desired, engine, identity) and not weights.unreachable
    changing = not serving or bool(weights.load) or releasing or (engine.generating is None and engine.stale_cache)
    pausing = pausable and engine.generating is not False and changing
    mode = sync.in_flight if sync is not None else desired.pause_mode
    frozen = engine.requests_kept and engine.generating is not True  # else a resume whose answer was lost was made
    requests_kept = frozen or (pausing and mode == "keep")
    stale = (engine.stale_cache or bool(weights.load)) and (engine.recomputes or not requests_kept)
    flushing = stale and serving and sync is None and "kv_cache" not in desired.asleep
    resuming = pausable and serving and (pausing or not engine.generating)
    return GenerationPlan(
        pause=(Pause(mode),) if pausing else (),
        flush=(Flush(),) if flushing else (),
        resume=(Resume(),) if resuming else (),
    )


def _directory(session: ProfileSession, identity: Identity) -> str:
    return trace_directory(session.step, session.plan, identity)


# --- what an engine may serve -----------------------------------------------------------------------------------------


def may_serve(desired: Desired, engine: EngineState, identity: Identity) -> bool:
    """Whether the engine may generate once everything that `desired` asks for is done.

    An engine that holds uncommitted or torn weights must not, if nothing was committed that it could go back to. One
    that never syncs holds what it was given.
    """
    returns = engine.launched_from is not None and desired.fallback is None
    lost = desired.committed is None and not (returns or holds_committed(desired, engine))
    return desired.serving and not (lost and identity.syncs)


def goes_back(desired: Desired, engine: EngineState, identity: Identity) -> bool:
    """Whether the engine goes back to the weights of its launch: a sync failed before anything was committed."""
    if identity.mode is COLOCATED or engine.launched_from is None or desired.sync is not None or desired.quarantined:
        return False
    if desired.draining:
        return False
    if not engine.operations >= PAUSE_AND_RESUME:
        return False
    nothing = desired.committed is None and desired.fallback is None
    return nothing and "weights" not in desired.asleep and not holds_committed(desired, engine)


def is_stranded(desired: Desired, engine: EngineState, identity: Identity) -> bool:
    """Whether the engine can't get back to weights that it may serve before the next sync."""
    if identity.mode is COLOCATED or desired.sync is not None or desired.quarantined or engine.maybe_pushed:
        return False
    # Weights wait for their memory only where a command releases it: nothing wakes what this engine can't put to sleep.
    if holds_committed(desired, engine) or "weights" in attainable(desired, engine).asleep:
        return False
    wanted = desired.committed or desired.fallback
    return engine.launched_from is None if wanted is None else durable(wanted) is None
