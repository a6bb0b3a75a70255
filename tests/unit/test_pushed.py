"""Weights that the trainer's own data plane carries: an engine's own label is the only proof that it has them."""

from typing import Literal

import pytest
from msgspec.structs import replace

from schemas.commands import Broadcast, Checkpoint, Drain, EngineCommand, EpochStart, Pushed, Target, WeightSync
from schemas.desired import Committed, Desired, Syncing
from schemas.events import (
    AwaitPush,
    CheckSource,
    Effect,
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    Load,
    MachineSettings,
    Observation,
    Pause,
    Perform,
    Restart,
    Resume,
    Returned,
    SnapshotReceived,
    Started,
    Stopping,
    Tick,
)
from schemas.identity import Memory, Operation, RolloutMode, Tag
from schemas.outcomes import Acted, ErrorKind, Failed, Outcome, Reason, Skipped
from tests.unit.machines import PRESENT, PRIMARY, agent, answers, called, command, fold, manifest
from workers.link.heartbeat import status_of
from workers.machine.decide import decide, next_deadline
from workers.machine.readiness import in_sync, is_ready, trouble
from workers.machine.state import AgentState, EngineState, call_name, is_written_first
from workers.machine.weights import adopt_pushed

LABELLED = replace(PRESENT, engine="sglang 0.5.23", label="default")
NEW = Pushed("step 7")
OLD = Pushed("step 6")
OLD_COMMITTED = Desired(committed=Committed(6, OLD, None))


def phase(name: str, version: int = 7, source: Pushed | Broadcast | Checkpoint = NEW) -> WeightSync:
    """Return one phase of a sync of pushed weights."""
    if name in ("prepare", "commit"):
        return WeightSync(phase="prepare" if name == "prepare" else "commit", version=version, source=source)
    return WeightSync(phase="load" if name == "load" else "abort", version=version)


def outcomes(effects: list[Effect]) -> list[Outcome]:
    return [answer.outcome for answer in answers(effects)]


class Run:
    """One machine and the engine that it observes. Calls succeed, except the wait for a label, which `push` ends."""

    def __init__(self, seen: Observation = LABELLED, desired: Desired | None = None, memory: Memory = "agent") -> None:
        self.seen = seen
        self.loads: str | None = None  # the digest of what it loads
        self.state = AgentState()
        self.calls: list[str] = []
        self.outcomes: list[Outcome] = []
        self.effects: list[Effect] = []
        self.seq = 0
        self.feed(
            Started(at_ms=0, identity=PRIMARY, incarnation="a", settings=MachineSettings(memory=memory)),
            EngineObserved(at_ms=0, observation=seen),
            SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=desired or Desired()),
        )

    def issue(self, body: WeightSync | EngineCommand | EpochStart | Drain, ttl_ms: int = 1000) -> "Run":
        self.seq += 1
        return self.feed(command(body, self.seq, ttl_ms=ttl_ms))

    def push(self, label: str, noticed: bool = True) -> "Run":
        """Let the trainer replace the weights; unless it is `noticed`, the agent has not observed the engine since."""
        self.seen = replace(self.seen, label=label, version=None)
        call = self.state.activity.calls[0] if self.state.activity is not None else None
        if isinstance(call, AwaitPush) and call.source.label == label:
            return self._return()
        return self.feed(EngineObserved(at_ms=1, observation=self.seen)) if noticed else self

    def heard(self) -> "Run":
        """A head of the bus: only then is what others changed undone."""
        return self.feed(HeadSeen(at_ms=1, epoch=1, seq=self.seq))

    def _return(self) -> "Run":
        assert self.state.activity is not None
        returned = EngineReturned(
            at_ms=1, call_id=self.state.activity.call_id, result=Returned(), observation=self.seen
        )
        return self.feed(returned)

    def feed(self, *events: Event) -> "Run":
        for event in events:
            self.state, effects = fold(self.state, event)
            self.effects += effects
            self.outcomes += outcomes(effects)
            for effect in effects:
                if isinstance(effect, Perform):
                    self._call(effect)
        return self

    def _call(self, perform: Perform) -> None:
        self.calls.append(call_name(perform.call))
        match perform.call:
            case AwaitPush():
                return
            case Pause() | Resume():
                self.seen = replace(self.seen, generating=isinstance(perform.call, Resume))
            case Load():
                label = perform.call.label or str(perform.call.version)
                version = int(label) if label.isdigit() else None
                self.seen = replace(self.seen, label=label, version=version, digest=self.loads)
            case _:
                pass
        if self.state.activity is not None and self.state.activity.call_id == perform.call_id:
            self._return()

    @property
    def last(self) -> Outcome:
        return self.outcomes[-1]


