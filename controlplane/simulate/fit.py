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
from workers.machine.state import Activity, AgentState, EngineState, call_name

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
            fitted.states.setdefault(entry.agent, (entry.journal, _state_decoder.decode(entry.state)))
        elif isinstance(entry, LogEntry) and entry.agent:
            fitted.add_agent(entry)
        elif isinstance(entry, LogEntry):
            fitted.add_bus(entry)
    if not fitted.costs.syncs:
        raise ConfigError("the log has no sync that has ended: there is nothing to fit a model to")
    costs = fitted.costs.finish()
    return fitted.tree(costs), costs


class _Series(defaultdict[str, defaultdict[str, deque[float]]]):
    """Values by kind and agent, the newest in order."""

    def __init__(self) -> None:
        super().__init__(lambda: defaultdict(lambda: deque(maxlen=SAMPLES_MAX)))

    def in_order(self) -> Tree:
        """Return the values of each modelled call, replica by replica."""
        return {
            call: [list(self[call][name]) for name in sorted(self[call], key=agent_order)]
            for call in CallTimes.__struct_fields__
            if call in self
        }


class _Fitted:
    """What was read so far. The bus's times are shifted to its wall clock, since each life has a clock of its own."""

    def __init__(self) -> None:
        self.costs = CostCounter()
        self.states: dict[str, tuple[str, AgentState]] = {}  # by agent: its journal, and the state after it
        self._places: dict[str, Identity] = {}
        self._policy: Tree = {}
        self._bus: dict[str, int] = {}
        self._engine = ""
        self._shift_us = self._now_us = self._tried = 0
        self._ended_us: int | None = None  # the last sync; before the first one, the last agent has joined
        self._gathers = True
        self._steps: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._calls, self._failed, self._refused = _Series(), _Series(), _Series()
        self._parts: list[tuple[int, int, str]] = []  # when a phase of which sync began (µs), or the step after it
        self._failed_us: list[tuple[str, str, int, int]] = []  # what failed, whose, from when to when
        self._lives: dict[str, str] = {}
        self._lost_us: dict[str, tuple[str, int]] = {}  # by agent: how the bus lost it, and since when it is away
        self._away_us: dict[str, int] = {}  # by agent: since when it was away, or had ended, the last time
        self._ended_by_us: dict[str, int] = {}  # by agent: the same of an earlier incarnation
        self._answered_us: dict[str, int] = {}  # by agent: when the last command that it had answered was over
        self._joined_us: dict[str, int] = {}
        self._heard_us: dict[str, int] = {}  # by agent: its last decision
        self._down_us: dict[str, int] = {}  # by agent: since when its engine does not answer
        self._clocks: dict[str, Clock] = {}

    # --- the bus ------------------------------------------------------------------------------------------------------

    def add_bus(self, entry: LogEntry) -> None:
        """Add a decision of the coordinator."""
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
                self._clocks[agent_of(peer)] = status.clock
            case bus_events.HelloReceived() | bus_events.PeerLost() | bus_events.JoinReceived():
                self._add_connection(event)
        for effect in effects:
            if isinstance(effect, bus_events.Publish):
                self._add_published(effect, event.at_us)
            elif isinstance(effect, bus_events.Conclude) and isinstance(effect.report, SyncReport):
                self._ended_us = event.at_us
                self._parts.append((event.at_us, self._tried, "step"))
            elif isinstance(effect, bus_events.Conclude) and isinstance(effect.report, Report):
                answered = (line.agent for line in effect.report.outcomes if not isinstance(line.conclusion, Missing))
                self._answered_us.update(dict.fromkeys(answered, event.at_us))

    def _add_connection(self, event: bus_events.HelloReceived | bus_events.PeerLost | bus_events.JoinReceived) -> None:
        half_us = self._bus["agent_timeout_ms"] * 500  # what was silent for less than all of it, was for half of it
        match event:
            case bus_events.HelloReceived(hello=hello):
                name = hello.identity.agent
                if self._lives.setdefault(name, hello.incarnation) != hello.incarnation:
                    _, ended_us = self._lost_us.pop(name, ("", event.at_us - half_us))
                    self._ended_by_us[name] = max(ended_us, self._answered_us.get(name, 0))
                self._places[name], self._lives[name] = hello.identity, hello.incarnation
            case bus_events.PeerLost(peer=peer, reason="silent" | "unreachable" as reason):
                name, lost = agent_of(peer), ("silence", event.at_us - 2 * half_us)
                if reason == "unreachable":
                    lost = "cut", max(event.at_us - half_us, self._answered_us.get(name, 0))
                _, self._away_us[name] = self._lost_us.setdefault(name, lost)
            case bus_events.JoinReceived(peer=peer):
                self._joined_us[agent_of(peer)] = event.at_us
                if self._gathers:
                    self._ended_us = event.at_us
                if (away := self._lost_us.pop(agent_of(peer), None)) is not None:
                    self._failed_us.append((away[0], agent_of(peer), away[1], event.at_us))

    def _open(self, event: bus_events.Opened, shift_us: int) -> None:
        if self._now_us:
            self._failed_us.append(("trainer", "", self._now_us, event.at_us + shift_us))
        self._shift_us, self._ended_us, self._gathers = shift_us, None, True
        found = {name: getattr(event.settings, name, None) for name in BusConfig.__struct_fields__}
        self._bus = {name: value for name, value in found.items() if isinstance(value, int)}

    def _add_published(self, effect: bus_events.Publish, at_us: int) -> None:
        command = decode_command(effect.envelope.body)
        if isinstance(command, WeightSync | AdapterSync):
            self._tried += command.phase == "prepare"
            self._parts.append((at_us, self._tried, command.phase))

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

    # --- agents -------------------------------------------------------------------------------------------------------

    def add_agent(self, entry: LogEntry) -> None:
        """Add a decision of an agent beside an engine."""
        name, place = entry.agent, identity_of(entry.agent)
        if place.node_rank or place.role != ROLLOUT:
            return
        event: events.Event = entry.typed_event()  # type: ignore[assignment]
        journal, before = self.states.get(name, ("", AgentState()))
        before = before if journal == entry.journal else AgentState()
        state, _ = decide(before, event)
        self.states[name] = entry.journal, state
        self.costs.decided_by_agent(name, event, state)
        at_us = self._clocks[name].bus_ns(event.at_ms) // 1000 if name in self._clocks else 0
        if isinstance(event, events.Started) and name in self._heard_us:  # again
            since_us = max(self._heard_us[name], self._ended_by_us.pop(name, 0))
            self._down_us.setdefault(name, since_us)  # perhaps it ended with its agent
            joined_us = self._joined_us.get(name, 0)  # it has looked at its engine first
            self._failed_us += [("agent", name, since_us, at_us), ("cut", name, since_us, joined_us)]
            self._away_us[name] = since_us
        self._add_engine(name, at_us, before.engine, state.engine)
        self._heard_us[name] = at_us
        answers = before.engine.tokenizer == "present"
        if isinstance(event, events.EngineReturned | events.Started) and before.activity is not None and answers:
            self._add_call(name, before.activity, event, at_us)

    def _add_call(
        self, name: str, activity: Activity, event: events.EngineReturned | events.Started, at_us: int
    ) -> None:
        """A call has ended. Of one during which the agent went away, it is only known that it had not ended before."""
        result = event.result if isinstance(event, events.EngineReturned) else None
        fault = result.kind if isinstance(result, events.Fault) else ""
        call = _AS_MODELLED.get(call := call_name(activity.calls[0]), call)
        times, took_s = self._calls[call][name], max(0, event.at_ms - activity.since_ms) / 1000
        until_away_s = took_s - (at_us - self._away_us.get(name, 0)) / 1e6
        if 0 <= until_away_s < took_s and times:
            took_s = until_away_s + times[-1]
        times.append(took_s)
        self._failed[call][name].append(float(fault in _TOUCHED))
        self._refused[call][name].append(float(fault not in ("", *_TOUCHED)))

    def _add_engine(self, name: str, at_us: int, known: EngineState, engine: EngineState) -> None:
        if known.tokenizer == "present" != engine.tokenizer:
            self._down_us.setdefault(name, at_us)
        if known.instance is not None and engine.instance is not None and engine.instance != known.instance:
            self._failed_us.append(("engine", name, self._down_us.get(name, at_us), at_us))
        if engine.tokenizer == "present":
            self._engine = engine.name
            self._down_us.pop(name, None)

    # --- results ------------------------------------------------------------------------------------------------------

    def tree(self, costs: RunCosts) -> Tree:
        """Return the model."""
        primaries = [place for place in self._places.values() if place.role == ROLLOUT and not place.node_rank]
        return {
            "steps": costs.syncs,
            "step": [list(self._steps) or [0.0]],
            "fleet": {
                "replicas": len(primaries),
                "nodes": primaries[0].nnodes,
                "gpus": primaries[0].gpus_per_node,
                "engine": next((kind for kind in KINDS if kind in self._engine), KINDS[0]),
            },
            "calls": self._calls.in_order(),
            "failures": {
                "calls": self._failed.in_order(),
                "refused": self._refused.in_order(),
                "recorded": list(self._recorded()),
            },
            "policy": self._policy,
            "bus": self._bus,
        }

    def _recorded(self) -> Iterator[Tree]:
        """Yield what failed since the first sync began, to the end of the log if it was not over."""
        lasting = [("engine", name, since_us) for name, since_us in self._down_us.items()]
        lasting += [(what if what == "silence" else "agent", name, us) for name, (what, us) in self._lost_us.items()]
        self._failed_us += [(*failed, self._now_us) for failed in lasting]
        for what, agent, since_us, until_us in self._failed_us:
            at = bisect_right(self._parts, since_us, key=itemgetter(0))
            if at:
                began_us, sync, phase = self._parts[at - 1]
                after_s, lasts_s = (since_us - began_us) / 1e6, max(0, until_us - since_us) / 1e6
                times: Tree = {"after": min(DAY_S, after_s), "lasts": min(DAY_S, lasts_s)}
                yield {"what": what, "agent": agent, "sync": sync, "phase": phase, **times}
