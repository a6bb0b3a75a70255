"""SGLang within this process: the front of a `TokenizerManager`.

A trainer that embeds the engine runs the agent beside the tasks that generate, on the same asyncio event loop:

    front = TokenizerManagerClient(sgl_engine.tokenizer_manager)
    engine = SGLangEngine(identity, front, checkpoints=checkpoints, traces=traces)
    left = NodeTraces(traces, identity)
    async with (
        Agent(bus=bus, identity=identity, engine=engine, state_dir=state_dir, traces=left) as agent,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(agent.run)
        await agent.wait_ready()
        ...                           # sgl_engine.async_generate(...)
        tasks.cancel_scope.cancel()   # and then sgl_engine.shutdown()

`sgl_engine.generate` is no way to generate beside it: it runs the event loop itself. On a node rank above 0 the
tokenizer manager is None, and is given as that: the agent there has nothing to command, and collects traces.

SGLang hands the late reply of a cancelled call to the next caller, so nothing here is ever given up. What is read are
attributes, which answer at once.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from workers.engines.client import CallRefused, Methods, Unanswered
from workers.engines.in_process import Home, finished, mark, result_of, takes

REQUESTS: Final = "sglang.srt.managers.io_struct"
REQUEST_OF: Final[Mapping[str, str]] = {
    "start_profile": "ProfileReq",
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "check_weights": "CheckWeightsReqInput",
}
"""Methods that take one request object, with its class. `start_profile` does so from 0.5.15 on."""
PLAIN: Final = ("stop_profile", "flush_cache", "abort_request")
"""Methods that take arguments, or none."""
LAUNCH: Final = (
    *("random_seed", "node_rank", "device", "model_path", "tp_size"),
    *("enable_memory_saver", "enable_weights_cpu_backup"),
)
"""What the adapter reads of the launch."""


class TokenizerManagerClient:
    """A `TokenizerManager` of SGLang 0.5.6 or newer, or None on a node that has none.

    requests: the module of its request classes; SGLang's own by default.
    """

    where = "TokenizerManager"

    def __init__(self, manager: Any, requests: ModuleType | None = None) -> None:
        self._manager, self._requests = manager, requests
        self._home = Home("sglang's TokenizerManager")

    async def open(self) -> None:
        """Raises EngineError when this is not the engine's event loop."""
        self._require_home()

    async def methods(self) -> Methods | None:
        """By their signatures and request classes. None when the engine is being shut down."""
        self._require_home()
        if not self._commands():
            return {}
        if self._manager.gracefully_exit:
            return None
        found = {name: getattr(self._manager, name, None) for name in (*REQUEST_OF, *PLAIN)}
        made = {name: self._takes(name, method) for name, method in found.items() if callable(method)}
        read = {"is_paused": frozenset[str](), "get_weight_version": frozenset[str]()}
        return {"update_weight_version": frozenset({"new_version", "abort_all_requests"}), **made, **read}

    async def info(self) -> Mapping[str, object] | None:
        """What `/server_info` says of the launch, as far as the adapter reads it. None where nothing can be commanded:
        without a tokenizer manager, or with the router that stands in its place before several of them."""
        if not self._commands():
            return None
        arguments = self._manager.server_args
        resolve = getattr(arguments, "resolved_dict", None)  # where what was left open is decided apart from them
        resolved = resolve() if callable(resolve) else {}
        return {
            **{name: resolved.get(name, getattr(arguments, name, None)) for name in LAUNCH},
            "version": getattr(sys.modules.get("sglang"), "__version__", None),
            "startup_time": getattr(self._manager, "startup_time", None),
            "launched_at": mark(self._manager),  # a seed can be given, and is then the same for two launches
        }

    async def call(self, method: str, /, **arguments: object) -> object:
        """One call, brought to its end. Raises CallRefused, and Unanswered when the engine is being shut down."""
        self._require_home()
        self._require_up(method)
        return await finished(self._made(method, arguments))

    async def read(self, method: str, /) -> object:
        """What the tokenizer manager holds itself."""
        self._require_home()
        self._require_up(method)
        if method == "is_paused":
            return self._manager.is_pause
        current = getattr(self._manager, "config_value", None)
        return current("weight_version") if callable(current) else self._manager.server_args.weight_version

    async def close(self) -> None:
        """Nothing to let go of."""

    def _commands(self) -> bool:
        return callable(getattr(self._manager, "pause_generation", None))

    def _require_home(self) -> None:
        self._home.require(getattr(self._manager, "event_loop", None))

    def _require_up(self, method: str) -> None:
        if not self._commands() or self._manager.gracefully_exit:
            raise Unanswered(f"{self.where}.{method} was not called: the engine is being shut down, or is not here.")

    async def _made(self, method: str, arguments: dict[str, object]) -> object:
        """The one place where something of the engine is awaited."""
        self._manager.auto_create_handle_loop()  # up to 0.5.9 a flush as the first call would wait for ever
        try:
            result = await self._translated(method, arguments)
        except CallRefused:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise CallRefused(f"{self.where}.{method} failed: {said}", None, said) from error
        succeeded, said = _verdict(result)
        if not succeeded:
            raise CallRefused(f"{self.where}.{method} answered no: {said}", None, said)
        return result

    async def _translated(self, method: str, arguments: dict[str, object]) -> object:
        """What the server's route of this method does."""
        manager = self._manager
        if method == "update_weight_version":
            if arguments.pop("abort_all_requests", False):
                manager.abort_request(abort_all=True)
            if not hasattr(manager, method):  # before 0.5.19 it is a label on the arguments
                manager.server_args.weight_version = arguments["new_version"]
                return None
        ask = getattr(manager, method)
        request = self._request_class(method, ask)
        return await (result_of(ask, **arguments) if request is None else result_of(ask, request(**arguments)))

    def _takes(self, name: str, method: Any) -> frozenset[str]:
        request = self._request_class(name, method)
        return takes(method) if request is None else _fields(request)

    def _request_class(self, name: str, method: Any) -> Any:
        """The class of the one object that the method takes; None when it takes its arguments one by one."""
        if name not in REQUEST_OF or not takes(method) & {"obj", "req"}:
            return None
        self._requests = self._requests or import_module(REQUESTS)
        return getattr(self._requests, REQUEST_OF[name])


def _fields(request: Any) -> frozenset[str]:
    """Names of the fields of a request class: a dataclass up to 0.5.14, a Struct from 0.5.15 on."""
    for told in ("__struct_fields__", "__dataclass_fields__"):
        if hasattr(request, told):
            return frozenset(getattr(request, told))
    return frozenset()


def _verdict(result: object) -> tuple[bool, str]:
    """(whether it succeeded, the engine's words): of a tuple that begins with the two, or an object that has them."""
    match result:
        case (bool() as success, *rest):
            return success, str(rest[0]) if rest else ""
    success = getattr(result, "success", True)
    return success is not False, str(getattr(result, "message", ""))
