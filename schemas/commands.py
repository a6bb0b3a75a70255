"""What a trainer may ask of its rollout engines. Pure data; each docstring is the contract of its message.

Bodies are tagged maps: a tag is for ever, a new field is optional and has a default. `Command` is the closed union
that travels inside an envelope; a reader that does not know a tag answers `failed(unsupported)`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from schemas.identity import ROLLOUT, Count, Identity, InFlight, Name, Positive, Role, Tag

RelativePath = Annotated[str, Meta(max_length=512)]
"""A path relative to a root that the *agent* configures. Never absolute, no `..`: the agent refuses both."""


class Window(Struct, frozen=True, omit_defaults=True):
    """Forward steps to record, counted from the session's start, 0-based and half open: [start, end).

    end: None for the end of the session.
    """

    start: Count
    end: Positive | None = None

    def __post_init__(self) -> None:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"window {self} is empty: end must be larger than start")

    def __str__(self) -> str:
        return f"[{self.start}, {'…' if self.end is None else self.end})"


class Schedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Mini-batches of a training rank that torch's profiler records, as `torch.profiler.schedule` counts them."""

    active: Positive
    wait: Count = 0
    warmup: Count = 0
    repeat: Count = 0
    skip_first: Count = 0


class TorchMemory(Struct, frozen=True, kw_only=True, tag="torch_memory", omit_defaults=True):
    """Options of tool `torch_memory`: `torch.cuda.memory._record_memory_history`, dumped as a snapshot at the stop.

    snapshot_steps: profiled steps that one snapshot covers.
    """

    max_entries: Positive = 100_000
    context: Literal["state", "alloc", "all"] | None = "all"
    stacks: Literal["python", "all"] = "all"
    snapshot_steps: Positive = 1


class Npu(Struct, frozen=True, kw_only=True, tag="npu", omit_defaults=True):
    """Options of tool `npu` (`torch_npu.profiler`). analysis: parse what was recorded at the stop, which takes long."""

    level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    analysis: bool = False


class PrecisionDebugger(Struct, frozen=True, kw_only=True, tag="precision_debugger", omit_defaults=True):
    """Options of tool `precision_debugger` (`msprobe.pytorch.PrecisionDebugger`).

    config_path: on the rank's machine.   stages: those that are watched; None for all.   strict: an unknown stage is
    an error.
    """

    config_path: Annotated[str, Meta(max_length=512)] = ""
    stages: frozenset[Name] | None = None
    strict: bool = False


ToolOptions = TorchMemory | Npu | PrecisionDebugger
Activity = Literal["cpu", "cuda", "memory", "npu"]


