"""Fits the model of a fleet to a recorded run: what was measured there is what is drawn from."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from msgspec.msgpack import Decoder

from controlplane.machine import events as bus_events
from controlplane.record.entries import AgentMark, LogEntry, LogItem
from controlplane.simulate.costs import CostCounter, RunCosts
from controlplane.simulate.fleet_model import CallTimes, Policy, Tree
from controlplane.simulate.modelled_engine import KINDS
from schemas import events
from schemas.commands import AdapterSync, WeightSync
from schemas.errors import ConfigError
from schemas.formatting import agent_order
from schemas.identity import ROLLOUT, Identity, agent_of
from schemas.outcomes import Acted
from schemas.reports import Report, SyncReport
from workers.machine.decide import decide
from workers.machine.state import AgentState, call_name

_MODELLED: Final = CallTimes.__struct_fields__
_AS_MODELLED: Final = {"await_push": "load"}
"""Weights that the trainer sends take as long to arrive as it takes to load them."""
_state_decoder = Decoder(AgentState)
SAMPLES_MAX: Final = 1_000
"""Values that are kept of one distribution, or of one replica's calls of a kind."""


def fit(entries: Iterable[LogItem]) -> tuple[Tree, RunCosts]:
    """Return the model of a run, as a tree that a file can change, and what the run cost.

    Args:
        entries: Of its log.

    Raises:
        ConfigError: It has no sync that ended.
    """
    fitted = _Fitted()
    for entry in entries:
        fitted.add(entry)
    return fitted.tree(), fitted.costs.finish()


class _Series(defaultdict[str, defaultdict[str, list[float]]]):
    """Values by call and agent, in order."""

    def __init__(self) -> None:
        super().__init__(lambda: defaultdict(list))


