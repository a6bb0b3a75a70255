"""From the bus's frames to what the agent's machine understands. Every byte from outside passes through here.

An event that leaves this file can be encoded and decoded again: it goes into the journal, and a journal that can't be
read back would keep the agent from ever starting again. So numbers are checked here that a struct does not check when
it is built, and that a machine could count beyond what MessagePack can write.
"""

from collections.abc import Iterator, Sequence

from schemas.errors import WireError
from schemas.events import CommandReceived, HeadSeen, SnapshotReceived
from schemas.wire import (
    TOPIC_COMMAND,
    TOPIC_HEAD,
    Ack,
    Downward,
    Envelope,
    Header,
    Rejoin,
    Replay,
    Snapshot,
    TimeReply,
    Welcome,
    decode_command,
    decode_downward,
    decode_envelope,
    parse_frames,
)

NUMBER_MAX = 1 << 53
"""Largest epoch, seq and time to live that is believed."""

_NIL = b"\xc0"


def read_publication(frames: list[bytes], run: str, now_ms: int) -> CommandReceived | HeadSeen:
    """What arrived on the subscription. run: the only run whose commands are taken. Raises WireError."""
    topic = frames[0]
    if topic == TOPIC_COMMAND:
        head, body = parse_frames(frames[1:])
        return _command(head.epoch, head.origin, head.seq, decode_envelope(body), run, now_ms)
    if topic == TOPIC_HEAD:
        head, _ = parse_frames(frames[1:])
    elif len(frames) == 1 and topic.startswith(TOPIC_HEAD):  # libzmq packs what a new subscriber gets into one frame
        head, _ = parse_frames([topic[len(TOPIC_HEAD) :], _NIL])
    else:
        raise WireError("a publication under a topic that nobody asked for")
    return read_head(head, now_ms)


def read_control(frames: list[bytes]) -> tuple[Header, Downward]:
    """What arrived from the router. Raises WireError."""
    head, body = parse_frames(frames)
    _check(head.epoch, head.seq)
    message = decode_downward(body)
    if not isinstance(message, Welcome | Snapshot | Replay | Ack | Rejoin | TimeReply):
        raise WireError(f"{type(message).__name__} is not for agents")
    return head, message


def read_head(head: Header, now_ms: int) -> HeadSeen:
    """The position of the bus, which heads are about and which pages of replay tell as well. Raises WireError."""
    _check(head.epoch, head.seq)
    return HeadSeen(at_ms=now_ms, epoch=head.epoch, seq=head.seq)


def read_snapshot(head: Header, snapshot: Snapshot, now_ms: int) -> SnapshotReceived:
    """The desired state as of the header's seq."""
    return SnapshotReceived(at_ms=now_ms, epoch=head.epoch, seq=head.seq, desired=snapshot.desired)


def read_replay(head: Header, replay: Replay, run: str, now_ms: int) -> Iterator[CommandReceived]:
    """The commands of a page, as if they came from the publisher now. Raises WireError."""
    for record in replay.records:
        yield _command(head.epoch, record.origin, record.seq, record.envelope, run, now_ms)


def events_address(dialled: str, welcome: Welcome) -> str:
    """Where the publish socket is: beside the router, on the host that was dialled. Raises WireError without a port."""
    if not dialled.startswith("tcp://"):
        return f"{dialled}-publish"
    if welcome.publish_port is None or welcome.publish_port > 65535:
        raise WireError(f"the bus at {dialled} does not tell the port of its publish socket")
    return f"{dialled.rpartition(':')[0]}:{welcome.publish_port}"


def nbytes(frames: Sequence[bytes]) -> int:
    """Size of a message."""
    return sum(map(len, frames))


def _command(epoch: int, origin: int, seq: int, envelope: Envelope, run: str, now_ms: int) -> CommandReceived:
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
        command=decode_command(envelope.body),
        target=envelope.target,
    )


def _check(epoch: int, seq: int) -> None:
    if not (0 < epoch < NUMBER_MAX and seq < NUMBER_MAX):
        raise WireError("a header without epoch, or with numbers beyond belief")
