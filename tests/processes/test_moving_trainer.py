"""A trainer that is killed in the middle of a sync, and goes on on another machine."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.processes.machines import ADDRESSES, Machine, two_machines
from tests.running import ROOT, typed
from tests.waiting import wait_until

PORT: Final = 5555
LEASE_MS: Final = 120_000
TRAINER: Final = ROOT / "tests/processes/moving_trainer.py"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(tmp_path) as both:
        (tmp_path / "shared").mkdir()
        yield both


class Name:
    """A host name that leads to one of the machines, as in a DNS that follows the trainer."""

    text = "bus.example"

    def __init__(self, hosts: Path) -> None:
        self._hosts, self._others = hosts, hosts.read_text()

    def lead_to(self, machine: str) -> None:
        self._hosts.write_text(f"{self._others}{ADDRESSES[machine]} {self.text}\n")  # in place: it is mounted


def told(trainer: subprocess.Popen[str]) -> dict[str, Any]:
    assert trainer.stdout is not None
    return dict(json.loads(trainer.stdout.readline()))


def test_a_trainer_that_is_killed_goes_on_on_another_machine_and_its_agents_find_it(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = machines
    shared, errors = tmp_path / "shared", [tmp_path / f"{name}.log" for name in ("a", "b", "first", "second")]
    agent = f"exec rolloutctl agent --engine tests.unit.small_bus:Engine --checkpoints {shared}"
    name = Name(tmp_path / "hosts")
    name.lead_to("trainer")
    train = f"exec python {TRAINER} {shared} {PORT} {LEASE_MS}"
    with (
        ExitStack() as stack,
        first.typed(f"{agent} --replica 0 --bus {shared}/bus", stack.enter_context(errors[0].open("w"))),
        second.typed(f"{agent} --replica 1 --bus tcp://{name.text}:{PORT}", stack.enter_context(errors[1].open("w"))),
        first.typed(f"{train} hang", stack.enter_context(errors[2].open("w"))) as training,
    ):
        assert told(training) == {"epoch": 1, "serving": {"0": 0, "1": 0}}
        assert told(training) == {"version": 1, "serving": {"0": 1, "1": 1}}
        assert told(training) == {"loading": True}  # both engines are paused
        assert (shared / "bus").read_text() == f"tcp://trainer:{PORT}\n"
        training.kill()
        killed_s = time.monotonic()
        with second.typed(train, stack.enter_context(errors[3].open("w"))) as resumed:
            name.lead_to("node-a")
            assert told(resumed) == {"known": ["0.0", "1.0"]}, errors[3].read_text()
            # The version that was loaded when its trainer died is not used again.
            assert told(resumed) == {"epoch": 2, "serving": {"0": 1, "1": 1}}
            assert (time.monotonic() - killed_s) * 1000 < LEASE_MS
            assert told(resumed) == {"version": 3, "serving": {"0": 3, "1": 3}}
            assert told(resumed) == {"version": 4, "serving": {"0": 4, "1": 4}}
            assert (shared / "bus").read_text() == f"tcp://node-a:{PORT}\n"
            assert resumed.wait(60) == 0
    said = [log.read_text() for log in errors[:2]]
    assert f"its bus is at tcp://node-a:{PORT} now, by the file {shared}/bus" in said[0]
    assert "its log lost its tail" not in "".join(said)
    assert typed("log", "verify", second.home / "run.db").returncode == 0
    wait_until(lambda: (shared / "log" / "writer").read_text() == "")
