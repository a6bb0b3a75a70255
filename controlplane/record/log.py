"""The run's log: what the coordinator and every agent decided, in one file on `schemas.storage.records`.

    header   run, created (wall clock, ns), major (of the wire protocol), logic (of the coordinator's decisions)
    records  agent is '' for the coordinator, kind is the tag of the event that was decided, the body is a
             decision, as `controlplane.record.bodies` writes it
             kind 'decisions' is an upload of an agent: decisions that follow each other
             kind '' is the state of an agent's machine, which it sends now and then
    marks    the coordinator's state now and then, see `controlplane.record.marks`

Opening for writing replays the coordinator over its own records, from the newest mark on. A log that does not lead to
the recorded effects was written by other logic, and to continue it would be a guess. Reading does not check that: any
intact log can be read.
"""

import os
import secrets
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Self

from msgspec import MsgspecError, Struct, convert

from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide
from controlplane.machine.events import AnswersReceived, CoordinatorEffect, CoordinatorEvent, Publish, Retired
from controlplane.record.bodies import (
    STATE,
    StateBody,
    decision_body,
    deflated,
    inflated,
    newest_decision,
    read_entries,
    state_body_decoder,
    tag_decoder,
    upload_body,
)
from controlplane.record.entries import AgentMark, LogEntry, LogItem, LogMark, coordinator_event_decoder
from controlplane.record.marks import decode_mark, decode_state, encode_mark
from controlplane.record.previous import rename_previous_log
from schemas.errors import ConfigError, LogCorrupt, LogError, LogLocked, WireError
from schemas.storage.database import Durability
from schemas.storage.record_copy import RecordCopy, has_copy, put_aside
from schemas.storage.record_file import RecordFile
from schemas.storage.records import Record, RecordReader
from schemas.wall_clock import wall_clock_ns
from schemas.wire import DECODE_ERRORS, MAJOR, DecisionBatch, encode

NUMBER_MAX: Final = 1 << 53
"""Largest number of a decision that is accepted."""
DECISIONS: Final = "decisions"
"""Kind of the record of an upload of decisions; no event has it."""
MARK_RECORDS: Final = 8192
MARK_BYTES: Final = 16 * 1024 * 1024
"""A mark is made after this many records and answers in them, or bytes, whichever comes first: about half a second of
folding."""
MARK_SHARE: Final = 8
"""And after this many times the bytes of the last mark, so that marks are a small part of the file."""

DROPPED_MARKS: Final = 4
"""Records up to so many marks are dropped with one commit, so that none takes long."""


class RunHeader(Struct, frozen=True, kw_only=True, rename={"created_ns": "created"}):
    """The header of a log."""

    run: str
    created_ns: int
    major: int
    logic: int
    package: str = ""


