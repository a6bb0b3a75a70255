"""Tool `torch`: torch.profiler around the outermost stages of the thread that trains.

What was found by experiment with torch 2.13, and is why it is built so:

- torch's profiler records the thread that starts it, and what autograd does for that thread. A stop from another thread
  finds no session: what was recorded is lost, and the callbacks leak.
- `_ExperimentalConfig(profile_all_threads=True)` lets another thread start and stop it, with stacks and shapes. But a
  stop while the training thread is inside an operator reads what that thread still writes: a segmentation fault within
  the first of 300 sessions, or names of random bytes. A trainer must not die of being looked at, so it is not used.
- So a profiler runs from the beginning to the end of an outermost stage, on its thread, and never between two of them:
  there the thread might not come back before a stop has to be answered. A session that is not discrete joins what its
  stages left into one trace. Who wants to see what lies between the stages annotates the whole step as one.
- A span that is open when a recording ends, and is left while the next one runs, is written into memory that torch has
  freed: the process dies, now or later. So spans of stages end with the recording.
- There is one such profiler per process: two threads that start one bring the process down, and a second start on one
  thread silently takes the first one's place. `torch.autograd.profiler._is_profiler_enabled` tells of any.
- Nobody can be kept from starting one while ours records, and theirs takes the place of ours as soon as it warms up. To
  stop ours then, to write it, or to end a span in it brings the process down, or ends theirs. So the flag holds a value
  of our own as long as ours is the one. Theirs dies in the same way of one of ours that comes between its warm-up and
  its recording, and nothing but its object tells that it warms up.
"""

import gc
import json
import logging
import os
import sys
import threading
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.autograd.profiler
import torch.distributed
from torch.autograd.profiler import KinetoStepTracker
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function
from torch.profiler.profiler import PROFILER_STEP_NAME, _KinetoProfile

from schemas.commands import ProfilePlan, Schedule
from schemas.errors import EngineError
from schemas.events import Returned
from schemas.outcomes import Trace
from workers.profilers.places import WHOLE, Place
from workers.profilers.writing import TraceFile, Writer

logger = logging.getLogger("rolloutctl.rank")

_in_use = threading.Lock()
"""Held by the rank of this process whose stage is recorded."""

_OURS: Final[Any] = 1
"""As true as torch's own True, and told from it."""

_steps_before: list[record_function] = []
_steps_left: list[record_function] = []
"""Spans of `step()` of somebody else's profilers: when the last recording began, and those that opened in it and were
open at its end. The next recording would be written over by their end."""

LISTED: Final = 150
"""Traces that one outcome names; more have no room in a message."""


class _Here(threading.local):
    """Whether one of our profilers records this thread, and the spans in what it records."""

    recording = False

    def __init__(self) -> None:
        self.spans: list[_Span] = []


_here = _Here()


def _stop_in_child() -> None:
    """A child that is forked inside of a stage, a data loader's worker, would keep all that it ever does: up to 1 kB
    for each operator."""
    if _here.recording:
        _here.recording = False
        sys.setprofile(None)  # by which torch takes stacks
        torch._C._autograd._toggle_collection_dynamic(False, {ProfilerActivity.CPU})


os.register_at_fork(after_in_child=_stop_in_child)


