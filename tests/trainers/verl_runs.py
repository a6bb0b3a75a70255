"""Runs of an unmodified `python -m verl.trainer.main_ppo` on this machine: GRPO, two training ranks, two replicas."""

import json
import os
from pathlib import Path
from typing import Any, Final

from tests.engines.models import save_model
from tests.engines.servers import Process
from tests.environments import ROOT, own_metadata, python

STANDINS: Final = Path(__file__).parent
"""Holds the package `verl_cpu`. verl's environment has a package `tests` of another project, which hides ours."""
STEPS: Final = 3
RUN_S: Final = 1000.0
"""Most of a run's time goes into imports: ten processes, ten seconds of work each."""

OPTIONS: Final = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "data.dataloader_num_workers=0",
    "data.shuffle=False",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
    "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
    "actor_rollout_ref.rollout.name=standin",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "reward.custom_reward_function.name=score",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
    "trainer.nnodes=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=False",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.logger=[console]",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.num_gpus=2",
    "+ray_kwargs.ray_init.include_dashboard=False",
)
PROFILED: Final = (
    "global_profiler.tool=torch",
    "global_profiler.profile_continuous_steps=True",
    "actor_rollout_ref.rollout.profiler.enable=True",
    "actor_rollout_ref.rollout.profiler.all_ranks=True",
    "actor_rollout_ref.rollout.profiler.tool_config.torch.contents=[cpu]",
)
"""Rollouts only. verl's servers record in discrete mode alone, which is off by default: the door turns it on."""

REWARD: Final = """
def score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(letter in "aeiou" for letter in solution_str) / (len(solution_str) or 1)
"""
TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def prepare(folder: Path) -> None:
    """Write the model, the prompts and the reward below `folder`."""
    model = save_model(folder / "model", seed=1)
    settings = model / "tokenizer_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE, "pad_token": "<eos>"})
    )
    prompts = [
        {
            "data_source": "vowels",
            "prompt": [{"role": "user", "content": f"say {word}"}],
            "ability": "spelling",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, word in enumerate(("aa", "bb", "cc", "dd", "ee", "ff", "gg", "hh"))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text(REWARD)


def main_ppo(folder: Path, name: str, *options: str, **variables: str) -> Process:
    """Start verl in `folder`. Its output goes to NAME.log."""
    of_run = (
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'prompts.jsonl'}",
        f"data.val_files={folder / 'prompts.jsonl'}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"global_profiler.save_path={folder / 'traces'}",
        f"hydra.run.dir={folder / 'hydra'}",
    )
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (own_metadata(folder / "installed"), ROOT, STANDINS))),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu.platforms",
        "VERL_PLATFORM": "cpu",
        "STANDIN_FOLDER": str(folder),
        "HF_HUB_OFFLINE": "1",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **variables,
    }
    command = [str(python("verl")), "-m", "verl.trainer.main_ppo", *OPTIONS, *of_run, *options]
    return Process(command, folder / f"{name}.log", environment, cwd=folder)


def diary(folder: Path, replica: int, what: str) -> list[dict[str, Any]]:
    """Return what the server of that replica noted."""
    file = folder / f"diary-{replica}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["what"] == what]
