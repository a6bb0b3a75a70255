"""Replicas that are drained, places that are retired, and agents that take them up again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from controlplane.machine.events import Retired
from schemas.commands import Drain, Target
from schemas.identity import ROLLOUT, Identity, agent_of

if TYPE_CHECKING:
    from tests.simulation.agent import Process
    from tests.simulation.cluster import World
    from tests.simulation.promises import Promises
    from tests.simulation.slot import Slot


@dataclass
class Newcomers:
    """What shows that a replica is new.

    Attributes:
        arrived: Agents, each with the seq at which one first joined at its place.
        followed: Replicas that a report of this life of the bus has named as loaded since they arrived.
    """

    arrived: dict[str, int] = field(default_factory=dict)
    followed: set[int] = field(default_factory=set)


def drain(world: World, slot: Slot) -> None:
    """Let a replica leave in good order: the trainer or an operator wants it, or its agent is asked to end. The fleet
    is synced meanwhile.
    """
    bus, place, luck = world.bus, slot.identity, world.leaving
    grace_ms = luck.choice((0, 300, 4000))
    if place.role != ROLLOUT or slot.double or bus is None or not bus.alive or not world.trainer.busy:
        return
    if luck.random() < 0.5 and slot.process is not None:
        slot.process.ask_to_leave(grace_ms)
    else:
        command, target = Drain(grace_ms=grace_ms), Target(replicas=frozenset({place.replica}))
        world.trainer.issue(bus, command, target, command.timeout_ms)
    for delay_ms in (luck.randrange(300), 2000):
        world.at(delay_ms, world.sync_meanwhile)


def units(promises: Promises, target: Target) -> set[int | str]:
    """The known replicas and training ranks that a target names."""
    places = (promises.world.slot(name).identity for name in promises.known)
    return {place.unit for place in places if target.includes(place)}


def staying(promises: Promises) -> dict[str, bool]:
    """The known agents whose replicas do not leave: is each live?"""
    slot = promises.world.slot
    return {name: live for name, live in promises.known.items() if slot(name).identity.unit not in promises.leaving}


def begins(promises: Promises, seq: int) -> None:
    """From here on no command waits for the replicas of this drain, or need name them."""
    leaving = units(promises, promises.log[seq].target)
    promises.leaving |= leaving
    names = frozenset(name for name in promises.known if promises.world.slot(name).identity.unit in leaving)
    for at, published in promises.log.items():
        published.may_lack |= (
            names if at != seq else promises.known.keys() - names
        )  # the bus knows that it is not theirs


def until(promises: Promises, place: Identity, seq: int) -> int:
    """The last command up to `seq` that changes what is wanted of a place: none after a drain does."""
    drains = (
        at for at, found in promises.log.items() if isinstance(found.command, Drain) and promises.counts(at, place)
    )
    return min((at for at in drains if at <= seq), default=seq)


def has_begun(promises: Promises, process: Process, seq: int) -> bool | None:
    """Whether the replica of an agent had been told to leave before a command. None if it has begun anew since, and the
    agent perhaps not.
    """
    place, again = process.slot.identity, promises.joined.get(process.slot.name) == _incarnation(process.peer)
    drains = [
        at
        for at, found in promises.log.items()
        if at < seq and isinstance(found.command, Drain) and found.target.includes(place)
    ]
    begun = promises.begun_anew.get(place.unit, 0)
    return max(drains, default=0) > begun if again or not any(at <= begun for at in drains) else None


def retire(promises: Promises, effect: Retired) -> str:
    """From here on no report names them, and no agent comes in at their places that does not say that it begins there
    anew. None of them is running, unless it was drained.
    """
    slot = promises.world.slot
    running = [name for name in effect.agents if promises.known.get(name)]
    wrong = [name for name in running if slot(name).identity.unit not in promises.leaving]
    before = _first_nodes(promises)
    for name in effect.agents:
        promises.known.pop(name, None)
        promises.identities.pop(name, None)
        promises.retired[name] = _incarnation(promises.peers.pop(name, "")) or promises.retired.get(name, "")
        promises.joined.pop(name, None)
        promises.newcomers.arrived.pop(name, None)
    promises.ever_retired.update(effect.agents)
    known = {slot(name).identity.unit for name in promises.known}
    gone = {slot(name).identity.unit for name in effect.agents} - known
    gone |= {unit for unit, place in _first_nodes(promises).items() if place.syncs != before[unit].syncs}
    promises.leaving -= gone
    promises.newcomers.followed -= {
        slot(name).identity.replica for name in effect.agents if slot(name).identity.node_rank == 0
    }
    promises.begun_anew.update(dict.fromkeys(gone, promises.head))
    return f"{wrong} were retired and are running" if wrong else ""


def admitted(promises: Promises, peer: str) -> str:
    """A retired place is taken up again by a new process that says so, and by no other. Its replica begins anew."""
    name = agent_of(peer)
    if name not in promises.retired:
        return ""
    slot = promises.world.slot(name)
    if not slot.rejoins or _incarnation(peer) == promises.retired[name]:
        return f"{name} was retired, and is back in the run"
    for other in promises.world.slots:
        if other.identity.unit == slot.identity.unit:
            other.ledger.version = 0
    return ""


def _first_nodes(promises: Promises) -> dict[int | str, Identity]:
    """The first known node of each unit, which says whether it syncs."""
    places = sorted(promises.identities.values(), key=lambda place: -place.node_rank)
    return {place.unit: place for place in places}


def _incarnation(peer: str) -> str:
    return peer.split("/")[1] if "/" in peer else ""
