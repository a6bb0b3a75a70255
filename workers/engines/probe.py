"""What an engine behind a URL is, and what it can do: for people, before they attach an agent to it."""

from collections.abc import Mapping
from math import prod
from typing import Literal

from msgspec import Struct

from schemas.identity import Operation
from workers.engines.client import CallRefused, EngineClient, Methods, integer_at, mapping_at
from workers.engines.http import HttpClient
from workers.engines.sglang import launch as sglang
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm import launch as vllm
from workers.engines.vllm.server import VLLMServer

FOLLOWER_ROUTES = {"/ping", "/health", "/health_generate", "/metrics"}
"""All that SGLang serves on a node rank above 0 (launch_dummy_health_check_server, sglang/srt/utils/common.py)."""


class Probed(Struct, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        world: GPUs of the engine.
        weights: The engine's label of its weights.
        has: Operations that it supports.
        lacks: Operations that it does not support, each with the reason.
    """

    url: str
    kind: Literal["vllm", "sglang", "unknown"]
    version: str | None = None
    tokenizer: Literal["present", "absent", "unknown"] = "unknown"
    node_rank: int | None = None
    nnodes: int | None = None
    world: int | None = None
    model: str | None = None
    weights: str | None = None
    instance: str | None = None
    has: tuple[Operation, ...] = ()
    lacks: Mapping[Operation, str] = {}
    note: str = ""


async def probe(url: str, key: str | None = None) -> Probed:
    """Inspect a server without changing it. Raises ConfigError for a bad URL, EngineError if nobody answers."""
    client = HttpClient(url, {}, info_path="/server_info", key=key)
    try:
        document = await client.get("/openapi.json")
    except CallRefused as error:
        note = f"it does not publish its routes ({error.status}): launch it with its openapi.json"
        return Probed(url=client.where, kind="unknown", note=note)
    finally:
        await client.close()
    paths = document.get("paths", {})
    if "/pause_generation" in paths or "/generate" in paths:
        return await _sglang(SGLangServer(url, key))
    if paths and paths.keys() <= FOLLOWER_ROUTES:
        note = "it answers health checks only, as SGLang does on a node rank above 0; attach to node rank 0 instead"
        return Probed(url=client.where, kind="sglang", tokenizer="absent", note=note)
    if "/v1/models" in paths and "/version" in paths:
        return await _vllm(VLLMServer(url, key))
    return Probed(url=client.where, kind="unknown", note="it is neither an SGLang nor a vLLM server")


async def _sglang(client: SGLangServer) -> Probed:
    try:
        methods, info = await client.methods(), await client.info()
        if methods is None or info is None:
            note = "it has SGLang's routes but no /server_info"
            return Probed(url=client.where, kind="sglang", tokenizer="absent", note=note)
        label = await _label(client, methods)
    finally:
        await client.close()
    launch = sglang.read_launch(info, methods)
    return Probed(
        url=client.where,
        kind="sglang",
        version=launch.version,
        tokenizer="present",
        node_rank=launch.node_rank,
        nnodes=integer_at(info, "nnodes"),
        world=_product(info, "tp_size", "pp_size", "dp_size"),
        model=launch.model,
        weights=label,
        instance=launch.instance,
        has=tuple(sorted(sglang.operations(launch))),
        lacks=sglang.missing_operations(launch),
    )


async def _vllm(client: VLLMServer) -> Probed:
    try:
        methods, info = await client.methods() or {}, await client.info()
        label = await _label(client, methods)
    finally:
        await client.close()
    launch, parallel = vllm.read_launch(info, methods), mapping_at(mapping_at(info, "vllm_config"), "parallel_config")
    return Probed(
        url=client.where,
        kind="vllm",
        version=launch.version,
        tokenizer="present",
        node_rank=integer_at(parallel, "node_rank"),
        nnodes=integer_at(parallel, "nnodes"),
        world=_product(parallel, "world_size", "data_parallel_size"),
        model=launch.model,
        weights=label,
        instance=launch.instance,
        has=tuple(sorted(vllm.operations(launch))),
        lacks=vllm.missing_operations(launch),
    )


async def _label(client: EngineClient, methods: Methods) -> str | None:
    label = await client.read("get_weight_version") if "get_weight_version" in methods else None
    return label if isinstance(label, str) else None


def _product(info: Mapping[str, object], *keys: str) -> int | None:
    sizes = [integer_at(info, key) for key in keys]
    return None if None in sizes else prod(size for size in sizes if size is not None)
