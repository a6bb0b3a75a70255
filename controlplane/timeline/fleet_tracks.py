"""Draws what the bus and its agents did as events of a timeline, in the order of the log. Pure.

The bus is one process: its commands from issue to conclusion, weight syncs with their phases, answers. Each agent is
one process: its commands from receipt to answer, its engine calls, and when the engine was paused, asleep or profiled,
and which weights it held. An arrow leads from the issue of each command to each agent's decision about it.

An agent's decisions are known to the millisecond, so one may seem to precede its cause. It is moved within that
millisecond: no decision is drawn before the one that precedes it, and no receipt before its issue.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from controlplane.analysis.log_lines import format_agent_effect, format_agent_event, format_bus_event
from controlplane.machine import events as bus_events
from controlplane.record.entries import LogEntry
from controlplane.timeline.survey import BusRecord, LogSurvey, decode_entries
from controlplane.timeline.tracks import SHORTEST_NS, OpenSlice, ProcessTracks, TraceEvent
from schemas import events
from schemas.commands import AdapterSync, WeightSync, sync_key
from schemas.formatting import describe, kind_and_reason
from schemas.identity import ROLLOUT, Identity, agent_of, identity_of
from schemas.outcomes import Acted, Conclusion, Failed
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command

Events = Iterator[TraceEvent]


class BusTracks:
    """The bus's process.

    Attributes:
        issued_ns: By seq, when each command was issued: the end of its mark, on the bus's clock.
    """

    def __init__(self, process: ProcessTracks) -> None:
        self.issued_ns: dict[int, int] = {}
        self._marks: dict[int, TraceEvent] = {}
        self._next_arrow = 1
        self._process = process
        self._last_ns = 0
        self._open: dict[int, OpenSlice] = {}
        self._syncs: dict[str, tuple[int, OpenSlice]] = {}  # with their versions, by adapter; of base weights under ""
        self._samples: set[str] = set()  # counters

    def draw(self, event: bus_events.CoordinatorEvent, effects: bus_events.CoordinatorEffects, at_ns: int) -> Events:
        at_ns = self._last_ns = max(at_ns, self._last_ns)  # a wall clock can be set back
        yield from self._draw_event(event, effects, at_ns)
        for effect in effects:
            match effect:
                case bus_events.Publish():
                    yield from self._publish(effect, at_ns)
                case bus_events.Conclude(report=Report() as report):
                    yield from self._conclude(report, at_ns)
                case bus_events.Conclude(report=SyncReport() as sync):
                    args = {"loaded": sync.loaded, "quarantined": sync.quarantined}
                    yield from self._end_sync(sync.adapter, at_ns, status=sync.status, **args)
                case bus_events.Refuse():
                    yield self._process.instant("fleet", f"refused: {effect.reason}", at_ns)

    def end(self, at_ns: int) -> Events:
        """End everything that is open as unfinished: this life of the bus is over, or the log."""
        for seq in list(self._open):
            yield from self._close(seq, at_ns, unfinished=True)
        for adapter in list(self._syncs):
            yield from self._end_sync(adapter, at_ns, unfinished=True)

    def arrow(self, seq: int, decided: TraceEvent) -> Events:
        """Draw an arrow from the issue of a command to a decision about it."""
        if (mark := self._marks.get(seq)) is None:
            return
        for ph, bp, anchor in (("s", None, mark), ("f", "e", decided)):
            yield replace(anchor, ph=ph, bp=bp, name="command", id=self._next_arrow, dur=None, args={})
        self._next_arrow += 1

    def _draw_event(
        self, event: bus_events.CoordinatorEvent, effects: bus_events.CoordinatorEffects, at_ns: int
    ) -> Events:
        match event:
            case bus_events.Opened():  # concludes what the previous life left open
                for effect in effects:
                    if isinstance(effect, bus_events.Conclude) and isinstance(effect.report, Report):
                        yield from self._conclude(effect.report, at_ns)
                yield from self.end(at_ns)
                yield self._process.instant("fleet", format_bus_event(event), at_ns)
            case bus_events.HelloReceived() | bus_events.JoinReceived() | bus_events.PeerLost():
                yield self._process.instant("fleet", format_bus_event(event), at_ns)
            case bus_events.AnswersReceived():
                for answer in event.answers:
                    text = f"{agent_of(answer.peer)} {_short(answer.outcome)} (seq {answer.seq})"
                    args = {"kind": "outcome", "seq": answer.seq, **_outcome_args(answer.outcome)}
                    yield self._process.instant("outcomes", text, at_ns, args)
            case bus_events.SamplesCounted():
                yield from self._count_samples(event.counts, at_ns)

    def _count_samples(self, counts: Iterable[bus_events.SampleCount], at_ns: int) -> Events:
        """How many samples of a record were how far behind, and were refused. One that is not there is 0 again."""
        found = Counter[str]()
        for count in counts:
            age = "of unknown age" if count.staleness is None else f"{count.staleness} behind"
            found[f"samples {age}"] += count.sequences
            found["samples refused"] += 0 if count.accepted else count.sequences
        self._samples |= found.keys()
        for name in sorted(self._samples):
            yield self._process.counter(name, found[name], at_ns)

    def _publish(self, effect: bus_events.Publish, at_ns: int) -> Events:
        command, seq, replicas = decode_command(effect.envelope.body), effect.seq, effect.envelope.target.replicas
        thread, inside = "commands", None
        adapter = sync_key(command)
        if isinstance(command, WeightSync | AdapterSync) and adapter is not None:
            version = command.adapter.version if isinstance(command, AdapterSync) else command.version
            thread = f"adapter {adapter}" if adapter else "weight syncs"
            if adapter not in self._syncs or self._syncs[adapter][0] != version:
                yield from self._end_sync(adapter, at_ns, unfinished=True)
                self._syncs[adapter] = version, OpenSlice(self._process, thread, f"sync to v{version}", at_ns)
            inside = self._syncs[adapter][1]
        args: dict[str, object] = {"kind": "command", "seq": seq, "epoch": effect.epoch}
        if replicas is not None:
            args["replicas"] = sorted(replicas, key=str)
        name = f"{describe(command)} (seq {seq})"
        opened = self._open[seq] = OpenSlice(self._process, thread, name, at_ns, args, inside)
        # Viewers draw an arrow from the end of its first slice. The command ends too late for that, so its issue is
        # marked by a slice inside it.
        begin_ns, opened.filled_ns = opened.begin_ns + SHORTEST_NS, opened.begin_ns + 2 * SHORTEST_NS
        mark_args: dict[str, object] = {"kind": "issue", "seq": seq}
        mark = self._process.slice(opened.tid, f"issue (seq {seq})", begin_ns, opened.filled_ns, mark_args)
        self._marks[seq], self.issued_ns[seq] = mark, opened.filled_ns
        yield mark

    def _conclude(self, report: Report, at_ns: int) -> Events:
        yield from self._close(
            report.seq, at_ns, **{outcome.agent: _short(outcome.conclusion) for outcome in report.outcomes}
        )

    def _close(self, seq: int, at_ns: int, **args: object) -> Events:
        opened = self._open.pop(seq, None)
        if opened is not None:
            yield opened.end(at_ns, **args)

    def _end_sync(self, adapter: str, at_ns: int, **args: object) -> Events:
        if adapter not in self._syncs:
            return
        _, sync = self._syncs.pop(adapter)
        for seq in [seq for seq, opened in self._open.items() if opened.inside is sync]:
            yield from self._close(seq, at_ns, unfinished=True)
        if "status" in args:
            sync.name = f"{sync.name}: {args['status']}"
        yield sync.end(at_ns, **args)


class AgentTracks:
    """One agent's process, over all its incarnations."""

    def __init__(self, process: ProcessTracks, identity: Identity, bus: BusTracks) -> None:
        self._process, self._identity, self._bus = process, identity, bus
        self._peer = ""
        self._last_ns = 0
        self._open: dict[int, OpenSlice] = {}
        self._call: tuple[events.Perform, OpenSlice] | None = None
        self._conditions: dict[str, OpenSlice] = {}  # by thread
        self._versions: dict[str, int] = {}  # by what they are of

    def draw(self, peer: str, event: events.Event, effects: tuple[events.Effect, ...], at_ns: int) -> Events:
        """Draw one decision. `at_ns` is on the bus's clock, known to the millisecond."""
        at_ns = max(at_ns, self._last_ns + SHORTEST_NS)
        if peer != self._peer:
            yield from self.end(at_ns)
            self._peer = peer
        self._last_ns = at_ns
        yield from self._draw_event(event, at_ns)
        for effect in effects:
            match effect:
                case events.Answer():
                    yield from self._answer(effect, at_ns)
                case events.Perform(call=call):
                    tag = call.__struct_config__.tag
                    name = f"{tag} v{call.version}" if isinstance(call, events.Load) else str(tag)
                    args: dict[str, object] = {"kind": "effect", "call": effect.call_id}
                    self._call = effect, OpenSlice(self._process, "engine calls", name, at_ns, args)
                case _:
                    yield self._mark(format_agent_effect(effect), at_ns)

    def end(self, at_ns: int) -> Events:
        """End everything that is open as unfinished: the incarnation is over, or the log."""
        calls = [] if self._call is None else [self._call[1]]
        for opened in (*self._open.values(), *calls, *self._conditions.values()):
            yield opened.end(at_ns, unfinished=True)
        self._open, self._call, self._conditions = {}, None, {}

    def _draw_event(self, event: events.Event, at_ns: int) -> Events:
        match event:
            case events.Started() | events.SnapshotReceived() | events.LeaseExpired():
                yield self._mark(format_agent_event(event), at_ns)
            case events.CommandReceived() if event.seq not in self._open:
                args: dict[str, object] = {"kind": "decide", "seq": event.seq, "epoch": event.epoch}
                name = f"{describe(event.command)} (seq {event.seq})"
                self._open[event.seq] = OpenSlice(self._process, "commands", name, at_ns, args)
            case events.EngineReturned():
                yield from self._end_call(event, at_ns)
                if event.observation is not None:
                    yield from self._observe(event.observation, at_ns)
            case events.EngineObserved():
                yield from self._observe(event.observation, at_ns)

    def _answer(self, answer: events.Answer, at_ns: int) -> Events:
        opened = self._open.pop(answer.seq, None)
        if opened is None:  # sent again, or for a command that a snapshot settled
            yield self._mark(f"{_short(answer.outcome)} (seq {answer.seq})", at_ns)
            return
        opened.name = f"{opened.name}: {_short(answer.outcome)}"
        decided = opened.end(at_ns, rule=answer.rule, **_outcome_args(answer.outcome))
        yield decided
        yield from self._bus.arrow(answer.seq, decided)

    def _end_call(self, event: events.EngineReturned, at_ns: int) -> Events:
        if self._call is None or self._call[0].call_id != event.call_id:
            return
        (perform, opened), self._call = self._call, None
        if isinstance(event.result, events.Fault):
            opened.name = f"{opened.name}: failed"
            yield opened.end(at_ns, fault=event.result.kind, message=event.result.message)
        else:
            yield opened.end(at_ns)
            yield from self._apply_call(perform, at_ns)

    def _apply_call(self, perform: events.Perform, at_ns: int) -> Events:
        """Draw the condition that a call leads to, for engines that can't be observed."""
        match perform.call:
            case events.Pause() | events.Resume() as call:
                yield from self._set("generation", "paused" if isinstance(call, events.Pause) else "", at_ns)
            case events.Sleep(tags=tags):
                yield from self._set("memory", f"asleep: {' '.join(sorted(tags))}", at_ns)
            case events.Wake():
                yield from self._set("memory", "", at_ns)
            case events.StartProfile(session=session):
                yield from self._set("profile session", f"profile step {session.step}", at_ns)
            case events.StopProfile():
                yield from self._set("profile session", "", at_ns)
            case events.Load(version=version):
                yield from self._count_version("weight", version, at_ns)

    def _observe(self, seen: events.Observation, at_ns: int) -> Events:
        if seen.generating is not None:
            yield from self._set("generation", "" if seen.generating else "paused", at_ns)
        if seen.asleep is not None:
            yield from self._set("memory", f"asleep: {' '.join(sorted(seen.asleep))}" if seen.asleep else "", at_ns)
        if seen.profiling is False:
            yield from self._set("profile session", "", at_ns)
        if seen.version is not None:
            yield from self._count_version("weight", seen.version, at_ns)
        for adapter, versions in _versions_of(seen.adapters or ()).items():
            yield from self._count_version(f"adapter {adapter}", max(versions), at_ns)

    def _set(self, thread: str, condition: str, at_ns: int) -> Events:
        """A condition holds from now on; an empty one ends the last."""
        opened = self._conditions.get(thread)
        if opened is not None and opened.name != condition:
            yield self._conditions.pop(thread).end(at_ns)
        if condition and thread not in self._conditions:
            self._conditions[thread] = OpenSlice(self._process, thread, condition, at_ns)

    def _count_version(self, what: str, version: int, at_ns: int) -> Events:
        identity = self._identity
        if identity.role == ROLLOUT and identity.node_rank == 0 and version != self._versions.get(what):
            self._versions[what] = version
            yield self._process.counter(f"replica {identity.replica} {what} version", version, at_ns)

    def _mark(self, name: str, at_ns: int) -> TraceEvent:
        return self._process.instant("events", name, at_ns)


