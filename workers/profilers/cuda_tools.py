"""Tools `torch_memory` (the history of CUDA's allocator) and `nsys` (ranges in which Nsight Systems records)."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch

from schemas.commands import ProfilePlan, TorchMemory
from schemas.errors import EngineError
from schemas.events import Returned
from workers.profilers.recorder import Recorder
from workers.profilers.session_files import SessionFiles

_DEFAULT: Final = TorchMemory()


class _History:
    """The allocator has one history per process. `steps` were profiled since the last snapshot."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.steps: list[int] = []


_history = _History()


class MemoryRecorder(Recorder):
    """Records the history of CUDA's allocator from start to stop, over all threads, and dumps it at the stop.

    With `snapshot_steps` n the history continues over n profiled steps, and the last of their stops dumps it.
    """

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        self._options = plan.options if isinstance(plan.options, TorchMemory) else _DEFAULT
        self._files = files

    def open(self) -> None:
        options = self._options
        with _history.lock:
            if not _history.steps:
                self._record(
                    enabled="all", context=options.context, stacks=options.stacks, max_entries=options.max_entries
                )
            _history.steps.append(self._files.step)

    def close(self) -> Returned:
        files = self._files
        with _history.lock:
            if len(_history.steps) < self._options.snapshot_steps:
                return Returned(ranks_without_trace=(files.rank,))  # a later step's snapshot covers this one
            steps, _history.steps = _history.steps, []
            name = f"memory.rank{files.rank}.step{'-'.join(map(str, dict.fromkeys((steps[0], steps[-1]))))}"
            # The format is that of torch and its viewer (pytorch.org/memory_viz); nothing here ever opens one.
            file = files.directory / f"{name}.pid{os.getpid()}.pickle"
            part = file.with_name(f".{file.name}.part")
            try:
                file.open("xb").close()
                torch.cuda.memory._dump_snapshot(str(part))  # type: ignore[no-untyped-call]
                os.replace(part, file)
                traces = files.describe([file])
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


class NsysRecorder(Recorder):
    """Opens ranges of the CUDA profiler API, in which `nsys profile --capture-range=cudaProfilerApi` records.

    A discrete plan has a range around each outermost stage, any other has one from the first stage to the stop. Stages
    are NVTX ranges. nsys writes its report by itself, so a stop lists no trace.
    """

    def __init__(self, plan: ProfilePlan) -> None:
        self._discrete = plan.discrete
        self._device: int | None = None  # with the open range

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        if self._device is None:
            self._call(torch.cuda.profiler.start)
            self._device = torch.cuda.current_device()

    def end(self) -> None:
        if self._discrete:
            self._stop()

    def mark(self, stage: str) -> AbstractContextManager[object]:
        return _nvtx(stage)

    def close(self) -> Returned:
        self._stop()
        return Returned()

    def _stop(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            with torch.cuda.device(device):  # on another thread the default is device 0, which may not be this rank's
                self._call(torch.cuda.profiler.stop)

    def _call(self, function: object) -> None:
        assert callable(function)
        try:
            function()
        except (RuntimeError, AssertionError) as error:
            raise EngineError(f"the CUDA profiler API refused: {error}.") from error


@contextmanager
def _nvtx(stage: str) -> Iterator[None]:
    """A range that is not pushed on the thread's stack, since interleaved coroutines don't end in stack order."""
    span = torch.cuda.nvtx.range_start(stage)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(span)
