"""The steps of a trainer: a shell around `controlplane.machine.profiling`, which publishes its commands and logs how
they ended.

Nothing here raises for profiling that failed, and nothing waits past the deadline of a command: the step goes on.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from controlplane.machine.profiling import (
    check_command,
    collect_command,
    commands_after,
    commands_before,
    finish_command,
    ranks_absent,
    roles_absent,
    session_after,
    sessions,
)
from controlplane.tickets import Ticket
from schemas.commands import ProfileCommand, Target
from schemas.config import within_bounds
from schemas.errors import ConfigError, RolloutctlError
from schemas.formatting import describe, format_outcome, is_trouble
from schemas.identity import Identity
from schemas.logs import logger_of
from schemas.outcomes import Acted
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report

logger = logger_of("plane")

REPORTS_KEPT: Final = 256
"""Reports of profile commands that are kept in memory. The log has all of them."""
FINISH_MS: Final = 600_000
"""Time to move the traces, perhaps to another disk. No step waits for it."""

PublishProfile = Callable[[ProfileCommand, Target, int], Ticket[Report]]
"""Publishes a command with a timeout in milliseconds. Raises RolloutctlError."""


class Profiling:
    """The profiling of one run, driven by its steps.

    Raises:
        ConfigError: A value of the configuration has the wrong type. Raised here, before any step meets it.
    """

    def __init__(
        self, config: ProfilerConfig, publish: PublishProfile, fleet: Callable[[], Iterable[Identity]]
    ) -> None:
        self.config = within_bounds(config)
        self.reports: deque[Report] = deque(maxlen=REPORTS_KEPT)
        self._publish, self._fleet = publish, fleet
        self._session: int | None = None
        self._opened: set[int] = set()
        self._checked = False
        self._finish: Ticket[Report] | None = None

    def begin_step(self, step: int) -> list[Ticket[Report]]:
        """Publish the commands before a step; before the first step, also a check that the plan can be recorded."""
        check = None if self._checked else check_command(self.config, step)
        self._checked = True
        tickets: list[Ticket[Report]] = []
        if check is not None:
            self._warn_of_absent()
            tickets += self._try_publish(check)
        return tickets + self._publish_all(commands_before(self.config, self._session, step))

    def end_step(self, step: int) -> list[Ticket[Report]]:
        """Publish the commands after a step."""
        return self._publish_all(commands_after(self.config, self._session, step))

    def record(self, ticket: Ticket[Report]) -> list[Ticket[Report]]:
        """Wait for a ticket, keep its report, log failures, publish the commands that follow; return their tickets."""
        report = self._keep(ticket)
        command = report.command if report is not None else None
        if report is None or not isinstance(command, ProfileCommand):
            return []
        collect = collect_command(report)
        if collect is not None:
            return self._try_publish(*collect)
        last = max(sessions(self.config), default=0)  # a trainer that jumped into the last run opened a later session
        if command.action in ("stop", "collect") and command.step >= last and self._session is None:
            self._publish_finish()
        return []

    def close(self) -> None:
        """End the open session and profiling as a whole. Waits for both."""
        if self._session is not None:
            ended = replace(self.config, continuous=False)  # no step follows
            tickets = self._publish_all(commands_after(ended, self._session, self._session))
            for ticket in tickets:
                tickets += self.record(ticket)
        self._publish_finish()
        if self._finish is not None:
            with suppress(RolloutctlError):
                self._finish.wait()

    def _warn_of_absent(self) -> None:
        fleet = tuple(self._fleet())
        if ranks := ranks_absent(self.config, fleet):
            logger.warning("ranks %s are selected for profiling, and no agent has them", sorted(ranks))
        for role in roles_absent(self.config, fleet):
            logger.warning("role %s is selected for profiling, and no agent has it", role)

    def _publish_all(self, commands: Iterable[ProfileCommand]) -> list[Ticket[Report]]:
        tickets: list[Ticket[Report]] = []
        for command in commands:
            self._session = session_after(self._session, command)
            if command.action == "start":
                self._opened.add(command.step)
            tickets += self._try_publish(command)
        return tickets

    def _publish_finish(self) -> None:
        command = finish_command(self.config, self._opened)
        if command is None or self._finish is not None:
            return
        for ticket in self._try_publish(command, timeout_ms=FINISH_MS):
            self._finish = ticket
            ticket.when_done(self._keep)

    def _try_publish(
        self, command: ProfileCommand, target: Target | None = None, timeout_ms: int | None = None
    ) -> list[Ticket[Report]]:
        try:
            return [self._publish(command, target or Target(), timeout_ms or self.config.timeout_ms)]
        except RolloutctlError as error:
            logger.warning("%s was not published; the step goes on: %s", describe(command), error)
            return []

    def _keep(self, ticket: Ticket[Report]) -> Report | None:
        try:
            report = ticket.wait()
        except RolloutctlError as error:
            logger.warning("a profile command has no report; the step goes on: %s", error)
            return None
        self.reports.append(report)
        for outcome in report.outcomes:
            conclusion = outcome.conclusion
            if is_trouble(conclusion) or (isinstance(conclusion, Acted) and conclusion.ranks_without_trace):
                command, text = describe(report.command), format_outcome(conclusion)
                logger.warning("%s on agent %s: %s; the step goes on", command, outcome.agent, text)
        return report


class Step:
    """One step of the trainer, as a context; made by `ControlPlane.step`. Waits until the agents have answered."""

    def __init__(self, profiling: Profiling, global_step: int) -> None:
        if global_step < 0:
            raise ConfigError(f"global_step {global_step}: steps are counted from 0")
        self._profiling, self._number = profiling, global_step

    def __enter__(self) -> None:
        self._wait(self._profiling.begin_step(self._number))

    def __exit__(self, *_: object) -> None:
        self._wait(self._profiling.end_step(self._number))

    async def __aenter__(self) -> None:
        await self._wait_async(self._profiling.begin_step(self._number))

    async def __aexit__(self, *_: object) -> None:
        await self._wait_async(self._profiling.end_step(self._number))

    def _wait(self, tickets: list[Ticket[Report]]) -> None:
        for ticket in tickets:  # grows: a stop is followed by a collect
            tickets += self._profiling.record(ticket)

    async def _wait_async(self, tickets: list[Ticket[Report]]) -> None:
        for ticket in tickets:
            with suppress(RolloutctlError):  # logged by `record`
                await ticket
            tickets += self._profiling.record(ticket)
