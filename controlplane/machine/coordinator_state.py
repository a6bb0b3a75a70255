"""What the coordinator knows, and what is asked of it everywhere. Pure: a state is replaced, never changed."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, convert
from msgspec.structs import replace

from controlplane.machine import events
from schemas.agent_status import AgentStatus
from schemas.commands import AdapterVersion, Command, SyncPhase
from schemas.config import BusConfig
from schemas.desired import Committed, Desired
from schemas.identity import Count, Positive, agent_of
from schemas.outcomes import Conclusion
from schemas.reports import AgentOutcome, Report, SampleStatus
from schemas.wire import CommandRecord, Downward, Hello, Rejoin

UNSEEN_STOP: Final = -1
"""Key in `CoordinatorState.stops` of the replicas that have not been seen yet."""
UNKNOWN_PEER: Final = Rejoin(reason="the bus does not know you: say hello")
ALIVE: Final = ("joining", "live")

Effects = list[events.CoordinatorEffect]


class Member(Struct, frozen=True, kw_only=True, gc=False):
    """One agent that said hello.

    Attributes:
        peer: Its newest connection, as `name/incarnation/connection`.
        fresh: This incarnation has not joined yet. A reconnect of a living process is not fresh.
        joined: Some incarnation has joined at this place. Where none ever did, the place is forgotten with its agent.
        settled: Some incarnation has reported that its engine is up with the weights that it should have.
        away_us: Since when it is not live, on the clock of this life of the bus.
        seq: Last command that it applied, by its own report.
        status_us: When it did, on the clock of this life of the bus. A heartbeat that repeats the last one is no event.
        command_acked: Result of the last pause, resume, sleep, wake or end of a sync that ended after `status`.
        sync_acked: Result of the last commit or abort of a sync that ended after `status`.
        adapters_acked: Results of loads and commits of adapters that ended after `status`, by the versions' names in
            engines.
    """

    peer: str
    hello: Hello
    state: str
    fresh: bool
    joined: bool
    settled: bool
    away_us: int
    seq: Count = 0
    status: AgentStatus | None = None
    status_us: int = 0
    command_acked: bool | None = None
    sync_acked: bool | None = None
    adapters_acked: Mapping[str, bool] = {}


class OpenCommand(Struct, frozen=True, kw_only=True):
    """A command in flight.

    Attributes:
        resent_through: The last agent that it was sent to again in this round; empty at the end of a round.
        expected: Agents that owe an answer: those that were live when it was issued.
        outcomes: Of the agents that have answered or are missing, in that order.
        absent: Outcomes of the known agents that were away when it was issued.
    """

    record: CommandRecord
    command: Command
    ticket: Positive | None
    issued_us: int
    deadline_us: int
    retransmit_us: int
    resent_through: str = ""
    expected: frozenset[str]
    outcomes: Mapping[str, AgentOutcome] = {}
    absent: tuple[AgentOutcome, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether it waits for no agent."""
        return len(self.outcomes) == len(self.expected)

    @property
    def waiting(self) -> frozenset[str]:
        """Agents that have not answered yet."""
        return self.expected.difference(self.outcomes)

    def waits_for(self, name: str) -> bool:
        """Whether this agent has not answered yet."""
        return name in self.expected and name not in self.outcomes

    @property
    def all_outcomes(self) -> tuple[AgentOutcome, ...]:
        """Everything that is known of how it ended."""
        return (*self.absent, *self.outcomes.values())


class LoadedWeights(Struct, frozen=True):
    """Base weights that engines may have loaded.

    Attributes:
        committed: A sync committed them.
        holders: Replicas that were ever proven to hold them, in order.
    """

    weights: Committed
    committed: bool = False
    holders: tuple[Count, ...] = ()


class UsedAdapter(Struct, frozen=True):
    """A version of an adapter that engines may have loaded.

    Attributes:
        holders: Replicas that were ever proven to hold it, in order.
        loaded_seq: Position of the newest command to load it.
        committed: A sync committed it, or is committing it.
        dropped_seq: Position from which on replicas need not hold it; 0 while they should.
    """

    adapter: AdapterVersion
    loaded_seq: Count = 0
    committed: bool = False
    dropped_seq: Count = 0
    holders: tuple[Count, ...] = ()


class KnownAdapter(Struct, frozen=True, kw_only=True):
    """One LoRA adapter of the run.

    Attributes:
        requested: The newest version that a sync was ever requested for.
        used: Versions that engines may have loaded.
        newest_committed: The newest version that was ever committed, though it may be dropped since; 0 if none was.
    """

    requested: Count = 0
    used: tuple[UsedAdapter, ...] = ()
    newest_committed: Count = 0


