"""The desired state of a replica: a fold of the run's commands, the same on both sides of the wire."""

import pytest
from msgspec.structs import replace

from schemas.commands import Checkpoint, Command, EngineCommand, EpochStart, ProfileCommand, ProfilePlan, UnknownCommand
from schemas.desired import ALL_TAGS, Committed, Desired, ProfileSession, Syncing, desired_after, orphaned
from schemas.identity import Identity
from tests.unit.machines import PRIMARY, SECOND, START, STOP, manifest, sync

PAUSE, RESUME, SLEEP, WAKE, FLUSH, ABORT = (
    EngineCommand(operation=name) for name in ("pause", "resume", "sleep", "wake", "flush", "abort")
)
BEGIN = EpochStart(previous_epoch=1, logic=1)
V1, V2 = (Committed(version, Checkpoint(f"v{version}"), manifest(version)) for version in (1, 2))
PREPARED = Syncing(2, Checkpoint("v2"), manifest(2), "abort", "prepare")
LOADING = replace(PREPARED, phase="load")
OUT = frozenset({0})


def after(*commands: Command | UnknownCommand, start: Desired | None = None, identity: Identity = PRIMARY) -> Desired:
    """Return the desired state after these commands, all of which target the replica."""
    desired = start or Desired()
    for command in commands:
        desired = desired_after(desired, command, True, identity)
    return desired


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ((PAUSE,), Desired(generation="paused")),
        ((EngineCommand(operation="pause", mode="keep"),), Desired(generation="paused", pause_mode="keep")),
        ((PAUSE, RESUME), Desired()),
        ((SLEEP,), Desired(asleep=ALL_TAGS)),
        ((EngineCommand(operation="sleep", tags=frozenset({"weights"})),), Desired(asleep=frozenset({"weights"}))),
        (
            (SLEEP, EngineCommand(operation="wake", tags=frozenset({"kv_cache"}))),
            Desired(asleep=frozenset({"weights"})),
        ),
        ((SLEEP, WAKE), Desired()),
        ((PAUSE, SLEEP, WAKE), Desired(generation="paused")),
        ((FLUSH, ABORT), Desired()),
        ((UnknownCommand("teleport"),), Desired()),
    ],
)
def test_engine_commands_add_up(commands: tuple[Command, ...], expected: Desired) -> None:
    assert after(*commands) == expected


@pytest.mark.parametrize("body", [PAUSE, RESUME, SLEEP, WAKE])
def test_engine_commands_during_a_sync_change_nothing(body: EngineCommand) -> None:
    start = Desired(committed=V1, sync=PREPARED)
    assert after(body, start=start) is start


@pytest.mark.parametrize("body", [PAUSE, START, STOP, sync("prepare"), sync("load"), sync("commit"), sync("abort")])
def test_a_command_for_others_changes_nothing(body: Command) -> None:
    start = Desired(profile=ProfileSession(3, ProfilePlan()))
    assert desired_after(start, body, False, PRIMARY) is start


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_session_is_desired_from_its_start_to_its_stop() -> None:
    assert after(START) == Desired(profile=ProfileSession(3, ProfilePlan()))
    assert after(START, STOP) == Desired()


def test_a_second_start_of_the_same_step_may_correct_a_refused_plan() -> None:
    again = ProfileCommand(action="start", step=3, plan=ProfilePlan(with_stack=True))
    assert after(START, again) == after(again) != after(START)


def test_a_session_that_does_not_select_the_replica_is_not_desired() -> None:
    assert after(ProfileCommand(action="start", step=3, plan=ProfilePlan(steps=frozenset({4})))) == Desired()


# --- weights ----------------------------------------------------------------------------------------------------------


def test_a_sync_is_desired_phase_by_phase() -> None:
    start = Desired(committed=V1)
    assert after(sync("prepare", 2), start=start) == replace(start, sync=PREPARED)
    assert after(sync("prepare", 2), sync("load", 2), start=start) == replace(start, sync=LOADING)
    assert after(sync("prepare", 2), sync("load", 2), sync("commit", 2), start=start) == Desired(committed=V2)


@pytest.mark.parametrize("phases", [("prepare", "abort"), ("prepare", "load", "abort")])
def test_an_abort_leaves_the_committed_weights(phases: tuple[str, ...]) -> None:
    start = Desired(committed=V1)
    assert after(*(sync(phase, 2) for phase in phases), start=start) == start


def test_a_load_without_a_prepare_changes_nothing() -> None:
    assert after(sync("load", 2)) == Desired()
    assert after(sync("prepare", 2), sync("load", 3)) == Desired(sync=PREPARED)


@pytest.mark.parametrize("phase", ["prepare", "load", "commit", "abort"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_version_that_is_not_newer_changes_nothing(phase: str, version: int) -> None:
    start = Desired(committed=V2)
    assert after(sync(phase, version), start=start) is start


def test_a_replica_left_out_of_a_load_or_commit_is_quarantined() -> None:
    dropped = after(sync("prepare", 2), sync("load", 2, OUT), start=Desired(committed=V1))
    assert dropped == Desired(committed=V1, quarantined=2)
    assert after(sync("commit", 2, OUT), start=dropped) == Desired(committed=V2, quarantined=2)


def test_an_abort_lifts_the_quarantine_of_its_own_sync_only() -> None:
    assert after(sync("abort", 2), start=Desired(committed=V1, quarantined=2)) == Desired(committed=V1)
    older = Desired(committed=V1, quarantined=1)
    assert after(sync("abort", 2), start=older) == older


def test_a_quarantine_outlives_later_loads_and_ends_with_a_commit_that_includes_the_replica() -> None:
    older = Desired(committed=V1, quarantined=1)
    assert after(sync("prepare", 2), sync("load", 2, OUT), start=older) == older
    assert after(sync("prepare", 2), sync("load", 2), sync("commit", 2), start=older) == Desired(committed=V2)


# --- without a trainer ------------------------------------------------------------------------------------------------

HALF_DONE = Desired(
    generation="paused",
    asleep=frozenset({"weights"}),
    profile=ProfileSession(3, ProfilePlan()),
    committed=V1,
    sync=PREPARED,
    quarantined=1,
)


def test_without_a_trainer_the_replica_resumes_and_keeps_weights_memory_and_quarantine() -> None:
    assert orphaned(HALF_DONE) == Desired(asleep=frozenset({"weights"}), committed=V1, quarantined=1)


@pytest.mark.parametrize("targeted", [True, False])
def test_an_epoch_start_ends_what_is_half_done_for_every_replica(targeted: bool) -> None:
    assert desired_after(HALF_DONE, BEGIN, targeted, PRIMARY) == orphaned(HALF_DONE)


def test_with_nothing_to_end_the_desired_state_is_the_same_object() -> None:
    start = Desired(committed=V1, asleep=ALL_TAGS)
    assert orphaned(start) is start


# --- both sides -------------------------------------------------------------------------------------------------------


def test_all_nodes_of_a_replica_fold_the_same_state() -> None:
    history = (BEGIN, PAUSE, START, sync("prepare"), sync("load"), sync("commit"), RESUME, STOP)
    assert after(*history) == after(*history, identity=SECOND)
