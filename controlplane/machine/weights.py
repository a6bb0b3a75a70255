"""The phases of a weight sync, each decided from the reports of the phases before. Pure.

    prepare ──enough prepared──▶ load ──enough loaded──▶ commit ──▶ committed
       └──too few──────────────────┴──too few──────────▶ abort  ──▶ aborted

A replica's primary (node rank 0) speaks for it. A replica that never syncs (a colocated judge) takes no part. A
replica that fails is named in the quarantine of the next phase, and so is paused before others serve the new version.

A replica that is away is left out instead: its agent is lost or was lost before the sync, or has restarted, or its
engine is down. What is desired of it advances with the fleet, so that it comes back to what was committed meanwhile.
No phase waits for one once the others meet the quorum. Until it is back, every report names it as unproven.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from controlplane.machine.events import SyncRequested
from schemas.commands import WeightSync
from schemas.identity import Count, Positive, replica_and_node
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Reason, Skipped
from schemas.reports import AgentOutcome, Report, SyncReport

_TAKES_NO_PART: Final = tuple(map(Skipped, (Reason.MODE_NEVER_SYNCS, Reason.NOT_TARGETED, Reason.OBSERVING)))
_ALREADY: Final = Skipped(Reason.ALREADY)
_STALE: Final = Skipped(Reason.STALE_VERSION)
_AWAY: Final = ("absent", "gone", "restarted", "engine_down")
"""Why a replica that did not answer is left out, and not quarantined."""


Conclusions = Mapping[int, Conclusion]
"""What the primary of each replica concluded."""


class Sync(Struct, frozen=True, kw_only=True):
    """A weight sync in progress.

    Attributes:
        version: Of the new weights: the one that was requested, or the next of the run.
        seq: Of the phase that is open.
        members: Replicas that take part.
        lost: Replicas that failed.
        restarted: Replicas whose agent joined as a new incarnation since the sync began.
        reports: Of the phases that have ended.
        sent: The trainer has sent the weights that are being loaded.
        stuck: Replicas that have not received them: their engines may wait for a long time, and nobody waits for them.
        failure: Why the trainer gave it up, if it did.
        abort: Ticket of the abort, if the trainer waits for its report.
        held_until_us: The phase waits until then for the trainer to ask for it; None if it is open.
    """

    request: SyncRequested
    version: Positive
    phase: Literal["prepare", "load", "commit", "abort"] = "prepare"
    seq: Count = 0
    members: frozenset[Count] = frozenset()
    lost: frozenset[Count] = frozenset()
    restarted: frozenset[Count] = frozenset()
    reports: tuple[Report, ...] = ()
    sent: bool = False
    stuck: frozenset[Count] = frozenset()
    failure: str = ""
    abort: Positive | None = None
    held_until_us: int | None = None


def first_phase(sync: Sync) -> WeightSync:
    """Return the command that opens a sync."""
    request = sync.request
    return WeightSync(
        phase="prepare",
        version=sync.version,
        source=request.source,
        manifest=request.manifest,
        in_flight=request.in_flight,
    )


def phase_command(sync: Sync) -> WeightSync:
    """Return the command of a later phase."""
    lost = sync.lost - sync.restarted
    match sync.phase:
        case "load":
            return WeightSync(phase="load", version=sync.version, quarantine=lost)
        case "commit":
            return commit_phase(sync, lost)
        case _:
            return WeightSync(phase="abort", version=sync.version)


def commit_phase(sync: Sync, lost: frozenset[int]) -> WeightSync:
    """Return the command that commits a sync; `lost` are the replicas that dropped out."""
    return WeightSync(
        phase="commit",
        version=sync.version,
        source=sync.request.source,
        manifest=sync.request.manifest,
        quarantine=lost,
    )


def next_phase(sync: Sync, report: Report, known: frozenset[int]) -> tuple[Sync, WeightSync | SyncReport]:
    """Return what follows the end of a phase: the command of the next one, or the report of the whole sync.

    Args:
        known: Replicas of the run that the sync is for.
    """
    conclusions = primary_conclusions(report.outcomes, known)
    sync = _with_conclusions(sync, report, conclusions)
    succeeded = _followed(sync, conclusions)
    match sync.phase:
        case "prepare" if sync.members and all(conclusions[replica] == _STALE for replica in sync.members):
            return sync, _report(sync, "stale", conclusions, known)
        case "abort":
            return sync, _report(sync, "aborted", conclusions, known)
        case "commit":
            return sync, _report(sync, "committed", conclusions, known)
        case _ if not _meets_quorum(sync, succeeded):
            sync = replace(sync, phase="abort")
        case "prepare":
            sync = replace(sync, phase="load")
        case "load":
            sync = replace(sync, phase="commit")
    return sync, phase_command(sync)


def given_up_report(sync: Sync, known: frozenset[int]) -> SyncReport:
    """Return the report of a sync that the trainer gave up, after the end of the phase that it was in."""
    conclusions = primary_conclusions(sync.reports[-1].outcomes, known)
    return replace(_report(sync, "aborted", conclusions, known), reason=sync.failure)


def may_leave_out(sync: Sync, outcomes: Iterable[AgentOutcome], down: frozenset[int], known: frozenset[int]) -> bool:
    """Return whether the open phase may end now, if it waits for nobody but replicas whose engines are `down`."""
    if sync.request.absent == "wait":
        return False
    conclusions = primary_conclusions(outcomes, known)
    if sync.phase == "prepare":
        sync = replace(sync, members=_taking_part(conclusions) | (down & known))
    return sync.phase in ("commit", "abort") or _meets_quorum(sync, _followed(sync, conclusions))


def primary_conclusions(outcomes: Iterable[AgentOutcome], known: frozenset[int]) -> dict[int, Conclusion]:
    """Return what the primary of each known replica concluded."""
    conclusions: dict[int, Conclusion] = {}
    for outcome in outcomes:
        place = replica_and_node(outcome.agent)
        if place is not None and place[1] == 0 and place[0] in known:
            conclusions[place[0]] = outcome.conclusion
    return conclusions


def with_report(sync: Sync, report: Report, known: frozenset[int]) -> Sync:
    """Return the sync after a phase: who takes part, and who has dropped out."""
    return _with_conclusions(sync, report, primary_conclusions(report.outcomes, known))


def _with_conclusions(sync: Sync, report: Report, conclusions: Conclusions) -> Sync:
    taking_part = _taking_part(conclusions)
    members = taking_part if sync.phase == "prepare" else sync.members | taking_part
    failed = members & _those(conclusions, _dropped_out)
    return replace(sync, reports=(*sync.reports, report), members=members, lost=(sync.lost | failed) - sync.restarted)


def _those(conclusions: Conclusions, holds: Callable[[Conclusion], bool]) -> frozenset[int]:
    """The replicas that did not act, and of whose conclusion this holds. The others are many, and need no question."""
    return frozenset(
        replica for replica, conclusion in conclusions.items() if type(conclusion) is not Acted and holds(conclusion)
    )


def _taking_part(conclusions: Conclusions) -> frozenset[int]:
    """Replicas that count for the quorum: all but those that never sync or were away when the phase began."""
    return frozenset(conclusions) - _those(conclusions, _takes_no_part)


def _takes_no_part(conclusion: Conclusion) -> bool:
    return conclusion in _TAKES_NO_PART or (isinstance(conclusion, Missing) and conclusion.reason == "absent")


def _followed(sync: Sync, conclusions: Conclusions) -> frozenset[int]:
    """Members that did what the phase asks for. One in quarantine acts too, when it pauses, and has not."""
    others = _those(conclusions, lambda conclusion: conclusion != _ALREADY)
    return sync.members.intersection(conclusions) - others - sync.lost


def _dropped_out(conclusion: Conclusion) -> bool:
    return conclusion != _ALREADY and not (isinstance(conclusion, Missing) and conclusion.reason in _AWAY)


def _meets_quorum(sync: Sync, succeeded: frozenset[int]) -> bool:
    quorum = sync.request.quorum or len(sync.members) // 2 + 1
    return len(succeeded) >= quorum


def _report(
    sync: Sync,
    status: Literal["committed", "aborted", "stale"],
    conclusions: Conclusions,
    known: frozenset[int],
) -> SyncReport:
    """The report of a sync whose last phase had these conclusions."""
    answered = frozenset(conclusions) - _those(conclusions, lambda conclusion: isinstance(conclusion, Missing))
    failed = _those(conclusions, lambda conclusion: isinstance(conclusion, Failed))
    committed = status == "committed"
    loaded = _followed(sync, conclusions) if committed else frozenset[int]()
    quarantined = sync.lost & answered if committed else frozenset[int]()
    given_up = status == "aborted" and sync.phase != "abort"  # so nobody has answered an abort yet
    taking_no_part = _those(conclusions, lambda conclusion: conclusion in _TAKES_NO_PART)
    proven = loaded if committed else taking_no_part if given_up else answered - failed
    return SyncReport(
        version=sync.version,
        status=status,
        loaded=tuple(sorted(loaded)),
        quarantined=tuple(sorted(quarantined)),
        unproven=tuple(sorted(known - proven - quarantined)),
        phases=sync.reports,
    )
