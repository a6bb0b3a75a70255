"""Rule 10 of the decision table: what each command means on the one node that may act, given the engine's state."""

from typing import Literal, assert_never

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import (
    AdapterDrop,
    AdapterSync,
    Checkpoint,
    Command,
    Drain,
    EngineCommand,
    EpochStart,
    ProfileCommand,
    ProfilePlan,
    Pushed,
    UnknownCommand,
    WeightSync,
    durable_source,
)
from schemas.desired import Desired, ProfileSession, Syncing
from schemas.events import (
    Abort,
    AwaitIdle,
    Call,
    CheckAdapter,
    CheckProfile,
    CollectTraces,
    FinishProfile,
    Flush,
    Observe,
    Returned,
    UnloadAdapter,
)
from schemas.identity import COLOCATED, Identity, Operation
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from schemas.selection import finish_skip_reason, profile_skip_reason, trace_directory
from workers.machine.lora import can_load, has_place, is_held, left, plan_load
from workers.machine.reconcile import attainable, is_stranded, lacks_memory, reconcile
from workers.machine.state import NOTHING_REPORTED, PAUSE_AND_RESUME, EngineState, with_engine_state
from workers.machine.weights import label_of

CallsOrOutcome = tuple[Call, ...] | Skipped | Failed
"""The calls that a command needs (empty if recording it is enough), or its outcome if there is nothing to do."""

_ABORT, _FLUSH = Abort(), Flush()
_NO_PLAN = ProfilePlan(enabled=False)

_ALL = frozenset(Operation)
_NEED_A_PAUSE = frozenset({Operation.LOAD, Operation.SLEEP, Operation.WAKE}) | PAUSE_AND_RESUME
_BY_NAME = {operation.value: operation for operation in Operation}  # calling the enum costs five times as much
_NEEDED: dict[type[Struct], Operation] = {
    ProfileCommand: Operation.PROFILE,
    WeightSync: Operation.LOAD,
    AdapterSync: Operation.ADAPTERS,
}


def is_disk_command(command: Command | UnknownCommand) -> bool:
    """Whether the command is about the traces on a node's disk. Then every node acts, whatever its engine."""
    return type(command) is ProfileCommand and command.action in ("collect", "finish")


def needs_no_engine(command: Command | UnknownCommand, engine: EngineState, identity: Identity) -> bool:
    """Whether it asks nothing of this engine, which then may be launching, busy or unable: a profile command that is
    not for it, or the drain of one that is not there.
    """
    if type(command) is Drain:
        return engine.tokenizer == "unknown"
    if type(command) is not ProfileCommand or command.action == "collect":
        return False
    if command.action == "stop":
        return not engine.may_profile(command.step)
    plan = command.plan_for(identity.role)
    if command.action == "finish":
        return finish_skip_reason(plan, identity) is not None
    return profile_skip_reason(plan, None if command.action == "check" else command.step, identity) is not None


def needs_free_engine(command: Command | UnknownCommand, engine: EngineState, identity: Identity) -> bool:
    """Whether a command can't be decided while a call is in flight. A stop can't: that call may be its start."""
    if isinstance(command, WeightSync) and identity.mode is COLOCATED:
        return False
    stopping = isinstance(command, ProfileCommand) and command.action == "stop"
    return stopping or not needs_no_engine(command, engine, identity)


def missing_operation(command: Command | UnknownCommand, engine: EngineState) -> Operation | Literal["unknown"] | None:
    """Return the operation that the command needs and the engine lacks, or None.

    A change of weights or memory needs a pause before it and a resume after it. No engine has what an unknown command
    needs.
    """
    if type(command) is UnknownCommand:
        return "unknown"
    if engine.operations == _ALL or is_disk_command(command):
        return None
    if isinstance(command, AdapterSync) and command.phase == "abort":
        return None  # it has loaded nothing
    needed = _BY_NAME[command.operation] if isinstance(command, EngineCommand) else _NEEDED.get(type(command))
    if needed is None:
        return None
    if needed not in engine.operations:
        return needed
    return min(PAUSE_AND_RESUME - engine.operations, default=None) if needed in _NEED_A_PAUSE else None


