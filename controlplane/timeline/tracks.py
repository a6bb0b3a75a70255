"""Tracks of a timeline: which process and thread an event is drawn on, in the Trace Event Format of Chrome. Pure.

Rule 1  What is drawn on one thread nests. What overlaps goes to another lane: a thread of the same name and a number.
Rule 2  What is drawn inside of something begins after it and ends before it, if only by a microsecond: viewers differ
        in what they make of two things that begin at the same moment.
Rule 3  Numbers of processes and threads are given once, whoever asks: traces of engines get theirs here, too.
"""

from typing import Final

from msgspec import Struct

CATEGORY: Final = "rolloutctl"
THREADS: Final = 1_000
"""Numbers of threads that belong to one process of ours."""
SHORTEST_NS: Final = 1_000
"""Of a slice: an arrow is bound to what has a length."""


class TraceEvent(Struct, kw_only=True, omit_defaults=True):
    """One event. ts, dur: µs, from the beginning of the timeline.

    ph: X a slice, i an instant, C a counter, s and f the two ends of an arrow, M a name.
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


class Lanes:
    """Threads of one process. Each name is a lane; more of that name are opened while things overlap."""

    def __init__(self, pid: int, name: str, sort: int) -> None:
        self.pid = pid
        self._sort = sort
        self._busy: dict[str, list[int | None]] = {}  # by name: until when each lane is taken; None while it is open
        self._numbers: dict[tuple[str, int], int] = {}
        self.names = [
            TraceEvent(ph="M", pid=pid, tid=0, name="process_name", args={"name": name}),
            TraceEvent(ph="M", pid=pid, tid=0, name="process_sort_index", args={"sort_index": sort}),
        ]

    def tid(self, name: str, lane: int = 0) -> int:
        """The number of a lane."""
        known = self._numbers.get((name, lane))
        if known is None:
            known = self._numbers[name, lane] = self.pid * THREADS + len(self._numbers) + 1
            shown = f"{name} ({lane + 1})" if lane else name
            self.names.append(TraceEvent(ph="M", pid=self.pid, tid=known, name="thread_name", args={"name": shown}))
        return known

    def take(self, name: str, at_ns: int) -> int:
        """A lane on which nothing is drawn from `at_ns` on."""
        lanes = self._busy.setdefault(name, [])
        for lane, until in enumerate(lanes):
            if until is not None and until <= at_ns:
                lanes[lane] = None
                return lane
        lanes.append(None)
        return len(lanes) - 1

    def free(self, name: str, lane: int, at_ns: int) -> None:
        """What was drawn on a lane ends."""
        self._busy[name][lane] = at_ns


class Span:
    """Something that has begun. `end` draws it. inside: what it is a part of; it is drawn on the same lane."""

    def __init__(
        self,
        lanes: Lanes,
        thread: str,
        name: str,
        at_ns: int,
        args: dict[str, object] | None = None,
        inside: "Span | None" = None,
    ) -> None:
        self.lanes, self.thread, self.name = lanes, thread, name
        self.args = args or {}
        self.at_ns: int = at_ns if inside is None else max(at_ns, inside.at_ns + SHORTEST_NS, inside.inner_ns)
        self.inside = inside
        self.inner_ns: int = 0  # until when it was filled
        self.lane: int = lanes.take(thread, at_ns) if inside is None else inside.lane

    @property
    def tid(self) -> int:
        """The thread it is drawn on."""
        return self.lanes.tid(self.thread, self.lane)

    def end(self, at_ns: int, zero_ns: int) -> TraceEvent:
        """The slice. zero_ns: the beginning of the timeline."""
        until = max(at_ns, self.at_ns + SHORTEST_NS, self.inner_ns + SHORTEST_NS)
        if self.inside is None:
            self.lanes.free(self.thread, self.lane, until)
        else:
            self.inside.inner_ns = until
        return TraceEvent(
            ph="X",
            pid=self.lanes.pid,
            tid=self.tid,
            name=self.name,
            cat=CATEGORY,
            ts=us(self.at_ns - zero_ns),
            dur=us(until - self.at_ns),
            args=self.args,
        )


def us(ns: int) -> float:
    """Nanoseconds in the unit of the format; exact to the nanosecond within a hundred days."""
    return ns / 1000
