"""Whether a replica may serve, and what is wrong with one that may not. Pure; heartbeats and the router go by it."""

from schemas.commands import AdapterDrop, AdapterSync, durable_source
from schemas.identity import OBSERVED, ROLLOUT, Operation
from workers.machine.lora import NO_PAUSE, missing, plan_adapters
from workers.machine.reconcile import is_stranded, may_serve, reconcile
from workers.machine.state import PAUSE_AND_RESUME, AgentState, call_name
from workers.machine.suppressed import still_desired
from workers.machine.weights import holds_committed


def in_sync(state: AgentState) -> bool:
    """Whether the engine is as desired, with nothing under way. Only then is the replica ready for traffic."""
    if not state.joined or state.needs_snapshot or _is_disturbed(state) or state.engine.lost or state.desired.draining:
        return False
    if state.identity.node_rank > 0:
        return True
    if state.identity.mode is OBSERVED:
        return state.engine.tokenizer == "present"
    desired, engine = still_desired(state.desired, state.suppressed), state.engine
    held = holds_committed(desired, engine) or not state.identity.syncs
    if not engine.operations >= PAUSE_AND_RESUME and not (held and may_serve(desired, engine, state.identity)):
        return False  # it serves what is not desired, and can't be paused
    wanted = desired.committed or desired.fallback
    if wanted is not None and durable_source(wanted.source) is None and not held:
        return False  # it missed a broadcast, and waits for the next sync
    if engine.tokenizer != "present" or reconcile(desired, engine, state.identity):
        return False
    return not plan_adapters(desired, engine, state.suppressed.adapters)


def _is_disturbed(state: AgentState) -> bool:
    """Whether something is under way, or about to be, during which the replica may not serve."""
    pausing = state.activity is not None and not isinstance(state.activity.calls[0], NO_PAUSE)
    return pausing or not all(isinstance(queued.command, AdapterSync | AdapterDrop) for queued in state.queue)


def out_of_service(state: AgentState) -> bool:
    """Whether only a sync or a new incarnation can bring the replica back."""
    remaining = still_desired(state.desired, state.suppressed)
    dropped_out = state.desired.sync is not None and remaining.sync is None
    return state.joined and (remaining.quarantined > 0 or dropped_out)


def is_ready(state: AgentState) -> bool:
    """Whether the agent has brought about what is desired and, on the node that has the engine, the replica serves."""
    if not in_sync(state):
        return False
    if state.identity.node_rank > 0 or state.identity.role != ROLLOUT:
        return True
    if Operation.ADAPTERS in state.engine.operations:
        lacking = (version.model for version in missing(state.desired, state.engine))
        if not state.suppressed.adapters.issuperset(lacking):
            return False  # also if the trainer has its memory, so that nothing can be loaded now
    quarantined = still_desired(state.desired, state.suppressed).quarantined
    return bool(state.engine.generating) and quarantined == 0 and not is_wedged(state)


def is_wedged(state: AgentState) -> bool:
    """Whether the engine runs requests and has not generated a token for too long."""
    return state.engine.progress is not None and state.engine.progress.wedged


def trouble(state: AgentState) -> str:
    """Return what keeps the replica from serving, and what it waits for; empty if nothing but a command does."""
    suppressed = state.suppressed
    if state.bus_lost and state.changed_by_others:
        return "something else commands its engine, and its bus is out of reach; waits for the bus"
    if state.bus_lost:
        return "has heard nothing from its bus for a lease; waits for the bus"
    if not state.joined or state.needs_snapshot:
        return "waits for the desired state from its bus"
    if found := _trouble_of_engine(state):
        return found
    if state.desired.quarantined:
        return f"left out of version {state.desired.quarantined}; waits for the next committed sync, or a restart"
    if suppressed.quarantined:
        return f"could not load version {suppressed.quarantined}; waits for the next committed sync, or a restart"
    if suppressed.generation == "paused":
        return "a resume failed; waits for another resume, or the next committed sync"
    if suppressed.asleep:
        return "a wake failed; waits for another wake"
    if state.engine.stale_cache and state.engine.generating:
        return "its cache holds prefixes of other weights, and requests still use it; waits until they have ended"
    if state.reconcile_blocked and state.retry_at_ms:
        return "a call that the agent made by itself failed; it is made again"
    if state.reconcile_blocked:
        return "a call that the agent made by itself failed; waits for the next command"
    return _trouble_of_weights(state)


def _trouble_of_weights(state: AgentState) -> str:
    """What keeps the engine from the weights that it should serve."""
    desired, engine = state.desired, state.engine
    if state.identity.node_rank > 0 or not state.identity.syncs:
        return ""
    if is_stranded(desired, engine, state.identity):
        missed = (
            f"missed version {desired.version}, whose" if desired.version else "holds uncommitted weights, and its own"
        )
        return f"{missed} weights can't be read again; waits for the next sync"
    if desired.sync is not None or Operation.LOAD in engine.operations or holds_committed(desired, engine):
        return ""
    wanted = desired.committed or desired.fallback
    missing = f"version {wanted.version}" if wanted is not None else "the weights of its launch"
    return f"{engine.name} can load no weights, and does not hold {missing}"


def _trouble_of_engine(state: AgentState) -> str:
    engine, activity = state.engine, state.activity
    if state.desired.draining:
        return "leaves the fleet"
    if state.contested:
        return "something else commands its engine and undoes what this agent does; waits for the next command"
    if engine.trouble is not None:
        return engine.trouble
    if engine.tokenizer == "unknown":
        return "its engine does not answer, or is still launching"
    if activity is not None and activity.overdue:
        late = f"{engine.name} has not answered {call_name(activity.calls[0])}, past its deadline; waits for the answer"
        return f"{late}. {activity.stacks.rstrip('.')}" if activity.stacks else late
    if is_wedged(state):
        return f"{engine.name} is wedged: it runs requests and generates nothing"
    if engine.lost:
        return f"a call to {engine.name} was not answered, and what it did is not known; waits for its relaunch"
    labelled = f"its engine holds weights labelled {engine.label!r}"
    unknown = engine.label is not None and engine.label == engine.launch_label and engine.loaded is None
    if unknown and state.identity.syncs and state.desired.sync is None:
        return f"{labelled}, of which its agent has no record; waits for the next sync"
    if engine.torn and state.identity.syncs and state.desired.sync is None and not engine.asleep:
        return "the weights that its engine holds can't be trusted; waits for the next committed sync"
    if state.weights_changed:
        return f"{labelled}, which were not committed; waits for the next sync"
    return ""
