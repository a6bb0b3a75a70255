"""The plan of a game day: what is due where and when, and what is wrong with a plan."""

import pytest

from schemas.commands import AdapterSync, AdapterVersion, Checkpoint, EngineCommand, WeightSync
from schemas.desired import Desired
from schemas.errors import ConfigError
from schemas.events import CommandReceived, Load, Perform, Resume, SnapshotReceived
from schemas.fault_plan import FaultPlan, Occasion, described, is_due, occasions, parse_plan
from schemas.identity import Identity
from workers.faults import FaultInjector


def planned(text: str) -> FaultPlan:
    return parse_plan("".join(f"[[fault]]\n{part}\n" for part in text.split("---")))


def due(text: str) -> list[Occasion]:
    """The moments of a sync at which the only fault of a plan is due."""
    (fault,) = planned(text).fault
    moments = (
        Occasion(0),
        Occasion(1, "prepare", 3),
        Occasion(2, "load", 3),
        Occasion(7, "load", 3, "load"),
        Occasion(3, "commit", 3),
        Occasion(8, "commit", 3, "resume"),
        Occasion(4, "prepare", 4),
    )
    return [moment for moment in moments if is_due(fault, moment)]


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("name='f'\nwhat='kill_agent'", [Occasion(0)]),
        ("name='f'\nwhat='kill_agent'\nversion=3", [Occasion(1, "prepare", 3)]),
        ("name='f'\nwhat='kill_agent'\nphase='load'", [Occasion(2, "load", 3)]),
        ("name='f'\nwhat='kill_agent'\nphase='prepare'\nversion=4", [Occasion(4, "prepare", 4)]),
        ("name='f'\nwhat='kill_agent'\ncall='resume'", [Occasion(8, "commit", 3, "resume")]),
        ("name='f'\nwhat='refuse'\nversion=3", [Occasion(7, "load", 3, "load"), Occasion(8, "commit", 3, "resume")]),
        ("name='f'\nwhat='refuse'\nphase='load'", [Occasion(7, "load", 3, "load")]),
        ("name='f'\nwhat='refuse'\nversion=5", []),
    ],
)
def test_a_fault_is_due_when_all_that_is_given_comes_together(text: str, when: list[Occasion]) -> None:
    assert due(text) == when


def test_a_decision_is_a_snapshot_a_phase_or_a_call() -> None:
    load = WeightSync(phase="load", version=3)
    received = CommandReceived(at_ms=0, epoch=1, origin=1, seq=9, ttl_ms=1, command=load)
    call = Perform(call_id=4, call=Load(version=3, source=Checkpoint("a"), manifest=None))
    assert list(occasions(received, [call], load)) == [Occasion(9, "load", 3), Occasion(4, "load", 3, "load")]
    snapshot = SnapshotReceived(at_ms=0, epoch=1, seq=0, desired=Desired())
    assert list(occasions(snapshot, [], None)) == [Occasion(0)]
    resume = CommandReceived(at_ms=0, epoch=1, origin=1, seq=9, ttl_ms=1, command=EngineCommand(operation="resume"))
    adapter = AdapterSync(phase="load", adapter=AdapterVersion(name="policy", version=3, path="a"))
    received = CommandReceived(at_ms=0, epoch=1, origin=1, seq=9, ttl_ms=1000, command=adapter)
    assert list(occasions(received, [call], adapter)) == [Occasion(9, "load", 3), Occasion(4, "load", 3, "load")]
    assert list(occasions(resume, [Perform(call_id=5, call=Resume())], resume.command)) == [
        Occasion(5, None, 0, "resume")
    ]


def test_each_agent_finds_its_own_faults() -> None:
    plan = planned(
        "name='a'\nwhat='kill_agent'---name='b'\nwhat='kill_agent'\nreplicas=[1]---"
        "name='c'\nwhat='kill_agent'\nnode=1---name='d'\nwhat='kill_trainer'\nseconds=1\nversion=1"
    )

    def names(replica: int, node: int = 0) -> list[str]:
        return [fault.name for fault in plan.of(Identity(replica=replica, node_rank=node, nnodes=2))]

    assert [names(0), names(1), names(0, node=1)] == [["a"], ["a", "b"], ["c"]]


def test_a_fault_is_of_engines_or_of_the_training_ranks_that_its_role_names() -> None:
    plan = planned("name='e'\nwhat='kill_agent'---name='r'\nwhat='kill_agent'\nrole='actor'\nreplicas=[1]")
    agents = [
        Identity(replica=rank, node_rank=0, role=role) for role in ("rollout", "actor", "critic") for rank in (0, 1)
    ]
    assert [fault.name for agent in agents for fault in plan.of(agent)] == ["e", "e", "r"]
    assert plan.of(agents[3]) == plan.fault[1:]


