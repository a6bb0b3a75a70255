"""The desired state of one replica: a fold over the commands of the run.

The bus folds all commands for each replica and sends the result to agents that join late; an agent folds the commands
that it applies. Both call `desired_after`, so a snapshot always means the same as the commands that it replaces.
What an engine is actually doing is not part of it: an agent observes that (`schemas.events.Observation`).
"""

from collections.abc import Mapping
from typing import Literal, assert_never

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import (
    AdapterDrop,
    AdapterSync,
    AdapterVersion,
    Command,
    Drain,
    EngineCommand,
    EpochStart,
    Manifest,
    ProfileCommand,
    ProfilePlan,
    Source,
    UnknownCommand,
    WeightSync,
    without_delta,
)
from schemas.identity import COLOCATED, OBSERVED, ROLLOUT, Count, Identity, InFlight, Positive, Tag
from schemas.selection import profile_skip_reason

ALL_TAGS: frozenset[Tag] = frozenset({"weights", "kv_cache"})


class ProfileSession(Struct, frozen=True):
    """A profiling session that should be open."""

    step: Count
    plan: ProfilePlan


class Committed(Struct, frozen=True):
    """The weights of the newest commit."""

    version: Positive
    source: Source
    manifest: Manifest | None


class Syncing(Struct, frozen=True):
    """A weight sync that is not committed yet."""

    version: Positive
    source: Source
    manifest: Manifest | None
    in_flight: InFlight
    phase: Literal["prepare", "load"]


class Adapter(Struct, frozen=True, omit_defaults=True):
    """What a replica should hold of one LoRA adapter.

    Attributes:
        versions: Committed versions, the oldest first. Requests name the last one; the others are for those that still
            name an older one. Empty once it was dropped, so that agents know what to unload.
        loading: The version that is being loaded and not committed yet.
    """

    versions: tuple[AdapterVersion, ...] = ()
    loading: AdapterVersion | None = None

    @property
    def newest(self) -> int:
        """The newest committed version; 0 if there is none."""
        return self.versions[-1].version if self.versions else 0


