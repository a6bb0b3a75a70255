"""The node's side: the agent and the engines that it commands. Importing this package loads neither."""

from pkgutil import extend_path
from typing import TYPE_CHECKING

from workers.shadowing import refuse_foreign_schemas

__path__ = extend_path(__path__, __name__)  # a folder of this name without an `__init__.py`, in a user's repository

if TYPE_CHECKING:
    from workers.agent import Agent as Agent
    from workers.engine import Engine as Engine
    from workers.engines.factory import EngineOptions as EngineOptions
    from workers.engines.factory import make_engine as make_engine
    from workers.engines.observed import ObservedEngine as ObservedEngine
    from workers.engines.tiny.engine import TinyEngine as TinyEngine
    from workers.engines.tiny.server import TinyClient as TinyClient
    from workers.exporter import AgentCollector as AgentCollector
    from workers.profilers.rank import TrainingRank as TrainingRank
    from workers.profilers.stages import annotate as annotate
    from workers.profilers.stages import mini_batch as mini_batch
    from workers.ray_placement import ReplicaNodes as ReplicaNodes
    from workers.ray_placement import first_node_address as first_node_address
    from workers.ray_placement import place_agents as place_agents
    from workers.server.launch import LaunchedEngine as LaunchedEngine
    from workers.server.launch import ServerProcess as ServerProcess
    from workers.stacks import StackDumps as StackDumps
    from workers.traces.node import NodeTraces as NodeTraces
    from workers.traces.node import collect_traces as collect_traces
    from workers.traces.node import make_fresh as make_fresh
    from workers.traces.node import require_writable as require_writable

if not TYPE_CHECKING:
    _MODULES = {
        "Agent": "workers.agent",
        "AgentCollector": "workers.exporter",
        "Engine": "workers.engine",
        "EngineOptions": "workers.engines.factory",
        "LaunchedEngine": "workers.server.launch",
        "NodeTraces": "workers.traces.node",
        "ObservedEngine": "workers.engines.observed",
        "ReplicaNodes": "workers.ray_placement",
        "ServerProcess": "workers.server.launch",
        "StackDumps": "workers.stacks",
        "TinyClient": "workers.engines.tiny.server",
        "TinyEngine": "workers.engines.tiny.engine",
        "TrainingRank": "workers.profilers.rank",
        "annotate": "workers.profilers.stages",
        "collect_traces": "workers.traces.node",
        "first_node_address": "workers.ray_placement",
        "make_engine": "workers.engines.factory",
        "make_fresh": "workers.traces.node",
        "mini_batch": "workers.profilers.stages",
        "place_agents": "workers.ray_placement",
        "require_writable": "workers.traces.node",
    }

    __all__ = [*_MODULES]

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        refuse_foreign_schemas()
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)
