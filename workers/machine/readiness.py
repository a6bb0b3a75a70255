"""Whether a replica may serve, and what is wrong with one that may not. Pure; heartbeats and the router go by it."""

from schemas.identity import ROLLOUT
from workers.machine.decide import in_sync
from workers.machine.state import AgentState, call_name
from workers.machine.suppressed import still_desired


def is_ready(state: AgentState) -> bool:
    """Whether the agent has brought about what is desired and, on the node that has the engine, the replica serves."""
    if not in_sync(state):
        return False
    if state.identity.node_rank > 0 or state.identity.role != ROLLOUT:
        return True
    quarantined = still_desired(state.desired, state.suppressed).quarantined
    return state.engine.generating and quarantined == 0 and not is_wedged(state)


def is_wedged(state: AgentState) -> bool:
    """Whether the engine runs requests and has not generated a token for too long."""
    return state.engine.progress is not None and state.engine.progress.wedged


def trouble(state: AgentState) -> str:
    """Return what keeps the replica from serving, and what it waits for; empty if nothing but a command does."""
    suppressed = state.suppressed
    if state.bus_lost:
        return "has heard nothing from its bus for a lease; waits for the bus"
    if not state.joined or state.diverged:
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
    if state.reconcile_blocked:
        return "a call failed that nobody had commanded; waits for the next command"
    return ""


def _trouble_of_engine(state: AgentState) -> str:
    engine, activity = state.engine, state.activity
    if engine.trouble is not None:
        return engine.trouble
    if engine.tokenizer == "unknown":
        return "its engine does not answer, or is still launching"
    if activity is not None and activity.overdue:
        late = f"{engine.name} has not answered {call_name(activity.calls[0])}, past its deadline; waits for the answer"
        return f"{late}. {activity.stacks.rstrip('.')}" if activity.stacks else late
    if is_wedged(state):
        return f"{engine.name} is wedged: it runs requests and generates nothing"
    if engine.foreign and state.desired.sync is None:
        return f"its engine holds weights labelled {engine.label!r}, which nobody committed; waits for the next sync"
    return ""
