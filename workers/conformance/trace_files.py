"""What profiling sessions really left on the disk."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

from schemas.outcomes import Trace

EVENTS = b'"ph"'
"""In every trace of events; other kinds of traces are only required not to be empty."""


def trace_faults(root: Path, directory: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield what is wrong with the traces that a session in a directory below `root` reported."""
    if not traces:
        yield f"the session of {directory} left no trace"
    for trace in traces:
        file = root / trace.path
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            yield f"{trace.path} is reported, and not on the disk"
        elif size != trace.nbytes:
            yield f"{trace.path} has {size} bytes, and {trace.nbytes} are reported"
        elif not (size and _is_readable(file)):
            yield f"{trace.path} holds no events"
        if not trace.path.startswith(f"{directory}/"):
            yield f"{trace.path} is not below {directory}"


def files_below(directory: Path) -> dict[str, int]:
    """Return the size of each file."""
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def _is_readable(file: Path) -> bool:
    if ".json" not in file.suffixes:
        return True
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            return EVENTS in opened.read()
    except (OSError, EOFError):
        return False
