"""Tools `npu` (torch_npu.profiler) and `precision_debugger` (msprobe), for Ascend machines.

They have never run on such a machine: the calls follow the packages' own source (torch_npu 2.14.0, mindstudio-probe
26.2.0), and the tests drive stand-ins with the same signatures.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from schemas.commands import Npu, PrecisionDebugger, ProfilePlan
from schemas.errors import EngineError
from schemas.events import Returned
from workers.profilers.recorder import Recorder
from workers.profilers.session_files import SessionFiles

NPU_FILES = ("*.db", "trace_view.json", "profiler_info*.json")
"""The files of a profile that an outcome lists; the others lie beside them."""
DUMP_FILES = ("dump.json", "stack.json", "construct.json", "debug.json")
MAX_LISTED = 150


class NpuRecorder(Recorder):
    """torch_npu's profiler around each outermost stage, whether the plan is discrete or not.

    It is stopped only by the thread that started it: whether another may is not known. It swallows its own errors and
    names its directories itself, so a session without files is an error.
    """

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        self._plan, self._files = plan, files
        self._options = plan.options if isinstance(plan.options, Npu) else Npu()
        self._folder = files.directory
        self._npu: Any = None
        self._running: Any = None
        self._stages = 0

    def open(self) -> None:
        self._npu = importlib.import_module("torch_npu")
        self._folder = _session_dir(self._files)

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        plan, api = self._plan, self._npu.profiler
        levels = {"level_none": "Level_none", "level0": "Level0", "level1": "Level1", "level2": "Level2"}
        activities = [api.ProfilerActivity.CPU]
        if "npu" in plan.activities:
            activities.append(api.ProfilerActivity.NPU)
        self._stages += 1
        folder = self._folder / f"{self._stages}-{stage.replace('/', '-')}"
        running = api.profile(
            activities=activities,
            record_shapes=plan.record_shapes,
            profile_memory="memory" in plan.activities,
            with_stack=plan.with_stack,
            with_modules=plan.with_modules,
            on_trace_ready=api.tensorboard_trace_handler(str(folder), analyse_flag=self._options.analysis),
            experimental_config=api._ExperimentalConfig(
                profiler_level=getattr(api.ProfilerLevel, levels[self._options.level]),
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
        return self._span(stage)

    def close(self) -> Returned:
        return _describe(self._files, self._folder, NPU_FILES, self._stages > 0)

    @contextmanager
    def _span(self, stage: str) -> Iterator[None]:
        mstx = self._npu.npu.mstx
        span = mstx.range_start(message=stage)
        try:
            yield
        finally:
            mstx.range_end(span)


class PrecisionRecorder(Recorder):
    """msprobe's PrecisionDebugger around each outermost stage that the plan names.

    There is one debugger per process. It takes the directory of its dumps when it is made, so the directory of a later
    stage is written into its configuration. A stage's model is the one that `annotate` or the rank names; levels of
    msprobe that watch no module need none.
    """

    def __init__(self, plan: ProfilePlan, files: SessionFiles) -> None:
        self._files = files
        self._options = plan.options if isinstance(plan.options, PrecisionDebugger) else PrecisionDebugger()
        self._folder = files.directory
        self._debugger: Any = None
        self._running = False
        self._seen: set[str] = set()
        self._watched = 0

    def open(self) -> None:
        self._debugger = importlib.import_module("msprobe.pytorch").PrecisionDebugger
        self._folder = _session_dir(self._files)

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        self._seen.add(stage)
        if self._options.stages is not None and stage not in self._options.stages:
            return
        folder = self._folder / stage.replace("/", "-")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"no dump can be made in {folder}: {error.strerror}.") from error
        debugger = self._debugger(config_path=self._options.config_path, dump_path=str(folder))
        debugger.service.config.dump_path = str(folder)
        debugger.start(model)
        self._running, self._watched = True, self._watched + 1

    def end(self) -> None:
        if self._running:
            self._running = False
            self._debugger.stop()
            self._debugger.step()

    def close(self) -> Returned:
        missed = sorted((self._options.stages or frozenset()) - self._seen)
        if missed and self._options.strict:
            seen = ", ".join(sorted(self._seen)) or "none"
            raise EngineError(f"the plan watches stages that never came: {', '.join(missed)}; those that came: {seen}.")
        return _describe(self._files, self._folder, DUMP_FILES, self._watched > 0)


def _session_dir(files: SessionFiles) -> Path:
    try:
        return files.session_dir()
    except OSError as error:
        raise EngineError(f"the profile was not started: {error.filename}: {error.strerror}.") from error


def _describe(files: SessionFiles, folder: Path, patterns: tuple[str, ...], expected: bool) -> Returned:
    """Describe the files in a session's directory. Raises EngineError when some were expected and there are none."""
    try:
        found = {file for pattern in patterns for file in folder.rglob(pattern)}
        traces = files.describe(sorted(found)[:MAX_LISTED])
    except OSError as error:
        raise EngineError(f"{error.filename} can't be read: {error.strerror}.") from error
    if expected and not traces:
        raise EngineError(f"the tool wrote nothing to {folder}: its own log says why.")
    return Returned(traces=traces, ranks_without_trace=() if traces else (files.rank,))