class RunLog:
    """The log of one run, open for writing. Created by `open`; a context manager.

    Use it from one thread.

    Attributes:
        state: Of the coordinator as of the last record, when the log was opened.
        folded: Records that were read for that, those after the newest mark.
    """

    def __init__(self, file: RecordFile, run: str) -> None:
        self.run = run
        self.path = file.path
        self.state = CoordinatorState()
        self.folded = 0
        self._file = file
        self._bytes_max: int | None = None
        self._age_max_s: int | None = None
        self._recorded: dict[str, dict[str, int]] = {}  # by agent and journal: number of the last recorded decision
        self._holes: dict[tuple[str, str], int] = {}  # by agent and journal: first number of a batch after a hole
        self._unmarked_records = self._unmarked_bytes = self._mark_bytes = 0  # since the newest mark; of that mark
        self._copy: RecordCopy | None = None
        self._tells_others = False  # of commands or retired places, since the last commit

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        run: str | None = None,
        durability: Durability = "os",
        *,
        bytes_max: int | None = None,
        age_max_s: int | None = None,
        copy: str | None = None,
    ) -> Self:
        """Create the log of a new run, or continue one.

        `run` is that of `ControlPlane`, the others are those of `BusConfig`. A log that lacks some of its live copy is
        put aside, and written from that.

        Raises:
            ConfigError: It is the log of another run, or there is none to resume.
            LogLocked, LogCorrupt, LogFull, LogError: It can't be opened, or this version can't continue it.
        """
        folder = Path(copy) if copy is not None else None
        copied = folder is not None and has_copy(folder)
        if run == "resume" and not (Path(path).exists() or copied):
            raise ConfigError(f'run="resume": there is no log {path}, nor a copy. Nothing was done; "auto" begins one')
        if run == "new":
            if folder is not None and copied:
                put_aside(folder)
            rename_previous_log(Path(path))
        run = None if run in ("new", "resume", "auto") else run
        created = wall_clock_ns()
        new_run = run or f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(created // 10**9))}-{secrets.token_hex(4)}"
        header = {"run": new_run, "created": str(created), "major": str(MAJOR), "logic": str(LOGIC)}
        header["package"] = _package_version()
        with ExitStack() as undo:
            live = RecordCopy.claim(folder) if folder is not None else None
            if live is not None:
                undo.callback(live.close)
                _restore(live, Path(path))
            file = undo.enter_context(RecordFile.open(path, header, durability))
            found = _read_header(file)
            if found.major != MAJOR or found.logic != LOGIC:
                raise _other_logic(file.path, _written_by(found))
            if run is not None and found.run != run:
                raise ConfigError(f"{file.path} is the log of run {found.run}, not of {run}: name another file")
            log = cls(file, found.run)
            log._bytes_max, log._age_max_s = bytes_max, age_max_s
            log._restore()
            if live is not None:
                live.start(file.path, file.header)
                while live.copied < file.committed:  # all of a log that had no copy yet
                    with suppress(LogLocked):
                        live.wait(file.committed)
            log._copy = live
            undo.pop_all()
        return log

    @staticmethod
    def header(path: str | os.PathLike[str]) -> RunHeader:
        """Return the header of a log. Raises LogError or LogCorrupt."""
        with RecordReader.open(path) as reader:
            return _read_header(reader)

    @staticmethod
    def check_logic(path: str | os.PathLike[str]) -> None:
        """Raise LogError if a log was written by other logic than this version's, or as `header` does."""
        found = RunLog.header(path)
        if found.major != MAJOR or found.logic != LOGIC:
            raise LogError(
                f"the log {path} can't be replayed: {_written_by(found)}. Replay it with a version of rolloutctl that "
                f"has decision logic {found.logic} and protocol {found.major}; `show`, `verify` and `report` work here"
            )

    @staticmethod
    def read(path: str | os.PathLike[str], start: int = 1) -> Iterator[LogEntry]:
        """Yield the records from position `start` on, even while a bus writes them.

        Raises:
            LogError: The file can't be read, or is no log.
            LogCorrupt: At the first damaged record, after all those before it.
        """
        with RecordReader.open(path) as reader:
            _read_header(reader)
            for record in reader.records(start):
                yield from read_entries(record, reader.path)

    @staticmethod
    def walk(path: str | os.PathLike[str]) -> Iterator[LogItem]:
        """Yield all records and marks, each mark after its record. A damaged mark is yielded too. Raises as `read`."""
        with RecordReader.open(path) as reader:
            _read_header(reader)
            marks = deque(reader.mark_positions())
            for record in reader.records():
                while marks and marks[0] < record.position:
                    yield _mark(reader, marks.popleft())
                if record.kind == STATE:
                    yield from _agent_mark(record)
                else:
                    yield from read_entries(record, reader.path)
            for position in marks:
                yield _mark(reader, position)

    @property
    def continues(self) -> str:
        """Which run was found in the file when it was opened, and what to do about that; empty for a new one."""
        if not self.state.epoch:
            return ""
        committed = max(desired.version for desired in (self.state.default_desired, *self.state.desired.values()))
        if not self.state.newest_version:
            return f"the log {self.path} goes on with run {self.run}, which has committed no version"
        return (
            f"the log {self.path} goes on with run {self.run}, which has committed version {committed}. To continue "
            f"it, take versions above {self.state.newest_version}, or None to let the run count. For a new one, pass "
            'run="new", which keeps the earlier log beside the new one, or name another file'
        )

    @property
    def pending(self) -> int:
        """Number of records that the next `commit` writes."""
        return self._file.pending

    @property
    def settled(self) -> bool:
        """Whether all that was appended is in the file, and in its copy: an agent may forget its decisions then."""
        return not self._file.pending and (self._copy is None or self._copy.copied >= self._file.committed)

    @property
    def copy_behind(self) -> str:
        """Why a commit waits for the copy of the log; empty if none does. In any thread."""
        return self._copy.behind if self._copy is not None else ""

    def append(
        self,
        event: CoordinatorEvent,
        effects: tuple[CoordinatorEffect, ...],
        at_ns: int,
        state: CoordinatorState | None = None,
    ) -> None:
        """Append one decision of the coordinator, and a mark of the state if one is due. `commit` writes both."""
        self._append(str(event.__struct_config__.tag), "", at_ns, decision_body(event, effects))
        if self._copy is not None:
            self._tells_others |= any(isinstance(effect, Publish | Retired) for effect in effects)
        if isinstance(event, AnswersReceived):
            self._unmarked_records += len(event.answers)
        if state is not None and self._mark_due():
            self._append_mark(state, at_ns)

    def append_batch(self, agent: str, batch: DecisionBatch, at_ns: int) -> int:
        """Append those decisions of an agent that the log does not have yet. The next `commit` writes them.

        A batch after a hole is refused: messages were lost, and the agent sends again from the returned number on. If
        it then sends the same batch, it has nothing older any more, and the hole stays in the log.

        Returns:
            The number up to which the log has the decisions of the journal.

        Raises:
            WireError: One of them is not a decision. Nothing of the batch is appended.
        """
        key = (agent, batch.journal)
        known = self.recorded(agent, batch.journal)
        last = batch.first + len(batch.decisions) - 1
        if last > NUMBER_MAX:
            raise WireError(f"decisions numbered beyond {NUMBER_MAX}")
        if batch.first > known + 1 and self._holes.get(key) != batch.first:
            self._holes[key] = batch.first
            return known
        new = batch.decisions[max(0, known + 1 - batch.first) :]
        try:
            for decision in new:
                tag_decoder.decode(decision.event)
        except DECODE_ERRORS as error:
            raise WireError(f"a decision without a kind: {type(error).__name__}") from None
        if new:
            self._append(DECISIONS, agent, at_ns, upload_body(batch.journal, last - len(new) + 1, new))
            if batch.state:
                self._append(STATE, agent, at_ns, deflated(encode(StateBody(batch.journal, last, batch.state))))
            self._recorded.setdefault(agent, {})[batch.journal] = last
            self._holes.pop(key, None)
        return max(known, last)

    def recorded(self, agent: str, journal: str) -> int:
        """Return the number of the newest decision of a journal that the log has; 0 if it has none."""
        return self._recorded.get(agent, {}).get(journal, 0)

    def commit(self) -> None:
        """Write what was appended, as one group. Raises LogLocked, LogFull or LogError, as `RecordFile.commit`.

        A command is published only once the copy of the log has it too, so no agent knows of one that a bus which goes
        on from the copy does not. Nor is any caller told of a place that it would not know to be retired.
        """
        position = self._file.commit()
        if self._tells_others and self._copy is not None:
            self._copy.wait(position)
        self._tells_others = False

    def check_copy(self) -> None:
        """Raise LogError if a bus elsewhere goes on with this run, from the copy of the log."""
        if self._copy is not None:
            self._copy.check()

    def close(self) -> None:
        """Write what was appended, and close, even if the writing raises. May be called twice."""
        try:
            if self._copy is not None:
                with suppress(LogError):  # the file raises it again when it closes
                    self._file.commit()
                self._copy.close()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, kind: str, agent: str, at_ns: int, body: bytes) -> None:
        self._file.append(kind, agent, at_ns, body)
        self._unmarked_records += 1
        self._unmarked_bytes += len(body)

    def _append_mark(self, state: CoordinatorState, at_ns: int) -> None:
        """Append a mark after the last record, and drop what is past the limits."""
        body = deflated(encode_mark(state, self._recorded))
        self._file.append_mark(at_ns, body)
        self._unmarked_records = self._unmarked_bytes = 0
        self._mark_bytes = len(body)
        self._drop_oldest(at_ns)

    def _drop_oldest(self, at_ns: int) -> None:
        """Keep to the limits. What is dropped ends at a mark, so that the log begins with one."""
        if cut := _find_cut(self._file, self._bytes_max, self._age_max_s, at_ns):
            first = self._file.first_position
            oldest = [mark for mark in self._file.mark_positions() if mark >= first][:DROPPED_MARKS]
            if self._copy is None or self._copy.copied >= oldest[-1]:
                self._file.drop_before(min(cut, oldest[-1]) + 1)

    def _mark_due(self) -> bool:
        if self._unmarked_records < MARK_RECORDS and self._unmarked_bytes < MARK_BYTES:
            return False
        return self._unmarked_bytes >= MARK_SHARE * self._mark_bytes

    def _restore(self) -> None:
        """Fold the coordinator over its own records, from the newest mark on that can be used."""
        for record in self._file.records(self._begin_at_mark() + 1):
            self.folded += 1
            self._unmarked_records += 1
            self._unmarked_bytes += len(record.body)
            if record.kind == STATE:
                continue
            try:
                if record.agent:
                    journal, number = newest_decision(record)
                    self._recorded.setdefault(record.agent, {})[journal] = number
                    continue
                (entry,) = read_entries(record, self.path)
                event = coordinator_event_decoder.decode(entry.event)
                self.state, effects = decide(self.state, event)
                if isinstance(event, AnswersReceived):
                    self._unmarked_records += len(event.answers)
            except (MsgspecError, LogCorrupt, zlib.error) as error:
                raise _other_logic(self.path, f"record {record.position} can't be understood ({error})") from error
            if encode(effects) != entry.effects:
                raise _other_logic(self.path, f"this version would decide otherwise in record {record.position}")

    def _begin_at_mark(self) -> int:
        """Take the state of the newest mark that can be used, and return its position; 0 if there is none."""
        first = self._file.first_position
        for position in reversed(self._file.mark_positions()):
            mark = _mark(self._file, position)
            state = decode_state(mark)
            if state is not None and first - 1 <= position <= self._file.last_position:
                self.state, self._mark_bytes = state, len(self._file.mark(position).body)
                self._recorded = {agent: dict(numbers) for agent, numbers in mark.recorded.items()}
                return position
        if first > 1:
            raise _other_logic(
                self.path, f"its records before {first} were dropped, and no mark after them can be used"
            )
        return 0


