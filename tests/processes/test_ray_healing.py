"""Nodes of a real Ray that are lost under traffic: Ray replaces them, and the fleet is whole again without a hand."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group

from controlplane import ControlPlane
from schemas.commands import Checkpoint
from schemas.config import AgentConfig, BusConfig
from schemas.errors import EngineError
from schemas.identity import Identity
from tests.running import typed
from tests.waiting import wait_until
from workers.engines.tiny.engine import TinyEngine
from workers.engines.tiny.model import TinyConfig, TinyModel, save
from workers.engines.tiny.server import TinyClient
from workers.ray_placement import EngineFactory, Placement, ReplicaNodes, first_node_address, place_agents
from workers.server.launch import LaunchedEngine, ServerProcess

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.long]

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=2000, retransmit_ms=200)
HASTY = AgentConfig(hello_retry_ms=20, observe_ms=50)
SMALL = {"num_cpus": 1, "object_store_memory": 80_000_000}
NOTICED_SOON = {
    **{"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 2000},
}
"""Ray takes a node for dead after five checks in a row that failed: by default after 15 s, or 65 s if it hangs."""
TOKENS = 8


class Nodes:
    """Nodes for rollouts: each has an address and a disk of its own, and room for one bundle."""

    def __init__(self, folder: Path) -> None:
        head = {**SMALL, "include_dashboard": False, "_system_config": NOTICED_SOON}
        self._cluster, self._folder = Cluster(initialize_head=True, head_node_args=head), folder
        self._nodes: dict[str, Any] = {}
        ray.init(address=self._cluster.address, log_to_driver=False)

    def add(self) -> str:
        """Start one. Returns Ray's id of it."""
        address = f"127.0.1.{len(self._nodes) + 1}"
        disk = {"XDG_STATE_HOME": str(self._folder / address)}
        node = self._cluster.add_node(**SMALL, resources={"rollout": 1}, node_ip_address=address, env_vars=disk)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node: str) -> None:
        """Kill all of its processes, so that none of them ends in good order."""
        self._cluster.remove_node(self._nodes[node], allow_graceful=False)

    def freeze(self, node: str) -> None:
        """Stop the process of Ray on it, and no agent: the node is dead to Ray, and alive to the bus."""
        (raylet,) = self._nodes[node].all_processes[PROCESS_TYPE_RAYLET]
        os.kill(raylet.process.pid, signal.SIGSTOP)

    def address(self, node: str) -> str:
        return str(self._nodes[node].node_ip_address)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


class Traffic:
    """A client that sends one request after the other, and counts what became of them."""

    def __init__(self, front: str) -> None:
        self.answered = self.failed = 0
        self._client, self._ending = TinyClient(front), threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        while not self._ending.is_set():
            try:
                self.answered += len(self._client.generate([[3]], TOKENS)[0].tokens) == TOKENS
            except EngineError:
                self.failed += 1
                self._ending.wait(0.05)

    def require_more(self) -> None:
        """Wait until more of them are answered."""
        before = self.answered
        wait_until(lambda: self.answered > before + 3)

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


def group(size: int) -> PlacementGroup:
    return placement_group([{"rollout": 1}] * size, strategy="STRICT_SPREAD")


def place_of(placement: Placement, agent: str) -> tuple[str, int]:
    """The node that an agent's actor is on, and its process."""
    found: tuple[str, int] = ray.get(
        placement.actors[agent].__ray_call__.remote(
            lambda _: (ray.get_runtime_context().get_node_id(), os.getpid()),
        )
    )
    return found


def incarnations(plane: ControlPlane) -> dict[str, str]:
    return {agent.agent: agent.incarnation for agent in plane.status().agents}


SERVER = ("sleep", f"{86400 + os.getpid()}")
"""A server that does nothing, and that no other test launches."""


def launched(folder: Path) -> EngineFactory:
    """What makes an engine with a server, and writes down where the servers of its replica meet."""
    server = SERVER

    def engine(identity: Identity) -> LaunchedEngine:
        (folder / f"met-{identity.agent}").write_text(first_node_address())
        front = f"ipc://{folder}/front-{identity.replica}"
        tiny = TinyEngine(identity, checkpoints=folder, traces=folder / "traces", serve=front)
        log = Path(os.environ["XDG_STATE_HOME"]) / f"server-{identity.agent}.log"
        return LaunchedEngine(tiny, ServerProcess(server, log=log, name=f"server of agent {identity.agent}"))

    return engine


