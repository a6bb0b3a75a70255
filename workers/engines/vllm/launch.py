"""How a vLLM engine was launched, and which operations follow from that. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from schemas.identity import Operation
from workers.engines.client import Methods, integer_at, mapping_at, product_at, text_at
from workers.engines.counters import CounterNames
from workers.engines.observed import EngineKind, Launch

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


class VLLMLaunch(Launch, frozen=True, kw_only=True):
    """Launch settings of a vLLM engine.

    Attributes:
        profiles_to: Directory that torch traces are written to; None if it was launched without a torch profiler.
        profiler: Its profiler's configuration.
    """

    profiles_to: Path | None
    profiler: Mapping[str, object]


def read_launch(info: Mapping[str, object], methods: Methods) -> VLLMLaunch:
    """Read the answer of `/server_info?config_format=json`, or the same structure made in process."""
    config = mapping_at(info, "vllm_config")
    profiler, model = mapping_at(config, "profiler_config"), mapping_at(config, "model_config")
    parallel = mapping_at(config, "parallel_config")
    directory = text_at(profiler, "torch_profiler_dir")
    device = text_at(mapping_at(config, "device_config"), "device")
    profiles_to = Path(directory) if text_at(profiler, "profiler") == "torch" and directory else None
    # A CPU has no memory to release, but the scheduler's part of sleep works there too.
    saves_memory = model.get("enable_sleep_mode") is True or device == "cpu"
    return VLLMLaunch(
        version=text_at(info, "version") or "of unknown version",
        instance=text_at(config, "instance_id"),
        model=text_at(model, "model"),
        device=device,
        node_rank=integer_at(parallel, "node_rank"),
        nnodes=integer_at(parallel, "nnodes"),
        world=product_at(parallel, "world_size", "data_parallel_size"),
        methods=methods,
        missing=_missing(methods, profiles_to, saves_memory),
        profiles_to=profiles_to,
        profiler=profiler,
    )


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


VLLM: Final = EngineKind(
    "vllm", CounterNames("vllm:num_requests_running", ("vllm:generation_tokens_total",)), read_launch
)
