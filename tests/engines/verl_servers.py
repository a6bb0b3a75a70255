"""verl's rollout servers (0.9.1) as a control plane meets them: their methods and attributes, over engines in memory.

The engines refuse what kills the real ones or what those refuse: memory that is released while requests run or restored
twice, a profile that is stopped before it started. On a node rank above 0 there is no front end, so every method fails,
as verl's did. `called` holds the names of all methods that were ever called.
"""

import gzip
import json
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class RolloutMode(Enum):
    HYBRID = "hybrid"
    COLOCATED = "colocated"
    STANDALONE = "standalone"


class Engine:
    """What both engines hold.

    Attributes:
        requests: Requests in flight, by id.
        prefixes: Prefixes in the cache.
        released: Released regions of memory.
    """

    def __init__(self) -> None:
        self.requests: dict[str, object] = {}
        self.prefixes = 7
        self.released: set[str] = set()
        self.flushed = self.recorded = 0
        self.recording: dict[str, Any] | None = None
        self.given: list[dict[str, Any]] = []

    def release(self, tags: Iterable[str]) -> None:
        assert not self.requests, "memory released under running requests"
        for tag in tags:
            assert tag not in self.released, f"{tag} released twice"
            self.released.add(tag)

    def take_back(self, tags: Iterable[str]) -> None:
        for tag in tags:
            self.released.remove(tag)

    async def flush_cache(self) -> bool:
        if not self.requests:
            self.prefixes, self.flushed = 0, self.flushed + 1
        return not self.requests

    def start(self, arguments: dict[str, Any]) -> None:
        self.given.append(arguments)
        self.recording = arguments

    def stop(self, directory: str, ranks: int) -> list[Path]:
        """Write one trace for each rank."""
        if self.recording is None:
            raise RuntimeError("Profiling is not in progress. Call /start_profile first.")
        self.recording = None
        self.recorded += 1
        Path(directory).mkdir(parents=True, exist_ok=True)
        files = [Path(directory, f"{self.recorded}-TP-{rank}.trace.json.gz") for rank in range(ranks)]
        for rank, file in enumerate(files):
            with gzip.open(file, "wt") as stream:
                json.dump({"distributedInfo": {"rank": rank}, "traceEvents": []}, stream)
        return files


class TokenizerManager(Engine):
    """SGLang's front end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_pause = False
        self.deaf = False

    @property
    def rid_to_state(self) -> dict[str, object]:
        return self.requests

    async def pause_generation(self, mode: str) -> None:
        assert mode == "abort"
        self.requests.clear()
        self.is_pause = not self.deaf

    async def continue_generation(self) -> None:
        self.is_pause = self.deaf


class AsyncLLM(Engine):
    """vLLM's. Sleep level 2 forgets the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.output_processor = SimpleNamespace(request_states=self.requests)
        self.levels: list[int] = []

    async def sleep(self, level: int) -> None:
        self.levels.append(level)
        self.release(["weights", "kv_cache"])

    async def wake_up(self, tags: list[str]) -> None:
        self.take_back(tags)


class ProfilerController:
    """verl's `DistProfiler`, as the servers hold it."""

    def __init__(self, save_path: str) -> None:
        self.config = SimpleNamespace(tool="torch", save_path=save_path, relocate_results=False)
        self.tool_config = SimpleNamespace(contents=[], profile_token_start=None, profile_token_end=None)
        self.enabled = self.selected = self.discrete = True

    def check_enable(self) -> bool:
        return self.enabled

    def check_this_rank(self) -> bool:
        return self.selected

    def is_discrete_mode(self) -> bool:
        return self.discrete


class Server:
    """What both servers have in common."""

    def __init__(self, mode: str, node_rank: int = 0, replica_rank: int = 0, save_path: str | None = None) -> None:
        self.rollout_mode = RolloutMode(mode)
        self.node_rank, self.replica_rank = node_rank, replica_rank
        self.config = SimpleNamespace(free_cache_engine=True)
        self.lora_as_adapter = False
        self.global_steps: int | None = None
        self.called: list[str] = []
        self.dies_in: str | None = None
        if save_path is not None:
            self.profiler_controller = ProfilerController(save_path)

    async def set_global_steps(self, global_steps: int) -> None:
        self._note("set_global_steps")
        self.global_steps = global_steps

    def hold(self, fifo: str) -> None:
        """Hold up the actor's loop until something is written into `fifo`. Not of verl."""
        Path(fifo).read_text()

    def _note(self, method: str) -> None:
        self.called.append(method)
        if method == self.dies_in:
            os._exit(1)

    def _profiles(self) -> bool:
        controller = self.profiler_controller
        return controller.check_enable() and controller.check_this_rank() and controller.is_discrete_mode()

    def _traces(self) -> str:
        return f"{self.profiler_controller.config.save_path}/agent_loop_rollout_replica_{self.replica_rank}"

    def _relocate(self, files: list[Path]) -> None:
        config = self.profiler_controller.config
        for file in files if config.relocate_results else ():
            file.rename(Path(config.save_path, f"rollout-replica{self.replica_rank}-globalrank0_{file.name}"))


