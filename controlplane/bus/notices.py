"""What the trainer's log says of its fleet: who joins and who is lost, and how weight syncs end. Rate limited."""

import logging
from collections import defaultdict, deque
from typing import Final

from controlplane.machine import events
from controlplane.machine.coordinator_state import CoordinatorState, member_at
from schemas.logs import logger_of
from schemas.reports import Report, SyncReport

logger = logger_of("bus")

LINES: Final = 20
PERIOD_US: Final = 60_000_000
"""Log lines of one kind in each period."""


class LineLimit:
    """Says whether one more line may be logged."""

    def __init__(self) -> None:
        self._logged_us: deque[int] = deque(maxlen=LINES)
        self.left_out = 0

    def allows(self, now_us: int) -> bool:
        """Whether it may. If so, the caller logs it."""
        if len(self._logged_us) == LINES and now_us - self._logged_us[0] < PERIOD_US:
            self.left_out += 1
            return False
        self._logged_us.append(now_us)
        return True


class Notices:
    """Logs what a person who reads the trainer's log should know of its fleet. Each level of each kind has a limit of
    its own, so that no good news hides a warning.
    """

    def __init__(self) -> None:
        self._members, self._syncs = defaultdict[int, LineLimit](LineLimit), defaultdict[int, LineLimit](LineLimit)

    def note_event(self, event: events.CoordinatorEvent, before: CoordinatorState, after: CoordinatorState) -> None:
        """Log who has joined or was lost by an event."""
        if isinstance(event, events.JoinReceived):
            self._note(logging.INFO, event, member_at(after, event.peer), "joined", after)
        elif isinstance(event, events.PeerLost):
            level = logging.INFO if event.reason == "left" else logging.WARNING
            self._note(level, event, member_at(before, event.peer), f"is lost ({event.reason})", after)

    def _note(self, level: int, event: events.PeerEvent, agent: str | None, what: str, state: CoordinatorState) -> None:
        limit = self._members[level]
        if agent is None or not limit.allows(event.at_us):
            return
        live = sum(member.state == "live" for member in state.members.values())
        left_out, limit.left_out = limit.left_out, 0
        more = f"; {left_out} lines like this left out" if left_out else ""
        logger.log(level, "agent %s %s; %d of %d live%s", agent, what, live, len(state.members), more)

    def note_report(self, report: Report | SyncReport, now_us: int) -> None:
        """Log how a weight sync ended."""
        if isinstance(report, SyncReport):
            level = logging.WARNING if report.flawed or report.reason else logging.INFO
            if self._syncs[level].allows(now_us):
                logger.log(level, "%s", report.headline)
