"""Collects the report of one recorded run in one pass over its log. Pure.

Memory grows with the number of agents and commands, never with that of answers: equal outcomes are one group, latencies
are counted in buckets, and every list has a maximum and a count of what is left out.

Times are the bus's wall clock in ns. Durations are of its monotonic clock in µs. The state of engines is taken from
their agents' own records, as far as the log has them.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, Literal, TypeVar

from msgspec import Struct, field

from controlplane.machine import events as bus_events
from controlplane.record.entries import LogEntry, LogItem
from controlplane.record.invariants import Violation, verify
from controlplane.record.log_lines import format_observation
from controlplane.report.fleet_history import AgentHistory, FleetHistory, Quarantine, ReplicaHistory
from controlplane.report.model import (
    CommandSummary,
    FailureGroup,
    LatencyHistogram,
    StepSummary,
    Straggler,
    command_kind,
    group_by_reason,
    rank_stragglers,
)
from schemas.commands import Command, EpochStart, ProfileCommand, UnknownCommand, WeightSync
from schemas.errors import DecisionUnreadable, LogCorrupt
from schemas.events import Answer, Effect, EngineObserved, EngineReturned, Event, Observation, Perform, Started
from schemas.formatting import agent_order, describe, format_agents, format_replicas, is_trouble, kind_and_reason
from schemas.outcomes import Acted, Failed, Missing
from schemas.reports import AgentOutcome, Report, SyncReport
from schemas.wire import decode_command

MAX_COMMANDS: Final = 6_000
"""The newest commands are kept; older steps only if something went wrong in them."""
MAX_STEP_COMMANDS: Final = 200
"""Commands per step. Fleets whose weights are never synced have steps, too."""
MAX_FAILURES: Final = 400
MAX_ENGINES: Final = 8 * MAX_FAILURES
"""States of engines after a failure."""
MAX_TEXT: Final = 1_200
"""Characters of a message."""
MAX_TRACES: Final = 64
"""Traces per command."""

T = TypeVar("T")


class RunReport(Struct, kw_only=True):
    """What the page shows.

    Attributes:
        closed: The bus was closed, and did not die.
        counts: Outcomes by kind.
        untraced: Commands after which a rank lacked its trace.
        left_out: What was counted and not kept.
        damage: Why the log can't be read further; empty if it can.
        unconcluded: Commands without a report.
        latencies: By kind of command, of the agents that acted; `calls` by kind of engine call.
        replicas: By index.
    """

    run: str = ""
    start_ns: int = 0
    end_ns: int = 0
    records: int = 0
    epochs: int = 0
    closed: bool = False
    version: int = 0
    commands: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[FailureGroup] = []
    refused: list[tuple[int, str]] = []
    violations: list[Violation] = []
    untraced: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    damage: str = ""
    agents: list[AgentHistory] = []
    quarantines: list[Quarantine] = []
    unconcluded: list[CommandSummary] = []
    steps: list[StepSummary] = []
    latencies: dict[str, LatencyHistogram] = {}
    calls: dict[str, LatencyHistogram] = {}
    stragglers: list[Straggler] = []
    replicas: dict[int, ReplicaHistory] = {}

    @property
    def out_now(self) -> list[Quarantine]:
        """Replicas that are out of service at the end of the log."""
        return [quarantine for quarantine in self.quarantines if quarantine.until_ns is None]

    @property
    def gone_now(self) -> list[AgentHistory]:
        """Agents that are lost at the end of the log."""
        return [agent for agent in self.agents if agent.membership == "gone"]

    @property
    def unready(self) -> list[AgentHistory]:
        """Agents in the fleet at the end of the log whose engines are not as desired."""
        return [agent for agent in self.agents if agent.unready]

    @property
    def lost(self) -> list[AgentHistory]:
        """Agents that were ever lost."""
        return [agent for agent in self.agents if agent.losses_count]

    @property
    def tone(self) -> Literal["bad", "warn", "ok"]:
        """bad: something is wrong at the end, or can't be trusted. warn: something was wrong, or is not finished."""
        if self.out_now or self.gone_now or self.violations or self.damage:
            return "bad"
        wrong = self.failures or self.quarantines or self.lost or self.refused or self.untraced
        return "warn" if wrong or self.unconcluded or self.unready else "ok"

    @property
    def verdict(self) -> str:
        """The run in one line."""
        amounts = {
            "failed": self.counts["failed"],
            "missing": self.counts["missing"],
            "out of service": len(self.out_now),
            "temporarily quarantined": len(self.quarantines) - len(self.out_now),
            "gone": len(self.gone_now),
            "temporarily lost": sum(agent.membership != "gone" for agent in self.lost),
            "not ready": len(self.unready),
            "not concluded": len(self.unconcluded),
            "without a trace": self.untraced,
            "refused": len(self.refused) + self.left_out["refused"],
            "broken invariants": len(self.violations) + self.left_out["violations"],
            "damaged": int(bool(self.damage)),
        }
        return ", ".join(f"{count:,} {text}" for text, count in amounts.items() if count) or "nothing failed"


