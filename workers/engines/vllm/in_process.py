"""vLLM in this process: a client of an `AsyncLLM`.

`workers/engines/in_process.py` shows how to embed it. A headless node (node rank above 0) has no `AsyncLLM`: pass None,
as in `VLLMEngine(identity, None, ...)`.

To be profiled, the engine needs a `profiler_config`; to sleep, `enable_sleep_mode`; for adapters, `enable_lora`.
Everything else always works. No key and no dev mode are needed: code in the process owns the engine anyway.

An `AsyncLLM` knows adapters by number. Their names are kept here: a request runs on `policy-v7` if it is given
`lora_request=lora_request(async_llm, "policy-v7")`.
"""

import asyncio
import secrets
import sys
from asyncio import AbstractEventLoop, Task
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final
from weakref import WeakKeyDictionary

import anyio

from schemas.errors import EngineError, RefusedError, UnansweredError
from workers.engines.client import READ_TIMEOUT_S, CallRefused, Methods
from workers.engines.in_process import (
    InProcessClient,
    call_and_await,
    instance_id,
    parameter_names,
)
from workers.engines.vllm.server import ROUTES

REQUESTS: Final = "vllm.distributed.weight_transfer.base"
REQUEST_OF: Final[Mapping[str, tuple[str, str]]] = {
    "init_weight_transfer_engine": ("WeightTransferInitRequest", "init_info"),
    "update_weights": ("WeightTransferUpdateRequest", "update_info"),
}
"""Methods that take one request object, with its class and field."""

ADAPTERS: Final = ("load_lora_adapter", "unload_lora_adapter")
"""Methods of the server's front end, for engines that were launched for adapters."""
KEPT: Final = ("list_models", "count_lora_requests")
"""What is read without a call, likewise."""

_loaded: Final[WeakKeyDictionary[object, dict[str, Any]]] = WeakKeyDictionary()  # by engine and name

READS: Final = ("is_paused", "is_sleeping", "get_weight_version")
"""Methods that only read."""

HEALTH_CHECK_S: Final = 1.0
"""Seconds between two health checks of an engine that owes an answer."""


