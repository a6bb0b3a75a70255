"""A sync of weights or of an adapter, from its request to its report, in the order in which it happens. Pure.

    prepare ──enough prepared──▶ load ──enough loaded──▶ commit ──▶ committed
       └──too few──────────────────┴──too few──────────▶ abort  ──▶ aborted

One sync of base weights may be in progress, and one of each adapter. `begin` publishes the first phase. When the
command of a phase has ended for every agent, the coordinator calls `on_phase_ended`, which goes on with the next one.
What the answers come to is `controlplane.machine.quorum`. Which version may be used is `controlplane.machine.versions`,
and `controlplane.machine.adapters` for adapters.

Weights that a sender of the trainer's sends are committed only after it has returned, whatever the engines say: it may
still be writing into them. Once it raises, or does not return in time, the sync is given up: its report is made at
once, and an abort is published that no report waits for.
"""

from typing import Literal

from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.adapters import (
    adapter_of,
    adapters_of_other_base,
    keep_of,
    next_adapter_version,
    refused_adapter,
    with_committed,
    with_loading,
    with_requested,
)
from controlplane.machine.coordinator_state import (
    CoordinatorState,
    Effects,
    OpenCommand,
    Sync,
    conclude,
    with_open,
    with_sync,
    without_sync,
)
from controlplane.machine.publishing import oversize, publish
from controlplane.machine.quorum import (
    JOINING,
    all_stale,
    may_leave_out,
    primary_conclusions,
    shortfall,
    sync_report,
    with_conclusions,
)
from controlplane.machine.replicas import (
    is_engine_down,
    joining_replicas,
    quarantined_replicas,
    syncing_replicas,
    whole_target,
)
from controlplane.machine.stops import stopped_replicas
from controlplane.machine.versions import (
    doubted_label,
    holding_replicas,
    next_version,
    refused_number,
    refused_version,
    weights_of,
    with_loaded,
)
from schemas.commands import AdapterSync, SyncPhase, WeightSync, without_delta
from schemas.outcomes import Missing
from schemas.reports import Report


def begin(state: CoordinatorState, event: events.SyncRequested, effects: Effects) -> CoordinatorState:
    """Begin a sync, or refuse it."""
    if (sync := state.syncs.get(event.adapter.name if event.adapter is not None else "")) is not None:
        reason = (
            f"a sync to version {sync.version} is in its {sync.shown_phase} phase; two at once would split the fleet. "
            "Wait for its report, then ask again"
        )
        effects.append(events.Refuse(ticket=event.ticket, kind="sync_in_progress", reason=reason))
        return state
    request = replace(event, target=whole_target(state, event.target))
    if event.adapter is None:
        sync = Sync(request=request, version=event.version or next_version(state, event.source))
        sync = replace(sync, holding=holding_replicas(state, sync))
        reason = refused_version(state, sync) or adapters_of_other_base(state, sync.version)
    else:
        sync = Sync(request=request, version=event.version or next_adapter_version(state, event.adapter.name))
        adapter = adapter_of(sync)
        reason = refused_adapter(state, adapter) if adapter is not None else "an adapter is a directory of files"
        reason = refused_number(sync) or reason
    every = frozenset(unit for unit in state.desired if isinstance(unit, int))
    if reason := reason or oversize(_command(sync, "commit", every), request.target):
        effects.append(events.Refuse(ticket=event.ticket, kind="command", reason=reason))
        return state
    if (adapter := adapter_of(sync)) is not None:
        state = with_requested(state, adapter)
        earlier = state.adapters[sync.key].newest_committed > 0
    else:
        state = replace(state, newest_version=max(state.newest_version, sync.version))
        earlier = any(known.committed for known in state.loaded)
    if earlier:
        sync = replace(sync, joining=joining_replicas(state, syncing_replicas(state, request.target)))
    # Replicas check the source without touching their engines; for base weights, they pause them then.
    return _open(state, sync, _command(sync, "prepare"), event, effects)


def on_phase_ended(
    state: CoordinatorState, ended: OpenCommand, report: Report, event: events.CoordinatorEvent, effects: Effects
) -> CoordinatorState:
    """Go on from the end of a phase: to the next one, or to the report of the sync."""
    sync = next((sync for sync in state.syncs.values() if sync.seq == report.seq), None)
    if sync is None:
        return state
    conclusions = primary_conclusions(report.outcomes, syncing_replicas(state, sync.request.target))
    sync = with_conclusions(sync, report, conclusions)
    if sync.phase == "load" and sync.sent:  # what has not received the weights may hold up no later phase
        late = frozenset(replica for replica, conclusion in conclusions.items() if conclusion == Missing("deadline"))
        sync = replace(sync, stuck=late)
    match sync.phase:
        case "prepare" | "load" if sync.failure:
            return _give_up(state, sync, event, effects)
        case "prepare" if all_stale(sync, conclusions):
            return _end(state, sync, "stale", effects)
        case "commit":
            return _end(state, sync, "committed", effects)
        case "abort":
            return _end(state, sync, "aborted", effects)
        case _ if failure := shortfall(sync, conclusions):
            return _abort(state, replace(sync, failure=failure), event, effects)
        case "prepare":
            return _load(state, sync, event, effects)
    if sync.request.sends and not sync.sent:
        until_us = ended.issued_us + sync.request.timeout_ms * 1000
        return with_sync(state, replace(sync, phase="commit", held_until_us=until_us))
    return _commit(state, sync, event, effects)


