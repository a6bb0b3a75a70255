"""Which replicas are proven to serve: what `wait_for_agents` waits for, and what the status shows first."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane import ControlPlane
from controlplane.machine.fleet_view import FleetView
from controlplane.machine.replicas import all_serve, needed_weights, not_ready_reasons, proven_replicas
from controlplane.machine.status import fleet_status
from schemas import errors
from schemas.agent_status import AgentStatus
from schemas.commands import EngineCommand, Target, WeightSync
from schemas.config import BusConfig
from schemas.identity import Identity, RolloutMode
from schemas.outcomes import Acted, Reason, Skipped
from schemas.reports import FleetStatus
from tests.unit.fleets import DONE, NO, NOT_PRIMARY, SECOND_US, Coordinator
from tests.unit.small_bus import Engine
from tests.unit.test_plane import agents

PATIENT = BusConfig(head_interval_ms=50, heartbeat_ms=100, retransmit_ms=200, agent_timeout_ms=60_000)
SERVING = AgentStatus(ready=True, tokenizer="present", engine="tiny", generating=True, version=1)
FOLLOWER = AgentStatus(ready=True, tokenizer="absent")


def committed() -> Coordinator:
    """A primary, a follower, a judge and a training rank; version 1 is committed."""
    bus = Coordinator("0.0", "0.1", "actor.0")
    bus.arrive("1.0", mode=RolloutMode.COLOCATED)
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a0_1=DONE, a1_0=DONE, actor_0=DONE)
    return bus


def heard(bus: Coordinator, at_us: int, **statuses: AgentStatus) -> None:
    """A heartbeat of every agent; those named say something else."""
    said = {"a0_0": SERVING, "a0_1": FOLLOWER, "a1_0": replace(SERVING, version=0), "actor_0": FOLLOWER, **statuses}
    for agent, status in said.items():
        bus.status(agent.removeprefix("a").replace("_", ".") if agent != "actor_0" else "actor.0", status, at_us=at_us)


def status(bus: Coordinator) -> FleetStatus:
    return fleet_status(bus.state, 90 * SECOND_US, "run.db", {})


def test_replicas_that_took_the_first_weights_of_a_lost_trainer_serve_beside_those_of_the_launch() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    assert [command.phase for command in bus.published if isinstance(command, WeightSync)] == ["load"]
    bus.open()
    for agent in ("0.0", "1.0"):
        assert bus.arrive(agent).fallback is not None
    bus.status("0.0", SERVING, at_us=5)
    bus.status("1.0", replace(SERVING, version=0), at_us=5)
    assert not_ready_reasons(bus.state, 4) == {} and all_serve(bus.state, 2, since_us=4)
    assert proven_replicas(bus.state).serving == {0: 1, 1: 0}


def test_a_quarantine_of_a_sync_that_lost_its_trainer_does_not_keep_the_next_one_waiting() -> None:
    bus = Coordinator("0.0", "1.0", "2.0")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE, a2_0=DONE)
    bus.sync(2)
    bus.answer(a0_0=NO, a1_0=DONE, a2_0=DONE)
    assert bus.state.desired[0].quarantined == 2
    bus.open()
    assert bus.arrive("0.0").quarantined == 0
    assert bus.state.desired[0].version == 1


def test_replicas_serve_once_each_agent_was_heard_after_the_call() -> None:
    bus = committed()
    heard(bus, at_us=5)
    assert all_serve(bus.state, 4, since_us=4) and not all_serve(bus.state, 5, since_us=4)
    assert not_ready_reasons(bus.state, 5) == dict.fromkeys(
        ("0.0", "0.1", "1.0", "actor.0"), "no heartbeat since the call"
    )
    heard(bus, at_us=6)
    assert all_serve(bus.state, 4, since_us=5)


@pytest.mark.parametrize(
    ("said", "lacks"),
    [
        (replace(SERVING, quarantined=1), "quarantined since v1"),
        (replace(SERVING, version=0), "it holds v0, and v1 is committed"),
        (replace(SERVING, torn=True), "its weights are torn"),
        (replace(SERVING, generating=False), "it does not serve: v1, paused"),
        (replace(SERVING, generating=False, asleep=("weights",)), "it does not serve: v1, paused, asleep weights"),
        (replace(SERVING, ready=False, activity="load"), "it does not serve: not ready, v1, generating, busy: load"),
    ],
)
def test_a_replica_that_does_not_serve_is_not_ready(said: AgentStatus, lacks: str) -> None:
    bus = committed()
    heard(bus, at_us=5, a0_0=said)
    assert not_ready_reasons(bus.state, 4) == {"0.0": lacks} and not all_serve(bus.state, 1, since_us=4)


def test_a_replica_with_weights_of_an_earlier_run_is_said_to_wait_for_a_sync() -> None:
    bus = Coordinator("0.0")
    bus.status("0.0", replace(SERVING, version=7))
    lacks = "it holds v7, and nothing is committed yet: it serves after the first sync"
    assert not_ready_reasons(bus.state, -1) == {"0.0": lacks}


def test_an_answer_of_an_agent_that_has_not_joined_again_proves_nothing_of_the_syncs_that_it_missed() -> None:
    """It dials anew while its engine goes back to version 1, and the next sync does not wait for it."""
    bus = Coordinator("0.0", "1.0")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE)
    bus.sync(2)
    bus.answer(a0_0=NO, a1_0=NO)
    aborted = bus.state.seq
    bus.hello("0.0")
    bus.answer(aborted, a0_0=DONE, a1_0=DONE)
    bus.sync(3)
    for _ in range(3):
        bus.answer(a1_0=DONE)
    bus.join("0.0")
    assert bus.state.desired[0].version == 3
    proven = proven_replicas(bus.state)
    assert proven.serving == {1: 3} and proven.unproven == {0}


def test_a_replica_that_later_syncs_did_not_name_still_needs_its_checkpoint() -> None:
    bus = Coordinator("0.0", "1.0")
    assert needed_weights(bus.state) == frozenset()
    for version, replicas, needed in ((1, None, "1"), (2, {0}, "12"), (3, None, "123")):
        bus.sync(version, target=Target(replicas=frozenset(replicas) if replicas else None), path=str(version))
        assert needed_weights(bus.state) == frozenset(needed)  # until it is committed
        for _ in range(3):
            bus.answer(a0_0=DONE, a1_0=DONE if replicas is None else Skipped(Reason.NOT_TARGETED))
        if version == 2:
            bus.lose("1.0", at_us=SECOND_US)
            assert needed_weights(bus.state) == {"1", "2"}  # it comes back to what was committed for it
            bus.arrive("1.0")
    assert needed_weights(bus.state) == {"3"}


def test_an_agent_that_is_away_is_named_and_not_waited_for() -> None:
    bus = committed()
    bus.lose("0.0", at_us=SECOND_US)
    heard(bus, at_us=200 * SECOND_US)
    lacking = not_ready_reasons(bus.state, 181 * SECOND_US)
    assert lacking == {"0.0": "its agent is gone (away for 3 min at the call)"}
    assert all_serve(bus.state, 3, since_us=181 * SECOND_US)


def shown(bus: Coordinator, agent: str = "0.0") -> tuple[int | None, str, bool]:
    """What the status says of an agent: what its replica serves, its condition, and whether it is in trouble."""
    line = next(line for line in status(bus).agents if line.agent == agent)
    return line.serving, line.condition, line.in_trouble


def test_the_columns_of_the_status_are_of_one_moment_though_a_heartbeat_is_older_than_an_outcome() -> None:
    bus = Coordinator("0.0")
    bus.status("0.0", replace(SERVING, version=0))
    assert shown(bus) == (0, "v0, generating", False)
    bus.sync(1)
    assert shown(bus) == (None, "in the sync to v1 (was v0, generating)", False)
    bus.status("0.0", replace(SERVING, ready=False, generating=False, version=0, activity="load"))
    assert shown(bus) == (None, "v0, paused, busy: load", False)
    for _ in range(3):
        bus.answer(a0_0=DONE)
    assert shown(bus) == (1, "v1, generating", False)
    bus.status("0.0", SERVING)
    bus.issue(EngineCommand(operation="pause"))
    assert shown(bus) == (None, "told to pause (was v1, generating)", False)
    bus.answer(a0_0=NO)
    bus.issue(EngineCommand(operation="resume"))
    bus.answer(a0_0=NO)
    assert shown(bus) == (None, "did not carry out its last command (was v1, generating)", False)
    bus.status("0.0", SERVING)
    assert shown(bus) == (1, "v1, generating", False)


@pytest.mark.parametrize("calls", [(), ("sleep",)])
def test_a_resume_that_resumes_nothing_proves_nothing_of_a_replica_whose_wake_failed(calls: tuple[str, ...]) -> None:
    """Its memory stays asleep."""
    bus = Coordinator("0.0")
    bus.status("0.0", replace(SERVING, ready=False, generating=False, version=0, asleep=("kv_cache",)))
    bus.issue(EngineCommand(operation="wake"))
    bus.answer(a0_0=NO)
    bus.issue(EngineCommand(operation="resume"))
    bus.answer(a0_0=Acted(calls=calls))
    assert shown(bus)[0] is None


def test_a_command_that_an_agent_never_heard_is_not_said_to_have_been_told_to_it() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.status("0.0", replace(SERVING, version=0))
    bus.lose("0.0")
    bus.issue(EngineCommand(operation="pause"))
    assert "told to pause" not in shown(bus)[1]


def test_the_status_shows_unproven_and_absent_agents_first() -> None:
    bus = committed()
    bus.arrive("2.0")
    bus.status("2.0", SERVING)
    heard(bus, at_us=1)
    assert proven_replicas(bus.state).unproven == frozenset() and status(bus).warnings == ()
    bus.status("2.0", replace(SERVING, version=0))
    bus.lose("actor.0", "left", at_us=30 * SECOND_US)
    shown = status(bus)
    assert [line.agent for line in shown.agents] == ["2.0", "actor.0", "0.0", "0.1", "1.0"]
    assert str(shown).splitlines()[1:3] == ["  replica 2 not proven to hold v1", "  actor.0: left for 1 min"]
    bus.lose("0.0", at_us=60 * SECOND_US)
    assert status(bus).unproven == (0, 2) and "0.0: gone for 30 s (was v1, generating)" in str(status(bus))


# --- which version is served, by answers and heartbeats ---------------------------------------------------------------

PAUSE, RESUME = EngineCommand(operation="pause"), EngineCommand(operation="resume")


def serving() -> Coordinator:
    """Two replicas that have just committed version 1, and whose heartbeats are older than that."""
    bus = Coordinator("0.0", "1.0", "0.1", "actor.0")
    for name in ("0.0", "1.0"):
        bus.status(name, replace(SERVING, version=0))
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a1_0=DONE, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    return bus


def carried_out(bus: Coordinator, command: EngineCommand) -> dict[int, int]:
    """What is served after a command that both replicas carried out."""
    bus.issue(command)
    bus.answer(a0_0=DONE, a1_0=DONE)
    return proven_replicas(bus.state).serving


def test_during_a_sync_no_replica_is_proven_to_serve_until_it_has_committed() -> None:
    bus = serving()
    bus.sync(2)
    for _ in range(2):
        assert proven_replicas(bus.state).serving == {}
        bus.answer(a0_0=DONE, a1_0=DONE, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    bus.answer(a1_0=DONE)
    assert proven_replicas(bus.state).serving == {1: 2}, "the other has not answered the commit"
    bus.status("0.0", replace(SERVING, version=2))
    assert proven_replicas(bus.state).serving == {1: 2}, "not by a heartbeat either, while its answer is due"
    bus.answer(a0_0=NO)
    assert proven_replicas(bus.state).serving == {1: 2}
    bus.status("0.0", replace(SERVING, version=2))
    assert proven_replicas(bus.state).serving == {0: 2, 1: 2}


def test_after_an_abort_replicas_serve_what_they_served_before() -> None:
    bus = serving()
    bus.sync(2)
    bus.answer(a0_0=NO, a1_0=NO, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    bus.answer(a0_0=DONE, a1_0=NO, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    assert proven_replicas(bus.state).serving == {0: 1}
    assert proven_replicas(bus.state).unproven == {1}, "its abort failed, and its heartbeat is older"


def test_an_abort_that_resumes_nothing_shows_no_replica_that_serves() -> None:
    """The prepare paused both, and of the memory of one a wake has failed; what it said before is older."""
    bus = serving()
    for name in ("0.0", "1.0"):
        bus.status(name, SERVING)
    bus.sync(2)
    paused, resumed = Acted(calls=("pause",), version=1), Acted(calls=("flush", "resume"), version=1)
    bus.answer(a0_0=paused, a1_0=paused, a0_1=NO, actor_0=NOT_PRIMARY)
    bus.answer(a0_0=NO, a1_0=NO, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    bus.answer(a0_0=Skipped(Reason.ALREADY), a1_0=resumed, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    assert proven_replicas(bus.state).serving == {1: 1}
    bus.status("0.0", SERVING)
    assert proven_replicas(bus.state).serving == {0: 1, 1: 1}


def test_the_answers_of_a_sync_say_which_weights_a_replica_holds_before_its_next_heartbeat() -> None:
    """It goes back to what it took of a lost trainer, and its heartbeat named what the next one was loading."""
    bus = Coordinator("0.0", "1.0")
    bus.sync(1)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.open()
    for name in ("0.0", "1.0"):
        bus.arrive(name)
        bus.status(name, SERVING)
    bus.sync(2)
    bus.answer(a0_0=DONE, a1_0=DONE)
    bus.answer(a0_0=Acted(calls=("load",), version=2, digest="two"))
    assert status(bus).agents[0].status == replace(SERVING, version=2, digest="two")
    bus.answer(a1_0=NO)
    bus.answer(a0_0=Acted(calls=("load", "resume"), version=1), a1_0=NO)
    assert proven_replicas(bus.state).serving == {0: 1}
    bus.arrive("0.0")
    bus.issue(RESUME)
    bus.answer(a0_0=Acted(calls=("resume",)))
    assert proven_replicas(bus.state).serving == {}, "it has sent no heartbeat, and may hold those of its launch"


def test_a_paused_replica_serves_again_once_it_has_answered_the_resume() -> None:
    bus = serving()
    assert carried_out(bus, PAUSE) == {}
    bus.issue(RESUME)
    bus.answer(a0_0=DONE)
    assert proven_replicas(bus.state).serving == {0: 1}
    bus.answer(a1_0=NO)
    assert proven_replicas(bus.state).serving == {0: 1}, "it said before the pause that it generates"
    bus.status("0.0", replace(SERVING, generating=False))
    assert proven_replicas(bus.state).serving == {}, "its heartbeat is newer than its answer"


def test_a_wake_that_found_all_memory_awake_says_nothing_of_a_resume_that_failed() -> None:
    bus = serving()
    assert carried_out(bus, PAUSE) == {}
    bus.issue(RESUME)
    bus.answer(a0_0=NO, a1_0=DONE)
    for _ in ("by that answer", "by its heartbeat"):
        bus.issue(EngineCommand(operation="wake"))
        bus.answer(a0_0=Skipped(Reason.ALREADY), a1_0=Skipped(Reason.ALREADY))
        assert proven_replicas(bus.state).serving == {1: 1}, "the other is paused"
        bus.status("0.0", replace(SERVING, version=1, generating=False), seq=bus.state.seq)


def test_a_wake_that_resumes_nothing_shows_no_replica_that_serves() -> None:
    """Its agent keeps it paused, since it can't know which weights it holds."""
    bus = serving()
    bus.issue(EngineCommand(operation="sleep"))
    bus.answer(a0_0=DONE, a1_0=DONE)
    for conclusion in (Acted(calls=("wake",)), Skipped(Reason.ALREADY)):
        bus.issue(EngineCommand(operation="wake"))
        bus.answer(a0_0=conclusion, a1_0=Acted(calls=("wake", "resume")))
        assert proven_replicas(bus.state).serving == {1: 1}


