"""Replicas that leave the fleet in good order: a drain, from its command to the retirement of its replicas. Pure.

From the moment at which the drain is published its replicas are not served, and no command waits for them or names
them: neither those that follow, nor those that are open. They are retired once each of their agents has answered the
drain or is lost, or its time is over: that of a drain is over soon after its grace. An agent that hears of that ends.
"""

from typing import Final

from msgspec.structs import replace

from controlplane.machine import events
from controlplane.machine.agents import retire
from controlplane.machine.coordinator_state import (
    UNKNOWN_PEER,
    CoordinatorState,
    Effects,
    OpenCommand,
    conclude,
    member_at,
    send,
)
from controlplane.machine.publishing import publish
from schemas.commands import Command, Drain, Target
from schemas.desired import Desired
from schemas.formatting import format_replicas
from schemas.identity import ROLLOUT
from schemas.outcomes import Reason, Skipped

_NOT_TARGETED: Final = Skipped(Reason.NOT_TARGETED)


def refused_drain(state: CoordinatorState, command: Command, target: Target) -> str:
    """Return why a drain can't be published; empty if it can, or is none."""
    if not isinstance(command, Drain):
        return ""
    if not target.replicas:
        return "a drain names the replicas that leave. Nothing was drained"
    identities = [member.hello.identity for member in state.members.values() if member.joined]
    if unknown := target.replicas.difference(place.replica for place in identities if place.role == ROLLOUT):
        return f"this run has no {format_replicas(unknown)}. Nothing was drained"
    leaving = target.replicas & state.draining
    return f"already leaving the fleet: {format_replicas(leaving)}. Nothing was drained" if leaving else ""


def on_leave_requested(state: CoordinatorState, event: events.LeaveRequested, effects: Effects) -> CoordinatorState:
    """Drain the replica of an agent that was asked to end. Its other nodes can do nothing without it."""
    name = member_at(state, event.peer)
    if name is None:
        send(state, event.peer, UNKNOWN_PEER, effects)
        return state
    identity, command = state.members[name].hello.identity, Drain(grace_ms=event.grace_ms)
    target = Target(replicas=frozenset({identity.replica}))
    if identity.role != ROLLOUT or refused_drain(state, command, target):
        return state
    return released(publish(state, command, target, command.timeout_ms, event, effects), target)


def released(state: CoordinatorState, target: Target) -> CoordinatorState:
    """Return the state after the newest command, a drain: no other command or sync waits for its replicas."""
    leaving = target.replicas or frozenset()
    agents = {name for name, member in state.members.items() if member.hello.identity.unit in leaving}
    open_commands = (
        conclude(command, command.expected - agents, _NOT_TARGETED, command.issued_us)  # they may be busy for long
        if command.record.seq == state.seq
        else replace(command, expected=command.expected - command.waiting.intersection(agents))
        for command in state.open
    )
    syncs = {
        key: replace(
            sync, shrunk=True, **{name: getattr(sync, name) - leaving for name in ("members", "lost", "differing")}
        )
        for key, sync in state.syncs.items()
    }
    # Of a replica that changes its mode nothing is desired until it has joined again.
    unseen: dict[int | str, Desired] = {replica: Desired(generation="paused", draining=True) for replica in leaving}
    return replace(state, open=tuple(open_commands), syncs=syncs, desired={**unseen, **state.desired})


def retire_drained(state: CoordinatorState, ended: OpenCommand, effects: Effects) -> CoordinatorState:
    """Retire the replicas of a drain that has ended, and tell their agents. Those that were retired by hand meanwhile
    may have been taken up again.
    """
    leaving = (ended.record.envelope.target.replicas or frozenset()) & state.draining
    names = frozenset(name for name, member in state.members.items() if member.hello.identity.unit in leaving)
    return retire(state, names, None, effects) if names else state
