"""Recorded decisions as text. Pure."""

from collections.abc import Iterator
from typing import assert_never

import msgspec
from msgspec.structs import asdict

from controlplane.machine import events as bus_events
from controlplane.record.entries import LogEntry
from schemas import events
from schemas.commands import Pushed
from schemas.errors import DecisionUnreadable
from schemas.formatting import count_outcomes, describe, format_agents, format_list, format_outcome, json_text
from schemas.identity import agent_of
from schemas.reports import Report, SyncReport
from schemas.wire import DECODE_ERRORS, decode_command


def format_decision(entry: LogEntry) -> str:
    """Return one line: what happened, then what was decided; or why that can't be read, if an agent sent it.

    Raises LogCorrupt if a decision of the coordinator can't be read.
    """
    try:
        event, effects = entry.typed_event(), entry.typed_effects()
    except DecisionUnreadable as error:
        return f"unreadable: {error}"
    if entry.agent:
        parts = [format_agent_event(event), *(format_agent_effect(effect) for effect in effects)]  # type: ignore[arg-type]
    else:
        parts = [format_bus_event(event), *_bus_effects(effects)]  # type: ignore[arg-type]
    return " -> ".join(parts)


def json_line(entry: LogEntry) -> bytes:
    """Return one record as JSON. What an agent sent and JSON can't represent is shown in base64, as `unreadable`.

    Raises LogCorrupt if a decision of the coordinator can't be read.
    """
    decode = msgspec.msgpack.decode
    try:
        plain = {**asdict(entry), "event": decode(entry.event), "effects": decode(entry.effects)}
        return json_text(plain).encode()
    except (*DECODE_ERRORS, TypeError):  # TypeError: keys or types that JSON lacks
        problem = "it has values that JSON can't represent"
        try:
            entry.typed_event()
            entry.typed_effects()
        except DecisionUnreadable as error:
            problem = str(error)
    return json_text({**asdict(entry), "unreadable": problem}).encode()


# --- the coordinator --------------------------------------------------------------------------------------------------


def format_bus_event(event: bus_events.CoordinatorEvent) -> str:
    """Return what the bus saw."""
    match event:
        case bus_events.Opened():
            return f"bus of run {event.run} opens"
        case bus_events.Issued():
            return f"asked to publish {describe(event.command)}"
        case bus_events.SyncRequested():
            version = f"v{event.version}" if event.version is not None else "the next version"
            pushed = f"pushed, {event.source.label}" if isinstance(event.source, Pushed) else ""
            by = " by an operator" if event.operator else ""
            what = f" of adapter {event.adapter.name}" if event.adapter is not None else ""
            return f"asked{by} for a sync{what} to {version} from {event.source.path or pushed}"
        case bus_events.RetireRequested():
            return f"asked to retire {', '.join(event.places)}"
        case bus_events.SamplesCounted(counts=counts):
            return "; ".join(["samples", *map(_format_samples, counts)])
        case bus_events.SendFailed():
            return f"could not send the weights: {event.reason}"
        case bus_events.SendReturned():
            return "has sent the weights"
        case bus_events.TimerFired():
            return "timer fires"
        case bus_events.Closed():
            return "bus closes"
        case bus_events.AnswersReceived(answers=answers):
            return "; ".join(f"{agent_of(a.peer)} {format_outcome(a.outcome)} (seq {a.seq})" for a in answers)
        case _:
            return f"{agent_of(event.peer)} {_peer_event(event)}"


def _format_samples(count: bus_events.SampleCount) -> str:
    what = f"{count.adapter} " if count.adapter else ""
    known = "other versions" if count.proof != "unknown" else "version unknown"
    version = f"v{count.version}" if count.version is not None else known
    version += f", {count.staleness} behind" if count.staleness is not None else ""
    taken = "accepted" if count.accepted else "refused"
    return f"{what}{version}, {count.proof}: {count.sequences:,} {taken}, {count.tokens:,} tokens"


