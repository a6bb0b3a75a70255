"""What travels between the bus and its agents: headers, envelopes, control messages, and the one guard that decodes.

A message is `[topic,] header, body`: the topic only on the publish socket. The header is an array that is frozen for
major version 1; the body is a tagged map, so fields can be added. Integers only; the unit is in the name. Nothing
here is ever decoded into `Any`, and no hook builds objects.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from schemas.commands import Command, Target, UnknownCommand
from schemas.desired import Desired
from schemas.errors import CommandFailed, WireError
from schemas.events import Decision, Effect, Event
from schemas.identity import Count, Identity, Name, Positive, Text
from schemas.outcomes import Acted, Conclusion, Failed, Missing, Outcome, Skipped

MAGIC = 0x524F  # "RO"
MAJOR = 1
MINOR = 0
MAX_FRAMES = 8
MAX_BYTES = 256 * 1024
MAX_COMMAND_BYTES = 64 * 1024
TOPIC_COMMAND = b"c1"
TOPIC_HEAD = b"h1"

Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 62)]
"""A reading of a clock; small enough that differences and sums of two can be written down."""


class Header(Struct, frozen=True, array_like=True, gc=False):
    """First frame of every message. Never changes within major version 1.

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


class AskTime(Struct, frozen=True, kw_only=True, tag="ask_time"):
    """What does the bus's clock show? Goes with every heartbeat. sent_ns: of a clock that only the agent reads."""

    sent_ns: Nanoseconds


class Clock(Struct, frozen=True, kw_only=True):
    """An agent's clocks, as measured against the bus's. For timelines: no decision rests on it.

    at_ms, wall_ns: one moment, on the agent's monotonic clock (that of its events) and on its node's wall clock.
    offset_ns: what to add to the node's wall clock for the bus's.   error_ns: by how much that may be wrong then.
    """

    at_ms: int
    wall_ns: int
    offset_ns: int
    error_ns: Count


class Status(Struct, frozen=True, kw_only=True, tag="status", omit_defaults=True):
    """The heartbeat: what an agent is. Its header's seq is the last command applied.

    ready: the engine is as desired and may serve.   activity: the engine call under way, and since how long.
    clock: the last estimate that said something new; None before the first.
    """

    ready: bool
    tokenizer: Name = "unknown"
    engine: Text = "unknown"
    generating: bool = False
    asleep: tuple[Name, ...] = ()
    profiling_step: Count | None = None
    version: Count = 0
    digest: Name | None = None
    quarantined: Count = 0
    torn: bool = False
    activity: Text | None = None
    waiting: Count = 0
    held: Count = 0
    clock: Clock | None = None


class Answered(Struct, frozen=True, kw_only=True, tag="answered"):
    """The outcome of one command; the header's seq and origin name the record."""

    outcome: Outcome
    row: Count


class Needs(Struct, frozen=True, kw_only=True, tag="needs"):
    """Ask for records from `first` on, at most `credit` of them."""

    first: Positive
    credit: Positive


class Recorded(Struct, frozen=True, kw_only=True, tag="recorded"):
    """Decisions of the agent's machine, numbered `first`, `first` + 1, … within its journal."""

    journal: Name
    first: Positive
    decisions: tuple[Decision, ...]


class Leaving(Struct, frozen=True, kw_only=True, tag="leaving"):
    """The agent ends in good order."""


Upward = Hello | Join | Status | AskTime | Answered | Needs | Recorded | Leaving

# --- bus to agent -----------------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `Hello`. recorded: how many of the journal's decisions the log holds; the agent goes on after them.

    events_port: port of the publish socket on the host that the agent dialled; None on ipc and inproc, where it is
    the dialled address with `-events` appended. No address that comes over the wire is ever dialled.
    """

    run: Name
    events_port: Positive | None
    heartbeat_ms: Positive
    lease_ms: Positive
    recorded: Count


class Snapshot(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """What is desired of the agent's replica as of the header's seq."""

    desired: Desired


class Record(Struct, frozen=True, kw_only=True):
    """One command in a page of replay. ttl_ms of its envelope is what is left of it; 0 when its time is over."""

    origin: Positive
    seq: Positive
    envelope: Envelope


class Replay(Struct, frozen=True, kw_only=True, tag="replay"):
    """A page of records, in order. The header's seq is the head of the bus."""

    records: tuple[Record, ...]


class Kept(Struct, frozen=True, kw_only=True, tag="kept"):
    """The log holds the journal's decisions up to and with `through`."""

    journal: Name
    through: Count


class Rejoin(Struct, frozen=True, kw_only=True, tag="rejoin"):
    """The bus does not know the sender: say hello again. final: there is no use in trying."""

    why: Text
    final: bool = False


class TimeTold(Struct, frozen=True, kw_only=True, tag="time_told"):
    """Answer to `AskTime`. received_ns, replied_ns: the bus's wall clock, when it read the question and now."""

    sent_ns: Nanoseconds
    received_ns: Nanoseconds
    replied_ns: Nanoseconds


