"""The fleet over a run: which agents were in it and when, and each replica's state over time. Pure.

A replica's state is taken from what its primary sent to the bus (outcomes and heartbeats) and what the bus sent to it.
So it is on one clock, and known even where the agents' own records are missing from the log.
"""

from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from controlplane.machine.events import CoordinatorEffect, HelloReceived, PeerAnswer, PeerLost, Send, StatusReceived
from controlplane.report.histogram import UNKNOWN, ReplicaColumns, StateHistory
from schemas.commands import Target, WeightSync
from schemas.events import Observation
from schemas.formatting import agent_order
from schemas.identity import ROLLOUT, Identity, agent_of
from schemas.outcomes import Acted, Conclusion, Failed, Missing
from schemas.reports import AgentLine, AgentStatus
from schemas.wire import Welcome

_COMMITTED = -1
"""Key of the committed version among the replicas."""
MAX_LOSSES = 20
"""Losses that are listed per agent."""
MAX_OPENINGS = 100


class AgentSummary(Struct, kw_only=True):
    """One agent.

    Attributes:
        lives: Number of its incarnations.
        launches: How often its engine was replaced by another instance.
        fleet_ns: Time in the fleet.
        losses: When (ns) and why it was lost; `losses_count` counts all.
        membership: joining, live, gone or left, at the end.
        condition: In a few words, at the end; `bad` if it should not be so.
        unready: It is in the fleet, and said last that its engine is not as desired.
        failed, missing: Numbers of commands.
    """

    agent: str
    identity: Identity
    host: str
    pid: int
    engine: str = ""
    lives: int = 1
    launches: int = 0
    fleet_ns: int = 0
    losses: list[tuple[int, str]] = []
    losses_count: int = 0
    membership: str = "joining"
    condition: str = ""
    bad: bool = False
    unready: bool = False
    failed: int = 0
    missing: int = 0

    @property
    def healthy(self) -> bool:
        """It never had a problem."""
        problems = self.losses_count + self.failed + self.missing + self.launches + self.lives - 1
        return not self.bad and problems == 0

    @property
    def primary_of(self) -> int | None:
        """The replica that it speaks for, if any."""
        return self.identity.replica if self.identity.role == ROLLOUT and self.identity.node_rank == 0 else None


class Quarantine(Struct, kw_only=True):
    """A replica out of service: the sync to `version` left it out. `until_ns` is None while it lasts."""

    replica: int
    version: int
    since_ns: int
    until_ns: int | None = None
    reason_ended: str = ""


class ReplicaHistory(Struct, frozen=True, kw_only=True):
    """Every replica over the run.

    Attributes:
        quantum_ns: Time that one column stands for.
        columns: Their number.
        replicas: By index.
        committed: The committed version.
        opened: Columns in which a bus began its life.
    """

    quantum_ns: int = 1
    columns: int = 0
    replicas: dict[int, ReplicaColumns] = {}
    committed: ReplicaColumns = field(default_factory=ReplicaColumns)
    opened: tuple[int, ...] = ()


class _Tracked(Struct, kw_only=True):
    summary: AgentSummary
    peer: str
    incarnation: str
    fresh: bool = True  # has not joined in this life
    lost: bool = False
    since_ns: int | None = None  # when it joined, while it is in the fleet
    status: AgentStatus | None = None
    heard_ns: int = 0
    version: int | None = None  # from outcomes after the status
    paused: bool | None = None

    def newest_status(self) -> AgentStatus | None:
        """The last heartbeat, updated by the outcomes after it."""
        if self.status is None:
            return None
        version = self.status.version if self.version is None else self.version
        generating = self.status.generating if self.paused is None else not self.paused
        return replace(self.status, version=version, generating=generating)


