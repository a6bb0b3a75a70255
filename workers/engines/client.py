"""How a backend reaches its engine: it calls methods by the engine's own names, over HTTP or in process.

One backend serves both ways and every version, because it looks at what is there: `methods` returns each method that
this engine has, with the parameters that it takes. Versions are shown to people; they are not compared.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Final, Protocol

from schemas.errors import EngineError, RefusedError
from schemas.identity import LAUNCH_LABEL, NUMBER_MAX

READ_TIMEOUT_S: Final = 5.0
"""Seconds for which one read is waited for."""
RETRY_S: Final = 0.25
"""Seconds before asking again for something that the engine refuses only for the moment."""

Methods = Mapping[str, frozenset[str]]
"""The engine's methods by name, with the names of their parameters as far as they are declared."""


class CallRefused(EngineError):
    """The engine answered a call with an error. It may have been touched.

    Attributes:
        status: HTTP status; None in process.
    """

    def __init__(self, message: str, status: int | None, body: str) -> None:
        super().__init__(message)
        self.status, self.body = status, body


class CallNotBegun(CallRefused, RefusedError):
    """The engine answered that it did not begin the call: it does not know the key, the route or the arguments, say."""


@contextmanager
def begun() -> Iterator[None]:
    """Hold the further requests of a call that has touched the engine: what is refused here is no refusal of the call.

    Raises EngineError.
    """
    try:
        yield
    except RefusedError as error:
        raise EngineError(str(error)) from error


class EngineReader(Protocol):
    """A connection to one engine's front end that can only read. It is all that an observing agent has.

    Attributes:
        where: The URL, or the class in process, for messages.
    """

    where: str

    async def open(self) -> None:
        """Raise EngineError if the engine can never be called from here."""
        ...

    async def methods(self) -> Methods | None:
        """Return the engine's methods; None while it is not up. Raises EngineError if it is up but silent."""
        ...

    async def info(self) -> Mapping[str, object] | None:
        """Return the engine's launch settings, under its own names; None if this node has no front end.

        Raises:
            EngineError: The engine did not answer, or refused.
        """
        ...

    async def read(self, method: str, /) -> object:
        """Call a method that only reads; gives up after some seconds. Raises EngineError."""
        ...

    async def close(self) -> None:
        """Close the connection; the engine keeps running."""
        ...


class EngineClient(EngineReader, Protocol):
    """A connection over which an engine is commanded as well."""

    async def parameters(self, method: str, /, *names: str) -> frozenset[str]:
        """Return which of these parameters a method is proven to read, before it is called for the first time.

        A method that reads none of them may have been carried out. Raises as `call`.
        """
        ...

    async def call(self, method: str, /, **arguments: object) -> object:
        """Call one of `methods` with parameters that it takes.

        Raises:
            RefusedError: It was not sent, or the engine did not begin it.
            UnansweredError: It was sent and not answered.
            CallRefused: The engine answered with an error.
        """
        ...


def retry_time_s(timeout_s: float) -> float:
    """Return the seconds to spend on retries, out of `timeout_s`. The rest is for reporting a refusal in time."""
    return max(0.0, timeout_s - min(1.0, timeout_s / 4))


def version_of(label: object) -> int | None:
    """Return the weights' version from the engine's label: 0 as launched, None for a label that agents never set."""
    if label == LAUNCH_LABEL:
        return 0
    if not isinstance(label, str) or not (label.isascii() and label.isdigit()) or len(label) > 15:
        return None
    return int(label) or None


def text_at(mapping: Mapping[str, object], key: str) -> str | None:
    """Return the value if it is a string, else None: the types of an engine's answers are not trusted."""
    value = mapping.get(key)
    return value if isinstance(value, str) else None


def integer_at(mapping: Mapping[str, object], key: str) -> int | None:
    """Return the value if it is an integer within the bounds of a message, else None."""
    value = mapping.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < NUMBER_MAX else None


def mapping_at(mapping: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return the value if it is a mapping, else an empty one."""
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def list_at(mapping: Mapping[str, object], key: str) -> list[object]:
    """Return the value if it is a list, else an empty one."""
    value = mapping.get(key)
    return value if isinstance(value, list) else []


def product_at(mapping: Mapping[str, object], *keys: str) -> int | None:
    """Return the product of these integers; None if one of them is missing."""
    factors = [integer_at(mapping, key) for key in keys]
    return None if None in factors else prod(factor for factor in factors if factor is not None)
