"""The fleet in a run's report: who was in it, when and as what, and how each replica went through the run. Pure.

A replica's state over time is told from what its primary said to the bus (outcomes and heartbeats) and from what the
bus told it, so it is on one clock, and it is there when an agent's own records are not.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.events import CoordinatorEffect, HelloReceived, PeerAnswer, PeerLost, Send, StatusReceived
from controlplane.report.histogram import UNKNOWN, Lanes, Painted
from schemas.commands import Target, WeightSync
from schemas.events import Observation
from schemas.identity import ROLLOUT, Identity, replica_and_node
from schemas.outcomes import Acted
from schemas.reports import AgentStatus
from schemas.wire import Welcome

_COMMITTED = -1
"""Among the lanes, the one of what is committed."""
LOSSES = 20
"""Losses that are named for one agent."""
MOMENTS = 100


class AgentFacts(Struct, kw_only=True):
    """One agent. lives: its incarnations.   launches: how often its engine was seen to be another instance.

    fleet_ns: time in which it heard the commands.   losses: when and why it was lost (ns).   life: joining, live, gone
    or left, at the end.   state: in words; bad: it should not be so.   unready: it said at the end that its engine is
    not as desired.   failed, missing: commands.
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
    state: str = ""
    bad: bool = False
    unready: bool = False
    failed: int = 0
    missing: int = 0

    @property
    def quiet(self) -> bool:
        """Nothing ever was the matter with it."""
        troubles = self.losses_count + self.failed + self.missing + self.launches + self.lives - 1
        return not self.bad and troubles == 0


class Quarantine(Struct, kw_only=True):
    """A replica out of service. version: of the sync that left it out.   until_ns, ended: None and '' while it is."""

    replica: int
    version: int
    since_ns: int
    until_ns: int | None = None
    ended: str = ""


class ReplicaTime(Struct, frozen=True, kw_only=True):
    """Every replica over the run, in columns of `quantum_ns`. opened: columns in which a bus began its life."""

    quantum_ns: int
    columns: int
    replicas: dict[int, Painted]
    committed: Painted
    opened: tuple[int, ...]


class _Member(Struct, kw_only=True):
    facts: AgentFacts
    peer: str
    incarnation: str
    fresh: bool = True
    lost: bool = False
    since_ns: int | None = None  # when it joined, while it is in the fleet
    status: AgentStatus | None = None
    heard_ns: int = 0
    version: int | None = None  # since the status: an outcome said so
    paused: bool | None = None


