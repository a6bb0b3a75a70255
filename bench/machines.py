"""How many decisions a second of CPU the machines make, and how many records a replay folds, on one core.

    python -m bench.machines [--decisions 200000] [--agents 64,4096] [--out FILE]

`agent skipping` is a node rank 1 that skips every command; `agent acting` a primary whose engine is called for each
(two decisions a command: one begins the call, one ends it). `coordinator` counts each answer of 64 agents as one.
`samples` are tokens whose provenance is asked and judged, in sequences of 100 that two of 64 known versions made, each
held by 64 replicas. `replay` reads a log of those decisions back from its file, folds both machines over it and
compares the effects. Each is the fastest of several passes over the same events.

The second table shows what one decision of the coordinator costs in fleets of different sizes: µs of CPU, the smallest
of several. An answer is one of a batch of that size. None of these may come near 5 ms, the longest turn of a bus.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Raw

from bench import tables
from bench.tables import Row
from controlplane.cli.replay_log import replay_log
from controlplane.machine import coordinator
from controlplane.machine.coordinator_state import LoadedWeights
from controlplane.machine.events import (
    AnswersReceived,
    CoordinatorEvent,
    CoordinatorSettings,
    HelloReceived,
    Issued,
    JoinReceived,
    Opened,
    PeerAnswer,
    PeerLost,
    StatusReceived,
    SyncRequested,
    TimerFired,
)
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.provenance import accepts
from controlplane.machine.status import fleet_status
from controlplane.record.log import RunLog
from controlplane.samples import SampleCounts
from schemas.agent_status import AgentStatus
from schemas.commands import Checkpoint, EngineCommand, Target
from schemas.desired import Committed, Desired
from schemas.events import (
    CommandReceived,
    Decision,
    EngineObserved,
    EngineReturned,
    Event,
    Observation,
    Perform,
    Returned,
    SnapshotReceived,
    Started,
)
from schemas.identity import Identity, Operation
from schemas.outcomes import Acted
from schemas.wire import DecisionBatch, Hello, encode
from workers.machine import decide as machine

S = TypeVar("S")

BATCH = 32
"""Decisions that an agent uploads at once."""
AGENTS = 64
FLUSH = EngineCommand(operation="flush")
DONE = Acted(calls=("flush",))
PASSES = 5
VERSIONS = 64


def joined(node_rank: int) -> tuple[machine.AgentState, list[Event]]:
    """Return an agent that is up and has its snapshot, and the events that led there."""
    events: list[Event] = [
        Started(at_ms=0, identity=Identity(replica=0, node_rank=node_rank, nnodes=2), incarnation="bench"),
        EngineObserved(
            at_ms=0, observation=Observation(engine="null", tokenizer="present", operations=frozenset(Operation))
        ),
        SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired()),
    ]
    state = machine.AgentState()
    for event in events:
        state, _ = machine.decide(state, event)
    return state, events


def agent_events(node_rank: int, decisions: int) -> tuple[list[Event], list[Event]]:
    """Return what an agent sees until it has joined, and commands with what comes of them."""
    state, seen = joined(node_rank)
    events: list[Event] = []
    for seq in range(1, decisions + 1):
        command = CommandReceived(at_ms=seq, epoch=1, origin=1, seq=seq, ttl_ms=1000, command=FLUSH)
        state, (first,) = machine.decide(state, command)
        events.append(command)
        if isinstance(first, Perform):
            returned = EngineReturned(at_ms=seq, call_id=first.call_id, result=Returned())
            state, _ = machine.decide(state, returned)
            events.append(returned)
        if len(events) >= decisions:
            break
    return seen, events


def folded(decide: Callable[[S, Any], tuple[S, object]], state: S, events: Sequence[object]) -> float:
    """Return the seconds of CPU of a fold."""
    best = float("inf")
    for _ in range(PASSES):
        after = state
        start = time.thread_time()
        for event in events:
            after, _ = decide(after, event)
        best = min(best, time.thread_time() - start)
    return best


class Fleet:
    """A coordinator whose agents, one per replica, have all joined and sent a heartbeat."""

    def __init__(self, agents: int) -> None:
        self.agents = agents
        self.peers = [f"{replica}.0/bench" for replica in range(agents)]
        self.state = coordinator.CoordinatorState()
        settings = CoordinatorSettings(
            heartbeat_ms=2000, agent_timeout_ms=10_000, lease_ms=60_000, history=1024, retransmit_ms=1000
        )
        opening: list[CoordinatorEvent] = [
            Opened(at_us=0, at_ns=0, run="bench", settings=settings, logic=coordinator.LOGIC)
        ]
        for made in (self.hello, self.join, self.status):
            opening += [made(replica) for replica in range(agents)]
        self.opening = opening
        for event in opening:
            self.state, _ = coordinator.decide(self.state, event)

    def hello(self, replica: int) -> CoordinatorEvent:
        hello = Hello(
            identity=Identity(replica=replica, node_rank=0), incarnation="bench", journal="j", host="h", pid=1
        )
        return HelloReceived(at_us=0, peer=self.peers[replica], hello=hello, recorded_decisions=0)

    def join(self, replica: int) -> CoordinatorEvent:
        return JoinReceived(at_us=0, peer=self.peers[replica])

    def status(self, replica: int) -> CoordinatorEvent:
        status = AgentStatus(ready=True, tokenizer="present", engine="null", generating=True)
        return StatusReceived(at_us=1, peer=self.peers[replica], seq=self.state.seq, status=status)

    def lost(self, replica: int) -> CoordinatorEvent:
        return PeerLost(at_us=1, peer=self.peers[replica], reason="silent")

    def issue(self, seq: int, command: EngineCommand = FLUSH) -> CoordinatorEvent:
        return Issued(at_us=seq, at_ns=seq, ticket=seq, command=command, target=Target(), timeout_ms=1000)

    def answers(self, seq: int, batch: int) -> list[CoordinatorEvent]:
        """Return all answers to a command, in batches."""
        every = [PeerAnswer(peer=peer, origin=1, seq=seq, outcome=DONE, rule=10) for peer in self.peers]
        return [
            AnswersReceived(at_us=seq, answers=tuple(every[first : first + batch]))
            for first in range(0, self.agents, batch)
        ]


def bus(decisions: int) -> tuple[float, list[CoordinatorEvent]]:
    """Return the answers a second that the coordinator takes in batches of 16, and its events."""
    fleet, events = Fleet(AGENTS), list[CoordinatorEvent]()
    for seq in range(fleet.state.seq + 1, fleet.state.seq + 1 + decisions // AGENTS):
        events += [fleet.issue(seq), *fleet.answers(seq, 16)]
    took = folded(coordinator.decide, fleet.state, events)
    return (decisions // AGENTS) * AGENTS / took, fleet.opening + events


def growth(agents: int) -> dict[str, float]:
    """Return what one decision costs in a fleet of this size, and the longest about all of it: µs of CPU."""
    fleet, costs = Fleet(agents), dict[str, float]()
    seq = fleet.state.seq + 1
    sample = [replica * 37 % agents for replica in range(200)]
    for name, event in (("hello", fleet.hello), ("join", fleet.join), ("status", fleet.status), ("lost", fleet.lost)):
        costs[name], _, _ = decided(fleet.state, [event(replica) for replica in sample])
    _, costs["issue flush"], issued = decided(fleet.state, [fleet.issue(seq)])
    _, costs["issue pause"], _ = decided(fleet.state, [fleet.issue(seq, EngineCommand(operation="pause"))])
    for batch in (1, 16, 64, 256):
        events = fleet.answers(seq, batch)
        cost, longest, _ = decided(issued, events, repeats=3)
        costs[f"answer, of {batch}"] = cost * len(events) / agents
        costs[f"longest batch of {batch}"] = longest
    _, costs["all answers at once"], _ = decided(issued, fleet.answers(seq, agents))
    _, costs["deadline, all missing"], _ = decided(issued, [TimerFired(at_us=2_000_000)])
    costs["longest of a sync"] = max(sync_decisions(fleet, fleet.state))
    costs["all lost and back"], _, _ = decided(
        fleet.state, [event(replica) for event in (fleet.lost, fleet.hello, fleet.join) for replica in range(agents)], 1
    )
    costs["status of the fleet"] = smallest(lambda: fleet_status(fleet.state, 1, "log", {}))
    return costs


def decided(
    state: coordinator.CoordinatorState, events: list[CoordinatorEvent], repeats: int = 5
) -> tuple[float, float, coordinator.CoordinatorState]:
    """Decide events one after the other: return the mean and the longest, in µs of CPU, and the state at the end."""
    best = [float("inf")] * len(events)
    for _ in range(repeats):
        after = state
        for number, event in enumerate(events):
            began = time.thread_time_ns()
            after, _ = coordinator.decide(after, event)
            best[number] = min(best[number], (time.thread_time_ns() - began) / 1000)
    return sum(best) / len(best), max(best), after


def smallest(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the smallest µs of CPU of several runs."""
    took = []
    for _ in range(repeats):
        began = time.thread_time_ns()
        work()
        took.append((time.thread_time_ns() - began) / 1000)
    return min(took)


