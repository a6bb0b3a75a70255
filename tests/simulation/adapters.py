"""LoRA adapters in the simulation: the files that the trainer writes, what each engine holds, and the trainer's part.

An engine is as unkind here as elsewhere. It evicts an adapter, forgets all at a launch, goes on listing what was
discarded, answers 400 to a name that it has, and reads files again when it likes. Some can't list what they hold, some
list names without paths, some can't tell which requests run on an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from controlplane.machine.events import Issued, SyncRequested
from controlplane.machine.fleet_view import FleetView
from schemas import events
from schemas.commands import AdapterDrop, AdapterRequest, AdapterSync, AdapterVersion, Checkpoint, Manifest, Target
from tests.simulation import adapter_verdicts

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.cluster import World
    from tests.simulation.engine import Engine
    from tests.simulation.slot import Slot

NAMES: Final = ("policy", "judge", "policy-v2")
"""Adapters of a run; one has the name that engines have for a version of another."""
FOREIGN: Final = "house"
"""An adapter that an engine was launched with, and that is not the run's."""
GRACE_MS: Final = 8000
"""`adapter_grace_ms` of the agents."""
LONGEST_MS: Final = 4000
"""How long a request generates at most."""


class Files:
    """The checkpoint root, as far as it is about adapters.

    Attributes:
        broken: Paths that an engine can't load, each with the slot of that engine.
        let_go: Paths that the bus said are needed no more: they are gone.
    """

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"files {seed}")
        self.broken: set[tuple[str, str]] = set()
        self.let_go: set[str] = set()

    def write(self, path: str, slots: list[Slot]) -> None:
        """Write a version. A fifth of them are bad for some engines."""
        if self.rng.random() < 0.2:
            self.broken |= {(path, slot.name) for slot in slots if self.rng.random() < 0.5}


@dataclass
class Held:
    """An adapter that an engine lists."""

    path: str
    garbage: bool = False
    of_another: bool = False  # an agent that was cut off for good has loaded it


