"""The traces that engines and training ranks left, found, checked, and streamed into a timeline on the bus's clock.

A torch trace is an object with `traceEvents`; `ts` of each is in µs after `baseTimeNanoseconds` (of the Unix epoch when
there is no such field), which may stand before or after the events. So a file is read twice: once for its digest, base
and rank, and once for its events, one at a time: memory does not grow with the file.

Numbers of processes, threads and arrows are a trace's own. Here each gets another, unlike those of all other files.
"""

import gzip
import hashlib
import re
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, NamedTuple

from controlplane.timeline.alignment import ToldTrace

READ_BYTES: Final = 1 << 20
FIRST_PID: Final = 100_000
"""Of traces; the bus and its agents have smaller numbers."""
FIRST_TID: Final = 1_000_000_000
ARROW_BITS: Final = 40
"""Of a trace's own number of an arrow; above them stands the file's."""
LANES: Final = 32
"""Of one thread, at most: as many slices overlap, and more are cut."""
FIELD_BYTES: Final = 4_096
"""Longest field that is looked for in a file read piece by piece."""
_BASE: Final = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,20})\s*[,}]')
_FIRST: Final = re.compile(rb'"ph"\s*:\s*"X".{0,%d}?"ts"\s*:\s*"?(\d{1,20}(?:\.\d{1,9})?)' % FIELD_BYTES, re.DOTALL)
_RANK: Final = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,9})')
_STACKS: Final = b'"python_function"'
_NO_NUMBERS: Final = tuple(word + end for word in (b"NaN", b"nan", b"ity", b"inf") for end in (b",", b"}", b" ", b"\n"))
"""Looked for at first: that is several times as fast as the expression below."""
_NO_NUMBER: Final = re.compile(rb'((?<!\\)"\s*:\s*)-?(?:NaN|nan|Infinity|inf)(?=\s*[,}])')
"""A value that JSON has not, where it can't be a part of a text: after a key. Python writes those, and so does C."""
_UNREADABLE: Final = (OSError, EOFError, zlib.error)
_ODD: Final = (TypeError, ValueError, ArithmeticError, AttributeError)
"""Of an event whose fields are not what they should be: no object, a time that is none or beyond all numbers."""

Event = dict[str, Any]


class TraceFile(NamedTuple):
    """One file that was found and is what the log says. base_ns: of its `ts`, on the wall clock of its node.

    first_ns: when its first slice begins, on that clock; None when it has none.
    rank: within its torch.distributed group; None when the file does not tell.   stacks: it has Python's calls, too.
    loose: it has numbers that are none, or texts that are not UTF-8.
    """

    path: Path
    told: ToldTrace
    base_ns: int
    first_ns: int | None
    rank: int | None
    stacks: bool
    loose: bool


def is_torch_trace(path: str) -> bool:
    """By its name. SGLang's merged file repeats what the files of its ranks hold."""
    name = PurePosixPath(path).name
    return name.endswith((".trace.json", ".trace.json.gz", ".pt.trace.json.gz")) and not name.startswith("merged-")


def found(told: ToldTrace, roots: Sequence[Path]) -> TraceFile | str:
    """The file below one of the roots, or why it can't be had."""
    seen: list[str] = []
    for name in told.paths:
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            return f"{name}: not a path below a traces root"
        for root in roots:
            file = root / relative
            try:
                if not file.is_file():
                    continue
                size = file.stat().st_size
                if size != told.trace.nbytes:
                    seen.append(f"{file} has {size} bytes, the log says {told.trace.nbytes}")
                    continue
                scanned = _scanned(file)
            except _UNREADABLE as error:
                seen.append(f"{file} can't be read: {error}")
                continue
            if scanned.sha256 == told.trace.sha256:
                return TraceFile(file, told, *scanned[:-1])
            seen.append(
                f"{file} has sha256 {scanned.sha256[:16]}…, the log says {told.trace.sha256[:16]}…: another file"
            )
    where = ", ".join(map(str, roots)) or "no traces root was given"
    return f"{told.paths[0]}: {'; '.join(seen) or f'not found ({where})'}"


