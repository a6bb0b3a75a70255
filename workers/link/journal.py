"""The agent's journal: every decision of its machine, on disk before it counts.

One record file per agent. A record's body is a `Decision`; its kind is the tag of the event. Decisions are numbered
1, 2, 3 … within a journal, whose id never comes back; the bus keeps the same numbers in the run's log. Between the
decisions stand marks: a mark holds the state that all decisions before it led to, so they can be dropped once the bus
has them.

Theory of operation. `note` takes a decision into memory and `commit` writes all that was noted as one group, so the
order on disk is the order of deciding, and whatever is lost in a crash is the end. What may be lost is for the agent
to choose: it commits before an engine is called and before the outcome of a call is told, and leaves decisions that
touched nothing for later. Opening folds the machine over the decisions and compares: a journal that does not lead to
the recorded effects was written by other logic, and going on from it would be guessing.
"""

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final, Literal, get_args

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder

from schemas.carriers.records import Record, RecordFile
from schemas.errors import AgentError, LogError
from schemas.events import Decision, Effect, Event
from schemas.identity import Count
from schemas.wire import decision_decoder, encode, event_decoder
from workers.machine.decide import LOGIC, AgentState, decide

MARK: Final = "mark"
MARK_EVERY: Final = 4096
"""Decisions between two marks. The file holds about twice as many, plus what the bus has not taken yet."""
NOTED_MAX: Final = 1024
"""Decisions held in memory, at most, before they are written unasked."""
RECENT_MAX: Final = 512
"""Newest decisions kept in memory as well, since the bus asks for those."""

Durability = Literal["disk", "os"]


class Mark(Struct, frozen=True, kw_only=True):
    """Where everything before it led to. number: of the last decision before it.   run: '' before any was joined."""

    number: Count
    run: str
    state: AgentState


class _Made(Struct, frozen=True, gc=False):
    """A `Decision` that is not encoded yet. Gives the same bytes, in one pass over it instead of three."""

    event: Event
    effects: tuple[Effect, ...]


_mark_decoder = Decoder(Mark)
_KINDS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Event)}


class Journal:
    """The journal of one agent; made by `open`. Not for several threads.

    id: of this journal, for ever.   run: the run it belongs to, '' until `join_run`.   state: the newest.
    number: decisions made.   committed: decisions on disk.
    """

    def __init__(self, file: RecordFile, agent: str, name: str) -> None:
        self.id = name
        self.run = ""
        self.state = AgentState()
        self.number = 0
        self.committed = 0
        self._file = file
        self._agent = agent
        self._noted: list[tuple[int, Event, tuple[Effect, ...]]] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT_MAX)  # ends with decision `committed`
        self._marks: list[tuple[int, int]] = [(0, 0)]  # position of a mark, number of the decision before it

    @classmethod
    def open(cls, path: Path, agent: str, durability: Durability) -> "Journal":
        """Open or make the file, and fold what it holds. agent: as in `Identity.agent`.

        Raises LogError and its kinds if it can't be read or another process writes it, AgentError if it was written by
        another version of the decision logic.
        """
        header = {"journal": secrets.token_hex(16), "logic": str(LOGIC), "agent": agent}
        file = RecordFile.open(path, header, durability)
        try:
            found = file.header
            if "journal" not in found or found.get("agent") != agent:
                raise AgentError(f"{path} is not the journal of agent {agent}: give the agent a folder of its own")
            if found.get("logic") != str(LOGIC):
                raise _other_logic(path, f"it was written by decision logic {found['logic']}, this agent has {LOGIC}")
            journal = cls(file, agent, found["journal"])
            for record in file.records(file.first_position):
                journal._fold(record)
        except BaseException:
            file.close()
            raise
        return journal

    def note(self, event: Event, effects: tuple[Effect, ...], state: AgentState) -> None:
        """Take one decision. It is on disk after the next `commit`. Raises AgentError when it can't be written."""
        self._noted.append((time.time_ns(), event, effects))
        self.number += 1
        self.state = state
        if len(self._noted) >= NOTED_MAX:
            self.commit()

    def commit(self) -> None:
        """Write what was noted. Raises AgentError when that fails; the agent must not act any more then."""
        if not self._noted and self._file.pending == 0:
            return
        agent, append, remember = self._agent, self._file.append, self._recent.append
        for at_ns, event, effects in self._noted:
            body = encode(_Made(event, effects))
            append(_KINDS[type(event)], agent, at_ns, body)
            remember(body)
        self._noted.clear()
        if self.number - self._marks[-1][1] >= MARK_EVERY:
            self._mark()
        try:
            self._file.commit()
        except LogError as error:
            raise AgentError(
                f"agent {agent} stopped: it can't write down what it decides ({error}). It acts no more, since after a "
                "restart nobody could tell what was done. Make space, then start it again: it goes on from there"
            ) from error
        self.committed = self.number

    def join_run(self, run: str) -> None:
        """This journal belongs to `run` from now on. Raises AgentError when that can't be written."""
        self.commit()
        self.run = run
        self._mark()
        self.commit()

    def after(self, number: int, count: int, nbytes: int) -> tuple[int, tuple[Decision, ...]]:
        """Committed decisions that follow decision `number`, and the number of the first of them.

        At most `count`, and as many as fit into `nbytes`, but one at least. Where those right after `number` are not
        kept any more, the oldest that are. Raises LogError.
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
        """The bus has every decision up to and with `through`: drop what is not needed to start again."""
        safe = [position for position, number in self._marks if number <= through]
        if safe and safe[-1] - self._file.first_position >= MARK_EVERY:
            self._file.truncate_before(safe[-1])
            self._marks = [mark for mark in self._marks if mark[0] >= safe[-1]]

    def close(self) -> None:
        """Write what was noted, close the file. Raises AgentError when it can't be written, and has closed then."""
        try:
            self.commit()
        finally:
            with contextlib.suppress(LogError):  # what could not be written is on its way to the caller already
                self._file.close()

    def _read(self, number: int) -> tuple[int, Iterator[bytes]]:
        """From the file: the number of the first decision after `number` that is kept, it, and what follows."""
        records = (
            one
            for one in self._file.records(max(self._position(number + 1), self._file.first_position))
            if one.kind != MARK
        )
        record = next(records)
        return self._number(record.position), (one.body for one in chain((record,), records))

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
                    raise _other_logic(path, f"decision {position} would be another one today")
                self.number += 1
        except MsgspecError as error:
            raise _other_logic(path, f"record {position} can't be understood ({error})") from error
        self.committed = self.number

    def _position(self, number: int) -> int:
        position, before = next((mark for mark in reversed(self._marks) if mark[1] < number), (0, 0))
        return position + number - before

    def _number(self, position: int) -> int:
        start, before = next((mark for mark in reversed(self._marks) if mark[0] < position), (0, 0))
        return before + position - start


def set_aside(path: Path) -> None:
    """Put a journal that was closed beside a new one, in the place of an older one: its run is over."""
    os.replace(path, path.with_suffix(".previous.db"))


def _other_logic(path: Path, what: str) -> AgentError:
    return AgentError(
        f"the journal {path} can't be continued: {what}. Start the agent once with the version that wrote it to let a "
        "call in flight end, or move the file away: without it the agent starts anew and reads its engine"
    )
