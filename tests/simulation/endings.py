"""How a run ends: what must be in order once the weather is calm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from controlplane.machine import coordinator
from controlplane.machine.replicas import proven_replicas
from schemas.identity import ROLLOUT, RolloutMode
from schemas.wire import encode, event_decoder
from tests.simulation import adapter_verdicts, serving
from tests.simulation.bus import event_decoder as bus_event_decoder
from tests.simulation.engine import weights_of, weights_to_serve
from workers.machine.decide import decide
from workers.machine.readiness import in_sync, is_ready, trouble
from workers.machine.state import AgentState
from workers.machine.suppressed import still_desired

if TYPE_CHECKING:
    from tests.simulation.agent import Process
    from tests.simulation.bus import Bus
    from tests.simulation.cluster import World
    from tests.simulation.slot import Slot


def trainer_is_gone(world: World) -> None:
    """P7 and I7: after the lease, every replica runs on the committed weights, and no session is open."""
    world.run(world.now + 25_000)  # everyone who can has joined
    joined = [slot for slot in world.slots if slot.process is not None and slot.process.state.joined]
    for bus in world.buses:
        bus.die()
    world.say("the trainer is gone for good")
    for slot in joined:
        if slot.process is not None and world.rng.random() < 0.5:
            world.at(world.rng.randrange(world.settings.lease_ms), slot.process.die)
    world.run(world.now + 2 * world.settings.lease_ms + 20_000)
    for process in [slot.process for slot in joined]:
        if process is None or not process.state.informed:
            continue
        engine, desired = process.slot.engine, still_desired(process.state.desired, process.state.suppressed)
        if engine is None or not engine.ready or serving.misled(process):
            continue
        lost = serving.stranded(process, desired)
        lost = lost or (desired.committed is not None and engine.unable)
        kept = (
            desired.asleep
            or desired.quarantined
            or desired.draining
            or process.state.reconcile_blocked
            or process.state.engine.lost
            or lost
        )
        if process.slot.on_lost_bus == "pause":
            serving.paused(world.promises, process)
        elif not engine.generating and not kept:
            world.promises.broken("P7 trainer first", f"{process.peer} stays paused without a trainer")
        if engine.session_step != engine.forgotten and not process.state.reconcile_blocked:
            world.promises.broken("I7 windows close", f"{process.peer} profiles without a trainer")


def all_comes_right(world: World) -> None:
    """Convergence: the fleet is as desired, and one more sync brings everybody back, whatever happened before."""
    world.run(world.now + 2000)
    _converge(world, "calm")
    relaunch_lost(world)
    world.trainer.restore()
    world.run(world.now + 1000)
    _converge(world, "the last sync", adapters=True)
    for slot in world.slots:
        engine, process = slot.engine, slot.process
        if engine is None or process is None or engine.unable or slot.name in world.promises.retired:
            continue
        colocated = slot.identity.mode is RolloutMode.COLOCATED
        committed = process.state.desired.committed
        current = committed is not None and engine.weights == weights_of(committed.source)
        if not engine.generating or not (current or colocated):
            text = f"after the last sync {slot.name} holds {engine.weights}, generating: {engine.generating}"
            world.promises.broken("convergence", text)


def _converge(world: World, when: str, adapters: bool = False) -> None:
    """Wait until the fleet has converged; with all of its adapters, if wanted."""
    for _ in range(40):
        missing = _missing(world) or (_lacking(world) if adapters else None)
        if missing is None:
            return
        world.run(world.now + 1500)
    world.promises.broken("convergence", f"after {when}: {missing}")


def _lacking(world: World) -> str | None:
    """Return which adapters are not where they should be, or None."""
    for slot in world.slots:
        settled = slot.process is not None and in_sync(slot.process.state)
        if settled and slot.name not in world.promises.retired and (wrong := adapter_verdicts.converged(world, slot)):
            return wrong
    return None


def _missing(world: World) -> str | None:
    """Return what has not converged yet, or None."""
    bus = world.bus
    if bus is None or not bus.alive:
        return "there is no bus"
    if bus.state.open or bus.state.syncs:
        return f"open commands {[command.record.seq for command in bus.state.open]}"
    concluded = {seq for _, seq in world.promises.concluded}
    silent = [seq for seq in world.promises.log if seq not in concluded]
    if silent:
        return f"P3 answer: never concluded: {silent}"
    for slot in world.slots:
        process = slot.process
        member = bus.state.members.get(slot.name)
        if slot.name in world.promises.retired:
            continue
        if process is None or member is None or member.state != "live":
            return f"{slot.name} is not in the fleet"
        state = process.state
        if state.seq != bus.state.seq or not state.joined or state.needs_snapshot:
            return f"{process.peer} is at {state.seq}, the bus at {bus.state.seq}"
        if world.now - process.published_ms > 3000:
            return f"{process.peer} hears no heads"
        if wrong := _serves_wrongly(slot, process) or _unlisted(bus, slot, process):
            return wrong
        stuck = state.reconcile_blocked or state.engine.lost or (slot.engine is not None and slot.engine.unable)
        stuck = stuck or serving.stranded(process, state.desired)
        stuck = stuck or serving.waits_for_push(state)
        if state.activity is not None or not (in_sync(state) or stuck):
            return f"{process.peer} is not as desired"
        waits = slot.engine is not None and not (slot.engine.generating or slot.engine.interrupts)
        if waits and state.desired.serving and slot.identity.role == ROLLOUT and not trouble(state):
            return f"{process.peer} does not serve, and does not say what it waits for"
    return None


def _serves_wrongly(slot: Slot, process: Process) -> str:
    """An engine that can be paused generates only while that is desired, whatever failed before."""
    engine, state = slot.engine, process.state
    if engine is None or not engine.generating or not engine.pausable or not state.reconcile_blocked:
        return ""
    desired = still_desired(state.desired, state.suppressed)
    if engine.keeps_memory:
        desired = replace(desired, asleep=frozenset())
    return "" if desired.serving else f"{process.peer} generates, and is out of service"


def _unlisted(bus: Bus, slot: Slot, process: Process) -> str:
    """A replica that is ready serves, by what the bus says, unless a command told it to stop, and that failed.

    An answer by which it does not serve counts until its next heartbeat.
    """
    place, listed = slot.identity, proven_replicas(bus.state).serving
    member = bus.state.members.get(place.agent)
    serves = place.syncs and not place.node_rank and is_ready(process.state) and process.state.desired.serving
    answered = member is not None and False in (member.command_acked, member.sync_acked)
    lacks = serves and place.replica not in listed and not answered
    return f"{process.peer} is ready, and the bus does not list it as serving" if lacks else ""


def relaunch_lost(world: World) -> None:
    """Launch engines again of which nobody knows what they do, as their agents ask for. Once more if an agent had not
    seen its engine since it called it: perhaps it called the launch that it sees now.
    """
    for again in (False, True):
        lost = [slot for slot in world.slots if slot.process is not None and slot.process.state.engine.lost]
        if again and not lost:
            return
        for slot in lost:
            seen = slot.process is not None and not serving.misled(slot.process)
            if slot.engine is not None and slot.engine.kind == "tiny" and seen:
                world.promises.broken("convergence", f"{slot.name} shows all it does, and its agent does not know it")
            slot.relaunch()
        world.run(world.now + 6000)


def restarts_heal(world: World) -> None:
    """P4: a new incarnation of each agent brings its replica back to the newest commit, without another sync."""
    world.run(world.now + 2000)
    _converge(world, "calm")
    relaunch_lost(world)
    for slot in world.slots:
        if slot.process is not None:
            slot.process.die()
    world.run(world.now + 10_000)
    if any(slot.process is not None and slot.process.state.engine.lost for slot in world.slots):
        relaunch_lost(world)  # one may have been turned away meanwhile, in the middle of a call
    world.trainer.restore(sync=False)
    _converge(world, "the restarts", adapters=True)
    for slot in world.slots:
        engine, process = slot.engine, slot.process
        if engine is None or process is None or engine.unable or slot.name in world.promises.retired:
            continue
        desired = process.state.desired
        if serving.stranded(process, desired) or slot.identity.role != ROLLOUT:
            continue
        wanted = weights_to_serve(desired, engine.weights)
        colocated = slot.identity.mode is RolloutMode.COLOCATED
        if desired.quarantined or not engine.generating or not (colocated or engine.weights == wanted):
            text = f"after its restart {slot.name} holds {engine.weights}, generating: {engine.generating}"
            world.promises.broken("convergence", text)


def replays(world: World) -> None:
    """P9: what was told is in the log, and folding what was recorded gives the same effects, byte for byte."""
    if world.disk:
        world.promises.kept(world.log.records)
    bus_state = coordinator.CoordinatorState()
    for event, effects in world.log.records:
        bus_state, again = coordinator.decide(bus_state, bus_event_decoder.decode(event))
        if encode(again) != effects:
            world.promises.broken("P9 recorded", f"the bus decides differently in replay: {event!r}")
    for slot in world.slots:
        state = AgentState()
        for event, effects in slot.journal:
            state, decided = decide(state, event_decoder.decode(event))
            if encode(decided) != effects:
                world.promises.broken("P9 recorded", f"{slot.name} decides differently in replay: {event!r}")
