"""For `GRPOTrainer`: the policy's weights to the fleet, and rollouts from it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from controlplane.plane import ControlPlane
from controlplane.trainers.checkpoints import CheckpointSync
from controlplane.trainers.completions import Rollout
from controlplane.trainers.gate import Gate, GatedRollouts
from controlplane.trainers.trl.adapters import adapter_of, newest_of, save_adapter
from controlplane.trainers.trl.steps import BusSteps, prompt_ids, sampling, warn_of_unseen
from schemas.errors import ConfigError, EngineError
from schemas.reports import SyncReport

if TYPE_CHECKING:
    from workers.profilers import TrainingRank


class FleetSync(BusSteps):
    """Steps, and the policy's weights to the fleet: before the first step, and after every `every` steps.

    What engines were launched with is never trusted, but for the base weights of a PEFT model: of that, the adapter
    alone is synced. A sync that is aborted raises CommandFailed and so ends the training. For one training process:
    with more, weights have to be gathered, which `AsyncGRPOTrainer` does.

    Args:
        plane: The open control plane. Checkpoints are written below its `checkpoints`.
        rank: As for `BusSteps`.
        every: Steps between two syncs.
        options: `keep`, `in_flight`, `quorum` and `timeout`, see `CheckpointSync`.

    Attributes:
        report: Of the newest sync.

    Raises:
        ConfigError: An argument is wrong; at the beginning of the training, if the trainer can't be used so.
        AgentsMissing: At the beginning of the training, if no agent of a replica has joined.
    """

    def __init__(
        self, plane: ControlPlane, *, rank: "TrainingRank | None" = None, every: int = 1, **options: Any
    ) -> None:
        super().__init__(plane, rank)
        if every < 1:
            raise ConfigError(f"every is {every}: steps between two syncs, at least 1")
        self._sync, self._every, self._options = CheckpointSync(plane, **options), every, options
        self.report: SyncReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **members: Any) -> None:
        if args.world_size > 1:
            raise ConfigError(
                f"TRL trains in {args.world_size} processes: FleetSync reads the weights of one. Use AsyncGRPOTrainer "
                f"with BusWeightTransfer, which is given whole tensors"
            )
        if getattr(args, "use_vllm", False):
            raise ConfigError("use_vllm=True: TRL would sync a server of its own. Leave it False with rollout_func")
        adapter = adapter_of(members["model"])
        if adapter != self._sync.adapter:
            self._sync = CheckpointSync(self._plane, adapter=adapter, **self._options)
        self._sync.require_replicas()
        self._publish(state.global_step, members["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **members: Any) -> None:
        super().on_step_end(args, state, control)
        if state.global_step % self._every == 0:
            self._publish(state.global_step, members["model"])

    def _publish(self, step: int, model: torch.nn.Module) -> None:
        save = save_adapter if self._sync.adapter else save_weights
        self.report = self._sync.publish(f"step_{step}", partial(save, model))


def save_weights(model: Any, folder: Path) -> None:
    """Write a model's weights under the names of its checkpoints, in safetensors."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one for each step otherwise
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


