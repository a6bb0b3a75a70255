"""Turns the ROUTER's frames into events for the coordinator. Every byte from outside passes through here.

Theory of operation. A turn of the bus begins with `begin_turn`, which sets the time of its events. The bus passes in
every message with `receive`, then takes the results: `take_events` for the coordinator, and what needs no decision
(decisions of agents for the log, requests of operators, requests for the time).
All outcomes of a turn are one event. A malformed message is counted, logged now and then by its hash, and dropped. A
heartbeat that repeats the last one is a sign of life and nothing more.

Rule 1  Who is behind a connection is what its hello says, once: a connection speaks for one incarnation of one agent. A
        connection that has not said hello is a stranger, and is told to. One that sends an operator's request is an
        operator.
        Where the bus has keys, the key of a connection says what it may send, in every message.
Rule 2  Outcomes that arrived before a hello or a goodbye are passed on before it: the order decides who is missing. So
        are those that arrived before a heartbeat of the same agent: the newer of the two says what it serves.
Rule 3  Nothing here grows with what strangers send: there are entries only for connections that said hello, at most
        CONNECTIONS_MAX, until they fall silent.
"""

import hashlib
from collections.abc import Callable
from typing import Final

from controlplane.machine import events
from controlplane.machine.coordinator_state import UNKNOWN_PEER, CoordinatorState, member_at
from controlplane.machine.permissions import Grant, refusal
from controlplane.record.log import RunLog
from schemas import wire
from schemas.agent_status import AgentStatus, RequestCounts
from schemas.errors import WireError
from schemas.identity import agent_of
from schemas.logs import logger_of
from schemas.wall_clock import wall_clock_ns

logger = logger_of("bus")

GrantOf = Callable[[bytes], Grant | str]
"""Returns what a key may do, or why it may do nothing."""

CONNECTIONS_MAX: Final = 65_536
"""Connections of agents that are known at once."""
LOST_MAX: Final = 256
"""Agents that are lost in one turn because they are silent: to lose 4,096 at once took 44 ms."""
PEER_CHARS_MAX: Final = 255
"""Longest name of a peer that the log can hold."""
BODY_BYTES_MAX: Final = wire.MAX_BYTES - 1024
"""Largest body that fits into a message with any header."""


def connection_of(peer: str) -> bytes:
    """Return the routing id of a peer's connection."""
    return bytes.fromhex(peer.rpartition("/")[2])


def _peer_at(connection: bytes, agent: str, process: str) -> str:
    """Return the name of the peer at a connection. Raises WireError."""
    if len(connection) != 5 or connection[0] != 0:
        raise WireError(f"a hello of agent {agent} on a connection that chose its own routing id")
    return f"{agent}/{process}/{connection.hex()}"