def calls_for(
    command: Command | UnknownCommand,
    before: Desired,
    after: Desired,
    syncing: int,
    engine: EngineState,
    identity: Identity,
) -> CallsOrOutcome:
    """Return what the primary does for a command that passed rules 1 to 9."""
    if engine.lost and not _needs_no_certainty(command, identity):
        return _lost(engine, identity)
    if isinstance(command, EngineCommand):  # not a pattern, which takes five times as long
        return _engine(command, before, after, syncing, engine, identity)
    match command:
        case WeightSync():
            return _weights(command, before, after, engine, identity)
        case AdapterSync():
            return _adapter(command, before, after, engine, identity)
        case AdapterDrop():
            return () if before != after else Skipped(Reason.ALREADY)
        case Drain():
            return _drain(command, after, engine, identity)
        case ProfileCommand():
            return _profile(command, after, engine, identity)
        case EpochStart() | UnknownCommand():  # the latter never passes rule 9
            return reconcile(after, engine, identity) or Skipped(Reason.ALREADY)
        case _:
            assert_never(command)


def _needs_no_certainty(command: Command | UnknownCommand, identity: Identity) -> bool:
    """Whether a command calls nothing that could kill an engine whose state is not known."""
    if isinstance(command, EngineCommand):
        return command.operation == "abort"
    if isinstance(command, AdapterSync):
        return command.phase == "abort"
    if isinstance(command, WeightSync):
        return identity.mode is COLOCATED
    return not (isinstance(command, ProfileCommand) and command.action == "start")


def _lost(engine: EngineState, identity: Identity) -> Failed:
    """Return the outcome of a command that needs to know what the engine does."""
    message = f"replica {identity.replica} is out of service: a call to {engine.name} was cut off or not answered, and "
    message += "making it again could kill the engine. It was not called: launch it again."
    return Failed(ErrorKind.UNKNOWN, with_engine_state(message, engine))


def finish_call(command: ProfileCommand, identity: Identity) -> FinishProfile:
    """Return the call by which this agent finishes profiling."""
    plan = command.plan_for(identity.role) or _NO_PLAN
    directories = tuple(trace_directory(step, plan, identity) for step in command.profiled_steps)
    return FinishProfile(plan, directories, command.profiled_steps)


def _profile(command: ProfileCommand, after: Desired, engine: EngineState, identity: Identity) -> CallsOrOutcome:
    if command.action == "stop":
        return reconcile(after, engine, identity) if engine.may_profile(command.step) else Skipped(Reason.NOT_PROFILING)
    plan = command.plan_for(identity.role) or _NO_PLAN
    if command.action == "finish":
        reason = finish_skip_reason(plan, identity)
        return Skipped(reason) if reason is not None else (finish_call(command, identity),)
    reason = profile_skip_reason(plan, None if command.action == "check" else command.step, identity)
    if reason is not None:
        return Skipped(reason)
    if command.action == "check":
        return (CheckProfile(plan),)
    if command.action == "collect":
        return _collect(ProfileSession(command.step, plan), identity)
    return _start(command.step, after, engine, identity)


def _collect(session: ProfileSession, identity: Identity) -> CallsOrOutcome:
    if identity.node_rank == 0:
        return Skipped(Reason.ALREADY)  # the outcome of the stop listed the traces
    return (CollectTraces(session, trace_directory(session.step, session.plan, identity)),)


def _start(step: int, after: Desired, engine: EngineState, identity: Identity) -> CallsOrOutcome:
    if engine.may_profile(step) and not engine.closing:
        if not engine.opening:
            return Skipped(Reason.ALREADY_PROFILING)
        engine = replace(engine, closing=True)  # nothing shows that it is open, and a second start would destroy it
    if after.quarantined or engine.torn:
        return _out_of_service(identity, after)
    return reconcile(after, engine, identity)


def _weights(
    command: WeightSync, before: Desired, after: Desired, engine: EngineState, identity: Identity
) -> CallsOrOutcome:
    if identity.mode is COLOCATED:
        return Skipped(Reason.MODE_NEVER_SYNCS)
    if command.version <= before.version:
        return Skipped(Reason.STALE_VERSION)
    left_out = identity.replica in command.quarantine
    if not left_out:
        failure = _cannot_sync(command, after, engine, identity)
        if failure is not None:
            return failure
    if command.phase == "abort" and after.quarantined:
        return Skipped(Reason.QUARANTINED)  # acted, or already, would mean that it serves again
    calls = reconcile(after, engine, identity, load_commanded=command.phase == "load")
    failure = stranded(command, after, engine, identity)
    if failure is not None:
        return failure
    if calls or (before != after and not left_out):
        return calls
    return Skipped(Reason.QUARANTINED if left_out else Reason.ALREADY)


