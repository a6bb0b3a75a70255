"""What a trainer can ask of its rollout engines. Pure data: each docstring is the contract of its message.

On the wire a command is a tagged map. A tag never changes its meaning, and a new field is optional and has a default.
`Command` is the closed union that travels inside an envelope; an agent that does not know a tag answers
`failed(unsupported)`.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from schemas.identity import (
    ROLLOUT,
    TIME_MAX_MS,
    AdapterName,
    Count,
    Identity,
    InFlight,
    Name,
    Port,
    Positive,
    ReplicaIndex,
    Role,
    Tag,
)

RelativePath = Annotated[str, Meta(max_length=512)]
"""A path below a root that each agent configures. An agent refuses absolute paths and `..`."""
DRAIN_MARGIN_MS: Final = 15_000
"""Time beyond the grace of a drain in which its replicas abort what still runs, and answer."""
Grace = Annotated[int, Meta(ge=0, le=TIME_MAX_MS - DRAIN_MARGIN_MS)]


class Window(Struct, frozen=True, omit_defaults=True):
    """Forward steps to record: the half-open range [start, end).

    Attributes:
        start: First step, counted from 0 at the start of the session.
        end: First step not recorded; None to record until the session stops.
    """

    start: Count
    end: Positive | None = None

    def __post_init__(self) -> None:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"window {self} is empty: end must be larger than start")

    def __str__(self) -> str:
        return f"[{self.start}, {'…' if self.end is None else self.end})"


class Schedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Mini-batches of a training rank to record, with the parameters of `torch.profiler.schedule`."""

    active: Positive
    wait: Count = 0
    warmup: Count = 0
    repeat: Count = 0
    skip_first: Count = 0


class TorchMemory(Struct, frozen=True, kw_only=True, tag="torch_memory", omit_defaults=True):
    """Options of tool `torch_memory`, which dumps a snapshot of CUDA's memory history when the session stops.

    Attributes:
        max_entries, context, stacks: As for `torch.cuda.memory._record_memory_history`.
    """

    max_entries: Positive = 100_000
    context: Literal["state", "alloc", "all"] | None = "all"
    stacks: Literal["python", "all"] = "all"
    snapshot_steps: Positive = 1


class Npu(Struct, frozen=True, kw_only=True, tag="npu", omit_defaults=True):
    """Options of tool `npu` (`torch_npu.profiler`).

    Attributes:
        analysis: Parse the recording when the session stops, which takes long.
    """

    level: Literal["level_none", "level0", "level1", "level2"] = "level0"
    analysis: bool = False


ToolOptions = TorchMemory | Npu
ProfileActivity = Literal["cpu", "cuda", "memory", "npu"]


