"""Fits the model of a fleet to a recorded run: what was measured there is what is drawn from."""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Final

from msgspec.msgpack import Decoder
from msgspec.structs import replace

from controlplane.machine import events as bus_events
from controlplane.record.entries import AgentMark, LogEntry, LogItem
from controlplane.simulate.costs import CostCounter, RunCosts
from controlplane.simulate.fleet_model import CallTimes, Tree
from controlplane.simulate.modelled_engine import KINDS
from schemas import events
from schemas.agent_status import Clock
from schemas.commands import AdapterSync, WeightSync
from schemas.config import BusConfig
from schemas.errors import ConfigError
from schemas.formatting import agent_order
from schemas.identity import ROLLOUT, Identity, agent_of, identity_of
from schemas.outcomes import Missing
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command
from workers.machine.decide import decide
from workers.machine.state import Activity, AgentState, call_name

SAMPLES_MAX: Final = 1_000
"""Values that are kept of one distribution, or of one replica's calls of a kind."""
DAY_S: Final = 86_400.0
"""The longest time that a model has."""
_AS_MODELLED: Final = {"await_push": "load"}
"""Weights that the trainer sends take as long to arrive as it takes to load them."""
_TOUCHED: Final = ("engine_error", "unanswered")
"""Faults after which an engine may not be as it was."""
_state_decoder = Decoder(AgentState)


def fit(entries: Iterable[LogItem]) -> tuple[Tree, RunCosts]:
    """Return the model of a run, as a tree that a file can change, and what the run cost.

    Args:
        entries: Of its log.

    Raises:
        ConfigError: It has no sync that ended.
    """
    fitted = _Fitted()
    for entry in entries:
        if isinstance(entry, AgentMark):  # of a log that lacks its beginning
            fitted.begin_agent(entry)
        elif isinstance(entry, LogEntry) and entry.agent:
            fitted.add_agent(entry)
        elif isinstance(entry, LogEntry):
            fitted.add_bus(entry)
    if not fitted.costs.syncs:
        raise ConfigError("the log has no sync that has ended: there is nothing to fit a model to")
    costs = fitted.costs.finish()
    return fitted.tree(costs), costs


class _RecordedAgent:
    """What was read of one agent. Times are in µs on the bus's wall clock."""

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.clock: Clock | None = None
        self.incarnation = self.journal = self.instance = ""  # the last of its engine that answered
        self.state = AgentState()
        self.heard_us: int | None = None  # its last decision
        self.answered_us = self.joined_us = 0  # the end of the last command that it had answered; its last join
        self.lost: tuple[str, int] | None = None  # how the bus lost it, and since when it is away
        self.away_us = 0  # since when it was away, or had ended, the last time
        self.ended_us = 0  # when an earlier incarnation had ended, as the bus saw it
        self.down_us: int | None = None  # since when its engine does not answer
        self.calls: defaultdict[str, deque[tuple[float, ...]]] = defaultdict(lambda: deque(maxlen=SAMPLES_MAX))