def _adapter(
    command: AdapterSync, before: Desired, after: Desired, engine: EngineState, identity: Identity
) -> CallsOrOutcome:
    """An abort unloads nothing itself: the version is no longer wanted, and goes once no request runs on it."""
    adapter = command.adapter
    if identity.mode is COLOCATED:
        return Skipped(Reason.MODE_NEVER_SYNCS)
    if command.phase == "abort":
        return () if before != after else Skipped(Reason.ALREADY)
    known = before.adapters.get(adapter.name)
    if known is not None and adapter.version < known.newest:
        return Skipped(Reason.STALE_VERSION)
    if is_held(engine, adapter):
        return () if before != after else Skipped(Reason.ALREADY)
    if not can_load(engine):
        return Failed(
            ErrorKind.WEIGHTS_ASLEEP,
            f"replica {identity.replica} was asked to {command.phase} adapter {adapter.model} while memory of its "
            "engine is released. Nothing was touched: wake it first, then sync.",
        )
    if command.phase == "prepare":
        return (CheckAdapter(adapter),)
    frees = command.phase == "commit" and engine.generating is True and not has_place(engine, adapter)
    dropped = left(after, engine)[:1] if frees else ()
    return (*(UnloadAdapter(model, waited=False) for model in dropped), *plan_load(adapter, engine))


def _drain(command: Drain, after: Desired, engine: EngineState, identity: Identity) -> CallsOrOutcome:
    """Requests that a pause has frozen can't end by themselves: they are aborted at once."""
    if engine.tokenizer == "unknown":
        return ()
    frozen = engine.generating is False and engine.requests_kept and Operation.ABORT in engine.operations
    wait = (AwaitIdle(command.grace_ms),) if engine.generating is not False else (_ABORT,) if frozen else ()
    return (*wait, *reconcile(after, engine, identity))


def memory_missing(calls: tuple[Call, ...], engine: EngineState, identity: Identity) -> Failed | None:
    """Return the outcome of a command for which the trainer has not taken the memory back; None if it needs none."""
    if not any(lacks_memory(call, engine) for call in calls):
        return None
    return Failed(
        ErrorKind.WEIGHTS_ASLEEP,
        with_engine_state(
            f"the trainer's own data plane has released memory of replica {identity.replica} and not taken it back, so "
            "its engine was not called: take it back first.",
            engine,
        ),
    )


def stranded(
    command: Command | UnknownCommand | None, after: Desired, engine: EngineState, identity: Identity
) -> Failed | None:
    """Return the outcome of a sync's end that leaves the engine without weights that it may serve; None otherwise.

    Such a replica must not be taken for one that serves the committed version, so it never counts as acted.
    """
    if not isinstance(command, WeightSync) or command.phase not in ("commit", "abort"):
        return None
    if not is_stranded(after, engine, identity):
        return None
    message = f"replica {identity.replica} can't get version {after.version}: "
    message += (
        "the weights of its launch can't be loaded again."
        if after.committed is None
        else ("its source has no checkpoint (`path`) to load it from.")
    )
    return Failed(ErrorKind.QUARANTINED, with_engine_state(message, engine) + " It stays paused until the next sync.")


def _cannot_sync(command: WeightSync, after: Desired, engine: EngineState, identity: Identity) -> Failed | None:
    if command.phase != "abort" and "weights" in attainable(after, engine).asleep:
        return Failed(
            ErrorKind.WEIGHTS_ASLEEP,
            f"replica {identity.replica} was asked to {command.phase} version {command.version} while its weights are "
            "asleep. Nothing was touched: wake the weights first, then sync.",
        )
    if command.phase == "prepare" and isinstance(command.source, Pushed):
        return _cannot_be_pushed_to(command.source, command.version, engine, identity)
    if command.phase == "load" and (after.sync is None or after.sync.version != command.version):
        return Failed(
            ErrorKind.NO_SUCH_SYNC,
            f"replica {identity.replica} was asked to load version {command.version}, which it did not prepare. "
            f"Its engine was not touched and holds version {engine.version}.",
        )
    return None


