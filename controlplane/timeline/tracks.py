"""Processes, threads and slices of a timeline, in Chrome's Trace Event Format. Pure.

Rule 1  Slices of one thread nest. One that overlaps another goes to a further lane: a thread of the same name with a
        number.
Rule 2  A slice inside another begins after it and ends before it, by a microsecond at least: viewers disagree about two
        slices that begin at the same moment.
Rule 3  Process and thread numbers are unique in the file; torch's traces are renumbered.
"""

from typing import Final

from msgspec import Struct

CATEGORY: Final = "rolloutctl"
THREADS: Final = 1_000
"""Thread numbers reserved for each of our processes."""
SHORTEST_NS: Final = 1_000
"""Shortest slice: an arrow needs one of some length."""


class TraceEvent(Struct, kw_only=True, omit_defaults=True):
    """One event of the format; `ts` and `dur` in µs since the timeline begins.

    Attributes:
        ph: X for a slice, i an instant, C a counter, s and f the two ends of an arrow, M a name.
    """

    ph: str
    pid: int
    tid: int
    name: str = ""
    cat: str = ""
    ts: float | None = None
    dur: float | None = None
    id: int | None = None
    bp: str | None = None
    s: str | None = None
    args: dict[str, object] = {}


class ProcessTracks:
    """One process and its threads. Moments are on the bus's clock; the timeline begins at `zero_ns`."""

    def __init__(self, pid: int, title: str, sort: int, zero_ns: int) -> None:
        self.pid = pid
        self._zero_ns = zero_ns
        self._busy: dict[str, list[int | None]] = {}  # by thread: end of the last slice of each lane; None while open
        self._tids: dict[tuple[str, int], int] = {}
        self._names = [
            TraceEvent(ph="M", pid=pid, tid=0, name="process_name", args={"name": title}),
            TraceEvent(ph="M", pid=pid, tid=0, name="process_sort_index", args={"sort_index": sort}),
        ]
        self._drawn = False

    def names(self) -> list[TraceEvent]:
        """Return the names of the process and its threads; none if nothing was drawn."""
        return self._names if self._drawn else []

    def tid(self, thread: str, lane: int = 0) -> int:
        """Return the number of a lane; names it on first use."""
        self._drawn = True
        tid = self._tids.get((thread, lane))
        if tid is None:
            tid = self._tids[thread, lane] = self.pid * THREADS + len(self._tids) + 1
            name = f"{thread} ({lane + 1})" if lane else thread
            self._names.append(TraceEvent(ph="M", pid=self.pid, tid=tid, name="thread_name", args={"name": name}))
        return tid

    def take_lane(self, thread: str, at_ns: int) -> int:
        """Occupy the first lane that is free at a moment, and return its index."""
        lanes = self._busy.setdefault(thread, [])
        lane = next((lane for lane, end_ns in enumerate(lanes) if end_ns is not None and end_ns <= at_ns), len(lanes))
        lanes[lane : lane + 1] = [None]
        return lane

    def free_lane(self, thread: str, lane: int, at_ns: int) -> None:
        self._busy[thread][lane] = at_ns

    def slice(self, tid: int, name: str, begin_ns: int, end_ns: int, args: dict[str, object]) -> TraceEvent:
        ts, dur = self.us(begin_ns), (end_ns - begin_ns) / 1000
        return TraceEvent(ph="X", pid=self.pid, tid=tid, name=name, cat=CATEGORY, ts=ts, dur=dur, args=args)

    def instant(self, thread: str, name: str, at_ns: int, args: dict[str, object] | None = None) -> TraceEvent:
        """Return a mark on a thread."""
        tid, ts = self.tid(thread), self.us(at_ns)
        return TraceEvent(ph="i", pid=self.pid, tid=tid, name=name, cat=CATEGORY, ts=ts, s="t", args=args or {})

    def counter(self, name: str, value: int, at_ns: int) -> TraceEvent:
        self._drawn = True
        ts = self.us(at_ns)
        return TraceEvent(ph="C", pid=self.pid, tid=self.pid, name=name, cat=CATEGORY, ts=ts, args={"value": value})

    def us(self, at_ns: int) -> float:
        """Convert to the format's unit; exact to the nanosecond within a hundred days."""
        return (at_ns - self._zero_ns) / 1000


class OpenSlice:
    """A slice that has begun and not ended. `end` returns its event."""

    def __init__(
        self,
        process: ProcessTracks,
        thread: str,
        name: str,
        at_ns: int,
        args: dict[str, object] | None = None,
        inside: "OpenSlice | None" = None,
    ) -> None:
        self._process, self._thread = process, thread
        self.name, self.args, self.inside = name, args or {}, inside
        self.begin_ns: int = at_ns if inside is None else max(at_ns, inside.begin_ns + SHORTEST_NS, inside.filled_ns)
        self.filled_ns: int = 0  # end of the last slice inside
        self._lane: int = process.take_lane(thread, at_ns) if inside is None else inside._lane
        self.tid: int = process.tid(thread, self._lane)

    def end(self, at_ns: int, **args: object) -> TraceEvent:
        """End it with further details, after everything inside it, and return its event."""
        self.args.update(args)
        end_ns = max(at_ns, self.begin_ns + SHORTEST_NS, self.filled_ns + SHORTEST_NS)
        if self.inside is None:
            self._process.free_lane(self._thread, self._lane, end_ns)
        else:
            self.inside.filled_ns = end_ns
        return self._process.slice(self.tid, self.name, self.begin_ns, end_ns, self.args)
