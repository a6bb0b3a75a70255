"""Writes traces on a thread of its own, so that the training step can continue.

torch holds the interpreter's lock while it writes its JSON (docs/training-ranks.md has the times). It writes to a local
temporary directory (`TMPDIR`), so that a slow disk for the traces adds nothing to that time. From there the JSON is
compressed piece by piece, without the lock. torch reports no error when a disk is full, so the file itself is checked.
"""

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from schemas.errors import EngineError
from schemas.transport import background
from workers.profilers.recorder import reason
from workers.traces.node import require_complete

CHUNK_BYTES: Final = 1 << 20
COMPRESSION_LEVEL: Final = 5
"""Twice as fast as the default, and a tenth larger."""
MAX_WAITING: Final = 8
"""Most recordings held in memory until they are written. While there are that many, no further stage is recorded."""


def write_trace(export: Callable[[str], object], file: Path) -> None:
    """Write one recording, compressed. It is complete at its place or not there.

    Raises EngineError; no file of it is left then.
    """
    part = file.with_name(f".{file.name}.part")
    try:
        with tempfile.TemporaryDirectory(prefix="rolloutctl-", ignore_cleanup_errors=True) as folder:
            raw = Path(folder, "raw.trace.json")
            export(str(raw))
            require_complete(raw)
            with raw.open("rb") as source, gzip.GzipFile(part, "xb", COMPRESSION_LEVEL) as packed:
                shutil.copyfileobj(source, packed, CHUNK_BYTES)
        os.replace(part, file)
    except Exception as error:  # of torch's code, too
        for left in (part, file):
            with suppress(OSError):
                left.unlink()
        raise EngineError(
            f"the trace {file.name} was not written, and what was recorded of it is lost. {reason(error)}"
        ) from error


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
