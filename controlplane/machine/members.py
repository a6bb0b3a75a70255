"""The members of the fleet, and what is asked about all of them. Pure."""

from collections.abc import Mapping
from typing import Final, NamedTuple, Self

from msgspec import Struct

from controlplane.machine.tables import Table
from schemas.identity import ROLLOUT, Count, Identity, RolloutMode
from schemas.reports import AgentStatus
from schemas.wire import Hello

_UNLIKE: Final = (RolloutMode.COLOCATED, RolloutMode.OBSERVED)


class Member(Struct, frozen=True, kw_only=True, gc=False):
    """One agent that said hello.

    Attributes:
        peer: Its newest connection, as `name/incarnation/connection`.
        state: joining, live, gone or left.
        fresh: This incarnation has not joined yet. A reconnect of a living process is not fresh.
        joined: Some incarnation has joined at this place. Where none ever did, the place is forgotten with its agent.
        away_us: Since when it is not live, on the clock of this life of the bus.
        seq: Last command that it applied, by its own report.
        status: What it last reported.
        status_us: When it did, on the clock of this life of the bus. A heartbeat that repeats the last one is no event.
        obeyed: Whether it carried out the newest command that lets it serve or not, if that has ended since `status`.
        loaded: The same of the newest commit or abort of a sync, which brings it to the committed weights.
    """

    peer: str
    hello: Hello
    state: str
    fresh: bool
    joined: bool = False
    away_us: int = 0
    seq: Count = 0
    status: AgentStatus | None = None
    status_us: int = 0
    obeyed: bool | None = None
    loaded: bool | None = None


class Roster(NamedTuple):
    """Who the members are.

    Attributes:
        live: Agents that are live.
        away: Agents that are known and not live, in order of their names.
        syncing: Known replicas that weight syncs are for.
        identities: Of each replica and training rank: the identity of one of its agents, which agree on what counts.
        unlike: Those of them that some commands treat unlike the usual replica: training ranks, judges, observed ones.
    """

    live: frozenset[str]
    away: tuple[str, ...]
    syncing: frozenset[int]
    identities: dict[int | str, Identity]
    unlike: dict[int | str, Identity]


class Members(Table[str, Member]):
    """The members of the fleet, by name. The roster is made when it is asked for, and kept until one comes or goes."""

    __slots__ = ("_roster",)

    def __init__(self, entries: Mapping[str, Member]) -> None:
        super().__init__(entries)
        self._roster: Roster | None = None

    @property
    def roster(self) -> Roster:
        """Who they are."""
        if self._roster is None:
            self._roster = _roster_of(self.as_dict())
        return self._roster

    def with_entries(self, entries: Mapping[str, Member]) -> Self:
        """Return the members with some."""
        members = super().with_entries(entries)
        kept = self._roster is not None and all(_same_place(self.get(name), entries[name]) for name in entries)
        members._roster = self._roster if kept else None
        return members


def _same_place(before: Member | None, after: Member) -> bool:
    """Whether an entry changes nothing that the roster is made of."""
    if before is None or before.state != after.state or before.joined != after.joined:
        return False
    return before.hello is after.hello or before.hello.identity == after.hello.identity


def _roster_of(members: Mapping[str, Member]) -> Roster:
    live, away, syncing = [], [], []
    identities: dict[int | str, Identity] = {}
    unlike: dict[int | str, Identity] = {}
    for name, member in members.items():
        identity = member.hello.identity
        usual = identity.role == ROLLOUT and identity.mode not in _UNLIKE
        unit = identity.unit
        identities[unit] = identity
        if member.state == "live":
            live.append(name)
        elif member.joined:
            away.append(name)
        if not usual:
            unlike[unit] = identity
            continue
        unlike.pop(unit, None)
        if member.joined:
            syncing.append(identity.replica)
    return Roster(frozenset(live), tuple(sorted(away)), frozenset(syncing), identities, unlike)
