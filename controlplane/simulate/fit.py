"""Fits the model of a fleet to a recorded run: what was measured there is what is drawn from."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.msgpack import Decoder
from msgspec.structs import replace

from controlplane.machine import events as bus_events
from controlplane.record.entries import AgentMark, LogEntry, LogItem
from controlplane.simulate.costs import CostCounter, RunCosts
from controlplane.simulate.fleet_model import CallTimes, Tree
from controlplane.simulate.modelled_engine import KINDS
from schemas import events
from schemas.commands import AdapterSync, WeightSync
from schemas.config import BusConfig
from schemas.errors import ConfigError
from schemas.formatting import agent_order
from schemas.identity import ROLLOUT, Identity, agent_of, identity_of
from schemas.outcomes import Acted
from schemas.reports import Report, SyncReport
from workers.machine.decide import decide
from workers.machine.state import AgentState, call_name

SAMPLES_MAX: Final = 1_000
"""Values that are kept of one distribution, or of one replica's calls of a kind."""
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
        self._shift_us = self._now_us = 0
        self._ended_us: int | None = None  # the last sync
        self._steps: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._calls, self._failed, self._refused = _Series(), _Series(), _Series()
        self._away: defaultdict[str, list[float]] = defaultdict(list)  # by what failed
        self._lost: dict[str, tuple[int, str]] = {}  # by agent: when it was lost (µs), and its incarnation
        self._lives: dict[str, str] = {}
        self._down_ms: dict[str, int] = {}  # by agent: since when its engine does not answer
        self._received_ms: dict[tuple[str, int], int] = {}
        self._halves_us: dict[tuple[str, int], int] = {}  # by agent and seq: its latency, or its own work (negative)
        self._delays: deque[float] = deque(maxlen=100 * SAMPLES_MAX)

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
            case bus_events.HelloReceived(hello=hello):
                self._places[hello.identity.agent] = hello.identity
                self._lives[hello.identity.agent] = hello.incarnation
            case bus_events.PeerLost(peer=peer, reason="silent" | "unreachable" as reason):
                silent_us = self._bus["agent_timeout_ms"] * 1000 if reason == "silent" else 0
                lost = event.at_us - silent_us, self._lives.get(agent_of(peer), "")
                self._lost.setdefault(agent_of(peer), lost)
            case bus_events.JoinReceived(peer=peer) if agent_of(peer) in self._lost:
                lost_us, life = self._lost.pop(agent_of(peer))
                what = "cut" if life == self._lives[agent_of(peer)] else "agent"
                self._away[what].append(max(0, event.at_us - lost_us) / 1e6)
        for effect in effects:
            if isinstance(effect, bus_events.Conclude) and isinstance(effect.report, SyncReport):
                self._ended_us = event.at_us
            elif isinstance(effect, bus_events.Conclude) and isinstance(effect.report, Report):
                self._add_report(effect.report)

    def _open(self, event: bus_events.Opened, shift_us: int) -> None:
        if self._now_us:
            self._away["trainer"].append(max(0, event.at_us + shift_us - self._now_us) / 1e6)
        self._shift_us, self._ended_us = shift_us, None
        found = {name: getattr(event.settings, name, None) for name in BusConfig.__struct_fields__}
        self._bus = {name: value for name, value in found.items() if isinstance(value, int)}

    def _add_request(self, request: bus_events.SyncRequested) -> None:
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

    def _add_report(self, report: Report) -> None:
        for outcome in report.outcomes if isinstance(report.command, WeightSync | AdapterSync) else ():
            if isinstance(outcome.conclusion, Acted):
                self._add_half((outcome.agent, report.seq), outcome.latency_us)

    def _add_half(self, key: tuple[str, int], us: int) -> None:
        """What an answer took beyond the agent's own work was spent on the way, in both directions."""
        other_us = self._halves_us.pop(key, None)
        if other_us is None:
            self._halves_us[key] = us
        else:
            self._delays.append(max(0, other_us + us) / 2e6)

    # --- agents -------------------------------------------------------------------------------------------------------

    def add_agent(self, entry: LogEntry) -> None:
        """Add a decision of an agent beside an engine."""
        name, place = entry.agent, identity_of(entry.agent)
        if place.node_rank or place.role != ROLLOUT:
            return
        event: events.Event = entry.typed_event()  # type: ignore[assignment]
        journal, before = self.states.get(name, ("", AgentState()))
        before = before if journal == entry.journal else AgentState()
        state, effects = decide(before, event)
        self.states[name] = entry.journal, state
        self.costs.decided_by_agent(name, event, state)
        self._add_engine(name, event.at_ms, before, state)
        if isinstance(event, events.CommandReceived):
            self._received_ms[name, event.seq] = event.at_ms
        elif isinstance(event, events.EngineReturned) and before.activity is not None:
            call = call_name(before.activity.calls[0])
            call, fault = _AS_MODELLED.get(call, call), event.result if isinstance(event.result, events.Fault) else None
            self._calls[call][name].append(max(0, event.at_ms - before.activity.since_ms) / 1000)
            self._failed[call][name].append(float(fault is not None and fault.kind in _TOUCHED))
            self._refused[call][name].append(float(fault is not None and fault.kind not in _TOUCHED))
        for effect in effects:
            if isinstance(effect, events.Answer) and (name, effect.seq) in self._received_ms:
                worked_ms = event.at_ms - self._received_ms.pop((name, effect.seq))
                if isinstance(effect.outcome, Acted):
                    self._add_half((name, effect.seq), -1000 * worked_ms)

    def _add_engine(self, name: str, at_ms: int, before: AgentState, state: AgentState) -> None:
        known, engine = before.engine, state.engine
        self._engine = engine.name if engine.tokenizer == "present" else self._engine
        if engine.tokenizer != "present" and known.tokenizer == "present":
            self._down_ms[name] = at_ms
        if known.instance is not None and engine.instance is not None and engine.instance != known.instance:
            self._away["engine"].append(max(0, at_ms - self._down_ms.pop(name, at_ms)) / 1000)

    # --- results ------------------------------------------------------------------------------------------------------

    def tree(self, costs: RunCosts) -> Tree:
        """Return the model."""
        primaries = [place for place in self._places.values() if place.role == ROLLOUT and not place.node_rank]
        failures: Tree = {"calls": self._failed.in_order(), "refused": self._refused.in_order()}
        for what, seconds in self._away.items():
            hours = costs.hours * (1 if what == "trainer" else len(primaries))
            failures |= {f"{what}_per_hour": min(3600.0, len(seconds) / hours), f"{what}_s": _quantiles(seconds)}
        return {
            "steps": costs.syncs,
            "step": [list(self._steps) or [0.0]],
            "network": _quantiles(self._delays or [0.0]),
            "fleet": {
                "replicas": len(primaries),
                "nodes": primaries[0].nnodes,
                "gpus": primaries[0].gpus_per_node,
                "engine": next((kind for kind in KINDS if kind in self._engine), KINDS[0]),
            },
            "calls": self._calls.in_order(),
            "failures": failures,
            "policy": self._policy,
            "bus": self._bus,
        }


def _quantiles(values: Sequence[float]) -> list[float]:
    """Return the values in order; of many, as many quantiles as are kept."""
    ordered, last = sorted(values), len(values) - 1
    kept = min(last, SAMPLES_MAX - 1)
    return [ordered[number * last // max(1, kept)] for number in range(kept + 1)]
