"""The agent's journal: every decision of its machine, on disk before its effects count.

One record file per agent. The body of a record is a `Decision`, its kind is the tag of the event. Decisions are
numbered 1, 2, 3 … within a journal, whose id is never used again; the bus keeps the same numbers in the run's log.
Between the decisions there are marks. A mark holds the state after all decisions before it, so that those can be
dropped once the bus has them.

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
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final, get_args

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder

from schemas.carriers.database import Durability
from schemas.carriers.records import Record, RecordFile
from schemas.errors import AgentError, LogError
from schemas.events import Decision, Effect, Event
from schemas.identity import Count
from schemas.wire import decision_decoder, encode, event_decoder
from workers.machine.decide import LOGIC, AgentState, decide

MARK: Final = "mark"
MARK_EVERY: Final = 4096
"""Decisions between two marks. The file holds about twice as many, and those that the bus does not have yet."""
UNCOMMITTED_MAX: Final = 1024
"""Most decisions that wait in memory for a commit."""
RECENT_MAX: Final = 512
"""Newest decisions that are kept in memory as well, for the upload."""


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


class _Body(Struct, frozen=True, gc=False):
    """The body of a record: encodes to the same bytes as a `Decision`, in one pass instead of three."""

    event: Event
    effects: tuple[Effect, ...]


_mark_decoder = Decoder(Mark)
_KINDS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Event)}


class Journal:
    """The journal of one agent, created by `open`. Not thread-safe.

    Attributes:
        id: Never used again.
        run: The run it belongs to; '' until `join_run`.
        state: The state after the last decision.
        number: Number of the last decision.
        committed: Number of the last decision on disk.
    """

    def __init__(self, file: RecordFile, agent: str, name: str) -> None:
        self.id = name
        self.run = ""
        self.state = AgentState()
        self.number = 0
        self.committed = 0
        self._file = file
        self._agent = agent
        self._uncommitted: list[tuple[int, Event, tuple[Effect, ...]]] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT_MAX)  # ends with decision `committed`
        self._marks: list[tuple[int, int]] = [(0, 0)]  # position of a mark, number of the decision before it

    @classmethod
    def open(cls, path: Path, agent: str, durability: Durability) -> "Journal":
        """Open or create the file, and fold its decisions.

        Args:
            path: The file.
            agent: The agent's name, as in `Identity.agent`.
            durability: Whether each commit is flushed to the disk.

        Raises:
            LogError: The file cannot be read, or another process writes it.
            AgentError: It was written by another version of the decision logic, or for another agent.
        """
        header = {"journal": secrets.token_hex(16), "logic": str(LOGIC), "agent": agent}
        file = RecordFile.open(path, header, durability)
        try:
            found = file.header
            if "journal" not in found or found.get("agent") != agent:
                raise AgentError(f"{path} is not the journal of agent {agent}: give the agent a folder of its own")
            if found.get("logic") != str(LOGIC):
                raise _other_logic(
                    path, f"it was written by decision logic {found['logic']}, this agent has logic {LOGIC}"
                )
            journal = cls(file, agent, found["journal"])
            for record in file.records(file.first_position):
                journal._fold(record)
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
        if not self._uncommitted and self._file.pending == 0:
            return
        agent, append, remember = self._agent, self._file.append, self._recent.append
        for at_ns, event, effects in self._uncommitted:
            body = encode(_Body(event, effects))
            append(_KINDS[type(event)], agent, at_ns, body)
            remember(body)
        self._uncommitted.clear()
        if self.number - self._marks[-1][1] >= MARK_EVERY:
            self._mark()
        try:
            self._file.commit()
        except LogError as error:
            raise AgentError(
                f"agent {agent} stopped: it cannot write its decisions to its journal ({error}). It does nothing more, "
                "because after a restart nobody could tell what was done. Make space, then start it again: it "
                "continues from there"
            ) from error
        self.committed = self.number

    def join_run(self, run: str) -> None:
        """Bind this journal to `run`. Raises AgentError if that cannot be written."""
        self.commit()
        self.run = run
        self._mark()
        self.commit()

    def decisions_after(self, number: int, count: int, nbytes: int) -> tuple[int, tuple[Decision, ...]]:
        """Return committed decisions that follow decision `number`, and the number of the first of them.

        If the decisions right after `number` were dropped, the oldest that remain are returned. There are at most
        `count` of them and at most `nbytes`, but always at least one. Raises LogError if the file cannot be read.
        """
        oldest = self.committed - len(self._recent)
        if number >= oldest:
            first = number + 1
            bodies: Iterator[bytes] = islice(self._recent, number - oldest, None)
        else:
            first, bodies = self._read(number)
        decisions: list[Decision] = []
        for body in bodies:
            nbytes -= len(body)
            if decisions and (len(decisions) >= count or nbytes < 0):
                break
            decisions.append(decision_decoder.decode(body))
        return first, tuple(decisions)

    def release(self, through: int) -> None:
        """Drop decisions up to and including `through`, which the bus has, unless they are needed for a restart."""
        safe = [position for position, number in self._marks if number <= through]
        if safe and safe[-1] - self._file.first_position >= MARK_EVERY:
            self._file.truncate_before(safe[-1])
            self._marks = [mark for mark in self._marks if mark[0] >= safe[-1]]

    def close(self) -> None:
        """Commit and close the file. It is closed even if AgentError is raised, because the commit failed."""
        try:
            self.commit()
        finally:
            with contextlib.suppress(LogError):  # the caller gets the error of the commit
                self._file.close()

    def _read(self, number: int) -> tuple[int, Iterator[bytes]]:
        """Read from the file: the number of the first remaining decision after `number`, and the bodies from it on."""
        start = max(self._position(number + 1), self._file.first_position)
        records = (record for record in self._file.records(start) if record.kind != MARK)
        first = next(records)
        return self._number(first.position), (record.body for record in chain((first,), records))

    def _mark(self) -> None:
        body = encode(Mark(number=self.number, run=self.run, state=self.state))
        position = self._file.append(MARK, self._agent, time.time_ns(), body)
        self._marks.append((position, self.number))

    def _fold(self, record: Record) -> None:
        path, position = self._file.path, record.position
        try:
            if record.kind == MARK:
                mark = _mark_decoder.decode(record.body)
                self.number, self.run, self.state = mark.number, mark.run, mark.state
                self._marks.append((position, mark.number))
            else:
                decision = decision_decoder.decode(record.body)
                self.state, effects = decide(self.state, event_decoder.decode(decision.event))
                if encode(effects) != bytes(decision.effects):
                    raise _other_logic(path, f"decision {position} would be a different one today")
                self.number += 1
        except MsgspecError as error:
            raise _other_logic(path, f"record {position} cannot be decoded ({error})") from error
        self.committed = self.number

    def _position(self, number: int) -> int:
        position, before = next((mark for mark in reversed(self._marks) if mark[1] < number), (0, 0))
        return position + number - before

    def _number(self, position: int) -> int:
        start, before = next((mark for mark in reversed(self._marks) if mark[0] < position), (0, 0))
        return before + position - start


def archive_journal(path: Path) -> None:
    """Rename a closed journal, whose run is over, so that a new one can take its place. An older one is replaced."""
    os.replace(path, path.with_suffix(".previous.db"))


def _other_logic(path: Path, what: str) -> AgentError:
    return AgentError(
        f"the journal {path} cannot be continued: {what}. Start the agent once with the version that wrote it, so that "
        "a call in flight can end; or move the file away: the agent then begins a new journal and reads its engine"
    )
