"""The interface between an agent and its engine. `workers/engines/` has one backend per engine."""

from typing import Protocol, runtime_checkable

from schemas.events import EngineCall, Observation, Returned


class EngineView(Protocol):
    """One engine as seen from one node, for an agent that only observes: it offers nothing that changes the engine."""

    async def open(self) -> None:
        """Attach to the engine, or build it. Raises EngineError if there is none to attach to."""
        ...

    async def observe(self) -> Observation:
        """Read the engine's state. Changes nothing, is cheap, never raises: what cannot be read is None or unknown.

        It may be cancelled: a command does not wait for it.
        """
        ...

    async def close(self) -> None:
        """Detach from the engine, and free what `open` created, also if that raised."""
        ...


@runtime_checkable
class Engine(EngineView, Protocol):
    """One engine as seen from one node.

    Calls never overlap: the agent makes the next one when the last has returned. A call is never cancelled.
    """

    async def perform(self, call: EngineCall, timeout_s: float) -> Returned:
        """Make one call, and return once its effect holds, as far as the engine can tell.

        Args:
            call: The call.
            timeout_s: Seconds left until the command's deadline; 0 if no command waits. Until then, repeat what the
                engine refuses only for the moment (a flush while requests run). Do not give up a call that has begun:
                the machine reports it as late, and waits.

        Raises:
            CheckpointError: The source cannot be loaded. The engine was not touched.
            UnsupportedError: The engine cannot do this. It was not touched.
            RefusedError: The engine refuses now, or was not reached. It was not touched.
            UnansweredError: It was called and did not answer, so it may or may not have carried the call out.
            EngineError: The engine failed. It may have been touched.
        """
        ...
