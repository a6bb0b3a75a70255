"""The phases of a weight sync, decided from the reports of the phases before. Pure.

    prepare ──enough prepared──▶ load ──enough loaded──▶ commit ──▶ committed
       └──too few──────────────────┴──too few──────────▶ abort  ──▶ aborted

Only a replica's primary (node rank 0) speaks for it. A replica that never syncs (a colocated judge) takes no part. A
replica that drops out on the way is named in the quarantine of the next phase, so it is paused before others serve
the new version; one whose agent started anew meanwhile is not, because it follows the commit by itself.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from schemas.commands import Manifest, Source, Target, WeightSync
from schemas.identity import Count, InFlight, Positive, replica_and_node
from schemas.outcomes import Acted, Conclusion, Reason, Skipped
from schemas.reports import Report, SyncReport


class Sync(Struct, frozen=True, kw_only=True):
    """A weight sync under way. seq: of the phase that is open.   lost: replicas that dropped out.

    anew: replicas whose agent joined as a new incarnation since the sync began.
    """

    ticket: Positive
    version: Positive
    source: Source
    manifest: Manifest | None
    in_flight: InFlight
    quorum: Positive | None
    target: Target
    timeout_ms: Positive
    phase: Literal["prepare", "load", "commit", "abort"] = "prepare"
    seq: Count = 0
    members: frozenset[Count] = frozenset()
    lost: frozenset[Count] = frozenset()
    restarted: frozenset[Count] = frozenset()
    reports: tuple[Report, ...] = ()


def first_phase(sync: Sync) -> WeightSync:
    """The command that opens the sync."""
    return WeightSync(
        phase="prepare", version=sync.version, source=sync.source, manifest=sync.manifest, in_flight=sync.in_flight
    )


def next_phase(sync: Sync, report: Report) -> tuple[Sync, WeightSync | SyncReport]:
    """What follows the end of a phase: the command of the next one, or the report of the whole."""
    said = primaries(report)
    sync = replace(sync, reports=(*sync.reports, report))
    if sync.phase == "prepare":
        sync = replace(sync, members=frozenset(said) - _apart(said))
        if sync.members and all(said[one] == Skipped(Reason.STALE_VERSION) for one in sync.members):
            return sync, _report(sync, "stale", ())
    else:
        sync = replace(sync, members=sync.members | (frozenset(said) - _apart(said)))
    there = frozenset(one for one, conclusion in said.items() if _followed(conclusion))
    sync = replace(sync, lost=(sync.lost | (sync.members - there)) - sync.restarted)
    if sync.phase == "abort":
        return sync, _report(sync, "aborted", ())
    if sync.phase == "commit":
        return sync, _report(sync, "committed", tuple(sorted(there & sync.members)))
    if not _enough(sync, there & sync.members):
        return replace(sync, phase="abort"), WeightSync(phase="abort", version=sync.version)
    if sync.phase == "prepare":
        return replace(sync, phase="load"), WeightSync(phase="load", version=sync.version, quarantine=sync.lost)
    commit = WeightSync(
        phase="commit", version=sync.version, source=sync.source, manifest=sync.manifest, quarantine=sync.lost
    )
    return replace(sync, phase="commit"), commit


def primaries(report: Report) -> dict[int, Conclusion]:
    """What the primary of each replica concluded."""
    said: dict[int, Conclusion] = {}
    for one in report.outcomes:
        place = replica_and_node(one.agent)
        if place is not None and place[1] == 0:
            said[place[0]] = one.conclusion
    return said


def _apart(said: dict[int, Conclusion]) -> frozenset[int]:
    """Replicas that take no part: not targeted, or of a mode that never syncs."""
    out = (Skipped(Reason.MODE_NEVER_SYNCS), Skipped(Reason.NOT_TARGETED))
    return frozenset(replica for replica, conclusion in said.items() if conclusion in out)


def _followed(conclusion: Conclusion) -> bool:
    return isinstance(conclusion, Acted) or conclusion == Skipped(Reason.ALREADY)


def _enough(sync: Sync, there: frozenset[int]) -> bool:
    needed = sync.quorum if sync.quorum is not None else len(sync.members) // 2 + 1
    return len(there) >= max(1, needed)


def _report(sync: Sync, status: Literal["committed", "aborted", "stale"], loaded: tuple[int, ...]) -> SyncReport:
    out = tuple(sorted(sync.lost)) if status == "committed" else ()
    return SyncReport(version=sync.version, status=status, loaded=loaded, quarantined=out, phases=sync.reports)
