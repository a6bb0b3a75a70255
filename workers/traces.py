"""The trace files of a session, on this node's disk: where they go, which are whole, and which are this node's.

Every node of a replica profiles its own ranks and writes to its own disk, though only node rank 0 was told to. So each
agent collects what its ranks left. A torch trace names its rank in `distributedInfo`; one without belongs to rank 0.
"""

import hashlib
import re
import zlib
from pathlib import Path
from typing import Final

from schemas.errors import EngineError
from schemas.outcomes import Trace

SUFFIXES: Final = (".trace.json.gz", ".trace.json", ".pt.trace.json.gz", ".pickle", ".profiler_out.txt")
"""What engines leave. `.pickle` is SGLang's memory snapshot: listed and hashed, never opened."""
HEAD_BYTES: Final = 64 * 1024
"""Of a trace, decompressed: `distributedInfo` stands before the events."""
_RANK: Final = re.compile(rb'"distributedInfo":\s*\{[^{}]*?"rank":\s*(\d+)')


def make_fresh(directory: Path) -> None:
    """Make the directory of a session. Raises EngineError if it can't be made, or holds files already."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if next(directory.iterdir(), None) is None:
            return
    except OSError as error:
        raise EngineError(f"the profile was not started: {directory}: {error.strerror}.") from error
    raise EngineError(
        f"the profile was not started: {directory} holds files already, and nothing is ever written over. Move them "
        "away, or use another traces root."
    )


def described(file: Path, root: Path) -> Trace:
    """Path below `root`, size and digest of one file. Raises OSError."""
    with open(file, "rb") as written:
        sha256 = hashlib.file_digest(written, "sha256").hexdigest()
    return Trace(str(file.relative_to(root)), file.stat().st_size, sha256)


def of_node(directory: Path, root: Path, node_rank: int, gpus_per_node: int) -> tuple[Trace, ...]:
    """The session's traces that this node's ranks wrote, whole ones, in order of their names.

    On a disk that the nodes share, each takes its own: ranks node_rank * gpus_per_node and up. Raises EngineError for
    a file that can't be read or is cut off.
    """
    if not directory.is_dir():
        return ()
    own = range(node_rank * gpus_per_node, (node_rank + 1) * gpus_per_node)
    files = sorted(one for one in directory.rglob("*") if one.is_file() and one.name.endswith(SUFFIXES))
    try:
        mine = [one for one in files if _rank(one) in own]
        return tuple(described(one, root) for one in mine if _whole(one))
    except OSError as error:
        raise EngineError(f"the traces in {directory} can't be read: {error.strerror}: {error.filename}.") from error


def moved(files: list[Path], directory: Path) -> None:
    """Bring files of a directory that an engine was launched with to the session's. Raises EngineError.

    Copied when the two lie on different disks. What is there already is never written over.
    """
    import shutil

    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        place = directory / file.name
        if place.exists():
            raise EngineError(f"the trace {file} stays where it is: {place} is there already.")
        try:
            shutil.move(file, place)
        except OSError as error:
            raise EngineError(f"the trace {file} was not moved to {directory}: {error.strerror}.") from error


def _rank(file: Path) -> int:
    found = _RANK.search(_head(file)) if ".trace.json" in file.name else None
    return int(found.group(1)) if found else 0


def _head(file: Path) -> bytes:
    with open(file, "rb") as stream:
        raw = stream.read(HEAD_BYTES)
    if file.suffix != ".gz":
        return raw
    try:
        return zlib.decompressobj(wbits=31).decompress(raw, HEAD_BYTES)
    except zlib.error:
        return b""


def _whole(file: Path) -> bool:
    """Is a compressed file complete to its trailer? Raises EngineError when it is not."""
    if file.suffix != ".gz":
        return True
    inflate = zlib.decompressobj(wbits=31)
    try:
        with open(file, "rb") as stream:
            while not inflate.eof and (raw := stream.read(1 << 20)):
                inflate.decompress(raw)
    except zlib.error as error:
        raise EngineError(f"the trace {file} is damaged: {error}.") from error
    if not inflate.eof:
        raise EngineError(f"the trace {file} is cut off: its writer has not finished, or could not.")
    return True
