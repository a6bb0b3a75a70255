"""A bus of a few lines and an engine of a few fields, for the tests of the agent's shell."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import msgspec

from schemas import wire
from schemas.commands import Command, EngineCommand, Target
from schemas.config import AgentConfig
from schemas.desired import Desired
from schemas.events import Call, Decision, Load, Observation, Pause, Resume, Returned
from schemas.identity import Identity, OnLostBus, Operation
from schemas.transport.sockets import Context, bus_publisher, bus_router
from tests.unit.journal_files import entries
from workers.agent import Agent
from workers.machine.state import AgentState
from workers.traces.node import NodeTraces

PRIMARY = Identity(replica=0, node_rank=0, nnodes=2)
SECOND = Identity(replica=0, node_rank=1, nnodes=2)
PAUSE = EngineCommand(operation="pause")
RESUME = EngineCommand(operation="resume")
FLUSH = EngineCommand(operation="flush")
STRANGER = wire.Rejoin(reason="the bus does not know you: say hello")
TTL_MS = 60_000

M = TypeVar("M", bound=msgspec.Struct)


class Engine:
    """An engine of a few fields. Each call waits for `gate`, so that a test can keep it in flight."""

    def __init__(self) -> None:
        self.tokenizer = "present"
        self.generating = True
        self.version = 0
        self.running: int | None = None
        self.waiting: int | None = None
        self.calls: list[Call] = []
        self.raises: Exception | None = None
        self.gate: anyio.Event | None = None
        self.begun: Callable[[], object] = lambda: None
        self.observations = 0
        self.closed = False

    async def open(self) -> None:
        pass

    async def observe(self) -> Observation:
        self.observations += 1
        return Observation(
            engine="fake 1",
            instance="one",
            tokenizer=self.tokenizer,  # type: ignore[arg-type]
            operations=frozenset(Operation),
            generating=self.generating,
            asleep=frozenset(),
            profiling=False,
            version=self.version,
            running=self.running,
            waiting=self.waiting,
        )

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        self.calls.append(call)
        self.begun()
        if self.gate is not None:
            await self.gate.wait()
        if self.raises is not None:
            raise self.raises
        if isinstance(call, (Pause, Resume)):
            self.generating = isinstance(call, Resume)
        if isinstance(call, Load):
            self.version = call.version
        return Returned()

    async def close(self) -> None:
        self.closed = True


class Bus:
    """Just enough of a bus: it keeps what it receives, and sends what a test wants."""

    def __init__(self, context: Context, address: str = "tcp://127.0.0.1:0", run: str = "run-1") -> None:
        self.router = bus_router(context, address)
        self.publisher = bus_publisher(context, address if address.startswith("tcp:") else f"{address}-publish")
        self.run, self.epoch, self.seq = run, 1, 0
        self.heartbeat_ms, self.lease_ms = 40, 60_000
        self.head_interval_ms: int | None = None
        self.peers: list[bytes] = []
        self.ignored: list[wire.Upward] = []
        self.subscriptions: list[bytes] = []
        self.greet()

    @property
    def address(self) -> str:
        return self.router.address

    @property
    def peer(self) -> bytes:
        return self.peers[-1]

    def greet(self) -> None:
        self.publisher.set_welcome(wire.TOPIC_HEAD + wire.encode_header(self.epoch, 0, self.seq))

    async def serve(self) -> None:
        """Read the subscriptions: otherwise the publisher sends no welcome message."""
        while True:
            self.subscriptions += await self.publisher.recv()

    async def next(self, kind: type[M]) -> M:
        """Return the next message of a kind; others are kept in `ignored`."""
        with anyio.fail_after(60):
            while True:
                peer, *frames = await self.router.recv()
                if frames == [b""]:  # the probe of a new connection
                    continue
                self.last, body = wire.parse_frames(frames)
                message = wire.decode_upward(body)
                if not self.peers or peer != self.peers[-1]:
                    self.peers.append(peer)
                if isinstance(message, kind):
                    return message
                self.ignored.append(message)  # type: ignore[arg-type]

    def say(self, message: wire.Downward, seq: int | None = None) -> None:
        body = wire.encode(message)
        assert self.router.send_nowait(
            [self.peer, wire.encode_header(self.epoch, 0, self.seq if seq is None else seq), body]
        )

    def envelope(self, command: Command, ttl_ms: int = TTL_MS, target: Target | None = None) -> wire.Envelope:
        body = msgspec.Raw(wire.encode(command))
        return wire.Envelope(run=self.run, issued_at_ns=1, ttl_ms=ttl_ms, body=body, target=target or Target())

    def record(self, seq: int, command: Command) -> wire.CommandRecord:
        return wire.CommandRecord(origin=self.epoch, seq=seq, envelope=self.envelope(command))

    def publish(self, command: Command, seq: int | None = None, ttl_ms: int = TTL_MS) -> None:
        self.seq = self.seq + 1 if seq is None else seq
        self.raw(
            wire.TOPIC_COMMAND,
            wire.encode_header(self.epoch, self.epoch, self.seq),
            wire.encode(self.envelope(command, ttl_ms)),
        )

    def raw(self, *frames: bytes) -> None:
        assert self.publisher.send_nowait(frames)

    async def send_heads(self) -> None:
        """Send one head after the other."""
        while True:
            self.raw(wire.TOPIC_HEAD, wire.encode_header(self.epoch, 0, self.seq), b"\xc0")
            await anyio.sleep(0.005)

    def welcome(self, recorded: int = 0) -> wire.Welcome:
        port = self.publisher.address.rpartition(":")[2]
        return wire.Welcome(
            run=self.run,
            publish_port=int(port) if port.isdecimal() else None,
            heartbeat_ms=self.heartbeat_ms,
            lease_ms=self.lease_ms,
            recorded_decisions=recorded,
            head_interval_ms=self.head_interval_ms,
        )

    async def admit(self, desired: Desired | None = None, recorded: int = 0) -> wire.Hello:
        """The whole join, from hello to snapshot."""
        hello = await self.next(wire.Hello)
        self.say(self.welcome(recorded))
        await self.next(wire.Join)
        self.say(wire.Snapshot(desired=desired or Desired()))
        return hello

    async def outcome(self, seq: int) -> wire.CommandOutcome:
        answered = await self.next(wire.CommandOutcome)
        assert (self.last.seq, self.last.origin) == (seq, self.epoch)
        return answered

    def close(self) -> None:
        """Close the sockets. May be called again."""
        self.router.close(0)
        self.publisher.close(0)


class Run(Protocol):
    """The fixture `run`: runs an agent on the bus, with the engine and the folder of the test."""

    def __call__(self, identity: Identity = PRIMARY) -> AbstractAsyncContextManager[Agent]: ...


@asynccontextmanager
async def running(
    bus: Bus | str,
    context: Context,
    engine: Engine,
    folder: Path,
    identity: Identity = PRIMARY,
    on_lost_bus: OnLostBus = "serve",
) -> AsyncIterator[Agent]:
    """Run an agent until the block ends, for a bus or its address, and then end it in order."""
    config = AgentConfig(hello_retry_ms=20, observe_ms=10, on_lost_bus=on_lost_bus)
    place, left = identity, NodeTraces(folder / "traces", identity)
    address = bus if isinstance(bus, str) else bus.address
    async with (
        Agent(
            bus=address, identity=place, engine=engine, state_dir=folder, traces=left, config=config, context=context
        ) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(agent.run)
        if isinstance(bus, Bus):
            tasks.start_soon(bus.serve)
        yield agent
        tasks.cancel_scope.cancel()


async def reaches(agent: Agent, holds: Callable[[AgentState], bool]) -> AgentState:
    """Wait until the state of the agent's machine is one that `holds`."""
    with anyio.fail_after(60):
        return await agent.wait_until(holds)


def recorded(folder: Path, identity: Identity = PRIMARY) -> list[Decision]:
    """Return the decisions in the journal of a closed agent."""
    return entries(folder / f"agent-{identity.agent}.journal")