def collect(entries: Iterable[LogItem]) -> RunReport:
    """Return the report of a log, as far as it can be read. Of marks only one before all records counts."""
    collector = _Collector()
    source = iter(entries)
    try:
        for violation in verify(collector.pass_through(source)):
            collector.keep(collector.report.violations, violation, "violations")
    except LogCorrupt as error:
        collector.report.damage = str(error)
        with suppress(LogCorrupt):  # a log damaged in several places reports the first
            collector.add_readable(source)
    return collector.finish()


class _Collector:
    """Fills `report`; `finish` adds what is known only at the end."""

    def __init__(self) -> None:
        self.report = RunReport()
        self._fleet = FleetHistory()
        self._steps = _Steps()
        self._engines = _Engines(self._fleet)
        self._at_us = 0
        self._open: dict[int, tuple[CommandSummary, int]] = {}  # by seq: the command, and when it was published (µs)
        self._stragglers: dict[str, Straggler] = {}

    def pass_through(self, entries: Iterable[LogItem]) -> Iterator[LogItem]:
        """Add each entry, and yield it."""
        for entry in entries:
            if isinstance(entry, LogEntry):
                self._add(entry)
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

    def keep(self, kept: list[T], item: T, what: str) -> None:
        """Append an item, or count it as left out."""
        if len(kept) < MAX_FAILURES:
            kept.append(item)
        else:
            self.report.left_out[what] += 1

    def finish(self) -> RunReport:
        """Return the report of everything added."""
        self._steps.end(self._unsynced_title())
        report, fleet = self.report, self._fleet
        for failure in report.failures:
            failure.engines = self._engines.after_failure(failure)
        report.start_ns, report.end_ns, report.version = fleet.start_ns, fleet.now_ns, fleet.version
        report.agents, report.quarantines, report.replicas = fleet.agents(), fleet.quarantines, fleet.replicas()
        report.steps, report.left_out["commands"] = self._steps.kept(), self._steps.dropped
        report.unconcluded = [summary for summary, _ in self._open.values()]
        report.calls = self._engines.calls
        report.stragglers = rank_stragglers(self._stragglers.values())
        return report

    def _add(self, entry: LogEntry) -> None:
        self.report.records += 1
        if entry.agent:
            with suppress(DecisionUnreadable):  # `verify` reports it
                self._engines.add(entry)
            return
        self._fleet.advance(entry.at_ns)
        event, effects = entry.typed_event(), entry.typed_effects()
        self._at_us = event.at_us  # type: ignore[union-attr]
        self._add_event(event, effects)  # type: ignore[arg-type]
        for effect in effects:
            self._add_effect(effect)  # type: ignore[arg-type]

    def _add_event(self, event: bus_events.CoordinatorEvent, effects: tuple[bus_events.CoordinatorEffect, ...]) -> None:
        match event:
            case bus_events.Opened():
                self._steps.end("the trainer ended or died here")
                self.report.run, self.report.closed = event.run, False
                self.report.epochs += 1
                self._fleet.opened()
            case bus_events.Closed():
                self.report.closed = True
            case bus_events.HelloReceived():
                self._fleet.hello(event, effects)
            case bus_events.JoinReceived():
                self._fleet.joined(event.peer)
            case bus_events.StatusReceived():
                self._fleet.status(event)
            case bus_events.PeerLost():
                self._fleet.lost(event)
            case bus_events.AnswersReceived():
                for answer in event.answers:
                    self._fleet.answered(answer)

    def _add_effect(self, effect: bus_events.CoordinatorEffect) -> None:
        match effect:
            case bus_events.Publish():
                self._add_published(effect)
            case bus_events.Conclude(report=Report() as report):
                self._add_report(report)
            case bus_events.Conclude(report=SyncReport() as sync):
                if sync.status == "committed":
                    self._fleet.committed(sync)
                flawed = sync.status == "aborted" or bool(sync.quarantined or sync.unproven)
                self._steps.end(sync.headline, flawed=flawed)
            case bus_events.Refuse():
                self.keep(self.report.refused, (self._fleet.now_ns, effect.reason), "refused")

    def _add_published(self, effect: bus_events.Publish) -> None:
        command, target = decode_command(effect.envelope.body), effect.envelope.target
        whom = "all" if target.replicas is None else format_replicas(target.replicas)
        summary = CommandSummary(seq=effect.seq, at_ns=self._fleet.now_ns, text=describe(command), target=whom)
        self.report.commands += 1
        self._steps.add(command, summary, self._unsynced_title())
        self._open[effect.seq] = summary, self._at_us
        if isinstance(command, WeightSync):
            self._fleet.sync_published(command)

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
        if any(_left_open(outcome) for outcome in report.outcomes):  # its latencies are of a previous trainer's clock
            summary.duration_us = max(0, self._fleet.now_ns - summary.at_ns) // 1000
        else:
            latencies = [outcome.latency_us for outcome in report.outcomes]
            summary.duration_us = max(latencies, default=max(0, self._at_us - since_us))
        self._add_acted(report, summary)
        if not isinstance(report.command, EpochStart):  # it is published before anybody can have joined
            self._add_stragglers(report)
            self._add_failures(report, summary)

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
            latencies = self.report.latencies.setdefault(command_kind(report.command), LatencyHistogram())
            latencies.add(outcome.latency_us)

    def _add_failures(self, report: Report, summary: CommandSummary) -> None:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for outcome in report.outcomes:
            conclusion = outcome.conclusion
            if is_trouble(conclusion):
                message = conclusion.message if isinstance(conclusion, Failed) else ""
                groups.setdefault((*kind_and_reason(conclusion), message), []).append(outcome.agent)
                self._fleet.note_failure(outcome.agent, conclusion)
                if isinstance(conclusion, Missing):
                    self._engines.note_missing(outcome.agent, summary.seq)
        for (kind, reason, message), agents in groups.items():
            failure = FailureGroup(
                seq=summary.seq,
                at_ns=summary.at_ns,
                text=summary.text,
                kind=kind,
                reason=reason,
                message=message if len(message) <= MAX_TEXT else f"{message[:MAX_TEXT]}… ({len(message)} characters)",
                agents=format_agents(agents, 64),
                names=tuple(sorted(agents, key=agent_order)[:8]),
                count=len(agents),
            )
            self.keep(self.report.failures, failure, "failures")

    def _add_stragglers(self, report: Report) -> None:
        for outcome in report.outcomes:
            if isinstance(outcome.conclusion, Missing) and not _left_open(outcome):
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


