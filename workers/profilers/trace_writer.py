"""Writes traces on a thread of its own, so that the training step can continue.

Measured with torch 2.13 (600,000 events, 220 MB of JSON): torch writes them in 1.3 to 2.8 s and holds the interpreter's
lock all that time, so the step continues only as far as it runs outside of Python. torch writes to a local temporary
directory (`TMPDIR`), so that a slow disk for the traces adds nothing to that time. From there the JSON is compressed
piece by piece, without the lock. torch reports no error when a disk is full, so the file itself is checked.
"""

import gzip
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from schemas.errors import EngineError
from workers import background
from workers.profilers.recorder import reason

CHUNK_BYTES: Final = 1 << 20
COMPRESSION_LEVEL: Final = 5
"""Twice as fast as the default, and a tenth larger."""
MAX_WAITING: Final = 8
"""Most recordings held in memory until they are written. While there are that many, no further stage is recorded."""
_HEAD: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_TAIL: Final = re.compile(rb'\]\s*(,\s*"traceName"\s*:\s*"[^"]*"\s*)?\}\s*$')
_LINK: Final = re.compile(rb'("ph":\s*"[stf]",\s*"id":\s*)(\d+)([^{}]*?"cat":\s*"fwdbwd")')
_LINK_ID_OFFSET: Final = 1 << 32


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

    def add(self, export: Callable[[str], object]) -> None:
        """Append the events of a recording, which `export` writes to the path that it gets."""
        try:
            with tempfile.TemporaryDirectory(prefix="rolloutctl-", ignore_cleanup_errors=True) as folder:
                raw = Path(folder, "raw.json")
                export(str(raw))
                self._append(raw)
        except Exception as error:  # of torch's code, too
            raise self._failed(error) from error
        self.recordings += 1

    def close(self) -> bool:
        """Move the file to its final place. Returns False when it holds nothing, and then no file is left."""
        if self._stream is None:
            return False
        try:
            self._stream.write(b"\n]}\n")
            self._stream.close()
            os.replace(self._part, self.file)
        except OSError as error:
            raise self._failed(error) from error
        return True

    def _append(self, raw: Path) -> None:
        size = raw.stat().st_size if raw.exists() else 0
        if not size or not self._copy_events(raw):
            free = shutil.disk_usage(raw.parent).free
            raise EngineError(
                f"torch wrote {size} bytes to {raw.parent}, which are not a complete trace; {free} bytes are free there"
            )

    def _copy_events(self, raw: Path) -> bool:
        """Copy in pieces that end between two objects. Returns False for a trace that is cut off."""
        with open(raw, "rb") as source, mmap(source.fileno(), 0, access=ACCESS_READ) as text:
            head, tail = _HEAD.search(text, 0, CHUNK_BYTES), _TAIL.search(text, max(0, len(text) - CHUNK_BYTES))
            if head is None or tail is None:
                return False
            begin, end = head.end(), tail.start()
            if self._stream is None:
                self._stream = gzip.GzipFile(self._part, "xb", COMPRESSION_LEVEL)
                self._stream.write(text[:begin])
            else:
                self._stream.write(b",\n")
            while begin < end:
                cut = text.rfind(b"}", begin, min(begin + CHUNK_BYTES, end)) + 1 or end
                self._stream.write(self._renumber(text[begin:cut]))
                begin = cut
        return True

    def _renumber(self, events: bytes) -> bytes:
        if not self.recordings:
            return events
        offset = self.recordings * _LINK_ID_OFFSET
        return _LINK.sub(lambda link: b"%s%d%s" % (link[1], int(link[2]) + offset, link[3]), events)

    def _failed(self, error: Exception) -> EngineError:
        """Remove all files of this trace, and return the error for its loss."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):
                stream.close()
        for file in (self._part, self.file):
            with suppress(OSError):
                file.unlink()
        return EngineError(
            f"the trace {self.file.name} was not written: {reason(error)}. What was recorded of it is lost."
        )


class TraceWriter:
    """Does work in order on a daemon thread, which lives until `finish`."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ended = background.begin(self._run, "rolloutctl-traces", daemon=True)

    def require_room(self) -> None:
        """Raise EngineError while too many recordings wait to be written."""
        if (waiting := self._waiting.qsize()) >= MAX_WAITING:
            raise EngineError(f"{waiting} recordings wait to be written, and no more are kept in memory.")

    def put(self, work: Callable[[], None]) -> None:
        """Queue work. Never waits."""
        self._waiting.put(work)

    def finish(self) -> list[str]:
        """Wait until all work is done. Returns what failed."""
        self._waiting.put(None)
        return self._ended.result()

    def _run(self) -> list[str]:
        failures: list[str] = []
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception as error:  # the next trace may still succeed
                failures.append(reason(error))
        return failures
