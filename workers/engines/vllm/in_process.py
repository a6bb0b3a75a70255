"""vLLM within this process: the front of an `AsyncLLM`.

A trainer that embeds the engine runs the agent beside the tasks that generate, on the same asyncio event loop:

    engine = VllmEngine(identity, AsyncLLMClient(async_llm), checkpoints=checkpoints, traces=traces)
    left = NodeTraces(traces, identity)
    async with (
        Agent(bus=bus, identity=identity, engine=engine, state_dir=state_dir, traces=left) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(agent.run)
        await agent.wait_ready()
        ...                           # async_llm.generate(...)
        tasks.cancel_scope.cancel()   # and then async_llm.shutdown()

A headless node (node rank above 0) has no `AsyncLLM`: `VllmEngine(identity, None, ...)`.

To be profiled, the engine needs a `profiler_config`; to sleep, `enable_sleep_mode`. Everything else it always has. No
key and no dev mode are asked for: who can run code in the process owns the engine.
"""

import asyncio
import sys
from asyncio import Task
from collections.abc import Coroutine, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import anyio

from workers.engines.client import CallRefused, Methods, Unanswered
from workers.engines.http import READ_TIMEOUT_S
from workers.engines.in_process import Home, finished, mark, result_of, takes
from workers.engines.vllm.engine import ROUTES

REQUESTS: Final = "vllm.distributed.weight_transfer.base"
REQUEST_OF: Final[Mapping[str, str]] = {
    "init_weight_transfer_engine": "WeightTransferInitRequest",
    "update_weights": "WeightTransferUpdateRequest",
}
"""Methods that take one request object, with its class."""

LOOK_S: Final = 1.0
"""How often it is looked whether the engine that owes an answer still lives."""


class AsyncLLMClient:
    """An `AsyncLLM` of vLLM's V1 engine, 0.13 or newer.

    requests: the module of its request classes; vLLM's own by default.
    """

    where = "AsyncLLM"

    def __init__(self, engine: Any, requests: ModuleType | None = None) -> None:
        self._engine, self._requests = engine, requests
        self._home = Home("vllm's AsyncLLM")

    async def open(self) -> None:
        """Raises EngineError when this is not the engine's event loop."""
        self._require_home()

    async def methods(self) -> Methods | None:
        """By their signatures. None when the engine is dead."""
        self._require_home()
        if await self._dead() is not None:
            return None
        found = {name: getattr(self._engine, name, None) for name in ROUTES}
        return {name: self._takes(name, method) for name, method in found.items() if callable(method)}

    async def info(self) -> Mapping[str, object]:
        """What `/server_info?config_format=json` says of the launch, as far as the adapter reads it."""
        config = self._engine.vllm_config
        model = config.model_config
        return {
            "version": getattr(sys.modules.get("vllm"), "__version__", None),
            "vllm_config": {
                # A config can be used for two launches, so its own id does not tell them apart.
                "instance_id": f"{getattr(config, 'instance_id', '')}-{mark(self._engine)}",
                "profiler_config": _mapping(getattr(config, "profiler_config", None)),
                "model_config": {
                    "model": model.model,
                    "enable_sleep_mode": getattr(model, "enable_sleep_mode", None),
                },
                "device_config": {"device": str(config.device_config.device)},
            },
        }

    async def call(self, method: str, /, **arguments: object) -> object:
        """One call, brought to its end. Raises CallRefused, and Unanswered when the engine is dead."""
        self._require_home()
        return await finished(self._made(method, arguments))

    async def read(self, method: str, /) -> object:
        """One call that only reads. vLLM keeps replies apart, so this one may be given up."""
        self._require_home()
        with anyio.move_on_after(READ_TIMEOUT_S):
            return await self._made(method, {})
        raise Unanswered(f"{self.where}.{method} did not answer within {READ_TIMEOUT_S:g} s.")

    async def close(self) -> None:
        """Nothing to let go of."""

    def _require_home(self) -> None:
        task = getattr(self._engine, "output_handler", None)
        self._home.require(task.get_loop() if isinstance(task, Task) else None)

    async def _dead(self) -> Exception | None:
        try:
            await self._engine.check_health()
        except Exception as error:
            return error
        return None

    async def _made(self, method: str, arguments: dict[str, object]) -> object:
        """The one place where something of the engine is awaited."""
        if (died := await self._dead()) is None:
            try:
                return await self._while_alive(self._translated(method, arguments))
            except CallRefused:
                raise
            except Exception as error:
                died = await self._dead()
                if died is None:
                    said = f"{type(error).__name__}: {error}"
                    raise CallRefused(f"{self.where}.{method} failed: {said}", None, said) from error
        raise Unanswered(f"{self.where}.{method}: the engine is dead: {type(died).__name__} {died}".rstrip()) from died

    async def _while_alive(self, call: Coroutine[Any, Any, object]) -> object:
        """The call's result. Raises the engine's own error when it dies first: vLLM would leave the call waiting."""
        task = asyncio.get_running_loop().create_task(call)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                if (died := await self._dead()) is not None:
                    raise died
            return task.result()
        finally:
            task.cancel()

    async def _translated(self, method: str, arguments: dict[str, object]) -> object:
        """What the server's route of this method does."""
        if method == "abort" and not arguments:
            await self._abort_all()
            return None
        if method == "compute_weight_checksums":
            return _one_mapping(await self._engine.compute_weight_checksums())
        ask = getattr(self._engine, method)
        if (name := REQUEST_OF.get(method)) is not None:
            self._requests = self._requests or import_module(REQUESTS)
            return await ask(getattr(self._requests, name)(**arguments))
        return await result_of(ask, **arguments)

    async def _abort_all(self) -> None:
        """By the engine's own ids, where it has two kinds; a request for several samples has one of each."""
        tracked = self._engine.output_processor
        ids = [*tracked.request_states, *tracked.parent_requests]
        if ids:
            await self._engine.abort(ids, **({"internal": True} if "internal" in takes(self._engine.abort) else {}))

    def _takes(self, name: str, method: Any) -> frozenset[str]:
        if name == "compute_weight_checksums":
            return frozenset({"action"})
        return {
            "init_weight_transfer_engine": frozenset({"init_info"}),
            "update_weights": frozenset({"update_info"}),
        }.get(name) or takes(method)


def _mapping(config: object) -> dict[str, object]:
    """A config object by the names of its fields, one level deep."""
    if not is_dataclass(config):
        return {}
    return {one.name: getattr(config, one.name, None) for one in fields(config)}


def _one_mapping(workers: list[dict[str, str]]) -> dict[str, str]:
    """The checksums of all workers, as the server's route puts them together. Raises CallRefused when two disagree."""
    every: dict[str, str] = {}
    for one in workers:
        if twice := sorted(every.keys() & one.keys()):
            said = f"two workers tell of the same tensors: {', '.join(twice[:3])}"
            raise CallRefused(f"AsyncLLM.compute_weight_checksums: {said}", None, said)
        every |= one
    return every
