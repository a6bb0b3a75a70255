"""Tools `torch_memory` (the history of CUDA's allocator) and `nsys` (ranges in which Nsight Systems records)."""

import os
import threading
from contextlib import AbstractContextManager

import torch

from schemas.commands import ProfilePlan, TorchMemory
from schemas.errors import EngineError
from schemas.events import Returned
from workers.profilers.recorder import Recorder, SessionFiles, span

_lock = threading.Lock()
_steps: list[int] = []
"""Steps profiled since the last snapshot. The allocator has one history per process."""


class MemoryRecorder(Recorder):
    """Records the history of CUDA's allocator from start to stop, over all threads, and dumps it at the stop.

    With `snapshot_steps` n the history continues over n profiled steps, and the last of their stops dumps it.
    """

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        super().__init__(plan, files)
        options = plan.options if isinstance(plan.options, TorchMemory) else TorchMemory()
        self._snapshot_steps = options.snapshot_steps
        with _lock:
            if not _steps:
                torch.cuda.memory._record_memory_history(
                    enabled="all", context=options.context, stacks=options.stacks, max_entries=options.max_entries
                )
            _steps.append(files.step)

    def close(self) -> Returned:
        with _lock:
            if len(_steps) < self._snapshot_steps:
                return self.files.describe(())  # a later step's snapshot covers this one
            steps = "-".join(map(str, dict.fromkeys((_steps[0], _steps[-1]))))
            _steps.clear()
            # The format is that of torch and its viewer (pytorch.org/memory_viz); nothing here ever opens one.
            file = self.files.directory / f"memory.rank{self.files.rank}.step{steps}.pid{os.getpid()}.pickle"
            part = file.with_name(f".{file.name}.part")
            try:
                file.open("xb").close()
                torch.cuda.memory._dump_snapshot(str(part))  # type: ignore[no-untyped-call]
                os.replace(part, file)
            except (OSError, RuntimeError) as error:
                part.unlink(missing_ok=True)
                raise EngineError(f"the memory snapshot {file.name} was not written: {error}.") from error
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        return self.files.describe((file,))


class NsysRecorder(Recorder):
    """Opens ranges of the CUDA profiler API, in which `nsys profile --capture-range=cudaProfilerApi` records.

    A discrete plan has a range around each outermost stage, any other has one from the first stage to the stop. Stages
    are NVTX ranges. nsys writes its report by itself, so a stop lists no trace.

    A stop does nothing on a thread that has no CUDA context yet, as that of the agent (CUDA 13.0, driver 580). Waiting
    for the GPU makes one.
    """

    _device: int | None = None  # the device with the open range

    def begin(self, stage: str, scheduled: bool) -> None:
        if self._device is None:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._device = torch.cuda.current_device()

    def end(self) -> None:
        if self.plan.discrete:
            self._stop()

    def mark(self, stage: str) -> AbstractContextManager[object]:
        return span(torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end, stage)

    def close(self) -> Returned:
        self._stop()
        return Returned()

    def _stop(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            with torch.cuda.device(device):  # on another thread the default is device 0, which may not be this rank's
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
