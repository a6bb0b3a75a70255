"""The one weight sync that may be in progress: its request, its version, and its end. Pure.

What each phase leads to is `controlplane.machine.weights`. The functions here return the next state, and the phase that
follows, which the coordinator publishes.

A version stands for the same weights for ever. An agent that lost its journal knows what its engine holds by that
number alone. So a version that entered a load phase, in which engines may have taken it, is never used for others.
"""

from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.fleet import CoordinatorState, Effects, MissingReason, conclude_missing, oversize
from controlplane.machine.membership import is_engine_down, syncing_replicas, whole_target
from controlplane.machine.weights import (
    Sync,
    commit_phase,
    first_phase,
    given_up_report,
    may_leave_out,
    next_phase,
    phase_command,
    primary_conclusions,
    with_report,
)
from schemas.commands import Checkpoint, Source, Target, WeightSync
from schemas.desired import Committed
from schemas.identity import NUMBER_MAX
from schemas.outcomes import Missing
from schemas.reports import Report, SyncReport

LOADED_MAX: Final = 64
"""Weights that are remembered, those of the newest versions."""


class Phase(NamedTuple):
    """A phase to publish."""

    command: WeightSync
    target: Target
    timeout_ms: int
    ticket: int | None


def on_requested(
    state: CoordinatorState, event: events.SyncRequested, effects: Effects
) -> tuple[CoordinatorState, Phase | None]:
    """Begin a sync, or refuse it."""
    version = event.version or state.newest_version + 1
    if (sync := state.sync) is not None:
        reason = (
            f"a sync to version {sync.version} is in its {sync.phase} phase; two at once would split the fleet. Wait "
            "for its report, then ask again"
        )
        _refuse(event, "sync_in_progress", reason, effects)
        return state, None
    request = replace(event, target=whole_target(state, event.target))
    sync = Sync(request=request, version=version, seq=state.seq + 1)
    every = frozenset(unit for unit in state.desired if isinstance(unit, int))
    reason = _refused_version(state, sync) or oversize(commit_phase(sync, every), request.target)
    if reason:
        _refuse(event, "command", reason, effects)
        return state, None
    state = replace(state, sync=sync, newest_version=max(state.newest_version, version))
    return state, _phase(sync, first_phase(sync), event.prepare)


def _refuse(
    event: events.SyncRequested, kind: Literal["command", "sync_in_progress"], reason: str, effects: Effects
) -> None:
    for ticket in (event.ticket, event.prepare):
        if ticket is not None:
            effects.append(events.Refuse(ticket=ticket, kind=kind, reason=reason))


def on_phase_requested(
    state: CoordinatorState, event: events.PhaseRequested, effects: Effects
) -> tuple[CoordinatorState, Phase | None]:
    """Go on with the phase that the trainer asks for, if it is the next one and the one before has ended."""
    sync = state.sync
    if sync is None or sync.request.ticket != event.sync:
        reason = f"its sync has ended, as its report says: nothing is left to {event.phase}"
    elif event.phase == "abort" and (sync.phase in ("prepare", "load") or sync.held_until_us is not None):
        return give_up(
            state, replace(sync, abort=event.ticket), "the trainer aborted it", "aborted", event.at_us, effects
        )
    elif sync.held_until_us is None:
        reason = f"the sync to version {sync.version} is in its {sync.phase} phase: wait for the report of that"
    elif event.phase != sync.phase:
        reason = f"the sync to version {sync.version} goes on with {sync.phase}, not with {event.phase}"
    elif reason := oversize(phase_command(sync), sync.request.target):  # replicas that joined since
        state, phase = give_up(state, sync, reason, "aborted", event.at_us, effects)
        effects.append(events.Refuse(ticket=event.ticket, kind="command", reason=reason))
        return state, phase
    else:
        return _open(state, replace(sync, held_until_us=None), event.ticket)
    effects.append(events.Refuse(ticket=event.ticket, kind="command", reason=reason))
    return state, None


def on_send_failed(
    state: CoordinatorState, event: events.SendFailed, effects: Effects
) -> tuple[CoordinatorState, Phase | None]:
    """End the load phase: what the engines wait for will not come."""
    sync = _loading(state, event.ticket)
    if sync is None:
        return state, None
    reason = f"the trainer could not send the weights: {event.reason}"
    return give_up(state, sync, reason, "not_sent", event.at_us, effects)


def on_send_returned(state: CoordinatorState, event: events.SendReturned, _: Effects) -> CoordinatorState:
    """Leave the load phase a short time: the weights have arrived by then, or they will not."""
    sync = _loading(state, event.ticket)
    if sync is None:
        return state
    until_us = event.at_us + state.settings.after_send_ms * 1000
    open_commands = (
        replace(command, deadline_us=min(command.deadline_us, until_us)) if command.record.seq == sync.seq else command
        for command in state.open
    )
    return replace(state, open=tuple(open_commands), sync=replace(sync, sent=True))


def on_time(state: CoordinatorState, at_us: int, effects: Effects) -> tuple[CoordinatorState, Phase | None]:
    """Give up a sync whose trainer has not asked for the next phase in time: engines must not stay paused for it."""
    sync = state.sync
    if sync is None or sync.held_until_us is None or at_us < sync.held_until_us:
        return state, None
    reason = f"the trainer did not ask for its {sync.phase} phase in time"
    return give_up(state, sync, reason, "aborted", at_us, effects)


def give_up(
    state: CoordinatorState, sync: Sync, failure: str, reason: MissingReason, at_us: int, effects: Effects
) -> tuple[CoordinatorState, Phase | None]:
    """End the phase of a sync, and abort it. Of a phase that is open, `end_phase` does the rest."""
    sync = replace(sync, failure=failure)
    if sync.held_until_us is not None:
        return _given_up(state, sync, effects)
    open_commands = (
        conclude_missing(command, command.waiting, reason, at_us) if command.record.seq == sync.seq else command
        for command in state.open
    )
    return replace(state, open=tuple(open_commands), sync=sync), None


