"""Identities of agents and the GPUs of their replicas; commands that contradict themselves."""

from typing import Literal

import msgspec
import pytest

from schemas.commands import Checkpoint, ProfilePlan, WeightSync, Window
from schemas.identity import Identity, Operation, identity_of, replica_and_node

SOURCE = Checkpoint("run/step_5")
Phase = Literal["prepare", "load", "commit", "abort"]


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


def test_every_rank_belongs_to_exactly_one_replica() -> None:
    owned = [rank for replica in range(5) for rank in Identity(replica=replica, node_rank=0, nnodes=3).global_ranks]
    assert owned == list(range(15))


def test_the_ranks_of_a_node_are_its_part_of_the_replica() -> None:
    assert list(Identity(replica=1, node_rank=1, nnodes=2, gpus_per_node=2).ranks_on_node) == [6, 7]


def test_an_agent_is_named_after_its_place_and_the_name_gives_the_place_back() -> None:
    rollout = Identity(replica=12, node_rank=3, nnodes=4)
    rank = Identity(replica=3, node_rank=0, role="actor")
    assert (rollout.agent, rank.agent) == ("12.3", "actor.3")
    assert (replica_and_node("12.3"), replica_and_node("actor.3")) == ((12, 3), None)
    assert (identity_of("12.3"), identity_of("actor.3")) == (rollout, rank)


def test_a_training_rank_is_one_process_with_one_gpu() -> None:
    with pytest.raises(ValueError, match="role actor is one process with one GPU: leave nnodes, gpus_per_node at 1"):
        Identity(replica=3, node_rank=0, role="actor", gpus_per_node=8)


@pytest.mark.parametrize("role", ["actor\n", "Actor", "", "actor.1", "\x1b[2Jactor", "a" * 33])
def test_a_role_is_a_plain_word(role: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"role"):
        msgspec.convert({"replica": 3, "node_rank": 0, "role": role}, Identity)


@pytest.mark.parametrize(("node_rank", "nnodes"), [(1, 1), (4, 2)])
def test_a_node_rank_outside_of_the_replica_is_refused(node_rank: int, nnodes: int) -> None:
    with pytest.raises(ValueError, match=rf"node_rank {node_rank} is not below nnodes {nnodes}: ranks are 0..nnodes-1"):
        Identity(replica=0, node_rank=node_rank, nnodes=nnodes)


def test_an_operation_is_found_in_a_set_by_its_value() -> None:
    assert "pause" in frozenset(Operation) and Operation.PAUSE in {"pause"}


# --- commands that contradict themselves ------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 1)])
def test_an_empty_window_is_refused_with_both_ends_named(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=rf"window \[{start}, {end}\) is empty: end must be larger than start"):
        ProfilePlan(window=Window(start, end))


@pytest.mark.parametrize(
    ("phase", "source"), [("prepare", None), ("load", SOURCE), ("commit", None), ("abort", SOURCE)]
)
def test_a_source_belongs_to_prepare_and_commit_only(phase: Phase, source: Checkpoint | None) -> None:
    with pytest.raises(ValueError, match=f"a source belongs to phases prepare and commit; this is {phase}"):
        WeightSync(phase=phase, version=1, source=source)


@pytest.mark.parametrize(("phase", "source"), [("prepare", SOURCE), ("abort", None)])
def test_a_quarantine_belongs_to_load_and_commit_only(phase: Phase, source: Checkpoint | None) -> None:
    with pytest.raises(ValueError, match=f"a quarantine belongs to phases load and commit; this is {phase}"):
        WeightSync(phase=phase, version=1, source=source, quarantine=frozenset({0}))
