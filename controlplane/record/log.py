"""The run's log: what the coordinator decided and what every agent decided, in one file on `schemas.carriers.records`.

    header   run, created (wall clock, ns), major (of the wire protocol), logic (of the coordinator's decisions)
    records  of the coordinator: agent '', the body is a `Decision`
             of an agent: its name, the body is an `Uploaded`: the decision and its number in the agent's journal
             kind is the tag of the event that was decided

Opening for writing folds the coordinator over its own records and compares: a log that does not lead to the recorded
effects was written by other logic, and going on from it would be guessing. Reading asks for nothing: any log that is
whole can be looked at.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from msgspec import MsgspecError, Raw, Struct
from msgspec.msgpack import Decoder

from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide
from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from controlplane.record.entries import LogEntry, coordinator_event_decoder
from schemas.carriers.database import Durability
from schemas.carriers.records import Record, RecordFile, RecordReader
from schemas.errors import ConfigError, LogCorrupt, LogError, WireError
from schemas.events import Decision
from schemas.identity import Count, Name
from schemas.wire import (
    DECODE_ERRORS,
    MAJOR,
    DecisionBatch,
    decision_decoder,
    encode,
)

NUMBER_MAX: Final = 1 << 53
"""Largest number of a decision that is believed."""


class Uploaded(Struct, frozen=True, kw_only=True):
    """Body of an agent's record. number: of the decision in the agent's journal, 1, 2, 3 …"""

    journal: Name
    number: Count
    event: Raw
    effects: Raw


class RunHeader(Struct, frozen=True, kw_only=True):
    """What stands at the head of a log. created_ns: wall clock.   logic: version of the coordinator's decisions."""

    run: str
    created_ns: int
    major: int
    logic: int


class _Tagged(Struct):
    type: Name


_uploaded_decoder = Decoder(Uploaded)
_tag_decoder = Decoder(_Tagged)


