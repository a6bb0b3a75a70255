"""The desired states of a fleet after the next command. Pure.

Replicas that were told the same are in the same state, and share one object for it. What a command makes of that object
is worked out once, not once for each replica.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from controlplane.machine.fleet import CoordinatorState
from controlplane.machine.tables import Table, with_entries
from schemas.commands import Command, EpochStart, ProfileCommand, Target, WeightSync
from schemas.desired import Desired, changes_nothing, desired_after
from schemas.identity import Identity, identity_of

KNOWN_MAX: Final = 16
"""States of which the result is kept. A fleet has two or three."""
UNSEEN: Final = Identity(replica=2**31 - 1, node_rank=0)
"""Stands for every replica that has not been seen yet: no quarantine and no set of ranks names it."""


def shared(state: CoordinatorState) -> Table[int | str, Desired]:
    """Return what is desired, with one object for equal states. A state that was read has an object for each unit."""
    objects = {state.default_desired: state.default_desired}
    return Table({unit: objects.setdefault(desired, desired) for unit, desired in state.desired.items()})


def folded(state: CoordinatorState, command: Command, target: Target) -> tuple[Mapping[int | str, Desired], Desired]:
    """Return what is desired of each unit, and of a replica that has not been seen yet, after a command."""
    if changes_nothing(command):
        return state.desired, state.default_desired
    everywhere = target.replicas is None
    default_desired = desired_after(state.default_desired, command, everywhere, UNSEEN)
    roster, by_place = state.roster, _selects_places(command)
    named = command.quarantine if isinstance(command, WeightSync) else frozenset[int]()
    alike = _Alike(command, state.default_desired, default_desired if everywhere else None)
    changed: dict[int | str, Desired] = {}
    last = last_after = Desired()  # of the usual unit before
    for unit, before in _concerned(state.desired, command, target):
        if by_place or unit in named or unit in roster.unlike or isinstance(unit, str):
            identity = roster.identities.get(unit) or _absent_identity(unit)
            apart = by_place or unit in named
            after = desired_after(before, command, True, identity) if apart else alike.after(before, identity)
        else:
            if before is not last:
                last, last_after = before, alike.after(before, UNSEEN)
            after = last_after
        if after is not before:
            changed[unit] = after
    return (with_entries(state.desired, changed) if changed else state.desired), default_desired


def _concerned(
    desired: Mapping[int | str, Desired], command: Command, target: Target
) -> Iterable[tuple[int | str, Desired]]:
    """The units that a command may change. `EpochStart` is for all of them, whatever its target."""
    if target.replicas is None or isinstance(command, EpochStart):
        return desired.items()
    return [(replica, desired[replica]) for replica in sorted(target.replicas) if replica in desired]


def _absent_identity(unit: int | str) -> Identity:
    """Stands for a unit that left in an earlier life of the bus, until it comes back."""
    return identity_of(unit) if isinstance(unit, str) else Identity(replica=unit, node_rank=0)


def _selects_places(command: Command) -> bool:
    """Whether it asks different things of units of one kind, by their ranks or indices."""
    if not isinstance(command, ProfileCommand) or command.action != "start":
        return False
    plans = (command.plan, *command.roles.values())
    return any(plan.ranks is not None or plan.replicas is not None for plan in plans)


class _Alike:
    """What a command makes of units that differ in nothing but their place."""

    def __init__(self, command: Command, before: Desired, after: Desired | None) -> None:
        self._command = command
        self._known: list[tuple[Desired, Identity, Desired]] = []
        if after is not None:
            self._known.append((before, UNSEEN, after))

    def after(self, before: Desired, identity: Identity) -> Desired:
        """Return what is desired after the command of a unit that it is for."""
        role, mode = identity.role, identity.mode
        for known, other, after in self._known:
            if known is before and other.mode is mode and other.role == role:
                return after
        after = desired_after(before, self._command, True, identity)
        if len(self._known) < KNOWN_MAX:
            self._known.append((before, identity, after))
        return after
