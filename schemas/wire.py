"""What travels between the bus and its agents: headers, envelopes, control messages, and the one guard that decodes.

A message is `[topic,] header, body`: the topic only on the publish socket. The header is an array that is frozen for
major version 2; the body is a tagged map, so fields can be added. Integers only; the unit is in the name. Nothing
here is ever decoded into `Any`, and no hook builds objects.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from schemas.commands import Command, Target, UnknownCommand
from schemas.desired import Desired
from schemas.errors import WireError
from schemas.events import Decision, Effect, Event
from schemas.identity import Count, Identity, Name, Positive, Text
from schemas.outcomes import Outcome
from schemas.reports import AgentStatus, FleetStatus, Report

MAGIC = 0x524F  # "RO"
MAJOR = 2
MINOR = 0
MAX_FRAMES = 8
MAX_BYTES = 256 * 1024
MAX_COMMAND_BYTES = 64 * 1024
TOPIC_COMMAND = b"c2"
TOPIC_HEAD = b"h2"

Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A reading of a clock; small enough that differences and sums of two can be written down."""


class Header(Struct, frozen=True, array_like=True, gc=False):
    """First frame of every message. Never changes within major version 2.

    epoch: of the bus that sends, or that the agent last saw; it fences.   origin: epoch of the record, 0 for control
    messages.   seq: of the record, or the position the message speaks of.
    """

    magic: int
    major: int
    minor: int
    epoch: int
    origin: int
    seq: int


