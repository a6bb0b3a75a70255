"""Torch traces of engines and training ranks: found, checked, and streamed into a timeline on the bus's clock.

A torch trace is an object with `traceEvents`. The `ts` of each event is in µs after `baseTimeNanoseconds`, or after the
Unix epoch without that field, which may stand before or after the events. A file is therefore read several times: for
its digest, for its base and rank, and for its events, one at a time. Memory does not grow with the file.

A trace has several processes: Python, each GPU, the profiler itself. All of a rank's traces become one process here,
with threads for each trace; what has no events gets no name, and so no track. Process, thread and arrow numbers are
unique within a trace only, so each gets a new number.
"""

import gzip
import hashlib
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import count
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, NamedTuple

from controlplane.timeline.survey import ReportedTrace

READ_BYTES: Final = 1 << 20
FIRST_PID: Final = 100_001
"""Traces are numbered from here; the bus and its agents have smaller numbers."""
FIRST_TID: Final = 1_000_000_001
ARROW_BITS: Final = 40
"""Bits of a trace's own arrow number; the file's number stands above them."""
TEXT_BYTES: Final = 64 << 20
"""Most bytes between two quotes."""
LANES_MAX: Final = 64
"""Lanes of one thread. What overlaps more is drawn on the last."""
TIME_DIGITS: Final = 18
"""Digits of a time in µs before the point."""
FIELD_BYTES: Final = 4_096
"""Longest field that is found when it spans two reads."""
_BASE: Final = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,20})\s*[,}]')
_FIRST: Final = re.compile(rb'"ph"\s*:\s*"X".{0,%d}?"ts"\s*:\s*"?(\d{1,20}(?:\.\d{1,9})?)' % FIELD_BYTES, re.DOTALL)
_RANK: Final = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,9})')
_NOT_FINITE: Final = re.compile(rb'((?<!\\)"\s*:\s*)-?(?:NaN|nan|Infinity|inf)(?=\s*[,}])')
"""A value that JSON does not have, directly after a key, so never inside a string. Python and C both write those."""
_NOT_FINITE_WORDS: Final = tuple(w + end for w in (b"NaN", b"nan", b"ity", b"inf") for end in (b",", b"}", b" ", b"\n"))
"""Searched for first: several times faster than the expression."""
_UNREADABLE: Final = (OSError, EOFError, zlib.error)
_MALFORMED: Final = (TypeError, ValueError, ArithmeticError, AttributeError)
"""Raised by an event that is no object, or whose fields have the wrong type or an infinite time."""

JsonEvent = dict[str, Any]


class FoundTrace(NamedTuple):
    """A trace file that matches what the log says.

    Attributes:
        base_ns: What its `ts` are relative to, on its node's wall clock.
        first_ns: Begin of its first slice, on that clock; None if it has no slices.
        rank: Within its torch.distributed group; None if the file does not say.
    """

    path: Path
    reported: ReportedTrace
    base_ns: int
    first_ns: int | None
    rank: int | None


def is_torch_trace(path: str) -> bool:
    """Whether a file's name is that of a torch trace. SGLang's merged file repeats its ranks' files: it is none."""
    name = PurePosixPath(path).name
    return name.endswith((".trace.json", ".trace.json.gz")) and not name.startswith("merged-")


def find_trace(reported: ReportedTrace, roots: Sequence[Path]) -> FoundTrace | str:
    """Return the file below one of the roots, or why it can't be used."""
    mismatches: list[str] = []
    for name in reported.paths:
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            return f"{name}: not a path below a traces root"
        for root in roots:
            file = root / relative
            try:
                if not file.is_file():
                    continue
                mismatch = _mismatch(file, reported)
                if mismatch is None:
                    return _scan(file, reported)
                mismatches.append(f"{file} {mismatch}")
            except _UNREADABLE as error:
                mismatches.append(f"{file} can't be read: {error}")
    where = ", ".join(map(str, roots))
    return f"{reported.paths[0]}: {'; '.join(mismatches) or f'not found ({where})'}"


def _mismatch(file: Path, reported: ReportedTrace) -> str | None:
    size, expected = file.stat().st_size, reported.trace
    if size != expected.nbytes:
        return f"has {size} bytes, the log says {expected.nbytes}"
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 != expected.sha256:
        return f"has sha256 {sha256[:16]}…, the log says {expected.sha256[:16]}…: another file"
    return None


