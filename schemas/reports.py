"""What the bus tells a trainer or an operator: the report of a command or a sync, and the state of the fleet.

Reports and the fleet's status print as a few lines (`schemas.formatting`).
"""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from schemas.agent_status import AgentStatus, RequestCounts
from schemas.commands import Command, EpochStart
from schemas.errors import CommandFailed
from schemas.formatting import (
    Line,
    Printable,
    agent_order,
    count_outcomes,
    describe,
    format_agents,
    format_clock,
    format_duration,
    format_replicas,
    group_outcomes,
    is_trouble,
)
from schemas.identity import ROLLOUT, Count, Label, Name, Nanoseconds, Positive, Text, identity_of
from schemas.outcomes import BY_DELTA, Acted, Conclusion, Failed, Missing, Reason, Skipped


class AdapterStatus(Struct, frozen=True, kw_only=True):
    """The newest committed version of a LoRA adapter: what to name in a request, and where.

    Attributes:
        name: Of the adapter.
        version: The version.
        model: What engines call it: what a request names as its model.
        path: Its directory below the checkpoint root.
        replicas: Those that serve and are proven to hold it.
        oldest: The oldest version whose files a replica may still read.
    """

    name: Name
    version: Positive
    model: Name
    path: Text
    replicas: tuple[Count, ...]
    oldest: Count

    @property
    def line(self) -> str:
        """It in one line."""
        where = format_replicas(self.replicas) if self.replicas else "no replica"
        return f"{self.name} v{self.version} ({self.model}) on {where}"


class AgentLine(Struct, frozen=True, gc=False, kw_only=True):
    """One agent in `rolloutctl status`.

    Attributes:
        agent: Its place.
        incarnation: Which life of its process this is.
        host: Name of its node.
        state: joining, live, gone or left.
        silent_ms: Time since the last message; 0 for an agent that is gone.
        seq: Last command that it applied.
        status: Its newest heartbeat; None before the first.
        waits_for: Commands that it has not answered yet.
        away_ms: How long it has been away; 0 if it is live.
        serving: On node rank 0, the version that its replica is proven to serve; None if it is not proven to serve.
        latency_us: From publishing a command to the arrival of its newest answer; None if it has not answered lately.
        call_ms: How long the engine call in flight has taken; None if none is, or if its clock is not known yet.
        requests: How many its engine had, up to three heartbeats ago; None if it does not say.
        newer: What the bus knows of it that `status`, which is as old as the newest heartbeat, does not say.
    """

    agent: Name
    incarnation: Name
    host: Name
    state: Name
    silent_ms: Count
    seq: Count
    status: AgentStatus | None
    waits_for: tuple[Text, ...] = ()
    away_ms: Count = 0
    serving: Count | None = None
    latency_us: Count | None = None
    call_ms: Count | None = None
    requests: RequestCounts | None = None
    newer: Text = ""

    @property
    def in_flight(self) -> str:
        """The engine call in flight and its duration, after a semicolon: `; in load for 42 s`. Empty if unknown."""
        if self.call_ms is None or self.status is None or self.newer:
            return ""
        return f"; in {self.status.activity} for {format_duration(self.call_ms)}"

    @property
    def condition(self) -> str:
        """What the agent is doing, in a few words; of one that is gone, what it was doing."""
        away = f" for {format_duration(self.away_ms)}" if self.away_ms else ""
        if self.state == "left":
            return f"left{away}"
        identity = identity_of(self.agent)
        if self.status is None:
            return f"gone{away}" if self.state == "gone" else "no heartbeat yet"
        condition = self.status.condition(identity.role)
        if self.newer:
            return self.newer if self.serving is not None else f"{self.newer} (was {condition})"
        if self.state != "gone":
            return condition
        earlier = f"a healthy follower, node rank {identity.node_rank}" if condition == "follower" else condition
        return f"gone{away} (was {earlier})"

    @property
    def in_trouble(self) -> bool:
        """Whether the agent is out of the fleet without having left, or not fit to serve."""
        if self.state not in ("joining", "live"):
            return self.state == "gone"
        status = self.status if self.serving is None else None
        return status is not None and (not (status.ready or status.held) or status.torn or status.quarantined > 0)

    @property
    def busy(self) -> bool:
        """Whether an engine call is in flight."""
        return self.state == "live" and self.status is not None and bool(self.status.activity)

    @property
    def urgency(self) -> tuple[object, ...]:
        """Sort key: agents that are away, then those in trouble, then the others."""
        return self.state == "live", not self.in_trouble, agent_order(self.agent)


