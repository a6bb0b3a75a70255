"""A whole cluster in one thread: real machines, and everything around them simulated from one seed.

No sockets, no tasks, no sleep: a heap of (time, number, act) is the clock, and one `random.Random(seed)` decides every
drop, delay, crash and command. The same seed is the same run. Each seed also draws its own weather, so that some runs
are only lossy, some only crash, and some have everything at once.

    python -m tests.simulation.cluster 236          # run one seed and print its story
    python -m tests.simulation.cluster 0 10000      # run many, and print those that break a promise
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec.structs import replace as msgspec_replace

from controlplane.machine.events import CoordinatorSettings
from controlplane.simulate.modelled_engine import LAUNCH_LABEL
from controlplane.simulate.virtual_clock import VirtualClock
from schemas.agent_status import AgentStatus
from schemas.commands import Command, UnknownCommand, WeightSync
from schemas.identity import ROLLOUT, Identity, Operation, RolloutMode
from tests.simulation import endings, leaving, serving
from tests.simulation.adapters import AdapterTrainer, Files, Shelf
from tests.simulation.agent import Process
from tests.simulation.bus import Bus, Log
from tests.simulation.engine import BROADCAST, Engine, Temper
from tests.simulation.places import Places
from tests.simulation.promises import Ledger, Promises
from tests.simulation.samples import Sampler
from tests.simulation.slot import Slot
from tests.simulation.steps import Steps
from tests.simulation.trainer import Trainer
from tests.simulation.weather import ENGINES, LOSES, Weather

SETTINGS = CoordinatorSettings(
    heartbeat_ms=1000, agent_timeout_ms=4000, lease_ms=12_000, history=12, retransmit_ms=500, after_send_ms=1000
)

LACKING = ({Operation.PROFILE}, {Operation.SLEEP, Operation.WAKE}, {Operation.LOAD}, {Operation.PAUSE})
DOUBLE_FORGOTTEN_MS = 12_000
"""How long a second process of a place may count as alive after its end, at most."""


class World(VirtualClock):
    """The cluster, its clock (in ms) and its luck.

    new_slot, new_bus: what it is made of; others than these run the real shells.
    """

    new_slot: Callable[..., Slot] = Slot
    new_bus: Callable[..., Bus] = Bus

    def __init__(self, seed: int, story: list[str] | None = None) -> None:
        super().__init__()
        self.seed = seed
        self.rng = random.Random(seed)
        self.story = story
        self.settings = SETTINGS
        self.promises = Promises(self)
        self.weather = Weather.of(seed)
        lucks = ("operators", "others", "leaving", "watching")
        self.operators, self.others, self.leaving, self.watching = (random.Random(f"{luck} {seed}") for luck in lucks)
        self.disk = random.Random(f"disk {seed}").random() < 0.3  # durability of the log
        self.log = Log()
        self.files = Files(seed)
        self.doubled: set[str] = set()  # places that another process has claimed, with an engine of its own
        self.forgotten: set[str] = set()  # agents that can't know of a session that was open
        self.sent: dict[tuple[str, AgentStatus], int] = {}  # each status, with when its agent had last seen its engine
        self.connections = 0
        self.lives = 0
        self.buses: list[Bus] = []
        self.bus: Bus | None = None
        self.abandoned: set[str] = set()  # half-open connections that their agents gave up and their bus did not
        self.slots = self._fleet()
        self._draw_engines(self.slots)
        self.by_name = {slot.name: slot for slot in self.slots}
        self.doubles = 0
        self.doubled_until: dict[int | str, int] = {}  # by unit: how long the bus may take a second process for alive
        self.trainer = Trainer(self)
        self.adapters = AdapterTrainer(self)
        self.sampler = Sampler(self)
        self.steps_of_trainer = Steps(self)
        self.places = Places(self)

    def _fleet(self) -> list[Slot]:
        rng = self.rng
        slots = []
        for replica in range(rng.choice((1, 2, 2, 3))):
            nnodes = rng.choice((1, 1, 2))
            mode = RolloutMode.COLOCATED if replica > 0 and rng.random() < 0.3 else RolloutMode.HYBRID
            for node_rank in range(nnodes):
                identity = Identity(replica=replica, node_rank=node_rank, nnodes=nnodes, mode=mode)
                slot = self.new_slot(self, identity, None, embedded=rng.random() < 0.3)
                if node_rank == 0:
                    slot.engine = self._engine(slot)
                slots.append(slot)
        for rank in range(rng.choice((0, 0, 1, 2))):
            slot = self.new_slot(
                self, Identity(replica=rank, node_rank=0, role="actor"), None, embedded=rng.random() < 0.3
            )
            slot.engine = self._engine(slot)
            slot.engine.temper.lacks = frozenset(Operation) - {Operation.PROFILE}
            slot.engine.operations = frozenset({Operation.PROFILE})
            slots.append(slot)
        return slots

    def add_engine(self, slot: Slot) -> None:
        """Give an engine to a slot that comes later."""
        slot.engine = self._engine(slot)
        self._draw_engines([slot])

    def _draw_engines(self, slots: list[Slot]) -> None:
        """Draw what kind of engines they are, and how the agents are started."""
        rng = random.Random(f"engines {self.seed}")
        kind, loses = rng.choice(ENGINES), rng.choice(LOSES)
        traffic, recomputes, launched_from = rng.random() < 0.6, rng.random() < 0.6, rng.choice((None, "launched"))
        for slot in slots:
            slot.on_lost_bus = rng.choice(("serve", "serve", "pause"))
            engine = slot.engine
            if engine is None:
                continue
            engine.label = LAUNCH_LABEL if rng.random() < 0.9 else None
            if slot.identity.role != ROLLOUT:
                continue
            engine.kind, engine.losing, engine.temper.loses = kind, random.Random(f"{slot.name} {self.seed}"), loses
            engine.temper.blind, engine.temper.idle = self.weather.blind, self.weather.idles
            engine.flipping = random.Random(f"flips {slot.name} {self.seed}")
            engine.flips = 0.1 if random.Random(f"loads {self.seed}").random() < 0.15 else 0.0
            engine.traffic, engine.recomputes = traffic, recomputes
            engine.launched_from = launched_from if kind != "verl" else None
            found = random.Random(f"found {slot.name} {self.seed}")
            engine.used = found.randrange(1, 4) if found.random() < 0.1 else 0
            if kind == "tiny" and self.weather.forgets and self.weather.journals and found.random() < 0.5:
                engine.label = None  # else its weights are loaded again, and its cache flushed for that
            engine.closing = random.Random(f"closing {slot.name} {self.seed}")
            engine.temper.failing = {"failing loads": "load", "failing pauses": "pause"}.get(self.weather.aim, "")
            if "trainer dies" in self.weather.aim and rng.random() < 0.5:
                engine.temper.hangs = 0.2
            if self.weather.aim == "failing loads" and rng.random() < 0.4:  # those that fail have time to start again
                engine.temper.failing, engine.temper.slow_ms = "", 1500
            if self.weather.releases and rng.random() < 0.6:
                engine.memory = "trainer"

    def _engine(self, slot: Slot) -> Engine:
        rng = self.rng
        temper = Temper(
            fails=rng.choice((0.0, 0.0, 0.05)), hangs=rng.choice((0.0, 0.0, 0.03)), slow_ms=rng.choice((5, 40, 400))
        )
        if rng.random() < 0.1:
            temper.lacks = frozenset(rng.choice(LACKING))

        def kill(text: str) -> None:
            process = slot.process
            if len(self.commanders(slot)) > 1:
                self.say(f"two agents command the engine of {slot.name}: {text}")
                self.at(0, slot.relaunch)
            elif process is None or not serving.misled(process):
                self.promises.broken("P5 one effect", f"{slot.name}: {text}")
            else:  # its agent could not know, and it ended for that
                self.at(0, slot.relaunch)

        engine = Engine(self.rng, temper, kill, lambda: self.promises.resumed(slot), lambda: self.now)
        engine.shelf = Shelf.draw(slot, engine, random.Random(f"shelf {slot.name} {slot.double} {self.seed}"))
        if engine.shelf.luck.random() < 0.1:
            temper.lacks |= {Operation.ADAPTERS}
            engine.operations -= {Operation.ADAPTERS}
        return engine

    def say(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now:7d} {text}")

    # --- luck ---------------------------------------------------------------------------------------------------------

    def slot(self, name: str) -> Slot:
        """The slot that has a place."""
        return self.by_name[name]

    def hold(self, peer: str) -> None:
        """Note that the bus gave a place to this peer."""
        for slot in self.slots:
            if slot.process is not None and slot.process.peer == peer:
                self.by_name[slot.name] = slot

    def blocked(self, slot: Slot, way: str) -> bool:
        return slot.cut_off or self.now < slot.blocked_until[way]

    def new_connection(self) -> int:
        """Return the number of another control connection."""
        self.connections += 1
        return self.connections

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
        for slot in list(self.slots):
            self._break_connections(slot)
            for chance, luck, strikes in (
                (weather.exiles, rng, self._exile),
                (weather.absences, rng, self._go_away),
                (weather.engine_dies, rng, self._relaunch),
                (weather.agent_dies, rng, self._kill),
                (weather.journals, rng, self._lose_journal),
                (weather.rotations, self.operators, self._rotate),
                (weather.doubles, self.operators, self._double),
                (weather.reshapes, self.operators, self._reshape),
                (weather.deaf, self.others, self._deafen),
                (weather.successors, self.others, self._succeed),
                (weather.drains, self.leaving, partial(leaving.drain, self)),
            ):
                if chance and luck.random() < chance:
                    strikes(slot)
        if weather.tails and rng.random() < weather.tails:
            self._power_fails()
        if weather.releases and rng.random() < weather.releases:
            self.trainer.release()
        if weather.retires and rng.random() < weather.retires:
            self._retire(rng.choice(self.slots))
        if weather.trainer_dies and rng.random() < weather.trainer_dies:
            self.replace_trainer()

    def on_published(self, bus: Bus, command: Command | UnknownCommand) -> None:
        """Let misfortune strike at a phase of a sync, if that is its aim."""
        if not isinstance(command, WeightSync) or self.bus is not bus:
            return
        if self.weather.hits("trainer", f"at {command.phase}") and self.rng.random() < 0.5:
            self.at(self.rng.choice((0, 2, 30, 300)), self._trainer_dies, bus)
        if self.weather.hits("agent", f"at {command.phase}") and self.rng.random() < 0.7:
            process = self.rng.choice(self.slots).process
            if process is not None:
                self.at(self.rng.choice((1, 30, 200)), process.die)
        if self.weather.hits("engine", f"at {command.phase}") and self.rng.random() < 0.7:
            self.at(self.rng.choice((1, 30, 200)), self.rng.choice(self.slots).relaunch)

    def _trainer_dies(self, bus: Bus | None = None) -> None:
        if self.trainer.busy and bus in (None, self.bus):
            self.replace_trainer()

    def _relaunch(self, slot: Slot) -> None:
        self.say(f"the engine of {slot.name} is relaunched")
        slot.relaunch()

    def _kill(self, slot: Slot) -> None:
        if slot.process is not None:
            self.rng.choice((slot.process.die, slot.process.die, slot.process.leave))()

    def _rotate(self, slot: Slot) -> None:
        if slot.process is not None:
            slot.process.new_key = True

    def _break_connections(self, slot: Slot) -> None:
        rng, weather = self.rng, self.weather
        if weather.cuts and rng.random() < weather.cuts and slot.process is not None:
            slot.process.cut()
        if weather.partitions and rng.random() < weather.partitions:
            for way in rng.choice((("up",), ("down",), ("pub",), ("up", "down"), ("up", "down", "pub"))):
                slot.blocked_until[way] = self.now + rng.choice((500, 3000, 15_000))
        if weather.half_open and rng.random() < weather.half_open and slot.process is not None:
            slot.process.fall_silent(rng.choice((("control",), ("pub",), ("control", "pub"))))

    def _deafen(self, slot: Slot) -> None:
        """Let an agent reach one of two ports for longer than its lease, most often from before it joins."""
        self.say(f"{slot.name} can't reach the publish port")
        slot.blocked_until["pub"] = self.now + self.settings.lease_ms + self.others.randrange(8000, 20_000)
        if slot.process is not None and self.others.random() < 0.8:
            slot.process.cut()

    def _power_fails(self) -> None:
        """Under durability `os` the last records are gone then, but never those that opened the life of the bus. Under
        `disk` nothing is gone that was committed.
        """
        bus, records = self.bus, self.log.records
        if self.weather.aim == "lost tails":
            self.at(self.rng.choice((1500, 4000, 8000)), self._trainer_dies)
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
        for delay_ms in (
            ()
            if self.weather.aim == "quiet"
            else (1000, self.settings.agent_timeout_ms + 1000, self.settings.lease_ms + 1000)
        ):
            self.at(delay_ms, self.sync_meanwhile)

    def _go_away(self, slot: Slot) -> None:
        """Let an agent leave in good order, and return to the fleet of the next trainer, in the middle of its syncs."""
        if slot.process is None:
            return
        self.say(f"{slot.name} goes away")
        slot.process.leave()
        slot.away_until = self.now + self.rng.randrange(4000, 12_000)
        self.at(1500, self._trainer_dies)
        for delay_ms in range(2500, 14_000, 1500):
            self.at(delay_ms, self.sync_meanwhile)

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

    def _double(self, slot: Slot) -> None:
        """Start another process for a place, with an engine of its own; it may claim another shape."""
        self.doubles += 1
        identity = self._other_shape(slot.identity) if self.operators.random() < 0.3 else slot.identity
        double = self.new_slot(self, identity, None, embedded=True, double=self.doubles)
        self.say(f"another process claims to be {double.name}, {identity.shape}")
        self.doubled.add(double.name)
        if slot.engine is not None:
            double.engine = self._engine(double)
            double.engine.label, double.engine.operations = LAUNCH_LABEL, slot.engine.operations
            double.engine.temper = replace(slot.engine.temper)
            double.engine.losing = random.Random(f"double {self.doubles} {self.seed}")
        double.ledger = Ledger(answered=slot.ledger.answered, lost_epoch=slot.ledger.lost_epoch)
        self.slots.append(double)
        double.start()
        lives_ms = self.operators.randrange(2000, 20_000)
        until_ms = self.now + lives_ms + DOUBLE_FORGOTTEN_MS
        self.doubled_until[identity.unit] = max(until_ms, self.doubled_until.get(identity.unit, 0))
        self.at(lives_ms, self._end_double, double)

    def commanders(self, slot: Slot) -> list[Slot]:
        """The places whose agents command the engine of this one."""
        return [other for other in self.slots if other.engine is slot.engine and other.engine is not None]

    def called(self, slot: Slot) -> None:
        """Note that an agent calls its engine, which others may command as well."""
        for other in self.commanders(slot):
            if other is not slot and slot.engine is not None:
                slot.engine.unseen_by.add(other.double)

    def _succeed(self, slot: Slot) -> None:
        """Cut an agent off for good, which lives on for a while; another one takes over its place and its engine."""
        engine, process = slot.engine, slot.process
        if slot.double or process is None or engine is None or len(self.commanders(slot)) > 1:
            return
        old = slot.be_succeeded(self.doubles + 1)
        if old is None:
            return
        self.doubles += 1
        self.say(f"{process.peer} is cut off for good, and another agent takes over")
        self.slots.append(old)
        lives_ms = self.settings.lease_ms + self.others.randrange(2000, 30_000)
        ends_ms = process.heard_ms + self.settings.lease_ms - self.now
        for delay_ms in (*range(5000, lives_ms, 3000), max(0, ends_ms - self.others.randrange(1000))):
            self.at(delay_ms, self.sync_meanwhile)  # so that it remembers weights that are not the newest
        until_ms = self.now + lives_ms + DOUBLE_FORGOTTEN_MS
        self.doubled_until[slot.identity.unit] = max(until_ms, self.doubled_until.get(slot.identity.unit, 0))
        self.at(self.others.randrange(500, 4000), slot.start, False)
        self.at(lives_ms, self._end_double, old)

    def _end_double(self, double: Slot) -> None:
        if double.process is not None:
            if double.cut_off and double.engine is not None and double.process.state.activity is not None:
                double.engine.cut()
            double.process.stop()
        if double in self.slots:
            self.slots.remove(double)
            if double.cut_off and double.engine is not None and double.engine.hides_release:
                double.relaunch()  # nothing else shows that its last pause was not the trainer's

    def _other_shape(self, identity: Identity) -> Identity:
        if identity.role != ROLLOUT:
            return identity
        if self.operators.random() < 0.5:
            return msgspec_replace(identity, gpus_per_node=identity.gpus_per_node + 1)
        mode = RolloutMode.HYBRID if identity.mode is RolloutMode.COLOCATED else RolloutMode.COLOCATED
        return msgspec_replace(identity, mode=mode)

    def _reshape(self, slot: Slot) -> None:
        """Start all nodes of a replica again, with their engine, as one of another shape."""
        if slot.identity.node_rank or slot.double:
            return
        other = self._other_shape(slot.identity)
        self.say(f"replica {slot.identity.unit} is deployed again as {other.shape}")
        for node in self.slots:
            if node.identity.unit == slot.identity.unit and not node.double:
                if node.process is not None:
                    node.process.die()
                node.identity = msgspec_replace(other, node_rank=node.identity.node_rank)
                node.relaunch()

    def _lose_journal(self, slot: Slot) -> None:
        """Let an agent lose its disk, most often while its engine holds what is not committed. The trainer then fails
        to send the weights to the others, and tries that version again with other weights.
        """
        engine, process, bus = slot.engine, slot.process, self.bus
        if process is None:
            return
        committed = engine is None or engine.version <= process.state.desired.version
        if engine is not None and self.weather.forgets and (engine.session_step is not None or engine.is_torn):
            committed = self.others.random() < 0.8
        if engine is not None and self.weather.forgets and (engine.hides or engine.weights.startswith(BROADCAST)):
            committed = self.others.random() < 0.4
        if self.rng.random() >= self.weather.journals / (50 if committed else 1):
            return
        slot.lose_journal()
        if bus is not None and bus.alive and bus.state.sync is not None:
            version = bus.state.sync.version
            self.trainer.fail_to_send(bus)
            self.at(200, self.sync_meanwhile, version)

    def sync_meanwhile(self, version: int | None = None) -> None:
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
        self.bus = self.new_bus(self, self.lives)
        self.buses.append(self.bus)
        for slot in self.slots if self.weather.one_port else ():
            if slot.process is not None and slot.process.state.joined and self.rng.random() < 0.5:
                slot.process.sub = self.bus  # ZeroMQ connects again by itself
        self.bus.begin()

    # --- the course of a run ------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Play rough weather, then calm; then everything must be in order."""
        for slot in self.slots:
            self.at(self.rng.choice((0, 200, 5000)), slot.start)
        self.at(self.rng.choice((0, 1000)), self.open_bus)
        self.at(self.rng.randrange(500, 3000), self.trainer.work)
        self.adapters.begin()
        self.sampler.begin()
        self.steps_of_trainer.begin()
        self.places.begin()
        self.at(1000, self.misfortune)
        self.run(self.rng.randrange(15_000, 40_000))
        self.calm()
        end = self.rng.random()
        if end < 0.2:
            endings.trainer_is_gone(self)
        elif end < 0.4:
            endings.restarts_heal(self)
        else:
            endings.all_comes_right(self)
        endings.replays(self)

    def calm(self) -> None:
        """End all faults. What is under way may still take its time."""
        self.say("calm")
        self.weather = Weather()
        self.trainer.busy = False
        self.trainer.take_back()
        for double in [slot for slot in self.slots if slot.double]:
            self._end_double(double)
        for slot in self.slots:
            slot.blocked_until = dict.fromkeys(slot.blocked_until, 0)
            if slot.engine is not None:
                temper = slot.engine.temper
                temper.fails = temper.hangs = temper.loses = temper.blind = temper.idle = 0.0
                slot.engine.shelf.evicts = slot.engine.flips = 0.0
                temper.failing, temper.slow_ms, slot.engine.traffic = "", min(temper.slow_ms, 400), False


