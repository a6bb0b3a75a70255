"""Which profiling sessions a step of the trainer opens and closes; what comes before the first and after the last.

Pure. A session is named by its first step. Discrete: one session for each selected step, closed when the step ends.
Continuous: one session over each run of consecutive selected steps, closed when its last step ends; where a plan has
steps of its own, another run begins with them and after them. A trainer that jumps (it resumed from a checkpoint, or a
step raised) finds the session of another step open: it is closed first.

    check ─▶ start ─▶ stop ─▶ collect (what the other nodes of a replica wrote) ─▶ … ─▶ finish, after the last session
"""

from collections.abc import Iterable
from typing import Literal

from schemas.commands import Finish, ProfileCommand, ProfilePlan, Target
from schemas.identity import Identity, replica_and_node
from schemas.outcomes import Acted
from schemas.profiler.config import ProfilerConfig
from schemas.reports import Report
from schemas.selection import ENGINE_TOOLS


def selected(config: ProfilerConfig, step: int) -> bool:
    """Is this global training step to be profiled?"""
    return step in config.steps and any(plan.enabled for plan in _plans(config))


def sessions(config: ProfilerConfig) -> tuple[int, ...]:
    """The first steps of all sessions, in order."""
    chosen = _chosen(config)
    return tuple(step for step in sorted(chosen) if not _goes_on(config, chosen, step))


def _chosen(config: ProfilerConfig) -> frozenset[int]:
    return frozenset(config.steps if any(plan.enabled for plan in _plans(config)) else ())


def _goes_on(config: ProfilerConfig, chosen: frozenset[int], step: int) -> bool:
    """Does a session of the step before go on in this one? Only if each plan takes part in both or in neither."""
    if not (config.continuous and step in chosen and step - 1 in chosen):
        return False
    apart = (plan.steps for plan in _plans(config) if plan.enabled and plan.steps is not None)
    return all((step in one) == (step - 1 in one) for one in apart)


def checking(config: ProfilerConfig, step: int) -> ProfileCommand | None:
    """What is asked before a trainer's first `step`: can this be recorded? None when nothing is to be any more."""
    first = min((one for one in config.steps if one >= step and selected(config, one)), default=None)
    return _command("check", first, config) if first is not None else None


def entering(config: ProfilerConfig, session: int | None, step: int) -> tuple[ProfileCommand, ...]:
    """Commands before the work of `step`. session: first step of the one that is open, if any."""
    wanted, chosen = selected(config, step), _chosen(config)
    since = range(session + 1, step + 1) if session is not None else ()
    if since and all(_goes_on(config, chosen, one) for one in since):  # a jump may lead to another run
        return ()
    stop = (_command("stop", session, config),) if session is not None else ()
    return (*stop, _command("start", step, config)) if wanted else stop


def leaving(config: ProfilerConfig, session: int | None, step: int) -> tuple[ProfileCommand, ...]:
    """Commands after the work of `step`, however it ended."""
    if session is None or _goes_on(config, _chosen(config), step + 1):
        return ()
    return (_command("stop", session, config),)


def session_after(session: int | None, command: ProfileCommand) -> int | None:
    """First step of the session that is open after the command, if any."""
    match command.action:
        case "start":
            return command.step
        case "stop":
            return None
        case _:
            return session


def collecting(report: Report) -> tuple[ProfileCommand, Target] | None:
    """What follows the end of a stop: its replicas of several nodes collect what the other nodes wrote. None if none.

    Only after the stop, because an engine answers it when all its ranks have written.
    """
    command = report.command
    if not isinstance(command, ProfileCommand) or command.action != "stop":
        return None
    said = {replica_and_node(one.agent): one.conclusion for one in report.outcomes}
    several = {place[0] for place in said if place is not None and place[1] > 0}
    replicas = frozenset(one for one in several if isinstance(said.get((one, 0)), Acted))
    if not replicas:
        return None
    return ProfileCommand(action="collect", step=command.step, plan=command.plan), Target(replicas=replicas)


def finishing(config: ProfilerConfig, opened: Iterable[int]) -> ProfileCommand | None:
    """What is asked once, after the last session. opened: sessions that were. None when nobody has anything to do."""
    ours = frozenset(opened)
    last = max(ours, default=-1)
    done = tuple(sorted(ours | {step for step in sessions(config) if step <= last}))  # also an earlier trainer's
    if not done or all(plan.finish == Finish() for plan in _plans(config) if plan.enabled):
        return None
    return ProfileCommand(action="finish", step=done[-1], plan=config.plan, roles=config.roles, profiled_steps=done)


def unowned(config: ProfilerConfig, fleet: Iterable[Identity]) -> frozenset[int]:
    """Global ranks and replicas that the configuration asks for and nobody in the fleet has: written out of habit."""
    identities = tuple(fleet)
    asked: set[int] = set()
    for role, plan in (("rollout", config.plan), *config.roles.items()):
        mine = [one for one in identities if one.role == role]
        if plan.enabled and mine:
            asked |= (plan.ranks or frozenset()) - {rank for one in mine for rank in one.global_ranks}
            asked |= (plan.replicas or frozenset()) - {one.replica for one in mine}
    return frozenset(asked)


def unmanned(config: ProfilerConfig, fleet: Iterable[Identity]) -> list[str]:
    """Roles that are to be profiled, and that nobody in the fleet has: not even a skip will tell of them."""
    present = {one.role for one in fleet}
    asked = {"rollout": config.plan, **config.roles} if config.plan.tool in ENGINE_TOOLS else config.roles
    return [role for role, plan in asked.items() if plan.enabled and role not in present]


def _plans(config: ProfilerConfig) -> tuple[ProfilePlan, ...]:
    return (config.plan, *config.roles.values())


def _command(action: Literal["check", "start", "stop"], step: int, config: ProfilerConfig) -> ProfileCommand:
    return ProfileCommand(action=action, step=step, plan=config.plan, roles=config.roles)
