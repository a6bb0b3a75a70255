"""The steps of a trainer: a shell around `controlplane.machine.profiling` that publishes what it says and tells the
outcome.

Nothing here raises for profiling that failed, and nothing waits past the deadline of a command: the step goes on.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final

from msgspec.structs import replace

from controlplane.machine.profiling import (
    checking,
    collecting,
    entering,
    finishing,
    leaving,
    session_after,
    sessions,
    unmanned,
    unowned,
)
from controlplane.tickets import Ticket
from schemas.commands import ProfileCommand, Target
from schemas.errors import ConfigError, RolloutctlError
from schemas.formatting import describe
from schemas.identity import Identity
from schemas.outcomes import Acted, Failed, Missing
from schemas.profiler.config import ProfilerConfig, checked
from schemas.reports import Report

logger = logging.getLogger("rolloutctl.plane")

REPORTS_KEPT: Final = 256
"""Reports of profile commands that are held; the log holds all."""
FINISH_MS: Final = 600_000
"""For moving traces, perhaps to another disk. No step waits for it."""

Publish = Callable[[ProfileCommand, Target, int], Ticket[Report]]
"""Hands a command over; the number is its time in milliseconds. Raises RolloutctlError."""


class Profiling:
    """The profiling of one run as its steps go by. fleet: who is live.   reports: newest last.

    Raises ConfigError for a configuration with a value of a wrong type: no step is to find that out.
    """

    def __init__(self, config: ProfilerConfig, publish: Publish, fleet: Callable[[], Iterable[Identity]]) -> None:
        self.config = checked(config)
        self.reports: deque[Report] = deque(maxlen=REPORTS_KEPT)
        self._publish, self._fleet = publish, fleet
        self._session: int | None = None
        self._opened: set[int] = set()
        self._checked = False
        self._finish: Ticket[Report] | None = None

    def entering(self, step: int) -> list[Ticket[Report]]:
        """Publish what a step begins with; before the first of all, the question whether it can be done."""
        tickets: list[Ticket[Report]] = []
        check = None if self._checked else checking(self.config, step)
        self._checked = True
        if check is not None:
            fleet = tuple(self._fleet())
            if nobodys := unowned(self.config, fleet):
                logger.warning("ranks %s are to be profiled, and nobody here has them", sorted(nobodys))
            for role in unmanned(self.config, fleet):
                logger.warning("%s is to be profiled, and no agent of that role is here", role)
            tickets += self._try(check)
        return tickets + self._commands(entering(self.config, self._session, step))

    def leaving(self, step: int) -> list[Ticket[Report]]:
        """Publish what a step ends with."""
        return self._commands(leaving(self.config, self._session, step))

    def note(self, ticket: Ticket[Report]) -> list[Ticket[Report]]:
        """Keep a report, tell what failed, publish what follows. Waits for the ticket; returns the next ones."""
        report = self._keep(ticket)
        command = report.command if report is not None else None
        if report is None or not isinstance(command, ProfileCommand):
            return []
        following = collecting(report)
        if following is not None:
            return self._try(*following)
        last = max(sessions(self.config), default=0)  # a trainer that jumped into the last run has named it otherwise
        if command.action in ("stop", "collect") and command.step >= last and self._session is None:
            self._ask_to_finish()
        return []

    def close(self) -> None:
        """End the session that is open, and profiling as a whole. Waits for what comes of it."""
        if self._session is not None:
            ended = replace(self.config, continuous=False)  # no step follows
            tickets = self._commands(leaving(ended, self._session, self._session))
            for ticket in tickets:
                tickets += self.note(ticket)
        self._ask_to_finish()
        if self._finish is not None:
            with suppress(RolloutctlError):
                self._finish.wait()

    def _commands(self, commands: Iterable[ProfileCommand]) -> list[Ticket[Report]]:
        tickets: list[Ticket[Report]] = []
        for command in commands:
            self._session = session_after(self._session, command)
            if command.action == "start":
                self._opened.add(command.step)
            tickets += self._try(command)
        return tickets

    def _ask_to_finish(self) -> None:
        command = finishing(self.config, self._opened)
        if command is None or self._finish is not None:
            return
        for ticket in self._try(command, timeout_ms=FINISH_MS):
            self._finish = ticket
            ticket.when_done(self._keep)

    def _try(
        self, command: ProfileCommand, target: Target | None = None, timeout_ms: int | None = None
    ) -> list[Ticket[Report]]:
        try:
            return [self._publish(command, target or Target(), timeout_ms or self.config.timeout_ms)]
        except RolloutctlError as error:
            logger.warning("%s was not published, the step goes on: %s", describe(command), error)
            return []

    def _keep(self, ticket: Ticket[Report]) -> Report | None:
        try:
            report = ticket.wait()
        except RolloutctlError as error:
            logger.warning("a profile command came to nothing, the step goes on: %s", error)
            return None
        self.reports.append(report)
        what = describe(report.command)
        for one in report.outcomes:
            match one.conclusion:
                case Failed() | Missing():
                    logger.warning("%s on agent %s: %s; the step goes on", what, one.agent, one.conclusion)
                case Acted(ranks_without_trace=ranks) if ranks:
                    logger.warning("%s on agent %s: ranks %s left no trace", what, one.agent, list(ranks))
        return report


class Step:
    """One step of the trainer, as a context; made by `ControlPlane.step`. `with` blocks until the agents answered."""

    def __init__(self, profiling: Profiling, global_step: int) -> None:
        if global_step < 0:
            raise ConfigError(f"global_step {global_step}: steps are counted from 0")
        self._profiling, self._step = profiling, global_step

    def __enter__(self) -> None:
        self._note(self._profiling.entering(self._step))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note(self._profiling.leaving(self._step))

    async def __aenter__(self) -> None:
        await self._await(self._profiling.entering(self._step))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._await(self._profiling.leaving(self._step))

    async def _await(self, tickets: list[Ticket[Report]]) -> None:
        for ticket in tickets:  # grows: a stop is followed by the collecting of what it left
            with suppress(RolloutctlError):  # it is told below
                await ticket
            tickets += self._profiling.note(ticket)

    def _note(self, tickets: list[Ticket[Report]]) -> None:
        for ticket in tickets:
            tickets += self._profiling.note(ticket)
