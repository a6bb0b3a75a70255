"""The floor: the same exchange with the same promises, written by hand for this benchmark alone.

The real machines decide on both sides, the messages are the real ones, both sides append each decision to a framed file
(length and CRC-32) before its effects, the engine is read back after each call, and the bus lives in a thread of its
own. Left out are membership, heartbeats, uploads, deadlines, resends, keys, an event loop, and a log that others can
read. The engine is called inline. `bench.fanout` measures it as `floor` and `floor-skip`, beside the real one.
"""

import os
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import zmq
from msgspec import Struct

from bench.machines import FLUSH
from bench.processes import System, spawn
from controlplane.machine import coordinator, events
from schemas import events as agent_events
from schemas import wire
from schemas.commands import Target
from schemas.desired import Desired
from schemas.identity import Identity, Operation
from workers.link.frames import read_publication
from workers.machine import decide as machine

RUN = "floor"
SETTINGS = events.CoordinatorSettings(
    heartbeat_ms=2000, agent_timeout_ms=10_000, lease_ms=60_000, history=1024, retransmit_ms=1000
)
TURN = 256
"""Messages that the bus takes in at once."""


class Decided(Struct, frozen=True, gc=False):
    """A decision as both sides record it."""

    event: Struct
    effects: object


class FramedFile:
    """Records one after the other, each with its length and checksum."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._parts: list[bytes] = []

    def append(self, event: Struct, effects: object) -> None:
        """Add a decision. It is in the file after the next `commit`."""
        body = wire.encode(Decided(event, effects))
        self._parts += (len(body).to_bytes(4, "little"), zlib.crc32(body).to_bytes(4, "little"), body)

    def commit(self) -> None:
        """Write what was appended, as one group."""
        if self._parts:
            os.write(self._file, b"".join(self._parts))
            self._parts.clear()


# --- the bus ----------------------------------------------------------------------------------------------------------


class FloorBus:
    """A bus in a thread of its own, without anything but commands and outcomes."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        for sock in (self._publisher, self._router):
            sock.set(zmq.RCVHWM, 0)
            sock.set(zmq.LINGER, 0)
            sock.bind("tcp://127.0.0.1:0")
        self._publisher.set(zmq.XPUB_VERBOSER, 1)
        self.addresses = [sock.get_string(zmq.LAST_ENDPOINT) for sock in (self._router, self._publisher)]
        self._log = FramedFile(path)
        self._state = coordinator.CoordinatorState()
        self._wakes, self._wake = os.pipe()
        self._orders: deque[tuple[int, Future[events.Conclude]]] = deque()
        self._waiting: dict[int, Future[events.Conclude]] = {}
        self._peers: dict[bytes, str] = {}
        self._tickets = 0

    def join(self, agents: int) -> None:
        """Let this many agents join, then serve."""
        self._decide([events.Opened(at_us=0, at_ns=0, run=RUN, settings=SETTINGS, logic=coordinator.LOGIC)])
        for _ in range(agents):
            self._publisher.recv()  # its subscription
        while len(self._peers) < agents:
            connection, _, body = self._router.recv_multipart()
            hello = wire.decode_upward(body)
            assert isinstance(hello, wire.Hello)
            self._peers[connection] = peer = f"{hello.identity.agent}/{hello.incarnation}/{connection.hex()}"
            self._decide(
                [
                    events.HelloReceived(at_us=0, peer=peer, hello=hello, recorded_decisions=0),
                    events.JoinReceived(at_us=0, peer=peer),
                ]
            )
        threading.Thread(target=self._serve, daemon=True).start()

    def publish(self) -> Future[events.Conclude]:
        """Hand a command to the bus."""
        self._tickets += 1
        concluded: Future[events.Conclude] = Future()
        self._orders.append((self._tickets, concluded))
        os.write(self._wake, b"\0")
        return concluded

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        receive, header_of = self._router.recv_multipart, wire.parse_frames
        while True:
            ready = dict(poller.poll())
            at_us, at_ns = time.monotonic_ns() // 1000, time.time_ns()
            batch: list[events.CoordinatorEvent] = []
            answers = []
            with suppress(zmq.Again):
                for _ in range(TURN):
                    connection, *frames = receive(zmq.NOBLOCK)
                    header, body = header_of(frames)
                    message = wire.decode_upward(body)
                    assert isinstance(message, wire.CommandOutcome)
                    answers.append(
                        events.PeerAnswer(
                            peer=self._peers[connection],
                            origin=header.origin,
                            seq=header.seq,
                            outcome=message.outcome,
                            rule=message.rule,
                        )
                    )
            if answers:
                batch.append(events.AnswersReceived(at_us=at_us, at_ns=at_ns, answers=tuple(answers)))
            if self._wakes in ready:
                os.read(self._wakes, 4096)
            while self._orders:
                ticket, concluded = self._orders.popleft()
                self._waiting[ticket] = concluded
                batch.append(
                    events.Issued(
                        at_us=at_us, at_ns=at_ns, ticket=ticket, command=FLUSH, target=Target(), timeout_ms=60_000
                    )
                )
            for effect in self._decide(batch):
                self._perform(effect)

    def _decide(self, batch: list[events.CoordinatorEvent]) -> list[events.CoordinatorEffect]:
        performed: list[events.CoordinatorEffect] = []
        for event in batch:
            self._state, effects = coordinator.decide(self._state, event)
            self._log.append(event, effects)
            performed += effects
        self._log.commit()
        return performed

    def _perform(self, effect: events.CoordinatorEffect) -> None:
        if isinstance(effect, events.Publish):
            header = wire.encode_header(effect.epoch, effect.epoch, effect.seq)
            self._publisher.send_multipart([wire.TOPIC_COMMAND, header, wire.encode(effect.envelope)])
        elif isinstance(effect, events.Conclude) and effect.ticket is not None:
            self._waiting.pop(effect.ticket).set_result(effect)


