"""The parts of a run's report, and their wording. Pure.

Times are the bus's wall clock in ns. Durations are of its monotonic clock in µs.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from msgspec import Struct

from schemas.commands import Command, ProfileCommand, WeightSync
from schemas.formatting import agent_order, describe, format_agents, kind_and_reason
from schemas.outcomes import Trace
from schemas.reports import AgentOutcome

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
        concluded: Its report is in the log.
        duration_us: From publishing to the last answer.
        traces: The first of its traces; `traces_count` and `traces_nbytes` count all.
        untraced: Global ranks that left no trace, and should have.
        hooks: Agents whose finish hook was still running.
    """

    seq: int
    at_ns: int
    text: str
    target: str
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


class StepSummary(Struct, kw_only=True):
    """Commands between the ends of two weight syncs.

    Attributes:
        title: What they led to.
        profiled: Training steps with a profiling session.
        flawed: The sync was aborted, or left a replica out.
    """

    title: str = ""
    commands: list[CommandSummary] = []
    profiled: list[int] = []
    flawed: bool = False

    @property
    def bad(self) -> bool:
        """Whether the sync or one of the commands went wrong."""
        return self.flawed or any(command.bad for command in self.commands)


class FailureGroup(Struct, kw_only=True):
    """Agents that failed a command in the same way, or did not answer it.

    Attributes:
        kind: failed or missing.
        names: The first of the agents; `agents` is their text, and `count` counts all.
        engines: By agent, the state of its engine right after the failure.
    """

    seq: int
    at_ns: int
    text: str
    kind: str
    reason: str
    message: str
    agents: str
    names: tuple[str, ...]
    count: int
    engines: tuple[tuple[str, str], ...] = ()


class LatencyHistogram:
    """Latencies in µs, counted in 64 buckets per power of two: a million of them need no more memory than ten.

    A percentile is at most 1.6 % too high; `largest` is exact.
    """

    def __init__(self) -> None:
        self.count = self.largest = 0
        self._buckets: Counter[int] = Counter()

    def add(self, value: int) -> None:
        """Count a latency."""
        shift = max(0, value.bit_length() - 7)
        self._buckets[((value >> shift) + 1 << shift) - 1] += 1
        self.count += 1
        self.largest = max(self.largest, value)

    def percentile(self, percent: int) -> int:
        """Return the smallest value that `percent` of all do not exceed."""
        uppers = sorted(self._buckets)
        counts = list(accumulate(self._buckets[upper] for upper in uppers))
        return min(self.largest, uppers[bisect_left(counts, self.count * percent / 100)])


class Straggler(Struct, kw_only=True):
    """How one agent kept the others waiting.

    Attributes:
        last: On how many commands it was the last of several agents to act.
        behind_us: How much later than their median it was then, in all.
        worst_us, worst_seq: The worst of these, and its command.
        missing: Commands that it never answered.
    """

    agent: str
    last: int = 0
    behind_us: int = 0
    worst_us: int = 0
    worst_seq: int = 0
    missing: int = 0


def group_by_reason(outcomes: Iterable[AgentOutcome]) -> tuple[OutcomeGroup, ...]:
    """Group the outcomes of a command by kind and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        groups.setdefault(kind_and_reason(outcome.conclusion), []).append(outcome.agent)
    return tuple(
        OutcomeGroup(kind=kind, reason=reason, agents=format_agents(agents), count=len(agents))
        for (kind, reason), agents in sorted(groups.items())
    )


def command_kind(command: Command) -> str:
    """Return the kind of a command: latencies of the same kind are counted together."""
    match command:
        case WeightSync():
            return f"weights {command.phase}"
        case ProfileCommand():
            return f"profile {command.action}"
        case _:
            return describe(command)


def rank_stragglers(stragglers: Iterable[Straggler]) -> list[Straggler]:
    """Return the worst first: those that never answered, then those that kept the others waiting for longest."""
    ranked = sorted(stragglers, key=lambda item: (-item.missing, -item.behind_us, -item.last, agent_order(item.agent)))
    return ranked[:MAX_STRAGGLERS]
