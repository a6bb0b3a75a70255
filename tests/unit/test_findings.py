"""Findings about observed runs, in made-up logs: which moments count, what is named, and what is no finding."""

from msgspec.structs import replace

from controlplane.analysis.findings import ObservedFleet, Violation
from controlplane.machine import events as bus_events
from controlplane.record.entries import LogEntry
from schemas.config import ObservePolicy
from schemas.events import EngineObserved, Event, Observation, Started, Stopping
from schemas.identity import Identity, RolloutMode
from schemas.wire import Hello, Welcome
from tests.unit.fleets import SETTINGS

S = 1_000_000_000
LIMITS = ObservePolicy(torn_ms=60_000, paused_ms=600_000, profiling_ms=300_000)
UP = Observation(engine="e 1", instance="one", tokenizer="present", generating=True, label="1")
DOWN = Observation(engine="e", tokenizer="unknown")
WELCOME = Welcome(run="r", publish_port=None, heartbeat_ms=1, lease_ms=1, recorded_decisions=0)


class Log:
    """A log that is written second by second."""

    def __init__(self) -> None:
        self.fleet = ObservedFleet()
        self._position = 0
        self.bus(0, bus_events.Opened(at_us=0, at_ns=0, run="r", settings=replace(SETTINGS, observe=LIMITS), logic=5))

    def _entry(self, at_s: float, agent: str = "") -> LogEntry:
        self._position += 1
        empty = b"\x90"
        return LogEntry(
            position=self._position,
            at_ns=int(at_s * S),
            agent=agent,
            kind="",
            journal="j",
            number=0,
            event=empty,
            effects=empty,
        )

    def bus(self, at_s: float, event: bus_events.CoordinatorEvent, *effects: bus_events.CoordinatorEffect) -> None:
        self.fleet.follow_bus(self._entry(at_s), event, effects)

    def joins(self, at_s: float, agent: str, incarnation: str = "a", mode: RolloutMode = RolloutMode.OBSERVED) -> None:
        """An agent says hello; then its start is uploaded."""
        self.hello(at_s, agent, incarnation, mode)
        started = Started(at_ms=0, identity=place(agent, mode), incarnation=incarnation)
        self.tells(at_s, agent, started)

    def hello(self, at_s: float, agent: str, incarnation: str = "a", mode: RolloutMode = RolloutMode.OBSERVED) -> None:
        peer = f"{agent}/{incarnation}/x"
        hello = Hello(identity=place(agent, mode), incarnation=incarnation, journal="j", host="h", pid=1)
        welcome = bus_events.Send(peer=peer, epoch=1, seq=0, message=WELCOME)
        self.bus(at_s, bus_events.HelloReceived(at_us=0, peer=peer, hello=hello, recorded_decisions=0), welcome)

    def lost(self, at_s: float, agent: str, incarnation: str = "a") -> None:
        self.bus(at_s, bus_events.PeerLost(at_us=0, peer=f"{agent}/{incarnation}/x", reason="silent"))

    def tells(self, at_s: float, agent: str, event: Event) -> None:
        self.fleet.follow_agent(self._entry(at_s, agent), event)

    def sees(self, at_s: float, agent: str, seen: Observation) -> None:
        self.tells(at_s, agent, EngineObserved(at_ms=0, observation=seen))

    def ends(self, at_s: float) -> list[Violation]:
        self.bus(at_s, bus_events.Closed(at_us=0, at_ns=0))
        return list(self.fleet.findings())


def place(agent: str, mode: RolloutMode) -> Identity:
    return Identity(replica=int(agent.partition(".")[0]), node_rank=0, mode=mode)


def fleet(*agents: str) -> Log:
    log = Log()
    for agent in agents:
        log.joins(0, agent)
        log.sees(1, agent, UP)
    return log


TWO = replace(UP, label="2")
PAUSED = replace(UP, generating=False)


def test_an_update_that_takes_a_while_is_no_torn_fleet() -> None:
    log = fleet("0.0", "1.0", "2.0")
    for at_s, agent in ((10, "0.0"), (40, "1.0"), (70, "2.0")):
        log.sees(at_s, agent, TWO)
    assert log.ends(500) == []


def test_a_torn_fleet_is_dated_and_its_smaller_part_named() -> None:
    log = fleet("0.0", "1.0", "2.0")
    log.sees(10, "0.0", TWO)
    log.sees(12, "1.0", TWO)
    log.sees(100.5, "2.0", TWO)
    (torn,) = log.ends(200)
    assert (torn.invariant, torn.agents) == ("O1", ("2.0",))
    assert torn.text == (
        "replicas served different weights for 1 min from 00:00:10.000 UTC: weights 2 on replicas 0, 1; weights 1 on "
        "replica 2"
    )


