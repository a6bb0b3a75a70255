"""A run's report, its parts, and their wording. Pure.

Times are the bus's wall clock in ns. Durations are of its monotonic clock in µs.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field

from controlplane.analysis.findings import OBSERVED, ObservedReplica, Violation
from controlplane.report.fleet_history import AgentHistory, Quarantine, ReplicaHistory
from controlplane.report.game_day import InjectedFault
from schemas.formatting import agent_order, format_agents, kind_and_reason
from schemas.identity import identity_of
from schemas.outcomes import Trace
from schemas.reports import AgentOutcome, Stopped

MAX_STRAGGLERS = 20


class OutcomeGroup(Struct, frozen=True, kw_only=True):
    """Agents whose outcome of a command has the same kind (acted, skipped, failed, missing) and reason."""

    kind: str
    reason: str
    agents: str
    count: int


class CommandSummary(Struct, kw_only=True):
    """One command.

    Attributes:
        duration_us: From publishing to the last answer.
        traces: The first of its traces; `traces_count` and `traces_nbytes` count all.
        untraced: Global ranks that left no trace, and should have.
        hooks: Agents whose finish hook was still running.
    """

    seq: int
    at_ns: int
    text: str
    target: str
    version: int = 0
    concluded: bool = False
    duration_us: int = 0
    outcomes: tuple[OutcomeGroup, ...] = ()
    traces: tuple[Trace, ...] = ()
    traces_count: int = 0
    traces_nbytes: int = 0
    untraced: tuple[int, ...] = ()
    hooks: str = ""

    @property
    def bad(self) -> bool:
        """Whether an agent failed or is missing, or the command has no report."""
        return not self.concluded or any(group.kind in ("failed", "missing") for group in self.outcomes)


class SampleSummary(Struct, kw_only=True):
    """Samples that were as many versions behind.

    Attributes:
        accepted, refused: Sequences.
        tokens: Those of both.
        unproven: Tokens of weights that were not proven.
    """

    accepted: int = 0
    refused: int = 0
    tokens: int = 0
    unproven: int = 0


class StepSummary(Struct, kw_only=True):
    """Commands between the ends of two weight syncs.

    Attributes:
        profiled: Training steps with a profiling session.
        flawed: The sync was aborted, or left a replica out.
        shown: The page shows its commands unasked: a cause began here, or a command was not concluded.
    """

    title: str = ""
    commands: list[CommandSummary] = []
    profiled: list[int] = []
    flawed: bool = False
    shown: bool = False

    @property
    def bad(self) -> bool:
        """Whether the sync or one of the commands went wrong."""
        return self.flawed or any(command.bad for command in self.commands)


class Cause(Struct, kw_only=True):
    """Why outcomes failed or are missing: one cause for all agents and commands that it concerns.

    Attributes:
        kind: `lost` if agents went away; else `failed` or `missing`.
        at_ns: When the first agent was lost, or the first command published.
        until_ns: When the last agent was lost, or the last command concluded.
        seq, text: Of its first command; 0 and empty if there is none. `last_seq` is the newest.
        members: The agents; `hosts` theirs, if lost.
        returned_ns: By agent that was lost, when it was in the fleet again.
        syncs: Replica and version, for each sync that one of the agents did not follow.
        quarantines: Of replicas that it put out of service.
    """

    kind: str
    reason: str
    message: str = ""
    at_ns: int
    until_ns: int = 0
    seq: int = 0
    last_seq: int = 0
    text: str = ""
    commands: Counter[str] = field(default_factory=Counter)
    outcomes: int = 0
    members: set[str] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    returned_ns: dict[str, int] = {}
    syncs: set[tuple[int, int]] = field(default_factory=set)
    quarantines: list[Quarantine] = []

    @property
    def agents(self) -> str:
        return format_agents(self.members, 64)

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def away(self) -> list[str]:
        """Agents that were lost and did not come back."""
        return sorted(self.members - self.returned_ns.keys(), key=agent_order) if self.kind == "lost" else []

    def add(self, agent: str, command: CommandSummary, kind: str, now_ns: int) -> None:
        """Add an agent's outcome of a command. Those of one command follow each other."""
        self.members.add(agent)
        if not self.outcomes:
            self.seq, self.text = command.seq, command.text
        if self.last_seq != command.seq:
            self.commands[kind] += 1
        self.last_seq = command.seq
        self.outcomes += 1
        if self.kind != "lost":
            self.until_ns = max(self.until_ns, now_ns)
        if command.version:
            self.syncs.add((identity_of(agent).replica, command.version))

    def absorb(self, other: "Cause") -> None:
        """Add all of another cause. Its commands are those of this one, or none of them is."""
        if not self.outcomes:
            self.seq, self.text = other.seq, other.text
        if (self.seq, self.last_seq) != (other.seq, other.last_seq):
            self.commands += other.commands
        self.outcomes += other.outcomes
        self.last_seq, self.until_ns = max(self.last_seq, other.last_seq), max(self.until_ns, other.until_ns)
        self.members |= other.members
        self.syncs |= other.syncs


class Refusal(Struct, kw_only=True):
    """Commands that were refused, or syncs aborted, for the same reason: first and last moment, and how many."""

    reason: str
    at_ns: int
    until_ns: int
    count: int = 0


class Latencies:
    """Latencies in µs: eight bytes for each."""

    def __init__(self) -> None:
        self.values = array("q")

    def percentile(self, percent: int) -> int:
        """Return the smallest value that `percent` of all do not exceed."""
        return sorted(self.values)[-(-len(self.values) * percent // 100) - 1]


class Straggler(Struct, kw_only=True):
    """How one agent kept the others waiting.

    Attributes:
        last: On how many commands it was the last of several agents to act.
        behind_us: How much later than their median it was then, in all.
        worst_us, worst_seq: The worst of these, and its command.
    """

    agent: str
    last: int = 0
    behind_us: int = 0
    worst_us: int = 0
    worst_seq: int = 0
    missing: int = 0


class RunReport(Struct, kw_only=True):
    """What the page shows.

    Attributes:
        untraced: Commands after which a rank lacked its trace.
        dropped: Commands of older steps, which are not kept.
        unreadable: Records after the damage that could not be read either.
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
    dropped: int = 0
    unreadable: int = 0
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
        return [agent for agent in self.agents if agent.losses]

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
        aborted, broken = sum(item.count for item in self.aborted), len(self.broken)
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
            "refused by the bus": sum(refusal.count for refusal in self.refused),
            "found in the observed run": len(self.findings),
            "broken invariant" if broken == 1 else "broken invariants": broken,
            "damaged": int(bool(self.damage)),
        }
        return ", ".join(f"{count:,} {text}" for text, count in amounts.items() if count) or "nothing failed"


def group_by_reason(outcomes: Iterable[AgentOutcome]) -> tuple[OutcomeGroup, ...]:
    """Group the outcomes of a command by kind and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(kind_and_reason(outcome.conclusion), []).append(outcome.agent)
    return tuple(
        OutcomeGroup(kind=kind, reason=reason, agents=format_agents(agents), count=len(agents))
        for (kind, reason), agents in sorted(groups.items())
    )


def rank_stragglers(stragglers: Iterable[Straggler]) -> list[Straggler]:
    """Return the worst first: those that never answered, then those that kept the others waiting for longest."""
    ranked = sorted(stragglers, key=lambda item: (-item.missing, -item.behind_us, -item.last, agent_order(item.agent)))
    return ranked[:MAX_STRAGGLERS]