class FleetHistory:
    """Follows what the bus heard from its agents.

    Attributes:
        states: Every replica over time. The owner advances it.
        quarantines: All of them, in order.
    """

    def __init__(self) -> None:
        self.states = StateHistory()
        self.quarantines: list[Quarantine] = []
        self._out: dict[int, Quarantine] = {}
        self._agents: dict[str, _Tracked] = {}
        self._opened_ns: list[int] = []

    # --- events -------------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """A bus began its life, with an empty fleet."""
        if len(self._opened_ns) < MAX_OPENINGS:
            self._opened_ns.append(self.states.end_ns)
        for agent in self._agents.values():
            self._leave(agent, "left" if agent.summary.membership == "left" else "gone", lost=False)

    def hello(self, event: HelloReceived, effects: Iterable[CoordinatorEffect]) -> None:
        """An agent said hello. Ignored unless it was welcomed."""
        if not any(isinstance(effect, Send) and isinstance(effect.message, Welcome) for effect in effects):
            return
        hello = event.hello
        name = hello.identity.agent
        agent = self._agents.get(name)
        if agent is None:
            summary = AgentSummary(agent=name, identity=hello.identity, host=hello.host, pid=hello.pid)
            self._agents[name] = _Tracked(summary=summary, peer=event.peer, incarnation=hello.incarnation)
            return
        self._leave(agent, "joining", lost=agent.lost)
        agent.peer = event.peer
        agent.summary.identity, agent.summary.host, agent.summary.pid = hello.identity, hello.host, hello.pid
        if agent.incarnation != hello.incarnation:
            agent.incarnation, agent.fresh, agent.status = hello.incarnation, True, None
            agent.version = agent.paused = None
            agent.summary.lives += 1

    def joined(self, peer: str) -> None:
        """An agent receives the commands from now on."""
        agent = self._agent(peer)
        if agent is None:
            return
        agent.summary.membership, agent.lost = "live", False
        agent.since_ns = self.states.end_ns if agent.since_ns is None else agent.since_ns
        replica = agent.summary.primary_of
        if replica is not None:
            if agent.fresh and replica in self._out:
                self._take_in(replica, "its agent restarted")
            self.states.set(replica, gone=False)
        agent.fresh = False

    def status(self, event: StatusReceived) -> None:
        """A heartbeat arrived."""
        agent = self._agent(event.peer)
        if agent is None:
            return
        status = agent.status = event.status
        agent.heard_ns, agent.version, agent.paused = self.states.end_ns, None, None
        agent.summary.engine = status.engine
        replica = agent.summary.primary_of
        if replica is not None and status.tokenizer == "present":
            self.states.set(replica, version=status.version, paused=not status.generating or bool(status.asleep))

    def answered(self, answer: PeerAnswer) -> None:
        """An outcome shows an engine's state sooner than the next heartbeat."""
        agent = self._agent(answer.peer)
        if agent is None:
            return
        agent.heard_ns = self.states.end_ns
        replica = agent.summary.primary_of
        if replica is None or not isinstance(answer.outcome, Acted):
            return
        changes = [call in ("pause", "sleep") for call in answer.outcome.calls if call in ("pause", "sleep", "resume")]
        paused = changes[-1] if changes else None
        self.states.set(replica, version=answer.outcome.version, paused=paused)
        agent.version = agent.version if answer.outcome.version is None else answer.outcome.version
        agent.paused = agent.paused if paused is None else paused

    def lost(self, event: PeerLost) -> None:
        """An agent is out of the fleet."""
        agent = self._agent(event.peer)
        if agent is None:
            return
        left = event.reason == "left"
        self._leave(agent, "left" if left else "gone", lost=not left)
        if not left:
            agent.summary.losses_count += 1
            if len(agent.summary.losses) < MAX_LOSSES:
                agent.summary.losses.append((self.states.end_ns, event.reason))

    def sync_published(self, command: WeightSync, target: Target) -> None:
        """A phase of a weight sync was published. It may quarantine replicas, and end quarantines."""
        for replica in sorted(command.quarantine - self._out.keys()):
            quarantine = Quarantine(replica=replica, version=command.version, since_ns=self.states.end_ns)
            self._out[replica] = quarantine
            self.quarantines.append(quarantine)
            self.states.set(replica, out=True)
        for replica, quarantine in sorted(self._out.items()):
            targeted = target.replicas is None or replica in target.replicas
            if command.phase == "commit" and targeted and replica not in command.quarantine:
                self._take_in(replica, f"the sync to v{command.version} included it")
            elif command.phase == "abort" and quarantine.version == command.version:
                self._take_in(replica, "that sync was aborted")

    def committed(self, version: int) -> None:
        """The fleet serves this version now."""
        self.states.set(_COMMITTED, version=version, gone=False)

    def observed(self, agent: str, seen: Observation, before: Observation | None) -> None:
        """An agent observed its engine. `before` is its previous observation in the same life."""
        tracked = self._agents.get(agent)
        if tracked is not None and before is not None and None not in (seen.instance, before.instance):
            tracked.summary.launches += seen.instance != before.instance

    def note_failure(self, agent: str, conclusion: Conclusion) -> None:
        """An agent failed a command, or did not answer it."""
        if agent in self._agents:
            self._agents[agent].summary.failed += isinstance(conclusion, Failed)
            self._agents[agent].summary.missing += isinstance(conclusion, Missing)

    # --- results ------------------------------------------------------------------------------------------------------

    def last_heard(self, agent: str) -> str:
        """What an agent last said about its engine; empty if it never did."""
        tracked = self._agents.get(agent)
        status = None if tracked is None else tracked.newest_status()
        if tracked is None or status is None:
            return ""
        silent_ms = (self.states.end_ns - tracked.heard_ns) // 1_000_000
        return f"was last heard {silent_ms:,} ms before that: {status.condition(tracked.summary.identity.role)}"

    def agents(self) -> list[AgentSummary]:
        """Every agent, in the order of the fleet, at the end of the log."""
        for name, agent in self._agents.items():
            summary, status, membership = agent.summary, agent.newest_status(), agent.summary.membership
            self._leave(agent, membership, lost=agent.lost)  # counts the time up to the end
            line = AgentLine(
                agent=name,
                incarnation=agent.incarnation,
                host=summary.host,
                state=membership,
                silent_ms=0,
                seq=0,
                status=status,
            )
            summary.condition = line.condition
            summary.bad = line.in_trouble or (status is None and membership != "left")
            summary.unready = status is not None and not status.ready and membership in ("joining", "live")
        return [self._agents[name].summary for name in sorted(self._agents, key=agent_order)]

    def replicas(self) -> ReplicaHistory:
        """Every replica over the run."""
        self.states.set(_COMMITTED)
        replicas = self.states.replicas()
        return ReplicaHistory(
            quantum_ns=self.states.quantum_ns,
            columns=self.states.column(self.states.end_ns) + 1,
            committed=replicas.pop(_COMMITTED),
            replicas=replicas,
            opened=tuple(self.states.column(moment) for moment in self._opened_ns),
        )

    def _agent(self, peer: str) -> _Tracked | None:
        """The agent behind a connection, unless a newer connection replaced it."""
        agent = self._agents.get(agent_of(peer))
        return agent if agent is not None and agent.peer == peer else None

    def _leave(self, agent: _Tracked, membership: str, *, lost: bool) -> None:
        summary = agent.summary
        agent.lost = lost
        if agent.since_ns is not None:
            summary.fleet_ns += self.states.end_ns - agent.since_ns
            agent.since_ns = None
        if summary.membership != membership:
            summary.membership = membership
            if summary.primary_of is not None:
                self.states.set(summary.primary_of, gone=lost, version=UNKNOWN, paused=False)

    def _take_in(self, replica: int, reason: str) -> None:
        quarantine = self._out.pop(replica)
        quarantine.until_ns, quarantine.reason_ended = self.states.end_ns, reason
        self.states.set(replica, out=False)
