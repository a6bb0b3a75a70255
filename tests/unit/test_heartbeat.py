"""What a heartbeat is made of, and how often a fleet sends one."""

import random

import pytest

from controlplane.bus.bus_loop import heartbeat_of
from schemas.agent_status import AgentStatus, RequestCounts
from schemas.config import BusConfig
from schemas.wire import TimeRequest
from workers.link.heartbeat import ASKED_EVERY, FIRST_ASKED, Heartbeat
from workers.machine.state import AgentState


class Agent:
    """A heartbeat, without an agent around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(random, "randrange", lambda _: 0)
        self._sent: list[type] = []
        self.counts = RequestCounts()
        self.heartbeat = Heartbeat(AgentState, lambda: self.counts, self._send, lambda: 0)

    def _send(self, message: AgentStatus | TimeRequest | RequestCounts) -> bool:
        self._sent.append(type(message))
        return True

    def beat(self, *, doubtful: bool = False) -> list[type]:
        """Return what one heartbeat sends."""
        self._sent = []
        self.heartbeat.beat(doubtful=doubtful)
        return self._sent

    def settle(self) -> None:
        """Send the heartbeats that all ask, and the next, which asks as well."""
        for _ in range(FIRST_ASKED + 1):
            assert self.beat() == [AgentStatus, TimeRequest]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    return Agent(monkeypatch)


def test_after_the_first_heartbeats_every_third_asks(agent: Agent) -> None:
    agent.settle()
    for _ in range(3):
        assert [agent.beat() for _ in range(ASKED_EVERY)] == [[AgentStatus], [AgentStatus], [AgentStatus, TimeRequest]]


def test_every_heartbeat_asks_a_bus_that_is_doubtful_and_one_that_is_new(agent: Agent) -> None:
    agent.settle()
    assert [agent.beat(doubtful=True) for _ in range(4)] == [[AgentStatus, TimeRequest]] * 4
    agent.heartbeat.restart()
    agent.settle()


def test_what_asks_also_says_how_many_requests_there_are_if_that_changed(agent: Agent) -> None:
    agent.settle()
    agent.counts = RequestCounts(running=1, waiting=0)
    beats = [agent.beat() for _ in range(2 * ASKED_EVERY)]
    assert [RequestCounts in sent for sent in beats] == [False, False, True, False, False, False]
    agent.heartbeat.restart()
    assert agent.beat() == [AgentStatus, TimeRequest, RequestCounts], "another bus knows nothing"


@pytest.mark.parametrize(("agents", "interval_ms"), [(64, None), (500, None), (1_024, 4_096), (60_000, 5_000)])
def test_a_large_fleet_sends_about_250_heartbeats_a_second_and_each_agent_two_in_its_timeout(
    agents: int, interval_ms: int | None
) -> None:
    assert heartbeat_of(BusConfig(), agents) == interval_ms