def end_phase(
    state: CoordinatorState, sync: Sync, report: Report, held_until_us: int, effects: Effects
) -> tuple[CoordinatorState, Phase | None]:
    """Go on from the end of a phase: to the next one, or to the report of the sync.

    Args:
        held_until_us: Until when the trainer may ask for the next phase, if it is to ask.
    """
    known = syncing_replicas(state, sync.request.target)
    if sync.failure:  # nobody waits for engines that still wait for the broadcast
        return _given_up(state, with_report(sync, report, known), effects)
    if sync.phase == "load" and sync.sent:
        conclusions = primary_conclusions(report.outcomes, known)
        late = frozenset(replica for replica in conclusions if conclusions[replica] == Missing("deadline"))
        sync = replace(sync, stuck=late)
    sync, following = next_phase(sync, report, known)
    if isinstance(following, SyncReport):
        effects.append(events.Conclude(ticket=sync.request.ticket, report=following))
        return replace(state, sync=None), None
    if sync.request.prepare is not None and sync.phase != "abort":
        return replace(state, sync=replace(sync, held_until_us=held_until_us)), None
    if oversize(following, sync.request.target):  # replicas that joined since
        sync = replace(sync, phase="abort")
    return _open(state, sync)


def _given_up(state: CoordinatorState, sync: Sync, effects: Effects) -> tuple[CoordinatorState, Phase | None]:
    report = given_up_report(sync, syncing_replicas(state, sync.request.target))
    effects.append(events.Conclude(ticket=sync.request.ticket, report=report))
    return replace(state, sync=None), abort_of(sync)


def _open(state: CoordinatorState, sync: Sync, ticket: int | None = None) -> tuple[CoordinatorState, Phase]:
    if sync.phase == "load":
        state = replace(state, loaded=_with_loaded(state.loaded, sync))
    return replace(state, sync=replace(sync, seq=state.seq + 1)), _phase(sync, phase_command(sync), ticket)


def _loading(state: CoordinatorState, ticket: int) -> Sync | None:
    """The sync with this ticket, if it is loading."""
    sync = state.sync
    loading = sync is not None and sync.phase == "load" and sync.held_until_us is None
    return sync if sync is not None and loading and sync.request.ticket == ticket else None


def abort_of(sync: Sync) -> Phase:
    """Return the phase that takes a sync back."""
    return _phase(sync, WeightSync(phase="abort", version=sync.version), sync.abort)


def without_engines_down(state: CoordinatorState, at_us: int) -> CoordinatorState:
    """End the phase of a sync for agents whose engines are known to be down or stuck, if it waits for nobody else."""
    sync = state.sync
    if sync is None:
        return state
    command = next((command for command in state.open if command.record.seq == sync.seq), None)
    if command is None or command.ended:
        return state
    stuck, down = set[str](), set[str]()
    for name in filter(command.waits_for, command.expected):
        if sync.stuck and sync.phase != "load" and _replica(state, name) in sync.stuck:
            stuck.add(name)
        elif sync.request.absent != "wait" and is_engine_down(state.members[name]):
            down.add(name)
        else:
            return state  # the usual case, and most often one of the first shows it
    replicas = frozenset(_replica(state, name) for name in sorted(down))
    known = syncing_replicas(state, sync.request.target)
    if down and not may_leave_out(sync, command.all_outcomes, replicas, known):
        return state
    ended = conclude_missing(command, down, "engine_down", at_us)
    ended = conclude_missing(ended, stuck, "not_sent", at_us)
    return replace(state, open=tuple(ended if other is command else other for other in state.open))


def _replica(state: CoordinatorState, name: str) -> int:
    return state.members[name].hello.identity.replica


def _phase(sync: Sync, command: WeightSync, ticket: int | None) -> Phase:
    return Phase(command, sync.request.target, sync.request.timeout_ms, ticket)


# --- versions ---------------------------------------------------------------------------------------------------------


def _weights(sync: Sync) -> Committed:
    return Committed(sync.version, sync.request.source, sync.request.manifest)


def _with_loaded(loaded: tuple[Committed, ...], sync: Sync) -> tuple[Committed, ...]:
    weights = _weights(sync)
    if weights in loaded:
        return loaded
    return tuple(sorted((*loaded, weights), key=lambda known: known.version))[-LOADED_MAX:]


def _refused_version(state: CoordinatorState, sync: Sync) -> str:
    """Why the version of a requested sync can't be used; empty if it can."""
    version, loaded = sync.version, state.loaded
    advice = "Take a newer one, or None to let the run count. Nothing was published"
    if version > NUMBER_MAX:
        return f"version {version:,} is beyond the largest, {NUMBER_MAX:,}. Nothing was published"
    known = next((weights for weights in loaded if weights.version == version), None)
    if known is None:
        forgotten = len(loaded) == LOADED_MAX and version < loaded[0].version
        behind = any(state.desired[replica].version < version for replica in _units(state, sync))
        if forgotten and behind:
            return f"version {version} may have been used before: it is older than the last {LOADED_MAX}. {advice}"
        return ""
    if known == _weights(sync):
        return ""
    differs = _named(known.source) if known.source != sync.request.source else "another manifest"
    return f"version {version} was used before: engines may have loaded it from {differs}. {advice}"


def _units(state: CoordinatorState, sync: Sync) -> frozenset[int]:
    return syncing_replicas(state, sync.request.target) & state.desired.keys()


def _named(source: Source) -> str:
    return source.path if isinstance(source, Checkpoint) else f"another {type(source).__name__.lower()}"
