"""Messages between the bus, its agents and operators, and the only functions that decode them.

A message is `[topic,] header, body`, with a topic on the publish socket only. The header is an array whose layout is
frozen for major version 2. The body is a tagged map, so fields can be added. Numbers are integers, and their names end
with the unit. Nothing is decoded into `Any`, and no hook builds objects.
"""

from typing import Annotated, Final, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from schemas.agent_status import AgentStatus, RequestCounts
from schemas.commands import AdapterRequest, Command, Grace, RelativePath, Target, UnknownCommand
from schemas.desired import Desired
from schemas.errors import WireError
from schemas.events import Decision, Effect, Event
from schemas.identity import (
    NUMBER_MAX,
    Count,
    Identity,
    Milliseconds,
    MillisecondsLeft,
    Name,
    Nanoseconds,
    Port,
    Positive,
    ReplicaIndex,
    Text,
    Token,
    Url,
)
from schemas.outcomes import Outcome
from schemas.reports import FleetStatus, Report, SyncReport

MAGIC = 0x524F  # "RO"
MAJOR = 2
MINOR = 0
MAX_BYTES = 256 * 1024
MAX_REPLY_BYTES = MAX_BYTES - 1024
REPLY_PART_BYTES = MAX_REPLY_BYTES - 1024
MAX_COMMAND_BYTES = 64 * 1024
MAX_TARGET_BYTES = 64 * 1024
"""A record is a command, its target and some numbers. So it fits into a message, also as the only one of a `Replay`."""
MAX_STATE_BYTES = 64 * 1024
"""Largest state of an agent's machine in a message. A larger one is not sent."""
TOPIC_COMMAND = b"c2"
TOPIC_HEAD = b"h2"


class Header(Struct, frozen=True, array_like=True, gc=False):
    """First frame of every message. Its layout never changes within major version 2.

    Attributes:
        major: Protocol version; a reader refuses another one.
        minor: Grows with each compatible addition.
        epoch: Epoch of the sending bus, or the one that the agent saw last. Used for fencing.
        origin: Epoch in which the command was recorded; 0 in control messages.
    """

    magic: int
    major: int
    minor: int
    epoch: int
    origin: int
    seq: int


