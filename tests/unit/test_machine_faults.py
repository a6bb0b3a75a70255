"""One test for each fault that the simulated cluster found in the agent's machine, as short as it can be told."""

import msgspec

from schemas.commands import Checkpoint, Command, EngineCommand, ProfileCommand, Target, WeightSync
from schemas.desired import Committed, Desired, Syncing
from schemas.events import (
    Answer,
    CheckSource,
    CommandReceived,
    EngineObserved,
    EngineReturned,
    Event,
    Fault,
    HeadSeen,
    Load,
    Observation,
    Pause,
    Perform,
    Returned,
    Settings,
    SnapshotReceived,
    Started,
)
from schemas.identity import Identity, Operation
from schemas.outcomes import ErrorKind, Failed
from workers.machine.decide import AgentState, decide, in_sync, next_deadline

PRESENT = Observation(
    engine="e",
    instance="launch 1",
    tokenizer="present",
    operations=frozenset(Operation),
    generating=True,
    asleep=frozenset(),
    profiling=False,
    version=0,
)
STARTED = Started(
    at_ms=0, identity=Identity(replica=0, node_rank=0), incarnation="a", settings=Settings(max_buffered=4)
)
JOINED = SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired())


def fold(*events: Event) -> AgentState:
    """The state after the events."""
    state = AgentState()
    for event in events:
        state, _ = decide(state, event)
    return state


def command(seq: int, body: Command, at_ms: int = 0, ttl_ms: int = 1000, epoch: int = 1) -> CommandReceived:
    """A command to everyone, published and received in the same epoch."""
    return CommandReceived(
        at_ms=at_ms, epoch=epoch, origin=epoch, seq=seq, ttl_ms=ttl_ms, command=body, target=Target()
    )


def observed(seen: Observation = PRESENT) -> EngineObserved:
    """The engine was read."""
    return EngineObserved(at_ms=0, observation=seen)


PAUSE = EngineCommand(operation="pause")
RESUME = EngineCommand(operation="resume")
START = ProfileCommand(action="start", step=3)


def test_a_command_queued_behind_a_call_wants_no_tick_before_the_call_is_due() -> None:
    state = fold(STARTED, observed(), JOINED, command(1, PAUSE, ttl_ms=5000), command(2, RESUME, at_ms=10, ttl_ms=100))
    assert next_deadline(state) == 5000  # a tick at 110 would change nothing, and would be due again at once


def test_a_full_queue_holds_the_next_command_and_takes_it_when_it_moves() -> None:
    state = fold(STARTED, observed(), JOINED, *(command(seq, PAUSE, ttl_ms=9000) for seq in range(1, 20)))
    assert state.seq == 5  # one under way, four queued
    assert [one.seq for one in state.reorder_buffer] == [6, 7, 8, 9]
    done, _ = decide(state, EngineReturned(at_ms=5, call_id=1, result=Returned()))
    assert done.seq == 9
    assert not done.queue and not done.reorder_buffer


def test_a_full_queue_does_not_ask_for_what_it_has_no_room_for() -> None:
    state = fold(STARTED, observed(), JOINED, *(command(seq, PAUSE, ttl_ms=9000) for seq in range(1, 20)))
    assert decide(state, HeadSeen(at_ms=5, epoch=1, seq=19)) == (state, ())


def prepare(seq: int, path: str) -> CommandReceived:
    """Version 2, from another place each time."""
    return command(seq, WeightSync(phase="prepare", version=2, source=Checkpoint(path)))


def performed(state: AgentState, event: Event) -> tuple[AgentState, list[str]]:
    """Feed the event, and every call's good end. Returns the names of the calls, with the source of a load."""
    names: list[str] = []
    events = [event]
    while events:
        state, effects = decide(state, events.pop(0))
        for effect in effects:
            if isinstance(effect, Perform):
                call = effect.call
                names.append(call.source.path if isinstance(call, Load | CheckSource) else "")
                events.append(EngineReturned(at_ms=0, call_id=effect.call_id, result=Returned()))
    return state, [name for name in names if name]


def test_an_aborted_version_that_is_tried_again_is_checked_again_in_its_new_place() -> None:
    state, checked = performed(fold(STARTED, observed(), JOINED), prepare(1, "a"))
    state, _ = performed(state, command(2, WeightSync(phase="abort", version=2)))
    state, again = performed(state, prepare(3, "b"))
    assert (checked, again) == (["a"], ["b"])


def test_an_aborted_version_that_is_tried_again_is_loaded_again_though_its_number_is_the_same() -> None:
    state, _ = performed(fold(STARTED, observed(), JOINED), prepare(1, "a"))
    state, loaded = performed(state, command(2, WeightSync(phase="load", version=2)))
    state, _ = performed(state, command(3, WeightSync(phase="abort", version=2)))
    state, _ = performed(state, prepare(4, "b"))
    state, again = performed(state, command(5, WeightSync(phase="load", version=2)))
    assert (loaded, again) == (["a"], ["b"])


