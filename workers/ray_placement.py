"""Agents as Ray actors, one on each node of each replica, for a job that has outgrown one machine.

Ray starts them on their nodes, restarts them when their process dies, and ends them with the job. It does nothing else:
commands and answers use the bus, and each agent keeps a journal on its node's disk, from which a new process continues.
Ray pickles, on its own wire, what an actor is given: the bus's address, its place, how to make its engine.

An actor that is bound to a node by its id does not come back if the node is gone. One in a bundle of a placement group
does, on a spare or a new node: Ray reserves that, and starts the actor there. The rest of its replica begins anew with
it, since the engines of one replica are one program.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import anyio
from anyio import CancelScope, to_thread
from msgspec.structs import replace

from schemas.config import AgentConfig
from schemas.errors import AgentError, AgentsMissing, ConfigError, ExtraMissing, IdentityTaken
from schemas.identity import Identity, RolloutMode
from schemas.logs import logger_of
from workers.agent import Agent
from workers.engine import Engine
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

logger = logger_of("ray")

EngineFactory = Callable[[Identity], Engine]
"""Makes the engine of one node, in the process of that node's agent."""

UNLIMITED: Final = -1
"""Ray's value for unlimited restarts and retries."""
LOOK_S: Final = 2.0
"""Seconds between two looks at where the nodes of a replica are."""


class ReplicaNodes(NamedTuple):
    """The nodes of one replica.

    Attributes:
        nodes: Ray's ids of the nodes, in order of their rank. Or a placement group with a bundle for each: Ray chooses
            the nodes, and replaces one that is lost. The agent of a bundle holds the GPUs in it.
        gpus_per_node: GPUs of this replica on each node.
        mode: How the replica shares them with the trainer.
    """

    nodes: "Sequence[str] | PlacementGroup"
    gpus_per_node: int = 1
    mode: RolloutMode = RolloutMode.HYBRID