def on_old(desired: Desired = OLD_COMMITTED, digest: str | None = None) -> Run:
    """Return a replica that serves the pushed version 6."""
    run = Run(replace(LABELLED, label="step 6", version=None, digest=digest), desired)
    assert run.state.engine.version == 6 and is_ready(run.state), trouble(run.state)
    return run


def failure(outcome: Outcome, kind: ErrorKind) -> str:
    assert isinstance(outcome, Failed) and outcome.error is kind, outcome
    return outcome.message


# --- a sync -----------------------------------------------------------------------------------------------------------


def test_pushed_weights_are_loaded_once_the_engine_reports_their_label() -> None:
    run = Run().issue(phase("prepare"))
    assert (run.calls, run.last) == (["pause"], Acted(calls=("pause",), version=0))
    run.issue(phase("load"))
    assert run.calls[1:] == ["await_push"] and len(run.outcomes) == 1
    run.push("step 6")
    assert len(run.outcomes) == 1
    run.push("step 7")
    assert run.last == Acted(calls=("await_push",), version=7)
    run.issue(phase("commit"))
    assert run.last == Acted(calls=("flush", "resume"), version=7)
    assert is_ready(run.state) and not run.state.engine.label_changed


def test_weights_that_were_pushed_before_the_load_phase_are_recognized_in_it() -> None:
    run = Run().issue(phase("prepare")).push("step 7").issue(phase("load"))
    assert run.last == Acted(calls=(), version=7)
    run.issue(phase("commit"))
    assert run.last == Acted(calls=("flush", "resume"), version=7)


def test_an_engine_without_a_label_refuses_to_prepare() -> None:
    run = Run(PRESENT).issue(phase("prepare"))
    message = failure(run.last, ErrorKind.UNSUPPORTED)
    assert message.startswith("tiny 1 does not report the label of its weights")
    assert run.calls == [] and is_ready(run.state)


def test_a_label_that_the_engine_reports_already_is_refused() -> None:
    """It proves nothing: here it is the number that an agent gave to version 7 of a checkpoint."""
    run = Run(replace(LABELLED, label="7", version=7), Desired(committed=Committed(7, Checkpoint("v7"), None)))
    run.issue(phase("prepare", 8, Pushed("7")))
    assert "reports the label '7' already" in failure(run.last, ErrorKind.SOURCE_REFUSED)
    assert is_ready(run.state)


def test_the_same_pushed_weights_may_be_synced_again_under_the_next_version() -> None:
    run = on_old().issue(phase("prepare", 7, OLD)).issue(phase("load")).issue(phase("commit", 7, OLD))
    assert run.last == Acted(calls=("resume",), version=7)


def test_the_number_of_a_pushed_label_is_no_version() -> None:
    """A trainer counts its steps, and the run counts its versions."""
    run = Run(replace(LABELLED, label="4", version=4), Desired(committed=Committed(5, Pushed("4"), None)))
    assert run.calls == [] and run.state.engine.version == 5 and is_ready(run.state)
    run.push("5").heard()
    assert run.calls == ["pause"] and not in_sync(run.state)
    run.seen = replace(run.seen, version=5)
    run.feed(EngineObserved(at_ms=1, observation=run.seen))
    assert not in_sync(run.state)


def test_pushed_weights_with_another_digest_than_announced_are_a_mismatch() -> None:
    prepare = replace(phase("prepare"), manifest=manifest(7, "expected"))
    run = Run(replace(LABELLED, digest="launched")).issue(prepare).issue(phase("load"))
    run.seen = replace(run.seen, digest="other")
    run.push("step 7")
    failure(run.last, ErrorKind.DIGEST_MISMATCH)
    assert run.state.engine.torn


