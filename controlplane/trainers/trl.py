"""TRL on the bus: what is passed to the constructors of `GRPOTrainer` and `AsyncGRPOTrainer`.

`GRPOTrainer(rollout_func=VllmRollouts(…), callbacks=[FleetSync(…)])`: TRL calls the function for each batch of prompts,
and the callback at each step. With `use_vllm=False` nothing else in TRL generates or moves weights.

`AsyncGRPOTrainer(weight_transfer=BusWeightTransfer(…), rollout_worker=VllmRolloutWorker(…), callbacks=[BusSteps(…)])`:
TRL calls the transfer at the beginning and every `weight_sync_steps`, and drains the worker's queue.

Read from, and run with, trl 1.16.0 (`trainer/grpo_trainer.py`, `experimental/async_grpo/`) and transformers 5.23.0.
"""

import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import trl
from safetensors.torch import save_file
from transformers import TrainerCallback
from transformers.utils import logging

from controlplane.plane import ControlPlane
from controlplane.trainers.checkpoints import CheckpointSync
from controlplane.trainers.completions import CompletionsClient, Rollout
from schemas.errors import ConfigError, EngineError
from schemas.identity import InFlight
from schemas.logs import logger_of
from schemas.reports import SyncReport
from workers.profilers import TrainingRank

logger = logger_of("trainers")

SEEN: Final = ("1.16.0",)
"""Versions of TRL that this was run with."""
SHARD_BYTES: Final = 4 << 30
"""Tensors of a checkpoint are collected up to here before a file is written."""


def _warn_of_unseen() -> None:
    if trl.__version__ not in SEEN:
        logger.warning("trl %s was not seen before: rolloutctl was run with %s", trl.__version__, ", ".join(SEEN))


# --- steps and weights ------------------------------------------------------------------------------------------------


class BusSteps(TrainerCallback):  # type: ignore[misc]
    """Tells the bus where each step of a TRL trainer begins and ends: steps are profiled as configured.

    Step 1 is the first: `state.global_step` counts those completed. TRL generates and updates inside of a step.

    Args:
        plane: The open control plane.
        rank: The training rank of this process, if it is profiled too; each step is one of its stages.
    """

    def __init__(self, plane: ControlPlane, rank: TrainingRank | None = None) -> None:
        _warn_of_unseen()
        self._plane, self._rank = plane, rank
        self._stage = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stage.close()  # of a step that an exception cut off
        self._plane.begin_step(state.global_step + 1)
        self._stage.callback(self._plane.end_step)
        if self._rank is not None:
            self._stage.enter_context(self._rank.annotate("step"))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stage.close()


class FleetSync(BusSteps):
    """Steps, and the policy's weights to the fleet: before the first step, and after every `every` steps.

    What engines were launched with is never trusted. A sync that is aborted raises CommandFailed and so ends the
    training. For one training process: with more, weights have to be gathered, which `AsyncGRPOTrainer` does.

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
        self, plane: ControlPlane, *, rank: TrainingRank | None = None, every: int = 1, **options: Any
    ) -> None:
        super().__init__(plane, rank)
        if every < 1:
            raise ConfigError(f"every is {every}: steps between two syncs, at least 1")
        self._sync, self._every = CheckpointSync(plane, **options), every
        self.report: SyncReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **members: Any) -> None:
        if args.world_size > 1:
            raise ConfigError(
                f"TRL trains in {args.world_size} processes: FleetSync reads the weights of one. Use AsyncGRPOTrainer "
                f"with BusWeightTransfer, which is given whole tensors"
            )
        if getattr(args, "use_vllm", False):
            raise ConfigError("use_vllm=True: TRL would sync a server of its own. Leave it False with rollout_func")
        if hasattr(members["model"], "peft_config"):
            raise ConfigError("the model is a PEFT adapter, and engines load whole checkpoints: merge it")
        self._sync.require_replicas()
        self._publish(state.global_step, members["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **members: Any) -> None:
        super().on_step_end(args, state, control)
        if state.global_step % self._every == 0:
            self._publish(state.global_step, members["model"])

    def _publish(self, step: int, model: torch.nn.Module) -> None:
        self.report = self._sync.publish(f"step_{step}", lambda folder: save_weights(model, folder))


class BusWeightTransfer:
    """For `AsyncGRPOTrainer(weight_transfer=…)`: weights reach all replicas or none, whatever else rolls out for it.

    TRL's own leaves a server paused and half updated when a transfer fails. A sync of the bus has its pause and its
    resume inside, so `pause` and `resume` do nothing.

    Args:
        plane: The open control plane. Checkpoints are written below its `checkpoints`.
        in_flight: As TRL's own, `keep` freezes running requests. Those are then of neither version alone: the cache
            behind them is the old weights'. Train on the engine's logprobs for them, as this trainer does.
        options: `keep`, `quorum` and `timeout`, see `CheckpointSync`.

    Attributes:
        report: Of the newest sync.
    """

    def __init__(self, plane: ControlPlane, *, in_flight: InFlight = "keep", **options: Any) -> None:
        _warn_of_unseen()
        self._sync = CheckpointSync(plane, in_flight=in_flight, **options)
        self._count = itertools.count()
        self.report: SyncReport | None = None

    def init_weight_transfer(self) -> None:
        self._sync.require_replicas()

    def pause(self) -> None:
        """Nothing: the sync pauses, once the weights are there."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        name = f"update_{next(self._count)}"
        self.report = self._sync.publish(name, lambda folder: save_tensors(iterator, folder))

    def resume(self) -> None:
        """Nothing: the sync resumed."""

    def destroy(self) -> None:
        """Nothing: the bus outlives the training."""


