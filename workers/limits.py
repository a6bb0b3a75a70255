"""What an engine or a tool can't record, as a table: each row has a condition, what it rules out, and advice."""

from collections.abc import Iterable
from typing import NamedTuple

from schemas.errors import UnsupportedError


class Limit(NamedTuple):
    """One row of the table.

    Attributes:
        what: What can't be recorded. Completes the sentence "… can't record <what>".
        advice: The reason, or what to do instead, without a full stop at the end.
    """

    exceeded: bool
    what: str
    advice: str


def require_recordable(subject: str, limits: Iterable[Limit]) -> None:
    """Raise UnsupportedError for the first limit that the plan exceeds."""
    for limit in limits:
        if limit.exceeded:
            raise UnsupportedError(f"{subject} can't record {limit.what}: {limit.advice}.")
