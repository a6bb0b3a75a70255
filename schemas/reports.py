"""What the bus tells a trainer or an operator: the report of a command or a sync, and the state of the fleet.

Reports and the fleet's status print as a few lines (`schemas.formatting`).
"""

from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct

from schemas.commands import Command, EpochStart
from schemas.errors import CommandFailed
from schemas.formatting import (
    Line,
    Printable,
    agent_order,
    count_outcomes,
    describe,
    format_agents,
    format_duration,
    format_replicas,
    group_outcomes,
    is_trouble,
)
from schemas.identity import ROLLOUT, Count, Label, Moment, Name, Nanoseconds, Positive, Text, identity_of
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Reason, Skipped


class Clock(Struct, frozen=True, kw_only=True):
    """An agent's clocks, measured against the bus's. For timelines; no decision depends on it.

    Attributes:
        at_ms: A moment on the agent's monotonic clock, which its events use.
        wall_ns: The same moment on the wall clock of its node.
        offset_ns: What to add to the node's wall clock to get the bus's.
        error_ns: By how much `offset_ns` may have been wrong at that moment.
    """

    at_ms: Moment
    wall_ns: Nanoseconds
    offset_ns: Nanoseconds
    error_ns: Nanoseconds

    def bus_ns(self, at_ms: int) -> int:
        """Return a moment of the agent's monotonic clock on the bus's wall clock."""
        return self.wall_ns + self.offset_ns + (at_ms - self.at_ms) * 1_000_000