@dataclass
class Shelf:
    """The adapters of one engine. `read(path)` judges that a file is read, and says whether it is there.

    lists: what it can list.   counts: it can tell which requests run on an adapter.   evicts: chance per second.
    requests: what runs on it: the adapter and the time that is left of each.   lost_ms: when it lost one by itself.
    seen_ms: when its agent last saw what it lists.   places: how many it holds at most.
    busy_ms: when requests last ran on an adapter.
    """

    engine: Engine
    slot: Slot
    luck: Random
    lists: Literal["paths", "names", "nothing"] = "paths"
    counts: bool = True
    evicts: float = 0.0
    held: dict[str, Held] = field(default_factory=dict)
    requests: list[tuple[str, int]] = field(default_factory=list)
    advanced_ms: int = 0
    lost_ms: dict[str, int] = field(default_factory=dict)
    seen_ms: int = -1
    places: int | None = None
    busy_ms: dict[str, int] = field(default_factory=dict)

    @classmethod
    def draw(cls, slot: Slot, engine: Engine, rng: Random) -> Shelf:
        """Draw how an engine handles adapters."""
        lists: Literal["paths", "names", "nothing"] = rng.choice(("paths", "paths", "paths", "names", "nothing"))
        evicts = rng.choice((0.0, 0.0, 0.03)) if lists != "nothing" else 0.0  # else its agent could not know
        # Where a load may have been made, it is unloaded first. One that shows neither could not be asked to.
        counts = rng.random() < 0.6 or lists == "nothing"
        return cls(engine, slot, rng, lists, counts, evicts, places=slot.world.weather.places)

    def launch(self) -> None:
        """Forget everything. One that was launched with an adapter has it again."""
        now = self.engine.now()
        self.lost_ms |= dict.fromkeys(self.held, now)
        self.held = {FOREIGN: Held("house")} if self.lists != "nothing" else {}
        self.requests.clear()
        self.advanced_ms = now

    def evict(self) -> None:
        """Evict an adapter that nothing uses, now and then."""
        ours = [model for model in self.held if model != FOREIGN and not self._runs(model)]
        if ours and self.evicts and self.engine.attempt is None and self.luck.random() < self.evicts:
            model = self.luck.choice(ours)
            del self.held[model]
            self.lost_ms[model] = self.engine.now()

    def listing(self) -> dict[str, str] | None:
        """Return what it lists."""
        if self.lists == "nothing":
            return None
        return {model: held.path if self.lists == "paths" else "" for model, held in self.held.items()}

    def seen(self) -> None:
        """Note that its agent takes in what it lists."""
        self.seen_ms = self.engine.now()

    def holds(self, adapter: AdapterVersion) -> bool:
        """Whether requests that name this version get its bytes."""
        held = self.held.get(adapter.model)
        return held is not None and held.path == adapter.path and not held.garbage

    def lost_since(self, model: str, ms: int) -> bool:
        """Whether it lost an adapter by itself at this moment or later."""
        return self.lost_ms.get(model, -1) >= ms

    @property
    def hides(self) -> bool:
        """Whether it holds adapters of which nothing tells the next agent what they are."""
        ours = [held for model, held in self.held.items() if model != FOREIGN]
        return bool(ours) and (self.lists != "paths" or any(held.garbage for held in ours))

    # --- requests -----------------------------------------------------------------------------------------------------

    def request(self, model: str, duration_ms: int) -> None:
        """Begin a request, if it has the adapter. Some engines read the files again then."""
        self.advance()
        if not self.engine.ready or model not in self.held:
            return
        self.requests.append((model, duration_ms))
        if self.engine.kind == "vllm" and self.luck.random() < 0.1:
            self._read(self.held[model].path)

    def advance(self) -> None:
        """Let requests generate until now. Called before anything changes whether they do."""
        passed, self.advanced_ms = self.engine.now() - self.advanced_ms, self.engine.now()
        self.busy_ms |= dict.fromkeys((model for model, _ in self.requests), self.advanced_ms)
        if self.engine.generating:
            self.requests = [(model, left - passed) for model, left in self.requests if left > passed]

    def _runs(self, model: str) -> bool:
        self.advance()
        return any(model == other for other, _ in self.requests)

    # --- calls --------------------------------------------------------------------------------------------------------

    def apply(
        self, call: events.CheckAdapter | events.LoadAdapter | events.UnloadAdapter
    ) -> events.Returned | events.Fault:
        """Carry out a call."""
        if isinstance(call, events.UnloadAdapter):
            return self.unload(call)
        return self.check(call.adapter) if isinstance(call, events.CheckAdapter) else self.load(call.adapter)

    def check(self, adapter: AdapterVersion) -> events.Returned | events.Fault:
        """Read the files. Half of the bad ones show it."""
        files = self.slot.world.files
        bad = (adapter.path, self.slot.name) in files.broken
        if adapter.path in files.let_go or (bad and len(adapter.path) % 2):
            return events.Fault("source_refused", "its files are bad.")
        return self._without_place(adapter) or events.Returned()

    def has_place(self, adapter: AdapterVersion) -> bool:
        """Whether it can hold this version beside the others."""
        return self.places is None or len(self.held.keys() - {adapter.model}) < self.places

    def _without_place(self, adapter: AdapterVersion) -> events.Fault | None:
        if self.has_place(adapter):
            return None
        self.advance()
        if self.engine.caller is not None and (text := adapter_verdicts.refused(self.engine.caller, self)):
            self.slot.world.promises.broken("P12 adapters", text)
        return events.Fault("refused", f"it holds {self.places} adapters at most.")

    def load(self, adapter: AdapterVersion) -> events.Returned | events.Fault:
        """Load beside the others; never a name that it has."""
        if self.engine.asleep:
            self.engine.kill(f"adapter {adapter.model} was loaded while memory is asleep")
        if adapter.model in self.held:
            return events.Fault("refused", "400: it has been loaded already.")
        if fault := self._without_place(adapter):
            return fault
        if not self._read(adapter.path) or (adapter.path, self.slot.name) in self.slot.world.files.broken:
            return events.Fault("engine_error", "500: it can't be loaded.")
        self.held[adapter.model] = Held(adapter.path, of_another=self._of_another)
        self.lost_ms.pop(adapter.model, None)
        return events.Returned()

    def unload(self, call: events.UnloadAdapter) -> events.Returned | events.Fault:
        """Unload. The backend asks only an engine on which no request runs it, as far as that can be known."""
        running = self._runs(call.model)
        if (running and self.counts) or not (self.counts or call.waited):
            return events.Fault("refused", "requests run on it, or may.")
        if call.model == FOREIGN:
            self.engine.kill("an adapter that is not the run's was unloaded")
        if running and not self.held[call.model].garbage:  # what runs on discarded memory is lost anyway
            self.engine.kill(f"adapter {call.model} was unloaded while a request runs on it")
        if self.held.pop(call.model, None) is not None and self._of_another:
            self.lost_ms[call.model] = self.engine.now()
        return events.Returned()

    @property
    def _of_another(self) -> bool:
        """Whether the agent that called it last is cut off for good, and another one has its place."""
        return self.engine.caller is not None and self.engine.caller.slot.cut_off

    def discard(self) -> None:
        """Lose the bytes of all, and go on listing them."""
        for held in self.held.values():
            held.garbage = True

    def read_again(self) -> None:
        """Read the files of all, as vLLM does after new base weights."""
        for model, held in self.held.items():
            if model != FOREIGN and self.engine.kind == "vllm":
                self._read(held.path)

    def _read(self, path: str) -> bool:
        world = self.slot.world
        if path not in world.files.let_go:
            return True
        doubled = self.slot.name in world.doubled  # what the bus knew may be of the engine of the other process
        excused = doubled or any(held.of_another for held in self.held.values() if held.path == path)
        if self.slot.name not in world.promises.ever_retired and not (excused or self._of_another):
            world.promises.broken("P12 adapters", f"{self.slot.name} reads {path}, which the bus had let go")
        return False


