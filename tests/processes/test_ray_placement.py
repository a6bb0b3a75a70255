"""Agents placed by a real Ray on the nodes of a real cluster, two of them on this machine, with a real bus."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from controlplane import ControlPlane
from controlplane.bus.key_folder import KeyFolder
from schemas.commands import ProfilePlan
from schemas.config import AgentConfig, BusConfig
from schemas.errors import AgentError, AgentsMissing, ConfigError, EngineError
from schemas.identity import Identity, RolloutMode
from schemas.outcomes import Acted
from tests.engines.verl_servers import SGLangHttpServer
from tests.running import python
from tests.unit.small_bus import Engine
from tests.waiting import wait_until
from workers.engines.tiny.engine import TinyEngine
from workers.engines.verl.engine import VerlEngine
from workers.ray_placement import EngineFactory, Placement, ReplicaNodes, first_node_address, place_agents

pytestmark = pytest.mark.xdist_group("ray")

QUICK = BusConfig(head_interval_ms=50, heartbeat_ms=100, agent_timeout_ms=2000, retransmit_ms=200)
HASTY = AgentConfig(hello_retry_ms=20, observe_ms=50)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    node = {"num_cpus": 1, "object_store_memory": 100_000_000}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.add_node(**node)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> list[str]:
    """Ray's ids of the cluster's nodes."""
    return [node.node_id for node in cluster.list_all_nodes()]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane("tcp://127.0.0.1:0", log=tmp_path / "run.db", config=QUICK) as opened:
        yield opened


def small(_: Identity) -> Engine:
    return Engine()


def place(plane: ControlPlane, folder: Path, *replicas: ReplicaNodes, engine: EngineFactory = small) -> Placement:
    return place_agents(bus=plane.address, replicas=replicas, engine=engine, state_dir=folder / "state", config=HASTY)


def process(actor: Any) -> tuple[int, str]:
    """The pid of an actor's process, and the node it runs on."""
    found: tuple[int, str] = ray.get(
        actor.__ray_call__.remote(lambda _: (os.getpid(), ray.get_runtime_context().get_node_id()))
    )
    return found


def incarnations(plane: ControlPlane) -> dict[str, str]:
    return {agent.agent: agent.incarnation for agent in plane.status().agents}


def differs(plane: ControlPlane, before: dict[str, str]) -> bool:
    return incarnations(plane) != before


def conditions(plane: ControlPlane) -> dict[str, str]:
    """What the live agents say of themselves."""
    return {agent.agent: agent.condition for agent in plane.status().agents if agent.state == "live"}


def test_each_agent_lands_on_its_node_and_a_command_reaches_all(
    plane: ControlPlane, tmp_path: Path, nodes: list[str]
) -> None:
    wide = ReplicaNodes(nodes, gpus_per_node=4)
    judge = ReplicaNodes(nodes[1:], mode=RolloutMode.COLOCATED)
    with place(plane, tmp_path, wide, judge) as placement:
        placement.wait_ready()
        plane.wait_for_agents(3).wait()
        assert {name: process(actor)[1] for name, actor in placement.actors.items()} == {
            "0.0": nodes[0],
            "0.1": nodes[1],
            "1.0": nodes[1],
        }
        paused = plane.pause().wait()
        assert (sorted(paused.acted), paused.skipped) == (["0.0", "1.0"], ("0.1",))
        placement.stop()
        assert {agent.agent: agent.state for agent in plane.status().agents} == dict.fromkeys(
            ("0.0", "0.1", "1.0"), "left"
        )
        with pytest.raises(AgentError, match="was stopped|can't be kept running"):
            placement.wait_ready()


def test_a_program_that_a_test_starts_joins_no_cluster_of_other_tests(nodes: list[str]) -> None:
    found = "from ray._private.services import canonicalize_bootstrap_address as found; print(found(None))"
    assert python("-c", found).stdout == "None\n"  # what `ray.init()` goes by: it begins a cluster of its own


@pytest.mark.long
def test_an_agent_whose_process_is_killed_comes_back_and_the_fleet_is_complete_again(
    plane: ControlPlane, tmp_path: Path, nodes: list[str]
) -> None:
    def tiny(identity: Identity) -> TinyEngine:
        return TinyEngine(identity, checkpoints=tmp_path, traces=tmp_path / "traces")

    with place(plane, tmp_path, ReplicaNodes(nodes), engine=tiny) as placement:
        placement.wait_ready()
        plane.wait_for_agents(2).wait()
        assert plane.pause().wait().acted == ("0.0",)
        for name in ("0.0", "0.1"):
            before, (pid, node) = incarnations(plane), process(placement.actors[name])
            os.kill(pid, signal.SIGKILL)
            again = process(placement.actors[name])
            assert (again[0] != pid, again[1]) == (True, node)
            wait_until(partial(differs, plane, before))
            wait_until(lambda: conditions(plane) == {"0.0": "v0, paused", "0.1": "follower"})  # as the trainer wants
            after = incarnations(plane)
            assert {entry for entry in after if after[entry] != before[entry]} == {name}
        # Its engine died with it, and begins as the trainer wanted it: paused. What is asked next reaches it.
        resumed = plane.resume().wait()
        assert (resumed.acted, resumed.skipped) == (("0.0",), ("0.1",))


