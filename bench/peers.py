"""The same exchange (one command to N agents, N outcomes back) on the usual means: bare pyzmq, HTTP, Ray.

Each peer is written as its users would write it, without recording, ordering, deadlines or membership: this is the
floor that a control plane adds to. Agents live in the same number of processes as ours, except Ray's, which are
processes themselves.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from bench.processes import PROCESSES, Fleet, System, spawn


class Command(msgspec.Struct):
    """What a bare exchange carries to an agent."""

    seq: int
    operation: str


class Outcome(msgspec.Struct):
    """What it carries back."""

    agent: int
    seq: int
    outcome: str


# --- bare pyzmq and msgspec -------------------------------------------------------------------------------------------


def pyzmq_agents(first: int, count: int, events: str, control: str) -> None:
    """`count` agents in this process: one poll loop over a SUB each, a DEALER each for the answers."""
    context = zmq.Context()
    poller, dealers, numbers = zmq.Poller(), {}, {}
    for number in range(first, first + count):
        dealer = context.socket(zmq.DEALER)
        dealer.connect(control)
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"c")
        subscriber.connect(events)
        poller.register(subscriber, zmq.POLLIN)
        dealers[subscriber], numbers[subscriber] = dealer, number
    decode = msgspec.msgpack.Decoder(Command).decode
    encode = msgspec.msgpack.Encoder().encode
    while True:
        for subscriber, _ in poller.poll():
            _, body = subscriber.recv_multipart()
            command = decode(body)
            dealers[subscriber].send(encode(Outcome(numbers[subscriber], command.seq, "acted")))


@contextmanager
def pyzmq_exchange(agents: int) -> Iterator[System]:
    """Yields what runs one exchange over XPUB and ROUTER."""
    context = zmq.Context()
    publisher, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    publisher.setsockopt(zmq.XPUB_VERBOSER, 1)
    router.setsockopt(zmq.RCVHWM, 10_000)
    events, control = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}", ""
    control = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    decode = msgspec.msgpack.Decoder(Outcome).decode
    encode = msgspec.msgpack.Encoder().encode
    seq = 0

    def exchange() -> None:
        nonlocal seq
        seq += 1
        publisher.send_multipart([b"c", encode(Command(seq, "flush"))])
        for _ in range(agents):
            _, body = router.recv_multipart()
            assert decode(body).seq == seq

    with spawn("pyzmq", agents, events, control) as fleet:
        for _ in range(agents):
            publisher.recv()  # one subscription each
        yield System(exchange, fleet)
    context.destroy(linger=0)


# --- HTTP: aiohttp to FastAPI under uvicorn ---------------------------------------------------------------------------


def http_agents(first: int, count: int, ports: str) -> None:
    """`count` servers in this process, one port each."""
    import uvicorn
    from fastapi import FastAPI

    def application(number: int) -> FastAPI:
        app = FastAPI()

        async def command(body: dict[str, int | str]) -> dict[str, int | str]:
            return {"agent": number, "seq": body["seq"], "outcome": "acted"}

        app.post("/command")(command)
        return app

    async def serve() -> None:
        own_ports = [int(port) for port in ports.split(",")][first : first + count]
        servers = []
        for number, port in enumerate(own_ports, first):
            config = uvicorn.Config(application(number), port=port, log_level="error", access_log=False)
            servers.append(uvicorn.Server(config))
        await asyncio.gather(*(server._serve() for server in servers))

    asyncio.run(serve())


@contextmanager
def http_exchange(agents: int) -> Iterator[System]:
    """Yields what posts to every server at once and reads all answers, over kept-alive connections."""
    import aiohttp

    ports = _free_ports(agents)
    loop = asyncio.new_event_loop()
    seq = 0

    async def open_session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    session = loop.run_until_complete(open_session())

    async def post(port: int) -> int:
        async with session.post(
            f"http://127.0.0.1:{port}/command", json={"seq": seq, "operation": "flush"}
        ) as response:
            return int((await response.json())["seq"])

    async def fan_out() -> None:
        assert set(await asyncio.gather(*(post(port) for port in ports))) == {seq}

    def exchange() -> None:
        nonlocal seq
        seq += 1
        loop.run_until_complete(fan_out())

    with spawn("http", agents, ",".join(map(str, ports))) as fleet:
        for port in ports:
            _wait_for_port(port)
        yield System(exchange, fleet)
        loop.run_until_complete(session.close())
    loop.close()


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in held]
    for listener in held:
        listener.close()
    return ports


def _wait_for_port(port: int, patience_s: float = 60.0) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            threading.Event().wait(0.02)
    raise TimeoutError(f"no server came up on port {port} within {patience_s:.0f} s")


# --- Ray actor calls --------------------------------------------------------------------------------------------------


@contextmanager
def ray_exchange(agents: int) -> Iterator[System]:
    """Yields what calls every actor and gets all results. One actor is one process."""
    import ray

    ray.init(address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level="error")

    class Actor:
        def __init__(self, number: int) -> None:
            self.number = number

        def command(self, seq: int, operation: str) -> dict[str, int | str]:
            return {"agent": self.number, "seq": seq, "outcome": "acted"}

    remote = ray.remote(num_cpus=0)(Actor)
    actors = [remote.remote(number) for number in range(agents)]
    seq = 0

    def exchange() -> None:
        nonlocal seq
        seq += 1
        answers = ray.get([actor.command.remote(seq, "flush") for actor in actors])
        assert {answer["seq"] for answer in answers} == {seq}

    try:
        exchange()
        yield System(exchange, Fleet([]))
    finally:
        ray.shutdown()