class _Fitted:
    """What was read so far. The bus's times are shifted to its wall clock, since each life has a clock of its own."""

    def __init__(self) -> None:
        self.costs = CostCounter()
        self._agents: defaultdict[str, _RecordedAgent] = defaultdict(_RecordedAgent)
        self._policy: Tree = {}
        self._bus: dict[str, int] = {}
        self._engine = ""
        self._shift_us = self._now_us = self._tried = 0
        self._ended_us: int | None = None  # the last sync; before the first one, the last agent has joined
        self._gathers = True
        self._steps: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._parts: list[tuple[int, int, str]] = []  # when a phase of which sync began (µs), or the step after it
        self._failed_us: list[tuple[str, str, int, int]] = []  # what failed, whose, from when to when

    def add_bus(self, entry: LogEntry) -> None:
        event: bus_events.CoordinatorEvent = entry.typed_event()  # type: ignore[assignment]
        effects: bus_events.CoordinatorEffects = entry.typed_effects()  # type: ignore[assignment]
        if isinstance(event, bus_events.Opened):
            self._open(event, entry.at_ns // 1000 - event.at_us)
        event = replace(event, at_us=event.at_us + self._shift_us)
        self._now_us = event.at_us
        self.costs.decided_by_bus(event, effects)
        match event:
            case bus_events.SyncRequested():
                self._add_request(event)
            case bus_events.StatusReceived(peer=peer, status=status) if status.clock is not None:
                self._agents[agent_of(peer)].clock = status.clock
            case bus_events.HelloReceived() | bus_events.PeerLost() | bus_events.JoinReceived():
                self._add_connection(event, agent_of(event.peer))
        for effect in effects:
            match effect:
                case bus_events.Publish(envelope=envelope):
                    command = decode_command(envelope.body)
                    if isinstance(command, WeightSync | AdapterSync):
                        self._tried += command.phase == "prepare"
                        self._parts.append((event.at_us, self._tried, command.phase))
                case bus_events.Conclude(report=SyncReport()):
                    self._ended_us = event.at_us
                    self._parts.append((event.at_us, self._tried, "step"))
                case bus_events.Conclude(report=Report(outcomes=outcomes)):
                    for line in outcomes:
                        if not isinstance(line.conclusion, Missing):
                            self._agents[line.agent].answered_us = event.at_us

    def _add_connection(
        self, event: bus_events.HelloReceived | bus_events.PeerLost | bus_events.JoinReceived, name: str
    ) -> None:
        agent, now_us = self._agents[name], event.at_us
        half_us = self._bus["agent_timeout_ms"] * 500  # what was silent for less than all of it, was for half of it
        heads_us = self._bus["head_interval_ms"] * 1000  # with each head, the bus looks which agents are silent
        match event:
            case bus_events.HelloReceived(hello=hello):
                if agent.incarnation not in ("", hello.incarnation):
                    ended_us = now_us - half_us if agent.lost is None else agent.lost[1]
                    agent.ended_us, agent.lost = max(ended_us, agent.answered_us), None
                agent.identity, agent.incarnation = hello.identity, hello.incarnation
            case bus_events.PeerLost(reason="silent" | "unreachable" as reason) if agent.lost is None:
                what, unheard_us = ("cut", half_us) if reason == "unreachable" else ("silence", 2 * half_us + heads_us)
                agent.away_us = max(now_us - unheard_us, agent.answered_us, agent.heard_us or 0)
                agent.lost = what, agent.away_us
            case bus_events.JoinReceived():
                agent.joined_us = now_us
                if self._gathers:
                    self._ended_us = now_us
                if agent.lost is not None:
                    self._failed_us.append((agent.lost[0], name, agent.lost[1], now_us))
                    agent.lost = None

    def _open(self, event: bus_events.Opened, shift_us: int) -> None:
        if self._now_us:
            self._failed_us.append(("trainer", "", self._now_us, event.at_us + shift_us))
        self._shift_us, self._ended_us, self._gathers = shift_us, None, True
        found = {name: getattr(event.settings, name, None) for name in BusConfig.__struct_fields__}
        self._bus = {name: value for name, value in found.items() if isinstance(value, int)}

    def _add_request(self, request: bus_events.SyncRequested) -> None:
        self._gathers = False
        if self._ended_us is not None:
            self._steps.append((request.at_us - self._ended_us) / 1e6)
        self._policy = {
            "sync": "weights" if request.adapter is None else "adapter",
            "quorum": request.quorum or "majority",
            "absent": request.on_unreachable,
            "in_flight": request.in_flight,
            "timeout": request.timeout_ms / 1000,
            "keep": 2 if request.adapter is None else request.adapter.keep,
        }

    def begin_agent(self, mark: AgentMark) -> None:
        """Begin with the state of an agent, unless it is known."""
        agent = self._agents[mark.agent]
        if not agent.journal:
            agent.journal, agent.state = mark.journal, _state_decoder.decode(mark.state)

    def add_agent(self, entry: LogEntry) -> None:
        """Add a decision of an agent beside an engine."""
        name, place = entry.agent, identity_of(entry.agent)
        if place.node_rank or place.role != ROLLOUT:
            return
        event: events.Event = entry.typed_event()  # type: ignore[assignment]
        agent = self._agents[name]
        before = agent.state if agent.journal == entry.journal else AgentState()
        agent.journal, (agent.state, _) = entry.journal, decide(before, event)
        self.costs.decided_by_agent(name, event, agent.state)
        at_us = agent.clock.bus_ns(event.at_ms) // 1000 if agent.clock is not None else 0
        if isinstance(event, events.Started) and agent.heard_us is not None:  # again
            agent.away_us, agent.ended_us = max(agent.heard_us, agent.ended_us), 0
            agent.down_us = agent.away_us if agent.down_us is None else agent.down_us  # perhaps it ended with its agent
            self._failed_us.append(("agent", name, agent.away_us, at_us))
            self._failed_us.append(("cut", name, agent.away_us, agent.joined_us))  # it has looked at its engine first
        self._add_engine(name, agent, at_us)
        agent.heard_us = at_us
        answers = before.engine.tokenizer == "present"
        if isinstance(event, events.EngineReturned | events.Started) and before.activity is not None and answers:
            self._add_call(agent, before.activity, event, at_us)

    def _add_call(
        self, agent: _RecordedAgent, activity: Activity, event: events.EngineReturned | events.Started, at_us: int
    ) -> None:
        """A call has ended. Of one during which the agent went away, it is only known that it had not ended before."""
        result = event.result if isinstance(event, events.EngineReturned) else None
        fault = result.kind if isinstance(result, events.Fault) else ""
        call = call_name(activity.calls[0])
        samples, took_s = agent.calls[_AS_MODELLED.get(call, call)], max(0, event.at_ms - activity.since_ms) / 1000
        until_away_s = took_s - (at_us - agent.away_us) / 1e6
        if 0 <= until_away_s < took_s and samples:
            took_s, fault = until_away_s + samples[-1][0], ""
        samples.append((took_s, float(fault in _TOUCHED), float(fault not in ("", *_TOUCHED))))

    def _add_engine(self, name: str, agent: _RecordedAgent, at_us: int) -> None:
        engine = agent.state.engine
        if engine.tokenizer != "present":
            agent.down_us = at_us if agent.down_us is None and agent.instance else agent.down_us
            return
        instance = engine.instance or agent.instance
        if agent.instance not in ("", instance):
            self._failed_us.append(("engine", name, at_us if agent.down_us is None else agent.down_us, at_us))
        self._engine, agent.instance, agent.down_us = engine.name, instance, None

    def tree(self, costs: RunCosts) -> Tree:
        places = [agent.identity for agent in self._agents.values() if agent.identity is not None]
        primaries = [place for place in places if place.role == ROLLOUT and not place.node_rank]
        return {
            "steps": costs.syncs,
            "step": [list(self._steps) or [0.0]],
            "fleet": {
                "replicas": len(primaries),
                "nodes": primaries[0].nnodes,
                "gpus": primaries[0].gpus_per_node,
                "engine": next((kind for kind in KINDS if kind in self._engine), KINDS[0]),
            },
            "calls": self._in_order(0),
            "failures": {
                "calls": self._in_order(1),
                "refused": self._in_order(2),
                "recorded": list(self._recorded()),
            },
            "policy": self._policy,
            "bus": self._bus,
        }

    def _in_order(self, part: int) -> Tree:
        """Return one part of the samples of each modelled call, replica by replica."""
        agents = [self._agents[name] for name in sorted(self._agents, key=agent_order)]
        calls = {call for agent in agents for call in agent.calls}.intersection(CallTimes.__struct_fields__)
        return {
            call: [[sample[part] for sample in agent.calls[call]] for agent in agents if call in agent.calls]
            for call in sorted(calls)
        }

    def _recorded(self) -> Iterator[Tree]:
        """Yield what failed since the first sync began, to the end of the log if it was not over."""
        for name, agent in self._agents.items():
            if agent.lost is not None:
                what, since_us = agent.lost
                self._failed_us.append((what if what == "silence" else "agent", name, since_us, self._now_us))
            if agent.down_us is not None:
                self._failed_us.append(("engine", name, agent.down_us, self._now_us))
        for what, whose, since_us, until_us in self._failed_us:
            at = bisect_right(self._parts, since_us, key=itemgetter(0))
            if at:
                began_us, sync, phase = self._parts[at - 1]
                after_s, lasts_s = (since_us - began_us) / 1e6, max(0, until_us - since_us) / 1e6
                times: Tree = {"after": min(DAY_S, after_s), "lasts": min(DAY_S, lasts_s)}
                yield {"what": what, "agent": whose, "sync": sync, "phase": phase, **times}
