"""Parts of the desired state that this agent no longer pursues, because they failed or expired. Pure.

The desired state is a fold of the run's commands, and both sides of the wire must compute the same one. A failure is
therefore never folded in; it is kept beside it as `Suppressed`, and cleared when a command asks again or a snapshot
arrives. Only a session that is recorded is not opened again by a snapshot of the same epoch.
"""

from msgspec.structs import replace

from schemas import commands
from schemas.desired import ALL_TAGS, Desired, ProfileSession, requested_session
from schemas.events import (
    AwaitPush,
    Call,
    CheckAdapter,
    CheckSource,
    Fault,
    Load,
    LoadAdapter,
    Restore,
    Returned,
    StartProfile,
    StopProfile,
    UnloadAdapter,
)
from schemas.identity import Identity
from schemas.outcomes import Acted
from workers.machine.state import NOTHING_SUPPRESSED, Activity, AgentState, EngineState, Suppressed
from workers.machine.weights import holds_committed


def still_desired(desired: Desired, suppressed: Suppressed) -> Desired:
    """Return `desired` without what is suppressed."""
    if suppressed is NOTHING_SUPPRESSED:
        return desired
    dropped_out = desired.sync is not None and desired.sync.version == suppressed.sync
    return replace(
        desired,
        generation=suppressed.generation or desired.generation,
        asleep=(desired.asleep - suppressed.awake) | suppressed.asleep,
        profile=None if suppressed.session or desired.profile == suppressed.recorded else desired.profile,
        sync=None if dropped_out else desired.sync,
        quarantined=desired.quarantined or suppressed.quarantined,
    )


def clear_suppressed(
    suppressed: Suppressed, command: commands.Command | commands.UnknownCommand, before: Desired, identity: Identity
) -> Suppressed:
    """Return what stays suppressed after `command`, which targets this replica and may ask again for what failed.

    `before` is the desired state before the command.
    """
    match command:
        case commands.ProfileCommand():
            stopped = command.action == "stop" and before.profile is not None and before.profile.step == command.step
            requested = requested_session(command, identity) is not None
            return replace(suppressed, session=False, recorded=None) if stopped or requested else suppressed
        case commands.EngineCommand() if before.sync is None:
            return _clear_engine(suppressed, command)
        case commands.AdapterSync(phase="prepare"):  # older versions of the same adapter get another chance too
            others = (model for model in suppressed.adapters if commands.split_model(model)[0] != command.adapter.name)
            return replace(suppressed, adapters=frozenset(others))
        case commands.AdapterSync():
            return replace(suppressed, adapters=suppressed.adapters - {command.adapter.model})
        case commands.Drain():
            return replace(suppressed, generation=None)
        case commands.EpochStart():
            return Suppressed(quarantined=_of_committed(suppressed, before))
        case commands.WeightSync() if command.version > before.version and command.phase != "load":
            return _clear_sync(suppressed, command)
        case _:
            return suppressed


def without_trainer(suppressed: Suppressed, desired: Desired) -> Suppressed:
    """Return what stays suppressed when the lease expires: a quarantine ends with the sync that it belongs to."""
    return replace(suppressed, generation=None, quarantined=_of_committed(suppressed, desired))


def with_recorded(state: AgentState, activity: Activity, result: Returned | Fault) -> AgentState:
    """Return the state after a call that no command asked for: a session that had ended with its window is recorded.

    Its bus may still want it when it is back. If an earlier stop was not answered, it may have cut the recording short.
    """
    call = activity.calls[0]
    if not isinstance(call, StopProfile) or activity.trigger is not None or state.engine.closing:
        return state
    wanted = state.bus_lost or state.desired.profile == call.session
    if not (wanted and isinstance(result, Returned) and result.auto_stopped):
        return state
    return replace(state, suppressed=replace(state.suppressed, recorded=call.session, reported=result))


def left_by_window(command: commands.Command | commands.UnknownCommand, suppressed: Suppressed) -> Acted | None:
    """Return the outcome of a stop whose session had ended with its window: no other outcome names its traces."""
    recorded, left = suppressed.recorded, suppressed.reported
    if recorded is None or not isinstance(command, commands.ProfileCommand):
        return None
    if (command.action, command.step) != ("stop", recorded.step):
        return None
    return Acted(calls=(), auto_stopped=True, traces=left.traces, ranks_without_trace=left.ranks_without_trace)


def only_recorded(suppressed: Suppressed, wanted: ProfileSession | None) -> Suppressed:
    """Return what stays suppressed when everything else gets another chance."""
    kept = wanted is not None and wanted == suppressed.recorded
    return Suppressed(recorded=wanted, reported=suppressed.reported) if kept else NOTHING_SUPPRESSED


