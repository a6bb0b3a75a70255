"""How an SGLang engine was launched, and which operations follow from that. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from schemas.identity import Operation
from workers.engines.client import Methods, integer_at, list_at, product_at, text_at
from workers.engines.counters import CounterNames
from workers.engines.observed import EngineKind, Launch, LoRALimits

_NEEDED: Final[Mapping[Operation, str]] = {
    Operation.PROFILE: "start_profile",
    Operation.PAUSE: "pause_generation",
    Operation.RESUME: "continue_generation",
    Operation.SLEEP: "release_memory_occupation",
    Operation.WAKE: "resume_memory_occupation",
    Operation.FLUSH: "flush_cache",
    Operation.ABORT: "abort_request",
    Operation.LOAD: "update_weights_from_disk",
}

FOR_ADAPTERS: Final = (
    "--enable-lora --max-lora-rank RANK --lora-target-modules all --max-loras-per-batch 3 (a base model counts as one) "
    "--enable-metrics"
)
BESIDE: Final = "/./../"
"""In the path of a delta that was loaded: what stands before it is the checkpoint of all of its weights."""
_FLUSH_REFUSED: Final = (0, 5, 22)
"""Below this version a scheduler dies of a load whose flush is refused. Nothing else tells them apart from outside."""
_TOGETHER: Final[Mapping[str, tuple[str, ...]]] = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
}
"""It fuses these by the name of the first. Without it, it ignores the others (sglang/srt/lora/lora.py)."""


class SGLangLaunch(Launch, frozen=True, kw_only=True):
    """Launch settings of an SGLang engine.

    Attributes:
        keeps_weights: Released weights come back unchanged.
        flushes_in_load: A load flushes the cache too, and much faster than a flush by itself.
    """

    keeps_weights: bool
    flushes_in_load: bool


def read_launch(info: Mapping[str, object], methods: Methods) -> SGLangLaunch:
    """Read the answer of `/server_info`, or the same names read in process."""
    cpu = info.get("device") == "cpu"
    # Attention's data parallelism lies within the tensor-parallel ranks. Older versions count it as `dp_size`.
    within = info.get("enable_dp_attention") is True and info.get("attn_dp_size") is None
    # Two launches differ in their random seed, and in how long each took to start (from 0.5.17 on).
    marks = json.dumps([info.get("random_seed"), info.get("startup_time"), info.get("launched_at")], sort_keys=True)
    return SGLangLaunch(
        version=text_at(info, "version") or "of unknown version",
        instance=hashlib.sha256(marks.encode()).hexdigest()[:16],
        model=(text_at(info, "model_path") or "").partition(BESIDE)[0] or None,
        load_format=text_at(info, "load_format"),
        device=text_at(info, "device"),
        precision=f"{info.get('dtype')} {info.get('quantization')}",
        node_rank=integer_at(info, "node_rank"),
        nnodes=integer_at(info, "nnodes"),
        world=product_at(info, "tp_size", "pp_size", *(() if within else ("dp_size",))),
        methods=methods,
        # A CPU has no memory to release.
        missing=_missing(methods, saves_memory=info.get("enable_memory_saver") is True or cpu)
        | _without_adapters(info, methods),
        recomputes="begin_weight_update" in methods,  # came with the flush under retracted requests, in 0.5.21
        lora=_limits(info) if info.get("enable_lora") is True else None,
        keeps_weights=info.get("enable_weights_cpu_backup") is True or cpu,
        # A flush by itself also frees memory: on a CPU by collecting garbage, 0.3 s. On a GPU that is fast, and what a
        # flush needs may be released during a load.
        flushes_in_load=cpu and release(text_at(info, "version") or "") >= _FLUSH_REFUSED,
    )


def release(version: str) -> tuple[int, ...]:
    """Return the three numbers of a version; none if it has not three."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return numbers if len(numbers) == 3 else ()


def _missing(methods: Methods, saves_memory: bool) -> dict[Operation, str]:
    missing = {
        operation: f"it has no {method}: use SGLang 0.5.6 or newer"
        for operation, method in _NEEDED.items()
        if method not in methods
    }
    if not saves_memory:
        reason = "it would release nothing: launch it with --enable-memory-saver"
        missing |= {Operation.SLEEP: reason, Operation.WAKE: reason}
    return missing


def _limits(info: Mapping[str, object]) -> LoRALimits:
    modules = [name for name in list_at(info, "lora_target_modules") if isinstance(name, str)]
    return LoRALimits(
        rank=integer_at(info, "max_lora_rank"),
        loaded=integer_at(info, "max_loaded_loras"),
        modules=None if "all" in modules else frozenset(modules) or None,
        refuses=frozenset({"use_rslora", "target_modules"}),  # the first is ignored
        needs=_TOGETHER,
    )


def _without_adapters(info: Mapping[str, object], methods: Methods) -> dict[Operation, str]:
    """Why adapters can't be loaded; empty if they can."""
    batch, reason = integer_at(info, "max_loras_per_batch"), ""
    if "load_lora_adapter" not in methods or info.get("enable_lora") is not True:
        reason = f"it was not launched for them: launch it with {FOR_ADAPTERS}"
    elif batch is not None and batch < 2:
        reason = f"requests of a new version would wait for the last one of the old: launch it with {FOR_ADAPTERS}"
    elif (integer_at(info, "dp_size") or 1) > 1:
        reason = "it loads none with data parallel ranks: launch one server for each"
    elif (integer_at(info, "tokenizer_worker_num") or 1) > 1:
        reason = "each of its tokenizer workers has names of its own: launch it with --tokenizer-worker-num 1"
    return {Operation.ADAPTERS: reason} if reason else {}


SGLANG: Final = EngineKind(
    "sglang",
    # It counts a request's tokens when the request ends; the latencies between them are counted as they come.
    CounterNames(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        ("sglang:generation_tokens_total", "sglang:inter_token_latency_seconds_count"),
    ),
    read_launch,
    frozenset({Operation.PAUSE, Operation.RESUME}),  # of a second release or wake its scheduler dies
)