def test_a_replica_that_missed_a_command_is_proven_by_its_next_heartbeat_alone() -> None:
    bus = serving()
    heard_since = replace(SERVING, version=1)
    bus.status("0.0", heard_since)
    bus.issue(RESUME)
    bus.answer(a1_0=Skipped(Reason.ALREADY))
    assert proven_replicas(bus.state).serving == {1: 1}
    bus.time(31 * SECOND_US)
    assert proven_replicas(bus.state).serving == {1: 1}
    bus.status("0.0", heard_since, seq=bus.state.seq)
    assert proven_replicas(bus.state).serving == {0: 1, 1: 1}


def test_a_command_for_others_says_nothing_about_a_replica() -> None:
    bus = serving()
    bus.issue(PAUSE, target=Target(replicas=frozenset({1})))
    assert proven_replicas(bus.state).serving == {0: 1}, "its answer is waited for, and it goes on"
    bus.answer(a0_0=Skipped(Reason.NOT_TARGETED), a1_0=DONE)
    assert proven_replicas(bus.state).serving == {0: 1}


def test_a_replica_in_quarantine_or_away_or_restarted_is_not_proven_to_serve() -> None:
    bus = serving()
    bus.arrive("2.0")
    bus.sync(2)
    for outcome in (NO, Skipped(Reason.QUARANTINED), DONE):
        bus.answer(a0_0=DONE, a1_0=DONE, a2_0=outcome, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    assert proven_replicas(bus.state).serving == {0: 2, 1: 2}
    bus.lose("1.0")
    assert proven_replicas(bus.state).serving == {0: 2}
    bus.arrive("1.0")
    assert proven_replicas(bus.state).serving == {0: 2}, "nothing was heard of it since"
    bus.status("1.0", replace(SERVING, version=2))
    assert proven_replicas(bus.state).serving == {0: 2, 1: 2}


def unfit(bus: Coordinator, replica: int = 0) -> str:
    return FleetView(bus.state).unfit(replica)


def test_requests_go_to_replicas_that_serve_and_to_those_that_wait_in_a_sync_with_good_weights() -> None:
    bus = serving()
    assert unfit(bus) == ""
    bus.sync(2)
    assert unfit(bus) == "", "it was told to pause, and its engine lets requests wait"
    bus.answer(a0_0=DONE, a1_0=DONE, a0_1=NOT_PRIMARY, actor_0=NOT_PRIMARY)
    assert unfit(bus) == "", "it was told to load"
    paused = replace(SERVING, ready=False, generating=False)
    for wrong in (replace(paused, torn=True), replace(paused, tokenizer="unknown"), replace(paused, version=0)):
        bus.status("0.0", wrong)
        assert unfit(bus).startswith("it is not proven to serve v1: "), wrong
    bus.status("0.0", replace(paused, version=2))
    assert unfit(bus) == "", "it has loaded what is to be committed"
    bus.status("0.0", replace(paused, quarantined=2))
    assert unfit(bus) == "quarantined since v2, until a later update includes it"


def test_requests_go_to_no_replica_that_serves_what_was_never_committed_also_during_a_sync() -> None:
    """The log lost its tail, and with it the sync that loaded this."""
    bus = Coordinator("0.0", "1.0")
    bus.status("0.0", replace(SERVING, version=7))
    bus.status("1.0", replace(SERVING, version=0))
    bus.sync(8)
    assert unfit(bus).startswith("it is not proven to serve v0: ") and unfit(bus, 1) == ""


def test_requests_go_to_no_replica_that_is_away_new_or_retired() -> None:
    bus = serving()
    bus.lose("1.0")
    bus.arrive("2.0")
    assert [unfit(bus, replica) for replica in (1, 2, 3)] == [
        "its agent is gone",
        "no heartbeat yet",
        "no agent has joined there",
    ]
    bus.retire("1")
    assert unfit(bus, 1) == "it was retired"


def test_a_wedged_engine_is_not_proven_to_serve_by_an_answer() -> None:
    bus = serving()
    bus.status("0.0", replace(SERVING, ready=False, wedged=True))
    assert carried_out(bus, RESUME) == {1: 1}


def test_replicas_and_training_ranks_are_apart_in_the_status() -> None:
    bus = committed()
    heard(bus, 1)
    bus.arrive("3.1")
    shown = status(bus)
    assert {index: [line.agent for line in replica.agents] for index, replica in shown.replicas.items()} == {
        0: ["0.0", "0.1"],
        1: ["1.0"],
        3: ["3.1"],
    }
    assert [(replica.state, replica.version) for replica in shown.replicas.values()] == [
        ("serving", 1),
        ("v0, generating", 0),
        ("its primary (node rank 0) has not joined", None),
    ]
    assert list(shown.training_ranks) == ["actor.0"] and shown.training_ranks["actor.0"].state == "live"


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=PATIENT) as opened:
        yield opened


def test_a_paused_replica_is_waited_for_until_it_is_resumed(plane: ControlPlane, tmp_path: Path) -> None:
    with agents(plane.address, tmp_path, {Identity(replica=0, node_rank=0): Engine()}):
        plane.wait_for_agents(1, timeout=60).wait()
        plane.pause().wait().raise_for_failures()
        with pytest.raises(errors.AgentsMissing, match=r"0\.0 lacks: it does not serve: .*paused"):
            plane.wait_for_agents(1, timeout=0.5).wait()
        ticket = plane.wait_for_agents(1, timeout=60)
        plane.resume().wait().raise_for_failures()
        status = ticket.wait().agents[0].status
        assert status is not None and status.generating
