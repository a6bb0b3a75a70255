"""Recorded decisions in plain words, one line each. Pure."""

from collections.abc import Iterator
from typing import assert_never

from controlplane.machine.events import (
    AnswersReceived,
    Closed,
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    HelloReceived,
    Issued,
    JoinReceived,
    Opened,
    PeerLost,
    Ping,
    Publish,
    Refuse,
    ResendRequested,
    Send,
    StatusReceived,
    SyncRequested,
    TimerFired,
)
from controlplane.record.entries import LogEntry
from schemas.commands import Command, UnknownCommand
from schemas.events import (
    Answer,
    CommandReceived,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    Fault,
    HeadSeen,
    LeaseExpired,
    Perform,
    RequestResend,
    RequestSnapshot,
    Restart,
    SnapshotReceived,
    Started,
    Tick,
)
from schemas.formatting import describe
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Skipped
from schemas.reports import Report, SyncReport
from schemas.wire import decode_command


def format_decision(entry: LogEntry) -> str:
    """What happened, then what was decided. Raises LogCorrupt for an entry that can't be read."""
    event, effects = entry.typed_event(), entry.typed_effects()
    if entry.agent:
        said = [_agent_event(event), *(_agent_effect(one) for one in effects)]  # type: ignore[arg-type]
    else:
        said = [_bus_event(event), *_bus_effects(effects)]  # type: ignore[arg-type]
    return " -> ".join(said)


def format_outcome(outcome: Conclusion) -> str:
    """One outcome, short."""
    match outcome:
        case Acted(calls=calls):
            return f"acted ({', '.join(calls) or 'noted'})"
        case Skipped(reason=reason):
            return f"skipped {reason}"
        case Failed(error=error, message=message):
            return f"failed {error}: {message}"
        case Missing(reason=why):
            return f"missing ({why})"
        case _:
            assert_never(outcome)


# --- the coordinator --------------------------------------------------------------------------------------------------


def _bus_event(event: CoordinatorEvent) -> str:
    match event:
        case Opened():
            return f"the bus of run {event.run} opens"
        case Issued():
            return f"asked to publish {describe(event.command)}"
        case SyncRequested():
            return f"asked for a sync to v{event.version} from {event.source.path}"
        case HelloReceived():
            return f"hello of {_name(event.peer)} on {event.hello.host}, pid {event.hello.pid}"
        case JoinReceived():
            return f"{_name(event.peer)} hears the commands"
        case StatusReceived():
            status = event.status
            ready = "ready" if status.ready else "not ready"
            return f"{_name(event.peer)} is {ready}, v{status.version}, at seq {event.seq}"
        case AnswersReceived():
            answers = event.answers
            said = [f"{_name(one.peer)} {format_outcome(one.outcome)} (seq {one.seq})" for one in answers]
            return "; ".join(said)
        case ResendRequested():
            return f"{_name(event.peer)} lacks the records from {event.first}"
        case PeerLost():
            return f"{_name(event.peer)} is lost: {event.reason}"
        case TimerFired():
            return "a deadline came"
        case Closed():
            return "the bus closes"
        case _:
            assert_never(event)


def _bus_effects(effects: tuple[CoordinatorEffect, ...]) -> Iterator[str]:
    for effect in effects:
        match effect:
            case Publish():
                command = decode_command(effect.envelope.body)
                yield f"seq {effect.seq}: {_command(command)}"
            case Conclude(report=Report() as report):
                counts = {
                    "acted": report.acted,
                    "skipped": report.skipped,
                    "failed": report.failed,
                    "missing": report.missing,
                }
                told = ", ".join(f"{len(who)} {word}" for word, who in counts.items() if who) or "nobody to answer"
                yield f"seq {report.seq} concluded: {told}"
            case Conclude(report=SyncReport() as sync):
                out = f", out of service {list(sync.quarantined)}" if sync.quarantined else ""
                yield f"sync to v{sync.version} {sync.status} on replicas {list(sync.loaded)}{out}"
            case Conclude():
                pass
            case Refuse():
                yield f"refused: {effect.reason}"
            case Send():
                yield f"{_name(effect.peer)} is sent {effect.message.__struct_config__.tag}"
            case Ping():
                yield f"{_name(effect.peer)} is probed"
            case _:
                assert_never(effect)


def _name(peer: str) -> str:
    return peer.partition("/")[0]


# --- an agent ---------------------------------------------------------------------------------------------------------


def _agent_event(event: Event) -> str:
    match event:
        case Started():
            return f"starts as incarnation {event.incarnation[:8]}"
        case CommandReceived():
            return f"seq {event.seq}: {_command(event.command)}"
        case HeadSeen():
            return f"the head is at seq {event.seq}, epoch {event.epoch}"
        case SnapshotReceived():
            desired = event.desired
            left_out = ", quarantined" if desired.quarantined else ""
            return f"told what is desired as of seq {event.seq}: v{desired.version}, {desired.generation}{left_out}"
        case EngineObserved():
            return f"sees {_seen(event)}"
        case EngineReturned(result=Fault() as fault):
            return f"call {event.call_id} failed ({fault.kind}): {fault.message}"
        case EngineReturned():
            return f"call {event.call_id} returned"
        case LeaseExpired():
            return "the lease of the bus is over"
        case Tick():
            return "a deadline came"
        case _:
            assert_never(event)


def _seen(event: EngineObserved) -> str:
    seen = event.observation
    words = [f"{seen.engine}, tokenizer {seen.tokenizer}"]
    words += [f"v{seen.version}"] if seen.version is not None else []
    words += ["generating" if seen.generating else "paused"] if seen.generating is not None else []
    words += [f"asleep {' '.join(sorted(seen.asleep))}"] if seen.asleep else []
    words += ["profiling"] if seen.profiling else []
    return ", ".join(words)


def _agent_effect(effect: Effect) -> str:
    match effect:
        case Perform():
            return f"call {effect.call_id}: {effect.call.__struct_config__.tag}"
        case Answer():
            row = f", row {effect.rule}" if effect.rule else ""
            return f"{format_outcome(effect.outcome)} (seq {effect.seq}{row})"
        case RequestResend():
            return f"asks for the records from {effect.first}"
        case Restart():
            return "starts anew"
        case RequestSnapshot():
            return "asks what is desired"
        case _:
            assert_never(effect)


def _command(command: Command | UnknownCommand) -> str:
    return f"unknown command {command.tag}" if isinstance(command, UnknownCommand) else describe(command)
