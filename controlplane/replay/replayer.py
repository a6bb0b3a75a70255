"""Replays a recorded run: every decision is made again, and compared byte for byte with the recorded one.

Pure. The machine of the agents belongs to the other side, so `controlplane.cli.replay_log` passes it in.
That root also checks the log's header first, since a log that other logic wrote may differ anywhere.

An agent's decisions are numbered within its journal, and a journal begins with an agent in its initial state. Where the
log lacks some (an agent lost its disk before it could send them), or an agent sent what is no decision, the rest of
that journal can't be compared, and the result says so.
"""

import difflib
from collections.abc import Callable
from hashlib import sha256
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.coordinator import LOGIC, CoordinatorState, decide
from controlplane.record.entries import AgentMark, LogEntry, LogMark
from controlplane.record.marks import decode_state
from schemas.errors import DecisionUnreadable, LogCorrupt, ReplayDiffers
from schemas.events import Effect, Event
from schemas.wire import encode

S = TypeVar("S")


class Replayed(Struct, frozen=True):
    """The result of a replay in which every decision that could be compared was the same.

    Attributes:
        holes: Where the log lacks decisions of an agent, or has one that can't be read.
        state: sha256 over all states at the end; the same log gives the same.
    """

    records: int
    compared: int
    marks: int
    agents: tuple[str, ...]
    holes: tuple[str, ...]
    state: str

    def __str__(self) -> str:
        text = (
            f"replayed {self.compared} decisions of the coordinator and {len(self.agents)} agents: "
            f"all are the same (state {self.state[:16]})"
        )
        if self.holes:
            rest, holes = self.records - self.compared, "; ".join(self.holes)
            text += f"\n{rest} could not be compared, because the log lacks decisions before them: {holes}"
        return text


class _AgentReplay(Struct, Generic[S]):
    """What is known of an agent with one journal: the number of its last decision, and the state after that."""

    journal: str
    number: int
    state: S
    broken: bool = False  # a decision is missing or can't be read, so that those that follow can't be compared


