"""One rank of a trainer, as a process: `python training_rank.py BUS RANK WORLD FOLDER`, then a step per line of input.

step 3      train it, and say `done 3`
hang 3      the same, but stay inside of a stage until the next line comes
"""

import sys
from pathlib import Path

import torch
from torch.profiler import record_function

from schemas.config import AgentConfig
from workers.profilers import TrainingRank, annotate

MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.01)


@annotate("compute_log_prob", role="actor")
def compute_log_prob() -> float:
    with torch.no_grad():
        return float(MODEL(torch.randn(4, 8)).sum())


def train(rank: TrainingRank, step: int, hang: bool) -> None:
    with record_function(f"global step {step}"):
        compute_log_prob()
        with rank.annotate("update_actor", scheduled=True):
            for index in range(3):
                with record_function(f"step {step} mini-batch {index}"):
                    OPTIMIZER.zero_grad()
                    MODEL(torch.randn(4, 8)).sum().backward()
                    OPTIMIZER.step()
                rank.mini_batch()
            if hang:
                say(f"inside {step}")
                sys.stdin.readline()


def say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(bus: str, number: str, world: str, folder: str) -> None:
    with TrainingRank(
        bus=bus,
        role="actor",
        rank=int(number),
        world_size=int(world),
        traces=Path(folder, "traces"),
        state_dir=Path(folder, "state"),
        config=AgentConfig(hello_retry_ms=20),
    ) as rank:
        say("up")
        for line in sys.stdin:
            how, step = line.split()
            train(rank, int(step), how == "hang")
            say(f"done {step}")
    say("down")


if __name__ == "__main__":
    main(*sys.argv[1:])