class AsyncLLMClient(InProcessClient):
    """An `EngineClient` of an `AsyncLLM` (vLLM's V1 engine, 0.13 or newer). To read, it calls `check_health` and what
    is in `READS`.
    """

    where, _owner = "AsyncLLM", "vllm's"

    async def methods(self) -> Methods | None:
        """Read the methods' signatures. None if the engine is dead."""
        self._require_loop()
        if await self._dead() is not None:
            return None
        found = {name: getattr(self._engine, name, None) for name in ROUTES}
        called = {name: self._parameters(name, method) for name, method in found.items() if callable(method)}
        takes_adapters = getattr(self._engine.vllm_config, "lora_config", None) is not None
        return called | (dict.fromkeys((*ADAPTERS, *KEPT), frozenset[str]()) if takes_adapters else {})

    async def info(self) -> Mapping[str, object]:
        """Return what the backend reads of `/server_info?config_format=json`."""
        config = self._engine.vllm_config
        model = config.model_config
        return {
            "version": getattr(sys.modules.get("vllm"), "__version__", None),
            "vllm_config": {
                # A config can be used for two launches, so its own id does not distinguish them.
                "instance_id": f"{getattr(config, 'instance_id', '')}-{instance_id(self._engine)}",
                "profiler_config": _mapping(getattr(config, "profiler_config", None)),
                "parallel_config": _mapping(getattr(config, "parallel_config", None)),
                "model_config": {
                    "model": model.model,
                    "enable_sleep_mode": getattr(model, "enable_sleep_mode", None),
                    "dtype": str(getattr(model, "dtype", None)),
                    "quantization": getattr(model, "quantization", None),
                },
                "lora_config": _mapping(getattr(config, "lora_config", None)),
                "load_config": {"load_format": getattr(getattr(config, "load_config", None), "load_format", None)},
                "device_config": {"device": str(config.device_config.device)},
            },
        }

    async def read(self, method: str, /) -> object:
        """Make one call that only reads. vLLM matches replies to calls, so this one may be abandoned."""
        self._require_loop()
        if method in KEPT:
            return self._kept(method)
        if method not in READS:
            raise EngineError(f"{self.where}.{method} was not called: it is not among {', '.join(READS)}.")
        with anyio.move_on_after(READ_TIMEOUT_S):
            return await self._answer(method, partial(call_and_await, getattr(self._engine, method)))
        raise UnansweredError(f"{self.where}.{method} did not answer within {READ_TIMEOUT_S:g} s.")

    def _kept(self, method: str) -> object:
        """What the server's `/v1/models` and `/metrics` would say."""
        loaded = _loaded.get(self._engine, {})
        if method == "list_models":
            return [{"id": name, "root": each.lora_path, "parent": "base"} for name, each in loaded.items()]
        running = Counter(state.lora_name for state in self._engine.output_processor.request_states.values())
        return {name: running[name] for name in loaded}

    def _engine_loop(self) -> AbstractEventLoop | None:
        task = getattr(self._engine, "output_handler", None)
        return task.get_loop() if isinstance(task, Task) else None

    async def _dead(self) -> Exception | None:
        try:
            await self._engine.check_health()
        except Exception as error:
            return error
        return None

    async def _answer(self, method: str, call: Callable[[], Coroutine[Any, Any, object]]) -> object:
        """Make a call, and return its result. Nothing else here awaits the engine's work."""
        if (died := await self._dead()) is not None:
            raise RefusedError(f"{self.where}.{method} was not called: {_dead_engine(died)}") from died
        try:
            return await self._while_alive(call())
        except CallRefused:
            raise
        except Exception as error:
            if (died := await self._dead()) is None:
                raise self._failure(method, error) from error
        raise UnansweredError(f"{self.where}.{method}: {_dead_engine(died)}") from died

    async def _while_alive(self, call: Coroutine[Any, Any, object]) -> object:
        """Return the call's result, or raise the engine's error if it dies first: vLLM would leave the call waiting."""
        task = asyncio.get_running_loop().create_task(call)
        try:
            while not (await asyncio.wait([task], timeout=HEALTH_CHECK_S))[0]:
                if (died := await self._dead()) is not None:
                    raise died
            return task.result()
        finally:
            task.cancel()

    async def _call(self, method: str, arguments: dict[str, object]) -> object:
        return await self._answer(method, partial(self._translated, method, arguments))

    async def _translated(self, method: str, arguments: dict[str, object]) -> object:
        """Do what the server's route of this method does."""
        if method == "abort" and not arguments:
            await self._abort_all()
            return None
        if method == "compute_weight_checksums":
            return _merged(await self._engine.compute_weight_checksums())
        if method in ADAPTERS:
            return await self._adapter(method, **arguments)
        function = getattr(self._engine, method)
        if method in REQUEST_OF:
            self._requests = self._requests or import_module(REQUESTS)
            return await function(getattr(self._requests, REQUEST_OF[method][0])(**arguments))
        return await call_and_await(function, **arguments)

    async def _adapter(self, method: str, *, lora_name: object, lora_path: object = "") -> object:
        loaded = _loaded.setdefault(self._engine, {})
        if method == "unload_lora_adapter":
            await self._engine.remove_lora(loaded[str(lora_name)].lora_int_id)
            return loaded.pop(str(lora_name))
        number = (1 << 30) + secrets.randbelow(1 << 30)  # not one of the trainer's own
        request = import_module("vllm.lora.request").LoRARequest(str(lora_name), number, str(lora_path))
        await self._engine.add_lora(request)
        loaded[str(lora_name)] = request
        return None

    async def _abort_all(self) -> None:
        """Abort by internal ids, where vLLM has two kinds of ids; a request for several samples has one of each."""
        tracked = self._engine.output_processor
        ids = [*tracked.request_states, *tracked.parent_requests]
        internal = {"internal": True} if "internal" in parameter_names(self._engine.abort) else {}
        if ids:
            await self._engine.abort(ids, **internal)

    def _parameters(self, name: str, method: Any) -> frozenset[str]:
        if name == "compute_weight_checksums":
            return frozenset({"action"})
        return frozenset(REQUEST_OF[name][1:]) if name in REQUEST_OF else parameter_names(method)


def lora_request(engine: object, name: str) -> Any:
    """Return the `LoRARequest` that makes a request run on the adapter that the engine knows by a name, or KeyError."""
    return _loaded.get(engine, {})[name]


def _dead_engine(died: Exception) -> str:
    return f"the engine is dead: {type(died).__name__} {died}".rstrip()


def _mapping(config: object) -> dict[str, object]:
    """A config object as a mapping of its fields, one level deep."""
    if not is_dataclass(config):
        return {}
    return {field.name: getattr(config, field.name, None) for field in fields(config)}


def _merged(workers: list[dict[str, str]]) -> dict[str, str]:
    """The checksums of all workers, merged as the server's route does. Raises CallRefused if two report the same."""
    merged: dict[str, str] = {}
    for checksums in workers:
        if twice := sorted(merged.keys() & checksums.keys()):
            reason = f"two workers report the same tensors: {', '.join(twice[:3])}"
            raise CallRefused(f"AsyncLLM.compute_weight_checksums: {reason}", None, reason)
        merged |= checksums
    return merged
