"""Metrics of one agent for Prometheus: `rolloutctl agent --metrics-port`. Needs the extra `metrics`.

Gauges are read from the agent's state at each scrape; counters count events (outcomes, engine calls). Each agent is a
target of its own, which Prometheus names, so no series repeats the agent's name: `rolloutctl_agent_info` has it.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import Counter, Histogram

from schemas import events
from schemas.formatting import kind_and_reason
from schemas.transport.exposition import Sample, Table, TableCollector
from workers.agent import Agent
from workers.link.heartbeat import status_of
from workers.machine.readiness import is_ready
from workers.machine.state import call_name
from workers.router import should_be_registered

CALL_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

GAUGES: Final[Table] = {
    "rolloutctl_agent_info": (
        "Always 1; its labels say which agent this is.",
        ("agent", "replica", "node_rank", "role", "engine"),
    ),
    "rolloutctl_agent_bus_connected": ("1 while it follows a bus: it has its desired state, and a lease.", ()),
    "rolloutctl_agent_ready": ("1 if its engine is as desired and, on node rank 0, serves.", ()),
    "rolloutctl_agent_engine_up": ("1 if its engine answers.", ()),
    "rolloutctl_agent_generating": ("1 unless its engine is paused.", ()),
    "rolloutctl_agent_profiling": ("1 while a profiling session is open.", ()),
    "rolloutctl_agent_weights_version": ("Version of the weights that its engine holds.", ()),
    "rolloutctl_agent_quarantined": ("1 if its replica could not follow a sync and is out of service.", ()),
    "rolloutctl_agent_torn": ("1 if a load failed or was cut off, and what the engine holds is not known.", ()),
    "rolloutctl_agent_wedged": ("1 if its engine runs requests and has generated nothing for too long.", ()),
    "rolloutctl_agent_queued_commands": ("Commands that wait for its engine.", ()),
    "rolloutctl_agent_engine_call_age_seconds": ("Age of the engine call in flight; 0 if there is none.", ()),
    "rolloutctl_agent_malformed_messages_total": ("Messages of this incarnation's bus that could not be read.", ()),
}
"""Read at each scrape."""


class AgentCollector(TableCollector):
    """Metrics of an agent that was entered. Counts from its creation on. May be scraped from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._outcomes = Counter(
            "rolloutctl_agent_outcomes_total", "Outcomes of commands.", ["outcome", "reason"], registry=None
        )
        self._resends = Counter(
            "rolloutctl_agent_resend_requests_total", "Requests for commands that did not arrive.", registry=None
        )
        self._leases = Counter(
            "rolloutctl_agent_leases_expired_total", "Times that the bus was silent for a lease.", registry=None
        )
        self._calls = Histogram(
            "rolloutctl_agent_engine_call_duration_seconds",
            "Calls of the engine.",
            ["call", "result"],
            buckets=CALL_BUCKETS_S,
            registry=None,
        )
        super().__init__(GAUGES, (self._outcomes, self._resends, self._leases, self._calls))
        self._call: tuple[int, str, float] | None = None  # number and name of the call in flight, and when it began
        self._ready = False
        agent.decisions.add(self._note)

    def ready(self) -> bool:
        """Whether requests may come here: as for a router, which keeps an engine that a command or a sync pauses."""
        state = self._agent.state
        self._ready = is_ready(state) if state.identity.node_rank else should_be_registered(state, self._ready)
        return self._ready

    def _note(self, event: events.Event, effects: Sequence[events.Effect]) -> None:
        if isinstance(event, events.EngineReturned):
            self._note_return(event)
        elif isinstance(event, events.LeaseExpired):
            self._leases.inc()
        elif isinstance(event, events.Started):
            self._call = None
        for effect in effects:
            match effect:
                case events.Perform(call_id=number, call=call):
                    self._call = number, call_name(call), time.monotonic()
                case events.Answer(outcome=outcome):
                    self._outcomes.labels(*kind_and_reason(outcome)).inc()
                case events.RequestResend():
                    self._resends.inc()

    def _note_return(self, event: events.EngineReturned) -> None:
        if self._call is None or self._call[0] != event.call_id:
            return
        _, name, began_s = self._call
        self._call = None
        result = event.result.kind if isinstance(event.result, events.Fault) else "ok"
        self._calls.labels(name, result).observe(time.monotonic() - began_s)

    def read(self) -> Iterator[Sample]:
        state, call = self._agent.state, self._call
        identity, status = state.identity, status_of(state)
        in_flight = call is not None and state.activity is not None and state.activity.call_id == call[0]
        place = (identity.agent, str(identity.replica), str(identity.node_rank), identity.role, state.engine.name)
        yield "rolloutctl_agent_info", place, 1
        yield "rolloutctl_agent_bus_connected", (), state.joined and not state.needs_snapshot
        yield "rolloutctl_agent_ready", (), status.ready
        yield "rolloutctl_agent_engine_up", (), status.tokenizer != "unknown"
        yield "rolloutctl_agent_generating", (), status.generating
        yield "rolloutctl_agent_profiling", (), status.profiling_step is not None
        yield "rolloutctl_agent_weights_version", (), status.version
        yield "rolloutctl_agent_quarantined", (), status.quarantined > 0
        yield "rolloutctl_agent_torn", (), status.torn
        yield "rolloutctl_agent_wedged", (), status.wedged
        yield "rolloutctl_agent_queued_commands", (), status.queued
        yield "rolloutctl_agent_engine_call_age_seconds", (), time.monotonic() - call[2] if call and in_flight else 0
        yield "rolloutctl_agent_malformed_messages_total", (), self._agent.malformed
