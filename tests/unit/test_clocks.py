"""How far an agent's clock is from the bus's: the arithmetic on a simulated network, then a real bus and agents."""

import random
import time
from pathlib import Path

import anyio
import pytest

from controlplane.bus.bus import Bus
from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.events import StatusReceived
from controlplane.record.log import RunLog
from schemas.carriers.sockets import Context
from schemas.config import AgentConfig, BusConfig
from schemas.reports import Clock
from schemas.wire import TimeReply
from tests.unit.small_bus import PRIMARY, SECOND, Engine, running
from workers.agent import Agent
from workers.link.clocks import DRIFT_PPM, REPORT_AGE_NS, Clocks

MS, S = 1_000_000, 1_000_000_000
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=20, agent_timeout_ms=5_000)


class Network:
    """Two machines whose clocks disagree, and a network between them. All moments are in ns of the true time.

    skew_ns: what the agent's wall clock is ahead of the bus's at the start.   drift_ppm: how much faster it runs.
    """

    def __init__(self, skew_ns: int = 0, drift_ppm: int = 0) -> None:
        self.now_ns = 1_800_000_000 * S
        self.booted_ns = self.now_ns - 3_600 * S
        self.skew_ns, self.drift_ppm = skew_ns, drift_ppm
        self.clocks = Clocks()

    @property
    def wall_ns(self) -> int:
        """The agent's."""
        return self.now_ns + self.skew_ns + (self.now_ns - self.booted_ns) * self.drift_ppm // 1_000_000

    @property
    def monotonic_ns(self) -> int:
        """The agent's."""
        passed = self.now_ns - self.booted_ns
        return passed + passed * self.drift_ppm // 1_000_000

    def exchange(self, up_ns: int, held_ns: int, down_ns: int) -> Clock | None:
        """A question and its answer; what the agent tells after it."""
        sent = self.monotonic_ns
        self.now_ns += up_ns
        received = self.now_ns
        self.now_ns += held_ns
        told = TimeReply(sent_ns=sent, received_ns=received, replied_ns=self.now_ns)
        self.now_ns += down_ns
        now = self.monotonic_ns
        self.clocks.add(told, now / S, self.wall_ns, (now, now))
        return self.clocks.reported

    def error_ns(self, told: Clock) -> int:
        """How wrong the estimate is that was just told."""
        return abs(told.offset_ns - (self.now_ns - self.wall_ns))


@pytest.mark.parametrize("skew_ns", [0, 5 * MS, -250 * MS, 3_600 * S])
@pytest.mark.parametrize("seed", range(20))
def test_the_offset_is_right_within_the_error_that_is_told(skew_ns: int, seed: int) -> None:
    chance = random.Random(seed)
    network = Network(skew_ns)
    for _ in range(50):
        told = network.exchange(chance.randrange(50_000, 8 * MS), chance.randrange(2 * MS), chance.randrange(20 * MS))
        assert told is not None
        assert network.error_ns(told) <= told.error_ns
        network.now_ns += 2 * S


@pytest.mark.parametrize("drift_ppm", [-DRIFT_PPM, DRIFT_PPM])
def test_a_clock_that_drifts_is_followed_within_the_error(drift_ppm: int) -> None:
    network = Network(7 * MS, drift_ppm)
    network.exchange(100_000, 0, 100_000)  # the best one; from here on the ways are long
    for _ in range(600):
        before = network.clocks.reported
        told = network.exchange(4 * MS, 0, 0)
        assert told is not None
        if told is not before:
            assert network.error_ns(told) <= told.error_ns
        network.now_ns += 2 * S


def test_the_exchange_with_the_shortest_way_counts() -> None:
    network = Network(5 * MS)
    network.exchange(10 * MS, 0, 0)
    told = network.exchange(50_000, 3 * MS, 50_000)
    assert told is not None
    assert told.error_ns < 60_000
    assert network.exchange(10 * MS, 0, 0) is told


def test_only_news_is_told() -> None:
    network = Network(5 * MS)
    first = network.exchange(100_000, 0, 100_000)
    second = network.exchange(90_000, 0, 90_000)
    assert second is first, "a little better is no news"
    third = network.exchange(20_000, 0, 20_000)
    assert third is not first, "twice as sure is"
    network.now_ns += REPORT_AGE_NS // 2
    assert network.exchange(20_000, 0, 20_000) is third
    network.now_ns += REPORT_AGE_NS // 2
    assert network.exchange(20_000, 0, 20_000) is not third, "after a minute it is told again"


