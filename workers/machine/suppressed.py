"""Parts of the desired state that this agent no longer pursues, because they failed or expired. Pure.

The desired state is a fold of the run's commands, and both sides of the wire must compute the same one. A failure is
therefore never folded in; it is kept beside it as `Suppressed`, and cleared when a command asks again or a snapshot
arrives.
"""

from msgspec.structs import replace

from schemas.commands import Command, EpochStart, ProfileCommand, UnknownCommand, WeightSync
from schemas.desired import Desired
from schemas.events import Call, CheckSource, Load, StartProfile
from workers.machine.reconcile import holds_committed
from workers.machine.state import NOTHING_SUPPRESSED, EngineState, Suppressed


def still_desired(desired: Desired, suppressed: Suppressed) -> Desired:
    """Return `desired` without what is suppressed."""
    if suppressed is NOTHING_SUPPRESSED:
        return desired
    dropped_out = desired.sync is not None and desired.sync.version == suppressed.sync
    return replace(
        desired,
        profile=None if suppressed.session else desired.profile,
        sync=None if dropped_out else desired.sync,
        quarantined=desired.quarantined or suppressed.quarantined,
    )


def clear_suppressed(suppressed: Suppressed, command: Command | UnknownCommand, before: Desired) -> Suppressed:
    """Return what stays suppressed after `command`, which targets this replica and may ask again for what failed.

    `before` is the desired state before the command.
    """
    match command:
        case ProfileCommand(action="collect" | "check" | "finish"):
            return suppressed
        case ProfileCommand():
            return replace(suppressed, session=False)
        case EpochStart():
            return replace(suppressed, session=False, sync=0)
        case WeightSync() if command.version > before.version and command.phase != "load":
            ended = command.phase == "commit" or command.version == suppressed.quarantined
            lifted = ended and command.phase != "prepare"
            return replace(suppressed, sync=0, quarantined=0 if lifted else suppressed.quarantined)
        case _:
            return suppressed


def suppress(
    suppressed: Suppressed, failed: Command | UnknownCommand | Call, remaining: Desired, engine: EngineState
) -> Suppressed:
    """Return what is suppressed after the failure of a command, or of a call that no command had asked for.

    What failed is not tried again until a command asks for it. `remaining` is what was still desired, `engine` the
    engine afterwards.

    A replica that refused to prepare was not touched, and continues as before the sync. One that did not load is
    quarantined: otherwise it could serve weights that were never committed.
    """
    match failed:
        case ProfileCommand(action="collect" | "check" | "finish"):
            return suppressed
        case ProfileCommand() | StartProfile():
            return replace(suppressed, session=True)
        case WeightSync(phase="prepare"):
            return replace(suppressed, sync=failed.version)
        case WeightSync() | CheckSource() | Load():
            earlier = suppressed.quarantined  # the abort of this sync must not lift an older quarantine
            if remaining.sync is not None:
                version = remaining.sync.version
                return replace(suppressed, sync=version, quarantined=earlier or version)
            if not holds_committed(remaining, engine):
                return replace(suppressed, quarantined=earlier or max(1, remaining.version))
            return suppressed
        case _:
            return suppressed
