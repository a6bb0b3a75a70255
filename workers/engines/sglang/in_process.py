"""SGLang in this process: a client of a `TokenizerManager`.

`workers/engines/in_process.py` shows how to embed an engine; this one is
`SGLangEngine(identity, TokenizerManagerClient(sgl_engine.tokenizer_manager), ...)`.

Don't generate with `sgl_engine.generate` beside it: that runs the event loop itself. On a node rank above 0 the
tokenizer manager is None; pass that None. The agent there has nothing to command, and collects traces.

SGLang gives the late reply of a cancelled call to the next caller, so no call here is ever abandoned. What is read are
attributes, which answer at once.
"""

import sys
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from schemas.errors import RefusedError
from workers.engines.client import CallRefused, Methods
from workers.engines.in_process import (
    InProcessClient,
    call_and_await,
    instance_id,
    parameter_names,
)

REQUESTS: Final = "sglang.srt.managers.io_struct"
REQUEST_OF: Final[Mapping[str, str]] = {
    "start_profile": "ProfileReq",
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "check_weights": "CheckWeightsReqInput",
    "load_lora_adapter": "LoadLoRAAdapterReqInput",
    "unload_lora_adapter": "UnloadLoRAAdapterReqInput",
}
"""Methods that take one request object, with its class. `start_profile` does so from 0.5.15 on."""
PLAIN: Final = ("stop_profile", "flush_cache", "abort_request")
"""Methods that take arguments, or none."""
KEPT: Final = ("list_models", "count_lora_requests")
"""What is read of its registry of adapters."""
LAUNCH: Final = (
    *("random_seed", "node_rank", "nnodes", "device", "model_path", "load_format", "tp_size", "pp_size", "dp_size"),
    *("dtype", "quantization"),
    *("enable_dp_attention", "attn_dp_size"),
    *("enable_memory_saver", "enable_weights_cpu_backup"),
    *("enable_lora", "max_lora_rank", "lora_target_modules", "max_loras_per_batch", "max_loaded_loras"),
    "tokenizer_worker_num",
)
"""Launch settings that the backend reads."""


class TokenizerManagerClient(InProcessClient):
    """An `EngineClient` of a `TokenizerManager` (SGLang 0.5.6 or newer). To read, it calls `config_value` and
    `resolved_dict`, which look things up, and no other method.

    Args:
        engine: The tokenizer manager; None on a node that has none.
        requests: The module of its request classes; SGLang's own by default.
    """

    where, _owner = "TokenizerManager", "sglang's"

    async def methods(self) -> Methods | None:
        """Read the methods' signatures and request classes. None while the engine is being shut down."""
        self._require_loop()
        if not self._can_command():
            return {}
        if self._engine.gracefully_exit:
            return None
        found = {name: getattr(self._engine, name, None) for name in (*REQUEST_OF, *PLAIN)}
        called = {name: self._parameters(name, method) for name, method in found.items() if callable(method)}
        read = {"is_paused": frozenset[str](), "get_weight_version": frozenset[str]()}
        read |= dict.fromkeys(KEPT, frozenset[str]()) if self._registry() is not None else {}
        return {"update_weight_version": frozenset({"new_version", "abort_all_requests"}), **called, **read}

    async def info(self) -> Mapping[str, object] | None:
        """Return what the backend reads of `/server_info`.

        None where nothing can be commanded: without a tokenizer manager, or with the router that replaces it in front
        of several.
        """
        if not self._can_command():
            return None
        arguments = self._engine.server_args
        resolve = getattr(arguments, "resolved_dict", None)  # newer versions resolve defaults separately
        resolved = resolve() if callable(resolve) else {}
        read = {name: resolved.get(name, getattr(arguments, name, None)) for name in LAUNCH}
        return {
            **{name: sorted(value) if isinstance(value, set) else value for name, value in read.items()},
            "version": getattr(sys.modules.get("sglang"), "__version__", None),
            "startup_time": getattr(self._engine, "startup_time", None),
            "launched_at": instance_id(self._engine),  # two launches with a given seed share it
        }

    async def read(self, method: str, /) -> object:
        """Read an attribute of the tokenizer manager. Raises RefusedError during shutdown."""
        self._require_loop()
        self._require_up(method)
        if method == "is_paused":
            return self._engine.is_pause
        if method in KEPT:
            found = self._registry().get_all_adapters()
            if method == "list_models":
                return [{"id": name, "root": each.lora_path, "parent": "base"} for name, each in found.items()]
            return {name: self._registry()._counters[each.lora_id].value() for name, each in found.items()}
        current = getattr(self._engine, "config_value", None)
        return current("weight_version") if callable(current) else self._engine.server_args.weight_version

    def _registry(self) -> Any:
        """What knows its adapters; None without LoRA."""
        return getattr(self._engine, "lora_registry", None)

    def _can_command(self) -> bool:
        return callable(getattr(self._engine, "pause_generation", None))

    def _engine_loop(self) -> AbstractEventLoop | None:
        loop: AbstractEventLoop | None = getattr(self._engine, "event_loop", None)
        return loop

    def _require_up(self, method: str) -> None:
        if not self._can_command() or self._engine.gracefully_exit:
            raise RefusedError(f"{self.where}.{method} was not called: the engine is being shut down, or is not here.")

    async def _call(self, method: str, arguments: dict[str, object]) -> object:
        """Call a method. Nothing else here awaits the engine."""
        self._require_up(method)
        self._engine.auto_create_handle_loop()  # up to 0.5.9 a flush as the first call hangs
        try:
            result = await self._translated(method, arguments)
        except CallRefused:
            raise
        except Exception as error:
            raise self._failure(method, error) from error
        succeeded, answer = _verdict(result)
        if not succeeded:
            raise CallRefused(f"{self.where}.{method} answered no: {answer}", None, answer)
        return result[2] if method == "check_weights" and isinstance(result, tuple) else result  # of each rank

    async def _translated(self, method: str, arguments: dict[str, object]) -> object:
        """Do what the server's route of this method does."""
        manager = self._engine
        if method == "update_weight_version":
            if arguments.pop("abort_all_requests", False):
                manager.abort_request(abort_all=True)
            if not hasattr(manager, method):  # before 0.5.19 it is a field of the arguments
                manager.server_args.weight_version = arguments["new_version"]
                return None
        function = getattr(manager, method)
        request = self._request_class(method, function)
        if request is None:
            return await call_and_await(function, **arguments)
        return await call_and_await(function, request(**arguments))

    def _parameters(self, name: str, method: Any) -> frozenset[str]:
        request = self._request_class(name, method)
        return parameter_names(method) if request is None else _fields(request)

    def _request_class(self, name: str, method: Any) -> Any:
        """The class of the one object that the method takes; None if it takes plain arguments."""
        if name not in REQUEST_OF or not parameter_names(method) & {"obj", "req"}:
            return None
        self._requests = self._requests or import_module(REQUESTS)
        return getattr(self._requests, REQUEST_OF[name])


def _fields(request: Any) -> frozenset[str]:
    """Names of the fields of a request class: a dataclass up to 0.5.14, a Struct from 0.5.15 on."""
    for names in ("__struct_fields__", "__dataclass_fields__"):
        if hasattr(request, names):
            return frozenset(getattr(request, names))
    return frozenset()


def _verdict(result: object) -> tuple[bool, str]:
    """Whether the call succeeded, and the engine's message: a tuple begins with both, an object has both."""
    match result:
        case (bool() as success, *rest):
            return success, str(rest[0]) if rest else ""
    success = getattr(result, "success", True)
    return success is not False, str(getattr(result, "message", "") or getattr(result, "error_message", ""))
