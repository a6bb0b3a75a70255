"""Shortens the interpreter's switch interval while commands are open, if the trainer wants that.

A thread that wants the GIL waits for one switch interval while another one computes in pure Python. A command to many
agents takes several wake-ups of the bus, so beside such a trainer it takes several intervals.
"""

import os
import sys
import threading
from typing import Final

_guard = threading.Lock()
_shortening: Final[set["SwitchInterval"]] = set()
_before_s = 0.0  # of the process, while one or more shorten it


class SwitchInterval:
    """What one bus wants of the process's switch interval while commands are open; None to leave it alone."""

    def __init__(self, interval_us: int | None) -> None:
        self._interval_s = interval_us / 1_000_000 if interval_us is not None else None
        self.shortened = False

    def shorten(self) -> None:
        """A command is open."""
        global _before_s
        if self.shortened or self._interval_s is None:
            return
        with _guard:
            if not _shortening:
                _before_s = sys.getswitchinterval()
            _shortening.add(self)
            self.shortened = True
            sys.setswitchinterval(min(self._interval_s, sys.getswitchinterval()))

    def restore(self) -> None:
        """None is. Without effect if the interval was not shortened for this bus."""
        with _guard:
            if self.shortened:
                self.shortened = False
                _shortening.discard(self)
                if not _shortening:
                    sys.setswitchinterval(_before_s)


def _forget_in_fork() -> None:
    """The buses, and perhaps a thread that holds the lock, are the parent's."""
    global _guard
    _guard = threading.Lock()
    if _shortening:
        _shortening.clear()
        sys.setswitchinterval(_before_s)


os.register_at_fork(after_in_child=_forget_in_fork)
