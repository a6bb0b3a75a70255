"""Rate-limited warnings about an agent's link: why it cannot join, and malformed messages."""

import hashlib
from collections.abc import Sequence
from typing import Final

import anyio

from schemas.errors import WireError
from schemas.logs import logger_of

logger = logger_of("agent")

FIRST_WARNING_S: Final = 5.0
NEXT_WARNING_S: Final = 30.0
"""Time without progress before the first warning, and between two warnings."""
MALFORMED_MS: Final = 60_000
"""Time between two warnings about malformed messages."""


class WaitWarning:
    """Warns when an agent waits long for its bus.

    Attributes:
        reason: What it waits for now; empty once it has joined.
    """

    def __init__(self, agent: str) -> None:
        self.reason = ""
        self._agent = agent
        self._waiting = anyio.Event()

    def begin(self, reason: str) -> None:
        """Note that the agent waits from now on."""
        self.reason = reason
        self._waiting.set()

    def explain(self, reason: str) -> None:
        """Give a better reason for what the agent waits for, if it waits."""
        if self.reason:
            self.reason = reason

    async def run(self) -> None:
        """Warn until cancelled."""
        while True:
            await self._waiting.wait()
            self._waiting = anyio.Event()
            delay_s = FIRST_WARNING_S
            while self.reason:
                await anyio.sleep(delay_s)
                if self.reason:
                    logger.warning("agent %s waits: %s", self._agent, self.reason)
                delay_s = NEXT_WARNING_S


class MalformedWarning:
    """Counts malformed messages, and warns about one of them now and then.

    Attributes:
        count: Malformed messages so far.
    """

    def __init__(self, agent: str) -> None:
        self.count = 0
        self._agent = agent
        self._warned_ms: int | None = None

    def add(self, frames: Sequence[bytes], error: WireError) -> None:
        """Count a message. The log shows only its hash, since anybody may have sent it."""
        self.count += 1
        now_ms = int(anyio.current_time() * 1000)
        if self._warned_ms is not None and now_ms - self._warned_ms < MALFORMED_MS:
            return
        self._warned_ms = now_ms
        message = b"".join(frames)
        digest = hashlib.sha256(message).hexdigest()[:16]
        logger.warning(
            "agent %s dropped a malformed message from the bus (%d so far): %s; sha256 %s, %d bytes",
            *(self._agent, self.count, error, digest, len(message)),
        )
