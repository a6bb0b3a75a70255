"""Every schedule of one agent's machine, within small bounds: 4 commands, 3 epochs, 2 crashes (1 in the short run).

The world around the machine is as hostile as the network may be. Anything that was ever sent may arrive now, again, or
not at all; a trainer that was replaced sends on; the agent dies between any two decisions, with its engine's call done
or not, and may have lost what it had not written down. Schedules that lead to the same situation are followed once, so
the search ends, and what it did not find does not exist within the bounds.
"""

from collections import deque
from collections.abc import Callable, Iterator

import pytest
from msgspec import Struct
from msgspec.structs import replace

from schemas import events
from schemas.commands import EngineCommand, EpochStart
from schemas.desired import Desired, desired_after
from schemas.identity import Identity, Operation
from schemas.outcomes import Outcome, Reason, Skipped
from schemas.wire import encode
from workers.machine.decide import decide
from workers.machine.state import AgentState

AgentDecide = Callable[[AgentState, events.Event], tuple[AgentState, tuple[events.Effect, ...]]]

PLACE = Identity(replica=0, node_rank=0)

# The run: epoch 1 published a pause; epoch 2 began with the second record and published a flush. The trainer of epoch 1
# does not know, and published a resume as its own second record. Epoch 3 began after a power cut, in which the log lost
# all of epoch 2, and so a position that the agent may have reached.
PAUSE, RESUME, FLUSH = (EngineCommand(operation=name) for name in ("pause", "resume", "flush"))
BEGIN = EpochStart(previous_epoch=1, logic=1)
HISTORY = ((1, 1, PAUSE), (2, 2, BEGIN), (2, 3, FLUSH))


def sent(epoch: int, origin: int, seq: int, command: EngineCommand | EpochStart) -> events.CommandReceived:
    return events.CommandReceived(at_ms=0, epoch=epoch, origin=origin, seq=seq, ttl_ms=1000, command=command)


def desired_at(seq: int) -> Desired:
    desired = Desired()
    for _, _, command in HISTORY[:seq]:
        desired = desired_after(desired, command, True, PLACE)
    return desired


MESSAGES: tuple[events.Event, ...] = (
    sent(1, 1, 1, PAUSE),
    sent(1, 1, 2, RESUME),
    events.HeadSeen(at_ms=0, epoch=1, seq=2),
    events.SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=desired_at(0)),
    *(sent(2, origin, seq, command) for origin, seq, command in HISTORY),
    events.HeadSeen(at_ms=0, epoch=2, seq=3),
    *(events.SnapshotReceived(at_ms=0, epoch=2, seq=seq, desired=desired_at(seq)) for seq in (1, 2, 3)),
)
AFTER_THE_LOSS = events.SnapshotReceived(at_ms=0, epoch=3, seq=2, desired=desired_at(2))
WITH_A_LOST_TAIL: tuple[events.Event, ...] = (
    sent(1, 1, 1, PAUSE),
    events.SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=desired_at(0)),
    *(sent(2, origin, seq, command) for origin, seq, command in HISTORY[1:]),
    events.SnapshotReceived(at_ms=0, epoch=2, seq=2, desired=desired_at(2)),
    sent(3, 3, 2, BEGIN),
    sent(3, 3, 3, RESUME),
    events.HeadSeen(at_ms=0, epoch=3, seq=3),
    AFTER_THE_LOSS,
)


class Situation(Struct, frozen=True):
    """state: of the machine.   durable: what it would find in its journal.   generating: the engine.

    calling: the call in flight.   answered: the outcomes that left the agent, by epoch and seq of the record.
    """

    state: AgentState
    durable: AgentState
    generating: bool = True
    calling: events.Perform | None = None
    answered: tuple[tuple[int, int, Outcome], ...] = ()
    crashes: int = 0


def observation(situation: Situation) -> events.Observation:
    return events.Observation(
        engine="e",
        instance="one",
        tokenizer="present",
        operations=frozenset(Operation),
        generating=situation.generating,
        asleep=frozenset(),
        profiling=False,
        version=0,
    )


def begin(situation: Situation, machine: AgentDecide) -> Situation:
    """Begin an incarnation, which observes its engine."""
    started = events.Started(at_ms=0, identity=PLACE, incarnation=str(situation.crashes))
    situation = step(situation, started, machine)
    return step(situation, events.EngineObserved(at_ms=0, observation=observation(situation)), machine)


