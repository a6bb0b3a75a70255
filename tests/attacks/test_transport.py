"""Attacks on the sockets of a trainer's process, by peers without any key."""

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.attacks.raw_peer import PING, connected, frame
from tests.running import started

TRAINER = """
import ctypes, sys
from controlplane import ControlPlane
from schemas.transport import sockets
sockets.HANDSHAKE_MS = 60_000  # on a busy machine the attackers may be slow
poll = ctypes.PyDLL(None).poll  # a call through PyDLL keeps the GIL
with ControlPlane("tcp://127.0.0.1:0", log=sys.argv[1]) as plane:
    print(plane.address.rpartition(":")[2], plane.bus.state.settings.publish_port, flush=True)
    for line in sys.stdin:
        print("holding", flush=True)
        poll(None, 0, int(line))
        plane.flush().wait(30)
        print("alive", flush=True)
"""


class Trainer(NamedTuple):
    """A process that embeds a bus."""

    process: subprocess.Popen[str]
    control: int
    publish: int

    def line(self) -> str:
        """Return its next line; a process that was aborted has none."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip() or f"died of {-self.process.wait(10)}"

    def hold(self, hold_ms: int) -> None:
        """Hold the GIL from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{hold_ms}\n")
        assert self.line() == "holding"

    def memory(self) -> int:
        """Return its resident memory in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def close(self) -> None:
        """End it, in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@contextmanager
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with started("-c", TRAINER, tmp_path / "run.db") as process:
        assert process.stdout is not None
        control, publish = map(int, process.stdout.readline().split())
        yield Trainer(process, control, publish)


MB = 1_000_000
HOLDS = [
    pytest.param(1, 300, 1),
    # Longer than the ZMTP heartbeat that used to abort the process: 50 peers in five turns of nine seconds.
    pytest.param(5, 9_000, 10, marks=pytest.mark.attacks),
]
ROUNDS = [1, pytest.param(50, marks=pytest.mark.attacks)]


@pytest.mark.parametrize("identity", [b"0.0/a", b""], ids=["a routing id in use", "no routing id"])
@pytest.mark.parametrize(("rounds", "hold_ms", "peers"), HOLDS)
def test_peers_that_send_more_than_is_read_and_leave_do_not_abort_the_trainer(
    tmp_path: Path, identity: bytes, rounds: int, hold_ms: int, peers: int
) -> None:
    with trainer(tmp_path) as victim, connected(victim.control, 1, identity=b"0.0/a"):
        for _ in range(rounds):
            victim.hold(hold_ms)
            with connected(victim.control, peers, identity=identity) as attackers:
                for attacker in attackers:
                    attacker.send_at_once(900 * frame(b"x"))
                    attacker.reset()
            assert victim.line() == "alive"
        victim.close()


@pytest.mark.parametrize(("kind", "messages"), [("DEALER", 300), ("SUB", 1_100)])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_ping_behind_more_than_is_read_does_not_abort_the_trainer(
    tmp_path: Path, kind: str, messages: int, rounds: int
) -> None:
    with trainer(tmp_path) as victim:
        port = victim.control if kind == "DEALER" else victim.publish
        for _ in range(rounds):
            victim.hold(100)
            with connected(port, 1, kind) as (attacker,):
                attacker.send_at_once(messages * frame(b"x") + PING)
                attacker.reset()
            assert victim.line() == "alive"
        victim.close()


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.attacks)])
@pytest.mark.parametrize("size", [4, 400, 4_000])
def test_subscriptions_to_made_up_topics_fill_no_memory(tmp_path: Path, size: int, rounds: int) -> None:
    topics, most = random.Random(0), 0
    made_up = b"".join(frame(b"\x01" + topics.randbytes(size)) for _ in range(4 * MB // size))
    with trainer(tmp_path) as victim:
        before = victim.memory()
        for _ in range(rounds):
            with connected(victim.publish, 1, "SUB") as (attacker,):
                assert attacker.flood(made_up, 42 * MB)
                victim.hold(0)
                assert victim.line() == "alive"
                most = max(most, victim.memory() - before)
        # Without limits 2.4 GB. Mostly the first wrong topic ends it, and it takes 1 MB. But topics may come as fast as
        # they are stored, in fifty times their size, some 10 MB a second. Then it ends when the bus is looked at, each
        # 0.03 s; on a busy machine that is late.
        assert most < 200 * MB
        victim.close()


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.attacks)])
def test_a_flood_of_messages_is_cut_off(tmp_path: Path, rounds: int) -> None:
    with trainer(tmp_path) as victim:
        before = victim.memory()
        for _ in range(rounds):
            with connected(victim.control, 1) as (attacker,):
                assert attacker.flood(100_000 * frame(b"x"), 100 * MB)
            victim.hold(0)
            assert victim.line() == "alive"
        assert victim.memory() - before < 1_000 * MB  # of more than 2 GB that they would take
        victim.close()
