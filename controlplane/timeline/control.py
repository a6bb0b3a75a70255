"""What the bus and its agents did, as events of a timeline: from a run's log, in its order. Pure.

One process for the bus: its commands from issue to conclusion, weight syncs with their phases, profiling sessions, what
arrived. One process for each agent: each command from receipt to answer, the calls into its engine, when the engine was
paused, asleep, profiled, and which weights it held. An arrow leads from each command to each agent's decision of it.

An agent's decisions are known to the millisecond, and so what is drawn of it can seem to come before its cause. It is
moved within its millisecond: no decision is drawn before the one that came before it, no receipt before its issue.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from controlplane.machine.events import (
    AnswersReceived,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    JoinReceived,
    Opened,
    PeerLost,
    Publish,
    Refuse,
)
from controlplane.record.entries import LogEntry
from controlplane.timeline.alignment import BusRecord, Survey, decoded
from controlplane.timeline.tracks import CATEGORY, SHORTEST_NS, Lanes, Span, TraceEvent, us
from schemas.commands import Command, ProfileCommand, UnknownCommand, WeightSync
from schemas.events import (
    Answer,
    CommandReceived,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    Fault,
    LeaseExpired,
    Load,
    Observation,
    Pause,
    Perform,
    RequestResend,
    RequestSnapshot,
    Restart,
    Resume,
    Sleep,
    SnapshotReceived,
    Started,
    StartProfile,
    StopProfile,
    Wake,
)
from schemas.formatting import describe
from schemas.identity import ROLLOUT
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Skipped
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command

Drawn = Iterator[TraceEvent]


class Arrows:
    """From the issue of each command to the decision of each agent; drawn when both ends are."""

    def __init__(self) -> None:
        self._issued: dict[int, TraceEvent] = {}
        self._early: dict[int, list[TraceEvent]] = {}
        self._count = 0

    def issued(self, seq: int, slice_: TraceEvent) -> Drawn:
        """The slice of a command's issue was drawn."""
        self._issued[seq] = slice_
        for decided in self._early.pop(seq, ()):
            yield from self._draw(slice_, decided)

    def decided(self, seq: int, slice_: TraceEvent) -> Drawn:
        """The slice of an agent's decision was drawn."""
        if seq in self._issued:
            yield from self._draw(self._issued[seq], slice_)
        else:
            self._early.setdefault(seq, []).append(slice_)

    def _draw(self, issued: TraceEvent, decided: TraceEvent) -> Drawn:
        self._count += 1
        for ph, at, bound in (("s", issued, None), ("f", decided, "e")):
            pid, tid, ts = at.pid, at.tid, at.ts
            yield TraceEvent(ph=ph, name="command", cat=CATEGORY, id=self._count, bp=bound, pid=pid, tid=tid, ts=ts)


class Session(NamedTuple):
    """A profiling session as the bus commanded it. replicas: None for all."""

    step: int
    replicas: frozenset[int] | None
    span: Span

    def meets(self, replicas: frozenset[int] | None) -> bool:
        """Do some of its replicas belong to these?"""
        return self.replicas is None or replicas is None or not self.replicas.isdisjoint(replicas)


