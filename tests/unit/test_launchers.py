"""An agent's place, from the environments that launchers make."""

import pytest

from schemas.errors import ConfigError
from workers.launchers import Environment, find_place

SLURM = {
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NNODES": "9",
    "SLURM_JOB_NUM_NODES": "9",
}
TORCHRUN = {"GROUP_RANK": "1", "RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
RAY_TRAIN = {"NODE_RANK": "1", "RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
LEADER = {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2", "HOSTNAME": "my-lws-3"}
WORKER = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "HOSTNAME": "my-lws-3-1"}
STATEFUL = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "rollout-5"}


@pytest.mark.parametrize(
    ("environment", "given", "place", "said"),
    [
        (
            SLURM,
            (None, None, 2),
            (1, 1, 2),
            (
                "--replica 1 from SLURM_NODEID=3 // 2",
                "--node-rank 1 from SLURM_NODEID=3 % 2",
            ),
        ),
        (
            SLURM,
            (7, None, None),
            (7, 3, 4),
            (
                "--nnodes 4 from SLURM_STEP_NUM_NODES=4",
                "--node-rank 3 from SLURM_NODEID=3",
            ),
        ),
        (
            {**SLURM, "SLURM_PROCID": "6", "SLURM_LOCALID": "1"},
            (None, 0, 1),
            (6, 0, 1),
            ("--replica 6 from SLURM_PROCID=6",),
        ),
        (
            {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2"},
            (0, 0, None),
            (0, 0, 2),
            ("--nnodes 2 from SLURM_JOB_NUM_NODES=2",),
        ),
        (
            TORCHRUN,
            (0, None, None),
            (0, 1, 2),
            (
                "--nnodes 2 from WORLD_SIZE=16 / LOCAL_WORLD_SIZE=8",
                "--node-rank 1 from GROUP_RANK=1",
            ),
        ),
        (
            {**SLURM, **TORCHRUN, "GROUP_WORLD_SIZE": "3"},
            (0, None, None),
            (0, 1, 3),
            (
                "--nnodes 3 from GROUP_WORLD_SIZE=3",
                "--node-rank 1 from GROUP_RANK=1",
            ),
        ),
        (RAY_TRAIN, (2, None, 2), (2, 1, 2), ("--node-rank 1 from NODE_RANK=1",)),
        (
            LEADER,
            (None, None, None),
            (3, 0, 2),
            (
                "--replica 3 from HOSTNAME=my-lws-3",
                "--nnodes 2 from LWS_GROUP_SIZE=2",
                "--node-rank 0 from LWS_WORKER_INDEX=0",
            ),
        ),
        (
            WORKER,
            (None, None, 2),
            (3, 1, 2),
            (
                "--replica 3 from HOSTNAME=my-lws-3-1",
                "--node-rank 1 from LWS_WORKER_INDEX=1",
            ),
        ),
        (
            {"JOB_COMPLETION_INDEX": "5", **STATEFUL},
            (None, None, 2),
            (2, 1, 2),
            (
                "--replica 2 from JOB_COMPLETION_INDEX=5 // 2",
                "--node-rank 1 from JOB_COMPLETION_INDEX=5 % 2",
            ),
        ),
        (STATEFUL, (None, 0, 1), (5, 0, 1), ("--replica 5 from HOSTNAME=rollout-5",)),
        ({"POD_NAME": "rollout-4"}, (None, 0, 1), (4, 0, 1), ("--replica 4 from POD_NAME=rollout-4",)),
        ({**STATEFUL, "POD_INDEX": "6"}, (None, 0, 1), (6, 0, 1), ("--replica 6 from POD_INDEX=6",)),
    ],
)
def test_a_launcher_says_the_place(
    environment: Environment, given: tuple[int | None, ...], place: tuple[int, ...], said: tuple[str, ...]
) -> None:
    replica, node_rank, nnodes = given
    found = find_place(environment, replica=replica, node_rank=node_rank, nnodes=nnodes)
    assert (found[:3], found.origins) == (place, said)


@pytest.mark.parametrize(
    ("environment", "given", "error"),
    [
        ({}, (None, None, 1), "SLURM_NODEID.*Give --replica N --node-rank N"),
        (
            {},
            (0, None, 1),
            "torchrun: GROUP_RANK, NODE_RANK; LeaderWorkerSet: LWS_WORKER_INDEX; Indexed Job: JOB_COMPLETION",
        ),
        ({"HOSTNAME": "node-3"}, (None, 0, 1), "no launcher says it"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "web-7d4b9c-24569"}, (None, 0, 1), "no launcher says it"),
        ({"RAY_JOB_ID": "01000000"}, (None, None, None), "workers.ray_placement.place_agents"),
        (STATEFUL, (0, 0, None), "--nnodes auto: .*StatefulSet: it has none. Give --nnodes N"),
        (SLURM, (None, None, None), "--nnodes 4 from SLURM_STEP_NUM_NODES=4.: name it by --replica N"),
        (SLURM, (None, None, 3), "SLURM_STEP_NUM_NODES=4: 4 nodes can't be divided into replicas of --nnodes 3"),
        (SLURM, (0, None, 2), "node rank 3 is not below --nnodes 2 .*SLURM_NODEID=3.*--replica auto"),
        ({**SLURM, "SLURM_LOCALID": "1"}, (0, None, None), "SLURM_LOCALID=1: Slurm started several processes"),
        ({**SLURM, "SLURM_NODEID": "x"}, (0, None, None), "SLURM_NODEID='x' in the environment is not"),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "0"}, (0, None, None), "1 to 1024 nodes, not 0 .*SLURM_STEP_NUM_NODES=0"),
        ({"POD_INDEX": "99999999"}, (None, 0, 1), "replica 99999999 is not below"),
        ({**WORKER, "HOSTNAME": "my-lws-x7k2p"}, (None, None, None), "ROLLOUTCTL_AGENT_REPLICA by the downward API"),
    ],
)
def test_what_no_launcher_says_is_an_error_that_names_the_variables(
    environment: Environment, given: tuple[int | None, ...], error: str
) -> None:
    replica, node_rank, nnodes = given
    with pytest.raises(ConfigError, match=error):
        find_place(environment, replica=replica, node_rank=node_rank, nnodes=nnodes)
