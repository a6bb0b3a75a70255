"""Adds up what came of the commands of a run: outcomes, latencies, failures, stragglers, steps. Pure.

Memory grows with the number of agents and commands, and by eight bytes for each answer: equal outcomes are one group,
and every list has a maximum and a count of what is left out.

Times are the bus's wall clock in ns. Durations are of its monotonic clock in µs.
"""

from collections import Counter, deque
from typing import Final, Literal, TypeVar

from msgspec import Struct, field

from controlplane.analysis.findings import OBSERVED, ObservedReplica
from controlplane.analysis.invariants import Violation
from controlplane.machine.events import PROVEN, SamplesCounted
from controlplane.machine.provenance import mean_staleness
from controlplane.report.fleet_history import AgentHistory, Quarantine, ReplicaHistory
from controlplane.report.game_day import InjectedFault
from controlplane.report.model import (
    Cause,
    CommandSummary,
    Latencies,
    Refusal,
    SampleSummary,
    StepSummary,
    Straggler,
    group_by_reason,
    rank_stragglers,
)
from schemas.commands import Command, EpochStart, ProfileCommand, UnknownCommand
from schemas.formatting import command_kind, format_agents, without_numbers
from schemas.outcomes import Acted, Missing
from schemas.reports import AgentOutcome, Report, Stopped

MAX_COMMANDS: Final = 6_000
"""The newest commands are kept; older steps only if something went wrong in them."""
MAX_STEP_COMMANDS: Final = 200
"""Commands per step. Fleets whose weights are never synced have steps, too."""
MAX_FAILURES: Final = 400
MAX_TRACES: Final = 64
"""Traces per command."""


T = TypeVar("T")


