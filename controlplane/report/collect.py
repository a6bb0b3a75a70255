"""One recorded run as a person wants to see it: what went wrong, then everything else. Pure: log entries in, facts out.

One pass over the log. What is kept grows with the number of agents and of commands, never with that of answers: who
answered alike is one line, latencies are counted in buckets (`controlplane.report.histogram`), and each list has an
end, with the number of what is left out.

Times are the wall clock of the bus, in ns; durations are of its monotonic clock, in µs. What engines were seen to hold
is from their own agents' records, as far as the log has them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

from msgspec import Struct

from controlplane.machine.events import (
    AnswersReceived,
    Closed,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    JoinReceived,
    Opened,
    PeerLost,
    Publish,
    Refuse,
    StatusReceived,
)
from controlplane.record.entries import LogEntry
from controlplane.record.invariants import Violation, verify
from controlplane.report.fleet_history import AgentFacts, Fleet, Quarantine, ReplicaTime, place
from controlplane.report.histogram import Spread
from controlplane.report.model import (
    CommandFacts,
    Phase,
    Step,
    Straggler,
    Trouble,
    alike,
    holds,
    in_short,
    in_words,
    kind_of,
    phases,
    ranked,
    replicas_in_short,
    target_in_words,
)
from schemas.commands import Command, ProfileCommand, UnknownCommand, WeightSync
from schemas.errors import LogCorrupt
from schemas.events import Answer, Effect, EngineObserved, EngineReturned, Event, Observation, Perform, Started
from schemas.outcomes import Acted, Failed, Missing
from schemas.reports import AgentOutcome, Report, SyncReport
from schemas.wire import decode_command

KEPT_COMMANDS = 6_000
"""Commands that are kept, the newest; older steps are kept besides if something went wrong in them."""
STEP_COMMANDS = 200
"""Commands of one step, at most: a fleet whose weights are never synced has steps, too."""
TROUBLES = 400
TEXT = 1_200
"""Characters of a message that are shown."""
TRACES = 64
"""Traces that are named for one command."""

T = TypeVar("T")


class RunReport(Struct, kw_only=True):
    """What the page shows. damage: where the log could not be read on; nothing after it is here.

    left_out: how many of what is counted and not kept.   ended: the bus closed in good order.   unended: commands
    without a report.   untraced: commands after which a rank lacked its trace.
    """

    run: str
    start_ns: int
    end_ns: int
    records: int
    epochs: int
    ended: bool
    version: int
    commands: int
    counts: dict[str, int]
    troubles: list[Trouble]
    refused: list[tuple[int, str]]
    violations: list[Violation]
    untraced: int
    left_out: dict[str, int]
    damage: str
    agents: list[AgentFacts]
    quarantines: list[Quarantine]
    unended: list[CommandFacts]
    steps: list[Step]
    phases: list[Phase]
    calls: list[Phase]
    stragglers: list[Straggler]
    time: ReplicaTime

    @property
    def out_now(self) -> list[Quarantine]:
        """Replicas that are out of service at the end of the log."""
        return [one for one in self.quarantines if one.until_ns is None]

    @property
    def gone_now(self) -> list[AgentFacts]:
        """Agents that were lost and had not come back at the end of the log."""
        return [one for one in self.agents if one.membership == "gone"]

    @property
    def unready(self) -> list[AgentFacts]:
        """Agents that were in the fleet at the end of the log, and had not got their engines as desired."""
        return [one for one in self.agents if one.unready]

    @property
    def lost(self) -> list[AgentFacts]:
        """Agents that were ever lost."""
        return [one for one in self.agents if one.losses_count]

    @property
    def tone(self) -> Literal["bad", "warn", "ok"]:
        """bad: something is wrong at the end, or can't be trusted.   warn: something was, and is over, or goes on."""
        if self.out_now or self.gone_now or self.violations or self.damage:
            return "bad"
        wrong = self.troubles or self.quarantines or self.lost or self.refused or self.untraced
        return "warn" if wrong or self.unended or self.unready else "ok"

    @property
    def verdict(self) -> str:
        """The run in a line."""
        amounts = {
            "failed": self.counts["failed"],
            "missing": self.counts["missing"],
            "out of service": len(self.out_now),
            "quarantined for a time": len(self.quarantines) - len(self.out_now),
            "gone": len(self.gone_now),
            "lost for a time": len(self.lost) - sum(1 for one in self.lost if one.membership == "gone"),
            "not ready": len(self.unready),
            "not ended": len(self.unended),
            "without a trace": self.untraced,
            "refused": len(self.refused) + self.left_out["refused"],
            "broken invariants": len(self.violations) + self.left_out["violations"],
            "damaged": int(bool(self.damage)),
        }
        told = [f"{count:,} {word}" for word, count in amounts.items() if count]
        return ", ".join(told) if told else "nothing failed"


