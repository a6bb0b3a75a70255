"""When the machine of an agent needs a `Tick`. Pure."""

from workers.machine import rules
from workers.machine.progress import wedged_at
from workers.machine.state import AgentState


def next_deadline(state: AgentState) -> int | None:
    """Return when the machine needs a `Tick`, in ms of its own clock; None if nothing is pending."""
    if state.stopping:
        return None
    wedged_ms = wedged_at(state.engine, state.settings.wedged_after_ms)
    retry_ms = state.retry_at_ms or None if state.reconcile_blocked else None
    idle = state.activity is None and (not state.queue or rules.place_until(state, state.queue[0]) is not None)
    unload_ms = min((unload.ask_ms for unload in state.unloads.values()), default=None) if idle else None
    return min(
        (ms for ms in (_command_deadline(state), wedged_ms, retry_ms, unload_ms) if ms is not None), default=None
    )


def _command_deadline(state: AgentState) -> int | None:
    if state.activity is not None and not state.activity.overdue:  # queued commands are decided after that
        return state.activity.deadline_ms if state.idle_at_ms is None else state.idle_at_ms
    if not state.queue:
        return None
    first = state.queue[0]
    place_ms = rules.place_until(state, first)
    return first.at_ms + first.ttl_ms if place_ms is None else place_ms
