"""Digests of what engines hold after a load: which replicas differ from the others, and what becomes of them."""

import pytest
from msgspec.structs import replace

from controlplane.machine.coordinator_state import Sync
from schemas.agent_status import AgentStatus
from schemas.commands import Checkpoint, Drain, Target, WeightSync
from schemas.desired import Committed, Desired
from schemas.events import EngineObserved, MachineSettings, SnapshotReceived, Started
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from tests.unit.fleets import DONE, NO, Coordinator
from tests.unit.machines import PRIMARY, agent, carry_out, command, fold, sync
from tests.unit.test_weights import phase
from workers.machine.state import EngineState, call_name
from workers.machine.weights import distrusted, holds_weights

A, B, C = "vllm:one:aa", "vllm:one:bb", "vllm:one:cc"
SGLANG, OTHER_LAYOUT = "sglang:one:bb", "vllm:two:bb"


def loaded(digest: str | None, version: int = 1) -> Acted:
    return Acted(calls=("load",), version=version, digest=digest)


def after_load(*outcomes: Outcome, quorum: int | None = None, sends: bool = False) -> Coordinator:
    """A fleet of which each replica has answered the load of version 1."""
    bus = Coordinator(*(f"{replica}.0" for replica in range(len(outcomes))))
    bus.sync(1, quorum=quorum, sends=sends)
    bus.answer(None, **{f"a{replica}_0": DONE for replica in range(len(outcomes))})  # type: ignore[arg-type]
    bus.answer(None, **{f"a{replica}_0": outcome for replica, outcome in enumerate(outcomes)})  # type: ignore[arg-type]
    return bus


NONE = frozenset[int]()


@pytest.mark.parametrize(
    ("digests", "quarantine"),
    [
        ((A, A, A), NONE),
        ((A, B, A), {1}),
        ((A, A, B, A, C), {2, 4}),
        ((A, B), None),
        ((A, A, B, B), None),
        ((A, B, C), None),
        ((A, SGLANG, OTHER_LAYOUT), NONE),
        ((A, SGLANG, A, B), {3}),
        ((A, None, A), NONE),
        ((None, None, None), NONE),
        (("aa", "bb", "aa"), {1}),
    ],
    ids=str,
)
def test_a_replica_with_other_bytes_than_most_of_its_layout_is_left_out(
    digests: tuple[str | None, ...], quarantine: frozenset[int] | None
) -> None:
    bus = after_load(*map(loaded, digests))
    seen = phase(bus)
    if quarantine is None:
        assert seen.phase == "abort", "nothing shows which bytes are right"
    else:
        assert (seen.phase, seen.quarantine) == ("commit", quarantine)


@pytest.mark.parametrize("paused", [Skipped(Reason.QUARANTINED), DONE], ids=["before", "by the commit"])
def test_the_report_names_it_and_says_what_was_found(paused: Outcome) -> None:
    bus = after_load(loaded(A), loaded(B), loaded(A))
    bus.answer(a0_0=DONE, a1_0=paused, a2_0=DONE)
    (report,) = bus.synced
    assert (report.status, report.loaded, report.quarantined) == ("committed", (0, 2), (1,))
    (failed,) = (line.conclusion for line in report.phases[1].outcomes if isinstance(line.conclusion, Failed))
    assert failed.error is ErrorKind.DIGEST_MISMATCH
    assert "version 1, but holds weights with digest bb, as 1 in all do, which are not most of" in failed.message


def test_without_a_majority_no_quorum_is_met_however_small_it_is() -> None:
    bus = after_load(loaded(A), loaded(B), quorum=1)
    assert phase(bus).phase == "abort"
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert bus.synced[0].reason == "0 of 2 replicas loaded, and 1 must: not replicas 0, 1"


def test_a_layout_without_a_majority_leaves_the_others_alone() -> None:
    bus = after_load(*map(loaded, (A, B, SGLANG, SGLANG, SGLANG)))
    assert phase(bus).phase == "commit" and phase(bus).quarantine == {0, 1}


def test_only_what_was_loaded_is_compared() -> None:
    """One that dropped out in prepare acts on a load too: it pauses, and holds an older version."""
    bus = after_load(loaded(A), loaded(B, version=0), loaded(A))
    assert phase(bus).quarantine == NONE
    bus = after_load(loaded(A), NO, loaded(A))
    assert phase(bus).quarantine == {1}