class BusTrack:
    """The bus's own process. published: until when the issue of each command was drawn, on the bus's clock."""

    def __init__(self, lanes: Lanes, zero_ns: int, arrows: Arrows) -> None:
        self.published: dict[int, int] = {}
        self._lanes, self._zero_ns, self._arrows = lanes, zero_ns, arrows
        self._last_ns = 0
        self._open: dict[int, Span] = {}
        self._sync: tuple[int, Span] | None = None  # its version
        self._sessions: list[Session] = []
        self._stopping: dict[int, list[Session]] = {}  # by the stop's seq

    def take(self, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...], at_ns: int) -> Drawn:
        """One record."""
        at_ns = self._last_ns = max(at_ns, self._last_ns)  # a wall clock can be set back
        match event:
            case Opened():  # what the life before left open is concluded now, as far as its log tells of it
                for effect in effects:
                    if isinstance(effect, Conclude) and isinstance(effect.report, Report):
                        yield from self._conclude(effect.report, at_ns)
                yield from self.end(at_ns)
                yield self._instant("fleet", f"the bus of run {event.run} opens", at_ns)
            case HelloReceived():
                yield self._instant("fleet", f"hello of {event.hello.identity.agent} on {event.hello.host}", at_ns)
            case JoinReceived():
                yield self._instant("fleet", f"{_agent(event.peer)} hears the commands", at_ns)
            case PeerLost():
                yield self._instant("fleet", f"{_agent(event.peer)} is lost: {event.reason}", at_ns)
            case AnswersReceived():
                for answer in event.answers:
                    word = _short(answer.outcome)
                    args = {"kind": "outcome", "seq": answer.seq, **_said(answer.outcome)}
                    yield self._instant("outcomes", f"{_agent(answer.peer)} {word} (seq {answer.seq})", at_ns, args)
        for effect in effects:
            match effect:
                case Publish():
                    yield from self._publish(effect, at_ns)
                case Conclude(report=Report() as report):
                    yield from self._conclude(report, at_ns)
                case Conclude(report=SyncReport() as sync):
                    args = {"status": sync.status, "loaded": sync.loaded, "quarantined": sync.quarantined}
                    yield from self._end_sync(at_ns, args)
                case Refuse():
                    yield self._instant("fleet", f"refused: {effect.reason}", at_ns)

    def end(self, at_ns: int) -> Drawn:
        """Nothing more comes of what is open: the bus's life is over, or the log."""
        for seq in list(self._open):
            yield from self._close(seq, at_ns, {"unfinished": True})
        yield from self._end_sync(at_ns, {"unfinished": True})
        stopping = [one for stopped in self._stopping.values() for one in stopped]
        for session in (*stopping, *self._sessions):
            yield self._end_session(session, at_ns, {"unfinished": True})
        self._stopping, self._sessions = {}, []

    def _publish(self, effect: Publish, at_ns: int) -> Drawn:
        command = decode_command(effect.envelope.body)
        thread, inside = "commands", None
        if isinstance(command, WeightSync):
            thread = "weight syncs"
            if self._sync is None or self._sync[0] != command.version:
                yield from self._end_sync(at_ns, {"unfinished": True})
                self._sync = command.version, Span(self._lanes, thread, f"sync to v{command.version}", at_ns)
            inside = self._sync[1]
        if isinstance(command, ProfileCommand):
            yield from self._profile(effect.seq, command, effect.envelope.target.replicas, at_ns)
        args: dict[str, object] = {"kind": "command", "seq": effect.seq, "epoch": effect.epoch}
        if effect.envelope.target.replicas is not None:
            args["replicas"] = sorted(effect.envelope.target.replicas, key=str)
        name = f"{_named(command)} (seq {effect.seq})"
        span = self._open[effect.seq] = Span(self._lanes, thread, name, at_ns, args, inside)
        span.inner_ns = span.at_ns + 2 * SHORTEST_NS
        self.published.setdefault(effect.seq, span.inner_ns)

    def _conclude(self, report: Report, at_ns: int) -> Drawn:
        said = {one.agent: _short(one.conclusion) for one in report.outcomes}
        yield from self._close(report.seq, at_ns, said)
        for session in self._stopping.pop(report.seq, ()):
            yield self._end_session(session, at_ns, {})

    def _profile(self, seq: int, command: ProfileCommand, replicas: frozenset[int] | None, at_ns: int) -> Drawn:
        """Replicas can be profiled by themselves. A start for another step ends what one of its replicas has open."""
        met = [one for one in self._sessions if one.meets(replicas)]
        same = [one for one in met if one.step == command.step]
        if command.action == "stop":
            self._stopping[seq] = same
            self._sessions = [one for one in self._sessions if one not in same]
        elif command.action == "start" and not same:
            for session in met:
                yield self._end_session(session, at_ns, {"unfinished": True})
            span = Span(self._lanes, "profiling", f"profile step {command.step}", at_ns)
            others = [one for one in self._sessions if one not in met]
            self._sessions = [*others, Session(command.step, replicas, span)]

    def _close(self, seq: int, at_ns: int, args: Mapping[str, object]) -> Drawn:
        span = self._open.pop(seq, None)
        if span is not None:
            span.args.update(args)
            yield span.end(at_ns, self._zero_ns)
            # A slice of its own: viewers draw an arrow from the end of one slice to the beginning of the other.
            issue = TraceEvent(
                ph="X",
                pid=self._lanes.pid,
                tid=span.tid,
                name=f"issue (seq {seq})",
                cat=CATEGORY,
                ts=us(span.at_ns + SHORTEST_NS - self._zero_ns),
                dur=us(SHORTEST_NS),
                args={"kind": "issue", "seq": seq},
            )
            yield issue
            yield from self._arrows.issued(seq, issue)

    def _end_sync(self, at_ns: int, args: dict[str, object]) -> Drawn:
        if self._sync is None:
            return
        _, sync = self._sync
        self._sync = None
        for seq in [seq for seq, span in self._open.items() if span.inside is sync]:
            yield from self._close(seq, at_ns, {"unfinished": True})
        sync.args.update(args)
        if "status" in args:
            sync.name = f"{sync.name}: {args['status']}"
        yield sync.end(at_ns, self._zero_ns)

    def _end_session(self, session: Session, at_ns: int, args: dict[str, object]) -> TraceEvent:
        session.span.args.update(args)
        return session.span.end(at_ns, self._zero_ns)

    def _instant(self, thread: str, name: str, at_ns: int, args: dict[str, object] | None = None) -> TraceEvent:
        return _instant(self._lanes, thread, name, at_ns - self._zero_ns, args)


