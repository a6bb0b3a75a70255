"""No loop, of the bus or of an agent, waits for a disk, a lock or an engine: profiles, syncs, memory, traces, the hook.

blockbuster raises where a call that may block is made on an event loop. The only exceptions are log and journal:
tens of microseconds into the page cache, which must be written before anything else is done (measured in bench/;
`durability="disk"` makes it a flush, by the user's choice).
"""

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from controlplane.bus.bus import Bus
from controlplane.machine.events import SyncRequested
from controlplane.record.log import RunLog
from schemas.commands import Checkpoint, Command, EngineCommand, Finish, ProfileCommand, ProfilePlan, Target
from schemas.config import AgentConfig, BusConfig
from schemas.identity import Identity
from schemas.safetensors.manifest import build_manifest
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.traces.node import NodeTraces

PLACE = Identity(replica=0, node_rank=0)
PLAN = ProfilePlan(record_shapes=True, finish=Finish(relocate=True, hook=True))
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)


@pytest.fixture
def never_blocking() -> Iterator[BlockBuster]:
    with blockbuster_ctx() as guard:
        for name, function in guard.functions.items():
            if name.startswith("sqlite3."):  # only `schemas.storage` speaks to it
                function.deactivate()
        guard.functions["os.stat"].can_block_in("schemas/storage/writer_lock.py", {"change", "note"})
        guard.functions["os.unlink"].can_block_in("schemas/storage/writer_lock.py", {"release"})  # as SQLite does then
        guard.functions["os.listdir"].can_block_in("controlplane/bus/descriptors.py", {"_open_now"})  # /proc is no disk
        yield guard


def profile(action: str, step: int = 1) -> ProfileCommand:
    return ProfileCommand(action=action, step=step, plan=PLAN, profiled_steps=(step,))  # type: ignore[arg-type]


COMMANDS: tuple[Command, ...] = (
    profile("check"),
    profile("start"),
    profile("stop"),
    profile("finish"),
    *(EngineCommand(operation=entry) for entry in ("pause", "flush", "sleep", "wake", "resume", "abort")),
)


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_nothing_blocks_a_loop_from_a_profile_to_its_finish_and_through_a_sync(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save(TinyModel(TinyConfig(), seed=1), tmp_path / "v1")
    manifest = build_manifest(tmp_path / "v1", content=True)
    engine = TinyEngine(PLACE, checkpoints=tmp_path, traces=tmp_path / "traces")
    left = NodeTraces(tmp_path / "traces", PLACE, hook="true")
    config, state = AgentConfig(hello_retry_ms=20, observe_ms=10), tmp_path / "state"
    async with (
        Bus("tcp://127.0.0.1:0", RunLog.open(tmp_path / "run.db"), QUICK) as bus,
        Agent(bus=bus.address, identity=PLACE, engine=engine, state_dir=state, traces=left, config=config) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(agent.run)
        with anyio.fail_after(60):
            await agent.wait_ready()
            request.getfixturevalue("never_blocking")
            for command in COMMANDS:
                (await bus.publish(command, Target(), 30_000)).raise_for_failures()
            report = await bus.sync(
                SyncRequested(version=1, source=Checkpoint("v1"), manifest=manifest, timeout_ms=30_000)
            )
            report.raise_for_failures()
        tasks.cancel_scope.cancel()
