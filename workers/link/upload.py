"""The upload of an agent's decisions into the run's log: one batch at a time, each acknowledged by the bus."""

from collections.abc import Callable
from typing import Final

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

    It sends nothing before the bus has reported which of them it holds. A decision waits for others: a bus that gets
    many at once takes each at a quarter of the cost. So a batch is sent when it is full, or some time after its first
    decision was made.
    """

    def __init__(
        self,
        journal: Journal,
        batch: int,
        delay_ms: int,
        send: Callable[[DecisionBatch], bool],
        now_ms: Callable[[], int],
        wake_at: Callable[[int], None],
    ) -> None:
        self._journal, self._batch, self._delay_ms, self._send = journal, batch, delay_ms, send
        self._now_ms, self._wake_at = now_ms, wake_at
        self._running = False
        self._acked = self._sent = 0  # the last decision that the bus holds, and the last sent to it
        self._behind = False  # there is more to send as soon as the batch under way is acknowledged
        self._sent_ms = 0
        self._stated = 0  # the last decision after which the state was sent
        self._due_ms: int | None = None  # when to send, if there is something

    def start(self, recorded: int, delay_ms: int) -> None:
        """Continue after decision `recorded`, the last one that the bus holds, within `delay_ms`."""
        self._running, self._delay_ms = True, delay_ms
        self._acked = self._sent = self._stated = recorded
        self._due_ms = None
        self.note()

    @property
    def awaits_ack(self) -> bool:
        """A batch is under way that the bus has not acknowledged."""
        return self._running and self._sent > self._acked

    def stop(self) -> None:
        """Send nothing until the next `start`."""
        self._running = False

    def note(self) -> None:
        """Say that there are new decisions. They are written and sent soon."""
        if self._due_ms is None:
            self._due_ms = self._now_ms() + self._delay_ms
            self._wake_at(self._due_ms)
        elif self._running and self._sent == self._acked and self._journal.number - self._sent >= self._batch:
            self._write_and_send()

    def notice_time(self, now_ms: int) -> None:
        if self._due_ms is None:
            return
        if now_ms < self._due_ms:
            self._wake_at(self._due_ms)
        else:
            self._write_and_send()

    def _write_and_send(self) -> None:
        self._due_ms = None
        self._journal.commit()
        self._send_next()

    def _send_next(self) -> None:
        """Send the next batch now, or when the one under way was acknowledged."""
        if self._sent == self._acked:
            self._send_after(self._acked)
        else:
            self._behind = True

    def retry(self) -> None:
        """Send what was not acknowledged in time, or dropped on the way."""
        if self._sent > self._acked and self._now_ms() - self._sent_ms > ACK_TIMEOUT_MS:
            self._sent, self._behind = self._acked, True
        if self._behind:
            self._send_next()

    def flush(self) -> None:
        """Send everything that was not sent yet, without waiting for acks."""
        while self._send_after(self._sent):
            pass

    def apply_ack(self, ack: Ack) -> None:
        """Drop from the journal what the bus holds. Continue at once if more had been waiting than fits a batch."""
        if ack.journal != self._journal.id or not self._acked < ack.through <= self._sent:
            return
        behind = self._behind or ack.through < self._sent
        self._acked = self._sent = ack.through
        self._journal.release(ack.through)
        if behind:
            self._send_next()

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
        if not self._send(batch):
            self._behind = True
            return False
        self._sent, self._behind = last, last < journal.committed
        self._stated = last if state else self._stated
        self._sent_ms = self._now_ms()
        return True
