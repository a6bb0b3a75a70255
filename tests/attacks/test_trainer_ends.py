"""A trainer that is interrupted, or whose main thread dies, ends; its bus ends with it, and leaves nothing paused."""

import random
import signal
import subprocess
from pathlib import Path

import pytest

from controlplane import ControlPlane
from schemas.config import AgentConfig
from schemas.errors import LogLocked
from tests.running import python, started
from workers.profilers import TrainingRank

OPEN = """
import os, signal, sys, threading, time
from controlplane import ControlPlane
from schemas import BusConfig
plane = ControlPlane("tcp://127.0.0.1:0", log=sys.argv[1], config=BusConfig(heartbeat_ms=400))
plane.open()
print(plane.address, flush=True)
sys.stdin.readline()
"""
CLOSE = (
    OPEN
    + """
print("closing", flush=True)
plane.close()
print("closed", flush=True)
signal.pause()  # an interrupt that comes after the end finds the trainer here
"""
)
FALL_OVER = (
    OPEN
    + """
threading.Thread(target=sys.stdin.read).start()  # not a daemon: the process lives on
raise RuntimeError("the main thread dies")
"""
)


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=[pytest.mark.attacks, pytest.mark.timeout(300)])])
def test_an_interrupted_close_ends_the_trainer(tmp_path: Path, rounds: int) -> None:
    rng = random.Random(rounds)
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        with started("-c", CLOSE, folder / "run.db", stderr=subprocess.PIPE) as trainer:
            assert trainer.stdin is not None and trainer.stdout is not None
            address = trainer.stdout.readline().strip()
            with rank(address, folder):  # a live agent, so that closing takes a moment
                trainer.stdin.write("\n")
                assert trainer.stdout.readline() == "closing\n"
                with pytest.raises(subprocess.TimeoutExpired):
                    trainer.wait(rng.random() * 0.4)
                for _ in range(rng.choice((1, 1, 2))):
                    trainer.send_signal(signal.SIGINT)
                assert trainer.wait(60) == -signal.SIGINT
        with ControlPlane("tcp://127.0.0.1:0", log=folder / "run.db"):
            pass  # the log was left whole, and unlocked


def test_a_trainer_that_raises_outside_of_the_context_ends(tmp_path: Path) -> None:
    code = OPEN.replace("sys.stdin.readline()", "raise RuntimeError('the main thread dies')")
    done = python("-c", code, tmp_path / "run.db", timeout_s=20)
    assert done.returncode == 1 and "the main thread has ended without closing the bus" in done.stderr


def test_a_bus_ends_with_the_main_thread_though_another_thread_lives_on(tmp_path: Path) -> None:
    log = tmp_path / "run.db"
    with started("-c", FALL_OVER, log, stderr=subprocess.PIPE) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None and trainer.stderr is not None
        trainer.stdout.readline()
        trainer.stdin.write("\n")
        while "without closing the bus" not in trainer.stderr.readline():
            assert trainer.poll() is None
        while True:  # until the bus has let go of the log
            try:
                with ControlPlane("tcp://127.0.0.1:0", log=log):
                    break
            except LogLocked:
                assert trainer.poll() is None
        assert trainer.poll() is None
        trainer.stdin.close()
        assert trainer.wait(60) == 1


def rank(bus: str, folder: Path) -> TrainingRank:
    return TrainingRank(
        bus=bus,
        role="actor",
        rank=0,
        world_size=1,
        traces=folder,
        state_dir=folder,
        config=AgentConfig(hello_retry_ms=20),
    )