class SGLangHttpServer(Server):
    """Without a `save_path` it has no profiler of its own, and hands on what it is given."""

    async def launch_server(self) -> None:
        self.tokenizer_manager: Any = TokenizerManager() if self.node_rank == 0 else None

    async def wake_up(self) -> None:
        self._note("wake_up")
        if self.rollout_mode is RolloutMode.HYBRID:
            raise ValueError(f"wake_up not support rollout_mode {self.rollout_mode}")
        weights = [] if self.rollout_mode is RolloutMode.STANDALONE else ["weights"]
        self.tokenizer_manager.take_back(["kv_cache", *weights])

    async def sleep(self) -> None:
        self._note("sleep")
        weights = [] if self.rollout_mode is RolloutMode.STANDALONE else ["weights"]
        self.tokenizer_manager.release(["kv_cache", *weights])

    async def clear_kv_cache(self) -> None:
        self._note("clear_kv_cache")
        await self.tokenizer_manager.flush_cache()

    async def release_kv_cache(self) -> None:
        self._note("release_kv_cache")
        if self.config.free_cache_engine:
            self.tokenizer_manager.release(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        self._note("resume_kv_cache")
        if self.config.free_cache_engine:
            self.tokenizer_manager.take_back(["kv_cache"])
            await self.tokenizer_manager.flush_cache()

    async def abort_all_requests(self) -> None:
        self._note("abort_all_requests")
        await self.tokenizer_manager.pause_generation("abort")

    async def resume_generation(self) -> None:
        self._note("resume_generation")
        await self.tokenizer_manager.continue_generation()

    async def start_profile(self, **kwargs: Any) -> None:
        self._note("start_profile")
        if hasattr(self, "profiler_controller"):
            if not self._profiles():
                return
            kwargs = {"output_dir": self._traces()}
        self.tokenizer_manager.start(kwargs)

    async def stop_profile(self) -> None:
        self._note("stop_profile")
        recording = self.tokenizer_manager.recording or {}
        files = self.tokenizer_manager.stop(recording.get("output_dir"), ranks=2)
        if hasattr(self, "profiler_controller"):
            self._relocate(files)


class vLLMHttpServer(Server):
    """vLLM's server, with a sleep level. `abort_all_requests` returns `answer`."""

    def __init__(self, mode: str, node_rank: int = 0, replica_rank: int = 0, save_path: str | None = None) -> None:
        super().__init__(mode, node_rank, replica_rank, save_path)
        self.level = 1
        self.answer: dict[str, Any] = {"aborted_count": 0, "request_ids": []}
        self._submission_paused = False

    async def launch_server(self) -> None:
        if self.node_rank == 0:
            self.engine = AsyncLLM()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._note("wake_up")
        if self.rollout_mode is RolloutMode.HYBRID:
            await self.engine.wake_up(tags=tags or ["kv_cache", "weights"])
        elif self.rollout_mode is RolloutMode.COLOCATED:
            await self.engine.wake_up(tags=["kv_cache", "weights"])

    async def sleep(self) -> None:
        self._note("sleep")
        if self.rollout_mode is not RolloutMode.STANDALONE:
            await self.engine.sleep(level=self._resolve_sleep_level())

    async def clear_kv_cache(self) -> None:
        self._note("clear_kv_cache")
        await self.engine.flush_cache()

    async def release_kv_cache(self) -> None:
        self._note("release_kv_cache")
        if self.rollout_mode is not RolloutMode.COLOCATED:
            await self.engine.sleep(level=self._resolve_sleep_level())
            await self.engine.wake_up(tags=["weights"])

    async def resume_kv_cache(self) -> None:
        self._note("resume_kv_cache")
        if self.rollout_mode is not RolloutMode.COLOCATED:
            await self.engine.wake_up(tags=["kv_cache"])

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        self._note("abort_all_requests")
        self._submission_paused = True
        self.engine.requests.clear()
        return self.answer

    async def resume_generation(self) -> None:
        self._note("resume_generation")
        self._submission_paused = False

    async def start_profile(self, **kwargs: Any) -> None:
        self._note("start_profile")
        if self._profiles():
            self.engine.start(kwargs)

    async def stop_profile(self) -> None:
        self._note("stop_profile")
        if self._profiles():
            self._relocate(self.engine.stop(self._traces(), ranks=1))

    def _resolve_sleep_level(self) -> int:
        return self.level