class AgentTrack:
    """One agent's process, over all its incarnations."""

    def __init__(self, lanes: Lanes, zero_ns: int, arrows: Arrows, counter: str) -> None:
        self._lanes, self._zero_ns, self._arrows, self._counter = lanes, zero_ns, arrows, counter
        self._peer = ""
        self._last_ns = 0
        self._open: dict[int, Span] = {}
        self._call: tuple[Perform, Span] | None = None
        self._holds: dict[str, Span] = {}  # what is so for a while, by thread
        self._version: int | None = None

    def take(self, peer: str, event: Event, effects: tuple[Effect, ...], at_ns: int) -> Drawn:
        """One decision. at_ns: on the bus's clock, known to the millisecond."""
        if peer != self._peer:
            yield from self.end(max(at_ns, self._last_ns + SHORTEST_NS))
            self._peer = peer
        at_ns = self._last_ns = max(at_ns, self._last_ns + SHORTEST_NS)
        yield from self._see(event, at_ns)
        for effect in effects:
            match effect:
                case Answer():
                    yield from self._answer(effect, at_ns)
                case Perform():
                    name = effect.call.__struct_config__.tag
                    shown = f"{name} v{effect.call.version}" if isinstance(effect.call, Load) else str(name)
                    args: dict[str, object] = {"kind": "effect", "call": effect.call_id}
                    self._call = effect, Span(self._lanes, "engine calls", shown, at_ns, args)
                case RequestResend():
                    yield self._instant(f"asks for the records from {effect.first}", at_ns)
                case RequestSnapshot():
                    yield self._instant("asks what is desired", at_ns)
                case Restart():
                    yield self._instant("starts anew", at_ns)

    def end(self, at_ns: int) -> Drawn:
        """The incarnation is over, or the log."""
        for span in self._open.values():
            span.args["unfinished"] = True
            yield span.end(at_ns, self._zero_ns)
        self._open.clear()
        if self._call is not None:
            self._call[1].args["unfinished"] = True
            yield self._call[1].end(at_ns, self._zero_ns)
            self._call = None
        for thread, span in list(self._holds.items()):
            span.args["unfinished"] = True
            yield from self._hold(thread, "", at_ns)

    def _see(self, event: Event, at_ns: int) -> Drawn:
        match event:
            case Started():
                yield self._instant(f"starts as incarnation {event.incarnation[:8]}", at_ns)
            case SnapshotReceived():
                yield self._instant(f"told what is desired as of seq {event.seq}", at_ns)
            case LeaseExpired():
                yield self._instant("the lease of the bus is over", at_ns)
            case CommandReceived():
                if event.seq not in self._open:
                    args: dict[str, object] = {"kind": "decide", "seq": event.seq, "epoch": event.epoch}
                    name = f"{_named(event.command)} (seq {event.seq})"
                    self._open[event.seq] = Span(self._lanes, "commands", name, at_ns, args)
            case EngineReturned():
                yield from self._returned(event, at_ns)
            case EngineObserved():
                yield from self._observed(event.observation, at_ns)

    def _answer(self, answer: Answer, at_ns: int) -> Drawn:
        span = self._open.pop(answer.seq, None)
        if span is None:  # told again, or of a command that was settled by a snapshot
            yield self._instant(f"{_short(answer.outcome)} (seq {answer.seq})", at_ns)
            return
        span.name = f"{span.name}: {_short(answer.outcome)}"
        span.args.update({"row": answer.rule, **_said(answer.outcome)})
        drawn = span.end(at_ns, self._zero_ns)
        yield drawn
        yield from self._arrows.decided(answer.seq, drawn)

    def _returned(self, event: EngineReturned, at_ns: int) -> Drawn:
        if self._call is not None and self._call[0].call_id == event.call_id:
            perform, span = self._call
            self._call = None
            fault = event.result if isinstance(event.result, Fault) else None
            if fault is not None:
                span.name = f"{span.name}: failed"
                span.args.update({"fault": fault.kind, "message": fault.message})
            yield span.end(at_ns, self._zero_ns)
            if fault is None:
                yield from self._done(perform, at_ns)
        if event.observation is not None:
            yield from self._observed(event.observation, at_ns)

    def _done(self, perform: Perform, at_ns: int) -> Drawn:
        """What a call brought about; an engine that can tell says so itself."""
        match perform.call:
            case Pause():
                yield from self._hold("generation", "paused", at_ns)
            case Resume():
                yield from self._hold("generation", "", at_ns)
            case Sleep(tags=tags):
                yield from self._hold("memory", f"asleep: {' '.join(sorted(tags))}", at_ns)
            case Wake():
                yield from self._hold("memory", "", at_ns)
            case StartProfile(session=session):
                yield from self._hold("profile session", f"profile step {session.step}", at_ns)
            case StopProfile():
                yield from self._hold("profile session", "", at_ns)
            case Load(version=version):
                yield from self._holds_version(version, at_ns)

    def _observed(self, seen: Observation, at_ns: int) -> Drawn:
        if seen.generating is not None:
            yield from self._hold("generation", "" if seen.generating else "paused", at_ns)
        if seen.asleep is not None:
            yield from self._hold("memory", f"asleep: {' '.join(sorted(seen.asleep))}" if seen.asleep else "", at_ns)
        if seen.profiling is False:
            yield from self._hold("profile session", "", at_ns)
        if seen.version is not None:
            yield from self._holds_version(seen.version, at_ns)

    def _hold(self, thread: str, name: str, at_ns: int) -> Drawn:
        """From now on it is so; an empty name ends it."""
        span = self._holds.get(thread)
        if span is not None and span.name != name:
            yield self._holds.pop(thread).end(at_ns, self._zero_ns)
        if name and thread not in self._holds:
            self._holds[thread] = Span(self._lanes, thread, name, at_ns)

    def _holds_version(self, version: int, at_ns: int) -> Drawn:
        if self._counter and version != self._version:
            self._version = version
            ts, pid = us(at_ns - self._zero_ns), self._lanes.pid
            args: dict[str, object] = {"value": version}
            yield TraceEvent(ph="C", pid=pid, tid=pid, name=self._counter, cat=CATEGORY, ts=ts, args=args)

    def _instant(self, name: str, at_ns: int) -> TraceEvent:
        return _instant(self._lanes, "events", name, at_ns - self._zero_ns)


