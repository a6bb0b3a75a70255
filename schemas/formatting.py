"""Commands, outcomes and agents as text for people: the one place for their wording, order and grouping. Pure.

Reports print by `Printable`: plain lines, colour in a terminal that rich writes to, HTML in a notebook.
"""

import html
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, assert_never

import msgspec
from msgspec import Struct

from schemas import commands
from schemas.identity import NAMES_CACHED, ROLLOUT, identity_of
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Skipped

MAX_LINES: Final = 20
"""Lines that a report prints at most."""
MAX_WIDTH: Final = 400
"""Characters of a printed line."""
MAX_LISTED: Final = 8
"""Names in a list, before `and N more`."""

_KINDS: Final = {Failed: "failed", Missing: "missing", Acted: "acted", Skipped: "skipped"}
"""Conclusions in the order in which they are shown: trouble first."""
_UNITS: Final = re.compile("....")
_MARKUP: Final = re.compile(r"(\\*)(\[[a-z#/@][^[]*?])")
"""What rich would take for a tag, as in `rich.markup.escape`."""
_VARIABLE: Final = re.compile(r"[0-9a-f]{12,}|\d+")


# --- text of others ---------------------------------------------------------------------------------------------------
# Whatever came from an engine, a host, a path or a peer passes through one of these before a person sees it.


def one_line(text: str) -> str:
    """Return the text with a space for each character that a terminal may act on.

    These are control characters, the beginnings of escape sequences, line breaks of any kind, marks that turn the
    direction of writing, and half characters that no terminal can be sent.
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def printable(text: str) -> str:
    """Return a text of several lines, each as `one_line` returns it."""
    return text if text.isprintable() else "\n".join(one_line(line) for line in text.split("\n"))


def json_text(value: object) -> str:
    """Return a value as JSON in one line. What a terminal may act on is in it as an escape, and means the same."""
    text = msgspec.json.encode(value).decode()
    return text if text.isprintable() else "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return _UNITS.sub(r"\\u\g<0>", char.encode("utf-16-be").hex())


def markup(text: str) -> str:
    """Return the text as rich prints it: one line, nothing in it taken for a style. As `rich.markup.escape`."""
    escaped = _MARKUP.sub(r"\1\1\\\2", one_line(text))
    if escaped.endswith("\\") and not escaped.endswith("\\\\"):
        return escaped + "\\"  # it would escape the tag that follows
    return escaped


def without_numbers(text: str) -> str:
    """Return what a text has in common with those for other agents, commands and versions: no numbers, no digests."""
    return _VARIABLE.sub("0", text)


# --- wording ----------------------------------------------------------------------------------------------------------


def describe(command: commands.Command | commands.UnknownCommand) -> str:
    """Return a command in a few words."""
    return " ".join(_kind_and_object(command)).rstrip()


def command_kind(command: commands.Command | commands.UnknownCommand) -> str:
    """Return the kind of a command, by which it is counted: `profile start`, `weights load`, `pause`."""
    return _kind_and_object(command)[0]


def _kind_and_object(command: commands.Command | commands.UnknownCommand) -> tuple[str, str]:
    match command:
        case commands.ProfileCommand():
            return f"profile {command.action}", f"step {command.step}"
        case commands.EpochStart():
            return "epoch start", ""
        case commands.WeightSync():
            return f"weights {command.phase}", f"v{command.version}"
        case commands.AdapterSync():
            return f"adapter {command.phase}", command.adapter.model
        case commands.AdapterDrop():
            return "adapter drop", command.name
        case commands.Drain():
            return "drain", ""
        case commands.EngineCommand():
            return command.operation, ""
        case commands.UnknownCommand():
            return "unknown command", command.tag
        case _:
            assert_never(command)


def format_outcome(outcome: Conclusion) -> str:
    """Return one outcome in one line."""
    match outcome:
        case Acted():
            return _format_acted(outcome)
        case Skipped(reason=reason):
            return f"skipped {reason}"
        case Failed(error=error, message=message):
            return f"failed {error}: {message}"
        case Missing(reason="absent", away_ms=away_ms):
            return f"missing (absent for {format_duration(away_ms)})"
        case Missing(reason=reason):
            return f"missing ({reason})"
        case _:
            assert_never(outcome)


def format_duration(duration_ms: int) -> str:
    """Return a duration in its largest unit, rounded down: `3 min`."""
    seconds = duration_ms // 1000
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def format_clock(ns: int) -> str:
    """Return the time of day of a wall clock."""
    seconds, ms = divmod(ns // 1_000_000, 1000)
    return f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{ms:03} UTC"


def kind_and_reason(outcome: Conclusion) -> tuple[str, str]:
    """Return what became of a command, e.g. `skipped`, and the short reason, e.g. `not_primary`; empty for `acted`."""
    match outcome:
        case Acted():
            return "acted", ""
        case Skipped(reason=reason) | Missing(reason=reason):
            return _KINDS[type(outcome)], str(reason)
        case Failed(error=error):
            return "failed", str(error)
        case _:
            assert_never(outcome)


def _format_acted(acted: Acted) -> str:
    parts = [f"acted ({', '.join(acted.calls) or 'nothing to call'})"]
    parts += [f"version {acted.version}"] if acted.version is not None else []
    parts += [f"took the {acted.took}"] if acted.took else []
    parts += ["the engine had stopped by itself"] if acted.auto_stopped else []
    parts += ["still running"] if acted.still_running else []
    parts += [f"{len(acted.traces)} trace{'' if len(acted.traces) == 1 else 's'}"] if acted.traces else []
    parts += [f"no trace of ranks {format_list(acted.ranks_without_trace)}"] if acted.ranks_without_trace else []
    return "; ".join(parts)


def is_trouble(outcome: Conclusion) -> bool:
    """Return whether the agent should have acted, and did not."""
    return isinstance(outcome, Failed | Missing)


# --- order and grouping -----------------------------------------------------------------------------------------------


@lru_cache(NAMES_CACHED)
def agent_order(agent: str) -> tuple[bool, str, int, int]:
    """Sort key of agents' names: replicas first, by node rank, then training ranks by role."""
    identity = identity_of(agent)
    return identity.role != ROLLOUT, identity.role, identity.replica, identity.node_rank


