"""How long the turn of a bus takes, and what ends by its deadline though the turn does not end.

A turn takes milliseconds. One that takes a second waits for the disk of the log: in the loop, which then does nothing
else, or beside it. So another thread looks at the clock (`TurnClock.watch`). It warns, ends tickets at their deadlines,
and after a lease, when the agents have left the bus anyway, it ends the life of the bus.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from controlplane.bus.callers import REASON_MAX, Callers
from controlplane.tickets import FOREVER_US
from schemas.config import BusConfig
from schemas.errors import BusFaulted, BusHeldUp, LogError
from schemas.logs import logger_of

logger = logger_of("bus")

HELD_UP_US: Final = 1_000_000
"""A turn that takes longer is held up."""
SAY_AGAIN_US: Final = 10_000_000
"""Time between two log lines about a turn that is held up."""


class TurnClock:
    """The time of the turn under way, a lease at most. All but `begin` and `end` may be called from any thread."""

    def __init__(self, log: Path, config: BusConfig, now_us: Callable[[], int], behind: Callable[[], str]) -> None:
        self._log, self._now_us, self._copy_behind = log, now_us, behind
        self._lease_us, self._timeout_us = config.lease_ms * 1000, config.agent_timeout_ms * 1000
        self._since_us: int | None = None
        self._said_us = 0  # how long the turn had taken at the last warning

    def begin(self) -> None:
        self._since_us = self._now_us()

    def end(self) -> None:
        self._since_us = None

    @property
    def _took_us(self) -> int:
        since_us = self._since_us
        return self._now_us() - since_us if since_us is not None else 0

    @property
    def too_long(self) -> bool:
        """Whether the turn under way has taken longer than the leases of the agents."""
        return self._took_us > self._lease_us

    @property
    def expired_us(self) -> int:
        """Deadlines before this moment have passed: all of them, once the turn under way has taken too long."""
        return FOREVER_US if self.too_long else self._now_us()

    @property
    def hold_up(self) -> str:
        """What holds up the turn under way, as a sentence without its full stop; empty if nothing does."""
        took_us = self._took_us
        if took_us < HELD_UP_US:
            return ""
        why = self._copy_behind() or "its disk hangs, another program keeps the file locked, or this process starves"
        return f"the log {self._log} has taken no record for {took_us // 1_000_000} s: {why}"

    def explain(self, fault: BusFaulted | None) -> str:
        """Return why the fleet may be another by now than is known, or gets no commands; empty if nothing is wrong."""
        hold_up = self.hold_up
        if fault is None:
            return hold_up and f"{hold_up}. All this is from before"
        return f"{hold_up}, and the bus has stopped: it needs a new start" if hold_up else str(fault)[:REASON_MAX]

    def require_news(self) -> None:
        """Raise BusHeldUp if the state of the bus is so old that it says nothing about the fleet."""
        if self._took_us > self._timeout_us:
            raise BusHeldUp(f"nothing is known about the fleet: {self.hold_up}")

    def watch(self, callers: Callers, fault: Callable[[Exception], BusFaulted]) -> None:
        """End what must end in time. Called now and then by a thread of its own."""
        hold_up, took_us = self.hold_up, self._took_us
        if not hold_up:
            if self._said_us:
                logger.warning("the log %s takes records again, and the bus goes on", self._log)
            self._said_us = 0
        elif self.too_long:
            self._said_us = 0
            callers.fail_all(fault(LogError(hold_up)), operators=False)
        else:
            if not self._said_us or took_us - self._said_us > SAY_AGAIN_US:
                self._said_us = took_us
                logger.warning("%s. The bus waits for it, for %d s at most", hold_up, self._lease_us // 1_000_000)
            callers.expire(self._now_us(), BusFaulted(hold_up))
