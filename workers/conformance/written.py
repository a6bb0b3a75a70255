"""What profiling sessions really left on the disk."""

import gzip
from pathlib import Path

from schemas.outcomes import Trace
from workers.conformance.judge import TraceSeen

EVENTS = b'"ph"'
"""In every trace of events; other kinds of traces are only required not to be empty."""


def trace_seen(root: Path, trace: Trace) -> TraceSeen:
    """Compare a reported trace with its file."""
    file = root / trace.path
    size = file.stat().st_size if file.is_file() else None
    return TraceSeen(trace.path, trace.nbytes, size, bool(size) and _is_readable(file))


def files_below(directory: Path) -> dict[str, int]:
    """Return the size of each file."""
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def _is_readable(file: Path) -> bool:
    if ".json" not in file.suffixes:
        return True
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            kept = b""
            while chunk := opened.read(1 << 20):
                if EVENTS in kept + chunk:
                    return True
                kept = chunk[-len(EVENTS) :]
    except (OSError, EOFError):
        pass
    return False