Downward = Welcome | Snapshot | Replay | Kept | Rejoin | TimeTold

# --- a person at a running bus ----------------------------------------------------------------------------------------


class AskStatus(Struct, frozen=True, kw_only=True, tag="ask_status"):
    """What does the fleet look like?"""


class Submit(Struct, frozen=True, kw_only=True, tag="submit"):
    """Publish a command by hand and report."""

    command: Command
    target: Target
    timeout_ms: Positive


class AgentLine(Struct, frozen=True, kw_only=True):
    """One agent in `rolloutctl status`.

    silent_ms: since it was last heard; 0 of one that is gone.   waits_for: what it is late with.
    """

    agent: Name
    incarnation: Name
    host: Name
    life: Name
    silent_ms: Count
    seq: Count
    status: Status | None
    waits_for: tuple[Text, ...] = ()


class FleetStatus(Struct, frozen=True, kw_only=True, tag="fleet_status"):
    """Answer to `AskStatus`. open: commands that are not concluded, and who has not answered."""

    run: Name
    epoch: Count
    seq: Count
    version: Count
    log: Text
    agents: tuple[AgentLine, ...]
    open: tuple[Text, ...] = ()


class AgentOutcome(Struct, frozen=True, kw_only=True):
    """One line of a report. latency_us: from publishing to the answer's arrival; row: of the decision table."""

    agent: Name
    conclusion: Conclusion
    row: Count = 0
    latency_us: Count = 0


class Report(Struct, frozen=True, kw_only=True, tag="report"):
    """All outcomes of one command: for every agent in the fleet at the time it was issued, exactly one."""

    seq: Count
    origin: Count
    command: Command
    outcomes: tuple[AgentOutcome, ...]

    @property
    def acted(self) -> tuple[str, ...]:
        """Agents that called their engine and saw the effect hold."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Acted))

    @property
    def skipped(self) -> tuple[str, ...]:
        """Agents that had nothing to do."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Skipped))

    @property
    def failed(self) -> tuple[str, ...]:
        """Agents that should have acted and could not."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Failed))

    @property
    def missing(self) -> tuple[str, ...]:
        """Agents that did not answer."""
        return tuple(one.agent for one in self.outcomes if isinstance(one.conclusion, Missing))

    def raise_for_failures(self) -> None:
        """Raise CommandFailed naming every agent that failed or is missing, and why. Skips are not failures."""
        lines = []
        for one in self.outcomes:
            if isinstance(one.conclusion, Failed):
                lines.append(f"  {one.agent} failed ({one.conclusion.error}): {one.conclusion.message}")
            elif isinstance(one.conclusion, Missing):
                lines.append(f"  {one.agent} missing ({one.conclusion.why})")
        if lines:
            raise CommandFailed(f"command {self.seq} did not succeed everywhere:\n" + "\n".join(lines))


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """The bus did not do what an operator asked."""

    why: Text


Operator = AskStatus | Submit
Reply = FleetStatus | Report | Refused

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

HOSTILE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)
"""Everything that decoding bytes of a stranger can raise (seen with msgspec 0.22)."""


def header(epoch: int, origin: int = 0, seq: int = 0) -> bytes:
    """The header frame of a message of this version."""
    return encode(Header(MAGIC, MAJOR, MINOR, epoch, origin, seq))


def open_frames(frames: list[bytes]) -> tuple[Header, bytes]:
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
    except HOSTILE as error:
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
    except HOSTILE as error:
        raise WireError(f"unreadable message from an agent: {_say(error)}") from None


def decode_downward(body: bytes) -> Downward | Reply:
    """Decode what the bus sent. Raises WireError."""
    try:
        return _downward.decode(body)
    except HOSTILE as error:
        raise WireError(f"unreadable message from the bus: {_say(error)}") from None


def decode_envelope(body: bytes) -> Envelope:
    """Decode the outer part of a command. Raises WireError."""
    try:
        return _envelope.decode(body)
    except HOSTILE as error:
        raise WireError(f"unreadable envelope: {_say(error)}") from None


def decode_command(body: Raw) -> Command | UnknownCommand:
    """Decode a command. One with an unknown tag, or one that breaks the rules of its type, is an `UnknownCommand`.

    It must not raise: the envelope is in order, and an agent that stumbles over a record would stop for ever.
    """
    try:
        return _command.decode(body)
    except HOSTILE:
        pass
    try:
        return UnknownCommand(_tag.decode(_tagged.decode(body)["type"])[:64])
    except (*HOSTILE, KeyError):
        return UnknownCommand("unreadable")


def _say(error: Exception) -> str:
    """The kind of the error and, for a schema violation, where: never the bytes."""
    return f"{type(error).__name__}: {str(error)[:200]}"
