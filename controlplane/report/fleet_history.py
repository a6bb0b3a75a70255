"""The fleet over a run: which agents were in it and when, and what was wrong with each replica. Pure.

A replica's state is taken from what its primary sent to the bus (outcomes and heartbeats) and what the bus sent to it.
So it is on one clock, and known even where the agents' own records are missing from the log.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.events import CoordinatorEffect, HelloReceived, PeerAnswer, PeerLost, Send, StatusReceived
from schemas.commands import WeightSync
from schemas.events import Observation
from schemas.formatting import agent_order
from schemas.identity import ROLLOUT, Identity, agent_of
from schemas.outcomes import Acted, Conclusion, Failed, Missing
from schemas.reports import AgentLine, AgentStatus, SyncReport
from schemas.wire import Welcome

MAX_LOSSES = 20
"""Losses that are listed per agent."""
MAX_SPANS = 100
"""Problems that are drawn per replica."""


class AgentHistory(Struct, kw_only=True):
    """One agent: while the log is read, and then at the end of the log.

    Attributes:
        peer: Its newest connection.
        status: Its last heartbeat, updated by the outcomes after it; it arrived at `heard_ns`.
        fresh: This incarnation has not joined yet.
        since_ns: When it joined, while it is in the fleet.
        lives: Number of its incarnations, without one that only found out that the run is another than its journal's.
        instance: Of its engine, when that was last seen up.
        launches: How often its engine was seen up as another instance than before.
        fleet_ns: Time in the fleet.
        losses: When (ns) and why it was lost; `losses_count` counts all.
        membership: joining, live, gone or left.
        condition: Its condition at the end, in a few words; `bad` if something is wrong with it.
        failed, missing: Numbers of commands.
    """

    agent: str
    identity: Identity
    host: str
    pid: int
    peer: str
    incarnation: str
    status: AgentStatus | None = None
    heard_ns: int = 0
    fresh: bool = True
    since_ns: int | None = None
    engine: str = ""
    lives: int = 1
    instance: str = ""
    launches: int = 0
    fleet_ns: int = 0
    losses: list[tuple[int, str]] = []
    losses_count: int = 0
    membership: str = "joining"
    condition: str = ""
    bad: bool = False
    failed: int = 0
    missing: int = 0

    @property
    def healthy(self) -> bool:
        """Whether it never had a problem."""
        problems = self.losses_count + self.failed + self.missing + self.launches + self.lives - 1
        return not self.bad and problems == 0

    @property
    def unready(self) -> bool:
        """Whether it is in the fleet, and last reported that its engine is not as desired."""
        status = self.status
        return status is not None and not (status.ready or status.held) and self.membership in ("joining", "live")


class Quarantine(Struct, kw_only=True):
    """A replica out of service: the sync to `version` quarantined it, or could not prove that it serves that.

    `until_ns` is None while it lasts.
    """

    replica: int
    version: int
    since_ns: int
    until_ns: int | None = None
    reason_ended: str = ""


class ReplicaHistory(Struct, kw_only=True):
    """One replica over the run. Its conditions are `out` of service, `gone`, `behind` the fleet, and `paused`.

    Attributes:
        version: What its engine holds; None while it is not in the fleet, or has not reported it.
        latest: The last known version.
        since_ns: Conditions that hold now.
        totals_ns: How long each held; `spans` has the first of them (condition, begin, end) without pauses.
    """

    version: int | None = None
    latest: int | None = None
    since_ns: dict[str, int] = {}
    totals_ns: dict[str, int] = {}
    spans: list[tuple[str, int, int]] = []

    @property
    def bad(self) -> bool:
        """Whether it ever had a problem."""
        return any(condition != "paused" for condition in self.totals_ns)

    def set(self, condition: str, holds: bool, now_ns: int) -> None:
        """Note that a condition holds from now on, or no longer."""
        if holds:
            self.since_ns.setdefault(condition, now_ns)
            return
        since_ns = self.since_ns.pop(condition, now_ns)
        if since_ns == now_ns:
            return
        self.totals_ns[condition] = self.totals_ns.get(condition, 0) + now_ns - since_ns
        if condition != "paused" and len(self.spans) < MAX_SPANS:
            self.spans.append((condition, since_ns, now_ns))


class FleetHistory:
    """Follows what the bus heard from its agents.

    Attributes:
        start_ns, now_ns: First and newest moment, wall clock.
        version: The committed one.
        quarantines: All of them, in order.
    """

    def __init__(self) -> None:
        self.start_ns = self.now_ns = self.version = 0
        self._begun = False
        self.quarantines: list[Quarantine] = []
        self._quarantined: dict[int, Quarantine] = {}
        self._agents: dict[str, AgentHistory] = {}
        self._replicas: dict[int, ReplicaHistory] = {}

    # --- events -------------------------------------------------------------------------------------------------------

    def advance(self, at_ns: int) -> None:
        """Advance the time. A clock that was set back counts as standing still."""
        if not self._begun:
            self.start_ns = self.now_ns = at_ns
            self._begun = True
        self.now_ns = max(self.now_ns, at_ns)

    def opened(self) -> None:
        """A bus began its life, with an empty fleet."""
        for agent in self._agents.values():
            self._leave(agent, "left" if agent.membership == "left" else "gone")

    def hello(self, event: HelloReceived, effects: Iterable[CoordinatorEffect]) -> None:
        """An agent said hello. Ignored unless it was welcomed."""
        if not any(isinstance(effect, Send) and isinstance(effect.message, Welcome) for effect in effects):
            return
        hello, name = event.hello, event.hello.identity.agent
        agent = self._agents.get(name)
        if agent is None:
            self._agents[name] = AgentHistory(
                agent=name,
                identity=hello.identity,
                host=hello.host,
                pid=hello.pid,
                peer=event.peer,
                incarnation=hello.incarnation,
            )
            return
        began_anew = agent.fresh and agent.membership == "left"
        self._leave(agent, "joining")
        agent.peer, agent.identity, agent.host, agent.pid = event.peer, hello.identity, hello.host, hello.pid
        if agent.incarnation != hello.incarnation:
            agent.incarnation, agent.fresh, agent.status = hello.incarnation, True, None
            agent.lives += not began_anew

    def joined(self, peer: str) -> bool:
        """An agent receives the commands from now on. Returns False if it is not known by this connection."""
        agent = self._agent(peer)
        if agent is None:
            return False
        agent.membership = "live"
        agent.since_ns = self.now_ns if agent.since_ns is None else agent.since_ns
        if (replica := self._replica(agent)) is not None:
            if agent.fresh and agent.identity.replica in self._quarantined:
                self._end_quarantine(agent.identity.replica, "its agent restarted")
            replica.set("gone", False, self.now_ns)
        agent.fresh = False
        return True

    def status(self, event: StatusReceived) -> None:
        """A heartbeat arrived."""
        agent = self._agent(event.peer)
        if agent is None:
            return
        status = agent.status = event.status
        agent.heard_ns, agent.engine = self.now_ns, status.engine
        if status.observed is not None:
            self._update(agent, None, status.observed.generating is False)
        elif status.tokenizer == "present":
            self._update(agent, status.version, not status.generating or bool(status.asleep))
        self._note_service(agent, status)

    def answered(self, answer: PeerAnswer) -> None:
        """An outcome shows an engine's state sooner than the next heartbeat."""
        agent = self._agent(answer.peer)
        if agent is None:
            return
        agent.heard_ns = self.now_ns
        if not isinstance(answer.outcome, Acted):
            return
        version = answer.outcome.version
        changes = [call != "resume" for call in answer.outcome.calls if call in ("pause", "sleep", "resume")]
        paused = changes[-1] if changes else None
        if (version, paused) != (None, None) and self._update(agent, version, paused) and agent.status is not None:
            status = agent.status
            version = status.version if version is None else version
            generating = status.generating if paused is None else not paused
            agent.status = replace(status, version=version, generating=generating)

    def lost(self, event: PeerLost) -> AgentHistory | None:
        """An agent is out of the fleet. Returns it unless it said goodbye."""
        agent = self._agent(event.peer)
        if agent is None:
            return None
        left = event.reason == "left"
        self._leave(agent, "left" if left else "gone")
        if (replica := self._replica(agent)) is not None:
            replica.set("gone", not left, self.now_ns)
        if not left:
            agent.losses_count += 1
            if len(agent.losses) < MAX_LOSSES:
                agent.losses.append((self.now_ns, event.reason))
        return None if left else agent

    def sync_published(self, command: WeightSync) -> None:
        """A phase of a weight sync was published. It may quarantine replicas, and an abort ends quarantines."""
        self._leave_out(command.quarantine, command.version)
        for index, quarantine in sorted(self._quarantined.items()):
            if command.phase == "abort" and quarantine.version == command.version:
                self._end_quarantine(index, "that sync was aborted")

    def committed(self, report: SyncReport) -> None:
        """The fleet serves this version now, except for the replicas that the report names."""
        self.version = max(self.version, report.version)
        self._leave_out((*report.quarantined, *report.unproven), report.version)
        for index in sorted(self._quarantined.keys() & set(report.loaded)):
            self._end_quarantine(index, f"the sync to v{report.version} included it")
        for replica in self._replicas.values():
            self._compare(replica)

    def observed(self, name: str, seen: Observation) -> None:
        """An agent observed its engine. While that is not up, its instance has no name of its own yet."""
        agent = self._agents.get(name)
        if agent is not None and seen.instance is not None and seen.tokenizer != "unknown":
            agent.launches += agent.instance not in ("", seen.instance)
            agent.instance = seen.instance

    def note_failure(self, agent: str, conclusion: Conclusion) -> None:
        """An agent failed a command, or did not answer it."""
        if agent in self._agents:
            self._agents[agent].failed += isinstance(conclusion, Failed)
            self._agents[agent].missing += isinstance(conclusion, Missing)

    # --- results ------------------------------------------------------------------------------------------------------

    def heard_ns(self, name: str) -> int:
        """Return when an agent was last heard; 0 if it never was."""
        return self._agents[name].heard_ns if name in self._agents else 0

    def last_heard(self, name: str) -> str:
        """Return what an agent last reported about its engine; empty if it never did."""
        agent = self._agents.get(name)
        if agent is None or agent.status is None:
            return ""
        silent_ms = (self.now_ns - agent.heard_ns) // 1_000_000
        return f"was last heard {silent_ms:,} ms before that: {agent.status.condition(agent.identity.role)}"

    def agents(self) -> list[AgentHistory]:
        """Return every agent, in the order of the fleet, at the end of the log."""
        for name, agent in self._agents.items():
            self._leave(agent, agent.membership)  # counts the time up to the end
            line = AgentLine(
                agent=name,
                incarnation=agent.incarnation,
                host=agent.host,
                state=agent.membership,
                silent_ms=0,
                seq=0,
                status=agent.status,
            )
            agent.condition = line.condition
            agent.bad = line.in_trouble or (agent.status is None and agent.membership != "left")
        return [self._agents[name] for name in sorted(self._agents, key=agent_order)]

    def replicas(self) -> dict[int, ReplicaHistory]:
        """Return every replica in order, up to the end of the log."""
        for replica in self._replicas.values():
            for condition in list(replica.since_ns):
                replica.set(condition, False, self.now_ns)
        return dict(sorted(self._replicas.items()))

    def _agent(self, peer: str) -> AgentHistory | None:
        """The agent behind a connection, unless a newer connection replaced it."""
        agent = self._agents.get(agent_of(peer))
        return agent if agent is not None and agent.peer == peer else None

    def _replica(self, agent: AgentHistory) -> ReplicaHistory | None:
        """The replica that an agent speaks for, if any."""
        if agent.identity.role != ROLLOUT or agent.identity.node_rank > 0:
            return None
        return self._replicas.setdefault(agent.identity.replica, ReplicaHistory())

    def _update(self, agent: AgentHistory, version: int | None, paused: bool | None) -> bool:
        """Note a replica's state; None keeps a value. Returns whether the agent speaks for a replica."""
        replica = self._replica(agent)
        if replica is None:
            return False
        if paused is not None:
            replica.set("paused", paused, self.now_ns)
        if version is not None:
            replica.version = replica.latest = version
            self._compare(replica)
        return True

    def _compare(self, replica: ReplicaHistory) -> None:
        replica.set("behind", replica.version is not None and replica.version < self.version, self.now_ns)

    def _leave(self, agent: AgentHistory, membership: str) -> None:
        if agent.since_ns is not None:
            agent.fleet_ns += self.now_ns - agent.since_ns
            agent.since_ns = None
        if agent.membership == membership:
            return
        agent.membership = membership
        if (replica := self._replica(agent)) is not None:
            replica.version = None
            for condition in ("behind", "paused"):
                replica.set(condition, False, self.now_ns)

    def _note_service(self, agent: AgentHistory, status: AgentStatus) -> None:
        """A heartbeat shows whether a replica is out of service: its engine is down, or did not follow the fleet."""
        replica = self._replica(agent)
        if replica is None:
            return
        index, down = agent.identity.replica, status.tokenizer == "unknown" and replica.latest is not None
        if index in self._quarantined and status.ready and not status.quarantined and status.version == self.version:
            self._end_quarantine(index, f"it served v{status.version}")
        replica.set("out", down or status.torn or status.quarantined > 0 or index in self._quarantined, self.now_ns)

    def _leave_out(self, replicas: Iterable[int], version: int) -> None:
        for index in sorted(set(replicas) - self._quarantined.keys()):
            quarantine = Quarantine(replica=index, version=version, since_ns=self.now_ns)
            self._quarantined[index] = quarantine
            self.quarantines.append(quarantine)
            self._replicas.setdefault(index, ReplicaHistory()).set("out", True, self.now_ns)

    def _end_quarantine(self, index: int, reason: str) -> None:
        quarantine = self._quarantined.pop(index)
        quarantine.until_ns, quarantine.reason_ended = self.now_ns, reason
        self._replicas[index].set("out", False, self.now_ns)
