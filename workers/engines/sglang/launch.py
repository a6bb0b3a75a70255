"""How an SGLang engine was launched, and which operations follow from that. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from schemas.identity import Operation
from workers.engines.client import Methods, integer_at, product_at, text_at
from workers.engines.counters import CounterNames
from workers.engines.observed import EngineKind, Launch

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


class SGLangLaunch(Launch, frozen=True, kw_only=True):
    """Launch settings of an SGLang engine.

    Attributes:
        keeps_weights: Released weights come back unchanged.
        tensor_parallel: Tensor-parallel size.
    """

    keeps_weights: bool
    tensor_parallel: int


def read_launch(info: Mapping[str, object], methods: Methods) -> SGLangLaunch:
    """Read the answer of `/server_info`, or the same names read in process."""
    cpu = info.get("device") == "cpu"
    # Two launches differ in their random seed, and in how long each took to start (from 0.5.17 on).
    marks = json.dumps([info.get("random_seed"), info.get("startup_time"), info.get("launched_at")], sort_keys=True)
    return SGLangLaunch(
        version=text_at(info, "version") or "of unknown version",
        instance=hashlib.sha256(marks.encode()).hexdigest()[:16],
        model=text_at(info, "model_path"),
        device=text_at(info, "device"),
        node_rank=integer_at(info, "node_rank"),
        nnodes=integer_at(info, "nnodes"),
        world=product_at(info, "tp_size", "pp_size", "dp_size"),
        methods=methods,
        # A CPU has no memory to release.
        missing=_missing(methods, saves_memory=info.get("enable_memory_saver") is True or cpu),
        keeps_weights=info.get("enable_weights_cpu_backup") is True or cpu,
        tensor_parallel=integer_at(info, "tp_size") or 1,
    )


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


SGLANG: Final = EngineKind(
    "sglang",
    # It counts a request's tokens when the request ends; the latencies between them are counted as they come.
    CounterNames(
        "sglang:num_running_reqs", ("sglang:generation_tokens_total", "sglang:inter_token_latency_seconds_count")
    ),
    read_launch,
)
