"""Checks of what agents answered."""

from controlplane import ControlPlane
from schemas.commands import ProfileCommand, ProfilePlan
from schemas.config import BusConfig
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed
from schemas.reports import Report

BUS = BusConfig(head_interval_ms=200, heartbeat_ms=300, agent_timeout_ms=3_000, retransmit_ms=500)
"""Quick enough for tests, on a machine that has much else to do."""


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
    """Node rank 0 refuses a plan in these words, both when it is asked to check it and to start it."""
    check = ProfileCommand(action="check", step=step, plan=plan)
    checked = plane.publish(check, replicas=[replica]).wait()
    started = plane.start_profile(step, plan, replicas=[replica]).wait()
    for refused in (failed(report, f"{replica}.0") for report in (checked, started)):
        assert refused.error is ErrorKind.UNSUPPORTED and why in refused.message
