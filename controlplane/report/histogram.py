"""The figures of a run's report that would grow with the run, held in a room that does not. Pure.

`Spread` counts latencies in buckets, so a percentile over a million answers costs what one over ten does.
`Lanes` paints the state of every replica over time into a fixed number of columns; a run that goes on longer than they
reach has its columns merged by twos, as often as it takes.
"""

from msgspec import Struct

COLUMNS = 480
"""Columns of a lane, at most. The time that one stands for doubles when a run outgrows them."""
UNKNOWN = -1
"""Version of a replica that is not in the fleet, or that has not said."""


class Spread:
    """How long things took, in µs. A percentile is at most 1.6 % above the truth; the largest value is exact."""

    def __init__(self) -> None:
        self.count = 0
        self.largest = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count one. Below 0 is taken as 0."""
        value = max(0, value)
        self.count += 1
        self.largest = max(self.largest, value)
        shift = max(0, value.bit_length() - 7)  # 64 buckets for each power of two
        above = ((value >> shift) + 1 << shift) - 1
        self._buckets[above] = self._buckets.get(above, 0) + 1

    def at(self, per_mille: int) -> int:
        """The smallest value that `per_mille` of all do not exceed; 0 when there are none."""
        wanted = max(1, -(-self.count * per_mille // 1000))
        for above, count in sorted(self._buckets.items()):
            wanted -= count
            if wanted <= 0:
                return min(above, self.largest)
        return self.largest


class Painted(Struct, kw_only=True):
    """One replica over time, column by column.

    versions: what its engine held at the end of the column, or UNKNOWN.   paused, out, gone: ns of the column in which
    it did not generate, was in quarantine, or was lost.   latest: the last version it was heard to hold.
    """

    latest: int = UNKNOWN
    versions: list[int]
    paused: list[int]
    out: list[int]
    gone: list[int]


class _Lane:
    def __init__(self, since_ns: int) -> None:
        self.since_ns = since_ns
        self.version = UNKNOWN
        self.paused = self.out = self.gone = False
        self.painted = Painted(versions=[], paused=[], out=[], gone=[])

    def paint(self, until_ns: int, quantum_ns: int) -> None:
        """Fill the columns up to this moment with the state that held until now. Times count from the run's start."""
        painted = self.painted
        column = self.since_ns // quantum_ns
        while True:
            self._reach(column)
            left = min(until_ns, (column + 1) * quantum_ns) - self.since_ns
            painted.versions[column] = self.version
            painted.paused[column] += left if self.paused and not self.gone else 0
            painted.out[column] += left if self.out else 0
            painted.gone[column] += left if self.gone else 0
            self.since_ns += left
            if self.since_ns >= until_ns:
                return
            column += 1

    def _reach(self, column: int) -> None:
        painted = self.painted
        missing = column + 1 - len(painted.versions)
        if missing > 0:
            painted.versions += [self.version] * missing
            for amounts in (painted.paused, painted.out, painted.gone):
                amounts += [0] * missing

    def halve(self) -> None:
        """Make one column of each two."""
        painted = self.painted
        if len(painted.versions) % 2:
            self._reach(len(painted.versions))
            painted.versions[-1] = painted.versions[-2]
        painted.versions = painted.versions[1::2]
        painted.paused = _by_twos(painted.paused)
        painted.out = _by_twos(painted.out)
        painted.gone = _by_twos(painted.gone)


def _by_twos(amounts: list[int]) -> list[int]:
    return [first + second for first, second in zip(amounts[::2], amounts[1::2], strict=True)]


class Lanes:
    """All replicas over time. Moments are wall clock, in ns, and must not go back (`at` sees to that).

    start_ns, end_ns: the first and the last moment.   quantum_ns: what one column stands for.
    """

    def __init__(self) -> None:
        self.start_ns = self.end_ns = 0
        self.quantum_ns = 1_000_000
        self._lanes: dict[int, _Lane] = {}

    def at(self, moment_ns: int) -> None:
        """Time has come to this moment. A clock that was set back is taken to have stood still."""
        if self.start_ns == 0:
            self.start_ns = self.end_ns = moment_ns
        self.end_ns = max(self.end_ns, moment_ns)
        while self._now >= COLUMNS * self.quantum_ns:
            for lane in self._lanes.values():
                lane.halve()
            self.quantum_ns *= 2

    def set(
        self,
        replica: int,
        *,
        version: int | None = None,
        paused: bool | None = None,
        out: bool | None = None,
        gone: bool | None = None,
    ) -> None:
        """What holds of a replica from now on. None: as before."""
        lane = self._lanes.setdefault(replica, _Lane(0))
        lane.paint(self._now, self.quantum_ns)
        lane.version = lane.version if version is None else version
        lane.painted.latest = lane.painted.latest if lane.version == UNKNOWN else lane.version
        lane.paused = lane.paused if paused is None else paused
        lane.out = lane.out if out is None else out
        lane.gone = lane.gone if gone is None else gone

    def painted(self) -> dict[int, Painted]:
        """Every replica, in order, painted up to the last moment."""
        for lane in self._lanes.values():
            lane.paint(self._now, self.quantum_ns)
            lane.painted.versions[-1] = lane.version  # what was set at the very last moment shows, too
        return {replica: lane.painted for replica, lane in sorted(self._lanes.items())}

    def column(self, moment_ns: int) -> int:
        """Where a moment lies."""
        return max(0, moment_ns - self.start_ns) // self.quantum_ns

    @property
    def _now(self) -> int:
        return self.end_ns - self.start_ns