def test_a_torn_fleet_without_an_end_lasts_to_that_of_the_log() -> None:
    log = fleet("0.0", "1.0")
    log.sees(10, "0.0", TWO)
    (torn,) = log.ends(75)
    assert "for 1 min from 00:00:10.000 UTC, and still at the end of the log" in torn.text


def test_a_replica_that_is_paused_or_down_or_says_nothing_of_its_weights_tears_nothing() -> None:
    for other in (PAUSED, DOWN, replace(UP, label=None), replace(UP, label="")):
        log = fleet("0.0", "1.0")
        log.sees(2, "1.0", other)
        log.sees(10, "0.0", TWO)
        assert [finding.invariant for finding in log.ends(400)] == []


def test_what_is_not_known_to_be_paused_serves() -> None:
    log = fleet("0.0", "1.0")
    log.sees(2, "1.0", replace(UP, generating=None))
    log.sees(10, "0.0", TWO)
    assert [finding.invariant for finding in log.ends(400)] == ["O1"]


def test_what_an_agent_saw_while_it_was_cut_off_counts_once_it_is_back() -> None:
    """Agent 1.0 was cut off while both replicas were updated at once, and its record came ten minutes later."""
    log = fleet("0.0", "1.0")
    log.lost(9, "1.0")
    log.sees(10, "0.0", TWO)
    log.hello(610, "1.0")
    log.sees(611, "1.0", TWO)
    assert log.ends(900) == []


def test_an_agent_that_is_back_and_tells_nothing_new_still_sees_what_it_saw() -> None:
    log = fleet("0.0", "1.0")
    log.lost(9, "1.0")
    log.sees(10, "0.0", TWO)
    log.hello(610, "1.0")
    (torn,) = log.ends(700)
    assert "from 00:10:10.000 UTC" in torn.text  # nothing is known of the time in between


def test_a_pause_that_ended_is_none_whatever_it_took() -> None:
    log = fleet("0.0")
    log.sees(10, "0.0", PAUSED)
    log.sees(2_000, "0.0", UP)
    assert log.ends(2_001) == []
    replica = log.fleet.replicas()["0.0"]
    assert (replica.paused_ns, replica.pauses.count) == (1_990 * S, 1)


def test_a_pause_outlives_the_agent_that_saw_it_begin() -> None:
    log = fleet("0.0")
    log.sees(10, "0.0", PAUSED)
    log.lost(20, "0.0")
    log.joins(400, "0.0", "b")
    log.sees(401, "0.0", PAUSED)
    (pause,) = log.ends(700)
    assert pause.agents == ("0.0",) and pause.text.startswith("paused since 00:00:10.000 UTC for 11 min")


def test_a_replica_whose_engine_went_away_is_paused_for_as_long_as_it_was_seen() -> None:
    log = fleet("0.0", "1.0")
    log.sees(10, "0.0", PAUSED)
    log.sees(10, "1.0", PAUSED)
    log.sees(20, "0.0", DOWN)
    log.tells(800, "1.0", Stopping(at_ms=0))
    (pause,) = log.ends(2_000)
    assert pause.agents == ("1.0",) and "until it was last seen at 00:13:20.000 UTC" in pause.text


def test_a_session_that_is_never_stopped_is_leaked() -> None:
    log = fleet("0.0", "1.0")
    for agent in ("0.0", "1.0"):
        log.sees(10, agent, replace(UP, profiling=True))
    log.sees(40, "1.0", replace(UP, profiling=False))
    (leak,) = log.ends(400)
    assert (leak.invariant, leak.agents) == ("O3", ("0.0",))
    assert leak.text == "profiling since 00:00:10.000 UTC for 6 min, until the end of the log, and never seen to stop"


def test_agents_that_command_are_no_observers() -> None:
    log = Log()
    for agent, seen in (("0.0", UP), ("1.0", TWO)):
        log.joins(0, agent, mode=RolloutMode.HYBRID)
        log.sees(1, agent, seen)
    assert log.ends(5_000) == [] and log.fleet.replicas() == {}


def test_a_replica_that_is_commanded_from_now_on_is_observed_no_more() -> None:
    log = fleet("0.0", "1.0")
    log.joins(10, "1.0", "b", mode=RolloutMode.HYBRID)
    log.sees(11, "1.0", UP)
    log.sees(12, "0.0", TWO)
    assert log.ends(5_000) == []
