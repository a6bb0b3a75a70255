"""Which profiling sessions a training step opens and closes, and what comes before the first and after the last. Pure.

A session is named by its first step. Discrete: one session for each selected step, closed when the step ends.
Continuous: one session over each run of consecutive selected steps, closed when the last of them ends; where a plan
selects steps of its own, another run begins with them and after them. A trainer that jumps (it resumed from a
checkpoint, or a step raised) finds the session of another step open: that one is closed first.

    check ─▶ start ─▶ stop ─▶ collect (what the other nodes of a replica wrote) ─▶ … ─▶ finish, after the last session
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

from schemas.commands import Finish, ProfileCommand, ProfilePlan, Target
from schemas.identity import ROLLOUT, Identity, replica_and_node
from schemas.outcomes import Acted
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report
from schemas.selection import ENGINE_TOOLS


def sessions(config: ProfilerConfig) -> tuple[int, ...]:
    """Return the first steps of all sessions, in order."""
    selected = selected_steps(config)
    return tuple(step for step in sorted(selected) if not _continues(config, selected, step))


def selected_steps(config: ProfilerConfig) -> frozenset[int]:
    """Return the global training steps to profile."""
    return frozenset(config.steps if any(plan.enabled for plan in _plans(config)) else ())


def _continues(config: ProfilerConfig, selected: frozenset[int], step: int) -> bool:
    """Whether a session of the step before covers this one: only if each plan takes part in both or in neither."""
    if not (config.continuous and step in selected and step - 1 in selected):
        return False
    own_steps = (plan.steps for plan in _plans(config) if plan.enabled and plan.steps is not None)
    return all((step in steps) == (step - 1 in steps) for steps in own_steps)


# --- commands ---------------------------------------------------------------------------------------------------------


def check_command(config: ProfilerConfig, step: int) -> ProfileCommand | None:
    """Return the question before a trainer's first step: can this be recorded? None if nothing is left to profile."""
    first = min((selected for selected in selected_steps(config) if selected >= step), default=None)
    return _command("check", first, config) if first is not None else None


def commands_before(config: ProfilerConfig, session: int | None, step: int) -> tuple[ProfileCommand, ...]:
    """Return the commands before the work of `step`."""
    selected = selected_steps(config)
    covered = range(session + 1, step + 1) if session is not None else ()
    if covered and all(_continues(config, selected, later) for later in covered):  # a jump may lead to another run
        return ()
    stop = (_command("stop", session, config),) if session is not None else ()
    return (*stop, _command("start", step, config)) if step in selected else stop


def commands_after(config: ProfilerConfig, session: int | None, step: int) -> tuple[ProfileCommand, ...]:
    """Return the commands after the work of `step`, however it ended."""
    if session is None or _continues(config, selected_steps(config), step + 1):
        return ()
    return (_command("stop", session, config),)


def session_after(session: int | None, command: ProfileCommand) -> int | None:
    """Return the first step of the session that is open after the command, if any."""
    match command.action:
        case "start":
            return command.step
        case "stop":
            return None
        case _:
            return session


def collect_command(report: Report) -> tuple[ProfileCommand, Target] | None:
    """Return what follows the report of a stop: replicas of several nodes collect what their other nodes wrote.

    Only after the stop, because an engine answers it when all its ranks have written.
    """
    command = report.command
    if not isinstance(command, ProfileCommand) or command.action != "stop":
        return None
    conclusions = {replica_and_node(outcome.agent): outcome.conclusion for outcome in report.outcomes}
    several_nodes = {place[0] for place in conclusions if place is not None and place[1] > 0}
    replicas = frozenset(replica for replica in several_nodes if isinstance(conclusions.get((replica, 0)), Acted))
    if not replicas:
        return None
    return ProfileCommand(action="collect", step=command.step, plan=command.plan), Target(replicas=replicas)


def finish_command(config: ProfilerConfig, opened: Iterable[int]) -> ProfileCommand | None:
    """Return the command that follows the last session; None if no plan wants anything done."""
    opened_here = frozenset(opened)
    last = max(opened_here, default=-1)
    profiled = tuple(sorted(opened_here | {step for step in sessions(config) if step <= last}))
    if not profiled or all(plan.finish == Finish() for plan in _plans(config) if plan.enabled):
        return None
    return ProfileCommand(
        action="finish", step=profiled[-1], plan=config.plan, roles=config.roles, profiled_steps=profiled
    )


def _command(action: Literal["check", "start", "stop"], step: int, config: ProfilerConfig) -> ProfileCommand:
    return ProfileCommand(action=action, step=step, plan=config.plan, roles=config.roles)


# --- what the configuration names -------------------------------------------------------------------------------------


def ranks_absent(config: ProfilerConfig, fleet: Iterable[Identity]) -> frozenset[int]:
    """Return global ranks and replicas that the configuration selects, and that no agent in the fleet has."""
    identities = tuple(fleet)
    absent: set[int] = set()
    for role, plan in ((ROLLOUT, config.plan), *config.roles.items()):
        members = [identity for identity in identities if identity.role == role]
        if plan.enabled and members:
            absent |= _without_owner(plan.ranks or frozenset(), members)
            absent |= (plan.replicas or frozenset()) - {member.replica for member in members}
    return frozenset(absent)


def _without_owner(ranks: frozenset[int], members: Iterable[Identity]) -> frozenset[int]:
    """The ranks without an owner. Replicas may be large and many, so their ranks are not counted out one by one."""
    ordered = sorted(ranks)
    owned: set[int] = set()
    for owner in dict.fromkeys(member.global_ranks for member in members):
        owned.update(ordered[bisect_left(ordered, owner.start) : bisect_left(ordered, owner.stop)])
    return ranks - owned


def roles_absent(config: ProfilerConfig, fleet: Iterable[Identity]) -> list[str]:
    """Return roles to profile that no agent in the fleet has. No report would name them, not even as skipped."""
    present = {identity.role for identity in fleet}
    plans = {ROLLOUT: config.plan, **config.roles} if config.plan.tool in ENGINE_TOOLS else config.roles
    return [role for role, plan in plans.items() if plan.enabled and role not in present]


def _plans(config: ProfilerConfig) -> tuple[ProfilePlan, ...]:
    return (config.plan, *config.roles.values())
