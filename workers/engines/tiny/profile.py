"""One profiling session of the tiny engine: torch's profiler around the forwards of a window, and nothing else.

torch's profiler belongs to the thread that starts it, so everything here runs on the engine's thread. It runs from just
before the first forward of the window to just after the last one, so the trace holds exactly the forwards asked for.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torch.cuda import is_available as cuda_is_available
from torch.profiler.profiler import _KinetoProfile

from schemas.commands import ProfilePlan
from schemas.errors import EngineError
from workers.limits import Limit, require_recordable
from workers.profilers import process_profiler
from workers.traces.node import make_fresh

FORWARD: Final = "tiny.forward"
"""The span around each forward in a trace."""


def require_supported(plan: ProfilePlan) -> None:
    """Raise UnsupportedError for a plan that this engine can't record."""
    limits = (
        Limit("cuda" in plan.activities and not cuda_is_available(), "activity `cuda`", "torch sees no GPU here"),
        Limit("npu" in (plan.tool, *plan.activities), "what an NPU does", "it runs on CPUs and GPUs"),
        Limit(plan.by_stage, "a trace by stage", "it feeds prompts and generated tokens in the same forward"),
        Limit(plan.merge, "a merged trace", "it has one rank"),
    )
    require_recordable("the tiny engine", limits)
    # torch's profiler imports it at its first start: here, a check takes those seconds, and no step.
    importlib.import_module("torch._inductor.config")


class ForwardProfile:
    """An open session. Enter `forward` around each forward, and call `stop` once.

    Raises UnsupportedError or EngineError.
    """

    def __init__(self, plan: ProfilePlan, file: Path) -> None:
        require_supported(plan)
        self.file = file
        self._plan = plan
        self._forwards = 0
        self._profiler: _KinetoProfile | None = None
        self._failure: EngineError | None = None
        self._auto_stopped = False
        process_profiler.acquire()
        try:
            make_fresh(file.parent)
            process_profiler.require_free()
            if plan.window is None:
                self._start()
        except EngineError:
            process_profiler.release()
            raise

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround one forward. Never raises: `stop` reports what went wrong."""
        window = self._plan.window
        if window is not None and self._forwards == window.start:
            try:
                self._start()
            except EngineError as error:
                self._failure = error
        yield
        self._forwards += 1
        if window is not None and self._forwards == window.end:
            self._auto_stopped = True
            self._finish()

    def stop(self) -> bool:
        """End the session. There is no file if its window was never reached. Raises EngineError.

        Returns:
            Whether the window had ended it before.
        """
        if not self._auto_stopped:
            self._finish()
        if self._failure is not None:
            raise self._failure
        return self._auto_stopped

    def _start(self) -> None:
        profiler = process_profiler.make_profiler(self._plan)
        try:
            process_profiler.start(profiler)
        except RuntimeError as error:
            raise EngineError(f"torch's profiler did not start: {error}. Nothing is recorded.") from error
        self._profiler = profiler

    def _finish(self) -> None:
        try:
            if self._profiler is not None:
                process_profiler.stop(self._profiler)
                self._profiler.export_chrome_trace(str(self.file))
                if not self.file.exists():  # torch 2.13 removes a file that it could not complete, often silently
                    raise OSError("torch removed it unfinished: is the disk full?")
        except EngineError as error:
            self._failure = error
        except (OSError, RuntimeError) as error:
            self._failure = EngineError(f"the trace {self.file} was not written: {error}. The session is closed.")
        finally:
            self._profiler = None
            process_profiler.release()
