"""The part of a server that has adapters, as unkind as the real ones: a stand-in of one release of vLLM or SGLang.

It answers 200 to an adapter that fits nothing. It can lose the answer to what it has done, and be slow to list it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpcore

from schemas.commands import AdapterVersion
from schemas.errors import CheckpointError, EngineError
from schemas.events import EngineCall, Observation
from schemas.identity import Identity
from tests.engines.adapters import save_base
from tests.engines.strict import App, Reply
from tests.engines.surfaces import Kind, Route, read
from workers.engines.sglang.engine import SGLangEngine
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm.engine import VLLMEngine
from workers.engines.vllm.server import VLLMServer

LOAD = {"vllm": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}
UNLOAD = {"vllm": "/v1/unload_lora_adapter", "sglang": "/unload_lora_adapter"}
PLACE = Identity(replica=0, node_rank=0)


class LoRAServer:
    """A backend and the server that it calls.

    loaded: names with paths.   lost: paths of calls whose next answer is lost.   hidden: names that the next listing
    leaves out.   late: listings that do not come in time.   metrics: the text, or None.   refusals: the next answers to
    calls of a path.   posts: what it was asked to change.
    """

    def __init__(self, kind: Kind, version: str, folder: Path) -> None:
        self.kind: Kind = kind
        self.root = folder / "checkpoints"
        self.loaded: dict[str, str] = {}
        self.lost: set[str] = set()
        self.hidden: set[str] = set()
        self.late = 0
        self.metrics: str | None = None
        self.refusals: dict[str, Reply] = {}
        self.posts: list[tuple[str, Any]] = []
        base = str(save_base(self.root / "base"))
        (folder / "traces").mkdir(exist_ok=True)
        self.info = _vllm_info(base) if kind == "vllm" else _sglang_info(base, version)
        self.app = App(
            read(kind, version),
            {
                "/server_info": lambda _: self.info,
                "/version": {"version": version},
                "/is_paused": {"is_paused": False},
                "/is_sleeping": {"is_sleeping": False},
                "/v1/models": lambda _: self._models(base),
                "/metrics": lambda _: Reply(404) if self.metrics is None else Reply(200, self.metrics),
                LOAD[kind]: self._load,
                UNLOAD[kind]: self._unload,
            },
        )
        self.app._routes["/metrics"] = {"GET": Route("/metrics", "GET")}  # an application below the server's
        client = VLLMServer("http://engine") if kind == "vllm" else SGLangServer("http://engine")
        client._pool = self.app  # type: ignore[assignment]  # the same client, with another way to the server
        self.client = client
        make = VLLMEngine if kind == "vllm" else SGLangEngine
        self.backend = make(PLACE, client, checkpoints=self.root, traces=folder / "traces")

    async def fault(self, call: EngineCall, timeout_s: float = 1.0) -> EngineError | CheckpointError | None:
        """Make a call. Returns why it failed."""
        try:
            await self.backend.perform(call, timeout_s)
        except (EngineError, CheckpointError) as error:
            return error
        return None

    async def seen(self) -> Observation:
        return await self.backend.observe()

    def _models(self, base: str) -> dict[str, Any]:
        if self.late:
            self.late -= 1
            raise TimeoutError
        cards: list[dict[str, Any]] = [{"id": base, "object": "model", "root": base, "parent": None}]
        cards += [
            {"id": name, "root": at, "parent": base} for name, at in self.loaded.items() if name not in self.hidden
        ]
        self.hidden.clear()
        return {"object": "list", "data": cards}

    def _load(self, body: dict[str, Any]) -> Reply:
        self.posts.append((LOAD[self.kind], body))
        if (reply := self.refusals.pop(LOAD[self.kind], None)) is not None:
            return reply
        name = body["lora_name"]
        if name in self.loaded:
            return self._answer(LOAD[self.kind], 400, f"LoRA adapter {name} is already loaded")
        self.loaded[name] = body["lora_path"]
        return self._answer(LOAD[self.kind], 200, "")

    def _unload(self, body: dict[str, Any]) -> Reply:
        self.posts.append((UNLOAD[self.kind], body))
        if (reply := self.refusals.pop(UNLOAD[self.kind], None)) is not None:
            return reply
        if self.loaded.pop(body["lora_name"], None) is None:
            status = 404 if self.kind == "vllm" else 400
            return self._answer(UNLOAD[self.kind], status, f"{body['lora_name']} cannot be found")
        return self._answer(UNLOAD[self.kind], 200, "")

    def _answer(self, path: str, status: int, reason: str) -> Reply:
        if path in self.lost:
            self.lost.remove(path)
            raise httpcore.ReadError("the connection was lost")
        if self.kind == "vllm":
            body: Any = {"error": {"message": reason, "code": status}} if reason else "Success: LoRA adapter added."
        else:
            body = {"success": not reason, "error_message": reason, "loaded_adapters": self.loaded}
        return Reply(status, body)


@asynccontextmanager
async def lora_server(kind: Kind, version: str, folder: Path) -> AsyncIterator[LoRAServer]:
    """A server that was launched for two adapters of rank 8, with its backend attached."""
    server = LoRAServer(kind, version, folder)
    await server.backend.open()
    server.app.requests.clear()
    yield server
    await server.backend.close()


def of(version: int, path: str = "") -> AdapterVersion:
    """A version of the adapter `policy`."""
    return AdapterVersion(name="policy", version=version, path=path or f"adapters/step_{version}")


def _vllm_info(base: str) -> dict[str, Any]:
    lora = {"max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2, "target_modules": None}
    config = {"instance_id": "1", "model_config": {"model": base}, "lora_config": lora}
    return {"vllm_config": config | {"parallel_config": {"_api_process_count": 1}}}


def _sglang_info(base: str, version: str) -> dict[str, Any]:
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"], "max_loras_per_batch": 3}
    info = {"version": version, "model_path": base, "random_seed": 1, "dp_size": 1, "tokenizer_worker_num": 1}
    return info | lora | {"max_loaded_loras": 2}