class ReplicaStatus(Struct, frozen=True, kw_only=True):
    """One replica in `FleetStatus.replicas`.

    Attributes:
        agents: By node rank.
    """

    agents: tuple[AgentLine, ...]

    @property
    def serving(self) -> int | None:
        """The version that it is proven to serve at the moment of the status; None if it is not proven to serve."""
        return self._primary.serving if self._primary is not None else None

    @property
    def version(self) -> int | None:
        """The version that it holds: the one that it serves, else the one of its last heartbeat; None if unknown."""
        if self.serving is not None:
            return self.serving
        status = self._primary.status if self._primary is not None else None
        return status.version if status is not None and status.observed is None else None

    @property
    def state(self) -> str:
        """`serving`, else what its primary is doing, in a few words."""
        if self._primary is None:
            return "its primary (node rank 0) has not joined"
        return "serving" if self.serving is not None else self._primary.condition

    @property
    def _primary(self) -> AgentLine | None:
        return next((line for line in self.agents if identity_of(line.agent).node_rank == 0), None)


class RecentFailure(Struct, frozen=True, kw_only=True):
    """A command or a sync that did not succeed, in `FleetStatus.failures`.

    Attributes:
        ago_ms: Time since its end.
        text: What it was, and who failed or is missing.
        times: How often it was seen; others that differ in nothing but numbers are counted with it.
    """

    ago_ms: Count
    text: Text
    times: Positive = 1

    @property
    def line(self) -> str:
        """How long ago it was, what it was, and how often."""
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{format_duration(self.ago_ms)} ago: {self.text}{often}"


