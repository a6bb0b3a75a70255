"""What the trainer wants of one replica, as a fold over the commands of the run.

The bus folds every command for every replica and sends the result to late joiners; each agent folds what it applies.
Both use the function below, so a snapshot and the history that it stands for can't mean different things.
Nothing here says what an engine *is* doing: that is observed by the agent (`schemas.events.EngineState`).
"""

from typing import Literal, assert_never

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import (
    Command,
    EngineCommand,
    EpochStart,
    Manifest,
    ProfileCommand,
    ProfilePlan,
    Source,
    UnknownCommand,
    WeightSync,
)
from schemas.identity import ROLLOUT, Count, Identity, InFlight, Positive, RolloutMode, Tag
from schemas.selection import profile_skip_reason

ALL_TAGS: frozenset[Tag] = frozenset({"weights", "kv_cache"})


class ProfileSession(Struct, frozen=True):
    """An open profiling session."""

    step: Count
    plan: ProfilePlan


class Committed(Struct, frozen=True):
    """The weights a replica serves: the newest that a commit named."""

    version: Positive
    source: Source
    manifest: Manifest | None


class Syncing(Struct, frozen=True):
    """A weight sync that is prepared or loading, not committed yet."""

    version: Positive
    source: Source
    manifest: Manifest | None
    in_flight: InFlight
    phase: Literal["prepare", "load"]


class Desired(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state one replica is to be in. The default is that of a run in which nothing was commanded yet.

    discard: weights that are asleep need not be kept.
    committed: None stands for the weights the engine was launched with.
    quarantined: version of the sync that left the replica out, else 0. It is paused until a later commit takes it in,
    that sync is aborted, or its agent starts anew.
    """

    generation: Literal["running", "paused"] = "running"
    pause_mode: InFlight = "abort"
    asleep: frozenset[Tag] = frozenset()
    discard: bool = False
    profile: ProfileSession | None = None
    committed: Committed | None = None
    sync: Syncing | None = None
    quarantined: Count = 0

    @property
    def version(self) -> int:
        """The committed version; 0 is what the engine was launched with."""
        return self.committed.version if self.committed is not None else 0

    @property
    def serving(self) -> bool:
        """May an engine that meets everything else of this state generate?"""
        return self.generation == "running" and not self.asleep and self.sync is None and self.quarantined == 0


def orphaned(desired: Desired) -> Desired:
    """What holds when the trainer is gone: committed weights, running, no session. Memory stays as it is.

    Waking memory could collide with a trainer that lost its bus but still owns the GPU, so only the trainer wakes.
    """
    if desired.generation == "running" and desired.profile is None and desired.sync is None:
        return desired
    return replace(desired, generation="running", pause_mode="abort", profile=None, sync=None)


def desired_after(desired: Desired, command: Command | UnknownCommand, targeted: bool, identity: Identity) -> Desired:
    """What is wanted of the replica, or training rank, after `command`.

    targeted: whether the command's target names it. An epoch's start concerns all.
    """
    if identity.role != ROLLOUT and not isinstance(command, ProfileCommand | EpochStart):
        return desired
    match command:
        case EngineCommand():
            unsettled = desired.sync is not None or not targeted
            return desired if unsettled else _intend_engine(desired, command)
        case EpochStart():
            return orphaned(desired)
        case _ if not targeted:
            return desired
        case WeightSync():
            return _intend_sync(desired, command, identity)
        case ProfileCommand():
            return _intend_profile(desired, command, identity)
        case UnknownCommand():
            return desired
        case _:
            assert_never(command)


def _intend_profile(desired: Desired, command: ProfileCommand, identity: Identity) -> Desired:
    if command.action != "start":
        stopping = command.action == "stop" and desired.profile is not None
        return replace(desired, profile=None) if stopping else desired
    plan = command.plan_for(identity.role)
    if plan is None or profile_skip_reason(plan, command.step, identity) is not None:
        return desired
    session = ProfileSession(command.step, plan)  # another plan for the same step mends one that was refused
    return desired if desired.profile == session else replace(desired, profile=session)


def _intend_engine(desired: Desired, command: EngineCommand) -> Desired:
    match command.operation:
        case "flush" | "abort":
            return desired
        case "pause":
            return replace(desired, generation="paused", pause_mode=command.mode)
        case "resume":
            return replace(desired, generation="running", pause_mode="abort")
        case "sleep":
            asleep = desired.asleep | (command.tags or ALL_TAGS)
            return replace(desired, asleep=asleep, discard=desired.discard or (command.discard and "weights" in asleep))
        case "wake":
            asleep = desired.asleep - (command.tags or ALL_TAGS)
            return replace(desired, asleep=asleep, discard=desired.discard and "weights" in asleep)
        case _:
            assert_never(command.operation)


def _intend_sync(desired: Desired, command: WeightSync, identity: Identity) -> Desired:
    if identity.mode is RolloutMode.COLOCATED or command.version <= desired.version:
        return desired
    sync, source = desired.sync, command.source
    left_out = identity.replica in command.quarantine
    if command.phase == "prepare" and source is not None:
        return replace(
            desired, sync=Syncing(command.version, source, command.manifest, command.in_flight, phase="prepare")
        )
    if command.phase == "commit" and source is not None:
        committed = Committed(command.version, source, command.manifest)
        return replace(desired, committed=committed, sync=None, quarantined=command.version if left_out else 0)
    if command.phase == "abort":
        lifted = 0 if desired.quarantined == command.version else desired.quarantined
        return replace(desired, sync=None, quarantined=lifted)
    if left_out:
        return replace(desired, sync=None, quarantined=desired.quarantined or command.version)
    if sync is None or sync.version != command.version:
        return desired
    return replace(desired, sync=replace(sync, phase="load"))