class Envelope(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One command on the wire. The header before it carries the epochs and the seq.

    Attributes:
        issued_at_ns: Wall clock of the bus, for people.
        ttl_ms: Time left to act, counted from receipt, so that clock skew between nodes can't expire a command.
        body: The encoded `Command`. Raw, so that the envelope of an unknown command can still be read.
    """

    run: Name
    issued_at_ns: Nanoseconds
    ttl_ms: MillisecondsLeft
    body: Raw
    target: Target = Target()


# --- agent to bus -----------------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag="hello"):
    """An agent introduces itself.

    Attributes:
        incarnation: Random id of this life of the agent.
        journal: Id of the agent's journal. Decisions are numbered within it.
        attempt: How many hellos this incarnation said before. One that was overtaken by a later one is ignored.
        endpoint: Where clients reach the engine's server, if the agent knows.
        rejoin: It takes up its place again, as a new one does, if that was retired before this incarnation began.
    """

    identity: Identity
    incarnation: Name
    journal: Name
    host: Name
    pid: Count
    attempt: Count = 0
    endpoint: Url = ""
    rejoin: bool = False


class Join(Struct, frozen=True, kw_only=True, tag="join"):
    """Ask for the desired state. Sent after the first frame on the subscription, so that no command is missed."""


class TimeRequest(Struct, frozen=True, kw_only=True, tag="time_request"):
    """Ask for the time of the bus. Sent with some heartbeats. `sent_ns` is on a clock that only the agent reads."""

    sent_ns: Nanoseconds


class CommandOutcome(Struct, frozen=True, kw_only=True, tag="outcome"):
    """The outcome of one command, which the header names by seq and origin. See `schemas.events.Answer`."""

    outcome: Outcome
    rule: Count


class ResendRequest(Struct, frozen=True, kw_only=True, tag="resend_request"):
    """Ask the bus to resend commands from `first` on, at most `credit` of them."""

    first: Positive
    credit: Positive


class DecisionBatch(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="decisions"):
    """Decisions of the agent's machine, for the log. They are numbered `first`, `first` + 1, … within its journal.

    Attributes:
        state: Now and then the machine's state after the last of them, encoded, so that a replay can begin there.
    """

    journal: Name
    first: Positive
    decisions: tuple[Decision, ...]
    state: Annotated[bytes, Meta(max_length=MAX_STATE_BYTES)] = b""


class Goodbye(Struct, frozen=True, kw_only=True, tag="goodbye"):
    """The agent leaves the fleet and ends."""


class Leave(Struct, frozen=True, kw_only=True, tag="leave"):
    """The agent was asked to end: its replica is to leave the fleet, and to be retired. It ends when it is told so.

    Attributes:
        grace_ms: As in `Drain`.
    """

    grace_ms: Grace


class PlaceRequest(Struct, frozen=True, kw_only=True, tag="place_request"):
    """Ask which replica to be, before the hello. The bus assigns the lowest index that is free.

    Attributes:
        token: Random id of this request, which may be sent again.
    """

    token: Token


_Told = CommandOutcome | ResendRequest | DecisionBatch
Upward = Hello | Join | AgentStatus | TimeRequest | RequestCounts | _Told | Leave | Goodbye | PlaceRequest

# --- bus to agent -----------------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="welcome"):
    """Answer to `Hello`.

    Attributes:
        publish_port: Port of the publish socket, on the host that the agent dialled. None on ipc and inproc, where it
            is the dialled address with `-publish` appended. An agent never dials an address from the wire.
        lease_ms: An agent that hears nothing from the bus for this long continues without the trainer.
        recorded_decisions: Decisions of the agent's journal that the log holds. The agent sends those that follow.
        head_interval_ms: Time between two heads; None if an older bus does not say. An agent that is answered and hears
            no head subscribes anew.
    """

    run: Name
    publish_port: Port | None
    heartbeat_ms: Milliseconds
    lease_ms: Milliseconds
    recorded_decisions: Count
    head_interval_ms: Milliseconds | None = None


class Snapshot(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """The desired state of the agent's replica, as of the header's seq."""

    desired: Desired


class CommandRecord(Struct, frozen=True, kw_only=True):
    """One command in a `Replay`. The `ttl_ms` of its envelope is the time left, 0 when it has expired."""

    origin: Positive
    seq: Positive
    envelope: Envelope


class Replay(Struct, frozen=True, kw_only=True, tag="replay"):
    """A page of resent commands, in order. The header's seq is the head of the bus."""

    records: tuple[CommandRecord, ...]


class Place(Struct, frozen=True, kw_only=True):
    """A `CommandRecord`, as an agent reads it first: with its envelope encoded."""

    origin: Annotated[int, Meta(ge=1, lt=NUMBER_MAX)]
    seq: Annotated[int, Meta(ge=1, lt=NUMBER_MAX)]
    envelope: Raw


class Page(Struct, frozen=True, kw_only=True, tag="replay"):
    """A `Replay` as an agent reads it: record by record, so that one that can't be read does not hide the others."""

    records: tuple[Raw, ...]


class Ack(Struct, frozen=True, kw_only=True, tag="ack"):
    """Cumulative acknowledgement: the log holds the journal's decisions up to and including `through`."""

    journal: Name
    through: Count


class Rejoin(Struct, frozen=True, kw_only=True, tag="rejoin"):
    """The bus does not accept the sender: say hello again, or stop trying if `give_up` is set."""

    reason: Text
    give_up: bool = False


class TimeReply(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="time_reply"):
    """Answer to `TimeRequest`.

    Attributes:
        heartbeat_ms: Time between two heartbeats from now on, while the fleet is large; None for that of the welcome.
    """

    sent_ns: Nanoseconds
    received_ns: Nanoseconds
    replied_ns: Nanoseconds
    heartbeat_ms: Milliseconds | None = None


class PlaceAssigned(Struct, frozen=True, kw_only=True, tag="place_assigned"):
    """Answer to `PlaceRequest`. No other is assigned it before its agent has had a lease to say hello."""

    replica: ReplicaIndex


Downward = Welcome | Snapshot | Replay | Ack | Rejoin | TimeReply | PlaceAssigned
Received = Welcome | Snapshot | Page | Ack | Rejoin | TimeReply
"""What an agent decodes: `Downward`, with its pages of replay unread."""

# --- operator to bus, and back ----------------------------------------------------------------------------------------


class StatusRequest(Struct, frozen=True, kw_only=True, tag="status_request"):
    """Ask for the state of the fleet."""


class Submit(Struct, frozen=True, kw_only=True, tag="submit"):
    """Publish a command for an operator, and answer with its report.

    Attributes:
        force: A start of a profiling session may take over the trainer's.
    """

    command: Command
    target: Target
    timeout_ms: Milliseconds
    force: bool = False


class SyncRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sync_request"):
    """Bring the fleet to a checkpoint for an operator, and answer with the report of the sync.

    Attributes:
        path: Of the checkpoint, below the checkpoint root of the bus and of each agent.
        version: None for the next of the run.
        adapter: The LoRA adapter that it is a version of; None for base weights. Its `config` is not read.
    """

    path: RelativePath
    timeout_ms: Milliseconds
    version: Positive | None = None
    adapter: AdapterRequest | None = None


class Retire(Struct, frozen=True, kw_only=True, tag="retire"):
    """Take places out of the run for good, and answer with the status of the fleet.

    Attributes:
        places: Each a replica, by index, or one agent, by name.
    """

    places: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]


