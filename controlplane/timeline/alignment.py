"""Maps moments of an agent's clocks to the bus's clock, with a bound of the error. Pure.

The bus's clock is the wall clock of the trainer's machine; every record of a log carries it. An agent's decisions carry
its monotonic clock in whole milliseconds; its engine's traces carry the wall clock of its node.

Theory of operation. Agents measure their clocks against the bus's with their heartbeats and report each new estimate
(`schemas.reports.Clock`). A moment is placed by the estimates around it that agree with each other. An incarnation that
never reported an estimate, since it ended within seconds, is placed by when the bus received its records, which is up
to some hundred milliseconds late. Traces of its node keep their own times.
"""

from bisect import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

from schemas.agent_status import Clock

MS: Final = 1_000_000
"""Nanoseconds in a millisecond."""
DRIFT_PPM: Final = 15
"""How fast two clocks drift apart, as NTP assumes (RFC 5905, PHI)."""


class Offset(NamedTuple):
    """What to add to an agent's clock to get the bus's, and a bound of its error; None if unknown."""

    offset_ns: int
    error_ns: int | None


class OffsetEstimate(NamedTuple):
    """An offset that was measured at `at_ns` of the clock that it belongs to."""

    at_ns: int
    offset_ns: int
    error_ns: int

    def grown_error_ns(self, at_ns: int) -> int:
        """Return the error at another moment: it grows by the drift."""
        return self.error_ns + abs(at_ns - self.at_ns) * DRIFT_PPM // 1_000_000

    def agrees_with(self, other: "OffsetEstimate") -> bool:
        """Whether both can be true of clocks that only drift."""
        return abs(self.offset_ns - other.offset_ns) <= self.grown_error_ns(other.at_ns) + other.error_ns


class AgentClock:
    """The two clocks of one incarnation of an agent.

    Attributes:
        early_ns: How long before its issue a command seems to have been received, at most.
    """

    def __init__(self, peer: str) -> None:
        self.agent, _, self.incarnation = peer.partition("/")
        self.early_ns = 0
        self._monotonic: list[OffsetEstimate] = []
        self._wall: list[OffsetEstimate] = []
        self._most_ns: int | None = None  # of the monotonic clock's offset, by the records

    @property
    def estimates(self) -> int:
        """Number of estimates that the agent reported."""
        return len(self._monotonic)

    @property
    def max_error_ns(self) -> int | None:
        """The largest error among the estimates; None if nothing is known."""
        return max((estimate.error_ns for estimate in self._monotonic), default=None)

    def monotonic(self, at_ms: int) -> Offset:
        """Return the offset of the agent's monotonic clock, at a moment of that clock."""
        return _interpolate(self._monotonic, at_ms * MS) if self._monotonic else Offset(self._most_ns or 0, None)

    def wall(self, bus_ns: int) -> Offset:
        """Return the offset of the node's wall clock, at a moment of the bus's clock."""
        return _interpolate(self._wall, bus_ns) if self._wall else Offset(0, None)

    def add(self, clock: Clock) -> None:
        """Add an estimate. One that was reported before is ignored."""
        at_ns, bus_ns = clock.at_ms * MS, clock.wall_ns + clock.offset_ns
        if not self._monotonic or at_ns > self._monotonic[-1].at_ns:
            self._monotonic.append(OffsetEstimate(at_ns, bus_ns - at_ns, clock.error_ns))
            self._wall.append(OffsetEstimate(bus_ns, clock.offset_ns, clock.error_ns))

    def happened_before(self, bus_ns: int, at_ms: int) -> None:
        """Note that what the agent did in its millisecond `at_ms` happened before `bus_ns`."""
        most = bus_ns - at_ms * MS
        self._most_ns = most if self._most_ns is None else min(self._most_ns, most)


def _interpolate(estimates: Sequence[OffsetEstimate], at_ns: int) -> Offset:
    """The offset at a moment: what the two estimates before it and the two after it agree on.

    An estimate that contradicts the nearer one on its side dates from before a clock was set, or from after.
    """
    at = bisect(estimates, at_ns, key=lambda estimate: estimate.at_ns)
    around = [estimate for estimate in estimates[max(0, at - 2) : at] if estimate.agrees_with(estimates[at - 1])]
    around += [estimate for estimate in estimates[at : at + 2] if estimate.agrees_with(estimates[at])]
    least = max(estimate.offset_ns - estimate.grown_error_ns(at_ns) for estimate in around)
    most = min(estimate.offset_ns + estimate.grown_error_ns(at_ns) for estimate in around)
    if least <= most:
        return Offset((least + most) // 2, (most - least + 1) // 2)
    # The two sides contradict each other: the clock drifts faster than assumed, or was set. A straight line is exact
    # for drift, and wrong by at most one step for a clock that was set.
    before, after = estimates[max(0, at - 1)], estimates[min(at, len(estimates) - 1)]
    step_ns = after.offset_ns - before.offset_ns
    part_ns = step_ns * (at_ns - before.at_ns) // max(1, after.at_ns - before.at_ns)
    return Offset(before.offset_ns + part_ns, max(before.error_ns, after.error_ns) + abs(step_ns))
