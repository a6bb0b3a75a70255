"""A trainer's thread that only publishes, asks what serves and waits for tickets is never held past its own time-outs.

Each fault strikes a bus with one real agent, in a process of its own. Then every call of the trainer's thread is timed.
"""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import zmq

from controlplane import ControlPlane
from controlplane.bus import bus_loop, operator
from controlplane.bus.thread import WATCH_S
from controlplane.machine import coordinator, events
from controlplane.metrics import BusCollector
from controlplane.trainers.gateway.service import Gateway
from schemas import wire
from schemas.config import BusConfig
from schemas.errors import BusError, BusFaulted
from schemas.storage.record_file import RecordFile
from schemas.transport.exposition import serve_metrics
from schemas.transport.sockets import Context
from tests.engines.servers import AgentProcess
from tests.running import started
from tests.trainers.gateway_fleet import on_a_thread
from tests.unit.test_plane import checkpoint
from tests.waiting import wait_until

CONFIG = BusConfig(head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=1_000, lease_ms=2_000, retransmit_ms=100)
TIMEOUT_S = 1.0
"""Of each command."""
GRANULARITY_S = CONFIG.lease_ms / 1000 + WATCH_S
"""By when a caller hears of a fault that lasts: after a lease nothing relies on the bus any more."""

PLANNED = {
    "nothing": "",
    "a_killed_agent": "fault = [{name = 'it', call = 'flush', what = 'kill_agent'}]",
    "an_agent_that_is_stopped": "fault = [{name = 'it', call = 'flush', what = 'stop_agent', seconds = 600}]",
}
"""What goes wrong in the agent itself, in the first flush."""
TOPICS = """
import random, sys, threading
from tests.attacks.raw_peer import connected, frame
topics = b"".join(frame(b"\\1" + random.randbytes(4)) for _ in range(500_000))
with connected(int(sys.argv[1]), 4, "SUB") as peers:
    print("ready", flush=True)
    sys.stdin.readline()
    floods = [threading.Thread(target=peer.flood, args=(topics, 40_000_000)) for peer in peers]
    for flood in floods:
        flood.start()
    for flood in floods:
        flood.join()
"""
LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


class Run(NamedTuple):
    """What a fault may strike."""

    plane: ControlPlane
    folder: Path
    monkeypatch: pytest.MonkeyPatch


@contextlib.contextmanager
def planned(run: Run) -> Iterator[None]:
    run.plane.flush(timeout=TIMEOUT_S).wait()
    yield


@contextlib.contextmanager
def a_disk_that_hangs(run: Run) -> Iterator[None]:
    goes_on, write = threading.Event(), RecordFile._write

    def hanging(*args: Any) -> None:
        goes_on.wait()
        write(*args)

    run.monkeypatch.setattr(RecordFile, "_write", hanging)
    yield
    goes_on.set()


@contextlib.contextmanager
def a_full_disk(run: Run) -> Iterator[None]:
    connection = run.plane.bus._log._file._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    yield


@contextlib.contextmanager
def a_stopped_program_that_has_locked_the_log(run: Run) -> Iterator[None]:
    with started("-c", LOCK, run.folder / "run.db") as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        holder.send_signal(signal.SIGSTOP)
        yield


@contextlib.contextmanager
def a_send_that_hangs(run: Run) -> Iterator[None]:
    begun, never = threading.Event(), threading.Event()

    def send(_: tuple[int, ...]) -> None:
        begun.set()
        never.wait()

    run.plane.sync_weights(None, checkpoint(run.folder / "weights"), send=send)
    assert begun.wait(20)
    yield
    never.set()


@contextlib.contextmanager
def a_first_answer_without_a_body(run: Run) -> Iterator[None]:
    context: Context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as stranger:
        stranger.connect(run.plane.address)
        stranger.send_multipart([wire.encode_header(0), b""])
        wait_until(lambda: run.plane.bus.inbox.malformed == 1)
        yield


@contextlib.contextmanager
def more_messages_than_the_bus_reads(run: Run) -> Iterator[None]:
    over = threading.Event()
    context: Context = zmq.Context.instance()

    def flood() -> None:
        with context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 0)
            stranger.set(zmq.SNDTIMEO, 100)
            stranger.connect(run.plane.address)
            while not over.is_set():
                with contextlib.suppress(zmq.Again):
                    stranger.send_multipart([b"x" * 100, b"y" * 1000])

    floods = [threading.Thread(target=flood) for _ in range(2)]
    for thread in floods:
        thread.start()
    wait_until(lambda: run.plane.bus.inbox.malformed > 1_000)
    yield
    over.set()
    for thread in floods:
        thread.join()


@contextlib.contextmanager
def a_mistake_in_a_decision(run: Run) -> Iterator[None]:
    decide = coordinator.decide

    def mistaken(state: Any, event: Any) -> Any:
        if isinstance(event, events.Issued):
            raise ZeroDivisionError("a mistake of ours")
        return decide(state, event)

    run.monkeypatch.setattr(bus_loop, "decide", mistaken)
    yield


