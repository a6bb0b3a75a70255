"""Attacks on an agent's journal: its writer is killed with -9 at any moment, while groups are written and dropped."""

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import started
from tests.unit.journal_files import entries
from workers.link.journal import Journal

WRITE = """
import os, random, signal, sys, threading
from pathlib import Path
from schemas import events
from schemas.storage import checkpointer
from schemas.commands import EngineCommand, Target
from schemas.desired import Desired
from schemas.identity import Identity
from workers.link import journal as journal_module
from workers.link.journal import Journal
from workers.machine.decide import decide

journal_module.MARK_EVERY = 60
checkpointer.CHECKPOINT_BYTES = 100_000  # so that a kill also meets checkpoints

def trace(frame, event, argument):
    global steps
    if not frame.f_code.co_filename.endswith(("record_file.py", "database.py", "checkpointer.py")):
        return None
    steps -= 1
    if not steps:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

def feed(event):
    state, effects = decide(journal.state, event)
    journal.append(event, effects, state)

def write(path, seed):
    global journal
    noise = random.Random(seed)
    journal = Journal.open(Path(path), "0.1", "os")
    if steps >= 0:
        threading.settrace(trace)
        sys.settrace(trace)
    feed(events.Started(at_ms=0, identity=Identity(replica=0, node_rank=1, nnodes=2), incarnation=str(seed)))
    feed(events.SnapshotReceived(at_ms=0, epoch=1, seq=journal.state.seq, desired=Desired()))
    while True:
        for _ in range(noise.choice((1, 3, 200))):
            seq = journal.state.seq + 1
            flush, target = EngineCommand(operation="flush"), Target(replicas=frozenset(range(300)))
            feed(events.CommandReceived(at_ms=seq, epoch=1, origin=1, seq=seq, ttl_ms=1, command=flush, target=target))
        os.write(1, f"writing {journal.number}\\n".encode())
        journal.commit()
        os.write(1, f"written {journal.number}\\n".encode())
        if noise.random() < 0.5:
            released = max(0, journal.committed - noise.randrange(100))
            os.write(1, f"released {released}\\n".encode())
            journal.release(released)

for line in sys.stdin:
    path, seed, number = line.split()
    steps = int(number)  # to be killed after, at one of the lines that write; -1: by another process
    if (child := os.fork()) == 0:
        try:
            os.write(1, f"begun {os.getpid()}\\n".encode())
            write(path, int(seed))
        finally:
            os._exit(1)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Writers:
    """Processes that write a journal. They are forks of one that has imported everything, which takes the longest."""

    def __init__(self, nursery: subprocess.Popen[str]) -> None:
        self._nursery = nursery

    def lines(self, path: Path, seed: int, steps: int, after: int) -> Iterator[tuple[str, int]]:
        """What one says until it is killed, as pairs. With -1 steps it is killed here, after that many lines."""
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._nursery.stdin.write(f"{path} {seed} {steps}\n")
        self._nursery.stdin.flush()
        pid = 0
        for number, line in enumerate(self._nursery.stdout):
            what, _, count = line.partition(" ")
            if what == "begun":
                pid = int(count)
            elif what == "ended":
                assert int(count) == -9
                return
            else:
                yield what, int(count)
            if steps < 0 and number == after + 1:
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def writers() -> Iterator[Writers]:
    with started("-c", WRITE) as nursery:
        yield Writers(nursery)


def kill_and_look(writers: Writers, path: Path, last: tuple[int, int], seed: int, steps: int) -> tuple[int, int]:
    """Let a process write and kill it. All that it committed must be there, in whole groups, and open again.

    Args:
        writers: Of the process.
        path: Of the journal.
        last: Number of the last decision, and of the last one that was released, before this life.
        steps: Lines of `record_file`, `database` and `checkpointer` after which the process kills itself; -1 to kill it
            from here.

    Returns:
        The same after this life.
    """
    said = {"writing": last[0], "written": last[0], "released": last[1]}
    for what, count in writers.lines(path, seed, steps, random.Random(seed).randrange(60)):
        said[what] = max(said[what], count)
    # What it was writing may be there: as a whole.
    journal = Journal.open(path, "0.1", "os")
    assert journal.number in (said["written"], said["writing"]), said
    first = journal.number + 1 - len(entries(path))
    assert first <= said["released"] + 1, said
    journal.close()
    assert [near.name for near in path.parent.iterdir()] == [path.name]
    return journal.number, said["released"]


@pytest.mark.parametrize("rounds", [3, pytest.param(150, marks=pytest.mark.attacks)])
def test_a_killed_agent_finds_every_decision_that_it_committed(writers: Writers, tmp_path: Path, rounds: int) -> None:
    path, last = tmp_path / "agent-0.1.journal", (0, 0)
    for seed in range(rounds):
        last = kill_and_look(writers, path, last, seed, -1)
    assert last[0] > 100 * rounds


@pytest.mark.parametrize(
    "moments", [range(2000, 3000, 397), pytest.param(range(1, 6000, 41), marks=pytest.mark.attacks)]
)
def test_a_writer_that_is_killed_at_any_line_loses_nothing(writers: Writers, tmp_path: Path, moments: range) -> None:
    path, last = tmp_path / "agent-0.1.journal", (0, 0)
    for steps in moments:
        last = kill_and_look(writers, path, last, steps, steps)
