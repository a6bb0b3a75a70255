"""What a run cost: adds up the decisions of a simulated run, or of a recorded one, in the same way."""

from collections import Counter
from typing import Literal

from msgspec import Struct

from controlplane.machine.events import Conclude, CoordinatorEffects, CoordinatorEvent, SyncRequested
from controlplane.report.model import Latencies
from schemas.commands import AdapterSync, WeightSync
from schemas.events import CommandReceived, Event, Pause, Sleep
from schemas.reports import SyncReport
from workers.machine.state import AgentState

Condition = Literal["serves", "paused", "quarantined", "down"]
"""What a replica does, as its agent believes. Only one that `serves` generates."""


class RunCosts(Struct, frozen=True, kw_only=True):
    """What a run cost. A column of docs/simulate.md each: `hours` of the run, GPU-hours, and seconds of a sync."""

    hours: float
    syncs: int
    aborted: int
    left_out: float
    sync_p50: float
    sync_p99: float
    behind: float
    gpu_hours: float
    paused: float
    quarantined: float
    down: float

    @property
    def lost(self) -> float:
        """GPU-hours in which nothing was generated."""
        return self.paused + self.quarantined + self.down

    @property
    def lost_share(self) -> float:
        """The same as a share of all GPU-hours."""
        return self.lost / self.gpu_hours if self.gpu_hours else 0.0


class CostCounter:
    """Follows a run, from its first sync to its last.

    Attributes:
        replicas: By their agents' names: those of which the agent has got a command of a sync.
    """

    def __init__(self) -> None:
        self._begun_us: int | None = None
        self._ended_us = 0
        self._requests: dict[int, int] = {}  # by ticket: when its sync was requested (µs)
        self._times = Latencies()
        self._aborted = self._left_out = self._behind = self._behind_sum = 0
        self.replicas: dict[str, _Replica] = {}

    @property
    def syncs(self) -> int:
        return len(self._times.values)

    def decided_by_bus(self, event: CoordinatorEvent, effects: CoordinatorEffects) -> None:
        if isinstance(event, SyncRequested):
            self._begun_us = event.at_us if self._begun_us is None else self._begun_us
            self._requests[event.ticket] = event.at_us
        for effect in effects:
            if isinstance(effect, Conclude) and isinstance(effect.report, SyncReport):
                self.add_sync(self._requests.pop(effect.ticket or 0, event.at_us), event.at_us, effect.report)

    def add_sync(self, since_us: int, at_us: int, report: SyncReport | None = None) -> None:
        """Add a sync that has ended; one without a report if nothing failed in it."""
        self._ended_us = at_us
        self._times.values.append(at_us - since_us)
        aborted = report is not None and report.status == "aborted"
        self._aborted += aborted
        self._left_out += 0 if aborted or report is None else len(report.quarantined) + len(report.unproven)
        self._behind = self._behind + 1 if aborted else 0
        self._behind_sum += self._behind

    def decided_by_agent(self, name: str, event: Event, after: AgentState) -> None:
        """Add a decision of the agent beside an engine."""
        if name in self.replicas:
            self.replicas[name].change(condition_of(after), event.at_ms)
        elif isinstance(event, CommandReceived) and isinstance(event.command, WeightSync | AdapterSync):
            self.replicas[name] = _Replica(after, event.at_ms)

    def finish(self) -> RunCosts:
        """Return the costs of a run with a sync that has ended."""
        length_us = self._ended_us - (self._begun_us or 0)
        spent: Counter[Condition] = Counter()
        for replica in self.replicas.values():
            for condition, spent_ms in replica.up_to(length_us // 1000).items():
                spent[condition] += replica.gpus * spent_ms
        return RunCosts(
            hours=length_us / 3.6e9,
            syncs=self.syncs,
            aborted=self._aborted,
            left_out=self._left_out / max(1, self.syncs - self._aborted),
            sync_p50=self._times.percentile(50) / 1e6,
            sync_p99=self._times.percentile(99) / 1e6,
            behind=self._behind_sum / self.syncs,
            gpu_hours=spent.total() / 3.6e6,
            paused=spent["paused"] / 3.6e6,
            quarantined=spent["quarantined"] / 3.6e6,
            down=spent["down"] / 3.6e6,
        )


class _Replica:
    """What one replica did, for how long."""

    def __init__(self, state: AgentState, at_ms: int) -> None:
        self.gpus = state.identity.nnodes * state.identity.gpus_per_node
        self.spent_ms: Counter[Condition] = Counter()
        self._condition, self._since_ms = condition_of(state), at_ms

    def change(self, condition: Condition, at_ms: int) -> None:
        """Count the time up to now: from now on it does that."""
        self.spent_ms[self._condition] += max(0, at_ms - self._since_ms)  # another boot of its node has another clock
        self._condition, self._since_ms = condition, at_ms

    def up_to(self, length_ms: int) -> Counter[Condition]:
        """Return how long it did what in a run of this length: since its last decision it goes on as it did."""
        return self.spent_ms + Counter({self._condition: length_ms - self.spent_ms.total()})


def condition_of(state: AgentState) -> Condition:
    """Return what the replica of an agent in this state does."""
    engine, activity = state.engine, state.activity
    if engine.tokenizer != "present":
        return "down"
    pausing = activity is not None and isinstance(activity.calls[0], Pause | Sleep)
    if engine.generating is not False and not engine.asleep and not pausing:
        return "serves"
    out = state.desired.quarantined or state.suppressed.quarantined
    return "quarantined" if out else "paused"