class Envelope(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command on the wire. The header beside it carries its epochs and seq.

    issued_at_ns: wall clock of the bus, for people.   ttl_ms: time to act, counted from receipt, so that clocks that
    differ between nodes can't expire it.   body: the encoded `Command`; raw, so that an unknown one leaves the
    envelope readable.
    """

    run: Name
    issued_at_ns: int
    ttl_ms: Count
    body: Raw
    target: Target = Target()


# --- agent to bus -----------------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent introduces itself. journal: id of its journal; recorded decisions are counted within it."""

    identity: Identity
    incarnation: Name
    journal: Name
    host: Name
    pid: Count


class Join(Struct, frozen=True, kw_only=True, tag="join"):
    """Ask for the desired state. Sent only after the first frame of the subscription, so that nothing falls between."""


class TimeRequest(Struct, frozen=True, kw_only=True, tag="time_request"):
    """What does the bus's clock show? Goes with every heartbeat. sent_ns: of a clock that only the agent reads."""

    sent_ns: Nanoseconds


class CommandOutcome(Struct, frozen=True, kw_only=True, tag="outcome"):
    """The outcome of one command; the header's seq and origin name the record."""

    outcome: Outcome
    rule: Count


class ResendRequest(Struct, frozen=True, kw_only=True, tag="resend_request"):
    """Ask for records from `first` on, at most `credit` of them."""

    first: Positive
    credit: Positive


class DecisionBatch(Struct, frozen=True, kw_only=True, tag="decisions"):
    """Decisions of the agent's machine, numbered `first`, `first` + 1, … within its journal."""

    journal: Name
    first: Positive
    decisions: tuple[Decision, ...]


class Goodbye(Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The agent ends in good order."""


Upward = Hello | Join | AgentStatus | TimeRequest | CommandOutcome | ResendRequest | DecisionBatch | Goodbye

# --- bus to agent -----------------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `Hello`. recorded_decisions: how many of the journal's decisions the log holds; it sends those after.

    publish_port: port of the publish socket on the host that the agent dialled; None on ipc and inproc, where it is
    the dialled address with `-publish` appended. No address that comes over the wire is ever dialled.
    """

    run: Name
    publish_port: Positive | None
    heartbeat_ms: Positive
    lease_ms: Positive
    recorded_decisions: Count


class Snapshot(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """What is desired of the agent's replica as of the header's seq."""

    desired: Desired


class CommandRecord(Struct, frozen=True, kw_only=True):
    """One command in a page of replay. ttl_ms of its envelope is what is left of it; 0 when its time is over."""

    origin: Positive
    seq: Positive
    envelope: Envelope


class Replay(Struct, frozen=True, kw_only=True, tag="replay"):
    """A page of records, in order. The header's seq is the head of the bus."""

    records: tuple[CommandRecord, ...]


class Ack(Struct, frozen=True, kw_only=True, tag="ack"):
    """The log holds the journal's decisions up to and with `through`."""

    journal: Name
    through: Count


class Rejoin(Struct, frozen=True, kw_only=True, tag="rejoin"):
    """The bus does not know the sender: say hello again. final: there is no use in trying."""

    reason: Text
    give_up: bool = False


class TimeReply(Struct, frozen=True, kw_only=True, tag="time_reply"):
    """Answer to `TimeRequest`. received_ns, replied_ns: the bus's wall clock, when it read the question and now."""

    sent_ns: Nanoseconds
    received_ns: Nanoseconds
    replied_ns: Nanoseconds


Downward = Welcome | Snapshot | Replay | Ack | Rejoin | TimeReply

# --- a person at a running bus ----------------------------------------------------------------------------------------


class StatusRequest(Struct, frozen=True, kw_only=True, tag="status_request"):
    """What does the fleet look like?"""


class Submit(Struct, frozen=True, kw_only=True, tag="submit"):
    """Publish a command by hand and report."""

    command: Command
    target: Target
    timeout_ms: Positive


class RequestRejected(Struct, frozen=True, kw_only=True, tag="rejected"):
    """The bus did not do what an operator asked."""

    reason: Text


Operator = StatusRequest | Submit
Reply = FleetStatus | Report | RequestRejected

# --- encoding and the guard -------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder(order="deterministic")
encode = _encoder.encode
"""Encode any of our structs. Deterministic: the same value gives the same bytes in every process."""

_header = msgspec.msgpack.Decoder(Header)
_envelope = msgspec.msgpack.Decoder(Envelope)
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_tagged = msgspec.msgpack.Decoder(dict[str, Raw])
_tag = msgspec.msgpack.Decoder(str)
_upward: msgspec.msgpack.Decoder[Upward | Operator] = msgspec.msgpack.Decoder(Upward | Operator)
_downward: msgspec.msgpack.Decoder[Downward | Reply] = msgspec.msgpack.Decoder(Downward | Reply)
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
effects_decoder = msgspec.msgpack.Decoder(tuple[Effect, ...])
decision_decoder = msgspec.msgpack.Decoder(Decision)

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)
"""Everything that decoding bytes of a stranger can raise (seen with msgspec 0.22)."""


def encode_header(epoch: int, origin: int = 0, seq: int = 0) -> bytes:
    """The header frame of a message of this version."""
    return encode(Header(MAGIC, MAJOR, MINOR, epoch, origin, seq))


def parse_frames(frames: list[bytes]) -> tuple[Header, bytes]:
    """Check a received message (without topic or routing id) and return its header and undecoded body.

    Raises WireError: wrong number or size of frames, not our magic, another major version.
    """
    if len(frames) != 2:
        raise WireError(f"a message has 2 frames, not {len(frames)}")
    size = len(frames[0]) + len(frames[1])
    if size > MAX_BYTES:
        raise WireError(f"a message has at most {MAX_BYTES} bytes, not {size}")
    try:
        head = _header.decode(frames[0])
    except DECODE_ERRORS as error:
        raise WireError(f"unreadable header: {type(error).__name__}") from None
    if head.magic != MAGIC:
        raise WireError("not a message of rolloutctl")
    if head.major != MAJOR:
        raise WireError(f"protocol version {head.major}, this side speaks {MAJOR}")
    if min(head.epoch, head.origin, head.seq) < 0:
        raise WireError("negative number in a header")
    return head, frames[1]


def decode_upward(body: bytes) -> Upward | Operator:
    """Decode what an agent or operator sent. Raises WireError."""
    try:
        return _upward.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"unreadable message from an agent: {_say(error)}") from None


def decode_downward(body: bytes) -> Downward | Reply:
    """Decode what the bus sent. Raises WireError."""
    try:
        return _downward.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"unreadable message from the bus: {_say(error)}") from None


def decode_envelope(body: bytes) -> Envelope:
    """Decode the outer part of a command. Raises WireError."""
    try:
        return _envelope.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"unreadable envelope: {_say(error)}") from None


def decode_command(body: Raw) -> Command | UnknownCommand:
    """Decode a command. One with an unknown tag, or one that breaks the rules of its type, is an `UnknownCommand`.

    It must not raise: the envelope is in order, and an agent that stumbles over a record would stop for ever.
    """
    try:
        return _command.decode(body)
    except DECODE_ERRORS:
        pass
    try:
        return UnknownCommand(_tag.decode(_tagged.decode(body)["type"])[:64])
    except (*DECODE_ERRORS, KeyError):
        return UnknownCommand("unreadable")


def _say(error: Exception) -> str:
    """The kind of the error and, for a schema violation, where: never the bytes."""
    return f"{type(error).__name__}: {str(error)[:200]}"