class Fleet:
    """The fold over what the bus heard of its agents. lanes: the replicas over time; its owner tells it the time."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.quarantines: list[Quarantine] = []
        self._out: dict[int, Quarantine] = {}
        self._members: dict[str, _Member] = {}
        self._opened_ns: list[int] = []

    # --- what happened ------------------------------------------------------------------------------------------------

    def opened(self) -> None:
        """A bus began its life: nobody is in its fleet."""
        if len(self._opened_ns) < MOMENTS:
            self._opened_ns.append(self.lanes.end_ns)
        for member in self._members.values():
            self._leave(member, "left" if member.facts.membership == "left" else "gone", lost=False)

    def hello(self, event: HelloReceived, effects: Iterable[CoordinatorEffect]) -> None:
        """An agent said hello, and was welcomed or not."""
        if not any(isinstance(one, Send) and isinstance(one.message, Welcome) for one in effects):
            return
        hello = event.hello
        name = hello.identity.agent
        member = self._members.get(name)
        if member is None:
            facts = AgentFacts(agent=name, identity=hello.identity, host=hello.host, pid=hello.pid)
            self._members[name] = _Member(facts=facts, peer=event.peer, incarnation=hello.incarnation)
            return
        self._leave(member, "joining", lost=member.lost)
        member.peer = event.peer
        member.facts.identity, member.facts.host, member.facts.pid = hello.identity, hello.host, hello.pid
        if member.incarnation != hello.incarnation:
            member.incarnation, member.fresh, member.status = hello.incarnation, True, None
            member.version = member.paused = None
            member.facts.lives += 1

    def joined(self, peer: str) -> None:
        """An agent hears the commands from now on."""
        member = self._member(peer)
        if member is None:
            return
        member.facts.membership, member.lost = "live", False
        member.since_ns = self.lanes.end_ns if member.since_ns is None else member.since_ns
        replica = _primary_of(member.facts.identity)
        if replica is not None:
            if member.fresh and replica in self._out:
                self._take_in(replica, "its agent started anew")
            self.lanes.set(replica, gone=False)
        member.fresh = False

    def status(self, event: StatusReceived) -> None:
        """A heartbeat."""
        member = self._member(event.peer)
        if member is None:
            return
        status = member.status = event.status
        member.heard_ns, member.version, member.paused = self.lanes.end_ns, None, None
        member.facts.engine = status.engine
        replica = _primary_of(member.facts.identity)
        if replica is not None and status.tokenizer == "present":
            self.lanes.set(replica, version=status.version, paused=not status.generating or bool(status.asleep))

    def answered(self, answer: PeerAnswer) -> None:
        """An outcome says what an engine does now, sooner than the next heartbeat."""
        member = self._member(answer.peer)
        if member is None:
            return
        member.heard_ns = self.lanes.end_ns
        replica = _primary_of(member.facts.identity)
        if replica is None or not isinstance(answer.outcome, Acted):
            return
        changes = [call in ("pause", "sleep") for call in answer.outcome.calls if call in ("pause", "sleep", "resume")]
        paused = changes[-1] if changes else None
        self.lanes.set(replica, version=answer.outcome.version, paused=paused)
        member.version = member.version if answer.outcome.version is None else answer.outcome.version
        member.paused = member.paused if paused is None else paused

    def lost(self, event: PeerLost) -> None:
        """An agent is out of the fleet."""
        member = self._member(event.peer)
        if member is None:
            return
        self._leave(member, "left" if event.reason == "left" else "gone", lost=event.reason != "left")
        if event.reason != "left":
            member.facts.losses_count += 1
            if len(member.facts.losses) < LOSSES:
                member.facts.losses = [*member.facts.losses, (self.lanes.end_ns, event.reason)]

    def commanded(self, command: WeightSync, target: Target) -> None:
        """A phase of a weight sync was published: who is left out by it, who is taken in."""
        for replica in sorted(command.quarantine):
            if replica not in self._out:
                found = Quarantine(replica=replica, version=command.version, since_ns=self.lanes.end_ns)
                self._out[replica] = found
                self.quarantines.append(found)
                self.lanes.set(replica, out=True)
        for replica, found in sorted(self._out.items()):
            targeted = target.replicas is None or replica in target.replicas
            if command.phase == "commit" and targeted and replica not in command.quarantine:
                self._take_in(replica, f"the sync to v{command.version} took it in")
            elif command.phase == "abort" and found.version == command.version:
                self._take_in(replica, "that sync was aborted")

    def committed(self, version: int) -> None:
        """A sync came to its end; the fleet serves this version."""
        self.lanes.set(_COMMITTED, version=version, gone=False)

    def observed(self, agent: str, seen: Observation, before: Observation | None) -> None:
        """An agent's own records show its engine. before: as it was seen the time before, in the same life."""
        member = self._members.get(agent)
        if member is not None and before is not None and None not in (seen.instance, before.instance):
            member.facts.launches += seen.instance != before.instance

    def failed(self, agent: str) -> None:
        """It failed a command."""
        if agent in self._members:
            self._members[agent].facts.failed += 1

    def missed(self, agent: str) -> None:
        """It did not answer a command."""
        if agent in self._members:
            self._members[agent].facts.missing += 1

    # --- what it comes to ---------------------------------------------------------------------------------------------

    def last_heard(self, agent: str) -> str:
        """What the agent said of its engine last, in words; '' when it never did."""
        member = self._members.get(agent)
        if member is None or member.status is None:
            return ""
        silent_ms = (self.lanes.end_ns - member.heard_ns) // 1_000_000
        said = status_in_words(_newest(member, member.status), member.facts.identity.role)
        return f"was last heard {silent_ms:,} ms before that: {said}"

    def facts(self) -> list[AgentFacts]:
        """Every agent, in the order of the fleet."""
        for member in self._members.values():
            life = member.facts.membership
            self._leave(member, life, lost=member.lost)  # counts the time up to the end of the log
            status = _newest(member, member.status) if member.status is not None else None
            member.facts.state, member.facts.bad = _state(life, status, member.facts.identity.role)
            member.facts.unready = status is not None and not status.ready and life in ("joining", "live")
        return [self._members[name].facts for name in sorted(self._members, key=place)]

    def time(self) -> ReplicaTime:
        """Every replica over the run."""
        self.lanes.set(_COMMITTED)
        painted = self.lanes.painted()
        return ReplicaTime(
            quantum_ns=self.lanes.quantum_ns,
            columns=self.lanes.column(self.lanes.end_ns) + 1,
            committed=painted.pop(_COMMITTED),
            replicas=painted,
            opened=tuple(self.lanes.column(moment) for moment in self._opened_ns),
        )

    def _member(self, peer: str) -> _Member | None:
        member = self._members.get(peer.partition("/")[0])
        return member if member is not None and member.peer == peer else None

    def _leave(self, member: _Member, life: str, *, lost: bool) -> None:
        facts = member.facts
        member.lost = lost
        if member.since_ns is not None:
            facts.fleet_ns += self.lanes.end_ns - member.since_ns
            member.since_ns = None
        if facts.membership != life:
            facts.membership = life
            replica = _primary_of(facts.identity)
            if replica is not None:
                self.lanes.set(replica, gone=lost, version=UNKNOWN, paused=False)

    def _take_in(self, replica: int, how: str) -> None:
        found = self._out.pop(replica)
        found.until_ns, found.ended = self.lanes.end_ns, how
        self.lanes.set(replica, out=False)


