"""An agent that has lost its journal, and what it can't know of the engine that it finds: whether it is paused, what is
in its cache.
"""

import pytest
from msgspec.structs import replace

from schemas.commands import Checkpoint, Pushed
from schemas.desired import Committed, Desired
from schemas.events import EngineObserved, MachineSettings, Observation, Perform, Remedies, SnapshotReceived, Started
from schemas.identity import OBSERVED, Identity, Memory, Operation
from tests.unit.machines import PRESENT, PRIMARY, carry_out, fold
from workers.machine.readiness import in_sync, is_ready
from workers.machine.state import AgentState, call_name

BOTH_TWICE = Remedies(idempotent=frozenset({Operation.PAUSE, Operation.RESUME}))
SILENT = replace(PRESENT, generating=None, asleep=None, profiling=None, version=None, label="", remedies=BOTH_TWICE)
"""What verl's servers say: neither whether they are paused, nor which version they hold."""
PUSHED = Committed(4, Pushed("4"), None)


def finds(
    seen: Observation, desired: Desired, memory: Memory = "agent", place: Identity = PRIMARY
) -> tuple[AgentState, list[str]]:
    """Return an agent without a journal that has found this engine and joined, and its calls."""
    state, effects = fold(
        AgentState(),
        Started(at_ms=0, identity=place, incarnation="b", settings=MachineSettings(memory=memory)),
        EngineObserved(at_ms=0, observation=seen),
    )
    assert effects == []
    state, effects = fold(state, SnapshotReceived(at_ms=0, epoch=1, seq=3, desired=desired))
    first = [call_name(effect.call) for effect in effects if isinstance(effect, Perform)]
    state, calls, _ = carry_out(state, effects, seen)
    names = [call_name(call) for call in calls]
    assert names[: len(first)] == first
    return state, names


V3 = Desired(committed=Committed(3, Checkpoint("v3"), None))
PUSHED_4 = Desired(committed=PUSHED)
GIVEN = [(replace(PRESENT, version=3), V3), (replace(PRESENT, version=None, label="4"), PUSHED_4)]


@pytest.mark.parametrize(("found", "desired"), GIVEN, ids=["its version", "its label"])
def test_an_engine_that_is_found_paused_with_weights_is_flushed_before_it_generates(
    found: Observation, desired: Desired
) -> None:
    """Perhaps it was given them since it last generated."""
    state, calls = finds(replace(found, generating=False, recomputes=True), desired)
    assert calls == ["flush", "resume"] and is_ready(state)


def test_an_engine_that_is_found_paused_and_computes_no_requests_anew_is_flushed_after_them() -> None:
    """A pause that is not known here may have frozen requests, which keep their cache."""
    state, calls = finds(replace(PRESENT, generating=False, version=3), V3)
    assert calls == ["resume", "flush"] and is_ready(state)


def test_an_engine_that_was_launched_paused_is_resumed() -> None:
    assert finds(replace(PRESENT, generating=False, label=""), Desired())[1] == ["resume"]


@pytest.mark.parametrize("memory", ["agent", "trainer"])
@pytest.mark.parametrize(("found", "desired"), [(PRESENT, Desired()), *GIVEN], ids=["launch", "version", "label"])
def test_an_engine_that_is_found_generating_is_left_alone(found: Observation, desired: Desired, memory: Memory) -> None:
    assert finds(found, desired, memory)[1] == []


def test_memory_that_the_trainer_has_released_holds_no_cache() -> None:
    released = replace(PRESENT, version=3, generating=False, asleep=frozenset({"weights", "kv_cache"}))
    state, calls = finds(released, V3, "trainer")
    assert calls == [] and not state.engine.stale_cache


@pytest.mark.parametrize(("generation", "calls"), [("running", ["resume"]), ("paused", ["pause"])])
def test_an_engine_that_does_not_say_whether_it_is_paused_is_told_what_is_desired(
    generation: str, calls: list[str]
) -> None:
    desired = replace(Desired(), generation=generation)
    state, made = finds(SILENT, desired)
    assert made == calls and in_sync(state)


def test_one_that_holds_pushed_weights_and_may_be_paused_gets_a_new_cache_first() -> None:
    state, calls = finds(replace(SILENT, label="4"), PUSHED_4)
    assert calls == ["pause", "flush", "resume"] and is_ready(state)


def test_nothing_is_told_to_an_engine_that_does_not_declare_that_it_may_be_told_twice() -> None:
    assert finds(replace(SILENT, remedies=None), Desired())[1] == []


def test_nor_to_one_whose_memory_the_trainer_may_have_released() -> None:
    """Of that it says nothing, and a resume could kill it."""
    assert finds(SILENT, Desired(), "trainer")[1] == []


def test_an_agent_that_only_observes_takes_such_an_engine_for_one_that_generates() -> None:
    state, calls = finds(SILENT, Desired(), place=replace(PRIMARY, mode=OBSERVED))
    assert calls == [] and is_ready(state)


def test_a_new_launch_generates() -> None:
    state, _ = finds(SILENT, Desired())
    state, effects = fold(state, EngineObserved(at_ms=1, observation=replace(SILENT, instance="two")))
    assert effects == [] and in_sync(state)