@contextlib.contextmanager
def more_topics_than_are_taken_in(run: Run) -> Iterator[None]:
    with started("-c", TOPICS, str(run.plane.bus.state.settings.publish_port)) as attackers:
        assert attackers.stdout is not None and attackers.stdin is not None
        assert attackers.stdout.readline() == "ready\n"
        attackers.stdin.write("\n")
        attackers.stdin.flush()
        ctypes.PyDLL(None).poll(None, 0, 1_000)  # keeps the GIL, so that they come in one piece
        yield


@contextlib.contextmanager
def an_operator_who_syncs(run: Run) -> Iterator[None]:
    checkpoint(run.folder / "weights")
    over, synced = threading.Event(), threading.Event()

    def syncs() -> None:
        while not over.is_set():
            anyio.run(partial(operator.sync, run.plane.address, "weights", timeout_s=5.0))
            synced.set()

    thread = threading.Thread(target=syncs)
    thread.start()
    assert synced.wait(60)
    yield
    over.set()
    thread.join()


@contextlib.contextmanager
def half_sent_requests_to_its_gateway_and_its_metrics(run: Run) -> Iterator[None]:
    half = b"GET /metrics HTTP/1.1\r\nhost"
    with contextlib.ExitStack() as open_:
        gateway = Gateway(run.plane, replicas=1, checkpoints=run.folder)
        open_.enter_context(on_a_thread(gateway.serve))
        served, end = serve_metrics(BusCollector(run.plane), "0")
        open_.callback(end)
        for url in 60 * (gateway.url, served):
            host, _, port = url.split("/")[2].rpartition(":")
            open_.enter_context(socket.create_connection((host, int(port)), timeout=30)).sendall(half)
        yield


@contextlib.contextmanager
def a_forked_child_that_lives_on(run: Run) -> Iterator[None]:
    if (child := os.fork()) == 0:
        signal.pause()
    yield
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


FAULTS: list[str | Callable[[Run], contextlib.AbstractContextManager[None]]] = [
    *PLANNED,
    *(a_disk_that_hangs, a_full_disk),
    *(a_stopped_program_that_has_locked_the_log, a_send_that_hangs, a_first_answer_without_a_body),
    *(more_messages_than_the_bus_reads, a_mistake_in_a_decision, an_operator_who_syncs),
    *(half_sent_requests_to_its_gateway_and_its_metrics, a_forked_child_that_lives_on),
]
FAULTS_AT_LENGTH = [*FAULTS, more_topics_than_are_taken_in]
"""At length alone, since it takes eight seconds of a processor: the topics."""


class Held:
    """For how long each kind of call held the thread, at most."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def call(self, name: str, function: Callable[[], Any], promised_s: float) -> Any:
        """Call it. It may raise what a fault raises, but not take longer than promised."""
        began = time.monotonic()
        try:
            return function()
        except (BusError, TimeoutError) as error:
            return error
        finally:
            took = time.monotonic() - began
            self.longest[name] = max(took, self.longest.get(name, 0.0))
            assert took <= promised_s, f"{name} held the thread for {took:.3f} s"


@pytest.mark.parametrize(
    ("rounds", "fault"),
    [
        *((1, fault) for fault in FAULTS),
        *(pytest.param(5, fault, marks=pytest.mark.attacks) for fault in FAULTS_AT_LENGTH),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_no_fault_holds_a_trainer_past_its_own_time_outs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | Callable[[Run], Any], rounds: int
) -> None:
    held, plan = Held(), tmp_path / "faults.toml"
    plan.write_text(PLANNED[fault] if isinstance(fault, str) else "")
    light = ("--engine", "tests.unit.small_bus:Engine", "--faults", str(plan))
    with (
        contextlib.suppress(BusFaulted),  # a bus that could not write says so once more when it closes
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=CONFIG, checkpoints=tmp_path) as plane,
        AgentProcess(plane.address, tmp_path, "0.0", 1, *light),
    ):
        plane.wait_for_agents(1, timeout=60).wait()
        with (planned if isinstance(fault, str) else fault)(Run(plane, tmp_path, monkeypatch)):
            for _ in range(rounds):
                published = held.call("publish", lambda: plane.flush(timeout=TIMEOUT_S), GRANULARITY_S)
                held.call("serving", plane.serving, GRANULARITY_S)
                if isinstance(published, BusError):
                    continue
                held.call("wait, given a time", partial(published.wait, 0.1), 0.1 + GRANULARITY_S)
                held.call("wait", published.wait, TIMEOUT_S + GRANULARITY_S)
                assert published.done
            held.call("status", plane.status, 5.0 + GRANULARITY_S)
    calls = ", ".join(f"{name} {took * 1000:.1f} ms" for name, took in held.longest.items())
    print(f"{getattr(fault, '__name__', fault)}: {calls}")  # noqa: T201