def test_a_wall_clock_that_is_set_is_told_at_once_and_right() -> None:
    network = Network(5 * MS)
    before = network.exchange(100_000, 0, 100_000)
    network.skew_ns = -2 * S
    network.now_ns += 2 * S
    told = network.exchange(9 * MS, 0, 0)  # itself too slow to tell: what was learned before still holds
    assert told is not before and told is not None
    assert network.error_ns(told) <= told.error_ns < MS


@pytest.mark.parametrize("step_ns", [-2 * S, 40 * MS, 3_600 * S])
def test_a_bus_whose_clock_is_set_is_followed_at_once(step_ns: int) -> None:
    network = Network(5 * MS)
    network.exchange(50_000, 0, 50_000)
    before = network.exchange(50_000, 0, 50_000)
    network.now_ns += step_ns + 2 * S  # of the bus's clock, by which this network tells the time …
    network.booted_ns += step_ns  # … and not of the agent's two
    network.skew_ns -= step_ns
    told = network.exchange(9 * MS, 0, 0)  # a slow one: those before are better, and wrong
    assert told is not before and told is not None
    assert network.error_ns(told) <= told.error_ns


def test_an_answer_to_no_question_is_not_taken() -> None:
    clocks = Clocks()
    for sent, received, replied in ((11, 5, 5), (5, 9, 5), (5, 5, 99)):  # from the future; backwards; longer than away
        clocks.add(TimeReply(sent_ns=sent, received_ns=received, replied_ns=replied), 1.0, 10, (10, 10))
    assert clocks.reported is None


# --- on real sockets --------------------------------------------------------------------------------------------------


def clocks_of(state: CoordinatorState) -> dict[str, Clock]:
    told = {name: member.status.clock for name, member in state.members.items() if member.status is not None}
    return {name: clock for name, clock in told.items() if clock is not None}


@pytest.mark.anyio
async def test_an_agent_with_a_shifted_clock_tells_by_how_much(tmp_path: Path, context: Context) -> None:
    shift_ns = 37 * S + 5 * MS
    log = RunLog.open(tmp_path / "run.db")
    async with (
        Bus("tcp://127.0.0.1:0", log, QUICK, context=context) as bus,
        running(bus.address, context, Engine(), tmp_path, SECOND),
        Agent(
            bus=bus.address,
            identity=PRIMARY,
            engine=Engine(),
            state_dir=tmp_path,
            config=AgentConfig(hello_retry_ms=20),
            context=context,
            wall_ns=lambda: time.time_ns() + shift_ns,
        ) as shifted,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(shifted.run)
        with anyio.fail_after(10):
            state = await bus.wait_until(lambda state: len(clocks_of(state)) == 2)
        tasks.cancel_scope.cancel()
    found = clocks_of(state)
    assert abs(found["0.0"].offset_ns + shift_ns) <= found["0.0"].error_ns
    assert abs(found["0.1"].offset_ns) <= found["0.1"].error_ns
    events = [entry.typed_event() for entry in RunLog.read(tmp_path / "run.db") if entry.kind == "status"]
    recorded = [one for one in events if isinstance(one, StatusReceived)]
    assert found["0.0"] in {one.status.clock for one in recorded if one.peer.startswith("0.0/")}


@pytest.mark.anyio
async def test_a_new_bus_is_measured_anew(tmp_path: Path, context: Context) -> None:
    address = f"ipc://{tmp_path}/bus"
    async with running(address, context, Engine(), tmp_path):
        epochs = []
        for _ in range(2):
            async with Bus(address, RunLog.open(tmp_path / "run.db"), QUICK, context=context) as bus:
                with anyio.fail_after(10):
                    state = await bus.wait_until(lambda state: "0.0" in clocks_of(state) and live(state))
                epochs.append((state.epoch, clocks_of(state)["0.0"].at_ms))
    assert [epoch for epoch, _ in epochs] == [1, 2]


def live(state: CoordinatorState) -> bool:
    return state.members["0.0"].state == "live"