class RunLog:
    """The log of one run, open for writing. Made by `open`; a context manager.

    run: its id.   path: of the file.   state: of the coordinator as of the last record, when the log was opened.
    Not for several threads, but `commit` may run in another one.
    """

    def __init__(self, file: RecordFile, run: str) -> None:
        self.run = run
        self.path = file.path
        self.state = CoordinatorState()
        self._file = file
        self._recorded: dict[tuple[str, str], int] = {}  # by agent and journal: number of the last decision here
        self._holes: dict[tuple[str, str], int] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], run: str | None = None, durability: Durability = "os") -> Self:
        """Make the log of a new run, or go on with one. run: id of a new run; None chooses one.

        Raises LogLocked, LogCorrupt, LogFull, LogError (also for a log that this version can't continue), and
        ConfigError for a log of another run than the one named.
        """
        created = time.time_ns()
        fresh = run or f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(created // 10**9))}-{secrets.token_hex(4)}"
        header = {"run": fresh, "created": str(created), "major": str(MAJOR), "logic": str(LOGIC)}
        with ExitStack() as undo:
            file = undo.enter_context(RecordFile.open(path, header, durability))
            found = _read_header(file)
            if found.major != MAJOR or found.logic != LOGIC:
                raise _other_logic(file.path, _written_by(found))
            if run is not None and found.run != run:
                raise ConfigError(f"{file.path} is the log of run {found.run}, not of {run}: name another file")
            log = cls(file, found.run)
            log._fold()
            undo.pop_all()
        return log

    @staticmethod
    def header(path: str | os.PathLike[str]) -> RunHeader:
        """The head of a log. Raises LogError, LogCorrupt."""
        with RecordReader.open(path) as reader:
            return _read_header(reader)

    @staticmethod
    def check_logic(path: str | os.PathLike[str]) -> None:
        """Raise LogError when a log was written by other logic than this version's; also what `header` raises."""
        found = RunLog.header(path)
        if found.major != MAJOR or found.logic != LOGIC:
            raise LogError(
                f"the log {path} can't be replayed: {_written_by(found)}. Replay it with a version of rolloutctl that "
                f"has decision logic {found.logic} and protocol {found.major}; `show` and `verify` read it here"
            )

    @staticmethod
    def read(path: str | os.PathLike[str], start: int = 1) -> Iterator[LogEntry]:
        """Yield the records from position `start` on, also while a bus writes them.

        Raises LogError, and LogCorrupt at the first record that can't be trusted, after all those before it.
        """
        with RecordReader.open(path) as reader:
            _read_header(reader)
            for record in reader.records(start):
                yield _entry(reader.path, record)

    @property
    def pending(self) -> int:
        """Records that the next `commit` writes."""
        return self._file.pending

    def note(self, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...], at_ns: int) -> None:
        """Take one decision of the coordinator. at_ns: wall clock. It is in the file after the next `commit`."""
        body = encode(Decision(Raw(encode(event)), Raw(encode(effects))))
        self._file.append(str(event.__struct_config__.tag), "", at_ns, body)

    def take(self, agent: str, batch: DecisionBatch, at_ns: int) -> int:
        """Take the decisions of an agent that are not here yet; return the number up to which the log has them.

        A batch that leaves a hole is not taken: messages were lost, and the agent sends again from the number that it
        is told. If it then comes with the same batch, it has nothing older any more, and the hole stands in the log.
        Raises WireError for what is no decision; nothing of the batch is taken then.
        """
        key = (agent, batch.journal)
        known = self._recorded.get(key, 0)
        last = batch.first + len(batch.decisions) - 1
        if last > NUMBER_MAX:
            raise WireError("decisions with numbers beyond belief")
        if batch.first > known + 1 and self._holes.get(key) != batch.first:
            self._holes[key] = batch.first
            return known
        fresh = batch.decisions[max(0, known + 1 - batch.first) :]
        try:
            kinds = [_tag_decoder.decode(decision.event).type for decision in fresh]
        except DECODE_ERRORS as error:
            raise WireError(f"a decision without a kind: {type(error).__name__}") from None
        number = last - len(fresh)
        for kind, decision in zip(kinds, fresh, strict=True):
            number += 1
            uploaded = Uploaded(journal=batch.journal, number=number, event=decision.event, effects=decision.effects)
            self._file.append(kind, agent, at_ns, encode(uploaded))
        if fresh:
            self._recorded[key] = last
            self._holes.pop(key, None)
        return max(known, last)

    def recorded(self, agent: str, journal: str) -> int:
        """Number of the newest decision of a journal that the log holds; 0 if it holds none."""
        return self._recorded.get((agent, journal), 0)

    def commit(self) -> None:
        """Write what was taken, as one group. Raises LogFull, LogError."""
        self._file.commit()

    def close(self) -> None:
        """Write what was taken, and close. May be called twice. Raises what `commit` raises, and has closed then."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _fold(self) -> None:
        path = self.path
        for record in self._file.records(self._file.first_position):
            try:
                if record.agent:
                    uploaded = _uploaded_decoder.decode(record.body)
                    self._recorded[record.agent, uploaded.journal] = uploaded.number
                    continue
                decision = decision_decoder.decode(record.body)
                self.state, effects = decide(self.state, coordinator_event_decoder.decode(decision.event))
            except MsgspecError as error:
                raise _other_logic(path, f"record {record.position} can't be understood ({error})") from error
            if encode(effects) != bytes(decision.effects):
                raise _other_logic(path, f"the decision in record {record.position} would be another one today")


def _entry(path: Path, record: Record) -> LogEntry:
    journal, number = "", 0
    try:
        if record.agent:
            uploaded = _uploaded_decoder.decode(record.body)
            journal, number, event, effects = uploaded.journal, uploaded.number, uploaded.event, uploaded.effects
        else:
            decision = decision_decoder.decode(record.body)
            event, effects = decision.event, decision.effects
    except MsgspecError as error:
        raise LogCorrupt(f"{path}: record {record.position} is no decision ({error})", record.position) from error
    return LogEntry(
        position=record.position,
        at_ns=record.at_ns,
        agent=record.agent,
        kind=record.kind,
        journal=journal,
        number=number,
        event=event,
        effects=effects,
    )


def _read_header(reader: RecordReader) -> RunHeader:
    found = reader.header
    try:
        return RunHeader(
            run=found["run"],
            created_ns=int(found["created"]),
            major=int(found["major"]),
            logic=int(found["logic"]),
        )
    except (KeyError, ValueError) as error:
        raise LogError(f"{reader.path} is a record file, but no log of a run: its header lacks {error}") from error


def _written_by(found: RunHeader) -> str:
    return (
        f"it was written with decision logic {found.logic} and protocol {found.major}, this version has "
        f"logic {LOGIC} and protocol {MAJOR}"
    )


def _other_logic(path: Path, what: str) -> LogError:
    return LogError(
        f"the log {path} can't be continued: {what}. It can still be read. Start a new run in another file, or go on "
        "with the version that wrote it"
    )
