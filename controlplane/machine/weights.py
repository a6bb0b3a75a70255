"""The phases of a weight sync, each decided from the reports of the phases before. Pure.

    prepare ──enough prepared──▶ load ──enough loaded──▶ commit ──▶ committed
       └──too few──────────────────┴──too few──────────▶ abort  ──▶ aborted

A replica's primary (node rank 0) speaks for it. A replica that never syncs (a colocated judge) takes no part. A
replica that drops out is named in the quarantine of the next phase, and so is paused before others serve the new
version. One whose agent has restarted meanwhile is not, because it follows the commit by itself.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.events import SyncRequested
from schemas.commands import WeightSync
from schemas.identity import Count, replica_and_node
from schemas.outcomes import Acted, Conclusion, Reason, Skipped
from schemas.reports import Report, SyncReport

_TAKES_NO_PART = (Skipped(Reason.MODE_NEVER_SYNCS), Skipped(Reason.NOT_TARGETED))


class Sync(Struct, frozen=True, kw_only=True):
    """A weight sync in progress.

    Attributes:
        seq: Of the phase that is open.
        members: Replicas that take part.
        lost: Replicas that dropped out.
        restarted: Replicas whose agent joined as a new incarnation since the sync began.
        reports: Of the phases that have ended.
    """

    request: SyncRequested
    phase: Literal["prepare", "load", "commit", "abort"] = "prepare"
    seq: Count = 0
    members: frozenset[Count] = frozenset()
    lost: frozenset[Count] = frozenset()
    restarted: frozenset[Count] = frozenset()
    reports: tuple[Report, ...] = ()


def first_phase(request: SyncRequested) -> WeightSync:
    """Return the command that opens a sync."""
    return WeightSync(
        phase="prepare",
        version=request.version,
        source=request.source,
        manifest=request.manifest,
        in_flight=request.in_flight,
    )


def commit_phase(request: SyncRequested, lost: frozenset[int]) -> WeightSync:
    """Return the command that commits a sync; `lost` are the replicas that dropped out."""
    return WeightSync(
        phase="commit",
        version=request.version,
        source=request.source,
        manifest=request.manifest,
        quarantine=lost,
    )


def next_phase(sync: Sync, report: Report) -> tuple[Sync, WeightSync | SyncReport]:
    """Return what follows the end of a phase: the command of the next one, or the report of the whole sync."""
    conclusions = primary_conclusions(report)
    sync = _with_report(sync, report, conclusions)
    request, version = sync.request, sync.request.version
    succeeded = sync.members & {replica for replica, conclusion in conclusions.items() if _succeeded(conclusion)}
    match sync.phase:
        case "prepare" if sync.members and all(
            conclusions[replica] == Skipped(Reason.STALE_VERSION) for replica in sync.members
        ):
            return sync, _report(sync, "stale")
        case "abort":
            return sync, _report(sync, "aborted")
        case "commit":
            return sync, _report(sync, "committed", succeeded)
        case _ if not _meets_quorum(sync, succeeded):
            return replace(sync, phase="abort"), WeightSync(phase="abort", version=version)
        case "prepare":
            return replace(sync, phase="load"), WeightSync(phase="load", version=version, quarantine=sync.lost)
        case "load":
            return replace(sync, phase="commit"), commit_phase(request, sync.lost)


def primary_conclusions(report: Report) -> dict[int, Conclusion]:
    """Return what the primary of each replica concluded."""
    conclusions: dict[int, Conclusion] = {}
    for outcome in report.outcomes:
        place = replica_and_node(outcome.agent)
        if place is not None and place[1] == 0:
            conclusions[place[0]] = outcome.conclusion
    return conclusions


def _with_report(sync: Sync, report: Report, conclusions: Mapping[int, Conclusion]) -> Sync:
    """The sync after a phase: who takes part, and who has dropped out."""
    taking_part = frozenset(replica for replica, conclusion in conclusions.items() if conclusion not in _TAKES_NO_PART)
    members = taking_part if sync.phase == "prepare" else sync.members | taking_part
    succeeded = frozenset(replica for replica, conclusion in conclusions.items() if _succeeded(conclusion))
    lost = (sync.lost | (members - succeeded)) - sync.restarted
    return replace(sync, reports=(*sync.reports, report), members=members, lost=lost)


def _succeeded(conclusion: Conclusion) -> bool:
    return isinstance(conclusion, Acted) or conclusion == Skipped(Reason.ALREADY)


def _meets_quorum(sync: Sync, succeeded: frozenset[int]) -> bool:
    quorum = sync.request.quorum or len(sync.members) // 2 + 1
    return len(succeeded) >= quorum


def _report(
    sync: Sync, status: Literal["committed", "aborted", "stale"], loaded: frozenset[int] = frozenset()
) -> SyncReport:
    quarantined = tuple(sorted(sync.lost)) if status == "committed" else ()
    return SyncReport(
        version=sync.request.version,
        status=status,
        loaded=tuple(sorted(loaded)),
        quarantined=quarantined,
        phases=sync.reports,
    )
