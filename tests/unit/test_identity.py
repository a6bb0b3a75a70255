"""The place of an agent in the fleet, and which GPUs are its replica's."""

import pytest

from schemas.commands import ProfilePlan, WeightSync, Window
from schemas.identity import Identity, Operation
from tests.unit.machines import sync


@pytest.mark.parametrize(
    ("replica", "node_rank", "nnodes", "gpus", "ranks"),
    [
        (0, 0, 1, 1, [0]),
        (3, 0, 1, 2, [6, 7]),
        (0, 1, 2, 2, [0, 1, 2, 3]),
        (1, 0, 2, 2, [4, 5, 6, 7]),
        (1, 1, 2, 2, [4, 5, 6, 7]),
    ],
)
def test_a_replica_owns_the_ranks_of_all_its_nodes(
    replica: int, node_rank: int, nnodes: int, gpus: int, ranks: list[int]
) -> None:
    place = Identity(replica=replica, node_rank=node_rank, nnodes=nnodes, gpus_per_node=gpus)
    assert list(place.global_ranks) == ranks


def test_replicas_share_no_rank_and_leave_none_out() -> None:
    owned = [rank for replica in range(5) for rank in Identity(replica=replica, node_rank=0, nnodes=3).global_ranks]
    assert owned == list(range(15))


def test_an_agent_is_called_by_its_place() -> None:
    assert Identity(replica=12, node_rank=3, nnodes=4).agent == "12.3"


@pytest.mark.parametrize(("node_rank", "nnodes"), [(1, 1), (4, 2)])
def test_a_node_that_its_replica_does_not_have_is_refused(node_rank: int, nnodes: int) -> None:
    with pytest.raises(ValueError, match=rf"node_rank {node_rank} is not below nnodes {nnodes}: ranks are 0..nnodes-1"):
        Identity(replica=0, node_rank=node_rank, nnodes=nnodes)


def test_an_operation_is_found_in_a_set_by_its_word() -> None:
    assert "pause" in frozenset(Operation) and Operation.PAUSE in {"pause"}


# --- commands that contradict themselves ------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 1)])
def test_an_empty_window_is_refused_by_both_its_ends(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=rf"window \[{start}, {end}\) is empty: end must be larger than start"):
        ProfilePlan(window=Window(start, end))


@pytest.mark.parametrize("phase", ["load", "abort"])
def test_a_source_belongs_to_prepare_and_commit(phase: str) -> None:
    with pytest.raises(ValueError, match=f"a source belongs to phases prepare and commit; this is {phase}"):
        WeightSync(phase="load" if phase == "load" else "abort", version=1, source=sync("prepare").source)


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_prepare_and_commit_need_a_source(phase: str) -> None:
    with pytest.raises(ValueError, match=f"a source belongs to phases prepare and commit; this is {phase}"):
        WeightSync(phase="prepare" if phase == "prepare" else "commit", version=1)


@pytest.mark.parametrize("phase", ["prepare", "abort"])
def test_a_quarantine_belongs_to_load_and_commit(phase: str) -> None:
    with pytest.raises(ValueError, match=f"a quarantine belongs to phases load and commit; this is {phase}"):
        sync(phase, quarantine=frozenset({0}))
