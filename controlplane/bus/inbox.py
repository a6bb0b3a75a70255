"""Turns the ROUTER's frames into events for the coordinator. Every byte from outside passes through here.

Theory of operation. A turn of the bus begins with `begin_turn`, which sets the time of its events. The bus passes in
every message with `receive`, then takes the results: `take_events` for the coordinator, and what needs no decision
(decisions of agents for the log, requests of operators, requests for the time).
All outcomes of a turn are one event. A malformed message is counted, logged now and then by its hash, and dropped. A
heartbeat that repeats the last one is a sign of life and nothing more.

Rule 1  Who is behind a connection is what its hello says, once: a connection speaks for one incarnation of one agent. A
        connection that has not said hello is a stranger, and is told to. One that sends an operator's request is an
        operator.
Rule 2  Outcomes that arrived before a hello or a goodbye are passed on before it: the order decides who is missing.
Rule 3  Nothing here grows with what strangers send: there are entries only for connections that said hello, at most
        CONNECTIONS_MAX, until they fall silent.
"""

import hashlib
import logging
import time
from collections import deque
from typing import Final

from controlplane.machine import events
from controlplane.machine.fleet import CoordinatorState, member_at
from controlplane.record.log import RunLog
from schemas import wire
from schemas.errors import WireError
from schemas.reports import AgentStatus

logger = logging.getLogger("rolloutctl.bus")

CONNECTIONS_MAX: Final = 65_536
"""Connections of agents that are known at once."""
PEER_CHARS_MAX: Final = 255
"""Longest peer that the log can hold."""
MALFORMED_US: Final = 60_000_000
MALFORMED_LINES: Final = 20
"""Log lines about malformed messages in each period of `MALFORMED_US`."""


def connection_of(peer: str) -> bytes:
    """Return the routing id of a peer's connection."""
    return bytes.fromhex(peer.rpartition("/")[2])