class PeerRequest(Struct, frozen=True, kw_only=True, tag="peer_request"):
    """Ask for a server whose weights another engine may copy while it is launched. An agent asks, before its hello.

    Attributes:
        replica: Of the engine that is launched.
    """

    replica: ReplicaIndex


class PeerFound(Struct, frozen=True, kw_only=True, tag="peer_found"):
    """Answer to `PeerRequest`.

    Attributes:
        url: Of the server; empty if there is none now.
        content: `Manifest.content` of the weights that it holds; empty if that is not known.
        digest: What the engine itself reports of them; empty likewise.
    """

    url: Url = ""
    content: Text = ""
    digest: Text = ""


class RequestRejected(Struct, frozen=True, kw_only=True, tag="rejected"):
    """The bus did not do what the operator asked."""

    reason: Text


Operator = StatusRequest | Submit | SyncRequest | Retire | PeerRequest


class ReplyPart(Struct, frozen=True, kw_only=True, tag="reply_part"):
    """A part of a reply that is too large for one message. The parts are sent one after the other.

    Attributes:
        left: How many parts follow.
    """

    part: bytes
    left: Count


Reply = FleetStatus | Report | SyncReport | PeerFound | RequestRejected | ReplyPart

T = TypeVar("T")

# --- encoding and decoding --------------------------------------------------------------------------------------------

UNREADABLE: Final = "unreadable"
"""Stands for the tag of a command that has none that can be read."""
UNREADABLE_TTL_MS: Final = 60_000
"""Time to live of an envelope that can't be read."""
PROBLEM_MAX: Final = 200
"""Characters of a decoder's complaint that are kept."""
_KNOWN_TAGS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(Command))


class _Run(Struct):
    """What is read of an envelope that can't be read as a whole."""

    run: Name


_encoder = msgspec.msgpack.Encoder(order="deterministic")
encode = _encoder.encode
"""Encode any Struct of this protocol. The same value gives the same bytes in every process."""

_header_decoder = msgspec.msgpack.Decoder(Header)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_run_decoder = msgspec.msgpack.Decoder(_Run)
_place_decoder = msgspec.msgpack.Decoder(Place)
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_map_decoder = msgspec.msgpack.Decoder(dict[str, Raw])
_tag_decoder = msgspec.msgpack.Decoder(str)
_upward_decoder: msgspec.msgpack.Decoder[Upward | Operator] = msgspec.msgpack.Decoder(Upward | Operator)
_received_decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(Received)
_downward_decoder: msgspec.msgpack.Decoder[Downward | Reply] = msgspec.msgpack.Decoder(Downward | Reply)
event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
effects_decoder = msgspec.msgpack.Decoder(tuple[Effect, ...])
decision_decoder = msgspec.msgpack.Decoder(Decision)

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)
"""All exceptions that decoding arbitrary bytes can raise (observed with msgspec 0.22)."""


def encode_header(epoch: int, origin: int = 0, seq: int = 0) -> bytes:
    """Return the header frame of a message."""
    return encode(Header(MAGIC, MAJOR, MINOR, epoch, origin, seq))


