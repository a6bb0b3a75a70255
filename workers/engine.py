"""The one interface between an agent and an engine. `workers/engines/` has one file per engine."""

from typing import Protocol

from schemas.events import EngineCall, Observation, Returned


class Engine(Protocol):
    """One engine as seen from one node.

    Calls never overlap: the agent makes the next when the last has returned. A call is never cancelled.
    """

    async def open(self) -> None:
        """Attach to the engine, or build it. Raises EngineError when there is none to attach to."""
        ...

    async def observe(self) -> Observation:
        """Read what the engine is now. Changes nothing; cheap; never raises: what can't be read is None or unknown."""
        ...

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Make one call and return when what it is to bring about holds, as far as the engine can tell.

        timeout_s: Seconds left until the command's deadline. What an engine refuses for the moment (a flush while
        requests run) is asked again until then. A call that has begun is not given up at the deadline: the machine
        reports it as late, and waits.

        Raises CheckpointError when a source can't be loaded and UnsupportedError when the engine can't do what is asked
        (it was not touched in either case), EngineError when the engine refused or failed.
        """
        ...

    async def close(self) -> None:
        """Let go of the engine; free what `open` made."""
        ...