class Control:
    """All that the bus and its agents did.

    early_ns: by how much, at most, commands seemed to reach an incarnation of an agent before they were issued.

    lanes: the process of each agent, and of the bus under "".   zero_ns: the beginning of the timeline.
    """

    def __init__(self, survey: Survey, zero_ns: int, lanes: dict[str, Lanes]) -> None:
        self.early_ns: dict[str, int] = {}
        self._survey, self._zero_ns, self._lanes = survey, zero_ns, lanes

    def events(self, entries: Iterable[LogEntry]) -> Drawn:
        """From the log's first record to the last that was surveyed."""
        survey, zero_ns, arrows = self._survey, self._zero_ns, Arrows()
        bus = BusTrack(self._lanes[""], zero_ns, arrows)
        agents: dict[str, AgentTrack] = {}
        for one in decoded(survey.surveyed(entries)):
            if isinstance(one, BusRecord):
                yield from bus.take(one.event, one.effects, one.at_ns)
                continue
            if one.agent not in agents:
                lanes, counter = self._lanes[one.agent], self._counter(one.agent)
                agents[one.agent] = AgentTrack(lanes, zero_ns, arrows, counter)
            at_ns = survey.moment_ns(one.peer, one.event.at_ms)
            if isinstance(one.event, CommandReceived) and (issued_ns := bus.published.get(one.event.seq, 0)) > at_ns:
                self.early_ns[one.peer] = max(issued_ns - at_ns, self.early_ns.get(one.peer, 0))
                at_ns = issued_ns
            yield from agents[one.agent].take(one.peer, one.event, one.effects, at_ns)
        yield from bus.end(survey.last_ns)
        for track in agents.values():
            yield from track.end(survey.last_ns)
        for process in self._lanes.values():
            yield from process.names

    def _counter(self, agent: str) -> str:
        """Of the weights; training ranks hold none, and nodes above the first none of their own."""
        place = self._survey.places.get(agent)
        if place is None or place.role != ROLLOUT or place.node_rank > 0:
            return ""
        return f"replica {place.replica} weight version"


def _instant(lanes: Lanes, thread: str, name: str, since_ns: int, args: dict[str, object] | None = None) -> TraceEvent:
    tid, ts = lanes.tid(thread), us(since_ns)
    return TraceEvent(ph="i", pid=lanes.pid, tid=tid, name=name, cat=CATEGORY, ts=ts, s="t", args=args or {})


def _named(command: Command | UnknownCommand) -> str:
    return f"unknown command {command.tag}" if isinstance(command, UnknownCommand) else describe(command)


def _agent(peer: str) -> str:
    return peer.partition("/")[0]


def _short(outcome: Conclusion) -> str:
    match outcome:
        case Acted(calls=calls):
            return f"acted ({', '.join(calls)})" if calls else "acted"
        case Skipped(reason=reason):
            return f"skipped {reason}"
        case Failed(error=error):
            return f"failed {error}"
        case Missing(reason=why):
            return f"missing ({why})"


def _said(outcome: Conclusion) -> dict[str, object]:
    said: dict[str, object] = {"outcome": str(outcome.__struct_config__.tag)}
    if isinstance(outcome, Failed):
        said["message"] = outcome.message
    if isinstance(outcome, Acted) and outcome.traces:
        said["traces"] = [one.path for one in outcome.traces]
    return said
