"""A bus, agents and tiny engines that really generate, all in this process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import anyio
from anyio import to_thread
from torch import Tensor

from controlplane.bus.bus import Bus
from controlplane.record.log import RunLog
from schemas.config import AgentConfig, BusConfig
from schemas.errors import EngineError
from schemas.events import Observation
from schemas.identity import Digests, Identity
from workers.agent import Agent
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, layout, weights
from workers.engines.tiny.server import TinyClient

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=40, retransmit_ms=500)


def model(seed: int, config: TinyConfig | None = None) -> TinyModel:
    return TinyModel(config or TinyConfig(), seed=seed)


def push(engine: TinyEngine, label: str, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors over an engine's weights, as a trainer's own data plane does, which asks no agent.

    Raises:
        EngineError: The engine generates, its weights are asleep, or the tensors are not the model's.
    """
    scheduler = engine._require_scheduler()
    if layout(tensors) != engine._layout:
        raise EngineError("the push was refused: its tensors are not those of the model. Nothing was changed.")

    def copy() -> None:
        scheduler._require_loadable()
        for name, tensor in weights(scheduler.model).items():
            tensor.copy_(tensors[name])
        scheduler._change(version=None, label=label, digest=scheduler.digest())

    scheduler.run(copy)


class TinyFleet:
    """Replicas of one node each."""

    digests: Digests = "announced"

    def __init__(self, folder: Path, bus: Bus) -> None:
        self.folder, self.bus = folder, bus
        self.engines: dict[int, TinyEngine] = {}
        self.agents: dict[int, Agent] = {}

    @classmethod
    @asynccontextmanager
    async def of_two(cls, folder: Path) -> AsyncIterator[Self]:
        """Replicas 0 and 1, whose agents have joined."""
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(Bus("tcp://127.0.0.1:0", RunLog.open(folder / "run.db"), QUICK))
            made = cls(folder, bus)
            for replica in (0, 1):
                await stack.enter_async_context(made.replica(replica))
            with anyio.fail_after(20):
                await bus.wait_until(lambda state: [each.state for each in state.members.values()] == ["live", "live"])
            yield made

    def root(self, replica: int) -> Path:
        """The checkpoints that the replica sees."""
        return self.folder

    @asynccontextmanager
    async def replica(self, replica: int) -> AsyncIterator[Agent]:
        identity = Identity(replica=replica, node_rank=0)
        engine = self.engines[replica] = TinyEngine(
            identity,
            checkpoints=self.root(replica),
            traces=self.folder / "traces",
            serve=self._front(replica),
            seed=100 + replica,
            digests=self.digests,
        )
        config, state = AgentConfig(hello_retry_ms=20, observe_ms=20), self.folder / "state"
        async with (
            Agent(bus=self.bus.address, identity=identity, engine=engine, state_dir=state, config=config) as agent,
            anyio.create_task_group() as tasks,
        ):
            self.agents[replica] = agent
            tasks.start_soon(agent.run)
            with anyio.fail_after(30):
                await agent.wait_ready()
            yield agent
            tasks.cancel_scope.cancel()

    def held(self, replica: int) -> Observation:
        return TinyClient(self._front(replica), timeout_s=10).describe()

    async def generates_on(self, replica: int, timeout_s: float = 10) -> int | None:
        """Return the version that the replica generates on, 0 for one without a number; None if it doesn't answer."""
        client = TinyClient(self._front(replica), timeout_s=timeout_s)
        try:
            (completion,) = await to_thread.run_sync(client.generate, [[1]], 4)
        except EngineError:
            return None
        (version,) = set(completion.versions)
        return version

    def _front(self, replica: int) -> str:
        return f"ipc://{self.folder}/engine-{replica}"