def sync_decisions(fleet: Fleet, state: coordinator.CoordinatorState) -> list[float]:
    """Return what each decision of a whole weight sync costs, answered in batches of 256."""
    request = SyncRequested(
        at_us=1,
        at_ns=1,
        ticket=1,
        version=1,
        source=Checkpoint("v1"),
        manifest=None,
        in_flight="abort",
        quorum=None,
        target=Target(),
        timeout_ms=1000,
    )
    _, longest, state = decided(state, [request])
    costs = [longest]
    while state.sync is not None:
        _, longest, state = decided(state, fleet.answers(state.sync.seq, 256), repeats=3)
        costs.append(longest)
    return costs


def samples(sequences: int) -> float:
    """Return the tokens a second whose versions are looked up and judged."""
    loaded = tuple(
        LoadedWeights(Committed(version, Checkpoint(f"v{version}"), None), committed=True, holders=tuple(range(AGENTS)))
        for version in range(1, VERSIONS + 1)
    )
    view = FleetView(coordinator.CoordinatorState(loaded=loaded))
    ends = ((VERSIONS - 1, 0, 60), (VERSIONS, 60, 100))
    spans = [{"version": str(version), "start": begin, "end": end} for version, begin, end in ends]
    answers = [{"meta_info": {"weight_versions": spans, "completion_tokens": 100}}] * sequences
    counts = SampleCounts()

    def judge() -> None:
        for number, sample in enumerate(view.provenance(answers, replica=AGENTS // 2)):
            counts.add(sample, accepted=bool(accepts(sample, max_staleness=number % 2)))

    return 100 * sequences / (smallest(judge) / 1e6)


def replaying(agents: list[list[Event]], events: list[CoordinatorEvent]) -> tuple[float, int]:
    """Return the records a second of a replay, from the file to the comparison, and their number."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.db"
        with RunLog.open(path, "bench") as log:
            bus = log.state
            for event in events:
                bus, effects = coordinator.decide(bus, event)
                log.append(event, effects, 1)
            for number, seen in enumerate(agents):
                state, decisions = machine.AgentState(), []
                for agent_event in seen:
                    state, decided = machine.decide(state, agent_event)
                    decisions.append(Decision(Raw(encode(agent_event)), Raw(encode(decided))))
                for done in range(0, len(decisions), BATCH):
                    upload = DecisionBatch(journal="j", first=done + 1, decisions=tuple(decisions[done : done + BATCH]))
                    log.append_batch(f"0.{number}", upload, 1)
        took = float("inf")
        for _ in range(PASSES):
            start = time.thread_time()
            replayed = replay_log(RunLog.read(path))
            took = min(took, time.thread_time() - start)
    return replayed.records / took, replayed.records


def table(rows: list[Row]) -> str:
    """Return the decisions a second of each machine."""
    columns: dict[str, tables.Cell] = {"machine": "{what}", "a second": "{per_second:,}"}
    return tables.table(columns, (row for row in rows if "per_second" in row))


def growth_table(rows: list[Row]) -> str:
    """Return what one decision of the coordinator costs, by the size of the fleet."""
    return tables.pivot((row for row in rows if "us" in row), "{what}", "{agents:,}", "{us:,.1f}", "µs of CPU")


def main() -> None:
    """Measure, print a table, write JSON."""
    options = tables.read_options(__doc__, decisions=200_000, agents="64,1024,4096")
    (primary, acting), (second, skipping) = (agent_events(rank, options.decisions) for rank in (0, 1))
    rows: list[Row] = [
        {"what": what, "per_second": round(len(seen) / folded(machine.decide, joined(rank)[0], seen))}
        for what, rank, seen in (("agent skipping", 1, skipping), ("agent acting", 0, acting))
    ]
    answers, events = bus(options.decisions)
    replayed, records = replaying([primary + acting, second + skipping], events)
    rows += [
        {"what": "coordinator", "per_second": round(answers)},
        {"what": "samples", "per_second": round(samples(options.decisions // 20))},
        {"what": "replay", "per_second": round(replayed), "records": records},
    ]
    sizes = [int(size) for size in options.agents.split(",")]
    rows += [{"what": what, "agents": n, "us": round(us, 1)} for n in sizes for what, us in growth(n).items()]
    tables.publish(f"{table(rows)}\n\n{growth_table(rows)}", rows, options.out)


if __name__ == "__main__":
    main()