def _scan(path: Path, reported: ReportedTrace) -> FoundTrace:
    """Read what must be known before the events."""
    base_ns, first_us, rank, tail = 0, None, None, b""
    with _open(path) as stream:
        while piece := stream.read(READ_BYTES):
            text = tail + piece
            if first_us is None and (match := _FIRST.search(text)):
                first_us = Decimal(match.group(1).decode())
            if match := _BASE.search(text):
                base_ns = int(match.group(1))
            if rank is None and (match := _RANK.search(text)):
                rank = int(match.group(1))
            tail = text[-FIELD_BYTES:]
    first_ns = None if first_us is None else base_ns + int(first_us * 1000)
    return FoundTrace(path, reported, base_ns, first_ns, rank)


class _Thread:
    """A thread of a trace, drawn on one lane or more: viewers don't draw a slice that outlasts the one around it.

    Kernels on one stream overlap when each is launched before the previous one has ended. A Python call can end some µs
    after its caller.
    """

    def __init__(self, name: str, tids: Iterator[int]) -> None:
        self.name, self._tids = name, tids
        self.device = ""
        self.sort_index: object = None
        self.used = False
        self.first_tid = self.last_tid = next(tids)
        self.last_ns = -1  # begin of the last slice; its lane is `last_tid`
        self._category = ""
        self._open: dict[int, list[int]] = {self.first_tid: []}  # by lane: ends of its open slices, outermost first

    def place(self, ts_ns: int, end_ns: int, category: str) -> int:
        """Return the number of the first lane on which a slice nests."""
        if ts_ns < self.last_ns and category != self._category:  # torch writes one category after the other, in order
            for ends in self._open.values():
                ends.clear()
        tid = next((tid for tid, ends in self._open.items() if _nests(ts_ns, end_ns, ends)), None)
        if tid is None and len(self._open) >= LANES_MAX:
            tid = next(reversed(self._open))
        if tid is None:
            tid = next(self._tids)
            self._open[tid] = []
        self._open[tid].append(end_ns)
        self.last_ns, self.last_tid, self._category = ts_ns, tid, category
        return tid

    def names(self, pid: int) -> Iterator[JsonEvent]:
        """Name and position of each lane."""
        name = f"{self.device} {self.name}".lstrip()
        for number, tid in enumerate(self._open, start=1):
            yield _metadata("thread_name", pid, tid, "name", f"{name} ({number})" if number > 1 else name)
            if self.sort_index is not None:
                yield _metadata("thread_sort_index", pid, tid, "sort_index", self.sort_index)


def _nests(ts_ns: int, end_ns: int, ends: list[int]) -> bool:
    """Whether a slice lies inside the open slices of a lane. Those that have ended are removed."""
    while ends and ends[-1] <= ts_ns:
        ends.pop()
    return not ends or end_ns <= ends[-1]


class Numbers:
    """Process, thread and file numbers of one timeline; those of processes by the owners of traces."""

    def __init__(self) -> None:
        self.files, self.tids = count(1), count(FIRST_TID)
        self.pids: defaultdict[str, int] = defaultdict(count(FIRST_PID).__next__)


