"""The engine of the benchmarks. It imports nothing that an agent does not: `rolloutctl agent` is measured with it."""

from schemas.events import Call, Observation, Returned
from schemas.identity import Operation


class NullEngine:
    """An engine that has every operation and does nothing, so that only the way to it and back is measured."""

    def __init__(self, tokenizer: bool = True) -> None:
        self._observation = Observation(
            engine="null",
            tokenizer="present" if tokenizer else "absent",
            operations=frozenset(Operation),
            generating=True,
            asleep=frozenset(),
            profiling=False,
            version=0,
        )

    async def open(self) -> None:
        """Nothing to attach to."""

    async def observe(self) -> Observation:
        """Always the same."""
        return self._observation

    async def perform(self, call: Call, timeout_s: float) -> Returned:
        """Done."""
        return Returned()

    async def close(self) -> None:
        """Nothing to close."""
