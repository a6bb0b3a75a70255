"""`rolloutctl agent --dump-stacks`: where an engine hangs stands in a file, which the report and `stall` name."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from controlplane import ControlPlane
from schemas.config import BusConfig
from schemas.outcomes import ErrorKind, Failed
from tests.running import started, typed
from tests.waiting import until, wait_until
from workers.server.launch import ServerProcess
from workers.stacks import StackDumps

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=100, retransmit_ms=200)
ENGINE = """
import threading
from anyio import to_thread
from schemas.events import Observation, Returned
from schemas.identity import Operation

def waits_for_a_collective_that_never_comes():
    threading.Event().wait()

class Engine:
    async def open(self): pass
    async def close(self): pass
    async def observe(self):
        return Observation(engine="mine 1", tokenizer="present", operations=frozenset(Operation), generating=True,
                           asleep=frozenset(), profiling=False, version=0)
    async def perform(self, call, timeout_s):
        await to_thread.run_sync(waits_for_a_collective_that_never_comes, abandon_on_cancel=True)
        return Returned()
"""
SERVER = """
import subprocess, sys, threading
def worker_of_rank_one():
    print("up", flush=True)
    threading.Event().wait()
def front_end_of_the_server():
    subprocess.Popen([sys.executable, __file__, "worker"]).wait()
worker_of_rank_one() if sys.argv[1:] else front_end_of_the_server()
"""


@contextmanager
def agent(plane: ControlPlane, folder: Path, *options: str) -> Iterator[Path]:
    """Run an agent with an engine that hangs; gives the file of its output."""
    (folder / "mine.py").write_text(ENGINE)
    words = ["--bus", plane.address, "--replica", "0", "--engine", "mine:Engine", "--state-dir", str(folder / "state")]
    environment = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{folder}"}
    log = folder / "agent.log"
    with (
        log.open("wb") as output,
        started("-m", "controlplane.cli", "agent", *words, *options, env=environment, stderr=output.fileno()),
    ):
        plane.wait_for_agents(1, timeout=60).wait()
        yield log


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK) as opened:
        yield opened


def test_the_report_and_stall_name_the_file_that_says_where_the_engine_hangs(
    plane: ControlPlane, tmp_path: Path
) -> None:
    with agent(plane, tmp_path, "--dump-stacks") as log:
        report = plane.pause(timeout=12).wait()  # a quarter of it is left to the dump
        (outcome,) = (outcome.conclusion for outcome in report.outcomes)
        assert isinstance(outcome, Failed) and outcome.error is ErrorKind.ENGINE_TIMEOUT, outcome
        named = re.search(r"The stacks of .* are in (/\S+/state/stacks-0\.0-\S+\.txt)\.", outcome.message)
        assert named is not None, (outcome.message, log.read_text())
        assert "waits_for_a_collective_that_never_comes (" in Path(named[1]).read_text()
        assert named[1] in log.read_text()

        wait_until(lambda: named[1] in plane.status().agents[0].condition)
        shown = typed("stall", env={"ROLLOUTCTL_BUS": plane.address})
        assert shown.returncode == 1 and named[1] in shown.stdout, shown.stdout
    replayed = typed("log", "replay", tmp_path / "run.db")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_launched_server_is_read_with_all_that_it_has_started(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    await anyio.Path(script).write_text(SERVER)
    server = ServerProcess([sys.executable, str(script)], log=tmp_path / "server.log")
    server.start()
    try:
        await until(lambda: server.status().log_tail[-1:] == ("up",))
        note = await StackDumps().dump(tmp_path, "0.0", "load")
    finally:
        await server.end()
    (path,) = [path async for path in anyio.Path(tmp_path).glob("stacks-0.0-*.txt")]
    text = await path.read_text()
    assert str(path) in note and "processes, the agent's own among them" in note
    assert "worker_of_rank_one (" in text and "front_end_of_the_server (" in text
