"""The agent's connection to its bus: dialled with the agent's keys, and dialled anew when it is half open.

A half-open connection looks alive, and carries nothing. So a bus that answers nothing is asked on a new connection
beside the old one. If only the new one is answered, the old one is given up. A bus that is merely busy answers on the
old one too, and then nothing has changed.
"""

import contextlib
import random
from collections.abc import Callable
from typing import Final, Literal

import anyio
from anyio import CancelScope, to_thread

from schemas.errors import BusAddressError
from schemas.logs import logger_of
from schemas.transport.addresses import NOWHERE, is_file, read_address
from schemas.transport.handshakes import DialledSocket
from schemas.transport.keys import Credentials, KeySource
from schemas.transport.sockets import Context, agent_dealer, stays_here

logger = logger_of("agent")

PAUSE_MS_MAX: Final = 4_000
"""Longest pause between two attempts to join, or to get in."""
CONNECT_S: Final = 5.0
"""Time for a new connection to open, before another one is dialled."""
ANSWER_S: Final = 4.0
"""Time to wait for an answer on a new connection, before another one is dialled."""
REREAD_S: Final = 1.0
"""Time without an answer after which a file that names the bus is read again."""
BUSY_S: Final = 1.0
"""Time in which a bus that answers on a new connection would also answer on the old one."""

Dialled = Callable[[str, Literal["control", "commands"]], str]
"""Returns where to dial for an address of the bus: a relay, on a game day."""

FIRST_WARNING_S: Final = 5.0
NEXT_WARNING_S: Final = 30.0
"""Time without progress before the first warning, and between two warnings."""


class WaitWarning:
    """Warns when an agent waits long for its bus."""

    def __init__(self, agent: str) -> None:
        self.reason = ""
        self._agent = agent
        self._waiting = anyio.Event()

    def begin(self, reason: str) -> None:
        self.reason = reason
        self._waiting.set()

    def explain(self, reason: str) -> None:
        """Give a better reason for what the agent waits for, if it waits."""
        if self.reason:
            self.reason = reason

    async def run(self) -> None:
        while True:
            await self._waiting.wait()
            self._waiting = anyio.Event()
            delay_s = FIRST_WARNING_S
            while self.reason:
                await anyio.sleep(delay_s)
                if self.reason:
                    logger.warning("agent %s waits: %s", self._agent, self.reason)
                delay_s = NEXT_WARNING_S


