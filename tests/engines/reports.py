"""What agents answered, and what lies in the traces that they name."""

import gzip
import json
from pathlib import Path

from schemas.config import BusConfig
from schemas.outcomes import Acted, Conclusion, Failed, Trace
from schemas.reports import Report

BUS = BusConfig(head_interval_ms=200, heartbeat_ms=300, agent_timeout_ms=3_000, retransmit_ms=500)
"""Quick enough for tests, on a machine that has much else to do."""


def conclusions(report: Report) -> dict[str, Conclusion]:
    """What each agent came to."""
    return {one.agent: one.conclusion for one in report.outcomes}


def acted(report: Report, agent: str = "0.0") -> Acted:
    """The outcome of an agent that acted."""
    said = conclusions(report)[agent]
    assert isinstance(said, Acted), report
    return said


def failed(report: Report, agent: str = "0.0") -> Failed:
    """The outcome of an agent that failed."""
    said = conclusions(report)[agent]
    assert isinstance(said, Failed), report
    return said


def events(folder: Path, trace: Trace) -> list[dict[str, object]]:
    """The events of a compressed trace. folder: in which `traces` lies."""
    with gzip.open(folder / "traces" / trace.path) as file:
        found: list[dict[str, object]] = json.load(file)["traceEvents"]
        return found
