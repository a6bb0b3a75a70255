"""Runs a modelled fleet: the machines of agents and coordinator decide, and everything around them is drawn.

The shells here do what the real ones do, as far as it costs time: they ask their machine, make calls and send messages.
"""

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

from msgspec import convert
from msgspec.structs import replace

from controlplane.machine import coordinator
from controlplane.machine import events as bus_events
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.simulate.costs import CostCounter, RunCosts
from controlplane.simulate.fleet_model import Duration, FleetModel, RecordedFailure
from controlplane.simulate.luck import NO_ANSWER, RETURNED, SECOND, DrawnCalls, Luck
from controlplane.simulate.modelled_engine import ModelledEngine
from controlplane.simulate.quiet import TURN_US, QuietSyncs
from controlplane.simulate.virtual_clock import VirtualClock
from schemas import events, wire
from schemas.agent_status import AgentStatus
from schemas.commands import AdapterRequest, AdapterSync, Checkpoint, Command, Target, UnknownCommand, WeightSync
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
        self._failures_us: list[int] = []  # a heap
        self.recorded: defaultdict[int, list[RecordedFailure]] = defaultdict(list)  # by sync: what is still to come
        for failure in model.failures.recorded:
            self.recorded[failure.sync].append(failure)
        self.fixed_network_us = round(model.network * SECOND) if isinstance(model.network, float | int) else None
        self.quiet = QuietSyncs(self)
        self.bus = SimulatedBus(self)
        agents = [SimulatedAgent(self, replica) for replica in range(model.fleet.replicas)]
        self.agents = {agent.name: agent for agent in agents}

    def run(self) -> RunCosts:
        self.bus.open()
        for agent in self.agents.values():
            agent.begin()
            agent.plan_failures()
        while self.costs.syncs < self.model.steps:
            self.clock.step()
            if self.clock.now > WEEK_US * (self.costs.syncs + 1):
                raise ConfigError(f"after {self.costs.syncs} syncs there is less than one a week: it fails too often")
        return self.costs.finish()

    def after(self, duration: Duration, place: str, what: str, act: Callable[..., None], *args: Any) -> None:
        """Have something happen after a time that is drawn."""
        self.clock.at(self.luck.us(duration, place, what), act, *args)

    def fail(self, per_hour: float, place: str, what: str, act: Callable[[Duration], None], lasts: Duration) -> None:
        """Have something fail at random, again and again."""

        def again() -> None:
            self.fail(per_hour, place, what, act, lasts)
            act(lasts)

        if per_hour:
            self._fail_after(self.luck.of(place, what).expovariate(per_hour / 3600), again)

    def _fail_after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        wait_us = round(seconds * SECOND)
        heappush(self._failures_us, self.clock.now + wait_us)
        self.clock.at(wait_us, self._fails, act, *args)

    def _fails(self, act: Callable[..., None], *args: Any) -> None:
        heappop(self._failures_us)
        self.quiet.failed()
        act(*args)

    def reached(self, sync: int, phase: str) -> None:
        """Have fail what failed in this part of a recorded run, or in one that this run has left out."""
        for failure in self.recorded.pop(sync, []):
            agent = self.agents.get(failure.agent)
            if phase not in (failure.phase, "step"):
                self.recorded[sync].append(failure)
            elif failure.what == "trainer":
                self._fail_after(failure.after, self.bus.die, failure.lasts)
            elif agent is not None:
                self._fail_after(failure.after, agent.fail, failure.what, failure.lasts)

    def fails_by(self, at_us: int) -> bool:
        """Return whether anything fails up to a moment."""
        return bool(self._failures_us) and self._failures_us[0] <= at_us


