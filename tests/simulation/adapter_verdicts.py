"""Judges of LoRA adapters: what the bus lists, what agents say they lack, what a version stands for, what is paused.

They fold the log themselves and look at what the engines really hold. Each function returns what is wrong, or nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.machine.fleet_view import FleetView
from schemas.agent_status import AgentStatus
from schemas.commands import AdapterDrop, AdapterSync, AdapterVersion
from schemas.desired import Desired
from schemas.events import Flush, Pause, Perform, Resume, SnapshotReceived
from schemas.identity import Identity, Operation
from tests.simulation import leaving, serving, verdicts
from workers.machine.lora import left
from workers.machine.readiness import is_ready

if TYPE_CHECKING:
    from tests.simulation.adapters import Shelf
    from tests.simulation.agent import Process
    from tests.simulation.bus import Bus
    from tests.simulation.cluster import World
    from tests.simulation.promises import Promises, Published
    from tests.simulation.slot import Slot

Versions = dict[str, tuple[AdapterVersion, ...]]
"""The committed versions to hold, by the name of the adapter."""


def wanted(promises: Promises, place: Identity, seq: int) -> Versions:
    """What a replica should hold, by the log up to `seq`."""
    found: Versions = {}
    seq = leaving.until(promises, place, seq)
    for at, published in promises.log.items():
        command = published.command
        if at > seq or not isinstance(command, AdapterSync | AdapterDrop) or not promises.counts(at, place):
            continue
        if isinstance(command, AdapterDrop):
            found.pop(command.name, None)
        elif command.phase == "commit":
            earlier = found.get(command.adapter.name, ())
            if not earlier or earlier[-1].version < command.adapter.version:
                found[command.adapter.name] = (*earlier, command.adapter)[-command.keep :]
    return found


def of(desired: Desired) -> Versions:
    """The committed versions of a desired state."""
    return {name: adapter.versions for name, adapter in desired.adapters.items() if adapter.versions}


def listed(promises: Promises, bus: Bus) -> str:
    """A replica that the bus lists for a version has its bytes under its name; unless it lost them by itself since its
    agent last looked before the status that the bus goes by.
    """
    world = promises.world
    if bus is not world.bus or not world.adapters.tries:
        return ""
    for status in FleetView(bus.state).adapters.values():
        for replica in status.replicas:
            slot = world.slot(f"{replica}.0")
            process, engine, member = slot.process, slot.engine, bus.state.members[slot.name]
            if process is None or engine is None or process.peer != member.peer or serving.misled(process):
                continue
            held = engine.shelf.held.get(status.model)
            if held is not None and held.path == status.path and not held.garbage:
                continue
            told = bus.told.get(process.peer)
            seen_ms = world.sent.get((process.incarnation, told), -1) if told is not None else -1
            if not engine.shelf.lost_since(status.model, seen_ms):
                return f"the bus lists replica {replica} for {status.model} from {status.path}, and it has {held}"
    return ""


def snapshot(promises: Promises, place: Identity, event: SnapshotReceived) -> str:
    """P4: a snapshot wants the versions that were committed for this place."""
    versions = wanted(promises, place, event.seq) if verdicts.syncs(place) else {}
    found = of(event.desired)
    return "" if found == versions else f"the snapshot for {place.agent} wants {found}, the log {versions}"


def beat(process: Process, status: AgentStatus) -> AgentStatus:
    """Return a status that is about to be sent: it names each version that the engine should hold and lacks, unless
    that was lost since the last look. The bus gets none of an agent that is cut off for good.
    """
    engine, promises = process.slot.engine, process.world.promises
    process.world.sent[process.incarnation, status] = engine.shelf.seen_ms if engine is not None else -1
    if engine is None or engine.attempt is not None or status.tokenizer != "present" or serving.misled(process):
        return status
    if process.slot.cut_off:
        return status
    desired = promises.oracle(process) if process.state.joined else None
    for version in lacking(process.slot, of(desired)) if desired is not None else ():
        if version.model not in status.adapters_missing:
            promises.broken("P12 adapters", f"{process.peer} does not say that it lacks {version.model}")
    return status


def ready(process: Process, desired: Desired | None) -> str:
    """P4: an agent that reports ready holds all versions, except those that it could not load."""
    engine, state = process.slot.engine, process.state
    if engine is None or desired is None or Operation.ADAPTERS not in engine.operations or not is_ready(state):
        return ""
    if engine.attempt is not None or serving.misled(process):
        return ""
    missing = [version.model for version in lacking(process.slot, of(desired))]
    if left := [model for model in missing if model not in state.suppressed.adapters]:
        return f"{process.peer} says that it is ready, and lacks {left}"
    return ""


def lacking(slot: Slot, versions: Versions) -> list[AdapterVersion]:
    """The versions that an engine does not hold, and did not lose since its agent last looked."""
    engine = slot.engine
    if engine is None:
        return []
    shelf = engine.shelf
    every = (version for kept in versions.values() for version in kept)
    return [
        version for version in every if not shelf.holds(version) and not shelf.lost_since(version.model, shelf.seen_ms)
    ]


def paused(process: Process, perform: Perform) -> str:
    """A sync or a drop of an adapter stops no generation."""
    activity = process.state.activity
    command = activity.trigger.command if activity is not None and activity.trigger is not None else None
    stops = isinstance(command, AdapterSync | AdapterDrop) and isinstance(perform.call, Pause | Flush | Resume)
    return f"{process.peer} makes {perform.call} for {command}" if stops else ""


def refused(process: Process, shelf: Shelf) -> str:
    """A sync with time finds no place only if what is not wanted is in use, or was two seconds ago."""
    state, engine = process.state, shelf.engine
    activity, temper = state.activity, engine.temper
    trigger = activity.trigger if activity is not None else None
    if trigger is None or not isinstance(trigger.command, AdapterSync) or trigger.command.phase == "commit":
        return ""
    hurried = trigger.ttl_ms < 2500 or state.queue or temper.fails or temper.hangs or temper.loses
    unable = not (shelf.counts and engine.generating) or state.bus_lost or state.changed_by_others
    if hurried or unable or process.slot.cut_off or serving.misled(process):
        return ""
    idle = (model for model in shelf.held if shelf.busy_ms.get(model, -2000) + 2000 < engine.now())
    unwanted = set(idle) & set(left(state.desired, state.engine))
    return f"{process.peer} has no place for {trigger.command.adapter.model}, and holds {unwanted}" if unwanted else ""


def version(promises: Promises, new: Published) -> str:
    """Two versions that may have been loaded share neither a name nor a path; and none is of both, changed."""
    command = new.command
    if not isinstance(command, AdapterSync) or command.phase != "load":
        return ""
    adapter = command.adapter
    for other in promises.log.values():
        before = other.command
        if not isinstance(before, AdapterSync) or before.phase != "load" or before.adapter == adapter:
            continue
        if before.adapter.model == adapter.model or before.adapter.path == adapter.path:
            return f"{adapter} is loaded, and {before.adapter} was"
    return ""


def converged(world: World, slot: Slot) -> str:
    """After the weather a replica that can holds all versions to keep, but those that are bad for it; and no other."""
    engine, process = slot.engine, slot.process
    if engine is None or process is None or Operation.ADAPTERS not in engine.operations:
        return ""
    if not verdicts.syncs(slot.identity) or not engine.generating or engine.asleep:
        return ""
    promises, broken = world.promises, world.files.broken
    versions = wanted(promises, slot.identity, process.state.seq)
    shelf = engine.shelf
    for version in lacking(slot, versions):
        # A name that the lost tail of a log gave to other bytes. An engine that can't tell whether requests run on them
        # is not asked to unload them before the next sync of that adapter.
        other = not shelf.counts and version.model in shelf.held
        if (version.path, slot.name) not in broken and not other and shelf.has_place(version):
            return f"{slot.name} lacks {version.model}"
    every = {version.model for kept in versions.values() for version in kept}
    known = {
        published.command.adapter.model
        for published in promises.log.values()
        if isinstance(published.command, AdapterSync) and published.command.phase == "load"
    }
    if others := sorted(engine.shelf.held.keys() & known - every):
        return f"{slot.name} still holds {others}"
    return ""
