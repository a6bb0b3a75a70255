"""Rules 1 to 9 of the decision table, a function each. `decide.py` has the table, and says when each is applied.

Rules 1 to 3 are about order: is a command from the current epoch, new, and next in line? A command that one of them
stops does not move the position. They append to `effects`, and return the next state, or None if they don't apply.

A position is good in one epoch only. A bus that begins a new life may have lost the tail of its log (a power cut, with
durability "os"), so its first commands may bear the seq of others that were applied here. In a newer epoch, nothing is
taken before an `EpochStart` that follows the position directly, or a snapshot, which may lie behind the position.

Rules 4 to 9 ask whether this agent may act on a command at all. They return its outcome if it may not. What the command
means to one that may is rule 10, which is in `commands.py`, except for what depends on the queue.
"""

from typing import Final

from msgspec.structs import replace

from schemas.commands import AdapterSync, Drain, EngineCommand, EpochStart, ProfileCommand, UnknownCommand, WeightSync
from schemas.events import Answer, CommandReceived, Effect, HeadSeen, RequestResend, RequestSnapshot
from schemas.identity import OBSERVED, ROLLOUT, Operation
from schemas.outcomes import ErrorKind, Failed, Outcome, Reason, Skipped
from workers.machine.commands import is_disk_command, missing_operation, needs_no_engine
from workers.machine.reconcile import may_get_place
from workers.machine.state import AgentState

# Outcomes that most agents of a fleet give to most commands. They are built once: building one costs a tenth of a
# decision.
SUPERSEDED: Final = Skipped(Reason.SUPERSEDED)
_STALE_EPOCH = Skipped(Reason.STALE_EPOCH)
_EXPIRED = Skipped(Reason.EXPIRED)
_NOT_TARGETED = Skipped(Reason.NOT_TARGETED)
_NOT_AN_ENGINE = Skipped(Reason.NOT_AN_ENGINE)
_OBSERVING = Skipped(Reason.OBSERVING)
_NOT_PRIMARY = Skipped(Reason.NOT_PRIMARY)


# --- order: rules 1 to 3 ----------------------------------------------------------------------------------------------


def is_next(state: AgentState, event: CommandReceived) -> bool:
    """Whether rules 1 to 3 let the command pass and nothing else waits. Then it skips the queue: the usual case."""
    return (
        event.seq == state.seq + 1
        and event.epoch == state.epoch == state.snapshot_epoch  # so the agent has joined, and needs no snapshot
        and not state.bus_lost
        and not (state.queue or state.reorder_buffer)
        and state.activity is None
    )


def stale_epoch(state: AgentState, event: CommandReceived, effects: list[Effect]) -> AgentState | None:
    """Rule 1: the sender's epoch is older than one already seen."""
    if event.epoch >= state.epoch:
        return None
    effects.append(Answer(epoch=event.origin, seq=event.seq, outcome=_STALE_EPOCH, rule=1))
    return state


def applied_already(state: AgentState, event: CommandReceived, effects: list[Effect]) -> AgentState | None:
    """Rule 2: the stored answer again, which is known by its seq and its origin. One still to come is not repeated."""
    if not state.joined or state.needs_snapshot or event.seq > state.seq:
        return None
    record = (event.seq, event.origin)
    stored = next((answer for answer in state.answers if (answer.seq, answer.epoch) == record), None)
    trigger = state.activity.trigger if state.activity is not None else None
    undecided = (*state.queue, trigger) if trigger is not None else state.queue
    if stored is not None:
        effects.append(stored)
    elif all(event.seq != waiting.seq for waiting in undecided):
        effects.append(Answer(epoch=event.origin, seq=event.seq, outcome=SUPERSEDED, rule=2))
    return state


def leaves_a_hole(state: AgentState, event: CommandReceived, effects: list[Effect]) -> AgentState | None:
    """Rule 3: it waits in the reorder buffer until the missing commands have been sent again, or the queue has room."""
    if not state.joined or state.needs_snapshot:
        if state.needs_snapshot:
            effects.append(RequestSnapshot())
        return buffer(state, event)
    if event.seq > state.seq + 1:
        return request_resend(buffer(state, event), effects)
    return buffer(state, event) if len(state.queue) >= state.settings.max_buffered else None


def enter_epoch(state: AgentState, epoch: int) -> AgentState:
    """Follow a newer epoch. The new bus is asked for what is missing, and may have a step recorded again."""
    if epoch <= state.epoch:
        return state
    known = state.suppressed if state.suppressed.recorded is None else replace(state.suppressed, recorded=None)
    return replace(state, epoch=epoch, reorder_buffer=(), suppressed=known)


