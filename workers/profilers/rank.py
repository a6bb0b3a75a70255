"""A training rank on the bus: an agent on a thread and loop of its own, in the process that trains."""

import atexit
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final, Self

import anyio
import msgspec
from anyio.from_thread import BlockingPortal

from schemas.config import AgentConfig, within_bounds
from schemas.errors import ConfigError, RolloutctlError
from schemas.fault_plan import read_plan
from schemas.identity import ROLLOUT, Identity
from schemas.logs import logger_of
from schemas.outcomes import Reason
from schemas.profiler.config import ProfilerConfig
from schemas.selection import profile_skip_reason
from schemas.transport.keys import PeerKeys, StrPath
from workers.agent import Agent
from workers.faults import FaultInjector
from workers.profilers.session import RankProfiler
from workers.profilers.stages import Stage
from workers.profilers.tools import require_supported
from workers.traces.node import NodeTraces

logger = logger_of("rank")

CLOSE_S: Final = 60.0
"""Limit for writing the last traces at the end of a rank."""


class TrainingRank:
    """One rank of a training role, as the bus knows it. `with TrainingRank(...) as rank:` around the training.

    Once it is entered, none of its methods raises: a bus that is lost is searched for in the background, and what ends
    the agent is logged and stored in `failure`. Its thread is a daemon. If `close` is never called, the rank is closed
    at the end of the process. It does not exist in a child that this process forks.

    On a staging fleet, `ROLLOUTCTL_AGENT_FAULTS` names a plan of what goes wrong with it on purpose (docs/gamedays.md).

    Args:
        bus: Address of the bus.
        role: `actor`, `critic`, …
        rank: Global rank in the role.
        world_size: Ranks of the role.
        state_dir: Directory of the agent's journal, on a disk of this machine; None for the user's state folder.
        traces: Root of the traces; None for `save_path` of the profiler's configuration.
        profiler: The trainer's configuration, if it is known here: a plan that can't be honoured then raises at once.
        config: Settings of the agent.
        keys: File with this rank's key, or what `Agent` takes instead.

    Attributes:
        failure: What ended the agent, if anything did.

    Raises:
        ConfigError: An argument is wrong.
        UnsupportedError: This process can't record what the configuration asks for.
        BusAddressError, KeyFileError, LogLocked, LogError, AgentError: On entering.
    """

    def __init__(
        self,
        *,
        bus: str,
        role: str,
        rank: int,
        world_size: int,
        state_dir: Path | str | None = None,
        traces: Path | str | None = None,
        profiler: ProfilerConfig | None = None,
        config: AgentConfig | None = None,
        keys: StrPath | PeerKeys | None = None,
    ) -> None:
        self.identity = _identity(role, rank, world_size)
        profiler = within_bounds(profiler or ProfilerConfig())
        root = traces if traces is not None else profiler.save_path
        if not root:
            raise ConfigError("traces: a training rank needs a directory for them, or `save_path` in its configuration")
        plan = profiler.roles.get(role)
        if plan is not None and profile_skip_reason(plan, None, self.identity) in (None, Reason.TOOL_UNSUPPORTED):
            require_supported(plan)
        self.profiler = RankProfiler(self.identity, traces=Path(root), world_size=world_size)
        self.failure: RolloutctlError | None = None
        self._bus, self._config = bus, config
        self._state = Path(state_dir) if state_dir is not None else None
        self._keys = keys
        plan_file = os.environ.get("ROLLOUTCTL_AGENT_FAULTS")
        self._faults = FaultInjector(read_plan(Path(plan_file)), self.identity) if plan_file else None
        self._traces = NodeTraces(Path(root), self.identity, profiler.finish_hook_cmd)
        self._opened: Future[None] = Future()
        self._thread: Thread | None = None
        self._pid = 0
        self._portal: BlockingPortal
        self._serving: anyio.CancelScope

    # --- lifetime -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the agent. Blocks for some milliseconds, and does not wait for the bus."""
        if self._thread is not None:
            raise ConfigError("this training rank was opened before: make one object for each life")
        self._pid = os.getpid()
        self._thread = Thread(target=self._run, name=f"rolloutctl-{self.identity.agent}", daemon=True)
        self._thread.start()
        self._opened.result()
        atexit.register(self.close)

    def close(self) -> None:
        """End an open session, write its traces and leave the bus. Never raises; waits for at most a minute."""
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        self.profiler.stop_waiting()
        if thread.is_alive():
            with suppress(RuntimeError):  # its loop may have ended just now
                self._portal.start_task_soon(self._serving.cancel)
        thread.join(CLOSE_S)
        if thread.is_alive():
            logger.warning("%s: after %g s traces are still being written; giving up", self.identity.agent, CLOSE_S)

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            else:
                logger.warning("%s can't be profiled any more: %s", self.identity.agent, error)

    async def _main(self) -> None:
        agent = Agent(
            bus=self._bus,
            identity=self.identity,
            engine=self.profiler,
            state_dir=self._state,
            traces=self._traces,
            config=self._config,
            keys=self._keys,
            faults=self._faults,
        )
        async with BlockingPortal() as self._portal, agent:
            with anyio.CancelScope() as self._serving:
                self._opened.set_result(None)
                try:
                    await agent.run()
                except RolloutctlError as error:
                    self.failure = error
                    logger.warning("%s leaves the bus, the training goes on: %s", self.identity.agent, error)
                    await self.profiler.end()  # no command could end the session any more

    # --- called by the training code ----------------------------------------------------------------------------------

    def annotate(self, stage: str, *, scheduled: bool = False) -> Stage:
        """Mark a stage of this rank, as a decorator or with `with`; see `workers.profilers.annotate`.

        Args:
            stage: Name of the stage.
            scheduled: As in `annotate`.
        """
        return Stage(stage, None, scheduled, self.profiler)

    def mini_batch(self) -> None:
        """Note that one mini-batch of a scheduled stage is done."""
        self.profiler.mini_batch()


def _identity(role: str, rank: int, world_size: int) -> Identity:
    if role == ROLLOUT:
        raise ConfigError(f"role {ROLLOUT!r} is that of the engines; a training rank has another, such as 'actor'")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not below world_size {world_size}: ranks are 0..world_size-1")
    try:
        return msgspec.convert({"replica": rank, "node_rank": 0, "role": role}, Identity)
    except msgspec.ValidationError as error:
        raise ConfigError(f"role {role!r}, rank {rank!r}: {error}") from error