class Observed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent that only observes last saw of its engine; None where the engine can't tell.

    Attributes:
        label: The engine's own label of its weights.
        generating: False when paused.
        profiling: A session is open.
    """

    label: Label | None = None
    generating: bool | None = None
    profiling: bool | None = None

    def condition(self) -> str:
        """Return it in a few words."""
        weights = f"weights {self.label}" if self.label else "weights unknown"
        generating = {True: "generating", False: "paused", None: "unknown whether paused"}[self.generating]
        return ", ".join(["observed", weights, generating, *(["profiling"] if self.profiling else [])])


class AgentStatus(Struct, frozen=True, gc=False, kw_only=True, tag="status", omit_defaults=True):
    """The heartbeat: what an agent and its engine are doing. The header's seq is the last command applied.

    Attributes:
        ready: The engine is as desired, and serves. One that is paused, asleep or in quarantine is not ready.
        quarantined: Version that this replica could not follow; 0 if none.
        torn: A load failed or was cut off, and what the engine holds is unknown.
        activity: The engine call in flight.
        since_ms: When that call began, on the clock of `Clock.at_ms`; None if none is in flight.
        queued: Commands that wait for the engine.
        buffered: Commands that arrived out of order, and wait for those before them.
        clock: The newest estimate of the agent's clocks; None before the first.
        wedged: Its engine runs requests and has generated nothing for too long.
        trouble: What keeps the replica from serving, and what it waits for; empty if nothing but a command does.
        observed: What an agent that only observes saw; None for one that commands. Of such an agent, `generating` and
            `version` mean nothing where this has None.
    """

    ready: bool
    tokenizer: Name = "unknown"
    engine: Text = "unknown"
    generating: bool = False
    asleep: tuple[Name, ...] = ()
    profiling_step: Count | None = None
    version: Count = 0
    digest: Name | None = None
    quarantined: Count = 0
    torn: bool = False
    activity: Text | None = None
    queued: Count = 0
    buffered: Count = 0
    clock: Clock | None = None
    wedged: bool = False
    trouble: Text = ""
    observed: Observed | None = None
    since_ms: Moment | None = None

    @property
    def held(self) -> bool:
        """Whether the replica is paused or asleep because it was told to be."""
        return not (self.ready or self.trouble or self.generating) and self.tokenizer == "present"

    def condition(self, role: str = ROLLOUT) -> str:
        """Return the status in a few words.

        Args:
            role: Of the agent. A training rank has no weights, and never generates.
        """
        parts = [] if self.ready or self.held else ["not ready"]
        parts += [f"quarantined since v{self.quarantined}"] if self.quarantined else []
        parts += ["torn weights"] if self.torn else []
        if role != ROLLOUT:
            parts += ["training"]
        elif self.tokenizer == "absent":
            parts += ["follower"]
        elif self.observed is not None:
            parts += [self.observed.condition()]
        else:
            parts += [f"v{self.version}", "generating" if self.generating else "paused"]
        parts += [f"asleep {' '.join(self.asleep)}"] if self.asleep else []
        parts += [f"profiling step {self.profiling_step}"] if self.profiling_step is not None else []
        parts += [f"busy: {self.activity}"] if self.activity else []
        parts += [self.trouble] if self.trouble else []
        return ", ".join(parts)


class AgentLine(Struct, frozen=True, gc=False, kw_only=True):
    """One agent in `rolloutctl status`.

    Attributes:
        state: joining, live, gone or left.
        silent_ms: Time since the last message; 0 for an agent that is gone.
        waits_for: Commands that it has not answered yet.
        away_ms: How long it has been away; 0 if it is live.
        serving: On node rank 0, the version that its replica is proven to serve; None if it is not proven to serve.
        latency_us: From publishing a command to the arrival of its newest answer; None if it has not answered lately.
        call_ms: How long the engine call in flight has taken; None if none is, or if its clock is not known yet.
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

    @property
    def in_flight(self) -> str:
        """The engine call in flight and its duration, after a semicolon: `; in load for 42 s`. Empty if unknown."""
        if self.call_ms is None or self.status is None:
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
        if self.state != "gone":
            return condition
        earlier = f"a healthy follower, node rank {identity.node_rank}" if condition == "follower" else condition
        return f"gone{away} (was {earlier})"

    @property
    def in_trouble(self) -> bool:
        """Whether the agent is out of the fleet without having left, or not fit to serve."""
        if self.state not in ("joining", "live"):
            return self.state == "gone"
        status = self.status
        return status is not None and (not (status.ready or status.held) or status.torn or status.quarantined > 0)

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
    """

    ago_ms: Count
    text: Text


class PendingCommand(Struct, frozen=True, kw_only=True):
    """A command that is not concluded, in `FleetStatus.pending`. The agents' own lines name it in `waits_for`.

    Attributes:
        name: The command and its seq, as in `AgentLine.waits_for`.
        age_ms: Time since it was published.
        left_ms: Time until its deadline, at which those that have not answered are missing.
        waiting: How many agents have not answered.
    """

    name: Text
    age_ms: Count
    left_ms: Count
    waiting: Count


class HeldSync(Struct, frozen=True, kw_only=True):
    """A weight sync whose trainer has not asked for the next phase yet, in `FleetStatus.held`.

    Attributes:
        phase: The one that the trainer is to ask for.
        left_ms: Time until the sync is given up.
    """

    version: Positive
    phase: Name
    left_ms: Count


INSECURE: Final = "INSECURE: anybody who can reach this bus can command the engines; it has no keys"


class FleetStatus(Printable, frozen=True, kw_only=True, tag="fleet_status"):
    """Answer to `StatusRequest`.

    Attributes:
        version: Newest committed weights.
        log: Path of the run's log, on the trainer's machine.
        agents: Those of unproven replicas and those that are away come first.
        open: Commands that are not concluded, and who has not answered.
        insecure: Other machines can reach the bus, and it has no keys: anybody on them can command the engines.
        unproven: Replicas that the run knows and that are not proven to hold the committed weights.
        descriptors: Said while the trainer's process has few file descriptors left: for how many agents they last.
        failures: The last ones in this life of the bus, the newest first.
        read_only: The key of who asked may read the status, and not command.
        pending: The oldest of the commands in `open`, with their deadlines.
        held: The weight sync that waits for the trainer; None if none does.
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
    descriptors: Text = ""
    failures: tuple[RecentFailure, ...] = ()
    read_only: bool = False
    pending: tuple[PendingCommand, ...] = ()
    held: HeldSync | None = None

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
            *(_of_agents(lines, text, trouble) for (trouble, text), lines in groups.items()),
            *(Line(f"  open: {text}") for text in self.open),
        ]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What comes first: replicas that may serve other weights than the committed ones, and limits that are near."""
        unproven = f"{format_replicas(self.unproven)} not proven to hold v{self.version}" if self.unproven else ""
        return tuple(text for text in (unproven, self.descriptors) if text)

    @property
    def headline(self) -> str:
        """The run in one line."""
        return f"run {self.run}, epoch {self.epoch}, seq {self.seq}, weights v{self.version}, log {self.log}"


def _of_agents(lines: list[AgentLine], text: str, trouble: bool) -> Line:
    """A line for agents that do the same, with the engine call that has taken the longest."""
    longest = max(lines, key=lambda line: line.call_ms or 0)
    return Line(f"  {format_agents(line.agent for line in lines)}: {text}{longest.in_flight}", trouble)


class AgentOutcome(Struct, frozen=True, kw_only=True, gc=False):
    """One agent's line in a report.

    Attributes:
        rule: Rule of the decision table that gave the outcome; 0 if none did.
        latency_us: From publishing to the arrival of the answer.
    """

    agent: Name
    conclusion: Conclusion
    rule: Count = 0
    latency_us: Count = 0


_NOT_MEANT: Final = (Skipped(Reason.NOT_TARGETED), Skipped(Reason.NOT_AN_ENGINE), Skipped(Reason.OBSERVING))


class Report(Printable, frozen=True, kw_only=True, tag="report"):
    """All outcomes of one command: exactly one for every known agent that is not retired."""

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
    def about_nobody(self) -> bool:
        """Whether the command was for no agent at all: the fleet was empty, or the target named nobody in it."""
        return all(outcome.conclusion in _NOT_MEANT for outcome in self.outcomes)

    def _concluded(self, kind: type[Conclusion]) -> tuple[str, ...]:
        return tuple(outcome.agent for outcome in self.outcomes if isinstance(outcome.conclusion, kind))

    @property
    def headline(self) -> str:
        """The command and how many agents did what, in one line."""
        answered = [outcome.latency_us for outcome in self.outcomes if not isinstance(outcome.conclusion, Missing)]
        slowest = f"; slowest {max(answered) // 100 / 10} ms" if answered else ""
        counts = count_outcomes(outcome.conclusion for outcome in self.outcomes)
        nobody = "; nobody was meant" if self.about_nobody and self.outcomes else ""
        return f"{describe(self.command)} (seq {self.seq}): {counts}{nobody}{slowest}"

    def lines(self) -> list[Line]:
        """The headline, then agents of the same outcome together, failures first."""
        nobody = self.about_nobody and not isinstance(self.command, EpochStart)
        return [Line(self.headline, bool(self.failed or self.missing or nobody)), *_indented(self.outcomes)]

    def raise_for_failures(self) -> None:
        """Raise CommandFailed, which names each agent and why, if one failed or is missing, or if nobody was meant.

        Other skips are not failures.
        """
        if self.about_nobody:
            raise CommandFailed(f"command {self.seq} was for nobody: {self.headline}")
        troubles = [outcome for outcome in self.outcomes if is_trouble(outcome.conclusion)]
        if troubles:
            lines = [f"command {self.seq} did not succeed everywhere:", *(line.text for line in _indented(troubles))]
            raise CommandFailed("\n".join(lines))


class SyncReport(Printable, frozen=True, kw_only=True, tag="sync_report"):
    """How a weight sync ended.

    Attributes:
        status: `committed`: the fleet serves `version`. `aborted`: too few replicas could load it, and the fleet
            serves what it served before. `stale`: every replica has this version or a newer one already.
        loaded: Replicas that serve it.
        quarantined: Replicas that are out of service until a later sync or a restart.
        phases: The report of each phase, in order.
        unproven: All other replicas that the run knows and the sync was for. They are out of reach, or their engines
            are down, or they have not answered the last phase: nobody knows what they serve.
        reason: Why it was aborted, if not because of the replicas.
    """

    version: Positive
    status: Literal["committed", "aborted", "stale"]
    loaded: tuple[Count, ...]
    quarantined: tuple[Count, ...]
    phases: tuple[Report, ...]
    unproven: tuple[Count, ...] = ()
    reason: Text = ""

    @property
    def headline(self) -> str:
        """How it ended, in one line."""
        serving = f" on {format_replicas(self.loaded)}" if self.loaded else ""
        unproven = f"; unproven: {format_replicas(self.unproven)}" if self.unproven else ""
        quarantined = f"; quarantined: {format_replicas(self.quarantined)}" if self.quarantined else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"weights v{self.version} {self.status}{serving}{unproven}{quarantined}{reason}"

    def lines(self) -> list[Line]:
        """The headline, then what failed in each phase, then the count of every phase."""
        return [
            Line(self.headline, self.status == "aborted" or bool(self.quarantined or self.unproven)),
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
        """Raise CommandFailed unless every known replica that the sync was for is proven to serve the new version.

        For a trainer that needs its whole fleet: stricter than `raise_unless_committed`.
        """
        if self.status == "committed" and not self.quarantined and not self.unproven:
            return
        raise CommandFailed(self._failure("weight sync did not succeed everywhere"))

    def _failure(self, what: str) -> str:
        return "\n".join([f"{what}: {self.headline}", *(line.text for line in self._failures())])


def _grouped(outcomes: Iterable[AgentOutcome]) -> list[Line]:
    return group_outcomes((outcome.agent, outcome.conclusion, outcome.rule) for outcome in outcomes)


def _indented(outcomes: Iterable[AgentOutcome]) -> list[Line]:
    return [Line(f"  {line.text}", line.trouble) for line in _grouped(outcomes)]
