"""What an agent's heartbeat says: its state in a few fields, for the bus and for people."""

from schemas.reports import AgentStatus, Clock
from workers.machine.decide import AgentState, in_sync
from workers.machine.state import call_name


def status(state: AgentState, clock: Clock | None = None) -> AgentStatus:
    """The heartbeat of an agent in `state`, with what it knows of its clocks."""
    engine, activity = state.engine, state.activity
    return AgentStatus(
        ready=in_sync(state),
        tokenizer=engine.tokenizer,
        engine=engine.name,
        generating=engine.generating,
        asleep=tuple(sorted(engine.asleep)),
        profiling_step=engine.session.step if engine.session is not None else None,
        version=engine.version,
        digest=engine.digest,
        quarantined=state.desired.quarantined,
        torn=engine.torn,
        activity=call_name(activity.calls[0]) if activity is not None else None,
        queued=len(state.queue),
        buffered=len(state.reorder_buffer),
        clock=clock,
    )
