"""The wall clock, for people: no decision depends on it."""

import time

from schemas.identity import NANOSECONDS_MAX


def wall_clock_ns() -> int:
    """Return nanoseconds since 1970, within what messages and records hold. A clock past 2116 stands still at that."""
    return max(-NANOSECONDS_MAX, min(time.time_ns(), NANOSECONDS_MAX))
