"""How an adapter reaches its engine: methods by the names that the engine gives them, over HTTP or in process.

One adapter serves both ways, and every version, because it asks what is there: `methods` tells each method that this
engine answers to and the parameters that it takes. Versions are for people; they are never compared.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from schemas.errors import EngineError

RETRY_S: Final = 0.25
"""Until that which an engine refused for the moment is asked again."""

Methods = Mapping[str, frozenset[str]]
"""What an engine answers to: name of each method, with the names of its parameters as far as they are declared."""


class Unanswered(EngineError):
    """Nobody is there, or nobody answered in time. Whether a call was carried out is not known."""


class CallRefused(EngineError):
    """The engine answered no.   status: of HTTP, None in process.   said: the engine's own words."""

    def __init__(self, message: str, status: int | None, said: str) -> None:
        super().__init__(message)
        self.status, self.said = status, said


class EngineClient(Protocol):
    """The front end of one engine."""

    where: str
    """For messages: the URL, or the class in process."""

    async def open(self) -> None:
        """Raises EngineError when it can't be called from here at all, ever."""
        ...

    async def methods(self) -> Methods | None:
        """What it answers to; None while nobody is there. Raises Unanswered when it is there and does not answer."""
        ...

    async def info(self) -> Mapping[str, object] | None:
        """How it was launched, in the engine's own words. None when this node has no front end. Raises EngineError."""
        ...

    async def call(self, method: str, /, **arguments: object) -> object:
        """Call one method of `methods`, with parameters that it takes. Raises CallRefused and Unanswered."""
        ...

    async def read(self, method: str, /) -> object:
        """The same for one that only reads: given up after some seconds. Raises CallRefused and Unanswered."""
        ...

    async def close(self) -> None:
        """Let go of it; the engine goes on."""
        ...


def patience_s(timeout_s: float) -> float:
    """How long to ask again for what is refused for the moment. The rest of the time is for saying that it was."""
    return max(0.0, timeout_s - min(1.0, timeout_s / 4))


def version_of(label: object) -> int | None:
    """Number of the weights from the engine's label: 0 as launched, None for a label that is not ours."""
    if label == "default":
        return 0
    return int(label) if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 16 else None


def text(mapping: Mapping[str, object], key: str) -> str | None:
    """A value that is text, else None: what an engine says is never trusted to have a type."""
    value = mapping.get(key)
    return value if isinstance(value, str) else None


def number(mapping: Mapping[str, object], key: str) -> int | None:
    """A value that is an integer, else None."""
    value = mapping.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def part(mapping: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A value that is a mapping, else an empty one."""
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}
