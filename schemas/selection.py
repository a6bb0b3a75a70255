"""Which agents a profile command concerns, and where the traces of its sessions go."""

from schemas.commands import ProfilePlan
from schemas.identity import ROLLOUT, Identity
from schemas.outcomes import Reason

ENGINE_TOOLS = frozenset({"torch", "npu"})
"""Profiling tools that an inference engine can run itself; others (nsys, say) belong to the training ranks."""


RANK_TOOLS = frozenset({"torch", "torch_memory", "nsys", "npu", "precision_debugger"})
"""Profiling tools of a training rank."""


def profile_skip_reason(plan: ProfilePlan | None, step: int | None, identity: Identity) -> Reason | None:
    """Why a session for `step` does not concern this replica or rank, or None when it does. First reason that holds.

    step: None asks of the plan alone.   plan: None when there is none for its role.
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
    """Why the end of profiling does not concern this agent, or None when it does."""
    reason = profile_skip_reason(plan, None, identity)
    if plan is None or not plan.enabled:
        return reason
    finish, mine = plan.finish, identity.node_ranks
    if finish.hook and (finish.hook_all_ranks or not finish.hook_ranks.isdisjoint(mine)):
        return None
    if reason is None and not (finish.relocate or (finish.hook and not finish.hook_ranks)):
        return Reason.DISABLED
    return reason


def trace_directory(step: int, plan: ProfilePlan, identity: Identity) -> str:
    """Where the traces of a step's session go, relative to the agent's traces root.

    step       global_step_<N>/replica_<R>, and global_step_<N>/<role>_rank_<r>
    verl_step  rollout_step_<N>/agent_loop_replica_<R> (verl's pull request 5025)
    verl       agent_loop_rollout_replica_<R>/.step_<N>, and from there to the directory above when the session ends, so
               that it holds the traces of all steps as verl 0.9 has them; those of training ranks lie in the root
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
