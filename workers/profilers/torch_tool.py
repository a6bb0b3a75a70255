"""Tool `torch`: torch.profiler around the outermost stages of the thread that trains.

Findings with torch 2.13, which are the reason for this design (`process_profiler` has those about other profilers):

- torch's profiler records the thread that starts it, and what autograd does for that thread. A stop from another thread
  finds no session: what was recorded is lost, and the callbacks leak. Why `profile_all_threads` is not used:
  docs/training-ranks.md.
- So a profiler runs from the beginning to the end of an outermost stage, on its thread. It never runs between two
  stages, because the thread might not return before a stop has to be answered. To see what lies between stages,
  annotate the whole step as one stage.
"""

import json
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch.distributed
from torch.profiler import ProfilerAction
from torch.profiler.profiler import _KinetoProfile

from schemas.commands import ProfilePlan, Schedule
from schemas.events import Returned
from workers.profilers import process_profiler
from workers.profilers.recorder import WHOLE, Recorder, SessionFiles
from workers.profilers.trace_writer import TraceWriter, write_trace


class TorchRecorder(Recorder):
    """Writes one trace of each outermost stage, or of each window of the schedule."""

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        super().__init__(plan, files)
        process_profiler.require_free()
        self._writer = TraceWriter()
        self._written: list[Path] = []
        # Of the stage under way:
        self._scope = WHOLE
        self._schedule: Schedule | None = None
        self._profiler: _KinetoProfile | None = None  # while it warms up or records
        self._first: int | None = None  # the first mini-batch in the recording
        self._mini_batch = 0  # the one under way, counted in the stage if the plan is discrete, else in the session

    def begin(self, stage: str, scheduled: bool) -> None:
        self._writer.require_room()
        process_profiler.acquire()
        discrete = self.plan.discrete
        self._scope = stage if discrete else WHOLE
        self._schedule = self.plan.schedule if scheduled or not discrete else None
        self._mini_batch = 0 if discrete else self._mini_batch
        self._profiler = self._first = None
        try:
            self._advance()
        except BaseException:
            process_profiler.release()
            raise

    def mini_batch(self) -> None:
        ended = action(self._schedule, self._mini_batch)
        self._mini_batch += 1
        if ended is ProfilerAction.RECORD_AND_SAVE:
            self._save()
        self._advance()

    def end(self) -> None:
        """End the stage. A window that is cut short is saved; one that has recorded no full mini-batch is dropped."""
        try:
            if self._first is not None and (self._schedule is None or self._mini_batch > self._first):
                self._save()
            elif self._profiler is not None and (self._first is not None or process_profiler.is_ours()):
                if self._first is None:
                    self._start(self._profiler)  # torch can't stop a profiler that was only warmed up
                process_profiler.stop(self._profiler)
        finally:
            self._profiler = self._first = None
            process_profiler.release()

    def mark(self, stage: str) -> AbstractContextManager[None]:
        return process_profiler.span(stage)

    def close(self) -> Returned:
        self.failures = self._writer.finish()
        return self.files.describe(self._written)

    def _advance(self) -> None:
        """Warm up or start what the schedule wants for the mini-batch that begins."""
        wanted = action(self._schedule, self._mini_batch)
        if wanted is ProfilerAction.NONE or self._first is not None:
            return
        if self._profiler is None or not process_profiler.is_ours():  # another one may have replaced what warmed up
            self._profiler = process_profiler.make_profiler(self.plan)
            if wanted is ProfilerAction.WARMUP:
                process_profiler.prepare(self._profiler)
        if wanted is not ProfilerAction.WARMUP:
            self._first = self._mini_batch
            self._start(self._profiler)

    def _start(self, profiler: _KinetoProfile) -> None:
        """Start a profiler, and label what it records with this rank."""
        process_profiler.start(profiler)
        files = self.files
        label = {"role": files.role, "rank": files.rank, "step": files.step, "scope": self._scope}
        profiler.add_metadata_json("rolloutctl", json.dumps(label))
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # else torch adds more itself
            info = {"backend": "none", "rank": files.rank, "world_size": files.world_size}
            profiler.add_metadata_json("distributedInfo", json.dumps(info))

    def _save(self) -> None:
        """Stop the profiler, and queue what it has recorded for writing."""
        profiler, first = self._profiler, self._first
        self._profiler = self._first = None
        if profiler is not None and first is not None:
            process_profiler.stop(profiler)
            window = (first, self._mini_batch - 1) if self._schedule is not None else None
            self._writer.put(partial(self._write, profiler, self._scope, window))

    # --- on the writer's thread ---------------------------------------------------------------------------------------

    def _write(self, profiler: _KinetoProfile, scope: str, mini_batches: tuple[int, int] | None) -> None:
        file = self.files.reserve(scope, mini_batches)
        write_trace(profiler.export_chrome_trace, file)
        self._written.append(file)


def action(schedule: Schedule | None, mini_batch: int) -> ProfilerAction:
    """Return what the schedule does with a mini-batch, counted from 0. Without a schedule all are one recording.

    The same as `torch.profiler.schedule`, which warns each time it is created without a warm-up.
    """
    if schedule is None:
        return ProfilerAction.RECORD
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
