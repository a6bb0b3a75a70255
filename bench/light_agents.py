"""Light speakers of the wire protocol: many connections to one bus, with nothing behind them, in one process.

    python -m bench.light_agents ADDRESS COUNT [--uploads] [--core N]
    python -m bench.light_agents CONTROL,EVENTS COUNT --bare [--core N]

Each has two connections, as an agent has, and says what an agent says when an agent says it: hello, join, heartbeats at
the interval that the bus last told, requests for the time with some of them (`workers.link.heartbeat`), an outcome for
each command, and with --uploads its decisions. With --bare it says nothing but outcomes, to the bare exchange of
`bench.speakers`, over connections like these.

One ROUTER holds all control connections: a socket that dials may name each of its connections, and then choose one. One
XSUB holds all subscriptions: a command arrives once for each, and the n-th copy is answered by the n-th speaker. So no
speaker has a socket of libzmq or a machine of its own, and what is measured is the bus.

The process prints a line when it is ready, dials when it reads one, and ends with stdin.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import zmq
from msgspec import Raw

from bench.machines import FLUSH, joined
from bench.peers import Command as BareCommand
from bench.peers import Outcome
from controlplane.bus.descriptors import raise_limit
from schemas import wire
from schemas.agent_status import AgentStatus
from schemas.config import AgentConfig
from schemas.events import CommandReceived, Decision, EngineReturned, Perform, Returned
from schemas.identity import Identity
from schemas.outcomes import Acted
from workers.link.heartbeat import ASKED_EVERY, FIRST_ASKED
from workers.machine import decide as machine

OUTCOME: Final = wire.encode(wire.CommandOutcome(outcome=Acted(calls=("flush",)), rule=10))
STATUS: Final = wire.encode(AgentStatus(ready=True, tokenizer="present", engine="light", generating=True))
JOIN: Final = wire.encode(wire.Join())
JOURNAL: Final = "light"
UPLOAD_S: Final = 0.5
"""Time from a decision to its upload: a quarter of a heartbeat, as agents wait."""
BATCH: Final = AgentConfig().batch
BURST: Final = 512
"""Messages read from one socket before the other one has its turn."""


def pin(core: int | None) -> None:
    """Keep this process, and threads that it starts from now on, on one core."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def two_cores() -> tuple[int, int] | tuple[None, None]:
    """Return a core for the bus and one for its speakers; none where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


def dialled(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    """Return a socket that drops nothing."""
    sock = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        sock.set(option, 0)
    return sock


def connection(number: int) -> bytes:
    """Return the name of a speaker's connection on our side. The bus does not see it."""
    return b"%d" % number


def dial_all(control: "zmq.Socket[bytes]", address: str, count: int) -> None:
    """Open a control connection for each speaker."""
    for number in range(count):
        control.set(zmq.CONNECT_ROUTING_ID, connection(number))
        control.connect(address)


def read(sock: "zmq.Socket[bytes]", handle: Callable[[list[bytes]], None]) -> None:
    """Pass on what has arrived, at most a burst."""
    receive = sock.recv_multipart
    with contextlib.suppress(zmq.Again):
        for _ in range(BURST):
            handle(receive(zmq.NOBLOCK))


def decisions_of_a_command() -> tuple[Decision, Decision]:
    """Return what an agent uploads for a command on which its engine was called."""
    state, _ = joined(0)
    command = CommandReceived(at_ms=1, epoch=1, origin=1, seq=1, ttl_ms=1000, command=FLUSH)
    state, effects = machine.decide(state, command)
    (call,) = (effect for effect in effects if isinstance(effect, Perform))
    returned = EngineReturned(at_ms=2, call_id=call.call_id, result=Returned())
    _, after = machine.decide(state, returned)
    first, second = (
        Decision(Raw(wire.encode(event)), Raw(wire.encode(decided)))
        for event, decided in ((command, effects), (returned, after))
    )
    return first, second


