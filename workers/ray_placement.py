"""Agents as Ray actors, one beside each node of each replica, for a job that has outgrown one machine.

Ray starts them where they belong, starts them again when their process dies, and ends them with the job. That is all
that it does here: commands and answers go over the bus, and each agent keeps a journal on its node's disk, from which a
new process goes on. What is handed to an actor (where the bus is, its place, how its engine is made) is pickled by Ray,
on Ray's own wire.

An actor is bound to its node, so one whose node is gone does not come back: its replica has lost that node too.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from anyio import CancelScope

from schemas.config import AgentConfig
from schemas.errors import AgentError, AgentsMissing, ConfigError
from schemas.identity import Identity, RolloutMode
from workers.agent import Agent
from workers.engine import Engine
from workers.traces.node import NodeTraces

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

EngineFactory = Callable[[Identity], Engine]
"""Makes the engine of one node, in the process of that node's agent."""

FOR_EVER: Final = -1
"""Ray's word for restarts and retries without end."""


class ReplicaNodes(NamedTuple):
    """Where one replica runs.

    nodes: Ray's ids of its nodes, in order of their rank.   gpus_per_node: of this replica.   mode: how it shares them
    with the trainer.
    """

    nodes: Sequence[str]
    gpus_per_node: int = 1
    mode: RolloutMode = RolloutMode.HYBRID


class AgentActor:
    """One agent, as an actor. `run` is asked for once, and by Ray again in each new process."""

    def __init__(
        self,
        bus: str,
        identity: Identity,
        engine: EngineFactory,
        state_dir: Path,
        traces: NodeTraces | None,
        config: AgentConfig,
    ) -> None:
        self._bus, self._identity, self._engine = bus, identity, engine
        self._state_dir, self._traces, self._config = state_dir, traces, config
        self._alone, self._opened = asyncio.Lock(), asyncio.Event()
        self._scope: CancelScope | None = None
        self._stopped = False
        self._agent: Agent

    def __repr__(self) -> str:
        """The name under which Ray shows what this actor prints."""
        return f"agent {self._identity.agent}"

    async def run(self) -> None:
        """Serve until `stop`. Raises what entering an `Agent` and running it raises.

        Ray may ask twice, if it lost sight of this process for a while: the second waits for the first.
        """
        async with self._alone:
            with CancelScope() as self._scope:
                if not self._stopped:
                    await self._serve()

    async def _serve(self) -> None:
        place, state_dir = self._identity, self._state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        engine = self._engine(place)
        traces, config = self._traces, self._config
        async with Agent(
            bus=self._bus, identity=place, engine=engine, state_dir=state_dir, traces=traces, config=config
        ) as self._agent:
            self._opened.set()
            await self._agent.run()

    async def wait_ready(self) -> None:
        """Return when this node is as desired."""
        await self._opened.wait()
        await self._agent.wait_ready()

    async def stop(self) -> None:
        """End in good order: the engine call under way is awaited, and the bus told."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()


class Placement:
    """The agents that `place_agents` started. They end with it, or with the job.

    actors: handle of each, by the agent's name, e.g. `0.1`.
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
        """Return when every node is as desired: each has joined, and the engines may serve.

        Raises AgentsMissing when that is not so after `timeout` seconds, and AgentError when an agent ended and will
        not be started again.
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
                    f"{', '.join(sorted(waiting.values()))}. Look at what they log, and at the bus's status."
                )
            (ref,) = done
            self._tell(ref, self._runs.get(ref) or waiting[ref])
            if ref in self._runs:
                raise AgentError(f"agent {self._runs[ref]} was stopped.")
            del waiting[ref]

    def stop(self, timeout: float = 60.0) -> None:
        """End all agents in good order; after `timeout` seconds also who still waits for an engine. Idempotent."""
        import ray

        for actor in self.actors.values():
            actor.stop.remote()
        ray.wait(list(self._runs), num_returns=len(self._runs), timeout=timeout)
        for actor in self.actors.values():
            ray.kill(actor)

    def _tell(self, ref: "ObjectRef", name: str) -> None:
        """Raise AgentError if what was asked of an agent ended in an error."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            ray.get(ref)
        except RayTaskError as error:
            raise AgentError(f"agent {name} ended, and is not started again: {error.cause}") from error
        except RayError as error:
            said = " ".join(str(error).split())
            raise AgentError(f"agent {name} can't be kept running: {said}") from error


def place_agents(
    *,
    bus: str,
    replicas: Sequence[ReplicaNodes],
    engine: EngineFactory,
    state_dir: Path,
    traces: Path | None = None,
    finish_hook: str = "",
    config: AgentConfig | None = None,
) -> Placement:
    """Start one agent on each node of each replica; the place in `replicas` is the replica's index.

    bus: its address, as the nodes reach it.   state_dir: where journals lie, on a disk of each node.   traces: the root
    that the engines write profiles below.   finish_hook: command to run after the last profiled step.

    Returns at once; `wait_ready` waits. Must be called in a process that has joined the cluster (`ray.init`). Raises
    ConfigError, with nothing started.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError("agents on Ray need ray, and it is not installed: pip install 'rolloutctl[ray]'") from error
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        raise ConfigError("agents were to be placed, and this process is in no Ray cluster: call ray.init first.")
    places = _places(replicas, frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"]))
    actors = {}
    for identity, node in places:
        options = ray.remote(AgentActor).options(
            num_cpus=0,
            max_restarts=FOR_EVER,
            max_task_retries=FOR_EVER,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        left = NodeTraces(traces, identity, finish_hook) if traces is not None else None
        actors[identity.agent] = options.remote(bus, identity, engine, state_dir, left, config or AgentConfig())
    return Placement(actors)


def _places(replicas: Sequence[ReplicaNodes], alive: frozenset[str]) -> list[tuple[Identity, str]]:
    """The identity of each agent, and its node. Raises ConfigError."""
    if not replicas:
        raise ConfigError("agents were to be placed for no replica at all: name at least one.")
    places = []
    for index, replica in enumerate(replicas):
        if not replica.nodes:
            raise ConfigError(f"replica {index} has no nodes: name at least one, by its Ray id.")
        for rank, node in enumerate(replica.nodes):
            if node not in alive:
                raise ConfigError(
                    f"replica {index} is to have node {node!r}, which is none of this cluster's: "
                    f"{', '.join(sorted(alive))}. `ray.nodes()` tells them as NodeID."
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
