"""One short test for each fault that the simulated cluster found in the agent's machine."""

from msgspec.structs import replace

from schemas.commands import Checkpoint, EngineCommand, WeightSync
from schemas.desired import Desired, Syncing
from schemas.events import (
    Answer,
    CheckSource,
    CommandReceived,
    EngineReturned,
    Event,
    Fault,
    HeadSeen,
    Load,
    MachineSettings,
    Pause,
    Perform,
    Returned,
    SnapshotReceived,
    Started,
    Tick,
)
from schemas.outcomes import ErrorKind, Failed
from tests.unit.machines import PRESENT, PRIMARY, START, agent, command, observed, sync
from workers.machine.decide import decide, next_deadline
from workers.machine.readiness import trouble
from workers.machine.state import AgentState


def fold(state: AgentState, *events: Event) -> AgentState:
    """Return the state after the events."""
    for event in events:
        state, _ = decide(state, event)
    return state


STARTED = Started(at_ms=0, identity=PRIMARY, incarnation="a", settings=MachineSettings(max_buffered=4))
PAUSE = EngineCommand(operation="pause")
RESUME = EngineCommand(operation="resume")


def test_a_command_queued_behind_a_call_needs_no_tick_before_the_call_is_due() -> None:
    state = fold(agent(), command(PAUSE, 1, ttl_ms=5000), command(RESUME, 2, at_ms=10, ttl_ms=100))
    assert next_deadline(state) == 5000  # a tick at 110 would change nothing, and would be due again at once


def test_a_full_queue_buffers_the_next_command_and_takes_it_when_it_moves() -> None:
    state = fold(agent(), *(command(PAUSE, seq, ttl_ms=9000) for seq in range(1, 20)))
    assert state.seq == 5  # one under way, four queued
    assert [buffered.seq for buffered in state.reorder_buffer] == [6, 7, 8, 9]
    done, _ = decide(state, EngineReturned(at_ms=5, call_id=1, result=Returned()))
    assert done.seq == 9
    assert not done.queue and not done.reorder_buffer


def test_a_full_queue_does_not_request_what_it_has_no_room_for() -> None:
    state = fold(agent(), *(command(PAUSE, seq, ttl_ms=9000) for seq in range(1, 20)))
    assert decide(state, HeadSeen(at_ms=5, epoch=1, seq=19)) == (state, ())


def prepare(seq: int, path: str) -> CommandReceived:
    """Return a prepare of version 2 from the source `path`."""
    return command(WeightSync(phase="prepare", version=2, source=Checkpoint(path)), seq)


def performed(state: AgentState, event: Event) -> tuple[AgentState, list[str]]:
    """Feed the event, and let every call succeed. Also returns the sources that were checked or loaded."""
    sources: list[str] = []
    events = [event]
    while events:
        state, effects = decide(state, events.pop(0))
        for effect in effects:
            if isinstance(effect, Perform):
                call = effect.call
                if isinstance(call, Load | CheckSource):
                    sources.append(call.source.path)
                events.append(EngineReturned(at_ms=0, call_id=effect.call_id, result=Returned()))
    return state, sources


def test_an_aborted_version_is_loaded_again_from_its_new_source() -> None:
    state, _ = performed(agent(), prepare(1, "a"))
    state, loaded = performed(state, command(WeightSync(phase="load", version=2), 2))
    state, _ = performed(state, command(WeightSync(phase="abort", version=2), 3))
    state, _ = performed(state, prepare(4, "b"))
    state, again = performed(state, command(WeightSync(phase="load", version=2), 5))
    assert (loaded, again) == (["a"], ["b"])


def test_after_a_restart_the_engine_is_observed_before_it_is_called() -> None:
    state = agent()
    state, _ = decide(state, command(START, 1))  # the start is under way when the agent dies
    state, effects = decide(decide(state, STARTED)[0], SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=state.desired))
    assert effects == ()
    state, effects = decide(state, observed(replace(PRESENT, profiling=True)))
    assert not any(isinstance(effect, Perform) for effect in effects)  # the session it finds is the one desired