class LightAgents:
    """Speakers for the replicas 0 to `count` - 1, of one node each."""

    def __init__(self, address: str, count: int, uploads: bool) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address, self._count, self._uploads = address, count, uploads
        self._control, self._events = dialled(context, zmq.ROUTER), dialled(context, zmq.XSUB)
        self._control.set(zmq.PROBE_ROUTER, 1)
        for topic in (wire.TOPIC_COMMAND, wire.TOPIC_HEAD):
            self._events.send(b"\x01" + topic)
        self._welcomed: set[bytes] = set()
        self._subscribed = self._attempts = 0
        self._epoch = self._seq = 0
        self._welcome_s = self._interval_s = 2.0
        self._beats, self._next_beat_s = 0, 0.0
        self._header = self._received = b""
        self._copies: Counter[bytes] = Counter()
        self._decided = self._uploaded = 0
        self._upload_s: float | None = None
        self._one_command = decisions_of_a_command() if uploads else ()

    def hello(self, number: int) -> None:
        identity = Identity(replica=number, node_rank=0)
        message = wire.Hello(
            identity=identity, incarnation="light", journal=JOURNAL, host="light", pid=1, attempt=self._attempts
        )
        self._attempts += 1
        self._control.send_multipart([connection(number), wire.encode_header(0), wire.encode(message)])

    def serve(self) -> None:
        """Dial, join and speak until killed."""
        dial_all(self._control, self._address, self._count)
        for number in range(self._count):
            self.hello(number)
        self._next_beat_s = time.monotonic()
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while True:
            poller.poll(max(1, int((self._next_beat_s - time.monotonic()) * 1000)))
            read(self._control, self._on_control)
            read(self._events, self._on_publication)
            self._beat(time.monotonic())

    # --- what arrives -------------------------------------------------------------------------------------------------

    def _on_control(self, frames: list[bytes]) -> None:
        name, header, body = frames
        message = wire.decode_received(body)
        match message:
            case wire.Welcome():
                self._welcomed.add(name)
                self._welcome_s = message.heartbeat_ms / 1000
                self._events.connect(f"{self._address.rpartition(':')[0]}:{message.publish_port}")
            case wire.Snapshot():
                head = wire.parse_frames([header, body])[0]
                self._epoch, self._seq = head.epoch, max(self._seq, head.seq)
                self._control.send_multipart([name, wire.encode_header(head.epoch, 0, head.seq), STATUS])
            case wire.TimeReply(heartbeat_ms=told):
                self._interval_s = told / 1000 if told is not None else self._welcome_s
            case wire.Page():
                for record in message.records:
                    place = wire.decode_place(record)
                    outcome = wire.encode_header(self._epoch, place.origin, place.seq)
                    self._control.send_multipart([name, outcome, OUTCOME])
            case wire.Rejoin() if name in self._welcomed:  # else its hello is on the way
                self._welcomed.discard(name)
                self.hello(int(name))

    def _on_publication(self, frames: list[bytes]) -> None:
        if len(frames) == 1:  # the welcome of a new subscription
            self._control.send_multipart([connection(self._subscribed), wire.encode_header(0), JOIN])
            self._subscribed += 1
        elif frames[0] == wire.TOPIC_COMMAND:
            if frames[1] != self._received:
                self._on_new(frames[1], frames[2])
            number = self._copies[self._received]
            self._copies[self._received] = number + 1
            self._control.send_multipart([connection(number), self._header, OUTCOME])

    def _on_new(self, received: bytes, body: bytes) -> None:
        """Prepare the answer to the command of this header, of which other copies follow."""
        head, _ = wire.parse_frames([received, body])
        self._received, self._header = received, wire.encode_header(head.epoch, head.origin, head.seq)
        if received not in self._copies:
            self._seq = max(self._seq, head.seq)
            self._decided += 2
            if len(self._copies) > BURST:
                self._copies = Counter({received: 0})

    # --- what is sent by the clock ------------------------------------------------------------------------------------

    def _beat(self, now_s: float) -> None:
        """Send the heartbeats that are due: those of the fleet are spread over the interval, and so are requests."""
        header = wire.encode_header(self._epoch, 0, self._seq)
        asking = wire.encode(wire.TimeRequest(sent_ns=time.monotonic_ns()))
        while self._next_beat_s <= now_s:
            turn, number = divmod(self._beats, self._count)
            self._beats += 1
            self._next_beat_s += self._interval_s / self._count
            if not self._epoch:
                continue
            self._control.send_multipart([connection(number), header, STATUS])
            if turn < FIRST_ASKED or (turn + number) % ASKED_EVERY == 0:
                self._control.send_multipart([connection(number), header, asking])
        if self._uploads and self._decided > self._uploaded:
            self._upload_s = self._upload_s or now_s + UPLOAD_S
            if now_s >= self._upload_s or self._decided - self._uploaded >= BATCH:
                self._upload(header)

    def _upload(self, header: bytes) -> None:
        """Upload what was decided, in batches as large as an agent's: the bus cuts off who sends a larger message."""
        while self._uploaded < self._decided:
            decisions = self._one_command * (min(BATCH, self._decided - self._uploaded) // 2)
            batch = wire.encode(wire.DecisionBatch(journal=JOURNAL, first=self._uploaded + 1, decisions=decisions))
            for number in range(self._count):
                self._control.send_multipart([connection(number), header, batch])
            self._uploaded += len(decisions)
        self._upload_s = None


def bare(addresses: str, count: int) -> None:
    """Answer each copy of a command, and do nothing else."""
    control_address, events_address = addresses.split(",")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control, events = dialled(context, zmq.ROUTER), dialled(context, zmq.XSUB)
    dial_all(control, control_address, count)
    events.send(b"\x01c")
    for _ in range(count):
        events.connect(events_address)
    copies: Counter[bytes] = Counter()
    encode = msgspec.msgpack.encode

    def answer(frames: list[bytes]) -> None:
        body = frames[1]
        number = copies[body]
        copies[body] = number + 1
        if not number:
            answers[body] = encode(Outcome(number, msgspec.msgpack.decode(body, type=BareCommand).seq, "acted"))
        control.send_multipart([connection(number), answers[body]])

    answers: dict[bytes, bytes] = {}
    while True:
        events.poll()
        read(events, answer)


@contextmanager
def spawned(address: str, count: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process of speakers, which dials once `go` is called on it."""
    command = [sys.executable, "-m", "bench.light_agents", address, str(count), *options]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    with child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def go(child: subprocess.Popen[str]) -> None:
    """Let the speakers dial."""
    assert child.stdin is not None
    child.stdin.write("go\n")


def end_with_stdin() -> None:
    """End the process when its parent has ended, however that ended."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Speak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("count", type=int)
    parser.add_argument("--uploads", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--core", type=int)
    options = parser.parse_args()
    pin(options.core)
    raise_limit(options.count)
    print("ready", flush=True)  # noqa: T201
    sys.stdin.readline()
    threading.Thread(target=end_with_stdin, daemon=True).start()
    if options.bare:
        bare(options.address, options.count)
    else:
        LightAgents(options.address, options.count, options.uploads).serve()


if __name__ == "__main__":
    main()
