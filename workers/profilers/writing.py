"""Traces on their way to the disk: written by a thread of their own, so that the training step goes on.

What was measured with torch 2.13 (600,000 events, 220 MB of JSON): torch writes them in 1.3 to 2.8 s, and holds the
interpreter's lock all that time; so the step goes on only as far as it runs outside of Python. It writes to a local
temporary directory (`TMPDIR`), so that a slow disk of the traces adds nothing to it: they are compressed from there
piece by piece, with the lock free. torch tells no error of a disk that is full; the file is looked at instead.
"""

import gzip
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final, Protocol

from schemas.errors import EngineError

PIECE: Final = 1 << 20
LEVEL: Final = 5
"""Of compression: twice as fast as the default, and a tenth larger."""
MOST_WAITING: Final = 8
"""Recordings held in memory until they are written; further stages are not recorded."""
_HEAD: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_TAIL: Final = re.compile(rb'\]\s*(,\s*"traceName"\s*:\s*"[^"]*"\s*)?\}\s*$')
_LINK: Final = re.compile(rb'("ph":\s*"[stf]",\s*"id":\s*)(\d+)([^{}]*?"cat":\s*"fwdbwd")')
_LINKS_APART: Final = 1 << 32


class Recording(Protocol):
    """What torch recorded: a profiler of `torch.profiler` that was stopped."""

    def export_chrome_trace(self, path: str) -> None: ...


class TraceFile:
    """One compressed trace, made of one recording or of several that follow each other.

    They share a time base (torch gives all recordings of a process the same one), and so become one trace when their
    events are put into one list. What links a forward to its backward is numbered from 1 in each: it is numbered anew.
    file: reserved; what is there until `close` is beside it. Methods raise EngineError, and leave nothing but what was
    whole.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.recordings = 0
        self._part = file.with_name(f".{file.name}.part")
        self._stream: gzip.GzipFile | None = None

    def add(self, recording: Recording) -> None:
        """Append what a recording holds."""
        try:
            local = tempfile.TemporaryDirectory(prefix="rolloutctl-", ignore_cleanup_errors=True)
        except OSError as error:
            raise self._given_up(f"no temporary directory can be made: {error}") from error
        with local as folder:
            raw = Path(folder, "raw.json")
            try:
                recording.export_chrome_trace(str(raw))
            except Exception as error:  # torch's code
                raise self._given_up(f"torch can't write it to {folder}: {error}") from error
            begin, end = self._events(raw)
            try:
                self._append(raw, begin, end)
            except OSError as error:
                raise self._given_up(f"{self.file.parent}: {error.strerror}") from error
        self.recordings += 1

    def close(self) -> bool:
        """Bring the file to its place. False when it holds nothing: then it is gone."""
        if self._stream is None:
            self.discard()
            return False
        try:
            self._stream.write(b"\n]}\n")
            self._stream.close()
            os.replace(self._part, self.file)
        except OSError as error:
            raise self._given_up(f"{self.file.parent}: {error.strerror}") from error
        return True

    def discard(self) -> None:
        """Remove what there is."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):
                stream.close()
        for file in (self._part, self.file):
            with suppress(OSError):
                file.unlink()

    def _append(self, raw: Path, begin: int, end: int) -> None:
        with open(raw, "rb") as source:
            if self._stream is None:
                self._stream = gzip.GzipFile(self._part, "xb", LEVEL)
                self._stream.write(source.read(begin))
            else:
                self._stream.write(b",\n")
            source.seek(begin)
            left, rest = end - begin, b""
            while left and (piece := source.read(min(PIECE, left))):
                left -= len(piece)
                piece = rest + piece
                cut = piece.rfind(b"}") + 1 if left else len(piece)
                rest = piece[cut:]
                self._stream.write(self._renumbered(piece[:cut]))

    def _renumbered(self, piece: bytes) -> bytes:
        if not self.recordings:
            return piece
        apart = self.recordings * _LINKS_APART
        return _LINK.sub(lambda found: b"%s%d%s" % (found[1], int(found[2]) + apart, found[3]), piece)

    def _events(self, raw: Path) -> tuple[int, int]:
        """Where the list of events begins and ends. Raises EngineError for a file that is not whole."""
        try:
            size = raw.stat().st_size
            with open(raw, "rb") as source:
                head = _HEAD.search(source.read(PIECE))
                source.seek(max(0, size - PIECE))
                tail = _TAIL.search(source.read())
        except OSError:
            head = tail = None
            size = 0
        if head is None or tail is None:
            free = os.statvfs(raw.parent)
            raise self._given_up(
                f"torch wrote {size} bytes to {raw.parent}, which are no whole trace; {free.f_bavail * free.f_frsize} "
                "bytes are free there"
            )
        return head.end(), max(0, size - PIECE) + tail.start()

    def _given_up(self, why: str) -> EngineError:
        self.discard()
        return EngineError(f"the trace {self.file.name} was not written: {why}. What was recorded of it is lost.")


class Writer:
    """A thread that does one thing after the other. It lives from the first until `finish`; a daemon."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def require_room(self) -> None:
        """Raise EngineError while so much waits that no more may be recorded."""
        if (waiting := self._waiting.qsize()) >= MOST_WAITING:
            raise EngineError(f"{waiting} recordings wait to be written, and no more are kept in memory.")

    def put(self, work: Callable[[], None]) -> None:
        """Have it done. Never waits."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="rolloutctl-traces", daemon=True)
            self._thread.start()
        self._waiting.put(work)

    def finish(self) -> None:
        """Wait until all of it is done."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception as error:  # torch's code: the next trace may be well
                self.failures.append(str(error) if isinstance(error, EngineError) else repr(error))
