"""Draws syncs in which nothing fails without the machines, once these have decided one like it: every replica is whole,
and is called for the same in each phase. If something fails after all, the machines meet what was drawn.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from controlplane.simulate.luck import Outcome
from schemas import events
from schemas.commands import SyncPhase
from schemas.reports import SyncReport
from workers.machine.state import call_name

if TYPE_CHECKING:
    from controlplane.simulate.simulator import SimulatedAgent, Simulation

TURN_US: Final = 200
"""Between two turns of the bus."""
IN_TIME: Final = 0.9
"""Share of a phase's time after which it is not quiet: agents get a little less time than the trainer waits."""
_Calls = defaultdict[str, list[events.Call]]


class QuietSyncs:
    """The syncs of one run in which nothing fails."""

    def __init__(self, run: "Simulation") -> None:
        self._run = run
        self._phases: list[_Calls] = []  # of the sync that the machines decide: the calls of each replica
        self._shape: list[list[events.Call]] = []  # each replica's calls, by phase; empty unless all is well

    def published(self, phase: SyncPhase) -> None:
        """The machines begin a phase."""
        self._phases = [*(self._phases if phase != "prepare" else ()), _Calls(list)]

    def called(self, name: str, call: events.Call) -> None:
        """They have an engine called for it."""
        if self._phases:
            self._phases[-1][name].append(call)

    def failed(self) -> None:
        """Something failed: until a sync has gone well for all, the machines decide."""
        self._shape = []

    def concluded(self, report: SyncReport) -> None:
        """They end the sync."""
        names = [[[call_name(call) for call in calls[name]] for calls in self._phases] for name in self._run.agents]
        whole = len(report.loaded) == len(names) and not report.flawed and names.count(names[0]) == len(names)
        self._shape = [calls["0.0"] for calls in self._phases] if whole else []

    def draw(self) -> int | None:
        """Draw a sync that begins now, and count its costs. Return when it ends (µs), or None if it is not quiet."""
        run, agents = self._run, self._run.agents.values()
        if not self._shape or not all(agent.is_settled for agent in agents):
            return None
        replicas = [_DrawnReplica(agent) for agent in agents]
        at_us = requested_us = run.clock.now + 1
        quiet = True
        for calls in self._shape:
            begun_us = at_us
            for arrival_us in sorted([replica.draw(calls, begun_us) for replica in replicas]):
                if at_us <= arrival_us:  # it plans a turn
                    at_us = max(arrival_us + 1, at_us + TURN_US)
            quiet = quiet and at_us - begun_us < IN_TIME * 1e6 * run.model.policy.timeout
        if quiet and not run.fails_by(at_us) and all(replica.goes_well for replica in replicas):
            run.costs.add_sync(requested_us, at_us, {replica.agent.name: replica.paused_us for replica in replicas})
            return at_us
        for replica in replicas:
            replica.put_back()
        return None


class _DrawnReplica:
    """The calls beside one agent in one sync."""

    def __init__(self, agent: "SimulatedAgent") -> None:
        self.agent, self.goes_well, self.paused_us = agent, True, 0
        self._draws: list[tuple[events.Call, Outcome]] = []

    def draw(self, calls: Sequence[events.Call], begun_us: int) -> int:
        """Return when the bus has the answer of a phase that it published at a moment (µs)."""
        at_us = begun_us + self.agent.network_us()
        for call in calls:
            if isinstance(call, events.Pause):
                self.paused_us -= at_us
            outcome = result, took_us = self.agent.calls.draw(call)
            self._draws.append((call, outcome))
            self.goes_well = self.goes_well and isinstance(result, events.Returned)
            at_us += took_us
            if isinstance(call, events.Resume):
                self.paused_us += at_us
        return at_us + self.agent.network_us()

    def put_back(self) -> None:
        """Have the machines meet what was drawn."""
        for call, outcome in reversed(self._draws):
            self.agent.calls.put_back(call, outcome)
