"""What went wrong in a run that another trainer drives, found in the log of agents that only observe it. Pure.

    O1  torn fleet      replicas served different weights for longer than `ObservePolicy.torn_ms`
    O2  endless pause   a replica stayed paused for longer than `paused_ms`, and was never seen to resume
    O3  leaked session  a profiling session stayed open for longer than `profiling_ms`, and was never seen to stop

A replica serves unless it is known to be paused. What an engine can't tell is unknown: a replica without a label takes
no part in O1, one whose sessions can't be seen none in O3.

Theory of operation. Each observation is a change at the moment at which the bus recorded it. While an agent is away
nothing is known of its replica. When the same process is back, what it saw last holds again, since it reports every
change.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from controlplane.machine import events as bus_events
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.record.entries import LogEntry
from schemas import events
from schemas.config import ObservePolicy
from schemas.formatting import agent_order, format_clock, format_duration, format_replicas
from schemas.identity import Identity, RolloutMode, agent_of, identity_of, process_of
from schemas.wire import Downward, Welcome

MS: Final = 1_000_000
"""Nanoseconds in a millisecond."""
OBSERVED: Final = ("O1", "O2", "O3")
"""Invariants of replicas that are only observed."""
SPANS_MAX: Final = 200
"""Newest spans that are kept of one kind and replica."""


class Violation(Struct, frozen=True):
    """An invariant that did not hold."""

    invariant: str
    position: int
    agents: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        agents = f" ({', '.join(self.agents)})" if self.agents else ""
        return f"{self.invariant} at record {self.position}{agents}: {self.text}"


class Seen(NamedTuple):
    """What an agent saw of its engine; None where the engine can't tell."""

    weights: str | None = None
    generating: bool | None = None
    profiling: bool | None = None


class _Change(NamedTuple):
    """What an agent knows from a moment on. `back` says that the same process is in reach again."""

    at_ns: int
    position: int
    agent: str
    seen: Seen | Literal["away", "back"]


class Span(Struct, kw_only=True):
    """A state of one replica: a label of its weights, a pause, or a profiling session.

    Attributes:
        seen_ns: When it was last known to hold.
        until_ns: When it was seen to be over; None if it never was.
        known: Whether it was known to hold at the last change.
    """

    what: str
    position: int
    since_ns: int
    seen_ns: int
    until_ns: int | None = None
    known: bool = True

    @property
    def lasted_ns(self) -> int:
        """How long it lasted, as far as the log shows."""
        return (self.seen_ns if self.until_ns is None else self.until_ns) - self.since_ns


class Spans:
    """The states of one kind of one replica, one after the other.

    Attributes:
        newest: The newest of them, in order; `count` and `total_ns` are of all that ended.
    """

    def __init__(self) -> None:
        self.newest: list[Span] = []
        self.count = self.total_ns = 0

    @property
    def current(self) -> Span | None:
        """The one that was never seen to end."""
        return self.newest[-1] if self.newest and self.newest[-1].until_ns is None else None

    def follow(self, change: _Change, what: str | None) -> None:
        """Note what holds from now on: None if that is unknown, empty if nothing does."""
        current, at_ns = self.current, change.at_ns
        if current is not None:
            current.seen_ns = at_ns if current.known else current.seen_ns
            current.known = what is not None
        if what is None or (current is not None and current.what == what):
            return
        if current is not None:
            current.until_ns = at_ns
            self.count, self.total_ns = self.count + 1, self.total_ns + current.lasted_ns
        if what:
            self.newest.append(Span(what=what, position=change.position, since_ns=at_ns, seen_ns=at_ns))
            del self.newest[:-SPANS_MAX]

    def end(self, at_ns: int) -> None:
        if self.current is not None and self.current.known:
            self.current.seen_ns = at_ns


