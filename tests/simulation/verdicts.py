"""Judges of syncs: what a report says, when a quarantine ends, which weights a version stands for, how long a command
is good for. Each looks at the log and at the answers that were given, never at what a machine concluded from them.

Each function returns what is wrong, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from controlplane.machine.events import CoordinatorEvent, JoinReceived, ResendRequested, RetireRequested
from schemas.commands import (
    AdapterSync,
    Broadcast,
    Command,
    Drain,
    EpochStart,
    ProfileCommand,
    UnknownCommand,
    WeightSync,
)
from schemas.desired import Desired, requested_session
from schemas.events import (
    Call,
    CommandReceived,
    EngineReturned,
    Event,
    LeaseExpired,
    Load,
    Observe,
    SnapshotReceived,
    Started,
)
from schemas.identity import ROLLOUT, Identity, RolloutMode, agent_of, replica_and_node
from schemas.outcomes import Acted, Conclusion, ErrorKind, Failed, Missing, Outcome, Reason, Skipped
from schemas.reports import Report, SyncReport
from schemas.selection import profile_skip_reason
from tests.simulation import serving
from tests.simulation.engine import weights_of
from workers.machine.state import AgentState

if TYPE_CHECKING:
    from controlplane.machine.coordinator import CoordinatorState
    from controlplane.machine.coordinator_state import Sync
    from tests.simulation.agent import Process
    from tests.simulation.bus import Bus
    from tests.simulation.engine import Engine
    from tests.simulation.promises import Promises, Published
    from tests.simulation.slot import Slot

_TAKES_NO_PART = tuple(map(Skipped, (Reason.MODE_NEVER_SYNCS, Reason.NOT_TARGETED, Reason.OBSERVING)))
CALLS_ALONE_MAX = 8
"""Calls that bring one launch of an engine back to committed weights, without a session. More are a struggle."""
LEASE_LATE_MS = 5000
"""How much later than a lease its end may be noticed: a heartbeat, and a disk that hangs."""
REPLAYED_LATE_MS = 150
"""How long a message may be on its way on a connection that keeps order."""


def syncs(place: Identity) -> bool:
    """Whether weight syncs are for it."""
    return place.role == ROLLOUT and place.mode is not RolloutMode.COLOCATED


def followed(outcome: object) -> bool:
    """Whether the outcome of a phase says that the replica is where the phase wanted it."""
    return isinstance(outcome, Acted) or outcome == Skipped(Reason.ALREADY)


# --- reports ----------------------------------------------------------------------------------------------------------


def report(promises: Promises, bus: Bus, told: SyncReport) -> str:
    """P11: a report names each known replica that the sync was for, unless it has answered itself that it is where the
    end of the sync wants it.
    """
    last = told.phases[-1]
    target = promises.log[last.seq].target
    places = promises.identities
    firsts = {places[name].unit: places[name] for name in sorted(places, reverse=True)}
    joined = {places[name].unit for name in promises.known}
    members = (place for unit, place in firsts.items() if unit in joined and target.includes(place))
    known = {place.replica for place in members if syncs(place)}
    known -= {unit for unit in promises.leaving if isinstance(unit, int)}
    if leaving := promises.leaving & {*told.quarantined, *told.unproven, *told.joining}:
        return f"the report of v{told.version} names {leaving}, which leaves the fleet"
    if wrong := failed_for_one_that_leaves(promises, told, known):
        return wrong
    ends = isinstance(last.command, WeightSync | AdapterSync) and last.command.phase in ("commit", "abort")
    if old := promises.newcomers.followed & set(told.joining) - _arrived(promises, told.joining, told.phases[0].seq):
        return f"the report of v{told.version} calls {old} joining, which followed a sync before"
    promises.newcomers.followed |= {replica for replica in told.loaded if not told.adapter}
    named = {*told.quarantined, *told.unproven, *told.joining}
    for replica in known - named:
        given = promises.world.slot(f"{replica}.0").ledger.answered.get((last.origin, last.seq), [])
        proves = followed if ends else (lambda outcome: outcome in _TAKES_NO_PART)
        desired = bus.state.desired.get(replica)
        held = 0 if desired is None else desired.version if not told.adapter else _newest(desired, told.adapter)
        holds = told.status != "committed" or held == told.version
        stale = holds and Skipped(Reason.STALE_VERSION) in given
        if not (stale or any(proves(outcome) or outcome in _TAKES_NO_PART for outcome in given)):
            return f"the report of v{told.version}, {told.status}, does not name replica {replica}, which said {given}"
        if desired is not None and desired.quarantined and not told.adapter:
            return f"the report of v{told.version}, {told.status}, does not name replica {replica}, in quarantine"
    if nameless := [stop for stop in told.stopped if stop.operator is None]:
        return f"the report of v{told.version} does not say by whose order, and since when: {nameless}"
    stopped = {replica for stop in told.stopped for replica in stop.replicas}
    for replica in known - stopped:
        desired = bus.state.desired.get(replica)
        if desired is not None and (desired.generation == "paused" or desired.asleep):
            return f"the report of v{told.version} does not say that replica {replica} was told to stop"
    return _wrongly_named(bus, told, known)


def _wrongly_named(bus: Bus, told: SyncReport, known: set[int]) -> str:
    """P11: no replica is named that is where the end of the sync wants it, or unproven that was left out as new."""
    last = told.phases[-1]
    conclusions = dict(primaries(last))
    said = {(replica, outcome) for phase in told.phases for replica, outcome in primaries(phase)}
    new = Skipped(Reason.JOINING)
    failed = {replica for replica, outcome in said if outcome != new and not followed(outcome)}
    if left := {one for one in told.unproven if conclusions.get(one) == new} - failed:
        return f"the report of v{told.version} calls {left} unproven, which the bus itself left out as new"
    for replica in known.intersection(told.quarantined) if told.status == "aborted" and not told.adapter else ():
        desired, status = bus.state.desired.get(replica), bus.state.members[f"{replica}.0"].status
        if not ((desired is not None and desired.quarantined) or (status is not None and status.quarantined)):
            return f"the report of v{told.version}, aborted, calls replica {replica} quarantined, and it is not"
    if told.status == "committed" and isinstance(last.command, WeightSync):
        for replica in {*told.unproven, *told.joining} - last.command.quarantine:
            if followed(conclusions.get(replica)):
                return f"the report of v{told.version} calls replica {replica} unproven, and it followed"
        for replica in set(told.quarantined) - last.command.quarantine:
            if followed(conclusions.get(replica)):
                return f"the report of v{told.version} calls replica {replica} quarantined, and it serves"
    return ""


def _newest(desired: Desired, name: str) -> int:
    adapter = desired.adapters.get(name)
    return adapter.newest if adapter is not None else 0


def primaries(report: Report) -> Iterator[tuple[int, object]]:
    """What the primary of each replica concluded."""
    for line in report.outcomes:
        place = replica_and_node(line.agent)
        if place is not None and place[1] == 0:
            yield place[0], line.conclusion


def quorum(promises: Promises, before: CoordinatorState, new: Published) -> str:
    """A commit, of weights or of an adapter, rests on as many replicas that loaded as were asked for."""
    command = new.command
    if not isinstance(command, WeightSync | AdapterSync) or command.phase != "commit":
        return ""
    sync = before.syncs.get(command.adapter.name if isinstance(command, AdapterSync) else "")
    loads = [seq for seq, other in promises.log.items() if _is_phase(other, "load", command)]
    report = promises.concluded.get((promises.log[loads[-1]].origin, loads[-1])) if loads else None
    if sync is None or report is None:
        return f"{command} is published, and no replica was asked to load it, or the load has not ended"
    stale = Skipped(Reason.STALE_VERSION)
    loaded = [
        replica
        for replica, conclusion in primaries(report)
        if followed(conclusion) or (conclusion == stale and (sync.key or replica in sync.holding))
    ]
    short = len(loaded) < asked(sync) and (sync.key or sync.request.quorum is not None)
    return f"{command} is published with {loaded}, the quorum is {sync.request.quorum}" if short else ""


def _waited_for_new(promises: Promises, before: CoordinatorState, concluded: Report) -> str:
    """No phase waits until its deadline for replicas that have arrived since the sync began, where all others followed
    and are enough.
    """
    sync = before.sync
    if sync is None or sync.seq != concluded.seq or sync.request.on_unreachable == "wait":
        return ""
    began = min((report.seq for report in sync.reports), default=sync.seq)
    late = {replica for replica, conclusion in primaries(concluded) if conclusion == Missing("deadline")}
    others = [conclusion for replica, conclusion in primaries(concluded) if replica not in late]
    new = _arrived(promises, late, began)
    enough = len(others) >= max(1, sync.request.quorum or 1) and all(map(followed, others))
    return f"the sync to v{sync.version} waited for {new}, which are new" if late and late == new and enough else ""


def _arrived(promises: Promises, replicas: Iterable[int], seq: int) -> set[int]:
    """Those of these replicas that first joined when a command was out: the sync that it began may call them new."""
    return {replica for replica in replicas if promises.newcomers.arrived.get(f"{replica}.0", 0) >= seq}


def was_given(command: Command | UnknownCommand, conclusion: Conclusion, given: list[Outcome]) -> bool:
    """Whether an agent has given the answer that was concluded for it. Only the bus knows that digests differ, that it
    went on without one that is new, and which agents a drain is for.
    """
    differs = isinstance(conclusion, Failed) and conclusion.error is ErrorKind.DIGEST_MISMATCH
    acted = any(isinstance(answer, Acted) for answer in given)
    known = Reason.NOT_TARGETED if isinstance(command, Drain) else Reason.JOINING
    said = conclusion == Skipped(known) or conclusion in given
    return isinstance(conclusion, Missing) or said or (differs and acted)


def compared(promises: Promises, before: CoordinatorState, command: object) -> str:
    """No replica serves a commit whose engine was loaded with other bytes than more than half of its layout, unless
    they are served as this version already.
    """
    sync = before.sync
    if sync is None or not isinstance(command, WeightSync) or command.phase != "commit":
        return ""
    loads = [seq for seq, other in promises.log.items() if _is_phase(other, "load", command)]
    report = promises.concluded.get((promises.log[max(loads)].origin, max(loads))) if loads else None
    if report is None:
        return ""
    held: dict[int, str] = {}
    for replica, conclusion in primaries(report):
        if isinstance(conclusion, Missing):
            continue
        answers = promises.world.slot(f"{replica}.0").ledger.answered.get((report.origin, report.seq), [])
        for answer in answers:
            if isinstance(answer, Acted) and answer.version == command.version and answer.digest:
                held[replica] = answer.digest
    layouts = [digest.rpartition(":")[0] for digest in held.values()]
    holders = (before.members.get(f"{replica}.0") for replica in sync.holding)
    shown = [member.status for member in holders if member is not None and member.status is not None]
    served = {status.digest for status in shown if status.version == sync.version and not status.torn}
    for replica in held.keys() - command.quarantine:
        if held[replica] in served:
            continue
        same, of = list(held.values()).count(held[replica]), layouts.count(held[replica].rpartition(":")[0])
        if 2 * same <= of:
            return f"replica {replica} serves v{command.version} with {held[replica]}, as {same} of {of} do"
    return ""


def trusted(promises: Promises, slot: Slot, engine: Engine) -> str:
    """An engine with other bytes than were committed, whose replica the commit left out, is loaded again first."""
    of_these = [
        commit for commit in promises.commits() if commit.source and weights_of(commit.source) == engine.weights
    ]
    left_out = bool(of_these) and slot.identity.replica in of_these[-1].quarantine
    misled = engine.caller is not None and serving.misled(engine.caller)
    wrong = left_out and engine.flipped and not misled
    return f"{slot.name} serves the other bytes for which it was left out" if wrong else ""


def asked(sync: Sync) -> int:
    """How many replicas must load: no more than are left once some have begun to leave the fleet."""
    quorum = sync.request.quorum or 1
    return min(quorum, max(1, len(sync.members))) if sync.shrunk else quorum


def failed_for_one_that_leaves(promises: Promises, told: SyncReport, staying: set[int]) -> str:
    """A sync is not given up for want of replicas while enough that stay have done what each phase asked for. One that
    was retired since has not stayed, though a new agent has begun there.
    """
    short = re.search(r"and (\d+) must", told.reason)
    phases = [dict(primaries(phase)) for phase in told.phases if _phase_of(phase) in ("prepare", "load")]
    if told.status != "aborted" or short is None or not phases:
        return ""
    staying = {replica for replica in staying if promises.begun_anew.get(replica, 0) < told.phases[0].seq}
    done = [replica for replica in staying if all(followed(phase.get(replica)) for phase in phases)]
    enough = len(done) >= int(short[1])
    return f"the sync to v{told.version} was aborted ({told.reason}), though {done} followed" if enough else ""


def _phase_of(phase: Report) -> str:
    return phase.command.phase if isinstance(phase.command, WeightSync | AdapterSync) else ""


def _is_phase(published: Published, phase: str, of: WeightSync | AdapterSync) -> bool:
    """Whether a command is this phase of the sync that another one is of."""
    command = published.command
    if isinstance(command, AdapterSync) and isinstance(of, AdapterSync):
        return (command.phase, command.adapter) == (phase, of.adapter)
    if isinstance(command, WeightSync) and isinstance(of, WeightSync):
        return (command.phase, command.version) == (phase, of.version)
    return False


def waited(promises: Promises, before: CoordinatorState, after: CoordinatorState, concluded: Report) -> str:
    """No phase leaves out replicas whose engines are down if it was to wait for them, or if they have acted since."""
    sync = before.sync
    if sync is None or sync.seq != concluded.seq:
        return ""
    left = [line.agent for line in concluded.outcomes if line.conclusion == Missing("engine_down")]
    if left and sync.request.on_unreachable == "wait":
        return f"the sync to v{sync.version} was to wait for {left}"
    acted = {
        (line.agent, report.seq)
        for report in sync.reports
        for line in report.outcomes
        if type(line.conclusion) is Acted
    }
    for agent, seq in acted:
        member, unit = after.members.get(agent), promises.world.slot(agent).identity.unit
        if any(head >= seq for head in promises.restarts.get(unit, ())):
            continue  # a later life of its agent has reported another engine
        if agent in left and member is not None and member.status and member.seq - member.status.queued < seq:
            return f"the sync to v{sync.version} leaves out {agent}, which has done what seq {seq} asked for"
    return _waited_for_new(promises, before, concluded)


# --- commands ---------------------------------------------------------------------------------------------------------


def in_time(bus: Bus, new: Published) -> str:
    """An agent's time ends before the trainer's."""
    late = new.ends_us >= new.deadline_us > bus.now_us + 10_000
    return f"{new.command} is good for as long as the trainer waits" if late else ""


def alone(process: Process, call: Call) -> str:
    """An agent that is cut off and has a successor brings each launch of the engine back once, from the end of its
    lease on; and only as long as it sees, right before each call, that its successor has called nothing since it last
    looked, and loaded nothing else. More can't be promised: what the successor does while such a call is made is seen
    after it.
    """
    engine = process.slot.engine
    if engine is None or isinstance(call, Observe) or not (process.slot.cut_off and process.lease_over):
        return ""
    process.calls_alone.append(engine.instance)
    if process.calls_alone.count(engine.instance) > CALLS_ALONE_MAX:
        return f"{process.peer} is cut off, has a successor, and goes on to command its engine"
    if process.held_ms:  # its disk hung after it looked
        return ""
    if process.slot.double in engine.unseen_by:
        return f"{process.peer} is cut off, and calls {call} without a look at what its successor did"
    # A push that this agent had to expect shows nothing of its successor.
    if engine.loaded_by not in (None, process.slot.double) and not process.world.weather.pushes:
        return f"{process.peer} is cut off, and calls {call} after its successor has loaded {engine.weights}"
    return ""


def leased(process: Process) -> str:
    """An agent that no command can reach goes by its lease, whatever else it hears. A snapshot is the newest command,
    also of a bus that is gone by now.
    """
    now, member = process.world.now, None
    if process.bus is not None:
        member = process.bus.state.members.get(process.slot.name)
    commanded = member is not None and member.state == "live" and member.peer == process.peer
    if commanded or process.lease_over:
        process.commanded_ms = now
    late = now - process.commanded_ms > process.world.settings.lease_ms + LEASE_LATE_MS
    return (
        f"{process.peer} is out of reach of commands, and its lease goes on" if late and not process.lease_over else ""
    )


def receives(process: Process, call: Call) -> str:
    """A broadcast is received once for each command to load it, and by no agent of its own accord."""
    if not isinstance(call, Load) or not isinstance(call.source, Broadcast):
        return ""
    trigger, received = process.trigger, process.slot.ledger.received
    commanded = trigger is not None and isinstance(trigger.command, WeightSync) and trigger.command.phase == "load"
    if trigger is None or not commanded or (trigger.origin, trigger.seq) in received:
        return f"{process.peer} receives {call.source.group} again, and it is not sent"
    received.add((trigger.origin, trigger.seq))
    return ""


def version(promises: Promises, bus: Bus, new: Published) -> str:
    """A version stands for the same weights for ever, and the run counts on from the newest."""
    command, sync = new.command, bus.state.sync
    if not isinstance(command, WeightSync) or command.phase != "prepare" or sync is None:
        return ""
    asked = None
    for other in promises.log.values():
        before = other.command
        if not isinstance(before, WeightSync) or other is new:
            continue
        if before.phase == "prepare":
            asked = before
        if sync.request.version is None and before.version >= command.version:
            return f"the run counts on to v{command.version}, and there was v{before.version}"
        loaded = before.phase == "load" and before.version == command.version and asked is not None
        if loaded and asked is not None and (asked.source, asked.manifest) != (command.source, command.manifest):
            return f"v{command.version} was {asked.source} with {asked.manifest}, and is {command} now"
    return ""


def stale(promises: Promises, place: Identity, command: WeightSync, seq: int) -> bool:
    """Whether a sync is to a version that this replica has by an earlier commit: it takes no part."""
    earlier = (other for at, other in promises.log.items() if at < seq and promises.counts(at, place))
    commits = (other.command for other in earlier if isinstance(other.command, WeightSync))
    return any(commit.phase == "commit" and commit.version >= command.version for commit in commits)


def replayed(promises: Promises, bus: Bus, event: Event, held_ms: int) -> str:
    """A command that is sent again is not good for longer than it was. `held_ms`: how long it waited for its agent."""
    if not isinstance(event, CommandReceived) or isinstance(event.command, UnknownCommand):  # one that can't be read
        return ""
    new = promises.log.get(event.seq)
    if new is None or new.origin != event.origin or new.life != bus.life:
        return ""
    late_ms = event.ttl_ms - (new.ends_us - bus.now_us) // 1000
    late = late_ms > REPLAYED_LATE_MS + bus.slowest_ms + held_ms and event.ttl_ms > 0
    return f"command {event.seq}, sent again, is good until {late_ms} ms after its end" if late else ""


def taken(before: AgentState, event: SnapshotReceived) -> bool:
    """Whether the snapshot counts: not if its epoch is older, if this incarnation is already beyond its position, or if
    it was asked to end.
    """
    behind = event.epoch == before.snapshot_epoch and event.seq < before.seq
    return event.epoch >= before.epoch and not behind and not before.stopping


def blocked(process: Process, before: AgentState, event: Event) -> str:
    """Only a call that failed keeps an agent from going on by itself."""
    blocks = process.state.reconcile_blocked and not before.reconcile_blocked
    wrong = blocks and not isinstance(event, EngineReturned)
    return f"{process.peer} has given up, by {event}" if wrong else ""


# --- quarantine and sessions ------------------------------------------------------------------------------------------


def released(
    promises: Promises, bus: Bus, before: CoordinatorState, event: CoordinatorEvent, joined: dict[str, str]
) -> str:
    """A quarantine ends by a commit, by the abort of its own sync, or by a restart; and a restart does end it."""
    if isinstance(event, RetireRequested):
        return ""
    name = agent_of(event.peer) if isinstance(event, JoinReceived | ResendRequested) else ""
    snapshot = bool(name) and bus.state.members[name].state == "live" if name in bus.state.members else False
    restarted = snapshot and joined.get(name) != bus.state.members[name].hello.incarnation
    for unit, earlier in before.desired.items():
        after = bus.state.desired.get(unit)
        if after is None or not earlier.quarantined:
            continue
        if restarted and name == f"{unit}.0":
            if after.quarantined:
                return f"{name} has restarted, and stays in quarantine"
        elif (
            not after.quarantined
            and not after.draining
            and not _ends_quarantine(_between(promises, before.seq, bus.state.seq), earlier)
        ):
            return f"replica {unit} has left its quarantine of v{earlier.quarantined}, by {event}"
    return ""


def _between(promises: Promises, after: int, until: int) -> list[Command | UnknownCommand]:
    """The commands between two positions."""
    return [promises.log[seq].command for seq in range(after + 1, until + 1) if seq in promises.log]


def _ends_quarantine(commands: list[Command | UnknownCommand], before: Desired) -> bool:
    """Whether one of the commands ends the quarantine of a replica of which this was desired before."""
    for command in commands:
        if isinstance(command, EpochStart) and before.quarantined > before.version:  # it ends with its trainer
            return True
        if not isinstance(command, WeightSync) or command.phase not in ("commit", "abort"):
            continue
        if command.phase == "commit" or command.version == before.quarantined:
            return True
    return False


def suppressed(promises: Promises, before: AgentState, event: Event, state: AgentState, since: int) -> str:
    """An agent ends a quarantine of its own only when a commit, its own abort or a snapshot says so.

    `since` is the position at which it began.
    """
    was, now = before.suppressed.quarantined, state.suppressed.quarantined
    if not was or was == now or isinstance(event, SnapshotReceived | Started):
        return ""
    if not now and was > before.desired.version and isinstance(event, LeaseExpired):
        return ""
    lost = [published.command for (_, seq), published in promises.lost.items() if since < seq <= state.seq]
    if _ends_quarantine([*_between(promises, since, state.seq), *lost], replace(before.desired, quarantined=was)):
        return ""
    return f"its quarantine of v{was} {f'is one of v{now}' if now else 'has ended'} by {event}"


def session(promises: Promises, identity: Identity, seq: int, wanted: int | None) -> str:
    """P4: a snapshot wants the session that this unit has opened by the newest command for one."""
    for at in range(seq, promises.begun_anew.get(identity.unit, 0), -1):
        found = promises.log.get(at)
        if found is None or isinstance(found.command, EpochStart):
            return ""
        command = found.command
        if not isinstance(command, ProfileCommand | Drain) or not found.target.includes(identity):
            continue
        if isinstance(command, Drain) or command.action == "stop":
            return ""
        if requested_session(command, identity) is None:
            continue
        concluded = promises.concluded.get((found.origin, at))
        given = [line.conclusion for line in concluded.outcomes if line.agent == identity.agent] if concluded else []
        if any(isinstance(outcome, Acted) for outcome in given) and wanted != command.step:
            return f"the snapshot wants session {wanted}, and seq {at} has opened {command.step}"
        return ""
    return ""


def closing(promises: Promises, process: Process) -> str:
    """I7: a session that the trainer wants open is closed by its own stop, a newer start, a new epoch, the lease, or
    because it failed at this agent, by nothing else: judged by the log, and by what the agent answered. One whose stop
    was cut off is not the one that a later start of its step asks for.
    """
    engine, state = process.slot.engine, process.state
    ledger = process.slot.ledger
    if engine is None or engine.session_step is None or serving.misled(process):
        return ""
    if engine.session_step == engine.forgotten:
        return ""
    if ledger.lease_over or ledger.lost_epoch or ledger.late_start == engine.session_step:
        return ""
    if engine.stop_doubtful:
        return ""
    trigger = state.activity.trigger if state.activity is not None else None
    seq = trigger.seq if trigger is not None else state.seq
    start = _wanted_by(promises.log, process.slot.identity, engine.session_step, seq)
    begun_anew = promises.begun_anew.get(process.slot.identity.unit, 0)  # its place was taken up again, from nothing
    if start is None or start <= max(ledger.begun_at, begun_anew):
        return ""
    given = ledger.answered.get((promises.log[start].origin, start), [])
    if any(_gave_up(outcome) for outcome in given):
        return ""
    return f"{process.peer} closes the session of step {engine.session_step}, which seq {start} asked for"


def recording(promises: Promises, process: Process, step: int) -> str:
    """P5: an agent by itself doesn't record a step again whose window had ended, unless it was asked for again, or its
    replica has begun anew since: that takes part in the session that is open, as any new one does.
    """
    engine, trigger = process.slot.engine, process.trigger
    if engine is None:
        return ""
    seq = process.state.seq if trigger is None else trigger.seq
    starts = (at for at, found in promises.log.items() if at <= seq and _starts(found.command, step))
    engine.asked = max(starts, default=0)
    begun_anew = promises.begun_anew.get(process.slot.identity.unit, 0) > engine.asked
    again = trigger is None and not begun_anew and engine.recorded.get(step) == engine.asked
    return f"{process.peer} records step {step} again, whose window has ended" if again else ""


def _starts(command: Command | UnknownCommand, step: int) -> bool:
    return isinstance(command, ProfileCommand) and command.action == "start" and command.step == step


def _wanted_by(log: dict[int, Published], place: Identity, step: int, seq: int) -> int | None:
    """The newest start that wants this session open as of a seq; None if it is not wanted."""
    for at in range(seq, 0, -1):
        published = log.get(at)
        if published is None or isinstance(published.command, EpochStart):
            return None
        if isinstance(published.command, Drain) and published.target.includes(place):
            return None
        command = published.command
        if not isinstance(command, ProfileCommand) or not published.target.includes(place):
            continue
        if command.action == "stop" and command.step == step:
            return None
        plan = command.plan_for(place.role)
        if command.action == "start" and plan is not None and profile_skip_reason(plan, command.step, place) is None:
            return at if command.step == step and at != seq else None  # a start may replace one with another plan
    return None


def _gave_up(outcome: Outcome) -> bool:
    return not isinstance(outcome, Acted) and outcome != Skipped(Reason.ALREADY_PROFILING)
