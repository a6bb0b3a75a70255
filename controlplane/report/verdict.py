"""The verdict on a game day, as text."""

from controlplane.report.game_day import InjectedFault
from controlplane.report.model import RunReport
from schemas.fault_plan import FaultPlan
from schemas.formatting import format_duration
from schemas.logs import time_with_zone


def verdict(plan: FaultPlan, report: RunReport) -> tuple[list[str], bool]:
    """Return what is to be said of a game day, and whether all promises held and the fleet was whole at the end."""
    lines = [_line(fault) for fault in report.faults]
    happened = {fault.name for fault in report.faults}
    lines += [
        f"{fault.name}: never happened, as far as the log has it"
        for fault in plan.fault
        if fault.name not in happened and fault.what != "kill_trainer"
    ]
    repaired = sorted(fault.repaired_ns for fault in report.faults if fault.repaired_ns is not None)
    out_ms = sum(fault.out_ns for fault in report.faults) // 1_000_000
    if repaired:
        lines.append(
            f"time to repair: median {_span(repaired[len(repaired) // 2])}, longest {_span(repaired[-1])}; "
            f"out of service for {format_duration(out_ms)} in all"
        )
    lines += [str(violation) for violation in report.broken]
    good = not report.broken and not report.damage and not report.out_now and not report.gone_now
    broke = len(report.broken)
    end = f"{broke} promise{'' if broke == 1 else 's'} broke" if broke else "all promises held"
    whole = "" if good or report.broken else "; the fleet was not whole at the end: " + report.verdict
    count = len(report.faults)
    lines.append(f"{count:,} fault{'' if count == 1 else 's'}: {end}{whole}")
    return lines, good


def _line(fault: InjectedFault) -> str:
    parts = [f"out of service for {_span(fault.out_ns)}" if fault.out_ns else "never out of service"]
    parts += [f"whole again after {_span(fault.repaired_ns)}" if fault.repaired_ns is not None else "not whole again"]
    parts += fault.syncs
    more = fault.syncs_count - len(fault.syncs)
    parts += [f"and {more} more syncs"] if more else []
    return f"{time_with_zone(fault.at_ns / 1e9)} {fault.name} ({fault.what}) on {fault.agent}: {'; '.join(parts)}"


def _span(ns: int) -> str:
    return format_duration(ns // 1_000_000)
