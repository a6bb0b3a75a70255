"""Reads a log in one pass, and makes the report of its run. Pure.

The fleet's history is kept by `fleet_history`, why commands failed by `causes`. The state of engines is taken from
their agents' own records, as far as the log has them. Memory grows with the number of agents and failures, and by eight
bytes for each answer: equal outcomes are one group, and only the newest commands are kept.

Times are the bus's wall clock in ns. Durations are of its monotonic clock in µs.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from controlplane.analysis.findings import ObservedFleet
from controlplane.analysis.invariants import verify
from controlplane.machine import events as bus_events
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.machine.provenance import mean_staleness
from controlplane.machine.stops import stopped_replicas
from controlplane.record.entries import LogEntry, LogItem, LogMark
from controlplane.record.marks import decode_state
from controlplane.report.causes import Causes, explain
from controlplane.report.fleet_history import FleetHistory
from controlplane.report.game_day import GameDay
from controlplane.report.model import (
    CommandSummary,
    Latencies,
    Refusal,
    RunReport,
    SampleSummary,
    StepSummary,
    Straggler,
    group_by_reason,
    rank_stragglers,
)
from schemas.commands import EpochStart, ProfileCommand, WeightSync
from schemas.errors import DecisionUnreadable, LogCorrupt
from schemas.events import Effect, EngineObserved, EngineReturned, Event, Perform, Started
from schemas.formatting import (
    agent_order,
    command_kind,
    describe,
    format_agents,
    format_replicas,
    is_trouble,
    without_numbers,
)
from schemas.identity import agent_of, identity_of
from schemas.outcomes import Acted, Missing
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command

MAX_COMMANDS: Final = 6_000
"""The newest commands are kept."""
MAX_STEP_COMMANDS: Final = 200
"""Commands per step. Fleets whose weights are never synced have steps, too."""
MAX_TRACES: Final = 64
"""Traces per command."""


def collect(entries: Iterable[LogItem]) -> RunReport:
    """Return the report of a log, as far as it can be read. Of marks only one before all records counts."""
    collector = _Collector()
    source = iter(entries)
    try:
        for violation in verify(collector.pass_through(source), collector.observed):
            collector.report.violations.append(violation)
    except LogCorrupt as error:
        collector.report.damage = str(error)
        with suppress(LogCorrupt):  # a log damaged in several places reports the first
            collector.add_readable(source)
    return collector.finish()


class _Collector:
    """Fills `report`; `finish` adds what is known only at the end."""

    def __init__(self) -> None:
        self.report = RunReport()
        self.observed = ObservedFleet()
        self._game_day = GameDay()
        self._at_us = 0
        self._step, self._steps, self._kept = StepSummary(), deque[StepSummary](), 0
        self._open: dict[int, tuple[CommandSummary, int]] = {}  # by seq: the command, and when it was published (µs)
        self._stragglers: dict[str, Straggler] = {}
        # By reason without its numbers.
        self._refused: dict[str, Refusal] = {}
        self._aborted: dict[str, Refusal] = {}
        self._begin(None)

    def _begin(self, state: CoordinatorState | None) -> None:
        self._fleet = FleetHistory(state)
        self._causes, self._engines = Causes(self._fleet), _Engines(self._fleet)

    def pass_through(self, entries: Iterable[LogItem]) -> Iterator[LogItem]:
        for entry in entries:
            if isinstance(entry, LogEntry):
                self._add(entry)
            elif isinstance(entry, LogMark) and not self.report.records:
                self._begin(decode_state(entry))
            yield entry

    def add_readable(self, entries: Iterator[LogItem]) -> None:
        """Add what can be read after a record that could not."""
        for entry in (item for item in entries if isinstance(item, LogEntry)):
            try:
                self._add(entry)
            except LogCorrupt:
                self.report.unreadable += 1

    def finish(self) -> RunReport:
        report, fleet = self.report, self._fleet
        report.causes = self._causes.finish()
        report.refused, report.aborted = list(self._refused.values()), list(self._aborted.values())
        self._end_step(self._unsynced_title())
        report.steps, report.unconcluded = list(self._steps), [summary for summary, _ in self._open.values()]
        first_seqs = {cause.seq for cause in report.causes}
        for step in report.steps:
            step.shown = any(command.seq in first_seqs or not command.concluded for command in step.commands)
        report.stragglers = rank_stragglers(self._stragglers.values())
        for quarantine in sorted(fleet.quarantines, key=lambda quarantine: quarantine.until_ns is not None):
            cause_of_it = explain(report.causes, quarantine.replica, quarantine.version)
            (report.unexplained if cause_of_it is None else cause_of_it.quarantines).append(quarantine)
        report.start_ns, report.end_ns, report.version = fleet.start_ns, fleet.now_ns, fleet.version
        report.faults = self._game_day.faults(fleet.current_units, fleet.clocks, fleet.now_ns)
        report.agents, report.quarantines, report.replicas = fleet.agents(), fleet.quarantines, fleet.replicas()
        report.stopped = stopped_replicas(fleet.state)
        report.calls = self._engines.calls
        observed = self.observed.replicas()
        report.observed = {identity_of(agent).replica: observed[agent] for agent in sorted(observed, key=agent_order)}
        return report

    def _add(self, entry: LogEntry) -> None:
        self.report.records += 1
        if entry.agent:
            with suppress(DecisionUnreadable):  # `verify` reports it
                self._engines.add(entry)
                if entry.kind == "fault":
                    self._game_day.injected(entry.agent, entry.typed_event(), entry.at_ns)  # type: ignore[arg-type]
            return
        event, effects = entry.typed_event(), entry.typed_effects()
        self._at_us = event.at_us  # type: ignore[union-attr]
        self._add_event(event, entry.at_ns)  # type: ignore[arg-type]
        for effect in effects:
            self._add_effect(effect)  # type: ignore[arg-type]

    def _add_event(self, event: bus_events.CoordinatorEvent, at_ns: int) -> None:
        lost = self._fleet.follow(event, at_ns)
        match event:
            case bus_events.Opened():
                self._end_step("the trainer ended or died here")
                self.report.run, self.report.closed = event.run, False
                self.report.epochs += 1
            case bus_events.Closed():
                self.report.closed = True
            case bus_events.SamplesCounted():
                self._count_samples(event)
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
                    self._add_alike(self._aborted, sync.headline)
                self._end_step(sync.headline, flawed=sync.flawed)
            case bus_events.Refuse():
                self._add_alike(self._refused, effect.reason)

    def _add_alike(self, kept: dict[str, Refusal], reason: str) -> None:
        """Add what went wrong to others that did for the same reason."""
        now_ns = self._fleet.now_ns
        refusal = kept.setdefault(without_numbers(reason), Refusal(reason=reason, at_ns=now_ns, until_ns=now_ns))
        refusal.count, refusal.until_ns = refusal.count + 1, now_ns

    def _count_samples(self, event: bus_events.SamplesCounted) -> None:
        if (mean := mean_staleness(event)) is not None:
            self.report.staleness = [*self.report.staleness[1 - MAX_COMMANDS :], (event.step, mean)]
        for count in event.counts:
            summary = self.report.samples.setdefault(count.staleness, SampleSummary())
            summary.accepted += count.sequences * count.accepted
            summary.refused += count.sequences * (not count.accepted)
            summary.tokens += count.tokens
            summary.unproven += count.tokens * (count.proof not in bus_events.PROVEN)

    # --- commands and steps -------------------------------------------------------------------------------------------

    def _add_published(self, effect: bus_events.Publish) -> None:
        """Add a command. It begins another step if this one is full, or another training step is profiled now."""
        command, target = decode_command(effect.envelope.body), effect.envelope.target
        aim = "all" if target.replicas is None else format_replicas(target.replicas)
        summary = CommandSummary(seq=effect.seq, at_ns=self._fleet.now_ns, text=describe(command), target=aim)
        if isinstance(command, WeightSync):
            summary.version = command.version
        starts = command.step if isinstance(command, ProfileCommand) and command.action == "start" else None
        profiles_another = starts is not None and self._step.profiled and starts not in self._step.profiled
        if len(self._step.commands) >= MAX_STEP_COMMANDS or profiles_another:
            self._end_step(self._unsynced_title())
        self._step.commands.append(summary)
        if starts is not None and starts not in self._step.profiled:
            self._step.profiled.append(starts)
        self.report.commands += 1
        self._open[summary.seq] = summary, self._at_us

    def _end_step(self, title: str, flawed: bool = False) -> None:
        """End the step: what its commands led to is its title."""
        step, self._step = self._step, StepSummary()
        step.title, step.flawed = title, flawed
        if not step.commands:
            return
        self._steps.append(step)
        self._kept += len(step.commands)
        while self._kept > MAX_COMMANDS and len(self._steps) > 1:
            oldest = len(self._steps.popleft().commands)
            self._kept, self.report.dropped = self._kept - oldest, self.report.dropped + oldest

    def _unsynced_title(self) -> str:
        return f"after weights v{self._fleet.version}" if self._fleet.version else "before any weight sync"

    def _add_report(self, report: Report) -> None:
        summary, since_us = self._open.pop(report.seq, (None, 0))
        if summary is None:
            return  # violates I5, which `verify` reports
        summary.concluded = True
        summary.outcomes = group_by_reason(report.outcomes)
        for group in summary.outcomes:
            self.report.counts[group.kind] += group.count
        if Missing("bus_restarted") in [line.conclusion for line in report.outcomes]:  # on a previous trainer's clock
            summary.duration_us = max(0, self._fleet.now_ns - summary.at_ns) // 1000
        else:
            latencies = [outcome.latency_us for outcome in report.outcomes]
            summary.duration_us = max(latencies, default=max(0, self._at_us - since_us))
        self._add_acted(report, summary)
        if isinstance(report.command, EpochStart):  # it is published before any agent can have joined
            return
        self._add_stragglers(report)
        self._causes.concluded(report, summary)
        for outcome in report.outcomes:
            if is_trouble(outcome.conclusion):
                self._fleet.note_failure(outcome.agent, outcome.conclusion)

    def _add_acted(self, report: Report, summary: CommandSummary) -> None:
        acted = [(outcome, outcome.conclusion) for outcome in report.outcomes if isinstance(outcome.conclusion, Acted)]
        traces = [trace for _, conclusion in acted for trace in conclusion.traces]
        summary.traces, summary.traces_count = tuple(traces[:MAX_TRACES]), len(traces)
        summary.traces_nbytes = sum(trace.nbytes for trace in traces)
        untraced = {rank for _, conclusion in acted for rank in conclusion.ranks_without_trace}
        summary.untraced = tuple(sorted(untraced))
        self.report.untraced += bool(untraced)
        summary.hooks = format_agents(outcome.agent for outcome, conclusion in acted if conclusion.still_running)
        for outcome, _ in acted:
            latencies = self.report.latencies.setdefault(command_kind(report.command), Latencies())
            latencies.values.append(outcome.latency_us)

    def _add_stragglers(self, report: Report) -> None:
        for outcome in report.outcomes:
            if isinstance(outcome.conclusion, Missing) and outcome.conclusion.reason != "bus_restarted":
                self._straggler(outcome.agent).missing += 1
        acted = sorted(
            (outcome.latency_us, outcome.agent) for outcome in report.outcomes if isinstance(outcome.conclusion, Acted)
        )
        if len(acted) < 2:
            return
        slowest_us, agent = acted[-1]
        behind_us = slowest_us - acted[(len(acted) - 1) // 2][0]
        straggler = self._straggler(agent)
        straggler.last += 1
        straggler.behind_us += behind_us
        if behind_us > straggler.worst_us:
            straggler.worst_us, straggler.worst_seq = behind_us, report.seq

    def _straggler(self, agent: str) -> Straggler:
        return self._stragglers.setdefault(agent, Straggler(agent=agent))


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
