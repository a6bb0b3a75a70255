"""A small causal transformer, for the engine that samples from it and for the trainer that trains it.

`TinyModel(config, seed)` is an ordinary torch module: call it for logits, differentiate them, step an optimizer.
`log_probs` is what a policy gradient needs, and `save` writes a checkpoint that an engine can load. Engines call `step`
instead, which computes only what a `KVCache` does not hold yet.

Weights are deterministic in their seed, and nothing here touches torch's global random state.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from schemas.errors import CheckpointError, ConfigError
from schemas.identity import Positive
from schemas.safetensors.digest import tensor_digest
from schemas.safetensors.format import TensorSpec, safetensors_files
from workers.engines.checkpoint import TORCH_DTYPES

DTYPES: Final[Mapping[torch.dtype, str]] = {getattr(torch, name): dtype for dtype, name in TORCH_DTYPES.items()}
"""Names of torch's dtypes in safetensors."""


class TinyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the model.

    Attributes:
        vocab: Number of tokens; they are 0..vocab-1.
        hidden: Width, a multiple of `heads`.
        heads: Attention heads of each layer.
        layers: Number of blocks.
        context: Most tokens of prompt and completion together.
    """

    vocab: Positive = 32
    hidden: Positive = 48
    heads: Positive = 4
    layers: Positive = 2
    context: Positive = 64

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")


class KVCache:
    """Keys and values of the tokens computed so far, one row per running prompt.

    The position behind the last one is scratch space: the padding of a batch is written there and never read.
    """

    def __init__(self, config: TinyConfig, rows: int) -> None:
        shape = (config.layers, rows, config.heads, config.context + 1, config.hidden // config.heads)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)


class _CacheView:
    """The part of a cache that one forward uses: its rows [B], and the positions [B, T] of the tokens that are fed."""

    def __init__(self, cache: KVCache, rows: Tensor, positions: Tensor, length: int) -> None:
        self._cache, self._rows, self._positions, self._length = cache, rows, positions, length
        self.mask = (torch.arange(length) <= positions[:, :, None])[:, None]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of the fed tokens, [B, T, H, D]; return all of these rows, [B, H, length, D]."""
        rows, cache = self._rows, self._cache
        cache.keys[layer, rows[:, None], :, self._positions] = keys
        cache.values[layer, rows[:, None], :, self._positions] = values
        return cache.keys[layer][rows, :, : self._length], cache.values[layer][rows, :, : self._length]


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm before it."""

    def __init__(self, config: TinyConfig, layer: int, generator: torch.Generator) -> None:
        super().__init__()
        hidden = config.hidden
        self._layer, self._heads = layer, config.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = _matrix(3 * hidden, hidden, generator)
        self.out = _matrix(hidden, hidden, generator)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = _matrix(4 * hidden, hidden, generator)
        self.down = _matrix(hidden, 4 * hidden, generator)

    def forward(self, x: Tensor, view: _CacheView | None) -> Tensor:
        """Map x [B, T, hidden] to the same shape. With a view, each token also attends to those in the cache."""
        batch, time, hidden = x.shape
        mixed = functional.linear(self.attention_norm(x), self.qkv)
        query, key, value = mixed.view(batch, time, 3, self._heads, hidden // self._heads).unbind(2)
        attend = functional.scaled_dot_product_attention
        if view is None:
            seen = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True)
        else:
            keys, values = view.extend(self._layer, key, value)
            seen = attend(query.transpose(1, 2), keys, values, attn_mask=view.mask)
        x = x + functional.linear(seen.transpose(1, 2).reshape(batch, time, hidden), self.out)
        widened = functional.gelu(functional.linear(self.mlp_norm(x), self.up))
        return x + functional.linear(widened, self.down)


class TinyModel(nn.Module):
    """The language model. Two models with the same config and seed hold the same weights, bit for bit."""

    def __init__(self, config: TinyConfig, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.config = config
        self.tokens = _matrix(config.vocab, config.hidden, generator, std=0.3)
        self.positions = _matrix(config.context, config.hidden, generator, std=0.3)
        self.blocks = nn.ModuleList(Block(config, layer, generator) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        # Small, so that an untrained policy is close to uniform and explores.
        self.head = _matrix(config.vocab, config.hidden, generator, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token after each of `tokens` [B, T], T <= context: [B, T, vocab]."""
        return functional.linear(self._encode(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None), self.head)

    def step(self, fed: Sequence[Sequence[int]], cached: Sequence[int], rows: Sequence[int], cache: KVCache) -> Tensor:
        """Compute one forward over what the cache lacks.

        Args:
            fed: Tokens of each of B prompts that the cache does not hold yet, at least one each.
            cached: How many tokens of each the cache holds.
            rows: Row of each in the cache.
            cache: Extended by the fed tokens.

        Returns:
            Logits [B, vocab] of the token after the last one fed.
        """
        tokens = pad_sequence([torch.tensor(row) for row in fed], batch_first=True)
        lengths, starts = torch.tensor([len(row) for row in fed]), torch.tensor(cached)
        offsets = torch.arange(tokens.shape[1])
        positions = torch.where(offsets < lengths[:, None], starts[:, None] + offsets, self.config.context)
        view = _CacheView(cache, torch.tensor(rows), positions, int((starts + lengths).max()))
        encoded = self._encode(tokens, positions, view)
        return functional.linear(encoded[torch.arange(len(fed)), lengths - 1], self.head)

    def _encode(self, tokens: Tensor, positions: Tensor, view: _CacheView | None) -> Tensor:
        places = functional.embedding(positions.clamp(max=self.config.context - 1), self.positions)
        x = functional.embedding(tokens, self.tokens) + places
        for block in self.blocks:
            x = block(x, view)
        encoded: Tensor = self.norm(x)
        return encoded


