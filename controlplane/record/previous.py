"""The log of an earlier run is kept, under another name."""

import contextlib
import itertools
import os
import re
import time
from pathlib import Path

from schemas.errors import LogCorrupt, LogError
from schemas.logs import logger_of
from schemas.storage import writer_lock
from schemas.storage.record_file import RecordFile
from schemas.storage.records import RecordReader

logger = logger_of("log")


def rename_previous_log(path: Path) -> None:
    """Give the log that has this name another one, with its run's id in it; nothing if there is none.

    Raises LogLocked or LogError.
    """
    if not path.exists():
        return
    with contextlib.suppress(LogCorrupt), RecordFile.open(path):  # brings the newest records into the file itself
        pass
    run = ""
    with contextlib.suppress(LogError), RecordReader.open(path) as reader:
        run = reader.header.get("run", "")
    kept = _unused(path, run)
    try:
        locked = writer_lock.acquire(path)
        try:
            for end in ("-wal", "-shm", ""):  # of a damaged file they may be left
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{path}{end}", f"{kept}{end}")
        finally:
            writer_lock.release(locked)
    except OSError as error:
        raise LogError(f"{path} can't be renamed to {kept.name}: {error.strerror}") from error
    logger.info("the log of the earlier run is now %s", kept)


def _unused(path: Path, run: str) -> Path:
    """A name beside the log that is free: of its run, or of its last change if that can't be read."""
    if re.fullmatch(r"[\w.-]{1,100}", run) is None:
        run = time.strftime("%Y%m%d-%H%M%S", time.gmtime(path.stat().st_mtime))
    names = itertools.chain([run], (f"{run}.{number}" for number in itertools.count(2)))
    return next(kept for name in names if not (kept := path.with_suffix(f".{name}{path.suffix}")).exists())
