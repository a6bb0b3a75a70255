"""What agents' processes get from the trainer: how each finds the server that it commands.

Ray unpickles it there by importing this module, so it imports neither verl, which would load its plugins again, nor
torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.identity import Identity
from workers.engines.verl.engine import VerlEngine

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class ServerEngines:
    """Makes the engine of an agent: the server actor of the same replica and node."""

    def __init__(self, servers: "Mapping[str, ActorHandle]", traces: Path) -> None:
        self._servers, self._traces = dict(servers), traces

    def __call__(self, identity: Identity) -> VerlEngine:
        return VerlEngine(self._servers[identity.agent], identity, traces=self._traces)
