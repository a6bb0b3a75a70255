"""Logs that are put away: under another name, or as archives, which are compressed and which every reader reads.

An archive is one state of the log's file, so `gunzip` makes a log of it again. To read one, it is decompressed into a
temporary file, which has no name any more once it is open.
"""

import contextlib
import gzip
import itertools
import os
import re
import shutil
import tempfile
import time
import zlib
from pathlib import Path

from schemas.errors import LogCorrupt, LogError
from schemas.logs import logger_of
from schemas.storage import writer_lock
from schemas.storage.atomic_write import atomic_write, check_destination
from schemas.storage.record_file import RecordFile
from schemas.storage.records import RecordReader

logger = logger_of("log")

_MAGIC = b"\x1f\x8b"


def open_records(path: str | os.PathLike[str]) -> RecordReader:
    """Open the records of a log or of an archive. Raises LogError or LogCorrupt."""
    path = Path(path)
    try:
        return RecordReader.open(path)
    except LogCorrupt:
        if not _is_archive(path):  # only now: to close another descriptor of a database would drop its locks
            raise
    with tempfile.TemporaryDirectory(prefix="rolloutctl-") as folder:
        whole = Path(folder) / "run.db"
        try:
            with gzip.open(path) as packed, whole.open("xb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise LogCorrupt(f"{path}: the archive is cut off or damaged ({error})") from error
        except OSError as error:
            what = f"{path}: the archive can't be unpacked into {folder}: {error.strerror}. Free some space, or name "
            raise LogError(f"{what}another folder in TMPDIR") from error
        reader = RecordReader.open(whole)
    reader.path = path
    return reader


def write_archive(path: Path, out: Path, force: bool) -> int:
    """Write an archive of a log, also while a bus writes it, and return its size. The log stays as it is.

    Raises ConfigError or LogError.
    """
    check_destination(out, force, [path])
    try:
        with (
            atomic_write(out, force) as file,
            tempfile.TemporaryDirectory(dir=out.parent, prefix=".archive-") as folder,
        ):
            copy = Path(folder) / "run.db"
            with RecordReader.open(path) as reader:
                reader.copy_to(copy)
            with copy.open("rb") as whole, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                shutil.copyfileobj(whole, packed, 1 << 20)
        return out.stat().st_size
    except OSError as error:
        raise LogError(f"the archive {out} was not written: {error.strerror or error}") from error


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


def _is_archive(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False
