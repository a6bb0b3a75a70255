"""The agents in the fleet: hello, join, silence, two agents with one identity, and records that an agent misses."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.machine.events import HelloReceived, PeerLost, Retired
from controlplane.machine.publishing import PAGE
from controlplane.machine.replicas import syncing_replicas
from schemas.agent_status import AgentStatus
from schemas.commands import Checkpoint, Command, EngineCommand, ProfileCommand, ProfilePlan, Target, WeightSync
from schemas.desired import ALL_TAGS, Committed, Desired, desired_after
from schemas.errors import CommandFailed
from schemas.identity import Identity, RolloutMode
from schemas.outcomes import Missing
from schemas.wire import Rejoin, Welcome
from tests.unit.fleets import DONE, NO, NOT_PRIMARY, SECOND_US, SETTINGS, Coordinator, lines
from tests.unit.machines import START

PAUSE, RESUME, FLUSH, SLEEP = (
    EngineCommand(operation=operation) for operation in ("pause", "resume", "flush", "sleep")
)
UNKNOWN = Rejoin(reason="the bus does not know you: say hello")


def lives(bus: Coordinator) -> dict[str, str]:
    return {name: member.state for name, member in bus.state.members.items()}


def replayed(bus: Coordinator) -> list[int]:
    return [record.seq for record in bus.replayed]


# --- hello and join ---------------------------------------------------------------------------------------------------


def test_a_hello_is_answered_with_a_welcome() -> None:
    bus = Coordinator()
    bus.hello("0.1", recorded=17)
    welcome = Welcome(run="run", publish_port=7000, heartbeat_ms=1000, lease_ms=60_000, recorded_decisions=17)
    assert bus.sent == [("0.1/a", welcome)] and lives(bus) == {"0.1": "joining"}


def test_a_hello_that_was_overtaken_by_a_later_one_of_its_agent_changes_nothing() -> None:
    """It waited in the queue of a connection that the agent has replaced since."""
    bus = Coordinator("0.0")
    hello = bus.state.members["0.0"].hello
    bus.feed(HelloReceived(at_us=0, peer="second", hello=replace(hello, attempt=2), recorded_decisions=0))
    newest = bus.state
    assert newest.members["0.0"].peer == "second"
    bus.feed(HelloReceived(at_us=0, peer="first", hello=replace(hello, attempt=1), recorded_decisions=0))
    assert bus.state == newest and bus.sent == []


def test_an_agent_is_in_no_report_before_it_joins_for_the_first_time() -> None:
    bus = Coordinator()
    bus.hello("0.0")
    bus.issue(PAUSE)
    assert [lines(report) for report in bus.reports] == [{}]
    bus.join("0.0")
    assert lives(bus) == {"0.0": "live"}
    bus.issue(RESUME)
    assert bus.reports == []


@pytest.mark.parametrize("event", ["join", "status", "resend", "answer", "lost"])
def test_an_unknown_peer_is_told_to_say_hello_and_changes_nothing(event: str) -> None:
    bus = Coordinator("0.0")
    before = bus.state
    match event:
        case "join":
            bus.join("9.0")
        case "status":
            bus.status("9.0", AgentStatus(ready=True))
        case "resend":
            bus.request_resend("9.0", 1)
        case "answer":
            bus.answer(a9_0=DONE)
        case _:
            bus.lose("9.0")
    assert bus.state == before
    assert bus.sent == ([] if event == "lost" else [("9.0/a", UNKNOWN)])


def test_another_incarnation_of_a_member_is_unknown_until_its_hello() -> None:
    bus = Coordinator("0.0")
    bus.join("0.0", "b")
    assert bus.sent == [("0.0/b", UNKNOWN)]


# --- late joiners -----------------------------------------------------------------------------------------------------


def test_a_late_joiner_gets_the_desired_state_as_of_the_head() -> None:
    bus = Coordinator("0.0")
    for body in (SLEEP, FLUSH, PAUSE):
        bus.issue(body)
    assert bus.arrive("1.0") == Desired(generation="paused", asleep=ALL_TAGS)
    assert bus.effects[0].seq == bus.state.seq == 4  # type: ignore[union-attr]


def test_a_late_joiner_gets_the_committed_weights_unless_it_never_syncs() -> None:
    bus = Coordinator("0.0")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE)
    for agent, mode in (("1.0", RolloutMode.STANDALONE), ("2.0", RolloutMode.COLOCATED)):
        colocated = mode is RolloutMode.COLOCATED
        assert bus.arrive(agent, mode=mode).committed == (None if colocated else Committed(1, Checkpoint("v1"), None))


def test_a_late_joiner_does_not_open_a_session_that_failed_to_open() -> None:
    bus = Coordinator("0.0")
    bus.issue(START)
    bus.answer(a0_0=NO)
    assert bus.arrive("0.1").profile is None


# --- silence, restarts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("why", "life"), [("silent", "gone"), ("left", "left")])
def test_a_lost_agent_is_missing_from_open_commands(why: str, life: str) -> None:
    bus = Coordinator("0.0", "1.0")
    bus.issue(PAUSE, at_us=100)
    bus.answer(a0_0=DONE)
    bus.lose("1.0", why, at_us=350)
    (report,) = bus.reports
    assert lines(report) == {"0.0": DONE, "1.0": "gone"} and report.outcomes[1].latency_us == 250
    assert lives(bus) == {"0.0": "live", "1.0": life}


# --- absent and retired -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["silent", "left"])
def test_a_report_names_what_was_away_and_since_when(why: str) -> None:
    bus = Coordinator("0.0", "1.0", "1.1")
    bus.lose("1.0", why, at_us=60 * SECOND_US)
    bus.issue(PAUSE, at_us=250 * SECOND_US)
    bus.answer(a0_0=DONE, a1_1=NOT_PRIMARY)
    (report,) = bus.reports
    assert report.missing == ("1.0",) and "1.0: missing (absent for 3 min)" in str(report)
    with pytest.raises(CommandFailed, match=r"1\.0: missing \(absent for 3 min\)"):
        report.raise_for_failures()


def test_an_agent_that_is_away_counts_from_its_loss_until_it_has_joined() -> None:
    bus = Coordinator("0.0")
    bus.lose("0.0", at_us=10 * SECOND_US)
    bus.hello("0.0", "b", at_us=30 * SECOND_US)
    bus.issue(PAUSE, at_us=31 * SECOND_US)
    assert bus.reports[0].outcomes[0].conclusion == Missing("absent", away_ms=21_000)
    bus.issue(PAUSE, at_us=9 * SECOND_US)  # asked for on another thread a moment before the loss was noticed
    assert bus.reports[0].outcomes[0].conclusion == Missing("absent", away_ms=0)
    bus.join("0.0", "b")
    bus.issue(RESUME)
    assert bus.reports == [] and bus.state.open[0].waiting == {"0.0"}


def test_the_answer_of_one_that_was_absent_changes_nothing() -> None:
    bus = Coordinator("0.0", "1.0")
    bus.lose("1.0")
    bus.issue(PAUSE)
    seq = bus.state.seq
    bus.hello("1.0")
    bus.join("1.0")
    bus.answer(seq, a1_0=DONE)
    bus.answer(seq, a0_0=DONE)
    assert [lines(report) for report in bus.reports] == [{"1.0": "absent", "0.0": DONE}]


@pytest.mark.parametrize(("places", "retired"), [(("1",), {"1.0", "1.1"}), (("1.1", "0"), {"1.1", "0.0"})])
def test_a_retired_place_is_named_no_more_and_told_to_give_up(places: tuple[str, ...], retired: set[str]) -> None:
    bus = Coordinator("0.0", "1.0", "1.1", "2.0")
    for agent in ("0.0", "1.0", "1.1"):
        bus.lose(agent)
    bus.retire(*places)
    assert [set(effect.agents) for effect in bus.of(Retired)] == [retired] == [bus.state.retired.keys()]
    bus.issue(PAUSE)
    bus.answer(a2_0=DONE)
    assert not retired & lines(bus.reports[0]).keys()
    bus.hello(min(retired), "b")
    ((_, rejoin),) = bus.sent
    assert isinstance(rejoin, Rejoin) and rejoin.give_up and "was retired from this run" in rejoin.reason
    bus.open()
    bus.hello(min(retired), "b")
    assert bus.sent == [(f"{min(retired)}/b", rejoin)], "in every later life too"


def test_a_replica_is_forgotten_with_its_last_agent_also_while_another_one_only_says_hello() -> None:
    """It was told to pause. It begins anew, and that command was not for all."""
    bus = Coordinator("0.0", "0.1", "1.0")
    bus.issue(PAUSE, target=Target(replicas=frozenset({0})))
    for place in ("0.0", "0.1"):
        bus.lose(place)
        bus.retire(place)
        bus.hello("0.0", "b", rejoin=True)
    bus.join("0.0", "b")
    assert bus.snapshot.generation == "running"


def test_a_running_agent_and_an_unknown_place_cannot_be_retired() -> None:
    bus = Coordinator("0.0", "1.0", "1.1")
    bus.lose("1.0")
    before = bus.state
    for places, why in (
        (("1",), "agent 1.1 is running: stop it first, or drain its replica. Nothing was retired"),
        (("1.0", "7"), "this run has no agent 7. Nothing was retired"),
    ):
        ticket = bus.retire(*places)
        assert bus.refused == [(ticket, "retire", why)] and bus.state is before


def test_a_replica_leaves_the_desired_state_with_its_last_agent() -> None:
    bus = Coordinator("1.0", "1.1")
    bus.lose("1.0")
    bus.lose("1.1")
    bus.retire("1.0")
    assert bus.state.desired.keys() == {1}
    bus.retire("1")
    assert bus.state.desired.keys() == set()


def test_a_second_loss_of_the_same_agent_changes_nothing() -> None:
    bus = Coordinator("0.0")
    bus.lose("0.0")
    before = bus.state
    bus.lose("0.0")
    assert bus.state is before and bus.effects == ()


def test_a_process_that_reconnects_still_owes_its_answer() -> None:
    bus = Coordinator("0.0")
    bus.issue(PAUSE)
    bus.hello("0.0")
    assert bus.reports == [] and lives(bus) == {"0.0": "joining"}
    bus.answer(a0_0=DONE)
    assert [lines(report) for report in bus.reports] == [{"0.0": DONE}]


# --- made-up places ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["silent", "left", "a restart of the bus"])
def test_a_place_where_no_agent_ever_joined_is_forgotten_with_its_agent(why: str) -> None:
    bus = Coordinator("0.0")
    before = bus.state
    bus.hello("1.0")
    bus.hello("1.0", "claims it")
    if why == "a restart of the bus":
        bus.open()
    else:
        bus.lose("1.0", why)
        assert bus.state == before
    assert (set(bus.state.members), set(bus.state.desired), bus.state.claims) == ({"0.0"}, {0}, {})


def test_a_place_where_an_agent_joined_once_is_kept() -> None:
    bus = Coordinator("0.0")
    bus.lose("0.0")
    bus.hello("0.0", "b")
    bus.feed(PeerLost(at_us=0, peer="0.0/b", reason="silent"))
    assert lives(bus) == {"0.0": "gone"}


def test_no_agent_is_welcomed_at_a_new_place_when_all_are_taken() -> None:
    bus = Coordinator("0.0", "1.0", settings=replace(SETTINGS, agents_max=2))
    bus.lose("1.0")
    before = bus.state
    bus.hello("2.0")
    ((peer, message),) = bus.sent
    assert peer == "2.0/a" and isinstance(message, Rejoin) and not message.give_up
    assert message.reason.startswith("the run has places for 2 agents (`agents_max` in BusConfig)")
    assert bus.state is before
    bus.hello("1.0", "b")
    assert isinstance(bus.sent[0][1], Welcome)


# --- two agents, one identity -----------------------------------------------------------------------------------------


def test_a_second_agent_with_one_identity_waits_while_the_holder_is_pinged() -> None:
    bus = Coordinator("0.0")
    bus.hello("0.0", "b", at_us=5)
    assert bus.pinged == ["0.0/a"]
    ((peer, message),) = bus.sent
    assert peer == "0.0/b" and isinstance(message, Rejoin) and not message.give_up
    assert message.reason.startswith("agent 0.0 is running as incarnation a on node-1, pid 42.")
    assert bus.state.members["0.0"].hello.incarnation == "a"


def test_a_holder_that_stays_alive_keeps_its_place() -> None:
    bus = Coordinator("0.0")
    over_us = (SETTINGS.agent_timeout_ms + SETTINGS.heartbeat_ms) * 1000
    give_ups = []
    for at_us in (5, 5 + over_us, 6 + over_us):
        bus.hello("0.0", "b", at_us=at_us)
        ((_, message),) = bus.sent
        assert isinstance(message, Rejoin)
        give_ups.append(message.give_up)
    assert give_ups == [False, False, True]


def test_the_claim_of_a_dead_incarnation_does_not_count_against_the_next() -> None:
    bus = Coordinator("0.0")
    bus.hello("0.0", "dead", at_us=5)
    bus.hello("0.0", "b", at_us=60_000_000)
    ((_, message),) = bus.sent
    assert isinstance(message, Rejoin) and not message.give_up


def test_a_dead_holder_loses_its_place() -> None:
    bus = Coordinator("0.0")
    bus.issue(PAUSE)
    bus.hello("0.0", "b")
    bus.lose("0.0")
    assert [lines(report) for report in bus.reports] == [{"0.0": "restarted"}]
    bus.hello("0.0", "b")
    assert isinstance(bus.sent[0][1], Welcome) and bus.state.claims == {}


def test_a_place_that_was_left_is_free_at_once() -> None:
    bus = Coordinator("0.0")
    bus.lose("0.0", "left")
    bus.hello("0.0", "b")
    assert isinstance(bus.sent[0][1], Welcome) and bus.pinged == []


# --- nodes of one replica that disagree -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"mode": RolloutMode.COLOCATED}, "mode colocated, 2 nodes, 1 GPUs on each"),
        ({"nnodes": 3}, "mode hybrid, 3 nodes, 1 GPUs on each"),
        ({"gpus": 8}, "mode hybrid, 2 nodes, 8 GPUs on each"),
    ],
)
@pytest.mark.parametrize(("first", "second"), [("0.0", "0.1"), ("0.1", "0.0")])
def test_a_node_that_disagrees_with_a_live_one_of_its_replica_is_turned_away(
    first: str, second: str, shape: dict[str, Any], words: str
) -> None:
    bus = Coordinator(first)
    over_us = (SETTINGS.agent_timeout_ms + SETTINGS.heartbeat_ms) * 1000
    for at_us in (5, 6 + over_us):
        bus.hello(second, at_us=at_us, **shape)
        ((_, message),) = bus.sent
        assert isinstance(message, Rejoin) and message.give_up == (at_us > over_us), "it may be about to restart too"
        assert f"agent {second} was given {words}, and agent {first} of the same replica mode hybrid" in message.reason
    assert set(bus.state.members) == {first} and bus.pinged == [f"{first}/a"]


def test_a_node_that_claims_to_be_the_whole_replica_is_turned_away_while_another_lives() -> None:
    bus = Coordinator("0.1")
    bus.hello("0.0", nnodes=1)
    assert isinstance(bus.sent[0][1], Rejoin)


def test_a_replica_whose_nodes_are_all_away_returns_with_another_shape_its_first_node_first() -> None:
    bus = Coordinator("0.0", "0.1")
    bus.lose("0.0")
    bus.hello("0.0", "b", gpus=8)
    ((_, message),) = bus.sent
    assert isinstance(message, Rejoin), "the second node is live, and has the old shape"
    bus.lose("0.1")
    bus.hello("0.1", "b", gpus=8)
    ((_, message),) = bus.sent
    assert isinstance(message, Rejoin) and not message.give_up, "the first node decides"
    for agent in ("0.0", "0.1"):
        bus.hello(agent, "b", gpus=8)
        assert isinstance(bus.sent[0][1], Welcome)
        bus.join(agent, "b")
    assert lives(bus) == {"0.0": "live", "0.1": "live"}


@pytest.mark.parametrize("asks", [START, EngineCommand(operation="pause")])
def test_what_is_desired_of_a_replica_follows_from_its_first_node_whatever_a_lost_one_was(asks: Command) -> None:
    """A replica of two nodes returns as a colocated one of one node, while its old second node is known."""
    bus = Coordinator("0.0", "0.1")
    for agent in ("0.0", "0.1"):
        bus.lose(agent)
    bus.sync(1)
    identity = Identity(replica=0, node_rank=0, mode=RolloutMode.COLOCATED)
    bus.hello("0.0", "b", mode=RolloutMode.COLOCATED, nnodes=1)
    bus.join("0.0", "b")
    agents = bus.snapshot
    assert agents.sync is None and agents.committed is None, "as a new replica of that kind"
    assert 0 not in syncing_replicas(bus.state, Target())
    for command in (asks, WeightSync(version=2, phase="prepare", in_flight="abort", source=Checkpoint("v2"))):
        bus.issue(command)
        agents = desired_after(agents, command, True, identity)
        assert bus.state.desired[0] == agents


# --- missed records ---------------------------------------------------------------------------------------------------


def bus_with_commands(commands: int) -> Coordinator:
    """A bus with one agent and records 1 (the epoch's start) to `commands` + 1."""
    bus = Coordinator("0.0")
    for _ in range(commands):
        bus.issue(FLUSH, timeout_ms=20_000)
    return bus


@pytest.mark.parametrize(
    ("first", "credit", "seqs"), [(1, 64, [1, 2, 3, 4]), (3, 64, [3, 4]), (2, 2, [2, 3]), (4, 1, [4])]
)
def test_a_page_has_the_missing_records_in_order_and_no_more_than_the_credit(
    first: int, credit: int, seqs: list[int]
) -> None:
    bus = bus_with_commands(3)
    bus.request_resend("0.0", first, credit)
    assert replayed(bus) == seqs


def test_an_agent_that_misses_nothing_is_sent_nothing() -> None:
    bus = bus_with_commands(3)
    bus.request_resend("0.0", 5)
    assert bus.effects == ()


def test_records_older_than_the_history_are_replaced_by_a_snapshot() -> None:
    bus = bus_with_commands(10)
    oldest = bus.state.history[0][0].seq
    assert oldest == 11 - SETTINGS.history + 1
    bus.request_resend("0.0", oldest)
    assert replayed(bus) == list(range(oldest, 12))
    bus.request_resend("0.0", oldest - 1)
    assert bus.snapshot == Desired()


def test_a_page_is_bounded_in_records_and_in_bytes() -> None:
    bus = Coordinator("0.0", settings=replace(SETTINGS, history=200))
    for _ in range(100):
        bus.issue(FLUSH)
    bus.request_resend("0.0", 1, credit=1000)
    assert replayed(bus) == list(range(1, PAGE + 1))
    for _ in range(10):
        bus.issue(ProfileCommand(action="start", step=1, plan=ProfilePlan(ranks=frozenset(range(65_536, 73_536)))))
    bus.request_resend("0.0", 102)
    assert replayed(bus) == [102, 103, 104, 105]


def test_what_was_commanded_before_the_second_node_of_a_new_kind_of_replica_is_back_is_still_desired() -> None:
    bus = Coordinator("0.0", "0.1")
    for agent in ("0.0", "0.1"):
        bus.lose(agent)
    bus.arrive("0.0", "b", mode=RolloutMode.COLOCATED)
    bus.issue(EngineCommand(operation="pause"), target=Target(replicas=frozenset({0})))
    desired = bus.state.desired[0]
    assert desired.generation == "paused"
    assert bus.arrive("0.1", "b", mode=RolloutMode.COLOCATED) == desired
    assert bus.state.desired[0] == desired


def test_a_replica_that_syncs_again_once_its_other_first_node_is_retired_begins_as_a_new_one_does() -> None:
    bus = Coordinator("0.0", "0.1", "1.0")
    bus.sync(1)
    for _ in range(3):
        bus.answer(a0_0=DONE, a0_1=NOT_PRIMARY, a1_0=DONE)
    for agent in ("0.0", "0.1"):
        bus.lose(agent)
    assert bus.arrive("0.0", mode=RolloutMode.COLOCATED).version == 0
    bus.lose("0.0", "left")
    bus.retire("0.0")
    assert bus.arrive("0.1").version == 1
