"""A whole cluster in one thread: real machines, and everything around them simulated from one seed.

No sockets, no tasks, no sleep: a heap of (time, number, act) is the clock, and one `random.Random(seed)` decides every
drop, delay, crash and command. The same seed is the same run. Each seed also draws its own weather, so that some runs
are only lossy, some only crash, and some have everything at once.

    python -m tests.simulation.cluster 236          # run one seed and print its story
    python -m tests.simulation.cluster 0 10000      # run many, and print those that break a promise
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controlplane.machine import coordinator
from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.events import CoordinatorEffect, CoordinatorEvent, CoordinatorSettings
from schemas.events import Effect, Event
from schemas.identity import ROLLOUT, Identity, Operation, RolloutMode
from schemas.wire import encode, event_decoder
from tests.simulation.agent import Process, Slot
from tests.simulation.bus import Bus, Log
from tests.simulation.bus import event_decoder as bus_event_decoder
from tests.simulation.engine import LAUNCH_LABEL, Engine, Temper, weights_of
from tests.simulation.promises import Broken, Promises
from tests.simulation.trainer import Trainer
from workers.machine import decide as machine
from workers.machine.decide import AgentState
from workers.machine.suppressed import still_desired

SETTINGS = CoordinatorSettings(
    heartbeat_ms=1000, agent_timeout_ms=4000, lease_ms=12_000, history=12, retransmit_ms=500, after_send_ms=1000
)

LACKING = ({Operation.PROFILE}, {Operation.SLEEP, Operation.WAKE}, {Operation.LOAD}, {Operation.PAUSE})

AgentDecide = Callable[[AgentState, Event], tuple[AgentState, tuple[Effect, ...]]]
BusDecide = Callable[[CoordinatorState, CoordinatorEvent], tuple[CoordinatorState, tuple[CoordinatorEffect, ...]]]


@dataclass(frozen=True)
class Mechanisms:
    """The mechanisms of a world. The default is the product; an ablation takes one away.

    Attributes:
        dump_stacks: The agents ask for the stacks of late engines, as the product does by option.
    """

    agent: AgentDecide = machine.decide
    bus: BusDecide = coordinator.decide
    beacon: bool = True
    journal: bool = True
    storage_fence: bool = True
    commit_first: bool = True
    redial_control: bool = True
    redial_subscription: bool = True
    bounds: bool = True
    label_proves: bool = True
    drops_unreadable: bool = False
    dump_stacks: bool = False


@dataclass
class Weather:
    """How rough a run is. Chances are per message, per effect or per second; all are 0 once it is calm."""

    drops: float = 0.0
    repeats: float = 0.0
    late_ms: int = 5
    agent_dies: float = 0.0
    trainer_dies: float = 0.0
    cuts: float = 0.0
    partitions: float = 0.0
    half_open: float = 0.0
    engine_dies: float = 0.0
    exiles: float = 0.0
    tails: float = 0.0
    absences: float = 0.0
    journals: float = 0.0
    retires: float = 0.0
    releases: float = 0.0
    pushes: float = 0.0  # share of syncs whose weights the trainer pushes

    @classmethod
    def draw(cls, rng: random.Random) -> Weather:
        return cls(
            drops=rng.choice((0.0, 0.1, 0.4)),
            repeats=rng.choice((0.0, 0.2)),
            late_ms=rng.choice((5, 50, 1500)),
            agent_dies=rng.choice((0.0, 0.0, 0.005, 0.03)),
            trainer_dies=rng.choice((0.0, 0.0, 0.003, 0.02)),
            cuts=rng.choice((0.0, 0.0, 0.1)),
            partitions=rng.choice((0.0, 0.0, 0.05)),
            half_open=rng.choice((0.0, 0.0, 0.05)),
            engine_dies=rng.choice((0.0, 0.0, 0.0, 0.02)),
        )


class World:
    """The cluster, its clock and its luck."""

    def __init__(self, seed: int, mechanisms: Mechanisms | None = None, story: list[str] | None = None) -> None:
        self.seed = seed
        self.mechanisms = mechanisms if mechanisms is not None else Mechanisms()
        self.rng = random.Random(seed)
        self.now = 0
        self.heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.steps = 0
        self.story = story
        self.settings = SETTINGS
        self.promises = Promises(self)
        self.weather = Weather.draw(self.rng)
        newer = random.Random(~seed)  # of its own, so that seeds keep their luck with the rest
        self.weather.exiles = newer.choice((0.0, 0.0, 0.0, 0.02))
        self.weather.tails = newer.choice((0.0, 0.0, 0.1))
        self.weather.absences = random.Random(f"absences {seed}").choice((0.0, 0.0, 0.1))
        self.weather.retires = random.Random(f"retires {seed}").choice((0.0, 0.0, 0.15))
        self.weather.journals = random.Random(f"journals {seed}").choice((0.0, 0.0, 1.0))
        self.disk = newer.choice((False, False, True))  # durability of the log
        self.log = Log()
        self.lives = 0
        self.buses: list[Bus] = []
        self.bus: Bus | None = None
        self.abandoned: set[str] = set()  # half-open connections that their agents gave up and their bus did not
        self.slots = self._fleet()
        lost_bus = random.Random(f"lost bus {seed}")
        for slot in self.slots:
            slot.on_lost_bus = lost_bus.choice(("serve", "serve", "pause"))
        memory = random.Random(f"memory {seed}")
        self.weather.releases = memory.choice((0.0, 0.0, 0.0, 0.3))
        for slot in self.slots:
            if slot.engine is None or slot.identity.role != ROLLOUT:
                continue
            if self.weather.releases and memory.random() < 0.6:
                slot.engine.memory = "trainer"
        pushing = random.Random(f"pushes {seed}")
        self.weather.pushes = pushing.choice((0.0, 0.0, 0.5))
        for slot in self.slots:
            if slot.engine is not None and pushing.random() < 0.9:
                slot.engine.label = LAUNCH_LABEL
        self.by_name = {slot.name: slot for slot in self.slots}
        self.trainer = Trainer(self)

    def _fleet(self) -> list[Slot]:
        rng = self.rng
        slots = []
        for replica in range(rng.choice((1, 2, 2, 3))):
            nnodes = rng.choice((1, 1, 2))
            mode = RolloutMode.COLOCATED if replica > 0 and rng.random() < 0.3 else RolloutMode.HYBRID
            for node_rank in range(nnodes):
                identity = Identity(replica=replica, node_rank=node_rank, nnodes=nnodes, mode=mode)
                slot = Slot(self, identity, None, embedded=rng.random() < 0.3)
                if node_rank == 0:
                    slot.engine = self._engine(slot)
                slots.append(slot)
        for rank in range(rng.choice((0, 0, 1, 2))):
            slot = Slot(self, Identity(replica=rank, node_rank=0, role="actor"), None, embedded=rng.random() < 0.3)
            slot.engine = self._engine(slot)
            slot.engine.temper.lacks = frozenset(Operation) - {Operation.PROFILE}
            slot.engine.operations = frozenset({Operation.PROFILE})
            slots.append(slot)
        return slots

    def _engine(self, slot: Slot) -> Engine:
        rng = self.rng
        temper = Temper(
            fails=rng.choice((0.0, 0.0, 0.05)), hangs=rng.choice((0.0, 0.0, 0.03)), slow_ms=rng.choice((5, 40, 400))
        )
        if rng.random() < 0.1:
            temper.lacks = frozenset(rng.choice(LACKING))

        def kill(text: str) -> None:
            process = slot.process
            if process is None or not self.promises.misled(process):
                self.promises.broken("P5 one effect", f"{slot.name}: {text}")

        return Engine(self.rng, temper, kill, lambda: self.promises.resumed(slot))

    # --- the clock ----------------------------------------------------------------------------------------------------

    def at(self, delay_ms: int, act: Callable[..., None], *args: Any) -> None:
        self.steps += 1
        heapq.heappush(self.heap, (self.now + delay_ms, self.steps, act, args))

    def run(self, until_ms: int) -> None:
        heap = self.heap
        while heap and heap[0][0] <= until_ms:
            self.now, _, act, args = heapq.heappop(heap)
            act(*args)
        self.now = until_ms

    def say(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:7d} {text}")

    # --- luck ---------------------------------------------------------------------------------------------------------

    def slot(self, name: str) -> Slot:
        return self.by_name[name]

    def blocked(self, slot: Slot, way: str) -> bool:
        return self.now < slot.blocked_until[way]

    def strikes(self, whom: str) -> bool:
        """Whether the process dies now. Asked between any two effects."""
        chance = self.weather.agent_dies if whom == "agent" else self.weather.trainer_dies
        return chance > 0.0 and self.rng.random() < chance

    def luck(self, slot: Slot, head: bool) -> tuple[int, ...]:
        """Return the delays of a published message: none if it is lost, two if it is duplicated."""
        weather, rng = self.weather, self.rng
        if self.blocked(slot, "pub") or (weather.drops and rng.random() < weather.drops):
            return ()
        delay = 1 + int(rng.random() * weather.late_ms)
        if weather.repeats and not head and rng.random() < weather.repeats:
            return (delay, delay + int(rng.random() * 3000))
        return (delay,)

    def in_order(self, process: Process, way: str, act: Callable[..., None], *args: Any) -> None:
        """Deliver on a connection that keeps order."""
        delay = 1 + int(self.rng.random() * min(self.weather.late_ms, 100))
        arrival = max(process.last_arrival_ms[way], self.now + delay)
        process.last_arrival_ms[way] = arrival
        self.at(arrival - self.now, act, *args)

    # --- faults -------------------------------------------------------------------------------------------------------

    def misfortune(self) -> None:
        """Once a second: what breaks by itself."""
        rng, weather = self.rng, self.weather
        self.at(1000, self.misfortune)
        for slot in self.slots:
            self._break_connections(slot)
            if weather.exiles and rng.random() < weather.exiles:
                self._exile(slot)
            if weather.absences and rng.random() < weather.absences and slot.process is not None:
                self._go_away(slot)
            if weather.engine_dies and rng.random() < weather.engine_dies:
                self.say(f"the engine of {slot.name} is relaunched")
                slot.relaunch()
            if weather.agent_dies and rng.random() < weather.agent_dies and slot.process is not None:
                rng.choice((slot.process.die, slot.process.die, slot.process.leave))()
            if weather.journals and slot.process is not None:
                self._lose_journal(slot)
        if weather.tails and rng.random() < weather.tails:
            self._power_fails()
        if weather.releases and rng.random() < weather.releases:
            self.trainer.release()
        if weather.retires and rng.random() < weather.retires:
            self._retire(rng.choice(self.slots))
        if weather.trainer_dies and rng.random() < weather.trainer_dies:
            self.replace_trainer()

    def _break_connections(self, slot: Slot) -> None:
        rng, weather = self.rng, self.weather
        if weather.cuts and rng.random() < weather.cuts and slot.process is not None:
            slot.process.cut()
        if weather.partitions and rng.random() < weather.partitions:
            for way in rng.choice((("up",), ("down",), ("pub",), ("up", "down"), ("up", "down", "pub"))):
                slot.blocked_until[way] = self.now + rng.choice((500, 3000, 15_000))
        if weather.half_open and rng.random() < weather.half_open and slot.process is not None:
            slot.process.fall_silent(rng.choice((("control",), ("pub",), ("control", "pub"))))

    def _power_fails(self) -> None:
        """Under durability `os` the last records are gone then, but never those that opened the life of the bus. Under
        `disk` nothing is gone that was committed.
        """
        bus, records = self.bus, self.log.records
        if bus is None or not bus.alive or self.log.owner != bus.life:
            return
        self.bus = None
        bus.die()
        self.at(self.rng.choice((100, 1000, 5000, 20_000)), self.open_bus)
        if self.disk:
            return
        left = max(bus.opened_at, len(records) - self.rng.choice((3, 10, 30, 100)))
        self.say(f"the log loses its last {len(records) - left} records")
        del records[left:]
        self.promises.forget(left)

    def _exile(self, slot: Slot) -> None:
        """Cut one agent off from a living bus for longer than its lease, and sync the fleet meanwhile."""
        self.say(f"{slot.name} is out of reach")
        for way in slot.blocked_until:
            slot.blocked_until[way] = self.now + self.settings.lease_ms + self.rng.randrange(2000, 10_000)
        for delay_ms in (1000, self.settings.agent_timeout_ms + 1000, self.settings.lease_ms + 1000):
            self.at(delay_ms, self._sync_meanwhile)

    def _go_away(self, slot: Slot) -> None:
        """Let an agent leave in good order, and return to the fleet of the next trainer, in the middle of its syncs."""
        self.say(f"{slot.name} goes away")
        if slot.process is not None:
            slot.process.leave()
        slot.away_until = self.now + self.rng.randrange(4000, 12_000)
        self.at(1500, self.replace_trainer)
        for delay_ms in range(2500, 14_000, 1500):
            self.at(delay_ms, self._sync_meanwhile)

    def _retire(self, slot: Slot) -> None:
        """Take a place or a replica out of the run, most often one that has left; its agent may come back."""
        if slot.process is not None and self.rng.random() < 0.8:
            slot.process.leave()
        slot.away_until = self.now + self.rng.randrange(1000, 8000)
        place = str(slot.identity.replica) if self.rng.random() < 0.3 else slot.name
        self.at(self.rng.choice((50, 500, 2000)), self._retire_place, place)

    def _retire_place(self, place: str) -> None:
        if self.bus is not None and self.bus.alive and self.trainer.busy:
            self.trainer.retire(self.bus, place)

    def _lose_journal(self, slot: Slot) -> None:
        """Let an agent lose its disk, most often while its engine holds what is not committed. The trainer then fails
        to send the weights to the others, and tries that version again with other weights.
        """
        engine, process, bus = slot.engine, slot.process, self.bus
        assert process is not None
        committed = engine is None or engine.version <= process.state.desired.version
        if self.rng.random() >= self.weather.journals / (50 if committed else 1):
            return
        slot.lose_journal()
        if bus is not None and bus.alive and bus.state.sync is not None:
            version = bus.state.sync.version
            self.trainer.fail_to_send(bus)
            self.at(200, self._sync_meanwhile, version)

    def _sync_meanwhile(self, version: int | None = None) -> None:
        if self.bus is not None and self.bus.alive and self.trainer.busy:
            self.trainer.sync(self.bus, quorum=1, version=version)

    def replace_trainer(self) -> None:
        """The trainer dies, or lives on as a zombie, and another takes over."""
        bus, self.bus = self.bus, None
        if bus is None:
            return
        if bus.alive:
            fate = self.rng.choice(("dies", "dies", "closes", "zombie"))
            if fate == "zombie":
                self.at(self.rng.randrange(1000, 10_000), bus.die)
                self.say(f"bus {bus.life} is a zombie from now on")
                for slot in self.slots:
                    if slot.process is not None and self.rng.random() < 0.5:
                        self.at(self.rng.randrange(3000), slot.process.cut)
            elif fate == "closes":
                bus.close()
            else:
                bus.die()
        self.at(self.rng.choice((100, 1000, 5000, 20_000)), self.open_bus)

    def open_bus(self) -> None:
        if self.bus is not None:
            return
        self.lives += 1
        self.bus = Bus(self, self.lives)
        self.buses.append(self.bus)
        self.bus.begin()

    # --- the course of a run ------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Play rough weather, then calm; then everything must be in order."""
        for slot in self.slots:
            self.at(self.rng.choice((0, 200, 5000)), slot.start)
        self.at(self.rng.choice((0, 1000)), self.open_bus)
        self.at(self.rng.randrange(500, 3000), self.trainer.work)
        self.at(1000, self.misfortune)
        self.run(self.rng.randrange(15_000, 40_000))
        self.calm()
        if self.rng.random() < 0.2:
            self.trainer_is_gone()
        else:
            self.all_comes_right()
        self.replays()

    def calm(self) -> None:
        """End all faults. What is under way may still take its time."""
        self.say("calm")
        self.weather = Weather()
        self.trainer.busy = False
        self.trainer.take_back()
        for slot in self.slots:
            slot.blocked_until = dict.fromkeys(slot.blocked_until, 0)
            if slot.engine is not None:
                slot.engine.temper.fails = slot.engine.temper.hangs = 0.0

    def trainer_is_gone(self) -> None:
        """P7 and I7: after the lease, every replica runs on the committed weights, and no session is open."""
        self.run(self.now + 25_000)  # everyone who can has joined
        joined = [slot.process for slot in self.slots if slot.process is not None and slot.process.state.joined]
        if self.bus is not None:
            self.bus.die()
        for bus in self.buses:
            bus.die()
        self.say("the trainer is gone for good")
        self.run(self.now + self.settings.lease_ms + 20_000)
        for process in joined:
            engine, desired = process.slot.engine, still_desired(process.state.desired, process.state.suppressed)
            if engine is None or not engine.ready or self.promises.misled(process):
                continue
            lost = self.promises.stranded(engine, desired)
            lost = lost or (desired.committed is not None and engine.unable)
            kept = desired.asleep or desired.quarantined or process.state.reconcile_blocked or lost
            if process.slot.on_lost_bus == "pause":
                self.promises.paused(process)
            elif not engine.generating and not kept:
                self.promises.broken("P7 trainer first", f"{process.peer} stays paused without a trainer")
            if engine.session_step is not None and not process.state.reconcile_blocked:
                self.promises.broken("I7 windows close", f"{process.peer} profiles without a trainer")

    def all_comes_right(self) -> None:
        """Convergence: the fleet is as desired, and one more sync brings everybody back, whatever happened before."""
        self.run(self.now + 2000)
        self._converge("calm")
        self.trainer.restore()
        self.run(self.now + 1000)
        self._converge("the last sync")
        for slot in self.slots:
            engine, process = slot.engine, slot.process
            if engine is None or process is None or engine.unable or slot.name in self.promises.retired:
                continue
            colocated = slot.identity.mode is RolloutMode.COLOCATED
            committed = process.state.desired.committed
            current = committed is not None and engine.weights == weights_of(committed.source)
            if not engine.generating or not (current or colocated):
                text = f"after the last sync {slot.name} holds {engine.weights}, generating: {engine.generating}"
                self.promises.broken("convergence", text)

    def _converge(self, when: str) -> None:
        """Wait until the fleet has converged."""
        for _ in range(40):
            missing = self._missing()
            if missing is None:
                return
            self.run(self.now + 1500)
        self.promises.broken("convergence", f"after {when}: {missing}")

    def _missing(self) -> str | None:
        """Return what has not converged yet, or None."""
        bus = self.bus
        if bus is None or not bus.alive:
            return "there is no bus"
        if bus.state.open or bus.state.sync is not None:
            return f"open commands {[command.record.seq for command in bus.state.open]}"
        concluded = {seq for _, seq in self.promises.concluded}
        silent = [seq for seq in self.promises.log if seq not in concluded]
        if silent:
            return f"P3 answer: never concluded: {silent}"
        for slot in self.slots:
            process = slot.process
            member = bus.state.members.get(slot.name)
            if slot.name in self.promises.retired:
                continue
            if process is None or member is None or member.state != "live":
                return f"{slot.name} is not in the fleet"
            state = process.state
            if state.seq != bus.state.seq or not state.joined or state.diverged:
                return f"{process.peer} is at {state.seq}, the bus at {bus.state.seq}"
            if self.mechanisms.beacon and self.now - process.published_ms > 3000:
                return f"{process.peer} hears no heads"
            stuck = state.reconcile_blocked or (slot.engine is not None and slot.engine.unable)
            stuck = stuck or (slot.engine is not None and self.promises.stranded(slot.engine, state.desired))
            stuck = stuck or self.promises.waits_for_push(state)
            if state.activity is not None or not (machine.in_sync(state) or stuck):
                return f"{process.peer} is not as desired"
        return None

    def replays(self) -> None:
        """P9: what was told is in the log, and folding what was recorded gives the same effects, byte for byte."""
        if self.disk:
            self.promises.kept(self.log.records)
        bus_state = CoordinatorState()
        for event, effects in self.log.records:
            bus_state, again = self.mechanisms.bus(bus_state, bus_event_decoder.decode(event))
            if encode(again) != effects:
                self.promises.broken("P9 recorded", f"the bus decides differently in replay: {event!r}")
        for slot in self.slots:
            state = AgentState()
            for event, effects in slot.journal:
                state, decided = self.mechanisms.agent(state, event_decoder.decode(event))
                if encode(decided) != effects:
                    self.promises.broken("P9 recorded", f"{slot.name} decides differently in replay: {event!r}")


def simulate(seed: int, mechanisms: Mechanisms | None = None, story: list[str] | None = None) -> World:
    """Play one run. Raises Broken if a promise does not hold."""
    world = World(seed, mechanisms, story)
    world.play()
    return world


def main() -> int:
    """Run one seed and print its story, or a range of seeds and print what broke."""
    first, *last = map(int, sys.argv[1:])
    broken = [text for seed in range(first, *last) if (text := _tell(seed))] if last else [_tell(first, [])]
    if last:
        sys.stdout.write(f"{last[0] - first} seeds, {len(broken)} broke a promise\n")
    return 1 if any(broken) else 0


def _tell(seed: int, story: list[str] | None = None) -> str:
    """Run a seed; print its story, if wanted, and what broke. Returns that."""
    found = ""
    try:
        simulate(seed, story=story)
    except Broken as broken:
        found = f"seed {seed}: {broken}"
    if story is not None or found:
        sys.stdout.write("\n".join([*(story or ()), found or "every promise held"]) + "\n")
        sys.stdout.flush()
    return found


if __name__ == "__main__":
    raise SystemExit(main())
