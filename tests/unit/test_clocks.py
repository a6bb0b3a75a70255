"""The offset between the clocks of agent and bus: the arithmetic on a simulated network, then on real sockets."""

import random
import time
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from controlplane.bus.bus import Bus
from controlplane.machine.coordinator import CoordinatorState
from controlplane.machine.events import StatusReceived
from controlplane.record.log import RunLog
from controlplane.report.collect import collect
from controlplane.timeline.survey import LogSurvey
from schemas.agent_status import Clock
from schemas.commands import EngineCommand, Target
from schemas.config import AgentConfig, BusConfig
from schemas.transport.sockets import Context
from schemas.wire import TimeReply
from tests.running import typed
from tests.unit.small_bus import PRIMARY, SECOND, Engine, running
from workers.agent import Agent
from workers.link.clocks import DRIFT_PPM, REPORT_AGE_NS, Clocks

MS, S = 1_000_000, 1_000_000_000
QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=20, agent_timeout_ms=5_000)


class Network:
    """Two machines whose clocks disagree, and a network between them. All times are in ns of the true time.

    Args:
        skew_ns: By how much the agent's wall clock is ahead of the bus's at the start.
        drift_ppm: How much faster it runs.
    """

    def __init__(self, skew_ns: int = 0, drift_ppm: int = 0) -> None:
        self.now_ns = 1_800_000_000 * S
        self.booted_ns = self.now_ns - 3_600 * S
        self.skew_ns, self.drift_ppm = skew_ns, drift_ppm
        self.clocks = Clocks()

    @property
    def wall_ns(self) -> int:
        """The agent's wall clock."""
        return self.now_ns + self.skew_ns + (self.now_ns - self.booted_ns) * self.drift_ppm // 1_000_000

    @property
    def monotonic_ns(self) -> int:
        """The agent's monotonic clock."""
        passed = self.now_ns - self.booted_ns
        return passed + passed * self.drift_ppm // 1_000_000

    def exchange(self, up_ns: int, held_ns: int, down_ns: int) -> Clock | None:
        """Make one request and its reply; returns what the agent reports after it."""
        sent = self.monotonic_ns
        self.now_ns += up_ns
        received = self.now_ns
        self.now_ns += held_ns
        reply = TimeReply(sent_ns=sent, received_ns=received, replied_ns=self.now_ns)
        self.now_ns += down_ns
        now = self.monotonic_ns
        self.clocks.add(reply, now / S, self.wall_ns, (now, now))
        return self.clocks.reported

    def error_ns(self, reported: Clock) -> int:
        """Return the true error of an estimate that was just reported."""
        return abs(reported.offset_ns - (self.now_ns - self.wall_ns))


@pytest.mark.parametrize("skew_ns", [0, 5 * MS, -250 * MS, 3_600 * S])
@pytest.mark.parametrize("seed", range(20))
def test_the_offset_is_right_within_the_reported_error(skew_ns: int, seed: int) -> None:
    chance = random.Random(seed)
    network = Network(skew_ns)
    for _ in range(50):
        reported = network.exchange(
            chance.randrange(50_000, 8 * MS), chance.randrange(2 * MS), chance.randrange(20 * MS)
        )
        assert reported is not None
        assert network.error_ns(reported) <= reported.error_ns
        network.now_ns += 2 * S


@pytest.mark.parametrize("drift_ppm", [-DRIFT_PPM, DRIFT_PPM])
def test_a_drifting_clock_is_followed_within_the_error(drift_ppm: int) -> None:
    network = Network(7 * MS, drift_ppm)
    network.exchange(100_000, 0, 100_000)  # the best one; from here on the ways are long
    for _ in range(600):
        before = network.clocks.reported
        reported = network.exchange(4 * MS, 0, 0)
        assert reported is not None
        if reported is not before:
            assert network.error_ns(reported) <= reported.error_ns
        network.now_ns += 2 * S


def test_the_exchange_with_the_shortest_round_trip_counts() -> None:
    network = Network(5 * MS)
    network.exchange(10 * MS, 0, 0)
    reported = network.exchange(50_000, 3 * MS, 50_000)
    assert reported is not None
    assert reported.error_ns < 60_000
    assert network.exchange(10 * MS, 0, 0) is reported


def test_only_a_better_estimate_is_reported() -> None:
    network = Network(5 * MS)
    first = network.exchange(100_000, 0, 100_000)
    second = network.exchange(90_000, 0, 90_000)
    assert second is first, "a little more precise is not enough"
    third = network.exchange(20_000, 0, 20_000)
    assert third is not first, "twice as precise is"
    network.now_ns += REPORT_AGE_NS // 2
    assert network.exchange(20_000, 0, 20_000) is third
    network.now_ns += REPORT_AGE_NS // 2
    assert network.exchange(20_000, 0, 20_000) is not third, "after a minute it is reported again"


def test_a_wall_clock_that_is_set_is_followed_at_once() -> None:
    network = Network(5 * MS)
    before = network.exchange(100_000, 0, 100_000)
    network.skew_ns = -2 * S
    network.now_ns += 2 * S
    reported = network.exchange(9 * MS, 0, 0)  # too slow to measure with: the earlier measurement still holds
    assert reported is not before and reported is not None
    assert network.error_ns(reported) <= reported.error_ns < MS