class Inbox:
    """What arrives at one bus.

    Attributes:
        events: For the coordinator, in order.
        acks: For agents whose decisions were recorded; to be sent once they are committed.
        requests: Of operators, with the connections to answer.
        refused: Requests of operators that can't be read or are out of bounds, with the reason.
        strangers: Connections that sent something without a hello; to be told to say it.
        time_replies: For agents that asked for the time; to be completed and sent at once.
        last_heard_us: When each agent last sent a message, on the bus's clock.
        operators_only: Messages of agents are ignored from now on.
        malformed: Messages that could not be read.
    """

    def __init__(self, log: RunLog) -> None:
        self.events: list[events.CoordinatorEvent] = []
        self.acks: list[tuple[str, wire.Ack]] = []
        self.requests: list[tuple[bytes, wire.Operator]] = []
        self.refused: list[tuple[bytes, str]] = []
        self.strangers: set[bytes] = set()
        self.time_replies: list[tuple[str, wire.TimeReply]] = []
        self.last_heard_us: dict[str, int] = {}
        self.operators_only = False
        self.malformed = 0
        self._log = log
        self._answers: list[events.PeerAnswer] = []
        self._peers: dict[bytes, str] = {}  # by connection: who said hello on it
        self._last_status: dict[str, tuple[int, bytes]] = {}  # by peer: seq and body of its last heartbeat
        self._logged_us: deque[int] = deque(maxlen=MALFORMED_LINES)  # when malformed messages were logged
        self._at_us = self._at_ns = 0
        self._state = log.state

    def begin_turn(self, at_us: int, at_ns: int, state: CoordinatorState) -> None:
        """Set the moment, on the bus's clock and on the wall clock, and the state that messages are read against."""
        self._at_us, self._at_ns, self._state = at_us, at_ns, state

    def receive(self, frames: list[bytes]) -> None:
        """Read one message. Never raises for anything that a peer sends."""
        try:
            header, body = wire.parse_frames(frames[1:])
            peer = self._peers.get(connection := frames[0])
            if peer is not None:
                self.last_heard_us[peer] = self._at_us
                if self._last_status.get(peer) == (header.seq, body) and member_at(self._state, peer) is not None:
                    return
            message = self._decode(connection, body)
            if isinstance(message, (wire.StatusRequest, wire.Submit, wire.Retire)):
                self.requests.append((connection, message))
            elif self.operators_only:
                return
            elif isinstance(message, wire.Hello):
                self._on_hello(connection, message)
            elif peer is not None:
                self._on_message(peer, header, body, message)
            elif not isinstance(message, wire.Goodbye):
                self.strangers.add(connection)
        except WireError as error:
            self._on_malformed(frames, error)

    def _decode(self, connection: bytes, body: bytes) -> wire.Upward | wire.Operator:
        """Decode a body. A person who waits for the answer to a request is told what is wrong with it."""
        try:
            return wire.decode_upward(body)
        except WireError as error:
            if wire.tag_of(body) in wire.OPERATOR_TAGS:
                self.refused.append((connection, str(error)))
            raise

    def take_events(self) -> list[events.CoordinatorEvent]:
        """Return the events of the messages received since the last call."""
        self._flush_answers()
        taken, self.events = self.events, []
        return taken

    def drop_silent(self, since_us: int) -> None:
        """Report agents as lost that have sent nothing since a moment, and forget them."""
        for peer, heard_us in list(self.last_heard_us.items()):
            if heard_us < since_us:  # not sooner, even for a stranger: its hello may be of this very turn
                del self.last_heard_us[peer], self._peers[connection_of(peer)]
                if member_at(self._state, peer) is not None:
                    self.events.append(
                        events.PeerLost(at_us=self._at_us, at_ns=self._at_ns, peer=peer, reason="silent")
                    )
        for peer in self._last_status.keys() - self.last_heard_us.keys():
            del self._last_status[peer]

    def discount(self, late_us: int) -> None:
        """Don't count time in which the bus itself did not run as silence of the agents."""
        self.last_heard_us = {peer: min(self._at_us, heard + late_us) for peer, heard in self.last_heard_us.items()}

    # --- one message --------------------------------------------------------------------------------------------------

    def _on_message(self, peer: str, header: wire.Header, body: bytes, message: wire.Upward) -> None:
        """Read a message of an agent that said hello on this connection."""
        at_us = self._at_us
        match message:
            case wire.CommandOutcome(outcome=outcome, rule=rule):
                answer = events.PeerAnswer(peer=peer, origin=header.origin, seq=header.seq, outcome=outcome, rule=rule)
                self._answers.append(answer)
            case AgentStatus():
                self._last_status[peer] = (header.seq, body)
                self.events.append(
                    events.StatusReceived(at_us=at_us, at_ns=self._at_ns, peer=peer, seq=header.seq, status=message)
                )
            case wire.TimeRequest():
                # Read the clock now, not at the beginning of the turn: a request can't be read before it was sent.
                if member_at(self._state, peer) is not None:
                    received_ns = time.time_ns()
                    reply = wire.TimeReply(sent_ns=message.sent_ns, received_ns=received_ns, replied_ns=received_ns)
                    self.time_replies.append((peer, reply))
            case wire.DecisionBatch():
                self._on_decisions(peer, message)
            case wire.ResendRequest(first=first, credit=credit):
                self.events.append(
                    events.ResendRequested(at_us=at_us, at_ns=self._at_ns, peer=peer, first=first, credit=credit)
                )
            case wire.Join():
                self.events.append(events.JoinReceived(at_us=at_us, at_ns=self._at_ns, peer=peer))
            case wire.Goodbye():
                self._flush_answers()
                self.events.append(events.PeerLost(at_us=at_us, at_ns=self._at_ns, peer=peer, reason="left"))

    def _on_decisions(self, peer: str, batch: wire.DecisionBatch) -> None:
        name = member_at(self._state, peer)
        if name is not None:  # a stranger is told to say hello at its next sign of life
            through = self._log.append_batch(name, batch, self._at_ns)
            self.acks.append((peer, wire.Ack(journal=batch.journal, through=through)))

    def _on_hello(self, connection: bytes, hello: wire.Hello) -> None:
        """From here on the connection speaks for this agent."""
        name = hello.identity.agent
        peer = f"{name}/{hello.incarnation}/{connection.hex()}"
        if self._peers.get(connection, peer) != peer:
            raise WireError(f"a hello of agent {name} on the connection of another one")
        if len(connection) != 5 or connection[0] != 0:
            raise WireError(f"a hello of agent {name} on a connection that chose its own routing id")
        if len(peer) > PEER_CHARS_MAX or len(self._peers) >= CONNECTIONS_MAX:
            raise WireError(f"a hello of agent {name} with too long an incarnation, or with too many others")
        self._peers[connection] = peer
        self._flush_answers()
        self._last_status.pop(peer, None)  # with a hello, the coordinator forgets the agent's last status
        self.last_heard_us[peer] = self._at_us
        recorded = self._log.recorded(name, hello.journal)
        self.events.append(
            events.HelloReceived(
                at_us=self._at_us, at_ns=self._at_ns, peer=peer, hello=hello, recorded_decisions=recorded
            )
        )

    def _flush_answers(self) -> None:
        if self._answers:
            self.events.append(
                events.AnswersReceived(at_us=self._at_us, at_ns=self._at_ns, answers=tuple(self._answers))
            )
            self._answers.clear()

    def _on_malformed(self, frames: list[bytes], error: Exception) -> None:
        """Count it, and log it now and then: by hash, since the bytes are a stranger's."""
        self.malformed += 1
        if len(self._logged_us) == MALFORMED_LINES and self._at_us - self._logged_us[0] < MALFORMED_US:
            return
        self._logged_us.append(self._at_us)
        data = b"\0".join(frames[1:])
        digest = hashlib.sha256(data).hexdigest()[:16]
        text = "dropped a malformed message from %a: %s; %d bytes, sha256 %s; %d so far"
        logger.warning(text, frames[0][:64], error, len(data), digest, self.malformed)
