"""Folds the machines over a recorded run, and compares: the same decisions, byte for byte, or the first that differs.

Pure, and no machine is named here: a composition root hands in both `decide` functions, and compares the log's header
before, since a log that other logic wrote may differ anywhere.

An agent's decisions are numbered within its journal, and a journal begins with an agent that knows nothing. Where the
log lacks some (an agent lost its disk before it could send them) there is nothing to fold over: what follows in that
journal is counted as not compared, and said.
"""

import difflib
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent
from controlplane.record.entries import LogEntry, coordinator_event_decoder
from schemas.errors import ReplayDiffers
from schemas.events import Effect, Event
from schemas.wire import DECODE_ERRORS, encode, event_decoder

S = TypeVar("S")

BusLaw = Callable[[CoordinatorState, CoordinatorEvent], tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]]
"""The coordinator's `decide`."""


class AgentLaw(Generic[S]):
    """An agent's machine: its `decide`, and the state of an agent that knows nothing."""

    def __init__(self, decide: Callable[[S, Event], tuple[S, tuple[Effect, ...]]], default_desired: S) -> None:
        self.decide = decide
        self.default_desired = default_desired


class Replayed(Struct, frozen=True, kw_only=True):
    """What a replay came to. Every decision that was compared came out the same, or there would be none of these.

    records: read.   compared: decisions that were folded and compared.   agents: whose decisions are in the log.
    holes: where the log lacks decisions of an agent.   epoch, seq: the bus's, at the end.
    state: sha256 over all states at the end; the same log gives the same.
    """

    records: int
    compared: int
    agents: tuple[str, ...]
    holes: tuple[str, ...]
    epoch: int
    seq: int
    state: str

    def __str__(self) -> str:
        text = (
            f"replayed {self.compared} decisions of the coordinator and {len(self.agents)} agents: "
            f"every one came out the same (state {self.state[:16]})"
        )
        if self.holes:
            left, missing = self.records - self.compared, "; ".join(self.holes)
            text += f"\n{left} could not be compared, since the log lacks what led to them: {missing}"
        return text


def replay(entries: Iterable[LogEntry], bus: BusLaw, agent: AgentLaw[S]) -> Replayed:
    """Fold both machines over a log, from its first record on.

    Raises ReplayDiffers at the first decision that is another one today, with a diff; LogCorrupt at a record that can't
    be read.
    """
    fold = Fold(bus, agent)
    for entry in entries:
        fold.take(entry)
    return fold.replayed()


class Fold(Generic[S]):
    """The states of all machines of a run, as of the last entry that was taken.

    coordinator: the bus's.   agents: by name, those of its newest journal.
    """

    def __init__(self, bus: BusLaw, agent: AgentLaw[S]) -> None:
        self.coordinator = CoordinatorState()
        self.agents: dict[str, S] = {}
        self._bus, self._agent = bus, agent
        self._journals: dict[str, tuple[str, int]] = {}  # by agent: its journal, and the number of the last decision
        self._broken: set[tuple[str, str]] = set()
        self._holes: list[str] = []
        self._records = self._compared = 0

    def take(self, entry: LogEntry) -> None:
        """Decide again what this entry holds. Raises ReplayDiffers, LogCorrupt."""
        self._records += 1
        if entry.agent:
            self._take_agents(entry)
            return
        try:
            event = coordinator_event_decoder.decode(entry.event)
        except DECODE_ERRORS:
            entry.typed_event()  # says what is wrong, and where
            raise
        self.coordinator, effects = self._bus(self.coordinator, event)
        self._compare(entry, effects)

    def state_hash(self) -> str:
        """sha256 over the states of all machines: one number for everything that is known at this position."""
        desired = sorted(self.coordinator.desired.items(), key=str)  # its keys have no encoding of their own
        states = (replace(self.coordinator, desired={}), desired, sorted(self.agents.items()))
        return sha256(encode(states)).hexdigest()

    def replayed(self) -> Replayed:
        """What it came to, until here."""
        return Replayed(
            records=self._records,
            compared=self._compared,
            agents=tuple(sorted(self._journals)),
            holes=tuple(self._holes),
            epoch=self.coordinator.epoch,
            seq=self.coordinator.seq,
            state=self.state_hash(),
        )

    def _take_agents(self, entry: LogEntry) -> None:
        name = entry.agent
        journal, number = self._journals.get(name, ("", 0))
        if journal != entry.journal:
            number = 0
            self.agents[name] = self._agent.default_desired
        self._journals[name] = entry.journal, entry.number
        if entry.number != number + 1 and (name, entry.journal) not in self._broken:
            self._broken.add((name, entry.journal))
            self._holes.append(f"agent {name} from {number + 1} to {entry.number - 1}")
        if (name, entry.journal) in self._broken:
            return
        try:
            event = event_decoder.decode(entry.event)
        except DECODE_ERRORS:
            entry.typed_event()
            raise
        self.agents[name], effects = self._agent.decide(self.agents[name], event)
        self._compare(entry, effects)

    def _compare(self, entry: LogEntry, effects: tuple[object, ...]) -> None:
        self._compared += 1
        again = encode(effects)
        if again != bytes(entry.effects):
            entry.typed_effects()  # what nobody can read is damage, and can't be shown beside the others
            raise ReplayDiffers(_difference(entry, Raw(again)))


def _difference(entry: LogEntry, again: Raw) -> str:
    who = f"agent {entry.agent}, decision {entry.number} of its journal" if entry.agent else "the coordinator"
    lines = difflib.unified_diff(_lines(entry.effects), _lines(again), "recorded", "decided today", lineterm="", n=2)
    return (
        f"record {entry.position}, {who}: a {entry.kind} event led to other effects.\nThe event:\n"
        + "\n".join(f"  {line}" for line in _lines(entry.event))
        + "\nThe effects:\n"
        + "\n".join(lines)
    )


def _lines(encoded: Raw) -> list[str]:
    value = msgspec.msgpack.decode(encoded)
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2).decode().splitlines()
