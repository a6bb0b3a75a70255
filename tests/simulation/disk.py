"""The disk of a simulated agent."""

import random


class Disk:
    """One journal. A group that was being written when its agent was killed is there as a whole, or not at all."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)  # of its own, so that seeds keep their luck with the rest
        self._decisions: list[tuple[bytes, bytes]] = []

    def erase(self) -> None:
        self._decisions = []

    def write(self, group: list[tuple[bytes, bytes]]) -> None:
        self._decisions += group

    def tear(self, group: list[tuple[bytes, bytes]]) -> None:
        """Be cut off while a group is written."""
        if self.rng.random() < 0.5:
            self.write(group)

    def recover(self) -> list[tuple[bytes, bytes]]:
        """Return what was written."""
        return self._decisions.copy()
