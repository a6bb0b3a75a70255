"""An agent's heartbeat: its state in a few fields, sent at regular times and as soon as the agent becomes ready.

The first three heartbeats after a welcome ask for the bus's time, then every third does, which is about as precise: the
best of many answers counts. While the bus seems silent, all of them do. Those
also say how many requests the engine has.
"""

import random
import time
from collections.abc import Callable
from typing import Final

import anyio
from msgspec import convert

from schemas.agent_status import AgentStatus, Clock, Observed, RequestCounts
from schemas.wire import TimeReply, TimeRequest
from workers.link.clocks import Clocks
from workers.machine.lora import lacked, still_read
from workers.machine.readiness import is_ready, is_wedged, trouble
from workers.machine.state import AgentState, call_name
from workers.machine.suppressed import still_desired

FIRST_ASKED: Final = 3
"""Heartbeats after a welcome that all ask for the time."""
ASKED_EVERY: Final = 3
"""From then on, one of so many asks."""


class Heartbeat:
    """Sends the status of one agent, and requests for the bus's time."""

    def __init__(
        self,
        state: Callable[[], AgentState],
        counts: Callable[[], RequestCounts],
        send: Callable[[AgentStatus | TimeRequest | RequestCounts], bool],
        wall_ns: Callable[[], int],
    ) -> None:
        self._state, self._counts, self._send, self._wall_ns = state, counts, send, wall_ns
        self._reported_counts = RequestCounts()
        self._clocks = Clocks()
        self._reported_ready = False
        self._beats = 0  # since the last welcome
        self._due = anyio.Event()

    def restart(self) -> None:
        """Begin again for a new bus: it knows nothing, and may run on another machine."""
        self._reported_ready, self._beats, self._reported_counts = False, 0, RequestCounts()
        self._clocks = Clocks()

    def note(self, state: AgentState) -> None:
        """Send the next heartbeat at once if the agent has just become ready, or answers from a stale cache."""
        stale = state.engine.stale_cache and state.engine.generating
        if stale if self._reported_ready else is_ready(state):
            self._due.set()

    def apply_time(self, reply: TimeReply) -> None:
        """Measure the clocks. The first estimate is sent at once, later ones with the next heartbeat."""
        first = self._clocks.reported is None
        before_ns, loop_s, wall_ns = time.monotonic_ns(), anyio.current_time(), self._wall_ns()
        self._clocks.add(reply, loop_s, wall_ns, (before_ns, time.monotonic_ns()))
        if first and self._clocks.reported is not None:
            self._due.set()

    async def wait(self, interval_ms: int) -> None:
        """Wait until the next heartbeat is due."""
        with anyio.move_on_after(interval_ms / 1000):
            await self._due.wait()
        self._due = anyio.Event()

    def beat(self, *, doubtful: bool) -> None:
        """Send the heartbeat. With a request for the time if it is the turn of one, or if the bus is `doubtful`."""
        status = status_of(self._state(), self._clocks.reported)
        if self._send(status):
            self._reported_ready = status.ready
        if doubtful or self._beats < FIRST_ASKED or self._beats % ASKED_EVERY == 0:
            self._send(TimeRequest(sent_ns=time.monotonic_ns()))
            if (counts := self._counts()) != self._reported_counts and self._send(counts):
                self._reported_counts = counts
        self._beats += 1
        if self._beats == FIRST_ASKED:  # agents that joined together don't ask together for ever
            self._beats += random.randrange(ASKED_EVERY)


def status_of(state: AgentState, clock: Clock | None = None) -> AgentStatus:
    """Return the heartbeat of an agent in `state`, with its newest clock estimate."""
    engine, activity, primary = state.engine, state.activity, state.identity.node_rank == 0
    return AgentStatus(
        ready=is_ready(state),
        tokenizer=engine.tokenizer,
        engine=engine.name,
        generating=bool(engine.generating),
        asleep=tuple(sorted(engine.asleep)),
        profiling_step=engine.session.step if engine.session is not None else None,
        version=engine.version,
        digest=engine.digest,
        quarantined=still_desired(state.desired, state.suppressed).quarantined,
        torn=(engine.torn and state.identity.syncs) or state.weights_changed,
        activity=call_name(activity.calls[0]) if activity is not None else None,
        queued=len(state.queue),
        buffered=len(state.reorder_buffer),
        clock=clock,
        wedged=is_wedged(state),
        trouble=trouble(state),
        observed=None if engine.seen is None else convert(engine.seen, Observed, from_attributes=True),
        since_ms=activity.since_ms if activity is not None else None,
        adapters_missing=lacked(state) if primary else (),
        adapters_left=still_read(state) if primary else (),
        launch_label=engine.launch_label if state.joined and state.identity.syncs else None,
        faults=sum(state.faults.values()) if state.settings.game_day else None,
    )
