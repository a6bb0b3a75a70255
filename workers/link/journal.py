"""The agent's journal: every decision of its machine, on disk before its effects count.

One framed file per agent (`schemas.carriers.framing`). A group is a tuple of `Entry`, or one `Mark`. Decisions are
numbered 1, 2, 3 … within a journal, whose id is never used again; the bus keeps the same numbers in the run's log. A
mark holds the state after all decisions before it, so that those can be dropped once the bus has them.

Theory of operation. `append` takes a decision into memory and `commit` writes everything appended as one group. So the
order on disk is the order of the decisions, and a crash loses only the last of them. The agent chooses what may be
lost: it commits before an engine is called and before the outcome of a call is sent, and leaves decisions that touched
nothing for later. Opening a journal folds the machine over its decisions and compares the effects. If they differ, the
journal was written by other logic, and continuing from it would be guessing.
"""

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, NoReturn

from msgspec import MsgspecError, Raw, Struct
from msgspec.msgpack import Decoder

from schemas.carriers.framed_file import FramedFile
from schemas.carriers.framing import Frame, FramePlace
from schemas.errors import AgentError, LogCorrupt, LogError
from schemas.events import Decision, Effect, Event
from schemas.identity import Count
from schemas.wire import encode, event_decoder
from workers.machine.decide import LOGIC, AgentState, decide

DECISIONS: Final = 1
MARK: Final = 2
"""Kinds of groups."""
MARK_EVERY: Final = 4096
"""Decisions between two marks. The file holds about twice as many, and those that the bus does not have yet."""
UNCOMMITTED_MAX: Final = 1024
"""Most decisions that wait in memory for a commit."""
RECENT_MAX: Final = 512
"""Newest decisions that are kept in memory as well, for the upload."""


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """One decision in a journal.

    Attributes:
        at_ns: Wall clock, for people.
    """

    at_ns: int
    event: Raw
    effects: Raw


class Mark(Struct, frozen=True, kw_only=True):
    """The state after every decision before this mark.

    Attributes:
        number: Number of the last decision before it.
        run: The run of the journal; '' before the agent has joined one.
        state: The state.
    """

    number: Count
    run: str
    state: AgentState


class _Start(NamedTuple):
    """Where a group begins, and the number of the decision before it."""

    place: FramePlace
    number: int


class _Group(Struct, frozen=True, gc=False):
    """A group of decisions, with the number of the decision before it and of its last one."""

    before: int
    last: int
    payload: bytes


_mark_decoder = Decoder(Mark)
entries_decoder = Decoder(tuple[Entry, ...])


