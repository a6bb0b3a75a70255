"""A cluster driven by hypothesis, which chooses the commands and the faults, and shrinks what breaks.

The world of the simulation, with its virtual clock and its checks after every step, without its own weather. No
sockets, no sleep. What is checked after each step: P1 order, P2 no hole, P3 one answer, P5 one effect, P6 fencing and
I1; at the end of each example, that the fleet converges once the faults end, and that all of it replays.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from schemas.commands import EngineCommand, ProfileCommand, Target
from tests.simulation import endings
from tests.simulation.adapters import NAMES
from tests.simulation.bus import Bus
from tests.simulation.cluster import World
from tests.simulation.slot import Slot
from tests.simulation.weather import Weather

COMMANDS = st.one_of(
    st.builds(
        EngineCommand,
        operation=st.sampled_from(("pause", "resume", "flush", "abort", "sleep", "wake")),
        mode=st.sampled_from(("abort", "wait", "keep")),
        tags=st.sampled_from((frozenset(), frozenset({"weights"}), frozenset({"kv_cache"}))),
    ),
    st.builds(ProfileCommand, action=st.sampled_from(("start", "stop")), step=st.integers(0, 3)),
)
TARGETS = st.sampled_from((Target(), Target(), Target(), Target(replicas=frozenset({0}))))
NUMBERS_AT_BOUNDS = st.sampled_from((0, 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -1))
TARGETS_AT_BOUNDS = st.one_of(TARGETS, st.builds(Target, replicas=st.frozensets(NUMBERS_AT_BOUNDS | st.integers(0, 3))))
MOMENTS = st.sampled_from((1, 10, 100, 700, 3000, 15_000))
WEATHERS = st.builds(
    Weather,
    drops=st.sampled_from((0.0, 0.3, 0.9)),
    repeats=st.sampled_from((0.0, 0.5)),
    late_ms=st.sampled_from((5, 50, 1500)),
    agent_dies=st.sampled_from((0.0, 0.0, 0.05)),
    trainer_dies=st.sampled_from((0.0, 0.0, 0.02)),
)
NUMBERS = st.integers(0, 5)


class Cluster(RuleBasedStateMachine):
    """Everything that may be done to a fleet, or happen to it."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.world = World(seed)
        self.world.weather = Weather()
        for slot in self.world.slots:
            if slot.engine is not None:
                slot.engine.temper.loses = 0.0  # what is lost is for hypothesis to say
            self.world.at(0, slot.start)
        self.world.at(0, self.world.adapters.ask)
        self.world.open_bus()
        self.world.run(2000)

    @property
    def bus(self) -> Bus | None:
        bus = self.world.bus
        return bus if bus is not None and bus.alive else None

    def slot(self, number: int) -> Slot:
        return self.world.slots[number % len(self.world.slots)]

    @rule(moment=MOMENTS)
    def time_passes(self, moment: int) -> None:
        self.world.run(self.world.now + moment)

    @precondition(lambda self: self.bus is not None)
    @rule(command=COMMANDS, receivers=TARGETS, timeout_ms=st.sampled_from((300, 2000)))
    def trainer_asks(self, command: EngineCommand | ProfileCommand, receivers: Target, timeout_ms: int) -> None:
        assert self.bus is not None
        self.world.trainer.issue(self.bus, command, receivers, timeout_ms)

    @precondition(lambda self: self.bus is not None)
    @rule(command=COMMANDS, receivers=TARGETS_AT_BOUNDS, timeout_ms=NUMBERS_AT_BOUNDS)
    def trainer_asks_at_the_bounds(
        self, command: EngineCommand | ProfileCommand, receivers: Target, timeout_ms: int
    ) -> None:
        assert self.bus is not None
        self.world.trainer.issue(self.bus, command, receivers, timeout_ms)

    @precondition(lambda self: self.bus is not None)
    @rule(quorum=st.sampled_from((None, 1)), timeout_ms=st.sampled_from((1000, 5000)))
    def trainer_syncs(self, quorum: int | None, timeout_ms: int) -> None:
        assert self.bus is not None
        self.world.trainer.sync(self.bus, quorum, timeout_ms)

    @precondition(lambda self: self.bus is not None)
    @rule(name=st.sampled_from(NAMES))
    def trainer_syncs_an_adapter(self, name: str) -> None:
        assert self.bus is not None
        self.world.adapters.sync(self.bus, name)

    @precondition(lambda self: self.bus is not None)
    @rule(name=st.sampled_from(NAMES), receivers=TARGETS)
    def trainer_drops_an_adapter(self, name: str, receivers: Target) -> None:
        assert self.bus is not None
        self.world.adapters.drop(self.bus, name, receivers)

    @rule(weather=WEATHERS)
    def weather_turns(self, weather: Weather) -> None:
        self.world.weather = weather

    @rule(number=NUMBERS, way=st.sampled_from(("up", "down", "pub")), moment=MOMENTS)
    def network_is_cut(self, number: int, way: str, moment: int) -> None:
        self.slot(number).blocked_until[way] = self.world.now + moment

    @rule(number=NUMBERS)
    def connection_breaks(self, number: int) -> None:
        process = self.slot(number).process
        if process is not None:
            process.cut()

    @rule(number=NUMBERS, leaves=st.booleans())
    def agent_ends(self, number: int, leaves: bool) -> None:
        process = self.slot(number).process
        if process is not None:
            (process.leave if leaves else process.die)()

    @rule(number=NUMBERS)
    def engine_is_relaunched(self, number: int) -> None:
        self.slot(number).relaunch()

    @rule(number=NUMBERS, fails=st.sampled_from((0.0, 1.0)))
    def engine_turns_bad_or_good(self, number: int, fails: float) -> None:
        engine = self.slot(number).engine
        if engine is not None:
            engine.temper.fails = fails

    @precondition(lambda self: self.bus is not None)
    @rule()
    def trainer_is_replaced(self) -> None:
        self.world.replace_trainer()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run(self.world.now + 25_000)  # a trainer that was to be replaced has been
        self.world.calm()
        endings.all_comes_right(self.world)
        endings.replays(self.world)


def explored(examples: int) -> settings:
    return settings(max_examples=examples, stateful_step_count=40, derandomize=True, deadline=None)


class ClusterAtLength(Cluster):
    """The same, ten times as often."""


TestCluster = Cluster.TestCase
TestCluster.settings = explored(30)
TestClusterAtLength = pytest.mark.timeout(600)(pytest.mark.long(ClusterAtLength.TestCase))
TestClusterAtLength.settings = explored(600)
