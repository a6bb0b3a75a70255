"""The page about a recorded run: facts in, one HTML file out, with everything that it needs in it.

What comes from a log is text and stays text: the template escapes every value, and the page's own policy allows no
script but the one whose digest it names, and no request at all.
"""

import base64
import datetime
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TextIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from controlplane.report.collect import RunReport
from controlplane.report.fleet_history import AgentFacts, ReplicaTime
from controlplane.report.histogram import UNKNOWN, Painted
from controlplane.report.model import CommandFacts, Phase, Said

HERE = Path(__file__).parent
LANES = 32
"""Replicas whose course is drawn; those that were ever out of service come first."""
LANE_HEIGHT = 40
FLEET_ROWS = 48
"""Agents that are listed at once; of a larger fleet, only those with whom something was the matter."""


def write_page(page: TextIO, report: RunReport, run: str, log: str) -> None:
    """Write the page. run, log: names of the run and of its file."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        clock=_clock, date=_date, span=_span, us=_us, size=_size, many=_many, part=_part, said=_said
    )
    script = (HERE / "page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {
        "report": report,
        "run": run,
        "log": log,
        "made_by": version("rolloutctl"),
        "style": Markup((HERE / "page.css").read_text("utf-8")),
        "script": Markup(script),
        "digest": digest,
        "lanes": _lanes(report),
        "axis": _axis(report),
        "fleet": _fleet(report.agents),
        "bars": _bars(report.phases),
        "call_bars": _bars(report.calls),
    }
    page.writelines(environment.get_template("page.html.j2").generate(values))


# --- in words ---------------------------------------------------------------------------------------------------------


def _moment(ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ns / 1e9, datetime.UTC)


def _clock(ns: int) -> str:
    return _moment(ns).strftime("%H:%M:%S.%f")[:-3]


def _date(ns: int) -> str:
    return _moment(ns).strftime("%Y-%m-%d")


def _us(us: int) -> str:
    """A duration of µs, to three digits or so."""
    if us < 1000:
        return f"{us} µs"
    if us < 10_000:
        return f"{us / 1000:.1f} ms"
    if us < 1_000_000:
        return f"{us / 1000:.0f} ms"
    return _span(us * 1000)


def _span(ns: int) -> str:
    """A duration of ns, for people."""
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


def _many(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def _part(amount: int, whole: int) -> str:
    if amount == 0 or whole == 0:
        return "0 %"
    percent = 100 * amount / whole
    return "under 0.1 %" if percent < 0.1 else f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %"


def _said(facts: CommandFacts, what: str) -> list[Said]:
    return [one for one in facts.said if one.what == what]


# --- the fleet --------------------------------------------------------------------------------------------------------


class _Fleet(Struct, frozen=True):
    """shown: listed at once.   folded: the others, with whom nothing was ever the matter."""

    shown: list[AgentFacts]
    folded: list[AgentFacts]


def _fleet(agents: list[AgentFacts]) -> _Fleet:
    if len(agents) <= FLEET_ROWS:
        return _Fleet(agents, [])
    return _Fleet([one for one in agents if not one.quiet], [one for one in agents if one.quiet])


# --- bars -------------------------------------------------------------------------------------------------------------


class _Bar(Struct, frozen=True):
    """One phase, with the ends of its bar in per cent of the width, on a logarithmic scale."""

    phase: Phase
    p50: float
    p95: float
    most: float


def _bars(phases: Sequence[Phase]) -> list[_Bar]:
    if not phases:
        return []
    least = math.log10(max(1, min(one.p50_us for one in phases))) - 0.2
    most = math.log10(max(10, max(one.max_us for one in phases)))

    def along(us: int) -> float:
        return round(max(1.0, 100 * (math.log10(max(1, us)) - least) / (most - least)), 1)

    return [_Bar(one, along(one.p50_us), along(one.p95_us), along(one.max_us)) for one in phases]


# --- lanes ------------------------------------------------------------------------------------------------------------


class _Lane(Struct, frozen=True, kw_only=True):
    """One replica, drawn. paths: by class of the style sheet.   note: what the drawing says, in words."""

    replica: int
    bad: bool
    paths: list[tuple[str, str]]
    note: str


class _Lanes(Struct, frozen=True):
    shown: list[_Lane]
    others: int
    others_bad: int


def _lanes(report: RunReport) -> _Lanes:
    time = report.time
    drawn = [_lane(replica, one, report) for replica, one in time.replicas.items()]
    bad, good = [one for one in drawn if one.bad], [one for one in drawn if not one.bad]
    shown = [*bad[:LANES], *good[: max(4, LANES - len(bad)) if len(good) <= LANES else 4]]
    left_out = max(0, len(bad) - LANES)
    return _Lanes(sorted(shown, key=lambda one: (not one.bad, one.replica)), len(drawn) - len(shown), left_out)


def _lane(replica: int, painted: Painted, report: RunReport) -> _Lane:
    time = report.time
    committed = _filled(time.committed.versions, time.columns)
    versions = _filled(painted.versions, time.columns)
    behind = [UNKNOWN < one < wanted for one, wanted in zip(versions, committed, strict=True)]
    known = [one for one in (*versions, *committed) if one != UNKNOWN]
    low, high = min(known, default=0), max(known, default=0)

    def height(version: int) -> float:
        return round(LANE_HEIGHT - 6 - (LANE_HEIGHT - 12) * (version - low) / max(1, high - low), 1)

    quantum = time.quantum_ns
    shares = [min(4, -(-4 * one // quantum)) for one in _padded(painted.paused, time.columns)]
    paths = [(f"paused{level}", _blocks([one == level for one in shares])) for level in (1, 2, 3, 4)]
    paths.append(("out", _blocks([one > 0 for one in painted.out])))
    paths.append(("gone", _blocks([one > 0 for one in painted.gone])))
    paths.append(("committed", _stairs(committed, height)))
    paths.append(("version", _stairs(versions, height)))
    paths.append(
        ("behind", _stairs([v if late else UNKNOWN for v, late in zip(versions, behind, strict=True)], height))
    )
    out, gone, paused = sum(painted.out), sum(painted.gone), sum(painted.paused)
    words = [f"v{painted.latest}" if painted.latest != UNKNOWN else "no version heard"]
    words += [f"out of service {_span(out)}"] if out else []
    words += [f"lost for {_span(gone)}"] if gone else []
    words += [f"behind the fleet {_span(sum(behind) * quantum)}"] if any(behind) else []
    words += [f"paused {_span(paused)}, {_part(paused, report.end_ns - report.start_ns)}"] if paused else []
    bad = bool(out or gone or any(behind))
    return _Lane(replica=replica, bad=bad, paths=[one for one in paths if one[1]], note="; ".join(words))


def _filled(versions: list[int], columns: int) -> list[int]:
    """As many as there are columns: nothing changed after the last."""
    last = versions[-1] if versions else UNKNOWN
    return (versions + [last] * (columns - len(versions)))[:columns]


def _padded(amounts: list[int], columns: int) -> list[int]:
    return (amounts + [0] * (columns - len(amounts)))[:columns]


def _runs(values: Iterable[int]) -> Iterable[tuple[int, int, int]]:
    """Equal values in a row: the value, the first column, and the column after the last."""
    start = 0
    for value, same in groupby(values):
        end = start + sum(1 for _ in same)
        yield value, start, end
        start = end


def _blocks(marked: Iterable[bool]) -> str:
    """Rectangles over the marked columns, as one path."""
    return "".join(f"M{start} 0H{end}V{LANE_HEIGHT}H{start}Z" for one, start, end in _runs(marked) if one)


def _stairs(versions: Sequence[int], height: Callable[[int], float]) -> str:
    """One line through the versions, with a gap where none is known."""
    path, before = "", UNKNOWN
    for one, start, end in _runs(versions):
        if one != UNKNOWN:
            path += f"V{height(one)}H{end}" if before != UNKNOWN else f"M{start} {height(one)}H{end}"
        before = one
    return path


class _Axis(Struct, frozen=True):
    """columns: width of the drawings.   commits, opened: paths.   labels: moments, evenly spread."""

    columns: int
    commits: str
    opened: str
    labels: list[int]


def _axis(report: RunReport) -> _Axis:
    time: ReplicaTime = report.time
    committed = time.committed.versions
    changes = [at for at in range(1, len(committed)) if committed[at] != committed[at - 1]]
    return _Axis(
        columns=max(1, time.columns),
        commits="".join(f"M{at} 0V6" for at in changes),
        opened="".join(f"M{at} 0V{LANE_HEIGHT}" for at in time.opened if at > 0),
        labels=[report.start_ns + (report.end_ns - report.start_ns) * one // 4 for one in range(5)],
    )
