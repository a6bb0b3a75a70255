"""Checks of what agents answered."""

from controlplane import ControlPlane
from schemas.commands import ProfileCommand, ProfilePlan
from schemas.config import BusConfig
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed
from schemas.reports import Report

BUS = BusConfig(head_interval_ms=200, heartbeat_ms=300, agent_timeout_ms=30_000, retransmit_ms=500)
"""Short enough for tests, and long enough for a busy machine."""


def conclusions(report: Report) -> dict[str, Conclusion]:
    """The conclusion of each agent."""
    return {outcome.agent: outcome.conclusion for outcome in report.outcomes}


def acted(report: Report, agent: str = "0.0") -> Acted:
    """The outcome of an agent that acted."""
    conclusion = conclusions(report)[agent]
    assert isinstance(conclusion, Acted), report
    return conclusion


def failed(report: Report, agent: str = "0.0") -> Failed:
    """The outcome of an agent that failed."""
    conclusion = conclusions(report)[agent]
    assert isinstance(conclusion, Failed), report
    return conclusion


def refuses(plane: ControlPlane, step: int, plan: ProfilePlan, why: str, replica: int = 0) -> None:
    """Check that node rank 0 refuses a plan with this message, both in a check and in a start."""
    check = ProfileCommand(action="check", step=step, plan=plan)
    checked = plane.publish(check, replicas=[replica]).wait()
    started = plane.start_profile(step, plan, replicas=[replica]).wait()
    for refused in (failed(report, f"{replica}.0") for report in (checked, started)):
        assert refused.error is ErrorKind.UNSUPPORTED and why in refused.message
