"""Reads a log in one pass, and passes each record on to what keeps it for the report of the run. Pure.

The fleet's history is kept by `fleet_history`, commands and what came of them by `totals`. The state of engines is
taken from their agents' own records, as far as the log has them.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from controlplane.analysis.findings import ObservedFleet
from controlplane.analysis.invariants import verify
from controlplane.machine import events as bus_events
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.machine.stops import stopped_replicas
from controlplane.record.entries import LogEntry, LogItem, LogMark
from controlplane.record.marks import decode_state
from controlplane.report.causes import Causes, explain
from controlplane.report.fleet_history import FleetHistory
from controlplane.report.game_day import GameDay
from controlplane.report.model import CommandSummary, Latencies
from controlplane.report.totals import RunReport, Totals
from schemas.commands import EpochStart, WeightSync
from schemas.errors import DecisionUnreadable, LogCorrupt
from schemas.events import Effect, EngineObserved, EngineReturned, Event, Perform, Started
from schemas.formatting import agent_order, describe, format_replicas, is_trouble
from schemas.identity import agent_of, identity_of
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command


def collect(entries: Iterable[LogItem]) -> RunReport:
    """Return the report of a log, as far as it can be read. Of marks only one before all records counts."""
    collector = _Collector()
    source = iter(entries)
    try:
        for violation in verify(collector.pass_through(source)):
            collector.totals.keep(collector.report.violations, violation, "violations")
    except LogCorrupt as error:
        collector.report.damage = str(error)
        with suppress(LogCorrupt):  # a log damaged in several places reports the first
            collector.add_readable(source)
    return collector.finish()


class _Collector:
    """Fills `report`; `finish` adds what is known only at the end."""

    def __init__(self) -> None:
        self.report = RunReport()
        self.totals = Totals(self.report)
        self._game_day = GameDay()
        self._at_us = 0
        self._begin(None)

    def _begin(self, state: CoordinatorState | None) -> None:
        """The log begins with this state."""
        self._fleet, self._observed = FleetHistory(state), ObservedFleet(state)
        self._causes, self._engines = Causes(self._fleet), _Engines(self._fleet)

    def pass_through(self, entries: Iterable[LogItem]) -> Iterator[LogItem]:
        """Add each entry, and yield it."""
        for entry in entries:
            if isinstance(entry, LogEntry):
                self._add(entry)
            elif isinstance(entry, LogMark) and not self.report.records:
                self._begin(decode_state(entry))
            yield entry

    def add_readable(self, entries: Iterator[LogItem]) -> None:
        """Add what can be read after a record that could not."""
        for entry in entries:
            if not isinstance(entry, LogEntry):
                continue
            try:
                self._add(entry)
            except LogCorrupt:
                self.report.left_out["unreadable"] += 1

    def finish(self) -> RunReport:
        """Return the report of everything added."""
        report, fleet = self.report, self._fleet
        report.causes, report.left_out["causes"] = self._causes.finish(), self._causes.dropped
        self.totals.end_step(self._unsynced_title())
        self.totals.finish()
        for quarantine in sorted(fleet.quarantines, key=lambda quarantine: quarantine.until_ns is not None):
            cause_of_it = explain(report.causes, quarantine.replica, quarantine.version)
            (report.unexplained if cause_of_it is None else cause_of_it.quarantines).append(quarantine)
        report.start_ns, report.end_ns, report.version = fleet.start_ns, fleet.now_ns, fleet.version
        report.faults = self._game_day.faults(fleet.current_replicas, fleet.clocks, fleet.now_ns)
        report.left_out["faults"] = self._game_day.left_out
        report.agents, report.quarantines, report.replicas = fleet.agents(), fleet.quarantines, fleet.replicas()
        report.stopped = stopped_replicas(fleet.state)
        report.calls = self._engines.calls
        observed = self._observed.replicas()
        report.observed = {identity_of(agent).replica: observed[agent] for agent in sorted(observed, key=agent_order)}
        return report

    def _add(self, entry: LogEntry) -> None:
        self.report.records += 1
        if entry.agent:
            with suppress(DecisionUnreadable):  # `verify` reports it
                self._engines.add(entry)
                if entry.kind == "fault":
                    self._game_day.injected(entry.agent, entry.typed_event(), entry.at_ns)  # type: ignore[arg-type]
                if entry.kind in ("started", "observed", "stopping"):
                    self._observed.follow_agent(entry, entry.typed_event())  # type: ignore[arg-type]
            return
        event, effects = entry.typed_event(), entry.typed_effects()
        self._at_us = event.at_us  # type: ignore[union-attr]
        self._observed.follow_bus(entry, event, effects)  # type: ignore[arg-type]
        self._add_event(event, entry.at_ns)  # type: ignore[arg-type]
        for effect in effects:
            self._add_effect(effect)  # type: ignore[arg-type]

    def _add_event(self, event: bus_events.CoordinatorEvent, at_ns: int) -> None:
        lost = self._fleet.follow(event, at_ns)
        match event:
            case bus_events.Opened():
                self.totals.end_step("the trainer ended or died here")
                self.report.run, self.report.closed = event.run, False
                self.report.epochs += 1
            case bus_events.Closed():
                self.report.closed = True
            case bus_events.SamplesCounted():
                self.totals.counted(event)
            case bus_events.JoinReceived():
                self._causes.returned(agent_of(event.peer))
            case bus_events.PeerLost() if lost is not None:
                self._causes.lost(lost, event.reason)

    def _add_effect(self, effect: bus_events.CoordinatorEffect) -> None:
        match effect:
            case bus_events.Publish():
                self._add_published(effect)
            case bus_events.Conclude(report=Report() as report):
                self._add_report(report)
            case bus_events.Conclude(report=SyncReport() as sync):
                self._fleet.concluded(sync)
                self._game_day.concluded(sync, self._fleet.now_ns)
                if sync.status == "aborted":
                    self.totals.aborted(sync.headline, self._fleet.now_ns)
                self.totals.end_step(sync.headline, flawed=sync.flawed)
            case bus_events.Refuse():
                self.totals.refused(effect.reason, self._fleet.now_ns)

    def _add_published(self, effect: bus_events.Publish) -> None:
        command, target = decode_command(effect.envelope.body), effect.envelope.target
        aim = "all" if target.replicas is None else format_replicas(target.replicas)
        summary = CommandSummary(seq=effect.seq, at_ns=self._fleet.now_ns, text=describe(command), target=aim)
        self.totals.published(command, summary, self._at_us, self._unsynced_title())
        if isinstance(command, WeightSync):
            summary.version = command.version

    def _unsynced_title(self) -> str:
        return f"after weights v{self._fleet.version}" if self._fleet.version else "before any weight sync"

    def _add_report(self, report: Report) -> None:
        summary = self.totals.concluded(report, self._fleet.now_ns, self._at_us)
        if summary is None or isinstance(report.command, EpochStart):
            return
        self._causes.concluded(report, summary)
        for outcome in report.outcomes:
            if is_trouble(outcome.conclusion):
                self._fleet.note_failure(outcome.agent, outcome.conclusion)


class _Engines:
    """What the agents' own records tell about their engines. `calls` has the latencies of engine calls."""

    def __init__(self, fleet: FleetHistory) -> None:
        self.calls: dict[str, Latencies] = {}
        self._fleet = fleet
        self._in_flight: dict[str, tuple[int, str, int]] = {}  # by agent: id, name and start (ms) of the call

    def add(self, entry: LogEntry) -> None:
        """Add an agent's record. Most are not decoded: they neither observe nor call."""
        if entry.kind in ("command", "head", "tick") and b"perform" not in entry.effects:
            return
        event: Event = entry.typed_event()  # type: ignore[assignment]
        effects: tuple[Effect, ...] = entry.typed_effects()  # type: ignore[assignment]
        agent = entry.agent
        if isinstance(event, Started):
            self._in_flight.pop(agent, None)
        elif isinstance(event, EngineReturned):
            call_id, name, since_ms = self._in_flight.pop(agent, (0, "", 0))
            if call_id == event.call_id:
                self.calls.setdefault(name, Latencies()).values.append((event.at_ms - since_ms) * 1000)
        seen = event.observation if isinstance(event, EngineReturned | EngineObserved) else None
        if seen is not None:
            self._fleet.observed(agent, seen)
        for effect in effects:
            if isinstance(effect, Perform):
                self._in_flight[agent] = effect.call_id, str(effect.call.__struct_config__.tag), event.at_ms
