"""How many decisions a second the machines make, and how many records a second a replay folds, on one core.

    python -m bench.machines [--decisions 200000] [--out FILE]

`agent skipping` is a node rank 1 that skips every command; `agent acting` a primary whose engine is called for each
(two decisions a command: one begins the call, one ends it). `coordinator` counts each answer of 64 agents as one.
`replay` reads a log of those decisions back from its file, folds both machines over it and compares the effects.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from msgspec import Raw

from controlplane.cli.reducers import replay_log
from controlplane.machine import coordinator
from controlplane.machine.events import (
    AnswersReceived,
    CoordinatorEvent,
    CoordinatorSettings,
    HelloReceived,
    Issued,
    JoinReceived,
    Opened,
    PeerAnswer,
)
from controlplane.record.log import RunLog
from schemas.commands import EngineCommand, Target
from schemas.desired import Desired
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

AGENTS = 64
FLUSH = EngineCommand(operation="flush")


def joined(node_rank: int) -> tuple[machine.AgentState, list[Event]]:
    """Return an agent that is up and has its snapshot, and the events that led there."""
    events: list[Event] = [
        Started(at_ms=0, identity=Identity(replica=0, node_rank=node_rank, nnodes=2), incarnation="bench"),
        EngineObserved(
            at_ms=0,
            observation=Observation(engine="null", tokenizer="present", operations=frozenset(Operation)),
        ),
        SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired()),
    ]
    state = machine.AgentState()
    for event in events:
        state, _ = machine.decide(state, event)
    return state, events


def agent(node_rank: int, decisions: int) -> tuple[float, list[Event]]:
    """Return the decisions a second of one agent, and its events."""
    state, seen = joined(node_rank)
    commands = [
        CommandReceived(at_ms=seq, epoch=1, origin=1, seq=seq, ttl_ms=1000, command=FLUSH)
        for seq in range(1, decisions + 1)
    ]
    events: list[Event] = []
    start = time.perf_counter()
    for command in commands:
        state, effects = machine.decide(state, command)
        events.append(command)
        first = effects[0]
        if isinstance(first, Perform):
            returned = EngineReturned(at_ms=command.at_ms, call_id=first.call_id, result=Returned())
            state, effects = machine.decide(state, returned)
            events.append(returned)
        if len(events) >= decisions:
            break
    took = time.perf_counter() - start
    return len(events) / took, seen + events


def bus(decisions: int) -> tuple[float, list[CoordinatorEvent]]:
    """Return the answers a second that the coordinator takes in batches of 16, and its events."""
    settings = CoordinatorSettings(
        heartbeat_ms=2000, agent_timeout_ms=10_000, lease_ms=60_000, history=1024, retransmit_ms=1000
    )
    state = coordinator.CoordinatorState()
    opening: list[CoordinatorEvent] = [
        Opened(at_us=0, at_ns=0, run="bench", settings=settings, logic=coordinator.LOGIC)
    ]
    peers = [f"{replica}.0/bench" for replica in range(AGENTS)]
    for replica, peer in enumerate(peers):
        hello = Hello(
            identity=Identity(replica=replica, node_rank=0), incarnation="bench", journal="j", host="h", pid=1
        )
        opening += [
            HelloReceived(at_us=0, peer=peer, hello=hello, recorded_decisions=0),
            JoinReceived(at_us=0, peer=peer),
        ]
    for event in opening:
        state, _ = coordinator.decide(state, event)
    events: list[CoordinatorEvent] = []
    outcome = Acted(calls=("flush",))
    for seq in range(state.seq + 1, state.seq + 1 + decisions // AGENTS):
        events.append(Issued(at_us=seq, at_ns=seq, ticket=seq, command=FLUSH, target=Target(), timeout_ms=1000))
        for batch in range(0, AGENTS, 16):
            answers = tuple(
                PeerAnswer(peer=peer, origin=1, seq=seq, outcome=outcome, rule=10) for peer in peers[batch : batch + 16]
            )
            events.append(AnswersReceived(at_us=seq, answers=answers))
    start = time.perf_counter()
    for event in events:
        state, _ = coordinator.decide(state, event)
    took = time.perf_counter() - start
    return (decisions // AGENTS) * AGENTS / took, opening + events


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
                log.append_batch(f"0.{number}", DecisionBatch(journal="j", first=1, decisions=tuple(decisions)), 1)
        start = time.perf_counter()
        replayed = replay_log(RunLog.read(path))
        took = time.perf_counter() - start
    return replayed.records / took, replayed.records


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=200_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    acting, primary = agent(0, options.decisions)
    skipping, second = agent(1, options.decisions)
    answers, events = bus(options.decisions)
    folding, records = replaying([primary, second], events)
    rows = [
        {"what": "agent skipping", "per_second": round(skipping)},
        {"what": "agent acting", "per_second": round(acting)},
        {"what": "coordinator", "per_second": round(answers)},
        {"what": "replay", "per_second": round(folding), "records": records},
    ]
    for row in rows:
        print(f"{row['what']:<16} {row['per_second']:>10,} a second")  # noqa: T201
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
