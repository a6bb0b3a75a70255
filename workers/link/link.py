"""The agent's end of the bus: it joins, stays joined, receives and sends.

    Hello → Welcome → subscribe, wait for the first frame → Join → Snapshot → commands, until Rejoin: Hello again

Either connection may be half open: it looks alive, and carries nothing. A bus that publishes nothing but answers gets a
new subscription; what happens with one that answers nothing is in `connection`.

Theory of operation. What arrives is decoded, turned into an event and given to the machine at once, where it was read.
Nothing waits in between, so events are decided in the order in which they arrive. Sending never waits either: a message
that finds no room is dropped, because an agent that misses it asks again. The bus repeats a command that was not
answered, the next head shows a hole again, and an upload continues from where the bus says.

Nothing about commands or engines is decided here: only when to say hello, and when the bus has been silent for a lease.
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, assert_never

import anyio
from anyio import CancelScope
from msgspec.structs import replace

from schemas import wire
from schemas.agent_status import RequestCounts
from schemas.config import AgentConfig, BusConfig
from schemas.errors import AgentError, IdentityTaken, RolloutctlError, WireError
from schemas.events import Answer, Event, LeaseExpired, SnapshotReceived
from schemas.identity import Identity
from schemas.logs import RateLimit, logger_of
from schemas.transport.addresses import NOWHERE
from schemas.transport.async_socket import Sent
from schemas.transport.keys import KeySource
from schemas.transport.sockets import Context, agent_subscriber
from workers.link.connection import PAUSE_MS_MAX, Connection, Dialled, WaitWarning, jittered_s
from workers.link.frames import (
    publish_address,
    read_control,
    read_head,
    read_publication,
    read_replay,
)
from workers.link.heartbeat import Heartbeat
from workers.link.journal import Journal
from workers.link.upload import DecisionUpload
from workers.machine.rules import is_leaving
from workers.machine.state import AgentState

logger = logger_of("agent")
malformed_logger = logger_of("malformed")
malformed_logger.addFilter(RateLimit(lines=1, interval_s=60.0))

CREDIT: Final = 64
"""Most records that one request asks for."""
SILENT_MS: Final = 3_000
"""Time without an answer to a question, after which the agent asks on another connection. A hello waits one heartbeat
longer, since a bus that a whole fleet joins answers late."""
HEADS_MISSED: Final = 5
"""Heads that fail to arrive before the agent subscribes anew."""
HEADS_LATE: Final = 2
"""Heads that fail to arrive before the agent doubts that the bus answers."""


class HasLeft(RolloutctlError):
    """The bus has retired the replica, which was told to leave the fleet before."""


class RunChanged(RolloutctlError):
    """The bus is of another run than the journal: seq and epochs start again."""

    def __init__(self, run: str) -> None:
        super().__init__(f"the bus is of run {run}")


@dataclass
class _Session:
    """The time from a welcome to the next rejoin.

    Attributes:
        repeated: Joins that were sent again, because a busy bus did not answer in time. Each brings one more snapshot.
    """

    welcome: wire.Welcome
    scope: CancelScope = field(default_factory=CancelScope)
    subscribed: anyio.Event = field(default_factory=anyio.Event)
    snapshot: anyio.Event = field(default_factory=anyio.Event)
    repeated: int = 0


def as_it_is(address: str, connection: Literal["control", "commands"]) -> str:
    """Dial the bus itself."""
    return address


class Link:
    """One connection of one incarnation. It dials when created; `run` serves it until cancelled.

    Raises BusAddressError.
    """

    def __init__(
        self,
        bus: str,
        identity: Identity,
        incarnation: str,
        journal: Journal,
        config: AgentConfig,
        context: Context,
        handle: Callable[[Event], None],
        now_ms: Callable[[], int],
        wake_at: Callable[[int], None],
        wall_ns: Callable[[], int],
        counts: Callable[[], RequestCounts] = RequestCounts,
        keys: KeySource | None = None,
        dialled: Dialled = as_it_is,
        endpoint: str = "",
    ) -> None:
        self._bus, self._config, self._context, self._dialled = bus, config, context, dialled
        self._agent, self._journal, self._handle = identity.agent, journal, handle
        self._now_ms = now_ms
        self._keys = keys
        self._waiting, self.malformed = WaitWarning(self._agent), 0
        self._connection = Connection(
            bus,
            dialled,
            self._agent,
            config.hello_retry_ms,
            context,
            keys,
            self._waiting,
            now_ms,
            silence_limit_ms=lambda: SILENT_MS + (self._heartbeat_ms if self._session is None else 0),
            question=lambda: [self._header(), wire.encode(wire.TimeRequest(sent_ns=time.monotonic_ns()))],
            replaced=self._end_session,
        )
        self._hello = wire.Hello(
            identity=identity,
            incarnation=incarnation,
            journal=journal.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            endpoint=endpoint,
            rejoin=config.rejoin,
        )
        self._session: _Session | None = None
        self._leave: wire.Leave | None = None
        self._welcomed = anyio.Event()
        self._intervals: BusConfig | wire.Welcome = BusConfig()  # of heartbeats, as the last welcome set them
        self._heartbeat_ms = self._intervals.heartbeat_ms  # as the bus last said
        self._heard_ms = self._published_ms = 0
        self._heartbeat = Heartbeat(lambda: journal.state, counts, self._send, wall_ns)
        delay_ms = _upload_delay_ms(self._intervals)
        self._upload = DecisionUpload(journal, config.batch, delay_ms, self._send, now_ms, wake_at)

    async def run(self) -> None:
        """Join, and serve until cancelled.

        Raises:
            IdentityTaken: A live agent holds the place, or the bus does not accept the key for it.
            HasLeft: The replica has left the fleet.
            RunChanged: The bus belongs to another run.
            AgentError: The journal cannot be written, or lost decisions that the bus has.
        """
        self._heard_ms = self._now_ms()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._connection.run, self._on_control)
            tasks.start_soon(self._send_heartbeats)
            tasks.start_soon(self._watch_lease)
            tasks.start_soon(self._waiting.run)
            await self._stay_joined()

    # --- what the machine asks for ------------------------------------------------------------------------------------

    def send_outcome(self, answer: Answer) -> None:
        self._send(wire.CommandOutcome(outcome=answer.outcome, rule=answer.rule), answer.epoch, answer.seq)

    def request_resend(self, first: int) -> None:
        self._send(wire.ResendRequest(first=first, credit=CREDIT))

    def request_snapshot(self) -> None:
        """Ask for the desired state, unless the agent is about to join: then `_join` does."""
        if self._session is not None and self._session.snapshot.is_set():
            self._session.repeated = 0
            self._send(wire.Join())

    def ask_to_leave(self, grace_ms: int) -> None:
        """Ask that the replica leave the fleet, again with each heartbeat until the bus has published that it does."""
        self._leave = wire.Leave(grace_ms=grace_ms)
        self._send(self._leave)

    def note_decision(self, state: AgentState) -> None:
        """Note a decision that led to `state`: upload it soon, and report at once if the agent became ready."""
        self._upload.note()
        self._heartbeat.note(state)

    def notice_time(self, now_ms: int) -> None:
        self._upload.notice_time(now_ms)

    def leave(self) -> None:
        """Send what was decided, then say goodbye, for an orderly end. Never waits."""
        self._upload.flush()
        self._send(wire.Goodbye())

    def close(self) -> None:
        """Close the socket. What was sent is still delivered, within the linger time."""
        self._connection.close()

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _stay_joined(self) -> None:
        """Join, and join again whenever the bus does not know this agent any more."""
        while True:
            session = await self._say_hello()
            with session.scope:
                await self._serve(session)
            # With jitter, so that a fleet does not return all at once.
            await anyio.sleep(random.uniform(0, self._config.hello_retry_ms) / 1000)

    async def _say_hello(self) -> _Session:
        """Say hello until the bus welcomes the agent. Pauses double, with jitter over their whole length."""
        pause_ms = self._config.hello_retry_ms
        self._waiting.begin(unreachable := self._unreachable())
        while True:
            with (
                anyio.move_on_after(jittered_s(self._config.hello_retry_ms, pause_ms)),
                contextlib.suppress(anyio.ClosedResourceError),
            ):
                # Closed: another connection has taken its place, and the next hello goes there.
                self._connection.note_question()
                await self._connection.dealer.send([self._header(), wire.encode(self._hello)])
                self._hello = replace(self._hello, attempt=self._hello.attempt + 1)
                if self._waiting.reason == unreachable and self._connection.address != NOWHERE:
                    self._waiting.reason = f"the bus at {self._connection.address} has not answered hello"
                await self._welcomed.wait()
            if self._session is not None:
                return self._session
            pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)

    def _unreachable(self) -> str:
        address = self._connection.address
        if address == NOWHERE:
            return f"the file {self._bus} names no bus yet"
        keyless = ", or the bus there admits no peer without a key" if self._keys is None else ""
        return f"nothing listens at {address}{keyless}"

    def _accept_welcome(self, welcome: wire.Welcome) -> None:
        """Begin a session, and continue the upload from where this bus stands."""
        if self._session is not None:
            return
        self._session, self._intervals, self._heartbeat_ms = _Session(welcome), welcome, welcome.heartbeat_ms
        self._connection.welcomed = True
        if self._journal.run not in ("", welcome.run):
            raise RunChanged(welcome.run)
        self._journal.join_run(welcome.run, welcome.lease_ms)
        if welcome.recorded_decisions > self._journal.committed:
            raise AgentError(
                f"the journal of agent {self._agent} ends with decision {self._journal.committed}, but the log of run "
                f"{welcome.run} holds {welcome.recorded_decisions} of them: the disk lost what was written. Move the "
                "journal away and start the agent again: it begins a new journal and reads its engine"
            )
        self._heartbeat.restart()
        self._upload.start(welcome.recorded_decisions, _upload_delay_ms(welcome))
        self._welcomed.set()

    async def _serve(self, session: _Session) -> None:
        try:
            address = publish_address(self._connection.address, session.welcome)
        except WireError as error:
            self._note_malformed(error)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._subscribe, address, session)
            self._waiting.begin(f"nothing arrives from the publish socket at {address}")
            await session.subscribed.wait()
            await self._join(session)
            self._waiting.reason = ""
            state = self._journal.state
            logger.info(
                "agent %s joined run %s at %s: epoch %d, seq %d, committed weights v%d",
                *(
                    self._agent,
                    session.welcome.run,
                    self._connection.address,
                    state.epoch,
                    state.seq,
                    state.desired.version,
                ),
            )
            await anyio.sleep_forever()

    async def _join(self, session: _Session) -> None:
        """Ask for the desired state. Only now, since everything published from here on arrives.

        Only the first snapshot is taken: a command that is issued between two is superseded by the second one.
        """
        pause_ms = self._config.hello_retry_ms
        self._waiting.reason = f"the bus at {self._connection.address} has not sent the desired state"
        session.snapshot = anyio.Event()
        while True:
            self._send(wire.Join())
            with anyio.move_on_after(jittered_s(self._config.hello_retry_ms, pause_ms)):
                return await session.snapshot.wait()
            session.repeated += 1
            pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)

    async def _subscribe(self, address: str, session: _Session) -> None:
        """Read the publish socket, over one connection after the other."""
        topics = (wire.TOPIC_COMMAND, wire.TOPIC_HEAD)
        while True:
            dialled, credentials = self._dialled(address, "commands"), self._connection.credentials()
            async with (
                agent_subscriber(self._context, dialled, topics, credentials) as subscriber,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(subscriber.serve, partial(self._on_publication, session))
                await self._heads_stopped(session.welcome.head_interval_ms)
                tasks.cancel_scope.cancel()
            logger.warning("agent %s: the bus answers, and %s publishes nothing: dialling anew", self._agent, address)

    async def _heads_stopped(self, head_interval_ms: int | None) -> None:
        """Return when the bus has answered, and has published nothing, for the time of some heads."""
        if head_interval_ms is None:
            await anyio.sleep_forever()
            return
        while True:
            since = self._now_ms()
            await anyio.sleep(HEADS_MISSED * head_interval_ms / 1000)
            if self._published_ms < since <= self._connection.answered_ms:
                return

    def _take_snapshot(self, snapshot: SnapshotReceived) -> None:
        session = self._session
        if session is not None and session.snapshot.is_set() and session.repeated:
            session.repeated -= 1
            return
        self._handle(snapshot)
        if session is not None:
            session.snapshot.set()

    def _rejoin(self, message: wire.Rejoin) -> None:
        if message.give_up:
            raise HasLeft if is_leaving(self._journal.state) else IdentityTaken(message.reason)
        self._waiting.reason = f"the bus at {self._connection.address} answers: {message.reason}"
        if self._session is not None:
            logger.info("agent %s: %s; saying hello again", self._agent, message.reason)
            self._end_session()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.scope.cancel()
            self._session, self._welcomed = None, anyio.Event()
            self._upload.stop()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _on_publication(self, session: _Session, frames: list[bytes]) -> None:
        received_ms = self._published_ms = self._now_ms()
        try:
            event = read_publication(frames, session.welcome.run, received_ms)
        except WireError as error:
            self._note_malformed(error)
            return
        self._renew_lease(event.epoch, received_ms)
        session.subscribed.set()
        self._handle(event)

    def _on_control(self, frames: list[bytes]) -> None:
        received_ms = self._now_ms()
        try:
            head, message = read_control(frames)
            self._handle_control(head, message, received_ms)
            self._renew_lease(head.epoch, received_ms)
        except WireError as error:
            self._note_malformed(error)

    def _note_malformed(self, error: WireError) -> None:
        """Count a message that could not be read, and log one now and then. Its content may be anything."""
        self.malformed += 1
        malformed_logger.warning(
            "agent %s dropped a malformed message from the bus (%d so far): %s", self._agent, self.malformed, error
        )

    def _handle_control(self, head: wire.Header, message: wire.Received, received_ms: int) -> None:
        match message:
            case wire.Page():
                run = self._session.welcome.run if self._session is not None else ""
                for command in read_replay(head, message, run, received_ms):
                    self._handle(command)
                self._handle(read_head(head, received_ms))  # more may be missing than fits into a page
            case wire.Ack():
                self._upload.apply_ack(message)
            case wire.TimeReply():
                self._heartbeat_ms = message.heartbeat_ms or self._intervals.heartbeat_ms
                self._heartbeat.apply_time(message)
            case wire.Snapshot():
                self._take_snapshot(
                    SnapshotReceived(at_ms=received_ms, epoch=head.epoch, seq=head.seq, desired=message.desired)
                )
            case wire.Welcome():
                self._accept_welcome(message)
            case wire.Rejoin():
                self._rejoin(message)
            case _:
                assert_never(message)

    def _renew_lease(self, epoch: int, received_ms: int) -> None:
        """Every frame from the current epoch renews the lease of an agent that has joined. Until then the bus commands
        nothing here, however often it answers: its publish socket may be out of reach.
        """
        joined = self._session is not None and self._session.snapshot.is_set()
        if joined and epoch >= self._journal.state.epoch:
            self._heard_ms = received_ms

    async def _watch_lease(self) -> None:
        """Report silence for the length of the lease as an event, and again after each further lease.

        It counts from the start: the bus may be gone for good.
        """
        since = self._heard_ms
        while True:
            lease_ms, welcomed = self._journal.lease_ms, self._welcomed
            with CancelScope(deadline=(since + lease_ms) / 1000):
                if not welcomed.is_set():
                    await welcomed.wait()
                    continue  # this bus may have another lease
                await anyio.sleep_forever()
            if self._heard_ms > since:
                since = self._heard_ms
                continue
            since += lease_ms
            if self._journal.state.joined:
                logger.warning("agent %s heard nothing from its bus for %d ms", self._agent, lease_ms)
            self._handle(LeaseExpired(at_ms=since))

    # --- sending ------------------------------------------------------------------------------------------------------

    def _header(self, origin: int = 0, seq: int | None = None) -> bytes:
        state = self._journal.state
        return wire.encode_header(state.epoch, origin, state.seq if seq is None else seq)

    def _send(self, message: wire.Upward, origin: int = 0, seq: int | None = None) -> bool:
        if self._session is None:
            return False
        if isinstance(message, wire.TimeRequest):
            self._connection.note_question()
        body = wire.encode(message)
        if len(body) > wire.MAX_BYTES - 1024:
            logger.error("agent %s can't send %d bytes in one message", self._agent, len(body))
            return False
        return self._connection.dealer.send_nowait([self._header(origin, seq), body]) is Sent.OK

    async def _send_heartbeats(self) -> None:
        while True:
            await self._welcomed.wait()
            await self._heartbeat.wait(self._heartbeat_ms)
            self._heartbeat.beat(doubtful=self._is_doubtful())
            if self._leave is not None and not self._journal.state.desired.draining:
                self._send(self._leave)
            self._upload.retry()
            if not self._journal.state.in_a_sync:  # an agent that is just joining again takes no part in one
                self._connection.use_new_keys()

    def _is_doubtful(self) -> bool:
        """Whether something is missing that a bus within reach would have sent."""
        head_ms = self._session.welcome.head_interval_ms if self._session is not None else None
        late = head_ms is not None and self._now_ms() - self._published_ms > HEADS_LATE * head_ms
        return late or self._upload.awaits_ack


def _upload_delay_ms(intervals: BusConfig | wire.Welcome) -> int:
    return intervals.heartbeat_ms // 4
