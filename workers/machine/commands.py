"""Row 10 of the decision table: what each command means on the one node that may act, given the engine's state."""

from typing import Literal, assert_never

from msgspec import Struct

from schemas.commands import Command, EngineCommand, EpochStart, ProfileCommand, ProfilePlan, UnknownCommand, WeightSync
from schemas.desired import Desired, ProfileSession
from schemas.events import Abort, Call, CheckProfile, CollectTraces, FinishProfile, Flush
from schemas.identity import Identity, Operation, RolloutMode
from schemas.outcomes import ErrorKind, Failed, Reason, Skipped
from schemas.selection import finish_skip_reason, profile_skip_reason, trace_directory
from workers.machine.reconcile import STEERABLE, EngineState, attainable, reconcile

Verdict = tuple[Call, ...] | Skipped | Failed
"""Calls to make (none: the command is acted by being noted), or the outcome when there is nothing to do."""

_ABORT, _FLUSH = Abort(), Flush()
_NO_PLAN = ProfilePlan(enabled=False)

_NEEDED: dict[type[Struct], Operation] = {ProfileCommand: Operation.PROFILE, WeightSync: Operation.LOAD}
_UNDER_PAUSE = frozenset({Operation.LOAD, Operation.SLEEP, Operation.WAKE}) | STEERABLE
_ALL = frozenset(Operation)
_NEEDED_FOR: dict[str, Operation] = {
    "pause": Operation.PAUSE,
    "resume": Operation.RESUME,
    "sleep": Operation.SLEEP,
    "wake": Operation.WAKE,
    "flush": Operation.FLUSH,
    "abort": Operation.ABORT,
}


def is_disk_command(command: Command | UnknownCommand) -> bool:
    """Is it about the traces on a node's disk? Then every node acts, whatever its engine."""
    return type(command) is ProfileCommand and command.action in ("collect", "finish")


def needs_no_engine(command: Command | UnknownCommand, engine: EngineState, identity: Identity) -> bool:
    """Is it a profile command that asks nothing of this engine? Then it need not be up, idle, nor have a profiler."""
    if type(command) is not ProfileCommand or command.action == "collect":
        return False
    if command.action == "stop":
        return engine.session is None
    plan = command.plan_for(identity.role)
    if command.action == "finish":
        return finish_skip_reason(plan, identity) is not None
    return profile_skip_reason(plan, None if command.action == "check" else command.step, identity) is not None


def missing_operation(command: Command | UnknownCommand, engine: EngineState) -> Operation | Literal["unknown"] | None:
    """The operation that the engine would need for the command and does not have; None when it has all.

    What changes weights or memory needs a pause before and a resume after it. No engine has what an unknown command
    needs.
    """
    if isinstance(command, UnknownCommand):
        return "unknown"
    if is_disk_command(command):
        return None
    needed = _NEEDED_FOR[command.operation] if isinstance(command, EngineCommand) else _NEEDED.get(type(command))
    if needed is None or engine.operations >= _ALL:
        return None
    if needed not in engine.operations:
        return needed
    return min(STEERABLE - engine.operations, default=None) if needed in _UNDER_PAUSE else None


def verdict_on(
    command: Command | UnknownCommand,
    before: Desired,
    after: Desired,
    syncing: int,
    engine: EngineState,
    identity: Identity,
) -> Verdict:
    """What the primary does for `command`. before, after: what was to be brought about until now, and from now on.

    syncing: version of the sync in which the command comes, 0 if none; also of one that this replica gave up.
    """
    match command:
        case EngineCommand():
            return _engine(command, before, after, syncing, engine, identity)
        case WeightSync():
            return _weights(command, before, after, engine, identity)
        case ProfileCommand():
            return _profile(command, after, engine, identity)
        case EpochStart() | UnknownCommand():  # the latter never passes the gate
            return reconcile(after, engine, identity) or Skipped(Reason.ALREADY)
        case _:
            assert_never(command)


