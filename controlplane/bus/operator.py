"""Asks a running bus for its status, to publish a command, or to retire a place. For the command line.

One request, one reply; that of a large fleet comes in parts.
"""

from typing import Final, TypeVar

import anyio
import zmq

from schemas import wire
from schemas.carriers.handshakes import DialledSocket
from schemas.carriers.keys import KeySource
from schemas.carriers.sockets import agent_dealer
from schemas.commands import EngineCommand, ProfileCommand, Target
from schemas.config import milliseconds, within_bounds
from schemas.errors import BusUnreachable, CommandError, KeyRefused
from schemas.reports import FleetStatus, Report

R = TypeVar("R", FleetStatus, Report)

ANSWER_S: Final = 5.0
"""How long a bus may take to reply, in addition to the timeout of a command."""


async def ask_status(bus: str, timeout_s: float = ANSWER_S, keys: KeySource | None = None) -> FleetStatus:
    """Return the status of the fleet.

    Raises:
        BusUnreachable: No reply.
        KeyRefused: The bus refuses this key, or requires one.
        BusAddressError: The address can't be used.
        CommandError: The bus refused.
        ConfigError: The timeout is out of bounds.
    """
    return await _ask(bus, wire.StatusRequest(), FleetStatus, milliseconds(timeout_s) / 1000, keys)


async def submit(
    bus: str,
    command: ProfileCommand | EngineCommand,
    target: Target,
    timeout_s: float,
    keys: KeySource | None = None,
    *,
    force: bool = False,
) -> Report:
    """Publish a command on a running bus, and return its report.

    Args:
        bus: Its address.
        command: What to publish.
        target: Which replicas it is for.
        timeout_s: How long agents may take to answer.
        keys: This operator's keys.
        force: A start of a profiling session may take over the trainer's.

    Raises:
        BusUnreachable: No reply. The command may have been published.
        KeyRefused: The bus refuses this key, or requires one. Nothing was published.
        BusAddressError: The address can't be used.
        CommandError: The bus refused, or the request is too large for a message.
        ConfigError: The timeout, or a number of the command or its target, is out of bounds.
    """
    request = wire.Submit(command=command, target=target, timeout_ms=milliseconds(timeout_s), force=force)
    if (size := len(wire.encode(within_bounds(request)))) > wire.MAX_REPLY_BYTES:
        raise CommandError(f"the request takes {size:,} bytes, of at most {wire.MAX_REPLY_BYTES:,}. Nothing was sent")
    return await _ask(bus, request, Report, timeout_s + ANSWER_S, keys)


async def retire(
    bus: str, places: tuple[str, ...], timeout_s: float = ANSWER_S, keys: KeySource | None = None
) -> FleetStatus:
    """Take places out of the run for good, and return the status of the fleet without them.

    Raises:
        BusUnreachable, KeyRefused, BusAddressError: As for `submit`.
        CommandError: An agent is still running there, or the run does not know the place.
    """
    return await _ask(bus, wire.Retire(places=places), FleetStatus, milliseconds(timeout_s) / 1000, keys)


async def _ask(bus: str, request: wire.Operator, expected: type[R], timeout_s: float, keys: KeySource | None) -> R:
    async with agent_dealer(zmq.Context.instance(), bus, keys.credentials() if keys is not None else None) as dealer:
        with anyio.move_on_after(timeout_s):
            await _get_in(dealer, bus, keys)
            await dealer.send([wire.encode_header(0), wire.encode(request)])
            parts: list[FleetStatus | Report] = []
            while True:
                _, body = wire.parse_frames(await dealer.recv())
                reply = wire.decode_downward(body)
                if isinstance(reply, wire.ReplyPart):
                    parts.append(reply.part)
                    if reply.left:
                        continue
                    reply = wire.join_parts(parts)
                if isinstance(reply, wire.RequestRejected):
                    raise CommandError(f"the bus at {bus} refused: {reply.reason}")
                if isinstance(reply, expected):
                    return reply
    raise BusUnreachable(
        f"no bus answered at {bus} within {timeout_s:g} s. Is the trainer running, is this its address, and can it be "
        "reached from this machine?"
    )


async def _get_in(dealer: DialledSocket, bus: str, keys: KeySource | None) -> None:
    """Wait until the connection is open. Tries each key that the bus may have. Raises KeyRefused."""
    attempts = len(keys.keys.servers) if keys is not None else 1
    for attempt in range(1, attempts + 1):
        refused = await dealer.refusal()
        if refused is None:
            return
        if attempt == attempts:
            raise KeyRefused(f"can't connect to {bus}: {refused.reason}. Nothing was sent")
        dealer.redial(keys.credentials(attempt) if keys is not None else None)
