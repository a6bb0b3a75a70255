"""Tools `npu` (torch_npu.profiler) and `precision_debugger` (msprobe), for Ascend machines.

They have never run on such a machine: the calls follow the packages' own source (torch_npu 2.14.0, mindstudio-probe
26.2.0), and the tests drive stand-ins with the same signatures.
"""

import importlib
from contextlib import AbstractContextManager
from typing import Any

from schemas.commands import Npu, PrecisionDebugger, ProfilePlan
from schemas.errors import EngineError
from schemas.events import Returned
from workers.profilers.recorder import Recorder, SessionFiles, span


class _AscendRecorder(Recorder):
    """A tool that names its files itself, in a directory of the session."""

    patterns: tuple[str, ...]
    """The files that an outcome lists; the others lie beside them."""

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        super().__init__(plan, files)
        self._folder = files.session_dir()
        self._recorded = 0

    def close(self) -> Returned:
        """Describe the files. Both tools swallow their own errors, so a session without files is an error."""
        found = {file for pattern in self.patterns for file in self._folder.rglob(pattern)}
        if self._recorded and not found:
            raise EngineError(f"the tool wrote nothing to {self._folder}: its own log says why.")
        return self.files.describe(found)


class NpuRecorder(_AscendRecorder):
    """torch_npu's profiler around each outermost stage, whether the plan is discrete or not.

    It is stopped only by the thread that started it: whether another may is not known.
    """

    patterns = ("*.db", "trace_view.json", "profiler_info*.json")

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        super().__init__(plan, files)
        self._options = plan.options if isinstance(plan.options, Npu) else Npu()
        self._npu: Any = importlib.import_module("torch_npu")
        self._running: Any = None

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
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


class PrecisionRecorder(_AscendRecorder):
    """msprobe's PrecisionDebugger around each outermost stage that the plan names.

    There is one debugger per process. It takes the directory of its dumps when it is made, so the directory of a later
    stage is written into its configuration. A stage's model is the one that `annotate` or the rank names; levels of
    msprobe that watch no module need none.
    """

    patterns = ("dump.json", "stack.json", "construct.json", "debug.json")

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        super().__init__(plan, files)
        self._options = plan.options if isinstance(plan.options, PrecisionDebugger) else PrecisionDebugger()
        self._make_debugger: Any = importlib.import_module("msprobe.pytorch").PrecisionDebugger
        self._running: Any = None
        self._seen: set[str] = set()

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        self._seen.add(stage)
        if self._options.stages is not None and stage not in self._options.stages:
            return
        folder = self._folder / stage.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        debugger = self._make_debugger(config_path=self._options.config_path, dump_path=str(folder))
        debugger.service.config.dump_path = str(folder)
        debugger.start(model)
        self._running, self._recorded = debugger, self._recorded + 1

    def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            running.step()

    def close(self) -> Returned:
        missed = sorted((self._options.stages or frozenset()) - self._seen)
        if missed and self._options.strict:
            seen = ", ".join(sorted(self._seen)) or "none"
            raise EngineError(f"the plan watches stages that never came: {', '.join(missed)}; those that came: {seen}.")
        return super().close()
