"""GRPO with TRL, unmodified, on two vLLM servers, without a GPU: `make demo-vllm`.

A random model of a million parameters learns to write vowels and consonants in turn. The bus brings the weights of each
step to both servers, profiles step 3, and sees one server killed in step 6. Training goes on until it is back. On a
game day (`make demo-gameday`), what goes wrong is in gameday.toml instead.
"""

import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from controlplane import ControlPlane, ProfilerConfig
from controlplane.trainers.trl import FleetSync, VllmRollouts
from workers import TrainingRank

OUT, VLLM, PLAN = Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3:]
STEPS, KILL_IN, LETTERS = 44, 6, sorted(pre_tokenizers.ByteLevel.alphabet())
# The reward: the share of neighbours of which one is a small vowel and the other a small consonant.
VOWEL = {LETTERS.index(letter): letter in "aeiou" for letter in "abcdefghijklmnopqrstuvwxyz"}
SERVER = "env VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1"
SERVER += f" {VLLM} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --max-model-len 256 --max-num-seqs 64"
SERVER += " --dtype float32 --generation-config vllm --enforce-eager --distributed-executor-backend uni"
SERVER += " --enable-scale-out"  # for trainers with a gate: a route whose answers name versions


def make_model() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(LETTERS)} | {"<eos>": 256}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 256}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>", pad_token="<eos>")
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)), tokenizer


def start_agent(bus: str, replica: int, url: str) -> subprocess.Popen[bytes]:
    """Start an agent, which launches its server, restarts it when it dies, and ends it with itself."""
    server = [*SERVER.split(), "--model", OUT / "model", "--port", url.split(":")[-1]]
    place = ["--bus", bus, "--replica", replica, "--engine", "vllm", "--url", url, "--state-dir", OUT / "state"]
    place += ["--checkpoints", OUT / "new", "--profiler", OUT / "profile.yaml"]
    place += [word for plan in PLAN for word in ("--faults", plan)]
    command = [sys.executable, "-m", "controlplane.cli", "agent", *place, "--launch", "--", *server]
    with open(OUT / f"agent-{replica}.log", "wb") as log:
        return subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)


def in_turn(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [sum({VOWEL.get(a), VOWEL.get(b)} == {True, False} for a, b in pairwise(ids)) / 31 for ids in completion_ids]


class Narrator(TrainerCallback):  # prints the steps, kills a server in one, and ends the training when it is back
    def on_step_begin(self, args, state, control, **_):
        if state.global_step + 1 == KILL_IN and not PLAN:
            [child for child in psutil.Process(agents[1].pid).children(True) if VLLM in child.cmdline()[:1]][0].kill()
            print("the server of replica 1 gets SIGKILL", flush=True)

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            facts = state.global_step, logs["reward"], rollouts.replicas, rollouts.logprob_gaps[-1]
            print("step {}: reward {:.3f}, replicas {}, logprobs off by {:.0e}".format(*facts), flush=True)
            control.should_training_stop = state.global_step >= STEPS and rollouts.replicas == (0, 1)


if __name__ == "__main__":
    (OUT / "new").mkdir(parents=True)
    torch.manual_seed(0), torch.set_num_threads(1)
    model, tokenizer = make_model()
    model.save_pretrained(OUT / "model"), tokenizer.save_pretrained(OUT / "model")
    sections = f"roles: {{actor: {{}}}}\nsave_path: {OUT}/traces\ntimeout_ms: 120000\n"
    (OUT / "profile.yaml").write_text(f"steps: [3]\n{sections}")
    profiler = ProfilerConfig.from_yaml(OUT / "profile.yaml")
    prompts = Dataset.from_dict({"prompt": [f"{number:02}: " for number in range(64)]})
    cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    sizes = {"per_device_train_batch_size": 64, "max_completion_length": 32, "max_steps": 400, "learning_rate": 1e-3}
    rate = {"lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    agents, urls = [], {}
    with ControlPlane("tcp://127.0.0.1:0", log=OUT / "run.db", profiler=profiler, checkpoints=OUT / "new") as plane:
        try:
            for replica in (0, 1):
                with socket.create_server(("127.0.0.1", 0)) as free:
                    urls[replica] = f"http://127.0.0.1:{free.getsockname()[1]}"
                agents.append(start_agent(plane.address, replica, urls[replica]))
            plane.wait_for_agents(2, timeout=300).wait()
            actor = {"role": "actor", "rank": 0, "world_size": 1, "profiler": profiler}
            with TrainingRank(bus=plane.address, state_dir=OUT / "state", **actor) as rank:
                sync, rollouts = FleetSync(plane, rank=rank, quorum=1), VllmRollouts(plane, urls, max_logprob_gap=1e-4)
                bus = {"callbacks": [sync, Narrator()], "rollout_func": rollouts, "processing_class": tokenizer}
                trainer = GRPOTrainer(model, in_turn, GRPOConfig(**sizes, **cpu, **rate), prompts, **bus)
                trainer.remove_callback(PrinterCallback), trainer.train()
        finally:
            print("agents ended with", [agent.terminate() or agent.wait() for agent in agents])
    for command in (["log", "verify"], ["log", "replay"], ["timeline", "--traces", OUT / "traces"]):
        subprocess.run([sys.executable, "-m", "controlplane.cli", *command, OUT / "run.db"], check=True)
