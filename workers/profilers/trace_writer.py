"""Writes traces on a thread of its own, so that the training step goes on.

Measured with torch 2.13 (600,000 events, 220 MB of JSON): torch writes them in 1.3 to 2.8 s and holds the interpreter's
lock all that time, so the step goes on only as far as it runs outside of Python. torch writes to a local temporary
directory (`TMPDIR`), so that a slow disk for the traces adds nothing to that time. From there the JSON is compressed
piece by piece, without the lock. torch reports no error when a disk is full, so the file itself is checked.
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

CHUNK_BYTES: Final = 1 << 20
COMPRESSION_LEVEL: Final = 5
"""Twice as fast as the default, and a tenth larger."""
MAX_WAITING: Final = 8
"""Recordings held in memory until they are written. While there are so many, no further stage is recorded."""
_HEAD: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_TAIL: Final = re.compile(rb'\]\s*(,\s*"traceName"\s*:\s*"[^"]*"\s*)?\}\s*$')
_LINK: Final = re.compile(rb'("ph":\s*"[stf]",\s*"id":\s*)(\d+)([^{}]*?"cat":\s*"fwdbwd")')
_LINK_ID_OFFSET: Final = 1 << 32


class StoppedProfiler(Protocol):
    """A profiler of `torch.profiler` that was stopped, with what it recorded."""

    def export_chrome_trace(self, path: str) -> None: ...


class CompressedTrace:
    """One compressed trace, made of one recording or of several that follow each other.

    All recordings of a process have the same time base in torch, so their events can be joined into one list. The links
    from a forward to its backward are numbered from 1 in each recording, and are renumbered here. Until `close` the
    trace is written to a file beside its final place. Methods raise EngineError, and then nothing incomplete is left.

    Args:
        file: The final place, reserved by an empty file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.recordings = 0
        self._part = file.with_name(f".{file.name}.part")
        self._stream: gzip.GzipFile | None = None

    def add(self, recording: StoppedProfiler) -> None:
        """Append the events of a recording."""
        try:
            local = tempfile.TemporaryDirectory(prefix="rolloutctl-", ignore_cleanup_errors=True)
        except OSError as error:
            raise self._fail(f"no temporary directory can be made: {error}") from error
        with local as folder:
            raw = Path(folder, "raw.json")
            try:
                recording.export_chrome_trace(str(raw))
            except Exception as error:  # torch's code
                raise self._fail(f"torch can't write it to {folder}: {error}") from error
            begin, end = self._find_events(raw)
            try:
                self._append(raw, begin, end)
            except OSError as error:
                raise self._fail(f"{self.file.parent}: {error.strerror}") from error
        self.recordings += 1

    def close(self) -> bool:
        """Move the file to its final place. Returns False when it holds nothing, and then no file is left."""
        if self._stream is None:
            self.discard()
            return False
        try:
            self._stream.write(b"\n]}\n")
            self._stream.close()
            os.replace(self._part, self.file)
        except OSError as error:
            raise self._fail(f"{self.file.parent}: {error.strerror}") from error
        return True

    def discard(self) -> None:
        """Remove all files of this trace."""
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
                self._stream = gzip.GzipFile(self._part, "xb", COMPRESSION_LEVEL)
                self._stream.write(source.read(begin))
            else:
                self._stream.write(b",\n")
            source.seek(begin)
            left, rest = end - begin, b""
            while left and (chunk := source.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                chunk = rest + chunk
                cut = chunk.rfind(b"}") + 1 if left else len(chunk)
                rest = chunk[cut:]
                self._stream.write(self._renumber(chunk[:cut]))

    def _renumber(self, events: bytes) -> bytes:
        if not self.recordings:
            return events
        offset = self.recordings * _LINK_ID_OFFSET
        return _LINK.sub(lambda link: b"%s%d%s" % (link[1], int(link[2]) + offset, link[3]), events)

    def _find_events(self, raw: Path) -> tuple[int, int]:
        """Return where the list of events begins and ends. Raises EngineError for a file that is cut off."""
        try:
            size = raw.stat().st_size
            with open(raw, "rb") as source:
                head = _HEAD.search(source.read(CHUNK_BYTES))
                source.seek(max(0, size - CHUNK_BYTES))
                tail = _TAIL.search(source.read())
        except OSError:
            head = tail = None
            size = 0
        if head is None or tail is None:
            free = os.statvfs(raw.parent)
            raise self._fail(
                f"torch wrote {size} bytes to {raw.parent}, which are not a complete trace; "
                f"{free.f_bavail * free.f_frsize} bytes are free there"
            )
        return head.end(), max(0, size - CHUNK_BYTES) + tail.start()

    def _fail(self, why: str) -> EngineError:
        self.discard()
        return EngineError(f"the trace {self.file.name} was not written: {why}. What was recorded of it is lost.")


class TraceWriter:
    """Does work in order on a daemon thread, which lives from the first `put` until `finish`.

    Attributes:
        failures: Errors of the work done so far.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def require_room(self) -> None:
        """Raise EngineError while too many recordings wait to be written."""
        if (waiting := self._waiting.qsize()) >= MAX_WAITING:
            raise EngineError(f"{waiting} recordings wait to be written, and no more are kept in memory.")

    def put(self, work: Callable[[], None]) -> None:
        """Queue work. Never waits."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="rolloutctl-traces", daemon=True)
            self._thread.start()
        self._waiting.put(work)

    def finish(self) -> None:
        """Wait until all work is done."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception as error:  # of torch's code; the next trace may still succeed
                self.failures.append(str(error) if isinstance(error, EngineError) else repr(error))