class TorchRecorder:
    """See above. One trace of each outermost stage (discrete), of each window of the schedule, or of all of them."""

    def __init__(self, plan: ProfilePlan, place: Place) -> None:
        self.plan, self._place = plan, place
        self._writer = Writer()
        self._files: list[Path] = []
        self._whole: TraceFile | None = None
        self._running: _Whole | _Windows | None = None
        self._scope = WHOLE
        self._mini_batches = 0  # of the session, where the stages are not recorded apart

    def open(self) -> None:
        _require_nobody_else()

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        self._writer.require_room()
        if not _in_use.acquire(blocking=False):
            raise EngineError("another rank of this process is recorded now, and torch's profiler is one per process.")
        plan = self.plan
        self._scope = stage if plan.discrete else WHOLE
        try:
            if plan.schedule is None or (plan.discrete and not scheduled):
                self._running = _Whole(self)
            else:
                self._running = _Windows(self, 0 if plan.discrete else self._mini_batches)
        except BaseException as error:
            _is_over()
            _in_use.release()
            if isinstance(error, RuntimeError):
                raise EngineError(f"torch's profiler did not start: {error}.") from error
            raise

    def end(self) -> None:
        running, self._running = self._running, None
        assert running is not None
        try:
            running.end()
        except RuntimeError as error:
            raise EngineError(f"torch's profiler did not stop: {error}. What it recorded is lost.") from error
        finally:
            _in_use.release()
        if isinstance(running, _Whole):
            self._writer.put(partial(self._write, running.profiler, self._scope, None))
        elif not self.plan.discrete:
            self._mini_batches = running.mini_batch_at

    def mini_batch(self) -> None:
        if isinstance(self._running, _Windows):
            try:
                self._running.mini_batch()
            except RuntimeError as error:
                raise EngineError(f"torch's profiler failed between two mini-batches: {error}.") from error

    def mark(self, stage: str) -> AbstractContextManager[object]:
        return _Span(stage)

    def close(self) -> Returned:
        self._writer.put(self._finish_whole)
        self._writer.finish()
        failures = self._writer.failures
        traces: tuple[Trace, ...] = ()
        try:
            traces = self._place.describe(self._files)
        except OSError as error:
            failures.append(f"{error.filename} can't be read: {error.strerror}")
        if failures:
            whole = f"{len(traces)} traces are whole: {', '.join(one.path for one in traces[:10])}" if traces else ""
            raise EngineError(" ".join([*failures[:5], whole]).strip())
        if len(traces) > LISTED:
            logger.warning("rank %d left %d traces; the outcome names %d", self._place.rank, len(traces), LISTED)
        return Returned(traces=traces[:LISTED], ranks_without_trace=() if traces else (self._place.rank,))

    def window(self, recording: _KinetoProfile, first: int, last: int) -> None:
        """A window of the schedule was recorded."""
        self._writer.put(partial(self._write, recording, self._scope, (first, last)))

    def start(self, profiler: _KinetoProfile) -> None:
        """Start it, and label what it records with the place of this rank. Raises EngineError and RuntimeError."""
        if not _is_ours():
            _prepare(profiler)
        else:
            _require_nobody_else()
        profiler.start_trace()
        torch.autograd.profiler._set_is_profiler_enabled(_OURS)
        _here.recording = True
        place = self._place
        label = {"role": place.identity.role, "rank": place.rank, "step": place.step, "scope": self._scope}
        profiler.add_metadata_json("rolloutctl", json.dumps(label))
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # else torch says more itself
            told = {"backend": "none", "rank": place.rank, "world_size": place.world_size}
            profiler.add_metadata_json("distributedInfo", json.dumps(told))

    def profiler(self) -> _KinetoProfile:
        """A new one, not started."""
        plan = self.plan
        activities = [ProfilerActivity.CPU]  # the spans of the stages are of the CPU
        if "cuda" in plan.activities:
            activities.append(ProfilerActivity.CUDA)
        return _KinetoProfile(
            activities=activities,
            record_shapes=plan.record_shapes,
            with_stack=plan.with_stack or plan.with_modules,  # it is the stacks that name eager modules
            with_modules=plan.with_modules,
            profile_memory="memory" in plan.activities,
        )

    # --- on the writer's thread ---------------------------------------------------------------------------------------

    def _write(self, recording: _KinetoProfile, scope: str, mini_batches: tuple[int, int] | None) -> None:
        if mini_batches is None and scope == WHOLE and not self.plan.discrete:
            if self._whole is None:
                self._whole = TraceFile(self._reserve(scope, None))
            self._whole.add(recording)
            return
        file = TraceFile(self._reserve(scope, mini_batches))
        file.add(recording)
        if file.close():
            self._files.append(file.file)

    def _finish_whole(self) -> None:
        if self._whole is not None and self._whole.close():
            self._files.append(self._whole.file)

    def _reserve(self, scope: str, mini_batches: tuple[int, int] | None) -> Path:
        try:
            return self._place.reserve(scope, mini_batches)
        except OSError as error:
            raise EngineError(f"no trace can be made in {self._place.directory}: {error.strerror}.") from error


class _Whole:
    """A stage from its beginning to its end."""

    def __init__(self, recorder: "TorchRecorder") -> None:
        self.profiler = recorder.profiler()
        recorder.start(self.profiler)

    def end(self) -> None:
        _stop(self.profiler)


class _Windows:
    """The mini-batches of a stage that the schedule records. mini_batch_at: the one that is next, or under way."""

    def __init__(self, recorder: TorchRecorder, mini_batch_at: int) -> None:
        wanted = recorder.plan.schedule
        assert wanted is not None
        self._action = partial(action, wanted)
        self._recorder = recorder
        self.mini_batch_at = mini_batch_at
        self._profiler: _KinetoProfile | None = None
        self._first: int | None = None  # recorded, while it records
        self._go_on()

    def mini_batch(self) -> None:
        last = self.mini_batch_at
        self.mini_batch_at += 1
        if self._action(last) is ProfilerAction.RECORD_AND_SAVE:
            self._save(last)
        self._go_on()

    def end(self) -> None:
        """A window that is cut short holds what there was of it; one that has only begun is dropped."""
        if self._first is not None and self.mini_batch_at > self._first:
            self._save(self.mini_batch_at - 1)
        elif (profiler := self._profiler) is not None:
            if self._first is None:
                if not _is_ours():
                    return  # somebody else took its place
                self._recorder.start(profiler)  # torch takes a profiler that was only warmed up back no other way
            _stop(profiler)

    def _go_on(self) -> None:
        action = self._action(self.mini_batch_at)
        if action is ProfilerAction.NONE:
            return
        if self._profiler is None or not _is_ours():  # somebody else took the place of what was warmed up
            self._profiler = self._recorder.profiler()
            if action is ProfilerAction.WARMUP:
                _prepare(self._profiler)
        if action is not ProfilerAction.WARMUP and self._first is None:
            self._first = self.mini_batch_at
            self._recorder.start(self._profiler)

    def _save(self, last: int) -> None:
        profiler, first = self._profiler, self._first
        self._profiler = self._first = None
        if profiler is not None and first is not None:
            _stop(profiler)
            self._recorder.window(profiler, first, last)


