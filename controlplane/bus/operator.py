"""Asks a running bus for its status, to publish a command, or to retire a place. For the command line.

One request, one reply.
"""

from typing import Final, TypeVar

import anyio
import zmq

from schemas import wire
from schemas.carriers.sockets import agent_dealer
from schemas.commands import EngineCommand, ProfileCommand, Target
from schemas.config import milliseconds
from schemas.errors import BusUnreachable, CommandError
from schemas.reports import FleetStatus, Report

R = TypeVar("R", FleetStatus, Report)

ANSWER_S: Final = 5.0
"""How long a bus may take to reply, in addition to the timeout of a command."""


async def ask_status(bus: str, timeout_s: float = ANSWER_S) -> FleetStatus:
    """Return the status of the fleet. Raises BusUnreachable, BusAddressError, or CommandError if the bus refused."""
    return await _ask(bus, wire.StatusRequest(), FleetStatus, timeout_s)


async def submit(bus: str, command: ProfileCommand | EngineCommand, target: Target, timeout_s: float) -> Report:
    """Publish a command on a running bus, and return its report.

    Raises:
        BusUnreachable: No reply. The command may have been published.
        BusAddressError: The address can't be used.
        CommandError: The bus refused.
        ConfigError: The timeout is out of bounds.
    """
    request = wire.Submit(command=command, target=target, timeout_ms=milliseconds(timeout_s))
    return await _ask(bus, request, Report, timeout_s + ANSWER_S)


async def retire(bus: str, places: tuple[str, ...], timeout_s: float = ANSWER_S) -> FleetStatus:
    """Take places out of the run for good, and return the status of the fleet without them.

    Raises:
        BusUnreachable, BusAddressError: As for `submit`.
        CommandError: An agent is still running there, or the run does not know the place.
    """
    return await _ask(bus, wire.Retire(places=places), FleetStatus, timeout_s)


async def _ask(bus: str, request: wire.Operator, expected: type[R], timeout_s: float) -> R:
    async with agent_dealer(zmq.Context.instance(), bus) as dealer:
        with anyio.move_on_after(timeout_s):
            await dealer.send([wire.encode_header(0), wire.encode(request)])
            while True:
                _, body = wire.parse_frames(await dealer.recv())
                reply = wire.decode_downward(body)
                if isinstance(reply, wire.RequestRejected):
                    raise CommandError(f"the bus at {bus} refused: {reply.reason}")
                if isinstance(reply, expected):
                    return reply
    raise BusUnreachable(
        f"no bus answered at {bus} within {timeout_s:g} s. Is the trainer running, is this its address, and can it be "
        "reached from this machine?"
    )
