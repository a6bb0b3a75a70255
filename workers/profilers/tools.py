"""The tools of a training rank, and what each can't record in this process."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from schemas.commands import Npu, PrecisionDebugger, ProfilePlan, TorchMemory
from schemas.selection import RANK_TOOLS
from workers.limits import Limit, require_recordable
from workers.profilers.recorder import Recorder
from workers.profilers.session_files import SessionFiles

OLDEST_TORCH: Final = (2, 6)
_OPTIONS: Final = {"torch_memory": TorchMemory, "npu": Npu, "precision_debugger": PrecisionDebugger}
"""The type of a tool's options; the other tools have none."""


def torch_version() -> str:
    """Return the installed version of torch without importing it; `missing` if there is none."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "missing"


def require_supported(plan: ProfilePlan) -> None:
    """Raise UnsupportedError for a plan that can't be honoured in this process. Imports torch; starts nothing."""
    require_recordable(f"tool {plan.tool}", _limits(plan))


def make_recorder(plan: ProfilePlan, files: SessionFiles) -> Recorder:
    """Return the tool of a plan that `require_supported` has passed."""
    match plan.tool:
        case "torch":
            from workers.profilers.torch_tool import TorchRecorder

            return TorchRecorder(plan, files)
        case "torch_memory":
            from workers.profilers.cuda_tools import MemoryRecorder

            return MemoryRecorder(plan, files)
        case "nsys":
            from workers.profilers.cuda_tools import NsysRecorder

            return NsysRecorder(plan)
        case "npu":
            from workers.profilers.ascend_tools import NpuRecorder

            return NpuRecorder(plan, files)
        case _:
            from workers.profilers.ascend_tools import PrecisionRecorder

            return PrecisionRecorder(plan, files)


def _limits(plan: ProfilePlan) -> Iterator[Limit]:
    options = type(plan.options).__name__
    yield Limit(
        plan.tool not in RANK_TOOLS, "a training rank", f"the tools for that are {', '.join(sorted(RANK_TOOLS))}"
    )
    yield Limit(
        plan.window is not None,
        "a window in a training rank",
        "a window counts the forwards of an engine. Use a schedule, which counts mini-batches",
    )
    yield Limit(
        plan.by_stage or plan.merge,
        "by_stage or merge in a training rank",
        "they are for engines. Use discrete for a trace of each stage",
    )
    yield Limit(
        plan.options is not None and not isinstance(plan.options, _OPTIONS.get(plan.tool, ())),
        f"with options of type {options}",
        "they are those of another tool",
    )
    yield Limit(plan.schedule is not None and plan.tool != "torch", "a schedule", "only tool torch has one")
    yield from _TOOL_LIMITS[plan.tool](plan)


def _torch_limits(plan: ProfilePlan) -> Iterator[Limit]:
    error = _import_error("torch")
    yield Limit(error != "", "anything", f"torch can't be imported ({error}); pip install 'rolloutctl[torch]'")
    installed = torch_version()
    yield Limit(
        tuple(int(part) for part in installed.split(".")[:2]) < OLDEST_TORCH,
        "with this torch",
        f"torch is {installed}, and {'.'.join(map(str, OLDEST_TORCH))} is the oldest supported version",
    )


def _cuda_limits(plan: ProfilePlan) -> Iterator[Limit]:
    yield from _torch_limits(plan)
    yield Limit(not sys.modules["torch"].cuda.is_available(), "a GPU", "torch sees no CUDA device")


def _torch_tool_limits(plan: ProfilePlan) -> Iterator[Limit]:
    yield Limit("npu" in plan.activities, "activity npu", "tool npu records it")
    yield from (_cuda_limits if "cuda" in plan.activities else _torch_limits)(plan)
    # torch's profiler imports it at its first start, which takes seconds that a training step does not have.
    error = _import_error("torch._inductor.config")
    yield Limit(error != "", "anything", f"torch's profiler needs torch._inductor, which can't be imported ({error})")


def _package_limits(package: str, pip: str) -> Iterator[Limit]:
    error = _import_error(package)
    installed = error != "" and find_spec(package.partition(".")[0]) is not None
    problem = f"is installed, but can't be imported ({error})" if installed else f"is not installed ({error})"
    yield Limit(error != "", "anything", f"{package} {problem}; pip install {pip}")


def _npu_limits(plan: ProfilePlan) -> Iterator[Limit]:
    return _package_limits("torch_npu", "torch-npu")


def _precision_limits(plan: ProfilePlan) -> Iterator[Limit]:
    path = plan.options.config_path if isinstance(plan.options, PrecisionDebugger) else ""
    yield Limit(not path, "without `config_path`", "that is a JSON file of msprobe's")
    yield Limit(not os.path.isfile(path), f"with `config_path` {path}", "there is no such file here")
    yield from _package_limits("msprobe.pytorch", "mindstudio-probe")


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error) or type(error).__name__
    return ""


_TOOL_LIMITS: Final[dict[str, Callable[[ProfilePlan], Iterator[Limit]]]] = {
    "torch": _torch_tool_limits,
    "torch_memory": _cuda_limits,
    "nsys": _cuda_limits,
    "npu": _npu_limits,
    "precision_debugger": _precision_limits,
}