def gather(entries: Iterable[LogEntry]) -> RunReport:
    """Everything that a page about these entries shows. Where they can't be read on is told in it."""
    gathering = Gathering()
    source = iter(entries)
    damage = ""
    try:
        for violation in verify(gathering.passing(source)):
            gathering.violated(violation)
    except LogCorrupt as error:
        damage = str(error)
        with suppress(LogCorrupt):  # of a log that is damaged in several places, the first is told
            gathering.rest(source)
    return gathering.report(damage)


class Gathering:
    """The fold behind `gather`."""

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._run, self._records, self._epochs, self._version, self._commands = "", 0, 0, 0, 0
        self._closed = False
        self._at_us = 0
        self._open: dict[int, tuple[CommandFacts, int]] = {}  # by seq: the command, and when it was published (µs)
        self._steps: deque[Step] = deque()
        self._kept_commands = 0
        self._loud: list[Step] = []
        self._step = Step(title="", commands=[], profiled=[])
        self._untraced = 0
        self._counts = {"acted": 0, "skipped": 0, "failed": 0, "missing": 0}
        self._troubles: list[Trouble] = []
        self._refused: list[tuple[int, str]] = []
        self._violations: list[Violation] = []
        self._left_out: dict[str, int] = {"commands": 0, "troubles": 0, "refused": 0, "violations": 0, "unreadable": 0}
        self._phases: dict[str, Spread] = {}
        self._calls: dict[str, Spread] = {}
        self._stragglers: dict[str, Straggler] = {}
        self._seen: dict[str, Observation] = {}  # by agent: what its engine was last seen to be, in its own records
        self._calling: dict[str, tuple[int, str, int]] = {}  # by agent: id, name and start (ms) of the call under way
        self._held: dict[tuple[str, int], str] = {}  # by agent and seq, of what failed

    def passing(self, entries: Iterable[LogEntry]) -> Iterator[LogEntry]:
        """Take each entry, and hand it on."""
        for entry in entries:
            self.take(entry)
            yield entry

    def rest(self, entries: Iterator[LogEntry]) -> None:
        """Take what can be read after a record that could not, as far as the file gives any."""
        for entry in entries:
            try:
                self.take(entry)
            except LogCorrupt:
                self._left_out["unreadable"] += 1

    def take(self, entry: LogEntry) -> None:
        """One record. Raises LogCorrupt for one that can't be read."""
        self._records += 1
        if entry.agent:
            self._take_agents(entry)
            return
        self._fleet.lanes.at(entry.at_ns)
        event, effects = entry.typed_event(), entry.typed_effects()
        self._take_bus(event, effects)  # type: ignore[arg-type]

    def violated(self, violation: Violation) -> None:
        """An invariant of the log does not hold."""
        self._keep(self._violations, violation, "violations")

    def report(self, damage: str) -> RunReport:
        """What was gathered until here."""
        if self._step.commands:
            self._end_step(self._goes_on())
        for trouble in self._troubles:
            held = ((name, self._held.get((name, trouble.seq), "")) for name in trouble.names)
            trouble.held = tuple((name, text) for name, text in held if text)
        lanes = self._fleet.lanes
        return RunReport(
            run=self._run,
            start_ns=lanes.start_ns,
            end_ns=lanes.end_ns,
            records=self._records,
            epochs=self._epochs,
            ended=self._closed,
            version=self._version,
            commands=self._commands,
            counts=self._counts,
            troubles=self._troubles,
            refused=self._refused,
            violations=self._violations,
            untraced=self._untraced,
            left_out=self._left_out,
            damage=damage,
            agents=self._fleet.facts(),
            quarantines=self._fleet.quarantines,
            unended=[facts for facts, _ in self._open.values()],
            steps=[*self._loud, *self._steps],
            phases=phases(self._phases),
            calls=phases(self._calls),
            stragglers=ranked(self._stragglers.values()),
            time=self._fleet.time(),
        )

    # --- the bus ------------------------------------------------------------------------------------------------------

    def _take_bus(self, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]) -> None:
        now_ns = self._fleet.lanes.end_ns
        self._at_us = event.at_us
        match event:
            case Opened():
                if self._step.commands:
                    self._end_step("the trainer ended or died here")
                self._run, self._closed = event.run, False
                self._epochs += 1
                self._fleet.opened()
            case Closed():
                self._closed = True
            case HelloReceived():
                self._fleet.hello(event, effects)
            case StatusReceived():
                self._fleet.status(event)
            case PeerLost():
                self._fleet.lost(event)
            case AnswersReceived():
                for answer in event.answers:
                    self._fleet.answered(answer)
            case _:
                pass
        if isinstance(event, JoinReceived):
            self._fleet.joined(event.peer)
        for effect in effects:
            match effect:
                case Publish():
                    self._published(effect, now_ns)
                case Conclude(report=Report() as report):
                    self._concluded(report)
                case Conclude(report=SyncReport() as sync):
                    self._synced(sync)
                case Refuse():
                    self._keep(self._refused, (now_ns, effect.reason), "refused")
                case _:
                    pass

    def _published(self, effect: Publish, now_ns: int) -> None:
        command = decode_command(effect.envelope.body)
        facts = CommandFacts(
            seq=effect.seq, at_ns=now_ns, words=in_words(command), target=target_in_words(effect.envelope.target)
        )
        self._commands += 1
        if len(self._step.commands) >= STEP_COMMANDS or self._profiles_anew(command):
            self._end_step(self._goes_on())
        self._step.commands.append(facts)
        self._open[effect.seq] = facts, self._at_us
        if (
            isinstance(command, ProfileCommand)
            and command.action == "start"
            and command.step not in self._step.profiled
        ):
            self._step.profiled.append(command.step)
        if isinstance(command, WeightSync):
            self._fleet.commanded(command, effect.envelope.target)

    def _profiles_anew(self, command: Command | UnknownCommand) -> bool:
        """A profile of another training step begins, and no weight sync ended the one before."""
        return (
            isinstance(command, ProfileCommand)
            and command.action == "start"
            and bool(self._step.profiled)
            and command.step not in self._step.profiled
        )

    def _concluded(self, report: Report) -> None:
        facts, since_us = self._open.pop(report.seq, (None, 0))
        if facts is None:
            return  # the invariants say so
        facts.ended = True
        facts.duration_us = max((one.latency_us for one in report.outcomes), default=max(0, self._at_us - since_us))
        if any(_left_open(one) for one in report.outcomes):  # by a life of the trainer whose clock is not this one's
            facts.duration_us = max(0, self._fleet.lanes.end_ns - facts.at_ns) // 1000
        facts.said = alike(report.outcomes)
        for said in facts.said:
            self._counts[said.what] += said.count
        acted = [one.conclusion for one in report.outcomes if isinstance(one.conclusion, Acted)]
        traces = [trace for one in acted for trace in one.traces]
        facts.traces, facts.traces_count = tuple(traces[:TRACES]), len(traces)
        facts.traces_nbytes = sum(trace.nbytes for trace in traces)
        facts.untraced = tuple(sorted({rank for one in acted for rank in one.ranks_without_trace}))
        self._untraced += bool(facts.untraced)
        running = [
            one.agent for one in report.outcomes if isinstance(one.conclusion, Acted) and one.conclusion.still_running
        ]
        facts.hooks = in_short(running)
        spread = self._phases.setdefault(kind_of(report.command), Spread())
        for one in report.outcomes:
            if isinstance(one.conclusion, Acted):
                spread.add(one.latency_us)
        self._waited(report)
        if facts.bad:
            self._trouble(facts, report.outcomes)

    def _synced(self, sync: SyncReport) -> None:
        if sync.status == "committed":
            self._version = max(self._version, sync.version)
            self._fleet.committed(sync.version)
        out = f", {replicas_in_short(sync.quarantined)} left out" if sync.quarantined else ""
        where = f" on {replicas_in_short(sync.loaded)}" if sync.loaded else ""
        self._step.flawed = bool(sync.quarantined) or sync.status == "aborted"
        self._end_step(f"weights v{sync.version} {sync.status}{where}{out}")

    def _end_step(self, title: str) -> None:
        step, self._step = self._step, Step(title="", commands=[], profiled=[])
        step.title = title
        if not step.commands:
            return
        self._steps.append(step)
        self._kept_commands += len(step.commands)
        while self._kept_commands > KEPT_COMMANDS and len(self._steps) > 1:
            oldest = self._steps.popleft()
            self._kept_commands -= len(oldest.commands)
            if oldest.bad and len(self._loud) < TROUBLES:
                self._loud.append(oldest)
            else:
                self._left_out["commands"] += len(oldest.commands)

    def _goes_on(self) -> str:
        return f"after weights v{self._version}" if self._version else "before any weight sync"

    def _trouble(self, facts: CommandFacts, outcomes: Sequence[AgentOutcome]) -> None:
        same: dict[tuple[str, str, str], list[str]] = {}
        for one in outcomes:
            match one.conclusion:
                case Failed(error=error, message=message):
                    same.setdefault(("failed", str(error), message), []).append(one.agent)
                    self._fleet.failed(one.agent)
                case Missing() as missing:
                    same.setdefault(("missing", missing.reason, ""), []).append(one.agent)
                    self._fleet.missed(one.agent)
                    if len(self._held) < 8 * TROUBLES:
                        self._held[one.agent, facts.seq] = self._fleet.last_heard(one.agent)
                case _:
                    pass
        for (what, why, message), agents in same.items():
            trouble = Trouble(
                seq=facts.seq,
                at_ns=facts.at_ns,
                words=facts.words,
                what=what,
                reason=why,
                message=message if len(message) <= TEXT else f"{message[:TEXT]}… ({len(message)} characters)",
                agents=in_short(agents, 64),
                names=tuple(sorted(agents, key=place)[:8]),
                count=len(agents),
            )
            self._keep(self._troubles, trouble, "troubles")

    def _waited(self, report: Report) -> None:
        """Who was the last, and how far behind the median."""
        acted = sorted((one.latency_us, one.agent) for one in report.outcomes if isinstance(one.conclusion, Acted))
        for one in report.outcomes:
            if isinstance(one.conclusion, Missing) and not _left_open(one):
                self._straggler(one.agent).missing += 1
        if len(acted) < 2:
            return
        for _, agent in acted:
            self._straggler(agent).acted += 1
        slowest_us, agent = acted[-1]
        behind_us = slowest_us - acted[(len(acted) - 1) // 2][0]
        straggler = self._straggler(agent)
        straggler.last += 1
        straggler.behind_us += behind_us
        if behind_us > straggler.worst_us:
            straggler.worst_us, straggler.worst_seq = behind_us, report.seq

    def _straggler(self, agent: str) -> Straggler:
        return self._stragglers.setdefault(agent, Straggler(agent=agent))

    def _keep(self, kept: list[T], one: T, what: str) -> None:
        if len(kept) < TROUBLES:
            kept.append(one)
        else:
            self._left_out[what] += 1

    # --- the agents' own records --------------------------------------------------------------------------------------

    def _take_agents(self, entry: LogEntry) -> None:
        """What engines were seen to be and how long their calls took. Other records are left to the invariants."""
        plain = entry.kind in ("command", "head", "tick") and b"perform" not in bytes(entry.effects)
        if plain and b"failed" not in bytes(entry.effects):
            return
        event: Event = entry.typed_event()  # type: ignore[assignment]
        effects: tuple[Effect, ...] = entry.typed_effects()  # type: ignore[assignment]
        agent = entry.agent
        if isinstance(event, Started):
            self._seen.pop(agent, None)
            self._calling.pop(agent, None)
        elif isinstance(event, EngineReturned):
            call_id, name, since_ms = self._calling.pop(agent, (0, "", 0))
            if call_id == event.call_id:
                self._calls.setdefault(name, Spread()).add((event.at_ms - since_ms) * 1000)
        seen = event.observation if isinstance(event, EngineReturned | EngineObserved) else None
        if seen is not None:
            before = self._seen.get(agent)
            self._seen[agent] = seen
            self._fleet.observed(agent, seen, before)
        for effect in effects:
            if isinstance(effect, Perform):
                self._calling[agent] = effect.call_id, str(effect.call.__struct_config__.tag), event.at_ms
            elif isinstance(effect, Answer) and isinstance(effect.outcome, Failed):
                self._note_held(agent, effect.seq)

    def _note_held(self, agent: str, seq: int) -> None:
        if agent in self._seen and len(self._held) < 8 * TROUBLES:
            self._held[agent, seq] = holds(self._seen[agent])


def _left_open(outcome: AgentOutcome) -> bool:
    """The trainer ended before the agent answered, and nobody waited for it any more."""
    return isinstance(outcome.conclusion, Missing) and outcome.conclusion.reason == "bus_restarted"
