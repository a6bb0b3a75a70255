"""Renders a run's report as one HTML file that needs nothing else.

Text from a log stays text: the template escapes every value, and the page's Content-Security-Policy allows no script
except the one whose digest it names, and no requests.
"""

import base64
import datetime
import hashlib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Final, TextIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from controlplane.report.collect import RunReport
from controlplane.report.histogram import UNKNOWN, ReplicaColumns
from controlplane.report.model import CommandSummary, OutcomeGroup

HERE: Final = Path(__file__).parent
MAX_DRAWN: Final = 32
"""Replicas whose state over time is drawn; those that had a problem come first."""
MAX_DRAWN_GOOD: Final = 4
"""Of replicas without a problem, in a larger fleet."""
HEIGHT: Final = 40
"""Of the drawing of one replica."""
MAX_AGENTS: Final = 48
"""Agents in the table. In a larger fleet, agents without a problem are folded away."""


def write_page(page: TextIO, report: RunReport, run: str, log: str) -> None:
    """Write the page.

    Args:
        page: Where to.
        report: What to show.
        run: The run's id.
        log: Name of the log's file.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(clock=_clock, date=_date, span=_span, us=_us, size=_size, count=_count, of_kind=_of_kind)
    script = (HERE / "page.js").read_text("utf-8")
    folded = [agent for agent in report.agents if agent.healthy] if len(report.agents) > MAX_AGENTS else []
    values = {
        "report": report,
        "run": run,
        "log": log,
        "made_by": version("rolloutctl"),
        "style": Markup((HERE / "page.css").read_text("utf-8")),
        "script": Markup(script),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "drawings": _draw(report),
        "axis": _axis(report),
        "agents": [agent for agent in report.agents if not (folded and agent.healthy)],
        "folded_agents": folded,
    }
    page.writelines(environment.get_template("page.html.j2").generate(values))


# --- formatting -------------------------------------------------------------------------------------------------------


def _moment(ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ns / 1e9, datetime.UTC)


def _clock(ns: int) -> str:
    return _moment(ns).strftime("%H:%M:%S.%f")[:-3]


def _date(ns: int) -> str:
    return _moment(ns).strftime("%Y-%m-%d")


def _us(us: int) -> str:
    """A duration in µs, with up to three digits."""
    if us < 1000:
        return f"{us} µs"
    if us < 1_000_000:
        return f"{us / 1000:.{1 if us < 10_000 else 0}f} ms"
    return _span(us * 1000)


def _span(ns: int) -> str:
    """A duration in ns."""
    seconds = ns / 1e9
    if seconds < 1:
        return _us(ns // 1000)
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60:02} min"
    return f"{minutes} min {round(seconds) % 60:02} s"


def _size(nbytes: int) -> str:
    amount, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def _percent(amount: int, whole: int) -> str:
    percent = 100 * amount / max(1, whole)
    return "under 0.1 %" if 0 < percent < 0.1 else f"{percent:.{1 if percent < 10 else 0}f} %"


def _of_kind(command: CommandSummary, kind: str) -> list[OutcomeGroup]:
    return [group for group in command.outcomes if group.kind == kind]


# --- drawings ---------------------------------------------------------------------------------------------------------


class _Drawing(Struct, frozen=True, kw_only=True):
    """One replica over time: paths by their class in the style sheet, and a note that says the same."""

    replica: int
    bad: bool
    paths: list[tuple[str, str]]
    note: str


class _Drawings(Struct, frozen=True):
    shown: list[_Drawing]
    hidden: int
    hidden_bad: int


def _draw(report: RunReport) -> _Drawings:
    drawings = [_draw_replica(replica, columns, report) for replica, columns in report.history.replicas.items()]
    bad = [drawing for drawing in drawings if drawing.bad]
    good = [drawing for drawing in drawings if not drawing.bad]
    max_good = max(MAX_DRAWN_GOOD, MAX_DRAWN - len(bad)) if len(good) <= MAX_DRAWN else MAX_DRAWN_GOOD
    shown = [*bad[:MAX_DRAWN], *good[:max_good]]
    return _Drawings(shown, len(drawings) - len(shown), max(0, len(bad) - MAX_DRAWN))


def _draw_replica(replica: int, columns: ReplicaColumns, report: RunReport) -> _Drawing:
    history = report.history
    committed = _extend(history.committed.versions, history.columns)
    versions = _extend(columns.versions, history.columns)
    behind = [UNKNOWN < held < wanted for held, wanted in zip(versions, committed, strict=True)]
    known = [version for version in (*versions, *committed) if version != UNKNOWN]
    low, high = min(known, default=0), max(known, default=0)

    def height(version: int) -> float:
        return round(HEIGHT - 6 - (HEIGHT - 12) * (version - low) / max(1, high - low), 1)

    shades = [min(4, -(-4 * paused_ns // history.quantum_ns)) for paused_ns in columns.paused]
    late = [version if is_behind else UNKNOWN for version, is_behind in zip(versions, behind, strict=True)]
    paths = [
        *((f"paused{level}", _blocks(shade == level for shade in shades)) for level in (1, 2, 3, 4)),
        ("out", _blocks(out_ns > 0 for out_ns in columns.out)),
        ("gone", _blocks(gone_ns > 0 for gone_ns in columns.gone)),
        ("committed", _steps(committed, height)),
        ("version", _steps(versions, height)),
        ("behind", _steps(late, height)),
    ]
    out, gone, paused = sum(columns.out), sum(columns.gone), sum(columns.paused)
    parts = [f"v{columns.latest}" if columns.latest != UNKNOWN else "version unknown"]
    parts += [f"out of service for {_span(out)}"] if out else []
    parts += [f"lost for {_span(gone)}"] if gone else []
    parts += [f"behind the fleet for {_span(sum(behind) * history.quantum_ns)}"] if any(behind) else []
    parts += [f"paused for {_span(paused)}, {_percent(paused, report.end_ns - report.start_ns)}"] if paused else []
    drawn = [(name, path) for name, path in paths if path]
    return _Drawing(replica=replica, bad=bool(out or gone or any(behind)), paths=drawn, note="; ".join(parts))


def _extend(versions: list[int], columns: int) -> list[int]:
    """Repeat the last version up to the end of the run."""
    last = versions[-1] if versions else UNKNOWN
    return (versions + [last] * (columns - len(versions)))[:columns]


def _runs(values: Iterable[int]) -> Iterable[tuple[int, int, int]]:
    """Runs of equal values: the value, the first column, and the column after the last."""
    start = 0
    for value, same in groupby(values):
        end = start + sum(1 for _ in same)
        yield value, start, end
        start = end


def _blocks(marked: Iterable[bool]) -> str:
    """A path of rectangles over the marked columns."""
    return "".join(f"M{start} 0H{end}V{HEIGHT}H{start}Z" for is_marked, start, end in _runs(marked) if is_marked)


def _steps(versions: Sequence[int], height: Callable[[int], float]) -> str:
    """A path through the versions, with gaps where the version is unknown."""
    path, previous = "", UNKNOWN
    for version_, start, end in _runs(versions):
        if version_ != UNKNOWN:
            path += f"V{height(version_)}H{end}" if previous != UNKNOWN else f"M{start} {height(version_)}H{end}"
        previous = version_
    return path


class _Axis(Struct, frozen=True):
    """Width of the drawings, paths of commits and of the bus's lives, and evenly spaced moments."""

    columns: int
    commits: str
    opened: str
    labels: list[int]


def _axis(report: RunReport) -> _Axis:
    history = report.history
    committed = history.committed.versions
    changes = [column for column in range(1, len(committed)) if committed[column] != committed[column - 1]]
    return _Axis(
        columns=max(1, history.columns),
        commits="".join(f"M{column} 0V6" for column in changes),
        opened="".join(f"M{column} 0V{HEIGHT}" for column in history.opened if column > 0),
        labels=[report.start_ns + (report.end_ns - report.start_ns) * quarter // 4 for quarter in range(5)],
    )