def _profile(command: ProfileCommand, after: Desired, engine: EngineState, identity: Identity) -> Verdict:
    if command.action == "stop":
        return reconcile(after, engine, identity) if engine.session is not None else Skipped(Reason.NOT_PROFILING)
    plan, step = command.plan_for(identity.role) or _NO_PLAN, command.step
    if command.action == "finish":
        reason = finish_skip_reason(plan, identity)
        return Skipped(reason) if reason is not None else (finish_call(command, identity),)
    reason = profile_skip_reason(plan, None if command.action == "check" else step, identity)
    if reason is not None:
        return Skipped(reason)
    if command.action == "check":
        return (CheckProfile(plan),)
    if command.action == "collect":
        if identity.node_rank == 0:
            return Skipped(Reason.ALREADY)  # told by the outcome of the stop
        return (CollectTraces(ProfileSession(step, plan), trace_directory(step, plan, identity)),)
    if engine.session is not None and engine.session.step == step:
        return Skipped(Reason.ALREADY_PROFILING)
    if after.quarantined or engine.torn:
        return Failed(ErrorKind.QUARANTINED, _out_of_service(identity, after))
    return reconcile(after, engine, identity)


def finish_call(command: ProfileCommand, identity: Identity) -> FinishProfile:
    """What the end of profiling asks of this agent, if anything."""
    plan = command.plan_for(identity.role) or _NO_PLAN
    directories = tuple(trace_directory(one, plan, identity) for one in command.profiled_steps)
    return FinishProfile(plan, directories, command.profiled_steps)


def _weights(command: WeightSync, before: Desired, after: Desired, engine: EngineState, identity: Identity) -> Verdict:
    if identity.mode is RolloutMode.COLOCATED:
        return Skipped(Reason.MODE_NEVER_SYNCS)
    if command.version <= before.version:
        return Skipped(Reason.STALE_VERSION)
    left_out = identity.replica in command.quarantine
    if command.phase != "abort" and not left_out and "weights" in attainable(before, engine).asleep:
        return Failed(
            ErrorKind.WEIGHTS_ASLEEP,
            f"replica {identity.replica} was asked to {command.phase} version {command.version} while its weights are "
            "asleep. Nothing was touched: wake the weights first, then sync.",
        )
    if command.phase == "load" and not left_out and (after.sync is None or after.sync.version != command.version):
        return Failed(
            ErrorKind.NO_SUCH_SYNC,
            f"replica {identity.replica} was asked to load version {command.version}, which it did not prepare. "
            f"Its engine was not touched and holds version {engine.version}.",
        )
    calls = reconcile(after, engine, identity, live=command.phase == "load")
    if calls or (before != after and not left_out):
        return calls
    return Skipped(Reason.QUARANTINED if left_out else Reason.ALREADY)


def _engine(
    command: EngineCommand, before: Desired, after: Desired, syncing: int, engine: EngineState, identity: Identity
) -> Verdict:
    if command.operation == "abort":
        return (_ABORT,)
    if command.operation == "flush":
        if "kv_cache" in engine.asleep:
            return Skipped(Reason.ALREADY)  # releasing the cache dropped it
        calls = reconcile(after, engine, identity)
        return calls if _FLUSH in calls else (*calls, _FLUSH)
    if syncing:
        return Failed(
            ErrorKind.SYNC_IN_PROGRESS,
            f"replica {identity.replica} was asked to {command.operation} in the middle of the sync to version "
            f"{syncing}. Nothing was touched: wait for its commit or abort.",
        )
    if command.operation == "resume" and after.quarantined:
        return Failed(ErrorKind.QUARANTINED, _out_of_service(identity, after))
    calls = reconcile(after, engine, identity)
    if calls or before != after:
        return calls
    return Skipped(Reason.ALREADY)


def _out_of_service(identity: Identity, desired: Desired) -> str:
    return (
        f"replica {identity.replica} is out of service since the sync to version {desired.quarantined or 'unknown'}: "
        "it stays paused until the next committed sync, or until its agent is restarted."
    )
