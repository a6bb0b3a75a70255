"""Logs written by hand, and traces as torch writes them: for timelines of runs that are hard to reproduce."""

import gzip
import hashlib
import json
from pathlib import Path

from msgspec import Raw, Struct

from controlplane.machine.events import (
    AnswersReceived,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    Issued,
    PeerAnswer,
    Publish,
    StatusReceived,
)
from controlplane.record.log import RunLog
from schemas.agent_status import AgentStatus, Clock
from schemas.commands import EngineCommand, ProfileCommand, Target
from schemas.events import Answer, CommandReceived, Decision, Effect, Event, Started
from schemas.identity import Identity
from schemas.outcomes import Acted, Outcome, Trace
from schemas.reports import AgentOutcome, Report
from schemas.wire import DecisionBatch, Envelope, Hello, encode

START_NS = 1_800_000_000_000_000_000
"""When the run begins, on the bus's clock."""
MS = 1_000_000
BASE_NS = START_NS - 40_000_000_000_000_000
"""Base of the traces' `ts`. Torch chooses one some months ago."""
FLUSH = EngineCommand(operation="flush")


class Written:
    """A log. All moments are milliseconds after the start, on the bus's clock.

    Args:
        path: The file.
        zero_ms: What an agent's monotonic clock shows at the start.
    """

    def __init__(self, path: Path, zero_ms: int = 5_000) -> None:
        self.path, self.zero_ms = path, zero_ms
        self._log = RunLog.open(path, "written")
        self._seq = 0
        self._asked: dict[int, EngineCommand | ProfileCommand] = {}
        self._numbers: dict[str, int] = {}

    def commit(self) -> Path:
        """Make readable what was written so far. More may follow."""
        self._log.commit()
        return self.path

    def close(self) -> Path:
        self._log.close()
        return self.path

    def bus(self, at_ms: float, event: CoordinatorEvent, *effects: CoordinatorEffect) -> None:
        self._log.append(event, effects, START_NS + int(at_ms * MS))

    def decides(self, agent: str, event: Event, *effects: Effect) -> None:
        """A decision of an agent, which the bus receives half a second later."""
        number = self._numbers[agent] = self._numbers.get(agent, 0) + 1
        decision = Decision(Raw(encode(event)), Raw(encode(effects)))
        batch = DecisionBatch(journal=f"j{agent}", first=number, decisions=(decision,))
        assert self._log.append_batch(agent, batch, START_NS + (event.at_ms - self.zero_ms + 500) * MS) == number

    def joins(self, place: Identity, at_ms: float = 1, clocks: tuple[Clock, ...] = ()) -> str:
        """An agent starts, says hello and reports its clocks. Returns its routing id."""
        peer = f"{place.agent}/i"
        hello = Hello(identity=place, incarnation="i", journal=f"j{place.agent}", host="node", pid=1)
        self.bus(at_ms, HelloReceived(at_us=0, peer=peer, hello=hello, recorded_decisions=0))
        self.decides(place.agent, Started(at_ms=self.zero_ms + int(at_ms), identity=place, incarnation="i"))
        for clock in clocks:
            self.bus(at_ms, StatusReceived(at_us=0, peer=peer, seq=0, status=AgentStatus(ready=True, clock=clock)))
        return peer

    def clock(self, at_ms: int, offset_ns: int = 0, error_ns: int = 1_000) -> Clock:
        """A correct estimate by an agent whose node's wall clock is that far from the bus's."""
        wall_ns = START_NS + at_ms * MS - offset_ns
        return Clock(at_ms=self.zero_ms + at_ms, wall_ns=wall_ns, offset_ns=offset_ns, error_ns=error_ns)

    def issue(
        self,
        peer: str,
        at_ms: float,
        got_ms: float,
        command: EngineCommand | ProfileCommand = FLUSH,
        replicas: frozenset[int] | None = None,
    ) -> int:
        """A command for some replicas, or all, which one agent receives. Returns its seq."""
        self._seq += 1
        seq, agent = self._seq, peer.partition("/")[0]
        self._asked[seq] = command
        target = Target(replicas=replicas)
        envelope = Envelope(run="written", issued_at_ns=0, ttl_ms=1, target=target, body=Raw(encode(command)))
        issued = Issued(at_us=0, at_ns=0, ticket=seq, command=command, target=target, timeout_ms=1)
        self.bus(at_ms, issued, Publish(epoch=1, seq=seq, envelope=envelope))
        self.decides(agent, self._received(seq, got_ms))
        return seq

    def answer(self, peer: str, seq: int, done_ms: float, concluded_ms: float, outcome: Outcome) -> None:
        """End a command: the agent answers, the bus concludes."""
        agent, command = peer.partition("/")[0], self._asked[seq]
        lines = (AgentOutcome(agent=agent, conclusion=outcome, rule=10),)
        report = Report(seq=seq, origin=1, command=command, outcomes=lines)
        answer = PeerAnswer(peer=peer, origin=1, seq=seq, outcome=outcome, rule=10)
        arrived = AnswersReceived(at_us=0, answers=(answer,))
        self.bus(concluded_ms, arrived, Conclude(ticket=seq, report=report))
        self.decides(agent, self._received(seq, done_ms), Answer(epoch=1, seq=seq, outcome=outcome, rule=10))

    def commands(
        self, peer: str, at_ms: float, took_ms: float, outcome: Outcome, command: EngineCommand | ProfileCommand = FLUSH
    ) -> None:
        """A whole command: received after a quarter of the time it takes, answered a quarter before its end."""
        seq = self.issue(peer, at_ms, at_ms + took_ms / 4, command)
        self.answer(peer, seq, at_ms + took_ms * 3 / 4, at_ms + took_ms, outcome)

    def _received(self, seq: int, at_ms: float) -> CommandReceived:
        at, command = self.zero_ms + int(at_ms), self._asked[seq]
        return CommandReceived(at_ms=at, epoch=1, origin=1, seq=seq, ttl_ms=1, command=command)

    def profiles(self, peer: str, at_ms: float, took_ms: float, *traces: Trace) -> None:
        """Stop a session. The answer reports traces."""
        stop = ProfileCommand(action="stop", step=1)
        self.commands(peer, at_ms, took_ms, Acted(calls=("stop_profile",), traces=traces), stop)


