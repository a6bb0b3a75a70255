"""Agents in the same state decide alike, so the machine decides once for all of them while all goes well.

No decision depends on what an agent is called, on how often its engine was launched, or on what it has answered before.
An agent that anything happens to gets its own state, as if it had decided all by itself, and does so from then on.
"""

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.events import PeerAnswer
from controlplane.simulate.costs import Condition, condition_of
from controlplane.simulate.luck import RETURNED, Outcome
from controlplane.simulate.modelled_engine import FIRST_LAUNCH, ModelledEngine
from schemas import events
from schemas.commands import WeightSync
from schemas.identity import Identity
from workers.machine import decide as machine
from workers.machine.observe import SHOWS_NOTHING
from workers.machine.state import AgentState

if TYPE_CHECKING:
    from controlplane.simulate.simulator import SimulatedAgent

_ANY: Final = AgentState()
"""Its names stand for those of all who are alike."""


class Situation(Struct, frozen=True):
    """The state of agents and of their engines, but for their names."""

    state: AgentState
    engine: events.Observation


class Course(Struct, frozen=True):
    """What a command leads to if every call goes well.

    Attributes:
        answer: What is answered, after the first `answered` calls.
        changes: What a replica does from then on, each with the number of calls that come before.
        limit_us: How long all calls may take.
    """

    calls: tuple[events.Call, ...]
    answered: int
    answer: events.Answer
    changes: tuple[tuple[int, Condition], ...]
    limit_us: float
    after: Situation


def _named(state: AgentState, names: AgentState, instance: str | None) -> AgentState:
    engine = replace(state.engine, instance=instance)
    identity, incarnation, calls_made = names.identity, names.incarnation, names.calls_made
    return replace(state, identity=identity, incarnation=incarnation, calls_made=calls_made, answers=(), engine=engine)


def _returned(engine: ModelledEngine, state: AgentState, call: events.Call, at_ms: int) -> events.EngineReturned:
    """Have a call carried out, and return what its agent hears."""
    assert state.activity is not None
    engine.carry_out(call, RETURNED)
    seen = None if type(call) in SHOWS_NOTHING else engine.observe()
    return events.EngineReturned(at_ms=at_ms, call_id=state.activity.call_id, result=RETURNED, observation=seen)


def _course(before: Situation, identity: Identity, command: events.CommandReceived) -> Course | None:
    """Decide about a command; None if it leads to anything but calls and one answer."""
    engine, state = ModelledEngine(before.engine), replace(before.state, identity=identity)
    event: events.Event = command
    calls: list[events.Call] = []
    answers: list[tuple[int, events.Answer]] = []
    conditions, limit_ms = [condition_of(state)], float("inf")
    while True:
        state, effects = machine.decide(state, event)
        conditions.append(condition_of(state))
        answers += [(len(calls), effect) for effect in effects if isinstance(effect, events.Answer)]
        performed = [effect.call for effect in effects if isinstance(effect, events.Perform)]
        deadline_ms = machine.next_deadline(state)
        if len(effects) > len(performed) + 1 or not performed:
            break
        limit_ms = min(limit_ms, deadline_ms - command.at_ms) if deadline_ms is not None else limit_ms
        event = _returned(engine, state, performed[0], command.at_ms)
        calls += performed
    if performed or deadline_ms is not None or len(answers) != 1:
        return None
    ((answered, answer),) = answers
    changes = tuple((n, now) for n, (was, now) in enumerate(pairwise(conditions)) if now != was)
    after = Situation(_named(state, _ANY, FIRST_LAUNCH), engine.state)
    return Course(tuple(calls), answered, answer, changes, limit_ms * 1000, after)


class Follower:
    """An agent that decides as others do."""

    def __init__(self, agent: "SimulatedAgent") -> None:
        self._agent = agent
        self.situation = Situation(_named(agent.state, _ANY, FIRST_LAUNCH), agent.engine.state)
        self._command: events.CommandReceived | None = None
        self._course: Course | None = None
        self._moments_us: list[int] = []  # when the command has arrived, and when each call ends
        self._drawn: list[tuple[events.Call, Outcome]] = []
        self._answer: tuple[int, PeerAnswer] | None = None  # and when the bus has it

    def has_ended(self) -> bool:
        """Whether it has come to the end of its course. Then that is counted."""
        if (course := self._course) is None:
            return True
        if self._moments_us[-1] > self._agent.clock.now:
            return False
        for place, condition in course.changes:
            self._agent.run.costs.change(self._agent.name, condition, self._moments_us[place] // 1000)
        self.situation, self._course, self._command = course.after, None, None
        return True

    def follow(self, command: events.CommandReceived, courses: dict[int, Course | None]) -> None:
        """Take a command that is published now, alike in each situation, or part."""
        agent, situation = self._agent, self.situation
        self._command, self._answer = command, None
        at_us = agent.clock.now + agent.network_us("publications")
        self._moments_us, self._drawn = [at_us], []
        if id(situation) not in courses:
            courses[id(situation)] = _course(situation, agent.identity, command)
        course = self._course = courses[id(situation)]
        named = isinstance(command.command, WeightSync) and agent.identity.replica in command.command.quarantine
        if course is None or named:
            agent.part()
            return
        latest_us = at_us // 1000 * 1000 + course.limit_us
        for call in course.calls:
            outcome = result, took_us = agent.calls.draw(call)
            at_us += took_us
            self._moments_us.append(at_us)
            self._drawn.append((call, outcome))
            if isinstance(result, events.Fault) or at_us >= latest_us:
                agent.part()
                return
        at_us = self._moments_us[course.answered] + agent.network_us("up")
        self._answer = at_us, agent.answer(course.answer)
        agent.run.bus.expected.append(self._answer)

    def part(self) -> None:
        """Give the agent its own state, as if it had decided all by itself until now."""
        agent, now_us, moments_us, drawn = self._agent, self._agent.clock.now, self._moments_us, self._drawn
        agent.engine.state = self.situation.engine
        agent.state = _named(self.situation.state, agent.state, agent.engine.instance)
        if self._command is None:
            return
        decided = bisect_right(moments_us, now_us) if self._answer is not None else 0
        event: events.Event = self._command
        for place, at_us in enumerate(moments_us[:decided]):
            if place:
                event = _returned(agent.engine, agent.state, drawn[place - 1][0], at_us // 1000)
            agent.decide(replace(event, at_ms=at_us // 1000))
        if not decided:
            agent.clock.at(moments_us[0] - now_us, agent.hear, agent.peer, self._command)
        elif decided < len(moments_us):
            call, (result, _) = drawn[decided - 1]
            agent.await_call(call, result, moments_us[decided] - now_us)
        for call, outcome in reversed(drawn[decided:]):
            agent.calls.put_back(call, outcome)
        if self._answer is not None and self._course is not None:
            sent_us, arrives_us = moments_us[self._course.answered], self._answer[0]
            if sent_us <= now_us:
                agent.arrivals_us["up"] = arrives_us
            else:
                agent.run.bus.forget(self._answer)
                agent.ahead_us["up"] = arrives_us - sent_us