@pytest.mark.parametrize("announced", ["the same", None])
@pytest.mark.parametrize("path", ["", "v6"])
def test_other_bytes_under_the_label_that_a_replica_has_proven_are_not_served(path: str, announced: str | None) -> None:
    """It answers the load at once, since it has the label already. What comes afterwards is not what it has proven."""
    source = replace(OLD, path=path)
    run = on_old(Desired(committed=Committed(6, source, None)), "the same")
    manifested = manifest(7, announced) if announced else None
    run.issue(replace(phase("prepare", 7, source), manifest=manifested)).issue(phase("load"))
    assert run.last == Acted(calls=(), version=7, digest="the same")
    run.seen = replace(run.seen, digest="others")
    run.loads = "the same"
    run.issue(replace(phase("commit", 7, source), manifest=manifested))
    if path:
        assert run.last == Acted(
            calls=("observe", "check_source", "load", "flush", "resume"), version=7, digest="the same"
        )
        assert is_ready(run.state)
        return
    assert "weights that can't be trusted" in failure(run.last, ErrorKind.QUARANTINED)
    assert "resume" not in run.calls and not in_sync(run.state) and "can't be trusted" in trouble(run.state)
    run.issue(phase("prepare", 8, Pushed("step 8"))).issue(phase("load", 8)).push("step 8")
    run.issue(phase("commit", 8, Pushed("step 8")))
    assert run.last == Acted(calls=("observe", "flush", "resume"), version=8, digest="others") and is_ready(run.state)


def test_other_bytes_under_the_committed_label_take_a_replica_out_of_service() -> None:
    run = on_old(digest="the same")
    run.seen = replace(run.seen, digest="others")
    run.feed(EngineObserved(at_ms=1, observation=run.seen))
    assert not in_sync(run.state) and status_of(run.state).torn
    assert run.calls == [], "an agent that is cut off leaves it to its successor"
    assert run.heard().calls == ["pause"]


def test_the_digest_of_a_load_is_not_that_of_what_is_pushed_afterwards() -> None:
    """An engine that computes it after loads only shows none of its own."""
    run = on_old()
    run.state = replace(run.state, engine=replace(run.state.engine, digest="sglang:layout:loaded"))
    run.issue(phase("prepare")).push("step 7").issue(phase("load"))
    assert run.last == Acted(calls=(), version=7, digest=None)


def test_an_agent_that_was_killed_during_the_wait_did_not_act_if_other_bytes_came() -> None:
    prepare = replace(phase("prepare"), manifest=manifest(7, "announced"))
    run = Run(replace(LABELLED, digest="launched")).issue(prepare).issue(phase("load"))
    seen = replace(run.seen, label="step 7", version=None, digest="others")
    started = Started(at_ms=0, identity=PRIMARY, incarnation="b")
    state, effects = fold(run.state, started, EngineObserved(at_ms=0, observation=seen))
    failure(outcomes(effects)[-1], ErrorKind.UNKNOWN)
    assert state.engine.version != 7 or state.engine.torn


# --- the end of a wait ------------------------------------------------------------------------------------------------


def test_a_push_that_does_not_come_by_the_deadline_is_named() -> None:
    run = Run().issue(phase("prepare")).issue(phase("load"), ttl_ms=500)
    assert next_deadline(run.state) == 500
    run.feed(Tick(at_ms=500))
    message = failure(run.last, ErrorKind.ENGINE_TIMEOUT)
    assert "'step 7' in time: the engine's label is 'default'" in message
    assert run.state.activity is None and run.state.suppressed.quarantined == 7


def test_a_drain_does_not_wait_for_the_trainer() -> None:
    run = Run().issue(phase("prepare")).issue(phase("load")).issue(Drain(grace_ms=0), ttl_ms=15_000)
    assert run.outcomes[1:] == [Skipped(Reason.SUPERSEDED), Acted(calls=("observe",))]
    assert run.state.activity is None and run.state.desired.draining


@pytest.mark.parametrize("body", [phase("abort"), phase("commit"), EpochStart(previous_epoch=1, logic=1)])
def test_the_end_of_the_phase_ends_the_wait_at_once(body: WeightSync | EpochStart) -> None:
    run = Run().issue(phase("prepare")).issue(phase("load")).issue(body)
    assert run.outcomes[1] == Skipped(Reason.SUPERSEDED) and len(run.outcomes) == 3
    assert "observe" in run.calls and run.state.activity is None


