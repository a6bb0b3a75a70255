"""LoRA adapters on disk, as PEFT writes them, without torch or PEFT."""

import json
import random
from array import array
from collections.abc import Mapping
from pathlib import Path

BASE = {
    "model.layers.0.self_attn.q_proj": (16, 8),
    "model.layers.0.self_attn.v_proj": (4, 8),
    "model.layers.0.mlp.down_proj": (8, 12),
}
"""Modules of a small base model: rows and columns of their weights."""
Tensors = dict[str, tuple[int, ...]]


def tensors_of(modules: Mapping[str, tuple[int, int]], rank: int) -> Tensors:
    """The shapes of an adapter's tensors, by PEFT's names."""
    made: Tensors = {}
    for name, (rows, columns) in modules.items():
        made[f"base_model.model.{name}.lora_A.weight"] = (rank, columns)
        made[f"base_model.model.{name}.lora_B.weight"] = (rows, rank)
    return made


def save_adapter(
    directory: Path,
    modules: Mapping[str, tuple[int, int]] = BASE,
    rank: int = 4,
    seed: int = 0,
    tensors: Tensors | None = None,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write an adapter. Returns its directory.

    tensors: other shapes than those of the modules and the rank.   settings: of its configuration.
    """
    targets = sorted({name.rpartition(".")[2] for name in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": targets, "bias": "none"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**config, **(settings or {})}))
    write_tensors(directory / "adapter_model.safetensors", tensors or tensors_of(modules, rank), seed)
    return directory


def save_base(directory: Path, modules: Mapping[str, tuple[int, int]] = BASE) -> Path:
    """Write the weights of a base model. Returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", {f"{name}.weight": shape for name, shape in modules.items()}, 0)
    return directory


def write_tensors(path: Path, tensors: Mapping[str, tuple[int, ...]], seed: int, dtype: str = "F32") -> None:
    """Write a safetensors file of random numbers."""
    draw, header, data = random.Random(seed), {}, array("f")
    for name, shape in tensors.items():
        start, size = data.itemsize * len(data), 1
        for extent in shape:
            size *= extent
        data.extend(draw.gauss(0, 0.3) for _ in range(size))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, data.itemsize * len(data))}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