def simulate(seed: int, story: list[str] | None = None) -> World:
    """Play one run. Raises Broken if a promise does not hold."""
    world = World(seed, story)
    world.play()
    return world


def main(simulate: Callable[[int, list[str] | None], object]) -> int:
    """Run one seed and print its story, or a range of seeds and print what broke; of that the `first`, if wanted.

    Args:
        simulate: Plays the run of a seed, and adds to a story.
    """
    arguments = sys.argv[1:]
    first, *last = (int(number) for number in arguments[:2])
    if not last:
        return 1 if _tell(simulate, first, []) else 0
    broken = 0
    for seed in range(first, *last):
        broken += bool(_tell(simulate, seed, None))
        if broken and arguments[2:] == ["first"]:
            return 1
    sys.stdout.write(f"{last[0] - first} seeds, {broken} broke a promise\n")
    return 1 if broken else 0


def _tell(simulate: Callable[[int, list[str] | None], object], seed: int, story: list[str] | None) -> str:
    """Run a seed; print its story, if wanted, and what broke. Returns that."""
    found = ""
    try:
        simulate(seed, story)
    except Exception as error:
        found = f"seed {seed}: {type(error).__name__} {error}"
    if story is not None or found:
        sys.stdout.write("\n".join([*(story or ()), found or "every promise held"]) + "\n")
        sys.stdout.flush()
    return found


if __name__ == "__main__":
    raise SystemExit(main(simulate))