class Journal:
    """The journal of one agent, created by `open`. Not thread-safe.

    Attributes:
        id: Never used again.
        run: The run it belongs to; '' until `join_run`.
        state: The state after the last decision.
        number: Number of the last decision.
        committed: Number of the last decision on disk.
    """

    def __init__(self, file: FramedFile, agent: str, name: str) -> None:
        self.id = name
        self.run = ""
        self.state = AgentState()
        self.number = 0
        self.committed = 0
        self._file = file
        self._agent = agent
        self._uncommitted: list[tuple[int, Event, tuple[Effect, ...]]] = []
        self._marks = [_Start(file.first, 0)]  # begins with where the file does
        self._reading = self._marks[0]  # the group where the last reading of the file ended
        self._recent: deque[_Group] = deque()

    @classmethod
    def open(cls, path: Path, agent: str, durability: Literal["disk", "os"]) -> "Journal":
        """Open or create the file, and fold its decisions.

        Args:
            path: The file.
            agent: The agent's name, as in `Identity.agent`.
            durability: `disk` flushes each commit to the disk.

        Raises:
            LogError: The file cannot be read, or another process writes it.
            AgentError: It was written by another version, or for another agent.
        """
        _check_not_sqlite(path)
        header = {"journal": secrets.token_hex(16), "logic": str(LOGIC), "agent": agent}
        try:
            file = FramedFile.create_or_open(path, header, durability == "disk")
        except LogCorrupt as error:
            _damaged(error)
        try:
            found = file.header
            if "journal" not in found or found.get("agent") != agent:
                raise AgentError(f"{path} is not the journal of agent {agent}: give the agent a folder of its own")
            if found.get("logic") != str(LOGIC):
                raise _other_logic(
                    path, f"it was written by decision logic {found['logic']}, this agent has logic {LOGIC}"
                )
            journal = cls(file, agent, found["journal"])
            for frame in file.frames():
                journal._fold(frame)
            journal._reading = journal._marks[0]
        except BaseException:
            file.close()
            raise
        return journal

    def append(self, event: Event, effects: tuple[Effect, ...], state: AgentState) -> None:
        """Add one decision. It is on disk after the next `commit`. Raises AgentError if it cannot be written."""
        self._uncommitted.append((time.time_ns(), event, effects))
        self.number += 1
        self.state = state
        if len(self._uncommitted) >= UNCOMMITTED_MAX:
            self.commit()

    def commit(self) -> None:
        """Write what was appended. Raises AgentError if that fails; then the agent must stop acting."""
        if not self._uncommitted:
            return
        before, number, recent, payload = self.committed, self.number, self._recent, encode(self._uncommitted)
        self._write(DECISIONS, payload)
        if recent and recent[-1].last != before:  # Ctrl-C came between the two lines above
            recent.clear()
        recent.append(_Group(before, number, payload))
        while number - recent[0].before > RECENT_MAX and len(recent) > 1:
            recent.popleft()
        if number - self._marks[-1].number >= MARK_EVERY:
            self._mark()

    def join_run(self, run: str) -> None:
        """Bind this journal to `run`. Raises AgentError if that cannot be written."""
        self.commit()
        self.run = run
        self._mark()

    def decisions_after(self, number: int, count: int, nbytes: int) -> tuple[int, tuple[Decision, ...]]:
        """Return committed decisions that follow decision `number`, and the number of the first of them.

        If the decisions right after `number` were dropped, the oldest that remain are returned. There are at most
        `count` of them and at most `nbytes`, but always at least one. Raises LogError if the file cannot be read.
        """
        if self._recent and self._recent[0].before <= number:
            groups: Iterable[_Group] = (group for group in self._recent if group.last > number)
        else:
            groups = self._read(number)
        decisions: list[Decision] = []
        first = number + 1
        for group in groups:
            entries = entries_decoder.decode(group.payload)
            if not decisions:
                first = max(first, group.before + 1)
                entries = entries[first - 1 - group.before :]
            for entry in entries:
                event, effects = entry.event, entry.effects
                nbytes -= len(event) + len(effects)
                if decisions and (nbytes < 0 or len(decisions) >= count):
                    return first, tuple(decisions)
                decisions.append(Decision(event, effects))
        return first, tuple(decisions)

    def release(self, through: int) -> None:
        """Drop decisions up to and including `through`, which the bus has, unless they are needed for a restart."""
        self._forget_dropped()
        while self._recent and self._recent[0].last <= through:
            self._recent.popleft()
        safe = [mark for mark in self._marks if mark.number <= through]
        if safe and safe[-1].number - self._marks[0].number >= MARK_EVERY:
            self._file.drop_before(safe[-1].place)

    def close(self) -> None:
        """Commit and close the file. It is closed even if AgentError is raised, because the commit failed."""
        try:
            self.commit()
        finally:
            with contextlib.suppress(LogError):  # the caller gets the error of the commit
                self._file.close()

    def _write(self, kind: int, payload: bytes) -> None:
        before = self._file.sequence
        try:
            self._file.append(kind, payload)
        except LogError as error:
            raise AgentError(
                f"agent {self._agent} stopped: it cannot write its decisions to its journal ({error}). It does nothing "
                "more, because after a restart nobody could tell what was done. Make space, then start it again: it "
                "continues from there"
            ) from error
        finally:
            # Also where Ctrl-C came right after the group was written: it must not be written again.
            if kind == DECISIONS and self._file.sequence != before:
                self._uncommitted.clear()
                self.committed = self.number

    def _mark(self) -> None:
        start = _Start(self._file.end, self.number)
        self._write(MARK, encode(Mark(number=self.number, run=self.run, state=self.state)))
        self._marks.append(start)

    def _read(self, number: int) -> Iterator[_Group]:
        """Yield the groups in the file that have decisions behind decision `number`."""
        self._forget_dropped()
        starts = [start for start in (*self._marks, self._reading) if start.number <= number]
        before = max((start.number for start in starts), default=self._marks[0].number)
        place = next((start.place for start in starts if start.number == before), self._marks[0].place)
        for frame in self._file.frames(place):
            if frame.kind == DECISIONS:
                self._reading = _Start(frame.place, before)
                last = before + len(entries_decoder.decode(frame.payload))
                if last > number:
                    yield _Group(before, last, frame.payload)
                before = last

    def _forget_dropped(self) -> None:
        first = self._file.first
        if self._marks[0].place != first:
            self._marks = [mark for mark in self._marks if mark.place >= first]
        if self._reading.place < first:
            self._reading = self._marks[0]

    def _fold(self, frame: Frame) -> None:
        path = self._file.path
        try:
            if frame.kind == MARK:
                mark = _mark_decoder.decode(frame.payload)
                self.number, self.run, self.state = mark.number, mark.run, mark.state
                if frame.place == self._file.first:
                    self._marks.clear()
                self._marks.append(_Start(frame.place, mark.number))
            else:
                for entry in entries_decoder.decode(frame.payload):
                    self.state, effects = decide(self.state, event_decoder.decode(entry.event))
                    if encode(effects) != bytes(entry.effects):
                        raise _other_logic(path, f"decision {self.number + 1} would be a different one today")
                    self.number += 1
        except MsgspecError as error:
            what = f"decision {self.number + 1} cannot be decoded ({error})"
            raise _other_logic(path, what) from error
        self.committed = self.number


def archive_journal(path: Path) -> None:
    """Rename a closed journal, whose run is over, so that a new one can take its place. An older one is replaced."""
    os.replace(path, path.with_suffix(".previous.journal"))


def _check_not_sqlite(path: Path) -> None:
    """Raise AgentError where an earlier version kept its journal, an SQLite file."""
    earlier = path.with_suffix(".db")
    if earlier.exists() and not path.exists():
        raise _other_logic(earlier, "an earlier rolloutctl wrote it, as an SQLite file, which this one does not read")


def _damaged(error: LogCorrupt) -> NoReturn:
    what = "Move the file away: the agent then begins a new journal and reads its engine"
    raise LogCorrupt(f"{error}. {what}, and {_MISSING}", error.position) from error


def _other_logic(path: Path, what: str) -> AgentError:
    return AgentError(
        f"the journal {path} cannot be continued: {what}. Start the agent once with the version that wrote it, so that "
        "a call in flight can end and its decisions reach the run's log. Then move the file away: the agent begins a "
        f"new journal and reads its engine. If you skip the first step: {_MISSING}"
    )


_MISSING: Final = "decisions that the bus does not have yet will be missing from the run's log"
