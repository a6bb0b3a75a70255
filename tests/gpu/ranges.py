"""A training rank without a bus, for Nsight: `python -m tests.gpu.ranges FOLDER whole|discrete`.

Its kernels are told apart by their functions: `sin` before and after the session, `exp` and `tanh` in its two stages,
`cos` between them.
"""

import sys
from pathlib import Path

import torch

from schemas.commands import ProfilePlan
from tests.unit.rank_sessions import Commanded
from workers.profilers import annotate


def main(folder: str, how: str) -> None:
    tensor = torch.ones(64, device="cuda")
    with Commanded(Path(folder)) as rank:
        tensor.sin()
        rank.start(ProfilePlan(tool="nsys", discrete=how == "discrete"))
        with annotate("rollout"):
            tensor.exp()
        tensor.cos()
        with annotate("update"):
            tensor.tanh()
        rank.stop()
        tensor.sin()
    torch.cuda.synchronize()
    sys.stdout.write("trained to the end\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