class Desired(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state that one replica should be in. The default is that of a run without commands.

    Attributes:
        discard: Sleeping weights need not be kept.
        committed: Weights to serve; None for those that the engine was launched with.
        quarantined: Version of the sync that quarantined the replica; 0 if none. The replica stays paused until a later
            commit includes it, that sync is aborted or loses its trainer, or its agent restarts.
        uncommitted: Weights that were last loaded while nothing was committed. A replica that took them has nothing to
            go back to: after an abort it stays paused until its trainer syncs again.
        fallback: Those weights, once that trainer is lost: a replica that has them may serve them until the first
            commit.
        draining: The replica leaves the fleet, and is retired soon. Nothing changes what is desired of it any more.
    """

    generation: Literal["running", "paused"] = "running"
    pause_mode: InFlight = "abort"
    asleep: frozenset[Tag] = frozenset()
    discard: bool = False
    profile: ProfileSession | None = None
    committed: Committed | None = None
    sync: Syncing | None = None
    quarantined: Count = 0
    uncommitted: Committed | None = None
    fallback: Committed | None = None
    adapters: Mapping[str, Adapter] = {}
    draining: bool = False

    @property
    def version(self) -> int:
        """The committed version; 0 for the weights of the launch."""
        return self.committed.version if self.committed is not None else 0

    @property
    def serving(self) -> bool:
        """Whether an engine in this state may generate."""
        stopped = self.asleep or self.quarantined or self.draining
        return self.generation == "running" and self.sync is None and not stopped


def orphaned(desired: Desired) -> Desired:
    """Return the desired state once the trainer is gone: committed weights, running, no session, no sync.

    A quarantine ends with the sync that it belongs to; that of a committed sync stays.

    Memory stays as it is. A trainer that lost its bus may still use the GPU, so only the trainer wakes memory.
    """
    lifted, uncommitted = desired.quarantined > desired.version, desired.uncommitted
    loading = any(adapter.loading for adapter in desired.adapters.values())
    idle = desired.profile is None and desired.sync is None and uncommitted is None and not loading
    if desired.draining or (desired.generation == "running" and idle and not lifted):
        return desired
    return replace(
        desired,
        generation="running",
        pause_mode="abort",
        profile=None,
        sync=None,
        quarantined=0 if lifted else desired.quarantined,
        uncommitted=None,
        fallback=uncommitted or desired.fallback,
        adapters={name: replace(adapter, loading=None) for name, adapter in desired.adapters.items()},
    )


def changes_nothing(command: Command | UnknownCommand) -> bool:
    """Return whether a command leaves the desired state of every replica as it was."""
    if isinstance(command, EngineCommand):
        return command.operation in ("flush", "abort")
    if isinstance(command, AdapterSync):
        return command.phase == "prepare"
    return isinstance(command, ProfileCommand) and command.action not in ("start", "stop")


def desired_after(desired: Desired, command: Command | UnknownCommand, targeted: bool, identity: Identity) -> Desired:
    """Return the desired state of a replica, or of a training rank, after the next command of the run.

    Args:
        desired: The state before the command.
        command: The next command.
        targeted: Whether the target of the command includes this unit. `EpochStart` applies in any case.
        identity: Any agent of the replica, or the training rank.
    """
    if desired.draining or (identity.mode is OBSERVED and not isinstance(command, Drain)):
        return desired
    if isinstance(command, EngineCommand):  # not a pattern, which takes five times as long
        ignored = not targeted or desired.sync is not None or identity.role != ROLLOUT
        return desired if ignored else _after_engine_command(desired, command)
    match command:
        case EpochStart():
            return orphaned(desired)
        case _ if not targeted:
            return desired
        case ProfileCommand():
            return _after_profile(desired, command, identity)
        case WeightSync():
            return desired if identity.role != ROLLOUT else _after_sync(desired, command, identity)
        case Drain():
            left = Desired(committed=desired.committed, asleep=desired.asleep, adapters=desired.adapters)
            return replace(left, generation="paused", draining=True) if identity.role == ROLLOUT else desired
        case AdapterSync() | AdapterDrop():
            return _after_adapter(desired, command) if identity.role == ROLLOUT and identity.syncs else desired
        case UnknownCommand():
            return desired
        case _:
            assert_never(command)


def requested_session(command: ProfileCommand, identity: Identity) -> ProfileSession | None:
    """Return the session that a profile start asks of this unit; None if it asks for none, or is no start."""
    plan = command.plan_for(identity.role)
    if command.action != "start" or plan is None or profile_skip_reason(plan, command.step, identity) is not None:
        return None
    return ProfileSession(command.step, plan)


def _after_profile(desired: Desired, command: ProfileCommand, identity: Identity) -> Desired:
    """A stop closes the session of its own step and no other."""
    if command.action == "stop":
        stopped = desired.profile is not None and desired.profile.step == command.step
        return replace(desired, profile=None) if stopped else desired
    session = requested_session(command, identity)  # a second start of the same step may carry another plan
    return desired if session is None or desired.profile == session else replace(desired, profile=session)


def _after_engine_command(desired: Desired, command: EngineCommand) -> Desired:
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


def _after_sync(desired: Desired, command: WeightSync, identity: Identity) -> Desired:
    if identity.mode is COLOCATED or command.version <= desired.version:
        return desired
    sync, source = desired.sync, command.source
    quarantined = identity.replica in command.quarantine
    match command.phase:
        case "prepare" if source is not None:
            prepared = Syncing(command.version, source, command.manifest, command.in_flight, phase="prepare")
            return replace(desired, sync=prepared)
        case "load" if quarantined:
            return replace(desired, sync=None, quarantined=desired.quarantined or command.version)
        case "load" if sync is not None and sync.version == command.version:
            whole = Committed(sync.version, without_delta(sync.source), sync.manifest)
            first = whole if desired.committed is None else None
            return replace(desired, sync=replace(sync, phase="load"), uncommitted=first)
        case "commit" if source is not None:
            committed = Committed(command.version, source, command.manifest)
            left_out = command.version if quarantined else 0
            desired = replace(desired, uncommitted=None, fallback=None)
            return replace(desired, committed=committed, sync=None, quarantined=left_out)
        case "abort":
            released = desired.quarantined == command.version
            return replace(desired, sync=None, quarantined=0 if released else desired.quarantined)
    return desired


def _after_adapter(desired: Desired, command: AdapterSync | AdapterDrop) -> Desired:
    """A version that is not newer than the committed one changes nothing."""
    if isinstance(command, AdapterDrop):
        return _with_adapter(desired, command.name, Adapter()) if command.name in desired.adapters else desired
    version = command.adapter
    adapter = desired.adapters.get(version.name, Adapter())
    match command.phase:
        case "load" if version.version > adapter.newest:
            return _with_adapter(desired, version.name, replace(adapter, loading=version))
        case "commit" if version.version > adapter.newest:
            versions = (*adapter.versions, version)[-command.keep :]
            return _with_adapter(desired, version.name, Adapter(versions))
        case "abort" if adapter.loading == version:
            return _with_adapter(desired, version.name, replace(adapter, loading=None))
    return desired


def _with_adapter(desired: Desired, name: str, adapter: Adapter) -> Desired:
    return replace(desired, adapters={**desired.adapters, name: adapter})
