"""What the bus keeps of commands that have ended, for its status: the last failures, and how fast each agent answered.

Nothing of it is recorded: the log has all of it, and a restarted bus begins without.
"""

from collections import deque
from typing import Final

from schemas.formatting import MAX_WIDTH, describe, group_outcomes, without_numbers
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
        self._failures: dict[str, tuple[int, str, int]] = {}  # when, what and how often; by what they have in common

    def note(self, report: Report | SyncReport, at_us: int) -> None:
        """Take in how a command or a sync ended."""
        if isinstance(report, Report):
            self._reports.append(report)
        if failure := _failure(report):
            text = failure[:MAX_WIDTH]
            key = without_numbers(text)
            _, _, times = self._failures.pop(key, (0, "", 0))
            self._failures[key] = at_us, text, times + 1
            if len(self._failures) > FAILURES_KEPT:
                del self._failures[next(iter(self._failures))]

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
        return tuple(
            RecentFailure(ago_ms=max(0, now_us - at_us) // 1000, text=text, times=times)
            for at_us, text, times in reversed(self._failures.values())
        )


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
