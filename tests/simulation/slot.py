"""One place in the simulated fleet: what outlives its agents, and what their successors are not told."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from controlplane.simulate.modelled_engine import LAUNCH_LABEL
from schemas.events import Perform
from schemas.identity import Identity, OnLostBus
from tests.simulation.agent import Process
from tests.simulation.engine import BROADCAST, Attempt, Engine
from tests.simulation.promises import Ledger
from workers.machine.readiness import in_sync

if TYPE_CHECKING:
    from tests.simulation.cluster import World


class Disk:
    """One journal. A group that was being written when its agent was killed is there as a whole, or not at all."""

    def __init__(self, seed: str) -> None:
        self.rng = Random(seed)  # of its own, so that seeds keep their luck with the rest
        self._decisions: list[tuple[bytes, bytes]] = []

    def erase(self) -> None:
        self._decisions = []

    def write(self, group: list[tuple[bytes, bytes]]) -> None:
        self._decisions += group

    def tear(self, group: list[tuple[bytes, bytes]]) -> None:
        """Be cut off while a group is written."""
        if self.rng.random() < 0.5:
            self.write(group)

    def recover(self) -> list[tuple[bytes, bytes]]:
        """Return what was written."""
        return self._decisions.copy()


class Slot:
    """One place in the fleet, with everything that outlives its agent: journal, engine, clock, network."""

    def __init__(
        self, world: World, identity: Identity, engine: Engine | None, embedded: bool, double: int = 0
    ) -> None:
        self.world = world
        self.double = double  # number of a slot whose place another one has
        self.identity = identity
        self.engine = engine
        self.embedded = embedded
        self.journal: list[tuple[bytes, bytes]] = []  # what its disk holds
        self.disk = self.new_disk(f"{world.seed} {identity.agent} {double or ''}")
        self.clock_ms = world.rng.randrange(1_000_000)
        self.blocked_until = {"up": 0, "down": 0, "pub": 0}
        self.away_until = 0  # its agent is not started before
        self.incarnations = 0
        self.process: Process | None = None
        self.ledger = Ledger()
        self.on_lost_bus: OnLostBus = "serve"
        self.cut_off = False  # for good: another slot has its place and its engine
        self.rejoins = Random(f"rejoins {identity.agent} {world.seed}").random() < 0.5

    @property
    def name(self) -> str:
        return self.identity.agent

    def start(self, launches: bool = True) -> None:
        """Begin an incarnation. If it `launches`, an embedded engine is launched with it."""
        if self.process is not None or self not in self.world.slots:
            return
        if self.world.now < self.away_until:
            self.world.at(self.away_until - self.world.now, self.start, launches)
            return
        self.incarnations += 1
        if self.engine is not None and launches and (self.incarnations == 1 or self.embedded):
            self.relaunch()
        self.process = self.new_process()
        self.process.begin()

    def new_disk(self, seed: str) -> Disk:
        """Return an empty disk."""
        return Disk(seed)

    def new_process(self) -> Process:
        """Return its next agent."""
        return Process(self)

    def turn_away(self, peer: str) -> None:
        """Judge that the bus refuses its agent for good. Now and then somebody starts it again all the same."""
        self.world.say(f"{peer} is turned away for good")
        alone = not self.double and self.world.now > self.world.doubled_until.get(self.identity.unit, -1)
        alone = alone and [slot.name for slot in self.world.slots].count(self.name) == 1
        if alone and self.name not in self.world.promises.ever_retired:
            self.world.promises.broken("P3 answer", f"{peer} is turned away though it is alone")
        if not self.world.places.turned_away(self):
            self.world.at(self.world.rng.randrange(3000, 8000), self.start)

    def begin_call(self, process: Process, perform: Perform, engine: Engine) -> tuple[Attempt, int]:
        """Let the engine begin a call, in which its agent may die. Returns it and its duration in ms."""
        world = self.world
        world.promises.performing(process, perform)
        known = process.state.engine.instance == f"launch {engine.instance}"
        world.called(self)
        engine.caller = process
        attempt, duration_ms = engine.begin(perform.call, perform.call_id, known)
        if world.weather.hits("agent", f"in {attempt.word}") and world.rng.random() < 0.4:
            world.at(world.rng.randrange(duration_ms), process.die)
        return attempt, duration_ms

    def be_succeeded(self, number: int) -> Slot | None:
        """Give up the agent with its journal. Returns the slot that it goes on in, cut off from every bus, and with the
        same engine. None if the engine can't tell the next agent what it has to know.
        """
        process, engine = self.process, self.engine
        if process is None or engine is None or engine.attempt is not None or process.waiting:
            return None
        if not in_sync(process.state) or engine.kind == "verl":  # which would not tell whether it was paused meanwhile
            return None
        torn = process.state.engine.torn or engine.is_torn
        pushed = (engine.label or "").startswith("push") or engine.weights.startswith(BROADCAST)
        if engine.session_step is not None or torn or pushed or engine.hides:
            return None
        old = type(self)(self.world, self.identity, engine, embedded=False, double=number)
        old.clock_ms, old.on_lost_bus, old.incarnations = self.clock_ms, self.on_lost_bus, self.incarnations
        old.disk, old.journal, old.ledger, old.cut_off = self.disk, self.journal, self.ledger, True
        old.process, process.slot, self.process, engine.loaded_by = process, old, None, None
        engine.recorded.clear()
        self.disk, self.journal = self.new_disk(f"{self.world.seed} {self.name} after {number}"), []
        self.ledger = Ledger(answered=old.ledger.answered, lost_epoch=old.ledger.lost_epoch)
        return old

    def lose_journal(self) -> None:
        """The agent dies with its disk, and its engine goes on: the next agent knows of nothing before it.

        Not while no engine could tell the next agent what it has to know: after a load that was cut off, or a sleep
        that dropped the weights, while their label is still that of the launch, or a mere number; nor while it holds a
        push that the run may forget. A session that was open stays open, and a new start is refused meanwhile. Nothing
        proves what was broadcast.
        """
        process, engine = self.process, self.engine
        if process is None or engine is None or engine.attempt is not None or process.state.activity is not None:
            return
        torn = process.state.engine.torn or engine.is_torn  # not read yet, perhaps
        weather, label = self.world.weather, engine.label or ""
        forgotten = label.startswith("push") and bool(weather.tails or weather.retires or weather.reshapes)
        unseen = torn and (engine.label in (None, LAUNCH_LABEL) or not weather.forgets)
        profiles = engine.session_step is not None and not weather.forgets
        hides = engine.hides_for_good if weather.forgets else engine.hides
        if profiles or unseen or forgotten or hides:
            return
        if engine.session_step is not None:
            self.world.say(f"its session of step {engine.session_step} is forgotten")
            engine.forgotten = engine.session_step
            self.world.forgotten.add(self.name)
        self.world.say(f"{self.name} loses its journal")
        self.away_until = self.world.now + self.world.rng.randrange(2000, 5000)
        engine.recorded.clear()
        process.die()
        self.disk.erase()
        self.journal.clear()
        unproven = engine.weights if engine.weights.startswith(BROADCAST) else ""
        self.ledger = Ledger(answered=self.ledger.answered, lost_epoch=self.ledger.lost_epoch, unproven=unproven)

    def relaunch(self) -> None:
        """Kill the engine and launch it again; it answers after a while."""
        engine = self.engine
        if engine is not None:
            engine.launch()
            engine.label = self.world.sampler.launch_label(self) or engine.label
            instance = engine.instance

            def up() -> None:
                if engine.instance == instance:
                    engine.ready = True

            self.world.at(self.world.rng.choice((0, 100, 3000)), up)
