"""An agent's heartbeat: its state in a few fields, sent at regular times and as soon as the agent becomes ready."""

import time
from collections.abc import Callable

import anyio

from schemas.events import Observation
from schemas.reports import AgentStatus, Clock, Observed
from schemas.wire import TimeReply, TimeRequest
from workers.link.clocks import Clocks
from workers.machine.readiness import is_ready, is_wedged, trouble
from workers.machine.state import AgentState, call_name
from workers.machine.suppressed import still_desired


class Heartbeat:
    """Sends the status of one agent, each time with a request for the bus's time.

    Args:
        state: Returns the agent's state.
        send: Sends a message, without waiting; False if it was dropped.
        wall_ns: The node's wall clock.
    """

    def __init__(
        self,
        state: Callable[[], AgentState],
        send: Callable[[AgentStatus | TimeRequest], bool],
        wall_ns: Callable[[], int],
    ) -> None:
        self._state, self._send, self._wall_ns = state, send, wall_ns
        self._clocks = Clocks()
        self._reported_ready = False
        self._due = anyio.Event()

    def restart(self) -> None:
        """Begin again for a new bus: it knows nothing, and may run on another machine."""
        self._reported_ready = False
        self._clocks = Clocks()

    def note(self, state: AgentState) -> None:
        """Send the next heartbeat at once if the agent has just become ready."""
        if not self._reported_ready and is_ready(state):
            self._due.set()

    def apply_time(self, reply: TimeReply) -> None:
        """Measure the clocks. The first estimate is sent at once, later ones with the next heartbeat."""
        first = self._clocks.reported is None
        before_ns, loop_s, wall_ns = time.monotonic_ns(), anyio.current_time(), self._wall_ns()
        self._clocks.add(reply, loop_s, wall_ns, (before_ns, time.monotonic_ns()))
        if first and self._clocks.reported is not None:
            self._due.set()

    async def beat(self, interval_ms: int) -> None:
        """Wait until the next heartbeat is due, and send it."""
        with anyio.move_on_after(interval_ms / 1000):
            await self._due.wait()
        self._due = anyio.Event()
        status = status_of(self._state(), self._clocks.reported)
        if self._send(status):
            self._reported_ready = status.ready
        self._send(TimeRequest(sent_ns=time.monotonic_ns()))


def status_of(state: AgentState, clock: Clock | None = None) -> AgentStatus:
    """Return the heartbeat of an agent in `state`, with its newest clock estimate."""
    engine, activity = state.engine, state.activity
    return AgentStatus(
        ready=is_ready(state),
        tokenizer=engine.tokenizer,
        engine=engine.name,
        generating=engine.generating,
        asleep=tuple(sorted(engine.asleep)),
        profiling_step=engine.session.step if engine.session is not None else None,
        version=engine.version,
        digest=engine.digest,
        quarantined=still_desired(state.desired, state.suppressed).quarantined,
        torn=engine.torn,
        activity=call_name(activity.calls[0]) if activity is not None else None,
        queued=len(state.queue),
        buffered=len(state.reorder_buffer),
        clock=clock,
        wedged=is_wedged(state),
        trouble=trouble(state),
        observed=_observed(engine.seen),
    )


def _observed(seen: Observation | None) -> Observed | None:
    if seen is None:
        return None
    return Observed(label=seen.label, generating=seen.generating, profiling=seen.profiling)