class Op(Struct):
    """One event of a trace. `at_ms` counts from the start of the run, on the node's own wall clock."""

    name: str
    at_ms: float
    for_ms: float
    pid: int | str = 77
    tid: int | str = 78
    cat: str = "cpu_op"


def torch_trace(ops: list[Op], *, rank: int | None = None, base_last: bool = False, arrows: bool = False) -> bytes:
    """A trace as torch 2.13 writes it.

    Args:
        ops: Its slices.
        rank: Its rank; None if it does not say.
        base_last: The base stands after the events.
        arrows: Draw an arrow from each slice to the next.
    """
    head = f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": 8}},\n' if rank is not None else ""
    base = f'"baseTimeNanoseconds": {BASE_NS}'
    events = [_named("process_name", {"name": "python"}), _named("process_labels", {"labels": "CPU"})]
    for i, op in enumerate(ops):
        ts = f"{(START_NS - BASE_NS) // 1000 + round(op.at_ms * 1000)}.250"
        place = f'"pid": {json.dumps(op.pid)}, "tid": {json.dumps(op.tid)}, "ts": {ts}'
        events.append(
            f'{{"ph": "X", "cat": "{op.cat}", "name": "{op.name}", {place}, "dur": {op.for_ms * 1000:.3f},\n'
            f'    "args": {{"External id": {i}, "Addr": 18446744073709551615}}}}'
        )
        if arrows:
            kind, bound = ("f", ', "bp": "e"') if i % 2 else ("s", "")
            events.append(f'{{"ph": "{kind}", "id": {i // 2 + 1}, "cat": "ac2g", "name": "ac2g", {place}{bound}}}')
    body = ",\n  ".join(events)
    first, last = ("", f", {base}") if base_last else (f"{base},\n", "")
    return f'{{\n"schemaVersion": 1,\n{head}{first}"traceEvents": [\n  {body}\n  ],"traceName": "x"{last} }}'.encode()


def placed(root: Path, name: str, content: bytes) -> Trace:
    """Write a trace below a root, compressed if its name says so."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    data = gzip.compress(content, mtime=0) if name.endswith(".gz") else content
    file.write_bytes(data)
    return Trace(name, len(data), hashlib.sha256(data).hexdigest())


def _named(kind: str, args: dict[str, str]) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": 77, "tid": 0, "args": args})