class Numbers:
    """Gives out the numbers of processes and threads, and tells arrows of different files apart."""

    def __init__(self) -> None:
        self._pid, self._tid, self._file = FIRST_PID, FIRST_TID, 0

    def file(self) -> int:
        """Of the next file; from 1 on, so that our own arrows are apart as well."""
        self._file += 1
        return self._file

    def pid(self) -> int:
        """Of the next process."""
        self._pid += 1
        return self._pid

    def tid(self) -> int:
        """Of the next thread."""
        self._tid += 1
        return self._tid


class Nest:
    """The slices of one thread that are open, from the outermost in, while its slices come in the order of their start.

    torch writes them in that order. Whatever comes out of it is left as it is.
    """

    def __init__(self) -> None:
        self._ends_ns: list[int] = []
        self._last_ns = 0

    def room(self, ts_ns: int) -> int | None:
        """Until when the slice around this moment goes on, counted from it; None when there is none."""
        if ts_ns < self._last_ns:
            return None
        while self._ends_ns and self._ends_ns[-1] <= ts_ns:
            self._ends_ns.pop()
        return self._ends_ns[-1] - ts_ns if self._ends_ns else None

    def add(self, ts_ns: int, dur_ns: int) -> None:
        """One more slice."""
        if ts_ns >= self._last_ns:
            self._last_ns = ts_ns
            self._ends_ns.append(ts_ns + dur_ns)


