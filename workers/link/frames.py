"""Decoding of the bus's frames into events of the agent's machine. Every byte from outside passes through here.

An event that leaves this file can be encoded and decoded again: it goes into the journal, and an agent cannot restart
from a journal that cannot be read back. A struct does not check its numbers when it is built, and the machine could
count them beyond what MessagePack can encode. So they are checked here.
"""

from collections.abc import Iterator

from schemas import wire
from schemas.errors import WireError
from schemas.events import CommandReceived, HeadSeen, SnapshotReceived

NUMBER_MAX = 1 << 53
"""Largest epoch, seq and time to live that is accepted."""

_NIL = b"\xc0"


def read_publication(frames: list[bytes], run: str, now_ms: int) -> CommandReceived | HeadSeen:
    """Decode what arrived on the subscription. Raises WireError if it is malformed, or of another run than `run`."""
    topic = frames[0]
    if topic == wire.TOPIC_COMMAND:
        head, body = wire.parse_frames(frames[1:])
        return _command(head.epoch, head.origin, head.seq, wire.decode_envelope(body), run, now_ms)
    if topic == wire.TOPIC_HEAD:
        head, _ = wire.parse_frames(frames[1:])
    elif len(frames) == 1 and topic.startswith(wire.TOPIC_HEAD):
        # The welcome that libzmq sends to a new subscriber is a single frame: topic and header together.
        head, _ = wire.parse_frames([topic[len(wire.TOPIC_HEAD) :], _NIL])
    else:
        raise WireError("a publication under a topic that was not subscribed to")
    return read_head(head, now_ms)


def read_control(frames: list[bytes]) -> tuple[wire.Header, wire.Downward]:
    """Decode what arrived from the router. Raises WireError."""
    head, body = wire.parse_frames(frames)
    _check(head.epoch, head.seq)
    message = wire.decode_downward(body)
    if not isinstance(message, wire.Welcome | wire.Snapshot | wire.Replay | wire.Ack | wire.Rejoin | wire.TimeReply):
        raise WireError(f"{type(message).__name__} is not for agents")
    return head, message


def read_head(head: wire.Header, now_ms: int) -> HeadSeen:
    """Return the position of the bus, which is in heads and in pages of replay. Raises WireError."""
    _check(head.epoch, head.seq)
    return HeadSeen(at_ms=now_ms, epoch=head.epoch, seq=head.seq)


def read_snapshot(head: wire.Header, snapshot: wire.Snapshot, now_ms: int) -> SnapshotReceived:
    """Return the desired state as of the header's seq."""
    return SnapshotReceived(at_ms=now_ms, epoch=head.epoch, seq=head.seq, desired=snapshot.desired)


def read_replay(head: wire.Header, replay: wire.Replay, run: str, now_ms: int) -> Iterator[CommandReceived]:
    """Yield the commands of a page, as if they came from the publisher now. Raises WireError."""
    for record in replay.records:
        yield _command(head.epoch, record.origin, record.seq, record.envelope, run, now_ms)


def publish_address(dialled: str, welcome: wire.Welcome) -> str:
    """Return the address of the publish socket: beside the router, on the host that was dialled. Raises WireError."""
    if not dialled.startswith("tcp://"):
        return f"{dialled}-publish"
    if welcome.publish_port is None or welcome.publish_port > 65535:
        raise WireError(f"the bus at {dialled} does not name the port of its publish socket")
    return f"{dialled.rpartition(':')[0]}:{welcome.publish_port}"


def _command(epoch: int, origin: int, seq: int, envelope: wire.Envelope, run: str, now_ms: int) -> CommandReceived:
    if not (0 < epoch < NUMBER_MAX and 0 < origin < NUMBER_MAX and 0 < seq < NUMBER_MAX):
        raise WireError("a command without epoch, origin or seq")
    if envelope.ttl_ms > NUMBER_MAX:
        raise WireError("a command that never expires")
    if envelope.run != run:
        raise WireError("a command of another run")
    return CommandReceived(
        at_ms=now_ms,
        epoch=epoch,
        origin=origin,
        seq=seq,
        ttl_ms=envelope.ttl_ms,
        command=wire.decode_command(envelope.body),
        target=envelope.target,
    )


def _check(epoch: int, seq: int) -> None:
    if not (0 < epoch < NUMBER_MAX and seq < NUMBER_MAX):
        raise WireError("a header without epoch, or with numbers out of bounds")
