"""The trainer of the demo: a small causal language model that learns by policy gradient to count upwards.

The task: after token t comes t + 1 (modulo the vocabulary). A completion's reward is the share of its tokens that do,
so it starts near 1 / vocabulary and rises to 1. REINFORCE (Williams, 1992), with the batch's mean reward at each
position as the baseline; each token is credited with its own reward. The tokens come from the rollout engines, never
from this model, so the reward rises only if the engines really get the new weights.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from controlplane.cli.tables import Screen
from controlplane.plane import ControlPlane
from schemas.errors import EngineError
from schemas.reports import SyncReport
from workers.engines.tiny.model import TinyConfig, TinyModel, digest, log_probs, save, weights
from workers.engines.tiny.server import TinyClient
from workers.profilers import TrainingRank

PROMPTS = 128
"""Prompts in a step, shared out among the replicas."""
TOKENS = 12
"""Tokens of a completion."""
LEARNING_RATE = 1e-2
START_TIMEOUT_S = 120.0
"""Limit for the slowest start of an agent."""


class Training:
    """The training loop of the demo, as anyone would write it around a control plane."""

    def __init__(
        self,
        plane: ControlPlane,
        rank: TrainingRank,
        engines: Sequence[str],
        *,
        agents: int,
        checkpoints: Path,
        seed: int,
    ) -> None:
        self._plane, self._rank, self._agents, self._checkpoints = plane, rank, agents, checkpoints
        self._engines = [TinyClient(address) for address in engines]
        self._model = TinyModel(TinyConfig(), seed)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=LEARNING_RATE)
        self._random = torch.Generator().manual_seed(seed)
        self._version = 0

    def run(self, steps: int, screen: Screen, kill: Callable[[], None] | None) -> list[float]:
        """Train, sync the weights after each step, and prove by digest that every engine has them.

        Returns:
            The mean reward of each step.
        """
        screen.print(f"starting {self._agents - 1} agents")
        self._wait_for_agents()
        rewards: list[float] = []
        self._sync().raise_for_failures()
        self._prove()
        for step in range(steps):
            rewards.append(self._step(step))
            if kill is not None and step == steps // 2:
                kill()
                screen.print(f"agent 1.0 was killed: {self._sync().headline}", soft_wrap=True)
                self._wait_for_agents()
                screen.print("agent 1.0 is back, ready again with the newest weights")
            else:
                self._sync().raise_for_failures()
            self._prove()
            screen.print(f"step {step + 1:>4} of {steps}  reward {rewards[-1]:.2f}  weights v{self._version}")
        screen.print(f"after each of {steps + 1} syncs, both engines held the trainer's weights, byte for byte")
        return rewards

    def _wait_for_agents(self) -> None:
        self._plane.wait_for_agents(self._agents, timeout=START_TIMEOUT_S).wait()

    def _step(self, step: int) -> float:
        with self._plane.step(step), self._rank.annotate("step"):
            starts = torch.randint(self._model.config.vocab, (PROMPTS, 1), generator=self._random)
            with self._rank.annotate("rollouts"):
                sequences = self._rollouts(starts.tolist())
            with self._rank.annotate("learn"):
                return self._learn(sequences)

    def _rollouts(self, prompts: list[list[int]]) -> list[list[int]]:
        """Sample a completion for each prompt, an equal share on each engine, and check which weights they used.

        Returns:
            Prompts with their completions. Those that were cut short (their engine died, or was paused) are left out.
        """
        share = len(prompts) // len(self._engines)
        shares = [prompts[start : start + share] for start in range(0, len(prompts), share)]
        with ThreadPoolExecutor(len(self._engines)) as pool:
            answers = pool.map(lambda engine, part: engine.generate(part, TOKENS), self._engines, shares)
            completions = list(itertools.chain.from_iterable(answers))
        if used := {version for completion in completions for version in completion.versions} - {self._version}:
            raise EngineError(f"the rollouts of weights version {self._version} came from versions {sorted(used)}")
        pairs = zip(prompts, completions, strict=True)
        return [prompt + completion.tokens for prompt, completion in pairs if completion.finish_reason == "length"]

    def _learn(self, rollouts: list[list[int]]) -> float:
        """Make one update from what the engines sampled, and return the mean reward, between 0 and 1."""
        if not rollouts:
            return 0.0
        sequences = torch.tensor(rollouts)
        rewards = (sequences[:, 1:] == (sequences[:, :-1] + 1) % self._model.config.vocab).float()
        advantages = rewards - rewards.mean(dim=0, keepdim=True)
        loss = -(advantages * log_probs(self._model, sequences)).sum(dim=1).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(rewards.mean())

    def _sync(self) -> SyncReport:
        self._version += 1
        name = f"version_{self._version}"
        save(self._model, self._checkpoints / name)
        # A quorum of 1: when one of two replicas is lost, the fleet goes on with the other.
        return self._plane.sync_weights(self._version, name, content=True, quorum=1, timeout=60).wait()

    def _prove(self) -> None:
        """Raise EngineError unless every engine holds the trainer's weights, by the digest of all their bytes."""
        expected = digest(weights(self._model))
        for engine in self._engines:
            held = engine.describe()
            if (held.version, held.digest) != (self._version, expected):
                raise EngineError(
                    f"the engine at {engine.address} holds version {held.version} ({str(held.digest)[:16]}), "
                    f"the trainer's is version {self._version} ({expected[:16]})"
                )