class TorchTrace:
    """The events of one file, on the bus's clock. whose: stands before the names of its processes.

    shift_ns: what to add to a `ts` of the file, in ns, for one of the timeline.   sort: among the processes.
    count: events that were given so far.   before: how many lie before the beginning of the timeline.
    last_ns: when the last of them was, after the beginning.
    odd: how many were left out, for they have no place that can be told.
    fault: why the file was not read to its end, if it was not.
    """

    def __init__(self, file: TraceFile, whose: str, shift_ns: int, sort: int, numbers: Numbers) -> None:
        self.count = self.before = self.odd = self.last_ns = 0
        self.fault: str | None = None
        self._file, self._whose, self._shift_ns, self._sort, self._numbers = file, whose, shift_ns, sort, numbers
        self._number = numbers.file()
        self._pids: dict[object, int] = {}
        self._tids: dict[tuple[int, object], int] = {}
        self._named: set[int] = set()  # processes
        self._said: dict[int, dict[str, object]] = {}  # by thread: what the file says of it
        self._nests: dict[tuple[int, int, bool], Nest] = {}
        self._lanes: dict[tuple[int, int], int] = {}  # by thread and lane, the first of which is the thread itself
        self._drawn: dict[int, tuple[int, int]] = {}  # by thread: when its last slice began, and on which lane's thread
        self._stages: dict[int, int] = {}  # by thread: that of its annotations, where they have one of their own

    def events(self) -> Iterator[Event]:
        """One after the other, and the names of what has none."""
        import ijson  # on use: few commands need it

        with ExitStack() as stack:
            try:
                file = _opened(stack, self._file.path)
                stream = _Strict(file) if self._file.loose else file
                for event in ijson.items(stream, "traceEvents.item", buf_size=READ_BYTES):
                    try:
                        moved = self._moved(event)
                    except _ODD:
                        self.odd += 1
                        continue
                    if moved is not None:
                        self.count += 1
                        yield moved
            except (ijson.JSONError, UnicodeDecodeError, *_UNREADABLE) as error:
                self.fault = next(iter(str(error).splitlines()), type(error).__name__)
        yield from self._names()

    def _moved(self, event: Event) -> Event | None:
        kind = event.get("ph")
        pid = self._pid_of(event.get("pid", ""))
        if kind == "M" and not self._rename(event, pid):
            return None
        event["pid"] = pid
        process_wide = kind == "M" and not str(event.get("name")).startswith("thread_")
        event["tid"] = tid = 0 if process_wide else self._tid_of(pid, event.get("tid", ""))
        if "ts" in event:
            ts_ns = int(Decimal(event["ts"]) * 1000) + self._shift_ns
            event["ts"] = ts_ns / 1000
            if kind == "X" and "dur" in event:
                self._nest(event, ts_ns, int(Decimal(event["dur"]) * 1000))
            elif kind in ("s", "t", "f") and self._drawn.get(tid, (None, tid))[0] == ts_ns:
                event["tid"] = self._drawn[tid][1]  # it stands behind the slice that it is bound to
            if kind != "M":
                self.before += ts_ns < 0
                self.last_ns = max(self.last_ns, ts_ns)
        if event.get("s") == "g":  # of all that this file shows, and that is one process among others here
            event["s"] = "p"
        for name in ("id", "bind_id"):
            if name in event:
                event[name] = self._arrow(event[name])
        return event

    def _nest(self, event: Event, ts_ns: int, dur_ns: int) -> None:
        """Have a slice lie within the one around it, for no viewer draws one that goes on after that; or on a lane of
        its own, a thread of the same name.

        Kernels on one stream overlap where each is launched before the one before it has ended. Where Python's calls
        are recorded, torch has an annotation begin within the call that made it and go on after that, so annotations
        get a thread of their own. And those calls can end some µs after the one around them, so they are cut.
        """
        thread = tid = event["tid"]
        category = str(event.get("cat"))
        if self._file.stacks and category == "user_annotation":
            if tid not in self._stages:
                self._stages[tid] = self._numbers.tid()
            tid = self._stages[tid]
        is_call = category == "python_function"  # they come after all others
        for lane in range(LANES):
            around = self._nests.setdefault((tid, lane, is_call), Nest())
            room_ns = around.room(ts_ns)
            if room_ns is None or dur_ns <= room_ns or is_call:
                break
        if room_ns is not None and dur_ns > room_ns:
            dur_ns = room_ns
        around.add(ts_ns, dur_ns)
        event["dur"], event["tid"] = dur_ns / 1000, self._lane(tid, lane)
        if tid == thread:
            self._drawn[thread] = ts_ns, event["tid"]

    def _lane(self, tid: int, lane: int) -> int:
        """The number of its thread."""
        if not lane:
            return tid
        if (tid, lane) not in self._lanes:
            self._lanes[tid, lane] = self._numbers.tid()
        return self._lanes[tid, lane]

    def _rename(self, event: Event, pid: int) -> bool:
        """Say whose process it is. Returns whether the name is worth keeping."""
        kind, args = event.get("name"), event.get("args")
        if kind == "process_sort_index":
            return False
        if kind == "process_name" and isinstance(args, dict):
            args["name"] = f"{self._whose}: {args.get('name', '')}"
            self._named.add(pid)
        elif kind in ("thread_name", "thread_sort_index"):
            self._said.setdefault(self._tid_of(pid, event.get("tid", "")), {})[kind] = args
        return True

    def _names(self) -> Iterator[Event]:
        """Of what the file did not name itself, and where to show it."""
        for original, pid in self._pids.items():
            if pid not in self._named:
                name = f"{self._whose}: {_shown(original)}"
                yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": self._sort}}
        threads: dict[int, tuple[int, str, object]] = {}
        for (pid, original), tid in self._tids.items():
            said = self._said.get(tid, {})
            threads[tid] = pid, _name_in(said.get("thread_name")) or _shown(original), said.get("thread_sort_index")
            if "thread_name" not in said:
                yield _thread(pid, tid, "name", {"name": _shown(original)})
            if tid in self._stages:
                threads[self._stages[tid]] = pid, f"stages (thread {_shown(original)})", None
                yield _thread(pid, self._stages[tid], "name", {"name": threads[self._stages[tid]][1]})
        for (tid, lane), number in self._lanes.items():
            pid, name, place = threads[tid]
            yield _thread(pid, number, "name", {"name": f"{name} ({lane + 1})"})
            if place is not None:
                yield _thread(pid, number, "sort_index", place)

    def _pid_of(self, original: object) -> int:
        known = self._pids.get(original)
        if known is None:
            known = self._pids[original] = self._numbers.pid()
        return known

    def _tid_of(self, pid: int, original: object) -> int:
        known = self._tids.get((pid, original))
        if known is None:
            known = self._tids[pid, original] = self._numbers.tid()
        return known

    def _arrow(self, original: object) -> object:
        number = original
        if isinstance(original, str):
            try:
                number = int(original, 0)
            except ValueError:
                return f"{self._number}/{original}"
        if not isinstance(number, int):
            return f"{self._number}/{original}"
        return self._number << ARROW_BITS | (number & ((1 << ARROW_BITS) - 1))


