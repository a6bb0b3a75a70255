"""Sends a trainer's weights in the middle of a weight sync, once the replicas have prepared."""

import threading
from collections.abc import Callable

from controlplane.bus.bus import Bus
from controlplane.machine.coordinator import CoordinatorState
from controlplane.tickets import Ticket
from schemas.logs import logger_of
from schemas.reports import SyncReport

logger = logger_of("plane")

SendWeights = Callable[[tuple[int, ...]], object]
"""Sends weights to the replicas whose indices it is given."""


async def send_when_loading(
    bus: Bus, ticket: Ticket[SyncReport], send: SendWeights, senders: list[threading.Thread]
) -> None:
    """Call `send` in a thread once all receivers have prepared: a broadcast waits for every rank of its group.

    The thread is a daemon, which nothing waits for: a sender may hang for ever, as one of NCCL does without its peers.
    """

    def loading_or_over(state: CoordinatorState) -> bool:
        sync = state.sync
        return ticket.done or (sync is not None and sync.request.ticket == ticket.number and sync.phase != "prepare")

    sync = (await bus.wait_until(loading_or_over)).sync
    # Engines that don't wait for what is sent may have loaded already: then the commit waits for it.
    if sync is not None and sync.request.ticket == ticket.number and sync.phase != "abort" and not sync.sent:
        members = tuple(sorted(sync.members - sync.lost))
        name = f"rolloutctl-send-{sync.version}"
        thread = threading.Thread(target=_send, args=(bus, ticket, send, members), name=name, daemon=True)
        senders[:] = [*(sender for sender in senders if sender.is_alive()), thread]
        thread.start()


def _send(bus: Bus, ticket: Ticket[SyncReport], send: SendWeights, members: tuple[int, ...]) -> None:
    try:
        send(members)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        logger.warning("the weights of a sync were not sent: %s: %s", type(error).__name__, error)
        bus.note_sent(ticket, f"{type(error).__name__}: {error}")
    else:
        bus.note_sent(ticket)