class RunReport(Struct, kw_only=True):
    """What the page shows.

    Attributes:
        untraced: Commands after which a rank lacked its trace.
        left_out: What was counted and not kept.
        samples: By how many versions they were behind; None where that is not known.
        staleness: Training step, and how many versions its tokens were behind on average, of the newest steps.
        unexplained: Quarantines that belong to none of the causes.
        aborted: Weight syncs that were aborted, those for the same reason together.
        stopped: Replicas that a command kept from generating at the end of the log.
        observed: Replicas of a run that another trainer drives, by index.
        faults: What agents did wrong on purpose, on a game day.
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
    causes: list[Cause] = []
    refused: list[Refusal] = []
    aborted: list[Refusal] = []
    stopped: tuple[Stopped, ...] = ()
    violations: list[Violation] = []
    untraced: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    damage: str = ""
    samples: dict[int | None, SampleSummary] = {}
    staleness: list[tuple[int, float]] = []
    agents: list[AgentHistory] = []
    quarantines: list[Quarantine] = []
    unexplained: list[Quarantine] = []
    unconcluded: list[CommandSummary] = []
    steps: list[StepSummary] = []
    latencies: dict[str, Latencies] = {}
    calls: dict[str, Latencies] = {}
    stragglers: list[Straggler] = []
    replicas: dict[int, ReplicaHistory] = {}
    observed: dict[int, ObservedReplica] = {}
    faults: list[InjectedFault] = []

    @property
    def broken(self) -> list[Violation]:
        """Invariants of every run that do not hold."""
        return [violation for violation in self.violations if violation.invariant not in OBSERVED]

    @property
    def findings(self) -> list[Violation]:
        """What went wrong in a run that was only observed."""
        return [violation for violation in self.violations if violation.invariant in OBSERVED]

    @property
    def out_now(self) -> list[Quarantine]:
        """Replicas that are out of service at the end of the log."""
        return [quarantine for quarantine in self.quarantines if quarantine.until_ns is None]

    @property
    def gone_now(self) -> list[AgentHistory]:
        """Agents that are lost at the end of the log."""
        return [agent for agent in self.agents if agent.member.state == "gone"]

    @property
    def stopped_by_hand(self) -> list[Stopped]:
        """Replicas that an operator had stopped and that were not resumed by the end of the log."""
        return [stop for stop in self.stopped if stop.operator]

    @property
    def unready(self) -> list[AgentHistory]:
        """Agents in the fleet at the end of the log whose engines are not as desired."""
        return [agent for agent in self.agents if agent.unready]

    @property
    def unseen(self) -> list[AgentHistory]:
        """Agents that are gone at the end of the log, and whose loss it does not have."""
        seen = {agent for cause in self.causes for agent in cause.away}
        return [agent for agent in self.gone_now if agent.agent not in seen]

    @property
    def lost(self) -> list[AgentHistory]:
        """Agents that were ever lost."""
        return [agent for agent in self.agents if agent.losses_count]

    @property
    def tone(self) -> Literal["bad", "warn", "ok"]:
        """bad: something is wrong at the end, or can't be trusted. warn: something was wrong, or is not finished."""
        if self.out_now or self.gone_now or self.violations or self.damage:
            return "bad"
        wrong = self.causes or self.quarantines or self.lost or self.refused or self.untraced or self.aborted
        return "warn" if wrong or self.unconcluded or self.unready or self.stopped_by_hand else "ok"

    @property
    def verdict(self) -> str:
        """The run in one line."""
        unanswered = sum(cause.outcomes for cause in self.causes if cause.kind == "lost")
        aborted = sum(item.count for item in self.aborted) + self.left_out["aborted"]
        broken = len(self.broken) + self.left_out["violations"]
        amounts = {
            "failed": self.counts["failed"],
            "missing": self.counts["missing"] - unanswered,
            "out of service": len(self.out_now),
            "temporarily quarantined": len(self.quarantines) - len(self.out_now),
            "gone": len(self.gone_now),
            "temporarily lost": sum(agent.member.state != "gone" for agent in self.lost),
            "not answered by lost agents": unanswered,
            "not ready": len(self.unready),
            "not concluded": len(self.unconcluded),
            "stopped by an operator": sum(len(stop.replicas) for stop in self.stopped_by_hand),
            "weight sync aborted" if aborted == 1 else "weight syncs aborted": aborted,
            "without a trace": self.untraced,
            "refused by the bus": sum(refusal.count for refusal in self.refused) + self.left_out["refused"],
            "found in the observed run": len(self.findings),
            "broken invariant" if broken == 1 else "broken invariants": broken,
            "damaged": int(bool(self.damage)),
        }
        return ", ".join(f"{count:,} {text}" for text, count in amounts.items() if count) or "nothing failed"


