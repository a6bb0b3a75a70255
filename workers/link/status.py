"""What an agent's heartbeat says: its state in a few fields, for the bus and for people."""

from schemas.wire import Clock, Status
from workers.machine.decide import AgentState, settled
from workers.machine.reconcile import name


def status(state: AgentState, clock: Clock | None = None) -> Status:
    """The heartbeat of an agent in `state`, with what it knows of its clocks."""
    engine, activity = state.engine, state.activity
    return Status(
        ready=settled(state),
        tokenizer=engine.tokenizer,
        engine=engine.name,
        generating=engine.generating,
        asleep=tuple(sorted(engine.asleep)),
        profiling_step=engine.session.step if engine.session is not None else None,
        version=engine.version,
        digest=engine.digest,
        quarantined=state.desired.quarantined,
        torn=engine.torn,
        activity=name(activity.calls[0]) if activity is not None else None,
        waiting=len(state.queue),
        held=len(state.held),
        clock=clock,
    )
