"""Who an agent is, the terms that describe an engine, and the bounded types that every message is made of.

A bound is part of a type, so it is checked wherever a value is decoded. What a loop, a sleep or an allocation depends
on has a type of its own, with a bound that the loop, sleep or allocation can bear.
"""

from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

NUMBER_MAX: Final = 1 << 53
"""Largest number in a message. A few of them can be added, or multiplied by a thousand, within 64 bits."""
REPLICAS_MAX: Final = 1 << 20
NODES_MAX: Final = 1024
GPUS_PER_NODE_MAX: Final = 64
NAMES_CACHED: Final = 16_384
"""Agents' names that are not parsed again. A fleet's are, for each report and each status."""
TIME_MAX_MS: Final = 7 * 86_400_000
"""Longest timeout and longest interval: a week."""

Count = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Positive = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
ReplicaIndex = Annotated[int, Meta(ge=0, lt=REPLICAS_MAX)]
"""Index of a replica; of a training rank, its global rank."""
NodeRank = Annotated[int, Meta(ge=0, lt=NODES_MAX)]
NodeCount = Annotated[int, Meta(ge=1, le=NODES_MAX)]
GpuCount = Annotated[int, Meta(ge=1, le=GPUS_PER_NODE_MAX)]
Milliseconds = Annotated[int, Meta(ge=1, le=TIME_MAX_MS)]
"""A timeout or an interval."""
MillisecondsLeft = Annotated[int, Meta(ge=0, le=TIME_MAX_MS)]
"""What is left of a timeout."""
NANOSECONDS_MAX: Final = 1 << 62
Nanoseconds = Annotated[int, Meta(ge=-NANOSECONDS_MAX, le=NANOSECONDS_MAX)]
"""A clock reading, or the difference of two. The sum or difference of two still fits into 64 bits."""
Moment = Annotated[int, Meta(ge=-(1 << 43), le=1 << 43)]
"""A reading of a monotonic clock in milliseconds: 278 years. In nanoseconds it fits into 64 bits."""
Port = Annotated[int, Meta(ge=1, le=65_535)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Token = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$(?!\n)")]
Label = Annotated[str, Meta(max_length=200)]
"""An engine's own name of its weights; empty for none."""
LAUNCH_LABEL: Final = "default"
"""Label of the weights that an engine was launched with: that of SGLang and vLLM."""
Text = Annotated[str, Meta(max_length=8192)]
Url = Annotated[str, Meta(pattern=r"^(https?://\S{1,500})?$(?!\n)")]
"""Address of a server; empty if it has none."""
AdapterName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$(?!\n)")]
"""Name of a LoRA adapter. It becomes part of the names under which engines have its versions."""

Role = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}$(?!\n)")]
"""What an agent's process does in the job: `rollout`, or the name of a training role such as `actor` or `critic`."""
ROLLOUT: Final = "rollout"

Tag = Literal["weights", "kv_cache"]
"""A region of engine memory that can be released and resumed."""

InFlight = Literal["abort", "wait", "keep"]
"""What a pause does to running requests: abort them, wait until they finish, or freeze them and continue later."""

Digests = Literal["always", "announced", "never"]
"""After which loads an engine is asked for checksums of its weights: all, those of syncs with a digest, or none."""
OnLostBus = Literal["serve", "pause"]
"""What an engine does while its agent is cut off from the bus for longer than the lease."""


Memory = Literal["agent", "trainer"]
"""Who releases an engine's memory and takes it back: the agent, on command, or the trainer's own data plane."""


class RolloutMode(StrEnum):
    """How a replica shares GPUs and weights with the trainer."""

    HYBRID = "hybrid"  # same GPUs, weights are synced
    STANDALONE = "standalone"  # own GPUs, weights are synced
    COLOCATED = "colocated"  # same GPUs, never synced: a judge or reward model
    OBSERVED = "observed"  # another program commands it: its agent reads, and calls nothing


COLOCATED: Final = RolloutMode.COLOCATED
OBSERVED: Final = RolloutMode.OBSERVED
"""Each decision asks for these two, and to look a member up in an enum costs as much as to build an answer."""


