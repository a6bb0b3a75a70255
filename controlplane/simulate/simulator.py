"""Runs a modelled fleet: the machines of agents and coordinator decide, and everything around them is drawn.

The shells here do what the real ones do, as far as it costs time: they ask their machine, make calls and send messages.
"""

from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

from msgspec import convert
from msgspec.structs import replace

from controlplane.machine import coordinator
from controlplane.machine import events as bus_events
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.simulate import alike
from controlplane.simulate.costs import CostCounter, RunCosts
from controlplane.simulate.fleet_model import Duration, FleetModel, RecordedFailure
from controlplane.simulate.luck import NO_ANSWER, RETURNED, SECOND, DrawnCalls, Luck
from controlplane.simulate.modelled_engine import ModelledEngine, launched
from controlplane.simulate.virtual_clock import VirtualClock
from schemas import events, wire
from schemas.agent_status import AgentStatus
from schemas.commands import AdapterRequest, AdapterSync, Checkpoint, WeightSync
from schemas.errors import ConfigError
from schemas.identity import Identity, agent_of
from schemas.reports import SyncReport
from workers.link.heartbeat import status_of
from workers.machine import decide as machine
from workers.machine.observe import SHOWS_NOTHING
from workers.machine.state import AgentState

AGAIN_US: Final = SECOND
"""Until an agent that was turned away says hello again, and until one has seen what became of its engine."""
WEEK_US: Final = 7 * 24 * 3600 * SECOND


def simulate(model: FleetModel) -> RunCosts:
    """Run the fleet of a model, and return what that cost.

    Raises:
        ConfigError: The coordinator refuses such a sync, or there are next to none.
    """
    return Simulation(model).run()


class Simulation:
    """One run. Until all agents have joined, its trainer waits."""

    def __init__(self, model: FleetModel) -> None:
        self.model, self.clock, self.costs = model, VirtualClock(), CostCounter()
        self.luck = Luck(model.seed)
        self.recorded: defaultdict[int, list[RecordedFailure]] = defaultdict(list)  # by sync: what is still to come
        for failure in model.failures.recorded:
            self.recorded[failure.sync].append(failure)
        self.bus = SimulatedBus(self)
        agents = [SimulatedAgent(self, replica) for replica in range(model.fleet.replicas)]
        self.agents = {agent.name: agent for agent in agents}

    def run(self) -> RunCosts:
        self.bus.open()
        for agent in self.agents.values():
            agent.begin()
            for what, act in (("agent", agent.die), ("cut", agent.be_cut_off), ("engine", agent.lose_engine)):
                self.fail(agent.name, what, act)
        while self.costs.syncs < self.model.steps:
            self.clock.step()
            if self.clock.now > WEEK_US * (self.costs.syncs + 1):
                raise ConfigError(f"after {self.costs.syncs} syncs there is less than one a week: it fails too often")
        for agent in self.agents.values():
            agent.part()
        return self.costs.finish()

    def gather(self) -> list[alike.Follower]:
        """Have agents in the same situation decide alike. Return all agents if all are in one situation."""
        found: dict[int, tuple[alike.Situation, alike.Situation]] = {}  # by what it was: what it is from now on
        followers: list[alike.Follower] = []
        for agent in self.agents.values():
            if agent.follower is None and agent.is_settled:
                agent.follower, agent.deadline_ms = alike.Follower(agent), None
            if (follower := agent.follower) is not None and follower.has_ended():
                own = follower.situation
                if id(own) not in found:
                    found[id(own)] = own, next((other for _, other in found.values() if other == own), own)
                _, follower.situation = found[id(own)]
                followers.append(follower)
        one = len(followers) == len(self.agents) and len({id(same) for _, same in found.values()}) == 1
        return followers if one else []

    def after(self, duration: Duration, place: str, what: str, act: Callable[..., None], *args: Any) -> None:
        """Have something happen after a time that is drawn."""
        self.clock.at(self.luck.us(duration, place, what), act, *args)

    def fail(self, place: str, what: str, act: Callable[[Duration], None], now: bool = False) -> None:
        """Have something fail at random, again and again."""
        per_hour = getattr(self.model.failures, f"{what}_per_hour")
        if per_hour:
            wait_s = self.luck.of(place, what).expovariate(per_hour / 3600)
            self.clock.at(round(wait_s * SECOND), self.fail, place, what, act, True)
        if now:
            act(getattr(self.model.failures, f"{what}_s"))

    def reached(self, sync: int, phase: str) -> None:
        """Have fail what failed in this part of a recorded run, or in one that this run has left out."""
        for failure in self.recorded.pop(sync, []):
            agent = self.agents.get(failure.agent)
            if phase not in (failure.phase, "step"):
                self.recorded[sync].append(failure)
            elif agent is not None or failure.what == "trainer":
                self.clock.at(round(failure.after * SECOND), self._fail_again, failure, agent)

    def _fail_again(self, failure: RecordedFailure, agent: "SimulatedAgent | None") -> None:
        """Fail as an agent has seen it, and for as long as it saw that."""
        if agent is None:
            self.bus.die(failure.lasts)
        elif failure.what == "engine":
            agent.lose_engine(failure.lasts, seen_us=0)
        elif failure.what == "agent":
            agent.die(failure.lasts)
        else:
            agent.be_cut_off(failure.lasts, connection_stands=failure.what == "silence")


