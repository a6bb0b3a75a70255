"""What a run's log costs: how long a commit takes, how long opening and replaying it, and where its bytes go.

    python -m bench.logs [--agents 4] [--commands 151000] [--log FILE] [--out FILE]

The log is what a bus writes for agents that skip every command, except one that acts: both machines decide, and nothing
is sent. `commit` is the time of a commit by the clock, over the whole run; that of an agent's journal stands beside
it, with the decisions of the agent that acts. `opened` is the time to open the log again, and how many records were
folded for it. `replay` reads all of it back, folds the machines over it and compares the effects: records a second of
CPU.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec import Raw

from bench import machines, tables
from bench.tables import Row
from controlplane.cli.replay_log import replay_log
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
    Publish,
    StatusReceived,
)
from controlplane.record.log import RunLog
from schemas import events as agent_events
from schemas.agent_status import AgentStatus
from schemas.commands import EngineCommand, Target
from schemas.desired import Desired
from schemas.identity import Identity, Operation
from schemas.outcomes import Acted
from schemas.wire import DecisionBatch, Hello, decode_command, encode
from workers.link.journal import Journal
from workers.link.upload import STATE_EVERY
from workers.machine import decide as machine

SETTINGS = CoordinatorSettings(
    heartbeat_ms=2000, agent_timeout_ms=10_000, lease_ms=60_000, history=1024, retransmit_ms=1000
)
TURN = 256
"""Answers that the bus takes in at once."""
START_NS = 1_700_000_000 * 10**9


class Node:
    """One agent: its machine, and the decisions that it has not uploaded yet."""

    def __init__(self, replica: int) -> None:
        self.identity = Identity(replica=replica, node_rank=0)
        noise = random.Random(replica)  # as hard to compress as real ids
        self.peer = f"{replica}.0/{noise.randbytes(16).hex()}/{noise.randbytes(5).hex()}"
        self.journal = noise.randbytes(16).hex()
        self.waiting: list[agent_events.Decision] = []
        self.uploaded = 0
        self.state = machine.AgentState()
        seen = agent_events.Observation(engine="null", tokenizer="present", operations=frozenset(Operation))
        self.decide(agent_events.Started(at_ms=0, identity=self.identity, incarnation=self.peer.split("/")[1]))
        self.decide(agent_events.EngineObserved(at_ms=0, observation=seen))
        self.decide(agent_events.SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=Desired()))

    def decide(self, event: agent_events.Event) -> tuple[agent_events.Effect, ...]:
        """Decide, and keep the decision for the upload."""
        self.state, effects = machine.decide(self.state, event)
        self.waiting.append(agent_events.Decision(Raw(encode(event)), Raw(encode(effects))))
        return effects

    def answers(self, publish: Publish, at_ms: int) -> Iterator[agent_events.Answer]:
        """Take a command, and make the calls that follow."""
        envelope = publish.envelope
        command = agent_events.CommandReceived(
            at_ms=at_ms,
            epoch=publish.epoch,
            origin=publish.epoch,
            seq=publish.seq,
            ttl_ms=envelope.ttl_ms,
            command=decode_command(envelope.body),
            target=envelope.target,
        )
        effects = self.decide(command)
        while effects:
            calls = [effect for effect in effects if isinstance(effect, agent_events.Perform)]
            yield from (effect for effect in effects if isinstance(effect, agent_events.Answer))
            effects = ()
            for call in calls:
                effects = self.decide(
                    agent_events.EngineReturned(at_ms=at_ms + 1, call_id=call.call_id, result=agent_events.Returned())
                )


class Run:
    """A bus without sockets, which writes its log.

    Args:
        path: The log, which must not exist.
        agents: Replicas of one node.
        bytes_max, age_max_s: As in `RunLog.open`.
        state_every: Decisions of an agent between two uploads of its state.

    Attributes:
        commits_us: How long each commit took.
    """

    def __init__(
        self,
        path: Path,
        agents: int,
        bytes_max: int | None = None,
        age_max_s: int | None = None,
        state_every: int = STATE_EVERY,
    ) -> None:
        self._state_every = state_every
        self._log = RunLog.open(path, "bench", bytes_max=bytes_max, age_max_s=age_max_s)
        self._state = self._log.state
        self._now_us = 0
        self.commits_us: list[float] = []
        self._nodes = [Node(replica) for replica in range(agents)]
        self._decide(Opened(at_us=0, at_ns=START_NS, run="bench", settings=SETTINGS, logic=coordinator.LOGIC))
        for node in self._nodes:
            host = f"node-{node.identity.replica:04}"
            hello = Hello(
                identity=node.identity, incarnation=node.peer.split("/")[1], journal=node.journal, host=host, pid=1
            )
            self._decide(HelloReceived(at_us=0, peer=node.peer, hello=hello, recorded_decisions=0))
            self._decide(JoinReceived(at_us=0, peer=node.peer))
            status = AgentStatus(ready=True, tokenizer="present", engine="null", generating=True)
            self._decide(StatusReceived(at_us=0, peer=node.peer, seq=1, status=status))
        self._commit()

    def commands(self, count: int) -> None:
        """Publish this many commands. Replica 0 acts, the others skip."""
        flush, target = EngineCommand(operation="flush"), Target(replicas=frozenset({0}))
        for ticket in range(1, count + 1):
            self._now_us += 10_000
            issued = Issued(
                at_us=self._now_us,
                at_ns=START_NS + self._now_us * 1000,
                ticket=ticket,
                command=flush,
                target=target,
                timeout_ms=60_000,
            )
            (publish,) = self._decide(issued)
            self._commit()
            assert isinstance(publish, Publish)
            self._answer(publish)

    def _answer(self, publish: Publish) -> None:
        answers = [
            PeerAnswer(peer=node.peer, origin=publish.epoch, seq=publish.seq, outcome=answer.outcome, rule=answer.rule)
            for node in self._nodes
            for answer in node.answers(publish, self._now_us // 1000)
        ]
        assert isinstance(answers[0].outcome, Acted) and len(answers) == len(self._nodes)
        for first in range(0, len(answers), TURN):
            self._now_us += 1000
            self._decide(AnswersReceived(at_us=self._now_us, answers=tuple(answers[first : first + TURN])))
            self._commit()
        if len(self._nodes[0].waiting) >= machines.BATCH:
            self._upload()

    def _upload(self) -> None:
        for node in self._nodes:
            uploaded = node.uploaded + len(node.waiting)
            batch = DecisionBatch(
                journal=node.journal,
                first=node.uploaded + 1,
                decisions=tuple(node.waiting),
                state=encode(node.state) if uploaded % self._state_every < len(node.waiting) else b"",
            )
            self._log.append_batch(node.identity.agent, batch, START_NS + self._now_us * 1000)
            node.uploaded = uploaded
            node.waiting.clear()
        self._commit()

    def _commit(self) -> None:
        start = time.perf_counter_ns()
        self._log.commit()
        self.commits_us.append((time.perf_counter_ns() - start) / 1000)

    def _decide(self, event: CoordinatorEvent) -> tuple[object, ...]:
        self._state, effects = coordinator.decide(self._state, event)
        self._log.append(event, effects, START_NS + self._now_us * 1000, self._state)
        return effects

    def close(self) -> None:
        """Write what is left, and close the log."""
        self._upload()
        self._log.close()


def bytes_by_kind(path: Path) -> dict[str, int]:
    """Return how many bytes the bodies of each kind of record take."""
    found: Counter[str] = Counter()
    for entry in RunLog.read(path):
        found[f"{'agents' if entry.agent else 'bus'} {entry.kind}: event"] += len(entry.event)
        found[f"{'agents' if entry.agent else 'bus'} {entry.kind}: effects"] += len(entry.effects)
    return dict(found.most_common())


def percentiles(took_us: list[float]) -> dict[str, float]:
    """Return the tail of a distribution, in µs."""
    cuts = statistics.quantiles(took_us, n=1000)
    tail = {"p50": cuts[499], "p99": cuts[989], "p99.9": cuts[998], "max": max(took_us)}
    return {name: round(value, 1) for name, value in tail.items()}


def journal_commits(path: Path, commands: int) -> list[float]:
    """Return how long each commit of an agent's journal takes: two for a command, before its call and after it."""
    seen, commanded = machines.agent_events(0, 2 * commands)
    state, took_us = machine.AgentState(), []
    journal = Journal.open(path, "0.0", "os")
    for event in seen + commanded:
        state, effects = machine.decide(state, event)
        journal.append(event, effects, state)
        start = time.perf_counter_ns()
        journal.commit()
        took_us.append((time.perf_counter_ns() - start) / 1000)
        journal.release(journal.committed)
    journal.close()
    return took_us