def _newest(member: _Member, status: AgentStatus) -> AgentStatus:
    """The last heartbeat, with what outcomes said after it."""
    version = status.version if member.version is None else member.version
    return replace(
        status, version=version, generating=status.generating if member.paused is None else not member.paused
    )


def place(agent: str) -> tuple[bool, str, int, int]:
    """The order of agents: by replica and node rank, then the training ranks by role."""
    found = replica_and_node(agent)
    if found is not None:
        return False, "", *found
    role, _, rank = agent.rpartition(".")
    return (True, role, int(rank), 0) if rank.isdecimal() else (True, agent, 0, 0)


def _primary_of(identity: Identity) -> int | None:
    """The replica that an agent speaks for, if any."""
    return identity.replica if identity.role == ROLLOUT and identity.node_rank == 0 else None


def status_in_words(status: AgentStatus, role: str = ROLLOUT) -> str:
    """What an agent says of itself. A training rank has no weights to name, and never generates."""
    if status.tokenizer == "absent":
        return "no tokenizer: follows"
    engine = [f"v{status.version}", "generating" if status.generating else "paused"]
    words = engine if role == ROLLOUT else ["a training rank"]
    words += [f"asleep {' '.join(status.asleep)}"] if status.asleep else []
    words += [f"profiling step {status.profiling_step}"] if status.profiling_step is not None else []
    words += [f"quarantined since v{status.quarantined}"] if status.quarantined else []
    words += ["torn weights"] if status.torn else []
    words += [f"busy: {status.activity}"] if status.activity else []
    words += [] if status.ready else ["not ready"]
    return ", ".join(words)


def _state(life: str, status: AgentStatus | None, role: str) -> tuple[str, bool]:
    if life == "left":
        return "left in good order", False
    if status is None:
        return ("gone" if life == "gone" else "no heartbeat yet"), True
    words = status_in_words(status, role)
    if life == "gone":
        return f"gone; before: {words}", True
    return words, bool(status.quarantined) or status.torn or not status.ready
