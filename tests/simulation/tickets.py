"""The tickets that a bus was given, and the check that each of them ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.machine.events import (
    Conclude,
    CoordinatorEffect,
    CoordinatorEvent,
    Issued,
    Opened,
    Refuse,
    Retired,
    RetireRequested,
    SyncRequested,
)

if TYPE_CHECKING:
    from tests.simulation.bus import Bus


class Tickets:
    """The tickets of every life of the bus that have not ended."""

    def __init__(self) -> None:
        self._waiting: dict[int, set[int]] = {}  # by life

    def after(self, bus: Bus, event: CoordinatorEvent, effects: tuple[CoordinatorEffect, ...]) -> str:
        """Return what is wrong after a step of the bus, or nothing: each ticket ends once, at the latest with the last
        open command and the last sync.
        """
        waiting = self._waiting.setdefault(bus.life, set())
        if isinstance(event, Issued | SyncRequested | RetireRequested):
            waiting.add(event.ticket)
        for effect in effects:
            ticket = effect.ticket if isinstance(effect, Conclude | Refuse | Retired) else None
            if ticket is None or isinstance(event, Opened):  # which ends those of an earlier life
                continue
            if ticket not in waiting:
                return f"ticket {ticket} ended twice, or was of nobody: {effect}"
            waiting.remove(ticket)
        if waiting and not bus.state.open and not bus.state.syncs:
            return f"nothing is open, and tickets {sorted(waiting)} have not ended"
        return ""
