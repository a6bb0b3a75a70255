"""The facts of a run's report, and the words and figures that they are put in. Pure.

Times are the wall clock of the bus, in ns; durations are of its monotonic clock, in µs.
"""

from collections.abc import Iterable

from msgspec import Struct

from controlplane.report.fleet_history import place
from controlplane.report.histogram import Spread
from schemas.commands import Command, ProfileCommand, Target, UnknownCommand, WeightSync
from schemas.events import Observation
from schemas.formatting import describe
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Skipped, Trace
from schemas.reports import AgentOutcome

STRAGGLERS = 20
"""Stragglers that are named."""


class Said(Struct, frozen=True, kw_only=True):
    """Agents that concluded a command alike. what: acted, skipped, failed or missing.   why: reason, kind of error."""

    what: str
    reason: str
    agents: str
    count: int


class CommandFacts(Struct, kw_only=True):
    """One command. target: in words.   ended: its report is in the log.   duration_us: from publishing to the end.

    untraced: global ranks that were to leave a trace and did not.   hooks: agents whose finish went on.
    """

    seq: int
    at_ns: int
    words: str
    target: str
    ended: bool = False
    duration_us: int = 0
    said: tuple[Said, ...] = ()
    traces: tuple[Trace, ...] = ()
    traces_count: int = 0
    traces_nbytes: int = 0
    untraced: tuple[int, ...] = ()
    hooks: str = ""

    @property
    def bad(self) -> bool:
        """Somebody failed or is missing, or it never ended."""
        return not self.ended or any(one.what in ("failed", "missing") for one in self.said)


class Step(Struct, kw_only=True):
    """Commands that belong together: everything from the end of one weight sync to the end of the next.

    title: what it led to.   profiled: training steps with a profile session.   flawed: its sync did not go well.
    """

    title: str
    commands: list[CommandFacts]
    profiled: list[int]
    flawed: bool = False

    @property
    def bad(self) -> bool:
        """The sync left a replica out or was aborted, or a command in it did not end well."""
        return self.flawed or any(one.bad for one in self.commands)


class Trouble(Struct, kw_only=True):
    """Agents that failed one command in the same way, or that did not answer it. held: by agent, what its engine was
    seen to hold just after.
    """

    seq: int
    at_ns: int
    words: str
    what: str
    reason: str
    message: str
    agents: str
    names: tuple[str, ...]
    count: int
    held: tuple[tuple[str, str], ...] = ()


class Phase(Struct, frozen=True, kw_only=True):
    """How long one kind of command, or of engine call, took: over all agents that acted."""

    name: str
    count: int
    p50_us: int
    p95_us: int
    max_us: int


class Straggler(Struct, kw_only=True):
    """How one agent kept others waiting. acted: commands in which it and another one did.   last: how often it was
    the last.   behind_us: by how much in all, against the median of those that acted with it.   worst_us, worst_seq:
    the one time it was furthest behind.   missing: commands that it never answered.
    """

    agent: str
    acted: int = 0
    last: int = 0
    behind_us: int = 0
    worst_us: int = 0
    worst_seq: int = 0
    missing: int = 0


# --- in words ---------------------------------------------------------------------------------------------------------


def in_short(agents: Iterable[str], most: int = 8) -> str:
    """Agents in at most so many words: those of one node rank and of replicas in a row are `first … last`."""
    rows: dict[tuple[bool, str, int], list[int]] = {}
    for training, role, first, second in sorted(place(agent) for agent in agents):
        rows.setdefault((training, role, second), []).append(first)
    words = []
    for (training, role, second), numbers in sorted(rows.items()):
        before, after = (f"{role}.", "") if training else ("", f".{second}")
        words += [word for row in _in_rows(numbers) for word in _row_in_short(row, before, after)]
    return _shortened(words, most)


def replicas_in_short(replicas: Iterable[int | str]) -> str:
    """Replicas, by number, and training ranks, by name."""
    named = list(replicas)
    numbers = sorted(one for one in named if isinstance(one, int))
    words = [word for row in _in_rows(numbers) for word in _row_in_short(row, "", "")]
    told = [f"{'replica' if len(numbers) == 1 else 'replicas'} {_shortened(words)}"] if numbers else []
    ranks = [one for one in named if isinstance(one, str)]
    return " and ".join([*told, *([in_short(ranks)] if ranks else [])])


def _in_rows(numbers: list[int]) -> list[list[int]]:
    """Numbers in ascending order, cut where one is left out."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and rows[-1][-1] == number - 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return rows


def _row_in_short(row: list[int], before: str, after: str) -> list[str]:
    named = [f"{before}{number}{after}" for number in row]
    return named if len(row) < 3 else [f"{named[0]} … {named[-1]}"]


def _shortened(words: list[str], most: int = 8) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def in_words(command: Command | UnknownCommand) -> str:
    """A command, for people."""
    return f"unknown command {command.tag}" if isinstance(command, UnknownCommand) else describe(command)


def kind_of(command: Command) -> str:
    """What commands have in common whose latencies are counted together."""
    match command:
        case WeightSync():
            return f"weights {command.phase}"
        case ProfileCommand():
            return f"profile {command.action}"
        case _:
            return describe(command)


def target_in_words(target: Target) -> str:
    """Whom a command is for."""
    return "all" if target.replicas is None else replicas_in_short(target.replicas)


def holds(seen: Observation) -> str:
    """What an engine was seen to hold and to do."""
    if seen.version is None and seen.generating is None:  # a training rank
        return "was profiling then" if seen.profiling else "was not profiling then"
    words = [f"v{seen.version}" if seen.version is not None else "weights that it can't name"]
    words += [f"digest {seen.digest[:12]}"] if seen.digest else []
    words += ["generating" if seen.generating else "paused"] if seen.generating is not None else []
    words += [f"asleep {' '.join(sorted(seen.asleep))}"] if seen.asleep else []
    words += ["profiling"] if seen.profiling else []
    words += [] if seen.tokenizer == "present" else [f"tokenizer {seen.tokenizer}"]
    return f"then held {', '.join(words)}"


# --- in figures -------------------------------------------------------------------------------------------------------


def alike(outcomes: Iterable[AgentOutcome]) -> tuple[Said, ...]:
    """Who concluded a command in the same way."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in outcomes:
        groups.setdefault(_conclusion(one.conclusion), []).append(one.agent)
    return tuple(
        Said(what=what, reason=why, agents=in_short(agents), count=len(agents))
        for (what, why), agents in sorted(groups.items())
    )


def _conclusion(conclusion: Conclusion) -> tuple[str, str]:
    match conclusion:
        case Acted():
            return "acted", ""
        case Skipped(reason=reason):
            return "skipped", str(reason)
        case Failed(error=error):
            return "failed", str(error)
        case Missing(reason=why):
            return "missing", why


def phases(spreads: dict[str, Spread]) -> list[Phase]:
    """Each kind with its percentiles."""
    return [
        Phase(name=name, count=one.count, p50_us=one.at(500), p95_us=one.at(950), max_us=one.largest)
        for name, one in sorted(spreads.items())
        if one.count
    ]


def ranked(stragglers: Iterable[Straggler]) -> list[Straggler]:
    """The worst first: who never answered, then who kept the others waiting for longest."""
    late = [one for one in stragglers if one.last or one.missing]
    return sorted(late, key=lambda one: (-one.missing, -one.behind_us, -one.last, place(one.agent)))[:STRAGGLERS]
