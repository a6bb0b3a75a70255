"""Finds out which engine is behind a URL and what it can do, for people who want to attach an agent to it."""

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from schemas.identity import Operation
from workers.engines.client import CallRefused, EngineClient, Methods, mapping_at
from workers.engines.http import HttpClient
from workers.engines.observed import Launch
from workers.engines.sglang import launch as sglang
from workers.engines.sglang.server import SGLangServer
from workers.engines.vllm import launch as vllm
from workers.engines.vllm.server import VLLMServer

FOLLOWER_ROUTES = {"/ping", "/health", "/health_generate", "/metrics"}
"""All that SGLang serves on a node rank above 0 (launch_dummy_health_check_server, sglang/srt/utils/common.py)."""


class Probed(Struct, frozen=True, kw_only=True):
    """What was found."""

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
    """Inspect a server without changing it. Raises ConfigError for a bad URL, EngineError if nothing answers."""
    client = HttpClient(url, {}, info_path="/server_info", key=key)
    try:
        document = await client.get("/openapi.json")
    except CallRefused as error:
        note = f"it does not publish its routes ({error.status}): launch it with its openapi.json"
        if error.status in (401, 403):
            note = f"it refuses the API key ({error.status})" if key else f"it asks for an API key ({error.status})"
        return Probed(url=client.where, kind="unknown", note=note)
    finally:
        await client.close()
    paths = mapping_at(document, "paths")
    if "/pause_generation" in paths or "/generate" in paths:
        return await _probe("sglang", SGLangServer(url, key), sglang.read_launch)
    if paths and paths.keys() <= FOLLOWER_ROUTES:
        note = "it answers health checks only, as SGLang does on a node rank above 0; attach to node rank 0 instead"
        return Probed(url=client.where, kind="sglang", tokenizer="absent", note=note)
    if "/v1/models" in paths and "/version" in paths:
        return await _probe("vllm", VLLMServer(url, key), vllm.read_launch)
    return Probed(url=client.where, kind="unknown", note="it is neither an SGLang nor a vLLM server")


async def _probe(
    kind: Literal["vllm", "sglang"],
    client: EngineClient,
    read_launch: Callable[[Mapping[str, object], Methods], Launch],
) -> Probed:
    try:
        methods, info = await client.methods(), await client.info()
        if methods is None or info is None:
            note = f"it has {kind}'s routes but no /server_info"
            return Probed(url=client.where, kind=kind, tokenizer="absent", note=note)
        launch = read_launch(info, methods)
        label = await client.read("get_weight_version") if "get_weight_version" in methods else None
    except CallRefused as error:
        return Probed(url=client.where, kind="unknown", note=f"it has {kind}'s routes, and {error}")
    finally:
        await client.close()
    return Probed(
        url=client.where,
        kind=kind,
        version=launch.version,
        tokenizer="present",
        node_rank=launch.node_rank,
        nnodes=launch.nnodes,
        world=launch.world,
        model=launch.model,
        weights=label if isinstance(label, str) else None,
        instance=launch.instance,
        has=tuple(sorted(launch.operations)),
        lacks=launch.missing,
    )