class _Span:
    """A stage in what is recorded of this thread, if anything is. It ends with the recording at the latest."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._among = _here.spans
        self._opened: record_function | None = None

    def __enter__(self) -> None:
        if _here.recording and not _is_somebody_elses():
            self._opened = record_function(self._stage)
            self._opened.__enter__()  # type: ignore[no-untyped-call]
            self._among.append(self)

    def __exit__(self, *_: object) -> None:
        if self._opened is not None and not _is_somebody_elses():  # else it is ended when theirs is over
            self._among.remove(self)
            self.end()

    def end(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.__exit__(None, None, None)


def _prepare(profiler: _KinetoProfile) -> None:
    """Warm it up. Raises EngineError and RuntimeError."""
    _require_nobody_else()
    if torch._C._autograd._profiler_enabled():
        _take_back()
    _end_spans()
    _steps_before[:] = _steps()
    profiler.prepare_trace()
    torch.autograd.profiler._set_is_profiler_enabled(_OURS)


def _stop(profiler: _KinetoProfile) -> None:
    """Raises RuntimeError, and EngineError when another has taken its place."""
    _here.recording = False
    enabled = torch._C._autograd._profiler_enabled()
    try:
        if _is_ours() and enabled:
            _end_spans()
            profiler.stop_trace()
            _steps_left[:] = [one for one in _steps() if not any(one is before for before in _steps_before)]
            return
        if enabled and not _is_somebody_elses():
            _take_back()
    finally:
        _is_over()
    raise EngineError(
        "somebody else's profiler was started while this stage was recorded, and torch has one per process. Theirs was "
        "left alone; what was recorded is lost."
    )


def _take_back() -> None:
    """This thread is recorded still, and another thread's profiler, which is over, took the rest of it along."""
    rest = _KinetoProfile(activities=[ProfilerActivity.CPU])
    rest.prepare_trace()
    rest.stop_trace()


def _end_spans() -> None:
    """Those of this thread that are open. Not while somebody else's profiler records."""
    while _here.spans:
        _here.spans.pop().end()


def _is_ours() -> bool:
    """Whether torch's profiler warms up or records for a rank of this process."""
    return torch.autograd.profiler._is_profiler_enabled is _OURS


def _is_over() -> None:
    """Ours is not the one any more, however it ended."""
    if _is_ours():
        torch.autograd.profiler._set_is_profiler_enabled(False)


def _is_somebody_elses() -> bool:
    """Whether it records for anybody else."""
    return bool(torch.autograd.profiler._is_profiler_enabled) and not _is_ours()


def action(schedule: Schedule, mini_batch: int) -> ProfilerAction:
    """What becomes of a mini-batch, counted from 0: as `torch.profiler.schedule` has it, which warns on the way."""
    cycle = schedule.wait + schedule.warmup + schedule.active
    since = mini_batch - schedule.skip_first
    if since < 0 or (schedule.repeat and since >= schedule.repeat * cycle):
        return ProfilerAction.NONE
    left = cycle - since % cycle
    if left > schedule.warmup + schedule.active:
        return ProfilerAction.NONE
    if left > schedule.active:
        return ProfilerAction.WARMUP
    return ProfilerAction.RECORD_AND_SAVE if left == 1 else ProfilerAction.RECORD


def _require_nobody_else() -> None:
    """Raise EngineError if torch's profiler records or warms up in this process for anybody but its ranks."""
    if _is_somebody_elses():
        raise EngineError(
            "torch's profiler records in this process already, started by somebody else, and there is one per process. "
            "It was left alone; end it, or let the bus profile."
        )
    if any(one.current_action is ProfilerAction.WARMUP for one in _profilers()):
        raise EngineError(
            "torch's profiler warms up in this process already, for somebody else's schedule, and there is one per "
            "process. It was left alone; end it, or let the bus profile."
        )
    if any(one is left for one in _steps() for left in _steps_left):
        raise EngineError(
            "a `step()` of somebody else's profiler was called inside of the stage that was recorded last, and its "
            "span is open still. Call it between stages."
        )


def _profilers() -> list[profile]:
    """Everybody else's. Ours are of the kind below, which torch does not count as it does theirs: where it counts none,
    Python's objects need not be looked through, which takes 80 ms for a million of them."""
    if PROFILER_STEP_NAME not in KinetoStepTracker._step_dict:
        return []
    return [one for one in gc.get_referrers(profile) if isinstance(one, profile)]


def _steps() -> list[record_function]:
    return [one.step_rec_fn for one in _profilers() if one.step_rec_fn is not None]
