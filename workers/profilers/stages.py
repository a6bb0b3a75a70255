"""Annotated stages: the parts of a training step that the code names, and the moments when its profiler may act.

Theory of operation. A profiler of torch belongs to the thread that starts it, so only the thread that trains starts and
stops it, where that thread enters or leaves a stage (or ends a mini-batch). A session that a command opens is therefore
only *armed*, and recording begins at the next such moment. While no session is open in the process, a stage only checks
that a tuple is empty.

Rule  Nothing here raises into the training code, and nothing here swallows what the training code raises.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, Self, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from schemas.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class StageListener(Protocol):
    """Called for each stage: a rank's profiler with an open session. Never raises. `leave` gets what `enter` gave."""

    role: str

    def enter(self, stage: "Stage") -> object: ...
    def leave(self, entered: object) -> None: ...
    def mini_batch(self) -> None: ...


class _Listeners:
    """The listeners of this process.

    A class attribute, not a global: a function that is sent to another process by value, as Ray sends what the
    trainer's script defines, takes copies of the globals that it reads, and would keep looking at its own tuple.
    """

    current: tuple[StageListener, ...] = ()
    """Replaced as a whole, so that it is read without a lock."""


_replacing = threading.Lock()
"""A command may reach all ranks of a process at once."""


def add_listener(listener: StageListener) -> None:
    """Call the listener for every stage from now on."""
    with _replacing:
        _Listeners.current = (*_Listeners.current, listener)


def remove_listener(listener: StageListener) -> None:
    """Stop calling the listener."""
    with _replacing:
        _Listeners.current = tuple(other for other in _Listeners.current if other is not listener)


def _clear_in_child() -> None:
    """Forget the listeners: the agent and its bus stay with the parent of a fork."""
    global _replacing
    _Listeners.current, _replacing = (), threading.Lock()  # another thread may have held the lock


os.register_at_fork(after_in_child=_clear_in_child)


class Stage(Struct):  # one is made for each `with`, and a Struct is made five times as fast
    """A named part of a training step: a decorator of functions, async ones too, or a context. Re-entrant.

    As a context one object serves one task at a time; make another for each `with`, as `annotate` does.

    Attributes:
        scheduled: Its mini-batches are those of the plan's schedule.
        listener: Only for this listener; None for all.
        entered: One entry for each time that it was entered and not left yet, innermost last: the listeners that were
            called, each with what it returned.
    """

    name: str
    role: str | None = None
    scheduled: bool = False
    listener: object = None
    entered: tuple[tuple[tuple[StageListener, object], ...], ...] = ()

    def __enter__(self) -> Self:
        if _Listeners.current or self.entered:  # the latter: entered again after the session ended
            called = (listener for listener in _Listeners.current if self._is_for(listener))
            self.entered += (tuple((listener, listener.enter(self)) for listener in called),)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.entered:
            *outer, innermost = self.entered
            self.entered = tuple(outer)
            for listener, token in reversed(innermost):
                listener.leave(token)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Annotate a function. Raises ConfigError for a generator: its body runs when it is consumed, not called."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"stage {self.name} annotates the generator {function.__qualname__}, whose work is done elsewhere: "
                "annotate the function that consumes it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def annotated_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                with replace(self, entered=()):
                    return await function(*args, **kwargs)

            return cast(Callable[P, R], annotated_coroutine)

        @functools.wraps(function)
        def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _Listeners.current:
                return function(*args, **kwargs)
            with replace(self, entered=()):
                return function(*args, **kwargs)

        return annotated

    def _is_for(self, listener: StageListener) -> bool:
        if self.listener is not None:
            return self.listener is listener
        return self.role is None or self.role == listener.role


def annotate(stage: str, *, role: str | None = None, scheduled: bool = False) -> Stage:
    """Mark a stage for the ranks that are open in this process: `@annotate("update_actor")` or `with annotate(…)`.

    Args:
        stage: Its name.
        role: Only for the rank of that role; None for all.
        scheduled: Its mini-batches are those of the plan's schedule.
    """
    return Stage(stage, role, scheduled)


def mini_batch(role: str | None = None) -> None:
    """Note that one mini-batch of a scheduled stage is done. Costs nothing while no session is open."""
    for listener in _Listeners.current:
        if role is None or role == listener.role:
            listener.mini_batch()