class Stopped(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Replicas that do not generate because a command stopped them, in `FleetStatus.stopped` and `SyncReport.stopped`.

    Attributes:
        replicas: By index.
        how: `paused`, or `asleep`, or `paused and asleep`.
        operator: Whether an operator's command did it, and not the trainer's; None if the log no longer has it.
        since_ns: When that was published, by the bus's wall clock.
    """

    replicas: tuple[Count, ...]
    how: Name
    operator: bool | None = None
    since_ns: Nanoseconds = 0

    @property
    def text(self) -> str:
        """Who stopped which replicas, and since when: `replica 2 paused by an operator since 12:04:05 UTC`."""
        who = f"{format_replicas(self.replicas)} {self.how}"
        if self.operator is None:
            return who
        by = "an operator" if self.operator else "the trainer"
        return f"{who} by {by} since {format_clock(self.since_ns)}"


INSECURE: Final = "INSECURE: every program that can reach this bus can command the engines; it has no keys"


class SampleStatus(Struct, frozen=True):
    """Samples that the trainer has judged in this run by the versions that made them.

    Attributes:
        accepted, refused: Sequences.
        behind: By how many versions the tokens of the newest record were behind, on average; None if that is not known.
    """

    accepted: Count = 0
    refused: Count = 0
    behind: float | None = None

    @property
    def line(self) -> str:
        behind = f"; the newest {self.behind:.1f} versions behind" if self.behind is not None else ""
        return f"samples: {self.accepted:,} accepted, {self.refused:,} refused{behind}"


class FleetStatus(Printable, frozen=True, kw_only=True, tag="fleet_status"):
    """Answer to `StatusRequest`.

    Attributes:
        run: Id of the run.
        epoch: Which life of the bus this is.
        seq: Newest command.
        version: Newest committed weights.
        log: Path of the run's log, on the trainer's machine.
        agents: Those of unproven replicas and those that are away come first.
        open: Commands that are not concluded, and which agents they wait for; then a sync that waits for its trainer.
        left_ms: Time until each of `open` is given up; those that are only counted have none.
        insecure: Other machines can reach the bus, and it has no keys: any program on them can command the engines.
        unproven: Replicas that the run knows and that are not proven to hold the committed weights.
        failures: The last ones in this life of the bus, the newest first.
        read_only: The key of who asked may read the status, and not command.
        stopped: Replicas that do not generate because a command stopped them.
        hold_up: Why the bus does not go on, and since when; empty while it does.
        adapters: LoRA adapters that are served.
        samples: Of a trainer that judges them; None for another.
        draining: Replicas that leave the fleet.
    """

    run: Name
    epoch: Count
    seq: Count
    version: Count
    log: Text
    agents: tuple[AgentLine, ...]
    open: tuple[Text, ...] = ()
    insecure: bool = False
    unproven: tuple[Count, ...] = ()
    failures: tuple[RecentFailure, ...] = ()
    read_only: bool = False
    left_ms: tuple[Count, ...] = ()
    stopped: tuple[Stopped, ...] = ()
    hold_up: Text = ""
    adapters: tuple[AdapterStatus, ...] = ()
    samples: SampleStatus | None = None
    draining: tuple[Count, ...] = ()

    @property
    def replicas(self) -> dict[int, ReplicaStatus]:
        """The replicas of the fleet, by index."""
        nodes: dict[int, list[AgentLine]] = {}
        for line in sorted(self.agents, key=lambda line: agent_order(line.agent)):
            identity = identity_of(line.agent)
            if identity.role == ROLLOUT:
                nodes.setdefault(identity.replica, []).append(line)
        return {replica: ReplicaStatus(agents=tuple(lines)) for replica, lines in nodes.items()}

    @property
    def training_ranks(self) -> dict[str, AgentLine]:
        """The training ranks of the fleet, by name: `actor.0`."""
        lines = sorted(self.agents, key=lambda line: agent_order(line.agent))
        return {line.agent: line for line in lines if identity_of(line.agent).role != ROLLOUT}

    def lines(self) -> list[Line]:
        """The run, then agents of the same condition together, those away or in trouble first, then open commands."""
        groups: dict[tuple[bool, str], list[AgentLine]] = {}
        for line in sorted(self.agents, key=lambda line: line.urgency):
            where = f" on {line.host}" if line.in_trouble else ""
            groups.setdefault((line.in_trouble, f"{line.condition}{where}"), []).append(line)
        return [
            *([Line(INSECURE, True)] if self.insecure else []),
            Line(f"{self.headline}, {len(self.agents)} agents"),
            *(Line(f"  {text}", trouble=True) for text in self.warnings),
            *(Line(f"  {stop.text}") for stop in self.stopped if not stop.operator),
            *(Line(f"  adapter {adapter.line}", trouble=not adapter.replicas) for adapter in self.adapters),
            *([Line(f"  {self.samples.line}")] if self.samples is not None else []),
            *(_of_agents(lines, text, trouble) for (trouble, text), lines in groups.items()),
            *(Line(f"  open: {text}") for text in self.open_lines),
        ]

    @property
    def open_lines(self) -> list[str]:
        """What is open, and for how long it still may be."""
        left = (f": {format_duration(left_ms)} until it is given up" for left_ms in self.left_ms)
        return [f"{text}{until}" for text, until in zip_longest(self.open, left, fillvalue="")]

    @property
    def served_lines(self) -> list[str]:
        """The adapters that are served, and the samples that were judged."""
        samples = [self.samples.line] if self.samples is not None else []
        return [*(f"adapter {adapter.line}" for adapter in self.adapters), *samples]

    @property
    def stalled(self) -> "FleetStatus":
        """The same with only those agents that something waits for, that are busy, or that are not fit to serve."""
        kept = (
            line for line in self.agents if line.waits_for or line.busy or line.in_trouble or line.state == "joining"
        )
        return replace(self, agents=tuple(kept), failures=())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What comes first: a bus that does not go on, replicas that an operator stopped, those that may serve other
        weights than the committed ones.
        """
        stopped = (stop.text for stop in self.stopped if stop.operator)
        unproven = f"{format_replicas(self.unproven)} not proven to hold v{self.version}" if self.unproven else ""
        return tuple(text for text in (self.hold_up, self.game_day, *stopped, unproven) if text)

    @property
    def game_day(self) -> str:
        """Which agents were started with faults, and how many they have injected; empty if none was."""
        statuses = {line.agent: line.status for line in self.agents if line.status is not None}
        faults = {agent: status.faults for agent, status in statuses.items() if status.faults is not None}
        if not faults:
            return ""
        return f"game day: {format_agents(faults)} inject faults on purpose, {sum(faults.values())} so far"

    @property
    def headline(self) -> str:
        """The run in one line."""
        return f"run {self.run}, epoch {self.epoch}, seq {self.seq}, {self.weights}, log {self.log}"

    @property
    def weights(self) -> str:
        """The committed weights, in two words."""
        return f"weights v{self.version}" if self.version else "nothing committed"


def _of_agents(lines: list[AgentLine], text: str, trouble: bool) -> Line:
    """A line for agents that do the same, with the engine call that has taken the longest."""
    longest = max(lines, key=lambda line: line.call_ms or 0)
    return Line(f"  {format_agents(line.agent for line in lines)}: {text}{longest.in_flight}", trouble)


class AgentOutcome(Struct, frozen=True, kw_only=True, gc=False):
    """One agent's line in a report.

    Attributes:
        agent: Its place.
        conclusion: What became of the command there.
        rule: Rule of the decision table that gave the outcome; 0 if none did.
        latency_us: From publishing to the arrival of the answer.
    """

    agent: Name
    conclusion: Conclusion
    rule: Count = 0
    latency_us: Count = 0


_NOT_MEANT: Final = (Skipped(Reason.NOT_TARGETED), Skipped(Reason.NOT_AN_ENGINE), Skipped(Reason.OBSERVING))


class Report(Printable, frozen=True, kw_only=True, tag="report"):
    """All outcomes of one command: exactly one for every known agent that is not retired.

    Attributes:
        seq: Position of the command in the run.
        origin: Epoch in which it was recorded.
        command: What was published.
        outcomes: One for each agent of the fleet.
    """

    seq: Count
    origin: Count
    command: Command
    outcomes: tuple[AgentOutcome, ...]

    @property
    def acted(self) -> tuple[str, ...]:
        """Agents that called their engine and saw the effect hold."""
        return self._concluded(Acted)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Agents that had nothing to do."""
        return self._concluded(Skipped)

    @property
    def failed(self) -> tuple[str, ...]:
        """Agents that should have acted and could not."""
        return self._concluded(Failed)

    @property
    def missing(self) -> tuple[str, ...]:
        """Agents that did not answer, or were away when the command was issued."""
        return self._concluded(Missing)

    @property
    def matched_nothing(self) -> bool:
        """Whether no agent matched the target: the fleet was empty, or has none of its replicas."""
        return all(outcome.conclusion in _NOT_MEANT for outcome in self.outcomes)

    def _concluded(self, kind: type[Conclusion]) -> tuple[str, ...]:
        return tuple(outcome.agent for outcome in self.outcomes if isinstance(outcome.conclusion, kind))

    @property
    def headline(self) -> str:
        """The command and how many agents did what, in one line."""
        answered = [outcome.latency_us for outcome in self.outcomes if not isinstance(outcome.conclusion, Missing)]
        slowest = f"; slowest {max(answered) // 100 / 10} ms" if answered else ""
        counts = count_outcomes(outcome.conclusion for outcome in self.outcomes)
        unmatched = "; no agent matched the target" if self.matched_nothing and self.outcomes else ""
        return f"{describe(self.command)} (seq {self.seq}): {counts}{unmatched}{slowest}"

    def lines(self) -> list[Line]:
        """The headline, then agents of the same outcome together, failures first."""
        unmatched = self.matched_nothing and not isinstance(self.command, EpochStart)
        return [Line(self.headline, bool(self.failed or self.missing or unmatched)), *_indented(self.outcomes)]

    def raise_for_failures(self) -> None:
        """Raise CommandFailed, which names each agent and why, if one failed or is missing, or if no agent matched.

        Other skips are not failures.
        """
        if self.matched_nothing:
            raise CommandFailed(f"no agent matched the target of command {self.seq}: {self.headline}")
        troubles = [outcome for outcome in self.outcomes if is_trouble(outcome.conclusion)]
        if troubles:
            lines = [f"command {self.seq} did not succeed everywhere:", *(line.text for line in _indented(troubles))]
            raise CommandFailed("\n".join(lines))


class SyncReport(Printable, frozen=True, kw_only=True, tag="sync_report"):
    """How a weight sync ended.

    Attributes:
        version: Number of the new weights.
        status: `committed`: the fleet serves `version`. `aborted`: too few replicas could load it, and the fleet serves
            what it served before. `stale`: every replica has this version or a newer one already.
        loaded: Replicas that hold it, and serve it unless they are in `stopped`.
        quarantined: Replicas that are out of service until a later sync or a restart.
        phases: The report of each phase, in order.
        unproven: All other replicas that the run knows and the sync was for. They are out of reach, or their engines
            are down, or they have not answered the last phase: what they serve is not known.
        joining: New replicas that had not followed by then. They are brought to what is committed: no failure.
        reason: Why it was aborted; of a committed one, what it does not prove: a label of pushed weights that was used
            before proves nothing without digests.
        stopped: Replicas that do not generate, whatever weights they hold, because a command stopped them. That is no
            failure.
        adapter: The adapter that was synced; empty for the base weights. Its replicas in `quarantined` are out for this
            version alone, and serve on.
    """

    version: Positive
    status: Literal["committed", "aborted", "stale"]
    loaded: tuple[Count, ...]
    quarantined: tuple[Count, ...]
    phases: tuple[Report, ...]
    unproven: tuple[Count, ...] = ()
    joining: tuple[Count, ...] = ()
    reason: Text = ""
    stopped: tuple[Stopped, ...] = ()
    adapter: Label = ""

    @property
    def by_delta(self) -> tuple[int, ...]:
        """Replicas among those in `loaded` that loaded only the tensors that have changed since the delta's base."""
        lines = [line for phase in self.phases for line in phase.outcomes]
        took = {line.agent for line in lines if isinstance(line.conclusion, Acted) and line.conclusion.took == BY_DELTA}
        return tuple(replica for replica in self.loaded if f"{replica}.0" in took)

    @property
    def headline(self) -> str:
        """How it ended, in one line."""
        serving = f" on {format_replicas(self.loaded)}" if self.loaded else ""
        serving += f", by a delta on {format_replicas(delta)}" if (delta := self.by_delta) else ""
        unproven = f"; unproven: {format_replicas(self.unproven)}" if self.unproven else ""
        joining = f"; joining: {format_replicas(self.joining)}" if self.joining else ""
        out = "without it" if self.adapter else "quarantined"
        quarantined = f"; {out}: {format_replicas(self.quarantined)}" if self.quarantined else ""
        stopped = "".join(f"; {stop.text}" for stop in self.stopped)
        reason = f": {self.reason}" if self.reason else ""
        what = f"adapter {self.adapter}" if self.adapter else "weights"
        return f"{what} v{self.version} {self.status}{serving}{unproven}{joining}{quarantined}{stopped}{reason}"

    @property
    def flawed(self) -> bool:
        """Whether it was aborted, or leaves out a replica that only an operator or another sync brings back."""
        by_hand = any(stop.operator for stop in self.stopped)
        return self.status == "aborted" or by_hand or bool(self.quarantined or self.unproven)

    def lines(self) -> list[Line]:
        """The headline, then what failed in each phase, then the count of every phase."""
        return [
            Line(self.headline, self.flawed),
            *self._failures(),
            *(Line(f"  {phase.headline}") for phase in self.phases),
        ]

    def _failures(self) -> list[Line]:
        return [
            Line(f"  {describe(phase.command)}: {line.text}", trouble=True)
            for phase in self.phases
            for line in _grouped(phase.outcomes)
            if line.trouble
        ]

    def raise_unless_committed(self) -> None:
        """Raise CommandFailed unless the sync was committed: enough replicas serve the new version.

        For a trainer that goes on without the rest of the fleet. Replicas in `quarantined` and `unproven` are not
        failures here: they come back by a later sync or a restart. A `stale` sync has committed nothing, so it raises.
        """
        if self.status != "committed":
            raise CommandFailed(self._failure("weight sync was not committed"))

    def raise_for_failures(self) -> None:
        """Raise CommandFailed unless each known replica that the sync was for, but for new ones, is proven to serve it.

        For a trainer that needs its whole fleet: stricter than `raise_unless_committed`.
        """
        if self.status != "committed" or self.quarantined or self.unproven:
            raise CommandFailed(self._failure("weight sync did not succeed everywhere"))

    def _failure(self, what: str) -> str:
        return "\n".join([f"{what}: {self.headline}", *(line.text for line in self._failures())])


def _grouped(outcomes: Iterable[AgentOutcome]) -> list[Line]:
    return group_outcomes((outcome.agent, outcome.conclusion, outcome.rule) for outcome in outcomes)


def _indented(outcomes: Iterable[AgentOutcome]) -> list[Line]:
    return [Line(f"  {line.text}", line.trouble) for line in _grouped(outcomes)]
