"""Which replicas a command keeps from generating: whose it was, and since when. Pure.

The desired state says that a replica is paused or asleep, and not who wanted it so. An agent need not know; a person
who wonders why it generates nothing must.
"""

from collections.abc import Iterable, Mapping

from controlplane.machine.coordinator_state import UNSEEN_STOP, CoordinatorState, Order, Stop
from schemas.commands import Command, EngineCommand, EpochStart
from schemas.desired import Desired, changes_nothing
from schemas.reports import Stopped


def stops_after(
    stops: Mapping[int, Stop],
    command: Command,
    desired: Mapping[int | str, Desired],
    default_desired: Desired,
    order: Order,
) -> Mapping[int, Stop]:
    """Return what stops each replica after a command, given what is desired then. The first order that holds counts."""
    if not isinstance(command, EngineCommand | EpochStart) or changes_nothing(command):
        return stops
    made: dict[tuple[Stop, bool, bool], Stop] = {}
    after: dict[int, Stop] = {}
    for unit, wanted in ((UNSEEN_STOP, default_desired), *desired.items()):
        paused, asleep = wanted.generation == "paused", bool(wanted.asleep)
        if isinstance(unit, int) and (paused or asleep):
            key = stops.get(unit, Stop()), paused, asleep
            if key not in made:
                before = key[0]
                made[key] = Stop(
                    (before.paused or order) if paused else None, (before.asleep or order) if asleep else None
                )
            after[unit] = made[key]
    return after


def stopped_replicas(state: CoordinatorState, replicas: Iterable[int] | None = None) -> tuple[Stopped, ...]:
    """Return the replicas that do not generate because a command stopped them, those of one order together."""
    groups: dict[tuple[str, Order | None], list[int]] = {}
    for unit in (
        sorted(unit for unit in state.desired if isinstance(unit, int)) if replicas is None else sorted(replicas)
    ):
        desired = state.desired.get(unit, state.default_desired)
        if desired.draining or (desired.generation != "paused" and not desired.asleep):
            continue  # one that leaves the fleet still ends its requests
        stop = state.stops.get(unit) or state.stops.get(UNSEEN_STOP) or Stop()
        how = [*(["paused"] if desired.generation == "paused" else []), *(["asleep"] if desired.asleep else [])]
        groups.setdefault((" and ".join(how), stop.paused or stop.asleep), []).append(unit)
    return tuple(
        Stopped(
            replicas=tuple(units),
            how=how,
            operator=order.operator if order is not None else None,
            since_ns=order.at_ns if order is not None else 0,
        )
        for (how, order), units in groups.items()
    )