def _versions_of(models: Iterable[str]) -> dict[str, list[int]]:
    """The versions of each adapter, by what engines call them: `policy-v7`."""
    found: dict[str, list[int]] = {}
    for name, _, version in (model.rpartition("-v") for model in models):
        if name and version.isdecimal():
            found.setdefault(name, []).append(int(version))
    return found


def fleet_events(survey: LogSurvey, processes: Mapping[str, ProcessTracks], entries: Iterable[LogEntry]) -> Events:
    """Draw everything that the bus and its agents did."""
    bus = BusTracks(processes[""])
    agents: dict[str, AgentTracks] = {}
    for record in decode_entries(survey.same_entries(entries)):
        if isinstance(record, BusRecord):
            yield from bus.draw(record.event, record.effects, record.at_ns)
            continue
        name, peer, event = record.agent, record.peer, record.event
        if name not in agents:
            agents[name] = AgentTracks(processes[name], identity_of(name), bus)
        at_ns = survey.moment_ns(peer, event.at_ms)
        if isinstance(event, events.CommandReceived):
            at_ns = max(at_ns, bus.issued_ns.get(event.seq, at_ns))
        yield from agents[name].draw(peer, event, record.effects, at_ns)
    yield from bus.end(survey.last_ns)
    for track in agents.values():
        yield from track.end(survey.last_ns)
    for process in processes.values():
        yield from process.names()


def _short(outcome: Conclusion) -> str:
    return " ".join(kind_and_reason(outcome)).strip()


def _outcome_args(outcome: Conclusion) -> dict[str, object]:
    args: dict[str, object] = {"outcome": kind_and_reason(outcome)[0]}
    if isinstance(outcome, Failed):
        args["message"] = outcome.message
    if isinstance(outcome, Acted):
        args["calls"] = outcome.calls
        args |= {"traces": [trace.path for trace in outcome.traces]} if outcome.traces else {}
    return args
