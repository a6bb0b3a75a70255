"""Agents in the same state decide alike, so the machine decides once for all of them while all goes well.

No decision depends on what an agent is called, on how often its engine was launched, or on what it has answered before.
An agent that anything happens to gets its own state, as if it had decided all by itself, and does so from then on.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine import coordinator
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.machine.events import AnswersReceived, Conclude, CoordinatorEvent, PeerAnswer, Publish
from controlplane.simulate.costs import Condition, condition_of
from controlplane.simulate.luck import RETURNED, Outcome
from controlplane.simulate.modelled_engine import FIRST_LAUNCH, ModelledEngine
from controlplane.simulate.virtual_clock import VirtualClock
from schemas import events, wire
from schemas.commands import WeightSync
from schemas.identity import Identity
from schemas.reports import SyncReport
from workers.link.frames import read_command
from workers.machine import decide as machine
from workers.machine.observe import SHOWS_NOTHING
from workers.machine.state import AgentState

if TYPE_CHECKING:
    from controlplane.simulate.simulator import SimulatedAgent

RUN: Final = "simulated"
_ANY: Final = AgentState()
"""Its names stand for those of all who are alike."""


Expected = tuple[int, PeerAnswer]
"""An answer, and when the bus has it."""


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


def _course(before: Situation, identity: Identity, received: events.CommandReceived) -> Course | None:
    """Decide about a command; None if it leads to anything but calls and one answer."""
    engine, state = ModelledEngine(before.engine), replace(before.state, identity=identity)
    event: events.Event = received
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
        limit_ms = min(limit_ms, deadline_ms - received.at_ms) if deadline_ms is not None else limit_ms
        event = _returned(engine, state, performed[0], received.at_ms)
        calls += performed
    if performed or deadline_ms is not None or len(answers) != 1:
        return None
    ((answered, answer),) = answers
    changes = tuple((n, now) for n, (was, now) in enumerate(pairwise(conditions)) if now != was)
    after = Situation(_named(state, _ANY, FIRST_LAUNCH), engine.state)
    return Course(tuple(calls), answered, answer, changes, limit_ms * 1000, after)


def command(epoch: int, origin: int, seq: int, envelope: wire.Envelope) -> events.CommandReceived:
    """Return a command as agents get it, but for the time."""
    return read_command(epoch, origin, seq, wire.encode(envelope), RUN, 0)


class Follower:
    """An agent that decides as others do."""

    def __init__(self, agent: "SimulatedAgent") -> None:
        self.agent = agent
        self.situation = Situation(_named(agent.state, _ANY, FIRST_LAUNCH), agent.engine.state)
        self._follows: tuple[events.CommandReceived, Course, Expected] | None = None
        self._moments_us: list[int] = []  # when that command has arrived, and when each call ends
        self._drawn: list[tuple[events.Call, Outcome]] = []
        self._changes: list[tuple[Condition, int]] = []  # each from which moment on (ms)

    def has_ended(self) -> bool:
        """Whether it has come to the end of its course. Then that is counted."""
        if self._follows is not None and self._moments_us[-1] <= self.agent.clock.now:
            _, course, _ = self._follows
            self.situation, self._follows = course.after, None
            self.settle()
        return self._follows is None

    def settle(self, begun: int | None = None) -> None:
        """Count what it has gone through; or have the engine meet again what was drawn, but for calls that began."""
        for condition, at_ms in self._changes if begun is None else ():
            self.agent.run.costs.replicas[self.agent.name].change(condition, at_ms)
        for call, outcome in reversed(self._drawn[begun:]) if begun is not None else ():
            self.agent.calls.put_back(call, outcome)
        self._drawn, self._changes = [], []

    def draw(self, course: Course, at_us: int) -> int | None:
        """Draw a course. Return when the bus has the answer to what it publishes now; None if anything fails."""
        agent, draw = self.agent, self.agent.calls.draw
        at_us += agent.network_us
        latest_us, moments_us = at_us // 1000 * 1000 + course.limit_us, [at_us]
        self._moments_us = moments_us
        for call in course.calls:
            result, took_us = outcome = draw(call)
            moments_us.append(at_us := at_us + took_us)
            self._drawn.append((call, outcome))
            if result is not RETURNED or at_us >= latest_us:
                return None
        for place, condition in course.changes:
            self._changes.append((condition, moments_us[place] // 1000))
        return moments_us[course.answered] + agent.network_us

    def follow(self, received: events.CommandReceived, courses: dict[int, Course | None]) -> bool:
        """Take a command that is published now, if it leads to the same as for others, and all goes well."""
        agent, key, body = self.agent, id(self.situation), received.command
        if isinstance(body, WeightSync) and agent.identity.replica in body.quarantine:
            return False
        if key not in courses:
            courses[key] = _course(self.situation, agent.identity, received)
        if (course := courses[key]) is None:
            return False
        if (arrives_us := self.draw(course, agent.clock.now)) is None:
            self.settle(begun=0)
            return False
        expected = arrives_us, agent.answer(course.answer)
        self._follows = received, course, expected
        agent.run.bus.expected.append(expected)
        return True

    def part(self) -> None:
        """Give the agent its own state, as if it had decided all by itself until now."""
        agent, now_us, moments_us = self.agent, self.agent.clock.now, self._moments_us
        agent.engine.state = self.situation.engine
        agent.state = _named(self.situation.state, agent.state, agent.engine.instance)
        if self._follows is None:
            return
        received, course, expected = self._follows
        event: events.Event = received
        decided = bisect_right(moments_us, now_us)
        for place, at_us in enumerate(moments_us[:decided]):
            if place:
                event = _returned(agent.engine, agent.state, course.calls[place - 1], at_us // 1000)
            agent.decide(replace(event, at_ms=at_us // 1000))
        if not decided:
            agent.clock.at(moments_us[0] - now_us, agent.hear, agent.peer, received)
        elif decided < len(moments_us):
            agent.await_call(course.calls[decided - 1], RETURNED, moments_us[decided] - now_us)
        self.settle(begun=decided)
        if moments_us[course.answered] > now_us:
            agent.run.bus.forget(expected)


def rehearsed(followers: Sequence[Follower], state: CoordinatorState, event: CoordinatorEvent) -> list[Course]:
    """Return what a sync leads to in each phase if all goes well; nothing if not all get through it as they were."""
    situation = followers[0].situation
    before = situation.engine
    courses: list[Course] = []
    while situation.state.desired.committed is not None:
        state, effects = coordinator.decide(state, event)
        course = None
        for effect in effects:
            if isinstance(effect, Conclude) and isinstance(report := effect.report, SyncReport):
                same = replace(situation.engine, version=before.version, label=before.label) == before
                return courses if same and len(report.loaded) == len(followers) and not report.flawed else []
            if isinstance(effect, Publish):
                published = command(effect.epoch, effect.epoch, effect.seq, effect.envelope)
                course = _course(situation, followers[0].agent.identity, published)
        if course is None:
            return []
        courses.append(course)
        situation, answer = course.after, course.answer
        event = AnswersReceived(at_us=event.at_us, answers=tuple(one.agent.answer(answer) for one in followers))
    return []


def pass_through(followers: Sequence[Follower], courses: Sequence[Course], clock: VirtualClock) -> int | None:
    """Have all go through courses, one after the other, while nothing else happens.

    Return when the last answer to the last of them has arrived; None if anything else happens.
    """
    ends_us, well = clock.now, bool(courses)
    for course in courses:
        if well:
            arrivals_us = [follower.draw(course, ends_us) or 0 for follower in followers]
            ends_us = max(arrivals_us)
            well = all(arrivals_us) and clock.is_free(ends_us)
    for follower in followers:
        follower.settle(begun=None if well else 0)
    return ends_us if well else None
