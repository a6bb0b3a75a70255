"""The trainer of the demo: a small causal language model that learns by policy gradient to count upwards.

The task: after token t comes t + 1 (modulo the vocabulary). A completion's reward is the share of its tokens that do,
so it starts near 1 / vocabulary and rises to 1. REINFORCE (Williams, 1992) with the batch's mean reward at each
position as the baseline; each token is credited with its own reward. The tokens come from the rollout engines, never
from this model, so the reward rises only if the engines really get the new weights.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from workers.engines.tiny.model import TinyConfig, TinyModel, digest, log_probs, save, weights

PROMPTS = 128
"""Prompts in a step, shared out among the replicas."""
TOKENS = 12
"""Tokens of a completion."""
LEARNING_RATE = 1e-2


class PolicyTrainer:
    """Holds the policy that is trained. seed: of its first weights and of the prompts."""

    def __init__(self, config: TinyConfig, seed: int) -> None:
        self._config = config
        self._model = TinyModel(config, seed)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=LEARNING_RATE)
        self._random = torch.Generator().manual_seed(seed)

    def prompts(self) -> list[list[int]]:
        """One random token each: where to count from."""
        starts = torch.randint(self._config.vocab, (PROMPTS,), generator=self._random)
        return [[int(start)] for start in starts]

    def learn(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> float:
        """One update from what the engines sampled; returns the mean reward, between 0 and 1.

        Completions that were cut short (their engine died, or was paused) take no part.
        """
        whole = [
            [*prompt, *tokens] for prompt, tokens in zip(prompts, completions, strict=True) if len(tokens) == TOKENS
        ]
        if not whole:
            return 0.0
        sequences = torch.tensor(whole)
        rewards = (sequences[:, 1:] == (sequences[:, :-1] + 1) % self._config.vocab).float()
        logs = log_probs(self._model, sequences)
        advantages = rewards - rewards.mean(dim=0, keepdim=True)
        loss = -(advantages * logs).sum(dim=1).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(rewards.mean())

    @property
    def digest(self) -> str:
        """Of the weights as they are now, to be compared with what the engines say that they hold."""
        return digest(weights(self._model))

    def save(self, directory: Path) -> None:
        """Write the weights as safetensors, whole or not at all."""
        save(self._model, directory)