class SimulatedAgent:
    """The agent of a replica's first node, and the engine beside it. Its journal keeps `state`."""

    def __init__(self, run: Simulation, replica: int) -> None:
        self.run, self.model, self.clock, size = run, run.model, run.clock, run.model.fleet
        self.identity = Identity(replica=replica, node_rank=0, nnodes=size.nodes, gpus_per_node=size.gpus)
        self.name = self.identity.agent
        self.engine, self.calls = ModelledEngine(size.engine), DrawnCalls(run.model, run.luck, self.name)
        self.state = AgentState()
        self.alive = self._cut = self._beats = False
        self.peer = ""  # its connection; empty while there is none
        self.standing = ""  # one that carries nothing, and that the bus can't tell from another
        self._life = self._connections = self._call_id = 0
        self._arrivals_us: dict[str, int] = {}
        self._deadline_ms: int | None = None
        self._seen: events.Observation | None = None
        self._sent: tuple[int, AgentStatus] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is connected, and makes no call."""
        return bool(self.peer) and not self._call_id

    @property
    def _trigger(self) -> events.CommandReceived | None:
        return self.state.activity.trigger if self.state.activity is not None else None

    @property
    def now_ms(self) -> int:
        return self.clock.now // 1000

    # --- life and failures --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.alive, self._life, self._seen = True, self._life + 1, None
        self.feed(events.Started(at_ms=self.now_ms, identity=self.identity, incarnation=f"life {self._life}"))
        self._look()
        self.connect()

    def plan_failures(self) -> None:
        failures = self.model.failures
        self.run.fail(failures.agent_per_hour, self.name, "agent", self._die, failures.agent_s)
        self.run.fail(failures.cut_per_hour, self.name, "cut", self._be_cut_off, failures.cut_s)
        self.run.fail(failures.engine_per_hour, self.name, "engine", self._lose_engine, failures.engine_s)

    def fail(self, what: str, lasts: Duration) -> None:
        """Have something fail that an agent has seen fail, and for as long as it saw that."""
        match what:
            case "engine":
                self._lose_engine(lasts, seen_us=0)
            case "agent":
                self._die(lasts)
            case _:
                self._be_cut_off(lasts, connection_stands=what == "silence")

    def _die(self, lasts: Duration) -> None:
        """The call in flight is carried out all the same, or not."""
        if self.alive:
            activity = self.state.activity
            if activity is not None and self.run.luck.of(self.name, "dies").random() < 0.5:
                self.engine.carry_out(activity.calls[0], RETURNED)
            self.alive, self._call_id = False, 0
            self.lose_bus()
            self.run.after(lasts, self.name, "agent back", self.begin)

    def _be_cut_off(self, lasts: Duration, connection_stands: bool = False) -> None:
        if not self._cut:
            self._cut, peer = True, self.peer
            self.lose_bus()
            self.standing = peer if connection_stands else ""
            self.run.after(lasts, self.name, "cut off", self._be_back)

    def _be_back(self) -> None:
        self._cut = False
        self.connect()

    def _lose_engine(self, lasts: Duration, seen_us: int = AGAIN_US) -> None:
        if self.engine.ready:
            self.engine.end()
            self._return(self._call_id, events.Fault("engine_error", "the engine died."))
            self.clock.at(seen_us, self._look)
            self.run.after(lasts, self.name, "engine back", self._regain_engine, seen_us)

    def _regain_engine(self, seen_us: int) -> None:
        self.engine.ready = True
        self.clock.at(seen_us, self._look)

    def _look(self) -> None:
        seen = self.engine.observe()
        if not self._call_id and seen != self._seen:
            self._seen = seen
            self.feed(events.EngineObserved(at_ms=self.now_ms, observation=seen))

    # --- the machine --------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Decide, and perform. A heartbeat follows if anything changed: one that repeats the last is no event."""
        if not self.alive:
            return
        before = self.state
        self.state, effects = machine.decide(before, event)
        for effect in effects:
            self._perform(effect)
        if self.state is before:
            return
        self.run.costs.decided_by_agent(self.name, event, self.state)
        deadline_ms = machine.next_deadline(self.state)
        if deadline_ms is not None and deadline_ms != self._deadline_ms:
            self._deadline_ms = deadline_ms
            self.clock.at(max(0, deadline_ms * 1000 - self.clock.now), self._tick, deadline_ms)
        if not self._beats:
            self._beats, interval_us = True, self.model.bus.heartbeat_ms * 1000
            self.clock.at(interval_us - self.clock.now % interval_us, self._beat)

    def _tick(self, deadline_ms: int) -> None:
        if self._deadline_ms == deadline_ms:
            self._deadline_ms = None
            self.feed(events.Tick(at_ms=self.now_ms))

    def _beat(self) -> None:
        self._beats, status = False, (self.state.seq, status_of(self.state))
        if self.peer and status != self._sent:
            self._sent = status
            self._send(status[1], status[0])

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.Perform():
                self._call(effect.call_id, effect.call)
            case events.Answer():
                self._send(effect)
            case events.RequestResend():
                self._send(wire.ResendRequest(first=effect.first, credit=64))
            case events.RequestSnapshot():
                self._send(wire.Join())
            case events.Restart():
                self._send(wire.Goodbye())
                self.alive, self._call_id = False, 0
                self.clock.at(0, self.begin)

    def _call(self, call_id: int, call: events.Call) -> None:
        self._call_id = call_id
        result, took_us = self.calls.draw(call) if self.engine.ready else NO_ANSWER
        if self._trigger is not None:
            self.run.quiet.called(self.name, call)
        self.clock.at(took_us, self._return, call_id, result, call)

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

    # --- the network --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Say hello on a new connection, if the bus can be reached."""
        self.lose_bus()
        if self.alive and not self._cut and self.run.bus.alive:
            self._connections, self._sent = self._connections + 1, None
            self.peer = f"{self.name}/life {self._life}/{self._connections}"
            hello = wire.Hello(
                identity=self.identity, incarnation=f"life {self._life}", journal=self.name, host="modelled", pid=1
            )
            self._send(replace(hello, attempt=self._connections))

    def lose_bus(self) -> None:
        """The connection breaks: the lease runs out without another one, and with a head the bus notices."""
        peer, self.peer, self.standing = self.peer, "", ""
        self.clock.at(self.model.bus.lease_ms * 1000, self._end_lease, self._connections)
        if peer:
            silent_us, heads_us = self.model.bus.agent_timeout_ms * 1000, self.model.bus.head_interval_ms * 1000
            self.clock.at(silent_us + -(self.clock.now + silent_us) % heads_us, self.run.bus.miss, peer)

    def _end_lease(self, connections: int) -> None:
        if not self.peer and self._connections == connections:
            self.feed(events.LeaseExpired(at_ms=self.now_ms))

    def _send(self, message: wire.Upward | events.Answer, seq: int = 0) -> None:
        if self.peer:
            self.deliver("up", self.run.bus.receive, self.peer, message, seq)

    def deliver(self, connection: str, act: Callable[..., None], *args: Any) -> None:
        """Deliver a message on a connection, which keeps order."""
        arrival_us = self.clock.now + self.network_us()
        arrival_us = self._arrivals_us[connection] = max(self._arrivals_us.get(connection, 0), arrival_us)
        self.clock.at(arrival_us - self.clock.now, act, *args)

    def network_us(self) -> int:
        """Return how long a message is on its way."""
        fixed_us = self.run.fixed_network_us
        return self.run.luck.us(self.model.network, self.name, "network") if fixed_us is None else fixed_us

    def on_command(self, peer: str, epoch: int, record: wire.CommandRecord, command: Command | UnknownCommand) -> None:
        """Take a command, published or resent."""
        if self.peer == peer:
            received = events.CommandReceived(
                at_ms=self.now_ms,
                epoch=epoch,
                origin=record.origin,
                seq=record.seq,
                ttl_ms=record.envelope.ttl_ms,
                command=command,
                target=record.envelope.target,
            )
            self.feed(received)

    def on_message(self, peer: str, epoch: int, seq: int, message: wire.Downward) -> None:
        """Take a control message."""
        if self.peer != peer:
            return
        match message:
            case wire.Welcome():
                self._send(wire.Join())
            case wire.Snapshot(desired=desired):
                self.feed(events.SnapshotReceived(at_ms=self.now_ms, epoch=epoch, seq=seq, desired=desired))
            case wire.Replay(records=records):
                for record in records:  # most often of what it is doing: it answers that when it is done
                    if (trigger := self._trigger) is None or (trigger.epoch, trigger.seq) != (epoch, record.seq):
                        self.on_command(peer, epoch, record, wire.decode_command(record.envelope.body))
            case wire.Rejoin():
                self.clock.at(AGAIN_US, self._connect_again, peer)

    def _connect_again(self, peer: str) -> None:
        if self.peer == peer:  # it was told more than once
            self.connect()