class Finish(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What becomes of the traces after the last profiled step.

    relocate: those of the ranks asked for are moved to the traces' root, under names that tell replica and rank.
    hook: the command that an agent was started with is run, by agents of profiled ranks; hook_all_ranks: by all;
    hook_ranks: by those that own one of these global ranks. No command ever comes over the bus.
    """

    relocate: bool = False
    hook: bool = False
    hook_all_ranks: bool = False
    hook_ranks: frozenset[Count] = frozenset()


class ProfilePlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to profile. Who is profiled is decided from `enabled`, `steps`, `ranks` and `replicas`, by each agent itself.

    steps: global training steps that are profiled; None for every step a command names.
    ranks: global GPU ranks; a replica takes part when it owns one of them, and only their traces are told; None for
    all.   replicas: instead, or as well: indices of replicas.
    window: forward steps of an engine; None records from start to stop.
    discrete: a training rank makes one trace of each annotated stage, instead of one of the whole session. An engine
    has one session either way.   schedule: of a training rank's mini-batches.
    layout: of the directories, see `schemas.desired.trace_directory`.
    """

    enabled: bool = True
    tool: Name = "torch"
    steps: frozenset[Count] | None = None
    ranks: frozenset[Count] | None = None
    replicas: frozenset[Count] | None = None
    window: Window | None = None
    activities: frozenset[Activity] = frozenset({"cpu"})
    with_stack: bool = False
    with_modules: bool = False
    record_shapes: bool = False
    by_stage: bool = False
    merge: bool = False
    discrete: bool = False
    schedule: Schedule | None = None
    options: ToolOptions | None = None
    layout: Literal["step", "verl_step", "verl"] = "step"
    finish: Finish = Finish()


class Checkpoint(Struct, frozen=True, tag="checkpoint", omit_defaults=True):
    """A directory of safetensors files on a disk that the trainer and the agents share, or in memory (/dev/shm).

    path: relative to the checkpoint root of each side (`--checkpoints` of the agent, `checkpoints=` of the plane).
    as_tensors: the agent reads the files and hands tensors to its engine, which then need not see the files. An engine
    that takes no tensors is given the path.
    """

    path: RelativePath
    as_tensors: bool = False


class Broadcast(Struct, frozen=True, kw_only=True, tag="broadcast", omit_defaults=True):
    """Weights that the trainer sends over a torch.distributed group, of which it is rank 0; nothing of them on the bus.

    host, port: of the group's store, on the trainer's side.   group: its name; another one whenever it is made anew,
    and no plain number: torch names groups of its own so.
    replicas: who is in it, in order: the first has ranks 1 to w, w being the GPUs of a replica, the next w more.
    Tensors are sent one by one, in ascending order of their names, as the engine's own checkpoint names them.
    path: the same weights as a checkpoint, for replicas that come late or have to go back; without it those wait for
    the next sync, because a broadcast is over when it is over.
    """

    host: Name
    port: Positive
    group: Name
    replicas: tuple[Count, ...]
    backend: Literal["nccl", "gloo"] = "nccl"
    path: RelativePath = ""


Source = Checkpoint | Broadcast
"""Where weights come from."""


def durable_source(source: Source) -> Checkpoint | None:
    """Where they can be had again at any time, or None."""
    if isinstance(source, Checkpoint):
        return source
    return Checkpoint(source.path) if source.path else None


class Manifest(Struct, frozen=True, kw_only=True):
    """What a source must hold, small enough for the wire whatever the model's size.

    layout: sha256 (hex) over the sorted (name, dtype, shape) of all tensors; content: sha256 over the same plus the
    bytes of each tensor, None when the trainer did not compute it. `schemas.safetensors.format` computes both.
    """

    tensors: Positive
    nbytes: Count
    layout: Annotated[str, Meta(max_length=64)]
    content: Annotated[str, Meta(max_length=64)] | None = None


class Target(Struct, frozen=True, omit_defaults=True):
    """Which replicas a command is for; None means all, and the training ranks as well."""

    replicas: frozenset[Count] | None = None

    def includes(self, identity: Identity) -> bool:
        """Is the command for the agent at this place?"""
        return self.replicas is None or identity.unit in self.replicas


class ProfileCommand(Struct, frozen=True, kw_only=True, tag="profile", omit_defaults=True):
    """Open or close one profiling session on every targeted replica and training rank, or see to what it left.

    step: global training step, >= 0; it names the directory of the traces.
    plan: for rollouts.   roles: for training ranks, by role; a role that is not named does not take part.
    check: can the plan be honoured? Asked when a run begins, so that what can't be is known before the first step.
    collect: after a stop, each node rank above 0 answers with the traces that its own ranks wrote to its own disk. The
    outcome of the stop has those of node rank 0.
    finish: after the last profiled step, what `Finish` says.   profiled_steps: for finish only.
    """

    action: Literal["start", "stop", "collect", "check", "finish"]
    step: Count
    plan: ProfilePlan = ProfilePlan()
    roles: dict[Role, ProfilePlan] = {}
    profiled_steps: tuple[Count, ...] = ()

    def plan_for(self, role: str) -> ProfilePlan | None:
        """The plan that is meant for an agent of this role, if any."""
        return self.plan if role == ROLLOUT else self.roles.get(role)


class WeightSync(Struct, frozen=True, kw_only=True, tag="weights", omit_defaults=True):
    """One phase of a weight sync. The coordinator issues the phases in order: prepare, load, then commit or abort.

    version: number of the new weights, larger than any committed before.
    source, manifest: on `prepare`, and again on `commit`, so that a replica which missed the first can still follow.
    in_flight: on `prepare`: what becomes of running requests.
    quarantine: on `load` the replicas that did not prepare, on `commit` those that did not load as well. They stay
    paused until a later commit leaves them out of this set, an abort of this sync, or a new start of their agent.
    Every other replica is to serve `version` from the commit on.
    """

    phase: Literal["prepare", "load", "commit", "abort"]
    version: Positive
    source: Source | None = None
    manifest: Manifest | None = None
    in_flight: InFlight = "abort"
    quarantine: frozenset[Count] = frozenset()

    def __post_init__(self) -> None:
        if (self.phase in ("prepare", "commit")) != (self.source is not None):
            raise ValueError(f"a source belongs to phases prepare and commit; this is {self.phase}")
        if self.quarantine and self.phase not in ("load", "commit"):
            raise ValueError(f"a quarantine belongs to phases load and commit; this is {self.phase}")


class EngineCommand(Struct, frozen=True, kw_only=True, tag="engine", omit_defaults=True):
    """One operation on the engine itself. Each is idempotent on the state: what holds already is `skipped(already)`.

    mode: for pause only.   tags: for sleep and wake only; empty means all.
    discard: for sleep only: the weights need not be kept in host memory. They are loaded again after the wake, from
    what is committed; with nothing committed the engine stays paused until the next sync. A colocated replica, which
    never syncs, keeps them.
    A sleeping engine does not generate; it generates again when all its memory is awake and nobody paused it.
    """

    operation: Literal["pause", "resume", "sleep", "wake", "flush", "abort"]
    mode: InFlight = "abort"
    tags: frozenset[Tag] = frozenset()
    discard: bool = False


class EpochStart(Struct, frozen=True, kw_only=True, tag="epoch_start"):
    """First record of a bus's life. What an earlier trainer left half done (pause, sync, profile) ends here."""

    previous_epoch: Count
    logic: Positive


Command = ProfileCommand | WeightSync | EngineCommand | EpochStart


class UnknownCommand(Struct, frozen=True, tag="unknown"):
    """Stands for a command whose tag this version does not know. Never on the wire."""

    tag: Annotated[str, Meta(max_length=64)]