def measure(path: Path, agents: int, commands: int) -> dict[str, object]:
    """Write a log and open it again."""
    run = Run(path, agents)
    start = time.perf_counter()
    run.commands(commands)
    run.close()
    written_s = time.perf_counter() - start
    start = time.perf_counter()
    with RunLog.open(path) as log:
        opened_s = time.perf_counter() - start
        folded = log.folded
    start = time.thread_time()
    replayed = replay_log(RunLog.read(path))
    replay_s = time.thread_time() - start
    return {
        "agents": agents,
        "commands": commands,
        "cores": os.cpu_count(),
        "file_bytes": path.stat().st_size,
        "bytes_a_command_and_agent": round(path.stat().st_size / commands / agents, 1),
        "written_s": round(written_s, 1),
        "opened_s": round(opened_s, 3),
        "folded": folded,
        "commit_us": percentiles(run.commits_us),
        "journal_commit_us": percentiles(journal_commits(path.with_name("journal.db"), commands)),
        "replayed": replayed.records,
        "replayed_a_second": round(replayed.records / replay_s),
        "bytes": bytes_by_kind(path),
    }


def table(rows: list[Row]) -> str:
    """Return one line, of the whole run."""
    columns: dict[str, tables.Cell] = {
        "commands": "{commands:,}",
        "MB": lambda row: f"{row['file_bytes'] / 1e6:,.0f}",
        **{f"a commit, {tail}, µs": f"{{commit_us[{tail}]:,.0f}}" for tail in ("p50", "p99", "p99.9", "max")},
        **{f"of a journal, {tail}": f"{{journal_commit_us[{tail}]:,.0f}}" for tail in ("p50", "p99", "p99.9", "max")},
        "opened, s": "{opened_s:.2f}",
        "folded for it": "{folded:,}",
        "replayed a second": "{replayed_a_second:,}",
    }
    return tables.table(columns, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--commands", type=int, default=151_000)
    parser.add_argument("--log", type=Path, help="Keep the log here.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.log or Path(folder) / "run.db", options.agents, options.commands)
    print(json.dumps(results, indent=1))  # noqa: T201
    if options.out:
        options.out.write_text(json.dumps([results]) + "\n")


if __name__ == "__main__":
    main()
