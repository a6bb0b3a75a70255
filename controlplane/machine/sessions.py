"""Profiling sessions as the coordinator sees them: whose they are, and those that failed to open. Pure.

A trainer and an operator may both open one. An operator's start does not take over a session of the trainer, unless it
is forced: the trainer would go on to stop a session that it does not have.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from controlplane.machine.coordinator_state import CoordinatorState, OpenCommand
from controlplane.machine.events import Issued
from schemas.commands import ProfileCommand
from schemas.desired import requested_session
from schemas.formatting import format_replicas
from schemas.identity import Identity
from schemas.outcomes import Failed
from schemas.reports import AgentOutcome


def refused_start(state: CoordinatorState, event: Issued) -> str:
    """Return why an operator may not start a session now; empty if it may."""
    command, step = event.command, state.trainer_session
    if not event.operator or event.force or step is None:
        return ""
    if not isinstance(command, ProfileCommand) or command.action != "start":
        return ""
    units = [
        unit
        for unit, desired in state.desired.items()
        if desired.profile is not None and desired.profile.step == step
        if event.target.replicas is None or unit in event.target.replicas
    ]
    if not units:
        return ""
    return (
        f"the trainer's profiling session of step {step} is open on {format_replicas(units)}, and a start would take "
        "it over; nothing was published. Wait until the trainer has stopped it, or force the start (--force)"
    )


def trainer_session_after(state: CoordinatorState, event: Issued) -> int | None:
    """Return the step of the trainer's session that is open after a command, if any."""
    match event.command:
        case ProfileCommand(action="start", step=step):
            return None if event.operator else step
        case ProfileCommand(action="stop", step=step) if step == state.trainer_session:
            return None
        case _:
            return state.trainer_session


def withdraw_failed_session(
    state: CoordinatorState, command: OpenCommand, outcomes: Iterable[AgentOutcome]
) -> CoordinatorState:
    """A session that failed to open is no longer desired: a late joiner must not try it again."""
    if not isinstance(command.command, ProfileCommand) or command.command.action != "start":
        return state
    desired = state.desired
    for outcome in outcomes:
        if not isinstance(outcome.conclusion, Failed):
            continue
        identity = state.members[outcome.agent].hello.identity
        unit, session = identity.unit, desired[identity.unit].profile if identity.unit in desired else None
        if session is None:
            continue
        if session == requested_session(command.command, identity) and not _asked_again(state, command, identity):
            desired = {**desired, unit: replace(desired[unit], profile=None)}
    return state if desired is state.desired else replace(state, desired=desired)


def _asked_again(state: CoordinatorState, command: OpenCommand, identity: Identity) -> bool:
    """Whether a newer start has asked this unit for a session, and is open: its own answer decides about that."""
    return any(
        isinstance(other.command, ProfileCommand)
        and other.record.seq > command.record.seq
        and other.record.envelope.target.includes(identity)
        and requested_session(other.command, identity) is not None
        for other in state.open
    )
