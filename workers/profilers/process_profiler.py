"""torch has one profiler per process. Ranks and engines take turns with it here, and leave a foreign one alone.

Findings with torch 2.13, each of which is the reason for something below:

- Two threads that start a profiler crash the process. A second start on one thread silently replaces the first.
  `torch.autograd.profiler._is_profiler_enabled` is true while any profiler is on.
- Nothing keeps others from starting a profiler while ours records, and theirs replaces ours as soon as it warms up.
  To stop ours then, to write it, or to end a span in it crashes the process or ends theirs. So the flag holds a value
  of our own for as long as the profiler is ours.
- Theirs crashes in the same way if ours starts between its warm-up and its recording. Only its Python object tells
  that it is warming up.
- A span that is open when a recording ends, and ends while the next one runs, is written into memory that torch has
  freed: the process crashes, at once or later. So the spans of stages end with the recording at the latest. `step()` of
  another profiler opens such a span too, which its next `step()` ends.
- A child that is forked inside of a stage, such as a data loader's worker, keeps recording for as long as it lives:
  up to 1 kB for each operator.
"""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.autograd.profiler
from torch.autograd.profiler import KinetoStepTracker
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function
from torch.profiler.profiler import PROFILER_STEP_NAME, _KinetoProfile

from schemas.commands import ProfilePlan
from schemas.errors import EngineError

_in_use = threading.Lock()
"""Held by the rank of this process whose stage is recorded, or the engine with an open session."""

_OURS: Final[Any] = 1
"""Value of torch's flag while the profiler is ours: as true as torch's own True, and distinguishable from it."""

_steps_before: list[record_function] = []
_steps_left_open: list[record_function] = []
"""Spans of `step()` of others' profilers: those open when the last recording began, and those that it opened and left
open."""


class _ThisThread(threading.local):
    """Whether a profiler of ours records this thread, and the open spans in what it records."""

    recording = False

    def __init__(self) -> None:
        self.spans: list[record_function] = []


_this_thread = _ThisThread()


def _stop_in_child() -> None:
    if _this_thread.recording:
        _this_thread.recording = False
        sys.setprofile(None)  # by which torch takes stacks
        torch._C._autograd._toggle_collection_dynamic(False, {ProfilerActivity.CPU})


os.register_at_fork(after_in_child=_stop_in_child)


@contextmanager
def span(stage: str) -> Iterator[None]:
    """Mark a stage as a span in this thread's recording, if there is one. It ends with the recording at the latest."""
    spans, record = _this_thread.spans, record_function(stage)
    if _this_thread.recording and not _is_foreign():
        record.__enter__()  # type: ignore[no-untyped-call]
        spans.append(record)
    try:
        yield
    finally:
        if record in spans and not _is_foreign():  # otherwise it is ended later, when that profiler has ended
            spans.remove(record)
            record.__exit__(None, None, None)


def acquire() -> None:
    """Take the profiler for a rank or engine of this process. Raises EngineError while another one holds it."""
    if not _in_use.acquire(blocking=False):
        raise EngineError(
            "another rank or engine of this process is being recorded, and torch's profiler is one per process. Run "
            "each in a process of its own, or profile one at a time."
        )


def make_profiler(plan: ProfilePlan) -> _KinetoProfile:
    """Return a profiler that records what the plan asks for, not started."""
    activities = [ProfilerActivity.CPU]  # spans are recorded on the CPU
    if "cuda" in plan.activities:
        activities.append(ProfilerActivity.CUDA)
    profiler = _KinetoProfile(
        activities=activities,
        record_shapes=plan.record_shapes,
        with_stack=plan.with_stack or plan.with_modules,  # stacks name the modules of eager code
        with_modules=plan.with_modules,
        profile_memory="memory" in plan.activities,
    )
    profiler.acc_events = True  # or torch 2.11 warns of cycles, and where warnings are errors the stage is lost
    return profiler


def release() -> None:
    """Return the profiler, however the recording ended."""
    _clear_flag()
    _in_use.release()


def is_ours() -> bool:
    """Return whether torch's profiler warms up or records for the holder."""
    return torch.autograd.profiler._is_profiler_enabled is _OURS


def require_free() -> None:
    """Raise EngineError if a profiler other than the holder's records or warms up in this process."""
    warms_up = any(other.current_action is ProfilerAction.WARMUP for other in _foreign_profilers())
    if _is_foreign() or warms_up:
        raise EngineError(
            f"another torch profiler {'warms up' if warms_up else 'records'} in this process already, and there "
            "is one per process. It was left alone; end it, or let the bus profile."
        )
    if any(step is left for step in _open_steps() for left in _steps_left_open):
        raise EngineError(
            "a `step()` of another profiler was called inside of the stage that was recorded last, and its span is "
            "still open. Call it between stages."
        )


def prepare(profiler: _KinetoProfile) -> None:
    """Warm a profiler up. Raises EngineError and RuntimeError."""
    require_free()
    if torch._C._autograd._profiler_enabled():
        _discard_recording()
    _end_spans()
    _steps_before[:] = _open_steps()
    profiler.prepare_trace()
    if profiler.profiler is not None:
        profiler.profiler.acc_events = False  # or a stop parses every event
    torch.autograd.profiler._set_is_profiler_enabled(_OURS)


def start(profiler: _KinetoProfile) -> None:
    """Start a profiler, which may have been prepared. Raises EngineError and RuntimeError."""
    if is_ours():
        require_free()
    else:
        prepare(profiler)
    profiler.start_trace()
    torch.autograd.profiler._set_is_profiler_enabled(_OURS)
    _this_thread.recording = True


def stop(profiler: _KinetoProfile) -> None:
    """Stop a profiler that was started. Raises RuntimeError, and EngineError when another one has replaced it."""
    _this_thread.recording = False
    enabled = torch._C._autograd._profiler_enabled()
    try:
        if is_ours() and enabled:
            _end_spans()
            profiler.stop_trace()
            _steps_left_open[:] = [step for step in _open_steps() if not any(step is old for old in _steps_before)]
            return
        if enabled and not _is_foreign():
            _discard_recording()
    finally:
        _clear_flag()
    raise EngineError(
        "another torch profiler was started during this recording, and there is one per process. It was left "
        "alone; what was recorded here is lost."
    )


def _discard_recording() -> None:
    """End what is left of this thread's recording after the end of another thread's profiler took the rest."""
    rest = _KinetoProfile(activities=[ProfilerActivity.CPU])
    rest.prepare_trace()
    rest.stop_trace()


def _end_spans() -> None:
    """End the open spans of this thread. Must not be called while a foreign profiler records."""
    while _this_thread.spans:
        _this_thread.spans.pop().__exit__(None, None, None)


def _clear_flag() -> None:
    if is_ours():
        torch.autograd.profiler._set_is_profiler_enabled(False)


def _is_foreign() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled) and not is_ours()


def _foreign_profilers() -> list[profile]:
    """Return the profilers in this process that are not ours.

    Ours are `_KinetoProfile`s, which torch's step tracker does not count. If it counts none there are no others, and
    Python's objects need not be searched, which takes 80 ms for a million of them.
    """
    if PROFILER_STEP_NAME not in KinetoStepTracker._step_dict:
        return []
    return [other for other in gc.get_referrers(profile) if isinstance(other, profile)]


def _open_steps() -> list[record_function]:
    return [other.step_rec_fn for other in _foreign_profilers() if other.step_rec_fn is not None]
