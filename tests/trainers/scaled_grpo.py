"""TRL's `GRPOTrainer`, unmodified, trains while its fleet of vLLM servers is scaled 2 → 3 → 1 → 2: a program of
`test_trl.py`.

`python scaled_grpo.py OUT VLLM`, in TRL's environment, writes what each step saw to OUT/result.json. The bus assigns
the index of each agent, and knows the address of its server from it. Each change begins in a step, while its requests
run. `synced` after VLLM leaves the fleet at two: an operator syncs while the requests of each step run.
"""

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from controlplane import ControlPlane
from controlplane.trainers.trl import FleetSync, VllmRollouts
from tests.engines.servers import free_port

OUT = Path(sys.argv[1])
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "grpo_vllm.py"), run_name="example")
LENGTH, EOS = 32, 256
SYNCED = sys.argv[3:] == ["synced"]
STEPS_MAX = 8 if SYNCED else 400
"""The fleet has its last size long before."""
SYNCS = 3
"""In the midst of a step."""


class Fleet:
    """Agents that launch a vLLM each, and what changes their number."""

    def __init__(self, bus: str) -> None:
        self._bus, self._started = bus, 0
        self.agents: list[subprocess.Popen[bytes]] = []
        self.leaving: list[subprocess.Popen[bytes]] = []

    def grow(self) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        server = [*EXAMPLE["SERVER"].split(), "--model", OUT / "model", "--port", url.rpartition(":")[2]]
        place = ["--bus", self._bus, "--replica", "auto", "--drain", 60, "--engine", "vllm", "--url", url]
        place += ["--checkpoints", OUT / "new", "--state-dir", OUT / "state"]
        name, self._started = f"agent-{self._started}.log", self._started + 1
        self.agents.append(self._run(name, "agent", *place, "--launch", "--", *server))

    def drain(self, replica: int) -> None:
        """By an operator's hand: the agent of the replica ends by itself."""
        self.leaving += [self._run("drain.log", "drain", replica, "--grace", 60, "--bus", self._bus)]

    @staticmethod
    def _run(log: str, *words: object) -> subprocess.Popen[bytes]:
        with open(OUT / log, "wb") as out:
            command = [sys.executable, "-m", "controlplane.cli", *map(str, words)]
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)


def changes(fleet: Fleet, plane: ControlPlane) -> Iterator[bool]:
    """Change the fleet, one change after the other: each is begun by one step, and seen to be whole by a later one."""

    def until(replicas: set[int]) -> Iterator[bool]:
        while set(plane.serving()) != replicas:
            yield False
        yield from [False] * 2  # steps of the whole fleet

    if SYNCED:
        yield from [False] * STEPS_MAX
    yield from until({0, 1})
    fleet.grow()
    yield from until({0, 1, 2})
    fleet.drain(1)
    fleet.agents[2].terminate()
    fleet.leaving += fleet.agents[1:]
    yield from until({0})
    while any(process.poll() is None for process in fleet.leaving):
        yield False
    fleet.grow()
    yield from until({0, 1})
    yield True


class Synced(VllmRollouts):
    """While its requests run, an operator syncs the weights that are served, and again."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        with ThreadPoolExecutor() as operator:
            synced = operator.submit(self._sync)
            answer = super().__call__(prompts, trainer)
            synced.result()
        return answer

    def _sync(self) -> None:
        newest = max((OUT / "new").glob("step_*"), key=lambda folder: folder.stat().st_mtime_ns)
        for _ in range(SYNCS):
            plane.sync_weights(None, newest.name, timeout=60).wait().raise_unless_committed()


class Steps(TrainerCallback):  # type: ignore[misc]
    """Writes down each step, and changes the fleet while its requests run."""

    def __init__(self, plane: ControlPlane, fleet: Fleet, sync: FleetSync, rollouts: VllmRollouts) -> None:
        self._plane, self._sync, self._rollouts = plane, sync, rollouts
        self._changes, self._whole = changes(fleet, plane), False
        self.seen: list[dict[str, Any]] = []

    def roll(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        before = self._plane.serving()
        self._whole = next(self._changes)
        answer = self._rollouts(prompts, trainer)
        report = self._sync.report
        assert report is not None
        self.seen.append(
            {
                "served": sorted({*before, *self._plane.serving()}),
                "asked": list(self._rollouts.replicas),
                "gap": self._rollouts.logprob_gaps[-1],
                "whole": sum(len(ids) == LENGTH or ids[-1] == EOS for ids in answer["completion_ids"]),
                "sync": [report.version, report.status, *map(list, (report.loaded, report.quarantined))],
                "unproven": list(report.unproven),
            }
        )
        return answer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = self._whole


def train(plane: ControlPlane, fleet: Fleet) -> dict[str, Any]:
    prompts = Dataset.from_dict({"prompt": [f"{number:02}: " for number in range(64)]})
    cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    sizes = {"per_device_train_batch_size": 64, "max_completion_length": LENGTH, "max_steps": STEPS_MAX}
    rate = {"learning_rate": 1e-3, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    sync, rollouts = FleetSync(plane), (Synced if SYNCED else VllmRollouts)(plane, max_logprob_gap=1e-4)
    steps = Steps(plane, fleet, sync, rollouts)
    bus = {"callbacks": [sync, steps], "rollout_func": steps.roll, "processing_class": tokenizer}
    config = GRPOConfig(output_dir=str(OUT / "trl"), **sizes, **cpu, **rate)
    trainer = GRPOTrainer(model, EXAMPLE["in_turn"], config, prompts, **bus)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return {
        "steps": steps.seen,
        "serving": sorted(plane.serving()),
        "ended": [process.wait(60) for process in fleet.leaving],
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    (OUT / "new").mkdir()
    model, tokenizer = EXAMPLE["make_model"]()
    model.save_pretrained(OUT / "model")
    tokenizer.save_pretrained(OUT / "model")
    with ControlPlane("tcp://127.0.0.1:0", log=OUT / "run.db", checkpoints=OUT / "new") as plane:
        fleet = Fleet(plane.address)
        try:
            for replica in range(2):
                fleet.grow()
                plane.wait_for_agents(replica + 1, timeout=300).wait()
            (OUT / "result.json").write_text(json.dumps(train(plane, fleet)))
        finally:
            for agent in fleet.agents:
                agent.terminate()
            for agent in fleet.agents:
                agent.wait()