class _Steps:
    """Groups commands into steps, and keeps the newest and the bad ones. `dropped` counts commands."""

    def __init__(self) -> None:
        self.dropped = 0
        self._current = StepSummary()
        self._recent: deque[StepSummary] = deque()
        self._recent_commands = 0
        self._old_bad: list[StepSummary] = []

    def add(self, command: Command | UnknownCommand, summary: CommandSummary, title: str) -> None:
        """Add a command. Ends the step first, with this title, if it is full or another step is profiled now."""
        starts = command.step if isinstance(command, ProfileCommand) and command.action == "start" else None
        profiles_another = starts is not None and self._current.profiled and starts not in self._current.profiled
        if len(self._current.commands) >= MAX_STEP_COMMANDS or profiles_another:
            self.end(title)
        self._current.commands.append(summary)
        if starts is not None and starts not in self._current.profiled:
            self._current.profiled.append(starts)

    def end(self, title: str, flawed: bool = False) -> None:
        """End the step."""
        step, self._current = self._current, StepSummary()
        step.title, step.flawed = title, flawed
        if not step.commands:
            return
        self._recent.append(step)
        self._recent_commands += len(step.commands)
        while self._recent_commands > MAX_COMMANDS and len(self._recent) > 1:
            oldest = self._recent.popleft()
            self._recent_commands -= len(oldest.commands)
            if oldest.bad and len(self._old_bad) < MAX_FAILURES:
                self._old_bad.append(oldest)
            else:
                self.dropped += len(oldest.commands)

    def kept(self) -> list[StepSummary]:
        """Return the steps that are kept, in order."""
        return [*self._old_bad, *self._recent]