def test_a_pause_before_the_wait_is_awaited_whatever_ends_the_phase() -> None:
    run = Run().issue(phase("prepare"))
    run.feed(EngineObserved(at_ms=1, observation=replace(run.seen, generating=True)))
    state, effects = fold(run.state, command(phase("load"), 2), command(phase("abort"), 3))
    assert called(effects) == ["pause"] and len(state.queue) == 1


def test_a_sync_of_other_replicas_does_not_end_the_wait() -> None:
    run = Run().issue(phase("prepare")).issue(phase("load"))
    run.feed(command(phase("abort"), 3, target=Target(replicas=frozenset({5}))))
    assert run.state.activity is not None and len(run.state.queue) == 1


def test_an_agent_that_is_asked_to_end_does_not_wait_for_the_trainer() -> None:
    run = Run().issue(phase("prepare")).issue(phase("load")).feed(Stopping(at_ms=2))
    assert "asked to end while it waited" in failure(run.last, ErrorKind.UNKNOWN)
    assert run.state.activity is None


def test_a_snapshot_ends_the_wait() -> None:
    run = Run().issue(phase("prepare")).issue(phase("load"))
    run.feed(SnapshotReceived(at_ms=2, epoch=1, seq=5, desired=Desired()))
    assert run.last == Skipped(Reason.SUPERSEDED)
    assert run.calls[-2:] == ["observe", "resume"] and is_ready(run.state)


def test_an_engine_that_is_relaunched_during_the_wait_has_missed_the_push() -> None:
    run = Run().issue(phase("prepare")).issue(phase("load"))
    run.feed(EngineObserved(at_ms=2, observation=replace(LABELLED, instance="two")))
    failure(run.last, ErrorKind.ENGINE_TIMEOUT)
    assert Restart() in run.effects


def test_an_agent_that_was_killed_during_the_wait_acted_if_the_label_came() -> None:
    run = Run().issue(phase("prepare")).issue(phase("load"))
    started = Started(at_ms=0, identity=PRIMARY, incarnation="b")
    for label, expected in (("step 7", Acted(calls=("await_push",), version=7)), ("default", None)):
        seen = replace(run.seen, label=label, version=None)
        _, effects = fold(run.state, started, EngineObserved(at_ms=0, observation=seen))
        (outcome,) = outcomes(effects)
        assert outcome == expected if expected is not None else failure(outcome, ErrorKind.UNKNOWN)


def test_the_skip_that_ends_a_wait_is_written_first_since_a_restart_could_find_that_it_acted() -> None:
    """As the two tests above show. Seed 7974 of the simulation is a whole run of it."""
    waiting = Run().issue(phase("prepare")).issue(phase("load")).state
    left_out = replace(phase("commit"), quarantine=frozenset({PRIMARY.replica}))
    after, effects = decide(waiting, command(left_out, 3))
    assert outcomes(list(effects)) == [Skipped(Reason.SUPERSEDED), Skipped(Reason.QUARANTINED)]
    assert is_written_first(waiting, effects)
    _, skip = decide(after, command(EngineCommand(operation="flush"), 4, target=Target(replicas=frozenset({5}))))
    assert answers(list(skip)) and not is_written_first(after, skip)


@pytest.mark.parametrize("memory", ["agent", "trainer"])
def test_a_missed_push_is_no_success_of_an_engine_that_can_not_sleep_as_desired(memory: Memory) -> None:
    """Nothing wakes it before the next sync, so it does not wait for its weights either."""
    seen = replace(LABELLED, label="6", version=6)
    if memory == "agent":
        seen = replace(seen, operations=seen.operations - {Operation.SLEEP, Operation.WAKE})
    old = Committed(6, Checkpoint("v6"), None)
    asleep = frozenset[Tag]({"weights", "kv_cache"})
    desired = Desired(asleep=asleep, committed=old, sync=Syncing(7, NEW, None, "abort", "load"))
    run = Run(seen, desired, memory)
    run.issue(phase("commit"))
    message = failure(run.last, ErrorKind.QUARANTINED)
    assert "can't get version 7: its source has no checkpoint" in message
    assert "resume" not in run.calls and not in_sync(run.state)


# --- after an abort ---------------------------------------------------------------------------------------------------


def test_after_an_abort_an_engine_that_was_not_pushed_to_serves_again() -> None:
    run = on_old().issue(phase("prepare")).issue(phase("load")).issue(phase("abort"))
    assert run.last == Acted(calls=("observe", "resume"), version=6)
    assert is_ready(run.state)