class Operation(StrEnum):
    """What an engine can do. An engine lists its operations; a command that needs another one fails `unsupported`."""

    PROFILE = "profile"
    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"
    FLUSH = "flush"
    ABORT = "abort"
    LOAD = "load"
    ADAPTERS = "adapters"

    __hash__ = str.__hash__  # Enum's own is written in Python, and every decision looks one up in a set


class Identity(Struct, frozen=True, gc=False, kw_only=True):
    """The place of one agent: one node of one replica, or one rank of a training role.

    Attributes:
        replica: Index of the replica in the job. For a training rank, its global rank.
        node_rank: Index of the node in its replica, below `nnodes`. 0 for a training rank.
        nnodes: Nodes of this replica.
        gpus_per_node: GPUs of this replica on each node.
        mode: How the replica shares GPUs and weights with the trainer.
        role: `rollout`, or the training role. A training rank has no engine: it is profiled and skips everything else.
    """

    replica: ReplicaIndex
    node_rank: NodeRank
    nnodes: NodeCount = 1
    gpus_per_node: GpuCount = 1
    mode: RolloutMode = RolloutMode.HYBRID
    role: Role = ROLLOUT

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank {self.node_rank} is not below nnodes {self.nnodes}: ranks are 0..nnodes-1")
        if self.role != ROLLOUT and (self.nnodes, self.gpus_per_node) != (1, 1):
            raise ValueError(
                f"a rank of role {self.role} is one process with one GPU: leave nnodes, gpus_per_node at 1"
            )

    @property
    def syncs(self) -> bool:
        """Whether weight syncs are for this replica: it is no training rank, no judge, and not merely observed."""
        return self.role == ROLLOUT and self.mode is not COLOCATED and self.mode is not OBSERVED

    @property
    def shape(self) -> tuple[RolloutMode, int, int]:
        """What all nodes of a replica have in common: mode, nodes, GPUs per node."""
        return self.mode, self.nnodes, self.gpus_per_node

    @property
    def unit(self) -> int | str:
        """What commands target and desired states belong to: a replica, by index; or a training rank, by name."""
        return self.replica if self.role == ROLLOUT else self.agent

    @property
    def agent(self) -> str:
        """The name in reports, logs and on the command line: `0.1` for replica 0, node rank 1; or `actor.3`."""
        return f"{self.replica}.{self.node_rank}" if self.role == ROLLOUT else f"{self.role}.{self.replica}"

    @property
    def global_ranks(self) -> range:
        """The replica's GPUs: replica r with w = `nnodes * gpus_per_node` GPUs owns ranks r*w to r*w+w-1."""
        world = self.nnodes * self.gpus_per_node
        return range(self.replica * world, (self.replica + 1) * world)

    @property
    def ranks_on_node(self) -> range:
        """The global ranks on this node."""
        first = self.global_ranks.start + self.node_rank * self.gpus_per_node
        return range(first, first + self.gpus_per_node)


@lru_cache(NAMES_CACHED)
def replica_and_node(agent: str) -> tuple[int, int] | None:
    """Split the name of a rollout agent; return None for a training rank, whose name begins with its role."""
    replica, _, node_rank = agent.partition(".")
    return (int(replica), int(node_rank)) if replica.isdecimal() and node_rank.isdecimal() else None


@lru_cache(NAMES_CACHED)
def identity_of(agent: str) -> Identity:
    """Return the identity that an agent's name implies. It has no replica size, so `nnodes` is a lower bound."""
    place = replica_and_node(agent)
    if place is not None:
        return Identity(replica=place[0], node_rank=place[1], nnodes=place[1] + 1)
    role, _, rank = agent.rpartition(".")
    return Identity(replica=int(rank), node_rank=0, role=role)


def agent_of(peer: str) -> str:
    """Return the name of the agent behind a peer, which is `name/incarnation/connection`."""
    return peer.partition("/")[0]


def process_of(peer: str) -> str:
    """Return `name/incarnation` of a peer: one process, over whichever connection."""
    return "/".join(peer.split("/", 2)[:2])
