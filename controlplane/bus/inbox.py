"""From the ROUTER's frames to what the coordinator understands. Every byte from outside passes through here.

Theory of operation. A turn of the bus hands in message after message with `take`, then collects what they came to:
`events` for the coordinator, and what it need not decide (decisions of agents for the log, questions of operators).
All outcomes of a turn are one event. What is malformed is counted, told once in a while by its hash, and dropped.
A heartbeat that repeats the last one is a sign of life and nothing more.

Rule 1  An agent speaks for itself: its routing id is its place and its incarnation, and a hello that says otherwise is
        malformed. Only operators' routing ids ask operators' questions.
Rule 2  Outcomes that arrived before a hello or a good-bye are handed in before it: the order decides who is missing.
Rule 3  Nothing here grows with what strangers send: there is an entry for each agent that said hello, and a fixed
        number of entries for those who sent what can't be read.
"""

import hashlib
import logging
import time
from typing import Final

from controlplane.machine.events import (
    AnswersReceived,
    CoordinatorEvent,
    HelloReceived,
    JoinReceived,
    PeerAnswer,
    PeerLost,
    ResendRequested,
    StatusReceived,
)
from controlplane.machine.fleet import CoordinatorState, member_at
from controlplane.record.log import RunLog
from schemas.errors import WireError
from schemas.reports import AgentStatus
from schemas.wire import (
    Ack,
    CommandOutcome,
    DecisionBatch,
    Goodbye,
    Hello,
    Join,
    Operator,
    ResendRequest,
    StatusRequest,
    Submit,
    TimeRequest,
    Upward,
    decode_upward,
    parse_frames,
)

logger = logging.getLogger("rolloutctl.bus")

OPERATOR: Final = "op/"
"""How the routing ids of operators begin; no agent's does."""
MALFORMED_US: Final = 60_000_000
"""Between two lines in the process's log about one peer."""
MALFORMED_LINES: Final = 20
"""Lines about all peers in that time."""
MALFORMED_PEERS: Final = 1024
"""Peers whose malformed messages are counted apart; of more, the oldest are forgotten."""


