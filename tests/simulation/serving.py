"""The judge of engines: which may generate, on which weights and with which cache, and what agents say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from controlplane.machine.replicas import proven_replicas
from schemas.commands import durable_source
from schemas.desired import Committed, Desired
from schemas.events import EngineObserved, EngineReturned, Event, Load, Restore
from schemas.identity import Operation, RolloutMode
from tests.simulation.engine import LAUNCHED, Engine, digest_of, weights_of, weights_to_serve
from workers.machine.readiness import in_sync
from workers.machine.state import AgentState
from workers.machine.suppressed import still_desired

if TYPE_CHECKING:
    from tests.simulation.agent import Process
    from tests.simulation.bus import Bus
    from tests.simulation.promises import Promises


def misled(process: Process) -> bool:
    """Whether the engine was relaunched, or the trainer released its memory or took it back, after the last
    observation: then the agent cannot know better.
    """
    engine, believed = process.slot.engine, process.state.engine
    if engine is None:
        return False
    unseen = (
        engine.moved
        or process.slot.double in engine.unseen_by
        or (engine.memory == "trainer" and believed.asleep_by_trainer != engine.asleep)
    )
    return unseen or believed.instance != f"launch {engine.instance}"


def check(promises: Promises, process: Process) -> None:
    """P4 and I1: an agent that reports ready is in sync, and one that generates serves the committed weights."""
    state, engine = process.state, process.slot.engine
    if engine is None or engine.attempt is not None or misled(process) or process.slot.cut_off:
        return
    if not in_sync(state):
        _settled(promises, process, engine)
        return
    if process.slot.on_lost_bus == "pause" and process.slot.ledger.lease_over:
        paused(promises, process)
    desired = promises.oracle(process)
    if desired is None:
        return
    name = process.peer
    committed = weights_to_serve(desired, engine.weights)
    if state.desired != desired:
        promises.broken("P4 late joiner", f"{name} wants {state.desired}, the log says {desired}")
    # What failed is not pursued: a replica that could not be paused continues to generate.
    desired = replace(desired, generation=state.suppressed.generation or desired.generation)
    desired = replace(desired, asleep=(desired.asleep - state.suppressed.awake) | state.suppressed.asleep)
    if engine.keeps_memory:
        desired = replace(desired, asleep=frozenset())
    sync = desired.sync
    if sync is not None and sync.version == state.suppressed.sync and not state.suppressed.quarantined:
        desired = replace(desired, sync=None)  # it was not touched, and continues until the load or commit names it
    if engine.generating and not desired.serving:
        promises.broken("I1 no torn serving", f"{name} generates, and by the log {desired}")
    colocated = process.slot.identity.mode is RolloutMode.COLOCATED
    if engine.generating and engine.weights != committed and not colocated:
        promises.broken("I1 no torn serving", f"{name} generates on {engine.weights}, committed is {committed}")
    if engine.generating and (stale := engine.cached - {engine.weights}):
        promises.broken("I1 no torn serving", f"{name} says it serves {engine.weights}, with the cache of {stale}")
    _pursued(promises, process, engine, stranded(process, desired))


def served(promises: Promises, bus: Bus) -> str:
    """P11: a replica that the bus calls serving generates on nothing but the weights of that version."""
    for replica, version in proven_replicas(bus.state).serving.items():
        if replica in promises.leaving:
            return f"replica {replica} leaves the fleet, and the bus says that it serves"
        slot = promises.world.slot(f"{replica}.0")
        process, engine = slot.process, slot.engine
        if process is None or engine is None or process.peer != bus.state.members[slot.name].peer or misled(process):
            continue
        if engine.weights == LAUNCHED and engine.instance > 1:
            continue  # it was relaunched, and the bus has yet to hear of it
        desired = bus.state.desired.get(replica, bus.state.default_desired)
        weights, fallback = weights_to_serve(desired, engine.weights), desired.fallback
        if engine.generating and engine.weights != weights:
            return f"the bus says that replica {replica} serves v{version}, {weights}, and it has {engine.weights}"
        taken = fallback is not None and engine.weights == weights_of(fallback.source)
        if fallback is not None and taken and version != fallback.version:
            return f"replica {replica} serves v{fallback.version}, and is said to serve v{version}"
    return ""


def _settled(promises: Promises, process: Process, engine: Engine) -> None:
    """I1: one that is not as desired, and for which nothing is under way, does not generate; unless it can't be
    paused, or a call has just failed.
    """
    state = process.state
    idle = state.activity is None and not state.queue and state.joined and not state.needs_snapshot
    if not idle or state.reconcile_blocked or not engine.generating or not engine.pausable or state.stopping:
        return
    if state.engine.tokenizer != "present" or state.engine.asleep_by_trainer or state.engine.lost:
        return
    if state.changed_by_others:  # what something else did stands until the bus is heard, as `Promises` checks
        return
    if not still_desired(state.desired, state.suppressed).serving:
        promises.broken("I1 no torn serving", f"{process.peer} generates, and nothing is under way: {state.suppressed}")


def stranded(process: Process, desired: Desired) -> bool:
    """Whether nothing can give the engine weights that it may serve before the next sync. One whose engine shows no
    digest can't know that a load which failed has touched nothing; nor can one whose engine was launched again
    meanwhile, and showed other weights before. Where no digest was announced, none shows that a load without an answer
    was made. Nor does one know what was pushed under the same label for a sync that was aborted.
    """
    engine, committed, fallback = process.slot.engine, desired.committed, desired.fallback
    if engine is None:
        return False
    unknown = engine.kind != "tiny" or process.slot.ledger.may_be_torn == f"launch {engine.instance}"
    torn = unknown and process.state.engine.torn
    if committed is None and (fallback is None or engine.unable or _refused(engine, fallback)):
        no_way_back = fallback is not None or process.state.engine.launched_from is None or engine.unable
        return no_way_back and (engine.weights != LAUNCHED or torn)
    wanted = committed or fallback
    if wanted is None or durable_source(wanted.source) is not None:
        return False
    held = process.state.engine.loaded
    again = held is not None and held != wanted and held.source == wanted.source
    unannounced = wanted.manifest is None or wanted.manifest.content is None
    torn = torn or (process.state.engine.torn and held != wanted and unannounced)
    return (
        torn or again or engine.weights != weights_of(wanted.source) or engine.weights == process.slot.ledger.unproven
    )


def may_be_torn(before: AgentState, event: Event) -> str | None:
    """Return the launch that an agent first sees after a load without an answer, which this one was perhaps given: it
    shows other weights than the one before.
    """
    activity = before.interrupted or before.activity
    if not isinstance(event, EngineObserved | EngineReturned) or event.observation is None or activity is None:
        return None
    earlier, seen = before.engine, event.observation
    if not isinstance(activity.calls[0], Load | Restore) or earlier.instance in (None, seen.instance):
        return None
    return seen.instance if earlier.torn or earlier.digest != seen.digest else None


def _refused(engine: Engine, weights: Committed) -> bool:
    """Whether an engine that shows its digest refuses these weights at every load: their manifest says others."""
    content = weights.manifest.content if weights.manifest is not None else None
    return engine.kind == "tiny" and content not in (None, digest_of(weights_of(weights.source)))


def waits_for_push(state: AgentState) -> bool:
    """Whether it is in quarantine until the next sync, and so has not even read what was pushed into its engine."""
    committed = state.desired.committed
    pushed = committed is not None and durable_source(committed.source) is None
    return pushed and bool(state.desired.quarantined or state.suppressed.quarantined)


def paused(promises: Promises, process: Process) -> None:
    """I1: an engine that may not serve without a bus is paused once its lease is over, unless a pause failed."""
    engine = process.slot.engine
    if engine is not None and engine.generating and engine.pausable and not process.state.reconcile_blocked:
        promises.broken("I1 no torn serving", f"{process.peer} serves without a bus, and was told not to")


def _pursued(promises: Promises, process: Process, engine: Engine, lost: bool) -> None:
    """P4: an agent that reports ready has brought about what it still pursues."""
    state, name = process.state, process.peer
    pursued = still_desired(state.desired, state.suppressed)
    wanted = pursued.profile.step if pursued.profile is not None else None
    if engine.keeps_memory:
        pursued = replace(pursued, asleep=engine.asleep)
    if Operation.PROFILE in engine.temper.lacks:
        wanted = None
    stuck = engine.unable and pursued.committed is not None
    if not engine.generating and pursued.serving and not (lost or stuck or engine.interrupts):
        promises.broken("P4 late joiner", f"{name} says it serves, and is paused")
    if engine.asleep != pursued.asleep:
        promises.broken("P4 late joiner", f"{name} says it is as desired, asleep is {sorted(engine.asleep)}")
    allowed = engine.unseen is not None or engine.forgotten is not None
    allowed = allowed or (engine.session_step is None and wanted in engine.recorded.keys() | engine.doubtful)
    if engine.session_step != wanted and not allowed:
        promises.broken("P4 late joiner", f"{name}: session {engine.session_step} is open, desired is {wanted}")
