"""Tool `npu` (torch_npu.profiler), for Ascend machines.

It has never run on such a machine: the calls follow the package's own source (torch_npu 2.14.0), and the tests drive a
stand-in with the same signatures.
"""

import importlib
from contextlib import AbstractContextManager
from typing import Any

from schemas.commands import Npu, ProfilePlan
from schemas.errors import EngineError
from schemas.events import Returned
from workers.profilers.recorder import Recorder, SessionFiles, span


class NpuRecorder(Recorder):
    """torch_npu's profiler around each outermost stage, whether the plan is discrete or not.

    It names its files itself, in a directory of the session. It is stopped only by the thread that started it: whether
    another may is not known.
    """

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        super().__init__(plan, files)
        self._folder = files.session_dir()
        self._recorded = 0
        self._options = plan.options if isinstance(plan.options, Npu) else Npu()
        self._npu: Any = importlib.import_module("torch_npu")
        self._running: Any = None

    def begin(self, stage: str, scheduled: bool) -> None:
        plan, api = self.plan, self._npu.profiler
        activities = [api.ProfilerActivity.CPU]
        if "npu" in plan.activities:
            activities.append(api.ProfilerActivity.NPU)
        self._recorded += 1
        folder = self._folder / f"{self._recorded}-{stage.replace('/', '-')}"
        running = api.profile(
            activities=activities,
            record_shapes=plan.record_shapes,
            profile_memory="memory" in plan.activities,
            with_stack=plan.with_stack,
            with_modules=plan.with_modules,
            on_trace_ready=api.tensorboard_trace_handler(str(folder), analyse_flag=self._options.analysis),
            experimental_config=api._ExperimentalConfig(
                profiler_level=getattr(api.ProfilerLevel, self._options.level.capitalize()),
                export_type=api.ExportType.Db,
                data_simplification=True,
                msprof_tx=True,
                mstx_domain_exclude=["communication"],
            ),
        )
        running.start()
        self._running = running

    def end(self) -> None:
        running, self._running = self._running, None
        running.step()
        running.stop()

    def mark(self, stage: str) -> AbstractContextManager[object]:
        mstx = self._npu.npu.mstx
        return span(mstx.range_start, mstx.range_end, stage)

    def close(self) -> Returned:
        """Describe the files. The tool swallows its own errors, so a session without files is an error."""
        patterns = ("*.db", "trace_view.json", "profiler_info*.json")
        found = {file for pattern in patterns for file in self._folder.rglob(pattern)}
        if self._recorded and not found:
            raise EngineError(f"the tool wrote nothing to {self._folder}: its own log says why.")
        return self.files.describe(found)