def save_weights(model: Any, folder: Path) -> None:
    """Write a model's weights under the names of its checkpoints, in safetensors."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one for each step otherwise
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def save_tensors(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write named tensors in safetensors files, each as soon as it is large enough."""
    shard: dict[str, torch.Tensor] = {}
    count = itertools.count(1)

    def write() -> None:
        save_file(shard, folder / f"model-{next(count):05}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(held.nbytes for held in shard.values()) >= SHARD_BYTES:
            write()
    write()


# --- rollouts ---------------------------------------------------------------------------------------------------------


class VllmRollouts:
    """For `GRPOTrainer(rollout_func=…)`: each batch of prompts is shared out among the replicas that serve.

    How to sample (`max_completion_length`, `temperature`, `top_p`, …) is in the trainer's configuration. Images and
    tools are not for it.

    Args:
        plane: The open control plane.
        urls: Where this process reaches each replica's vLLM server, by the index of the replica.
        max_logprob_gap: If given, each logprob of vLLM is compared with the one that the trainer's own model computes,
            at the price of a forward pass. A larger difference ends the training: it was sampled from other weights, or
            in another precision. None to compare nothing.
        timeout: Seconds for one request, and for having nobody who serves.

    Attributes:
        replicas: Who sampled the newest batch.
        logprob_gaps: The largest difference in each batch.

    Raises:
        ConfigError: At the first batch: a replica has no URL, or an URL no vLLM.
        EngineError: A server refuses the requests, or the logprobs differ.
        AgentsMissing: Nobody served for as long as the timeout.
    """

    def __init__(
        self,
        plane: ControlPlane,
        urls: Mapping[int, str],
        *,
        max_logprob_gap: float | None = None,
        timeout: float = 600.0,
    ) -> None:
        _warn_of_unseen()
        self._client = CompletionsClient(plane.serving, urls, timeout=timeout)
        self._max_gap = max_logprob_gap
        self.replicas: tuple[int, ...] = ()
        self.logprob_gaps: list[float] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return what `GRPOTrainer` asks for: `prompt_ids`, `completion_ids` and `logprobs`, a list for each prompt."""
        ids = [prompt_ids(prompt, trainer.processing_class, trainer.args) for prompt in prompts]
        completions = self._client.generate(ids, sampling(trainer.args))
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


def prompt_ids(prompt: Any, tokenizer: Any, args: Any) -> list[int]:
    """Token ids of a prompt: of a plain string, or of messages by the tokenizer's chat template."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    templated = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(args.chat_template_kwargs or {})
    )
    return list(templated["input_ids"])


def sampling(args: Any) -> dict[str, Any]:
    """The fields of a request that TRL's configuration asks for."""
    fields = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
    }
    chosen = {name: value for name, value in fields.items() if value is not None}
    return chosen | (getattr(args, "generation_kwargs", None) or {})


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