@pytest.mark.parametrize("step_ns", [-2 * S, 40 * MS, 3_600 * S])
def test_a_bus_whose_clock_is_set_is_followed_at_once(step_ns: int) -> None:
    network = Network(5 * MS)
    network.exchange(50_000, 0, 50_000)
    before = network.exchange(50_000, 0, 50_000)
    network.now_ns += step_ns + 2 * S  # of the bus's clock, which is the true time here …
    network.booted_ns += step_ns  # … and not of the agent's two clocks
    network.skew_ns -= step_ns
    reported = network.exchange(9 * MS, 0, 0)  # a slow one: earlier ones look better, and are wrong
    assert reported is not before and reported is not None
    assert network.error_ns(reported) <= reported.error_ns


def test_a_reply_to_no_request_is_ignored() -> None:
    clocks = Clocks()
    for sent, received, replied in ((11, 5, 5), (5, 9, 5), (5, 5, 99)):  # from the future; backwards; longer than away
        clocks.add(TimeReply(sent_ns=sent, received_ns=received, replied_ns=replied), 1.0, 10, (10, 10))
    assert clocks.reported is None


# --- on real sockets --------------------------------------------------------------------------------------------------


def clocks_of(state: CoordinatorState) -> dict[str, Clock]:
    clocks = {name: member.status.clock for name, member in state.members.items() if member.status is not None}
    return {name: clock for name, clock in clocks.items() if clock is not None}


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_an_agent_with_a_shifted_clock_reports_the_shift(tmp_path: Path, context: Context) -> None:
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
    recorded = [event for event in events if isinstance(event, StatusReceived)]
    assert found["0.0"] in {event.status.clock for event in recorded if event.peer.startswith("0.0/")}


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_new_bus_is_measured_again(tmp_path: Path, context: Context) -> None:
    address = f"ipc://{tmp_path}/bus"
    async with running(address, context, Engine(), tmp_path):
        epochs = []
        for _ in range(2):
            async with Bus(address, RunLog.open(tmp_path / "run.db"), QUICK, context=context) as bus:
                with anyio.fail_after(10):
                    state = await bus.wait_until(lambda state: "0.0" in clocks_of(state) and live(state))
                epochs.append((state.epoch, clocks_of(state)["0.0"].at_ms))
    assert [epoch for epoch, _ in epochs] == [1, 2]


async def read_by_commands(log: Path) -> None:
    for words in (["log", "show"], ["log", "show", "--json"], ["log", "verify"], ["log", "replay"]):
        done = await to_thread.run_sync(typed, *words, log)
        assert (done.returncode, done.stderr) == (0, ""), words


@pytest.mark.anyio
@pytest.mark.one_loop
@pytest.mark.parametrize("year", [2117, 2300])
async def test_a_wall_clock_of_the_far_future_writes_a_log_that_can_be_read(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch, year: int
) -> None:
    ahead_ns = (year - 2026) * 31_557_600 * S
    original = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: original() + ahead_ns)
    address, path = f"ipc://{tmp_path}/bus", tmp_path / "run.db"
    async with Bus(address, RunLog.open(path), QUICK, context=context) as bus:
        async with running(address, context, Engine(), tmp_path) as agent:
            with anyio.fail_after(10):
                await bus.wait_until(lambda state: "0.0" in state.members and live(state))
                report = await bus.publish(EngineCommand(operation="flush"), Target(), 5000)
        assert report.acted == ("0.0",) and (bus.inbox.malformed, agent.malformed) == (0, 0)
    await read_by_commands(path)


@pytest.mark.anyio
@pytest.mark.one_loop
async def test_a_wall_clock_before_1970_is_survived(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a battery begins in 1970 or before, until its clock is set."""
    behind_ns = time.time_ns() + 1_000_000_000 * S
    original = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: original() - behind_ns)
    address, path = f"ipc://{tmp_path}/bus", tmp_path / "run.db"
    async with Bus(address, RunLog.open(path), QUICK, context=context) as bus:
        async with running(address, context, Engine(), tmp_path) as agent:
            with anyio.fail_after(10):
                await bus.wait_until(lambda state: "0.0" in clocks_of(state) and live(state))
                await bus.publish(EngineCommand(operation="flush"), Target(), 5000)
        assert (bus.inbox.malformed, agent.malformed) == (0, 0)
    assert all(entry.at_ns < 0 for entry in RunLog.read(path))
    assert RunLog.header(path).run.startswith("1938") and RunLog.header(path).created_ns < 0
    for last_ns in (LogSurvey(RunLog.read(path)).last_ns, collect(RunLog.read(path)).end_ns):
        assert abs(last_ns - time.time_ns()) < 60 * S
    out = tmp_path / "out"
    await read_by_commands(path)
    for command in ("report", "timeline"):
        done = await to_thread.run_sync(typed, command, path, "-o", out, "--force")
        assert done.returncode == 0, done.stderr
    with RunLog.open(path) as log:
        assert log.state.seq == 2


def live(state: CoordinatorState) -> bool:
    return state.members["0.0"].state == "live"
