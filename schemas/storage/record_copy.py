"""A live copy of a record file in a folder that several machines share, so that its writer can go on elsewhere.

    <life>-<part>.records   what one writer copied: frames of a length and a row, the first of them the header
    writer                  the newest life, its host and process; empty once it has ended in good order

Theory of operation.

- Each writer is a *life* with a number. It claims the number by creating a file that must not exist, names itself in
  `writer`, and only then reads what the lives before it copied. It gives up if there is a later number by then, so
  names follow each other as numbers do. A life looks into `writer` after each group that it
  flushed, and before anything that depends on it happens. So either it finds that it has a successor, or the successor
  finds the group: nothing that a dead writer let others see is missing, however it died.
- Nothing is locked: network file systems keep the locks of a dead machine for minutes or for ever, or have none. A
  living writer touches `writer`, and one that would take over watches that first.
- Files only grow. A frame that was cut off ends its file; the rest follows in the next one. Where records of two files
  overlap, those of the later file count.
- A thread copies each second, or at once while `wait` is called. It reads the record file, not the memory of its
  writer, so it may fall behind by any amount.
"""

import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Self

from msgspec import MsgspecError, msgpack

from schemas.errors import LogCorrupt, LogError, LogLocked
from schemas.logs import logger_of
from schemas.storage.atomic_write import atomic_write, private
from schemas.storage.record_file import MarkRow, RecordFile
from schemas.storage.records import MARK, RecordReader, Row, checksum

logger = logger_of("log")

COPY_S: Final = 1.0
"""Time between two groups that are not waited for."""
TOUCH_S: Final = 2.0
WATCH_S: Final = 10.0
"""A writer that has not touched `writer` for this long has ended."""
WAIT_S: Final = 1.0
"""Longest time that `wait` waits in one call."""
PART_BYTES: Final = 64 * 1024 * 1024
"""A file that is longer is followed by another one, so that old ones can be deleted."""
HEADER: Final = "header"
_LENGTH: Final = 4
_NAME: Final = re.compile(r"(\d{8})-(\d{8})\.records")
_row_decoder = msgpack.Decoder(Row)