def continues_history(state: AgentState, event: CommandReceived) -> bool:
    """Whether this command begins the epoch directly after the position, so that the bus's log has lost nothing."""
    command = event.command
    return (
        isinstance(command, EpochStart)
        and event.origin == event.epoch == state.epoch
        and event.seq == state.seq + 1
        and command.previous_epoch == state.snapshot_epoch
        and state.joined
    )


def apply_head(state: AgentState, event: HeadSeen, effects: list[Effect]) -> AgentState:
    """Compare the position with the bus's. Each head asks again for what is missing."""
    if event.epoch < state.epoch:
        return state
    state = enter_epoch(state, event.epoch)
    if state.needs_snapshot:
        effects.append(RequestSnapshot())
        return state
    if not state.joined or event.seq <= state.seq or len(state.queue) >= state.settings.max_buffered:
        return state
    return request_resend(replace(state, resend_from=0), effects)


def request_resend(state: AgentState, effects: list[Effect]) -> AgentState:
    """Ask for the first missing command, unless that was done already."""
    first = state.seq + 1
    if state.resend_from == first:
        return state
    effects.append(RequestResend(first))
    return replace(state, resend_from=first)


def buffer(state: AgentState, event: CommandReceived) -> AgentState:
    """Keep a command in order of seq. The furthest ahead is dropped first: it can be requested again."""
    if any(buffered.seq == event.seq for buffered in state.reorder_buffer):
        return state
    ordered = sorted((*state.reorder_buffer, event), key=lambda buffered: buffered.seq)
    return replace(state, reorder_buffer=tuple(ordered[: state.settings.max_buffered]))


def drain_buffer(state: AgentState) -> AgentState:
    """Move buffered commands that are next in line to the queue, while it has room and only commands are missing."""
    if state.needs_snapshot:
        return state
    seq, queue, buffered = state.seq, list(state.queue), state.reorder_buffer
    while buffered and buffered[0].seq <= seq + 1 and len(queue) < state.settings.max_buffered:
        if buffered[0].seq == seq + 1:
            queue.append(buffered[0])
            seq += 1
        buffered = buffered[1:]
    resend_from = state.resend_from if buffered and state.resend_from == seq + 1 else 0
    return replace(state, seq=seq, queue=tuple(queue), reorder_buffer=buffered, resend_from=resend_from)


# --- may this agent act: rules 4 to 9 ---------------------------------------------------------------------------------


def expired(state: AgentState, event: CommandReceived, now_ms: int) -> Outcome | None:
    """Rule 4: its time is over. One that waited for the engine to launch falls under rule 7."""
    late = now_ms >= event.at_ms + event.ttl_ms
    return _EXPIRED if late and not _awaits_launch(state, event) else None


def not_for_this_agent(state: AgentState, event: CommandReceived, _: int = 0) -> Outcome | None:
    """Rule 5: its target does not include this agent, which may only observe, or be a training rank."""
    if not is_targeted(state, event):
        return _NOT_TARGETED
    if state.identity.mode is OBSERVED:
        return _OBSERVING
    if state.identity.role != ROLLOUT and isinstance(event.command, WeightSync | EngineCommand):
        return _NOT_AN_ENGINE
    return None


def not_primary(state: AgentState, event: CommandReceived, _: int = 0) -> Outcome | None:
    """Rule 6: a higher node rank acts only on the traces on its disk."""
    return _NOT_PRIMARY if state.identity.node_rank > 0 and not is_disk_command(event.command) else None


def never_launched(state: AgentState, event: CommandReceived, _: int) -> Outcome | None:
    """Rule 7: its time is over, and the engine is still launching. Until then `waits` keeps it in the queue."""
    if not _awaits_launch(state, event):
        return None
    reason = state.engine.trouble or "its engine was still launching"
    message = f"replica {state.identity.replica} could not act before the command expired: {reason}. "
    if isinstance(event.command, ProfileCommand):  # a session that begins late would record another step
        message += "The engine was not called."
    else:
        message += "The engine was not called; it is brought to the desired state as soon as it is up."
    return Failed(ErrorKind.ENGINE_NOT_READY, message)


