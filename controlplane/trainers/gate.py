"""Which samples a trainer takes, by the versions of the weights that made them. Needs no trainer.

A sample is judged when the trainer takes it. One that is refused is counted by `ControlPlane.accepts`, and another one
takes its place.
"""

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from controlplane.machine.provenance import Verdict, accepts
from controlplane.plane import ControlPlane
from controlplane.trainers.completions import LOOK_AGAIN_S, CompletionsClient, NewestAdapter, Prompt, Rollout, known
from schemas.errors import ConfigError, EngineError
from schemas.logs import logger_of

logger = logger_of("trainers")


class Gate(Struct, frozen=True, kw_only=True):
    """Which samples a trainer takes. Those that it refuses are counted, and others are asked for.

    Args:
        max_staleness: How many versions behind the newest committed one the oldest token of a sample may be; None for
            any number.
        mixed: Take samples that more than one version made.
        unproven: Take tokens of weights that their replica was not proven to hold.
        attempts: How often a prompt is sampled while its samples are refused, before the training ends.

    Raises:
        ConfigError: A number is out of bounds.
    """

    max_staleness: int | None = None
    mixed: bool = True
    unproven: bool = False
    attempts: int = 3

    def __post_init__(self) -> None:
        if self.attempts < 1 or (self.max_staleness or 0) < 0:
            raise ConfigError(f"{self}: attempts is at least 1, and max_staleness at least 0")


class GatedRollouts:
    """Samples prompts until each has a completion that the gate accepts; without one all are, and none is counted."""

    def __init__(self, plane: ControlPlane, urls: Mapping[int, str] | None, gate: Gate | None, timeout: float) -> None:
        places = plane.endpoints if urls is None else urls
        self._client = CompletionsClient(plane.serving, places, timeout=timeout, versions=gate is not None)
        self._plane, self._gate, self.attempts = plane, gate, gate.attempts if gate is not None else 1

    def generate(
        self, prompts: Sequence[Prompt], sampling: Mapping[str, Any], adapter: NewestAdapter | None, *, taken: bool
    ) -> list[Rollout]:
        """Return one accepted completion for each prompt, in their order.

        Those that are `taken` now are counted, the others judged once more, by `verdict`. Raises as
        `CompletionsClient.generate`, and EngineError if the completions of a prompt were refused in each attempt.
        """
        accepted, open_, reason = dict[int, Rollout](), list(range(len(prompts))), ""
        for _ in range(self.attempts):
            rollouts = self._client.generate([prompts[index] for index in open_], sampling, adapter)
            verdicts = [self.verdict(rollout, taken=taken) for rollout in rollouts]
            judged = list(zip(open_, rollouts, verdicts, strict=True))
            accepted |= {index: rollout for index, rollout, verdict in judged if verdict}
            open_ = [index for index, _, verdict in judged if not verdict]
            if not open_:
                return [accepted[index] for index in range(len(prompts))]
            reason = next(verdict.reason for verdict in verdicts if not verdict)
            logger.warning("%d of %d samples are refused: %s", len(open_), len(judged), reason)
        raise EngineError(
            f"{len(open_)} of {len(prompts)} prompts got no accepted sample in {self.attempts} attempts: {reason}. "
            f"`rolloutctl status` shows what the replicas serve"
        )

    def verdict(self, rollout: Rollout, *, taken: bool = True) -> Verdict:
        """Return whether the trainer may take a completion now, and count that if it does or may not."""
        if self._gate is None:
            return Verdict("")
        made_by, replica, model = rollout.made_by, rollout.replica, rollout.model
        while not (found := known(lambda: self._plane.provenance(made_by, replica=replica, model=model))):
            threading.Event().wait(LOOK_AGAIN_S)
        (sample,) = found
        limits: dict[str, Any] = {name: getattr(self._gate, name) for name in ("max_staleness", "mixed", "unproven")}
        if not taken and (verdict := accepts(sample, **limits)):
            return verdict
        return self._plane.accepts(sample, **limits)


class GatedQueue(queue.Queue[Any]):
    """Samples, each put in with its completion. What is taken out has passed the gate at that moment.

    Args:
        rollouts: The gate.
        maxsize: Of the queue.
        batch: Samples that are made at once. More refused ones in a row than `attempts` times all that can have been
            made before a sync end the training.
    """

    def __init__(self, rollouts: GatedRollouts, maxsize: int, batch: int) -> None:
        super().__init__(maxsize)
        self._rollouts, self._batch, self._refused = rollouts, batch, 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next sample that is accepted. Raises EngineError if too many in a row were refused."""
        while True:
            sample, rollout = super().get(block, timeout)
            verdict = self._rollouts.verdict(rollout)
            if verdict:
                self._refused = 0
                return sample
            self._refused += 1
            if self._refused > self._rollouts.attempts * (max(self.maxsize, self.qsize()) + self._batch):
                raise EngineError(f"the gate has refused {self._refused} samples in a row: {verdict.reason}")
