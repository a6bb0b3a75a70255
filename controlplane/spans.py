"""OpenTelemetry spans of weight syncs and of profiling sessions, beside the trainer's own. Needs the extra `otel`.

Theory of operation. A call such as `sync_weights` takes note of the span that is current in its caller; that becomes
the parent. Spans are made of what the coordinator decided, with its times, once that was recorded and sent. A sync is
one span, and each of its phases a span within it. A profiling session is one span from its start to the end of its
stop, with a span for each of its commands. Only the API of OpenTelemetry is used: where the trainer has set up no SDK,
nothing is kept.
"""

from typing import Final

from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, Status, StatusCode, TracerProvider, get_tracer, set_span_in_context

from controlplane.machine import events
from controlplane.plane import ControlPlane
from schemas.commands import AdapterSync, ProfileCommand, WeightSync, sync_key
from schemas.formatting import count_outcomes
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command

CALLERS_MAX: Final = 1024
"""Calls that were made and not decided yet, of which the context is kept."""


def trace_commands(plane: ControlPlane, tracer_provider: TracerProvider | None = None) -> None:
    """Make spans of the syncs and profiling sessions of an open control plane, from now on.

    Args:
        plane: Open.
        tracer_provider: Where spans go; None for the global one.

    Raises:
        BusClosed: The plane is not open.
    """
    spans = _Spans(plane.bus.state.run, tracer_provider)
    plane.bus.orders.add(spans.note_order)
    plane.bus.decisions.add(spans.note_decision)


class _Spans:
    """Makes the spans of one bus: `note_order` in the threads of callers, `note_decision` in the loop of the bus."""

    def __init__(self, run: str, provider: TracerProvider | None) -> None:
        self._run = run
        self._tracer = get_tracer("rolloutctl", tracer_provider=provider)
        self._callers: dict[int, Context] = {}  # by ticket, until its order is decided
        self._published: dict[int, tuple[Context, int]] = {}  # by seq, while a command is open: its parent, and when
        self._syncs: dict[str, Span] = {}  # the newest of each adapter; of base weights under ""
        self._session: tuple[int, Span] | None = None  # by step: the profiling session that is open

    def note_order(self, order: events.CallerEvent) -> None:
        profiles = isinstance(order, events.Issued) and isinstance(order.command, ProfileCommand)
        if isinstance(order, events.SyncRequested) or profiles:
            self._callers[order.ticket] = get_current()
            while len(self._callers) > CALLERS_MAX:  # of calls that the bus never took
                self._callers.pop(next(iter(self._callers)), None)

    def note_decision(self, event: events.CoordinatorEvent, effects: events.CoordinatorEffects) -> None:
        caller = Context()
        if isinstance(event, events.Issued | events.SyncRequested):
            caller = self._callers.pop(event.ticket, caller)
        refused = any(isinstance(effect, events.Refuse) for effect in effects)
        if isinstance(event, events.SyncRequested) and not refused:
            adapter = event.adapter.name if event.adapter is not None else ""
            name = "rolloutctl.sync_adapter" if adapter else "rolloutctl.sync_weights"
            self._syncs[adapter] = self._begin(name, caller, event.at_ns)
        for effect in effects:
            match effect:
                case events.Publish(seq=seq, envelope=envelope):
                    key = sync_key(decode_command(envelope.body))
                    sync = self._syncs.get(key) if key is not None else None
                    self._published[seq] = caller if sync is None else set_span_in_context(sync), event.at_ns
                case events.Conclude(report=Report() as report):
                    self._end_command(report, event.at_ns)
                case events.Conclude(report=SyncReport() as report):
                    self._end_sync(report, event.at_ns)
        if isinstance(event, events.Closed):
            self._close(event.at_ns)

    def _begin(self, name: str, parent: Context, at_ns: int) -> Span:
        return self._tracer.start_span(name, parent, attributes={"rolloutctl.run": self._run}, start_time=at_ns)

    def _end_sync(self, report: SyncReport, at_ns: int) -> None:
        span = self._syncs.get(report.adapter)
        if span is None:
            return
        span.set_attributes(
            {
                "rolloutctl.version": report.version,
                "rolloutctl.sync.status": report.status,
                "rolloutctl.sync.loaded": len(report.loaded),
                "rolloutctl.sync.quarantined": len(report.quarantined),
                "rolloutctl.sync.unproven": len(report.unproven),
            }
        )
        if report.status == "aborted":
            span.set_status(Status(StatusCode.ERROR, report.headline))
        span.end(at_ns)

    def _end_command(self, report: Report, at_ns: int) -> None:
        parent, began_ns = self._published.pop(report.seq, (Context(), at_ns))
        match report.command:
            case WeightSync(phase=phase):
                self._add(f"sync_weights {phase}", report, parent, began_ns, at_ns)
            case AdapterSync(phase=phase):
                self._add(f"sync_adapter {phase}", report, parent, began_ns, at_ns)
            case ProfileCommand(action=action, step=step):
                if action == "start":
                    self._end_session(began_ns)
                    self._session = step, self._begin(f"rolloutctl.profile step {step}", parent, began_ns)
                ours = self._session is not None and self._session[0] == step
                if self._session is not None and ours:
                    parent = set_span_in_context(self._session[1])
                self._add(f"profile {action}", report, parent, began_ns, at_ns)
                if action == "stop" and ours:
                    self._end_session(at_ns)

    def _add(self, name: str, report: Report, parent: Context, began_ns: int, at_ns: int) -> None:
        span = self._begin(f"rolloutctl.{name}", parent, began_ns)
        counts = count_outcomes(outcome.conclusion for outcome in report.outcomes)
        span.set_attributes({"rolloutctl.seq": report.seq, "rolloutctl.outcomes": counts})
        if report.failed or report.missing:
            span.set_status(Status(StatusCode.ERROR, report.headline))
        span.end(at_ns)

    def _end_session(self, at_ns: int) -> None:
        if self._session is not None:
            self._session[1].end(at_ns)
            self._session = None

    def _close(self, at_ns: int) -> None:
        """No decision follows."""
        self._end_session(at_ns)
        for sync in self._syncs.values():
            if sync.is_recording():
                sync.set_status(Status(StatusCode.ERROR, "the bus was closed"))
                sync.end(at_ns)
