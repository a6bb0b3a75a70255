"""The node's side: the agent and the engines that it commands. Importing this package loads neither."""

from typing import TYPE_CHECKING

from workers.shadowing import refuse_foreign_schemas

if TYPE_CHECKING:
    from workers.agent import Agent
    from workers.engine import Engine

__all__ = ["Agent", "Engine"]

refuse_foreign_schemas()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "Agent":
            from workers.agent import Agent

            return Agent
        if name == "Engine":
            from workers.engine import Engine

            return Engine
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
