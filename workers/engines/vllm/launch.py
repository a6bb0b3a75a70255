"""How a vLLM engine was launched, and which operations follow from that. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from schemas.identity import Operation
from workers.engines.client import Methods, integer_at, list_at, mapping_at, product_at, text_at
from workers.engines.counters import CounterNames
from workers.engines.observed import EngineKind, Launch, LoRALimits

_NEEDED: Final[Mapping[Operation, tuple[str, ...]]] = {
    Operation.PROFILE: ("start_profile", "stop_profile"),
    Operation.PAUSE: ("pause_generation",),
    Operation.RESUME: ("resume_generation",),
    Operation.SLEEP: ("sleep",),
    Operation.WAKE: ("wake_up",),
    Operation.FLUSH: ("reset_prefix_cache",),
    Operation.ABORT: ("abort",),
    Operation.LOAD: ("collective_rpc",),
}

LOAD: Final = "load_lora_adapter"
SERVERS: Final = "_api_process_count"
FOR_ADAPTERS: Final = (
    "--enable-lora --max-lora-rank RANK --max-loras 2 --max-cpu-loras 8 (versions that it holds at once), and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
)


class VLLMLaunch(Launch, frozen=True, kw_only=True):
    """Launch settings of a vLLM engine.

    Attributes:
        profiles_to: Directory that torch traces are written to; None if it was launched without a torch profiler.
    """

    profiles_to: Path | None
    profiler: Mapping[str, object]


def read_launch(info: Mapping[str, object], methods: Methods) -> VLLMLaunch:
    """Read the answer of `/server_info?config_format=json`, or the same structure made in process."""
    config = mapping_at(info, "vllm_config")
    profiler, model = mapping_at(config, "profiler_config"), mapping_at(config, "model_config")
    directory = text_at(profiler, "torch_profiler_dir")
    device = text_at(mapping_at(config, "device_config"), "device")
    profiles_to = Path(directory) if text_at(profiler, "profiler") == "torch" and directory else None
    # A CPU has no memory to release, but the scheduler's part of sleep works there too.
    saves_memory = model.get("enable_sleep_mode") is True or device == "cpu"
    # A server that does not show its settings is believed by its routes.
    lora = _limits(mapping_at(config, "lora_config")) if config else LoRALimits() if LOAD in methods else None
    return VLLMLaunch(
        version=text_at(info, "version") or "of unknown version",
        instance=text_at(config, "instance_id"),
        model=text_at(model, "model"),
        load_format=text_at(mapping_at(config, "load_config"), "load_format"),
        device=device,
        precision=f"{model.get('dtype')} {model.get('quantization')}",
        **_shape(mapping_at(config, "parallel_config")),
        methods=methods,
        missing=_missing(methods, profiles_to, saves_memory) | _without_adapters(config, methods),
        recomputes="reset_running_requests" in methods.get("reset_prefix_cache", ()),
        lora=lora,
        profiles_to=profiles_to,
        profiler=profiler,
    )


def _shape(parallel: Mapping[str, object]) -> dict[str, int | None]:
    """Return the numbers of the engine behind this front end.

    With external or hybrid load balancing each front end has its own ranks of the data parallel group, and is a replica
    by itself. Only the executor `mp` counts nodes: Ray's, and data parallel without it, report one.
    """
    ranks, nnodes, node_rank = (integer_at(parallel, key) for key in ("data_parallel_size", "nnodes", "node_rank"))
    own = "data_parallel_size"
    if parallel.get("data_parallel_external_lb") is True or parallel.get("data_parallel_hybrid_lb") is True:
        own = "data_parallel_size_local"
        front_ends = (ranks or 1) // (integer_at(parallel, own) or 1)
        nnodes = max(1, nnodes // max(1, front_ends)) if nnodes is not None else None
        node_rank = node_rank % nnodes if node_rank is not None and nnodes is not None else None
    if parallel.get("distributed_executor_backend") == "external_launcher":  # each process is its own front end
        return {"node_rank": None, "nnodes": None, "world": None}
    counted = nnodes is not None and nnodes > 1
    return {
        "node_rank": node_rank,
        "nnodes": nnodes if counted else None,
        "world": product_at(parallel, "world_size", own),
    }


def _missing(methods: Methods, profiles_to: Path | None, saves_memory: bool) -> dict[Operation, str]:
    missing = {
        operation: f"it has no {method}: launch the server with VLLM_SERVER_DEV_MODE=1, or use a newer vLLM"
        for operation, needed in _NEEDED.items()
        for method in needed
        if method not in methods
    }
    if "collective_rpc" in methods and "init_weight_transfer_engine" not in methods:
        # The parameters of a worker's `reload_weights` can't be seen from here; both came with the same release.
        missing[Operation.LOAD] = "its workers load from no other path than at launch: use vLLM 0.16 or newer"
    if profiles_to is None:
        missing[Operation.PROFILE] = (
            'it was launched without a torch profiler: add --profiler-config \'{"profiler":"torch",'
            '"torch_profiler_dir":"/DIR","ignore_frontend":true}\''
        )
    if not saves_memory:
        reason = "it would release nothing: launch it with --enable-sleep-mode"
        missing |= {Operation.SLEEP: reason, Operation.WAKE: reason}
    return missing


def _limits(lora: Mapping[str, object]) -> LoRALimits | None:
    if not lora:
        return None
    modules = [name for name in list_at(lora, "target_modules") if isinstance(name, str)]
    return LoRALimits(
        rank=integer_at(lora, "max_lora_rank"),
        loaded=integer_at(lora, "max_cpu_loras"),
        modules=frozenset(modules) or None,
    )


def _without_adapters(config: Mapping[str, object], methods: Methods) -> dict[Operation, str]:
    """Why adapters can't be loaded; empty if they can."""
    lora, reason = mapping_at(config, "lora_config"), ""
    batch, servers = integer_at(lora, "max_loras"), integer_at(mapping_at(config, "parallel_config"), SERVERS)
    if LOAD not in methods or (config and not lora):
        reason = f"it was not launched for them: launch the server with {FOR_ADAPTERS}"
    elif batch is not None and batch < 2:
        reason = f"requests of a new version would wait for the last one of the old: launch it with {FOR_ADAPTERS}"
    elif servers is not None and servers > 1:
        reason = f"each of its {servers} API servers has names of its own: launch it with --api-server-count 1"
    return {Operation.ADAPTERS: reason} if reason else {}


VLLM: Final = EngineKind(
    "vllm",
    CounterNames("vllm:num_requests_running", "vllm:num_requests_waiting", ("vllm:generation_tokens_total",)),
    read_launch,
    # What sleeps already is not released again, and what is awake not woken (vllm/v1/executor/abstract.py).
    frozenset({Operation.PAUSE, Operation.RESUME, Operation.SLEEP, Operation.WAKE}),
)