def format_list(items: Iterable[object], limit: int = MAX_LISTED) -> str:
    """Return the items separated by commas, those beyond `limit` as `and N more`."""
    names = [str(item) for item in items]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def format_agents(agents: Iterable[str], limit: int = MAX_LISTED) -> str:
    """Return agents' names in order; three or more of consecutive replicas are shown as `first … last`."""
    rows: dict[tuple[bool, str, int], list[int]] = {}
    for training, role, first, node_rank in sorted(agent_order(agent) for agent in agents):
        rows.setdefault((training, role, node_rank), []).append(first)
    names = []
    for (training, role, node_rank), numbers in sorted(rows.items()):
        before, after = (f"{role}.", "") if training else ("", f".{node_rank}")
        names += _format_runs(numbers, before, after)
    return format_list(names, limit)


def format_replicas(replicas: Iterable[int | str]) -> str:
    """Return replicas, by index, and training ranks, by name: `replicas 0 … 3, 7 and actor.1`."""
    units = list(replicas)
    numbers = sorted(unit for unit in units if isinstance(unit, int))
    ranks = [unit for unit in units if isinstance(unit, str)]
    parts = [f"replica{'' if len(numbers) == 1 else 's'} {format_list(_format_runs(numbers))}"] if numbers else []
    parts += [format_agents(ranks)] if ranks else []
    return " and ".join(parts)


def _format_runs(numbers: Sequence[int], before: str = "", after: str = "") -> list[str]:
    """Ascending numbers, runs of three and more as `first … last`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names: list[str] = []
    for run in runs:
        named = [f"{before}{number}{after}" for number in run]
        names += named if len(run) < 3 else [f"{named[0]} … {named[-1]}"]
    return names


def count_outcomes(outcomes: Iterable[Conclusion]) -> str:
    """Return how many outcomes there are of each kind: `1 failed, 3 acted`."""
    kinds = [type(outcome) for outcome in outcomes]
    counts = [f"{kinds.count(kind)} {name}" for kind, name in _KINDS.items() if kind in kinds]
    return ", ".join(counts) or "no agents"


def group_outcomes(outcomes: Iterable[tuple[str, Conclusion, int]]) -> list["Line"]:
    """Return one line for each different outcome, with the agents that had it; failures first.

    Args:
        outcomes: For each agent its name, what it concluded, and the rule of the decision table; 0 if none.
    """
    groups: dict[tuple[int, str], list[str]] = {}
    order = list(_KINDS)
    for agent, outcome, rule in outcomes:
        text = format_outcome(outcome)
        if isinstance(outcome, Skipped) and rule:  # where to look up why
            text += f" (rule {rule})"
        groups.setdefault((order.index(type(outcome)), text), []).append(agent)
    lines = [
        (kind, min(agent_order(agent) for agent in agents), f"{format_agents(agents)}: {text}")
        for (kind, text), agents in groups.items()
    ]
    return [Line(text, order[kind] in (Failed, Missing)) for kind, _, text in sorted(lines)]


# --- printing ---------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One printed line.

    Attributes:
        trouble: It names something that is wrong, and is shown in red.
    """

    text: str
    trouble: bool = False


class Printable(Struct, frozen=True):
    """Prints as a few plain lines. A subclass gives the lines; the first is the headline."""

    def lines(self) -> list[Line]:
        """Return everything there is to say, the most important first."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(line.text for line in _shorten(self.lines()))

    def __rich__(self) -> str:
        lines = [(markup(line.text), line.trouble) for line in _shorten(self.lines())]
        return "\n".join(f"[red]{text}[/red]" if trouble else text for text, trouble in lines)

    def _repr_html_(self) -> str:
        lines = [(html.escape(line.text, quote=False), line.trouble) for line in _shorten(self.lines())]
        marked = [f'<span style="color:#b00020">{text}</span>' if trouble else text for text, trouble in lines]
        return "<pre>" + "\n".join(marked) + "</pre>"


def _shorten(lines: list[Line]) -> list[Line]:
    """At most MAX_LINES, each of them one line: the text of an outcome comes from an engine, and may hold anything."""
    lines = [Line(_cut(one_line(line.text)), line.trouble) for line in lines]
    left_out = lines[MAX_LINES - 1 :]
    if len(left_out) <= 1:
        return lines
    more = f"  … {len(left_out)} more lines"
    return [*lines[: MAX_LINES - 1], Line(more, any(line.trouble for line in left_out))]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_WIDTH else f"{text[:MAX_WIDTH]} …"