def servers() -> int:
    return sum(tuple(process.info["cmdline"] or ()) == SERVER for process in psutil.process_iter(["cmdline"]))


def test_a_node_that_is_lost_is_replaced_with_all_of_its_replica_and_no_other_is_touched(
    tmp_path: Path, nodes: Nodes
) -> None:
    for version in (1, 2, 3, 4):
        save(TinyModel(TinyConfig(), seed=version), tmp_path / f"v{version}")

    def endpoint(identity: Identity) -> str:
        return f"http://{ray.util.get_node_ip_address()}:{8000 + identity.replica}"

    for _ in range(4):
        nodes.add()
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK, checkpoints=tmp_path) as plane,
        place_agents(
            bus=plane.address,
            replicas=[ReplicaNodes(group(2)), ReplicaNodes(group(1))],
            engine=launched(tmp_path),
            config=HASTY,
            endpoint=endpoint,
        ) as placement,
    ):
        placement.wait_ready(120)
        plane.wait_for_agents(3).wait()
        assert plane.sync_weights(1, Checkpoint("v1")).wait().status == "committed"
        before, known = {agent: place_of(placement, agent) for agent in placement.actors}, incarnations(plane)
        lost, other = Traffic(f"ipc://{tmp_path}/front-0"), Traffic(f"ipc://{tmp_path}/front-1")
        lost.require_more()

        nodes.kill(before["0.0"][0])  # there is a spare
        wait_until(lambda: plane.serving() == {1: 1})
        assert plane.sync_weights(2, Checkpoint("v2"), quorum=1).wait().status == "committed"
        wait_until(lambda: plane.serving() == {0: 2, 1: 2}, 120)
        plane.wait_for_agents(3).wait()
        after, again = {agent: place_of(placement, agent) for agent in placement.actors}, incarnations(plane)
        assert after["0.0"][0] not in {node for node, _ in before.values()}
        assert after["0.1"][0] == before["0.1"][0] and after["0.1"][1] != before["0.1"][1]
        assert after["1.0"] == before["1.0"]
        assert {agent for agent in again if again[agent] != known[agent]} == {"0.0", "0.1"}
        first = nodes.address(after["0.0"][0])
        assert "launch 1 at" in (tmp_path / first / "server-0.0.log").read_text()
        wait_until(lambda: servers() == 3)  # that of the lost node has ended with its agent
        assert {(tmp_path / f"met-{agent}").read_text() for agent in ("0.0", "0.1")} == {first}
        assert plane.endpoints()[0] == f"http://{first}:8000"
        plane.sync_weights(3, Checkpoint("v3")).wait().raise_for_failures()
        lost.require_more()
        assert lost.failed and not other.failed

        nodes.kill(after["1.0"][0])  # there is no spare: Ray waits for a new node
        wait_until(lambda: plane.serving() == {0: 3})
        new = nodes.add()
        wait_until(lambda: plane.serving() == {0: 3, 1: 3}, 120)
        assert place_of(placement, "1.0")[0] == new
        assert {agent: place_of(placement, agent) for agent in ("0.0", "0.1")} == {a: after[a] for a in ("0.0", "0.1")}
        plane.sync_weights(4, Checkpoint("v4")).wait().raise_for_failures()
        other.require_more()
        lost.end()
        other.end()
    verified = typed("log", "verify", tmp_path / "run.db")
    assert verified.returncode == 0, verified.stdout


def test_an_agent_whose_node_only_ray_has_lost_keeps_its_place_until_it_ends(tmp_path: Path, nodes: Nodes) -> None:
    def engine(identity: Identity) -> TinyEngine:
        with (tmp_path / "made").open("a") as made:
            made.write(f"{ray.get_runtime_context().get_node_id()}\n")
        return TinyEngine(identity, checkpoints=tmp_path, traces=tmp_path / "traces")

    frozen = nodes.add()
    with (
        ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK) as plane,
        place_agents(bus=plane.address, replicas=[ReplicaNodes(group(1))], engine=engine, config=HASTY) as placement,
    ):
        placement.wait_ready(120)
        plane.wait_for_agents(1).wait()
        spare, before = nodes.add(), incarnations(plane)
        nodes.freeze(frozen)
        wait_until(lambda: (tmp_path / "made").read_text().split() == [frozen, spare, spare], 120)
        assert incarnations(plane) == before and plane.serving() == {0: 0}
        nodes.kill(frozen)
        wait_until(lambda: incarnations(plane) != before and plane.serving() == {0: 0}, 120)
        assert place_of(placement, "0.0")[0] == spare