class Inbox:
    """What arrives at one bus.

    events: for the coordinator, in order.   kept: what agents are told of their decisions once they are committed.
    asked: what operators want.   times: who asked for the time: the peer, what it sent, when it was read (wall, ns).
    heard: when each agent was last heard, in µs of the bus's clock.
    deaf: agents are not listened to any more.   malformed: messages that could not be read.
    """

    def __init__(self, log: RunLog) -> None:
        self.events: list[CoordinatorEvent] = []
        self.kept: list[tuple[str, Ack]] = []
        self.asked: list[tuple[str, Operator]] = []
        self.times: list[tuple[str, int, int]] = []
        self.heard: dict[str, int] = {}
        self.deaf = False
        self.malformed = 0
        self._log = log
        self._answers: list[PeerAnswer] = []
        self._said: dict[str, tuple[int, bytes]] = {}
        self._complaints: dict[bytes, tuple[int, int]] = {}  # by peer: how many, and when it was last told
        self._lines: list[int] = []

    def take(self, frames: list[bytes], at_us: int, at_ns: int, state: CoordinatorState) -> None:
        """Read one message. state: as of the beginning of the turn. Never raises for what a peer sends."""
        try:
            peer = frames[0].decode()
            head, body = parse_frames(frames[1:])
            if peer in self.heard:
                self.heard[peer] = at_us
                if self._said.get(peer) == (head.seq, body) and member_at(state, peer) is not None:
                    return
            message = decode_upward(body)
            if isinstance(message, (StatusRequest, Submit)):
                self._ask(peer, message)
            elif not self.deaf:
                self._hear(peer, head.origin, head.seq, body, message, at_us, at_ns, state)
        except (WireError, UnicodeDecodeError) as error:
            self._complain(frames, error, at_us)

    def collect(self, at_us: int) -> list[CoordinatorEvent]:
        """The events of the messages that were taken since the last time."""
        self._gather(at_us)
        events, self.events = self.events, []
        return events

    def silent(self, since_us: int, at_us: int, state: CoordinatorState) -> None:
        """Count as lost who was not heard since a moment, and forget it."""
        for peer, heard_us in list(self.heard.items()):
            if heard_us < since_us:  # not sooner, even for a stranger: its hello may be of this very turn
                del self.heard[peer]
                if member_at(state, peer) is not None:
                    self.events.append(PeerLost(at_us=at_us, peer=peer, reason="silent"))
        for peer in self._said.keys() - self.heard.keys():
            del self._said[peer]

    def forgive(self, late_us: int, at_us: int) -> None:
        """The bus itself was asleep: what it did not hear in that time is not the agents' silence."""
        self.heard = {peer: min(at_us, heard_us + late_us) for peer, heard_us in self.heard.items()}

    def _hear(
        self,
        peer: str,
        origin: int,
        seq: int,
        body: bytes,
        message: Upward,
        at_us: int,
        at_ns: int,
        state: CoordinatorState,
    ) -> None:
        match message:
            case CommandOutcome():
                self._answers.append(
                    PeerAnswer(peer=peer, origin=origin, seq=seq, outcome=message.outcome, rule=message.rule)
                )
            case AgentStatus():
                self._said[peer] = (seq, body)
                self.events.append(StatusReceived(at_us=at_us, peer=peer, seq=seq, status=message))
            case TimeRequest():
                # Read now, not at the turn's beginning: a question can't be read before it was asked.
                if member_at(state, peer) is not None:
                    self.times.append((peer, message.sent_ns, time.time_ns()))
            case DecisionBatch():
                # A stranger is told so when it shows its next sign of life.
                if (name := member_at(state, peer)) is not None:
                    through = self._log.take(name, message, at_ns)
                    self.kept.append((peer, Ack(journal=message.journal, through=through)))
            case ResendRequest():
                request_resend = ResendRequested(at_us=at_us, peer=peer, first=message.first, credit=message.credit)
                self.events.append(request_resend)
            case Join():
                self.events.append(JoinReceived(at_us=at_us, peer=peer))
            case Hello():
                self._greet(peer, message, at_us)
            case Goodbye():
                self._gather(at_us)
                self.events.append(PeerLost(at_us=at_us, peer=peer, reason="left"))

    def _greet(self, peer: str, hello: Hello, at_us: int) -> None:
        name = hello.identity.agent
        if peer != f"{name}/{hello.incarnation}":
            raise WireError(f"a hello of agent {name} under another routing id")
        self._gather(at_us)
        self._said.pop(peer, None)  # with a hello the coordinator forgets what the agent said of itself
        self.heard[peer] = at_us
        recorded = self._log.recorded(name, hello.journal)
        self.events.append(HelloReceived(at_us=at_us, peer=peer, hello=hello, recorded_decisions=recorded))

    def _ask(self, peer: str, message: Operator) -> None:
        if not peer.startswith(OPERATOR):
            raise WireError("an operator's question from somebody else")
        self.asked.append((peer, message))

    def _gather(self, at_us: int) -> None:
        if self._answers:
            self.events.append(AnswersReceived(at_us=at_us, answers=tuple(self._answers)))
            self._answers.clear()

    def _complain(self, frames: list[bytes], error: Exception, at_us: int) -> None:
        """Count, and say so once in a while: by hash, since the bytes are a stranger's."""
        self.malformed += 1
        peer = frames[0]
        count, told_us = self._complaints.pop(peer, (0, at_us - MALFORMED_US))
        self._lines = [line_us for line_us in self._lines if at_us - line_us < MALFORMED_US]
        if at_us - told_us >= MALFORMED_US and len(self._lines) < MALFORMED_LINES:
            told_us = at_us
            self._lines.append(at_us)
            digest = hashlib.sha256(b"\0".join(frames[1:])).hexdigest()[:16]
            nbytes = sum(map(len, frames[1:]))
            text = "malformed message from %a: %s; %d bytes, sha256 %s. Dropped; %d of this peer so far"
            logger.warning(text, peer[:64], error, nbytes, digest, count + 1)
        self._complaints[peer] = (count + 1, told_us)
        if len(self._complaints) > MALFORMED_PEERS:
            del self._complaints[next(iter(self._complaints))]
