"""What a profiling tool does in one session of a training rank, and the files that it writes there."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from schemas.commands import ProfilePlan
from schemas.desired import ProfileSession
from schemas.errors import EngineError
from schemas.events import Returned
from schemas.identity import Identity
from workers.traces.node import describe_trace, first_listed

WHOLE: Final = "e2e"
"""Stands for the stage in the names of traces that are not discrete."""
STAGE_CHARS_MAX: Final = 100
"""Most characters of a stage in a file name, which has at most 255 bytes."""
_UNSAFE: Final = re.compile(r"[^0-9A-Za-z.=+_-]+")
_touch: Final = partial(Path.touch, exist_ok=False)


class SessionFiles:
    """The files of one session. Nothing is ever overwritten. Methods raise OSError.

    In verl's layouts all ranks and steps share the directory, and files are named as verl names them.
    """

    def __init__(
        self, root: Path, directory: Path, identity: Identity, world_size: int, session: ProfileSession
    ) -> None:
        self.directory, self.role, self.rank = directory, identity.role, identity.replica
        self.world_size, self.step = world_size, session.step
        self._root, self._verl = root, session.plan.layout != "step"

    def reserve(self, stage: str, mini_batches: tuple[int, int] | None = None) -> Path:
        """Create an empty file under a free name, so that no other process takes the name."""
        stage = _UNSAFE.sub("-", stage).strip("-.")[:STAGE_CHARS_MAX] or "stage"
        first, last = mini_batches or (0, 0)
        if not self._verl:
            window = f".mb{first}-{last}" if mini_batches else ""
            return self._create(stage, ".", f".rank{self.rank}{window}.pt.trace.json.gz", _touch)
        window = f"_mb{first}" if first == last else f"_mb{first}-{last}"
        now = datetime.now().astimezone().strftime("%Y%m%d%H%M%S%f")[:-3]
        name = f"{self.role}_{stage}_step{self.step}_{self._process}_{now}"
        return self._create(name, "-", f"{window if mini_batches else ''}.json.gz", _touch)

    def session_dir(self) -> Path:
        """Return a directory of this session alone, for tools that name their files themselves."""
        if not self._verl:
            return self.directory
        return self._create(f"{self.role}_step{self.step}_{self._process}", "-", "", Path.mkdir)

    def describe(self, files: Iterable[Path]) -> Returned:
        """Describe files in the order of their names, as many as one outcome lists."""
        traces = tuple(describe_trace(file, self._root, self.rank) for file in first_listed(sorted(files)))
        return Returned(traces=traces, ranks_without_trace=() if traces else (self.rank,))

    @property
    def _process(self) -> str:
        return f"rank{self.rank}-of-{self.world_size}_pid{os.getpid()}"

    def _create(self, name: str, separator: str, suffix: str, create: Callable[[Path], None]) -> Path:
        """Create the first path that is free: the second attempt appends 2 to the name, and so on."""
        attempt, path = 1, self.directory / f"{name}{suffix}"
        while True:
            try:
                create(path)
            except FileExistsError:
                attempt += 1
                path = self.directory / f"{name}{separator}{attempt}{suffix}"
            else:
                return path


class Recorder(ABC):
    """One tool in one session. Creating the recorder opens the session.

    The thread that trains calls `begin`, `end`, `mini_batch` and `mark`. Another thread creates and closes it. Calls
    never overlap. All may raise: the session reports the error.

    Attributes:
        failures: What went wrong on other threads than the training thread. Complete once the recorder is closed.
    """

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        self.plan, self.files = plan, files
        self.failures: list[str] = []

    def begin(self, stage: str, scheduled: bool) -> None:  # noqa: B027
        """An outermost stage begins on this thread."""

    def end(self) -> None:  # noqa: B027
        """End the stage, or the session in the middle of it. Called on the thread of `begin`, once per success."""

    def mini_batch(self) -> None:  # noqa: B027
        """A mini-batch of the stage is done."""

    def mark(self, stage: str) -> AbstractContextManager[object]:
        """Return a context that names a span in what is recorded."""
        return nullcontext()

    @abstractmethod
    def close(self) -> Returned:
        """Write everything, and describe the traces. The session is over, and no stage is under way."""


@contextmanager
def span(start: Callable[[str], int], end: Callable[[int], object], stage: str) -> Iterator[None]:
    """Mark a span by an identifier, not on the thread's stack: interleaved coroutines don't end in stack order."""
    identifier = start(stage)
    try:
        yield
    finally:
        end(identifier)


def reason(error: Exception) -> str:
    """Return the text of an error for an outcome."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
