"""The offset between this node's wall clock and the bus's, measured with every third heartbeat. Pure.

Theory of operation. A request leaves at t1, the bus reads it at t2 and replies at t3, and the reply arrives at t4 (t1
and t4 on one clock of the agent, t2 and t3 on the bus's). However long each way took, the request was read between t1
and t4 - (t3 - t2). So the middle of that span is wrong by at most half of it, and the exchange with the shortest round
trip is the best measurement. It loses value with age, because clocks drift. The best of the recent exchanges is the
estimate. Exchanges that the newest one contradicts are dropped: the bus's clock has been set since then.

The agent's side is measured on the monotonic clock, which never jumps, and the wall clock is read beside it each time.
So if the wall clock is set in the middle of a run, the next estimate follows it.

A new estimate is reported if it is the first, twice as precise as the reported one, or contradicts it, or if the
reported one is a minute old. Otherwise the old one is repeated: equal heartbeats leave no trace in the run's log.
"""

from collections import deque
from typing import Final, NamedTuple

from schemas.agent_status import Clock
from schemas.wire import TimeReply

WINDOW: Final = 64
"""Exchanges that are considered: six minutes of heartbeats. Old ones lose by their age, see `Exchange.error_at`."""
DRIFT_PPM: Final = 15
"""How fast two clocks drift apart at most, as NTP assumes (RFC 5905, PHI)."""
REPORT_AGE_NS: Final = 60_000_000_000
"""Age at which a reported estimate is replaced."""


class Exchange(NamedTuple):
    """One request and its reply.

    Attributes:
        offset_ns: From that clock to the bus's wall clock.
        error_ns: Half of the round trip, without the time at the bus.
    """

    at_ns: int
    offset_ns: int
    error_ns: int

    def error_at(self, now_ns: int) -> int:
        """Return by how much the offset may be wrong at `now_ns`."""
        return self.error_ns + (now_ns - self.at_ns) * DRIFT_PPM // 1_000_000

    def agrees_with(self, later: "Exchange") -> bool:
        """Whether both can be right. If not, a clock was set between them, or drifts faster: the later one counts."""
        return abs(later.offset_ns - self.offset_ns) <= later.error_ns + self.error_at(later.at_ns)


class Clocks:
    """The clocks of one agent against those of one bus."""

    def __init__(self) -> None:
        self.reported: Clock | None = None
        self._reported_ns = 0
        self._window: deque[Exchange] = deque(maxlen=WINDOW)

    def add(self, reply: TimeReply, loop_s: float, wall_ns: int, between: tuple[int, int]) -> None:
        """Add a reply. One that answers no request of this agent is ignored.

        Args:
            reply: What the bus sent.
            loop_s: The event loop's clock, now.
            wall_ns: The node's wall clock, now.
            between: The monotonic clock before and after those two were read, in ns.
        """
        now_ns, reading_ns = between[1], between[1] - between[0]
        away_ns, bus_ns = now_ns - reply.sent_ns, reply.replied_ns - reply.received_ns
        # The bus's wall clock may have been set between its two readings, which makes them useless.
        if not 0 <= bus_ns <= away_ns:
            return
        offset_ns = (reply.received_ns + reply.replied_ns - reply.sent_ns - now_ns) // 2
        newest = Exchange(now_ns, offset_ns, (away_ns - bus_ns) // 2 + 1)
        consistent = (exchange for exchange in self._window if exchange.agrees_with(newest))
        self._window = deque((*consistent, newest), maxlen=WINDOW)
        best = min(self._window, key=lambda exchange: exchange.error_at(now_ns))
        at_ms = int(loop_s * 1000)
        clock = Clock(
            at_ms=at_ms,
            wall_ns=wall_ns - int(loop_s * 1_000_000_000) + at_ms * 1_000_000,
            offset_ns=best.offset_ns + now_ns - reading_ns // 2 - wall_ns,
            error_ns=best.error_at(now_ns) + reading_ns // 2 + 1,
        )
        if self._is_news(clock, now_ns):
            self.reported, self._reported_ns = clock, now_ns

    def _is_news(self, clock: Clock, now_ns: int) -> bool:
        reported = self.reported
        if reported is None:
            return True
        age_ns = now_ns - self._reported_ns
        drift_ns = age_ns * DRIFT_PPM // 1_000_000
        moved = abs(clock.offset_ns - reported.offset_ns) > clock.error_ns + reported.error_ns + drift_ns
        return moved or clock.error_ns * 2 < reported.error_ns or age_ns >= REPORT_AGE_NS
