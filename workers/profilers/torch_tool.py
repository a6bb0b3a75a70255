"""Tool `torch`: torch.profiler around the outermost stages of the thread that trains.

Findings with torch 2.13, which are the reason for this design (`process_profiler` has those about other profilers):

- torch's profiler records the thread that starts it, and what autograd does for that thread. A stop from another thread
  finds no session: what was recorded is lost, and the callbacks leak.
- `_ExperimentalConfig(profile_all_threads=True)` lets another thread start and stop it, with stacks and shapes. But a
  stop while the training thread is inside an operator reads what that thread is still writing: a segmentation fault
  within the first of 300 sessions, or names of random bytes. A trainer must not die of being profiled, so it is not
  used.
- So a profiler runs from the beginning to the end of an outermost stage, on its thread. It never runs between two
  stages, because the thread might not return before a stop has to be answered. A session that is not discrete joins the
  recordings of its stages into one trace. To see what lies between stages, annotate the whole step as one stage.
"""

import json
import logging
from functools import partial
from pathlib import Path

import torch.distributed
from torch.profiler import ProfilerAction
from torch.profiler.profiler import _KinetoProfile

from schemas.commands import ProfilePlan, Schedule
from schemas.errors import EngineError
from schemas.events import Returned
from schemas.outcomes import Trace
from workers.profilers import process_profiler
from workers.profilers.process_profiler import Span
from workers.profilers.recorder import Recorder
from workers.profilers.session_files import WHOLE, SessionFiles
from workers.profilers.trace_writer import CompressedTrace, TraceWriter

logger = logging.getLogger("rolloutctl.rank")

MAX_LISTED = 150
"""Traces that one outcome lists; more don't fit into a message."""


class TorchRecorder(Recorder):
    """Writes one trace of each outermost stage (discrete), of each window of the schedule, or of the whole session."""

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        self.plan, self._files = plan, files
        self._writer = TraceWriter()
        self._written: list[Path] = []
        self._whole: CompressedTrace | None = None
        self._running: _WholeStage | _Windows | None = None
        self._scope = WHOLE
        self._mini_batches = 0  # of the session, where it does not count from 0 in each stage

    def open(self) -> None:
        process_profiler.require_free()

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        self._writer.require_room()
        process_profiler.acquire()
        plan = self.plan
        self._scope = stage if plan.discrete else WHOLE
        try:
            if plan.schedule is None or (plan.discrete and not scheduled):
                self._running = _WholeStage(self)
            else:
                self._running = _Windows(self, plan.schedule, 0 if plan.discrete else self._mini_batches)
        except BaseException as error:
            process_profiler.release()
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
            process_profiler.release()
        if isinstance(running, _WholeStage):
            self._writer.put(partial(self._write, running.profiler, self._scope, None))
        elif not self.plan.discrete:
            self._mini_batches = running.next_mini_batch

    def mini_batch(self) -> None:
        if isinstance(self._running, _Windows):
            try:
                self._running.mini_batch()
            except RuntimeError as error:
                raise EngineError(f"torch's profiler failed between two mini-batches: {error}.") from error

    def mark(self, stage: str) -> Span:
        return Span(stage)

    def close(self) -> Returned:
        self._writer.put(self._finish_whole)
        self._writer.finish()
        failures = self._writer.failures
        traces: tuple[Trace, ...] = ()
        try:
            traces = self._files.describe(self._written)
        except OSError as error:
            failures.append(f"{error.filename} can't be read: {error.strerror}")
        rank = self._files.rank
        if failures:
            paths = ", ".join(trace.path for trace in traces[:10])
            complete = f"{len(traces)} traces are complete: {paths}" if traces else ""
            raise EngineError(" ".join([*failures[:5], complete]).strip())
        if len(traces) > MAX_LISTED:
            logger.warning("rank %d wrote %d traces; the outcome lists %d", rank, len(traces), MAX_LISTED)
        return Returned(traces=traces[:MAX_LISTED], ranks_without_trace=() if traces else (rank,))

    def save_window(self, profiler: _KinetoProfile, first: int, last: int) -> None:
        """Write what a stopped profiler has recorded of these mini-batches."""
        self._writer.put(partial(self._write, profiler, self._scope, (first, last)))

    def start(self, profiler: _KinetoProfile) -> None:
        """Start a profiler, and label what it records with this rank. Raises EngineError and RuntimeError."""
        process_profiler.start(profiler)
        files = self._files
        label = {"role": files.identity.role, "rank": files.rank, "step": files.step, "scope": self._scope}
        profiler.add_metadata_json("rolloutctl", json.dumps(label))
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # else torch adds more itself
            info = {"backend": "none", "rank": files.rank, "world_size": files.world_size}
            profiler.add_metadata_json("distributedInfo", json.dumps(info))

    # --- on the writer's thread ---------------------------------------------------------------------------------------

    def _write(self, profiler: _KinetoProfile, scope: str, mini_batches: tuple[int, int] | None) -> None:
        if mini_batches is None and scope == WHOLE and not self.plan.discrete:
            if self._whole is None:
                self._whole = CompressedTrace(self._reserve(scope, None))
            self._whole.add(profiler)
            return
        trace = CompressedTrace(self._reserve(scope, mini_batches))
        trace.add(profiler)
        if trace.close():
            self._written.append(trace.file)

    def _finish_whole(self) -> None:
        if self._whole is not None and self._whole.close():
            self._written.append(self._whole.file)

    def _reserve(self, scope: str, mini_batches: tuple[int, int] | None) -> Path:
        try:
            return self._files.reserve(scope, mini_batches)
        except OSError as error:
            raise EngineError(f"no trace can be made in {self._files.directory}: {error.strerror}.") from error


