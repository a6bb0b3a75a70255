"""Agents that are given no index: the bus assigns each a replica, which the agent remembers and takes up again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent, Opened, PlaceRequested, Send
from schemas.identity import ROLLOUT, Identity, agent_of
from schemas.wire import PlaceAssigned, Snapshot
from tests.simulation.promises import Ledger

if TYPE_CHECKING:
    from tests.simulation.cluster import World
    from tests.simulation.slot import Slot


class Places:
    """Those agents, and what the bus has told them.

    Attributes:
        kept: The replica that each was assigned, by token, and until when it is kept, unless an agent joins there.
        asking: Tokens of agents that know of no place yet.
    """

    def __init__(self, world: World) -> None:
        self.world, self.luck = world, Random(f"places {world.seed}")
        self.kept: dict[str, tuple[int, int]] = {}
        self.asking: set[str] = set()
        self.assigned: list[Slot] = []

    def begin(self) -> None:
        """Start agents, now and then two at a time."""
        for _ in range(self.world.weather.assigned):
            self.world.at(self.luck.choice((3000, self.luck.randrange(3000, 30_000))), self._start)

    def _start(self) -> None:
        self.asking.add(token := f"{self.luck.getrandbits(128):032x}")
        self._ask(token)

    def _ask(self, token: str) -> None:
        """Ask until an answer arrives, once all that were given an index have come."""
        bus, promises = self.world.bus, self.world.promises
        if not self.world.trainer.busy or token not in self.asking:
            return
        self.world.at(self.luck.choice((300, 1000)), self._ask, token)
        here = promises.known.keys() | promises.retired.keys()
        if bus is not None and bus.alive and here >= {slot.name for slot in self.world.slots}:
            bus.feed(PlaceRequested(at_us=bus.now_us, at_ns=self.world.now, peer=f"auto/{token}/00", token=token))

    def answered(self, peer: str, message: PlaceAssigned) -> None:
        """The bus answers, if that is not lost on its way. The agent may come when its place is no longer kept."""
        token = peer.split("/")[1]
        if token in self.asking and self.luck.random() < 0.7:
            self.asking.discard(token)
            delay_ms = self.luck.choice((1, 1000, self.world.settings.lease_ms + 1000))
            self.world.at(delay_ms, self._arrive, message.replica)

    def _arrive(self, replica: int) -> None:
        """It takes up its place, with an engine of its own. One that had it by its index and was retired is gone.

        What any agent before it has answered there may still be reported.
        """
        if not self.world.trainer.busy:
            return
        slot = self.world.new_slot(self.world, Identity(replica=replica, node_rank=0), None, embedded=True)
        if (earlier := self.world.by_name.get(slot.name)) is not None:
            slot.ledger = Ledger(answered=earlier.ledger.answered, lost_epoch=earlier.ledger.lost_epoch)
        for other in [other for other in self.world.slots if other.name == slot.name and other not in self.assigned]:
            if other.process is not None:
                other.process.stop()
            self.world.slots.remove(other)
            self.world.by_name[slot.name] = slot
        slot.rejoins, slot.incarnations = True, 100 * (len(self.assigned) + 1)
        self.world.by_name.setdefault(slot.name, slot)
        self.assigned.append(slot)
        self.world.slots.append(slot)
        self.world.add_engine(slot)
        slot.start()

    def turned_away(self, slot: Slot) -> bool:
        """It forgets a place that another has, and asks for a new one."""
        if slot not in self.assigned or slot not in self.world.slots:
            return False
        self.world.slots.remove(slot)
        self.world.at(1000, self._start)
        return True

    def judge(self, event: CoordinatorEvent, effects: Iterable[CoordinatorEffect]) -> str:
        """Each gets the lowest free place, which is kept for it for a lease, and again the same until then."""
        lease_ms, now = self.world.settings.lease_ms, self.world.now
        if isinstance(event, Opened):  # since when was on another life's clock
            self.kept = {token: (replica, now + lease_ms) for token, (replica, _) in self.kept.items()}
        elif isinstance(event, PlaceRequested):
            self.kept = {token: place for token, place in self.kept.items() if place[1] > now}
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Snapshot):
                unit = self.world.slot(agent_of(effect.peer)).identity.unit
                self.kept = {token: place for token, place in self.kept.items() if place[0] != unit}
            elif isinstance(effect, Send) and isinstance(effect.message, PlaceAssigned):
                token = effect.peer.split("/")[1]
                taken = {place.replica for place in self.world.promises.identities.values() if place.role == ROLLOUT}
                taken |= {replica for replica, _ in self.kept.values()}
                lowest = next(replica for replica in count() if replica not in taken)
                replica, _ = self.kept.setdefault(token, (lowest, now + lease_ms))
                if effect.message.replica != replica:
                    return f"{token} is assigned {effect.message.replica}, and not {replica}; taken are {taken}"
        return ""
