"""How far this node's wall clock is from the bus's, from what the bus tells about its own with every heartbeat. Pure.

Theory of operation. A question leaves at t1, the bus reads it at t2 and replies at t3, the reply is here at t4 (t1 and
t4 on one clock of the agent, t2 and t3 on the bus's). Whatever each way took, the question was read between t1 and
t4 - (t3 - t2): so the middle of that span is wrong by at most its half, and the exchange with the shortest ways tells
most. It tells less as it grows old, because clocks drift. The best of the last exchanges is the estimate. Those that
the newest contradicts are dropped: the bus's clock was set since.

The agent's side is measured on the monotonic clock, which never jumps; the wall clock is read beside it each time. So a
wall clock that is set in the middle of a run is followed at once.

An estimate becomes news when it is the first, or twice as sure as the one that was told, or contradicts it, or when
that one is a minute old. Only news is told: a heartbeat that repeats itself leaves no trace in the run's log.
"""

from collections import deque
from typing import Final, NamedTuple

from schemas.reports import Clock
from schemas.wire import TimeReply

WINDOW: Final = 64
"""Exchanges that are looked at: two minutes of heartbeats."""
DRIFT_PPM: Final = 15
"""By how much two clocks drift apart, as NTP assumes (RFC 5905, PHI)."""
TOLD_NS: Final = 60_000_000_000
"""How old the estimate that was told may become."""


class Exchange(NamedTuple):
    """One question and its answer. at_ns: when the answer came, by the agent's monotonic clock.

    offset_ns: from that clock to the bus's wall clock.   error_ns: half of what the ways took.
    """

    at_ns: int
    offset_ns: int
    error_ns: int

    def error_at(self, now_ns: int) -> int:
        """By how much the offset may be wrong now."""
        return self.error_ns + (now_ns - self.at_ns) * DRIFT_PPM // 1_000_000

    def agrees_with(self, later: "Exchange") -> bool:
        """Both can be right. If not, a clock was set between them, or drifts faster: the later one counts."""
        return abs(later.offset_ns - self.offset_ns) <= later.error_ns + self.error_at(later.at_ns)


class Clocks:
    """The clocks of one agent against one bus's. told: the newest estimate that was news; None before the first."""

    def __init__(self) -> None:
        self.told: Clock | None = None
        self._told_ns = 0
        self._window: deque[Exchange] = deque(maxlen=WINDOW)

    def take(self, told: TimeReply, loop_s: float, wall_ns: int, between: tuple[int, int]) -> None:
        """Take an answer. loop_s, wall_ns: the event loop's clock and the wall clock, now.   between: the monotonic
        clock before and after those two were read. An answer to no question of ours is not taken.
        """
        now_ns, spent_ns = between[1], between[1] - between[0]
        away_ns, held_ns = now_ns - told.sent_ns, told.replied_ns - told.received_ns
        # The bus's wall clock may be set between its two readings; then they say nothing.
        if not 0 <= held_ns <= away_ns:
            return
        middle = (told.received_ns + told.replied_ns - told.sent_ns - now_ns) // 2
        newest = Exchange(now_ns, middle, (away_ns - held_ns) // 2 + 1)
        self._window = deque((one for one in self._window if one.agrees_with(newest)), maxlen=WINDOW)
        self._window.append(newest)
        best = min(self._window, key=lambda one: one.error_at(now_ns))
        at_ms = int(loop_s * 1000)
        clock = Clock(
            at_ms=at_ms,
            wall_ns=wall_ns - int(loop_s * 1_000_000_000) + at_ms * 1_000_000,
            offset_ns=best.offset_ns + now_ns - spent_ns // 2 - wall_ns,
            error_ns=best.error_at(now_ns) + spent_ns // 2 + 1,
        )
        if self._is_news(clock, now_ns):
            self.told, self._told_ns = clock, now_ns

    def _is_news(self, clock: Clock, now_ns: int) -> bool:
        told = self.told
        if told is None:
            return True
        age_ns = now_ns - self._told_ns
        drift_ns = age_ns * DRIFT_PPM // 1_000_000
        moved = abs(clock.offset_ns - told.offset_ns) > clock.error_ns + told.error_ns + drift_ns
        return moved or clock.error_ns * 2 < told.error_ns or age_ns >= TOLD_NS
