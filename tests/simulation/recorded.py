"""The log of a simulated run, for readers of recorded runs."""

from controlplane.record.entries import LogEntry
from schemas.wire import event_decoder
from tests.simulation.bus import event_decoder as bus_event_decoder
from tests.simulation.cluster import World


def entries(world: World) -> list[LogEntry]:
    """Return the entries of a run's log: the coordinator's decisions, then those of each agent."""
    found: list[LogEntry] = []

    def add(agent: str, kind: str, number: int, event: bytes, effects: bytes) -> None:
        found.append(
            LogEntry(
                position=len(found) + 1,
                at_ns=1,
                agent=agent,
                kind=kind,
                journal="j" if agent else "",
                number=number,
                event=event,
                effects=effects,
            )
        )

    for event, effects in world.log.records:
        add("", str(bus_event_decoder.decode(event).__struct_config__.tag), 0, event, effects)
    for slot in world.slots:
        for number, (event, effects) in enumerate(slot.journal, start=1):
            add(slot.name, str(event_decoder.decode(event).__struct_config__.tag), number, event, effects)
    return found