class Inbox:
    """What arrives at one bus.

    Args:
        log: For the decisions of agents.
        grant_of: Returns what a key may do, or why it may do nothing. Each message then begins with its sender's key.

    Attributes:
        acks: For agents whose decisions were recorded; to be sent once they are committed.
        requests: Of operators and observers, with the connections to answer, and whether an observer's key was used.
        replies: What to tell connections at once: to say hello, that a message can't be read, or that a key does not
            allow what they sent. No decision is behind it, so nothing is recorded.
        time_replies: For agents that asked for the time; to be completed and sent at once.
        request_counts: What each peer last said of its engine's requests.
        operators_only: Messages of agents are ignored from now on.
        keys_changed: Set it when `grant_of` may answer differently from now on.
    """

    def __init__(self, log: RunLog, grant_of: GrantOf | None = None) -> None:
        self.events: list[events.CoordinatorEvent] = []
        self.acks: list[tuple[str, wire.Ack]] = []
        self.requests: list[tuple[bytes, wire.Operator, bool]] = []
        self.replies: dict[bytes, wire.Rejoin | wire.RequestRejected] = {}
        self.time_replies: list[tuple[str, wire.TimeReply]] = []
        self.last_heard_us: dict[str, int] = {}
        self.request_counts: dict[str, RequestCounts] = {}
        self.operators_only = self.keys_changed = False
        self.malformed = 0
        self._log, self._grant_of = log, grant_of
        self._answers: list[events.PeerAnswer] = []
        self._answering: set[str] = set()  # peers of those
        self._peers: dict[bytes, str] = {}  # by connection: who said hello on it
        self._keys: dict[bytes, bytes] = {}  # by connection of those: the key that it has proven to hold
        self._last_status: dict[str, tuple[int, bytes]] = {}  # by peer: seq and body of its last heartbeat
        self._at_us = self._at_ns = 0
        self._state = log.state
        self._newest_frames: list[bytes] = []  # of the message that was decoded last
        self._newest: tuple[wire.Header, wire.Upward | wire.Operator]

    def begin_turn(self, at_us: int, at_ns: int, state: CoordinatorState) -> None:
        """Set the moment, on the bus's clock and on the wall clock, and the state that messages are read against."""
        self._at_us, self._at_ns, self._state = at_us, at_ns, state
        if self.keys_changed:
            self.keys_changed = False
            self._recheck_keys()

    def receive(self, frames: list[bytes]) -> None:
        """Read one message. Never raises for anything that a peer sends."""
        key = frames.pop(0) if self._grant_of is not None else b""
        connection, message = frames[0], None
        try:
            header, message = self._read(frames[1:])
            peer = self._peers.get(connection)
            grant = self._grant_of(key) if self._grant_of is not None else None
            if peer is not None and not isinstance(grant, str):
                self.last_heard_us[peer] = self._at_us
                last = self._last_status.get(peer)
                same = last is not None and last[1] == frames[-1] and last[0] == header.seq
                if same and member_at(self._state, peer) is not None:
                    return
            if grant is not None and (reason := _denial_reason(grant, message, peer)):
                self._deny(connection, message, reason)
            elif isinstance(message, wire.Operator):
                self.requests.append((connection, message, isinstance(grant, Grant) and grant.role == "observer"))
            elif not self.operators_only:
                self._on_agent(connection, peer, header, frames[-1], message, key)
        except WireError as error:
            if frames[1:] != [b""]:
                self._on_malformed(frames, error)
                if message is None and connection not in self._peers:  # perhaps an operator, who waits for an answer
                    self.replies[connection] = wire.RequestRejected(reason=str(error))
            elif not self.operators_only:  # the probe with which an agent's connection begins
                self.replies[connection] = UNKNOWN_PEER

    def _read(self, frames: list[bytes]) -> tuple[wire.Header, wire.Upward | wire.Operator]:
        """Decode a message. Most agents answer a command alike: then it is decoded once, and they share one outcome."""
        if frames != self._newest_frames:
            header, body = wire.parse_frames(frames)
            self._newest = header, wire.decode_upward(body)
            self._newest_frames = frames
        return self._newest

    def operator_request(self, frames: list[bytes]) -> tuple[bytes, wire.Operator, bool] | None:
        """Return the entry for `requests` of a message from an operator that may send it; None for any other.

        Changes nothing, so the message can still be passed to `receive`.
        """
        grant = None
        if self._grant_of is not None:
            grant, frames = self._grant_of(frames[0]), frames[1:]
        try:
            message = wire.decode_upward(wire.parse_frames(frames[1:])[1])
        except WireError:
            return None
        if not isinstance(message, wire.Operator) or _denial_reason(grant, message, None):
            return None
        return frames[0], message, isinstance(grant, Grant) and grant.role == "observer"

    def take_events(self) -> list[events.CoordinatorEvent]:
        """Return the events of the messages received since the last call."""
        self._flush_answers()
        taken, self.events = self.events, []
        return taken

    def take_requests(
        self,
    ) -> tuple[list[tuple[bytes, wire.Operator, bool]], dict[bytes, wire.Rejoin | wire.RequestRejected]]:
        taken = self.requests, self.replies
        self.requests, self.replies = [], {}
        return taken

    def forget_statuses(self) -> None:
        """Let the next heartbeat of every agent be an event, also if it repeats the one before."""
        self._last_status.clear()

    def drop_silent(self, since_us: int) -> bool:
        """Report agents as lost that have sent nothing since a moment, and forget them. False if more are left."""
        # Not sooner, even for a stranger: its hello may be of this very turn.
        silent = [peer for peer, heard_us in self.last_heard_us.items() if heard_us < since_us]
        for peer in silent[:LOST_MAX]:
            self._forget(connection_of(peer), peer)
            if member_at(self._state, peer) is not None:
                self.events.append(events.PeerLost(peer=peer, reason="silent"))
        for peer in self._last_status.keys() - self.last_heard_us.keys():
            del self._last_status[peer]
        return len(silent) <= LOST_MAX

    def discount(self, late_us: int) -> None:
        """Don't count time in which the bus itself did not run as silence of the agents."""
        self.last_heard_us = {peer: min(self._at_us, heard + late_us) for peer, heard in self.last_heard_us.items()}

    # --- one message --------------------------------------------------------------------------------------------------

    def _on_agent(
        self,
        connection: bytes,
        peer: str | None,
        header: wire.Header,
        body: bytes,
        message: wire.Upward,
        key: bytes,
    ) -> None:
        if isinstance(message, wire.Hello):
            self._on_hello(connection, message, key)
        elif isinstance(message, wire.PlaceRequest):
            peer = _peer_at(connection, "auto", message.token)
            self.events.append(events.PlaceRequested(peer=peer, token=message.token))
        elif peer is not None:
            self._on_message(peer, header, body, message)
        elif not isinstance(message, wire.Goodbye):
            self.replies[connection] = UNKNOWN_PEER

    def _on_message(self, peer: str, header: wire.Header, body: bytes, message: wire.Upward) -> None:
        """Read a message of an agent that said hello on this connection."""
        match message:
            case wire.CommandOutcome(outcome=outcome, rule=rule):
                answer = events.PeerAnswer(peer=peer, origin=header.origin, seq=header.seq, outcome=outcome, rule=rule)
                self._answers.append(answer)
                self._answering.add(peer)
            case AgentStatus():
                self._last_status[peer] = (header.seq, body)
                if peer in self._answering:
                    self._flush_answers()
                self.events.append(events.StatusReceived(peer=peer, seq=header.seq, status=message))
            case wire.TimeRequest():
                # Read the clock now, not at the beginning of the turn: a request can't be read before it was sent.
                if member_at(self._state, peer) is not None:
                    received_ns = wall_clock_ns()
                    reply = wire.TimeReply(sent_ns=message.sent_ns, received_ns=received_ns, replied_ns=received_ns)
                    self.time_replies.append((peer, reply))
            case RequestCounts():
                self.request_counts[peer] = message
            case wire.DecisionBatch():
                self._on_decisions(peer, message)
            case wire.ResendRequest(first=first, credit=credit):
                self.events.append(events.ResendRequested(peer=peer, first=first, credit=credit))
            case wire.Join():
                self.events.append(events.JoinReceived(peer=peer))
            case wire.Leave(grace_ms=grace_ms):
                self.events.append(events.LeaveRequested(peer=peer, grace_ms=grace_ms))
            case wire.Goodbye():
                self._flush_answers()
                self.events.append(events.PeerLost(peer=peer, reason="left"))

    def _on_decisions(self, peer: str, batch: wire.DecisionBatch) -> None:
        name = member_at(self._state, peer)
        if name is not None:  # a stranger is told to say hello at its next sign of life
            if batch.journal != self._state.members[name].hello.journal:  # the log keeps a number for each journal
                raise WireError(f"decisions of agent {name} from another journal than its hello named")
            through = self._log.append_batch(name, batch, self._at_ns)
            self.acks.append((peer, wire.Ack(journal=batch.journal, through=through)))

    def _on_hello(self, connection: bytes, hello: wire.Hello, key: bytes) -> None:
        """From here on the connection speaks for this agent."""
        name = hello.identity.agent
        peer = _peer_at(connection, name, hello.incarnation)
        if self._peers.get(connection, peer) != peer:
            raise WireError(f"a hello of agent {name} on the connection of another one")
        if len(peer) > PEER_CHARS_MAX or len(self._peers) >= CONNECTIONS_MAX:
            raise WireError(f"a hello of agent {name} with too long an incarnation, or with too many others")
        self._peers[connection] = peer
        if self._grant_of is not None:
            self._keys[connection] = key
        self._flush_answers()
        self._last_status.pop(peer, None)  # with a hello, the coordinator forgets the agent's last status
        self.last_heard_us[peer] = self._at_us
        recorded = self._log.recorded(name, hello.journal)
        self.events.append(events.HelloReceived(peer=peer, hello=hello, recorded_decisions=recorded))

    def _flush_answers(self) -> None:
        if self._answers:
            self.events.append(events.AnswersReceived(answers=tuple(self._answers)))
            self._answers.clear()
            self._answering.clear()

    def _recheck_keys(self) -> None:
        """Shut out agents whose key was revoked, or may not be at their place any more."""
        assert self._grant_of is not None
        anything = wire.Join()  # stands for all that an agent sends
        for connection, key in list(self._keys.items()):
            peer, grant = self._peers[connection], self._grant_of(key)
            if reason := _denial_reason(grant, anything, peer):
                self._deny(connection, anything, reason)

    def _deny(self, connection: bytes, message: wire.Upward | wire.Operator, reason: str) -> None:
        """Note what to tell a connection whose key does not allow what it sent. An agent is a stranger from now on."""
        logger.warning("refused %s from connection %s: %s", type(message).__name__, connection.hex(), reason)
        if isinstance(message, wire.Operator):
            self.replies[connection] = wire.RequestRejected(reason=reason)
            return
        self.replies[connection] = wire.Rejoin(reason=reason, give_up=True)
        peer = self._peers.get(connection)
        if peer is not None:
            self._flush_answers()
            self._forget(connection, peer)
            if member_at(self._state, peer) is not None:
                self.events.append(events.PeerLost(peer=peer, reason="refused"))

    def _forget(self, connection: bytes, peer: str) -> None:
        del self._peers[connection], self.last_heard_us[peer]
        self._keys.pop(connection, None)
        self._last_status.pop(peer, None)
        self.request_counts.pop(peer, None)

    def _on_malformed(self, frames: list[bytes], error: Exception) -> None:
        """Count it, and log it now and then: by hash, since the bytes are a stranger's."""
        self.malformed += 1
        data = b"\0".join(frames[1:])
        digest = hashlib.sha256(data).hexdigest()[:16]
        text = "dropped a malformed message from %a: %s; %d bytes, sha256 %s; %d so far"
        logger.warning(text, frames[0][:64], error, len(data), digest, self.malformed)


def _denial_reason(grant: Grant | str | None, message: wire.Upward | wire.Operator, peer: str | None) -> str:
    """Return why a message is refused; empty if it is not, or if the bus has no keys."""
    if grant is None or isinstance(grant, str):
        return grant or ""
    if isinstance(message, wire.Hello):
        return refusal(grant, message, message.identity.agent)
    return refusal(grant, message, agent_of(peer) if peer is not None else None)