@pytest.mark.parametrize("noticed", [True, False])
def test_after_an_abort_an_engine_that_took_the_label_is_out_of_service(noticed: bool) -> None:
    run = on_old().issue(phase("prepare")).push("step 7", noticed).issue(phase("abort"))
    message = failure(run.last, ErrorKind.QUARANTINED)
    assert "can't get version 6: its source has no checkpoint" in message and "labelled 'step 7'" in message
    assert "resume" not in run.calls and not in_sync(run.state)
    run.issue(phase("prepare", 8, Pushed("step 8"))).issue(phase("load", 8)).push("step 8")
    run.issue(phase("commit", 8, Pushed("step 8")))
    assert run.last == Acted(calls=("flush", "resume"), version=8) and is_ready(run.state)


def test_after_an_abort_the_trainer_may_push_the_committed_weights_back() -> None:
    run = on_old().issue(phase("prepare")).push("step 7").issue(phase("abort"))
    run.issue(phase("prepare", 8, OLD)).issue(phase("load", 8)).push("step 6").issue(phase("commit", 8, OLD))
    assert run.last == Acted(calls=("flush", "resume"), version=8)


def test_after_an_abort_an_engine_goes_back_to_the_checkpoint_of_what_is_committed() -> None:
    source = Pushed("step 6", path="v6")
    run = on_old(Desired(committed=Committed(6, source, None))).issue(phase("prepare")).push("step 7", noticed=False)
    run.issue(phase("abort"))
    assert run.last == Acted(calls=("observe", "check_source", "load", "flush", "resume"), version=6)
    assert run.seen.label == "step 6" and is_ready(run.state)


def test_after_an_aborted_first_sync_an_engine_that_took_the_label_stays_paused() -> None:
    run = Run().issue(phase("prepare")).push("step 7", noticed=False).issue(phase("abort"))
    assert "weights of its launch" in failure(run.last, ErrorKind.QUARANTINED)
    assert not run.seen.generating


def test_a_trainer_that_dies_during_a_push_leaves_nothing_paused_that_is_whole() -> None:
    run = on_old().issue(phase("prepare")).issue(phase("load")).feed(LeaseExpired(at_ms=2))
    assert run.calls[-2:] == ["observe", "resume"]
    run = on_old().issue(phase("prepare")).push("step 7", noticed=False).feed(LeaseExpired(at_ms=2))
    assert run.calls[-1] == "observe" and not run.seen.generating


def test_an_engine_that_can_not_be_read_after_an_abort_is_out_of_service() -> None:
    run = on_old().issue(phase("prepare"))
    state, effects = fold(run.state, command(phase("abort"), 2))
    assert called(effects) == ["observe"] and state.activity is not None
    silent = EngineReturned(at_ms=1, call_id=state.activity.call_id, result=Returned(), observation=None)
    state, effects = fold(state, silent)
    assert "did not say what it holds" in failure(outcomes(effects)[-1], ErrorKind.ENGINE_ERROR)
    assert called(effects) == [] and not in_sync(state)


@pytest.mark.parametrize(("operation", "expected"), [("flush", ("flush",)), ("resume", ())])
def test_a_command_that_has_to_read_the_weights_first_still_does_its_own_part(
    operation: Literal["flush", "resume"], expected: tuple[str, ...]
) -> None:
    run = on_old().issue(phase("prepare"))
    run.state = replace(run.state, desired=OLD_COMMITTED)
    run.issue(EngineCommand(operation=operation))
    assert isinstance(run.last, Acted)
    assert run.last.calls == (("observe", "resume", "flush") if operation == "flush" else ("observe", "resume"))


# --- late joiners, and pushes without a sync --------------------------------------------------------------------------


def test_a_late_joiner_loads_the_checkpoint_and_gives_it_the_label_of_the_push() -> None:
    run = Run(desired=Desired(committed=Committed(7, Pushed("step 7", path="v7"), None)))
    assert run.calls == ["check_source", "pause", "load", "flush", "resume"]
    (load,) = [effect.call for effect in run.effects if isinstance(effect, Perform) and isinstance(effect.call, Load)]
    assert load == Load(7, Checkpoint("v7"), None, "step 7") and is_ready(run.state)
    assert CheckSource(Checkpoint("v7"), None, 7) in [e.call for e in run.effects if isinstance(e, Perform)]


