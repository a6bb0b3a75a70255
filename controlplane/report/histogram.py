"""Data of a run's report that would grow with the run, kept in bounded memory. Pure.

`LatencyHistogram` counts latencies in buckets: a percentile of a million answers costs as much as one of ten.
`StateHistory` keeps the state of every replica over time in a fixed number of columns. When a run outgrows them, they
are merged in pairs, as often as necessary.
"""

from itertools import zip_longest

from msgspec import Struct

MAX_COLUMNS = 480
"""Columns per replica. The time that each stands for doubles when a run outgrows them."""
UNKNOWN = -1
"""Version of a replica that is not in the fleet, or has not reported one."""


class LatencyHistogram:
    """Latencies in µs. A percentile is at most 1.6 % too high; `largest` is exact."""

    def __init__(self) -> None:
        self.count = 0
        self.largest = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: int) -> None:
        """Count a latency. A negative one counts as 0."""
        value = max(0, value)
        self.count += 1
        self.largest = max(self.largest, value)
        shift = max(0, value.bit_length() - 7)  # 64 buckets per power of two
        upper = ((value >> shift) + 1 << shift) - 1
        self._buckets[upper] = self._buckets.get(upper, 0) + 1

    def percentile(self, percent: int) -> int:
        """The smallest value that `percent` of all do not exceed; 0 if there are none."""
        wanted = max(1, -(-self.count * percent // 100))
        for upper, count in sorted(self._buckets.items()):
            wanted -= count
            if wanted <= 0:
                return min(upper, self.largest)
        return self.largest


class ReplicaColumns(Struct, kw_only=True):
    """One replica over time.

    Attributes:
        latest: The last known version that its engine held.
        versions: Version at the end of each column, or UNKNOWN.
        paused, out, gone: ns of each column in which it did not generate, was in quarantine, or was lost.
    """

    latest: int = UNKNOWN
    versions: list[int] = []
    paused: list[int] = []
    out: list[int] = []
    gone: list[int] = []


class _ReplicaRecorder:
    """Writes one replica's columns. Moments count from the beginning of the run."""

    def __init__(self) -> None:
        self.version = UNKNOWN
        self.paused = self.out = self.gone = False
        self.columns = ReplicaColumns()
        self._written_ns = 0

    def write(self, until_ns: int, quantum_ns: int) -> None:
        """Fill the columns up to a moment with the current state."""
        columns = self.columns
        while True:
            column = self._written_ns // quantum_ns
            while len(columns.versions) <= column:
                self._append_column()
            end_ns = min(until_ns, (column + 1) * quantum_ns)
            duration_ns = end_ns - self._written_ns
            columns.versions[column] = self.version
            columns.paused[column] += duration_ns if self.paused and not self.gone else 0
            columns.out[column] += duration_ns if self.out else 0
            columns.gone[column] += duration_ns if self.gone else 0
            self._written_ns = end_ns
            if end_ns >= until_ns:
                return

    def _append_column(self) -> None:
        self.columns.versions.append(self.version)
        for durations in (self.columns.paused, self.columns.out, self.columns.gone):
            durations.append(0)

    def halve(self) -> None:
        """Merge the columns in pairs."""
        columns = self.columns
        columns.versions = [second for _, second in _pairs(columns.versions, columns.versions[-1:])]
        columns.paused = [sum(pair) for pair in _pairs(columns.paused, [0])]
        columns.out = [sum(pair) for pair in _pairs(columns.out, [0])]
        columns.gone = [sum(pair) for pair in _pairs(columns.gone, [0])]


def _pairs(values: list[int], filler: list[int]) -> list[tuple[int, int]]:
    """Neighbours, two by two; an odd last value is paired with the filler."""
    return list(zip_longest(values[::2], values[1::2], fillvalue=filler[0] if filler else 0))


class StateHistory:
    """Every replica's state over time.

    Attributes:
        start_ns, end_ns: First and last moment, wall clock.
        quantum_ns: Time that one column stands for.
    """

    def __init__(self) -> None:
        self.start_ns = self.end_ns = 0
        self.quantum_ns = 1_000_000
        self._replicas: dict[int, _ReplicaRecorder] = {}

    def advance(self, moment_ns: int) -> None:
        """Advance the time. A clock that was set back counts as standing still."""
        if self.start_ns == 0:
            self.start_ns = self.end_ns = moment_ns
        self.end_ns = max(self.end_ns, moment_ns)
        while self._now >= MAX_COLUMNS * self.quantum_ns:
            for replica in self._replicas.values():
                replica.halve()
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
        """Change a replica's state from now on; None keeps a value."""
        recorder = self._replicas.setdefault(replica, _ReplicaRecorder())
        recorder.write(self._now, self.quantum_ns)
        recorder.version = recorder.version if version is None else version
        if recorder.version != UNKNOWN:
            recorder.columns.latest = recorder.version
        recorder.paused = recorder.paused if paused is None else paused
        recorder.out = recorder.out if out is None else out
        recorder.gone = recorder.gone if gone is None else gone

    def replicas(self) -> dict[int, ReplicaColumns]:
        """Every replica in order, up to the last moment."""
        for recorder in self._replicas.values():
            recorder.write(self._now, self.quantum_ns)
            recorder.columns.versions[-1] = recorder.version  # shows what was set at the very last moment
        return {replica: recorder.columns for replica, recorder in sorted(self._replicas.items())}

    def column(self, moment_ns: int) -> int:
        """The column of a moment."""
        return max(0, moment_ns - self.start_ns) // self.quantum_ns

    @property
    def _now(self) -> int:
        return self.end_ns - self.start_ns
