"""The bus alone: what each answer costs it, how fast it takes them, and what thousands of idle agents cost.

    python -m bench.speakers [--agents 1,64,256,1024,4096] [--blocks 5] [--idle 6] [--uploads] [--out FILE]

The agents are light speakers in another process (`bench.light_agents`), on another core. Beside the real bus stands a
bare one: XPUB, ROUTER and msgspec in one thread, with as many speakers and connections. Both are open at the same time
and take turns, so that whatever else the machine does strikes both.

`bus` is CPU time of the bus's thread for each answer, `zmq` that of libzmq's threads, `x bare` both against both of the
bare exchange. `burst` counts answers a second when many commands are published at once: by the clock, where one process
of thousands of speakers may be the slower side, and for each second of CPU of the bus's thread and libzmq's. `turn` is
the longest turn of the bus while agents join, are idle, or answer one command, in CPU time. `idle` is the share of a
core of the bus's thread and of libzmq's while nothing is published, once the agents have been there for some
heartbeats. `joined` is the time from the first dial until all are ready.

What was imported is frozen before (`gc.freeze`). A full collection of Python's garbage collector goes through all of
it, 18 ms in this process and far more in a trainer's, in whichever thread happens to begin one.
"""

import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import zmq

from bench import tables
from bench.light_agents import go, pin, spawned, two_cores
from bench.peers import Command, Outcome
from bench.tables import Row
from controlplane import ControlPlane
from controlplane.bus.bus_loop import BusLoop
from controlplane.bus.descriptors import raise_limit
from schemas.commands import EngineCommand

ANSWERS = 16_384
"""Answers in one block of commands, about: a block has at least three commands, and at most 400."""
IDLE_S = 6.0
"""Seconds: more than one heartbeat of each speaker, at the longest interval. Twice as long before that, they settle."""
BURST_ANSWERS = 12_288
"""Answers that a burst waits for: fewer than the bus takes in until it sends a command again."""

Exchange = Callable[[int], None]
"""Publishes this many commands at once, and waits for all outcomes."""


# --- CPU time of single threads ---------------------------------------------------------------------------------------


def tasks() -> set[int]:
    """Ids of this process's threads, libzmq's too."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def cpu_ns(threads: set[int]) -> int:
    """CPU time of threads of this process. A thread's clock has an id made of its own: see clock_getcpuclockid(3)."""
    return sum(time.clock_gettime_ns((~thread << 3) | 6) for thread in threads)


def thread_of_the_bus() -> int:
    """Return the id of the thread in which this process's bus lives."""
    (thread,) = (thread.native_id for thread in threading.enumerate() if thread.name == "rolloutctl-bus")
    assert thread is not None
    return thread


class Threads:
    """The threads that an exchange uses.

    Attributes:
        own: Those that run its Python.
        zmq: Those of libzmq.
    """

    def __init__(self, before: set[int], own: set[int]) -> None:
        comm = {thread: Path(f"/proc/self/task/{thread}/comm").read_text() for thread in tasks() - before}
        self.own = own
        self.zmq = {thread for thread, name in comm.items() if name.startswith("ZMQbg/IO")}

    def used_ns(self) -> tuple[int, int]:
        """CPU time until now, of both."""
        return cpu_ns(self.own), cpu_ns(self.zmq)


# --- turns of the bus, watched from outside ---------------------------------------------------------------------------


class TurnWatch:
    """Measures turns of every bus of this process while `on`. What a turn leaves to a thread is not counted.

    Attributes:
        cpu_us: Of the longest.
        on: It costs about a microsecond a turn.
    """

    def __init__(self) -> None:
        self.on, self.cpu_us = False, 0.0
        begin = BusLoop.begin

        def watched(turns: BusLoop) -> None:
            if not self.on:
                return begin(turns)
            cpu = time.thread_time_ns()
            begin(turns)
            self.cpu_us = max(self.cpu_us, (time.thread_time_ns() - cpu) / 1000)

        patch.object(BusLoop, "begin", watched).start()

    def take(self) -> float:
        """Return the longest turn since the last call."""
        longest, self.cpu_us = self.cpu_us, 0.0
        return longest


