"""What the answers to one phase of a weight sync come to: whether they are enough, and what is reported. Pure.

"Enough" is the quorum. By default that is more than half of the replicas that take part: all that the sync is for,
except those that never sync and those that were away when the phase began.

A replica's primary (node rank 0) speaks for it. A replica that never syncs (a colocated judge) takes no part. A
replica that fails is named in the quarantine of the next phase, and so is paused before others serve the new version.
One that served this version before the sync takes part without a change.

After a load an agent reports a digest of what its engine holds, where the engine can tell. A replica that differs from
most of its kind and layout has failed, whether or not the trainer announced a digest.

A replica that is new counts for what it has done alone: the default quorum is of the others, and no phase waits for it
once there is a quorum, unless it has tried to load and could not. It loads what is committed like any that joins, and
the report names it as joining.

A replica that is away is left out instead: its agent is lost or was lost before the sync, or has restarted, or its
engine is down. What is desired of it advances with the fleet, so that it comes back to what was committed meanwhile.
No phase waits for one once the others meet the quorum. Until it is back, every report names it as unproven.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from msgspec.structs import replace

from controlplane.machine.coordinator_state import Sync
from schemas.commands import Command, WeightSync
from schemas.formatting import format_replicas
from schemas.identity import replica_and_node
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Reason, Skipped
from schemas.reports import AgentOutcome, Report, SyncReport

JOINING: Final = Skipped(Reason.JOINING)
_NOT_MEANT: Final = tuple(map(Skipped, (Reason.MODE_NEVER_SYNCS, Reason.NOT_TARGETED, Reason.OBSERVING)))
_TAKES_NO_PART: Final = (*_NOT_MEANT, JOINING)
_ALREADY: Final = Skipped(Reason.ALREADY)
_STALE: Final = Skipped(Reason.STALE_VERSION)
AWAY: Final = ("absent", "gone", "restarted", "engine_down")
"""Why a replica that did not answer is left out, and not quarantined."""

Conclusions = Mapping[int, Conclusion]
"""What the primary of each replica concluded."""


def with_digests_compared(
    command: Command, outcomes: tuple[AgentOutcome, ...], served: frozenset[str]
) -> tuple[AgentOutcome, ...]:
    """Return the outcomes of a load, with the failure of each replica whose bytes are not those of most of its layout.

    Digests are compared with others of their kind and layout, which is what stands before the last colon. Without a
    majority nothing shows which bytes are right, so all of that layout have failed. What is `served` as this version
    already is right, however many load others.
    """
    if not isinstance(command, WeightSync) or command.phase != "load":
        return outcomes
    digests = [_loaded_digest(line.conclusion, command.version) for line in outcomes]
    holders = Counter(filter(None, digests))
    layouts, settled = Counter(map(_layout, holders.elements())), set(map(_layout, served))
    wrong = {
        digest: held
        for digest, held in holders.items()
        if (digest not in served if _layout(digest) in settled else 2 * held <= layouts[_layout(digest)])
    }
    if not wrong:
        return outcomes
    return tuple(
        replace(line, conclusion=_differs(command.version, digest, wrong[digest])) if digest in wrong else line
        for line, digest in zip(outcomes, digests, strict=True)
    )


def _loaded_digest(conclusion: Conclusion, version: int) -> str:
    """A replica in quarantine acts too, and holds an older version."""
    return conclusion.digest or "" if isinstance(conclusion, Acted) and conclusion.version == version else ""


def _layout(digest: str) -> str:
    return digest.rpartition(":")[0]


def _differs(version: int, digest: str, held: int) -> Failed:
    return Failed(
        ErrorKind.DIGEST_MISMATCH,
        f"the engine reported success for the load of version {version}, but holds weights with digest "
        f"{digest.rpartition(':')[2][:12]}, as {held} in all do, which are not most of this layout. Sync again; if "
        "engines arrange the same weights in different ways, start their agents with --digests never.",
    )


def primary_conclusions(outcomes: Iterable[AgentOutcome], known: frozenset[int]) -> dict[int, Conclusion]:
    """Return what the primary of each known replica concluded."""
    conclusions: dict[int, Conclusion] = {}
    for outcome in outcomes:
        place = replica_and_node(outcome.agent)
        if place is not None and place[1] == 0 and place[0] in known:
            conclusions[place[0]] = outcome.conclusion
    return conclusions


def with_conclusions(sync: Sync, report: Report, conclusions: Conclusions) -> Sync:
    """Return the sync after a phase: which replicas take part, and which have dropped out."""
    taking_part = _taking_part(conclusions)
    members = taking_part if sync.phase == "prepare" else sync.members | taking_part
    failed = members & _those(conclusions, _dropped_out)
    # A replica that could not load a version of an adapter was not put in quarantine for it, and tried again.
    lost = failed if sync.key and sync.phase == "commit" else sync.lost | failed
    if sync.phase == "load":
        sync = replace(sync, differing=_those(conclusions, _holds_other_bytes))
    lost = lost - sync.restarted | sync.differing
    return replace(sync, reports=(*sync.reports, report), members=members, lost=lost)


def all_stale(sync: Sync, conclusions: Conclusions) -> bool:
    """Return whether every replica that takes part holds this version, or a newer one."""
    return bool(sync.members) and all(conclusions[replica] == _STALE for replica in sync.members)


def shortfall(sync: Sync, conclusions: Conclusions) -> str:
    """Return why the phase that has ended did not meet the quorum; empty if it did."""
    succeeded, quorum = _followed(sync, conclusions), _quorum(sync)
    if len(succeeded) >= quorum:
        return ""
    done = {"prepare": "prepared", "load": "loaded"}[sync.phase]
    others = sync.members - succeeded
    which = f": not {format_replicas(others)}" if others else ""
    return f"{len(succeeded)} of {len(sync.members)} replicas {done}, and {quorum} must{which}"


def may_leave_out(sync: Sync, outcomes: Iterable[AgentOutcome], down: frozenset[int], known: frozenset[int]) -> bool:
    """Return whether the open phase may end now, if it waits only for replicas whose engines are `down`."""
    conclusions = primary_conclusions(outcomes, known)
    if sync.phase == "prepare":
        sync = replace(sync, members=_taking_part(conclusions) | (down & known))
    return sync.phase in ("commit", "abort") or not shortfall(sync, conclusions)


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
    unchanged = _those(conclusions, lambda conclusion: conclusion == _STALE) & sync.holding
    others = _those(conclusions, lambda conclusion: conclusion != _ALREADY) - unchanged
    return sync.members.intersection(conclusions) - others - sync.lost


def _dropped_out(conclusion: Conclusion) -> bool:
    """Whether a member failed. One that has this version or a newer one, or is new, or is away, has not."""
    away = isinstance(conclusion, Missing) and conclusion.reason in AWAY
    return not away and conclusion not in (_ALREADY, _STALE, JOINING)


def _holds_other_bytes(conclusion: Conclusion) -> bool:
    return isinstance(conclusion, Failed) and conclusion.error is ErrorKind.DIGEST_MISMATCH


def _quorum(sync: Sync) -> int:
    quorum = sync.request.quorum
    if quorum is None:
        return len(sync.members - sync.joining or sync.members) // 2 + 1
    return max(1, min(quorum, len(sync.members))) if sync.shrunk else quorum


def sync_report(
    sync: Sync,
    status: Literal["committed", "aborted", "stale"],
    known: frozenset[int],
    quarantined: frozenset[int],
) -> SyncReport:
    """Return the report of a sync after its last phase. Only what was answered proves anything."""
    conclusions = primary_conclusions(sync.reports[-1].outcomes, known)
    committed = status == "committed"
    failed = _those(conclusions, lambda conclusion: isinstance(conclusion, Failed))
    silent = _those(conclusions, lambda conclusion: isinstance(conclusion, Missing) or conclusion == JOINING)
    answered = frozenset(conclusions) - silent
    loaded = proven = _followed(sync, conclusions) if committed else frozenset[int]()
    if not committed:
        given_up = status == "aborted" and sync.phase != "abort"  # so no agent has answered an abort yet
        proofs = _NOT_MEANT if given_up else (*_NOT_MEANT, _ALREADY, _STALE)
        proven = frozenset(
            replica
            for replica, conclusion in conclusions.items()
            if conclusion in proofs or (type(conclusion) is Acted and not given_up)
        )
    # One that has not been seen to pause in this sync and then failed may still be in service.
    last = sync.reports[-1].command
    named = last.quarantine if isinstance(last, WeightSync) else frozenset[int]()
    running = failed & named - _prepared(sync, known) if committed else failed
    paused = answered - running
    out = (quarantined | sync.lost if committed else quarantined) & paused - loaded
    unproven = known - proven - out
    late = frozenset(one for one in unproven & sync.joining if conclusions.get(one, JOINING) == JOINING)
    joining = late - sync.lost
    return SyncReport(
        version=sync.version,
        status=status,
        loaded=tuple(sorted(loaded)),
        quarantined=tuple(sorted(out)),
        unproven=tuple(sorted(unproven - joining)),
        joining=tuple(sorted(joining)),
        phases=sync.reports,
        reason=sync.failure if status == "aborted" else "",
    )


def _prepared(sync: Sync, known: frozenset[int]) -> frozenset[int]:
    conclusions = primary_conclusions(sync.reports[0].outcomes, known)
    return frozenset(conclusions) - _those(conclusions, lambda conclusion: conclusion != _ALREADY)
