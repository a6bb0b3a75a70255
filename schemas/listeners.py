"""Functions that hear of decisions that were carried out, as metrics do. Their exceptions are logged, never raised."""

from collections.abc import Callable
from typing import Generic, ParamSpec

from schemas.logs import logger_of

logger = logger_of("listeners")

P = ParamSpec("P")


class Listeners(Generic[P]):
    """Functions that are called, one after the other, in the thread that notifies them. They must not wait."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[P, object], ...] = ()
        self._failed = False

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: Callable[P, object]) -> None:
        """Call this too, from now on. May be called from any thread."""
        self._listeners = (*self._listeners, listener)

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all of them. Never raises; the first error is logged."""
        for listener in self._listeners:
            try:
                listener(*args, **kwargs)
            except Exception:
                if not self._failed:
                    logger.exception("metrics or spans are incomplete from now on: %r raised", listener)
                self._failed = True
