"""The fleet over a run: which agents were in it and when, and what was wrong with each replica. Pure.

Each event of the log is decided again by the coordinator's own machine, whose state says which agents are in the fleet
and what they reported. Only what that state forgets is kept here: times, losses, earlier incarnations, past problems.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.coordinator import decide
from controlplane.machine.coordinator_state import ALIVE, CoordinatorState, Member
from controlplane.machine.replicas import is_engine_down, is_primary
from controlplane.machine.status import fleet_status
from schemas.agent_status import Clock
from schemas.desired import Desired
from schemas.events import Observation
from schemas.formatting import agent_order
from schemas.identity import agent_of, replica_and_node
from schemas.outcomes import Conclusion, Failed, Missing
from schemas.reports import AgentLine, SyncReport

MAX_SPANS = 100
"""Problems that are drawn per replica."""


class AgentHistory(Struct, kw_only=True):
    """One agent: while the log is read, and then at the end of the log.

    Attributes:
        member: As the coordinator last knew it.
        instance: Of its engine, when that was last seen up.
        launches: How often its engine was seen up as another instance than before.
        losses: When (ns) and why it was lost.
    """

    agent: str
    member: Member
    line: AgentLine | None = None
    heard_ns: int = 0
    lives: int = 0
    instance: str = ""
    launches: int = 0
    losses: list[tuple[int, str]] = []
    failed: int = 0
    missing: int = 0

    @property
    def condition(self) -> str:
        """Its condition at the end, in a few words."""
        return self.line.condition if self.line is not None else self.member.state

    @property
    def bad(self) -> bool:
        """Whether something is wrong with it at the end."""
        line, member = self.line, self.member
        return member.state != "left" and (line is None or line.in_trouble or member.status is None)

    @property
    def healthy(self) -> bool:
        """Whether it never had a problem."""
        return not (self.bad or self.losses or self.failed or self.missing or self.launches or self.lives > 1)

    @property
    def unready(self) -> bool:
        """Whether it is in the fleet, and its engine is not as desired."""
        return self.member.state in ALIVE and self.line is not None and self.line.in_trouble


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

    A training rank has only the condition `gone`.

    Attributes:
        latest: The last version that its engine is known to have held.
        since_ns: Conditions that hold now.
        totals_ns: How long each held; `spans` has the first of them (condition, begin, end) without pauses.
    """

    latest: int | None = None
    since_ns: dict[str, int] = {}
    totals_ns: dict[str, int] = {}
    spans: list[tuple[str, int, int]] = []

    @property
    def bad(self) -> bool:
        """Whether it ever had a problem."""
        return any(condition != "paused" for condition in self.totals_ns)

    def set(self, condition: str, holds: bool, now_ns: int) -> None:
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
    """Follows the coordinator."""

    def __init__(self, begin: CoordinatorState | None = None) -> None:
        self.state = begin or CoordinatorState()
        self.start_ns = self.now_ns = 0
        self.version = self.state.default_desired.version
        self.quarantines: list[Quarantine] = []
        self._at_us = 0
        self._out: dict[int, Quarantine] = {}
        self._agents = {name: AgentHistory(agent=name, member=member) for name, member in self.state.members.items()}
        self._replicas: dict[int, ReplicaHistory] = {}
        self._ranks: dict[int | str, ReplicaHistory] = {}
        self._clocks: dict[tuple[str, str], Clock] = {}  # by agent and host: the one that is known best

    def follow(self, event: events.CoordinatorEvent, at_ns: int) -> AgentHistory | None:
        """Note an event. A wall clock that was set back counts as standing still. Returns an agent that was lost."""
        self.now_ns, self._at_us = max(self.now_ns, at_ns) if self.start_ns else at_ns, event.at_us
        self.start_ns = self.start_ns or at_ns
        before = self.state
        self.state, _ = decide(before, event)
        senders = _senders(event)
        if isinstance(event, events.AnswersReceived | events.JoinReceived | events.StatusReceived):
            for agent in (self._agents[name] for name in senders if name in self._agents):
                agent.heard_ns = self.now_ns
                if isinstance(event, events.StatusReceived) and event.status.clock is not None:
                    self._note_clock(agent, event.status.clock)
        everything = self.state.desired is not before.desired or isinstance(event, events.Opened)
        lost = [self._look(name, event) for name in dict.fromkeys((*senders, *(self._agents if everything else ())))]
        return next(filter(None, lost), None)

    def concluded(self, report: SyncReport) -> None:
        """A sync has ended. Replicas that a committed one could not prove to serve are out of service."""
        if report.status != "committed" or report.adapter:
            return
        self.version = max(self.version, report.version)
        for index in sorted({*report.quarantined, *report.unproven} - self._out.keys()):
            self._leave_out(index, report.version)
        for name in self._agents:
            self._look(name, None)

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

    def agents(self) -> list[AgentHistory]:
        """Return every agent, in the order of the fleet, at the end of the log."""
        lines = {line.agent: line for line in fleet_status(self.state, self._at_us, "", {}).agents}
        for name, agent in self._agents.items():
            agent.line = lines.get(name)
        return [self._agents[name] for name in sorted(self._agents, key=agent_order)]

    @property
    def clocks(self) -> dict[str, Clock]:
        """The clocks of the agents, as far as they are known, on the hosts where they are."""
        return {
            name: clock for (name, host), clock in self._clocks.items() if self._agents[name].member.hello.host == host
        }

    @property
    def current_units(self) -> Mapping[int | str, ReplicaHistory]:
        """Every replica, and every training rank that was ever gone, as of now: what holds is still open."""
        return dict((*self._ranks.items(), *self._replicas.items()))

    def replicas(self) -> dict[int, ReplicaHistory]:
        """Return every replica in order, up to the end of the log."""
        for replica in self._replicas.values():
            for condition in list(replica.since_ns):
                replica.set(condition, False, self.now_ns)
        return dict(sorted(self._replicas.items()))

    # --- what changed -------------------------------------------------------------------------------------------------

    def _note_clock(self, agent: AgentHistory, clock: Clock) -> None:
        """Keep the measurement that is best by now. A host that was started again has another clock."""
        key = agent.agent, agent.member.hello.host
        best = self._clocks.get(key, clock)
        if clock.at_ms < best.at_ms or clock.error_ns <= best.grown_error_ns(clock.at_ms):
            self._clocks[key] = clock

    def _look(self, name: str, event: events.CoordinatorEvent | None) -> AgentHistory | None:
        """Compare an agent with what is known of it. Returns it if it was lost by this event."""
        member = self.state.members.get(name)
        if member is None and name not in self._agents:
            return None
        agent = self._agents.setdefault(name, AgentHistory(agent=name, member=member)) if member else self._agents[name]
        known = agent.member
        ended = isinstance(event, events.PeerLost) and known.state in ALIVE
        if member is None:  # forgotten: it never joined, or was retired
            gone = isinstance(event, events.PeerLost) and event.reason != "left"
            member = replace(known, state="gone" if gone else "left") if ended or known.joined else known
        agent.member, joins = member, isinstance(event, events.JoinReceived) and known.fresh and not member.fresh
        agent.lives += joins
        if is_primary(member):
            self._look_at_replica(member, joins)
        elif (member.state == "gone" or name in self._ranks) and replica_and_node(name) is None:
            self._ranks.setdefault(name, ReplicaHistory()).set("gone", member.state == "gone", self.now_ns)
        if not (ended and isinstance(event, events.PeerLost) and member.state == "gone"):
            return None
        agent.losses.append((self.now_ns, event.reason))
        return agent

    def _look_at_replica(self, member: Member, restarted: bool) -> None:
        """Compare a replica with what the coordinator knows of it: heartbeats, and newer answers."""
        index, now_ns, status = member.hello.identity.replica, self.now_ns, member.status
        replica = self._replicas.setdefault(index, ReplicaHistory())
        desired = self.state.desired.get(index, self.state.default_desired)
        live = member.state == "live"
        paused, version = False, None
        if status is not None and live and status.observed is not None:
            paused = status.observed.generating is False
        elif status is not None and live and status.tokenizer == "present":
            paused, version = not status.generating, status.version
        if live and (member.command_acked or desired.sync is not None):
            paused = not desired.serving
        if live and member.sync_acked:
            version = desired.version
        replica.latest = replica.latest if version is None else version
        replica.set("gone", member.state == "gone", now_ns)
        replica.set("paused", paused, now_ns)
        replica.set("behind", version is not None and version < self.version, now_ns)
        if desired.quarantined and index not in self._out:
            self._leave_out(index, desired.quarantined)
        elif index in self._out and (reason := self._back(member, desired, restarted)):
            quarantine = self._out.pop(index)
            quarantine.until_ns, quarantine.reason_ended = now_ns, reason
        down = is_engine_down(member) and replica.latest is not None
        ill = live and status is not None and (status.torn or status.quarantined > 0)
        replica.set("out", down or ill or index in self._out, now_ns)

    def _back(self, member: Member, desired: Desired, restarted: bool) -> str:
        """Why a replica that was out of service no longer is; empty if it is."""
        status = member.status
        if desired.quarantined or member.state != "live":
            return ""
        if restarted:
            return "its agent restarted"
        if desired.version < self._out[member.hello.identity.replica].version:
            return "that sync was aborted"
        if member.sync_acked:
            return f"the sync to v{desired.version} included it"
        serves = status is not None and status.ready and not status.quarantined and status.version == desired.version
        return f"it served v{desired.version}" if serves else ""

    def _leave_out(self, index: int, version: int) -> None:
        quarantine = self._out[index] = Quarantine(replica=index, version=version, since_ns=self.now_ns)
        self.quarantines.append(quarantine)
        self._replicas.setdefault(index, ReplicaHistory()).set("out", True, self.now_ns)


def _senders(event: events.CoordinatorEvent) -> tuple[str, ...]:
    if isinstance(event, events.AnswersReceived):
        return tuple(agent_of(answer.peer) for answer in event.answers)
    return (agent_of(event.peer),) if isinstance(event, events.PeerEvent) else ()
