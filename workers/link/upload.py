"""The upload of an agent's decisions into the run's log: one batch at a time, each acknowledged by the bus."""

from collections.abc import Callable
from typing import Final

import anyio

from schemas.wire import MAX_STATE_BYTES, Ack, DecisionBatch, encode
from workers.link.journal import Journal

UPLOAD_BYTES: Final = 128 * 1024
"""Most bytes of decisions in one batch."""
ACK_TIMEOUT_MS: Final = 5_000
"""Time without an ack after which a batch counts as lost, and is sent again."""

STATE_EVERY: Final = 1024
"""Decisions between two states of the machine that go with a batch."""


class DecisionUpload:
    """Sends the decisions of a journal, in order, at most `batch` in one message.

    It sends nothing before the bus has reported which of them it holds.
    """

    def __init__(self, journal: Journal, batch: int, send: Callable[[DecisionBatch], bool]) -> None:
        self._journal, self._batch, self._send = journal, batch, send
        self._running = False
        self._acked = self._sent = 0  # the last decision that the bus holds, and the last sent to it
        self._sent_ms = 0
        self._stated = 0  # the last decision after which the state was sent
        self._noted = anyio.Event()

    def start(self, recorded: int) -> None:
        """Continue after decision `recorded`, the last one that the bus holds."""
        self._running = True
        self._acked = self._sent = self._stated = recorded
        self._noted.set()

    def stop(self) -> None:
        """Send nothing until the next `start`."""
        self._running = False

    def note(self) -> None:
        """Say that there are new decisions."""
        self._noted.set()

    async def run(self, delay_s: Callable[[], float]) -> None:
        """Write and send decisions in groups, each `delay_s` after its first decision was made."""
        while True:
            await self._noted.wait()
            await anyio.sleep(delay_s())
            self._noted = anyio.Event()
            self._journal.commit()
            self.send_next()

    def send_next(self) -> None:
        """Send the next batch, unless one is under way."""
        if self._sent == self._acked:
            self._send_after(self._acked)

    def retry(self, now_ms: int) -> None:
        """Resend a batch that was not acknowledged in time; otherwise send the next, if none is under way."""
        if self._sent > self._acked and now_ms - self._sent_ms > ACK_TIMEOUT_MS:
            self._sent = self._acked
        self.send_next()

    def flush(self) -> None:
        """Send everything that was not sent yet, without waiting for acks."""
        while self._send_after(self._sent):
            pass

    def apply_ack(self, ack: Ack) -> None:
        """Drop from the journal what the bus holds, and send the next batch."""
        if ack.journal != self._journal.id or not self._acked < ack.through <= self._sent:
            return
        self._acked = self._sent = ack.through
        self._journal.release(ack.through)
        self.send_next()

    def _send_after(self, number: int) -> bool:
        journal = self._journal
        if not self._running or number >= journal.committed:
            return False
        first, decisions = journal.decisions_after(number, self._batch, UPLOAD_BYTES)
        last = first + len(decisions) - 1
        # The bus has a hole before decisions that do not follow: with the state, a replay can go on behind it.
        due = last - self._stated >= STATE_EVERY or first > number + 1
        state = encode(journal.state) if due and last == journal.number else b""
        state = state if len(state) <= MAX_STATE_BYTES else b""
        batch = DecisionBatch(journal=journal.id, first=first, decisions=decisions, state=state)
        if not decisions or not self._send(batch):
            return False
        self._sent = last
        self._stated = last if state else self._stated
        self._sent_ms = int(anyio.current_time() * 1000)
        return True