def with_room(suppressed: Suppressed) -> Suppressed:
    """Return what stays suppressed when the engine has room for other adapters, or may: it was launched again."""
    return replace(suppressed, adapters=frozenset()) if suppressed.adapters else suppressed


def _of_committed(suppressed: Suppressed, desired: Desired) -> int:
    return suppressed.quarantined if suppressed.quarantined <= desired.version else 0


def _clear_engine(suppressed: Suppressed, command: commands.EngineCommand) -> Suppressed:
    match command.operation:
        case "pause" | "resume":
            return replace(suppressed, generation=None)
        case "sleep" | "wake":
            tags = command.tags or ALL_TAGS
            return replace(suppressed, awake=suppressed.awake - tags, asleep=suppressed.asleep - tags)
        case _:
            return suppressed


def _clear_sync(suppressed: Suppressed, command: commands.WeightSync) -> Suppressed:
    """A sync asks every replica to take part, also with memory that a failed wake has left asleep: perhaps its weights
    could not be loaded. The end of a sync lifts a quarantine, and resumes where a resume failed before.
    """
    if command.phase == "prepare":
        return replace(suppressed, sync=0, asleep=frozenset())
    lifted = command.phase == "commit" or command.version == suppressed.quarantined
    return replace(
        suppressed,
        sync=0,
        quarantined=0 if lifted else suppressed.quarantined,
        generation=None if suppressed.generation == "paused" else suppressed.generation,
    )


def suppress(
    state: AgentState, failed: commands.Command | commands.UnknownCommand | Call, before: Desired | None = None
) -> AgentState:
    """Give up what a command, or a call that no command had asked for, did not bring about.

    What failed is not tried again until a command asks for it.

    A replica that refused to prepare, or found so when it joined, was not touched, and continues as before the sync
    until others load. One that does not load is quarantined: otherwise it could serve weights that were never
    committed, or go on with the old ones when others serve the new.
    """
    remaining = still_desired(state.desired, state.suppressed)
    return replace(state, suppressed=_after_failure(state.suppressed, failed, before, remaining, state.engine))


def _after_failure(
    suppressed: Suppressed,
    failed: commands.Command | commands.UnknownCommand | Call,
    before: Desired | None,
    remaining: Desired,
    engine: EngineState,
) -> Suppressed:
    match failed:
        case commands.ProfileCommand(action="start"):
            return _suppress_session(suppressed, failed.step, remaining, engine)
        case StartProfile():
            return _suppress_session(suppressed, failed.session.step, remaining, engine)
        case commands.EngineCommand() if before is not None:
            return replace(
                suppressed,
                generation=suppressed.generation if before.generation == remaining.generation else before.generation,
                awake=suppressed.awake | (remaining.asleep - before.asleep),
                asleep=suppressed.asleep | (before.asleep - remaining.asleep),
            )
        case commands.WeightSync(phase="prepare"):
            asleep = before.asleep - remaining.asleep if before is not None else frozenset()
            return replace(suppressed, sync=failed.version, asleep=suppressed.asleep | asleep)
        case CheckSource() if remaining.sync is not None and remaining.sync.phase == "prepare":
            return replace(suppressed, sync=remaining.sync.version)
        case commands.AdapterSync() | CheckAdapter() | LoadAdapter():
            return replace(suppressed, adapters=suppressed.adapters | {failed.adapter.model})
        case UnloadAdapter():  # of another adapter under the name of one that is wanted
            return replace(suppressed, adapters=suppressed.adapters | {failed.model})
        case commands.WeightSync(phase="load") if remaining.sync is None:
            return replace(suppressed, quarantined=suppressed.quarantined or failed.version)
        case commands.WeightSync() | CheckSource() | Load() | Restore() | AwaitPush():
            earlier = suppressed.quarantined  # the abort of this sync must not lift an older quarantine
            if remaining.sync is not None:
                version = remaining.sync.version
                return replace(suppressed, sync=version, quarantined=earlier or version)
            if not holds_committed(remaining, engine):
                return replace(suppressed, quarantined=earlier or max(1, remaining.version))
            return suppressed
        case _:
            return suppressed


def _suppress_session(suppressed: Suppressed, step: int, remaining: Desired, engine: EngineState) -> Suppressed:
    """Give up the session of this step, unless it is open already or another one is desired by now."""
    wanted = remaining.profile is not None and remaining.profile.step == step
    return replace(suppressed, session=True) if wanted and not engine.may_profile(step) else suppressed
