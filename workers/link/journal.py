"""The agent's journal: every decision of its machine, on disk before its effects count.

One record file per agent (`schemas.storage.records`). A record is one decision, and its position is the decision's
number: 1, 2, 3 … within a journal, whose id is never used again; the bus keeps the same numbers in the run's log. A
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
from pathlib import Path
from typing import Final, Literal, NoReturn

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder

from schemas.config import BusConfig
from schemas.errors import AgentError, LogCorrupt, LogError, LogLocked
from schemas.events import Decision, Effect, Event
from schemas.identity import Count, Milliseconds
from schemas.storage.record_file import RecordFile
from schemas.storage.records import Record
from schemas.wall_clock import wall_clock_ns
from schemas.wire import encode, event_decoder
from workers.machine.decide import LOGIC, decide
from workers.machine.state import AgentState

MARK_EVERY: Final = 4096
"""Decisions between two marks. The file holds about twice as many, and those that the bus does not have yet."""
UNCOMMITTED_MAX: Final = 1024
"""Most decisions that wait in memory for a commit."""
LOOK_S: Final = 1.0
"""Seconds in which the file is looked at once: each look costs as much as a fifth of a commit."""


class JournalMark(Struct, frozen=True, kw_only=True):
    """The state after every decision before this mark.

    Attributes:
        run: The run of the journal; '' before the agent has joined one.
    """

    number: Count
    run: str
    state: AgentState
    lease_ms: Milliseconds = BusConfig().lease_ms


class _Decided(Struct, frozen=True, gc=False):
    """A `Decision` before it is encoded."""

    event: Event
    effects: tuple[Effect, ...]


_mark_decoder = Decoder(JournalMark)
_decision_decoder = Decoder(Decision)


class Journal:
    """The journal of one agent, created by `open`. Not thread-safe.

    Attributes:
        id: Never used again.
        run: The run it belongs to; '' until `join_run`.
        lease_ms: The lease of that run, which also counts while an agent that was restarted waits for a bus.
    """

    def __init__(self, file: RecordFile, agent: str, name: str) -> None:
        self.id = name
        self.run = ""
        self.lease_ms = BusConfig().lease_ms
        self.state = AgentState()
        self._file = file
        self._agent = agent
        self._dropped = file.first_position - 1  # the last decision that was dropped
        self._marks = file.mark_positions()
        self.number = self._dropped

    @classmethod
    def open(cls, path: Path, agent: str, durability: Literal["disk", "os"]) -> "Journal":
        """Open or create the file, and fold its decisions.

        Raises LogError, or AgentError if another version wrote it, or another agent.
        """
        header = {"journal": secrets.token_hex(16), "logic": str(LOGIC), "agent": agent}
        try:
            file = RecordFile.open(path, header, durability, LOOK_S)
        except LogCorrupt as error:
            _refuse(error)
        except LogLocked as error:
            what = f"another process runs agent {agent} here, and writes {path}"
            raise LogLocked(f"{what}: end that one, or give this one another --replica, or --state-dir") from error
        try:
            found = file.header
            if "journal" not in found or found.get("agent") != agent:
                raise AgentError(f"{path} is not the journal of agent {agent}: give the agent a folder of its own")
            if found.get("logic") != str(LOGIC):
                raise _other_logic(
                    path, f"it was written by decision logic {found['logic']}, this agent has logic {LOGIC}"
                )
            journal = cls(file, agent, found["journal"])
            journal._restore()
        except BaseException as error:
            with contextlib.suppress(LogError):
                file.close()
            if isinstance(error, LogCorrupt):
                _refuse(error)
            raise
        return journal

    @property
    def committed(self) -> int:
        """Number of the last decision on disk."""
        return self._file.committed

    def append(self, event: Event, effects: tuple[Effect, ...], state: AgentState) -> None:
        """Add one decision. It is on disk after the next `commit`. Raises AgentError if it cannot be written."""
        kind = str(event.__struct_config__.tag)
        self.number = self._file.append(kind, self._agent, wall_clock_ns(), encode(_Decided(event, effects)))
        self.state = state
        if self._file.pending >= UNCOMMITTED_MAX:
            self.commit()

    def commit(self) -> None:
        """Write what was appended. Raises AgentError if that fails; then the agent must stop acting."""
        if self._file.pending:
            if self.number - self._newest_mark >= MARK_EVERY:
                self._mark()
            self._write()

    def join_run(self, run: str, lease_ms: int) -> None:
        """Bind this journal to `run`, and keep its lease. Raises AgentError if that cannot be written."""
        if (self.run, self.lease_ms) != (run, lease_ms):
            self.run, self.lease_ms = run, lease_ms
            self._mark()
            self._write()

    def decisions_after(self, number: int, count: int, nbytes: int) -> tuple[int, tuple[Decision, ...]]:
        """Return committed decisions that follow decision `number`, and the number of the first of them.

        If the decisions right after `number` were dropped, the oldest that remain are returned. There are at most
        `count` of them and at most `nbytes`, but always at least one. Raises LogError if the file cannot be read.
        """
        decisions: list[Decision] = []
        first = max(number, self._dropped) + 1
        for record in self._file.records(first):
            decision = _decision_decoder.decode(record.body)
            nbytes -= len(decision.event) + len(decision.effects)
            if decisions and (nbytes < 0 or len(decisions) >= count):
                break
            decisions.append(decision)
            if record.position == self.committed:  # to ask the file for more would cost as much as they did
                break
        return first, tuple(decisions)

    def release(self, through: int) -> None:
        """Drop decisions up to and including `through`, which the bus has, unless they are needed for a restart."""
        safe = max((mark for mark in self._marks if mark <= through), default=0)
        if safe - self._dropped >= MARK_EVERY:
            self._file.drop_before(safe + 1)
            self._dropped = safe
            self._marks = [mark for mark in self._marks if mark >= safe]

    def close(self) -> None:
        """Commit and close the file. It is closed even if AgentError is raised, because the commit failed."""
        try:
            self.commit()
        finally:
            with contextlib.suppress(LogError):  # the caller gets the error of the commit
                self._file.close()

    @property
    def _newest_mark(self) -> int:
        return self._marks[-1] if self._marks else 0

    def _mark(self) -> None:
        mark = JournalMark(number=self.number, run=self.run, state=self.state, lease_ms=self.lease_ms)
        self._file.append_mark(wall_clock_ns(), encode(mark))
        if not self._marks or self._newest_mark != self.number:
            self._marks.append(self.number)

    def _write(self) -> None:
        try:
            self._file.commit()
        except LogError as error:
            raise AgentError(
                f"agent {self._agent} stopped: it cannot write its decisions to its journal ({error}). It does nothing "
                "more, because after a restart it would not be known what was done. Make space, then start it again: "
                "it continues from there"
            ) from error

    def _restore(self) -> None:
        """Fold the machine from the newest mark on, and check everything that is kept before it."""
        path = self._file.path
        try:
            if self._marks:
                mark = _mark_decoder.decode(self._file.mark(self._newest_mark).body)
                self.run, self.state, self.lease_ms = mark.run, mark.state, mark.lease_ms
            elif self._dropped:
                raise LogCorrupt(f"{path}: the state after decision {self._dropped} is missing", self._dropped)
            for record in self._file.records():
                self._fold(record)
        except MsgspecError as error:
            raise _other_logic(path, f"decision {self.number + 1} cannot be decoded ({error})") from error

    def _fold(self, record: Record) -> None:
        if record.position > self._newest_mark:
            decision = _decision_decoder.decode(record.body)
            self.state, effects = decide(self.state, event_decoder.decode(decision.event))
            if encode(effects) != bytes(decision.effects):
                raise _other_logic(self._file.path, f"decision {record.position} would be a different one today")
        self.number = record.position


def archive_journal(path: Path) -> None:
    """Rename a closed journal, whose run is over, so that a new one can take its place. An older one is replaced."""
    kept = path.with_suffix(".previous.journal")
    for end in ("-wal", "-shm"):  # they are left where another program read it while it was closed
        Path(f"{kept}{end}").unlink(missing_ok=True)
    for end in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{end}", f"{kept}{end}")


def _refuse(error: LogCorrupt) -> NoReturn:
    what = "Move the file away: the agent then begins a new journal and reads its engine"
    raise LogCorrupt(f"{error}. {what}, and {_MISSING}", error.position) from error


def _other_logic(path: Path, what: str) -> AgentError:
    return AgentError(
        f"the journal {path} cannot be continued: {what}. Start the agent once with the version that wrote it, so that "
        "a call in flight can end and its decisions reach the run's log. Then move the file away: the agent begins a "
        f"new journal and reads its engine. If you skip the first step: {_MISSING}"
    )


_MISSING: Final = "decisions that the bus does not have yet will be missing from the run's log"
