"""One profiling session of the tiny engine: torch's profiler around the forwards of a window, and nothing else.

torch's profiler belongs to the thread that starts it, so everything here runs on the engine's thread. It runs from just
before the first forward of the window to just after the last one: what was asked for is what the trace holds.
"""

import importlib
import threading
from pathlib import Path
from typing import Final

from torch.autograd import profiler as torchs
from torch.cuda import is_available as cuda_is_available
from torch.profiler import ProfilerActivity, profile

from schemas.commands import ProfilePlan
from schemas.errors import EngineError, UnsupportedError
from workers.traces.node import make_fresh

FORWARD: Final = "tiny.forward"
"""The span around each forward in a trace."""

# torch's profiler is one per process, and two threads that start it at once bring the process down (torch 2.13). One
# that somebody else started in this process would lose what it has recorded.
_in_use = threading.Lock()


def prepare() -> None:
    """Import what the first start of a profiler would: seconds, which need not pass on the engine's thread."""
    importlib.import_module("torch._inductor.config")


class Recording:
    """An open session. Call `before` and `after` around each forward, and `stop` once.

    file: what the trace is written to; its directory is made, and must hold nothing yet.
    Raises EngineError when this engine can't do what the plan asks, or the process records already.
    """

    def __init__(self, plan: ProfilePlan, file: Path) -> None:
        require_possible(plan)
        if not _in_use.acquire(blocking=False):
            raise EngineError(
                "the profile was not started: torch's profiler is one per process, and another engine of this process "
                "uses it. Run each engine in a process of its own, or profile one at a time."
            )
        self.file = file
        self._plan = plan
        self._forwards = 0
        self._profiler: profile | None = None
        self._failure: EngineError | None = None
        self._owner = True
        self._auto_stopped = False
        try:
            make_fresh(file.parent)
            _require_free()
            if plan.window is None:
                self._begin()
        except EngineError:
            self._release()
            raise
        if self._failure is not None:
            self._release()
            raise self._failure

    def before(self) -> None:
        """A forward is about to be computed. Never raises: what goes wrong is told by `stop`."""
        if self._plan.window is not None and self._forwards == self._plan.window.start:
            self._begin()

    def after(self) -> None:
        """A forward was computed. Never raises: what goes wrong is told by `stop`."""
        self._forwards += 1
        if self._plan.window is not None and self._forwards == self._plan.window.end:
            self._auto_stopped = True
            self._end()
            self._release()

    def stop(self) -> bool:
        """End the session; return whether its window had ended it. No file is there if the window was never reached.

        Raises EngineError when recording or writing failed.
        """
        self._end()
        self._release()
        if self._failure is not None:
            raise self._failure
        return self._auto_stopped

    def discard(self) -> None:
        """The engine ends in the middle of the session: write what there is, and say nothing."""
        self._end()
        self._release()

    def _begin(self) -> None:
        try:
            _require_free()
        except EngineError as error:
            self._failure = error
            return
        plan = self._plan
        activities = [ProfilerActivity.CPU]
        if "cuda" in plan.activities:
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            record_shapes=plan.record_shapes,
            with_stack=plan.with_stack or plan.with_modules,  # stacks name the modules
            profile_memory="memory" in plan.activities,
        )
        try:
            profiler.start()
        except RuntimeError as error:
            self._failure = EngineError(f"torch's profiler did not start: {error}. Nothing is recorded.")
            return
        self._profiler = profiler

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        try:
            profiler.stop()
            profiler.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:
            self._failure = EngineError(f"the trace {self.file} was not written: {error}. The session is closed.")
        if not self.file.exists():  # torch 2.13 removes what it could not write to the end, as often as not in silence
            self._failure = EngineError(
                f"the trace {self.file} was not written to its end, and torch removed it: is the disk full? The "
                "session is closed."
            )

    def _release(self) -> None:
        if self._owner:
            self._owner = False
            _in_use.release()


def _require_free() -> None:
    """Raise EngineError while somebody else's profiler records in this process."""
    if torchs._is_profiler_enabled:
        raise EngineError(
            "the profile was not recorded: torch's profiler is one per process, and somebody else's records here. It "
            "goes on. Stop it, then start again, or run the engine in a process of its own."
        )


def require_possible(plan: ProfilePlan) -> None:
    """Raise UnsupportedError for what this engine can't record."""
    what: str | None = None
    if "cuda" in plan.activities and not cuda_is_available():
        what = "activity `cuda`, and torch sees no GPU here"
    elif "npu" in (plan.tool, *plan.activities):
        what = "what an NPU does, and this engine runs on CPUs and GPUs"
    elif plan.by_stage:
        what = "a trace by stage, and this engine feeds prompts and tokens in the same forward"
    elif plan.merge:
        what = "a merged trace, and this engine has one rank"
    if what is not None:
        raise UnsupportedError(f"the plan asks for {what}. Change the plan.")
