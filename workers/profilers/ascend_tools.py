"""Tools `npu` (torch_npu.profiler) and `precision_debugger` (msprobe), of Ascend machines.

Never run on such a machine: the calls are those that the packages' own source takes (torch_npu 2.14.0,
mindstudio-probe 26.2.0), and the tests drive stand-ins with the same signatures.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from schemas.commands import Npu, PrecisionDebugger, ProfilePlan
from schemas.errors import EngineError
from schemas.events import Returned
from workers.profilers.places import Place

NPU_FILES = ("*.db", "trace_view.json", "profiler_info*.json")
"""What of a profile is told; the rest lies beside it."""
DUMPS = ("dump.json", "stack.json", "construct.json", "debug.json")
LISTED = 150


class NpuRecorder:
    """torch_npu's profiler around each outermost stage, whether the plan is discrete or not.

    Whether it may be stopped by another thread than started it is not known, so it never is. It swallows its own errors
    and writes a directory of its own naming; a stage that left none is told.
    """

    def __init__(self, plan: ProfilePlan, place: Place) -> None:
        self._plan, self._place = plan, place
        self._options = plan.options if isinstance(plan.options, Npu) else Npu()
        self._folder = place.directory
        self._npu: Any = None
        self._running: Any = None
        self._stages = 0

    def open(self) -> None:
        self._npu = importlib.import_module("torch_npu")
        self._folder = _apart(self._place)

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

    def mini_batch(self) -> None: ...

    def mark(self, stage: str) -> AbstractContextManager[object]:
        return self._span(stage)

    def close(self) -> Returned:
        return _left(self._place, self._folder, NPU_FILES, self._stages > 0)

    @contextmanager
    def _span(self, stage: str) -> Iterator[None]:
        mstx = self._npu.npu.mstx
        opened = mstx.range_start(message=stage)
        try:
            yield
        finally:
            mstx.range_end(opened)


class PrecisionRecorder:
    """msprobe's PrecisionDebugger around each outermost stage that the plan names.

    There is one debugger per process, which takes the directory of its dumps when it is made: that of a later stage is
    put into its configuration. A stage's model is what `annotate` or the rank names; levels of msprobe that watch no
    module need none.
    """

    def __init__(self, plan: ProfilePlan, place: Place) -> None:
        self._place = place
        self._options = plan.options if isinstance(plan.options, PrecisionDebugger) else PrecisionDebugger()
        self._folder = place.directory
        self._debugger: Any = None
        self._running = False
        self._seen: set[str] = set()
        self._watched = 0

    def open(self) -> None:
        self._debugger = importlib.import_module("msprobe.pytorch").PrecisionDebugger
        self._folder = _apart(self._place)

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

    def mini_batch(self) -> None: ...

    def mark(self, stage: str) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> Returned:
        missed = sorted((self._options.stages or frozenset()) - self._seen)
        if missed and self._options.strict:
            came = ", ".join(sorted(self._seen)) or "none"
            raise EngineError(f"the plan watches stages that never came: {', '.join(missed)}; those that came: {came}.")
        return _left(self._place, self._folder, DUMPS, self._watched > 0)


def _apart(place: Place) -> Path:
    try:
        return place.apart()
    except OSError as error:
        raise EngineError(f"the profile was not started: {error.filename}: {error.strerror}.") from error


def _left(place: Place, folder: Path, patterns: tuple[str, ...], some: bool) -> Returned:
    """The files of a session's directory. Raises EngineError when there ought to be some."""
    try:
        files = {file for pattern in patterns for file in folder.rglob(pattern)}
        traces = place.describe(sorted(files)[:LISTED])
    except OSError as error:
        raise EngineError(f"{error.filename} can't be read: {error.strerror}.") from error
    if some and not traces:
        raise EngineError(f"the tool left nothing in {folder}: its own log says why.")
    return Returned(traces=traces, ranks_without_trace=() if traces else (place.rank,))
