"""An agent that only observes: whatever it sees, is told or lives through, it makes no call and wants nothing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.machine.events import CoordinatorSettings
from controlplane.machine.replicas import proven_replicas
from controlplane.machine.status import fleet_status
from schemas.agent_status import AgentStatus, Observed
from schemas.commands import EngineCommand, EpochStart, ProfileCommand, ProfilePlan, UnknownCommand
from schemas.config import ObservePolicy
from schemas.desired import Committed, Desired, ProfileSession
from schemas.events import (
    EngineObserved,
    EngineReturned,
    Event,
    HeadSeen,
    LeaseExpired,
    MachineSettings,
    Observation,
    Perform,
    Restart,
    Returned,
    SnapshotReceived,
    Started,
    Stopping,
    Tick,
)
from schemas.identity import Identity, RolloutMode
from schemas.outcomes import Reason, Skipped
from schemas.wire import Rejoin
from tests.unit.fleets import DONE, SETTINGS, Coordinator
from tests.unit.machines import PRESENT, START, agent, answers, command, fold, sync
from workers.link.heartbeat import status_of
from workers.machine.decide import decide
from workers.machine.readiness import is_ready
from workers.machine.state import AgentState

PLACE = Identity(replica=0, node_rank=0, mode=RolloutMode.OBSERVED)
SECOND = Identity(replica=0, node_rank=1, nnodes=2, mode=RolloutMode.OBSERVED)
STARTED = Started(at_ms=0, identity=PLACE, incarnation="b", settings=MachineSettings(on_lost_bus="pause"))
WANTED = Desired(
    generation="paused",
    asleep=frozenset({"weights"}),
    profile=ProfileSession(3, ProfilePlan()),
    committed=Committed(7, sync("commit", 7).source, None),  # type: ignore[arg-type]
)
COMMANDS = [
    *(EngineCommand(operation=name) for name in ("pause", "resume", "sleep", "wake", "flush", "abort")),
    *(ProfileCommand(action=name, step=3, plan=ProfilePlan()) for name in ("start", "stop", "collect", "finish")),
    ProfileCommand(action="check", step=0, plan=ProfilePlan()),
    *(sync(phase) for phase in ("prepare", "load", "commit", "abort")),
    EpochStart(previous_epoch=0, logic=1),
    UnknownCommand("from the future"),
]
SEEN = [
    PRESENT,
    replace(PRESENT, generating=False, version=3, label="step-3"),
    replace(PRESENT, generating=None, version=None, profiling=True, asleep=frozenset({"kv_cache"})),
    replace(PRESENT, instance="two", operations=frozenset(), profiling=None),
    Observation(engine="tiny", tokenizer="unknown"),
    Observation(engine="tiny", tokenizer="absent"),
]


@pytest.mark.parametrize("identity", [PLACE, SECOND], ids=["primary", "follower"])
@pytest.mark.parametrize("seen", SEEN, ids=range(len(SEEN)))
@pytest.mark.parametrize("body", COMMANDS, ids=lambda body: f"{type(body).__name__}-{getattr(body, 'operation', '')}")
def test_every_command_is_skipped_as_observing(identity: Identity, seen: Observation, body: Any) -> None:
    state = agent(identity, seen)
    after, effects = fold(state, command(body))
    assert [(answer.rule, answer.outcome) for answer in answers(effects)] == [(5, Skipped(Reason.OBSERVING))]
    assert len(effects) == 1 and (after.seq, after.desired) == (1, Desired())


EVENTS = st.one_of(
    st.builds(
        lambda body, seq, epoch, ttl: command(body, seq, epoch=epoch, ttl_ms=ttl),
        st.sampled_from(COMMANDS),
        st.integers(1, 5),
        st.integers(1, 2),
        st.sampled_from([0, 1000]),
    ),
    st.sampled_from([EngineObserved(at_ms=5, observation=seen) for seen in SEEN]),
    st.builds(
        lambda seq, desired: SnapshotReceived(at_ms=5, epoch=2, seq=seq, desired=desired),
        st.integers(0, 5),
        st.sampled_from([Desired(), WANTED]),
    ),
    st.sampled_from(
        [
            HeadSeen(at_ms=5, epoch=2, seq=4),
            LeaseExpired(at_ms=5),
            Tick(at_ms=900_000),
            STARTED,
            EngineReturned(at_ms=5, call_id=1, result=Returned(), observation=PRESENT),
        ]
    ),
)


@given(st.lists(EVENTS, max_size=12))
def test_no_life_leads_to_a_call(lived: list[Event]) -> None:
    state, effects = fold(AgentState(), STARTED, *lived, STARTED, *lived, Stopping(at_ms=9))
    assert not [effect for effect in effects if isinstance(effect, Perform | Restart)]
    assert all(isinstance(answer.outcome, Skipped) for answer in answers(effects))
    assert state.activity is None


def test_what_an_earlier_life_was_calling_is_not_called_again() -> None:
    """The same folder once belonged to an agent that commanded: it was killed in a call, with a finish to come."""
    commanding = agent(replace(PLACE, mode=RolloutMode.HYBRID))
    cut_off, effects = fold(commanding, command(START))
    assert any(isinstance(effect, Perform) for effect in effects)
    lived: list[Event] = [STARTED, *(EngineObserved(at_ms=1, observation=seen) for seen in SEEN)]
    lived += [SnapshotReceived(at_ms=2, epoch=1, seq=1, desired=WANTED)]
    _, effects = fold(cut_off, *lived)
    assert not [effect for effect in effects if isinstance(effect, Perform)]


def test_it_believes_what_it_sees_and_nothing_else() -> None:
    state = agent(PLACE, replace(PRESENT, version=3, label="step-3", profiling=True, generating=False))
    assert status_of(state).observed == Observed(label="step-3", generating=False, profiling=True)
    blind = Observation(engine="vllm 0.13.0", instance="one", tokenizer="present")
    state, _ = decide(state, EngineObserved(at_ms=1, observation=blind))
    assert status_of(state).observed == Observed()
    assert status_of(state).condition() == "observed, weights unknown, unknown whether paused"


def test_an_agent_that_commands_again_does_not_report_as_observing() -> None:
    state, _ = fold(agent(PLACE), replace(STARTED, identity=replace(PLACE, mode=RolloutMode.HYBRID)))
    assert status_of(state).observed is None


def test_a_replica_that_serves_is_ready_and_one_that_is_paused_is_held() -> None:
    state = agent(PLACE, replace(PRESENT, label="step-3", version=3))
    assert is_ready(state) and status_of(state).condition() == "observed, weights step-3, generating"
    paused, _ = decide(state, EngineObserved(at_ms=1, observation=replace(PRESENT, generating=False)))
    assert not is_ready(paused) and status_of(paused).held
    gone, _ = decide(state, EngineObserved(at_ms=1, observation=SEEN[4]))
    assert not is_ready(gone) and not status_of(gone).held


# --- the bus ----------------------------------------------------------------------------------------------------------

OBSERVING: CoordinatorSettings = replace(SETTINGS, observe=ObservePolicy())


def test_a_bus_that_observes_turns_away_agents_that_would_command() -> None:
    bus = Coordinator(settings=OBSERVING)
    for name in ("0.0", "0.1", "actor.0"):
        bus.hello(name)
        ((_, answer),) = bus.sent
        assert isinstance(answer, Rejoin) and answer.give_up
        assert f"agent {name} would command its engine: start the agent with --observe" in answer.reason
    assert bus.state.members == {}
    bus.arrive("0.0", mode=RolloutMode.OBSERVED)
    assert bus.state.members["0.0"].state == "live"


def test_syncs_of_a_fleet_leave_out_what_is_only_observed() -> None:
    bus = Coordinator("0.0")
    assert bus.arrive("1.0", mode=RolloutMode.OBSERVED) == Desired()
    bus.sync()
    for phase in ("prepare", "load", "commit"):
        assert [getattr(body, "phase", None) for body in bus.published] == [phase]
        bus.answer(a0_0=DONE, a1_0=Skipped(Reason.OBSERVING))
    (report,) = bus.synced
    assert (report.status, report.loaded, report.unproven, report.quarantined) == ("committed", (0,), (), ())
    assert bus.state.desired[1] == Desired()
    bus.status("1.0", AgentStatus(ready=True, tokenizer="present", generating=True, version=7))
    assert proven_replicas(bus.state).serving == {0: 1} and proven_replicas(bus.state).unproven == frozenset()


def test_the_version_of_a_replica_that_is_only_observed_is_not_known() -> None:
    bus = Coordinator(settings=OBSERVING)
    bus.arrive("0.0", mode=RolloutMode.OBSERVED)
    seen = Observed(label="step-3", generating=False)
    bus.status("0.0", AgentStatus(ready=False, tokenizer="present", version=0, observed=seen))
    fleet = fleet_status(bus.state, 0, "run.db", {})
    assert (fleet.replicas[0].version, fleet.replicas[0].serving) == (None, None)
    assert fleet.replicas[0].state == "observed, weights step-3, paused"


def test_a_command_to_observers_alone_was_for_no_agent() -> None:
    bus = Coordinator(settings=OBSERVING)
    bus.arrive("0.0", mode=RolloutMode.OBSERVED)
    bus.issue(EngineCommand(operation="pause"))
    bus.answer(a0_0=Skipped(Reason.OBSERVING))
    (report,) = bus.reports
    assert report.matched_nothing
