"""What the door to TRL refuses, and how it says so; run by `test_trl.py` in TRL's environment. Prints JSON."""

import json
import logging
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl
from peft import LoraConfig, get_peft_model
from safetensors import safe_open

from controlplane import ControlPlane
from controlplane.trainers.completions import Rollout
from controlplane.trainers.trl import BusWeightTransfer, FleetSync, VllmRollouts
from controlplane.trainers.trl.adapters import save_adapter
from schemas.errors import RolloutctlError

OUT = Path(sys.argv[1])
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "grpo_vllm.py"), run_name="example")


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except RolloutctlError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def begin(sync: FleetSync, **changes: Any) -> str:
    """What is said at the beginning of a training."""
    args = SimpleNamespace(**{"world_size": 1, "use_vllm": False} | changes.pop("args", {}))
    model = SimpleNamespace(**changes)
    return said(lambda: sync.on_train_begin(args, SimpleNamespace(global_step=0), None, model=model))


def sharded(plane: ControlPlane) -> str:
    """What is said of an adapter that several processes train."""
    args = SimpleNamespace(world_size=2)
    model = SimpleNamespace(peft_config={}, active_adapters=["default"])
    return said(lambda: BusWeightTransfer(plane).on_train_begin(args, None, None, model=model))


def saved() -> dict[str, list[str]]:
    """What engines get of a model with two adapters, whichever is trained."""
    model = get_peft_model(EXAMPLE["make_model"]()[0], LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=4, target_modules=["v_proj"]))
    found: dict[str, list[str]] = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        save_adapter(model, OUT / name)
        with safe_open(OUT / name / "adapter_model.safetensors", "pt") as tensors:
            modules = {tensor.split(".")[-3] for tensor in tensors.keys()}  # noqa: SIM118  # it is no dictionary
        found[name] = [*sorted(modules), *sorted(file.name for file in (OUT / name).iterdir())]
    return found


def compare(plane: ControlPlane) -> str:
    """What is said of logprobs that are not those of the trainer's model."""
    model, _ = EXAMPLE["make_model"]()
    trainer = SimpleNamespace(model=model, args=SimpleNamespace(per_device_train_batch_size=2))
    rollouts = VllmRollouts(plane, {1: "http://127.0.0.1:9"}, max_logprob_gap=1e-4)
    return said(lambda: rollouts._compare([[1, 2]], [Rollout([3, 4], [-0.5, -0.5], 1)], trainer, 1e-4))


if __name__ == "__main__":
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rolloutctl").addHandler(handler)
    with ControlPlane("tcp://127.0.0.1:0", log=OUT / "run.db", checkpoints=OUT) as plane:
        sync = FleetSync(plane)
        found = {
            "processes": begin(sync, args={"world_size": 2}),
            "use_vllm": begin(sync, args={"use_vllm": True}),
            "adapters": begin(sync, peft_config={}, active_adapters=["a", "b"]),
            "sharded": sharded(plane),
            "agents": begin(sync),
            "every": said(lambda: FleetSync(plane, every=0)),
            "logprobs": compare(plane),
            "saved": saved(),
            "seen": [*warnings],
        }
        trl.__version__ = "2.0.0"
        FleetSync(plane)
    print(json.dumps(found | {"unseen": warnings}))  # noqa: T201
