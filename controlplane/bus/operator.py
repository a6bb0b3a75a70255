"""A person, or a script, at a running bus: one question, one answer. For the command line."""

import secrets
from typing import Final

import anyio
import zmq

from schemas.carriers.sockets import agent_dealer
from schemas.commands import EngineCommand, ProfileCommand, Target
from schemas.errors import BusUnreachable, CommandError
from schemas.reports import FleetStatus, Report
from schemas.wire import (
    Operator,
    Reply,
    RequestRejected,
    StatusRequest,
    Submit,
    decode_downward,
    encode,
    encode_header,
    parse_frames,
)

ANSWER_S: Final = 5.0
"""How long a bus may take to answer, on top of the time that a command has."""


async def ask_status(bus: str, patience_s: float = ANSWER_S) -> FleetStatus:
    """What the fleet looks like. Raises BusUnreachable, BusAddressError, CommandError (the bus refused)."""
    reply = await _ask(bus, StatusRequest(), patience_s)
    assert isinstance(reply, FleetStatus)
    return reply


async def submit(bus: str, command: ProfileCommand | EngineCommand, target: Target, timeout_s: float) -> Report:
    """Publish a command on somebody else's bus and return its report.

    Raises BusUnreachable, BusAddressError, CommandError. After BusUnreachable the command may have been published.
    """
    asked = Submit(command=command, target=target, timeout_ms=max(1, int(timeout_s * 1000)))
    reply = await _ask(bus, asked, timeout_s + ANSWER_S)
    assert isinstance(reply, Report)
    return reply


async def _ask(bus: str, asked: Operator, patience_s: float) -> Reply:
    expected = FleetStatus if isinstance(asked, StatusRequest) else Report
    async with agent_dealer(zmq.Context.instance(), bus, b"op/" + secrets.token_hex(16).encode()) as dealer:
        with anyio.move_on_after(patience_s):
            await dealer.send([encode_header(0), encode(asked)])
            while True:
                _, body = parse_frames(await dealer.recv())
                reply = decode_downward(body)
                if isinstance(reply, RequestRejected):
                    raise CommandError(f"the bus at {bus} refused: {reply.reason}")
                if isinstance(reply, expected):
                    return reply
    raise BusUnreachable(
        f"no bus answered at {bus} within {patience_s:g} s. Is the trainer running, and is this the address that it "
        "was given? It has to be reachable from this machine"
    )