class _Engines:
    """What the agents' own records tell about their engines. `calls` has the latencies of engine calls."""

    def __init__(self, fleet: FleetHistory) -> None:
        self.calls: dict[str, LatencyHistogram] = {}
        self._fleet = fleet
        self._seen: dict[str, Observation] = {}
        self._in_flight: dict[str, tuple[int, str, int]] = {}  # by agent: id, name and start (ms) of the call
        self._after_failure: dict[tuple[str, int], str] = {}  # by agent and seq

    def add(self, entry: LogEntry) -> None:
        """Add an agent's record. Most are not decoded: they neither observe, nor call, nor fail."""
        effects_bytes = bytes(entry.effects)
        if entry.kind in ("command", "head", "tick") and not any(
            word in effects_bytes for word in (b"perform", b"failed")
        ):
            return
        event: Event = entry.typed_event()  # type: ignore[assignment]
        effects: tuple[Effect, ...] = entry.typed_effects()  # type: ignore[assignment]
        agent = entry.agent
        if isinstance(event, Started):
            self._seen.pop(agent, None)
            self._in_flight.pop(agent, None)
        elif isinstance(event, EngineReturned):
            call_id, name, since_ms = self._in_flight.pop(agent, (0, "", 0))
            if call_id == event.call_id:
                self.calls.setdefault(name, LatencyHistogram()).add((event.at_ms - since_ms) * 1000)
        seen = event.observation if isinstance(event, EngineReturned | EngineObserved) else None
        if seen is not None:
            self._fleet.observed(agent, seen)
            self._seen[agent] = seen
        for effect in effects:
            if isinstance(effect, Perform):
                self._in_flight[agent] = effect.call_id, str(effect.call.__struct_config__.tag), event.at_ms
            elif isinstance(effect, Answer) and isinstance(effect.outcome, Failed) and agent in self._seen:
                self._note(agent, effect.seq, f"then held: {format_observation(self._seen[agent])}")

    def note_missing(self, agent: str, seq: int) -> None:
        """An agent did not answer a command: note when it was last heard."""
        self._note(agent, seq, self._fleet.last_heard(agent))

    def after_failure(self, failure: FailureGroup) -> tuple[tuple[str, str], ...]:
        """Return the state of the engines after a failure, by agent."""
        texts = ((name, self._after_failure.get((name, failure.seq), "")) for name in failure.names)
        return tuple((name, text) for name, text in texts if text)

    def _note(self, agent: str, seq: int, text: str) -> None:
        if len(self._after_failure) < MAX_ENGINES:
            self._after_failure[agent, seq] = text


def _left_open(outcome: AgentOutcome) -> bool:
    """Whether the trainer ended before the agent answered, so that nobody waited for it."""
    return isinstance(outcome.conclusion, Missing) and outcome.conclusion.reason == "bus_restarted"