def _peer_event(event: bus_events.PeerEvent) -> str:
    match event:
        case bus_events.HelloReceived(hello=hello):
            return f"says hello from {hello.host}, pid {hello.pid}"
        case bus_events.JoinReceived():
            return "joins"
        case bus_events.StatusReceived(status=status):
            return f"is {'ready' if status.ready else 'not ready'}, v{status.version}, at seq {event.seq}"
        case bus_events.ResendRequested():
            return f"requests the records from {event.first} again"
        case bus_events.LeaveRequested():
            return "asks to leave the fleet"
        case bus_events.PlaceRequested():
            return "asks for a free place"
        case bus_events.PeerLost():
            return f"is lost: {event.reason}"
        case _:
            assert_never(event)


def _bus_effects(effects: bus_events.CoordinatorEffects) -> Iterator[str]:
    for effect in effects:
        match effect:
            case bus_events.Publish():
                yield f"seq {effect.seq}: {describe(decode_command(effect.envelope.body))}"
            case bus_events.Conclude(report=Report() as report):
                counts = count_outcomes(outcome.conclusion for outcome in report.outcomes)
                yield f"seq {report.seq} concluded: {counts}"
            case bus_events.Conclude(report=SyncReport() as sync):
                yield sync.headline
            case bus_events.Conclude():
                pass
            case bus_events.Refuse():
                yield f"refused: {effect.reason}"
            case bus_events.Retired(agents=agents):
                yield f"retired: {format_agents(agents)}"
            case bus_events.Send():
                yield f"send {effect.message.__struct_config__.tag} to {agent_of(effect.peer)}"
            case bus_events.Ping():
                yield f"ping {agent_of(effect.peer)}"
            case _:
                assert_never(effect)


# --- an agent ---------------------------------------------------------------------------------------------------------


def format_agent_event(event: events.Event) -> str:
    """Return what an agent saw."""
    match event:
        case events.Started():
            return f"starts as incarnation {event.incarnation[:8]}"
        case events.CommandReceived():
            return f"seq {event.seq}: {describe(event.command)}"
        case events.HeadSeen():
            return f"newest is seq {event.seq}, epoch {event.epoch}"
        case events.SnapshotReceived(desired=desired):
            quarantined = ", quarantined" if desired.quarantined else ""
            held = [version.model for adapter in desired.adapters.values() for version in adapter.versions]
            adapters = f", adapters {format_list(held)}" if held else ""
            return f"snapshot at seq {event.seq}: v{desired.version}, {desired.generation}{quarantined}{adapters}"
        case events.EngineObserved():
            return f"observes {format_observation(event.observation)}"
        case events.EngineReturned(result=events.Fault() as fault):
            return f"call {event.call_id} failed ({fault.kind}): {fault.message}"
        case events.EngineReturned():
            return f"call {event.call_id} returned"
        case events.LeaseExpired():
            return "the bus's lease expires"
        case events.Tick():
            return "deadline reached"
        case events.Stopping():
            return "is asked to end"
        case events.FaultInjected():
            return f"injects the fault {event.name!r} on purpose: {event.what}"
        case _:
            assert_never(event)


def format_observation(seen: events.Observation) -> str:
    """Return what an engine holds and does."""
    parts = [f"{seen.engine}, tokenizer {seen.tokenizer}"]
    parts += [f"v{seen.version}"] if seen.version is not None else []
    parts += [f"weights {seen.label}"] if seen.label and seen.label != str(seen.version) else []
    parts += [f"digest {seen.digest[:12]}"] if seen.digest else []
    parts += ["generating" if seen.generating else "paused"] if seen.generating is not None else []
    parts += [f"asleep {' '.join(sorted(seen.asleep))}"] if seen.asleep else []
    parts += ["profiling"] if seen.profiling else []
    parts += [f"adapters {format_list(seen.adapters)}"] if seen.adapters else []
    parts += [f"{seen.running} requests, {seen.generated} tokens"] if seen.running is not None else []
    parts += [seen.trouble] if seen.trouble else []
    return ", ".join(parts)


def format_agent_effect(effect: events.Effect) -> str:
    """Return what an agent does."""
    match effect:
        case events.Perform():
            return f"call {effect.call_id}: {effect.call.__struct_config__.tag}"
        case events.Answer():
            rule = f", rule {effect.rule}" if effect.rule else ""
            return f"{format_outcome(effect.outcome)} (seq {effect.seq}{rule})"
        case events.RequestResend():
            return f"request the records from {effect.first} again"
        case events.Restart():
            return "restart"
        case events.RequestSnapshot():
            return "request a snapshot"
        case _:
            assert_never(effect)