def _restore(copy: RecordCopy, path: Path) -> None:
    """Have the log go on where its copy ends. One that does not have all of the copy was left on this machine earlier.

    Raises ConfigError if they are of two runs.
    """
    has_all, copied = copy.restore(path), copy.header.get("run")
    if copied and (run := RunLog.header(path).run) != copied:
        what = f"{path} is the log of run {run}, and its copy that of run {copied}"
        raise ConfigError(f"{what}: to go on with the copy, name another file; else name another folder for the copy")
    if not has_all:
        rename_previous_log(path)
        copy.restore(path)


def _find_cut(file: RecordFile, bytes_max: int | None, age_max_s: int | None, now_ns: int) -> int | None:
    """Return the position of a mark up to which the oldest records can go; None if nothing can or has to."""
    first, last = file.first_position, file.last_position
    cuts = []
    if age_max_s is not None:
        cuts += file.mark_positions(until_ns=now_ns - age_max_s * 10**9)[-1:]
    if bytes_max is not None and (used := file.used_bytes) > bytes_max:
        kept = (last - first + 1) * bytes_max * 3 // (4 * used)  # below the limit, so that it is not reached at once
        marks = file.mark_positions()
        cuts += [mark for mark in marks if mark >= last - kept][:1] or marks[-1:]
    return max((cut for cut in cuts if cut >= first), default=None)