def test_an_expired_command_is_reconciled_at_once_and_not_at_the_next_event() -> None:
    _, effects = decide(agent(), command(PAUSE, 1, ttl_ms=0))
    assert [type(effect) for effect in effects] == [Answer, Perform]


def test_torn_weights_stay_torn_when_a_later_call_fails_and_leaves_their_digest_unchanged() -> None:
    state, _ = performed(agent(), prepare(1, "a"))
    state, _ = decide(state, command(WeightSync(phase="load", version=2), 2))
    torn = replace(PRESENT, generating=False, digest="half of a")
    refused = Fault("engine_error", "It broke off.")
    state, _ = decide(state, EngineReturned(at_ms=0, call_id=state.calls_made, result=refused, observation=torn))
    state, _ = decide(state, command(EngineCommand(operation="abort"), 3))
    state, _ = decide(state, EngineReturned(at_ms=0, call_id=state.calls_made, result=refused, observation=torn))
    assert state.engine.torn


def test_a_replica_whose_weights_are_asleep_fails_a_load() -> None:
    asleep = Desired(asleep=frozenset({"weights"}), sync=Syncing(2, Checkpoint("a"), None, "abort", "prepare"))
    joined = SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=asleep)
    seen = replace(PRESENT, generating=False, asleep=frozenset({"weights"}))
    state, _ = performed(fold(AgentState(), STARTED, observed(seen)), joined)
    _, effects = decide(state, command(WeightSync(phase="load", version=2), 1))
    assert isinstance(effects[0], Answer)
    assert isinstance(effects[0].outcome, Failed) and effects[0].outcome.error is ErrorKind.WEIGHTS_ASLEEP


def test_an_engine_that_is_relaunched_during_a_call_fails_the_command() -> None:
    state, effects = decide(agent(), prepare(1, "a"))
    again = replace(PRESENT, instance="launch 2")
    _, effects = decide(state, EngineReturned(at_ms=0, call_id=1, result=Returned(), observation=again))
    assert isinstance(effects[0], Answer) and isinstance(effects[0].outcome, Failed)


def test_a_relaunched_engine_is_reconciled_even_if_reconciling_had_failed() -> None:
    paused = SnapshotReceived(at_ms=0, epoch=1, seq=1, desired=Desired(generation="paused"))
    state, _ = decide(agent(), paused)
    failed = EngineReturned(at_ms=0, call_id=1, result=Fault("engine_error", "No."), observation=PRESENT)
    state, effects = decide(state, failed)
    assert effects == () and state.reconcile_blocked
    _, effects = decide(state, observed(replace(PRESENT, instance="launch 2")))
    assert effects == (Perform(call_id=2, call=Pause("abort")),)


# --- an engine that does not pause ------------------------------------------------------------------------------------


def unpausable(times: int) -> tuple[AgentState, list[int]]:
    """A replica that the commit of version 1 left out, and whose engine did not pause; and when it was asked to."""
    state = fold(agent(), command(sync("commit", quarantine=frozenset({0})), 1))
    asked: list[int] = []
    at_ms = 0
    while state.activity is not None and len(asked) < times:
        asked.append(at_ms)
        failed = Fault("engine_error", "No.")
        state, _ = decide(
            state, EngineReturned(at_ms=at_ms, call_id=state.calls_made, result=failed, observation=PRESENT)
        )
        if state.activity is None:
            at_ms = next_deadline(state) or 0
            state, _ = decide(state, Tick(at_ms=at_ms - 1))
            assert state.activity is None
            state, _ = decide(state, Tick(at_ms=at_ms))
    return state, asked


def test_an_engine_that_does_not_pause_is_asked_again_until_it_does() -> None:
    state, asked = unpausable(6)
    assert asked == [0, 0, 1_000, 3_000, 7_000, 15_000], "by the command, at once by itself, and then now and then"
    paused = replace(PRESENT, generating=False)
    state, effects = decide(
        state, EngineReturned(at_ms=30_000, call_id=state.calls_made, result=Returned(), observation=paused)
    )
    assert effects == () and not state.engine.generating and next_deadline(state) is None
    assert trouble(state) == "left out of version 1; waits for the next committed sync, or a restart"