# --- the two exchanges ------------------------------------------------------------------------------------------------


@contextmanager
def ours(count: int, core: int | None, uploads: bool, row: dict[str, Any]) -> Iterator[tuple[Exchange, Threads]]:
    """The real bus."""
    before, context = tasks(), zmq.Context()  # of its own, so that its thread is known
    options = ["--core", str(core)] if core is not None else []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plane = stack.enter_context(ControlPlane("tcp://127.0.0.1:0", log=Path(folder) / "run.db", context=context))
        child = stack.enter_context(spawned(plane.address, count, *options, *(["--uploads"] if uploads else [])))
        start = time.perf_counter()
        ready = plane.wait_for_agents(count, timeout=120)
        go(child)
        ready.wait()
        row["joined_s"] = round(time.perf_counter() - start, 2)
        command = EngineCommand(operation="flush")

        def exchange(commands: int) -> None:
            tickets = [plane.publish(command) for _ in range(commands)]
            for ticket in tickets:
                report = ticket.wait()
                report.raise_for_failures()

        yield exchange, Threads(before, {thread_of_the_bus()})
    context.term()


@contextmanager
def bare(count: int, core: int | None) -> Iterator[tuple[Exchange, Threads]]:
    """XPUB, ROUTER and msgspec, in this thread."""
    before = tasks()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher, router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    publisher.set(zmq.XPUB_VERBOSER, 1)
    for sock in (publisher, router):
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            sock.set(option, 0)
        sock.set(zmq.BACKLOG, 4096)
        sock.bind("tcp://127.0.0.1:0")
    decode, encode = msgspec.msgpack.Decoder(Outcome).decode, msgspec.msgpack.Encoder().encode
    addresses = ",".join(sock.get_string(zmq.LAST_ENDPOINT) for sock in (router, publisher))
    seq = 0

    def exchange(commands: int) -> None:
        nonlocal seq
        for _ in range(commands):
            seq += 1
            publisher.send_multipart([b"c", encode(Command(seq, "flush"))])
        for _ in range(commands * count):
            _, body = router.recv_multipart()
            assert decode(body).outcome == "acted"

    try:
        with spawned(addresses, count, "--bare", *(["--core", str(core)] if core is not None else [])) as child:
            go(child)
            for _ in range(count):
                publisher.recv()  # one subscription each
            yield exchange, Threads(before, {threading.get_native_id()})
    finally:
        context.destroy(linger=0)


# --- the measurement --------------------------------------------------------------------------------------------------


class Block:
    """One block of commands, each published when the one before has ended."""

    def __init__(self, exchange: Exchange, threads: Threads, count: int, rounds: int) -> None:
        (own, zmq_threads), took = threads.used_ns(), []
        for _ in range(rounds):
            start = time.perf_counter_ns()
            exchange(1)
            took.append((time.perf_counter_ns() - start) / 1000)
        now_own, now_zmq = threads.used_ns()
        self.own_us = (now_own - own) / 1000 / rounds / count
        self.zmq_us = (now_zmq - zmq_threads) / 1000 / rounds / count
        self.median_us = statistics.median(took)