def step(situation: Situation, event: events.Event, machine: AgentDecide) -> Situation:
    """Make one decision, journal it as the agent's shell does, and check it."""
    before = situation.state
    state, effects = machine(before, event)
    lazy = isinstance(event, events.CommandReceived | events.HeadSeen | events.Tick)
    written = not lazy or state.calls_made != before.calls_made or state.epoch != before.epoch
    check(situation, event, state, effects)
    answered = situation.answered
    for effect in effects:
        if isinstance(effect, events.Answer) and not _answers_a_copy(effect):
            key = (effect.epoch, effect.seq, effect.outcome)
            answered = answered if key in answered else (*answered, key)
    calling = next((effect for effect in effects if isinstance(effect, events.Perform)), situation.calling)
    if isinstance(event, events.EngineReturned) and calling is situation.calling:
        calling = None
    durable = state if written else situation.durable
    return replace(situation, state=state, durable=durable, calling=calling, answered=answered)


def _answers_a_copy(answer: events.Answer) -> bool:
    return answer.outcome in (Skipped(Reason.STALE_EPOCH), Skipped(Reason.SUPERSEDED))


def check(situation: Situation, event: events.Event, state: AgentState, effects: tuple[events.Effect, ...]) -> None:
    """Check what must hold for every single decision."""
    before = situation.state
    assert state.epoch >= before.epoch, "P6: an epoch that was seen is forgotten"
    if isinstance(event, events.CommandReceived) and event.epoch < before.epoch:
        assert state == before, "P6: a fenced command left a mark"
    elif isinstance(event, events.CommandReceived):
        refused = any(
            isinstance(effect, events.Answer) and effect.outcome == Skipped(Reason.STALE_EPOCH) for effect in effects
        )
        assert not refused, "P6: the newest epoch is refused"
    if isinstance(event, events.Started):
        assert state.seq == before.seq - len(before.queue), "P1: a restart goes on from what was decided"
    elif not isinstance(event, events.SnapshotReceived):
        taken = state.seq - before.seq
        assert taken >= 0, "P1: the position went back"
        if isinstance(event, events.CommandReceived):
            waiting = {buffered.seq for buffered in before.reorder_buffer} | {event.seq}
            assert set(range(before.seq + 1, state.seq + 1)) <= waiting, "P2: applied beyond a hole"
        else:
            assert taken == 0 or before.reorder_buffer, "P1: a position without a command"
    for effect in effects:
        if isinstance(effect, events.Perform):
            assert situation.calling is None or isinstance(event, events.EngineReturned), "P5: two calls at once"
            assert effect.call_id > before.calls_made, "P5: a call is made again"
            cause = state.activity.trigger if state.activity is not None else None
            assert cause is None or not _answered(situation, cause), "P5: what was answered is done again"
        if isinstance(effect, events.Answer) and not _answers_a_copy(effect):
            others = {
                outcome for epoch, seq, outcome in situation.answered if (epoch, seq) == (effect.epoch, effect.seq)
            }
            assert others <= {effect.outcome}, f"P3: two outcomes for {effect.seq}: {others} and {effect.outcome}"


def _answered(situation: Situation, cause: events.CommandReceived) -> bool:
    return any((epoch, seq) == (cause.origin, cause.seq) for epoch, seq, _ in situation.answered)


def done(situation: Situation) -> Situation:
    """The call in flight succeeds."""
    assert situation.calling is not None
    call = situation.calling.call
    generating = situation.generating and not isinstance(call, events.Pause) or isinstance(call, events.Resume)
    return replace(situation, generating=generating)


def following(
    situation: Situation, machine: AgentDecide, crashes: int, messages: tuple[events.Event, ...] = MESSAGES
) -> Iterator[Situation]:
    """Yield everything that may happen next."""
    for message in messages:
        if not _of_another_connection(situation.state, message):
            yield step(situation, message, machine)
    if situation.calling is not None:
        after = done(situation)
        call_id = situation.calling.call_id
        result = events.EngineReturned(
            at_ms=0, call_id=call_id, result=events.Returned(), observation=observation(after)
        )
        yield step(after, result, machine)
    if situation.crashes < crashes:
        called = [situation] if situation.calling is None else [situation, done(situation)]
        for found in called:
            for kept in {encode(state): state for state in (found.state, found.durable)}.values():
                yield begin(
                    replace(found, state=kept, durable=kept, calling=None, crashes=situation.crashes + 1), machine
                )


