"""verl's rollout servers, for an agent that only observes them.

One inspection of the actor (`ServerSnapshot`) tells all that is seen: `is_pause` of SGLang's tokenizer manager, or
`_submission_paused` of vLLM's server, and `global_steps`, which verl's checkpoint manager sets after each update (verl
0.9.1).
"""

from typing import Protocol

from schemas.errors import EngineError
from schemas.events import Observation
from schemas.identity import Identity
from workers.engines.client import version_of
from workers.engines.verl.snapshot import ServerSnapshot

_KIND = "verl server"


class SnapshotReader(Protocol):
    """What is used of a `VerlEngine`: it can be inspected."""

    async def open(self) -> None: ...

    async def inspect(self) -> ServerSnapshot: ...

    async def close(self) -> None: ...


class ObservedVerl:
    """One server actor, inspected and never called otherwise.

    Args:
        server: A `VerlEngine`.
        identity: This node's place. On node ranks above 0 the server is never looked up.
    """

    def __init__(self, server: SnapshotReader, identity: Identity) -> None:
        self._server, self._identity = server, identity

    async def open(self) -> None:
        await self._server.open()

    async def observe(self) -> Observation:
        if self._identity.node_rank > 0:
            return Observation(engine=_KIND, tokenizer="absent")
        try:
            snapshot = await self._server.inspect()
        except EngineError:
            return Observation(engine=_KIND, tokenizer="unknown")
        return Observation(
            engine=f"verl {snapshot.kind}"[:200],
            instance=snapshot.worker,
            tokenizer="unknown" if snapshot.front_end is None else "present" if snapshot.serves else "absent",
            generating=None if snapshot.paused is None else not snapshot.paused,
            version=version_of(snapshot.label),
            label=snapshot.label,
        )

    async def close(self) -> None:
        await self._server.close()