class Finish(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happens to the traces after the last profiled step.

    The hook is a command that each agent was started with. It never comes over the bus.

    Attributes:
        relocate: Move the traces of the selected ranks to the traces root, under names with replica and rank.
        hook_all_ranks: Run it on all agents.
        hook_ranks: Run it on agents that own one of these global ranks.
    """

    relocate: bool = False
    hook: bool = False
    hook_all_ranks: bool = False
    hook_ranks: frozenset[Count] = frozenset()


class ProfilePlan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to profile, and what. `schemas.selection` decides which agents take part.

    Attributes:
        enabled: False to skip all profiling.
        tool: Profiling tool, see `schemas.selection`.
        steps: Global training steps to profile; None for every step that a command names.
        ranks: Global GPU ranks; None for all. A replica takes part if it owns one of them, and only their traces are
            reported.
        replicas: Indices of replicas, in place of `ranks` or in addition to them.
        window: Forward steps of an engine to record; None to record from start to stop.
        activities: What torch's profiler records.
        with_stack: Record Python stacks.
        with_modules: Record the module hierarchy.
        record_shapes: Record the shapes of operator inputs.
        by_stage: Record prefill and decode separately, where the engine can.
        merge: Merge the traces of all ranks, where the engine can.
        discrete: On a training rank, write one trace per annotated stage instead of one per session. An engine always
            has one session.
        schedule: Mini-batches of a training rank to record.
        options: Options of the tool, if it has any.
        layout: Directory layout, see `schemas.selection.trace_directory`.
        finish: What happens to the traces at the end.
    """

    enabled: bool = True
    tool: Name = "torch"
    steps: frozenset[Count] | None = None
    ranks: frozenset[Count] | None = None
    replicas: frozenset[ReplicaIndex] | None = None
    window: Window | None = None
    activities: frozenset[ProfileActivity] = frozenset({"cpu"})
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

    Attributes:
        path: Relative to the checkpoint root of each side (`--checkpoints` of the agent, `checkpoints=` of the plane).
        delta: A directory of safetensors files with those of the same tensors that differ in version `base`. A replica
            that is proven to hold that version may load these alone; any other loads `path`. Empty for none.
        base: The committed version that the delta was made from.
    """

    path: RelativePath
    delta: RelativePath = ""
    base: Count = 0

    def __post_init__(self) -> None:
        if bool(self.delta) != bool(self.base):
            raise ValueError(f"a delta needs its base, and a base a delta: this has {self.delta!r} and {self.base}")


class Broadcast(Struct, frozen=True, kw_only=True, tag="broadcast", omit_defaults=True):
    """Weights that the trainer, as rank 0, broadcasts over a torch.distributed group. No tensor travels on the bus.

    Tensors are sent one by one, in ascending order of their names, as the engine's own checkpoint names them.

    Attributes:
        host: Host of the group's store, on the trainer's side.
        port: Port of that store.
        group: Name of the group. Use a new name each time the group is created. It must not be a plain number, since
            torch itself uses those.
        replicas: Receivers, in the order of their ranks. With w GPUs per replica the first has ranks 1 to w, the next
            w+1 to 2w.
        backend: Backend of the group.
        path: The same weights as a checkpoint, for replicas that join late or have to load them again. Without it they
            wait for the next sync, because a broadcast can't be received later.
    """

    host: Name
    port: Port
    group: Name
    replicas: tuple[ReplicaIndex, ...]
    backend: Literal["nccl", "gloo"] = "nccl"
    path: RelativePath = ""


class Pushed(Struct, frozen=True, tag="pushed", omit_defaults=True):
    """Weights that the trainer's own data plane carries into the engines. Agents fetch nothing.

    The trainer pushes between prepare and the end of the load phase, while generation is paused, and ends a push before
    it aborts. A replica has loaded these weights once its engine reports their label as its own. One that still reports
    the label it had before counts as untouched: a push that breaks in the middle must not leave it so.

    Attributes:
        label: What an engine reports of its weights once it holds these: SGLang's and vLLM's `weight_version`, verl's
            `global_steps`. It names one set of weights: no other ones ever get the same label in a run. The bus refuses
            a label of other bytes, where both manifests have a digest; an agent does not take the label of weights that
            it knows for proof of later ones that were committed while it was away. **Not proven** without digests: in a
            sync whose label was used before, that a replica which has this label already got the weights now. They may
            be the same, synced again, and the engine shows no more than the label. The report's `reason` says so.
        path: The same weights as a checkpoint, for replicas that join late or have to load them again. Without it they
            wait for the next sync.
    """

    label: Name
    path: RelativePath = ""


EngineSource = Checkpoint | Broadcast
"""Where an engine gets new weights itself, when its agent asks it to load."""
Source = EngineSource | Pushed
"""Where weights come from."""


def without_delta(source: Source) -> Source:
    """Return the source of all of these weights, which identifies them however they came."""
    return Checkpoint(source.path) if isinstance(source, Checkpoint) and source.delta else source


def durable_source(source: Source) -> Checkpoint | None:
    """Return where these weights can be read at any later time; None if there is no checkpoint beside the source."""
    source = without_delta(source)
    if isinstance(source, Checkpoint):
        return source
    return Checkpoint(source.path) if source.path else None


class Manifest(Struct, frozen=True, kw_only=True):
    """What a source must hold. Small enough for the wire, whatever the size of the model.

    Attributes:
        tensors: Number of tensors.
        nbytes: Bytes of all tensors together.
        layout: sha256, in hex, over the sorted (name, dtype, shape) of all tensors. See `schemas.safetensors.digest`.
        content: sha256 over the same and the bytes of each tensor; None if the trainer did not compute it.
    """

    tensors: Positive
    nbytes: Count
    layout: Annotated[str, Meta(max_length=64)]
    content: Annotated[str, Meta(max_length=64)] | None = None


class AdapterVersion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of a LoRA adapter. It stands for the same bytes for ever.

    Engines get it under a name that no other version ever has, from a path that none of the 64 before it has: vLLM keys
    its prefix cache by both, mixes two versions in one sequence when it loads in place, and ends when files that it
    reads again have changed.

    Attributes:
        name: Of the adapter.
        version: Counts up from 1 for each adapter.
        path: Directory with `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes them, relative to the
            checkpoint root of each side.
        manifest: What its safetensors file must hold.
        config: sha256 of `adapter_config.json`, in hex; empty if it is not known.
        base: Version of the base weights that it belongs to; None for any.
    """

    name: AdapterName
    version: Positive
    path: RelativePath
    manifest: Manifest | None = None
    config: Annotated[str, Meta(max_length=64)] = ""
    base: Count | None = None

    @property
    def model(self) -> str:
        """What engines call it, and what a request names as its model: `policy-v7`."""
        return f"{self.name}-v{self.version}"


def split_model(model: str) -> tuple[str, str]:
    """Return the adapter and the version that an engine's name stands for; both empty if it is of no version."""
    name, _, version = model.rpartition("-v")
    return (name, version) if name and version.isdecimal() else ("", "")


class AdapterRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a sync of an adapter is asked with, beside its directory and version.

    Attributes:
        keep: How many versions replicas hold after the commit, the newest included.
    """

    name: AdapterName
    config: Annotated[str, Meta(max_length=64)] = ""
    base: Count | None = None
    keep: Positive = 2


class Target(Struct, frozen=True, omit_defaults=True):
    """Which replicas a command is for. None means all of them, and the training ranks.

    Attributes:
        replicas: By index.
    """

    replicas: frozenset[ReplicaIndex] | None = None

    def includes(self, identity: Identity) -> bool:
        """Whether the command is for this agent."""
        return self.replicas is None or identity.unit in self.replicas


class ProfileCommand(Struct, frozen=True, kw_only=True, tag="profile", omit_defaults=True):
    """Open or close one profiling session on every targeted replica and training rank, or handle its traces.

    Actions:
        check: Can this plan be recorded? Asked when a run begins, so that problems are known before the first step.
        start, stop: Open and close a session. The outcome of a stop has the traces of node rank 0.
        collect: After a stop, each node rank above 0 answers with the traces that its own ranks wrote to its disk.
        finish: After the last profiled step, do what `Finish` says.

    Attributes:
        action: One of those above.
        step: Global training step; names the directory of the traces.
        plan: Plan for rollout engines.
        roles: Plans for training ranks, by role. A role without a plan does not take part.
        profiled_steps: For `finish`: the steps that were profiled.
    """

    action: Literal["start", "stop", "collect", "check", "finish"]
    step: Count
    plan: ProfilePlan = ProfilePlan()
    roles: dict[Role, ProfilePlan] = {}
    profiled_steps: tuple[Count, ...] = ()

    def plan_for(self, role: str) -> ProfilePlan | None:
        """Return the plan for agents of this role, or None."""
        return self.plan if role == ROLLOUT else self.roles.get(role)


SyncPhase = Literal["prepare", "load", "commit", "abort"]
"""A sync prepares, loads, and then commits or aborts."""


class WeightSync(Struct, frozen=True, kw_only=True, tag="weights", omit_defaults=True):
    """One phase of a weight sync. The coordinator issues the phases in order: prepare, load, then commit or abort.

    From the commit on, every replica outside `quarantine` serves `version`.

    Attributes:
        version: Number of the new weights, larger than any committed before.
        source: Where the weights are. On `prepare`, and again on `commit` for replicas that missed `prepare`.
        manifest: What the source must hold, with `source`.
        in_flight: On `prepare`: what happens to running requests.
        quarantine: On `load`, the replicas that did not prepare; on `commit`, also those that did not load. They stay
            paused until a later commit without them in this set, an abort of this sync, or a restart of their agent.
    """

    phase: SyncPhase
    version: Positive
    source: Source | None = None
    manifest: Manifest | None = None
    in_flight: InFlight = "abort"
    quarantine: frozenset[ReplicaIndex] = frozenset()

    def __post_init__(self) -> None:
        if (self.phase in ("prepare", "commit")) != (self.source is not None):
            raise ValueError(f"a source belongs to phases prepare and commit; this is {self.phase}")
        if self.quarantine and self.phase not in ("load", "commit"):
            raise ValueError(f"a quarantine belongs to phases load and commit; this is {self.phase}")


class AdapterSync(Struct, frozen=True, kw_only=True, tag="adapter", omit_defaults=True):
    """One phase of a sync of a LoRA adapter, in the order of those of a weight sync. No phase pauses an engine.

    A replica that fails a phase is out for this version alone: it serves its base and its other adapters on.

    Attributes:
        phase: prepare: check the files. load: load it beside the older versions. commit: requests may name it from now
            on. abort: unload it.
        adapter: The version.
        keep: On `commit`: how many versions replicas hold from then on, the newest included.
    """

    phase: SyncPhase
    adapter: AdapterVersion
    keep: Positive = 2


class AdapterDrop(Struct, frozen=True, kw_only=True, tag="adapter_drop"):
    """Hold no version of an adapter any more."""

    name: AdapterName


class EngineCommand(Struct, frozen=True, kw_only=True, tag="engine", omit_defaults=True):
    """One operation on the engine itself. If the engine is in that state already, the answer is `skipped(already)`.

    A sleeping engine does not generate. It generates again once all of its memory is awake and nothing pauses it.

    Attributes:
        operation: What to do.
        mode: For pause: what happens to running requests.
        tags: For sleep and wake: regions of memory; empty for all.
        discard: For sleep: the weights need not be kept in host memory. After the wake the committed weights are loaded
            again; if none are committed, the engine stays paused until the next sync. A colocated replica, which never
            syncs, keeps its weights.
    """

    operation: Literal["pause", "resume", "sleep", "wake", "flush", "abort"]
    mode: InFlight = "abort"
    tags: frozenset[Tag] = frozenset()
    discard: bool = False


class EpochStart(Struct, frozen=True, kw_only=True, tag="epoch_start"):
    """First record of an epoch. Ends what an earlier trainer left unfinished: a pause, a sync, a profiling session."""

    previous_epoch: Count
    logic: Positive


class Drain(Struct, frozen=True, kw_only=True, tag="drain"):
    """Leave the fleet: running requests may end, the rest are aborted, and then the engine stays paused.

    The targeted replicas take part in no later command, and are retired once they have answered this one.

    Attributes:
        grace_ms: How long running requests may go on, counted from receipt.
    """

    grace_ms: Grace

    @property
    def timeout_ms(self) -> int:
        """Until when replicas that have not answered are retired all the same."""
        return self.grace_ms + DRAIN_MARGIN_MS


Command = ProfileCommand | WeightSync | AdapterSync | AdapterDrop | EngineCommand | Drain | EpochStart


class UnknownCommand(Struct, frozen=True, tag="unknown", omit_defaults=True):
    """Stands for a command that this version can't read. Never on the wire.

    Attributes:
        problem: What is wrong with it; empty if its tag is unknown, as that of a newer version is.
    """

    tag: Annotated[str, Meta(max_length=64)]
    problem: Annotated[str, Meta(max_length=200)] = ""


def sync_key(command: Command | UnknownCommand) -> str | None:
    """Return of which sync a command is a phase: the name of its adapter, or "" for base weights; None if of none."""
    if isinstance(command, AdapterSync):
        return command.adapter.name
    return "" if isinstance(command, WeightSync) else None
