"""What an agent gave up of what is desired, because it failed or came too late. Pure.

What is desired is the fold of the run's commands, and the same on both sides of the wire. So a failure never changes
it: if it did, the next commands would be folded into different states here and at the bus. It is noted beside it, and
goes when a command asks anew or a snapshot is applied.
"""

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import Command, EpochStart, ProfileCommand, UnknownCommand, WeightSync
from schemas.desired import Desired
from schemas.events import Call, CheckSource, Load, StartProfile
from schemas.identity import Count
from workers.machine.reconcile import EngineState, holds_committed


class Suppressed(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """session: the desired session failed to open, or its time was over.   sync: version of a weight sync in which the
    replica takes no part any more.   quarantined: version that it could not follow; it stays paused until a commit, or
    the abort of that sync.
    """

    session: bool = False
    sync: Count = 0
    quarantined: Count = 0


NOTHING_SUPPRESSED = Suppressed()


def still_desired(desired: Desired, suppressed: Suppressed) -> Desired:
    """What is left to be brought about."""
    if suppressed is NOTHING_SUPPRESSED:
        return desired
    apart = desired.sync is not None and desired.sync.version == suppressed.sync
    return replace(
        desired,
        profile=None if suppressed.session else desired.profile,
        sync=None if apart else desired.sync,
        quarantined=desired.quarantined or suppressed.quarantined,
    )


def clear_suppressed(suppressed: Suppressed, command: Command | UnknownCommand, before: Desired) -> Suppressed:
    """What stays given up when `command`, which names this replica, asks anew. before: what was desired until now."""
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
    suppressed: Suppressed, failed: Command | UnknownCommand | Call, left: Desired, engine: EngineState
) -> Suppressed:
    """Give up what failed and must not be tried again unasked, and leave a replica that can't follow out of service.

    left: what remained to be brought about. A replica that refused to prepare was not touched and goes on as before
    the sync. One that did not load is quarantined: it could otherwise serve weights that nobody committed.
    """
    match failed:
        case ProfileCommand(action="collect" | "check" | "finish"):
            return suppressed
        case ProfileCommand() | StartProfile():
            return replace(suppressed, session=True)
        case WeightSync(phase="prepare"):
            return replace(suppressed, sync=failed.version)
        case WeightSync() | CheckSource() | Load():
            since = suppressed.quarantined  # the abort of this sync must not lift an older quarantine
            if left.sync is not None:
                return replace(suppressed, sync=left.sync.version, quarantined=since or left.sync.version)
            if not holds_committed(left, engine):
                return replace(suppressed, quarantined=since or max(1, left.version))
            return suppressed
        case _:
            return suppressed