class ObservedReplica:
    """One replica over the run."""

    def __init__(self) -> None:
        self.weights, self.pauses, self.sessions = Spans(), Spans(), Spans()
        self.last, self.away = Seen(), True

    @property
    def paused_ns(self) -> int:
        """How long it is known to have stood paused in all."""
        current = self.pauses.current
        return self.pauses.total_ns + (current.lasted_ns if current is not None else 0)

    @property
    def seen(self) -> Seen:
        """What is known of it at this moment."""
        return Seen() if self.away else self.last

    def follow(self, change: _Change) -> None:
        self.away = change.seen == "away"
        if isinstance(change.seen, Seen):
            self.last = change.seen
        seen = self.seen
        self.weights.follow(change, seen.weights)
        self.pauses.follow(change, None if seen.generating is None else "" if seen.generating else "paused")
        self.sessions.follow(change, None if seen.profiling is None else "profiling" if seen.profiling else "")


class ObservedFleet:
    """The observed replicas of one log. Feed it the entries in order, then ask."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, state: CoordinatorState | None) -> None:
        begin = state or CoordinatorState()
        self._policy = begin.settings.observe or ObservePolicy()
        self._observing = {name for name, member in begin.members.items() if _is_seen(member.hello.identity)}
        self._process = {name: process_of(member.peer) for name, member in begin.members.items()}
        self._replicas: dict[str, ObservedReplica] = {}
        self._watch = _TearWatch(self._policy)
        self._end_ns = 0

    # --- feeding ------------------------------------------------------------------------------------------------------

    def follow_bus(
        self, entry: LogEntry, event: bus_events.CoordinatorEvent, effects: bus_events.CoordinatorEffects
    ) -> None:
        self._end_ns = max(self._end_ns, entry.at_ns)
        match event:
            case bus_events.Opened(settings=settings):
                self._policy = self._watch.policy = settings.observe or ObservePolicy()
            case bus_events.HelloReceived(peer=peer, hello=hello) if any(sent(effects, Welcome)):
                self._hello(entry, hello.identity, process_of(peer))
            case bus_events.PeerLost(peer=peer) if self._process.get(agent_of(peer)) == process_of(peer):
                if agent_of(peer) in self._observing:
                    self._change(entry, agent_of(peer), "away")

    def follow_agent(self, entry: LogEntry, event: events.Event) -> None:
        self._end_ns = max(self._end_ns, entry.at_ns)
        agent = entry.agent
        match event:
            case events.Started(identity=identity, incarnation=incarnation):
                observed = agent in self._observing
                (self._observing.add if _is_seen(identity) else self._observing.discard)(agent)
                self._process[agent] = f"{agent}/{incarnation}"
                if observed or agent in self._observing:
                    self._change(entry, agent, Seen())
            case events.EngineObserved(observation=seen) if agent in self._observing:
                self._change(entry, agent, Seen(weights_of(seen), seen.generating, seen.profiling))
            case events.Stopping() if agent in self._observing:
                self._change(entry, agent, Seen())

    def _hello(self, entry: LogEntry, identity: Identity, process: str) -> None:
        agent = identity.agent
        if _is_seen(identity) and self._process.get(agent) == process:
            self._change(entry, agent, "back")
        if _is_seen(identity):
            self._observing.add(agent)
        self._process[agent] = process

    def _change(self, entry: LogEntry, agent: str, seen: Seen | Literal["away", "back"]) -> None:
        change = _Change(entry.at_ns, entry.position, agent, seen)
        replica = self._replicas.setdefault(agent, ObservedReplica())
        replica.follow(change)
        known = replica.seen
        self._watch.follow(change, known.weights if known.generating is not False else None)

    # --- asking -------------------------------------------------------------------------------------------------------

    def replicas(self) -> dict[str, ObservedReplica]:
        """Return each replica that was observed, by the name of its agent."""
        for replica in self._replicas.values():
            for spans in (replica.weights, replica.pauses, replica.sessions):
                spans.end(self._end_ns)
        return self._replicas

    def findings(self) -> Iterator[Violation]:
        """Yield what went wrong, in the order in which it began."""
        self._watch.end(self._end_ns)
        found = list(self._watch.found)
        for agent, replica in self.replicas().items():
            pause, session = replica.pauses.current, replica.sessions.current
            if pause is not None and pause.lasted_ns > self._policy.paused_ms * MS:
                found.append(self._endless("O2", agent, pause, "paused", "resume"))
            if session is not None and session.lasted_ns > self._policy.profiling_ms * MS:
                found.append(self._endless("O3", agent, session, "profiling", "stop"))
        return iter(sorted(found, key=lambda finding: finding.position))

    def _endless(self, invariant: str, agent: str, span: Span, what: str, verb: str) -> Violation:
        known = "the end of the log" if span.known else f"it was last seen at {format_clock(span.seen_ns)}"
        since = f"since {format_clock(span.since_ns)} for {_duration(span.lasted_ns)}"
        text = f"{what} {since}, until {known}, and never seen to {verb}"
        return Violation(invariant, span.position, (agent,), text)


class _TearWatch:
    """Follows which weights serve, and finds the times in which they differ for too long."""

    def __init__(self, policy: ObservePolicy) -> None:
        self.policy = policy
        self.found: list[Violation] = []
        self._serving: dict[str, str] = {}  # by agent
        self._labels = Counter[str]()
        self._since: _Change | None = None
        self._torn: dict[str, str] | None = None  # what each served when the limit had passed

    def follow(self, change: _Change, weights: str | None) -> None:
        """A replica serves these weights from now on, or none that are known."""
        before = self._serving.get(change.agent)
        if before == weights:
            return
        self._note(change.at_ns)
        if before is not None:
            del self._serving[change.agent]
            self._labels -= Counter((before,))
        if weights is not None:
            self._serving[change.agent] = weights
            self._labels[weights] += 1
        if len(self._labels) > 1:
            self._since = self._since or change
        else:
            self._close(change.at_ns, "")

    def end(self, at_ns: int) -> None:
        self._note(at_ns)
        self._close(at_ns, ", and still at the end of the log")

    def _note(self, at_ns: int) -> None:
        if self._torn is None and self._since is not None and at_ns - self._since.at_ns > self.policy.torn_ms * MS:
            self._torn = dict(self._serving)

    def _close(self, at_ns: int, ending: str) -> None:
        since, torn = self._since, self._torn
        self._since = self._torn = None
        if since is None or torn is None:
            return
        by_label: dict[str, list[str]] = {}
        for name in sorted(torn, key=agent_order):
            by_label.setdefault(torn[name], []).append(name)
        labels = sorted(by_label, key=lambda label: -len(by_label[label]))
        parts = [
            f"weights {label} on {format_replicas(identity_of(name).replica for name in by_label[label])}"
            for label in labels
        ]
        agents = tuple(name for label in labels[1:] for name in by_label[label])
        lasted = f"for {_duration(at_ns - since.at_ns)} from {format_clock(since.at_ns)}{ending}"
        text = f"replicas served different weights {lasted}: {'; '.join(parts)}"
        self.found.append(Violation("O1", since.position, agents, text))


def weights_of(seen: events.Observation) -> str | None:
    """Return what the engine says about its weights; None if it says nothing."""
    if seen.label:
        return seen.label
    return None if seen.version is None else str(seen.version)


def _is_seen(identity: Identity) -> bool:
    """Whether the agent observes a front end."""
    return identity.mode is RolloutMode.OBSERVED and identity.node_rank == 0


def sent(effects: bus_events.CoordinatorEffects, kind: type[Downward]) -> Iterator[bus_events.Send]:
    """Yield the messages of a kind among the effects of a decision."""
    return (effect for effect in effects if isinstance(effect, bus_events.Send) and isinstance(effect.message, kind))


def _duration(ns: int) -> str:
    return format_duration(ns // MS) if ns >= 60_000 * MS else f"{ns / (1000 * MS):.1f} s"