class AgentActor:
    """One agent, as an actor. `run` is called once, and by Ray again in each new process."""

    def __init__(
        self,
        bus: str,
        identity: Identity,
        engine: EngineFactory,
        state_dir: Path | None,
        traces: NodeTraces | None,
        config: AgentConfig,
        keys: str | None,
        endpoint: Callable[[Identity], str] | None,
    ) -> None:
        self._endpoint = endpoint if identity.node_rank == 0 else None
        self._bus, self._keys, self._identity, self._engine = bus, keys, identity, engine
        self._state_dir, self._traces, self._config = state_dir, traces, config
        self._running, self._opened = asyncio.Lock(), asyncio.Event()
        self._scope: CancelScope | None = None
        self._stopped = False
        self._agent: Agent
        self._watch: asyncio.Task[None]

    def __repr__(self) -> str:
        """Return the name that Ray shows beside this actor's output."""
        return f"agent {self._identity.agent}"

    async def run(self) -> None:
        """Serve until `stop`. Raises what entering and running an `Agent` raises.

        Ray may call this twice if it lost contact with this process for a while: the second call waits for the first.
        If Ray started this process in place of another, which still holds the place on the bus, that one is waited for:
        it is on a node that Ray can't reach, and the bus can.
        """
        from ray import get_runtime_context
        from ray.util import get_current_placement_group

        async with self._running:
            with CancelScope() as self._scope:
                if not self._stopped and self._identity.nnodes > 1 and get_current_placement_group() is not None:
                    await self._begin_together()
                while not self._stopped:
                    try:
                        return await self._serve()
                    except IdentityTaken as error:
                        if not get_runtime_context().was_current_actor_reconstructed:
                            raise
                        logger.warning("%s. Ray has replaced that one: trying again", error)
                        await anyio.sleep(LOOK_S)

    async def _begin_together(self) -> None:
        """Return once the replica has all of its nodes. If one of them is lost later, this process ends."""
        nodes = await to_thread.run_sync(_all_nodes, abandon_on_cancel=True)
        self._watch = asyncio.create_task(self._end_without(nodes))

    async def _end_without(self, nodes: list[str]) -> None:
        while True:
            await anyio.sleep(LOOK_S)
            if await to_thread.run_sync(_nodes) != nodes:
                logger.warning("%r ends, and begins anew with its replica, which lost a node", self)
                os._exit(1)  # nothing is awaited: a call into an engine that lost a node may never return

    async def _serve(self) -> None:
        async with Agent(
            bus=self._bus,
            keys=self._keys.replace("{agent}", self._identity.agent) if self._keys is not None else None,
            identity=self._identity,
            engine=self._engine(self._identity),
            state_dir=self._state_dir,
            traces=self._traces,
            config=self._config,
            endpoint=self._endpoint(self._identity) if self._endpoint is not None else "",
        ) as self._agent:
            self._opened.set()
            await self._agent.run()

    async def wait_ready(self) -> None:
        """Return once this node's engine is in sync."""
        await self._opened.wait()
        await self._agent.wait_ready()

    async def stop(self) -> None:
        """Stop cleanly: the engine call in progress is awaited, and the bus is informed."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()


class Placement:
    """The agents that `place_agents` started. They end with it, or with the job.

    Attributes:
        actors: The actor handles by the agents' names, e.g. `0.1`.
    """

    def __init__(self, actors: "dict[str, ActorHandle]") -> None:
        self.actors = actors
        self._runs: dict[ObjectRef, str] = {actor.run.remote(): name for name, actor in actors.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once every node is in sync: each has joined, and the engines may serve.

        Raises AgentsMissing if they are not by then, or AgentError when an agent ended for good.
        """
        import ray

        until = time.monotonic() + timeout
        waiting = {actor.wait_ready.remote(): name for name, actor in self.actors.items()}
        while waiting:
            left_s = max(0.0, until - time.monotonic())
            done, _ = ray.wait([*self._runs, *waiting], num_returns=1, timeout=left_s)
            if not done:
                raise AgentsMissing(
                    f"{len(waiting)} of {len(self.actors)} agents were not ready after {timeout:g} s: "
                    f"{', '.join(sorted(waiting.values()))}. Read their logs and the bus's status."
                )
            (ref,) = done
            self._raise_if_ended(ref, self._runs.get(ref) or waiting[ref])
            if ref in self._runs:
                raise AgentError(f"agent {self._runs[ref]} was stopped.")
            del waiting[ref]

    def stop(self, timeout: float = 60.0) -> None:
        """Stop all agents cleanly; kill those that still wait for an engine after `timeout` seconds. Idempotent."""
        import ray

        for actor in self.actors.values():
            actor.stop.remote()
        ray.wait(list(self._runs), num_returns=len(self._runs), timeout=timeout)
        for actor in self.actors.values():
            ray.kill(actor)

    def _raise_if_ended(self, ref: "ObjectRef", name: str) -> None:
        """Raise AgentError if a call of the agent ended in an error."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            ray.get(ref)
        except RayTaskError as error:
            raise AgentError(f"agent {name} ended, and will not be restarted: {error.cause}") from error
        except RayError as error:
            message = " ".join(str(error).split())
            raise AgentError(f"agent {name} can't be kept running: {message}") from error


def place_agents(
    *,
    bus: str,
    replicas: Sequence[ReplicaNodes],
    engine: EngineFactory,
    state_dir: Path | None = None,
    traces: Path | None = None,
    finish_hook: str = "",
    config: AgentConfig | None = None,
    keys: str | None = None,
    endpoint: Callable[[Identity], str] | None = None,
) -> Placement:
    """Start one agent on each node of each replica. Returns at once; `wait_ready` waits.

    Call it in a process that has joined the cluster (`ray.init`).

    Args:
        bus: Its address, as the nodes reach it.
        replicas: The position in this sequence is the replica's index.
        engine: Makes the engine of one node.
        state_dir: Directory of the journals, on a disk of each node; None for the user's state folder there.
        traces: Root of the session directories; None to collect no traces.
        finish_hook: Command to run after the last profiled step.
        config: Settings of every agent. A place that was retired is taken up again in any case (`rejoin`).
        keys: Path of the key file on each node; `{agent}` in it stands for the agent's name, e.g. 0.1. None for what
            the environment of the nodes says. Ray only ever carries the path: no key is in an argument or its logs.
        endpoint: Where clients reach the server of a replica, http://HOST:PORT, for `ControlPlane.endpoints`. Called on
            its first node, where `ray.util.get_node_ip_address()` is the host. None if they don't.

    Raises:
        ExtraMissing: Ray is not installed.
        ConfigError: They can't be placed. Nothing was started.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ExtraMissing("agents on Ray need ray, and it is missing", "ray") from error

    if not ray.is_initialized():
        raise ConfigError("agents can't be placed: this process is in no Ray cluster. Call ray.init first.")
    places = _places(replicas, frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"]))
    actors, own = {}, replace(config or AgentConfig(), rejoin=True)
    for identity, node in places:
        options = ray.remote(AgentActor).options(
            num_cpus=0, max_restarts=UNLIMITED, max_task_retries=UNLIMITED, **_where(node, identity.node_rank)
        )
        node_traces = NodeTraces(traces, identity, finish_hook) if traces is not None else None
        actors[identity.agent] = options.remote(bus, identity, engine, state_dir, node_traces, own, keys, endpoint)
    return Placement(actors)


def _where(node: "str | PlacementGroup", rank: int) -> dict[str, Any]:
    """Ray's options for the place of an actor."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    if isinstance(node, str):
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
    strategy = PlacementGroupSchedulingStrategy(node, rank)
    return {"scheduling_strategy": strategy, "num_gpus": node.bundle_specs[rank].get("GPU", 0)}


def first_node_address() -> str:
    """Return the address of the first node of this agent's replica, where the servers of a replica meet.

    For an `EngineFactory`, which is called again where a lost node was replaced.

    Raises:
        ConfigError: The agent was not placed in a placement group.
    """
    import ray

    if ray.util.get_current_placement_group() is None:
        raise ConfigError("only an agent in a placement group finds its replica's first node: others were given it.")
    addresses: dict[str, str] = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return addresses[_all_nodes()[0]]


def _nodes() -> list[str]:
    """Ray's ids of the nodes of this process's placement group, in order; empty for one that is lost."""
    from ray.util import get_current_placement_group, placement_group_table

    bundles: dict[int, str] = placement_group_table(get_current_placement_group())["bundles_to_node_id"]
    return [bundles[rank] for rank in sorted(bundles)]


def _all_nodes() -> list[str]:
    """The same, once Ray has replaced those that were lost."""
    from ray.util import get_current_placement_group

    while not all(nodes := _nodes()):
        get_current_placement_group().wait(LOOK_S)
    return nodes


def _places(replicas: Sequence[ReplicaNodes], alive: frozenset[str]) -> "list[tuple[Identity, str | PlacementGroup]]":
    """The identity of each agent, and its node or group. Raises ConfigError."""
    from ray.util.placement_group import PlacementGroup

    if not replicas:
        raise ConfigError("there are no replicas to place agents for: name at least one.")
    places: list[tuple[Identity, str | PlacementGroup]] = []
    for index, replica in enumerate(replicas):
        group = replica.nodes if isinstance(replica.nodes, PlacementGroup) else None
        nodes = [group] * group.bundle_count if group is not None else replica.nodes
        if not nodes:
            raise ConfigError(f"replica {index} has no nodes: name at least one, by its Ray id.")
        for rank, node in enumerate(nodes):
            if group is None and node not in alive:
                raise ConfigError(
                    f"replica {index} names node {node!r}, which is not one of this cluster's: "
                    f"{', '.join(sorted(alive))}. `ray.nodes()` lists them as NodeID."
                )
            identity = Identity(
                replica=index,
                node_rank=rank,
                nnodes=len(nodes),
                gpus_per_node=replica.gpus_per_node,
                mode=replica.mode,
            )
            places.append((identity, node))
    return places
