"""Tools `torch_memory` and `nsys`: what CUDA's allocator did, and the ranges in which Nsight Systems records."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

from schemas.commands import ProfilePlan, TorchMemory
from schemas.errors import EngineError
from schemas.events import Returned
from workers.profilers.places import Place

_DEFAULT: Final = TorchMemory()


class _History:
    """The allocator's history is one per process. steps: profiled since it began, so far without a snapshot."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps: list[int] = []


_history = _History()


class MemoryRecorder:
    """The history of CUDA's allocator from the start to the stop, over all threads; dumped at the stop.

    With `snapshot_steps` n the history goes on over n profiled steps, and the last stop of them dumps it.
    """

    def __init__(self, plan: ProfilePlan, place: Place) -> None:
        self._options = plan.options if isinstance(plan.options, TorchMemory) else _DEFAULT
        self._place = place

    def open(self) -> None:
        options = self._options
        with _history.lock:
            if not _history.steps:
                self._record(
                    enabled="all", context=options.context, stacks=options.stacks, max_entries=options.max_entries
                )
            _history.steps.append(self._place.step)

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None: ...

    def end(self) -> None: ...

    def mini_batch(self) -> None: ...

    def mark(self, stage: str) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> Returned:
        place = self._place
        with _history.lock:
            if len(_history.steps) < self._options.snapshot_steps:
                return Returned(ranks_without_trace=(place.rank,))  # a later step's snapshot covers this one
            steps, _history.steps = _history.steps, []
            name = f"memory.rank{place.rank}.step{'-'.join(map(str, dict.fromkeys((steps[0], steps[-1]))))}"
            # The format is torch's and its viewer's (pytorch.org/memory_viz); nothing here ever opens one.
            file = place.directory / f"{name}.pid{os.getpid()}.pickle"
            part = file.with_name(f".{file.name}.part")
            try:
                file.open("xb").close()
                torch.cuda.memory._dump_snapshot(str(part))  # type: ignore[no-untyped-call]
                os.replace(part, file)
                traces = place.describe([file])
            except (OSError, RuntimeError) as error:
                part.unlink(missing_ok=True)
                raise EngineError(f"the memory snapshot {file.name} was not written: {error}.") from error
            finally:
                self._record(enabled=None)
        return Returned(traces=traces)

    def _record(self, **options: object) -> None:
        try:
            torch.cuda.memory._record_memory_history(**options)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise EngineError(f"CUDA's allocator can't record its history: {error}.") from error


class NsysRecorder:
    """A range of the CUDA profiler API, in which `nsys profile --capture-range=cudaProfilerApi` records.

    Discrete: around each outermost stage; else from the first one to the stop. The report is nsys's own, on its own
    terms; nothing here knows of it, so a stop tells no trace. Stages are NVTX ranges.
    """

    def __init__(self, plan: ProfilePlan) -> None:
        self._discrete = plan.discrete
        self._device: int | None = None  # whose range is open

    def open(self) -> None: ...

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        if self._device is None:
            self._call(torch.cuda.profiler.start)
            self._device = torch.cuda.current_device()

    def end(self) -> None:
        if self._discrete:
            self._stop()

    def mini_batch(self) -> None: ...

    def mark(self, stage: str) -> AbstractContextManager[object]:
        return _nvtx(stage)

    def close(self) -> Returned:
        self._stop()
        return Returned()

    def _stop(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            with torch.cuda.device(device):  # another thread's own would be device 0, which may not be this rank's
                self._call(torch.cuda.profiler.stop)

    def _call(self, function: object) -> None:
        assert callable(function)
        try:
            function()
        except (RuntimeError, AssertionError) as error:
            raise EngineError(f"the CUDA profiler API refused: {error}.") from error


@contextmanager
def _nvtx(stage: str) -> Iterator[None]:
    """Not pushed on the thread's stack: stages of interleaved coroutines do not end in the order of a stack."""
    opened = torch.cuda.nvtx.range_start(stage)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(opened)