class RecordCopy:
    """The copy as its newest life. Made by `claim`; `start` begins to copy, `close` ends it.

    Called by the writer's thread; the attributes may be read by any.

    Attributes:
        header: Of the file that was copied, after `restore`; empty if nothing was.
        copied: Position of the last record that the copy has.
        fault: Why nothing is copied any more, as when another writer goes on.
    """

    def __init__(self, folder: Path, life: int) -> None:
        self._folder, self._life = folder, life
        self._me = f"life {life}, pid {os.getpid()} on {socket.gethostname()}"
        self._process = os.getpid()
        self._parts = itertools.count(1)
        self._part: IO[bytes] | None = None
        self._starts: list[tuple[Path, int]] = []  # files that are read, each with its first position; the oldest first
        self.header: dict[str, str] = {}
        self._appended = self._wanted = self._marked = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ends = False
        self._trouble = ""  # why the last group was not copied
        self.copied = 0
        self.fault = ""

    @classmethod
    def claim(cls, folder: Path) -> Self:
        """Become the newest life. Raises LogLocked while another writer lives, or LogError."""
        try:
            with suppress(FileExistsError):  # a folder, or what can't be read as one
                folder.mkdir(mode=0o700, parents=True)
            _require_unwritten(folder)
            life = 1 + _newest_life(folder)
            copy = cls(folder, life)
            copy._create(0).close()
            _write(folder / "writer", copy._me)
            overtaken = _newest_life(folder) > life  # whose name may be lost: neither of them goes on then
        except FileExistsError:
            overtaken = True
        except OSError as error:
            raise _out_of_reach(folder, error) from error
        if overtaken:
            raise LogLocked(f"{folder}: another program has begun to write this copy of a log at this moment")
        return copy

    def restore(self, path: Path) -> bool:
        """Write the copy to `path`, unless there is a file that has all of it. Returns whether the file has all of it.

        Returns False, and writes nothing, if there is another file. Raises LogCorrupt if the copy has a hole, LogError.
        """
        try:
            last = self._read_copy()
            if last is None:
                return True
            if path.exists():
                return _holds(path, last)
            draft = path.with_name(f".{path.name}.{self._life}")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with RecordFile.open(draft, self.header) as file:
                    for rows, marks in self._groups():
                        file.take_over(rows, marks)
                        file.commit()
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise _out_of_reach(self._folder, error) from error
        logger.info("%s was written from its copy in %s, up to record %d", path, self._folder, last[0])
        return True

    def start(self, path: Path, header: Mapping[str, str]) -> None:
        """Begin to copy the file at `path`, which has all that was copied so far."""
        self.header = dict(header)
        self._thread = threading.Thread(target=self._run, args=(path,), name="rolloutctl-log-copy", daemon=True)
        self._thread.start()

    def wait(self, position: int) -> None:
        """Return when the copy has all records up to a position. Raises LogLocked after a while: call it again.

        Raises LogError once nothing is copied any more.
        """
        with self._changed:
            self._wanted = max(self._wanted, position)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.copied >= position or self.fault, WAIT_S)
            self.check()
            if self.copied < position:
                raise LogLocked(self.behind)

    @property
    def behind(self) -> str:
        """What a caller of `wait` waits for; empty if there is none."""
        if not self._is_wanted:
            return ""
        return f"{self._folder}: the copy of the log is behind ({self._trouble or 'its folder does not answer'})"

    def check(self) -> None:
        """Raise LogError once nothing is copied any more, as when another writer goes on."""
        if self.fault:
            raise LogError(f"{self._folder}: {self.fault}")

    def close(self) -> None:
        """Copy what is left, and say that this life has ended. Waits for a while. May be called twice."""
        if self._process != os.getpid():  # a fork has no thread, and ends nothing
            return
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(WATCH_S)
            if self._thread.is_alive():
                logger.warning("the copy of the log in %s is behind: its folder does not answer", self._folder)
                return
        with suppress(OSError):
            if not self.fault and (self._folder / "writer").read_text("utf-8") == self._me:
                _write(self._folder / "writer", "")

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_copy(self) -> Row | None:
        """Note which files there are, and return the last record; None if there is none."""
        last, self._starts = None, []
        for name in sorted(match[0] for match in _names(self._folder)):
            if (header := next(_rows(self._folder / name), None)) is not None:  # else its life copied nothing
                self.header = msgpack.decode(header[5], type=dict[str, str])
                self._starts.append((self._folder / name, header[0]))
        for rows, marks in self._groups():
            last = rows[-1] if rows else last
            self._marked = marks[-1][0] if marks else self._marked
        self.copied = last[0] if last is not None else 0
        return last

    def _groups(self) -> Iterator[tuple[list[Row], list[MarkRow]]]:
        """Yield the records and marks of each file. Raises LogCorrupt at a hole."""
        expected = self._starts[0][1] if self._starts else 1
        for index, (path, _) in enumerate(self._starts):
            end = min((start for _, start in self._starts[index + 1 :]), default=1 << 63)
            rows, marks = list[Row](), list[MarkRow]()
            for row in itertools.islice(_rows(path), 1, None):
                if row[0] >= end:
                    continue
                if row[2] == MARK:
                    marks.append((row[0], row[1], row[4], row[5]))
                elif row[0] != expected:
                    raise LogCorrupt(f"{path}: record {expected} is missing; the next one is {row[0]}", expected)
                else:
                    rows.append(row)
                    expected += 1
            yield rows, marks

    # --- copying, in the thread ---------------------------------------------------------------------------------------

    def _run(self, path: Path) -> None:
        touched_s, ends = 0.0, False
        try:
            with RecordReader.open(path) as reader:
                while not ends:
                    with self._changed:
                        self._changed.wait_for(lambda: self._ends or (self._is_wanted and not self._trouble), COPY_S)
                        ends = self._ends
                    try:
                        if self._copy(reader) or time.monotonic() - touched_s > TOUCH_S:
                            self._require_newest()
                            os.utime(self._folder / "writer")
                            touched_s = time.monotonic()
                        self._note(self._appended, "")
                        self._delete_dropped(reader.first_position)
                    except (OSError, LogLocked) as error:
                        self._end_part()
                        self._marked = min(self._marked, self.copied)  # later ones go into the next file too
                        self._note(self.copied, getattr(error, "strerror", None) or str(error))
        except Exception as error:  # whatever it is: nothing may wait for a thread that has ended
            if not isinstance(error, LogError):
                logger.exception("a fault of rolloutctl ended the copying of the log to %s", self._folder)
            self.fault = str(error) if isinstance(error, LogError) else repr(error)
            with self._changed:
                self._changed.notify_all()
        finally:
            self._end_part()

    @property
    def _is_wanted(self) -> bool:
        return self._wanted > self.copied

    def _copy(self, reader: RecordReader) -> bool:
        """Append what the copy lacks, and flush it. Returns whether it lacked any."""
        self._appended, marked = self.copied, self._marked
        for record in reader.records(self.copied + 1):
            if self._appended and record.position != self._appended + 1:
                dropped = f"the log has dropped records from {self._appended + 1} on before they were copied"
                raise LogError(f"{dropped}: name another folder for its copy")
            self._append((record.position, record.at_ns, record.kind, record.agent, record.body))
            self._appended = record.position
        for position in reader.mark_positions():
            if marked < position <= self._appended:
                mark = reader.mark(position)
                self._append((position, mark.at_ns, MARK, "", mark.body))
                marked = position
        if (self._appended, marked) == (self.copied, self._marked) or self._part is None:
            return False
        _flush(self._part)
        self._marked = marked
        return True

    def _delete_dropped(self, first: int) -> None:
        """Delete files with nothing in them that the log keeps: neither records nor the mark that it begins with."""
        with suppress(OSError):  # the next round tries again: a later file must not go before
            while len(self._starts) > 1 and self._starts[1][1] < first:
                self._starts[0][0].unlink(missing_ok=True)
                del self._starts[0]

    def _append(self, record: tuple[int, int, str, str, bytes]) -> None:
        if self._part is not None and self._part.tell() > PART_BYTES:
            _flush(self._part)
            self._end_part()
        if self._part is None:
            self._part = self._create(next(self._parts))
            start = self._appended + 1 if self._appended else record[0]
            self._starts.append((Path(self._part.name), start))
            self._part.write(_frame(start, 0, HEADER, "", msgpack.encode(self.header)))
        self._part.write(_frame(*record))

    def _create(self, part: int) -> IO[bytes]:
        return open(self._folder / f"{self._life:08}-{part:08}.records", "xb", opener=private)

    def _end_part(self) -> None:
        """Go on in another file: this one may end with half a frame."""
        part, self._part = self._part, None
        if part is not None:
            with suppress(OSError):
                part.close()

    def _require_newest(self) -> None:
        """Raise LogError once there is a later life."""
        if (writer := (self._folder / "writer").read_text("utf-8")) != self._me:
            raise LogError(f"another program goes on with this run ({writer}): its copy of the log was taken over")

    def _note(self, copied: int, trouble: str) -> None:
        if bool(trouble) != bool(self._trouble):
            what = f"can't be written ({trouble}); commands wait for it" if trouble else "is written again"
            logger.warning("the copy of the log in %s %s", self._folder, what)
        with self._changed:
            self.copied, self._trouble = copied, trouble
            self._changed.notify_all()


