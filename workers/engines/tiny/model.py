"""A small causal transformer, for the engine that samples from it and for the trainer that trains it.

`TinyModel(config, seed)` is an ordinary torch module. `log_probs` is what a policy gradient needs, `save` writes a
checkpoint that an engine can load, and `save_adapter` a LoRA adapter. Weights are deterministic in their seed, and
nothing here touches torch's global random state, which belongs to the trainer.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional

from schemas.safetensors.digest import tensor_digest
from schemas.safetensors.format import TensorSpec
from workers.engines.checkpoint import TORCH_DTYPES

# The head is small, so that an untrained policy is close to uniform and explores.
INITIAL_STD: Final = {"tokens.weight": 0.3, "positions.weight": 0.3, "head.weight": 0.05}
"""Standard deviation of the initial weights; that of the other matrices follows from their width."""
DTYPE_NAMES: Final = {f"torch.{ours}": name for name, ours in TORCH_DTYPES.items()}
"""safetensors' names of torch's dtypes."""


class TinyConfig(Struct, frozen=True, kw_only=True):
    """The shape of the model.

    Attributes:
        vocab: Number of tokens; they are 0..vocab-1.
        hidden: Width, a multiple of `heads`.
        context: Most tokens of prompt and completion together.
    """

    vocab: int = 32
    hidden: int = 48
    heads: int = 4
    layers: int = 2
    context: int = 64


class Linear(nn.Linear):
    """A layer that draws no weights: the model does, and not from torch's global random state."""

    def reset_parameters(self) -> None: ...


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm before it."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self._heads = config.heads
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.qkv = Linear(hidden, 3 * hidden, bias=False)
        self.out = Linear(hidden, hidden, bias=False)
        self.up = Linear(hidden, 4 * hidden, bias=False)
        self.down = Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Map x [B, T, hidden] to the same shape; return it with the keys and values [2, B, heads, past + T, D]."""
        query, *new = self.qkv(self.norm(x)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        cache = torch.stack(new) if past is None else torch.cat([past, torch.stack(new)], dim=-2)
        mixed = functional.scaled_dot_product_attention(query, cache[0], cache[1], is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm(x)))), cache


class TinyModel(nn.Module):
    """The language model. Two models with the same config and seed hold the same weights, bit for bit."""

    def __init__(self, config: TinyConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        vocab, context, hidden = config.vocab, config.context, config.hidden
        self.tokens = nn.Embedding(vocab, hidden, _weight=torch.empty(vocab, hidden))
        self.positions = nn.Embedding(context, hidden, _weight=torch.empty(context, hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.head = Linear(hidden, vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, matrix in self.named_parameters():
            nn.init.normal_(matrix, std=INITIAL_STD.get(name, matrix.shape[1] ** -0.5), generator=generator)

    def forward(self, tokens: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute one forward.

        Args:
            tokens: [B, T]; with a past they are the one token after it, [B, 1].
            past: Keys and values of the tokens before, as an earlier forward returned them. It is not changed.

        Returns:
            Logits of the next token after each of `tokens` [B, T, vocab], and the keys and values of all tokens so far
            [layers, 2, B, heads, past + T, hidden / heads].
        """
        start = 0 if past is None else past.shape[-2]
        x = self.tokens(tokens) + self.positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        caches = []
        for layer, block in enumerate(self.blocks):
            x, cache = block(x, None if past is None else past[layer])
            caches.append(cache)
        return self.head(self.norm(x)), torch.stack(caches)


def with_adapter(model: TinyModel, deltas: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `torch.func.functional_call` takes to compute a model with an adapter: the weights that it changes,
    as they are now, with what it adds.
    """
    return {name: parameter + deltas[name] for name, parameter in model.named_parameters() if name in deltas}


def log_probs(model: TinyModel, tokens: Tensor) -> Tensor:
    """Log-probability of each token after the first, given those before it: [B, T] -> [B, T-1]. Differentiable."""
    logits: Tensor = model(tokens[:, :-1])[0]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(model: TinyModel) -> dict[str, Tensor]:
    """Return the live tensors of the model by name. They share its memory."""
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def layout(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return dtype and shape of tensors by name, as `schemas.safetensors.format.read_layout` reads them from a file."""
    return {name: TensorSpec(DTYPE_NAMES[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in tensors.items()}


def empty(tensors: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return tensors of these dtypes and shapes, by name, with any content."""
    return {
        name: torch.empty(spec.shape, dtype=getattr(torch, TORCH_DTYPES[spec.dtype])) for name, spec in tensors.items()
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the content digest of tensors, which is that of a checkpoint with the same tensors."""
    specs = layout(tensors)
    return tensor_digest(
        (name, specs[name].dtype, specs[name].shape, memory_of(tensors[name])) for name in sorted(specs)
    )


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor: its own memory if it is contiguous and on the CPU, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data


def save(model: TinyModel, directory: Path) -> None:
    """Write the weights to `model.safetensors` in the directory, which is made. A reader sees all of it or nothing.

    Raises FileExistsError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    part, whole = directory / "model.safetensors.part", directory / "model.safetensors"
    try:
        safetensors.torch.save_file(weights(model), part)
        os.link(part, whole)  # unlike a rename, it never replaces
    except FileExistsError:
        raise FileExistsError(f"{whole} is there already, and no checkpoint is ever replaced") from None
    finally:
        part.unlink(missing_ok=True)


# --- LoRA adapters ----------------------------------------------------------------------------------------------------


def save_adapter(lora: Mapping[str, tuple[Tensor, Tensor]], alpha: float, directory: Path) -> None:
    """Write a LoRA adapter as PEFT does. A reader sees all of it or nothing. Raises FileExistsError.

    Args:
        lora: A [r, in] and B [out, r] of each linear module, by its name: `blocks.0.qkv`.
        alpha: The adapter adds `alpha / r * B @ A`.
        directory: Made; each version belongs in one of its own.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} is there already, and no adapter is ever replaced")
    (rank,) = {down.shape[0] for down, _ in lora.values()}
    targets = sorted({name.rpartition(".")[2] for name in lora})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": tensor.detach().contiguous()
        for name, pair in lora.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    part = directory.with_name(f"{directory.name}.part")
    part.mkdir(parents=True)
    safetensors.torch.save_file(tensors, part / "adapter_model.safetensors")
    (part / "adapter_config.json").write_text(json.dumps(config))
    part.rename(directory)


def read_adapter(directory: Path) -> dict[str, Tensor]:
    """Return what an adapter adds to the weights of a model, by their names. Its files have been checked."""
    config = json.loads((directory / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    tensors = safetensors.torch.load_file(directory / "adapter_model.safetensors")
    modules = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    return {
        f"{name.removeprefix('base_model.model.')}.weight": scale
        * (tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"])
        for name in modules
    }
