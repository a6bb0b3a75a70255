"""Who an agent is: its place in the fleet, and the words that describe an engine."""

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=8192)]

Tag = Literal["weights", "kv_cache"]
"""A region of engine memory that can be released and resumed."""

InFlight = Literal["abort", "wait", "keep"]
"""What becomes of requests in flight at a pause: abort them, let them finish, or freeze and continue them later."""


class RolloutMode(StrEnum):
    """How a replica shares the machine with the trainer."""

    HYBRID = "hybrid"  # same GPUs, weights are synced
    STANDALONE = "standalone"  # own GPUs, weights are synced
    COLOCATED = "colocated"  # same GPUs, never synced: a judge or reward model


class Operation(StrEnum):
    """What an engine can be asked to do. An engine lists those it has; the rest is answered `failed(unsupported)`."""

    PROFILE = "profile"
    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"
    FLUSH = "flush"
    ABORT = "abort"
    LOAD = "load"

    __hash__ = str.__hash__  # Enum's own is written in Python, and every decision looks one up in a set


class Identity(Struct, frozen=True, kw_only=True):
    """The place of one agent: one node of one replica.

    replica: index of the replica in the job.   node_rank: index of the node in its replica, below `nnodes`.
    gpus_per_node: GPUs of this replica on each node; with `nnodes` it gives the replica's global ranks.
    """

    replica: Count
    node_rank: Count
    nnodes: Positive = 1
    gpus_per_node: Positive = 1
    mode: RolloutMode = RolloutMode.HYBRID

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank {self.node_rank} is not below nnodes {self.nnodes}: ranks are 0..nnodes-1")

    @property
    def agent(self) -> str:
        """The name used in reports, logs and on the command line, e.g. `0.1` for replica 0, node rank 1."""
        return f"{self.replica}.{self.node_rank}"

    @property
    def global_ranks(self) -> range:
        """Replica r of world size w owns ranks r*w .. r*w+w-1 (`nnodes * gpus_per_node` GPUs, in node order)."""
        world = self.nnodes * self.gpus_per_node
        return range(self.replica * world, (self.replica + 1) * world)