class Totals:
    """Fills a report with commands and what came of them; `finish` adds what is known only at the end."""

    def __init__(self, report: RunReport) -> None:
        self._report = report
        self._steps = _Steps()
        self._open: dict[int, tuple[CommandSummary, int]] = {}  # by seq: the command, and when it was published (µs)
        self._stragglers: dict[str, Straggler] = {}
        self._alike: dict[tuple[str, str], Refusal] = {}  # by kind, and by reason without its numbers

    def keep(self, kept: list[T], item: T, what: str) -> None:
        """Append an item, or count it as left out."""
        if len(kept) < MAX_FAILURES:
            kept.append(item)
        else:
            self._report.left_out[what] += 1

    def refused(self, reason: str, now_ns: int) -> None:
        """Add a command that was not published."""
        self._add_alike(self._report.refused, "refused", reason, now_ns)

    def aborted(self, headline: str, now_ns: int) -> None:
        """Add a weight sync that was aborted."""
        self._add_alike(self._report.aborted, "aborted", headline, now_ns)

    def counted(self, event: SamplesCounted) -> None:
        """Add samples that the trainer judged."""
        if (mean := mean_staleness(event)) is not None:
            self._report.staleness = [*self._report.staleness[1 - MAX_COMMANDS :], (event.step, mean)]
        for count in event.counts:
            summary = self._report.samples.setdefault(count.staleness, SampleSummary())
            summary.accepted += count.sequences * count.accepted
            summary.refused += count.sequences * (not count.accepted)
            summary.tokens += count.tokens
            summary.unproven += count.tokens * (count.proof not in PROVEN)

    def _add_alike(self, kept: list[Refusal], kind: str, reason: str, now_ns: int) -> None:
        """Add what went wrong to others that did for the same reason."""
        key = kind, without_numbers(reason)
        if key in self._alike:
            self._alike[key].count += 1
            self._alike[key].until_ns = now_ns
        elif len(kept) < MAX_FAILURES:
            self._alike[key] = Refusal(reason=reason, at_ns=now_ns, until_ns=now_ns)
            kept.append(self._alike[key])
        else:
            self._report.left_out[kind] += 1

    def published(self, command: Command | UnknownCommand, summary: CommandSummary, at_us: int, title: str) -> None:
        """Add a command. `title` is that of the step before, should this one begin another."""
        self._report.commands += 1
        self._steps.add(command, summary, title)
        self._open[summary.seq] = summary, at_us

    def end_step(self, title: str, flawed: bool = False) -> None:
        """End the step: what its commands led to is its title."""
        self._steps.end(title, flawed)

    def concluded(self, report: Report, now_ns: int, at_us: int) -> CommandSummary | None:
        """Add the report of a command; return the command, or None if the log does not have it."""
        summary, since_us = self._open.pop(report.seq, (None, 0))
        if summary is None:
            return None  # violates I5, which `verify` reports
        summary.concluded = True
        summary.outcomes = group_by_reason(report.outcomes)
        for group in summary.outcomes:
            self._report.counts[group.kind] += group.count
        if any(_left_open(outcome) for outcome in report.outcomes):  # its latencies are of a previous trainer's clock
            summary.duration_us = max(0, now_ns - summary.at_ns) // 1000
        else:
            latencies = [outcome.latency_us for outcome in report.outcomes]
            summary.duration_us = max(latencies, default=max(0, at_us - since_us))
        self._add_acted(report, summary)
        if not isinstance(report.command, EpochStart):  # it is published before any agent can have joined
            self._add_stragglers(report)
        return summary

    def finish(self) -> None:
        """Add what is known only at the end."""
        self._report.steps, self._report.left_out["commands"] = self._steps.kept(), self._steps.dropped
        self._report.unconcluded = [summary for summary, _ in self._open.values()]
        first_seqs = {cause.seq for cause in self._report.causes}
        for step in self._report.steps:
            step.shown = any(command.seq in first_seqs or not command.concluded for command in step.commands)
        self._report.stragglers = rank_stragglers(self._stragglers.values())

    def _add_acted(self, report: Report, summary: CommandSummary) -> None:
        acted = [(outcome, outcome.conclusion) for outcome in report.outcomes if isinstance(outcome.conclusion, Acted)]
        traces = [trace for _, conclusion in acted for trace in conclusion.traces]
        summary.traces, summary.traces_count = tuple(traces[:MAX_TRACES]), len(traces)
        summary.traces_nbytes = sum(trace.nbytes for trace in traces)
        untraced = {rank for _, conclusion in acted for rank in conclusion.ranks_without_trace}
        summary.untraced = tuple(sorted(untraced))
        self._report.untraced += bool(untraced)
        summary.hooks = format_agents(outcome.agent for outcome, conclusion in acted if conclusion.still_running)
        for outcome, _ in acted:
            latencies = self._report.latencies.setdefault(command_kind(report.command), Latencies())
            latencies.values.append(outcome.latency_us)

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


def _left_open(outcome: AgentOutcome) -> bool:
    """Whether the trainer ended before the agent answered, so that it was not waited for."""
    return isinstance(outcome.conclusion, Missing) and outcome.conclusion.reason == "bus_restarted"