class Replayer(Generic[S]):
    """The states of all machines of a run, as of the last entry."""

    def __init__(
        self,
        decide_agent: Callable[[S, Event], tuple[S, tuple[Effect, ...]]],
        initial: S,
        decode_agent: Callable[[bytes], S | None],
    ) -> None:
        self._decide_agent, self._initial, self._decode_agent = decide_agent, initial, decode_agent
        self._lives: dict[str, _AgentReplay[S]] = {}  # by agent: with its newest journal
        self._broken: set[tuple[str, str]] = set()  # agents and the older journals of theirs that are broken
        self._holes: list[str] = []
        self._records = self._compared = self._marks = 0
        self._recorded: dict[str, dict[str, int]] = {}  # by agent and journal: the newest decision, as in marks
        self.coordinator = CoordinatorState()
        """State of the bus."""

    @property
    def agents(self) -> dict[str, S]:
        """State of each agent, by name, in its newest journal."""
        return {name: life.state for name, life in self._lives.items()}

    def feed(self, entry: LogEntry) -> None:
        """Make the decision of this entry again. Raises ReplayDiffers, with a diff, or LogCorrupt."""
        self._records += 1
        if entry.agent:
            self._feed_agent(entry)
            return
        self.coordinator, effects = decide(self.coordinator, entry.typed_event())  # type: ignore[arg-type]
        if encode(effects) != entry.effects:
            raise _differs(entry, effects)
        self._compared += 1

    def check_mark(self, mark: LogMark) -> None:
        """Compare a mark with the state that the entries before it led to; begin with one that has none before it.

        Raises ReplayDiffers or LogCorrupt.
        """
        if self._records == 0:
            state = decode_state(mark)
            if state is None:
                raise LogCorrupt(mark.damage or f"the log begins with a mark of logic {mark.logic}", mark.position)
            self.coordinator = state
            self._recorded = {agent: dict(numbers) for agent, numbers in mark.recorded.items()}
        elif mark.logic == LOGIC:
            self._marks += 1
            state_differs = decode_state(mark) != self.coordinator
            if state_differs or mark.recorded != self._recorded:
                what = "state of the coordinator" if state_differs else "numbers of the agents' decisions"
                raise ReplayDiffers(
                    f"the mark after record {mark.position} has another {what} than the records before it lead to"
                )

    def check_agent(self, mark: AgentMark) -> None:
        """Compare an agent's own state with the one that its decisions led to, or go on from it behind a hole.

        Raises ReplayDiffers.
        """
        life = self._lives.get(mark.agent)
        if life is not None and (life.journal, life.number, life.broken) == (mark.journal, mark.number, False):
            if encode(life.state) != mark.state:
                name, number = mark.agent, mark.number
                raise ReplayDiffers(f"agent {name} says that decision {number} led to another state than it does today")
            return
        state = self._decode_agent(mark.state)
        if state is not None:
            self._lives[mark.agent] = _AgentReplay(mark.journal, mark.number, state)

    def state_hash(self) -> str:
        """Return the sha256 over the states of all machines: one value for everything known at this position."""
        tables = self.coordinator.desired, self.coordinator.stops
        by_unit = [sorted(table.items(), key=str) for table in tables]  # msgpack sorts no keys but text
        states = (replace(self.coordinator, desired={}, stops={}), by_unit, sorted(self.agents.items()))
        return sha256(encode(states)).hexdigest()

    def result(self) -> Replayed:
        agents, holes = tuple(sorted(self._lives)), tuple(self._holes)
        return Replayed(self._records, self._compared, self._marks, agents, holes, self.state_hash())

    def _feed_agent(self, entry: LogEntry) -> None:
        life = self._lives.get(entry.agent)
        if life is None or life.journal != entry.journal:
            life = self._begin_life(entry, life)
        if entry.number != life.number + 1 and not life.broken:
            life.broken = True
            self._holes.append(f"agent {entry.agent} from {life.number + 1} to {entry.number - 1}")
        life.number = self._recorded.setdefault(entry.agent, {})[entry.journal] = entry.number
        if life.broken:
            return
        try:
            life.state, effects = self._decide_agent(life.state, entry.typed_event())  # type: ignore[arg-type]
            if encode(effects) != entry.effects:
                raise _differs(entry, effects)
            self._compared += 1
        except DecisionUnreadable as error:
            life.broken = True
            self._holes.append(f"agent {entry.agent} from {entry.number} on ({error})")

    def _begin_life(self, entry: LogEntry, before: _AgentReplay[S] | None) -> _AgentReplay[S]:
        """The agent has another journal than before."""
        if before is not None and before.broken:
            self._broken.add((entry.agent, before.journal))
        broken = (entry.agent, entry.journal) in self._broken
        life = self._lives[entry.agent] = _AgentReplay(entry.journal, 0, self._initial, broken)
        return life


def _differs(entry: LogEntry, effects: tuple[object, ...]) -> ReplayDiffers:
    """What to raise if an entry has other effects than these."""
    entry.typed_effects()  # unreadable effects are damage, and can't be shown in a diff
    return ReplayDiffers(_difference(entry, encode(effects)))


def _difference(entry: LogEntry, recomputed: bytes) -> str:
    owner = f"agent {entry.agent}, decision {entry.number} of its journal" if entry.agent else "the coordinator"
    diff = difflib.unified_diff(
        _lines(entry.effects), _lines(recomputed), "recorded", "decided today", lineterm="", n=2
    )
    event = "\n".join(f"  {line}" for line in _lines(entry.event))
    return (
        f"record {entry.position}, {owner}: event `{entry.kind}` led to other effects.\nThe event:\n{event}\n"
        "The effects:\n" + "\n".join(diff)
    )


def _lines(encoded: bytes) -> list[str]:
    value = msgspec.msgpack.decode(encoded)
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2).decode().splitlines()
