"""Judges of single answers and single calls: each skip and each failure gives a reason that holds, what has to be
skipped is, and no call is made that changes nothing.

What holds is read from the log, the place and the engine; of the machine only that which it alone can know is taken.
Each function returns what is wrong, or nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schemas import events
from schemas.commands import (
    AdapterSync,
    Drain,
    EngineCommand,
    EpochStart,
    ProfileCommand,
    Pushed,
    UnknownCommand,
    WeightSync,
)
from schemas.identity import COLOCATED, ROLLOUT, Identity
from schemas.outcomes import Acted, ErrorKind, Failed, Reason, Skipped
from tests.simulation import leaving, model, serving, verdicts
from workers.machine.state import AgentState

if TYPE_CHECKING:
    from tests.simulation.agent import Process
    from tests.simulation.promises import Promises, Published

_NOT_ENGINE_CALLS = ("observe", "await_push", "await_idle", "collect_traces", "finish_profile")


def answer(process: Process, before: AgentState, event: events.Event, given: events.Answer) -> str:
    """Judge an answer that is given for the first time."""
    promises, place = process.world.promises, process.slot.identity
    published = promises.log.get(given.seq)
    if published is None or published.origin != given.epoch or promises.lost:
        return ""
    outcome = given.outcome
    wrong = _stops(promises, process, before, event, given, published)
    if isinstance(outcome, Skipped) and not wrong:
        wrong = _skipped(promises, process, published, given)
    elif isinstance(outcome, Failed) and not wrong:
        wrong = _failed(promises, process, before, event, published, given)
    elif isinstance(outcome, Acted) and not wrong:
        wrong = _acted(process, published, outcome)
    cut_off = before.interrupted is not None  # it was perhaps of another mode then
    if not (wrong or cut_off) and given.rule == 10 and place.node_rank == 0 and place.role == ROLLOUT:
        wrong = _must(promises, process, published, given)
    return f"{process.peer} answers {given}, and {wrong}" if wrong else ""


def _stops(
    promises: Promises,
    process: Process,
    before: AgentState,
    event: events.Event,
    given: events.Answer,
    published: Published,
) -> str:
    """Rules 4 to 6: whether its time is over, and whether it is for this place."""
    place, command = process.slot.identity, published.command
    expected, leaves = None, leaving.has_begun(promises, process, given.seq)
    if not published.target.includes(place) or leaves:
        expected = Reason.NOT_TARGETED
    elif place.role != ROLLOUT and isinstance(command, WeightSync | EngineCommand):
        expected = Reason.NOT_AN_ENGINE
    elif place.node_rank and not (isinstance(command, ProfileCommand) and command.action in ("collect", "finish")):
        expected = Reason.NOT_PRIMARY
    reason = given.outcome.reason if isinstance(given.outcome, Skipped) else None
    received = [event] if isinstance(event, events.CommandReceived) else []
    arrived = next((one for one in (*received, *before.queue) if one.seq == given.seq), None)
    late = arrived is not None and event.at_ms >= arrived.at_ms + arrived.ttl_ms
    if reason is Reason.EXPIRED:
        return "" if late or arrived is None else "its time is not over"
    if late and given.rule not in (4, 7) and not _launching(process, before):
        return "its time is over"
    told = reason in (Reason.NOT_TARGETED, Reason.NOT_AN_ENGINE, Reason.NOT_PRIMARY)
    return "" if leaves is None or (reason if told else None) == expected else f"the reason is {expected}"


def _launching(process: Process, before: AgentState) -> bool:
    """Whether the agent did not see its engine, before this event or by it."""
    return "unknown" in (before.engine.tokenizer, process.state.engine.tokenizer)


def _skipped(promises: Promises, process: Process, published: Published, given: events.Answer) -> str:
    assert isinstance(given.outcome, Skipped)
    command, place, engine = published.command, process.slot.identity, process.slot.engine
    certain = engine is not None and not serving.misled(process) and engine.attempt is None
    certain = certain and process.slot.name not in promises.world.forgotten
    match given.outcome.reason:
        case Reason.STALE_VERSION if isinstance(command, WeightSync):
            return "" if verdicts.stale(promises, place, command, given.seq) else "no newer version was committed"
        case Reason.MODE_NEVER_SYNCS:
            return "" if place.mode is COLOCATED else "its mode syncs"
        case Reason.SUPERSEDED if given.rule == 10:
            later = [found.command for seq, found in promises.log.items() if seq > given.seq]
            newer = any(isinstance(other, WeightSync | AdapterSync | EpochStart | Drain) for other in later)
            return "" if newer or process.state.bus_lost else "nothing newer was published"
        case Reason.ALREADY_PROFILING if certain and engine is not None and isinstance(command, ProfileCommand):
            doubtful = engine.doubtful | engine.recorded.keys()
            return "" if engine.session_step == command.step or command.step in doubtful else "no such session is open"
        case Reason.NOT_PROFILING if certain and engine is not None and isinstance(command, ProfileCommand):
            own = (
                engine.session_step == command.step and engine.forgotten is None and command.step not in engine.doubtful
            )
            return "its session is open" if own else ""
        case _:
            return ""


def _failed(
    promises: Promises,
    process: Process,
    before: AgentState,
    event: events.Event,
    published: Published,
    given: events.Answer,
) -> str:
    assert isinstance(given.outcome, Failed)
    command, place, engine = published.command, process.slot.identity, process.slot.engine
    syncing = open_sync(promises, place, given.seq)
    activity = before.activity
    match given.outcome.error:
        case ErrorKind.SYNC_IN_PROGRESS:
            return "" if syncing else "no sync was in progress"
        case ErrorKind.NO_EFFECT if engine is not None and not isinstance(command, AdapterSync):
            relaunched = before.engine.instance != process.state.engine.instance
            others = engine.memory == "trainer" or len(process.world.commanders(process.slot)) > 1
            return "" if engine.idled or relaunched or others else "its engine has done it"
        case ErrorKind.ENGINE_NOT_READY if given.rule == 7:
            return "" if _launching(process, before) else "its engine was up"
        case ErrorKind.SOURCE_REFUSED if engine is not None and not serving.misled(process):
            asked = isinstance(command, WeightSync) and command.phase == "prepare" and activity is None
            label = (
                command.source.label if isinstance(command, WeightSync) and isinstance(command.source, Pushed) else None
            )
            return f"its label is {engine.label}" if asked and label not in (None, engine.label) else ""
        case ErrorKind.ENGINE_BUSY:
            late = activity is not None and (activity.overdue or event.at_ms >= activity.deadline_ms)
            return "" if late else "nothing is overdue"
        case ErrorKind.ENGINE_TIMEOUT:
            late = activity is not None and event.at_ms >= activity.deadline_ms
            relaunched = before.engine.instance != process.state.engine.instance  # so that nothing was pushed to it
            return "" if late or relaunched else "its time is not over"
        case ErrorKind.WEIGHTS_ASLEEP if engine is not None and not serving.misled(process):
            asleep = engine.asleep or before.engine.unknown or before.engine.asleep
            asleep = asleep or before.desired.asleep or process.state.desired.asleep  # one event decides many commands
            return "" if asleep else "all its memory is awake"
        case ErrorKind.UNSUPPORTED if engine is not None and given.rule == 9:
            whole = not engine.temper.lacks and engine.memory == "agent"
            return "its engine can do all" if whole and not isinstance(command, UnknownCommand) else ""
        case _:
            return ""


def _acted(process: Process, published: Published, outcome: Acted) -> str:
    """The calls that it names were made, the last of all."""
    engine = process.slot.engine
    calls = [call for call in outcome.calls if call not in _NOT_ENGINE_CALLS]
    if engine is None or not calls or len(process.world.commanders(process.slot)) > 1:
        return ""
    made = [word for _, _, word in engine.called][-len(calls) :]
    return "" if made == calls else f"the last calls were {made}"


def _must(promises: Promises, process: Process, published: Published, given: events.Answer) -> str:
    """What has to be skipped or refused is."""
    command, place, outcome = published.command, process.slot.identity, given.outcome
    if isinstance(command, WeightSync | AdapterSync) and place.mode is COLOCATED:
        busy = isinstance(command, AdapterSync) and isinstance(outcome, Failed)
        return "" if isinstance(outcome, Skipped) or busy else "it never syncs"
    superseded = Skipped(Reason.SUPERSEDED)
    if isinstance(command, WeightSync) and verdicts.stale(promises, place, command, given.seq):
        unable = isinstance(outcome, Failed) and outcome.error in (ErrorKind.ENGINE_BUSY, ErrorKind.UNKNOWN)
        told = unable or outcome in (Skipped(Reason.STALE_VERSION), superseded)
        return "" if told else "a newer version was committed"
    stopping = isinstance(command, EngineCommand) and command.operation in ("pause", "resume", "sleep", "wake")
    if stopping and open_sync(promises, place, given.seq) and not isinstance(outcome, Failed):
        return "a sync is open"
    return ""


def open_sync(promises: Promises, place: Identity, seq: int) -> int:
    """The version of the sync that is open for a place before a position; 0 if none is."""
    return model.by_log(promises, place, seq).syncing


def dials(promises: Promises, process: Process) -> str:
    """P3: an agent that is given a new key leaves no sync that it takes part in."""
    ledger, state = process.slot.ledger, process.state
    if ledger.lost_epoch or ledger.lease_over or not state.joined or state.desired.draining:
        return ""
    version = open_sync(promises, process.slot.identity, state.seq + 1)
    return f"{process.peer} joins again in the sync to v{version}" if version else ""


def superfluous(process: Process, call: events.Call) -> str:
    """P5: no call is made that changes nothing, as far as the agent can know."""
    engine, believed, trigger = process.slot.engine, process.state.engine, process.trigger
    if engine is None or serving.misled(process) or not engine.ready or engine.temper.loses or believed.lost:
        return ""
    held = False
    match call:
        case events.Resume():
            held = engine.generating and believed.generating is True
        case events.Wake():
            held = not (call.tags & (engine.asleep | believed.unknown))
        case events.Sleep():
            held = call.tags <= engine.asleep and not (believed.unknown or call.discard)
        case events.Pause():
            held = engine.paused and believed.generating is False and not (engine.frozen or engine.interrupts)
        case events.Flush():
            own = trigger is None or not isinstance(trigger.command, EngineCommand)
            held = own and not believed.stale_cache and not engine.cached
        case events.StopProfile():
            held = engine.session_step is None and believed.session is None
    return f"{process.peer} calls {call}, which changes nothing: {believed}" if held else ""


def unseen(process: Process, call: events.Call) -> str:
    """P4: nothing is begun with an engine that its agent does not see."""
    activity, blind = process.state.activity, process.state.engine.tokenizer == "unknown"
    begun = activity is None or activity.completed  # a call after another one of the same command
    reads = isinstance(call, events.DiskCall | events.Observe | events.AwaitPush)
    return f"{process.peer} calls {call}, and has not seen its engine" if blind and not (begun or reads) else ""