class VllmRolloutWorker:
    """For `AsyncGRPOTrainer(rollout_worker=…)`: samples, scores and queues, on a thread of this process.

    TRL's own asks one server. This one shares the prompts out among the replicas that serve, as `VllmRollouts` does.
    It scores each group against its mean and standard deviation, as TRL's own does. No tools.

    Args:
        plane: The open control plane.
        urls: Where this process reaches each replica's vLLM server, by the index of the replica.
        args: The trainer's configuration.
        dataset: Rows with a `prompt`; their other columns are passed to the reward functions.
        reward_funcs: Functions of `prompts`, `completions`, `completion_ids` and the columns; they return floats.
        tokenizer: The trainer's `processing_class`.
        timeout: Seconds for one request, and for having nobody who serves.
    """

    def __init__(
        self,
        plane: ControlPlane,
        urls: Mapping[int, str],
        *,
        args: Any,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: Sequence[Callable[..., list[float]]],
        tokenizer: Any,
        timeout: float = 600.0,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._client = CompletionsClient(plane.serving, urls, timeout=timeout)
        self._args, self._dataset, self._rewards, self._tokenizer = args, dataset, reward_funcs, tokenizer
        self._version, self._groups = 0, itertools.count()
        self._ending = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rolloutctl-rollouts", daemon=True)
        self._progress = time.monotonic()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() - self._progress > stale_after_s:
            raise EngineError(f"no rollout has ended for {stale_after_s:g} s")

    def _run(self) -> None:
        try:
            rows = itertools.chain.from_iterable(itertools.repeat(self._dataset))
            while not self._ending.is_set():
                wanted = self._args.per_device_train_batch_size * self._args.gradient_accumulation_steps
                self._roll(list(itertools.islice(rows, max(1, wanted // self._args.num_generations))))
        except Exception as error:  # raised by check_health, in the trainer's thread
            self._failure = error

    def _roll(self, rows: list[Mapping[str, Any]]) -> None:
        """Sample and score one group for each row, and hand the samples over as the trainer takes them."""
        size, version = self._args.num_generations, self._version
        ids = [prompt_ids(row["prompt"], self._tokenizer, self._args) for row in rows]
        completions = self._client.generate([one for one in ids for _ in range(size)], sampling(self._args))
        self._progress = time.monotonic()
        for number, (row, prompt) in enumerate(zip(rows, ids, strict=True)):
            group = completions[number * size : (number + 1) * size]
            for sample in self._scored(row, prompt, group, version):
                self._put(sample)

    def _scored(self, row: Mapping[str, Any], prompt: list[int], group: list[Rollout], version: int) -> Iterator[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # GRPOTrainer does not need it

        ids = [completion.token_ids for completion in group]
        texts: list[Any] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        if not isinstance(row["prompt"], str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        asked = {"prompts": [row["prompt"]] * len(group), "completions": texts, "completion_ids": ids}
        columns = {name: [value] * len(group) for name, value in row.items() if name != "prompt"}
        rewards = np.sum([reward(**asked, **columns) for reward in self._rewards], axis=0, dtype=float)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        name = next(self._groups)
        for completion, text, reward, advantage in zip(group, texts, rewards, advantages, strict=True):
            sampled = len(completion.token_ids)
            yield RolloutSample(
                prompt=row["prompt"],
                completion=text,
                input_ids=np.asarray([*prompt, *completion.token_ids], dtype=np.int64),
                completion_mask=np.asarray([0] * len(prompt) + [1] * sampled, dtype=np.int64),
                old_log_probs=np.asarray([0.0] * len(prompt) + completion.logprobs, dtype=np.float32),
                advantage=float(advantage),
                model_version=version,
                group_id=name,
                metrics={"reward": float(reward), "reward_std": float(rewards.std())},
                enqueued_at=time.time(),
            )

    def _put(self, sample: Any) -> None:
        """Wait for room, as long as the training lasts."""
        while not self._ending.is_set():
            try:
                return self.rollout_buffer.put(sample, timeout=1)
            except queue.Full:
                self._progress = time.monotonic()  # the trainer is slow, not the engines
