"""Decoding of the bus's frames into events of the agent's machine. Every byte from outside passes through here.

An event that leaves this file can be encoded and decoded again: it goes into the journal, and an agent cannot restart
from a journal that cannot be read back. A struct does not check its numbers when it is built, so they are checked here.

A command is never dropped once its epoch, origin and seq are known. It would be a hole that no resend can fill, and the
agent would stand still behind it. What can't be read, or is out of bounds, is an `UnknownCommand`, which is answered.
"""

from collections.abc import Iterator

from msgspec import Raw

from schemas import wire
from schemas.errors import WireError
from schemas.events import CommandReceived, HeadSeen

_NIL = b"\xc0"


def read_publication(frames: list[bytes], run: str, now_ms: int) -> CommandReceived | HeadSeen:
    """Decode what arrived on the subscription. Raises WireError if it is malformed, or of another run than `run`."""
    topic = frames[0]
    if topic == wire.TOPIC_COMMAND:
        head, body = wire.parse_frames(frames[1:])
        _check(head.epoch)
        if not (head.origin and head.seq):
            raise WireError("a command without origin or seq")
        return read_command(head.epoch, head.origin, head.seq, body, run, now_ms)
    if topic == wire.TOPIC_HEAD:
        head, _ = wire.parse_frames(frames[1:])
    elif len(frames) == 1 and topic.startswith(wire.TOPIC_HEAD):
        # The welcome that libzmq sends to a new subscriber is a single frame: topic and header together.
        head, _ = wire.parse_frames([topic[len(wire.TOPIC_HEAD) :], _NIL])
    else:
        raise WireError("a publication under a topic that was not subscribed to")
    return read_head(head, now_ms)


def read_control(frames: list[bytes]) -> tuple[wire.Header, wire.Received]:
    """Decode what arrived from the router. Raises WireError."""
    head, body = wire.parse_frames(frames)
    _check(head.epoch)
    return head, wire.decode_received(body)


def read_head(head: wire.Header, now_ms: int) -> HeadSeen:
    """Return the position of the bus, which is in heads and in pages of replay. Raises WireError."""
    _check(head.epoch)
    return HeadSeen(at_ms=now_ms, epoch=head.epoch, seq=head.seq)


def read_replay(head: wire.Header, page: wire.Page, run: str, now_ms: int) -> Iterator[CommandReceived]:
    """Yield the commands of a page, as if they came from the publisher now. Raises WireError."""
    for record in page.records:
        place = wire.decode_place(record)
        yield read_command(head.epoch, place.origin, place.seq, place.envelope, run, now_ms)


def publish_address(dialled: str, welcome: wire.Welcome) -> str:
    """Return the address of the publish socket: beside the router, on the host that was dialled. Raises WireError."""
    if not dialled.startswith("tcp://"):
        return f"{dialled}-publish"
    if welcome.publish_port is None:
        raise WireError(f"the bus at {dialled} does not name the port of its publish socket")
    return f"{dialled.rpartition(':')[0]}:{welcome.publish_port}"


def read_command(epoch: int, origin: int, seq: int, body: bytes | Raw, run: str, now_ms: int) -> CommandReceived:
    """Return the command in an envelope. Raises WireError."""
    envelope, command = wire.read_envelope(body, run)
    return CommandReceived(
        at_ms=now_ms,
        epoch=epoch,
        origin=origin,
        seq=seq,
        ttl_ms=envelope.ttl_ms,
        command=command,
        target=envelope.target,
    )


def _check(epoch: int) -> None:
    if epoch == 0:
        raise WireError("a header without epoch")