class SimulatedAgent:
    """The agent of a replica's first node, and the engine beside it. Its journal keeps `state`."""

    def __init__(self, run: Simulation, replica: int) -> None:
        self.run, self.model, self.clock, size = run, run.model, run.clock, run.model.fleet
        self.identity = Identity(replica=replica, node_rank=0, nnodes=size.nodes, gpus_per_node=size.gpus)
        self.name = self.identity.agent
        self.engine, self.calls = ModelledEngine(launched(size.engine)), DrawnCalls(run.model, run.luck, self.name)
        self.state = AgentState()
        self.alive = self._cut = self._beats = False
        self.peer = ""  # its connection; empty while there is none
        self.standing = ""  # one that carries nothing, and that the bus can't tell from another
        self._life = self._connections = self._call_id = 0
        self.follower: alike.Follower | None = None  # while it decides as others do
        self.network_us = 0  # how long a message is on its way
        self.deadline_ms: int | None = None
        self._seen: events.Observation | None = None
        self._sent: tuple[int, AgentStatus] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way that is its own."""
        return (
            bool(self.peer)
            and not (self._call_id or self._beats)
            and self.engine.ready
            and self._seen == self.engine.observe()
            and machine.next_deadline(self.state) is None
            and self.name in self.run.costs.replicas
            and self.run.bus.state.members[self.name].settled
        )

    @property
    def now_ms(self) -> int:
        return self.clock.now // 1000

    def begin(self) -> None:
        self.alive, self._life, self._seen = True, self._life + 1, None
        self.feed(events.Started(at_ms=self.now_ms, identity=self.identity, incarnation=f"life {self._life}"))
        self._look()
        self.connect()

    def die(self, lasts: Duration) -> None:
        """The call in flight is carried out all the same, or not."""
        self.part()
        if self.alive:
            activity = self.state.activity
            if activity is not None and self.run.luck.of(self.name, "dies").random() < 0.5:
                self.engine.carry_out(activity.calls[0], RETURNED)
            self.alive, self._call_id = False, 0
            self.lose_bus()
            self.run.after(lasts, self.name, "agent back", self.begin)

    def be_cut_off(self, lasts: Duration, connection_stands: bool = False) -> None:
        if not self._cut:
            self._cut, peer = True, self.peer
            self.lose_bus()
            self.standing = peer if connection_stands else ""
            self.run.after(lasts, self.name, "cut off", self.connect, True)

    def lose_engine(self, lasts: Duration, seen_us: int = AGAIN_US) -> None:
        self.part()
        if self.engine.ready:
            self.engine.end()
            self._return(self._call_id, events.Fault("engine_error", "the engine died."))
            self.clock.at(seen_us, self._look)
            self.run.after(lasts, self.name, "engine back", self._regain_engine, seen_us)

    def _regain_engine(self, seen_us: int) -> None:
        self.engine.ready = True
        self.clock.at(seen_us, self._look)

    def _look(self) -> None:
        self.part()
        seen = self.engine.observe()
        if not self._call_id and seen != self._seen:
            self._seen = seen
            self.feed(events.EngineObserved(at_ms=self.now_ms, observation=seen))

    # --- the machine --------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        self.part()
        if self.alive:
            before = self.state
            for effect in self.decide(event):
                self._perform(effect)
            if self.state is not before:
                self._plan()

    def decide(self, event: events.Event) -> tuple[events.Effect, ...]:
        """Have the machine decide, and count what that costs. Return what is to be performed."""
        before = self.state
        self.state, effects = machine.decide(before, event)
        if self.state is not before:
            self.run.costs.decided_by_agent(self.name, event, self.state)
        return effects

    def _plan(self) -> None:
        """Plan the next deadline, and a heartbeat: one that repeats the last is no event."""
        deadline_ms = machine.next_deadline(self.state)
        if deadline_ms is not None and deadline_ms != self.deadline_ms:
            self.deadline_ms = deadline_ms
            self.clock.at(max(0, deadline_ms * 1000 - self.clock.now), self._tick, deadline_ms)
        if not self._beats:
            self._beats, interval_us = True, self.model.bus.heartbeat_ms * 1000
            self.clock.at(interval_us - self.clock.now % interval_us, self._beat)

    def part(self) -> None:
        """From now on it decides by itself."""
        if self.follower is not None:
            follower, self.follower = self.follower, None
            follower.part()
            self._seen = self.engine.observe()
            self._plan()

    def _tick(self, deadline_ms: int) -> None:
        if self.deadline_ms == deadline_ms:
            self.deadline_ms = None
            self.feed(events.Tick(at_ms=self.now_ms))

    def _beat(self) -> None:
        self._beats, status = False, (self.state.seq, status_of(self.state))
        if self.peer and status != self._sent:
            self._sent = status
            self._send(bus_events.StatusReceived, seq=status[0], status=status[1])

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Perform():
                outcome = self.calls.draw(effect.call) if self.engine.ready else NO_ANSWER
                self.await_call(effect.call, *outcome)
            case events.Answer():
                if self.peer:
                    self.clock.at(self.network_us, self.run.bus.receive, self.answer(effect))
            case events.RequestResend():
                self._send(bus_events.ResendRequested, first=effect.first, credit=64)
            case events.RequestSnapshot():
                self._send(bus_events.JoinReceived)
            case events.Restart():
                self._send(bus_events.PeerLost, reason="left")
                self.alive, self._call_id = False, 0
                self.clock.at(0, self.begin)

    def await_call(self, call: events.Call, result: events.Returned | events.Fault, left_us: int) -> None:
        assert self.state.activity is not None
        self._call_id = self.state.activity.call_id
        self.clock.at(left_us, self._return, self._call_id, result, call)

    def _return(self, call_id: int, result: events.Returned | events.Fault, call: events.Call | None = None) -> None:
        """A call ends, unless it was cut off."""
        if not call_id or call_id != self._call_id:
            return
        self._call_id, seen = 0, None
        if call is not None:
            self.engine.carry_out(call, result)
        if type(call) not in SHOWS_NOTHING or isinstance(result, events.Fault):
            seen = self._seen = self.engine.observe()
        self.feed(events.EngineReturned(at_ms=self.now_ms, call_id=call_id, result=result, observation=seen))

    def connect(self, in_reach: bool = False) -> None:
        """Say hello on a new connection, if the bus can be reached."""
        self.lose_bus()
        self._cut = self._cut and not in_reach
        if self.alive and not self._cut and self.run.bus.alive:
            self._connections, self._sent = self._connections + 1, None
            self.peer = f"{self.name}/life {self._life}/{self._connections}"
            self.network_us = self.run.luck.us(self.model.network, self.name, "network")
            hello = wire.Hello(
                identity=self.identity, incarnation=f"life {self._life}", journal=self.name, host="modelled", pid=1
            )
            self._send(bus_events.HelloReceived, hello=replace(hello, attempt=self._connections), recorded_decisions=0)

    def lose_bus(self) -> None:
        """The connection breaks: the lease runs out without another one, and with a head the bus notices."""
        self.part()
        peer, self.peer, self.standing = self.peer, "", ""
        self.clock.at(self.model.bus.lease_ms * 1000, self._end_lease, self._connections)
        if peer:
            silent_us, heads_us = self.model.bus.agent_timeout_ms * 1000, self.model.bus.head_interval_ms * 1000
            lost = bus_events.PeerLost(at_us=0, peer=peer, reason="silent")
            self.clock.at(silent_us + -(self.clock.now + silent_us) % heads_us, self.run.bus.receive, lost)

    def _end_lease(self, connections: int) -> None:
        if not self.peer and self._connections == connections:
            self.feed(events.LeaseExpired(at_ms=self.now_ms))

    def _send(self, message: Callable[..., bus_events.CoordinatorEvent], **fields: Any) -> None:
        if self.peer:
            self.clock.at(self.network_us, self.run.bus.receive, message(at_us=0, peer=self.peer, **fields))

    def publish(self, command: events.CommandReceived, courses: dict[int, alike.Course | None]) -> None:
        follower = self.follower
        if self.peer and not (follower is not None and follower.has_ended() and follower.follow(command, courses)):
            self.part()
            self.clock.at(self.network_us, self.hear, self.peer, command)

    def send(self, effect: bus_events.Send) -> None:
        if self.follower is None or not isinstance(effect.message, wire.Replay):  # which is of what it is doing
            self.clock.at(self.network_us, self._take, effect)

    def hear(self, peer: str, command: events.CommandReceived) -> None:
        """Take a command, published or resent."""
        if self.peer == peer:
            self.feed(replace(command, at_ms=self.now_ms))

    def answer(self, answer: events.Answer) -> bus_events.PeerAnswer:
        seq, outcome = answer.seq, answer.outcome
        return bus_events.PeerAnswer(peer=self.peer, origin=answer.epoch, seq=seq, outcome=outcome, rule=answer.rule)

    def _take(self, sent: bus_events.Send) -> None:
        if self.peer != sent.peer:
            return
        match sent.message:
            case wire.Welcome():
                self._send(bus_events.JoinReceived)
            case wire.Snapshot(desired=desired):
                now_ms, epoch = self.now_ms, sent.epoch
                self.feed(events.SnapshotReceived(at_ms=now_ms, epoch=epoch, seq=sent.seq, desired=desired))
            case wire.Replay(records=records):
                for record in records:
                    self.hear(sent.peer, alike.command(sent.epoch, record.origin, record.seq, record.envelope))
            case wire.Rejoin():
                self.clock.at(AGAIN_US, self._connect_again, sent.peer)

    def _connect_again(self, peer: str) -> None:
        if self.peer == peer:  # it was told more than once
            self.connect()


class SimulatedBus:
    """The trainer and its bus. Its log keeps `state`."""

    def __init__(self, run: Simulation) -> None:
        self.run, self.model, self.clock = run, run.model, run.clock
        self.state = CoordinatorState()
        self.alive = self._waits = False
        self._life = self._tried = 0
        self._turns = False  # at once
        # What a sync leads to if all goes well, and in which situation.
        self._rehearsed: tuple[alike.Situation, list[alike.Course]] | None = None
        self._inbox: list[bus_events.CoordinatorEvent] = []
        self._answers: list[bus_events.PeerAnswer] = []
        self.expected: list[alike.Expected] = []  # those that come alike, the last one first
        self._deadline_us: int | None = None

    def open(self) -> None:
        """The trainer starts, perhaps again."""
        self.alive, self._waits, self._turns, self._life = True, True, False, self._life + 1
        settings = convert(self.model.bus, bus_events.CoordinatorSettings, from_attributes=True)
        at_ns, logic = self.clock.now * 1000, coordinator.LOGIC
        self.receive(bus_events.Opened(at_us=0, at_ns=at_ns, run=alike.RUN, settings=settings, logic=logic))
        for agent in self.run.agents.values() if self._life > 1 else ():
            agent.connect()
        if self._life == 1:
            self.run.fail("", "trainer", self.die)

    def die(self, lasts: Duration) -> None:
        if self.alive:
            self.alive, self._inbox, self._answers, self._deadline_us = False, [], [], None
            for agent in self.run.agents.values():
                agent.lose_bus()
            self.expected.clear()
            self.run.after(lasts, "", "trainer back", self.open)

    def _sync(self, life: int) -> None:
        if not self.alive or life != self._life:
            return
        policy, self._tried = self.model.policy, self._tried + 1
        quorum = self.model.fleet.replicas if policy.quorum == "all" else policy.quorum
        requested = bus_events.SyncRequested(
            at_us=self.clock.now,
            at_ns=self.clock.now * 1000,
            ticket=self._tried,
            version=self._tried,
            source=Checkpoint(f"step_{self._tried}"),
            manifest=None,
            in_flight=policy.in_flight,
            quorum=quorum if isinstance(quorum, int) else None,
            timeout_ms=round(policy.timeout * 1000),
            on_unreachable=policy.absent,
            adapter=AdapterRequest(name="policy", keep=policy.keep) if policy.sync == "adapter" else None,
        )
        followers, ended_us = self.run.gather(), None
        if followers and self._tried not in self.run.recorded:
            if self._rehearsed is None or self._rehearsed[0] is not followers[0].situation:
                self._rehearsed = followers[0].situation, alike.rehearsed(followers, self.state, requested)
            ended_us = alike.pass_through(followers, self._rehearsed[1], self.clock)
        if ended_us is None:
            self.receive(requested)
        else:
            self.run.costs.add_sync(self.clock.now, ended_us)
            self.clock.at(ended_us - self.clock.now, self._plan_sync, life)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _await_expected(self) -> None:
        """Plan a turn for the last answer that comes alike. Those before it change nothing by themselves."""
        if self.expected:
            self.clock.at(self.expected[0][0] - self.clock.now, self._plan_turn)

    def forget(self, answer: alike.Expected) -> None:
        if answer in self.expected:
            self.expected.remove(answer)
            self._await_expected()

    def _plan_turn(self) -> None:
        if not self._turns:
            self._turns = True
            self.clock.at_last(self._turn, self._life)

    def _turn(self, life: int) -> None:
        if not self.alive or life != self._life:
            return
        now_us, self._turns = self.clock.now, False
        while self.expected and self.expected[-1][0] <= now_us:
            self._answers.append(self.expected.pop()[1])
        answered = [bus_events.AnswersReceived(at_us=0, answers=tuple(self._answers))] if self._answers else []
        batch, self._inbox, self._answers = [*answered, *self._inbox], [], []
        deadline_us = coordinator.next_deadline(self.state)
        if deadline_us is not None and now_us >= deadline_us:
            batch.append(bus_events.TimerFired(at_us=0))
        for event in batch:
            timed = replace(event, at_us=now_us)
            self.state, effects = coordinator.decide(self.state, timed)
            self.run.costs.decided_by_bus(timed, effects)
            for effect in effects:
                self._perform(effect)
        deadline_us = coordinator.next_deadline(self.state)
        if deadline_us is not None and deadline_us != self._deadline_us:
            self._deadline_us = deadline_us
            self.clock.at(max(0, deadline_us - now_us), self._plan_turn)
        if self._waits and all(self._is_live(agent.name) for agent in self.run.agents.values() if agent.peer):
            self._waits = False
            self._plan_sync(self._life)

    def _is_live(self, name: str) -> bool:
        return name in self.state.members and self.state.members[name].state == "live"

    def _plan_sync(self, life: int) -> None:
        self.run.after(self.model.step, "", "step", self._sync, life)

    def _perform(self, effect: bus_events.CoordinatorEffect) -> None:
        match effect:
            case bus_events.Publish():
                command = alike.command(effect.epoch, effect.epoch, effect.seq, effect.envelope)
                if isinstance(command.command, WeightSync | AdapterSync):
                    self.run.reached(self._tried, command.command.phase)
                courses: dict[int, alike.Course | None] = {}
                for agent in self.run.agents.values():
                    agent.publish(command, courses)
                self.expected.sort(key=itemgetter(0), reverse=True)
                self._await_expected()
            case bus_events.Send(peer=peer) | bus_events.Ping(peer=peer):
                agent = self.run.agents[agent_of(peer)]
                if peer not in (agent.peer, agent.standing):
                    self.receive(bus_events.PeerLost(at_us=0, peer=peer, reason="unreachable"))
                elif isinstance(effect, bus_events.Send) and agent.peer:
                    agent.send(effect)
            case bus_events.Conclude(report=SyncReport()):
                self.run.reached(self._tried, "step")
                self._plan_sync(self._life)
            case bus_events.Refuse(reason=reason):
                raise ConfigError(f"the bus refuses the sync: {reason}")

    def receive(self, message: bus_events.CoordinatorEvent | bus_events.PeerAnswer) -> None:
        """Have it decided, together with all else that arrives at this moment."""
        if not self.alive:
            return
        if isinstance(message, bus_events.PeerAnswer):
            self._answers.append(message)
        else:
            self._inbox.append(message)
        self._plan_turn()
