"""What an engine behind a URL is, and what it can do: for people, before they put an agent beside it."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from schemas.identity import Operation
from workers.engines.client import CallRefused, number, part
from workers.engines.http import HttpClient, Route
from workers.engines.sglang import engine as sglang
from workers.engines.sglang.engine import SGLangServer
from workers.engines.vllm import engine as vllm
from workers.engines.vllm.engine import VllmServer

FOLLOWER_ROUTES = {"/ping", "/health", "/health_generate", "/metrics"}
"""All that SGLang serves on a node rank above 0 (launch_dummy_health_check_server, sglang/srt/utils/common.py)."""


class Probed(Struct, frozen=True, kw_only=True):
    """What was found. lacks: operations it does not have, each with the reason.   world: GPUs of the engine."""

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
    """Look, and change nothing. Raises ConfigError for a bad URL, EngineError when nobody answers there."""
    front = HttpClient(url, {"version": Route("GET", "/version")}, info_path="/server_info", key=key)
    try:
        document = await front.get("/openapi.json")
    except CallRefused as error:
        note = f"it does not say what it serves ({error.status}): launch it with its openapi.json"
        return Probed(url=front.where, kind="unknown", note=note)
    finally:
        await front.close()
    paths = document.get("paths", {})
    if "/pause_generation" in paths or "/generate" in paths:
        return await _sglang(url, key)
    if paths and paths.keys() <= FOLLOWER_ROUTES:
        note = "it answers health and nothing else, as SGLang does on a node rank above 0; command node rank 0 instead"
        return Probed(url=front.where, kind="sglang", tokenizer="absent", note=note)
    if "/v1/models" in paths and "/version" in paths:
        return await _vllm(url, key)
    return Probed(url=front.where, kind="unknown", note="it is neither an SGLang nor a vLLM server")


async def _sglang(url: str, key: str | None) -> Probed:
    front = SGLangServer(url, key)
    try:
        methods, info = await front.methods(), await front.info()
        if methods is None or info is None:
            note = "it has SGLang's routes and no /server_info"
            return Probed(url=front.where, kind="sglang", tokenizer="absent", note=note)
        label = await front.read("get_weight_version") if "get_weight_version" in methods else None
    finally:
        await front.close()
    launch = sglang.launched(info, methods)
    sizes = [number(info, one) for one in ("tp_size", "pp_size", "dp_size")]
    return Probed(
        url=front.where,
        kind="sglang",
        version=launch.version,
        tokenizer="present",
        node_rank=launch.node_rank,
        nnodes=number(info, "nnodes"),
        world=_product(sizes),
        model=launch.model,
        weights=label if isinstance(label, str) else None,
        instance=launch.instance,
        has=tuple(sorted(sglang.operations(launch))),
        lacks=sglang.lacks(launch),
    )


async def _vllm(url: str, key: str | None) -> Probed:
    front = VllmServer(url, key)
    try:
        methods, info = await front.methods() or {}, await front.info()
        label = await front.read("get_weight_version") if "get_weight_version" in methods else None
    finally:
        await front.close()
    launch, parallel = vllm.launched(info, methods), part(part(info, "vllm_config"), "parallel_config")
    return Probed(
        url=front.where,
        kind="vllm",
        version=launch.version,
        tokenizer="present",
        node_rank=number(parallel, "node_rank"),
        nnodes=number(parallel, "nnodes"),
        world=_product([number(parallel, one) for one in ("world_size", "data_parallel_size")]),
        model=launch.model,
        weights=label if isinstance(label, str) else None,
        instance=launch.instance,
        has=tuple(sorted(vllm.operations(launch))),
        lacks=vllm.lacks(launch),
    )


def _product(sizes: list[int | None]) -> int | None:
    product = 1
    for size in sizes:
        if size is None:
            return None
        product *= size
    return product
