"""TRL on the bus: what is passed to the constructors of `GRPOTrainer` and `AsyncGRPOTrainer`.

`GRPOTrainer(rollout_func=VllmRollouts(…), callbacks=[FleetSync(…)])`: TRL calls the function for each batch of prompts,
and the callback at each step. With `use_vllm=False` nothing else in TRL generates or moves weights.

`AsyncGRPOTrainer(weight_transfer=BusWeightTransfer(…), rollout_worker=VllmRolloutWorker(…), callbacks=[BusSteps(…)])`:
TRL calls the transfer at the beginning and every `weight_sync_steps`, and drains the worker's queue.

Read from, and run with, trl 1.16.0 (`trainer/grpo_trainer.py`, `experimental/async_grpo/`) and transformers 5.23.0.
"""

from controlplane.trainers.gate import Gate
from controlplane.trainers.trl.async_grpo import BusWeightTransfer, VllmRolloutWorker
from controlplane.trainers.trl.grpo import FleetSync, VllmRollouts, logprob_gaps
from controlplane.trainers.trl.steps import BusSteps

__all__ = ["BusSteps", "BusWeightTransfer", "FleetSync", "Gate", "VllmRolloutWorker", "VllmRollouts", "logprob_gaps"]