def test_after_a_restart_the_engine_is_read_before_anything_is_asked_of_it() -> None:
    state = fold(STARTED, observed(), JOINED)
    state, _ = decide(state, command(1, START))  # the start is under way when the agent dies
    state, effects = decide(decide(state, STARTED)[0], SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=state.desired))
    assert effects == ()
    state, effects = decide(state, observed(msgspec.structs.replace(PRESENT, profiling=True)))
    assert not any(isinstance(effect, Perform) for effect in effects)  # the session it finds is the one desired


def test_a_command_that_came_too_late_is_settled_at_once_and_not_at_the_next_event() -> None:
    _, effects = decide(fold(STARTED, observed(), JOINED), command(1, PAUSE, ttl_ms=0))
    assert [type(effect) for effect in effects] == [Answer, Perform]


def test_a_replica_that_cannot_load_is_paused_by_the_load_that_leaves_it_out() -> None:
    unable = msgspec.structs.replace(PRESENT, operations=frozenset(Operation) - {Operation.LOAD})
    load = WeightSync(phase="load", version=2, quarantine=frozenset({0}))
    _, effects = decide(fold(STARTED, observed(unable), JOINED), command(1, load))
    assert Perform(call_id=1, call=Pause("abort")) in effects


def test_an_engine_is_never_asked_for_an_operation_that_it_lacks() -> None:
    unable = msgspec.structs.replace(PRESENT, operations=frozenset(Operation) - {Operation.SLEEP, Operation.PROFILE})
    state = fold(STARTED, observed(unable), JOINED)
    bodies: tuple[ProfileCommand | EngineCommand, ...] = (START, EngineCommand(operation="sleep"))
    for seq, body in enumerate(bodies, start=1):
        state, effects = decide(state, command(seq, body))
        assert [type(effect) for effect in effects] == [Answer]
    assert in_sync(state)


def test_torn_weights_stay_torn_when_a_later_call_fails_and_their_digest_is_what_it_was() -> None:
    state, _ = performed(fold(STARTED, observed(), JOINED), prepare(1, "a"))
    state, _ = decide(state, command(2, WeightSync(phase="load", version=2)))
    torn = msgspec.structs.replace(PRESENT, generating=False, digest="half of a")
    refused = Fault("engine_error", "It broke off.")
    state, _ = decide(state, EngineReturned(at_ms=0, call_id=state.calls_made, result=refused, observation=torn))
    state, _ = decide(state, command(3, EngineCommand(operation="abort")))
    state, _ = decide(state, EngineReturned(at_ms=0, call_id=state.calls_made, result=refused, observation=torn))
    assert state.engine.torn


def test_the_abort_of_a_later_sync_does_not_lift_an_earlier_quarantine() -> None:
    out = Desired(committed=Committed(1, Checkpoint("v1"), None), quarantined=1)
    state = fold(STARTED, observed(), SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=out))
    state, _ = performed(state, prepare(1, "a"))
    state, _ = decide(state, command(2, WeightSync(phase="load", version=2)))
    failed = Fault("source_refused", "It is not there.")
    state, _ = decide(state, EngineReturned(at_ms=0, call_id=state.calls_made, result=failed))
    state, _ = performed(state, command(3, WeightSync(phase="abort", version=2)))
    assert state.desired.quarantined == 1


def test_a_replica_whose_weights_sleep_does_not_say_that_it_followed_a_load_or_a_commit() -> None:
    asleep = Desired(asleep=frozenset({"weights"}), sync=Syncing(2, Checkpoint("a"), None, "abort", "prepare"))
    joined = SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=asleep)
    seen = msgspec.structs.replace(PRESENT, generating=False, asleep=frozenset({"weights"}))
    state, _ = performed(fold(STARTED, observed(seen)), joined)
    _, effects = decide(state, command(1, WeightSync(phase="load", version=2)))
    assert isinstance(effects[0], Answer)
    assert isinstance(effects[0].outcome, Failed) and effects[0].outcome.error is ErrorKind.WEIGHTS_ASLEEP


def test_an_engine_that_is_launched_anew_between_two_calls_is_not_treated_as_the_old_one() -> None:
    state, effects = decide(fold(STARTED, observed(), JOINED), prepare(1, "a"))
    again = msgspec.structs.replace(PRESENT, instance="launch 2")
    _, effects = decide(state, EngineReturned(at_ms=0, call_id=1, result=Returned(), observation=again))
    assert isinstance(effects[0], Answer) and isinstance(effects[0].outcome, Failed)


def test_an_engine_that_is_launched_anew_is_settled_though_settling_had_failed_before() -> None:
    state, _ = decide(fold(STARTED, observed(), JOINED), command(1, PAUSE))
    failed = EngineReturned(at_ms=0, call_id=1, result=Fault("engine_error", "No."), observation=PRESENT)
    state, _ = decide(state, failed)
    _, effects = decide(state, observed(msgspec.structs.replace(PRESENT, instance="launch 2")))
    assert effects == (Perform(call_id=2, call=Pause("abort")),)
