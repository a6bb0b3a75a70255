"""For `AsyncGRPOTrainer`: its transfer of weights, and its worker that fills the queue of samples."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from controlplane.plane import ControlPlane
from controlplane.trainers.checkpoints import CheckpointSync
from controlplane.trainers.completions import NewestAdapter, Rollout, again_and_again
from controlplane.trainers.gate import Gate, GatedQueue, GatedRollouts
from controlplane.trainers.trl.adapters import ADAPTER, active_of, adapter_of, newest_of, save_adapter
from controlplane.trainers.trl.steps import BusSteps, prompt_ids, sampling
from schemas.errors import ConfigError, EngineError
from schemas.identity import InFlight
from schemas.reports import SyncReport

SHARD_BYTES: Final = 4 << 30
"""Tensors of a checkpoint are collected up to here before a file is written."""


class BusWeightTransfer(BusSteps):
    """For `AsyncGRPOTrainer(weight_transfer=…)`: weights reach all replicas or none, whatever else rolls out for it.

    TRL's own leaves a server paused and half updated when a transfer fails. A sync of the bus has its pause and its
    resume inside, so `pause` and `resume` pause nothing.

    It may be among the trainer's `callbacks`, too: then it has the steps, as `BusSteps`, and of a PEFT model it syncs
    the adapter alone. Else TRL merges the adapter, and whole weights are synced.

    Args:
        plane: The open control plane. Checkpoints are written below its `checkpoints`.
        in_flight: As TRL's own, `keep` freezes running requests. Their first tokens are the old weights', the rest the
            new ones'. Train on the engine's logprobs for them, as this trainer does.
        options: `keep`, `quorum` and `timeout`, see `CheckpointSync`.

    Attributes:
        report: Of the newest sync.
    """

    def __init__(self, plane: ControlPlane, *, in_flight: InFlight = "keep", **options: Any) -> None:
        super().__init__(plane)
        self._sync, self._options = CheckpointSync(plane, in_flight=in_flight, **options), options
        self._count = itertools.count()
        self._model: Any = None  # whose adapter is synced alone
        self.report: SyncReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **members: Any) -> None:
        adapter = adapter_of(members["model"])
        if not adapter:
            return
        if args.world_size > 1:
            raise ConfigError(
                f"TRL trains in {args.world_size} processes: there the adapter can't be synced alone, since TRL merges "
                f"it in each. Without BusWeightTransfer among the callbacks, merged weights are synced"
            )
        if not self._sync.adapter:
            if self.report is not None:
                raise ConfigError("merged weights were synced before: pass BusWeightTransfer in callbacks= at once")
            self._sync = CheckpointSync(self._plane, adapter=adapter, **self._options)
        self._model = members["model"]  # TRL's own callback, which begins the first transfer, comes after this one

    def init_weight_transfer(self) -> None:
        self._sync.require_replicas()
        if self._model is None and ADAPTER in self._plane.adapters():
            raise ConfigError(
                f"replicas serve the adapter {ADAPTER} of an earlier training, and rollouts would name it. Drop it "
                f"(`rolloutctl drop-adapter {ADAPTER}`), or pass BusWeightTransfer in callbacks= too"
            )

    def pause(self) -> None:
        """Pause nothing: the sync does, if it must. TRL merges the active adapter next, and so rounds the base."""
        if self._model is not None:
            self._name = active_of(self._model)
            self._model.base_model.set_adapter([])  # nothing to merge

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        write = partial(save_tensors, iterator)
        if self._model is not None:
            self._model.set_adapter(self._name)
            write = partial(save_adapter, self._model)
        self.report = self._sync.publish(f"update_{next(self._count)}", write)

    def resume(self) -> None:
        """Nothing: the sync resumed."""

    def destroy(self) -> None:
        """Nothing: the bus outlives the training."""


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


class VllmRolloutWorker:
    """For `AsyncGRPOTrainer(rollout_worker=…)`: samples, scores and queues, on a thread of this process.

    TRL's own asks one server. This one shares the prompts out among the replicas that serve, as `VllmRollouts` does.
    It scores each group against its mean and standard deviation, as TRL's own does. No tools.

    Args:
        plane: The open control plane.
        urls: Where this process reaches each replica's vLLM server, by the index of the replica; None for what their
            agents say (`ControlPlane.endpoints`).
        args: The trainer's configuration.
        dataset: Rows with a `prompt`; their other columns are passed to the reward functions. It is read again and
            again, so it can't be an iterator that is used up.
        reward_funcs: Functions of `prompts`, `completions`, `completion_ids` and the columns; they return floats.
        tokenizer: The trainer's `processing_class`.
        gate: Which samples are taken. Each is judged before it is scored, and sampled again if it is refused; and when
            the trainer takes it, and left out if it is refused then. The servers must be launched with
            `--enable-scale-out`, but for adapters. None to take all, and count none.
        timeout: Seconds for one request, and for waiting while no replica serves.
    """

    def __init__(
        self,
        plane: ControlPlane,
        urls: Mapping[int, str] | None = None,
        *,
        args: Any,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: Sequence[Callable[..., list[float]]],
        tokenizer: Any,
        gate: Gate | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._rollouts, self._plane = GatedRollouts(plane, urls, gate, timeout), plane
        wanted = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._rows_at_once = max(1, wanted // args.num_generations)
        at_once = self._rows_at_once * args.num_generations
        self.rollout_buffer: queue.Queue[Any] = GatedQueue(self._rollouts, args.queue_maxsize, at_once)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._adapter: NewestAdapter | None = None
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
        if self._thread.is_alive():
            self._thread.join(15.0)  # as TRL's own does: what is in flight is judged, and counted

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() - self._progress > stale_after_s:
            raise EngineError(f"no rollout has ended for {stale_after_s:g} s")

    def _run(self) -> None:
        try:
            if ADAPTER in self._plane.adapters():  # the first transfer has ended
                self._adapter = newest_of(self._plane)
            rows = again_and_again(self._dataset)
            while not self._ending.is_set():
                self._roll(list(itertools.islice(rows, self._rows_at_once)))
        except Exception as error:  # raised by check_health, in the trainer's thread
            self._failure = error

    def _roll(self, rows: list[Mapping[str, Any]]) -> None:
        """Sample and score one group for each row, and hand the samples over as the trainer takes them."""
        size, version = self._args.num_generations, self._version
        ids = [prompt_ids(row["prompt"], self._tokenizer, self._args) for row in rows]
        asked = [one for one in ids for _ in range(size)]
        completions = self._rollouts.generate(asked, sampling(self._args), self._adapter, taken=False)
        self._progress = time.monotonic()
        for number, (row, prompt) in enumerate(zip(rows, ids, strict=True)):
            group = completions[number * size : (number + 1) * size]
            for judged in zip(self._scored(row, prompt, group, version), group, strict=True):
                self._put(judged)

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

    def _put(self, judged: tuple[Any, Rollout]) -> None:
        """Wait for room, as long as the training lasts."""
        while not self._ending.is_set():
            try:
                return self.rollout_buffer.put(judged, timeout=1)
            except queue.Full:
                self._progress = time.monotonic()  # the trainer is slow, not the engines
