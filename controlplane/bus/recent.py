"""What the bus keeps of commands that have ended, for its status: the last failures, and how fast each agent answered.

Nothing of it is recorded: the log has all of it, and a restarted bus begins without.
"""

from collections import deque
from typing import Final

from schemas.formatting import MAX_WIDTH, describe, group_outcomes
from schemas.outcomes import Failed, Missing
from schemas.reports import RecentFailure, Report, SyncReport

FAILURES_KEPT: Final = 8
REPORTS_KEPT: Final = 4
"""Reports in which an agent's newest answer is looked for."""
_TROUBLES: Final = frozenset({Failed, Missing})


class Recent:
    """The newest reports of one life of the bus."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque(maxlen=REPORTS_KEPT)
        self._failures: deque[tuple[int, str]] = deque(maxlen=FAILURES_KEPT)  # when, and what; the newest first

    def note(self, report: Report | SyncReport, at_us: int) -> None:
        """Take in how a command or a sync ended."""
        if isinstance(report, Report):
            self._reports.append(report)
        if failure := _failure(report):
            self._failures.appendleft((at_us, failure[:MAX_WIDTH]))

    def latencies_us(self) -> dict[str, int]:
        """Return the time from publishing a command to the newest answer of each agent."""
        return {
            outcome.agent: outcome.latency_us
            for report in self._reports
            for outcome in report.outcomes
            if not isinstance(outcome.conclusion, Missing)
        }

    def failures(self, now_us: int) -> tuple[RecentFailure, ...]:
        """Return the last failures, the newest first."""
        return tuple(RecentFailure(ago_ms=max(0, now_us - at_us) // 1000, text=text) for at_us, text in self._failures)


def _failure(report: Report | SyncReport) -> str:
    """What went wrong, in one line; empty if nothing did. That an agent is away is in its own line of the status."""
    if isinstance(report, SyncReport):
        return report.headline if report.status == "aborted" or report.quarantined else ""
    if _TROUBLES.isdisjoint({type(outcome.conclusion) for outcome in report.outcomes}):  # of most commands, at once
        return ""
    troubles = [
        (outcome.agent, outcome.conclusion, outcome.rule)
        for outcome in report.outcomes
        if isinstance(outcome.conclusion, Failed)
        or (isinstance(outcome.conclusion, Missing) and outcome.conclusion.reason != "absent")
    ]
    if not troubles:
        return ""
    who = "; ".join(line.text for line in group_outcomes(troubles))
    return f"{describe(report.command)} (seq {report.seq}): {who}"
