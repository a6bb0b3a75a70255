"""The tools of a training rank, and what each can't record in this process."""

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from schemas.commands import ProfilePlan
from schemas.profiler.settings import without_effect
from schemas.selection import RANK_TOOLS
from workers.limits import Limit, require_recordable
from workers.profilers.ascend_tools import NpuRecorder
from workers.profilers.recorder import Recorder, SessionFiles

TORCH_EXTRA: Final = "install rolloutctl with its extra `torch` (docs/installation.md)"
OLDEST_TORCH: Final = (2, 6)


def torch_version() -> str:
    """Return the installed version of torch without importing it; `missing` if there is none."""
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "missing"


def require_supported(plan: ProfilePlan) -> None:
    """Raise UnsupportedError for a plan that can't be honoured in this process. May import torch; starts nothing."""
    require_recordable(f"tool {plan.tool}", _limits(plan))


def make_recorder(plan: ProfilePlan, files: SessionFiles) -> Recorder:
    """Open the tool of a plan that `require_supported` has passed."""
    match plan.tool:
        case "torch":
            from workers.profilers.torch_tool import TorchRecorder

            return TorchRecorder(plan, files)
        case "torch_memory" | "nsys":
            from workers.profilers.cuda_tools import MemoryRecorder, NsysRecorder

            return (MemoryRecorder if plan.tool == "torch_memory" else NsysRecorder)(plan, files)
        case _:
            return NpuRecorder(plan, files)


def _limits(plan: ProfilePlan) -> Iterator[Limit]:
    yield Limit(
        plan.tool not in RANK_TOOLS, "a training rank", f"the tools for that are {', '.join(sorted(RANK_TOOLS))}"
    )
    for field, reason in without_effect(plan, role=True):
        yield Limit(True, f"with `{field}`", reason)
    yield from _TOOLS[plan.tool](plan)


def _torch_limits(plan: ProfilePlan) -> Iterator[Limit]:
    yield _import_limit("torch", TORCH_EXTRA)
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
    yield _import_limit("torch._inductor.config", TORCH_EXTRA)


def _npu_limits(plan: ProfilePlan) -> Iterator[Limit]:
    yield _import_limit("torch_npu", "pip install torch-npu")


def _import_limit(module: str, remedy: str) -> Limit:
    try:
        importlib.import_module(module)
    except ImportError as error:
        installed = find_spec(module.partition(".")[0]) is not None
        problem = "is installed, but can't be imported" if installed else "is not installed"
        return Limit(True, "anything", f"{module} {problem} ({error!r}); {remedy}")
    return Limit(False, "", "")


_TOOLS: Final[dict[str, Callable[[ProfilePlan], Iterator[Limit]]]] = {
    "torch": _torch_tool_limits,
    "torch_memory": _cuda_limits,
    "nsys": _cuda_limits,
    "npu": _npu_limits,
}
"""What each tool can't record here."""