def parse_frames(frames: list[bytes]) -> tuple[Header, bytes]:
    """Return the header and the undecoded body of a message without topic and routing id. Raises WireError."""
    if len(frames) != 2:
        raise WireError(f"a message has 2 frames, not {len(frames)}")
    size = len(frames[0]) + len(frames[1])
    if size > MAX_BYTES:
        raise WireError(f"a message has at most {MAX_BYTES} bytes, not {size}")
    try:
        head = _header_decoder.decode(frames[0])
    except DECODE_ERRORS as error:
        raise WireError(f"unreadable header: {type(error).__name__}") from None
    if head.magic != MAGIC:
        raise WireError("not a message of rolloutctl")
    if head.major != MAJOR:
        raise WireError(f"protocol version {head.major}, this side speaks {MAJOR}")
    numbers = (head.epoch, head.origin, head.seq)
    if min(numbers) < 0 or max(numbers) >= NUMBER_MAX:
        raise WireError("a number in the header is out of bounds")  # the next seq must be within them too
    return head, frames[1]


def encode_reply(reply: Reply | Rejoin) -> list[bytes]:
    """Encode the answer to an operator: as one body, or in parts if it is of a large fleet."""
    body = encode(reply)
    if len(body) <= MAX_REPLY_BYTES:
        return [body]
    starts = range(0, len(body), REPLY_PART_BYTES)
    return [
        encode(ReplyPart(part=body[start : start + REPLY_PART_BYTES], left=left))
        for left, start in zip(reversed(range(len(starts))), starts, strict=True)
    ]


def decode_upward(body: bytes) -> Upward | Operator:
    """Decode a body that an agent or operator sent. Raises WireError."""
    return _decode(_upward_decoder, body, "message from an agent")


def decode_received(body: bytes) -> Received:
    """Decode a body that the bus sent to an agent. Raises WireError."""
    return _decode(_received_decoder, body, "message from the bus")


def decode_downward(body: bytes) -> Downward | Reply:
    """Decode any body that the bus sent. Raises WireError."""
    return _decode(_downward_decoder, body, "message from the bus")


def decode_envelope(body: bytes | Raw) -> Envelope:
    """Decode a body on the publish socket; the command inside stays encoded. Raises WireError."""
    return _decode(_envelope_decoder, body, "envelope")


def read_envelope(body: bytes | Raw, run: str) -> tuple[Envelope, Command | UnknownCommand]:
    """Decode an envelope and the command in it.

    It raises WireError only for an envelope of another run. Any other has its place in the order of commands, and an
    agent that dropped it could never go on: what can't be read becomes an `UnknownCommand` for all.
    """
    try:
        envelope = decode_envelope(body)
    except WireError as error:
        envelope = Envelope(run=_run_of(body) or run, issued_at_ns=0, ttl_ms=UNREADABLE_TTL_MS, body=Raw())
        command: Command | UnknownCommand = UnknownCommand(UNREADABLE, str(error)[:PROBLEM_MAX])
    else:
        command = decode_command(envelope.body)
    if envelope.run != run:
        raise WireError("a command of another run")
    return envelope, command


def _run_of(body: bytes | Raw) -> str:
    try:
        return _decode(_run_decoder, body, "envelope").run
    except WireError:
        return ""


def decode_place(record: Raw) -> Place:
    """Decode the position of one record of a page; its envelope stays encoded. Raises WireError."""
    return _decode(_place_decoder, record, "record of a page")


def decode_command(body: Raw) -> Command | UnknownCommand:
    """Decode a command. One with an unknown tag or with invalid fields becomes an `UnknownCommand`. Never raises."""
    try:
        return _command_decoder.decode(body)
    except DECODE_ERRORS as error:
        problem = str(error)[:PROBLEM_MAX]
    tag = tag_of(body)
    return UnknownCommand(tag or UNREADABLE, "" if tag and tag not in _KNOWN_TAGS else problem)


def tag_of(body: bytes | Raw) -> str:
    """Return the tag of a message that can't be decoded, cut to 64 characters; empty if it has none."""
    try:
        return _tag_decoder.decode(_map_decoder.decode(body)["type"])[:64]
    except (*DECODE_ERRORS, KeyError):
        return ""


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes | Raw, what: str) -> T:
    try:
        return decoder.decode(body)
    except DECODE_ERRORS as error:  # names the path of an invalid field, and never shows the bytes
        raise WireError(f"unreadable {what}: {type(error).__name__}: {str(error)[:200]}") from None