def _shown(original: object) -> str:
    """The name of a process or thread that has none of its own; some numbers of torch's profiler are empty texts."""
    return str(original) or "profiler"


def _name_in(args: object) -> str:
    """What a file names a thread; "" if it does not."""
    name = args.get("name") if isinstance(args, dict) else None
    return name.rstrip() if isinstance(name, str) else ""


def _thread(pid: int, tid: int, kind: str, args: object) -> Event:
    return {"ph": "M", "name": f"thread_{kind}", "pid": pid, "tid": tid, "args": args}


class _Hashed:
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """As that of the file."""
        data = self._file.read(size)
        self.sha256.update(data)
        return data


class _Strict:
    """A trace in which what is no number is null, and what is not UTF-8 a mark. A parser would end there."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        """Some bytes, none at the end."""
        while piece := self._file.read(size):
            text = self._rest + piece
            at = text.rfind(b'"')  # what begins before the last quote ends before it
            while at > 0 and text[at - 1 : at] == b"\\":
                at = text.rfind(b'"', 0, at)
            self._rest = text[max(0, at) :]
            if at > 0:
                return _strict(text[:at])
        text, self._rest = self._rest, b""
        return _strict(text)


def _strict(text: bytes) -> bytes:
    """It does not begin or end within a value."""
    return _NO_NUMBER.sub(rb"\1null", text).decode(errors="replace").encode()


class _Scanned(NamedTuple):
    base_ns: int
    first_ns: int | None
    rank: int | None
    stacks: bool
    loose: bool
    sha256: str


def _scanned(path: Path) -> _Scanned:
    """What has to be known of a file before its events. Raises OSError, EOFError, zlib.error: it can't be read."""
    base_ns, first, rank, stacks, loose, tail = 0, b"", None, False, False, b""
    letters = getincrementaldecoder("utf-8")()
    with ExitStack() as stack:
        raw = _Hashed(stack.enter_context(open(path, "rb")))
        stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw  # type: ignore[call-overload]
        while piece := stream.read(READ_BYTES):
            text = tail + piece
            if not first and (seen := _FIRST.search(text)) is not None:
                first = seen.group(1)
            if (seen := _BASE.search(text)) is not None:
                base_ns = int(seen.group(1))
            if rank is None and (seen := _RANK.search(text)) is not None:
                rank = int(seen.group(1))
            stacks = stacks or _STACKS in text
            if not loose:
                loose = any(word in text for word in _NO_NUMBERS) and _NO_NUMBER.search(text) is not None
                try:
                    letters.decode(piece)
                except UnicodeDecodeError:
                    loose = True
            tail = text[-FIELD_BYTES:]
        while raw.read(READ_BYTES):  # what stands after the last block of a compressed file
            pass
    first_ns = base_ns + int(Decimal(first.decode()) * 1000) if first else None
    return _Scanned(base_ns, first_ns, rank, stacks, loose, raw.sha256.hexdigest())


def _opened(stack: ExitStack, path: Path) -> IO[bytes] | gzip.GzipFile:
    file = stack.enter_context(path.open("rb"))
    return stack.enter_context(gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