class _WholeStage:
    """Records a stage from its beginning to its end."""

    def __init__(self, recorder: TorchRecorder) -> None:
        self.profiler = process_profiler.make_profiler(recorder.plan)
        recorder.start(self.profiler)

    def end(self) -> None:
        process_profiler.stop(self.profiler)


class _Windows:
    """Records the mini-batches of a stage that the schedule selects; `next_mini_batch` is next, or under way."""

    def __init__(self, recorder: TorchRecorder, schedule: Schedule, next_mini_batch: int) -> None:
        self._recorder, self._schedule = recorder, schedule
        self.next_mini_batch = next_mini_batch
        self._profiler: _KinetoProfile | None = None
        self._first: int | None = None  # mini-batch of the window that is being recorded
        self._advance()

    def mini_batch(self) -> None:
        last = self.next_mini_batch
        self.next_mini_batch += 1
        if action(self._schedule, last) is ProfilerAction.RECORD_AND_SAVE:
            self._save(last)
        self._advance()

    def end(self) -> None:
        """End the stage. A window that is cut short is saved; one that has recorded no full mini-batch is dropped."""
        if self._first is not None and self.next_mini_batch > self._first:
            self._save(self.next_mini_batch - 1)
        elif (profiler := self._profiler) is not None:
            if self._first is None:
                if not process_profiler.is_ours():
                    return  # another profiler has replaced it
                self._recorder.start(profiler)  # torch can't stop a profiler that was only warmed up
            process_profiler.stop(profiler)

    def _advance(self) -> None:
        wanted = action(self._schedule, self.next_mini_batch)
        if wanted is ProfilerAction.NONE:
            return
        if self._profiler is None or not process_profiler.is_ours():  # another one may have replaced what warmed up
            self._profiler = process_profiler.make_profiler(self._recorder.plan)
            if wanted is ProfilerAction.WARMUP:
                process_profiler.prepare(self._profiler)
        if wanted is not ProfilerAction.WARMUP and self._first is None:
            self._first = self.next_mini_batch
            self._recorder.start(self._profiler)

    def _save(self, last: int) -> None:
        profiler, first = self._profiler, self._first
        self._profiler = self._first = None
        if profiler is not None and first is not None:
            process_profiler.stop(profiler)
            self._recorder.save_window(profiler, first, last)


def action(schedule: Schedule, mini_batch: int) -> ProfilerAction:
    """Return what the schedule does with a mini-batch, counted from 0.

    The same as `torch.profiler.schedule`, which warns each time it is made without a warm-up.
    """
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