def floor(nodes: int) -> Callable[[int], AbstractContextManager[System]]:
    """The exchange of the floor, with every agent on node rank 0 (replicas of one node) or 1 (of two)."""

    @contextmanager
    def exchange_with(agents: int) -> Iterator[System]:
        with tempfile.TemporaryDirectory() as folder:
            bus = FloorBus(Path(folder) / "log")

            def exchange() -> None:
                report = bus.publish().result().report
                assert len(report.outcomes) == agents  # type: ignore[union-attr]

            with spawn("floor", agents, *bus.addresses, str(nodes)) as fleet:
                bus.join(agents)
                yield System(exchange, fleet)

    return exchange_with


# --- agents -----------------------------------------------------------------------------------------------------------


class FloorAgent:
    """One agent: its sockets, machine and journal."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", addresses: list[str], identity: Identity, path: Path
    ) -> None:
        self._dealer, self.subscriber = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        self._dealer.connect(addresses[0])
        self.subscriber.subscribe(wire.TOPIC_COMMAND)
        self.subscriber.connect(addresses[1])
        self._journal = FramedFile(path)
        self._state = machine.AgentState()
        self._observation = agent_events.Observation(
            engine="null",
            tokenizer="present" if identity.node_rank == 0 else "absent",
            operations=frozenset(Operation),
            generating=True,
            asleep=frozenset(),
            profiling=False,
            version=0,
        )
        self._decide(agent_events.Started(at_ms=0, identity=identity, incarnation=RUN))
        self._decide(agent_events.EngineObserved(at_ms=0, observation=self._observation))
        self._decide(agent_events.SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=Desired()))
        hello = wire.Hello(identity=identity, incarnation=RUN, journal=RUN, host=RUN, pid=1)
        self._dealer.send_multipart([wire.encode_header(1), wire.encode(hello)])

    def take(self) -> None:
        """Receive a command, decide, record, act and answer."""
        now_ms = int(time.monotonic() * 1000)
        event = read_publication(self.subscriber.recv_multipart(), RUN, now_ms)
        for effect in self._decide(event):
            if isinstance(effect, agent_events.Perform):
                returned = agent_events.EngineReturned(
                    at_ms=now_ms, call_id=effect.call_id, result=agent_events.Returned(), observation=self._observation
                )
                for after in self._decide(returned):
                    self._answer(after)
            else:
                self._answer(effect)

    def _decide(self, event: agent_events.Event) -> tuple[agent_events.Effect, ...]:
        self._state, effects = machine.decide(self._state, event)
        self._journal.append(event, effects)
        if type(event) is not agent_events.CommandReceived or isinstance(effects[0], agent_events.Perform):
            self._journal.commit()  # as the agent: a command that touches nothing would be decided again
        return effects

    def _answer(self, effect: agent_events.Effect) -> None:
        if isinstance(effect, agent_events.Answer):
            header = wire.encode_header(effect.epoch, effect.epoch, effect.seq)
            self._dealer.send_multipart(
                [header, wire.encode(wire.CommandOutcome(outcome=effect.outcome, rule=effect.rule))]
            )


def floor_agents(first: int, count: int, router: str, publisher: str, nodes: str) -> None:
    """`count` agents in this process, in one poll loop."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller, agents = zmq.Poller(), {}
    rank = 0 if nodes == "1" else 1
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            identity = Identity(replica=number, node_rank=rank, nnodes=int(nodes))
            agent = FloorAgent(context, [router, publisher], identity, Path(folder) / str(number))
            agents[agent.subscriber] = agent
            poller.register(agent.subscriber, zmq.POLLIN)
        while True:
            for subscriber, _ in poller.poll():
                agents[subscriber].take()