# --- the phases -------------------------------------------------------------------------------------------------------


def _load(state: CoordinatorState, sync: Sync, event: events.CoordinatorEvent, effects: Effects) -> CoordinatorState:
    """Engines load. From here on the version stands for these weights."""
    command = _command(sync, "load", sync.lost - sync.restarted)
    if failure := oversize(command, sync.request.target):  # replicas that joined since
        return _abort(state, replace(sync, failure=failure), event, effects)
    if (adapter := adapter_of(sync)) is not None:
        state = with_loading(state, adapter)
    else:
        state = replace(state, loaded=with_loaded(state.loaded, sync))
    return _open(state, replace(sync, phase="load"), command, event, effects)


def _commit(state: CoordinatorState, sync: Sync, event: events.CoordinatorEvent, effects: Effects) -> CoordinatorState:
    """Replicas serve the new weights."""
    command = _command(sync, "commit", sync.lost - sync.restarted | sync.differing)
    if failure := oversize(command, sync.request.target):
        return _abort(state, replace(sync, failure=failure), event, effects)
    if (adapter := adapter_of(sync)) is not None:
        state = with_committed(state, adapter)
    else:
        state = replace(state, loaded=with_loaded(state.loaded, sync, committed=True))
    return _open(state, replace(sync, phase="commit", held_until_us=None), command, event, effects)


def _abort(state: CoordinatorState, sync: Sync, event: events.CoordinatorEvent, effects: Effects) -> CoordinatorState:
    """Replicas go back to the committed weights."""
    return _open(state, replace(sync, phase="abort", held_until_us=None), _command(sync, "abort"), event, effects)


def _command(sync: Sync, phase: SyncPhase, quarantine: frozenset[int] = frozenset()) -> WeightSync | AdapterSync:
    """The command of a phase. A replica that lacks a version of an adapter serves on, so none is in quarantine."""
    request = sync.request
    if (adapter := adapter_of(sync)) is not None:
        return AdapterSync(phase=phase, adapter=adapter, keep=keep_of(sync))
    has_source = phase in ("prepare", "commit")
    source = request.source if phase == "prepare" else without_delta(request.source)
    return WeightSync(
        phase=phase,
        version=sync.version,
        source=source if has_source else None,
        manifest=request.manifest if has_source else None,
        in_flight=request.in_flight if phase == "prepare" else "abort",
        quarantine=quarantine,
    )


def _open(
    state: CoordinatorState,
    sync: Sync,
    command: WeightSync | AdapterSync,
    event: events.CoordinatorEvent,
    effects: Effects,
) -> CoordinatorState:
    """Publish the command of a phase."""
    state = with_sync(state, replace(sync, seq=state.seq + 1))
    return publish(state, command, sync.request.target, sync.request.timeout_ms, event, effects)


def _end(
    state: CoordinatorState, sync: Sync, status: Literal["committed", "aborted", "stale"], effects: Effects
) -> CoordinatorState:
    """Report how a sync ended."""
    known = syncing_replicas(state, sync.request.target)
    adapter = adapter_of(sync)
    quarantined = quarantined_replicas(state) & known if adapter is None else frozenset[int]()
    report = replace(sync_report(sync, status, known, quarantined), adapter=sync.key)
    if adapter is None and status == "committed":
        report = replace(report, reason=doubted_label(state, weights_of(sync)))
    report = replace(report, stopped=stopped_replicas(state, known))
    effects.append(events.Conclude(ticket=sync.request.ticket, report=report))
    return without_sync(state, sync)


# --- what may happen meanwhile ----------------------------------------------------------------------------------------


def on_send_returned(state: CoordinatorState, event: events.SendReturned, effects: Effects) -> CoordinatorState:
    """Leave the load phase a short time: the weights have arrived by then, or they will not. Commit if they have."""
    if (sync := _sending(state, event.ticket)) is None:
        return state
    sync = replace(sync, sent=True)
    if sync.held_until_us is not None:
        return _commit(state, sync, event, effects)
    state = with_sync(state, sync)
    if (command := _open_phase(state, sync)) is None:
        return state
    until_us = event.at_us + state.settings.after_send_ms * 1000
    return with_open(state, replace(command, deadline_us=min(command.deadline_us, until_us)))


