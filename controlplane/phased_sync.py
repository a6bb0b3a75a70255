"""A trainer's part in a weight sync: it asks for the phases one by one, or sends the weights in the middle."""

from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self

from anyio import to_thread

from controlplane.bus.bus import Bus
from controlplane.machine.coordinator import CoordinatorState
from controlplane.tickets import Ticket
from schemas.errors import CommandError, RolloutctlError
from schemas.logs import logger_of
from schemas.reports import Report, SyncReport

logger = logger_of("plane")

SendWeights = Callable[[tuple[int, ...]], object]
"""Sends weights to the replicas whose indices it is given."""


class PhasedSync:
    """One weight sync, phase by phase; made by `ControlPlane.begin_sync`, and entered by `with` or `async with`.

    A method publishes its phase at once and returns a ticket with the report of that phase. Wait for it before you ask
    for the next. If too few replicas meet a phase, the sync is aborted at once, as it is by `sync_weights`; so it is
    when the next phase is not asked for within the sync's `timeout` since the last began: engines must not stay paused
    for a trainer that forgot them. Leaving the block aborts a sync that was not committed, also by an exception.

    A ticket raises CommandError for a phase that is out of order, or whose sync has ended.
    """

    def __init__(self, bus: Bus, begin: Callable[..., Ticket[SyncReport]]) -> None:
        self._bus, self._begin = bus, begin
        self._report: Ticket[SyncReport] | None = None

    @property
    def report(self) -> Ticket[SyncReport]:
        """The ticket of the whole sync: how it ended, whoever ended it.

        Raises:
            CommandError: It has not begun.
        """
        if self._report is None:
            raise CommandError("this sync has not begun: call `prepare` first")
        return self._report

    def prepare(self) -> Ticket[Report]:
        """Check the source everywhere, and pause the engines. The report's `command.version` is the version.

        Raises:
            CommandError: It was called before.
        """
        if self._report is not None:
            raise CommandError("this sync has begun: `prepare` is called once")
        ticket = self._bus.new_ticket()
        self._report = self._begin(prepare=ticket)
        return ticket

    def load(self) -> Ticket[Report]:
        """Let the engines load. Weights that the trainer sends itself are sent until this ticket ends."""
        return self._ask("load")

    def commit(self) -> Ticket[Report]:
        """Let the engines serve the new weights. Who does is in `report`."""
        return self._ask("commit")

    def abort(self) -> Ticket[Report]:
        """Go back to the committed weights, from whatever phase before the commit. `report` ends at once."""
        return self._ask("abort")

    def _ask(self, phase: Literal["load", "commit", "abort"]) -> Ticket[Report]:
        report = self.report
        if report.done:
            raise CommandError(f"{phase}: this sync has ended: {_end_of(report)}")
        return self._bus.request_phase(report, phase)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._report is not None and not self._report.done:
            with suppress(RolloutctlError):  # the bus has ended, and with it the sync
                self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


def _end_of(report: Ticket[SyncReport]) -> str:
    try:
        return report.wait().headline
    except RolloutctlError as error:
        return str(error)


async def send_when_loading(bus: Bus, ticket: Ticket[SyncReport], send: SendWeights) -> None:
    """Call `send` in a thread once all receivers have prepared: a broadcast waits for everyone in its group."""

    def loading_or_over(state: CoordinatorState) -> bool:
        sync = state.sync
        return ticket.done or (sync is not None and sync.request.ticket == ticket.number and sync.phase != "prepare")

    try:
        sync = (await bus.wait_until(loading_or_over)).sync
        if sync is not None and sync.request.ticket == ticket.number and sync.phase == "load":
            members = tuple(sorted(sync.members - sync.lost))
            await to_thread.run_sync(send, members, abandon_on_cancel=True)
            bus.note_sent(ticket)
    except (Exception, SystemExit) as error:  # of anybody's code, in a thread that must not end the bus
        logger.warning("the weights of a sync were not sent: %s: %s", type(error).__name__, error)
        bus.note_sent(ticket, f"{type(error).__name__}: {error}")