class Connection:
    """One connection at a time. It is dialled when created; `run` serves it until cancelled.

    `bus` is an address, or the path of a file that names it. `question` returns the frames of a message that the
    bus answers. `replaced` is called when the bus has to be told anew who is here. Raises BusAddressError.

    Attributes:
        welcomed: The bus has welcomed the agent before. Until then there is none to lose, and `waiting` says so.
    """

    def __init__(
        self,
        bus: str,
        dialled: Dialled,
        agent: str,
        retry_ms: int,
        context: Context,
        keys: KeySource | None,
        waiting: WaitWarning,
        now_ms: Callable[[], int],
        silence_limit_ms: Callable[[], int],
        question: Callable[[], list[bytes]],
        replaced: Callable[[], None],
    ) -> None:
        self._bus, self._agent, self._retry_ms, self._context = bus, agent, retry_ms, context
        self._relayed, self._addresses = dialled, dict[str, str]()  # by what was dialled: the bus's address
        self._keys = keys
        self._waiting, self._now_ms, self._silence_limit_ms = waiting, now_ms, silence_limit_ms
        self._question, self._replaced = question, replaced
        self.dealer = self._dial(read_address(bus))
        self._dialled = anyio.Event()
        self.welcomed = False
        self.answered_ms = 0
        self._asked_ms: int | None = None  # the first question since the last answer
        self._asked = anyio.Event()
        self._unanswered = 0  # attempts to reach the bus on another connection since it last answered
        self._asking: CancelScope | None = None  # of the attempt to reach the bus on another connection

    async def run(self, receive: Callable[[list[bytes]], None]) -> None:
        """Stay connected, and pass the frames of each message to `receive`, until cancelled. Raises what it raises."""
        self.answered_ms = self._now_ms()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, receive)
            tasks.start_soon(self._watch_answers)
            tasks.start_soon(self._stay_connected)
            if is_file(self._bus):
                tasks.start_soon(self._follow)

    @property
    def address(self) -> str:
        return self._addresses[self.dealer.address]

    def note_question(self) -> None:
        """Note that the bus was just asked something."""
        if self._asked_ms is None:
            self._asked_ms = self._now_ms()
            self._asked.set()

    def credentials(self) -> Credentials | None:
        """Return what to dial with now; the bus's other socket takes the same."""
        return self._keys.credentials() if self._keys is not None else None

    def use_new_keys(self) -> None:
        """Dial anew if the key file has changed. The bus then sees a new connection of the same incarnation."""
        if self._keys is not None and self._keys.refresh():
            logger.info("agent %s: its key file has changed; joining again with the new key", self._agent)
            self.dealer.redial(self.credentials())
            self._dialled.set()
            self._replaced()

    def close(self) -> None:
        """Close the socket. What was sent is still delivered, within the linger time."""
        self.dealer.close()

    async def _read(self, receive: Callable[[list[bytes]], None]) -> None:
        def on_message(frames: list[bytes]) -> None:
            self._note_answer()
            receive(frames)

        while True:
            dealer = self.dealer
            try:
                await dealer.serve(on_message)
            except anyio.ClosedResourceError:
                if dealer is self.dealer:
                    raise

    def _note_answer(self) -> None:
        received_ms = self._now_ms()
        if self._unanswered:
            self._note_found(received_ms)
        self.answered_ms, self._asked_ms = received_ms, None
        if self._asking is not None:
            self._asking.cancel()

    # --- getting in ---------------------------------------------------------------------------------------------------

    def _dial(self, address: str, *, watched: bool = False) -> DialledSocket:
        # A bus on this machine seldom has keys: whether it wants one is found out when the agent dials a second time.
        watched = watched or self._keys is not None or not stays_here(address)
        dialled = self._relayed(address, "control")
        self._addresses[dialled] = address
        return agent_dealer(self._context, dialled, self.credentials(), watched=watched, probe=True)

    async def _follow(self) -> None:
        """Dial what the file names now, if the bus does not answer where it was."""
        while True:
            await anyio.sleep(REREAD_S)
            if self._asked_ms is None or self._now_ms() - self._asked_ms < REREAD_S * 1000:
                continue
            address = await to_thread.run_sync(read_address, self._bus, abandon_on_cancel=True)
            if address in (self.address, NOWHERE):
                continue
            try:
                dealer = self._dial(address)
            except BusAddressError as error:
                self._waiting.explain(f"{error}, as the file {self._bus} says")
                continue
            logger.info("agent %s: its bus is at %s now, by the file %s", self._agent, address, self._bus)
            dealer, self.dealer = self.dealer, dealer
            dealer.close(0)
            if self._asking is not None:
                self._asking.cancel()
            self._asked_ms = None
            self._dialled.set()
            self._replaced()

    async def _stay_connected(self) -> None:
        while True:
            self._dialled = anyio.Event()
            await self._finish_handshake(self.dealer)
            await self._dialled.wait()

    async def _finish_handshake(self, dealer: DialledSocket) -> None:
        """Return when the connection is open, or was given up. Until then redial, and tell why it is not."""
        pause_ms, told = self._retry_ms, ""
        with contextlib.suppress(anyio.ClosedResourceError):
            while refused := await dealer.refusal():
                reason = f"no way into {dealer.address}: {refused.reason}"
                if reason != told:
                    logger.warning("agent %s: %s", self._agent, reason)
                told = reason
                self._waiting.explain(reason)
                await anyio.sleep(jittered_s(self._retry_ms, pause_ms))
                pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)
                if self._keys is not None:
                    self._keys.refresh()
                dealer.redial(self.credentials())
            if told:
                self._waiting.explain(f"the bus at {dealer.address} has not answered hello")

    # --- half-open connections ----------------------------------------------------------------------------------------

    async def _watch_answers(self) -> None:
        """Ask on another connection whenever the bus has not answered for too long."""
        while True:
            self._asked = anyio.Event()
            while self._asked_ms is not None:
                due_ms = self._asked_ms + self._silence_limit_ms()
                if self._now_ms() < due_ms:
                    await anyio.sleep_until(due_ms / 1000)
                else:
                    await self._try_second_connection()
            await self._asked.wait()

    async def _try_second_connection(self) -> None:
        """Dial beside the old connection, and take its place if only the new one is answered."""
        if not self._unanswered and self.welcomed:
            silent_s = (self._now_ms() - self.answered_ms) / 1000
            logger.warning("agent %s lost its bus: no answer from %s for %.1f s", self._agent, self.address, silent_s)
        self._unanswered += 1
        try:
            dealer = self._dial(self.address, watched=self._unanswered > 1)  # to find out takes two more sockets
        except BusAddressError as error:  # no descriptor is left: others may close some
            logger.warning("agent %s can't ask its bus on a new connection: %s", self._agent, error)
            await anyio.sleep(ANSWER_S)
            return
        with CancelScope() as self._asking:
            try:
                await self._finish_handshake(dealer)
                with anyio.move_on_after(None if dealer.watched else CONNECT_S) as connecting:
                    await dealer.send(self._question())
                if not connecting.cancelled_caught and await self._answers(dealer):
                    if self.welcomed:
                        logger.warning("agent %s: the bus answers on a new connection only: joining again", self._agent)
                    dealer, self.dealer = self.dealer, dealer
                    self._note_found(self._now_ms())
                    self.answered_ms, self._asked_ms = self._now_ms(), None
                    self._replaced()
            finally:
                dealer.close(0)
        self._asking = None

    def _note_found(self, at_ms: int) -> None:
        if self.welcomed:
            logger.info("agent %s found its bus again after %.1f s", self._agent, (at_ms - self.answered_ms) / 1000)
        self._unanswered = 0

    async def _answers(self, dealer: DialledSocket) -> bool:
        """Whether the bus answers on this connection, while the old one stays silent."""
        with anyio.move_on_after(ANSWER_S) as waiting:
            await dealer.recv()
        if waiting.cancelled_caught:
            return False
        await anyio.sleep(BUSY_S)
        return True


def jittered_s(retry_ms: int, pause_ms: int) -> float:
    """Return a pause, in seconds: at least `retry_ms`, and up to `pause_ms` longer."""
    return (retry_ms + random.uniform(0, pause_ms)) / 1000