def _cannot_be_pushed_to(source: Pushed, version: int, engine: EngineState, identity: Identity) -> Failed | None:
    """The label is the only proof of a push, so the engine must report it, and it must change."""
    if engine.label is None:
        return Failed(
            ErrorKind.UNSUPPORTED,
            f"{engine.name} does not report the label of its weights, so nothing would show that replica "
            f"{identity.replica} has got the pushed weights of version {version}. It was not touched: sync from a "
            "checkpoint, or use a version of the engine that has a label.",
        )
    held = label_of(engine.loaded) if engine.loaded is not None else None
    was_pushed = (
        engine.label_changed and engine.version_label is not None
    )  # since the last sync, not before it was first seen
    if engine.label == source.label and held != source.label and not was_pushed:
        return Failed(
            ErrorKind.SOURCE_REFUSED,
            f"replica {identity.replica} reports the label {source.label!r} already, for other weights (version "
            f"{engine.version}), so nothing would show that version {version} has been pushed. Its engine was not "
            "touched: give the weights another label.",
        )
    return None


def _engine(
    command: EngineCommand, before: Desired, after: Desired, syncing: int, engine: EngineState, identity: Identity
) -> CallsOrOutcome:
    if command.operation == "abort":
        return (_ABORT,)
    if command.operation == "flush":
        if "kv_cache" in engine.asleep | (engine.unknown & after.asleep):
            return Skipped(Reason.ALREADY)  # it was dropped when its memory was released
        calls = reconcile(after, engine, identity)
        if not calls:
            return (Observe(), _FLUSH) if engine.memory == "trainer" else (_FLUSH,)
        return calls if _FLUSH in calls else (*calls, _FLUSH)
    if syncing:
        return Failed(
            ErrorKind.SYNC_IN_PROGRESS,
            f"replica {identity.replica} was asked to {command.operation} in the middle of the sync to version "
            f"{syncing}. Nothing was touched: wait for its commit or abort.",
        )
    if command.operation == "resume" and after.quarantined:
        return _out_of_service(identity, after)
    calls = reconcile(after, engine, identity)
    return calls if calls or before != after else Skipped(Reason.ALREADY)


def _out_of_service(identity: Identity, desired: Desired) -> Failed:
    committed = desired.committed
    source = durable_source(committed.source) if committed and committed.version == desired.quarantined else None
    where = f" (checkpoint {source.path!r})" if source is not None else ""
    return Failed(
        ErrorKind.QUARANTINED,
        f"replica {identity.replica} is out of service since the sync to version {desired.quarantined or 'unknown'}"
        f"{where}: it stays paused until the next committed sync, or until its agent is restarted.",
    )


def acted(
    engine: EngineState,
    command: Command | UnknownCommand | None,
    calls: tuple[str, ...],
    reported: Returned = NOTHING_REPORTED,
    sync: Syncing | None = None,
) -> Acted:
    """Return the outcome of a command whose calls succeeded, with what they reported, in a sync if there is one."""
    if type(command) is WeightSync:
        took, source = reported.took, sync.source if sync is not None else None
        if command.phase == "load" and not took and isinstance(source, Checkpoint) and source.delta:
            took = f"whole: it takes no delta, or was not known to hold version {source.base}"
        return Acted(calls=calls, version=engine.version, digest=engine.digest, took=took)
    if reported is NOTHING_REPORTED:
        return Acted(calls=calls)
    return Acted(
        calls=calls,
        auto_stopped=reported.auto_stopped,
        traces=reported.traces,
        ranks_without_trace=reported.ranks_without_trace,
        still_running=reported.still_running,
    )


def merged(earlier: Returned, later: Returned) -> Returned:
    """Merge what two calls of one command reported about a profiling session, or about a load."""
    if not (later.auto_stopped or later.traces or later.ranks_without_trace or later.still_running or later.took):
        return earlier
    return Returned(
        took=later.took or earlier.took,
        auto_stopped=earlier.auto_stopped or later.auto_stopped,
        traces=earlier.traces + later.traces,
        ranks_without_trace=earlier.ranks_without_trace + later.ranks_without_trace,
        still_running=earlier.still_running or later.still_running,
    )
