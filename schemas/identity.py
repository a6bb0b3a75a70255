"""Who an agent is: its place in the fleet, and the words that describe an engine."""

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=8192)]

Role = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
"""What an agent's process does in the job: `rollout`, or the name of a training role such as `actor` or `critic`."""
ROLLOUT: Final = "rollout"

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
    """The place of one agent: one node of one replica, or one rank of a training role.

    replica: index of the replica in the job; of a training rank, its global rank.
    node_rank: index of the node in its replica, below `nnodes`; 0 for a training rank.
    gpus_per_node: GPUs of this replica on each node; with `nnodes` it gives the replica's global ranks.
    role: `rollout`, or the training role, whose ranks have no engine: they are profiled, and skip everything else.
    """

    replica: Count
    node_rank: Count
    nnodes: Positive = 1
    gpus_per_node: Positive = 1
    mode: RolloutMode = RolloutMode.HYBRID
    role: Role = ROLLOUT

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank {self.node_rank} is not below nnodes {self.nnodes}: ranks are 0..nnodes-1")
        if self.role != ROLLOUT and (self.nnodes, self.gpus_per_node) != (1, 1):
            raise ValueError(f"a rank of role {self.role} has one GPU and is no node: leave nnodes and gpus_per_node 1")

    @property
    def unit(self) -> int | str:
        """What is brought to one state: a replica, by its index; or a training rank, by its name."""
        return self.replica if self.role == ROLLOUT else self.agent

    @property
    def agent(self) -> str:
        """The name used in reports, logs and on the command line: `0.1` for replica 0, node rank 1; `actor.3`."""
        return f"{self.replica}.{self.node_rank}" if self.role == ROLLOUT else f"{self.role}.{self.replica}"

    @property
    def global_ranks(self) -> range:
        """Replica r of world size w owns ranks r*w .. r*w+w-1 (`nnodes * gpus_per_node` GPUs, in node order)."""
        world = self.nnodes * self.gpus_per_node
        return range(self.replica * world, (self.replica + 1) * world)

    @property
    def node_ranks(self) -> range:
        """The global ranks on this node, in node order."""
        first = self.global_ranks.start + self.node_rank * self.gpus_per_node
        return range(first, first + self.gpus_per_node)


def replica_and_node(agent: str) -> tuple[int, int] | None:
    """From the name of a rollout agent; None for a training rank, whose name begins with its role."""
    replica, _, node_rank = agent.partition(".")
    return (int(replica), int(node_rank)) if replica.isdecimal() and node_rank.isdecimal() else None


def identity_of(agent: str) -> Identity:
    """The place with this name, as far as a name tells: a replica is taken to end with the node."""
    place = replica_and_node(agent)
    if place is not None:
        return Identity(replica=place[0], node_rank=place[1], nnodes=place[1] + 1)
    role, _, rank = agent.rpartition(".")
    return Identity(replica=int(rank), node_rank=0, role=role)