def _agent_mark(record: Record) -> Iterator[AgentMark]:
    """Nothing if it can't be read: nothing depends on it."""
    with suppress(MsgspecError, zlib.error):
        body = state_body_decoder.decode(inflated(record.body))
        yield AgentMark(
            position=record.position, agent=record.agent, journal=body.journal, number=body.number, state=body.state
        )


def _mark(reader: RecordReader, position: int) -> LogMark:
    try:
        record = reader.mark(position)
        mark = decode_mark(inflated(record.body))
    except LogCorrupt as error:
        return LogMark(position=position, at_ns=0, logic=0, damage=str(error))
    except (MsgspecError, zlib.error) as error:
        text = f"{reader.path}: the mark after record {position} can't be read ({error})"
        return LogMark(position=position, at_ns=record.at_ns, logic=0, damage=text)
    return LogMark(position=position, at_ns=record.at_ns, logic=mark.logic, state=mark.state, recorded=mark.recorded)


def _read_header(reader: RecordReader) -> RunHeader:
    try:
        return convert(reader.header, RunHeader, strict=False)
    except MsgspecError as error:
        raise LogError(f"{reader.path} is a record file but no log of a run: {error}") from error


def _written_by(found: RunHeader) -> str:
    by = f"rolloutctl {found.package} wrote it" if found.package else "it was written"
    return (
        f"{by} with decision logic {found.logic} and protocol {found.major}, and this version has "
        f"logic {LOGIC} and protocol {MAJOR}"
    )


def _package_version() -> str:
    try:
        return version("rolloutctl")
    except PackageNotFoundError:  # a checkout that is not installed
        return ""


def _other_logic(path: Path, why: str) -> LogError:
    return LogError(
        f"the log {path} can't be continued: {why}. `rolloutctl log show`, `verify` and `report` read it. Begin a new "
        'run with run="new", which keeps this log beside the new one, or in another file; or continue this one with '
        "the version that wrote it"
    )
