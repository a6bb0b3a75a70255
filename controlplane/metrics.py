"""Metrics of a bus for Prometheus, to register where the trainer's own are. Needs the extra `metrics`.

Theory of operation. What is so at a moment (agents, versions, open commands) is read when it is scraped, from the state
of the coordinator, which is replaced and never changed: no command pays for it, and nothing waits for a scrape. What
happens (commands, outcomes, losses) is counted when it has, after it was recorded and sent.

Labels have few values: kinds of commands, reasons, states, roles, and the index of a replica. No series belongs to one
agent, host or incarnation: a fleet of thousands that restarts now and then would make new series each time, and a
database keeps them all. The status and the log name agents.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, get_args

from prometheus_client import Counter as Counted
from prometheus_client import Histogram

from controlplane.bus.bus import Bus
from controlplane.bus.descriptors import limit_and_left
from controlplane.machine import events
from controlplane.machine.adapters import adapter_statuses
from controlplane.machine.coordinator import LOGIC
from controlplane.machine.coordinator_state import CoordinatorState
from controlplane.machine.replicas import is_primary, proven_replicas, quarantined_replicas, syncing_replicas
from controlplane.plane import ControlPlane
from schemas.agent_status import RequestCounts
from schemas.commands import SyncPhase, Target, WeightSync
from schemas.formatting import command_kind, kind_and_reason
from schemas.identity import ROLLOUT
from schemas.reports import Report, SyncReport
from schemas.transport.exposition import Sample, Table, TableCollector

AGENT_STATES: Final = ("joining", "live", "gone", "left")
PHASES: Final = get_args(SyncPhase)
KINDS: Final = (
    *("pause", "resume", "sleep", "wake", "flush", "abort", "drain", "epoch_start"),
    *("profile_start", "profile_stop", "profile_collect", "profile_check", "profile_finish"),
    *("adapter_prepare", "adapter_load", "adapter_commit", "adapter_abort", "adapter_drop"),
)
"""Kinds of commands that are no phases of a weight sync."""
COMMAND_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BEHIND_MAX: Final = 8
"""Versions behind the newest committed one that have a series of their own."""
SYNC_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

READ: Final[Table] = {
    "rolloutctl_bus_info": ("Always 1: the run, and the version of the decision logic.", ("run", "logic")),
    "rolloutctl_bus_up": ("1 while the bus is open and can write its log.", ()),
    "rolloutctl_bus_epoch": ("Lives of the bus on this log.", ()),
    "rolloutctl_bus_file_descriptors_left": ("File descriptors left to this process; an agent takes two.", ()),
    "rolloutctl_log_size_bytes": ("Size of the run's log on disk.", ()),
    "rolloutctl_log_commit_failures_total": ("Failed writes to the log. The first one stops the bus.", ()),
    "rolloutctl_malformed_messages_total": ("Messages that could not be read, of all peers.", ()),
    "rolloutctl_safety_polls_total": ("Messages that a socket did not signal. Anything but 0 is a bug.", ()),
    "rolloutctl_agents": ("Agents that the run knows.", ("role", "state")),
    "rolloutctl_replicas_known": ("Replicas that weight syncs are for.", ()),
    "rolloutctl_replicas_serving": ("Those that are proven to serve.", ()),
    "rolloutctl_replicas_draining": ("Those that are leaving the fleet; the other counts leave them out.", ()),
    "rolloutctl_replicas_unproven": ("Those that are not proven to hold their committed weights.", ()),
    "rolloutctl_replica_serving": ("1 if the replica is proven to serve.", ("replica",)),
    "rolloutctl_replica_version": ("Version that the replica holds, as last reported or proven.", ("replica",)),
    "rolloutctl_replica_version_lag": ("Committed version minus the one that it holds.", ("replica",)),
    "rolloutctl_replica_quarantined": ("1 if it could not follow a sync and is out of service.", ("replica",)),
    "rolloutctl_replica_silence_seconds": ("Time since the last message of its quietest live agent.", ("replica",)),
    "rolloutctl_replica_requests_running": ("Requests that its engine generates, if it says so.", ("replica",)),
    "rolloutctl_replica_requests_waiting": ("Requests that wait in its engine, if it says so.", ("replica",)),
    "rolloutctl_committed_version": ("Newest committed weights.", ()),
    "rolloutctl_sync_in_progress": ("1 during a weight sync.", ()),
    "rolloutctl_adapter_version": ("Newest committed version of a LoRA adapter.", ("adapter",)),
    "rolloutctl_adapter_replicas": ("Replicas that serve and are proven to hold that version.", ("adapter",)),
    "rolloutctl_open_commands": ("Commands that an agent has not answered.", ()),
    "rolloutctl_oldest_open_command_seconds": ("Age of the oldest of them; 0 if there is none.", ()),
}
"""What is read at a scrape."""
COUNTED: Final[Table] = {
    "rolloutctl_commands_total": (
        "Commands that ended for every agent; `incomplete`: one failed, or was there and did not answer.",
        ("command", "result"),
    ),
    "rolloutctl_outcomes_total": ("What became of commands, agent by agent.", ("command", "outcome", "reason")),
    "rolloutctl_refused_total": ("Commands and syncs that were refused or given up.", ("kind",)),
    "rolloutctl_agents_lost_total": ("Agents that left the fleet, by what showed it.", ("reason",)),
    "rolloutctl_sample_tokens_total": (
        "Tokens that the trainer judged, by how many versions they were behind; `more` than 8, or unknown.",
        ("behind", "result"),
    ),
}
TIMED: Final = {
    "rolloutctl_command_duration_seconds": (
        "From publishing a command to its last outcome; phases of syncs apart.",
        ("command",),
        COMMAND_S,
    ),
    "rolloutctl_sync_phase_duration_seconds": (
        "From publishing a phase of a weight sync to its last outcome.",
        ("phase",),
        SYNC_S,
    ),
    "rolloutctl_sync_duration_seconds": (
        "From the request of a sync to its end, of weights or of an adapter.",
        ("status",),
        SYNC_S,
    ),
}
"""What is counted and timed when it has happened."""


class BusCollector(TableCollector):
    """Metrics of an open control plane: `REGISTRY.register(BusCollector(plane))`. May be scraped from any thread.

    Counts from its creation on. It goes on to answer when the plane has closed, with `rolloutctl_bus_up` 0; take it
    out with `REGISTRY.unregister` before another one is registered.

    Args:
        plane: Open.

    Raises:
        BusClosed: The plane is not open.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._bus = plane.bus
        counted = {name: Counted(name, *about, registry=None) for name, about in COUNTED.items()}
        timed = {
            name: Histogram(name, text, labels, buckets=buckets, registry=None)
            for name, (text, labels, buckets) in TIMED.items()
        }
        self._commands, self._outcomes, self._refused, self._lost, self._samples = counted.values()
        self._durations, self._phases, self._syncs = timed.values()
        self._begin_at_zero()
        super().__init__(READ, (*counted.values(), *timed.values()))
        self._sync_began_us: dict[str, int] = {}  # by adapter; of base weights under ""
        self._bus.decisions.add(self._note)

    def _begin_at_zero(self) -> None:
        """A series that is not there before its first event shows Prometheus no increase by it."""
        for kind in (*KINDS, *(f"weights_{phase}" for phase in PHASES)):
            for result in ("ok", "incomplete"):
                self._commands.labels(kind, result)
        for counted, values in (
            (self._refused, ("command", "sync_in_progress", "closed", "retire")),
            (self._lost, ("silent", "unreachable", "left", "refused")),
            (self._durations, KINDS),
            (self._phases, PHASES),
            (self._syncs, ("committed", "aborted", "stale")),
        ):
            for value in values:
                counted.labels(value)
        for result in ("accepted", "refused"):
            for behind in (*range(BEHIND_MAX + 1), "more"):
                self._samples.labels(str(behind), result)

    def read(self) -> Iterator[Sample]:
        bus = self._bus
        state, now_us = bus.state, bus.now_us()
        yield "rolloutctl_bus_info", (state.run, str(LOGIC)), 1
        yield "rolloutctl_bus_up", (), bus.is_up
        yield "rolloutctl_bus_epoch", (), state.epoch
        yield "rolloutctl_bus_file_descriptors_left", (), limit_and_left()[1]
        yield "rolloutctl_log_size_bytes", (), _size_of_log(bus)
        yield "rolloutctl_log_commit_failures_total", (), bus.fault is not None
        yield "rolloutctl_malformed_messages_total", (), bus.inbox.malformed
        yield "rolloutctl_safety_polls_total", (), bus.router.safety_polls + bus.publisher.safety_polls
        yield "rolloutctl_sync_in_progress", (), state.sync is not None
        for name, adapter in adapter_statuses(state).items():
            yield "rolloutctl_adapter_version", (name,), adapter.version
            yield "rolloutctl_adapter_replicas", (name,), len(adapter.replicas)
        yield "rolloutctl_open_commands", (), len(state.open)
        oldest_us = min((command.issued_us for command in state.open), default=now_us)
        yield "rolloutctl_oldest_open_command_seconds", (), max(0, now_us - oldest_us) / 1e6
        yield from _read_agents(state)
        yield from _read_replicas(state, bus)

    def _note(self, event: events.CoordinatorEvent, effects: events.CoordinatorEffects) -> None:
        if isinstance(event, events.PeerLost):
            self._lost.labels(event.reason).inc()
        elif isinstance(event, events.SamplesCounted):
            for count in event.counts:
                behind = str(count.staleness) if count.staleness in range(BEHIND_MAX + 1) else "more"
                self._samples.labels(behind, "accepted" if count.accepted else "refused").inc(count.tokens)
        elif isinstance(event, events.SyncRequested) and not any(isinstance(done, events.Refuse) for done in effects):
            self._sync_began_us[event.adapter.name if event.adapter is not None else ""] = event.at_us
        for effect in effects:
            match effect:
                case events.Conclude(report=Report() as report):
                    self._note_report(report)
                case events.Conclude(report=SyncReport(status=status, adapter=adapter)):
                    began_us = self._sync_began_us.get(adapter, event.at_us)
                    self._syncs.labels(status).observe((event.at_us - began_us) / 1e6)
                case events.Refuse(kind=kind):
                    self._refused.labels(kind).inc()

    def _note_report(self, report: Report) -> None:
        command = report.command
        kind = command_kind(command).replace(" ", "_")
        counts = Counter(kind_and_reason(outcome.conclusion) for outcome in report.outcomes)
        for (outcome, reason), count in counts.items():
            self._outcomes.labels(kind, outcome, reason).inc(count)
        trouble = any(outcome in ("failed", "missing") and reason != "absent" for outcome, reason in counts)
        self._commands.labels(kind, "incomplete" if trouble else "ok").inc()
        duration_s = max((outcome.latency_us for outcome in report.outcomes), default=0) / 1e6
        if isinstance(command, WeightSync):
            self._phases.labels(command.phase).observe(duration_s)
        else:
            self._durations.labels(kind).observe(duration_s)