@pytest.mark.long
def test_placed_agents_command_the_servers_of_their_nodes_across_a_death(
    plane: ControlPlane, tmp_path: Path, nodes: list[str]
) -> None:
    """Two nodes of one of verl's replicas, found by the names that verl gives them. The profile outlives an agent."""

    def verl(identity: Identity) -> VerlEngine:
        name = f"sglang_server_{identity.replica}_{identity.node_rank}"
        return VerlEngine(name, identity, traces=tmp_path / "traces")

    servers = []
    for rank, node in enumerate(nodes):
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "name": f"sglang_server_0_{rank}", "scheduling_strategy": there}
        server = ray.remote(SGLangHttpServer).options(**options).remote("colocated", rank, 0, str(tmp_path / "save"))
        servers.append(server)
    ray.get([server.launch_server.remote() for server in servers])
    with place(plane, tmp_path, ReplicaNodes(nodes), engine=verl) as placement:
        placement.wait_ready()
        plane.wait_for_agents(2).wait()
        started = plane.start_profile(3, ProfilePlan()).wait()
        os.kill(process(placement.actors["0.0"])[0], signal.SIGKILL)
        placement.wait_ready()
        plane.wait_for_agents(2).wait()
        stopped = plane.stop_profile(3).wait()
        for report in (started, stopped):
            assert (report.acted, report.skipped) == (("0.0",), ("0.1",))
        (outcome,) = (entry.conclusion for entry in stopped.outcomes if entry.agent == "0.0")
        assert isinstance(outcome, Acted)
        assert [trace.path for trace in outcome.traces] == ["global_step_3/replica_0/1-TP-0.trace.json.gz"]
    called = [ray.get(server.__ray_call__.remote(lambda own: own.called)) for server in servers]
    assert called == [["resume_generation", "start_profile", "stop_profile"], []], (
        "it resumes a server that it first meets"
    )


def test_what_ends_an_agent_for_good_is_reported(plane: ControlPlane, tmp_path: Path, nodes: list[str]) -> None:
    def none(identity: Identity) -> Engine:
        raise EngineError(f"no engine for {identity.agent}")

    here = ReplicaNodes(nodes[:1])
    with (
        place(plane, tmp_path, here, engine=none) as failing,
        pytest.raises(AgentError, match=r"agent 0\.0 ended, and will not be restarted: no engine for 0\.0"),
    ):
        failing.wait_ready()
    with place(plane, tmp_path / "one", here) as first:
        first.wait_ready()  # before the second is started, or the two would race for the place
        with (
            place(plane, tmp_path / "two", here) as second,
            pytest.raises(AgentError, match=r"agent 0\.0 ended, .*running as incarnation"),
        ):
            second.wait_ready()


def test_an_agent_without_a_bus_is_named_when_time_is_up(tmp_path: Path, nodes: list[str]) -> None:
    bus, replicas = f"ipc://{tmp_path}/no-bus", [ReplicaNodes(nodes[:1])]
    with (
        place_agents(bus=bus, replicas=replicas, engine=small, state_dir=tmp_path) as placement,
        pytest.raises(AgentsMissing, match=r"1 of 1 agents were not ready after 0\.2 s: 0\.0\."),
    ):
        placement.wait_ready(0.2)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([], "there are no replicas"),
        ([ReplicaNodes([])], "replica 0 has no nodes"),
        ([ReplicaNodes(["a" * 56])], "not one of this cluster's"),
    ],
)
def test_nothing_is_started_where_it_cannot_run(
    cluster: Cluster, plane: ControlPlane, tmp_path: Path, replicas: list[ReplicaNodes], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place(plane, tmp_path, *replicas)
    assert plane.status().agents == ()


@pytest.mark.long
def test_an_agent_in_a_placement_group_holds_the_gpus_of_its_bundle(
    cluster: Cluster, plane: ControlPlane, tmp_path: Path
) -> None:
    with_gpus = cluster.add_node(num_cpus=1, num_gpus=4, object_store_memory=100_000_000)
    group = placement_group([{"CPU": 1, "GPU": 2}])
    with place(plane, tmp_path, ReplicaNodes(group, gpus_per_node=2)) as placement:
        placement.wait_ready()
        plane.wait_for_agents(1).wait()
        assert process(placement.actors["0.0"])[1] == with_gpus.node_id
        held = ray.get(placement.actors["0.0"].__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]))
        assert len(held.split(",")) == 2
    remove_placement_group(group)
    cluster.remove_node(with_gpus)
    with pytest.raises(ConfigError, match="in a placement group"):
        first_node_address()


@pytest.mark.long
def test_an_agent_whose_node_is_gone_is_gone_too(
    cluster: Cluster, plane: ControlPlane, tmp_path: Path, nodes: list[str]
) -> None:
    third = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    with place(plane, tmp_path, ReplicaNodes([nodes[0], third.node_id])) as placement:
        placement.wait_ready()
        plane.wait_for_agents(2).wait()
        cluster.remove_node(third)
        with pytest.raises(AgentError, match=r"agent 0\.1 can't be kept running"):
            while True:
                placement.wait_ready()
        assert plane.pause().wait().acted == ("0.0",)


@pytest.mark.long
def test_agents_on_ray_bring_the_keys_of_their_nodes(nodes: list[str], tmp_path: Path) -> None:
    """Ray carries the path of a key file, and no key."""
    folder = KeyFolder(tmp_path / "keys")
    folder.make_server()
    for place_of in ("0.0", "0.1"):
        folder.add(place_of, "agent", (place_of,))
    with ControlPlane("tcp://0.0.0.0:0", log=tmp_path / "run.db", config=QUICK, keys=folder.path) as plane:
        replica = ReplicaNodes(nodes)
        with place_agents(
            bus=plane.address.replace("0.0.0.0", "127.0.0.1"),
            replicas=[replica],
            engine=small,
            state_dir=tmp_path / "state",
            config=HASTY,
            keys=f"{tmp_path}/keys/issued/{{agent}}.key",
        ) as placement:
            placement.wait_ready()
            assert plane.flush().wait(60).acted == ("0.0",)
