"""The agent's end of the bus: it joins, stays joined, hears and is heard.

    Hello → Welcome → subscribe, wait for the first frame → Join → Snapshot → commands, until Rejoin: Hello again

Theory of operation. What arrives is decoded, turned into an event and handed to the machine at once, in the reader's
own task: nothing waits in between, and the order of arrival is the order of deciding. What is sent never waits
either: a message that finds no room is dropped and counted, because whoever misses it asks again (the bus repeats a
command that nobody answered, a head shows a hole again, an upload goes on from where the bus says).

Nothing about commands or engines is decided here. What is: when to say hello, and when the bus has been silent for
the length of its lease.
"""

import hashlib
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Final, assert_never

import anyio
from anyio import CancelScope

from schemas.carriers.sockets import Context, EdgeSocket, agent_dealer, agent_subscriber
from schemas.config import AgentConfig, BusConfig
from schemas.errors import AgentError, IdentityTaken, RolloutctlError, WireError
from schemas.events import Answer, Event, LeaseExpired
from schemas.identity import Identity
from schemas.wire import (
    MAX_BYTES,
    TOPIC_COMMAND,
    TOPIC_HEAD,
    Ack,
    CommandOutcome,
    DecisionBatch,
    Downward,
    Goodbye,
    Header,
    Hello,
    Join,
    Rejoin,
    Replay,
    ResendRequest,
    Snapshot,
    TimeReply,
    TimeRequest,
    Upward,
    Welcome,
    encode,
    encode_header,
)
from workers.link.clocks import Clocks
from workers.link.frames import (
    events_address,
    nbytes,
    read_control,
    read_head,
    read_publication,
    read_replay,
    read_snapshot,
)
from workers.link.journal import Journal
from workers.link.status import status
from workers.machine.decide import AgentState, in_sync

logger = logging.getLogger("rolloutctl.agent")

CREDIT: Final = 64
"""Records asked for at once."""
UPLOAD_BYTES: Final = 128 * 1024
KEPT_TIMEOUT_MS: Final = 5_000
"""After so long without `Ack` a batch is taken for lost and sent again."""
PAUSE_MS_MAX: Final = 30_000
FIRST_WORD_S: Final = 5.0
NEXT_WORD_S: Final = 30.0
"""How long nothing may be heard of the bus before the log says so, and how long until it is said again."""
MALFORMED_MS: Final = 60_000
"""Between two lines about malformed messages."""


class AnotherRun(RolloutctlError):
    """The bus is of another run than the journal: seq and epochs begin anew."""

    def __init__(self, run: str) -> None:
        super().__init__(f"the bus is of run {run}")
        self.run = run


