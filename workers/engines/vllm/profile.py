"""A profiling plan as the arguments of vLLM's `start_profile`. Pure."""

from collections.abc import Iterator

from schemas.commands import ProfilePlan, Window
from schemas.errors import UnsupportedError
from schemas.identity import Operation
from workers.engines.client import integer_at
from workers.engines.vllm.launch import VLLMLaunch
from workers.limits import Limit, require_recordable


def profile_arguments(plan: ProfilePlan, directory: str, launch: VLLMLaunch) -> dict[str, object]:
    """Return the arguments of a start. Raises UnsupportedError."""
    if reason := launch.missing.get(Operation.PROFILE):
        raise UnsupportedError(f"vllm {launch.version} can't be profiled: {reason}.")
    require_recordable(f"vllm {launch.version}", _limits(plan, launch))
    parameters, arguments = launch.methods["start_profile"], dict[str, object]()
    if "profile_prefix" in parameters and directory:
        arguments["profile_prefix"] = directory.replace("/", ".")
    if _takes_bounds(launch):  # sent without a window as well: the engine may have been launched with one
        arguments["delay_iterations"], arguments["max_iterations"] = iteration_bounds(plan.window)
    return arguments


def iteration_bounds(window: Window | None) -> tuple[int, int]:
    """Return a window as the delay and number of iterations, where 0 iterations means no end."""
    if window is None:
        return 0, 0
    return (window.start + 1 if window.start else 0), (window.end - window.start if window.end is not None else 0)


def _takes_bounds(launch: VLLMLaunch) -> bool:
    return {"delay_iterations", "max_iterations"} <= launch.methods["start_profile"]


def _limits(plan: ProfilePlan, launch: VLLMLaunch) -> Iterator[Limit]:
    """What this engine, as it was launched, can't record."""
    device = launch.device
    asks_npu = "npu" in (plan.tool, *plan.activities)
    other_device = f"its device is {device}. Change the plan"
    yield Limit(plan.by_stage or plan.merge, "traces by stage, or merged", "vLLM writes neither. Change the plan")
    yield Limit(device not in (None, "npu") and asks_npu, "an NPU's work", other_device)
    yield Limit(device == "cpu" and "cuda" in plan.activities, "cuda", other_device)
    yield from _content_limits(plan, launch)
    yield Limit(
        launch.profiler.get("ignore_frontend") is False,
        "its front end",
        "that is started on one thread and stopped on another, which can kill the server. Launch it with "
        "ignore_frontend",
    )
    yield Limit(
        any(integer_at(launch.profiler, key) for key in ("wait_iterations", "warmup_iterations")),
        "all forward steps",
        "launch it without wait_iterations and warmup_iterations",
    )
    delay, most = iteration_bounds(plan.window)
    launched = tuple(integer_at(launch.profiler, key) or 0 for key in ("delay_iterations", "max_iterations"))
    yield Limit(
        (delay, most) != launched and not _takes_bounds(launch),
        "from start to stop" if plan.window is None else f"a window of {plan.window}",
        f"before 0.32 the bounds are fixed at launch. Launch it with delay_iterations={delay} and "
        f"max_iterations={most}, or use 0.32",
    )


def _content_limits(plan: ProfilePlan, launch: VLLMLaunch) -> Iterator[Limit]:
    """What a trace holds is chosen at launch."""
    chosen = launch.profiler.get("torch_profiler_activities")
    for activity in sorted(plan.activities & {"cpu", "cuda"}):
        absent = isinstance(chosen, list) and activity.upper() not in chosen
        yield Limit(absent, activity, f"launch it with torch_profiler_activities that have {activity.upper()}")
    contents = (
        ("stacks", plan.with_stack, "torch_profiler_with_stack"),
        ("modules, which stacks name", plan.with_modules, "torch_profiler_with_stack"),
        ("shapes", plan.record_shapes, "torch_profiler_record_shapes"),
        ("memory", "memory" in plan.activities, "torch_profiler_with_memory"),
    )
    for what, wanted, key in contents:
        yield Limit(wanted and launch.profiler.get(key) is False, what, f"launch it with {key}")
