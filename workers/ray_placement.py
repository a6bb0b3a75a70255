"""Agents as Ray actors, one on each node of each replica, for a job that has outgrown one machine.

Ray starts them on their nodes, restarts them when their process dies, and ends them with the job. It does nothing else:
commands and answers use the bus, and each agent keeps a journal on its node's disk, from which a new process continues.
Ray pickles, on its own wire, what an actor is given: the bus's address, its place, how to make its engine.

An actor is bound to its node, so it does not come back if the node is gone: its replica has lost that node too.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from anyio import CancelScope

from schemas.config import AgentConfig
from schemas.errors import AgentError, AgentsMissing, ConfigError, ExtraMissing
from schemas.identity import Identity, RolloutMode
from workers.agent import Agent
from workers.engine import Engine
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

EngineFactory = Callable[[Identity], Engine]
"""Makes the engine of one node, in the process of that node's agent."""

UNLIMITED: Final = -1
"""Ray's value for unlimited restarts and retries."""


class ReplicaNodes(NamedTuple):
    """The nodes of one replica.

    Attributes:
        nodes: Ray's ids of the nodes, in order of their rank.
        gpus_per_node: GPUs of this replica on each node.
        mode: How the replica shares them with the trainer.
    """

    nodes: Sequence[str]
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
    ) -> None:
        self._bus, self._keys, self._identity, self._engine = bus, keys, identity, engine
        self._state_dir, self._traces, self._config = state_dir, traces, config
        self._running, self._opened = asyncio.Lock(), asyncio.Event()
        self._scope: CancelScope | None = None
        self._stopped = False
        self._agent: Agent

    def __repr__(self) -> str:
        """Return the name that Ray shows beside this actor's output."""
        return f"agent {self._identity.agent}"

    async def run(self) -> None:
        """Serve until `stop`. Raises what entering and running an `Agent` raises.

        Ray may call this twice if it lost contact with this process for a while: the second call waits for the first.
        """
        async with self._running:
            with CancelScope() as self._scope:
                if not self._stopped:
                    await self._serve()

    async def _serve(self) -> None:
        async with Agent(
            bus=self._bus,
            keys=self._keys.replace("{agent}", self._identity.agent) if self._keys is not None else None,
            identity=self._identity,
            engine=self._engine(self._identity),
            state_dir=self._state_dir,
            traces=self._traces,
            config=self._config,
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        config: Settings of every agent.
        keys: Path of the key file on each node; `{agent}` in it stands for the agent's name, e.g. 0.1. None for what
            the environment of the nodes says. Ray only ever carries the path: no key is in an argument or its logs.

    Raises:
        ExtraMissing: Ray is not installed.
        ConfigError: They can't be placed. Nothing was started.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ExtraMissing("agents on Ray need ray, and it is missing", "ray") from error
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        raise ConfigError("agents can't be placed: this process is in no Ray cluster. Call ray.init first.")
    places = _places(replicas, frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"]))
    actors = {}
    for identity, node in places:
        options = ray.remote(AgentActor).options(
            num_cpus=0,
            max_restarts=UNLIMITED,
            max_task_retries=UNLIMITED,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        node_traces = NodeTraces(traces, identity, finish_hook) if traces is not None else None
        actors[identity.agent] = options.remote(
            bus, identity, engine, state_dir, node_traces, config or AgentConfig(), keys
        )
    return Placement(actors)


def _places(replicas: Sequence[ReplicaNodes], alive: frozenset[str]) -> list[tuple[Identity, str]]:
    """The identity of each agent, and its node. Raises ConfigError."""
    if not replicas:
        raise ConfigError("there are no replicas to place agents for: name at least one.")
    places = []
    for index, replica in enumerate(replicas):
        if not replica.nodes:
            raise ConfigError(f"replica {index} has no nodes: name at least one, by its Ray id.")
        for rank, node in enumerate(replica.nodes):
            if node not in alive:
                raise ConfigError(
                    f"replica {index} names node {node!r}, which is not one of this cluster's: "
                    f"{', '.join(sorted(alive))}. `ray.nodes()` lists them as NodeID."
                )
            identity = Identity(
                replica=index,
                node_rank=rank,
                nnodes=len(replica.nodes),
                gpus_per_node=replica.gpus_per_node,
                mode=replica.mode,
            )
            places.append((identity, node))
    return places
