"""The log of a simulated run, as readers of recorded runs find it, and what the world explains of their findings."""

from collections.abc import Iterable

from controlplane.analysis.invariants import Violation
from controlplane.record.entries import LogEntry
from schemas.wire import event_decoder
from tests.simulation.bus import event_decoder as bus_event_decoder
from tests.simulation.cluster import World


def entries(world: World) -> list[LogEntry]:
    """Return the entries of a run's log: the coordinator's decisions, then those of each agent."""
    bus, agent = bus_event_decoder.decode, event_decoder.decode
    found = [("", 0, str(bus(record[0]).__struct_config__.tag), *record) for record in world.log.records]
    for slot in world.slots:
        for number, record in enumerate(slot.journal, start=1):
            found.append((slot.name, number, str(agent(record[0]).__struct_config__.tag), *record))
    return [
        LogEntry(position=at, at_ns=1, agent=name, kind=kind, journal=name, number=number, event=event, effects=effects)
        for at, (name, number, kind, event, effects) in enumerate(found, start=1)
    ]


def unexplained(world: World, violations: Iterable[Violation], commanded_twice: Iterable[str] = ()) -> list[str]:
    """Return what the checker of recorded runs finds and the world does not explain.

    Engines that can't be paused serve whatever they hold, and a log shows it; also, where it has the decisions of one
    of two agents that command an engine, what the other did. A replica that was out of reach may have served an old
    version; then no report has said that it serves the new one. A session that an agent has forgotten with its journal
    goes on.
    """
    stubborn = {slot.name for slot in world.slots if slot.engine is not None and slot.engine.unable}
    explained = {"I1": stubborn.union(commanded_twice), "I7": world.forgotten}
    return [
        str(found)
        for found in violations
        if found.invariant != "I12"
        and not (found.agents and explained.get(found.invariant, set()) >= set(found.agents))
    ]