def burst(exchange: Exchange, threads: Threads, count: int) -> tuple[float, float]:
    """Return the answers a second to commands that are published at once: by the clock, and of CPU time."""
    answers = count * (commands := max(2, min(256, BURST_ANSWERS // count)))
    used_ns, start = sum(threads.used_ns()), time.perf_counter()
    exchange(commands)
    return answers / (time.perf_counter() - start), answers * 1e9 / (sum(threads.used_ns()) - used_ns)


def medians(name: str, blocks: list[Block]) -> dict[str, float]:
    """Return the medians of blocks, for a row."""
    figures = {f"{name}_{field}": [getattr(block, field) for block in blocks] for field in vars(blocks[0])}
    return {field: round(statistics.median(values), 2) for field, values in figures.items()}


def measure(count: int, blocks: int, uploads: bool, watch: TurnWatch, idle_s: float) -> dict[str, Any]:
    """Return one row."""
    row: dict[str, Any] = {"agents": count, "uploads": uploads}
    core, speakers_core = two_cores()
    raise_limit(3 * count)
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        pin(core)
        watch.on = True
        watch.take()
        exchange, threads = stack.enter_context(ours(count, speakers_core, uploads, row))
        row["join_turn_us"] = watch.take()
        bare_exchange, bare_threads = stack.enter_context(bare(count, speakers_core))
        rounds = max(3, min(400, ANSWERS // count))
        for warm in (exchange, bare_exchange):
            Block(warm, threads, count, max(2, rounds // 10))
        row["turn_us"] = watch.take()
        time.sleep(2 * idle_s)
        own, zmq_threads = threads.used_ns()
        time.sleep(idle_s)
        now_own, now_zmq = threads.used_ns()
        row["idle_share"] = round((now_own - own) / idle_s / 1e9, 4)
        row["idle_zmq_share"] = round((now_zmq - zmq_threads) / idle_s / 1e9, 4)
        row["idle_turn_us"] = watch.take()
        watch.on = False
        pairs = [
            (Block(exchange, threads, count, rounds), Block(bare_exchange, bare_threads, count, rounds))
            for _ in range(blocks)
        ]
        row |= medians("bus", [pair[0] for pair in pairs]) | medians("bare", [pair[1] for pair in pairs])
        row["x_bare"] = round((row["bus_own_us"] + row["bus_zmq_us"]) / (row["bare_own_us"] + row["bare_zmq_us"]), 2)
        bursts = [burst(exchange, threads, count) for _ in range(3)]
        row["burst"], row["burst_cpu"] = (round(statistics.median(found)) for found in zip(*bursts, strict=True))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


COLUMNS: dict[str, tables.Cell] = {
    "speakers": "{agents:,}",
    "bus's thread, µs": "{bus_own_us:.1f}",
    "libzmq, µs": "{bus_zmq_us:.1f}",
    "bare, µs": lambda row: f"{row['bare_own_us'] + row['bare_zmq_us']:.1f}",
    "times bare": "{x_bare:.2f}",
    "to report, ms": lambda row: f"{row['bus_median_us'] / 1000:.2f}",
    "burst, answers/s": "{burst:,}",
    "a second of CPU": "{burst_cpu:,}",
    "longest turn, ms": lambda row: f"{longest_turn_ms(row):.1f}",
    "idle, % of a core": lambda row: f"{100 * row['idle_share']:.2f}",
    "libzmq idle, %": lambda row: f"{100 * row['idle_zmq_share']:.2f}",
    "joined, s": "{joined_s:.2f}",
}


def table(rows: list[Row]) -> str:
    """Return a line for each number of speakers."""
    return tables.table(COLUMNS, rows)


def cpu_us(row: Row) -> float:
    """CPU of the bus for one answer, with libzmq's."""
    return float(row["bus_own_us"] + row["bus_zmq_us"])


def longest_turn_ms(row: Row) -> float:
    """Return the longest turn of all phases but the burst, in CPU time."""
    return float(max(row[f"{phase}turn_us"] for phase in ("", "join_", "idle_"))) / 1000


def main() -> None:
    """Measure, print a table, write JSON."""
    options = tables.read_options(__doc__, agents="1,64,256,1024,4096", blocks=5, idle=IDLE_S, uploads=False)
    gc.collect()
    gc.freeze()
    watch, counts = TurnWatch(), [int(count) for count in options.agents.split(",")]
    rows = [measure(count, options.blocks, options.uploads, watch, options.idle) for count in counts]
    tables.publish(table(rows), rows, options.out)


if __name__ == "__main__":
    main()
