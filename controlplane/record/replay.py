"""Replays a recorded run: every decision is made again, and compared byte for byte with the recorded one.

Pure, and it names no machine: a composition root passes in both `decide` functions. It also checks the log's header
before, since a log that other logic wrote may differ anywhere.

An agent's decisions are numbered within its journal, and a journal begins with an agent in its initial state. Where the
log lacks some (an agent lost its disk before it could send them), the rest of that journal can't be compared, and the
result says so.
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

CoordinatorReducer = Callable[
    [CoordinatorState, CoordinatorEvent], tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]
]
"""The coordinator's `decide`."""


class AgentReducer(Generic[S]):
    """An agent's machine.

    Args:
        decide: Its decisions.
        initial: The state of an agent that has not seen any event.
    """

    def __init__(self, decide: Callable[[S, Event], tuple[S, tuple[Effect, ...]]], initial: S) -> None:
        self.decide = decide
        self.initial = initial


class Replayed(Struct, frozen=True, kw_only=True):
    """The result of a replay in which every decision that could be compared was the same.

    Attributes:
        records: Records read.
        compared: Decisions that were made again and compared.
        agents: Those whose decisions are in the log.
        holes: Where the log lacks decisions of an agent.
        epoch: Of the bus, at the end.
        seq: Of the bus, at the end.
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
            f"all are the same (state {self.state[:16]})"
        )
        if self.holes:
            rest, holes = self.records - self.compared, "; ".join(self.holes)
            text += f"\n{rest} could not be compared, because the log lacks decisions before them: {holes}"
        return text


def replay(entries: Iterable[LogEntry], coordinator: CoordinatorReducer, agent: AgentReducer[S]) -> Replayed:
    """Replay a log, from its first record on.

    Raises:
        ReplayDiffers: At the first decision that differs today, with a diff.
        LogCorrupt: At a record that can't be read.
    """
    replayer = Replayer(coordinator, agent)
    for entry in entries:
        replayer.feed(entry)
    return replayer.result()


class Replayer(Generic[S]):
    """The states of all machines of a run, as of the last entry.

    Attributes:
        coordinator: The bus's.
        agents: By name, those of its newest journal.
    """

    def __init__(self, coordinator: CoordinatorReducer, agent: AgentReducer[S]) -> None:
        self.coordinator = CoordinatorState()
        self.agents: dict[str, S] = {}
        self._decide, self._agent = coordinator, agent
        self._journals: dict[str, tuple[str, int]] = {}  # by agent: its journal, and the number of the last decision
        self._broken: set[tuple[str, str]] = set()
        self._holes: list[str] = []
        self._records = self._compared = 0

    def feed(self, entry: LogEntry) -> None:
        """Make the decision of this entry again. Raises ReplayDiffers or LogCorrupt."""
        self._records += 1
        if entry.agent:
            self._feed_agent(entry)
            return
        try:
            event = coordinator_event_decoder.decode(entry.event)
        except DECODE_ERRORS:
            entry.typed_event()  # raises an error that says what is wrong, and where
            raise
        self.coordinator, effects = self._decide(self.coordinator, event)
        self._compare(entry, effects)

    def state_hash(self) -> str:
        """Return the sha256 over the states of all machines: one value for everything known at this position."""
        desired = sorted(self.coordinator.desired.items(), key=str)  # keys of two types, which msgpack can't encode
        states = (replace(self.coordinator, desired={}), desired, sorted(self.agents.items()))
        return sha256(encode(states)).hexdigest()

    def result(self) -> Replayed:
        """Return the result so far."""
        return Replayed(
            records=self._records,
            compared=self._compared,
            agents=tuple(sorted(self._journals)),
            holes=tuple(self._holes),
            epoch=self.coordinator.epoch,
            seq=self.coordinator.seq,
            state=self.state_hash(),
        )

    def _feed_agent(self, entry: LogEntry) -> None:
        name = entry.agent
        journal, number = self._journals.get(name, ("", 0))
        if journal != entry.journal:
            number = 0
            self.agents[name] = self._agent.initial
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
            entry.typed_effects()  # unreadable effects are damage, and can't be shown in a diff
            raise ReplayDiffers(_difference(entry, Raw(again)))


def _difference(entry: LogEntry, again: Raw) -> str:
    who = f"agent {entry.agent}, decision {entry.number} of its journal" if entry.agent else "the coordinator"
    diff = difflib.unified_diff(_lines(entry.effects), _lines(again), "recorded", "decided today", lineterm="", n=2)
    event = "\n".join(f"  {line}" for line in _lines(entry.event))
    return (
        f"record {entry.position}, {who}: event `{entry.kind}` led to other effects.\nThe event:\n{event}\n"
        "The effects:\n" + "\n".join(diff)
    )


def _lines(encoded: Raw) -> list[str]:
    value = msgspec.msgpack.decode(encoded)
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=2).decode().splitlines()
