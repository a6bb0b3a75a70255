"""What is profiled, and how. `schemas.profiler.config` adds the constructors that read these settings from a file."""

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec
from msgspec import Struct

from schemas.commands import Npu, ProfilePlan, ToolOptions, TorchMemory
from schemas.identity import ROLLOUT, Count, Milliseconds, Role

Layout = Literal["step", "verl_step", "verl"]
"""How trace directories are named (`schemas.selection.trace_directory`)."""
RankUnit = Literal["global", "replica"]
"""What the numbers in the `ranks` of verl's rollouts are: global GPU ranks, or replicas as in verl up to 0.9.0."""
TOOLS: Final[Mapping[str, type[ToolOptions] | None]] = {
    "torch": None,
    "npu": Npu,
    "nsys": None,
    "torch_memory": TorchMemory,
}
"""The profiling tools, and the type of the options of those that have any."""


class ProfilerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a `ProfilerConfig`.

    Attributes:
        steps: Global training steps to profile; empty for none.
        continuous: One session for each run of consecutive steps, instead of one for each step.
        save_path: Root of the trace directories on every agent and training rank that is given these settings.
        finish_hook_cmd: Command for `/bin/sh -c` after the last profiled step. `Finish` says which agents run it.
    """

    plan: ProfilePlan = ProfilePlan()
    roles: dict[Role, ProfilePlan] = {}
    steps: tuple[Count, ...] = ()
    continuous: bool = False
    timeout_ms: Milliseconds = 30_000
    save_path: str = ""
    finish_hook_cmd: str = ""


def problems(settings: ProfilerSettings) -> Iterator[str]:
    """Yield what is wrong with settings whose types are right: unknown roles and tools, and fields without effect.

    Engines have no mini-batches, training ranks no forward steps, and most tools no options.
    """
    if ROLLOUT in settings.roles:
        yield "roles.rollout is not a training role: write it as `plan`, beside `roles`"
    for role in settings.roles:
        try:
            msgspec.convert(role, Role)
        except msgspec.ValidationError:
            allowed = "allowed are 1 to 32 lower-case letters, digits, _ and -, a letter first"
            yield f"roles.{role} is not the name of a role: {allowed}"
    for path, plan in [("plan", settings.plan), *((f"roles.{name}", plan) for name, plan in settings.roles.items())]:
        if plan.tool not in TOOLS:
            yield f"{path}.tool is {plan.tool!r}: allowed is one of {', '.join(TOOLS)}"
            continue
        for field, reason in without_effect(plan, role=path != "plan"):
            yield f"{path}.{field} has no effect there: {reason}"


def without_effect(plan: ProfilePlan, role: bool) -> Iterator[tuple[str, str]]:
    """Yield the fields of a plan that have no effect in a training role, or in a rollout, each with the reason."""
    tool, default = plan.tool, ProfilePlan()
    rules: tuple[tuple[bool, str, str], ...] = (
        (not role, "schedule", "it counts mini-batches, and rollouts have none; write a window of forward steps"),
        (role, "replicas", "a training rank belongs to none; write ranks"),
        (role, "window", "it counts forward steps of an engine; write a schedule, which counts mini-batches"),
        (role, "by_stage", "only an engine makes a trace of each stage; write discrete"),
        (role, "merge", "only an engine merges traces"),
        (role and tool != "torch", "schedule", f"only the tool torch has one, and this is {tool}"),
        (tool == "torch_memory", "discrete", "a snapshot covers whole sessions"),
        (tool not in ("torch", "npu"), "activities", f"{tool} has none"),
    )
    for applies, field, reason in rules:
        if applies and getattr(plan, field) != getattr(default, field):
            yield field, reason
    if plan.options is not None and type(plan.options) is not TOOLS[tool]:
        yield "options", f"these are not options of the tool {tool}"
