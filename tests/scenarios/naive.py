"""A controller as trainers have it today: a chain of blocking calls to every engine of every node.

No seq, no epochs, no journal, no observation, no quarantine. An error ends the step; what was paused is resumed in a
`finally`; a call whose reply is lost is repeated; an engine that answers its health check counts as healthy. It is here
for contrast: each scenario of the corpus breaks the invariant that it is about.
"""

import random
from typing import Any, cast

from schemas.commands import Checkpoint, ProfilePlan
from schemas.desired import ALL_TAGS, ProfileSession
from schemas.events import Call, Fault, Flush, Load, Pause, Resume, Sleep, StartProfile, StopProfile, Wake
from tests.scenarios.stage import FOREVER_MS, Scenario, StageEngine, Step, torn, version_of
from tests.simulation.adapters import Shelf
from tests.simulation.engine import Temper
from tests.simulation.slot import Slot

CALLS: dict[str, Call] = {
    "pauses": Pause("abort"),
    "resumes": Resume(),
    "flushes": Flush(),
    "sleeps": Sleep(ALL_TAGS),
    "wakes": Wake(ALL_TAGS),
}


class Hung(Exception):
    """A call that never returns."""


class NaiveTrainer:
    """broke: the invariants that were broken, with what was observed."""

    def __init__(self, scenario: Scenario) -> None:
        self.broke: dict[str, str] = {}
        self._scenario = scenario
        self._engines: list[StageEngine] = []
        self._nodes: list[StageEngine | None] = []
        self._started = set(range(scenario.replicas))
        self._repeats = self._hung = self._gone = False
        self._calls = 0
        self._synced = 0  # counted in a process that may die
        self._published = 0  # what the rest of the system believes
        for replica in range(scenario.replicas):
            engine = self._engine(replica)
            self._engines.append(engine)
            self._nodes += [engine, *[None] * (scenario.nodes - 1)]
        late = {int(step.words[1]) for step in scenario.steps if step.text.endswith(" starts")}
        for replica in late:
            self._engines[replica].ready = False
            self._started.discard(replica)

    def run(self) -> dict[str, str]:
        """Play the scenario. Returns what broke."""
        for step in self._scenario.steps:
            if step.words[0] != "expect":
                self._step(step)
                self._look()
        self._look_at_the_end()
        return self.broke

    # --- its actions --------------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        match step.words:
            case ["engine", replica, "is", "relaunched"]:
                self._engines[int(replica)].launch()
                self._engines[int(replica)].ready = True  # its health check answers, so it is back
            case ["engine", replica, how, *word]:
                self._engines[int(replica)].cue(how, word[0] if word else None)
            case ["replica", replica, "starts"]:
                self._engines[int(replica)].ready = True
                self._started.add(int(replica))
            case ["network", *how]:
                self._repeats = how == ["repeats"]
            case ["trainer", "dies"]:
                self._gone, self._synced = True, 0
            case ["trainer", "returns"]:
                self._gone = self._hung = False
            case ["trainer", *what] if not self._gone:
                self._ask(what)
            case _:
                pass  # it has no agents that could die

    def _ask(self, what: list[str]) -> None:
        if self._hung:
            wanted = "I10" if what == ["asks", "status"] else "I5"
            self.broke.setdefault(wanted, f"{' '.join(what)}: nothing answers, the call before it never came back")
            return
        try:
            match what:
                case ["syncs", version]:
                    self._sync(int(version))
                case ["starts", "profile", number]:
                    self._each_node(StartProfile(ProfileSession(int(number), ProfilePlan()), "d"))
                case ["stops", "profile", number]:
                    self._each_node(StopProfile(ProfileSession(int(number), ProfilePlan()), "d"))
                case ["wakes", "kv_cache"]:
                    self._each_node(Wake(frozenset({"kv_cache"})))
                case [verb] if verb in CALLS:
                    self._each_node(CALLS[verb])
                case _:
                    pass
        except Hung:
            self._hung = True
            self.broke.setdefault("I5", f"{' '.join(what)} never ends")
        except (RuntimeError, AttributeError) as error:
            if isinstance(error, AttributeError):
                self.broke.setdefault("I6", f"{' '.join(what)} crashed the step: {error}")

    def _sync(self, version: int) -> None:
        version = max(version, self._synced + 1) if self._synced else version
        engines = [self._engines[replica] for replica in sorted(self._started)]
        before = [version_of(engine.weights) for engine in engines]
        try:
            for engine in engines:
                self._call(engine, Pause("abort"))
            for engine in engines:
                self._call(engine, Load(version, Checkpoint(f"v{version}"), None))
            self._synced = self._published = version
        finally:
            for engine in engines:
                if not self._is_stuck(engine):
                    self._call(engine, Resume())
        if any(version_of(engine.weights) < was for engine, was in zip(engines, before, strict=True)):
            self.broke.setdefault("I4", f"the weights went back to version {version}")

    def _is_stuck(self, engine: StageEngine) -> bool:
        return engine.attempt is not None

    def _each_node(self, call: Call) -> None:
        for node in self._nodes:
            self._call(node, call)

    def _call(self, engine: Any, call: Call) -> None:
        """Make a call. `engine` is None on a node without one, since nothing checks before the call."""
        for _ in range(2 if self._repeats else 1):  # the reply was lost, so the call is repeated
            self._calls += 1
            attempt, took_ms = engine.begin(call, self._calls)
            if took_ms >= FOREVER_MS:
                raise Hung
            result = engine.end(attempt)
            if isinstance(result, Fault):
                raise RuntimeError(result.message)

    # --- what is observed ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        serving = [engine for engine in self._engines if engine.ready and engine.generating and engine.attempt is None]
        if torn(serving):
            held = ", ".join(engine.weights for engine in serving)
            self.broke.setdefault("I1", f"replicas serve different weights: {held}")
        for engine in serving:
            if self._published and version_of(engine.weights) != self._published:
                text = f"an engine serves {engine.weights}, and version {self._published} was published"
                self.broke.setdefault("I2", text)
                if engine.instance > 1:
                    self.broke.setdefault("I8", f"an engine that came back {text}")

    def _look_at_the_end(self) -> None:
        if not self._gone:
            return
        for engine in self._engines:
            if engine.session_step is not None:
                self.broke.setdefault("I7", f"step {engine.session_step} is still profiled, and nothing will stop it")
            if not engine.generating:
                self.broke.setdefault("P7", "an engine stays paused, and nothing will resume it")

    def _engine(self, replica: int) -> StageEngine:
        def killed(text: str) -> None:
            again = "second" in text
            self.broke.setdefault("I3" if again else "preconditions", f"replica {replica}: {text}")

        engine = StageEngine(random.Random(0), Temper(), killed, lambda: None)
        engine.cues, engine.shelf = {}, Shelf(engine, cast("Slot", None), random.Random(0))  # it is given no adapter
        engine.launch()
        engine.ready = True
        return engine