def has_copy(folder: Path) -> bool:
    """Return whether a copy was begun in a folder."""
    return (folder / "writer").exists()


def put_aside(folder: Path) -> None:
    """Give the folder of a copy another name, which ends with this moment.

    Raises LogLocked while a writer lives, or LogError.
    """
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
    try:
        _require_unwritten(folder)
        folder.rename(aside)
    except OSError as error:
        raise _out_of_reach(folder, error) from error
    logger.info("the copy of the log of the earlier run is now %s", aside)


def _require_unwritten(folder: Path) -> None:
    """Watch whether a writer lives, if the last one has not ended in good order."""
    writer = folder / "writer"
    until_s, before = time.monotonic() + WATCH_S, _look(writer)
    while before is not None and before[0]:
        if time.monotonic() > until_s:
            logger.warning("the writer of the copy %s has ended without a word: %s", folder, before[0])
            return
        threading.Event().wait(WATCH_S / 20)
        if _look(writer) != before:
            raise LogLocked(
                f"{folder}: another program writes this copy of a log ({before[0]}). End that one first, or name "
                "another folder"
            )


def _look(writer: Path) -> tuple[str, int] | None:
    """The writer, and when it was touched. The file is opened: a network file system answers that from its server."""
    try:
        with writer.open(encoding="utf-8") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _holds(path: Path, last: Row) -> bool:
    """Whether a record file has just this record, or only later ones."""
    with suppress(LogError), RecordReader.open(path) as reader:
        for record in reader.records(last[0]):
            found = checksum(record.position, record.at_ns, record.kind, record.agent, record.body)
            return found == last[4] or record.position > last[0]
    return False


def _names(folder: Path) -> Iterator[re.Match[str]]:
    return filter(None, map(_NAME.fullmatch, os.listdir(folder)))


def _newest_life(folder: Path) -> int:
    return max((int(name[1]) for name in _names(folder)), default=0)


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file, up to the first that is not whole."""
    with path.open("rb") as file:
        while len(length := file.read(_LENGTH)) == _LENGTH:
            body = file.read(int.from_bytes(length))
            try:
                row = _row_decoder.decode(body)
            except MsgspecError:
                return
            position, at_ns, kind, agent, recorded, content = row
            if checksum(position, at_ns, kind, agent, content) != recorded:
                return
            yield row


def _frame(position: int, at_ns: int, kind: str, agent: str, body: bytes) -> bytes:
    row = msgpack.encode((position, at_ns, kind, agent, checksum(position, at_ns, kind, agent, body), body))
    return len(row).to_bytes(_LENGTH) + row


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _write(path: Path, text: str) -> None:
    with atomic_write(path, force=True) as file:
        file.write(text.encode())


def _out_of_reach(folder: Path, error: OSError) -> LogError:
    return LogError(f"the copy of the log in {folder} can't be read or written: {error.strerror or error}")
