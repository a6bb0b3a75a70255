"""Asks a running bus for its status, to publish a command, to sync weights, or to retire a place. For the command line.

One request, one reply; that of a large fleet comes in parts. Each function raises BusUnreachable if none comes (then a
command may have been published), KeyRefused or BusAddressError if it can't connect, CommandError if the bus refused,
and ConfigError for a number out of bounds.
"""

import secrets
from typing import Final, TypeVar

import anyio
import zmq

from controlplane.bus.callers import PHASES
from schemas import wire
from schemas.commands import AdapterDrop, AdapterRequest, Drain, EngineCommand, ProfileCommand, Target
from schemas.config import milliseconds, within_bounds
from schemas.errors import BusUnreachable, CommandError, KeyRefused
from schemas.logs import logger_of
from schemas.reports import FleetStatus, Report, SyncReport
from schemas.transport.addresses import NOWHERE, read_address
from schemas.transport.handshakes import DialledSocket, connect
from schemas.transport.keys import KeySource
from schemas.transport.sockets import agent_dealer

logger = logger_of("agent")

R = TypeVar("R", FleetStatus, Report, SyncReport, wire.PlaceAssigned, wire.PeerFound)

ANSWER_S: Final = 5.0
"""How long a bus may take to reply, in addition to the timeout of a command."""


async def ask_status(bus: str, timeout_s: float = ANSWER_S, keys: KeySource | None = None) -> FleetStatus:
    """Return the status of the fleet."""
    return await _ask(bus, wire.StatusRequest(), FleetStatus, milliseconds(timeout_s) / 1000, keys)


async def submit(
    bus: str,
    command: ProfileCommand | EngineCommand | AdapterDrop | Drain,
    target: Target,
    timeout_s: float,
    keys: KeySource | None = None,
    *,
    force: bool = False,
) -> Report:
    """Publish a command, and return its report. A start with `force` takes over the trainer's session."""
    request = wire.Submit(command=command, target=target, timeout_ms=milliseconds(timeout_s), force=force)
    if (size := len(wire.encode(within_bounds(request)))) > wire.MAX_REPLY_BYTES:
        raise CommandError(f"the request takes {size:,} bytes, of at most {wire.MAX_REPLY_BYTES:,}. Nothing was sent")
    return await _ask(bus, request, Report, timeout_s + ANSWER_S, keys)


async def sync(
    bus: str,
    path: str,
    version: int | None = None,
    timeout_s: float = 600.0,
    keys: KeySource | None = None,
    adapter: AdapterRequest | None = None,
) -> SyncReport:
    """Bring the fleet to a checkpoint or a version of an adapter; return the report. The timeout is for each phase."""
    request = wire.SyncRequest(path=path, version=version, timeout_ms=milliseconds(timeout_s), adapter=adapter)
    return await _ask(bus, within_bounds(request), SyncReport, PHASES * timeout_s + ANSWER_S, keys)


async def retire(
    bus: str, places: tuple[str, ...], timeout_s: float = ANSWER_S, keys: KeySource | None = None
) -> FleetStatus:
    """Take places out of the run for good, and return the status of the fleet without them."""
    return await _ask(bus, wire.Retire(places=places), FleetStatus, milliseconds(timeout_s) / 1000, keys)


async def assigned_replica(bus: str, keys: KeySource | None) -> int:
    """Return which replica an agent is to be. Waits for a bus. CommandError: it is full, or the key is for others."""
    request, waited_for = wire.PlaceRequest(token=secrets.token_hex(16)), ""
    while True:
        try:
            return (await _ask(bus, request, wire.PlaceAssigned, ANSWER_S, keys)).replica
        except BusUnreachable as error:
            if str(error) != waited_for:
                logger.warning("waiting to be assigned a replica: %s", waited_for := str(error))
            await anyio.sleep(1)


async def find_peer(bus: str, replica: int, keys: KeySource | None) -> wire.PeerFound:
    """Return a server whose weights the engine of a replica may copy now, or none. Raises RolloutctlError."""
    return await _ask(bus, wire.PeerRequest(replica=replica), wire.PeerFound, ANSWER_S, keys)


async def _ask(
    bus: str, request: wire.Operator | wire.PlaceRequest, expected: type[R], timeout_s: float, keys: KeySource | None
) -> R:
    credentials = keys.credentials() if keys is not None else None
    bus, named = read_address(bus), bus
    if bus == NOWHERE:
        raise BusUnreachable(f"the file {named} names no bus: is the trainer running? Nothing was sent")
    async with agent_dealer(zmq.Context.instance(), bus, credentials, wait_for_listener=False) as dealer:
        with anyio.move_on_after(timeout_s):
            await _finish_handshake(dealer, bus)
            await dealer.send([wire.encode_header(0), wire.encode(request)])
            whole = b""
            while True:
                _, body = wire.parse_frames(await dealer.recv())
                reply = wire.decode_downward(body)
                if isinstance(reply, wire.ReplyPart):
                    whole += reply.part
                    if reply.left:
                        continue
                    reply = wire.decode_downward(whole)
                if isinstance(reply, wire.RequestRejected) or (isinstance(reply, wire.Rejoin) and reply.give_up):
                    raise CommandError(f"the bus at {bus} refused: {reply.reason}")
                if isinstance(reply, expected):
                    return reply
    raise BusUnreachable(
        f"no bus answered at {bus} within {timeout_s:g} s. Is the trainer running, is this its address, and can it be "
        "reached from this machine?"
    )


async def _finish_handshake(dealer: DialledSocket, bus: str) -> None:
    """Wait until the connection is open. Raises KeyRefused or BusUnreachable."""
    while refused := await dealer.refusal():
        if not refused.reached:
            await _reach(bus)
            continue
        raise KeyRefused(f"can't connect to {bus}: {refused.reason}. Nothing was sent")


async def _reach(bus: str) -> None:
    """Raise BusUnreachable with the system's reason why nothing answers there."""
    try:
        await (await connect(bus)).aclose()
    except (OSError, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        why = getattr(cause, "strerror", None) or str(cause)
        raise BusUnreachable(
            f"nothing listens at {bus} ({why}). Is the trainer running, and is this its address? Nothing was sent"
        ) from None