def _of_another_connection(state: AgentState, message: events.Event) -> bool:
    """Whether a snapshot belongs to another connection: the bus of this one is not behind this agent, unless it lost
    the tail of its log.
    """
    behind = isinstance(message, events.SnapshotReceived) and message.seq < state.seq
    lost = message is AFTER_THE_LOSS and all(answer.epoch < AFTER_THE_LOSS.epoch for answer in state.answers)
    return behind and not lost and not state.joined


def search(machine: AgentDecide, crashes: int, messages: tuple[events.Event, ...] = MESSAGES) -> dict[bytes, Situation]:
    """Return all reachable situations by their encoding. Raises AssertionError if a promise is broken."""
    first = begin(Situation(AgentState(), AgentState()), machine)
    seen = {encode(first): first}
    queue = deque([first])
    while queue:
        for found in following(queue.popleft(), machine, crashes, messages):
            key = encode(found)
            if key not in seen:
                seen[key] = found
                queue.append(found)
    return seen


@pytest.mark.parametrize("crashes", [1, pytest.param(2, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_no_schedule_breaks_the_machine(crashes: int) -> None:
    found = search(decide, crashes)
    assert len(found) > 5_000  # the search is as wide as it should be
    ends = [end for end in found.values() if end.state.seq == 3 and end.state.epoch == 2 and end.calling is None]
    assert any(end.crashes == crashes for end in ends)
    for end in ends:
        if (
            end.state.joined
            and not end.state.needs_snapshot
            and not end.state.queue
            and not end.state.reconcile_blocked
        ):
            assert end.generating, "the pause of a replaced trainer must not hold"


def follow_the_bus_that_lost_its_tail(machine: AgentDecide, crashes: int) -> int:
    """From every situation, its snapshot leads into its history. Returns the number of situations."""
    found = search(machine, crashes, WITH_A_LOST_TAIL)
    for situation in found.values():
        state, _ = machine(situation.state, AFTER_THE_LOSS)
        assert (state.snapshot_epoch, state.needs_snapshot) == (3, False), "P2: it stays in a history that is lost"
        assert all(waiting.epoch == 3 for waiting in (*state.queue, *state.reorder_buffer))
    return len(found)


def clinging(state: AgentState, event: events.Event) -> tuple[AgentState, tuple[events.Effect, ...]]:
    """Ignore snapshots from behind the position, whatever life of the bus they come from."""
    behind = isinstance(event, events.SnapshotReceived) and state.joined and event.seq < state.seq
    return (state, ()) if behind else decide(state, event)


@pytest.mark.parametrize("crashes", [0, 1])
def test_from_everywhere_a_snapshot_leads_into_the_history_of_a_bus_that_lost_its_tail(crashes: int) -> None:
    assert follow_the_bus_that_lost_its_tail(decide, crashes) > 500
    with pytest.raises(AssertionError, match="P2: it stays in a history that is lost"):
        follow_the_bus_that_lost_its_tail(clinging, crashes)


def without_hole_check(state: AgentState, event: events.Event) -> tuple[AgentState, tuple[events.Effect, ...]]:
    """Take any newer command for the next one."""
    if isinstance(event, events.CommandReceived) and state.joined and not state.needs_snapshot:
        free = len(state.queue) < state.settings.max_buffered and event.epoch >= state.epoch
        state = replace(state, seq=event.seq - 1) if free and event.seq > state.seq + 1 else state
    return decide(state, event)


def without_fence(state: AgentState, event: events.Event) -> tuple[AgentState, tuple[events.Effect, ...]]:
    """Take messages of an older epoch for messages of the newest one."""
    if isinstance(event, events.CommandReceived | events.HeadSeen | events.SnapshotReceived):
        event = replace(event, epoch=max(event.epoch, state.epoch))
    return decide(state, event)


def with_one_epoch(state: AgentState, event: events.Event) -> tuple[AgentState, tuple[events.Effect, ...]]:
    """Fence by the origin epoch of a record, not by the epoch of its sender."""
    return decide(state, replace(event, epoch=event.origin) if isinstance(event, events.CommandReceived) else event)


@pytest.mark.parametrize(
    ("machine", "breaks"),
    [
        (without_hole_check, "P2: applied beyond a hole"),
        (without_fence, "P6: a fenced command left a mark"),
        (with_one_epoch, "P6: the newest epoch is refused"),
    ],
)
def test_the_search_sees_a_machine_that_lacks_a_mechanism(machine: AgentDecide, breaks: str) -> None:
    with pytest.raises(AssertionError, match=breaks):
        search(machine, crashes=2)