def test_a_restart_of_its_agent_does_not_bring_it_back_before_the_commit() -> None:
    bus = after_load(loaded(A), loaded(B), loaded(A), sends=True)
    bus.lose("1.0")
    bus.arrive("1.0", "b")
    sync: Sync | None = bus.state.sync
    assert sync is not None and sync.restarted == sync.differing == {1}
    bus.send_returned(bus.tickets)
    assert phase(bus).phase == "commit" and phase(bus).quarantine == {1}
    assert bus.state.desired[1].quarantined == 1


@pytest.mark.parametrize(
    ("digest", "quarantine"), [(A, NONE), (B, {2, 3}), (None, NONE), (OTHER_LAYOUT, NONE)], ids=str
)
def test_a_committed_version_stands_for_the_bytes_that_replicas_serve_for_those_that_get_it_later(
    digest: str | None, quarantine: frozenset[int]
) -> None:
    """However many they are."""
    bus = after_load(loaded(A), loaded(None), NO, NO, quorum=2)
    bus.answer(a0_0=DONE, a1_0=DONE, a2_0=Skipped(Reason.QUARANTINED), a3_0=Skipped(Reason.QUARANTINED))
    bus.status("0.0", AgentStatus(ready=True, tokenizer="present", generating=True, version=1, digest=A))
    bus.sync(1, quorum=2)
    stale = Skipped(Reason.STALE_VERSION)
    bus.answer(a0_0=stale, a1_0=stale, a2_0=DONE, a3_0=DONE)
    bus.answer(a0_0=stale, a1_0=stale, a2_0=loaded(digest), a3_0=loaded(digest))
    assert (phase(bus).phase, phase(bus).quarantine) == ("commit", quarantine)


def test_a_replica_that_drains_before_the_commit_is_not_named_in_it() -> None:
    bus = after_load(loaded(A), loaded(B), loaded(A), sends=True)
    bus.issue(Drain(grace_ms=0), target=Target(replicas=frozenset({1})), timeout_ms=15_000)
    bus.send_returned(bus.tickets - 1)
    assert phase(bus).phase == "commit" and phase(bus).quarantine == NONE


# --- on the replica ---------------------------------------------------------------------------------------------------


def committed(commit: WeightSync) -> Committed:
    assert commit.source is not None
    return Committed(commit.version, commit.source, commit.manifest)


V1 = Committed(1, Checkpoint("v1"), None)
HOLDS = EngineState(version=1, label="1", version_label="1", loaded=V1)


@pytest.mark.parametrize(
    ("desired", "trusted"),
    [
        (Desired(committed=V1, quarantined=1), False),
        (Desired(committed=V1), True),
        (Desired(committed=V1, quarantined=2), True),
        (Desired(committed=replace(V1, version=2), quarantined=2), True),
        (Desired(quarantined=1), True),
        (Desired(), True),
    ],
    ids=["left out by its commit", "included", "by a later sync", "it holds older ones", "not committed", "nothing"],
)
def test_weights_that_were_committed_without_this_replica_are_not_trusted(desired: Desired, trusted: bool) -> None:
    after = distrusted(HOLDS, desired)
    assert holds_weights(after, V1) is trusted and after.torn is not trusted
    assert distrusted(after, desired) is after


def test_it_loads_the_weights_again_before_it_serves_once_its_agent_was_restarted() -> None:
    state, effects = fold(agent(), command(sync("prepare")))
    state, _, seen = carry_out(state, effects)
    state, effects = fold(state, command(sync("load"), 2))
    state, calls, seen = carry_out(state, effects, seen)
    assert [call_name(call) for call in calls] == ["load"]
    state, effects = fold(state, command(sync("commit", quarantine=frozenset({0})), 3))
    state, calls, seen = carry_out(state, effects, seen)
    assert calls == [] and state.engine.torn
    started = Started(at_ms=1, identity=PRIMARY, incarnation="b", settings=MachineSettings(max_buffered=4))
    back = SnapshotReceived(at_ms=1, epoch=1, seq=3, desired=Desired(committed=committed(sync("commit"))))
    state, effects = fold(state, started, EngineObserved(at_ms=1, observation=seen), back)
    state, calls, seen = carry_out(state, effects, seen)
    assert [call_name(call) for call in calls] == ["check_source", "load", "flush", "resume"]