def tokenizer_missing(state: AgentState, _event: CommandReceived, _: int) -> Outcome | None:
    """Rule 8: node rank 0 has no tokenizer, which is a broken launch."""
    if state.engine.tokenizer != "absent" or state.identity.node_rank > 0:
        return None
    return Failed(
        ErrorKind.TOKENIZER_MISSING,
        f"replica {state.identity.replica} has no tokenizer manager on its node rank 0, so its engine can't be "
        "commanded. It was not called: check how it was launched.",
    )


def unsupported(state: AgentState, event: CommandReceived, _: int) -> Outcome | None:
    """Rule 9: the engine lacks the operation that the command needs, or the agent can't read the command."""
    command, engine, identity = event.command, state.engine, state.identity
    missing = missing_operation(command, engine)
    if missing is None or needs_no_engine(command, engine, identity):
        return None
    if isinstance(command, UnknownCommand):
        message = (
            f"this agent can't read the command {command.tag!r}, and did nothing: {command.problem}."
            if command.problem
            else f"this agent does not know the command {command.tag!r}: it is older than its bus."
        )
    elif state.settings.memory == "trainer" and missing in (Operation.SLEEP, Operation.WAKE):
        message = (
            f"the trainer's own data plane releases the memory of replica {identity.replica} and takes it back: its "
            f"agent was started with memory=trainer. Nothing was touched: {missing} it there."
        )
    else:
        available = ", ".join(sorted(engine.operations)) or "none"
        message = (
            f"{engine.name} has no operation {missing}; it has: {available}. For a server, `rolloutctl engine "
            "probe URL` says how to launch it."
        )
    return Failed(ErrorKind.UNSUPPORTED, message)


def superseded(state: AgentState, event: CommandReceived, _: int) -> Outcome | None:
    """Rule 10, of a part of a sync behind which a newer sync of the same adapter, or of the weights, waits. The bus has
    ended the older one; an engine that was launching meanwhile is brought to the newest version only.
    """
    command = event.command
    if not state.queue or not isinstance(command, WeightSync | AdapterSync):
        return None
    (what, version), later = _brought(command), (queued for queued in state.queue if is_targeted(state, queued))
    syncs = (queued.command for queued in later if isinstance(queued.command, WeightSync | AdapterSync))
    begun = (_brought(sync) for sync in syncs if sync.phase == "prepare")
    return SUPERSEDED if any(other == what and newer > version for other, newer in begun) else None


def _brought(sync: WeightSync | AdapterSync) -> tuple[str, int]:
    """The adapter that a sync brings, which is empty for the weights, and the version."""
    return (sync.adapter.name, sync.adapter.version) if isinstance(sync, AdapterSync) else ("", sync.version)


def is_targeted(state: AgentState, event: CommandReceived) -> bool:
    """Whether the command's target names this replica or rank. None does once the replica leaves the fleet."""
    if state.desired.draining:
        return False
    return event.target.replicas is None or event.target.includes(state.identity)


def is_leaving(state: AgentState) -> bool:
    """Whether the replica was told to leave the fleet, perhaps by a command that still waits for the call in flight."""
    if state.desired.draining:
        return True
    return any(isinstance(queued.command, Drain) and is_targeted(state, queued) for queued in state.queue)


def place_until(state: AgentState, event: CommandReceived) -> int | None:
    """Return until when a part of an adapter's sync waits for a place that others no longer need, in half of its time;
    None if it needs none. Only syncs of other adapters wait behind it.
    """
    command = event.command
    if not isinstance(command, AdapterSync) or command.phase not in ("prepare", "load") or state.activity is not None:
        return None
    if not is_targeted(state, event) or not may_get_place(state, command.adapter):
        return None
    behind = (queued.command for queued in state.queue[1:])
    if any(not isinstance(other, AdapterSync) or other.adapter.name == command.adapter.name for other in behind):
        return None
    return event.at_ms + event.ttl_ms // 2


def _awaits_launch(state: AgentState, event: CommandReceived) -> bool:
    """Whether the command needs an engine that may still be launching: no rule before 7 stops it."""
    if state.engine.tokenizer != "unknown" or state.identity.node_rank > 0 or not_for_this_agent(state, event):
        return False
    return not (is_disk_command(event.command) or needs_no_engine(event.command, state.engine, state.identity))


def waits(state: AgentState, event: CommandReceived, now_ms: int) -> bool:
    """Return whether a command is not decided yet, though no call is in flight: the engine is launching, or full."""
    if _awaits_launch(state, event):
        return now_ms < event.at_ms + event.ttl_ms
    until_ms = place_until(state, event)
    return until_ms is not None and now_ms < until_ms
