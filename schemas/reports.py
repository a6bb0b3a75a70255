"""What the bus tells a trainer or an operator: the report of a command or a sync, and the state of the fleet."""

from typing import Literal

from msgspec import Struct

from schemas.commands import Command
from schemas.errors import CommandFailed
from schemas.identity import Count, Name, Positive, Text, replica_and_node
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Skipped


class Clock(Struct, frozen=True, kw_only=True):
    """An agent's clocks, as measured against the bus's. For timelines: no decision rests on it.

    at_ms, wall_ns: one moment, on the agent's monotonic clock (that of its events) and on its node's wall clock.
    offset_ns: what to add to the node's wall clock for the bus's.   error_ns: by how much that may be wrong then.
    """

    at_ms: int
    wall_ns: int
    offset_ns: int
    error_ns: Count


class AgentStatus(Struct, frozen=True, kw_only=True, tag="status", omit_defaults=True):
    """The heartbeat: what an agent is. Its header's seq is the last command applied.

    ready: the engine is as desired and may serve.   activity: the engine call under way, and since how long.
    clock: the last estimate that said something new; None before the first.
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


class AgentLine(Struct, frozen=True, kw_only=True):
    """One agent in `rolloutctl status`.

    silent_ms: since it was last heard; 0 of one that is gone.   waits_for: what it is late with.
    """

    agent: Name
    incarnation: Name
    host: Name
    state: Name
    silent_ms: Count
    seq: Count
    status: AgentStatus | None
    waits_for: tuple[Text, ...] = ()


class FleetStatus(Struct, frozen=True, kw_only=True, tag="fleet_status"):
    """Answer to `AskStatus`. open: commands that are not concluded, and who has not answered."""

    run: Name
    epoch: Count
    seq: Count
    version: Count
    log: Text
    agents: tuple[AgentLine, ...]
    open: tuple[Text, ...] = ()


class AgentOutcome(Struct, frozen=True, kw_only=True):
    """One line of a report. latency_us: from publishing to the answer's arrival; rule: of the decision table."""

    agent: Name
    conclusion: Conclusion
    rule: Count = 0
    latency_us: Count = 0


class Report(Struct, frozen=True, kw_only=True, tag="report"):
    """All outcomes of one command: for every agent in the fleet at the time it was issued, exactly one."""

    seq: Count
    origin: Count
    command: Command
    outcomes: tuple[AgentOutcome, ...]

    @property
    def acted(self) -> tuple[str, ...]:
        """Agents that called their engine and saw the effect hold."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Acted))

    @property
    def skipped(self) -> tuple[str, ...]:
        """Agents that had nothing to do."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Skipped))

    @property
    def failed(self) -> tuple[str, ...]:
        """Agents that should have acted and could not."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Failed))

    @property
    def missing(self) -> tuple[str, ...]:
        """Agents that did not answer."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Missing))

    def raise_for_failures(self) -> None:
        """Raise CommandFailed naming every agent that failed or is missing, and why. Skips are not failures."""
        lines = []
        for one in self.outcomes:
            if isinstance(one.conclusion, Failed):
                lines.append(f"  {one.agent} failed ({one.conclusion.error}): {one.conclusion.message}")
            elif isinstance(one.conclusion, Missing):
                lines.append(f"  {one.agent} missing ({one.conclusion.reason})")
        if lines:
            raise CommandFailed(f"command {self.seq} did not succeed everywhere:\n" + "\n".join(lines))


class SyncReport(Struct, frozen=True, kw_only=True, tag="sync_report"):
    """How a weight sync ended.

    committed: the fleet serves `version`.   aborted: too few replicas could; the fleet serves what it served.
    stale: every replica holds this version or a newer one already.
    loaded: replicas that serve it.   quarantined: replicas out of service until a later sync or a restart.
    phases: the report of each phase, in order.
    """

    version: Positive
    status: Literal["committed", "aborted", "stale"]
    loaded: tuple[Count, ...]
    quarantined: tuple[Count, ...]
    phases: tuple[Report, ...]

    def raise_for_failures(self) -> None:
        """Raise CommandFailed unless every replica that syncs at all serves the new version."""
        troubled = [one.agent for one in self.phases[-1].outcomes if isinstance(one.conclusion, Failed | Missing)]
        places = [replica_and_node(agent) for agent in troubled]
        down = any(place is not None and place[1] == 0 for place in places)
        if self.status == "committed" and not self.quarantined and not down:
            return
        lines = [f"sync to version {self.version} {self.status}; out of service: {list(self.quarantined) or 'none'}"]
        for report in self.phases:
            try:
                report.raise_for_failures()
            except CommandFailed as failed:
                lines.append(str(failed))
        raise CommandFailed("\n".join(lines))
