"""What is desired of a replica, read from the log without any code of `schemas.desired`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schemas.commands import Command, Drain, EngineCommand, EpochStart, UnknownCommand, WeightSync
from schemas.desired import Desired
from schemas.identity import ROLLOUT, Identity
from tests.simulation import verdicts

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.promises import Promises

BOTH = frozenset({"weights", "kv_cache"})


@dataclass
class Wanted:
    """What is wanted of one replica; versions are 0 if there is none."""

    paused: str = ""  # how; empty while it is to run
    asleep: frozenset[str] = field(default_factory=frozenset)
    discard: bool = False
    version: int = 0
    syncing: int = 0
    loading: bool = False
    quarantined: int = 0
    loaded_first: int = 0
    fallback: int = 0
    leaves: bool = False

    def lose_trainer(self) -> None:
        """Go on without the sync, the pause and the quarantine of a trainer that is gone."""
        self.paused, self.syncing, self.loading = "", 0, False
        self.fallback, self.loaded_first = self.loaded_first or self.fallback, 0
        self.quarantined = self.quarantined if self.quarantined <= self.version else 0

    def restart(self, fleet: Wanted) -> None:
        """Leave a quarantine, and take part in what is synced to the whole fleet."""
        if self.quarantined:
            self.quarantined, self.syncing, self.loading = 0, fleet.syncing, fleet.loading

    def obey(self, command: EngineCommand) -> None:
        """Follow an engine command."""
        tags = frozenset(command.tags) or BOTH
        if command.operation == "pause":
            self.paused = command.mode
        elif command.operation == "resume":
            self.paused = ""
        elif command.operation == "sleep":
            self.asleep |= tags
            self.discard = self.discard or (command.discard and "weights" in self.asleep)
        elif command.operation == "wake":
            self.asleep -= tags
            self.discard = self.discard and "weights" in self.asleep

    def follow(self, command: WeightSync, replica: int) -> None:
        """Follow a phase of a sync to a newer version."""
        left_out = replica in command.quarantine
        if command.phase == "prepare":
            self.syncing, self.loading = command.version, False
        elif command.phase == "load" and left_out:
            self.syncing, self.loading, self.quarantined = 0, False, self.quarantined or command.version
        elif command.phase == "load" and self.syncing == command.version:
            self.loading, self.loaded_first = True, 0 if self.version else command.version
        elif command.phase == "commit":
            self.version, self.quarantined = command.version, command.version if left_out else 0
            self.syncing, self.loading, self.loaded_first, self.fallback = 0, False, 0, 0
        elif command.phase == "abort":
            self.syncing, self.loading = 0, False
            self.quarantined = 0 if self.quarantined == command.version else self.quarantined

    def apply(self, command: Command | UnknownCommand, replica: int) -> None:
        """Follow a command for this replica."""
        if isinstance(command, Drain):
            self.__init__("abort", self.asleep, version=self.version, leaves=True)  # type: ignore[misc]
        elif isinstance(command, EngineCommand) and not self.syncing:
            self.obey(command)
        elif isinstance(command, WeightSync) and command.version > self.version:
            self.follow(command, replica)


def differs(bus: Bus) -> Iterator[str]:
    """Yield what the bus desires of its replicas and the log does not."""
    promises = bus.world.promises
    joined = {bus.world.slot(name).identity.unit for name in promises.joined}
    for place in sorted(promises.identities.values(), key=lambda place: place.node_rank):
        desired = bus.state.desired.get(place.unit)
        if place.role != ROLLOUT or place.node_rank or desired is None or place.unit not in joined:
            continue
        wanted, found = by_log(promises, place, promises.head + 1), _read(desired)
        if found != wanted:
            yield f"of {place.agent} the bus desires {found}, the log {wanted}"


def by_log(promises: Promises, place: Identity, until: int) -> Wanted:
    """What is wanted of a place before a position.

    One that never syncs begins with what is wanted of those that do, and goes on without their weights. One whose
    agent restarts leaves its quarantine, and takes part in what the fleet syncs then.
    """
    wanted, begun, syncs = Wanted(), promises.begun_anew.get(place.unit, 0), verdicts.syncs(place)
    fleet, restarts = Wanted(), [seq for seq in promises.restarts.get(place.unit, ()) if seq >= begun]
    published_before = ((seq, published) for seq, published in promises.log.items() if seq < until)
    for seq, published in (*published_before, (until, None)):
        while restarts and restarts[0] < seq:
            wanted.restart(fleet)
            restarts.pop(0)
        if seq > begun and not syncs:
            wanted = Wanted(wanted.paused, wanted.asleep, wanted.discard, leaves=wanted.leaves)
        if wanted.leaves or published is None:
            break
        if isinstance(published.command, EpochStart):
            wanted.lose_trainer()
            fleet.lose_trainer()
        elif promises.counts(seq, place) and (syncs or seq <= begun or not isinstance(published.command, WeightSync)):
            # What left out its earlier self does not count once it has begun anew.
            wanted.apply(published.command, place.replica if seq > begun else -1)
        if published.target.replicas is None and not isinstance(published.command, Drain):
            fleet.apply(published.command, -1)
    return wanted if syncs else Wanted(wanted.paused, wanted.asleep, wanted.discard, leaves=wanted.leaves)


def _read(desired: Desired) -> Wanted:
    sync = desired.sync
    return Wanted(
        paused=desired.pause_mode if desired.generation == "paused" else "",
        asleep=frozenset(desired.asleep),
        discard=desired.discard,
        version=desired.committed.version if desired.committed is not None else 0,
        syncing=sync.version if sync is not None else 0,
        loading=sync is not None and sync.phase == "load",
        quarantined=desired.quarantined,
        loaded_first=desired.uncommitted.version if desired.uncommitted is not None else 0,
        fallback=desired.fallback.version if desired.fallback is not None else 0,
        leaves=desired.draining,
    )