class AdapterTrainer:
    """The trainer's part: it syncs and drops adapters, sends requests to them, and deletes files that it may delete."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = Random(f"adapters {world.seed}")
        self.pace_ms = 400 if world.weather.places else self.rng.choice((0, 0, 600, 1500, 4000))
        self.tries = 0
        self.asked: list[SyncRequested] = []

    @property
    def bus(self) -> Bus | None:
        """The bus of the trainer, if it lives."""
        bus = self.world.bus
        return bus if bus is not None and bus.alive else None

    def begin(self) -> None:
        """Begin to work, in some runs."""
        if self.pace_ms:
            self.world.at(self.rng.randrange(500, 3000), self.work)
            self.world.at(500, self.ask)

    def work(self) -> None:
        """Sync or drop one now and then."""
        if not self.world.trainer.busy:
            return
        self.world.at(1 + int(self.rng.expovariate(1.0 / self.pace_ms)), self.work)
        if self.bus is None:
            return
        if self.rng.random() < 0.12:
            target = Target() if self.rng.random() < 0.8 else Target(replicas=frozenset({self.rng.randrange(3)}))
            self.drop(self.bus, self.rng.choice(NAMES), target)
        else:
            self.sync(self.bus, self.rng.choice(NAMES))

    def ask(self) -> None:
        """Send requests to what the plane lists, and delete files that nothing reads any more; also once it is calm."""
        self.world.at(200, self.ask)
        if self.bus is None:
            return
        for status in FleetView(self.bus.state).adapters.values():
            for replica in status.replicas if self.world.trainer.busy else ():
                engine = self.world.slot(f"{replica}.0").engine
                if engine is not None and self.rng.random() < 0.3:
                    duration_ms = self.rng.randrange(100, LONGEST_MS)
                    self.world.at(self.rng.randrange(300), engine.shelf.request, status.model, duration_ms)
        self.clean(self.bus)

    def clean(self, bus: Bus) -> None:
        """Delete what the bus lets go. Versions that are synced now are newer than that, or not loaded yet."""
        files = self.world.files
        if bus.committing is not None:
            return
        needed = FleetView(bus.state).needed_checkpoints
        for adapter in set(self.published()):
            if adapter.name not in bus.state.syncs and adapter.path not in needed:
                if adapter.path not in files.let_go:
                    self.world.say(f"the files {adapter.path} of {adapter.model} are deleted")
                files.let_go.add(adapter.path)

    def published(self) -> Iterator[AdapterVersion]:
        """Yield the versions that were to be loaded, by the log."""
        for published in self.world.promises.log.values():
            if isinstance(published.command, AdapterSync) and published.command.phase == "load":
                yield published.command.adapter

    def sync(self, bus: Bus, name: str, again: bool = True) -> None:
        """Sync a new version; or if `again`, perhaps one that was asked for before, or from the path of another."""
        rng = self.rng
        self.tries += 1
        path = f"{name}/{'x' * rng.randrange(2)}{self.tries}"
        if again:
            self.world.files.write(path, self.world.slots)
        committed = bus.state.default_desired.version
        order = SyncRequested(
            ticket=1,
            version=rng.randrange(1, 12) if again and rng.random() < 0.3 else None,
            source=Checkpoint(path),
            manifest=Manifest(tensors=1, nbytes=1, layout="l", content=None) if rng.random() < 0.3 else None,
            in_flight="abort",
            quorum=rng.choice((None, None, 1, 2)) if again else 1,
            target=Target(replicas=frozenset({rng.randrange(3)})) if again and rng.random() < 0.15 else Target(),
            timeout_ms=rng.choice((1000, 3000, 6000)) if again else 30_000,
            on_unreachable=rng.choice(("skip", "skip", "wait")) if again else "skip",
            operator=rng.random() < 0.2,
            adapter=AdapterRequest(
                name=name,
                base=rng.choice((committed, 1)) if again and rng.random() < 0.1 else None,
                keep=rng.choice((1, 2, 2, 3)),
            ),
        )
        if again and self.asked and rng.random() < 0.2:
            order = self._retry(rng.choice(self.asked), order)
        if isinstance(order.source, Checkpoint) and order.source.path in self.world.files.let_go:
            return  # it has them no more
        bus.tickets += 1
        order = replace(order, ticket=bus.tickets)
        self.asked = [*self.asked[-8:], order]
        self.world.trainer.hand_over(bus, order)

    def _retry(self, asked: SyncRequested, order: SyncRequested) -> SyncRequested:
        """Ask for what was asked for before; or for its path as another version, or its version from another path."""
        version = asked.version or next(
            (adapter.version for adapter in self.published() if adapter.path == getattr(asked.source, "path", "")), None
        )
        as_before = replace(order, adapter=asked.adapter, version=version, source=asked.source, manifest=asked.manifest)
        of_another, elsewhere = replace(order, source=asked.source), replace(as_before, source=order.source)
        return self.rng.choice((as_before, as_before, of_another, elsewhere))

    def drop(self, bus: Bus, name: str, target: Target) -> None:
        bus.tickets += 1
        order = Issued(
            ticket=bus.tickets,
            command=AdapterDrop(name=name),
            target=target,
            timeout_ms=self.rng.choice((1000, 3000)),
            operator=self.rng.random() < 0.3,
        )
        self.world.trainer.hand_over(bus, order)

    def unbind(self, bus: Bus) -> None:
        """Drop adapters that belong to base weights, so that those can be synced."""
        bound = {
            version.name
            for desired in (*bus.state.desired.values(), bus.state.default_desired)
            for adapter in desired.adapters.values()
            for version in adapter.versions
            if version.base is not None
        }
        for name in sorted(bound):
            self.drop(bus, name, Target())

    def restore(self, bus: Bus) -> None:
        """Sync each adapter that is served once more, for all."""
        for name in sorted(FleetView(bus.state).adapters):
            self.sync(bus, name, again=False)
