"""A small causal transformer, for the engine that samples from it and for the trainer that trains it.

`TinyModel(config, seed)` is an ordinary torch module: call it for logits, differentiate them, step an optimizer.
`log_probs` and `sample` are what a policy gradient needs; `save` writes a checkpoint that an engine can load. Engines
call `step` instead, which computes only what a `Cache` does not hold yet.

Everything is deterministic in its seed, and nothing here touches torch's global random state.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional

from schemas.errors import CheckpointError, ConfigError
from schemas.identity import Positive
from schemas.safetensors.digest import tensor_digest
from schemas.safetensors.format import TensorSpec, safetensors_files

DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""The dtypes that weights come in, as safetensors calls them."""


class TinyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of the model.

    vocab: number of tokens; they are 0..vocab-1.   hidden: width, a multiple of `heads`.   context: largest number of
    tokens of prompt and completion together.
    """

    vocab: Positive = 32
    hidden: Positive = 48
    heads: Positive = 4
    layers: Positive = 2
    context: Positive = 64

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")


class Cache:
    """Keys and values of the tokens that were computed, one row per running request.

    The position behind the last one is scratch: what pads a batch is written there, and nothing ever reads it.
    """

    def __init__(self, config: TinyConfig, rows: int) -> None:
        shape = (config.layers, rows, config.heads, config.context + 1, config.hidden // config.heads)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)


class Span:
    """The part of a cache that one forward works on.

    rows: of the cache, [B].   positions: of the tokens that are fed, [B, T].   length: largest position, plus one.
    """

    def __init__(self, cache: Cache, rows: Tensor, positions: Tensor, length: int) -> None:
        self._cache, self._rows, self._positions, self._length = cache, rows, positions, length
        self.mask = (torch.arange(length) <= positions[:, :, None])[:, None]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the fed tokens, [B, T, H, D]; return all up to them, [B, H, length, D]."""
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

    def forward(self, x: Tensor, span: Span | None) -> Tensor:
        """x: [B, T, hidden]. Without a span every token sees those before it; with one, those in the cache too."""
        batch, time, hidden = x.shape
        mixed = functional.linear(self.attention_norm(x), self.qkv)
        query, key, value = mixed.view(batch, time, 3, self._heads, hidden // self._heads).unbind(2)
        attend = functional.scaled_dot_product_attention
        if span is None:
            seen = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True)
        else:
            keys, values = span.extend(self._layer, key, value)
            seen = attend(query.transpose(1, 2), keys, values, attn_mask=span.mask)
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

    def step(self, fed: Sequence[Sequence[int]], filled: Sequence[int], rows: Sequence[int], cache: Cache) -> Tensor:
        """Logits [B, vocab] of the token after the last one fed, for each of B requests.

        fed: the tokens of each request that the cache does not hold yet, at least one.   filled: how many of its tokens
        the cache holds.   rows: its row of the cache.
        """
        time, scratch = max(map(len, fed)), self.config.context
        padded = torch.tensor([[*tokens, *[0] * (time - len(tokens))] for tokens in fed])
        positions = torch.tensor(
            [
                [*range(start, start + len(tokens)), *[scratch] * (time - len(tokens))]
                for tokens, start in zip(fed, filled, strict=True)
            ]
        )
        length = max(start + len(tokens) for tokens, start in zip(fed, filled, strict=True))
        encoded = self._encode(padded, positions, Span(cache, torch.tensor(rows), positions, length))
        last = encoded[torch.arange(len(fed)), torch.tensor([len(tokens) - 1 for tokens in fed])]
        return functional.linear(last, self.head)

    def _encode(self, tokens: Tensor, positions: Tensor, span: Span | None) -> Tensor:
        places = functional.embedding(positions.clamp(max=self.config.context - 1), self.positions)
        x = functional.embedding(tokens, self.tokens) + places
        for block in self.blocks:
            x = block(x, span)
        encoded: Tensor = self.norm(x)
        return encoded


def _matrix(rows: int, columns: int, generator: torch.Generator, std: float | None = None) -> nn.Parameter:
    # Not nn.Linear: it draws its first values from torch's global state, which belongs to the trainer.
    return nn.Parameter(torch.empty(rows, columns).normal_(0.0, std or columns**-0.5, generator=generator))


# --- policy -----------------------------------------------------------------------------------------------------------


def choose(logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability under the distribution that it was drawn from: [B], [B].

    logits: [B, vocab].   temperature: [B]; 0 takes the likeliest token, with its log-probability at temperature 1.
    noise: Gumbel noise [B, vocab], zero where the temperature is: with it the largest of a row is an exact sample, and
    a row does not depend on the others of its batch.
    """
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    chosen = (scaled + noise).argmax(-1)
    return chosen, scaled.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]


def gumbel(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Gumbel noise for `choose`."""
    return -torch.empty(*shape).exponential_(generator=generator).log()


def log_probs(model: TinyModel, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token after the first, given those before it: [B, T] -> [B, T-1]. Differentiable.

    temperature: that of the sampling, larger than 0.
    """
    logits: Tensor = model(tokens[:, :-1])
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(
    model: TinyModel, prompts: Tensor, max_tokens: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Continue each of `prompts` [B, T] by `max_tokens` tokens: [B, T + max_tokens], at most `context`."""
    tokens = prompts
    temperatures = torch.full((len(prompts),), temperature)
    for _ in range(max_tokens):
        logits: Tensor = model(tokens)[:, -1]
        noise = gumbel(logits.shape, generator) if temperature > 0 else torch.zeros_like(logits)
        tokens = torch.cat([tokens, choose(logits, temperatures, noise)[0][:, None]], dim=1)
    return tokens


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(model: TinyModel) -> dict[str, Tensor]:
    """The live tensors of the model by name, sorted. They share its memory."""
    return {name: tensor.detach() for name, tensor in sorted(model.named_parameters())}


def layout(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Name, dtype and shape of tensors, sorted by name, as `schemas.safetensors.format.read_layout` reads them from a
    file.
    """
    return {name: TensorSpec(_dtype(tensors[name]), tuple(tensors[name].shape)) for name in sorted(tensors)}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The content digest of tensors: that of a checkpoint which holds the same ones."""
    return tensor_digest(_raw(tensors))


def _raw(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    for name in sorted(tensors):
        tensor = tensors[name]
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield name, _dtype(tensor), tuple(tensor.shape), flat.numpy().data


def _dtype(tensor: Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"weights are {', '.join(DTYPES.values())}; this tensor is {tensor.dtype}")
    return DTYPES[tensor.dtype]


def save(model: TinyModel, directory: Path) -> None:
    """Write the weights as `model.safetensors` into the directory, which is made. Whoever looks sees all or nothing.

    Raises FileExistsError if a checkpoint is there: weights of another version belong in a directory of their own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    part, whole = directory / "model.safetensors.part", directory / "model.safetensors"
    part.write_bytes(safetensors.torch.save(weights(model)))
    os.link(part, whole)  # unlike a rename, it never replaces
    part.unlink()


def read(directory: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint that was checked, by name. Raises CheckpointError when it changed since."""
    found: dict[str, Tensor] = {}
    for path in safetensors_files(directory):
        try:
            # Not load_file: it maps the file, and a file cut off under a mapping kills the process.
            found.update(safetensors.torch.load(path.read_bytes()))
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint refused: {path} changed while it was read: {error}. Nothing was loaded."
            ) from error
    return found
