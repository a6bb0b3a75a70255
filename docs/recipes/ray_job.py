"""The bus in a Ray job, and an agent on each node, beside a server that runs there.

ray job submit -- python ray_job.py vllm http://127.0.0.1:8000
"""

import logging
import os
import sys
from pathlib import Path

import ray

from controlplane import BusConfig, ControlPlane
from schemas import Identity
from workers import Engine, EngineOptions, ReplicaNodes, make_engine, place_agents

KIND, URL = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
RUN = Path.cwd()  # shared by all nodes: checkpoints, keys (`rolloutctl keys new fleet --fleet`) and the log's copy
LOG = os.environ.get("RUN_LOG", f"/tmp/{RUN.name}/run.db")  # on this node's disk


def engine(identity: Identity) -> Engine:
    """The engine of one node, made in the process of its agent."""
    traces = RUN / "traces"
    return make_engine(KIND, EngineOptions(identity=identity, checkpoints=RUN, traces=traces, url=URL))


logging.basicConfig(level=logging.INFO)
ray.init()
nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
here = ray.util.get_node_ip_address()
with (
    ControlPlane(
        f"tcp://{here}:0", log=LOG, run="auto", config=BusConfig(log_copy=str(RUN / "log")), keys="keys"
    ) as plane,
    place_agents(
        bus=plane.address,
        replicas=[ReplicaNodes([node]) for node in nodes],
        engine=engine,
        keys=str(RUN / "keys/issued/fleet.key"),
    ) as agents,
):
    agents.wait_ready(timeout=1800)
    for step in range(3):
        with plane.step(step):
            ...  # roll out, learn, save ckpt/step_<n>/*.safetensors; then sync_weights(None, f"ckpt/step_{step}")
        plane.flush().wait().raise_for_failures()
