"""The simulated trainer that asks for the phases of a sync one by one, as `ControlPlane.begin_sync` lets it.

It asks late, out of order, aborts, or never asks again. It dies with its bus.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal

from controlplane.machine.events import PhaseRequested

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.trainer import Trainer

Phase = Literal["load", "commit", "abort"]

PHASES: Final[tuple[Phase, ...]] = ("load", "commit", "abort")
DELAYS_MS: Final = (1, 50, 300, 300, 700, 2500)


class Phases:
    """Asks for the phases of the syncs of one trainer."""

    def __init__(self, trainer: Trainer, rng: random.Random) -> None:
        self.trainer, self.rng = trainer, rng
        self.share = rng.choice((0.0, 0.8))

    def prepare(self, bus: Bus) -> int | None:
        """Return a ticket for the prepare phase, if the next sync is one whose phases are asked for."""
        if self.rng.random() >= self.share:
            return None
        bus.tickets += 1
        return bus.tickets

    def advance(self, bus: Bus, sync: int) -> None:
        """Ask for the phases of this sync from now on, until it has ended or is forgotten."""
        self.trainer.world.at(self.rng.choice(DELAYS_MS), self._advance, bus, sync)

    def _advance(self, bus: Bus, ticket: int) -> None:
        sync = bus.state.sync
        ours = sync is not None and sync.request.ticket == ticket
        written = bus.committing is None and not bus.queue
        if not bus.alive or (written and not ours and self.rng.random() < 0.9):
            return
        held = sync is not None and ours and sync.held_until_us is not None and sync.phase != "prepare"
        if held and self.rng.random() < 0.1:
            self.trainer.world.say(f"the trainer forgets the sync with ticket {ticket}")
            return
        if self.rng.random() < (0.2 if held else 0.05):
            self._ask(bus, ticket, self.rng.choice(PHASES))
        elif held and sync is not None and sync.phase != "prepare":
            self._ask(bus, ticket, sync.phase)
        self.advance(bus, ticket)

    def _ask(self, bus: Bus, sync: int, phase: Phase) -> None:
        bus.tickets += 1
        self.trainer.world.say(f"the trainer asks for the {phase} phase of the sync with ticket {sync}")
        order = PhaseRequested(
            at_us=bus.now_us, at_ns=self.trainer.world.now, ticket=bus.tickets, sync=sync, phase=phase
        )
        self.trainer.hand_over(bus, order)
