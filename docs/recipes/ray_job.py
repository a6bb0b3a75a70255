"""The bus in a Ray job, and replicas of one node each. Ray chooses the nodes, and replaces one that is lost.

The agent of a node launches its server there:
ray job submit -- python ray_job.py sglang python -m sglang.launch_server --model-path /models/m --tp 8 --host 0.0.0.0
"""

import logging
import os
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group

from controlplane import BusConfig, ControlPlane
from schemas import Identity, RolloutMode
from workers import Engine, EngineOptions, LaunchedEngine, ReplicaNodes, ServerProcess, make_engine, place_agents

KIND, SERVER = sys.argv[1], sys.argv[2:]
REPLICAS, NODE = int(os.environ.get("REPLICAS", "1")), {"GPU": 8}
RUN = Path.cwd()  # shared by all nodes: checkpoints, keys (`rolloutctl keys new fleet --fleet`) and the log's copy
LOCAL = Path(f"/tmp/{RUN.name}")  # on each node's disk
LOG = os.environ.get("RUN_LOG", str(LOCAL / "run.db"))


def url(_: Identity) -> str:
    """Where clients reach the server of a node, asked on that node."""
    return f"http://{ray.util.get_node_ip_address()}:30000"


def engine(identity: Identity) -> Engine:
    """The engine of one node and its server, made in the process of the node's agent."""
    options = EngineOptions(identity=identity, checkpoints=RUN, traces=RUN / "traces", url=url(identity))
    attached = make_engine(KIND, options)
    if not SERVER:
        return attached  # `tiny` has none
    return LaunchedEngine(attached, ServerProcess(SERVER, log=LOCAL / f"server-{identity.agent}.log"))


logging.basicConfig(level=logging.INFO)
ray.init()
here = ray.util.get_node_ip_address()
groups = [placement_group([NODE]) for _ in range(REPLICAS)]
with (
    ControlPlane(
        f"tcp://{here}:0", log=LOG, run="auto", config=BusConfig(log_copy=str(RUN / "log")), keys="keys"
    ) as plane,
    place_agents(
        bus=plane.address,
        replicas=[ReplicaNodes(group, gpus_per_node=8, mode=RolloutMode.STANDALONE) for group in groups],
        engine=engine,
        keys=str(RUN / "keys/issued/fleet.key"),
        endpoint=url,
    ) as agents,
):
    agents.wait_ready(timeout=1800)
    for step in range(3):
        with plane.step(step):
            ...  # roll out, learn, save ckpt/step_<n>/*.safetensors; then sync_weights(None, f"ckpt/step_{step}")
        plane.flush().wait().raise_for_failures()
