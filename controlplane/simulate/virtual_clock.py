"""The clock of a simulated fleet: what happens next happens now, and the same calls give the same run."""

import heapq
from collections.abc import Callable
from typing import Any, Final

_LAST: Final = 1 << 60


class VirtualClock:
    """Moves from one event to the next.

    Attributes:
        now: The moment, in the unit of its caller.
        acts: How many acts were planned.
    """

    def __init__(self) -> None:
        self.now = 0
        self.acts = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, delay: int, act: Callable[..., None], *args: Any) -> None:
        """Have `act` called with `args` after a delay. Of acts for the same moment, the first planned comes first."""
        self.acts += 1
        heapq.heappush(self._heap, (self.now + delay, self.acts, act, args))

    def at_last(self, act: Callable[..., None], *args: Any) -> None:
        """Have `act` called with `args` once all that is planned for this moment has happened."""
        self.acts += 1
        heapq.heappush(self._heap, (self.now, _LAST + self.acts, act, args))

    def is_free(self, until: int) -> bool:
        """Return whether no act is planned up to and including a moment."""
        return not self._heap or self._heap[0][0] > until

    def run(self, until: int) -> None:
        """Let time pass up to and including a moment."""
        while self._heap and self._heap[0][0] <= until:
            self.step()
        self.now = until

    def step(self) -> None:
        """Let the next act happen."""
        self.now, _, act, args = heapq.heappop(self._heap)
        act(*args)