class Link:
    """One connection of one incarnation. Dials when made; `run` serves it until cancelled.

    hand: gives an event to the machine; returns when it was decided and its effects are under way.
    wall_ns: the node's wall clock.
    malformed, dropped: messages that could not be read, and that could not be sent.
    Raises BusAddressError for an address that can't be dialled.
    """

    def __init__(
        self,
        bus: str,
        identity: Identity,
        incarnation: str,
        journal: Journal,
        config: AgentConfig,
        context: Context,
        hand: Callable[[Event], None],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.malformed = 0
        self.dropped = 0
        self._bus, self._identity, self._config, self._context, self._hand = bus, identity, config, context, hand
        self._journal = journal
        self._wall_ns, self._clocks = wall_ns, Clocks()
        self._dealer = agent_dealer(context, bus, f"{identity.agent}/{incarnation}".encode())
        self._subscriber: EdgeSocket | None = None
        self._hello = Hello(
            identity=identity, incarnation=incarnation, journal=journal.id, host=socket.gethostname(), pid=os.getpid()
        )
        self._welcome: Welcome | None = None
        self._served: CancelScope | None = None  # from a welcome to the next rejoin
        self._welcomed, self._subscribed, self._snapshot = anyio.Event(), anyio.Event(), anyio.Event()
        self._missing = ""  # what keeps the agent from being joined, for people
        self._lost = anyio.Event()
        self._heard_ms = 0
        self._lease_ms, self._heartbeat_ms = BusConfig().lease_ms, BusConfig().heartbeat_ms
        self._ready = False  # as the bus was told
        self._beat_now = anyio.Event()
        self._noted = anyio.Event()
        self._unsent = False
        self._kept = self._sent = 0  # decisions that the bus has, and that it was sent
        self._sent_ms = 0
        self._complained_ms: int | None = None

    @property
    def safety_polls(self) -> int:
        """Edges that the sockets missed; must stay 0."""
        return self._dealer.safety_polls + (self._subscriber.safety_polls if self._subscriber is not None else 0)

    async def run(self) -> None:
        """Join, and serve until cancelled.

        Raises IdentityTaken, AnotherRun, and AgentError when the journal can't be written or lost what the bus has.
        """
        self._heard_ms = now_ms()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read_control)
            tasks.start_soon(self._beat)
            tasks.start_soon(self._watch_lease)
            tasks.start_soon(self._upload_by_and_by)
            tasks.start_soon(self._say_what_is_missing)
            await self._attend()

    # --- what the machine asks for ------------------------------------------------------------------------------------

    def answer(self, answer: Answer) -> None:
        """Send one outcome."""
        self._send(CommandOutcome(outcome=answer.outcome, rule=answer.rule), answer.epoch, answer.seq)

    def request_resend(self, first: int) -> None:
        """Ask for the records from `first` on."""
        self._send(ResendRequest(first=first, credit=CREDIT))

    def request_snapshot(self) -> None:
        """Ask for the desired state."""
        self._send(Join())

    def noted(self, state: AgentState) -> None:
        """A decision was made: it is uploaded soon, and who waits for this agent to be ready learns of it at once."""
        if not self._unsent:
            self._unsent = True
            self._noted.set()
        if not self._ready and in_sync(state):
            self._beat_now.set()

    def leave(self) -> None:
        """Say good-bye: what was decided, then that nobody will answer any more. For an orderly end; never waits."""
        while self._upload_after(self._sent):
            pass
        self._send(Goodbye())

    def close(self) -> None:
        """Close the sockets. What was sent is still delivered, within the linger time."""
        self._dealer.close()
        if self._subscriber is not None:
            self._subscriber.close()

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """Join; when the bus does not know this agent any more, join again."""
        while True:
            welcome = await self._introduce()
            with CancelScope() as self._served:  # no await between the two, or a rejoin could slip in unseen
                await self._serve(welcome)
            await anyio.sleep(random.uniform(0, self._config.hello_retry_ms) / 1000)  # a fleet does not return at once

    async def _introduce(self) -> Welcome:
        """Say hello until there is a welcome, at pauses that double, with jitter over their whole length."""
        pause_ms = self._config.hello_retry_ms
        nobody = f"nobody listens at {self._bus}"
        self._say_missing(nobody)
        while True:
            with anyio.move_on_after((self._config.hello_retry_ms + random.uniform(0, pause_ms)) / 1000):
                await self._dealer.send([self._header(), encode(self._hello)])
                if self._missing == nobody:
                    self._missing = f"the bus at {self._bus} has not answered hello"
                await self._welcomed.wait()
            if self._welcome is not None:
                return self._welcome
            pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)

    def _take_up(self, welcome: Welcome) -> None:
        """Go on from where this bus stands."""
        self._welcome = welcome
        self._lease_ms, self._heartbeat_ms = welcome.lease_ms, welcome.heartbeat_ms
        if not self._journal.run:
            self._journal.join_run(welcome.run)
        elif self._journal.run != welcome.run:
            raise AnotherRun(welcome.run)
        if welcome.recorded_decisions > self._journal.committed:
            raise AgentError(
                f"the journal of agent {self._identity.agent} ends with decision {self._journal.committed}, and the "
                f"log of run {welcome.run} holds {welcome.recorded_decisions} of it: the disk lost what was "
                "written. Move the journal away and start the agent again: it starts anew and reads its engine"
            )
        self._kept = self._sent = welcome.recorded_decisions
        self._ready = False
        self._clocks = Clocks()  # it may be another bus, on another machine
        self._noted.set()
        self._welcomed.set()

    async def _serve(self, welcome: Welcome) -> None:
        try:
            address = events_address(self._bus, welcome)
        except WireError as error:
            self._complain([], error)
            return
        self._subscribed = anyio.Event()
        async with (
            agent_subscriber(self._context, address, (TOPIC_COMMAND, TOPIC_HEAD)) as self._subscriber,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._read_publications, self._subscriber, welcome.run)
            self._say_missing(f"nothing arrives from the publish socket at {address}")
            await self._subscribed.wait()
            await self._join()
            self._missing = ""
            await anyio.sleep_forever()

    async def _join(self) -> None:
        """Ask for the desired state. Only now: what is published from here on is heard."""
        pause_ms = self._config.hello_retry_ms
        self._snapshot = anyio.Event()
        self._missing = f"the bus at {self._bus} has not told the desired state"
        while True:
            self._send(Join())
            with anyio.move_on_after((self._config.hello_retry_ms + random.uniform(0, pause_ms)) / 1000):
                return await self._snapshot.wait()
            pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)

    def _rejoin(self, message: Rejoin) -> None:
        if message.give_up:
            raise IdentityTaken(message.reason)
        self._missing = f"the bus at {self._bus} answers: {message.reason}"
        if self._welcome is not None:
            logger.info("agent %s: %s; saying hello again", self._identity.agent, message.reason)
            self._welcome = None
            self._welcomed = anyio.Event()
            if self._served is not None:
                self._served.cancel()

    def _say_missing(self, what: str) -> None:
        self._missing = what
        self._lost.set()

    async def _say_what_is_missing(self) -> None:
        while True:
            await self._lost.wait()
            self._lost = anyio.Event()
            patience_s = FIRST_WORD_S
            while self._missing:
                await anyio.sleep(patience_s)
                if self._missing:
                    logger.warning("agent %s waits: %s", self._identity.agent, self._missing)
                patience_s = NEXT_WORD_S

    # --- hearing ------------------------------------------------------------------------------------------------------

    async def _read_publications(self, subscriber: EdgeSocket, run: str) -> None:
        while True:
            frames = await subscriber.recv()
            moment = now_ms()
            try:
                event = read_publication(frames, run, moment)
            except WireError as error:
                self._complain(frames, error)
                continue
            if event.epoch >= self._journal.state.epoch:
                self._heard_ms = moment
            if not self._subscribed.is_set():
                self._subscribed.set()
            self._hand(event)

    async def _read_control(self) -> None:
        while True:
            frames = await self._dealer.recv()
            moment = now_ms()
            try:
                head, message = read_control(frames)
                if head.epoch >= self._journal.state.epoch:
                    self._heard_ms = moment
                self._take(head, message, moment)
            except WireError as error:
                self._complain(frames, error)

    def _take(self, head: Header, message: Downward, moment: int) -> None:
        match message:
            case Replay():
                run = self._welcome.run if self._welcome is not None else ""
                for command in read_replay(head, message, run, moment):
                    self._hand(command)
                self._hand(read_head(head, moment))  # more may be missing than fits into a page
            case Ack():
                self._keep(message)
            case TimeReply():
                self._note_time(message)
            case Snapshot():
                self._hand(read_snapshot(head, message, moment))
                self._snapshot.set()
            case Welcome():
                if self._welcome is None:
                    self._take_up(message)
            case Rejoin():
                self._rejoin(message)
            case _:
                assert_never(message)

    def _complain(self, frames: list[bytes], error: WireError) -> None:
        """Count, and say so once in a while: by hash, since the bytes are a stranger's."""
        self.malformed += 1
        moment = now_ms()
        if self._complained_ms is not None and moment - self._complained_ms < MALFORMED_MS:
            return
        self._complained_ms = moment
        digest = hashlib.sha256(b"".join(frames)).hexdigest()
        logger.warning(
            "agent %s dropped a malformed message from the bus (%d until now): %s; sha256 %s, %d bytes",
            *(self._identity.agent, self.malformed, error, digest[:16], nbytes(frames)),
        )

    async def _watch_lease(self) -> None:
        """Every frame of the bus starts the lease anew; silence for its length is an event, and again after as long."""
        await self._welcomed.wait()
        since = self._heard_ms
        while True:
            lease_ms = self._lease_ms
            await anyio.sleep_until((since + lease_ms) / 1000)
            if self._heard_ms > since:
                since = self._heard_ms
                continue
            since += lease_ms
            logger.warning("agent %s heard nothing of its bus for %d ms", self._identity.agent, lease_ms)
            self._hand(LeaseExpired(at_ms=since))

    # --- being heard --------------------------------------------------------------------------------------------------

    def _header(self, origin: int = 0, seq: int | None = None) -> bytes:
        state = self._journal.state
        return encode_header(state.epoch, origin, state.seq if seq is None else seq)

    def _send(self, message: Upward, origin: int = 0, seq: int | None = None) -> bool:
        if self._welcome is None:
            self.dropped += 1
            return False
        body = encode(message)
        frames = [self._header(origin, seq), body]
        if len(body) > MAX_BYTES - 1024:
            logger.error("agent %s can't send %d bytes in one message", self._identity.agent, len(body))
        elif self._dealer.send_nowait(frames):
            return True
        self.dropped += 1
        return False

    async def _beat(self) -> None:
        """The heartbeat, and between two of them the news that this agent became ready."""
        while True:
            await self._welcomed.wait()
            with anyio.move_on_after(self._heartbeat_ms / 1000):
                await self._beat_now.wait()
            self._beat_now = anyio.Event()
            now = status(self._journal.state, self._clocks.told)
            if self._send(now):
                self._ready = now.ready
            self._send(TimeRequest(sent_ns=time.monotonic_ns()))
            if self._sent > self._kept and now_ms() - self._sent_ms > KEPT_TIMEOUT_MS:
                self._sent = self._kept
            self._upload()

    def _note_time(self, told: TimeReply) -> None:
        """The first estimate is told at once, later ones go with a heartbeat."""
        unknown = self._clocks.told is None
        before_ns, loop_s, wall_ns = time.monotonic_ns(), anyio.current_time(), self._wall_ns()
        self._clocks.take(told, loop_s, wall_ns, (before_ns, time.monotonic_ns()))
        if unknown and self._clocks.told is not None:
            self._beat_now.set()

    # --- decisions into the run's log ---------------------------------------------------------------------------------

    async def _upload_by_and_by(self) -> None:
        """Decisions that touched nothing are written and sent in groups, a part of a heartbeat after they were made."""
        while True:
            await self._noted.wait()
            await anyio.sleep(self._heartbeat_ms / 4000)
            self._noted, self._unsent = anyio.Event(), False
            self._journal.commit()
            self._upload()

    def _upload(self) -> None:
        """Send the next batch, unless one is under way."""
        if self._sent == self._kept:
            self._upload_after(self._kept)

    def _upload_after(self, number: int) -> bool:
        welcome, journal = self._welcome, self._journal
        if welcome is None or welcome.run != journal.run or number >= journal.committed:
            return False
        first, decisions = journal.after(number, self._config.batch, UPLOAD_BYTES)
        if not decisions or not self._send(DecisionBatch(journal=journal.id, first=first, decisions=decisions)):
            return False
        self._sent = first + len(decisions) - 1
        self._sent_ms = now_ms()
        return True

    def _keep(self, message: Ack) -> None:
        if message.journal != self._journal.id or not self._kept < message.through <= self._sent:
            return
        self._kept = self._sent = message.through
        self._journal.release(self._kept)
        self._upload()


def now_ms() -> int:
    """The agent's monotonic clock: that of the event loop, so that a test's clock rules here too."""
    return int(anyio.current_time() * 1000)