# --- what is read -----------------------------------------------------------------------------------------------------


def _read_agents(state: CoordinatorState) -> Iterator[Sample]:
    members = state.members.values()
    counts = Counter((member.hello.identity.role, member.state) for member in members)
    for role in sorted({ROLLOUT, *(role for role, _ in counts)}):
        for name in AGENT_STATES:
            yield "rolloutctl_agents", (role, name), counts[role, name]


def _read_replicas(state: CoordinatorState, bus: Bus) -> Iterator[Sample]:
    (serving, unproven), syncing = proven_replicas(state), syncing_replicas(state, Target())
    quarantined = quarantined_replicas(state)
    committed = max(desired.version for desired in (state.default_desired, *state.desired.values()))
    yield "rolloutctl_committed_version", (), committed
    yield "rolloutctl_replicas_known", (), len(syncing)
    yield "rolloutctl_replicas_serving", (), len(serving)
    yield "rolloutctl_replicas_draining", (), len(state.draining)
    yield "rolloutctl_replicas_unproven", (), len(unproven)
    silence_us: dict[int, int] = {}
    for member in state.members.values():
        identity = member.hello.identity
        replica, status = identity.replica, member.status
        if member.state == "live" and identity.role == ROLLOUT:
            silence_us[replica] = max(silence_us.get(replica, 0), bus.silent_us(member.peer))
            requests = bus.inbox.request_counts.get(member.peer, RequestCounts())
            if requests.running is not None:
                yield "rolloutctl_replica_requests_running", (str(replica),), requests.running
            if requests.waiting is not None:
                yield "rolloutctl_replica_requests_waiting", (str(replica),), requests.waiting
        if not is_primary(member) or replica not in syncing:
            continue
        label = (str(replica),)
        yield "rolloutctl_replica_serving", label, replica in serving
        yield "rolloutctl_replica_quarantined", label, replica in quarantined
        if status is not None:
            held = serving.get(replica, status.version)
            yield "rolloutctl_replica_version", label, held
            yield "rolloutctl_replica_version_lag", label, committed - held
    for replica, silent_us in silence_us.items():
        yield "rolloutctl_replica_silence_seconds", (str(replica),), silent_us / 1e6


def _size_of_log(bus: Bus) -> int:
    """The file, and what SQLite has not moved into it yet."""
    size = 0
    for path in (bus.log_path, f"{bus.log_path}-wal"):
        with suppress(OSError):
            size += os.stat(path).st_size
    return size
