"""Our controller on the stage: the real machines in the simulated cluster, scripted to the ms, without weather."""

from msgspec.structs import replace

from controlplane.machine.events import Conclude, SyncRequested
from controlplane.machine.status import fleet_status
from controlplane.record.entries import coordinator_effects_decoder
from controlplane.simulate.modelled_engine import LAUNCH_LABEL
from schemas.commands import Checkpoint, EngineCommand, ProfileCommand, Target
from schemas.identity import Identity
from schemas.outcomes import Acted, Failed, Missing, Skipped
from schemas.reports import SyncReport
from tests.scenarios.stage import Scenario, StageEngine, Step, torn, version_of
from tests.simulation import endings
from tests.simulation.adapters import Shelf
from tests.simulation.bus import Bus
from tests.simulation.cluster import World
from tests.simulation.engine import Temper
from tests.simulation.slot import Slot
from tests.simulation.weather import Weather

TIMEOUT_MS = 2000


class Stage(World):
    """One scenario. The promises of the simulation are checked after every step; `expect` lines on top of them."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._silenced: dict[int, int] = {}  # until when a replica must not generate
        super().__init__(seed=1)
        self.weather = Weather()

    def _fleet(self) -> list[Slot]:
        slots = []
        for replica in range(self._scenario.replicas):
            for node_rank in range(self._scenario.nodes):
                identity = Identity(replica=replica, node_rank=node_rank, nnodes=self._scenario.nodes)
                slot = Slot(self, identity, None, embedded=False)
                slot.engine = self._stage_engine(slot) if node_rank == 0 else None
                slots.append(slot)
        return slots

    def _draw_engines(self, slots: list[Slot]) -> None:
        """Each engine shows all that it does, and no answer is lost, unless the scenario says so."""
        for slot in slots:
            if slot.engine is not None:
                slot.engine.label = LAUNCH_LABEL

    def _stage_engine(self, slot: Slot) -> StageEngine:
        def kill(text: str) -> None:
            self.promises.broken("P5 one effect", f"{slot.name}: {text}")

        engine = StageEngine(self.rng, Temper(), kill, lambda: self.promises.resumed(slot))
        engine.cues, engine.shelf = {}, Shelf(engine, slot, self.rng)
        return engine

    def play(self) -> None:
        """Play the scenario. Raises Broken, and AssertionError if an expectation is not met."""
        late = {int(step.words[1]) for step in self._scenario.steps if step.text.endswith(" starts")}
        for slot in self.slots:
            slot.on_lost_bus = "serve"  # the default: a scenario does not draw it
            if slot.identity.replica not in late:
                self.at(0, slot.start)
        self.open_bus()
        for step in self._scenario.steps:
            self.run(step.at_ms)
            self._step(step)
            assert not torn(self.engines), (
                f"{self.now} ms: {[engine.weights for engine in self.engines]} serve together"
            )
        self.run(self.now + 100)
        endings.replays(self)  # I9

    def step(self) -> None:
        """Act, and check the engines that must not generate."""
        super().step()
        self._look()

    def _look(self) -> None:
        for replica, until_ms in self._silenced.items():
            engine = self.engines[replica]
            assert not engine.generating or self.now >= until_ms, f"{self.now} ms: {replica} generates {engine.weights}"

    @property
    def engines(self) -> list[StageEngine]:
        return [slot.engine for slot in self.slots if isinstance(slot.engine, StageEngine)]

    def _step(self, step: Step) -> None:
        match step.words:
            case ["engine", replica, "is", "relaunched"]:
                self.slot(f"{replica}.0").relaunch()
            case ["engine", replica, how, *word]:
                self.engines[int(replica)].cue(how, word[0] if word else None)
            case ["replica", replica, "starts"]:
                for slot in self.slots:
                    if slot.identity.replica == int(replica):
                        slot.start()
            case ["network", *how]:
                self.weather = Weather(repeats=1.0, late_ms=50) if how == ["repeats"] else Weather()
            case ["agent", name, "dies"]:
                process = self.slot(name).process
                assert process is not None
                process.die()
            case ["trainer", "dies"]:
                assert self.bus is not None
                self.bus.die()
                self.bus = None
            case ["trainer", "returns"]:
                self.open_bus()
            case ["trainer", *what]:
                self._ask(what)
            case ["expect", *what]:
                self._expect(what)
            case _:
                raise AssertionError(step)

    def _ask(self, what: list[str]) -> None:
        bus = self.bus
        if bus is None or not bus.alive:
            return
        match what:
            case ["syncs", version]:
                self._sync(bus, int(version))
            case ["starts", "profile", number]:
                self.trainer.issue(bus, ProfileCommand(action="start", step=int(number)), Target(), TIMEOUT_MS)
            case ["stops", "profile", number]:
                self.trainer.issue(bus, ProfileCommand(action="stop", step=int(number)), Target(), TIMEOUT_MS)
            case ["asks", "status"]:
                self.status = fleet_status(bus.state, bus.now_us, "log", bus.inbox.last_heard_us)
            case ["wakes", _]:
                wake = EngineCommand(operation="wake", tags=frozenset({"kv_cache"}))
                self.trainer.issue(bus, wake, Target(), TIMEOUT_MS)
            case [operation]:
                word = {"flushes": "flush"}.get(operation, operation.removesuffix("s"))
                command = replace(EngineCommand(operation="flush"), operation=word)
                self.trainer.issue(bus, command, Target(), TIMEOUT_MS)
            case _:
                raise AssertionError(what)

    def _sync(self, bus: Bus, version: int) -> None:
        bus.tickets += 1
        bus.feed(
            SyncRequested(
                ticket=bus.tickets,
                version=version,
                source=Checkpoint(f"v{version}"),
                manifest=None,
                in_flight="abort",
                quorum=1,
                target=Target(),
                timeout_ms=TIMEOUT_MS,
            )
        )

    # --- expectations -------------------------------------------------------------------------------------------------

    def _expect(self, what: list[str]) -> None:
        text = f"at {self.now} ms: {' '.join(what)}"
        match what:
            case ["engine", replica, "never", "generates", "until", until_ms]:
                self._silenced[int(replica)] = int(until_ms)
                self._look()
            case ["engine", replica, *state]:
                engine = self.engines[int(replica)]
                serves = engine.ready and engine.generating and engine.attempt is None
                seen = {
                    "serves": serves and version_of(engine.weights) == int(state[-1] if state[-1].isdigit() else -1),
                    "is": not engine.generating,
                    "profiles": engine.session_step is not None,
                    "does": engine.session_step is None,
                }
                assert seen[state[0]], f"{text}; it holds {engine.weights}, generating: {engine.generating}"
            case ["report", version, status, *rest]:
                report = next((sync for sync in reversed(self._syncs()) if sync.version == int(version)), None)
                assert report is not None, f"{text}; there is none"
                out = (int(rest[1]),) if rest else ()
                assert (report.status, report.quarantined) == (status, out), f"{text}; it is {report}"
            case ["status", "told"]:
                bus = self.bus
                assert bus is not None and self.status.agents, text
                heard, late_us = bus.inbox.last_heard_us, 2000 * self.settings.heartbeat_ms
                late = [peer for peer, at_us in heard.items() if bus.now_us - at_us > late_us]
                assert not late and len(heard) == len(self.slots), f"{text}; nothing was heard of {late}"
            case ["all", "ended"]:
                assert self.bus is not None and not self.bus.state.open, text
            case [agent, "said", word]:
                assert self._last_word(agent) == word, f"{text}; it said {self._last_word(agent)}"
            case _:
                raise AssertionError(what)

    def _syncs(self) -> list[SyncReport]:
        effects = (effect for _, decided in self.log.records for effect in coordinator_effects_decoder.decode(decided))
        reports = (effect.report for effect in effects if isinstance(effect, Conclude))
        return [report for report in reports if isinstance(report, SyncReport)]

    def _last_word(self, agent: str) -> str | None:
        for (_, _), report in sorted(self.promises.concluded.items(), key=lambda item: -item[0][1]):
            for outcome in report.outcomes:
                if outcome.agent == agent:
                    match outcome.conclusion:
                        case Acted():
                            return "acted"
                        case Skipped(reason=reason):
                            return str(reason)
                        case Failed(error=error):
                            return str(error)
                        case Missing(reason=why):
                            return why
        return None
