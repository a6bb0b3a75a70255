"""TRL's `AsyncGRPOTrainer`, unmodified, trains on two vLLM servers: a program of `test_trl.py`.

`python async_grpo.py OUT VLLM PORT PORT vllm`, in TRL's environment, writes what came out to OUT/result.json. With
`lora` in place of `vllm`, an adapter is trained, and synced alone. The trainer asks for a GPU in two places, and gets a
stand-in there: the device's name (`trl/trainer/utils.py`, for its figures about use), and FlashAttention 3
(`experimental/async_grpo/packing.py`, fetched from a hub), here in plain torch.
"""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import Qwen2ForCausalLM, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

from controlplane import ControlPlane
from controlplane.trainers.completions import CompletionsClient
from controlplane.trainers.trl import BusSteps, BusWeightTransfer, Gate, VllmRolloutWorker, logprob_gaps
from schemas.profiler.config import ProfilerConfig

STEPS = 6
OUT, PORTS, KIND = Path(sys.argv[1]), sys.argv[3:5], sys.argv[5]
LORA = KIND == "lora"
del sys.argv[3:]  # the example would take them for plans of a game day
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / f"grpo_{KIND}.py"), run_name="example")


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Causal attention in each segment; the last query sees all keys of its segment."""
    out = torch.empty_like(query)
    for q0, q1, k0, k1 in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
        groups = query.shape[1] // key.shape[1]
        keys, values = (part[k0:k1].repeat_interleave(groups, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], keys) * softmax_scale
        hidden = torch.ones(int(q1 - q0), int(k1 - k0), dtype=torch.bool).triu(1 + int((k1 - k0) - (q1 - q0)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[q0:q1] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def train(plane: ControlPlane, urls: dict[int, str], tokenizer: Any) -> dict[str, Any]:
    config = AsyncGRPOConfig(
        output_dir=str(OUT / "trl"),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=32,
        max_steps=STEPS,
        token_budget=0,  # else it asks a server of its own
        learning_rate=EXAMPLE["RATE"] if LORA else 1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    prompts = Dataset.from_dict({"prompt": [f"{number:02}: " for number in range(64)]})
    reward = EXAMPLE["in_turn"]
    transfer = BusWeightTransfer(plane, timeout=60)
    worker = VllmRolloutWorker(
        plane,
        urls,
        args=config,
        dataset=prompts,
        reward_funcs=[reward],
        tokenizer=tokenizer,
        gate=Gate(max_staleness=0),
    )
    versions: list[int] = []

    class Versions(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **members: Any) -> None:
            versions.append(transfer.report.version if transfer.report else 0)

    trainer = AsyncGRPOTrainer(
        str(OUT / "model"),
        reward,
        config,
        prompts,
        processing_class=tokenizer,
        callbacks=[transfer if LORA else BusSteps(plane), Versions()],
        weight_transfer=transfer,
        rollout_worker=worker,
        peft_config=EXAMPLE["LORA"] if LORA else None,
    )
    trainer.train()
    plane.step(STEPS + 1)  # what was judged in the last one is recorded
    assert transfer.report is not None
    return {
        "versions": versions,
        "committed": [transfer.report.version, list(transfer.report.loaded)],
        "labels": [httpx.get(f"{url}/weight_info", timeout=60).json()["weight_version"] for url in urls.values()],
        "adapters": [sorted(card["id"] for card in models_of(url) if card["parent"]) for url in urls.values()],
        "base": base_of(trainer.model) if LORA else None,
        **compare(plane, urls, trained_of(plane, trainer.model), tokenizer),
        "samples": next(line.strip() for line in str(plane.status()).splitlines() if "samples:" in line),
    }


def models_of(url: str) -> list[dict[str, Any]]:
    return list(httpx.get(f"{url}/v1/models", timeout=60).json()["data"])


def base_of(model: Any) -> bool:
    """Whether the base of a trained adapter is, to the bit, the one that the servers were launched with."""
    launched = Qwen2ForCausalLM.from_pretrained(OUT / "model").state_dict()
    names = {name: name.removeprefix("base_model.model.").replace(".base_layer", "") for name in model.state_dict()}
    held = {names[name]: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    return held.keys() == launched.keys() and all(held[name].equal(launched[name]) for name in held)


def trained_of(plane: ControlPlane, model: Any) -> Any:
    """The trained model, in a copy; of an adapter, as its newest version was saved."""
    if LORA:
        base = Qwen2ForCausalLM.from_pretrained(OUT / "model")
        return PeftModel.from_pretrained(base, plane.checkpoints / plane.adapters()["policy"].path)
    copy = EXAMPLE["make_model"]()[0]
    copy.load_state_dict(model.state_dict())
    return copy


def compare(plane: ControlPlane, urls: dict[int, str], trained: Any, tokenizer: Any) -> dict[str, float]:
    """Logprobs of both servers beside those of the trained weights, and beside those of others."""
    prompts = [tokenizer(f"{number:02}: ")["input_ids"] for number in range(16)]
    sampling = {"max_tokens": 32, "temperature": 1.0}
    adapter = (lambda: plane.adapters()["policy"]) if LORA else None
    rollouts = CompletionsClient(plane.serving, urls).generate(prompts, sampling, adapter)
    assert {rollout.replica for rollout in rollouts} == {0, 1}
    other = Qwen2ForCausalLM.from_pretrained(OUT / "model") if LORA else EXAMPLE["make_model"]()[0]
    found = {name: logprob_gaps(model, prompts, rollouts, 16) for name, model in (("same", trained), ("other", other))}
    return {name: max(gaps) for name, gaps in found.items()}


if __name__ == "__main__":
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    torch.cuda.get_device_name = lambda *_: "cpu"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = EXAMPLE["make_model"]()
    model.save_pretrained(OUT / "model")
    tokenizer.save_pretrained(OUT / "model")
    (OUT / "new").mkdir()
    sections = f"save_path: {OUT}/traces\ntimeout_ms: 120000\n"
    (OUT / "profile.yaml").write_text(f"steps: [2]\n{sections}")
    profiler = ProfilerConfig.from_yaml(OUT / "profile.yaml")
    agents: list[Any] = []
    with ControlPlane("tcp://127.0.0.1:0", log=OUT / "run.db", profiler=profiler, checkpoints=OUT / "new") as plane:
        try:
            urls = {replica: f"http://127.0.0.1:{port}" for replica, port in enumerate(map(int, PORTS))}
            agents += [EXAMPLE["start_agent"](plane.address, *place) for place in urls.items()]
            plane.wait_for_agents(2, timeout=300).wait()
            (OUT / "result.json").write_text(json.dumps(train(plane, urls, tokenizer)))
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait()
