"""The tools of a training rank, and what each needs to run here."""

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final, NoReturn, Protocol

from schemas.commands import Npu, PrecisionDebugger, ProfilePlan, TorchMemory
from schemas.errors import UnsupportedError
from schemas.events import Returned
from schemas.selection import RANK_TOOLS
from workers.profilers.places import Place

OLDEST_TORCH: Final = (2, 6)


class Recorder(Protocol):
    """One tool in one session.

    `begin`, `end` and `mini_batch` are called by the thread that trains, `open` and `close` by another; no two at once.
    All raise EngineError for what the outcome is to say; nothing of a tool's own leaves it otherwise.
    """

    def open(self) -> None:
        """The session is to begin: prepare what can be prepared."""
        ...

    def begin(self, stage: str, scheduled: bool, model: object | None) -> None:
        """An outermost stage begins on this thread."""
        ...

    def end(self) -> None:
        """It ends, or the session does in the middle of it; on the thread of `begin`, and once for each that went
        well."""
        ...

    def mini_batch(self) -> None:
        """A mini-batch of it is done."""
        ...

    def mark(self, stage: str) -> AbstractContextManager[object]:
        """Names a span in what is recorded."""
        ...

    def close(self) -> Returned:
        """The session is over, and no stage is under way: write everything, and tell what was left."""
        ...


def torch_version() -> str:
    """Without importing it."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "missing"


def require(plan: ProfilePlan) -> None:
    """Raise UnsupportedError for a plan that can't be honoured in this process. Imports torch; starts nothing."""
    if plan.tool not in RANK_TOOLS:
        _refuse(plan, f"a training rank has no such tool, but: {', '.join(sorted(RANK_TOOLS))}")
    if plan.window is not None:
        _refuse(plan, "a window counts the forwards of an engine. Use a schedule, which counts mini-batches")
    if plan.by_stage or plan.merge:
        _refuse(plan, "by_stage and merge are for engines. Use discrete for a trace of each stage")
    wanted = {"torch_memory": TorchMemory, "npu": Npu, "precision_debugger": PrecisionDebugger}.get(plan.tool)
    if plan.options is not None and (wanted is None or not isinstance(plan.options, wanted)):
        _refuse(plan, f"its options are those of {type(plan.options).__name__}, another tool")
    if plan.schedule is not None and plan.tool != "torch":
        _refuse(plan, "only tool torch has a schedule")
    _REQUIRED[plan.tool](plan)


def recorder(plan: ProfilePlan, place: Place) -> Recorder:
    """The tool of a plan that `require` has passed."""
    match plan.tool:
        case "torch":
            from workers.profilers.torch_tool import TorchRecorder

            return TorchRecorder(plan, place)
        case "torch_memory":
            from workers.profilers.cuda_tools import MemoryRecorder

            return MemoryRecorder(plan, place)
        case "nsys":
            from workers.profilers.cuda_tools import NsysRecorder

            return NsysRecorder(plan)
        case "npu":
            from workers.profilers.ascend_tools import NpuRecorder

            return NpuRecorder(plan, place)
        case _:
            from workers.profilers.ascend_tools import PrecisionRecorder

            return PrecisionRecorder(plan, place)


def _refuse(plan: ProfilePlan, why: str) -> NoReturn:
    raise UnsupportedError(f"tool {plan.tool} can't record what the plan asks here: {why}.")


def _require_torch(plan: ProfilePlan) -> None:
    try:
        importlib.import_module("torch")
    except ImportError as error:
        _refuse(plan, f"torch can't be imported ({error}); pip install 'rolloutctl[torch]'")
    seen = torch_version()
    if tuple(int(part) for part in seen.split(".")[:2]) < OLDEST_TORCH:
        _refuse(plan, f"torch is {seen}, and {'.'.join(map(str, OLDEST_TORCH))} is the oldest that is driven")


def _require_cuda(plan: ProfilePlan) -> None:
    _require_torch(plan)
    if not sys.modules["torch"].cuda.is_available():
        _refuse(plan, "torch sees no CUDA device")


def _require_torch_tool(plan: ProfilePlan) -> None:
    if "npu" in plan.activities:
        _refuse(plan, "activity npu is recorded by tool npu")
    (_require_cuda if "cuda" in plan.activities else _require_torch)(plan)
    try:
        importlib.import_module("torch._inductor.config")  # the first start does, and a step has no seconds for it
    except ImportError as error:
        _refuse(plan, f"torch's profiler needs torch._inductor, which can't be imported ({error})")


def _require_package(package: str, pip: str) -> Callable[[ProfilePlan], None]:
    def check(plan: ProfilePlan) -> None:
        try:
            importlib.import_module(package)
        except ImportError as error:
            there = "is installed, but" if find_spec(package.partition(".")[0]) is not None else "is not installed:"
            _refuse(plan, f"{package} {there} can't be imported ({error}); pip install {pip}")

    return check


def _require_msprobe(plan: ProfilePlan) -> None:
    options = plan.options if isinstance(plan.options, PrecisionDebugger) else PrecisionDebugger()
    if not options.config_path:
        _refuse(plan, "it needs `config_path`, a JSON file of msprobe's")
    if not os.path.isfile(options.config_path):
        _refuse(plan, f"`config_path` is {options.config_path}, and no such file is here")
    _require_package("msprobe.pytorch", "mindstudio-probe")(plan)


_REQUIRED: Final[dict[str, Callable[[ProfilePlan], None]]] = {
    "torch": _require_torch_tool,
    "torch_memory": _require_cuda,
    "nsys": _require_cuda,
    "npu": _require_package("torch_npu", "torch-npu"),
    "precision_debugger": _require_msprobe,
}