def on_send_failed(state: CoordinatorState, event: events.SendFailed, effects: Effects) -> CoordinatorState:
    """End the load phase, or what is left of it: what the engines wait for will not come, or not to the end."""
    if (sync := _sending(state, event.ticket)) is None:
        return state
    sync = replace(sync, failure=f"the trainer could not send the weights: {event.reason}")
    if sync.held_until_us is not None:
        return _give_up(state, sync, event, effects)
    state = with_sync(state, sync)
    if (command := _open_phase(state, sync)) is None:
        return state
    return with_open(state, conclude(command, command.waiting, Missing("not_sent"), event.at_us))


def on_time(state: CoordinatorState, event: events.TimerFired, effects: Effects) -> CoordinatorState:
    """Give up a sync whose sender has not returned in time: engines must not stay paused for it."""
    sync = state.sync
    if sync is None or sync.held_until_us is None or event.at_us < sync.held_until_us:
        return state
    sync = replace(sync, failure="the trainer's sender had not returned by the deadline")
    return _give_up(state, sync, event, effects)


def is_abandoned_by_close(sync: Sync) -> bool:
    """Return whether a bus that closes now aborts the sync. One whose commit was published is committed: agents that
    hear nothing more serve it.
    """
    return sync.held_until_us is not None or sync.phase in ("prepare", "load")


def abort_at_close(state: CoordinatorState, sync: Sync, event: events.Closed, effects: Effects) -> CoordinatorState:
    """Abort a sync with the last command of a bus, so that the fleet resumes without waiting for its lease."""
    reason = f"the bus was closed in the {sync.shown_phase} phase of the sync to version {sync.version}; it was aborted"
    effects.append(events.Refuse(ticket=sync.request.ticket, kind="closed", reason=reason))
    return publish(state, _command(sync, "abort"), sync.request.target, sync.request.timeout_ms, event, effects)


def conclude_down_engines(state: CoordinatorState, at_us: int) -> CoordinatorState:
    """End the phase of each sync for agents that are new, or whose engines are known to be down or stuck, if it waits
    for no others.
    """
    for sync in state.syncs.values():
        state = _conclude_down_engines(state, sync, at_us)
    return state


def _conclude_down_engines(state: CoordinatorState, sync: Sync, at_us: int) -> CoordinatorState:
    if (command := _open_phase(state, sync)) is None or command.ended:
        return state
    stuck, new, down = set[str](), set[str](), set[str]()
    for name in filter(command.waits_for, command.expected):
        if sync.stuck and sync.phase != "load" and _replica(state, name) in sync.stuck:
            stuck.add(name)
        elif sync.request.on_unreachable != "wait" and _is_new(state, sync, _replica(state, name)):
            new.add(name)
        elif sync.request.on_unreachable != "wait" and is_engine_down(state.members[name]):
            down.add(name)
        else:
            return state  # the usual case, and most often one of the first shows it
    replicas = frozenset(_replica(state, name) for name in sorted(down))
    known = syncing_replicas(state, sync.request.target)
    if (down or new) and not may_leave_out(sync, command.all_outcomes, replicas, known):
        return state
    ended = conclude(command, down, Missing("engine_down"), at_us)
    ended = conclude(ended, new, JOINING, at_us)
    return with_open(state, conclude(ended, stuck, Missing("not_sent"), at_us))


def _is_new(state: CoordinatorState, sync: Sync, replica: int) -> bool:
    """Whether a replica has joined since the sync began, or had not settled by then. One that has since is waited for
    again by a sync of an adapter; for one of weights it still has a load before it, and serves nothing meanwhile.

    One that was in quarantine before is idle until this sync, and answers it like any.
    """
    primary, desired = state.members.get(f"{replica}.0"), state.desired.get(replica)
    if primary is None or replica in sync.restarted:
        return replica in sync.joining
    out = (primary.status is not None and primary.status.quarantined) or (desired is not None and desired.quarantined)
    served = sync.key and primary.settled
    return replica in sync.joining and not served and not (out and replica not in sync.lost)


def _give_up(state: CoordinatorState, sync: Sync, event: events.CoordinatorEvent, effects: Effects) -> CoordinatorState:
    """Abort, and report at once: engines that still wait for what is sent are not waited for."""
    state, request = without_sync(state, sync), sync.request
    state = publish(state, _command(sync, "abort"), request.target, request.timeout_ms, event, effects)
    return _end(state, sync, "aborted", effects)


def _sending(state: CoordinatorState, ticket: int) -> Sync | None:
    """The sync with this ticket, if it is loading, or has loaded and waits for its sender."""
    sync = state.sync
    if sync is None or sync.request.ticket != ticket:
        return None
    return sync if sync.phase == "load" or sync.held_until_us is not None else None


def _open_phase(state: CoordinatorState, sync: Sync) -> OpenCommand | None:
    """The command of the phase that is open."""
    return next((command for command in state.open if command.record.seq == sync.seq), None)


def _replica(state: CoordinatorState, name: str) -> int:
    return state.members[name].hello.identity.replica
