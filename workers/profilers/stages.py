"""Annotated stages: what the training code says of itself, and the moments at which its profiler may act.

Theory of operation. A profiler of torch belongs to the thread that starts it, so it is started and stopped only by the
thread that trains, where that thread enters or leaves a stage (or ends a mini-batch). A session that a command opens is
therefore *armed*: what follows happens at the next such moment. While no session is open in the process, a stage costs
one look at an empty tuple.

Rule  Nothing here raises into the training code, and nothing here swallows what the training code raises.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, cast

from msgspec import Struct

from schemas.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class Listener(Protocol):
    """Who wants to know of stages: a rank's profiler with an open session. Its methods never raise."""

    @property
    def role(self) -> str: ...

    def enter(self, stage: "Stage") -> object:
        """A stage begins on this thread. What is returned is given back to `leave`."""
        ...

    def leave(self, entered: object) -> None: ...

    def mini_batch(self) -> None: ...


class _Told:
    """Who is told of stages. An attribute of a class: a function that is sent to another process by value, as Ray sends
    what the trainer's script defines, takes the globals that it reads along, and would go on asking a tuple of its own.
    """

    open: tuple[Listener, ...] = ()
    """Replaced as a whole, so that it is read without a lock."""


_replacing = threading.Lock()
"""A command may reach all ranks of a process at once."""


def listen(listener: Listener) -> None:
    """Tell this one of every stage from now on."""
    with _replacing:
        _Told.open = (*_Told.open, listener)


def unlisten(listener: Listener) -> None:
    """Tell it no more."""
    with _replacing:
        _Told.open = tuple(one for one in _Told.open if one is not listener)


def _forget() -> None:
    global _replacing
    _Told.open, _replacing = (), threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_forget)  # the agent and its bus stay with the parent


Entered = tuple[tuple[Listener, object], ...]
_NOBODY: Entered = ()


class Stage(Struct):  # one is made for each `with`, and a Struct is made in a fifth of the time
    """A named part of a training step: a decorator of functions, async ones too, or a context. Re-entrant.

    role: only for the rank of that role; None for all.   scheduled: its mini-batches are those of the plan's schedule.
    model: the torch module that it runs.   listener: only for this one; None for all.
    As a context one object serves one task at a time; make another for each `with`, as `annotate` does.
    """

    name: str
    role: str | None = None
    scheduled: bool = False
    model: object = None
    listener: object = None
    entered: list[Entered] | None = None
    """What was told on entering, innermost last."""

    def __enter__(self) -> Self:
        if _Told.open or self.entered:  # the latter: entered again, and the session over in between
            if self.entered is None:
                self.entered = []
            self.entered.append(self._enter())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.entered:
            _leave(self.entered.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Raises ConfigError for a generator: its body runs when it is consumed, not when it is called."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"stage {self.name} annotates the generator {function.__qualname__}, whose work is done elsewhere: "
                "annotate the function that consumes it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def later(*args: P.args, **kwargs: P.kwargs) -> Any:
                entered = self._enter() if _Told.open else _NOBODY
                try:
                    return await function(*args, **kwargs)
                finally:
                    _leave(entered)

            return cast(Callable[P, R], later)

        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _Told.open:
                return function(*args, **kwargs)
            entered = self._enter()
            try:
                return function(*args, **kwargs)
            finally:
                _leave(entered)

        return wrapped

    def _enter(self) -> Entered:
        return tuple((one, one.enter(self)) for one in _Told.open if self._is_for(one))

    def _is_for(self, listener: Listener) -> bool:
        if self.listener is not None:
            return self.listener is listener
        return self.role is None or self.role == listener.role


def _leave(entered: Entered) -> None:
    for listener, token in reversed(entered):
        listener.leave(token)


def annotate(stage: str, *, role: str | None = None, scheduled: bool = False, model: object | None = None) -> Stage:
    """Mark a stage for the ranks that are open in this process, as `@annotate("update_actor")` or `with annotate(…)`.

    role: only for the rank of that role; None for all.   scheduled: its mini-batches are those of the plan's schedule.
    model: the torch module that the stage runs, for tools that watch one.
    """
    return Stage(stage, role, scheduled, model)


def mini_batch(role: str | None = None) -> None:
    """One mini-batch of a scheduled stage is done. Costs nothing while no session is open."""
    for one in _Told.open:
        if role is None or role == one.role:
            one.mini_batch()
