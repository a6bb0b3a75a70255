"""Low-rank adapters of the tiny model, and the tokens that it makes with one."""

from pathlib import Path

import torch
from torch.func import functional_call

from workers.engines.tiny.model import TinyConfig, TinyModel, read_adapter, with_adapter

PROMPT = [3, 1, 4, 1]


def lora(seed: int, rank: int = 2) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of every linear module of the model."""
    generator = torch.Generator().manual_seed(seed)
    modules = {name: module for name, module in TinyModel(TinyConfig()).named_modules() if name.startswith("blocks.")}
    return {
        name: (
            torch.randn(rank, module.in_features, generator=generator),
            torch.randn(module.out_features, rank, generator=generator),
        )
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
    }


def expected(base: TinyModel, directory: Path | None, tokens: int = 8) -> list[int]:
    """Greedy tokens of the base with an adapter, by a forward of all tokens each time."""
    deltas = read_adapter(directory) if directory is not None else {}
    made = list(PROMPT)
    with torch.no_grad():
        for _ in range(tokens):
            logits, _ = functional_call(base, with_adapter(base, deltas), (torch.tensor([made]),))
            made.append(int(logits[0, -1].argmax()))
    return made[len(PROMPT) :]
