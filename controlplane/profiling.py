"""Which profiling sessions a step of the trainer opens and closes. Pure.

A session is named by its first step. Discrete: one session for each selected step, closed when the step ends.
Continuous: one session over each run of consecutive selected steps, closed when its last step ends. A trainer that
jumps (it resumed from a checkpoint, or a step raised) finds the session of another step open: it is closed first.
"""

from schemas.commands import ProfileCommand, Target
from schemas.config import ProfilerConfig
from schemas.outcomes import Acted
from schemas.wire import Report


def selected(config: ProfilerConfig, step: int) -> bool:
    """Is this global training step to be profiled?"""
    return config.plan.enabled and step in config.steps


def entering(config: ProfilerConfig, session: int | None, step: int) -> tuple[ProfileCommand, ...]:
    """Commands before the work of `step`. session: first step of the one that is open, if any."""
    wanted = selected(config, step)
    goes_on = session is not None and config.continuous and wanted and selected(config, step - 1) and session < step
    if goes_on:
        return ()
    stop = (_command("stop", session, config),) if session is not None else ()
    return (*stop, _command("start", step, config)) if wanted else stop


def leaving(config: ProfilerConfig, session: int | None, step: int) -> tuple[ProfileCommand, ...]:
    """Commands after the work of `step`, however it ended."""
    if session is None or (config.continuous and selected(config, step + 1)):
        return ()
    return (_command("stop", session, config),)


def session_after(session: int | None, command: ProfileCommand) -> int | None:
    """First step of the session that is open after the command, if any."""
    return command.step if command.action == "start" else None


def collecting(report: Report) -> tuple[ProfileCommand, Target] | None:
    """What follows the end of a stop: its replicas of several nodes collect what the other nodes wrote. None if none.

    Only after the stop, because an engine answers it when all its ranks have written.
    """
    command = report.command
    if not isinstance(command, ProfileCommand) or command.action != "stop":
        return None
    said = {one.agent: one.conclusion for one in report.outcomes}
    several = {agent.partition(".")[0] for agent in said if not agent.endswith(".0")}
    replicas = frozenset(int(one) for one in several if isinstance(said.get(f"{one}.0"), Acted))
    if not replicas:
        return None
    return ProfileCommand(action="collect", step=command.step, plan=command.plan), Target(replicas=replicas)


def _command(action: str, step: int, config: ProfilerConfig) -> ProfileCommand:
    return ProfileCommand(action="start" if action == "start" else "stop", step=step, plan=config.plan)
