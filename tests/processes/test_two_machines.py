"""The two machines of docs/keys.md: its blocks, typed on the machine that the page names."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import blocks, module_of
from tests.processes.machines import Machine, two_machines
from tests.running import typed
from tests.waiting import wait_until

PAGE = "docs/keys.md"
NEW, COPY, TRAIN, AGENT, STATUS, REVOKE, *_ = blocks(PAGE, "sh")
(REPORT,) = blocks(PAGE, "text")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(tmp_path) as both:
        module_of(PAGE, "trainer", tmp_path / "trainer")
        yield both


def test_the_page_leads_to_a_fleet_on_two_machines_which_lets_nobody_in_without_a_key(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    trainer, node = machines
    for block in (NEW, COPY):
        done(trainer, block)
    assert not (trainer.home / "keys/issued/node-a.key").exists()
    without_key = AGENT.replace(" --key rolloutctl.key", "").replace(
        "0 --engine tiny", "1 --engine vllm --url http://[::1]:9"
    )
    assert "--key" not in without_key and "--replica 1 --engine vllm" in without_key
    log, refused = tmp_path / "agent.log", tmp_path / "refused.log"
    with (
        log.open("w") as errors,
        refused.open("w") as other_errors,
        trainer.typed(TRAIN) as training,
        node.typed(AGENT, errors) as agent,
        node.typed(without_key, other_errors),
    ):
        assert training.stdout is not None
        printed = training.stdout.readline()
        assert without_times(printed) == without_times(REPORT), printed + log.read_text()
        (line,) = (line for line in done(trainer, STATUS).splitlines() if "0.0" in line)
        assert "node-a" in line
        wait_until(lambda: "WARNING" in refused.read_text())
        assert done(trainer, REVOKE) == "node-a: revoked\n"
        assert agent.wait(60) == 3
        training.communicate("\n", timeout=60)
        assert training.returncode == 0
    assert "key node-a was revoked" in log.read_text()
    told = next(line for line in refused.read_text().splitlines() if "WARNING" in line)
    assert "no way into tcp://trainer:5555: the bus admits no peer without a key, and none was given" in told
    assert "agent 1.0" not in typed("log", "show", trainer.home / "run.db").stdout


def done(machine: Machine, block: str) -> str:
    """Run a block to its end, which must be a good one. Returns what it printed."""
    ran = machine.type(block)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def without_times(line: str) -> str:
    return re.sub(r"[\d.]+ m?s\b", "0 ms", line)


def test_the_trainer_of_the_page_opens_no_bus_for_other_machines_without_keys(
    machines: tuple[Machine, Machine],
) -> None:
    trainer, _ = machines
    file = trainer.home / "trainer.py"
    file.write_text(file.read_text().replace(', keys="keys"', ""))
    ran = trainer.type(TRAIN)
    assert ran.returncode == 1
    assert "refused to bind 'tcp://0.0.0.0:5555': other machines can reach it" in ran.stderr
    assert "rolloutctl keys new" in ran.stderr
