"""Which agents take part in a profiling session, and where its traces go."""

from schemas.commands import ProfilePlan
from schemas.identity import ROLLOUT, Identity
from schemas.outcomes import Reason

ENGINE_TOOLS = frozenset({"torch", "npu"})
"""Profiling tools that an inference engine can run. Others, such as nsys, are for training ranks."""

RANK_TOOLS = frozenset({"torch", "torch_memory", "nsys", "npu"})
"""Profiling tools that a training rank can run."""


def profile_skip_reason(plan: ProfilePlan | None, step: int | None, identity: Identity) -> Reason | None:
    """Return why this agent skips a session, or None if it takes part. The first reason that applies counts.

    Args:
        plan: None if there is no plan for the role of this agent.
        step: Global training step of the session; None to ignore the selection of steps.
        identity: The agent.
    """
    if plan is None or not plan.enabled:
        return Reason.DISABLED
    if step is not None and plan.steps is not None and step not in plan.steps:
        return Reason.STEP_NOT_SELECTED
    if not _selected(plan, identity):
        return Reason.RANK_NOT_SELECTED
    if plan.tool not in (ENGINE_TOOLS if identity.role == ROLLOUT else RANK_TOOLS):
        return Reason.TOOL_UNSUPPORTED
    return None


def _selected(plan: ProfilePlan, identity: Identity) -> bool:
    if plan.ranks is None and plan.replicas is None:
        return True
    by_rank = plan.ranks is not None and not plan.ranks.isdisjoint(identity.global_ranks)
    return by_rank or (plan.replicas is not None and identity.role == ROLLOUT and identity.replica in plan.replicas)


def finish_skip_reason(plan: ProfilePlan | None, identity: Identity) -> Reason | None:
    """Return why this agent skips the `finish` of a profiled run, or None if it takes part."""
    reason = profile_skip_reason(plan, None, identity)
    if plan is None or not plan.enabled:
        return reason
    finish = plan.finish
    if finish.hook and (finish.hook_all_ranks or not finish.hook_ranks.isdisjoint(identity.ranks_on_node)):
        return None
    if reason is None and not (finish.relocate or (finish.hook and not finish.hook_ranks)):
        return Reason.DISABLED
    return reason


def trace_directory(step: int, plan: ProfilePlan, identity: Identity) -> str:
    """Return the directory for the traces of a step's session, relative to the agent's traces root.

    Layouts:
        step: `global_step_<N>/replica_<R>`, and `global_step_<N>/<role>_rank_<r>` for training ranks.
        verl_step: `rollout_step_<N>/agent_loop_replica_<R>`, as in verl's pull request 5025.
        verl: `agent_loop_rollout_replica_<R>/.step_<N>`. When the session ends, its traces move one directory up, which
            then holds those of all steps, as in verl 0.9. Traces of training ranks are in the root.
    """
    if identity.role != ROLLOUT:
        return f"global_step_{step}/{identity.role}_rank_{identity.replica}" if plan.layout == "step" else "."
    match plan.layout:
        case "verl_step":
            return f"rollout_step_{step}/agent_loop_replica_{identity.replica}"
        case "verl":
            return f"agent_loop_rollout_replica_{identity.replica}/.step_{step}"
        case _:
            return f"global_step_{step}/replica_{identity.replica}"