def test_a_late_joiner_without_a_checkpoint_waits_for_the_next_sync() -> None:
    run = Run(desired=Desired(committed=Committed(7, NEW, None)))
    assert run.calls == ["pause"] and not in_sync(run.state)
    run.issue(phase("prepare", 8, Pushed("step 8"))).issue(phase("load", 8)).push("step 8")
    run.issue(phase("commit", 8, Pushed("step 8")))
    assert is_ready(run.state)


def test_an_agent_without_a_journal_knows_pushed_weights_by_their_label() -> None:
    run = Run(replace(LABELLED, label="step 7", version=None), Desired(committed=Committed(7, NEW, None)))
    assert run.calls == [] and run.state.engine.version == 7 and is_ready(run.state)
    assert status_of(run.state).launch_label is None


@pytest.mark.parametrize("path", ["", "v6"])
def test_an_engine_that_is_launched_again_under_the_committed_label_holds_the_weights_of_its_launch(path: str) -> None:
    """Another program launched it, with the label as an option, or gave it the label before it was seen."""
    run = on_old(Desired(committed=Committed(6, replace(OLD, path=path), None)))
    run.seen = replace(run.seen, instance="two")
    run.feed(EngineObserved(at_ms=2, observation=run.seen))
    assert run.calls == (["check_source", "pause", "load", "flush", "resume"] if path else ["pause"])
    assert is_ready(run.state) is bool(path)
    assert path or "weights labelled 'step 6', of which its agent has no record" in trouble(run.state)
    run.push("step 8")
    assert not in_sync(run.state), "and the next label is believed of a sync alone"
    run.issue(phase("prepare", 9, Pushed("step 9"))).issue(phase("load", 9)).push("step 9")
    run.issue(phase("commit", 9, Pushed("step 9")))
    assert is_ready(run.state) and status_of(run.state).launch_label == "step 6"


def snapshot(committed: Committed) -> SnapshotReceived:
    """What an agent is sent that was away while these weights were committed."""
    return SnapshotReceived(at_ms=9, epoch=1, seq=9, desired=Desired(committed=committed))


def test_a_label_that_was_used_again_for_other_weights_while_a_replica_was_away_proves_nothing() -> None:
    run = on_old().feed(snapshot(Committed(9, OLD, None)))
    assert run.calls == ["pause"] and not in_sync(run.state), "it holds those of version 6"
    run = on_old().feed(snapshot(Committed(9, replace(OLD, path="v9"), None)))
    assert run.calls == ["check_source", "pause", "load", "flush", "resume"] and is_ready(run.state)


@pytest.mark.parametrize(("content", "served"), [("the same", True), ("others", False)])
def test_a_label_that_was_used_again_for_the_same_bytes_proves_them(content: str, served: bool) -> None:
    held = Committed(6, OLD, manifest(6, "the same"))
    run = on_old(Desired(committed=held)).feed(snapshot(Committed(9, OLD, manifest(6, content))))
    assert is_ready(run.state) is served and run.state.engine.version == (9 if served else 6)


def test_the_number_of_a_version_that_an_agent_loaded_does_not_prove_a_push_with_that_label() -> None:
    run = Run(replace(LABELLED, label="3", version=3), Desired(committed=Committed(3, Checkpoint("v3"), None)))
    assert is_ready(run.state)
    run.issue(phase("prepare", 4, Checkpoint("v4"))).issue(phase("load", 4)).issue(phase("commit", 4, Checkpoint("v4")))
    assert run.state.engine.version == 4 and is_ready(run.state)
    run.feed(snapshot(Committed(9, Pushed("4"), None)))
    assert not in_sync(run.state)


@pytest.mark.parametrize("able", [True, False])
def test_a_judge_serves_whatever_its_label_says_since_it_is_never_synced(able: bool) -> None:
    lacking = frozenset[Operation]() if able else {Operation.PAUSE}
    seen = replace(LABELLED, label="2", version=2, operations=LABELLED.operations - lacking)
    state = agent(replace(PRIMARY, mode=RolloutMode.COLOCATED), seen)
    assert is_ready(state) and trouble(state) == ""


def test_a_judge_whose_agent_synced_it_before_serves_what_it_has_and_says_so() -> None:
    state = agent(replace(PRIMARY, mode=RolloutMode.COLOCATED), LABELLED)
    state = replace(state, engine=replace(state.engine, torn=True))  # as a journal of its earlier mode says
    assert is_ready(state) and not status_of(state).torn and trouble(state) == ""


