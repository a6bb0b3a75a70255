"""A trainer that is killed in a sync leaves nothing paused: not in the run's first, not what the sync had left out."""

import signal
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from controlplane.bus.bus import Bus
from controlplane.machine.replicas import all_serve, proven_replicas
from controlplane.record.log import RunLog
from schemas.config import BusConfig
from tests.attacks.keyed_bus import agent_of
from tests.running import started
from tests.unit.small_bus import Engine
from tests.waiting import until

pytestmark = pytest.mark.anyio

CONFIG = BusConfig(head_interval_ms=50, heartbeat_ms=100, lease_ms=1_000)
TRAINER = """
import sys
from pathlib import Path
import anyio
from controlplane.bus.bus import Bus
from controlplane.machine.events import SyncRequested
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint
from tests.attacks.test_lost_trainers import CONFIG
async def main():
    async with Bus("tcp://127.0.0.1:0", RunLog.open(Path(sys.argv[1])), CONFIG) as bus:
        print(bus.address, flush=True)
        agents, syncs = int(sys.argv[2]), int(sys.argv[3])
        await bus.wait_until(lambda state: sum(member.joined for member in state.members.values()) == agents)
        for version in range(1, syncs + 1):
            ticket = bus.sync(SyncRequested(version=version, source=Checkpoint(f"v{version}"), manifest=None,
                                            timeout_ms=60_000, sends=version == syncs))
            if version < syncs:
                await ticket
        await bus.wait_until(lambda state: state.sync is not None and state.sync.held_until_us is not None)
        print("loaded", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.mark.one_loop
@pytest.mark.parametrize("restarted", [False, True], ids=["the agent lives on", "the agent is restarted"])
async def test_weights_of_the_first_sync_are_served_when_its_trainer_was_killed(
    tmp_path: Path, restarted: bool
) -> None:
    engine, state, log = Engine(), tmp_path / "state", tmp_path / "run.db"
    with started("-c", TRAINER, log, "1", "1") as trainer:
        assert trainer.stdout is not None
        address = (await to_thread.run_sync(trainer.stdout.readline)).strip()
        async with agent_of(address, None, state, engine=engine):
            assert await to_thread.run_sync(trainer.stdout.readline) == "loaded\n"
            assert engine.version == 1 and not engine.generating
            trainer.send_signal(signal.SIGKILL)
            await until(lambda: trainer.poll() is not None)
            if not restarted:
                await until(lambda: engine.generating)
    async with agent_of(address, None, state, engine=engine):
        await until(lambda: engine.generating)
        async with Bus(address, RunLog.open(log), CONFIG) as bus:
            with anyio.fail_after(20):
                await bus.wait_until(lambda state: all_serve(state, 1, since_us=0))
            assert proven_replicas(bus.state).serving == {0: 1} and engine.generating


@pytest.mark.one_loop
@pytest.mark.parametrize("loss", ["lease", "next trainer"])
async def test_a_replica_that_a_sync_left_out_serves_again_when_its_trainer_was_killed(
    tmp_path: Path, loss: str
) -> None:
    engines, log = [Engine(), Engine(), Engine()], tmp_path / "run.db"
    refused = "fault = [{name = 'no memory', what = 'refuse', call = 'load', version = 2, replicas = [2]}]"
    with started("-c", TRAINER, log, "3", "2") as trainer:
        assert trainer.stdout is not None
        address = (await to_thread.run_sync(trainer.stdout.readline)).strip()
        async with AsyncExitStack() as stack:
            for replica, engine in enumerate(engines):
                state = tmp_path / f"state-{replica}"
                await stack.enter_async_context(agent_of(address, None, state, replica, engine, refused))
            assert await to_thread.run_sync(trainer.stdout.readline) == "loaded\n"
            assert [engine.version for engine in engines] == [2, 2, 1]
            trainer.send_signal(signal.SIGKILL)
            await until(lambda: trainer.poll() is not None)
            if loss == "lease":
                await until(lambda: all(engine.generating for engine in engines))
            async with Bus(address, RunLog.open(log), CONFIG) as bus:
                with anyio.fail_after(20):
                    await bus.wait_until(lambda state: all_serve(state, 3, since_us=0))
                assert proven_replicas(bus.state).serving == {0: 1, 1: 1, 2: 1}
    assert all(engine.generating and engine.version == 1 for engine in engines)
