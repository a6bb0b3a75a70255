"""The one weight sync that may be in progress: its request, its version, and its end. Pure.

What each phase leads to is `controlplane.machine.weights`. The functions here return the next state, and the phase that
follows, which the coordinator publishes.

A version stands for the same weights for ever. An agent that lost its journal knows what its engine holds by that
number alone. So a version that entered a load phase, in which engines may have taken it, is never used for others.
"""

from typing import Final, NamedTuple

from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.fleet import CoordinatorState, Effects, conclude_missing, oversize
from controlplane.machine.membership import is_engine_down, syncing_replicas, whole_target
from controlplane.machine.weights import Sync, commit_phase, failed_report, first_phase, may_leave_out, next_phase
from schemas.commands import Checkpoint, Source, Target, WeightSync
from schemas.desired import Committed
from schemas.identity import NUMBER_MAX
from schemas.reports import Report, SyncReport

LOADED_MAX: Final = 64
"""Weights that are remembered, those of the newest versions."""


class Phase(NamedTuple):
    """A phase to publish."""

    command: WeightSync
    target: Target
    timeout_ms: int


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
        effects.append(events.Refuse(ticket=event.ticket, kind="sync_in_progress", reason=reason))
        return state, None
    request = replace(event, target=whole_target(state, event.target))
    sync = Sync(request=request, version=version, seq=state.seq + 1)
    every = frozenset(unit for unit in state.desired if isinstance(unit, int))
    reason = _refused_version(state, sync) or oversize(commit_phase(sync, every), request.target)
    if reason:
        effects.append(events.Refuse(ticket=event.ticket, kind="command", reason=reason))
        return state, None
    state = replace(state, sync=sync, newest_version=max(state.newest_version, version))
    return state, _phase(sync, first_phase(sync))


def on_send_failed(state: CoordinatorState, event: events.SendFailed) -> CoordinatorState:
    """End the load phase: what the engines wait for will not come."""
    sync = state.sync
    if sync is None or sync.phase != "load" or sync.request.ticket != event.ticket:
        return state
    open_commands = tuple(
        conclude_missing(command, command.waiting, "not_sent", event.at_us)
        if command.record.seq == sync.seq
        else command
        for command in state.open
    )
    return replace(state, open=open_commands, sync=replace(sync, failure=event.reason))


def end_phase(
    state: CoordinatorState, sync: Sync, report: Report, effects: Effects
) -> tuple[CoordinatorState, Phase | None]:
    """Go on from the end of a phase: to the next one, or to the report of the sync."""
    known = syncing_replicas(state, sync.request.target)
    if sync.failure:  # nobody waits for engines that still wait for the broadcast
        effects.append(events.Conclude(ticket=sync.request.ticket, report=failed_report(sync, report, known)))
        return replace(state, sync=None), abort_of(sync)
    sync, following = next_phase(sync, report, known)
    if isinstance(following, SyncReport):
        effects.append(events.Conclude(ticket=sync.request.ticket, report=following))
        return replace(state, sync=None), None
    if oversize(following, sync.request.target):  # replicas that joined since
        sync, following = replace(sync, phase="abort"), WeightSync(phase="abort", version=sync.version)
    if following.phase == "load":
        state = replace(state, loaded=_with_loaded(state.loaded, sync))
    return replace(state, sync=replace(sync, seq=state.seq + 1)), _phase(sync, following)


def abort_of(sync: Sync) -> Phase:
    """Return the phase that takes a sync back."""
    return _phase(sync, WeightSync(phase="abort", version=sync.version))


def without_engines_down(state: CoordinatorState, at_us: int) -> CoordinatorState:
    """End the phase of a sync for agents whose engines are known to be down, if it waits for nobody else."""
    sync = state.sync
    command = next((command for command in state.open if sync is not None and command.record.seq == sync.seq), None)
    if sync is None or command is None or not command.waiting:
        return state
    if not all(is_engine_down(state.members[name]) for name in command.waiting):
        return state
    replicas = frozenset(state.members[name].hello.identity.replica for name in command.waiting)
    if not may_leave_out(sync, command.outcomes, replicas, syncing_replicas(state, sync.request.target)):
        return state
    ended = conclude_missing(command, command.waiting, "engine_down", at_us)
    return replace(state, open=tuple(ended if other is command else other for other in state.open))


def _phase(sync: Sync, command: WeightSync) -> Phase:
    return Phase(command, sync.request.target, sync.request.timeout_ms)


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
