"""verl's checkpoint manager, whose updates of the weights are syncs of the bus. verl itself moves the bytes."""

import atexit
from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

from controlplane.trainers.verl.run import VerlRun
from controlplane.trainers.verl.settings import SECTION, read_settings
from schemas.errors import ConfigError
from schemas.logs import logger_of
from schemas.profiler.config import ProfilerConfig

logger = logger_of("verl")


class BusCheckpointManager(CheckpointEngineManager):  # type: ignore[misc]
    """`CheckpointEngineManager` (verl 0.9.1) on the bus: between pause and commit, verl's own update.

    For verl's V0 and separation trainers it is named in the configuration:
    `+actor_rollout_ref.rollout.checkpoint_manager_class=controlplane.trainers.verl.checkpoints.BusCheckpointManager`.
    verl gives it no more than the three arguments, so its settings are those of a checkpoint engine:
    `+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.rolloutctl.KEY=VALUE`. The V1 trainers ignore that key.

    Args:
        config: verl's `CheckpointEngineConfig`.
        actor_wg: The training ranks.
        replicas: The rollout replicas.
        run: The bus; None to open one for these replicas alone, which then ends with the process.
        servers: verl's `LLMServerManager` of the replicas. With it, quarantined replicas get no requests.
    """

    def __init__(
        self, config: Any, actor_wg: Any, replicas: list[Any], run: VerlRun | None = None, servers: Any = None
    ) -> None:
        super().__init__(config=config, actor_wg=actor_wg, replicas=replicas)
        self._run = run if run is not None else _own_run(config, replicas)
        self._servers, self._left_out, self._updating = servers, frozenset[int](), False

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> Any:
        """Update the weights of all replicas. Raises what verl's own update raises."""
        update = partial(super().update_weights, global_steps)
        self._updating = True
        try:
            updated = await self._run.update(global_steps, [int(each.replica_rank) for each in self.replicas], update)
        finally:
            self._updating = False
        for replica in self.replicas:
            if replica.replica_rank in updated.unattended:
                await replica.resume_generation()  # as verl would have: perhaps an agent paused it, and died
        await self._leave_out(updated.quarantined)
        return updated.answer

    @auto_await  # type: ignore[untyped-decorator]
    async def resume_generation_replicas(self) -> None:
        """Resume generation; not within an update, where the commit does so for all replicas at once."""
        if not self._updating:
            await super().resume_generation_replicas()

    async def _leave_out(self, quarantined: frozenset[int]) -> None:
        """Send requests to all replicas but those in quarantine, which would keep them waiting."""
        if self._servers is None or quarantined == self._left_out:
            return
        ranks = [int(replica.replica_rank) for replica in self._servers.rollout_replicas]
        of = dict(
            zip(ranks, zip(self._servers.server_addresses, self._servers.server_handles, strict=True), strict=True)
        )
        balancer = self._servers.global_load_balancer
        back, out = (of[rank] for rank in self._left_out - quarantined), quarantined - self._left_out
        await balancer.add_servers.remote(dict(back))
        await balancer.remove_servers.remote([of[rank][0] for rank in out])
        self._left_out = quarantined
        if out:
            logger.error("replicas %s are in quarantine, and get no requests until a later sync", sorted(out))


def _own_run(config: Any, replicas: list[Any]) -> VerlRun:
    """Open the bus of a trainer that tells its checkpoint manager nothing but `config`. Raises ConfigError."""
    section = dict(config.engine_kwargs.get(SECTION) or {})
    path = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{SECTION}"
    if not section.get("log"):
        raise ConfigError(f"{path}.log is missing: it names the file of the run's log")
    settings = read_settings(section, Path(), Path(section["log"]).with_name("traces"), path)
    run = VerlRun.start(settings, replicas, ProfilerConfig())
    atexit.register(run.close)
    return run
