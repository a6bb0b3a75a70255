"""A profiling plan as the arguments of SGLang's `start_profile`. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from schemas.commands import ProfileActivity, ProfilePlan
from schemas.errors import UnsupportedError
from schemas.identity import Operation
from workers.engines.sglang.launch import SGLangLaunch, release
from workers.limits import Limit, require_recordable

NEVER: Final[Mapping[str, object]] = {"start_step": 1 << 60, "activities": []}
"""Arguments of a start that records nothing, at a forward step that never comes. It is refused, and changes nothing,
while a session is open."""

_ACTIVITIES: Final[Mapping[ProfileActivity, str]] = {"cpu": "CPU", "cuda": "GPU", "memory": "MEM", "npu": "GPU"}
"""SGLang's names. On an NPU its `GPU` is what torch_npu records (never run here)."""

_RECORDED: Final[Mapping[str, frozenset[ProfileActivity]]] = {
    "cpu": frozenset({"cpu"}),
    "cuda": frozenset({"cpu", "cuda", "memory"}),
    "npu": frozenset({"cpu", "npu"}),
}
"""By device. A scheduler that is asked to record CUDA's memory where there is none dies (0.5.6 to 0.5.23)."""

_ONE_FORWARD_SHORT: Final = (0, 5, 16)
"""Below this version `num_steps` records one forward step fewer. Nothing else that is visible from outside tells them
apart."""


def profile_arguments(plan: ProfilePlan, directory: str, traces: Path, launch: SGLangLaunch) -> dict[str, object]:
    """Return the arguments of a start. Raises UnsupportedError."""
    if "start_profile" not in launch.methods:
        raise UnsupportedError(f"sglang {launch.version} can't be profiled: {launch.missing[Operation.PROFILE]}.")
    require_recordable(f"sglang {launch.version}", _limits(plan, launch))
    parameters, window = launch.methods["start_profile"], plan.window
    arguments: dict[str, object] = {"output_dir": str(traces / directory), **trace_contents(plan)}
    if window is not None and window.end is not None:
        extra_step = () < release(launch.version) < _ONE_FORWARD_SHORT and not plan.by_stage
        arguments["num_steps"] = window.end + (1 if extra_step else 0)
    if plan.by_stage:
        arguments["profile_by_stage"] = True
    if plan.merge:
        arguments["merge_profiles"] = True
    name = directory.replace("/", ".")
    if "profile_id" in parameters:
        arguments["profile_id"] = name
    elif "profile_prefix" in parameters and not plan.merge:  # the merge looks for traces without the prefix
        arguments["profile_prefix"] = name
    return arguments


def trace_contents(plan: ProfilePlan) -> dict[str, object]:
    """Return the arguments that choose what a trace holds. Modules appear in stacks, so they need stacks."""
    return {
        "activities": [_ACTIVITIES[activity] for activity in sorted(plan.activities)],
        "with_stack": plan.with_stack or plan.with_modules,
        "record_shapes": plan.record_shapes,
    }


def _limits(plan: ProfilePlan, launch: SGLangLaunch) -> tuple[Limit, ...]:
    """What this engine can't record."""
    window = plan.window
    lacking = sorted(plan.activities - _RECORDED.get(launch.device or "", plan.activities))
    other_device = f"its device is {launch.device}. Change the plan"
    return (
        Limit(not plan.activities, "a plan without activities", "name at least one activity"),
        Limit(bool(lacking), ", ".join(lacking), other_device),
        Limit(plan.tool == "npu" and launch.device not in (None, "npu"), "with tool npu", other_device),
        Limit(
            plan.by_stage and (window is None or window.end is None),
            "by stage without a window",
            "give the number of forward steps of each stage",
        ),
        Limit(
            window is not None and window.start > 0,
            f"a window from forward step {window.start if window else 0}",
            "its start_step counts from its launch, the current step can't be read, and an armed start can't be "
            "disarmed. Begin the window at 0",
        ),
        Limit(
            plan.merge and "merge_profiles" not in launch.methods["start_profile"],
            "a merged trace",
            "this version writes one per rank only. Change the plan",
        ),
    )