def _matrix(rows: int, columns: int, generator: torch.Generator, std: float | None = None) -> nn.Parameter:
    # Not nn.Linear: it draws its first values from torch's global state, which belongs to the trainer.
    return nn.Parameter(torch.empty(rows, columns).normal_(0.0, std or columns**-0.5, generator=generator))


# --- policy -----------------------------------------------------------------------------------------------------------


def choose(logits: Tensor, temperature: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [B, vocab].
        temperature: [B]; 0 takes the likeliest token.
        random: Source of the draws.

    Returns:
        The tokens [B], and their log-probabilities [B] under the distribution that they were drawn from (at
        temperature 1 where the temperature is 0).
    """
    log_probabilities = (logits / torch.where(temperature > 0, temperature, 1.0)[:, None]).log_softmax(-1)
    drawn = torch.multinomial(log_probabilities.exp(), 1, generator=random)[:, 0]
    chosen = torch.where(temperature > 0, drawn, logits.argmax(-1))
    return chosen, log_probabilities.gather(-1, chosen[:, None])[:, 0]


def log_probs(model: TinyModel, tokens: Tensor) -> Tensor:
    """Log-probability of each token after the first, given those before it: [B, T] -> [B, T-1]. Differentiable."""
    logits: Tensor = model(tokens[:, :-1])
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(model: TinyModel) -> dict[str, Tensor]:
    """Return the live tensors of the model by name, sorted. They share its memory."""
    return {name: tensor.detach() for name, tensor in sorted(model.named_parameters())}


def layout(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return dtype and shape of tensors by name, as `schemas.safetensors.format.read_layout` reads them from a file."""
    return {name: TensorSpec(_dtype(tensors[name]), tuple(tensors[name].shape)) for name in sorted(tensors)}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the content digest of tensors, which is that of a checkpoint with the same tensors."""
    return tensor_digest(
        (name, _dtype(tensor), tuple(tensor.shape), _raw(tensor)) for name, tensor in sorted(tensors.items())
    )


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _dtype(tensor: Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"safetensors has no tensors of {tensor.dtype}")
    return DTYPES[tensor.dtype]


def save(model: TinyModel, directory: Path) -> None:
    """Write the weights to `model.safetensors` in the directory, which is made. A reader sees all of it or nothing.

    Raises:
        FileExistsError: A checkpoint is there already: each version belongs in a directory of its own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    part, whole = directory / "model.safetensors.part", directory / "model.safetensors"
    part.write_bytes(safetensors.torch.save(weights(model)))
    os.link(part, whole)  # unlike a rename, it never replaces
    part.unlink()


def read(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that was checked. Raises CheckpointError when it has changed since."""
    found: dict[str, Tensor] = {}
    for path in safetensors_files(directory):
        try:
            # Not load_file: it maps the file, and truncating a mapped file kills the process.
            found.update(safetensors.torch.load(path.read_bytes()))
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint refused: {path} changed while it was read: {error}. Nothing was loaded."
            ) from error
    return found