class TorchTrace:
    """The events of one file, on the bus's clock: `shift_ns` is what to add to its `ts` to get those of the timeline.

    It is drawn in the process of its `owner`, with that one's other traces.

    Attributes:
        count: Events yielded so far, without names.
        before: How many of them lie before the timeline begins.
        malformed: Events that were left out: without a valid time, process, thread or number.
    """

    def __init__(self, file: FoundTrace, owner: str, shift_ns: int, sort: int, numbers: Numbers) -> None:
        self.count = self.before = self.malformed = 0
        self.fault: str | None = None
        self._file, self._owner, self._shift_ns, self._sort, self._numbers = file, owner, shift_ns, sort, numbers
        self._number, self._pid = next(numbers.files), numbers.pids[owner]
        self._devices: dict[object, str] = {}  # by number of a process in the trace
        self._threads: dict[tuple[object, object], _Thread] = {}  # by process and thread in the trace

    def events(self) -> Iterator[JsonEvent]:
        """Yield the events one by one, then the names of processes and threads."""
        import ijson  # slow to import, and few commands need it

        try:
            with _open(self._file.path) as file:
                for event in ijson.items(_ValidJson(file), "traceEvents.item", buf_size=READ_BYTES):
                    try:
                        converted = self._convert(event)
                    except _MALFORMED:
                        self.malformed += 1
                        continue
                    if converted is not None:
                        yield converted
        except (ijson.JSONError, *_UNREADABLE) as error:
            self.fault = next(iter(str(error).splitlines()), type(error).__name__)
        yield from self._names()

    def _convert(self, event: JsonEvent) -> JsonEvent | None:
        """Move an event to the timeline. Returns None for a name, which `_names` yields."""
        kind, process = event.get("ph"), event.get("pid", "")
        if kind == "M":
            self._note_name(event, process)
            return None
        thread = self._thread(process, event.get("tid", ""))
        event["pid"], event["tid"] = self._pid, thread.first_tid
        for name in ("id", "bind_id"):
            if name in event:
                event[name] = self._number << ARROW_BITS | int(str(event[name]), 0) % (1 << ARROW_BITS)
        if "ts" in event:
            ts_ns = end_ns = _nanoseconds(event["ts"]) + self._shift_ns
            if kind == "X" and "dur" in event:
                end_ns += _nanoseconds(event["dur"])
                category = str(event.get("cat"))
                if category == "user_annotation":  # it may outlast the Python call that it begins in
                    thread = self._thread(process, f"annotations (thread {thread.name})")
                event["tid"], event["dur"] = thread.place(ts_ns, end_ns, category), (end_ns - ts_ns) / 1000
            elif kind in ("s", "t", "f") and thread.last_ns == ts_ns:
                event["tid"] = thread.last_tid  # an arrow follows the slice that it is bound to
            event["ts"] = ts_ns / 1000
            self.before += ts_ns < 0
        if event.get("s") == "g":  # an instant of the whole file, which is one process among others here
            event["s"] = "p"
        # Arrows, counters and instants of a process make no track for a thread.
        thread.used = thread.used or (kind not in ("s", "t", "f", "C") and event.get("s") != "p")
        self.count += 1
        return event

    def _note_name(self, event: JsonEvent, process: object) -> None:
        """Remember the name of a thread or device. `_names` yields those that have events."""
        kind, args = str(event.get("name")), event.get("args")
        fields = args if isinstance(args, dict) else {}
        if kind == "process_labels":
            self._devices[process] = str(fields.get("labels", ""))
        elif kind.startswith("thread_"):
            thread = self._thread(process, event.get("tid", ""))
            thread.name = str(fields.get("name", "")).rstrip() or thread.name
            thread.sort_index = fields.get("sort_index", thread.sort_index)

    def _names(self) -> Iterator[JsonEvent]:
        if not self.count:
            return
        yield _metadata("process_name", self._pid, 0, "name", self._owner)
        yield _metadata("process_sort_index", self._pid, 0, "sort_index", self._sort)
        for (process, _), thread in self._threads.items():
            device = self._devices.get(process, "")
            thread.device = thread.device if device in ("", "CPU") else device
            if thread.used:
                yield from thread.names(self._pid)

    def _thread(self, process: object, original: object) -> _Thread:
        thread = self._threads.get((process, original))
        if thread is None:
            name = str(original) or "profiler"  # torch's numbers some of its own with an empty text
            thread = self._threads[process, original] = _Thread(name, self._numbers.tids)
        return thread


def _nanoseconds(microseconds: str | int | Decimal) -> int:
    """Raises ValueError for a time that is infinite or has too many digits: to write out 1e999999 takes long."""
    time = Decimal(microseconds)
    if not time.is_finite() or time.adjusted() >= TIME_DIGITS:
        raise ValueError("a time out of bounds")
    return int(time * 1000)


def _metadata(kind: str, pid: int, tid: int, field: str, value: object) -> JsonEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {field: value}}


class _ValidJson:
    """A trace in which numbers that are not finite are null, and bytes that are not UTF-8 a replacement character.

    Strict parsers stop at either.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """Return some bytes, not necessarily `size`; none at the end."""
        while piece := self._file.read(size):
            text = self._rest + piece
            if len(text) > TEXT_BYTES:
                raise EOFError(f"{TEXT_BYTES:,} bytes without a name or a text: it is no trace")
            at = text.rfind(b'"')  # whatever begins before the last quote ends before it
            while at > 0 and text[at - 1 : at] == b"\\":
                at = text.rfind(b'"', 0, at)
            self._rest = text[max(0, at) :]
            if at > 0:
                return _valid(text[:at])
        text, self._rest = self._rest, b""
        return _valid(text)


def _valid(text: bytes) -> bytes:
    """Correct a text that begins and ends between values."""
    if any(word in text for word in _NOT_FINITE_WORDS):
        text = _NOT_FINITE.sub(rb"\1null", text)
    return text.decode(errors="replace").encode()


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
