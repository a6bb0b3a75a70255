"""Renders a run's report as one HTML file that needs nothing else.

Text from a log stays text: the template escapes every value, and the page's Content-Security-Policy allows no script
except the one whose digest it names, and no requests.
"""

import base64
import hashlib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final, TextIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from controlplane.report.model import RunReport
from schemas.formatting import format_clock, printable

HERE: Final = Path(__file__).parent
MAX_DRAWN: Final = 32
"""Replicas that are drawn; those that had a problem come first."""
MAX_AGENTS: Final = 48
"""Agents in the table. In a larger fleet, agents without a problem are folded away."""


def write_page(page: TextIO, report: RunReport, run: str, log: str) -> None:
    """Write the page."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(clock=_clock, span=_span, us=lambda us: _span(us * 1000), count=_count)
    environment.filters["date"] = lambda ns: datetime.fromtimestamp(ns / 1e9, UTC).date().isoformat()
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
        "drawn": sorted(report.replicas.items(), key=lambda item: not item[1].bad)[:MAX_DRAWN],
        "agents": [agent for agent in report.agents if not (folded and agent.healthy)],
        "folded_agents": folded,
    }
    page.writelines(environment.get_template("page.html.j2").generate(values))


# --- formatting -------------------------------------------------------------------------------------------------------


def _clock(ns: int) -> str:
    return format_clock(ns).removesuffix(" UTC")


def _span(ns: int) -> str:
    """A duration with up to three digits."""
    us, seconds = ns // 1000, ns / 1e9
    if us < 1000:
        return f"{us} µs"
    if seconds < 1:
        return f"{us / 1000:.{1 if us < 10_000 else 0}f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60:02} min"
    return f"{minutes} min {round(seconds) % 60:02} s"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun if count == 1 else noun + 's'}"