def test_the_seed_picks_replicas_and_chances_and_the_same_seed_the_same() -> None:
    def picked(seed: int) -> list[int]:
        plan = parse_plan(f"seed={seed}\n[[fault]]\nname='a'\nwhat='kill_agent'\nreplicas=[0,1,2,3,4,5,6,7]\nrandom=3")
        return [replica for replica in range(8) if plan.of(Identity(replica=replica, node_rank=0))]

    assert picked(1) == picked(1)
    assert len({tuple(picked(seed)) for seed in range(9)}) > 1
    assert {len(picked(seed)) for seed in range(9)} == {3}

    plan = planned("name='a'\nwhat='refuse'\nrate=0.25\ntimes=0")
    happened = [
        plan.happens(plan.fault[0], Identity(replica=0, node_rank=0), Occasion(n, call="load")) for n in range(400)
    ]
    assert 60 < sum(happened) < 140
    assert happened == [
        plan.happens(plan.fault[0], Identity(replica=0, node_rank=0), Occasion(n, call="load")) for n in range(400)
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name='a'\nwhat='kill_agnt'", "fault[0].what is 'kill_agnt': allowed is one of"),
        ("name='a'\nwhat='kill_agent'\nreplica=1", "fault[0].replica is unknown; did you mean replicas?"),
        ("what='kill_agent'", "fault[0].name is missing"),
        ("name='a'\nwhat='stop_agent'", "say for how many seconds"),
        ("name='a'\nwhat='kill_agent'\nseconds=1", "it takes no seconds"),
        ("name='a'\nwhat='refuse'\ncall='laod'", "call is 'laod': allowed is one of"),
        ("name='a'\nwhat='kill_agent'\nrandom=2\nreplicas=[1]", "random is 2 and replicas names 1"),
        ("name='a'\nwhat='kill_agent'---name='a'\nwhat='kill_agent'", "another fault has this name"),
        ("name='a'\nwhat='kill_agent'\nconnection='control'", "connection has no effect"),
        ("name='a'\nwhat='kill_trainer'\nseconds=1\nreplicas=[1]", "the trainer has no replicas"),
        ("name='a'\nwhat='kill_trainer'\nseconds=1", "say a version or a phase"),
        ("name='a'\nwhat='kill_trainer'\nseconds=1\nversion=1\nrate=0.5", "the trainer is killed once"),
        ("name='a'\nwhat='kill_trainer'\nseconds=1\nversion=1\ntimes=0", "the trainer is killed once"),
        ("name='a'\nwhat='slow'\nseconds=1\nafter_s=2", "after_s has no effect on 'slow'"),
        ("name='a'\nwhat='refuse'\nrate=0.0", "rate is 0.0: allowed is a number above 0, at most 1"),
        *(
            (f"name='a'\nrole='actor'\nwhat='{what}'\nseconds=1", f"what is '{what}': a training rank has no engine")
            for what in ("kill_engine", "kill_both", "stop_engine", "label")
        ),
        ("name='a'\nrole='actor'\nwhat='kill_agent'\nnode=1", "node is 1: a training rank has one node"),
        ("name='a'\nrole='actor'\nwhat='refuse'\ncall='load'", "call is 'load': training ranks are asked for profiles"),
        ("name='a'\nrole='actor 1'\nwhat='kill_agent'", "fault[0].role is 'actor 1'"),
        ("name='a'\nrole='actor'\nwhat='kill_trainer'\nseconds=1\nversion=1", "the trainer has no replicas"),
        ("name=", "the plan is not TOML"),
    ],
)
def test_a_wrong_plan_is_refused_with_what_is_allowed(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r".") as refused:
        planned(text)
    assert says in str(refused.value)


def test_a_fault_of_a_server_needs_one_that_the_agent_launches() -> None:
    plan = planned("name='a'\nwhat='kill_engine'")
    with pytest.raises(ConfigError, match=r"kill_engine needs a server that this agent launches"):
        FaultInjector(plan, Identity(replica=0, node_rank=0))


def test_a_plan_is_explained_in_plain_sentences() -> None:
    plan = planned(
        "name='a'\nwhat='cut'\nseconds=3\nconnection='commands'\nreplicas=[1,2]\nphase='load'\nafter_s=0.5---"
        "name='b'\nwhat='lose_answer'\ncall='sleep'\nrate=0.5\ntimes=2---name='c'\nwhat='kill_agent'---"
        "name='d'\nrole='actor'\nwhat='refuse'\nreplicas=[3]"
    )
    cut, lost, killed, refused = (described(plan, fault) for fault in plan.fault)
    assert cut == "a: cut (3 s), commands only, on replicas 1, 2, 0.5 s after the load of a sync, once for each agent"
    assert lost == (
        "b: lose_answer, on every replica, at the call sleep, with a chance of 0.5 each time, "
        "at most 2 times for each agent"
    )
    assert killed == "c: kill_agent, on every replica, at joining the run, once for each agent"
    assert refused == "d: refuse, on actor rank 3, at a call into the profiler, once for each agent"