class Sync(Struct, frozen=True, kw_only=True):
    """A sync in progress, of base weights or of one adapter.

    Attributes:
        version: Of the new weights: the one that was requested, or the next of the run.
        seq: Of the phase that is open.
        lost: Replicas that failed.
        restarted: Replicas whose agent joined as a new incarnation since the sync began.
        joining: Replicas that are new, beside others: they joined since the sync began, or had not settled by then.
        differing: Replicas that loaded other bytes than the others. A restart of their agents does not change that.
        holding: Replicas for which these weights were committed before the sync began.
        sent: The trainer has sent the weights that are being loaded.
        stuck: Replicas that have not received them: their engines may wait for a long time, and are not waited for.
        held_until_us: The commit waits until then for the trainer's sender to return; None if it does not wait.
        shrunk: Replicas have begun to leave the fleet meanwhile: the quorum is all that are left at most.
    """

    request: events.SyncRequested
    version: Positive
    phase: SyncPhase = "prepare"
    seq: Count = 0
    members: frozenset[Count] = frozenset()
    lost: frozenset[Count] = frozenset()
    restarted: frozenset[Count] = frozenset()
    joining: frozenset[Count] = frozenset()
    differing: frozenset[Count] = frozenset()
    holding: frozenset[Count] = frozenset()
    reports: tuple[Report, ...] = ()
    sent: bool = False
    stuck: frozenset[Count] = frozenset()
    failure: str = ""
    held_until_us: int | None = None
    shrunk: bool = False

    @property
    def key(self) -> str:
        """Name of its adapter; empty for base weights. At most one sync of each is in progress."""
        return self.request.adapter.name if self.request.adapter is not None else ""

    @property
    def shown_phase(self) -> str:
        """The phase as people are told it: of weights whose sender still sends, nothing is committed yet."""
        return "load" if self.held_until_us is not None else self.phase


class Order(Struct, frozen=True):
    """Whose a command was, and when it was published."""

    operator: bool
    at_ns: int


class Stop(Struct, frozen=True):
    """What stopped a replica that should not generate: the first of the commands that hold."""

    paused: Order | None = None
    asleep: Order | None = None


class CoordinatorState(Struct, frozen=True, kw_only=True):
    """Everything the bus knows.

    Attributes:
        history: The newest commands, each with the moment (µs) at which its time to live ends.
        desired: Of each replica (by index) and training rank (by name) that was ever seen.
        default_desired: Of replicas that have not been seen yet.
        stops: Of each replica that should not generate; of those that have not been seen yet under `UNSEEN_STOP`.
        syncs: The syncs in progress, by `Sync.key`.
        newest_version: The newest that a sync was ever requested for.
        loaded: Base weights that entered the load phase of a sync, the newest of them, in the order of their versions.
        launch_labels: Labels that engines of replicas were launched under, the newest of each: they prove nothing.
        claims: Places in the fleet that another incarnation claims: which one, and since when (µs).
        assigned: Replicas that were assigned to agents which have not joined yet, by their tokens: which one, and
            when (µs).
        retired: Agents that were taken out of the run, each with its last incarnation, which does not come back.
        trainer_session: Step of the profiling session that the trainer opened, until a stop of that step.
        discarded_seq: Position of the newest sleep that discards, or wake from one: adapters are loaded again after it.
    """

    run: str = ""
    epoch: Count = 0
    seq: Count = 0
    settings: events.CoordinatorSettings = convert(BusConfig(), events.CoordinatorSettings, from_attributes=True)
    members: Mapping[str, Member] = {}
    open: tuple[OpenCommand, ...] = ()
    history: tuple[tuple[CommandRecord, int], ...] = ()
    desired: Mapping[int | str, Desired] = {}
    default_desired: Desired = Desired()
    stops: Mapping[int, Stop] = {}
    syncs: Mapping[str, Sync] = {}
    newest_version: Count = 0
    loaded: tuple[LoadedWeights, ...] = ()
    launch_labels: Mapping[int, tuple[str, ...]] = {}
    claims: Mapping[str, tuple[str, int]] = {}
    assigned: Mapping[str, tuple[Count, int]] = {}
    retired: Mapping[str, str] = {}
    trainer_session: Count | None = None
    adapters: Mapping[str, KnownAdapter] = {}
    discarded_seq: Count = 0
    samples: SampleStatus | None = None

    @property
    def draining(self) -> frozenset[int]:
        """Replicas that leave the fleet, and take part in nothing more."""
        return frozenset(unit for unit, desired in self.desired.items() if desired.draining and isinstance(unit, int))

    @property
    def sync(self) -> Sync | None:
        """The sync of base weights in progress."""
        return self.syncs.get("")


def with_sync(state: CoordinatorState, sync: Sync) -> CoordinatorState:
    """Return `state` with this sync in progress."""
    return replace(state, syncs={**state.syncs, sync.key: sync})


def without_sync(state: CoordinatorState, sync: Sync) -> CoordinatorState:
    """Return `state` without this sync, which has ended."""
    return replace(state, syncs={key: other for key, other in state.syncs.items() if key != sync.key})


def member_at(state: CoordinatorState, peer: str) -> str | None:
    """Return the name under which the peer is a member now; None if it is not."""
    name = agent_of(peer)
    member = state.members.get(name)
    return name if member is not None and member.peer == peer and member.state in ALIVE else None


def conclude(command: OpenCommand, agents: Iterable[str], conclusion: Conclusion, at_us: int) -> OpenCommand:
    """Return `command`, concluded for those of `agents` that have not answered."""
    silent = sorted(filter(command.waits_for, agents))
    if not silent:
        return command
    latency_us = max(0, at_us - command.issued_us)
    outcomes = {name: AgentOutcome(agent=name, conclusion=conclusion, latency_us=latency_us) for name in silent}
    return replace(command, outcomes={**command.outcomes, **outcomes})


def with_open(state: CoordinatorState, changed: OpenCommand) -> CoordinatorState:
    """Return `state` with one of its open commands changed."""
    seq = changed.record.seq
    return replace(state, open=tuple(changed if command.record.seq == seq else command for command in state.open))


def send(state: CoordinatorState, peer: str, message: Downward, effects: Effects) -> None:
    """Append a control message to `effects`."""
    effects.append(events.Send(peer=peer, epoch=max(1, state.epoch), seq=state.seq, message=message))