class SimulatedBus:
    """The trainer and its bus. Its log keeps `state`."""

    def __init__(self, run: Simulation) -> None:
        self.run, self.model, self.clock = run, run.model, run.clock
        self.state = CoordinatorState()
        self.alive = self._waits = False
        self._life = self._tried = self._turn_us = 0  # the last turn, or the next one if it is planned
        self._inbox: list[bus_events.CoordinatorEvent] = []
        self._answers: list[bus_events.PeerAnswer] = []
        self._deadline_us: int | None = None

    # --- the trainer --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The trainer starts, perhaps again."""
        self.alive, self._waits, self._life, self._turn_us = True, True, self._life + 1, self.clock.now - TURN_US
        settings = convert(self.model.bus, bus_events.CoordinatorSettings, from_attributes=True)
        at_ns, logic = self.clock.now * 1000, coordinator.LOGIC
        self._feed(bus_events.Opened(at_us=0, at_ns=at_ns, run="simulated", settings=settings, logic=logic))
        for agent in self.run.agents.values() if self._life > 1 else ():
            agent.connect()
        if self._life == 1:
            failures = self.model.failures
            self.run.fail(failures.trainer_per_hour, "", "trainer", self.die, failures.trainer_s)

    def die(self, lasts: Duration) -> None:
        """The trainer dies, with its bus."""
        if self.alive:
            self.alive, self._inbox, self._answers, self._deadline_us = False, [], [], None
            for agent in self.run.agents.values():
                agent.lose_bus()
            self.run.after(lasts, "", "trainer back", self.open)

    def _sync(self, life: int) -> None:
        if not self.alive or life != self._life:
            return
        policy, self._tried = self.model.policy, self._tried + 1
        ended_us = None if self._tried in self.run.recorded else self.run.quiet.draw()
        if ended_us is not None:
            self.clock.at(ended_us - self.clock.now, self._plan_sync, life)
            return
        quorum = self.model.fleet.replicas if policy.quorum == "all" else policy.quorum
        requested = bus_events.SyncRequested(
            at_us=0,
            at_ns=self.clock.now * 1000,
            ticket=self._tried,
            version=self._tried,
            source=Checkpoint(f"step_{self._tried}"),
            manifest=None,
            in_flight=policy.in_flight,
            quorum=quorum if isinstance(quorum, int) else None,
            target=Target(),
            timeout_ms=round(policy.timeout * 1000),
            on_unreachable=policy.absent,
            adapter=AdapterRequest(name="policy", keep=policy.keep) if policy.sync == "adapter" else None,
        )
        self._feed(requested)

    # --- the machine --------------------------------------------------------------------------------------------------

    def _feed(self, event: bus_events.CoordinatorEvent) -> None:
        """Have an event decided in the next turn, at the time of that turn."""
        self._take_answers()
        self._inbox.append(event)
        self._plan_turn()

    def _take_answers(self) -> None:
        if self._answers:
            self._inbox.append(bus_events.AnswersReceived(at_us=0, answers=tuple(self._answers)))
            self._answers = []

    def _plan_turn(self) -> None:
        now_us = self.clock.now
        if self._turn_us <= now_us:
            self._turn_us = max(now_us + 1, self._turn_us + TURN_US)
            self.clock.at(self._turn_us - now_us, self._turn, self._life)

    def _turn(self, life: int) -> None:
        if not self.alive or life != self._life:
            return
        now_us = self.clock.now
        self._take_answers()
        batch, self._inbox = self._inbox, []
        deadline_us = coordinator.next_deadline(self.state)
        if deadline_us is not None and now_us >= deadline_us:
            batch.append(bus_events.TimerFired(at_us=now_us))
        for event in batch:
            self.state, effects = coordinator.decide(self.state, timed := replace(event, at_us=now_us))
            self.run.costs.decided_by_bus(timed, effects)
            for effect in effects:
                self._perform(effect)
        deadline_us = coordinator.next_deadline(self.state)
        if deadline_us is not None and deadline_us != self._deadline_us:
            self._deadline_us = deadline_us
            self.clock.at(max(0, deadline_us - now_us), self._wake, deadline_us)
        if self._waits and all(self._is_live(agent.name) for agent in self.run.agents.values() if agent.peer):
            self._waits = False
            self._plan_sync(self._life)

    def _is_live(self, name: str) -> bool:
        return name in self.state.members and self.state.members[name].state == "live"

    def _wake(self, deadline_us: int) -> None:
        if self.alive and self._deadline_us == deadline_us:
            self._deadline_us = None
            self._plan_turn()

    def _plan_sync(self, life: int) -> None:
        self.run.after(self.model.step, "", "step", self._sync, life)

    def _perform(self, effect: bus_events.CoordinatorEffect) -> None:
        match effect:
            case bus_events.Publish(epoch=epoch, seq=seq, envelope=envelope):
                record = wire.CommandRecord(origin=epoch, seq=seq, envelope=envelope)
                command = wire.decode_command(envelope.body)
                if isinstance(command, WeightSync | AdapterSync):
                    self.run.quiet.published(command.phase)
                    self.run.reached(self._tried, command.phase)
                for agent in self.run.agents.values():
                    if agent.peer:
                        agent.deliver("publications", agent.on_command, agent.peer, epoch, record, command)
            case bus_events.Send(peer=peer) | bus_events.Ping(peer=peer):
                agent = self.run.agents[agent_of(peer)]
                if peer not in (agent.peer, agent.standing):
                    self._feed(bus_events.PeerLost(at_us=0, peer=peer, reason="unreachable"))
                elif isinstance(effect, bus_events.Send) and agent.peer:
                    agent.deliver("down", agent.on_message, peer, effect.epoch, effect.seq, effect.message)
            case bus_events.Conclude(report=SyncReport() as report):
                self.run.quiet.concluded(report)
                self.run.reached(self._tried, "step")
                self._plan_sync(self._life)
            case bus_events.Refuse(reason=reason):
                raise ConfigError(f"the bus refuses the sync: {reason}")

    def receive(self, peer: str, message: wire.Upward | events.Answer, seq: int) -> None:
        """Take a message of an agent."""
        if not self.alive:
            return
        match message:
            case events.Answer(epoch=origin, outcome=outcome, rule=rule):
                answer = bus_events.PeerAnswer(peer=peer, origin=origin, seq=message.seq, outcome=outcome, rule=rule)
                self._answers.append(answer)
                self._plan_turn()
            case AgentStatus():
                self._feed(bus_events.StatusReceived(at_us=0, peer=peer, seq=seq, status=message))
            case wire.Hello():
                self._feed(bus_events.HelloReceived(at_us=0, peer=peer, hello=message, recorded_decisions=0))
            case wire.Join():
                self._feed(bus_events.JoinReceived(at_us=0, peer=peer))
            case wire.Goodbye():
                self._feed(bus_events.PeerLost(at_us=0, peer=peer, reason="left"))
            case wire.ResendRequest(first=first, credit=credit):
                self._feed(bus_events.ResendRequested(at_us=0, peer=peer, first=first, credit=credit))

    def miss(self, peer: str) -> None:
        """A connection has carried nothing for too long."""
        if self.alive:
            self._feed(bus_events.PeerLost(at_us=0, peer=peer, reason="silent"))