class VllmRollouts:
    """For `GRPOTrainer(rollout_func=…)`: each batch of prompts is shared out among the replicas that serve.

    How to sample (`max_completion_length`, `temperature`, `top_p`, …) is in the trainer's configuration. Images and
    tools are not for it. Of a PEFT model, requests name the newest version of its adapter, on replicas that hold it.

    Args:
        plane: The open control plane.
        urls: Where this process reaches each replica's vLLM server, by the index of the replica; None for what their
            agents say (`ControlPlane.endpoints`).
        max_logprob_gap: If given, each logprob of vLLM is compared with the one that the trainer's own model computes,
            at the price of a forward pass. A larger difference ends the training: it was sampled from other weights, or
            in another precision. None to compare nothing.
        gate: Which completions are taken; a prompt whose completion is refused is sampled again. The servers must be
            launched with `--enable-scale-out`, but for adapters. None to take all, and count none.
        timeout: Seconds for one request, and for waiting while no replica serves.

    Attributes:
        replicas: Who sampled the newest batch.
        logprob_gaps: The largest difference in each batch.

    Raises:
        ConfigError: At the first batch: a replica has no URL, or an URL no vLLM.
        EngineError: A server refuses the requests, the logprobs differ, or each completion of a prompt is refused.
        AgentsMissing: No replica served for as long as the timeout.
    """

    def __init__(
        self,
        plane: ControlPlane,
        urls: Mapping[int, str] | None = None,
        *,
        max_logprob_gap: float | None = None,
        gate: Gate | None = None,
        timeout: float = 600.0,
    ) -> None:
        warn_of_unseen()
        self._rollouts = GatedRollouts(plane, urls, gate, timeout)
        self._adapter, self._max_gap = newest_of(plane), max_logprob_gap
        self.replicas: tuple[int, ...] = ()
        self.logprob_gaps: list[float] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return what `GRPOTrainer` asks for: `prompt_ids`, `completion_ids` and `logprobs`, a list for each prompt."""
        ids = [prompt_ids(prompt, trainer.processing_class, trainer.args) for prompt in prompts]
        adapter = self._adapter if adapter_of(trainer.model) else None
        completions = self._rollouts.generate(ids, sampling(trainer.args), adapter, taken=True)
        self.replicas = tuple(sorted({completion.replica for completion in completions}))
        if self._max_gap is not None:
            self._compare(ids, completions, trainer, self._max_gap)
        return {
            "prompt_ids": ids,
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [completion.logprobs for completion in completions],
        }

    def _compare(self, prompts: list[list[int]], completions: list[Rollout], trainer: Any, limit: float) -> None:
        gaps = logprob_gaps(trainer.model, prompts, completions, trainer.args.per_device_train_batch_size)
        by_replica: defaultdict[int, float] = defaultdict(float)
        for completion, gap in zip(completions, gaps, strict=True):
            by_replica[completion.replica] = max(by_replica[completion.replica], gap)
        self.logprob_gaps.append(max(gaps))
        if wrong := {replica: gap for replica, gap in by_replica.items() if not gap <= limit}:
            found = ", ".join(f"replica {replica} by {gap:.2g}" for replica, gap in sorted(wrong.items()))
            raise EngineError(
                f"vLLM's logprobs differ from the trainer's by more than {limit:g}: {found}. It serves other weights, "
                f"or computes in another precision (--dtype)"
            )


@torch.no_grad()
def logprob_gaps(model: Any, prompts: Sequence[list[int]], completions: Sequence[Rollout], batch: int) -> list[float]:
    """Largest difference of each completion's logprobs from those that the model computes for the same tokens."""
    training, gaps = model.training, []
    model.eval()
    for start in range(0, len(prompts), batch):
        part = list(zip(prompts[start : start + batch], completions[start : start + batch], strict=True))
        rows = [torch.tensor([*ids, *completion.token_ids]) for ids, completion in part]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
        lengths = torch.tensor([len(row) for row in rows], device=model.device)
        mask = torch.arange(padded.shape[1], device=model.device) < lengths[:, None]
        logprobs = model(input_ids=padded, attention_mask=mask.long()).logits.float().log_softmax(-1)
        for row, (ids, completion) in enumerate(part):
            at = slice(len(ids) - 1, len(ids) - 1 + len(completion.token_ids))
            tokens = torch.tensor(completion.token_ids, device=model.device)
            own = logprobs[row, at].gather(-1, tokens[:, None])[:, 0]
            theirs = torch.tensor([x if x is not None else float("nan") for x in completion.logprobs])
            gaps.append(float((own - theirs.to(own)).abs().max()) if completion.token_ids else 0.0)
    model.train(training)
    return gaps
