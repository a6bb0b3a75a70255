"""What the trainer's log says of its fleet: who joins and who is lost, and how weight syncs end.

Rate limited, each kind of line by itself: no good news hides a warning.
"""

from controlplane.machine import events
from controlplane.machine.coordinator_state import CoordinatorState, member_at
from schemas.logs import RateLimit, logger_of
from schemas.reports import Report, SyncReport

logger = logger_of("bus")
logger.addFilter(RateLimit())


def note_event(event: events.CoordinatorEvent, before: CoordinatorState, after: CoordinatorState) -> None:
    """Log who has joined or was lost by an event."""
    if isinstance(event, events.JoinReceived) and (agent := member_at(after, event.peer)) is not None:
        logger.info("agent %s joined; %s", agent, _live(after))
    elif isinstance(event, events.PeerLost) and (agent := member_at(before, event.peer)) is not None:
        if event.reason == "left":
            logger.info("agent %s is lost (left); %s", agent, _live(after))
        else:
            logger.warning("agent %s is lost (%s); %s", agent, event.reason, _live(after))


def note_report(report: Report | SyncReport) -> None:
    """Log how a weight sync ended."""
    if isinstance(report, SyncReport) and (report.flawed or report.reason):
        logger.warning("%s", report.headline)
    elif isinstance(report, SyncReport):
        logger.info("%s", report.headline)


def _live(state: CoordinatorState) -> str:
    live = sum(member.state == "live" for member in state.members.values())
    return f"{live} of {len(state.members)} live"