class _Fitted:
    def __init__(self) -> None:
        self.costs = CostCounter()
        self._states: dict[str, tuple[str, AgentState]] = {}  # by agent: its journal, and the state after it
        self._places: dict[str, Identity] = {}
        self._policy: Tree = {}
        self._timeout_ms = 0  # after which a silent agent is lost
        self._engine = ""
        self._calls, self._failed, self._refused = _Series(), _Series(), _Series()
        self._steps: list[float] = []
        self._ended_us: int | None = None  # the last sync
        self._lost: dict[str, tuple[int, str]] = {}  # by agent: when it was lost (µs), and its incarnation
        self._lives: dict[str, str] = {}
        self._away: defaultdict[str, list[float]] = defaultdict(list)  # by kind of failure
        self._down_ms: dict[str, int] = {}  # by agent: since when its engine does not answer
        self._received_ms: dict[tuple[str, int], int] = {}
        self._worked_ms: dict[tuple[str, int], int] = {}  # from a command to its answer, by agent and seq
        self._latency_us: dict[tuple[str, int], int] = {}

    def add(self, entry: LogItem) -> None:
        """Add a record."""
        if isinstance(entry, AgentMark):  # of a log that lacks its beginning
            self._states.setdefault(entry.agent, (entry.journal, _state_decoder.decode(entry.state)))
        elif not isinstance(entry, LogEntry):
            return
        elif entry.agent:
            self._add_agent(entry)
        else:
            event, effects = entry.typed_event(), entry.typed_effects()
            self._add_bus(event, effects)  # type: ignore[arg-type]

    # --- the bus ------------------------------------------------------------------------------------------------------

    def _add_bus(self, event: bus_events.CoordinatorEvent, effects: bus_events.CoordinatorEffects) -> None:
        self.costs.decided_by_bus(event, effects)
        match event:
            case bus_events.Opened(settings=settings):
                names = Policy.__struct_fields__
                kept = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
                self._policy.update(kept)
                self._timeout_ms, self._ended_us = settings.agent_timeout_ms, None
            case bus_events.SyncRequested():
                self._add_request(event)
            case bus_events.HelloReceived(hello=hello):
                self._places[hello.identity.agent] = hello.identity
                self._lives[hello.identity.agent] = hello.incarnation
            case bus_events.PeerLost(reason="silent" | "unreachable" as reason):
                silent_us = 1000 * self._timeout_ms if reason == "silent" else 0
                name = agent_of(event.peer)
                self._lost.setdefault(name, (event.at_us - silent_us, self._lives.get(name, "")))
            case bus_events.JoinReceived():
                name = agent_of(event.peer)
                if name in self._lost:
                    lost_us, life = self._lost.pop(name)
                    kind = "cut" if life == self._lives.get(name) else "agent"
                    self._away[kind].append(max(0, event.at_us - lost_us) / 1e6)
            case _:
                pass
        for effect in effects:
            if isinstance(effect, bus_events.Conclude) and isinstance(effect.report, SyncReport):
                self._ended_us = event.at_us
            elif isinstance(effect, bus_events.Conclude) and isinstance(effect.report, Report):
                self._add_report(effect.report)

    def _add_request(self, request: bus_events.SyncRequested) -> None:
        if self._ended_us is not None:
            self._steps.append((request.at_us - self._ended_us) / 1e6)
        self._policy |= {
            "sync": "weights" if request.adapter is None else "adapter",
            "quorum": request.quorum or "majority",
            "absent": request.on_unreachable,
            "in_flight": request.in_flight,
            "timeout": request.timeout_ms / 1000,
            **({} if request.adapter is None else {"keep": request.adapter.keep}),
        }

    def _add_report(self, report: Report) -> None:
        if isinstance(report.command, WeightSync | AdapterSync):
            for outcome in report.outcomes:
                if isinstance(outcome.conclusion, Acted):
                    self._latency_us[outcome.agent, report.seq] = outcome.latency_us

    # --- agents -------------------------------------------------------------------------------------------------------

    def _add_agent(self, entry: LogEntry) -> None:
        event: events.Event = entry.typed_event()  # type: ignore[assignment]
        name = entry.agent
        journal, before = self._states.get(name, ("", AgentState()))
        state, effects = decide(before if journal == entry.journal else AgentState(), event)
        self._states[name] = entry.journal, state
        if state.identity.node_rank:
            return
        self.costs.decided_by_agent(name, event, state)
        self._add_engine(name, event.at_ms, before, state)
        if isinstance(event, events.CommandReceived):
            self._received_ms[name, event.seq] = event.at_ms
        elif isinstance(event, events.EngineReturned) and before.activity is not None:
            call = _AS_MODELLED.get(name_of := call_name(before.activity.calls[0]), name_of)
            self._calls[call][name].append(max(0, event.at_ms - before.activity.since_ms) / 1000)
            kind = event.result.kind if isinstance(event.result, events.Fault) else ""
            self._failed[call][name].append(float(kind in ("engine_error", "unanswered")))
            self._refused[call][name].append(float(kind not in ("", "engine_error", "unanswered")))
        for effect in effects:
            if isinstance(effect, events.Answer) and (name, effect.seq) in self._received_ms:
                self._worked_ms[name, effect.seq] = event.at_ms - self._received_ms.pop((name, effect.seq))

    def _add_engine(self, name: str, at_ms: int, before: AgentState, state: AgentState) -> None:
        known, engine = before.engine, state.engine
        self._engine = engine.name if engine.tokenizer == "present" else self._engine
        if engine.tokenizer != "present" and known.tokenizer == "present":
            self._down_ms[name] = at_ms
        if known.instance is not None and engine.instance is not None and engine.instance != known.instance:
            self._away["engine"].append(max(0, at_ms - self._down_ms.pop(name, at_ms)) / 1000)

    # --- results ------------------------------------------------------------------------------------------------------

    def tree(self) -> Tree:
        """Return the model as a tree."""
        costs = self.costs.finish()
        if not costs.syncs:
            raise ConfigError("the log has no sync that has ended: there is nothing to fit a model to")
        primaries = [place for place in self._places.values() if place.role == ROLLOUT and not place.node_rank]
        replica_hours = max(costs.hours, 1e-9) * len(primaries)
        failures: Tree = {"calls": _in_order(self._failed), "refused": _in_order(self._refused)}
        for kind, seconds in self._away.items():
            failures |= {f"{kind}_per_hour": len(seconds) / replica_hours, f"{kind}_s": _quantiles(seconds)}
        delays = [
            max(0.0, latency_us / 1000 - self._worked_ms[key]) / 2000
            for key, latency_us in self._latency_us.items()
            if key in self._worked_ms
        ]
        return {
            "steps": costs.syncs,
            "step": [self._steps[-SAMPLES_MAX:] or [0.0]],
            "network": _quantiles(delays or [0.0]),
            "fleet": {
                "replicas": len(primaries),
                "nodes": primaries[0].nnodes,
                "gpus": primaries[0].gpus_per_node,
                "engine": next((kind for kind in KINDS if kind in self._engine), KINDS[0]),
            },
            "calls": _in_order(self._calls),
            "failures": failures,
            "policy": self._policy,
        }


def _in_order(calls: _Series) -> Tree:
    """Return the values of each modelled call, replica by replica."""
    return {
        call: [by_agent[name][-SAMPLES_MAX:] for name in sorted(by_agent, key=agent_order)]
        for call, by_agent in calls.items()
        if call in _MODELLED
    }


def _quantiles(values: list[float]) -> list[float]:
    """Return the values in order; of many, as many quantiles as are kept."""
    ordered, last = sorted(values), len(values) - 1
    if last < SAMPLES_MAX:
        return ordered
    return [ordered[number * last // (SAMPLES_MAX - 1)] for number in range(SAMPLES_MAX)]
