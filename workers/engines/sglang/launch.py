"""How an SGLang engine was launched, and which operations follow from that. Pure."""

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from schemas.identity import Operation
from workers.engines.client import Methods, integer_at, text_at

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


class SGLangLaunch(Struct, frozen=True):
    """Launch settings of one engine, as far as it reports them.

    Attributes:
        instance: Differs between two launches.
        saves_memory: Sleep releases memory, or there is none to release (a CPU).
        keeps_weights: Released weights come back unchanged.
    """

    version: str
    instance: str | None
    node_rank: int | None
    model: str | None
    device: str | None
    saves_memory: bool
    keeps_weights: bool
    tensor_parallel: int
    methods: Methods


def read_launch(info: Mapping[str, object], methods: Methods) -> SGLangLaunch:
    """Read the answer of `/server_info`, or the same names read in process."""
    cpu = info.get("device") == "cpu"
    # Two launches differ in their random seed, and in how long each took to start (from 0.5.17 on).
    marks = json.dumps([info.get("random_seed"), info.get("startup_time"), info.get("launched_at")], sort_keys=True)
    return SGLangLaunch(
        version=text_at(info, "version") or "of unknown version",
        instance=hashlib.sha256(marks.encode()).hexdigest()[:16],
        node_rank=integer_at(info, "node_rank"),
        model=text_at(info, "model_path"),
        device=text_at(info, "device"),
        saves_memory=info.get("enable_memory_saver") is True or cpu,
        keeps_weights=info.get("enable_weights_cpu_backup") is True or cpu,
        tensor_parallel=integer_at(info, "tp_size") or 1,
        methods=methods,
    )


def operations(launch: SGLangLaunch) -> frozenset[Operation]:
    """Return what the engine can do; `missing_operations` has the rest."""
    return frozenset(Operation) - missing_operations(launch).keys()


def missing_operations(launch: SGLangLaunch) -> dict[Operation, str]:
    """Return what the engine can't do, each with the reason and the remedy."""
    missing = {
        operation: f"it has no {method}: use SGLang 0.5.6 or newer"
        for operation, method in _NEEDED.items()
        if method not in launch.methods
    }
    if not launch.saves_memory:
        reason = "it would release nothing: launch it with --enable-memory-saver"
        missing |= {Operation.SLEEP: reason, Operation.WAKE: reason}
    return missing
