"""When an agent that was asked to looks into an engine that does not answer, and what its outcomes say of that. Pure.

The stacks are asked for shortly before the deadline of the call, so that the outcome can name the file and does not
wait for it. A call that the trainer keeps waiting (`AwaitPush`) is not looked into: nothing in the engine is late.
"""

from typing import Final

from msgspec.structs import replace

from schemas.events import AwaitPush, DumpStacks, Effect, StacksDumped
from workers.machine.state import Activity, AgentState

DUMP_BEFORE_MS: Final = 3000
"""Longest time before the deadline; a shorter call leaves a quarter of its time."""
_DUMPING: Final = "The dump of its stacks has not ended yet; the log of the agent will name the file."


def dump_at(state: AgentState) -> int | None:
    """Return when the stacks of an engine that has not answered are to be dumped; None if they are not."""
    activity = state.activity
    if activity is None or not state.settings.dump_stacks or activity.stacks is not None or activity.overdue:
        return None
    if isinstance(activity.calls[0], AwaitPush):
        return None
    return activity.deadline_ms - min(DUMP_BEFORE_MS, (activity.deadline_ms - activity.since_ms) // 4)


def ask_for_stacks(state: AgentState, effects: list[Effect]) -> AgentState:
    """Ask for the stacks of the call in flight. Appends to `effects`."""
    assert state.activity is not None
    effects.append(DumpStacks(state.activity.call_id))
    return replace(state, activity=replace(state.activity, stacks=""))


def apply_stacks(state: AgentState, event: StacksDumped, _: list[Effect]) -> AgentState:
    """Note what became of a dump, unless the call has returned meanwhile."""
    activity = state.activity
    if activity is None or activity.call_id != event.call_id:
        return state
    return replace(state, activity=replace(activity, stacks=event.note))


def stacks_clause(activity: Activity) -> str:
    """Return what the outcome of a late call says of its stacks; empty if nobody has asked for them."""
    return "" if activity.stacks is None else f" {activity.stacks or _DUMPING}"