def test_a_push_whose_label_is_the_number_of_a_committed_version_is_not_taken_for_it() -> None:
    run = Run(desired=Desired(committed=Committed(2, Checkpoint("v2"), None)))
    assert run.seen.label == "2" and is_ready(run.state)
    run.calls.clear()
    run.seen = replace(run.seen, label="3", version=3)
    run.feed(EngineObserved(at_ms=1, observation=run.seen))
    assert "labelled '3', which were not committed" in trouble(run.state) and not is_ready(run.state)
    run.feed(HeadSeen(at_ms=2, epoch=1, seq=0))
    assert run.calls == ["check_source", "pause", "load", "flush", "resume"], "it goes back to what is committed"
    assert (run.seen.label, run.state.engine.version) == ("2", 2) and is_ready(run.state)


def test_an_engine_that_is_pushed_to_outside_of_a_sync_is_paused_and_named() -> None:
    run = on_old().push("step 7")
    assert run.calls == [] and not in_sync(run.state)
    assert status_of(run.state).torn, "the number of the version that it held says nothing of what it holds"
    run.heard()
    assert run.calls == ["pause"] and not in_sync(run.state)
    assert "labelled 'step 7', which were not committed" in trouble(run.state)
    run.push("step 6").heard()
    assert run.calls == ["pause", "flush", "resume"] and is_ready(run.state) and not status_of(run.state).torn


@pytest.mark.parametrize("source", [NEW, Broadcast(host="h", port=1, group="g", replicas=(0,))])
def test_a_commit_that_a_replica_can_not_follow_is_never_acted(source: Pushed | Broadcast) -> None:
    """It restarted in the load phase, say, so that the coordinator does not quarantine it."""
    run = on_old().issue(phase("commit", 7, source))
    assert "can't get version 7" in failure(run.last, ErrorKind.QUARANTINED)
    assert not in_sync(run.state) and not run.seen.generating


def test_a_label_that_was_pushed_before_its_sync_was_prepared_is_waited_for_no_more() -> None:
    run = Run(desired=OLD_COMMITTED).push("step 6").push("step 7")
    assert run.state.engine.label_changed
    run.issue(phase("prepare")).issue(phase("load"))
    assert all(isinstance(outcome, Acted) for outcome in run.outcomes) and run.state.engine.version == 7


@pytest.mark.parametrize(("held", "version"), [("another", 6), ("announced", 7)])
def test_pushed_weights_whose_digest_is_not_the_announced_one_are_not_taken_for_them(held: str, version: int) -> None:
    engine = EngineState(label="step 7", version=6, version_label="step 6", digest=held)
    desired = Desired(committed=Committed(7, NEW, manifest(7, "announced")))
    assert adopt_pushed(engine, desired, PRIMARY).version == version


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("pushed", [True, False])
def test_an_engine_of_the_first_sync_serves_what_it_has_once_the_trainer_is_lost(pushed: bool, noticed: bool) -> None:
    run = Run().issue(phase("prepare")).issue(phase("load"))
    if pushed and noticed:
        run.push("step 7")
    elif pushed:
        run.seen = replace(run.seen, label="step 7", version=None)
    run.feed(LeaseExpired(at_ms=5))
    assert run.seen.generating and run.state.engine.version == (7 if pushed else 0)


@pytest.mark.parametrize("source", [Checkpoint("v6"), Pushed("step 6", path="v6")])
def test_the_first_label_after_a_load_is_that_of_the_load_only_if_the_load_gives_it(
    source: Checkpoint | Pushed,
) -> None:
    """The engine could not be read after the load, and its agent was away when the trainer pushed other weights."""
    run = Run(desired=Desired(committed=Committed(6, source, None)))
    unread = replace(run.state.engine, label=None, version_label=None, generating=False)
    run.state = replace(run.state, engine=unread)
    run.calls.clear()
    run.seen = replace(run.seen, label="step 7", version=None, generating=False)
    run.feed(EngineObserved(at_ms=1, observation=run.seen))
    assert run.calls == ["check_source", "load", "flush", "resume"] and is_ready(run.state)
    assert run.seen.label == ("6" if isinstance(source, Checkpoint) else "step 6")
