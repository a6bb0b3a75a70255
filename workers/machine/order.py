"""Rules 1 to 3 of the decision table: is a command from the current epoch, new, and next in line?

A command that one of these rules stops does not move the position. One that passes them moves it and joins the queue.
One that leaves a hole waits in the reorder buffer until the missing commands have been sent again.

A position is good in one epoch only. A bus that begins a new life may have lost the tail of its log (a power cut, with
durability "os"), so its first commands may bear the seq of others that were applied here. In a newer epoch, nothing is
taken before an `EpochStart` that follows the position directly, or a snapshot, which may lie behind the position.

The functions append to `effects` and return the next state.
"""

from msgspec.structs import replace

from schemas.commands import EpochStart
from schemas.events import Answer, CommandReceived, Effect, HeadSeen, RequestResend, RequestSnapshot
from schemas.outcomes import Reason, Skipped
from workers.machine.state import AgentState

_STALE_EPOCH = Skipped(Reason.STALE_EPOCH)
_SUPERSEDED = Skipped(Reason.SUPERSEDED)


def is_next(state: AgentState, event: CommandReceived) -> bool:
    """Whether the command is next and nothing else waits. Then it skips the queue, which is the usual case."""
    return (
        event.seq == state.seq + 1
        and event.epoch == state.epoch == state.history  # so the agent has joined, and has not diverged
        and not state.bus_lost
        and not (state.queue or state.reorder_buffer)
        and state.activity is None
    )


def take_in(state: AgentState, event: CommandReceived, effects: list[Effect]) -> AgentState:
    """Apply rules 1 to 3 to a command, and put it where it belongs."""
    if event.epoch < state.epoch:
        effects.append(Answer(epoch=event.origin, seq=event.seq, outcome=_STALE_EPOCH, rule=1))
        return state
    state = enter_epoch(state, event.epoch)
    if _continues_history(state, event):
        state = replace(state, history=event.epoch)
    if not state.joined or state.diverged:  # rule 3, and everything is missing
        if state.diverged:
            effects.append(RequestSnapshot())
        return _buffer(state, event)
    if event.seq <= state.seq:
        return _answer_again(state, event, effects)
    if event.seq > state.seq + 1:
        return _request_resend(_buffer(state, event), effects)
    if len(state.queue) >= state.settings.max_buffered:
        return _buffer(state, event)  # until the queue has room
    return drain_buffer(replace(state, seq=event.seq, queue=(*state.queue, event)))


def _continues_history(state: AgentState, event: CommandReceived) -> bool:
    """Whether this command begins a newer epoch directly after the position, so that the bus's log has lost nothing."""
    command = event.command
    return (
        isinstance(command, EpochStart)
        and event.origin == event.epoch
        and event.seq == state.seq + 1
        and command.previous_epoch == state.history
        and state.joined
    )


def apply_head(state: AgentState, event: HeadSeen, effects: list[Effect]) -> AgentState:
    """Compare the position with the bus's. Each head asks again for what is missing."""
    if event.epoch < state.epoch:
        return state
    state = enter_epoch(state, event.epoch)
    if state.diverged:
        effects.append(RequestSnapshot())
        return state
    if not state.joined or event.seq <= state.seq or len(state.queue) >= state.settings.max_buffered:
        return state
    return _request_resend(replace(state, resend_from=0), effects)


def enter_epoch(state: AgentState, epoch: int) -> AgentState:
    """Follow a newer epoch. What is missing must be requested again, from the new bus."""
    if epoch == state.epoch:
        return state
    return replace(state, epoch=epoch, reorder_buffer=(), resend_from=0)


def drain_buffer(state: AgentState) -> AgentState:
    """Move buffered commands that are next in line to the queue, while it has room and only commands are missing."""
    if state.diverged:
        return state
    seq, queue, buffered = state.seq, list(state.queue), state.reorder_buffer
    while buffered and buffered[0].seq <= seq + 1 and len(queue) < state.settings.max_buffered:
        if buffered[0].seq == seq + 1:
            queue.append(buffered[0])
            seq += 1
        buffered = buffered[1:]
    resend_from = state.resend_from if buffered and state.resend_from == seq + 1 else 0
    return replace(state, seq=seq, queue=tuple(queue), reorder_buffer=buffered, resend_from=resend_from)


def _request_resend(state: AgentState, effects: list[Effect]) -> AgentState:
    """Ask for the first missing command, unless that was done already."""
    first = state.seq + 1
    if state.resend_from == first:
        return state
    effects.append(RequestResend(first))
    return replace(state, resend_from=first)


def _buffer(state: AgentState, event: CommandReceived) -> AgentState:
    """Keep a command in order of seq. The furthest ahead is dropped first: it can be requested again."""
    if any(buffered.seq == event.seq for buffered in state.reorder_buffer):
        return state
    ordered = sorted((*state.reorder_buffer, event), key=lambda buffered: buffered.seq)
    return replace(state, reorder_buffer=tuple(ordered[: state.settings.max_buffered]))


def _answer_again(state: AgentState, event: CommandReceived, effects: list[Effect]) -> AgentState:
    """Rule 2. A record is known by its seq and its origin."""
    record = (event.seq, event.origin)
    stored = next((answer for answer in state.answers if (answer.seq, answer.epoch) == record), None)
    if stored is None and _is_undecided(state, event.seq):
        return state
    effects.append(stored or Answer(epoch=event.origin, seq=event.seq, outcome=_SUPERSEDED, rule=2))
    return state


def _is_undecided(state: AgentState, seq: int) -> bool:
    """Whether the command waits in the queue or is being carried out: its answer is still to come."""
    trigger = state.activity.trigger if state.activity is not None else None
    return any(queued.seq == seq for queued in state.queue) or (trigger is not None and trigger.seq == seq)
