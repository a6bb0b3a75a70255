"""What a profiling tool does in one session of a training rank."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from schemas.events import Returned


class Recorder(ABC):
    """One tool in one session.

    The thread that trains calls `begin`, `end`, `mini_batch` and `mark`; another thread calls `open` and `close`; never
    two at once. All raise EngineError with the text for the outcome, and no exception of a tool itself.
    """

    def open(self) -> None:  # noqa: B027
        """Prepare what can be prepared before the first stage."""

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:  # noqa: B027
        """An outermost stage begins on this thread.

        Args:
            stage: Its name.
            scheduled: Its mini-batches are those of the plan's schedule.
            model: The torch module that it runs, for tools that watch one.
        """

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
